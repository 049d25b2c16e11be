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
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
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
                    info!(
                        hint = "other config changes need a restart",
                        "SIGHUP: reloading certificates, tokens, users, access rules and listeners"
                    );
                    reload::reload_now();
                }
            }
        }
    }
}
