//! How a client of the benchmark reaches a target: straight, or by CONNECT through a proxy.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One way to one target.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Way {
    /// Where the client's own connection goes.
    pub(crate) address: SocketAddr,
    /// What it asks for by CONNECT there, `host:port`; none if that address is already the way.
    pub(crate) connect: Option<String>,
}

/// The same proxy's ways to all targets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ways {
    /// To the target that sends everything back.
    pub(crate) echo: Way,
    /// To the target that sends without end.
    pub(crate) source: Way,
    /// To the target that counts what it gets and answers the count.
    pub(crate) sink: Way,
    /// To the target that sends one file and ends.
    pub(crate) file: Way,
}

impl Way {
    /// A way without CONNECT.
    pub(crate) fn straight(address: SocketAddr) -> Self {
        Self { address, connect: None }
    }

    /// Opens the way; the bytes are those of the target that came in one read with the proxy's answer.
    pub(crate) fn open(&self) -> io::Result<(TcpStream, Vec<u8>)> {
        let mut stream = self.dial()?;
        let buffered = self.ask(&mut stream)?;
        stream.set_read_timeout(None)?;
        Ok((stream, buffered))
    }

    /// The client's own connection, on which nothing has been said yet; reads that take too long fail.
    pub(crate) fn dial(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect_timeout(&self.address, TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(stream)
    }

    /// Asks for the target over such a connection; the bytes are as [`Way::open`] returns them.
    pub(crate) fn ask<S: Read + Write>(&self, stream: &mut S) -> io::Result<Vec<u8>> {
        let Some(target) = &self.connect else { return Ok(Vec::new()) };
        stream.write_all(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes())?;
        let mut head = Vec::with_capacity(HEAD);
        let mut some = [0; HEAD];
        loop {
            let n = stream.read(&mut some)?;
            if n == 0 {
                return Err(io::Error::other("the proxy closed instead of answering CONNECT"));
            }
            head.extend_from_slice(some.get(..n).unwrap_or_default());
            if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
                let buffered = head.split_off(end + 4);
                let line = String::from_utf8_lossy(&head);
                if line.split_whitespace().nth(1) != Some("200") {
                    let first = line.lines().next().unwrap_or_default();
                    return Err(io::Error::other(format!("CONNECT {target}: {first}")));
                }
                return Ok(buffered);
            }
        }
    }
}

/// A proxy that has not answered by now will not.
const TIMEOUT: Duration = Duration::from_secs(15);
/// More than any answer to CONNECT that we know.
const HEAD: usize = 2048;
