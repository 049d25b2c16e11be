//! Sending and checking one direction at its rate.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{sleep, timeout};

use crate::soak::pattern::Pattern;
use crate::soak::plan::Plan;
use crate::soak::world::{HANG, World};

/// The report of one side of a session.
#[derive(Debug)]
pub(crate) struct Side {
    /// Bytes that arrived, all of them correct.
    pub(crate) got: u64,
    /// How they ended.
    pub(crate) end: End,
    /// The error of sending, if this side could not send all its bytes.
    pub(crate) unsent: Option<String>,
}

/// How a direction ended for its reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// In an orderly way.
    Finished,
    /// Aborted by the other side.
    Reset(String),
    /// Ended by this side itself.
    Own,
    /// Neither bytes nor an end arrived within the maximum time that a session may hang.
    Hung,
    /// A wrong byte arrived.
    Wrong(String),
}

/// The progress of a session, as seen by one side.
#[derive(Debug)]
pub(crate) struct Progress<'a> {
    /// The plan of this session.
    pub(crate) plan: &'a Plan,
    world: &'a World,
    started: Instant,
    /// Time of the last progress, in milliseconds after the start.
    last: AtomicU64,
}

impl<'a> Progress<'a> {
    /// Creates the progress of a session that starts now.
    pub(crate) fn new(plan: &'a Plan, world: &'a World) -> Self {
        Self { plan, world, started: Instant::now(), last: AtomicU64::new(0) }
    }

    /// Records progress, and the number of received bytes.
    pub(crate) fn beats(&self, taken: u64) {
        self.world.stalled(self.plan.id, self.idle(), self.plan.pause + self.plan.doze + RHYTHM);
        self.world.moved(taken);
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or_default();
        self.last.store(now, Relaxed);
    }

    /// Returns how long there was no progress.
    fn idle(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_millis(self.last.load(Relaxed)))
    }

    /// Waits for an operation. Returns `None` if the session hangs.
    pub(crate) async fn within<T>(&self, done: impl Future<Output = T>) -> Option<T> {
        let mut done = pin!(done);
        while self.idle() < HANG + self.plan.pause + self.plan.doze {
            if let Ok(done) = timeout(RHYTHM, &mut done).await {
                return Some(done);
            }
        }
        None
    }
}

/// Reads and checks until the direction ends.
pub(crate) async fn take(
    from: &mut (impl AsyncRead + Unpin),
    pattern: Pattern,
    expected: u64,
    pulse: &Progress<'_>,
) -> (u64, End) {
    let plan = pulse.plan;
    let mut buffer = vec![0; BLOCK];
    let mut got = 0;
    let mut doze = Some(plan.doze).filter(|doze| !doze.is_zero());
    loop {
        if got * 4 > expected
            && let Some(doze) = doze.take()
        {
            sleep(doze).await;
        }
        let n = match pulse.within(from.read(&mut buffer)).await {
            None => return (got, End::Hung),
            Some(Err(why)) => return (got, End::Reset(why.to_string())),
            Some(Ok(0)) => return (got, End::Finished),
            Some(Ok(n)) => n,
        };
        pulse.beats(n as u64);
        let came = buffer.get(..n).unwrap_or_default();
        if let Some(fault) = pattern.fault(got, came) {
            return (got, End::Wrong(fault));
        }
        got += n as u64;
        if got > expected {
            return (got, End::Wrong(format!("{} bytes too many", got - expected)));
        }
    }
}

/// Sends `total` bytes at the plan's rate.
pub(crate) async fn give(
    to: &mut (impl AsyncWrite + Unpin),
    pattern: Pattern,
    total: u64,
    pulse: &Progress<'_>,
) -> Result<(), String> {
    let started = Instant::now();
    let mut sent = 0;
    while sent < total {
        let length = usize::try_from((total - sent).min(BLOCK as u64)).unwrap_or_default();
        write(to, &pattern.bytes(sent, length), pulse).await?;
        sent += length as u64;
        let due = started + Duration::from_micros(sent * 1_000_000 / pulse.plan.rate);
        sleep(due.saturating_duration_since(Instant::now())).await;
    }
    Ok(())
}

/// Writes one piece. Fails if the session hangs.
pub(crate) async fn write(
    to: &mut (impl AsyncWrite + Unpin),
    piece: &[u8],
    pulse: &Progress<'_>,
) -> Result<(), String> {
    let done = pulse.within(to.write_all(piece)).await.ok_or_else(|| "a write hung".to_owned())?;
    done.map_err(|why| why.to_string())?;
    pulse.beats(0);
    Ok(())
}

/// Bytes of one read or write.
const BLOCK: usize = 32 * 1024;
/// Time between two blocks at the slowest rate.
const RHYTHM: Duration = Duration::from_millis(500);
