//! Signals that end the process or reload its files.

use futures_util::future::OptionFuture;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

use tunnel_net::reload;

/// SIGTERM and SIGINT, which end the process, and SIGHUP, which reloads files.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// `None` if a closed terminal must end the program.
    hangup: Option<Signal>,
}

impl Signals {
    /// Returns the signals for a program started from a terminal.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot install the handlers.
    pub fn new() -> std::io::Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        Ok(Self { terminate, interrupt, hangup: None })
    }

    /// Like [`Self::new`], but SIGHUP reloads the files.
    ///
    /// # Errors
    ///
    /// Like [`Self::new`].
    pub fn of_daemon() -> std::io::Result<Self> {
        Ok(Self { hangup: Some(signal(SignalKind::hangup())?), ..Self::new()? })
    }

    /// Waits for a signal that ends the program. Reloads the files on each SIGHUP. Cancel safe.
    pub async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = OptionFuture::from(self.hangup.as_mut().map(Signal::recv)), if self.hangup.is_some() => {
                    info!("SIGHUP: reloading certificates, tokens, users and the config");
                    reload::reload_now();
                }
            }
        }
    }
}

/// Waits for SIGHUP. A process whose parent has made it ignore SIGHUP, as nohup does, continues to ignore it (proc(5),
/// SigIgn). Cancel safe.
pub async fn hangup() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let is_ignored =
        ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1));
    if !is_ignored && let Ok(mut hangups) = signal(SignalKind::hangup()) {
        hangups.recv().await;
        return;
    }
    std::future::pending().await
}
