//! The signals that a process ends at, or reads its files again.

use futures_util::future::OptionFuture;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

use crate::net::reload;

/// SIGTERM and SIGINT, each as often as it comes; and SIGHUP, which ends nothing.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// None where a terminal that goes away is to end the program.
    hangup: Option<Signal>,
}

impl Signals {
    /// For a program that a terminal started.
    ///
    /// # Errors
    ///
    /// The system gives none.
    pub fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, hangup: None })
    }

    /// As [`Self::new`]; SIGHUP means to read the files again.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn of_a_daemon() -> std::io::Result<Self> {
        Ok(Self { hangup: Some(signal(SignalKind::hangup())?), ..Self::new()? })
    }

    /// Waits for one that ends the program; reads the files again at each SIGHUP. Cancel safe.
    pub async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = OptionFuture::from(self.hangup.as_mut().map(Signal::recv)), if self.hangup.is_some() => {
                    info!("SIGHUP: certificates, tokens, users and the config's policies are read again; what else it says counts at a start");
                    reload::look_now();
                }
            }
        }
    }
}
