//! Closes a stream without losing bytes that its remote has not read, or not received, yet.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::session_io::copy::{CopyEnd, EndKind, Side};
use tunnel_net::ChunkStream;
use tunnel_net::os::sockets::unacknowledged;
use tunnel_net::socket::{AnyConnection, Connection as _, Socket};

/// Closes one side of an ended copy that is still set to [reset on drop](tunnel_net::socket::Connection::set_reset_on_drop).
///
/// Closes it cleanly unless the other side failed. In that case the remote receives the written bytes, unless a session
/// was evicted, and dropping the socket resets the connection. The kernel still delivers the rest of a finished stream to
/// a remote that reads slowly.
pub async fn close(socket: &mut Socket<AnyConnection>, side: Side, ended: CopyEnd) {
    if ended.by == side || ended.how == EndKind::Finished {
        socket.io.set_reset_on_drop(false);
        close_gracefully(socket).await;
    } else if !ended.is_for_memory() && !wait_acknowledged(socket).await && socket.is_finished() {
        socket.io.set_reset_on_drop(false);
    }
}

/// Closes a stream without losing bytes that its remote has not read yet. Call it before dropping a socket.
///
/// Finishes the sending direction, then reads and discards until the remote finishes too. Closing a socket with unread
/// bytes makes the kernel send RST, which discards bytes that the remote has not read. Gives up after
/// [`LINGER_SILENCE`] without a byte, [`LINGER_TIMEOUT`] in total, or [`LINGER_MAX_BYTES`] bytes. Ignores errors.
pub async fn close_gracefully(stream: &mut dyn ChunkStream) {
    let _ = timeout(LINGER_TIMEOUT, async {
        if poll_fn(|cx| stream.poll_finish(cx)).await.is_err() {
            return;
        }
        let mut discarded = 0;
        while discarded < LINGER_MAX_BYTES {
            match timeout(LINGER_SILENCE, poll_fn(|cx| stream.poll_read_chunk(cx))).await {
                Ok(Ok(bytes)) if !bytes.is_empty() => discarded += bytes.len(),
                _ => return,
            }
        }
    })
    .await;
}

/// Waits until the remote's kernel has all bytes written to a socket, which may then be reset. Returns false if it does
/// not have them in time.
///
/// A reset discards unsent bytes here, in the kernel or in TLS, but not bytes that have arrived at the remote.
///
/// Discards incoming bytes, so that a remote that first writes and then reads does not block. Gives up when the remote
/// resets the connection, or after [`DELIVERY_TIMEOUT`]. If the system does not report acknowledgements, it gives up
/// after [`LINGER_SILENCE`]. Returns once a stream without TCP is flushed, because its bytes then arrive.
pub async fn wait_acknowledged(socket: &mut Socket<AnyConnection>) -> bool {
    let started = Instant::now();
    let mut pause = MIN_CHECK_PAUSE;
    let mut leaving = LingeringSocket { socket, flushed: false, ended: false };
    loop {
        let limit = match leaving.socket.io.tcp().map(unacknowledged) {
            _ if !leaving.flushed => DELIVERY_TIMEOUT,
            None | Some(Ok(0)) => return true,
            Some(Ok(_)) => DELIVERY_TIMEOUT,
            Some(Err(_)) => LINGER_SILENCE,
        };
        let left = limit.saturating_sub(started.elapsed());
        if left.is_zero() {
            return false;
        }
        let look = if leaving.flushed { pause.min(left) } else { left };
        match timeout(look, poll_fn(|cx| leaving.poll(cx))).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return true,
            Err(_) => pause = (pause * 2).min(MAX_CHECK_PAUSE),
        }
    }
}

/// A socket to which nothing more is written.
struct LingeringSocket<'a> {
    socket: &'a mut Socket<AnyConnection>,
    /// Whether the kernel has all bytes.
    flushed: bool,
    /// Whether the remote has finished its direction.
    ended: bool,
}

impl LingeringSocket<'_> {
    /// Flushes the socket and discards incoming bytes. Completes once it is flushed, and fails once its remote has
    /// disconnected.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.flushed && self.socket.poll_flush(cx)?.is_ready() {
            self.flushed = true;
            return Poll::Ready(Ok(()));
        }
        while !self.ended {
            self.ended = ready!(self.socket.poll_read_chunk(cx))?.is_empty();
        }
        Poll::Pending
    }
}

/// Time for a remote to receive the bytes written to it: as long as a session may be without a path by default.
pub const DELIVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// Time for which a reader may pause before the last bytes of a stream whose sender has disconnected. It is long,
/// because people pause their terminals.
pub const READER_PAUSE: Duration = Duration::from_secs(600);

/// Minimum and maximum pause between two checks for unacknowledged bytes. The minimum is about one RTT.
const MIN_CHECK_PAUSE: Duration = Duration::from_millis(1);
const MAX_CHECK_PAUSE: Duration = Duration::from_millis(100);

/// Idle time after which a remote is assumed to send nothing more. TCP has then repeated a lost segment three times.
pub const LINGER_SILENCE: Duration = Duration::from_secs(2);

/// Time limit of a graceful close, so that a remote that never stops sending does not block it.
pub const LINGER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of discarded bytes: several times the kernels' buffers, half a second of a 1 Gbit/s upload.
pub const LINGER_MAX_BYTES: usize = 64 << 20;
