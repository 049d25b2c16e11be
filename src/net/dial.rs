//! Connecting to one of several addresses, with a deadline.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::listen::tune;

/// Why nobody answered. Of several addresses, the one that came closest to answering is told.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The machine answered that nothing listens there. Usual cause: the service is down, or the port is wrong.
    #[error("{0} refused the connection: nothing listens there")]
    Refused(SocketAddr),
    /// No answer in time. Usual causes: a firewall that drops, or a machine that is off.
    #[error("{at} did not answer within {patience:?}")]
    Timeout {
        /// Where.
        at: SocketAddr,
        /// How long it was waited for.
        patience: Duration,
    },
    /// The network says that there is no way. Usual causes: no route, or a firewall that rejects.
    #[error("{at} cannot be reached: {cause}")]
    Unreachable {
        /// Where.
        at: SocketAddr,
        /// What the system said.
        cause: io::Error,
    },
    /// This machine could not even try. Usual causes: too many open files, or no free port left.
    #[error("cannot connect to {at} from here: {cause}")]
    Local {
        /// Where.
        at: SocketAddr,
        /// What the system said.
        cause: io::Error,
    },
    /// There was no address to try.
    #[error("there is no address to connect to")]
    NoAddress,
}

/// Connects to the first address that answers, in the order given, all within `patience`.
///
/// An address may use the time that is left divided by the addresses that are left, so that a dead first one leaves
/// time for the others. The socket has no delay for small writes, and keep-alive. Cancel safe.
pub async fn dial(addresses: &[SocketAddr], patience: Duration) -> Result<TcpStream, DialError> {
    let deadline = Instant::now() + patience;
    let mut told = DialError::NoAddress;
    for (left, &at) in (1..=u32::try_from(addresses.len()).unwrap_or(u32::MAX)).rev().zip(addresses) {
        let share = deadline.saturating_duration_since(Instant::now()) / left;
        let failed = match timeout(share, TcpStream::connect(at)).await {
            Ok(Ok(socket)) => match tune(&SockRef::from(&socket)) {
                Ok(()) => return Ok(socket),
                Err(cause) => DialError::Local { at, cause },
            },
            Ok(Err(cause)) => sorted(at, cause, share),
            Err(_) => late(at, share),
        };
        if failed.rank() > told.rank() {
            told = failed;
        }
    }
    Err(told)
}

impl DialError {
    /// How close it came to an answer.
    fn rank(&self) -> u8 {
        match self {
            Self::NoAddress => 0,
            Self::Unreachable { .. } => 1,
            Self::Timeout { .. } => 2,
            Self::Local { .. } => 3,
            Self::Refused(_) => 4,
        }
    }
}

/// In whole milliseconds, as people count.
fn late(at: SocketAddr, patience: Duration) -> DialError {
    let millis = (patience + Duration::from_micros(500)).as_millis();
    DialError::Timeout { at, patience: Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)) }
}

fn sorted(at: SocketAddr, cause: io::Error, patience: Duration) -> DialError {
    use io::ErrorKind as Kind;
    match cause.kind() {
        Kind::ConnectionRefused | Kind::ConnectionReset => DialError::Refused(at),
        Kind::TimedOut => late(at, patience),
        Kind::HostUnreachable | Kind::NetworkUnreachable | Kind::NetworkDown => {
            DialError::Unreachable { at, cause }
        }
        _ => DialError::Local { at, cause },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    const SOON: Duration = Duration::from_secs(5);

    async fn closed() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
    }

    /// A listener that is full and whose kernel therefore leaves further connections unanswered.
    async fn silent() -> (TcpListener, SocketAddr, Vec<TcpStream>) {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(0).unwrap();
        let at = listener.local_addr().unwrap();
        let mut held = Vec::new();
        while let Ok(Ok(socket)) = timeout(Duration::from_millis(100), TcpStream::connect(at)).await {
            held.push(socket);
        }
        (listener, at, held)
    }

    #[tokio::test]
    async fn each_address_is_tried_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = listener.local_addr().unwrap();
        let socket = dial(&[closed().await, open], SOON).await.unwrap();
        assert_eq!(socket.peer_addr().unwrap(), open);
        assert!(socket.nodelay().unwrap() && SockRef::from(&socket).keepalive().unwrap());
    }

    #[tokio::test]
    async fn a_refusal_is_told_apart_from_silence() {
        let (_listener, mute, _held) = silent().await;
        let refuses = closed().await;
        let brief = Duration::from_millis(100);
        assert!(matches!(dial(&[refuses], SOON).await, Err(DialError::Refused(at)) if at == refuses));
        let late = dial(&[mute], brief).await.unwrap_err();
        assert_eq!(late.to_string(), format!("{mute} did not answer within 100ms"));
        assert!(matches!(dial(&[refuses, mute], brief).await, Err(DialError::Refused(at)) if at == refuses));
        assert!(matches!(dial(&[], SOON).await, Err(DialError::NoAddress)));
    }

    #[tokio::test]
    async fn a_silent_address_leaves_time_for_the_next() {
        let (_listener, mute, _held) = silent().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = listener.local_addr().unwrap();
        let socket = dial(&[mute, open], Duration::from_millis(400)).await.unwrap();
        assert_eq!(socket.peer_addr().unwrap(), open);
    }

    #[test]
    fn the_systems_words_are_sorted() {
        let at = "192.0.2.1:1".parse().unwrap();
        let of = |kind: io::ErrorKind| sorted(at, kind.into(), SOON).rank();
        use io::ErrorKind as Kind;
        assert_eq!(
            [Kind::ConnectionRefused, Kind::TimedOut, Kind::HostUnreachable, Kind::AddrNotAvailable].map(of),
            [4, 2, 1, 3]
        );
    }
}
