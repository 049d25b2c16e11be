//! Closing a stream without destroying what its peer has not read yet.

use std::future::poll_fn;
use std::time::Duration;

use tokio::time::timeout;

use crate::net::Duplex;

/// Closes a stream without destroying what its peer has not read yet. To be called before dropping a socket.
///
/// Finishes the sending direction, then reads and throws away until the peer finishes too: closing a socket while
/// bytes from the peer are unread makes the kernel send RST, and that discards what the peer has not read. Gives up
/// after [`SILENCE`] without a byte, [`PATIENCE`] in all, or [`ENOUGH`] bytes. Errors are of no interest any more.
pub async fn linger<D: Duplex>(stream: &mut D) {
    let _ = timeout(PATIENCE, async {
        if poll_fn(|cx| stream.poll_finish(cx)).await.is_err() {
            return;
        }
        let mut discarded = 0;
        while discarded < ENOUGH {
            match timeout(SILENCE, poll_fn(|cx| stream.poll_take(cx))).await {
                Ok(Ok(bytes)) if !bytes.is_empty() => discarded += bytes.len(),
                _ => return,
            }
        }
    })
    .await;
}

/// Silence after which a peer is taken to send nothing more: TCP has then repeated a lost segment three times.
pub const SILENCE: Duration = Duration::from_secs(2);

/// How long closing may take in all, so that a peer that never stops sending cannot hold us.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes to throw away at most: several times what both kernels' buffers hold, half a second of a 1 Gbit/s upload.
pub const ENOUGH: usize = 64 << 20;
