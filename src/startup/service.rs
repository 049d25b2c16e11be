//! What systemd is told of a service: that it is up, that it stops, and that it lives. Elsewhere nobody is told.

use std::time::Duration;

use sd_notify::NotifyState;

/// The service that this process is, if systemd has started it.
#[derive(Debug, Clone, Copy)]
pub struct Service;

impl Service {
    /// It is up: what waits for the service may start.
    pub fn is_up(self) {
        tell(&[NotifyState::Ready]);
    }

    /// It has begun to stop, which may take as long as its sessions may.
    pub fn stops(self) {
        tell(&[NotifyState::Stopping]);
    }

    /// Tells again and again that the runtime still runs tasks, if systemd watches that; never completes. Cancel safe.
    pub async fn lives(self) {
        let Some(within) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
        // Twice in the time, so that one that is late kills nothing.
        let mut beat = tokio::time::interval((within / 2).max(SHORTEST));
        loop {
            beat.tick().await;
            tell(&[NotifyState::Watchdog]);
        }
    }
}

/// If systemd cannot be told it will act by itself; nothing else depends on it.
fn tell(what: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(what);
}

/// Between two signs of life.
const SHORTEST: Duration = Duration::from_millis(100);
