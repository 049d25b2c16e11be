//! How a client of the benchmark reaches a target: directly, or by CONNECT through a proxy.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One route to one target.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Way {
    /// Address that the client connects to.
    pub(crate) address: Address,
    /// `host:port` for CONNECT there; `None` if the address is the target itself.
    pub(crate) connect: Option<String>,
}

/// An address that a client can connect to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// The routes of one proxy to all targets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ways {
    /// To the target that echoes everything.
    pub(crate) echo: Way,
    /// To the target that sends endlessly.
    pub(crate) source: Way,
    /// To the target that counts the received bytes and responds with the count.
    pub(crate) sink: Way,
    /// To the target that sends one file and ends.
    pub(crate) file: Way,
}

impl Ways {
    /// Returns one route for each target, from values in the order of [`Targets::all`].
    ///
    /// [`Targets::all`]: crate::targets::Targets::all
    pub(crate) fn each<T>(of: [T; 4], way: impl Fn(T) -> Way) -> Self {
        let [echo, source, sink, file] = of.map(way);
        Self { echo, source, sink, file }
    }
}

impl Way {
    /// Returns a route without CONNECT.
    pub(crate) fn straight(address: SocketAddr) -> Self {
        Self { address: Address::Tcp(address), connect: None }
    }

    /// Returns a route without CONNECT to a port of this machine.
    pub(crate) fn local(port: u16) -> Self {
        Self::straight(([127, 0, 0, 1], port).into())
    }

    /// Opens the route. Returns the bytes of the target that arrived in the same read as the proxy's response.
    pub(crate) fn open(&self) -> io::Result<(TcpStream, Vec<u8>)> {
        let mut stream = self.dial()?;
        let buffered = self.connect(&mut stream)?;
        stream.set_read_timeout(None)?;
        Ok((stream, buffered))
    }

    /// Opens the client's own connection, without sending anything. Reads have a timeout.
    pub(crate) fn dial(&self) -> io::Result<TcpStream> {
        let stream = match &self.address {
            Address::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, TIMEOUT)?;
                stream.set_nodelay(true)?;
                stream
            }
            // All further calls work on either kind of socket.
            Address::Unix(path) => OwnedFd::from(UnixStream::connect(path)?).into(),
        };
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(stream)
    }

    /// Sends CONNECT on such a connection. Returns the same bytes as [`Way::open`].
    pub(crate) fn connect<S: Read + Write>(&self, stream: &mut S) -> io::Result<Vec<u8>> {
        let Some(target) = &self.connect else { return Ok(Vec::new()) };
        stream.write_all(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes())?;
        let mut head = Vec::with_capacity(HEAD);
        let mut some = [0; HEAD];
        loop {
            let n = stream.read(&mut some)?;
            if n == 0 {
                return Err(io::Error::other(
                    "the proxy closed the connection without a response to CONNECT",
                ));
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

/// Timeout for a response of the proxy.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Longer than any known response to CONNECT.
const HEAD: usize = 2048;
