//! Closes a stream without destroying bytes that its peer has not read, or not received, yet.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::net::ByteStream;
use crate::net::diag::unacknowledged;
use crate::net::socket::{Connection, Socket};
use crate::net::splice::outcome::{Ended, How, Side};

/// Closes one side of a splice that [breaks off](Connection::breaks_off) and has ended: in good order, unless the other
/// side failed. Then the peer receives what was written to it, and dropping the socket resets the connection.
pub async fn close<C: Connection>(socket: &mut Socket<C>, side: Side, ended: Ended) {
    if ended.by == side || ended.how == How::Finished {
        socket.io().breaks_off(false);
        linger(socket).await;
    } else {
        deliver(socket).await;
    }
}

/// Closes a stream without destroying bytes that its peer has not read yet. Call it before dropping a socket.
///
/// Finishes the sending direction, then reads and throws away until the peer finishes too: closing a socket while
/// bytes from the peer are unread makes the kernel send RST, and that discards what the peer has not read. Gives up
/// after [`LINGER_SILENCE`] without a byte, [`LINGER_TIMEOUT`] in all, or [`LINGER_MAX_BYTES`] bytes. Ignores errors.
pub async fn linger<D: ByteStream>(stream: &mut D) {
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

/// Waits until the peer's kernel has all that was written to a socket, which may then be reset. A reset discards what
/// still waits to be sent here, in the kernel or in TLS, but not what has arrived there.
///
/// Discards what comes meanwhile, so that a peer that first writes and then reads does not get stuck. Gives up when the
/// peer resets the connection, or after [`DELIVERY`]; where the system does not report acknowledgements, after
/// [`LINGER_SILENCE`]. Without TCP under it, what was written arrives by itself.
pub async fn deliver<C: Connection>(socket: &mut Socket<C>) {
    let begun = Instant::now();
    let (mut pause, mut leaving) = (FIRST_LOOK, Leaving { socket, flushed: false, ended: false });
    loop {
        let patience = match leaving.socket.io().tcp().map(unacknowledged) {
            _ if !leaving.flushed => DELIVERY,
            None | Some(Ok(0)) => return,
            Some(Ok(_)) => DELIVERY,
            Some(Err(_)) => LINGER_SILENCE,
        };
        let left = patience.saturating_sub(begun.elapsed());
        if left.is_zero() {
            return;
        }
        let look = if leaving.flushed { pause.min(left) } else { left };
        match timeout(look, poll_fn(|cx| leaving.poll(cx))).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => pause = (pause * 2).min(SELDOM_LOOK),
        }
    }
}

/// A socket that nothing more is written to.
struct Leaving<'a, C> {
    socket: &'a mut Socket<C>,
    /// The kernel has everything.
    flushed: bool,
    /// The peer has finished its direction.
    ended: bool,
}

impl<C: Connection> Leaving<'_, C> {
    /// Flushes it, and throws away what comes. Completes once it is flushed, and fails once its peer is gone.
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

/// How long a peer may take to get what was written to it: as long as a session may be without a path by default.
pub const DELIVERY: Duration = Duration::from_secs(60);

/// Pauses between two looks at what is under way: about a round trip at first.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const SELDOM_LOOK: Duration = Duration::from_millis(100);

/// Silence after which a peer is taken to send nothing more: TCP has then repeated a lost segment three times.
pub const LINGER_SILENCE: Duration = Duration::from_secs(2);

/// How long closing may take in all, so that a peer that never stops sending cannot hold us.
pub const LINGER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes to throw away at most: several times what both kernels' buffers hold, half a second of a 1 Gbit/s upload.
pub const LINGER_MAX_BYTES: usize = 64 << 20;
