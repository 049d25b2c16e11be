//! The kernel's state of a TCP connection: RTT, bytes in flight, bytes not sent (`TCP_INFO`).

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;

use crate::os::sockets;

/// Reads the kernel's state of one connection. It holds no file, so it may outlive the connection.
#[derive(Debug, Clone)]
pub struct TcpInfoReader {
    from: SocketAddr,
    to: SocketAddr,
}

/// The kernel's state of a connection at one moment. Byte counts are TCP's, so they include TLS and HTTP/2 framing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// The smoothed RTT.
    pub rtt: Duration,
    /// The minimum RTT of the last five minutes.
    pub least_round_trip: Duration,
    /// The mean deviation of the RTT.
    pub variation: Duration,
    /// The current pacing rate in bytes per second.
    pub pacing: u64,
    /// Segments that have arrived, in order or not; the counter wraps.
    pub delivered: u32,
    /// Bytes of a full segment. It changes with the path.
    pub segment: u64,
    /// Bytes in flight.
    pub in_flight: u64,
    /// Bytes that were written but never sent.
    pub unsent: u64,
    /// Bytes that were written in total.
    pub written: u64,
}

/// What the kernel knows of lost segments of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LossInfo {
    /// Retransmission timeouts of the oldest unacknowledged segment.
    pub(crate) timeouts: u8,
    /// Whether later segments than that one have arrived at the remote.
    pub(crate) remote_has_gap: bool,
    /// Whether segments have arrived here that cannot be read, because an earlier one is missing.
    pub(crate) has_gap: bool,
    /// The path MTU in bytes.
    pub(crate) path_mtu: u64,
    /// The smoothed RTT.
    pub(crate) rtt: Duration,
    /// Bytes received in order.
    pub(crate) received: u64,
}

impl TcpInfoReader {
    /// Creates a reader for a connection. Returns `None` if the connection has ended.
    pub fn of(socket: &TcpStream) -> Option<Self> {
        Some(Self { from: socket.local_addr().ok()?, to: socket.peer_addr().ok()? })
    }

    /// Queries the kernel, which takes some microseconds. Returns `None` if it does not respond.
    pub fn read(&self) -> Option<TcpInfo> {
        sockets::tcp_info(self.from, self.to)
    }

    /// Like [`Self::read`], about lost segments.
    pub(crate) fn losses(&self) -> Option<LossInfo> {
        sockets::losses(self.from, self.to)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn tcp_info_reports_written_and_delivered_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap());
        let (far, near) = tokio::join!(far, listener.accept());
        let (mut far, (mut near, _)) = (far.unwrap(), near.unwrap());
        let reader = TcpInfoReader::of(&near).unwrap();
        let before = reader.read().unwrap();
        assert_eq!((before.in_flight, before.unsent), (0, 0));
        near.write_all(&[0; 100_000]).await.unwrap();
        far.read_exact(&mut vec![0; 100_000]).await.unwrap();
        let mut after = reader.read().unwrap();
        while after.in_flight + after.unsent > 0 {
            tokio::task::yield_now().await;
            after = reader.read().unwrap();
        }
        assert_eq!(after.written - before.written, 100_000);
        let delivered = u64::from(after.delivered - before.delivered) * after.segment;
        assert!(delivered >= 100_000 && after.pacing > 0, "{after:?}");
        assert!(after.rtt > Duration::ZERO && after.rtt < Duration::from_secs(1), "{after:?}");
        assert!(after.least_round_trip > Duration::ZERO && after.least_round_trip <= after.rtt, "{after:?}");
    }

    #[tokio::test]
    async fn a_closed_connection_has_no_tcp_info() {
        let reader =
            TcpInfoReader { from: "127.0.0.1:9".parse().unwrap(), to: "127.0.0.1:1".parse().unwrap() };
        assert_eq!(reader.read(), None);
    }
}
