//! Notices remotes that have vanished: probes of the kernel, and checks while the kernel sends none.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use crate::os::sockets::silence;

/// How long a remote has sent nothing, although it owes an acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpSilence {
    /// Time since its last packet.
    pub time: Duration,
    /// Number of retransmissions, or probes of a closed window, that it has not answered.
    pub attempts: u32,
}

/// The keepalive settings of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Time without traffic before the first probe.
    pub time: Duration,
    /// Time between two probes.
    pub interval: Duration,
    /// Number of unanswered probes after which the connection fails.
    pub attempts: u32,
}

impl Keepalive {
    /// The settings for sockets of clients, targets and links: a vanished remote is noticed within one minute. NATs
    /// keep connections longer.
    pub const PROBED: Self =
        Self { time: Duration::from_secs(30), interval: Duration::from_secs(10), attempts: 3 };

    /// Returns the settings of a TCP socket.
    ///
    /// # Errors
    ///
    /// The system does not report them.
    pub fn of(socket: &SockRef<'_>) -> io::Result<Self> {
        let time = socket.tcp_keepalive_time()?;
        let interval = socket.tcp_keepalive_interval()?;
        Ok(Self { time, interval, attempts: socket.tcp_keepalive_retries()? })
    }

    /// Sets them on a TCP socket, and has the kernel send probes.
    ///
    /// # Errors
    ///
    /// The system refuses.
    pub fn set(&self, socket: &SockRef<'_>) -> io::Result<()> {
        let Self { time, interval, attempts } = *self;
        let probes = TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(attempts);
        socket.set_tcp_keepalive(&probes)
    }

    /// Returns the time after which an idle connection fails if its remote has vanished.
    fn limit(&self) -> Duration {
        self.time + self.interval * self.attempts
    }
}

/// Detects that the remote of a connection has disconnected or vanished, where the kernel does not report it.
///
/// A read that waits for bytes returns the error of its connection, and the kernel probes a connection with nothing to
/// send. This covers the rest: a connection that is not read, because it has ended or its bytes find no room elsewhere,
/// and a connection with unacknowledged bytes, for which the kernel alone would try for 15 minutes. An idle connection
/// is not checked.
#[derive(Debug, Default)]
pub struct DisconnectDetector {
    /// Whether a read waits for bytes, since the last check for a loss.
    reading: bool,
    /// Whether bytes were written that may be unacknowledged.
    unacknowledged: bool,
    /// The next check, unless the connection is idle.
    timer: Option<Pin<Box<Sleep>>>,
}

impl DisconnectDetector {
    /// Records the result of a read.
    pub fn on_read<R>(&mut self, read: &Poll<R>) {
        self.reading = read.is_pending();
    }

    /// Records that bytes were written.
    pub fn on_write(&mut self) {
        self.unacknowledged = true;
    }

    /// Ready with the cause once the remote is lost, like [`ChunkStream::poll_lost`](crate::ChunkStream::poll_lost).
    ///
    /// `is_closed` returns true if the remote of a connection without TCP has closed it. Everything that it sent can
    /// then still be read.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        tcp: Option<&TcpStream>,
        is_closed: impl Fn() -> bool,
    ) -> Poll<io::Error> {
        if let Some(tcp) = tcp
            && let Ok(cause) = tcp.try_io(Interest::ERROR, || tcp.take_error())
        {
            // A failed write may have taken the cause.
            return Poll::Ready(cause.unwrap_or_else(|| io::ErrorKind::ConnectionReset.into()));
        }
        // It may not be read again before the next call, if its bytes find no room.
        let reading = std::mem::take(&mut self.reading);
        while !reading || self.unacknowledged {
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(of(tcp).time)));
            ready!(timer.as_mut().poll(cx));
            match self.check(tcp, &is_closed) {
                Ok(pause) => self.timer = Some(Box::pin(sleep(pause))),
                Err(cause) => return Poll::Ready(cause),
            }
        }
        self.timer = None;
        Poll::Pending
    }

    /// Checks the connection, and returns the time until the next check.
    ///
    /// # Errors
    ///
    /// The remote is lost.
    fn check(&mut self, tcp: Option<&TcpStream>, is_closed: impl Fn() -> bool) -> io::Result<Duration> {
        let keepalive = of(tcp);
        let owed = match tcp.map(silence) {
            None if is_closed() => return Err(io::ErrorKind::BrokenPipe.into()),
            None => None,
            Some(Ok(owed)) => owed,
            // Where the system does not report it, the kernel's own timeout applies.
            Some(Err(_)) => return Ok(keepalive.time),
        };
        let Some(silence) = owed else {
            self.unacknowledged = false;
            return Ok(keepalive.time);
        };
        match keepalive.limit().checked_sub(silence.time) {
            Some(left) => Ok(left.clamp(MIN_CHECK_INTERVAL, keepalive.time)),
            None if silence.attempts < keepalive.attempts => Ok(keepalive.interval),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// Returns the settings of a TCP socket, or the usual ones for another connection.
fn of(tcp: Option<&TcpStream>) -> Keepalive {
    tcp.and_then(|tcp| Keepalive::of(&SockRef::from(tcp)).ok()).unwrap_or(Keepalive::PROBED)
}

/// Minimum time between two checks.
const MIN_CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_read_no_longer_is_checked() {
        let mut detector = DisconnectDetector::default();
        detector.on_read(&Poll::<()>::Pending);
        let read = poll_fn(|cx| Poll::Ready(detector.poll(cx, None, || true))).await;
        assert!(read.is_pending(), "its read would report the end");
        let lost = poll_fn(|cx| detector.poll(cx, None, || true));
        timeout(2 * Keepalive::PROBED.time, lost).await.unwrap();
    }
}
