//! What the kernel knows of a connection's line: its round trip, what it has sent, what is under way, what waits.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use socket2::Socket;
use tokio::net::TcpStream;

use super::diag::{self, TCP_INFO};

/// Reads what the kernel knows of one connection. It holds no file, so it may outlive the connection.
#[derive(Debug, Clone)]
pub struct TcpInfoReader {
    from: SocketAddr,
    to: SocketAddr,
}

/// What the kernel knew at one moment. Bytes are those of TCP, so with TLS's and HTTP/2's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// The round trip of late, smoothed.
    pub round_trip: Duration,
    /// The least of the last five minutes.
    pub least_round_trip: Duration,
    /// By how much single ones differ from it, on average.
    pub variation: Duration,
    /// Bytes a second at which the kernel means to send just now.
    pub pacing: u64,
    /// Bytes that have arrived, in order or not. Counted in full segments, so a little too many; it goes round.
    pub delivered: u64,
    /// Bytes on the way.
    pub in_flight: u64,
    /// Bytes that were written, and not sent even once.
    pub unsent: u64,
    /// Bytes that were written in all.
    pub written: u64,
}

impl TcpInfoReader {
    /// For a connection; none if that has ended.
    pub fn of(socket: &TcpStream) -> Option<Self> {
        Some(Self { from: socket.local_addr().ok()?, to: socket.peer_addr().ok()? })
    }

    /// Asks the kernel, which takes some microseconds; none if it does not tell.
    pub fn read(&self) -> Option<TcpInfo> {
        let mut kernel = KERNEL.lock().unwrap_or_else(PoisonError::into_inner);
        let kernel = match &mut *kernel {
            Some(open) => open,
            none => none.insert(diag::open().ok()?),
        };
        let mut room = [0; diag::ROOM];
        let answer = diag::ask(kernel, self.from, self.to, TCP_INFO, &mut room).ok()?;
        tcp_info(diag::attribute(answer, TCP_INFO)?)
    }
}

/// `struct tcp_info`, which newer kernels only ever make longer: of Linux 4.19 and later.
fn tcp_info(info: &[u8]) -> Option<TcpInfo> {
    let short = |at: usize| Some(u32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    let [segment, unacknowledged, selected, lost, again] = [16, 24, 28, 32, 36].map(short);
    let segment = u64::from(segment?);
    let under_way = u64::from(unacknowledged?) + u64::from(again?);
    let unsent = u64::from(short(144)?);
    let round_trip = Duration::from_micros(short(68)?.into());
    Some(TcpInfo {
        round_trip,
        // Before the first one it says that it would be for ever.
        least_round_trip: round_trip.min(Duration::from_micros(short(148)?.into())),
        variation: Duration::from_micros(short(72)?.into()),
        pacing: long(104)?,
        delivered: u64::from(short(192)?) * segment,
        in_flight: under_way.saturating_sub(u64::from(selected?) + u64::from(lost?)) * segment,
        unsent,
        written: long(200)?.saturating_sub(long(208)?) + unsent,
    })
}

/// One for the process; none before the first reading, nor where there is no such thing. A process that had no file left for it
/// tries again at the next link.
static KERNEL: Mutex<Option<Socket>> = Mutex::new(None);

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn it_tells_what_was_written_and_what_arrived() {
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
        assert!(after.delivered - before.delivered >= 100_000 && after.pacing > 0, "{after:?}");
        assert!(after.round_trip > Duration::ZERO && after.round_trip < Duration::from_secs(1), "{after:?}");
        assert!(
            after.least_round_trip > Duration::ZERO && after.least_round_trip <= after.round_trip,
            "{after:?}"
        );
    }

    #[tokio::test]
    async fn nothing_is_read_of_a_connection_that_is_gone() {
        let reader =
            TcpInfoReader { from: "127.0.0.1:9".parse().unwrap(), to: "127.0.0.1:1".parse().unwrap() };
        assert_eq!(reader.read(), None);
    }

    #[test]
    fn an_answer_of_any_length_is_no_panic() {
        assert!((0..300).filter_map(|len| tcp_info(&vec![1; len])).count() == 300 - 216);
    }
}
