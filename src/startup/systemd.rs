//! Reports the service's state to systemd: ready, stopping, alive. Has no effect without systemd.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::startup::signals::Signals;

/// Reports that the process is up, then waits for a signal. Cancel safe.
pub(crate) async fn wait_stop(signals: &mut Signals) {
    notify_ready();
    tokio::select! {
        () = signals.next() => notify_stopping(),
        () = run_watchdog() => {}
    }
}

/// Reports that the service is ready, so that dependent units may start.
pub fn notify_ready() {
    notify(&[NotifyState::Ready]);
}

/// Reports that the service is stopping, which may take as long as the drain timeout.
pub fn notify_stopping() {
    notify(&[NotifyState::Stopping]);
}

/// Reports regularly that the runtime still runs tasks, if systemd watches that; never completes. Cancel safe.
pub async fn run_watchdog() {
    let Some(within) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    // Twice within the timeout, so that a delayed notification does not kill the service.
    let mut beat = tokio::time::interval((within / 2).max(MIN_WATCHDOG_INTERVAL));
    loop {
        beat.tick().await;
        notify(&[NotifyState::Watchdog]);
    }
}

/// Errors are ignored: systemd then acts on its own, and nothing else depends on it.
fn notify(what: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(what);
}

/// Minimum interval between watchdog notifications.
const MIN_WATCHDOG_INTERVAL: Duration = Duration::from_millis(100);
