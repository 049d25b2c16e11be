//! Reads what comes before another program's bytes on a connection, and not a byte more.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Reads up to and including the first `end`, byte by byte: heads are short and rare, and the following bytes come from
/// another program. `read` has what was read before. Returns false if there is no end within `most` bytes.
pub(crate) async fn read_until(
    io: &mut (impl AsyncRead + Unpin),
    read: &mut Vec<u8>,
    end: &[u8],
    most: usize,
) -> io::Result<bool> {
    while !read.ends_with(end) {
        if read.len() >= most {
            return Ok(false);
        }
        read.push(io.read_u8().await?);
    }
    Ok(true)
}
