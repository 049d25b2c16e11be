//! Reads what comes before another program's bytes on a connection, and not a byte more.

use std::io;

use tokio::net::TcpStream;

/// Reads up to and including the first `end`, byte by byte: heads are short and rare, and the following bytes come from
/// another program. `read` has what was read before. Returns false if there is no end within `most` bytes.
pub(crate) async fn read_until(
    socket: &TcpStream,
    read: &mut Vec<u8>,
    end: &[u8],
    most: usize,
) -> io::Result<bool> {
    while !read.ends_with(end) {
        if read.len() >= most {
            return Ok(false);
        }
        let mut byte = [0];
        fill(socket, &mut byte).await?;
        read.extend(byte);
    }
    Ok(true)
}

/// Reads until `space` is full.
pub(crate) async fn fill(socket: &TcpStream, mut space: &mut [u8]) -> io::Result<()> {
    while !space.is_empty() {
        socket.readable().await?;
        match socket.try_read(space) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => space = &mut space[n..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
