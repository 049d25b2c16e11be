//! Closes a stream without destroying bytes that its peer has not read, or not received, yet.

use std::future::poll_fn;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::net::ByteStream;
use crate::net::socket::{Connection, Socket};
use crate::net::unacknowledged::unacknowledged;

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
/// still waits to be sent here, but not what has arrived there.
///
/// Discards what comes meanwhile, so that a peer that first writes and then reads does not get stuck. Gives up when the
/// peer resets the connection, or after [`DELIVERY`]; where the system does not report acknowledgements, after
/// [`LINGER_SILENCE`]. A stream that is not TCP needs no wait.
pub async fn deliver<C: Connection>(socket: &mut Socket<C>) {
    let begun = Instant::now();
    let (mut pause, mut ended) = (FIRST_LOOK, false);
    loop {
        let Some(tcp) = socket.io().tcp() else { return };
        let patience = match unacknowledged(tcp) {
            Ok(0) => return,
            Ok(_) => DELIVERY,
            Err(_) => LINGER_SILENCE,
        };
        if begun.elapsed() >= patience {
            return;
        }
        let broken = async {
            while !ended {
                match poll_fn(|cx| socket.poll_read_chunk(cx)).await {
                    Ok(bytes) => ended = bytes.is_empty(),
                    Err(_) => return,
                }
            }
            std::future::pending().await
        };
        if timeout(pause, broken).await.is_ok() {
            return;
        }
        pause = (pause * 2).min(SELDOM_LOOK);
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
