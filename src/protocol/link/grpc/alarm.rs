//! The clock of HTTP/2's own pings, which falls silent once a link's pings show what they would.
//!
//! hyper looks every few seconds whether something came, by a timer that wakes the connection. Where thousands of links
//! ping each other anyway, that is a good part of what their being idle costs.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
#[expect(clippy::disallowed_types, reason = "hyper's timer speaks of it; it is made of tokio's")]
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};
use hyper_util::rt::TokioTimer;

/// hyper's timer for one connection. Cheap to clone; clones fall silent together.
#[derive(Debug, Clone)]
pub(super) struct Alarm {
    timer: TokioTimer,
    off: Arc<AtomicBool>,
}

/// A sleep that never ends once its alarm is off, and is in no queue of the runtime's then.
struct Snooze {
    sleep: Option<Pin<Box<dyn Sleep>>>,
    off: Arc<AtomicBool>,
}

impl Alarm {
    /// One that goes off as it is set.
    pub(super) fn new() -> Self {
        Self { timer: TokioTimer::new(), off: Arc::default() }
    }

    /// From now on it never goes off.
    pub(super) fn turn_off(&self) {
        self.off.store(true, Relaxed);
    }

    fn snooze(&self, sleep: Pin<Box<dyn Sleep>>) -> Pin<Box<dyn Sleep>> {
        Box::pin(Snooze { sleep: Some(sleep), off: self.off.clone() })
    }
}

#[expect(clippy::disallowed_types, reason = "as above")]
impl Timer for Alarm {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        self.snooze(self.timer.sleep(duration))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        self.snooze(self.timer.sleep_until(deadline))
    }

    fn now(&self) -> Instant {
        self.timer.now()
    }
}

impl Future for Snooze {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.off.load(Relaxed) {
            self.sleep = None;
        }
        self.sleep.as_mut().map_or(Poll::Pending, |sleep| sleep.as_mut().poll(cx))
    }
}

impl Sleep for Snooze {}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::timeout;

    #[tokio::test(start_paused = true)]
    async fn an_alarm_goes_off_until_it_is_turned_off() {
        let (alarm, nine) = (Alarm::new(), Duration::from_secs(9));
        let mut sleep = alarm.sleep(nine);
        let minute = Duration::from_secs(60);
        assert!(timeout(minute, sleep.as_mut()).await.is_ok());
        let later = alarm.now() + nine;
        alarm.reset(&mut sleep, later);
        assert!(timeout(minute, sleep.as_mut()).await.is_ok() && alarm.now() >= later);
        alarm.reset(&mut sleep, later + nine);
        alarm.clone().turn_off();
        assert!(timeout(minute, sleep.as_mut()).await.is_err());
    }
}
