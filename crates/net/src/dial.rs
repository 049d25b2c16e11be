//! Connects to one of several addresses within a timeout, from sockets with this process's mark.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::{fmt, io};

use rustix::io::Errno;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, timeout};

use crate::fd_limit;
use crate::listen::tune;
use tunnel_base::names::Target;

/// The failures of all addresses, the most telling first: its kind decides the result and the hint.
#[derive(Debug)]
pub struct ConnectError(Vec<Failure>);

/// The failure of one address. The variants are ordered from the least to the most telling.
#[derive(Debug)]
pub enum Failure {
    /// The network reports that the address is unreachable, or this machine has no addresses of its kind. Usual causes:
    /// no route, a firewall that rejects, or no IPv6.
    Unreachable(SocketAddr, io::Error),
    /// The remote machine refused the connection. Usual causes: the service is down, or the port is wrong.
    Refused(SocketAddr),
    /// No response within this time. Usual causes: a firewall that drops packets, or a machine or service that hangs.
    ///
    /// More telling than a refusal, because the time was spent on this address.
    Timeout(SocketAddr, Duration),
    /// This machine could not try. Usual causes: too many open files, no free port, or a local rule.
    ///
    /// The most telling one, because nothing is known about this address.
    Local(SocketAddr, io::Error),
}

/// Connects to the first address that responds, in the given order, within `patience` in total.
///
/// Each address gets an equal share of the remaining time, so that an unresponsive one leaves time for the others. The
/// socket has no delay for small writes, and keep-alive. Cancel safe.
pub async fn dial(addresses: &[SocketAddr], patience: Duration) -> Result<TcpStream, ConnectError> {
    dial_with(addresses, patience, |_| Ok(())).await
}

/// Like [`dial`], but for a target, which must not use the last file descriptors.
pub async fn dial_target(addresses: &[SocketAddr], patience: Duration) -> Result<TcpStream, ConnectError> {
    dial_with(addresses, patience, fd_limit::leave_reserve).await
}

async fn dial_with(
    addresses: &[SocketAddr],
    patience: Duration,
    check: impl Fn(&TcpSocket) -> io::Result<()>,
) -> Result<TcpStream, ConnectError> {
    let deadline = Instant::now() + patience;
    let mut failed = Vec::new();
    for (left, &at) in (1..=u32::try_from(addresses.len()).unwrap_or(u32::MAX)).rev().zip(addresses) {
        let share = deadline.saturating_duration_since(Instant::now()) / left;
        failed.push(match timeout(share, connect(at, &check)).await {
            Ok(Ok(socket)) => match tune(&SockRef::from(&socket)) {
                Ok(()) => return Ok(socket),
                Err(cause) => Failure::Local(at, cause),
            },
            Ok(Err(cause)) => sorted(at, cause, share),
            Err(_) => round_to_millis(at, share),
        });
    }
    Err(ConnectError::new(failed))
}

/// Opens every connection of this process to another machine.
async fn connect(at: SocketAddr, check: impl Fn(&TcpSocket) -> io::Result<()>) -> io::Result<TcpStream> {
    let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    check(&socket)?;
    put_on(&SockRef::from(&socket))?;
    socket.connect(at).await
}

impl ConnectError {
    fn new(mut failed: Vec<Failure>) -> Self {
        // By address, because callers try addresses in varying order, and log an error once.
        failed.sort_by_key(|failure| (Reverse(failure.rank()), failure.at()));
        let mut named = HashSet::new();
        failed.retain(|failure| named.insert(failure.at()));
        Self(failed)
    }

    /// Returns the text for a message that has named the target `at`: if that is the only address, it is not repeated.
    pub fn after(&self, at: &Target) -> String {
        match self.0.as_slice() {
            [Failure::Local(only, cause)] if Target::from(*only) == *at => format!("not from here: {cause}"),
            [only] if Target::from(only.at()) == *at => format!("it {}", Outcome(only)),
            _ => self.to_string(),
        }
    }

    /// Returns a fixed label for metrics: that of the most specific failure.
    pub fn reason(&self) -> &'static str {
        match self.first() {
            Some(Failure::Unreachable(..)) => "unreachable",
            Some(Failure::Local(..)) => "local_error",
            Some(Failure::Refused(_)) => "refused",
            Some(Failure::Timeout(..)) => "timeout",
            None => "address_unknown",
        }
    }

    /// Returns the most specific failure, or `None` if there was no address.
    pub fn first(&self) -> Option<&Failure> {
        self.0.first()
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no address to connect to");
        }
        for (n, alike) in self.0.chunk_by(Failure::is_like).enumerate() {
            let between = if n > 0 { "; " } else { "" };
            match alike {
                [Failure::Local(at, cause), ..] => {
                    write!(f, "{between}cannot connect to {at} from here: {cause}")?;
                }
                [first, rest @ ..] => {
                    let also = if let Failure::Timeout(..) = first { ", nor did" } else { ", and so did" };
                    write!(f, "{between}{} {}{}", first.at(), Outcome(first), AlsoFailed(also, rest))?;
                }
                [] => {}
            }
        }
        Ok(())
    }
}

impl std::error::Error for ConnectError {}

/// Formats what happened at an address, after the address.
struct Outcome<'a>(&'a Failure);

impl fmt::Display for Outcome<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Failure::Refused(_) => f.write_str("refused the connection"),
            Failure::Timeout(_, patience) => write!(f, "did not answer within {patience:?}"),
            Failure::Unreachable(_, cause) | Failure::Local(_, cause) => {
                write!(f, "cannot be reached: {cause}")
            }
        }
    }
}

/// Formats the addresses after the first that failed in the same way: the words before them, then the addresses.
struct AlsoFailed<'a>(&'static str, &'a [Failure]);

impl fmt::Display for AlsoFailed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, failure) in self.1.iter().enumerate() {
            write!(f, "{} {}", if n == 0 { self.0 } else { "," }, failure.at())?;
        }
        Ok(())
    }
}

impl Failure {
    fn at(&self) -> SocketAddr {
        match self {
            Self::Unreachable(at, _) | Self::Local(at, _) | Self::Refused(at) | Self::Timeout(at, _) => *at,
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Self::Unreachable(..) => 0,
            Self::Refused(_) => 1,
            Self::Timeout(..) => 2,
            Self::Local(..) => 3,
        }
    }

    /// Returns true if both failures are reported in one sentence.
    fn is_like(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Refused(_), Self::Refused(_)) | (Self::Timeout(..), Self::Timeout(..)))
    }
}

/// Creates a timeout failure with the time rounded to milliseconds, for messages.
fn round_to_millis(at: SocketAddr, patience: Duration) -> Failure {
    let millis = (patience + Duration::from_micros(500)).as_millis();
    Failure::Timeout(at, Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)))
}

fn sorted(at: SocketAddr, cause: io::Error, patience: Duration) -> Failure {
    use io::ErrorKind as Kind;
    match cause.kind() {
        Kind::ConnectionRefused | Kind::ConnectionReset => Failure::Refused(at),
        Kind::TimedOut => round_to_millis(at, patience),
        Kind::HostUnreachable | Kind::NetworkUnreachable | Kind::NetworkDown => {
            Failure::Unreachable(at, cause)
        }
        // With IPv4 it means that no port is free, with IPv6 that this machine has no such address.
        Kind::AddrNotAvailable if at.is_ipv6() => Failure::Unreachable(at, cause),
        _ if cause.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) => {
            Failure::Unreachable(at, cause)
        }
        _ => Failure::Local(at, cause),
    }
}

// The mark of sockets of this process, so that nftables rules can recognise them.

/// Global, because the rules that match the mark concern every dial. 0: no mark.
static MARK: AtomicU32 = AtomicU32::new(0);

/// Sets the mark (`SO_MARK`, requires CAP_NET_ADMIN) of all future connections and DNS queries. 0: no mark.
pub fn set(mark: u32) {
    MARK.store(mark, Relaxed);
}

/// Puts the mark on a socket before it connects or sends.
///
/// # Errors
///
/// The process may not mark sockets.
pub(crate) fn put_on(socket: &SockRef<'_>) -> io::Result<()> {
    match MARK.load(Relaxed) {
        0 => Ok(()),
        mark => socket.set_mark(mark),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    async fn closed() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
    }

    /// A listener with a full queue, so that the kernel does not answer further connections.
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
        let says = async |addresses: &[SocketAddr], patience| {
            dial(addresses, patience).await.unwrap_err().to_string()
        };
        assert_eq!(says(&[refuses], SOON).await, format!("{refuses} refused the connection"));
        assert_eq!(says(&[mute], brief).await, format!("{mute} did not answer within 100ms"));
        assert_eq!(says(&[], SOON).await, "no address to connect to");
        let failed = dial(&[refuses, mute], brief).await.unwrap_err();
        assert!(
            matches!(failed.first(), Some(Failure::Timeout(at, _)) if *at == mute),
            "the time was spent on this address"
        );
    }

    #[tokio::test]
    async fn what_is_said_does_not_depend_on_the_order_in_which_addresses_were_tried() {
        let [one, two] = [closed().await, closed().await];
        let says = async |addresses: &[SocketAddr]| dial(addresses, SOON).await.unwrap_err().to_string();
        assert_eq!(says(&[one, two]).await, says(&[two, one]).await);
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
    fn all_addresses_are_told_and_a_silent_one_first() {
        use io::ErrorKind as Kind;
        let of = |last: u8, kind: Kind| sorted(([192, 0, 2, last], 22).into(), kind.into(), SOON);
        let failed = |kinds: &[Kind]| {
            ConnectError::new((1..).zip(kinds).map(|(last, kind)| of(last, *kind)).collect()).to_string()
        };
        assert_eq!(
            failed(&[Kind::ConnectionRefused, Kind::TimedOut, Kind::ConnectionReset, Kind::HostUnreachable]),
            "192.0.2.2:22 did not answer within 5s; 192.0.2.1:22 refused the connection, and so did 192.0.2.3:22; \
             192.0.2.4:22 cannot be reached: host unreachable"
        );
        assert_eq!(
            failed(&[Kind::AddrNotAvailable, Kind::TimedOut, Kind::TimedOut, Kind::TimedOut]),
            "cannot connect to 192.0.2.1:22 from here: address not available; 192.0.2.2:22 did not answer within 5s, nor \
             did 192.0.2.3:22, 192.0.2.4:22"
        );
    }

    #[test]
    fn the_most_telling_failure_decides_and_no_address_is_named_twice() {
        use io::ErrorKind as Kind;
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let no_ipv6 = || io::Error::from_raw_os_error(Errno::AFNOSUPPORT.raw_os_error());
        for (v4, v6, reason) in [
            (Kind::ConnectionRefused.into(), Kind::AddrNotAvailable.into(), "refused"),
            (Kind::ConnectionRefused.into(), no_ipv6(), "refused"),
            (Kind::HostUnreachable.into(), no_ipv6(), "unreachable"),
            (Kind::ConnectionRefused.into(), Kind::TimedOut.into(), "timeout"),
            (io::Error::from_raw_os_error(Errno::MFILE.raw_os_error()), Kind::TimedOut.into(), "local_error"),
        ] {
            let failed = [sorted(at("192.0.2.1:22"), v4, SOON), sorted(at("[::1]:22"), v6, SOON)];
            assert_eq!(ConnectError::new(failed.into()).reason(), reason);
        }
        let refused = |at| sorted(at, Kind::ConnectionRefused.into(), SOON);
        let (one, two) = (at("192.0.2.1:22"), at("[fd00::1]:22"));
        let twice = ConnectError::new(vec![refused(one), refused(two), refused(one)]);
        assert_eq!(twice.to_string(), "192.0.2.1:22 refused the connection, and so did [fd00::1]:22");
        let only = ConnectError::new(vec![refused(two)]);
        assert_eq!(only.after(&two.into()), "it refused the connection");
        assert_eq!(only.after(&one.into()), "[fd00::1]:22 refused the connection");
        assert_eq!(twice.after(&two.into()), twice.to_string());
    }
}
