//! Connects to the first address of a host that answers (RFC 8305), from sockets with this process's mark.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use std::{fmt, io};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use rustix::io::Errno;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep_until};

use crate::listen::tune;
use crate::mark::put_on;
use crate::{fd_limit, path_mtu};
use tunnel_base::drain::Drain;
use tunnel_proto::names::{Host, Target};

/// The failures of all addresses, the most telling first: its kind decides the result and the hint.
#[derive(Debug)]
pub struct ConnectError(Vec<AddressFailure>);

/// The failure of one address. The variants are ordered from the least to the most telling.
#[derive(Debug)]
pub enum AddressFailure {
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

/// What the kernel may keep for targets, in a process with little memory. Control groups of version 2 count it.
#[derive(Debug, Clone)]
pub struct SocketMemory {
    /// Bytes for all of them.
    pub bytes: usize,
    /// Has a task for each, also while it is dialled.
    pub sessions: Drain,
}

/// The connected socket, or the failures of all addresses.
pub type DialResult = Result<TcpStream, ConnectError>;

/// Connects to the first of a host's addresses that answers, within `timeout` in total.
///
/// They are tried in the order of [`in_order`]. The socket has no delay for small writes, and keep-alive. Cancel safe.
pub async fn dial(host: &Host, addresses: &[SocketAddr], timeout: Duration) -> DialResult {
    dial_in_order(host, &in_order(host, addresses), timeout).await
}

/// Like [`dial`], but for a target, which must not use the last file descriptors. Its socket may keep about `buffer` bytes
/// in each direction. An address fails at once if `is_barred` is true for it, which is asked just before it is dialled.
pub async fn dial_target(
    host: &Host,
    addresses: &[SocketAddr],
    timeout: Duration,
    buffer: Option<usize>,
    is_barred: impl Fn(SocketAddr) -> bool,
) -> DialResult {
    let check = |socket: &TcpSocket, at| {
        if is_barred(at) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // Before the connection is made: later, the target may already send what it was promised room for.
        if let Some(bytes) = buffer {
            SockRef::from(socket).set_recv_buffer_size(bytes)?;
            SockRef::from(socket).set_send_buffer_size(bytes)?;
        }
        fd_limit::ensure_outside_reserve(socket)
    };
    dial_with(host, &in_order(host, addresses), timeout, check).await
}

/// Like [`dial`], in the given order.
///
/// The next address is tried as soon as one fails, and after 250 ms without an answer, while the earlier ones may still
/// answer. So an unresponsive address costs hardly any time.
pub async fn dial_in_order(host: &Host, addresses: &[SocketAddr], timeout: Duration) -> DialResult {
    dial_with(host, addresses, timeout, |_, _| Ok(())).await
}

/// Like [`dial_in_order`], with a check of each socket before it connects.
async fn dial_with(
    host: &Host,
    addresses: &[SocketAddr],
    timeout: Duration,
    check: impl Fn(&TcpSocket, SocketAddr) -> io::Result<()>,
) -> DialResult {
    let start = Instant::now();
    let check = &check;
    let addresses = addresses.get(..MAX_ATTEMPTS).unwrap_or(addresses);
    // The delay is shorter if there are many addresses, so that each gets its turn within the timeout.
    let delay = ATTEMPT_DELAY.min(timeout / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX));
    let mut next = start;
    let mut left = addresses.iter();
    let mut trying = FuturesUnordered::new();
    let mut failed = Vec::new();
    while left.len() > 0 || !trying.is_empty() {
        // Biased: a connection that has just been made is used, even if the time is over or the next address is due.
        tokio::select! {
            biased;
            Some((at, tried)) = trying.next() => match tried {
                Ok(socket) => {
                    // Only an address that has cost time is worth a changed order. One that refuses at once may stay
                    // first.
                    if addresses.first() != Some(&at) && start.elapsed() >= delay {
                        LAST_ANSWERS.lock().insert(host, at);
                    }
                    return Ok(socket);
                }
                Err(cause) => {
                    failed.push(failure(at, cause, timeout));
                    next = Instant::now();
                }
            },
            () = sleep_until(start + timeout) => break,
            () = sleep_if_before(next), if left.len() > 0 => {
                next = Instant::now() + delay;
                trying.extend(left.next().map(|&at| async move {
                    (at, connect(at, |socket| check(socket, at)).await)
                }));
            }
        }
    }
    // Addresses without an answer are reported too: the caller names all of them, and silence tells more than a
    // refusal.
    let answered: Vec<_> = failed.iter().map(AddressFailure::at).collect();
    let silent = addresses.iter().filter(|at| !answered.contains(at));
    failed.extend(silent.map(|&at| timed_out(at, timeout)));
    Err(ConnectError::new(failed))
}

/// Sleeps until `at`, but not at all if it has passed: `sleep_until` would wait for the timer's next millisecond.
async fn sleep_if_before(at: Instant) {
    if Instant::now() < at {
        sleep_until(at).await;
    }
}

/// Returns the addresses of a host in the order of trial: first the one that answered when an earlier one did not, then
/// its family and the other one in turns, each in the given order.
pub fn in_order(host: &Host, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let worked = addresses.first().and_then(|at| LAST_ANSWERS.lock().get(host, at.port()));
    let first_family = worked.or(addresses.first().map(SocketAddr::ip)).is_some_and(|ip| ip.is_ipv4());
    let mut sorted = addresses.to_vec();
    sorted.sort_by_key(|at| Some(at.ip()) != worked);
    let (first, other): (Vec<_>, Vec<_>) = sorted.into_iter().partition(|at| at.is_ipv4() == first_family);
    let mut in_turns: Vec<_> = first.iter().enumerate().chain(other.iter().enumerate()).collect();
    // Stable: of two with the same place, the one of the first family stays before the other.
    in_turns.sort_by_key(|(place, _)| *place);
    in_turns.into_iter().map(|(_, at)| *at).collect()
}

/// Opens every connection of this process to another machine.
async fn connect(at: SocketAddr, check: impl Fn(&TcpSocket) -> io::Result<()>) -> io::Result<TcpStream> {
    let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    check(&socket)?;
    put_on(&SockRef::from(&socket))?;
    if let Some(segment) = path_mtu::segment_limit(at.ip()) {
        // Before the connection is made, because the remote's segments depend on it too.
        SockRef::from(&socket).set_tcp_mss(segment)?;
    }
    let socket = socket.connect(at).await?;
    tune(&SockRef::from(&socket))?;
    Ok(socket)
}

impl SocketMemory {
    /// Returns the size of each of a new socket's two buffers. The kernel takes up to twice as much, and beyond that one
    /// packet of up to 64 KiB to be sent.
    ///
    /// It is an nth of a part for the nth socket. In whatever order they come and go, the nth oldest that is open found at
    /// least n - 1 others. So all have at most the sum of 1/n, which is below 8 for 1,600 sockets.
    pub fn buffer(&self) -> usize {
        (self.bytes / 32 / self.sessions.tasks().max(1)).max(MIN_BUFFER)
    }
}

impl ConnectError {
    fn new(mut failed: Vec<AddressFailure>) -> Self {
        // By address, because callers try addresses in varying order, and log an error once.
        failed.sort_by_key(|failure| (Reverse(failure.rank()), failure.at()));
        let mut named = HashSet::new();
        failed.retain(|failure| named.insert(failure.at()));
        Self(failed)
    }

    /// Returns the text for a message that has named the target `at`: if that is the only address, it is not repeated.
    pub fn after(&self, at: &Target) -> String {
        match self.0.as_slice() {
            [AddressFailure::Local(only, cause)] if Target::from(*only) == *at => {
                format!("not from here: {cause}")
            }
            [only] if Target::from(only.at()) == *at => format!("it {}", only.text()),
            _ => self.to_string(),
        }
    }

    /// Returns a fixed label for metrics: that of the most telling failure.
    pub fn reason(&self) -> &'static str {
        match self.first() {
            Some(AddressFailure::Unreachable(..)) => "unreachable",
            Some(AddressFailure::Local(..)) => "local_error",
            Some(AddressFailure::Refused(_)) => "refused",
            Some(AddressFailure::Timeout(..)) => "timeout",
            None => "address_unknown",
        }
    }

    /// Returns the most telling failure, or `None` if there was no address.
    pub fn first(&self) -> Option<&AddressFailure> {
        self.0.first()
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no address to connect to");
        }
        for (n, similar) in self.0.chunk_by(AddressFailure::is_like).enumerate() {
            let between = if n > 0 { "; " } else { "" };
            match similar {
                [AddressFailure::Local(at, cause), ..] => {
                    write!(f, "{between}cannot connect to {at} from here: {cause}")?;
                }
                [first, rest @ ..] => {
                    write!(f, "{between}{} {}", first.at(), first.text())?;
                    let mut also =
                        if let AddressFailure::Timeout(..) = first { ", nor did" } else { ", and so did" };
                    for failure in rest {
                        write!(f, "{also} {}", failure.at())?;
                        also = ",";
                    }
                }
                [] => {}
            }
        }
        Ok(())
    }
}

impl std::error::Error for ConnectError {}

impl AddressFailure {
    fn at(&self) -> SocketAddr {
        match self {
            Self::Unreachable(at, _) | Self::Local(at, _) | Self::Refused(at) | Self::Timeout(at, _) => *at,
        }
    }

    /// Returns what happened at the address, after the address.
    fn text(&self) -> String {
        match self {
            Self::Refused(_) => "refused the connection".to_owned(),
            Self::Timeout(_, timeout) => format!("did not answer within {timeout:?}"),
            Self::Unreachable(_, cause) | Self::Local(_, cause) => format!("cannot be reached: {cause}"),
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

/// Creates a timeout failure with the time rounded to hundredths of a second, for messages.
fn timed_out(at: SocketAddr, timeout: Duration) -> AddressFailure {
    let hundredths = (timeout + Duration::from_millis(5)).as_millis() / 10;
    AddressFailure::Timeout(at, Duration::from_millis(u64::try_from(hundredths * 10).unwrap_or(u64::MAX)))
}

/// Returns which failure the system's error means.
fn failure(at: SocketAddr, cause: io::Error, timeout: Duration) -> AddressFailure {
    use io::ErrorKind as Kind;
    match cause.kind() {
        Kind::ConnectionRefused | Kind::ConnectionReset => AddressFailure::Refused(at),
        Kind::TimedOut => timed_out(at, timeout),
        Kind::HostUnreachable | Kind::NetworkUnreachable | Kind::NetworkDown => {
            AddressFailure::Unreachable(at, cause)
        }
        // With IPv4 it means that no port is free, with IPv6 that this machine has no such address.
        Kind::AddrNotAvailable if at.is_ipv6() => AddressFailure::Unreachable(at, cause),
        _ if cause.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) => {
            AddressFailure::Unreachable(at, cause)
        }
        _ => AddressFailure::Local(at, cause),
    }
}

/// Smallest buffer of a socket in bytes: two packets.
const MIN_BUFFER: usize = 4096;

/// Time after which the next address is also tried (RFC 8305, section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Maximum number of a host's addresses that are tried.
const MAX_ATTEMPTS: usize = 16;

/// Global, so that every dial of a host by this process knows them.
static LAST_ANSWERS: LazyLock<Mutex<RespondingAddresses>> = LazyLock::new(Mutex::default);

/// For hosts and ports with an unresponsive address, the address that answered instead, and when.
#[derive(Debug, Default)]
struct RespondingAddresses(HashMap<(Arc<str>, u16), (IpAddr, Instant)>);

impl RespondingAddresses {
    fn insert(&mut self, host: &Host, at: SocketAddr) {
        let Host::Name(name) = host else { return };
        if self.0.len() >= MAX_LAST_ANSWERS {
            let oldest = self.0.iter().min_by_key(|(_, (_, since))| *since).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.0.remove(&key));
        }
        self.0.insert((name.clone(), at.port()), (at.ip(), Instant::now()));
    }

    fn get(&self, host: &Host, port: u16) -> Option<IpAddr> {
        let Host::Name(name) = host else { return None };
        let (ip, since) = self.0.get(&(name.clone(), port))?;
        (since.elapsed() < LAST_ANSWER_TTL).then_some(*ip)
    }
}

/// Maximum number of hosts and ports in [`LAST_ANSWERS`].
const MAX_LAST_ANSWERS: usize = 1000;

/// Time for which that address is tried first. Then the usual order shows again whether the others answer.
const LAST_ANSWER_TTL: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::time::timeout;

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

    fn named(name: &str) -> Host {
        name.parse().unwrap()
    }

    #[tokio::test]
    async fn addresses_are_tried_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = listener.local_addr().unwrap();
        let socket = dial(&named("order.test"), &[closed().await, open], SOON).await.unwrap();
        assert_eq!(socket.peer_addr().unwrap(), open);
        assert!(socket.nodelay().unwrap() && SockRef::from(&socket).keepalive().unwrap());
    }

    #[tokio::test]
    async fn an_address_is_checked_just_before_it_is_dialled_and_a_barred_one_is_not() {
        let [barred, open, other] =
            std::array::from_fn(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [&barred, &open, &other].map(|listener| listener.local_addr().unwrap());
        let asked = Mutex::new(Vec::new());
        let is_barred = |at| {
            asked.lock().push(at);
            at == addresses[0]
        };
        let socket = dial_target(&named("barred.test"), &addresses, SOON, None, is_barred).await.unwrap();
        assert_eq!((socket.peer_addr().unwrap(), &asked.lock()[..]), (addresses[1], &addresses[..2]));
        barred.set_nonblocking(true).unwrap();
        assert_eq!(barred.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[tokio::test]
    async fn the_nth_socket_of_little_memory_has_an_nth_of_the_first_ones_buffers() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = [listener.local_addr().unwrap()];
        let memory = SocketMemory { bytes: 5 << 20, sessions: Drain::new() };
        for expected in [163_840, 81_920, 54_613, 40_960] {
            memory.sessions.spawn(tracing::Span::none(), std::future::pending());
            assert_eq!(memory.buffer(), expected);
            let buffer = Some(memory.buffer());
            let socket = dial_target(&named("small.test"), &at, SOON, buffer, |_| false).await.unwrap();
            let [receives, sends] = {
                let socket = SockRef::from(&socket);
                [socket.recv_buffer_size().unwrap(), socket.send_buffer_size().unwrap()]
            };
            assert!(receives <= 2 * expected && sends <= 2 * expected, "{receives}, {sends} of {expected}");
        }
        (0..996).for_each(|_| memory.sessions.spawn(tracing::Span::none(), std::future::pending()));
        assert_eq!(memory.buffer(), MIN_BUFFER);
    }

    #[tokio::test]
    async fn the_first_address_is_tried_without_waiting_for_the_timer() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = [listener.local_addr().unwrap()];
        let host = named("at-once.test");
        let mut dialled = Box::pin(dial(&host, &address, SOON));
        assert!(futures_util::poll!(&mut dialled).is_pending());
        listener.accept().unwrap();
    }

    #[tokio::test]
    async fn a_refusal_and_a_timeout_have_different_errors() {
        let (_listener, mute, _held) = silent().await;
        let refuses = closed().await;
        let brief = Duration::from_millis(100);
        let error_of = async |addresses: &[SocketAddr], limit| {
            dial(&named("all.test"), addresses, limit).await.unwrap_err().to_string()
        };
        assert_eq!(error_of(&[refuses], SOON).await, format!("{refuses} refused the connection"));
        assert_eq!(error_of(&[mute], brief).await, format!("{mute} did not answer within 100ms"));
        assert_eq!(error_of(&[], SOON).await, "no address to connect to");
        let failed = dial(&named("all.test"), &[refuses, mute], brief).await.unwrap_err();
        assert!(
            matches!(failed.first(), Some(AddressFailure::Timeout(at, _)) if *at == mute),
            "the time was spent on this address"
        );
    }

    #[tokio::test]
    async fn the_error_does_not_depend_on_the_order_of_attempts() {
        let [one, two] = [closed().await, closed().await];
        let host = named("all.test");
        let error_of =
            async |addresses: &[SocketAddr]| dial(&host, addresses, SOON).await.unwrap_err().to_string();
        assert_eq!(error_of(&[one, two]).await, error_of(&[two, one]).await);
    }

    /// Returns a listener on IPv6 loopback and its address.
    async fn open_v6(port: u16) -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind(("::1", port)).await.unwrap();
        let at = listener.local_addr().unwrap();
        (listener, at)
    }

    #[tokio::test]
    async fn a_silent_address_delays_one_dial_and_then_the_address_that_answered_is_first() {
        let (_listener, mute, _held) = silent().await;
        let (_open, open) = open_v6(mute.port()).await;
        let host = named("dead-first.test");
        let addresses = [mute, closed().await, open];
        let start = Instant::now();
        let socket = dial(&host, &addresses, Duration::from_secs(600)).await.unwrap();
        assert_eq!(socket.peer_addr().unwrap(), open);
        assert!(start.elapsed() < Duration::from_secs(100), "much less than a share of the time");
        assert_eq!(in_order(&host, &addresses)[0], open);
        let mut others = ["192.0.2.1:7", "192.0.2.2:7", "[2001:db8::1]:7"].map(|at| at.parse().unwrap());
        others.iter_mut().for_each(|at: &mut SocketAddr| at.set_port(open.port()));
        let others = in_order(&host, &others);
        assert!(others[0].is_ipv6(), "the family that answered is tried first at other addresses");
        let others = in_order(&named("other.test"), &others);
        assert!(others[0].is_ipv6() && others[1].is_ipv4(), "another host keeps its order");
    }

    #[tokio::test]
    async fn a_slow_address_is_awaited_after_the_others_have_failed() {
        let (listener, slow, held) = silent().await;
        let drains = async {
            drop(held);
            loop {
                drop(listener.accept().await);
            }
        };
        let (host, addresses) = (named("slow.test"), [slow, closed().await]);
        let socket = tokio::select! {
            biased;
            socket = dial(&host, &addresses, SOON) => socket.unwrap(),
            () = drains => unreachable!(),
        };
        assert_eq!(socket.peer_addr().unwrap(), slow);
    }

    #[test]
    fn address_families_alternate_in_the_given_order() {
        let sorted = |addresses: &[&str]| {
            let addresses: Vec<SocketAddr> = addresses.iter().map(|at| at.parse().unwrap()).collect();
            in_order(&named("turns.test"), &addresses).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            sorted(&["192.0.2.1:7", "192.0.2.2:7", "192.0.2.3:7", "[::1]:7", "[::2]:7"]),
            ["192.0.2.1:7", "[::1]:7", "192.0.2.2:7", "[::2]:7", "192.0.2.3:7"]
        );
        assert_eq!(sorted(&["[::1]:7", "192.0.2.1:7"]), ["[::1]:7", "192.0.2.1:7"]);
    }

    #[test]
    fn the_number_of_remembered_hosts_is_bounded() {
        let mut worked = RespondingAddresses::default();
        for n in 0..3 * MAX_LAST_ANSWERS {
            worked.insert(&named(&format!("n{n}.test")), ([192, 0, 2, 1], 7).into());
        }
        assert_eq!(worked.0.len(), MAX_LAST_ANSWERS);
    }

    #[test]
    fn the_error_lists_all_addresses_and_a_silent_one_first() {
        use io::ErrorKind as Kind;
        let of = |last: u8, kind: Kind| failure(([192, 0, 2, last], 22).into(), kind.into(), SOON);
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
    fn the_most_telling_failure_is_the_reason_and_no_address_is_listed_twice() {
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
            let failed = [failure(at("192.0.2.1:22"), v4, SOON), failure(at("[::1]:22"), v6, SOON)];
            assert_eq!(ConnectError::new(failed.into()).reason(), reason);
        }
        let refused = |at| failure(at, Kind::ConnectionRefused.into(), SOON);
        let (one, two) = (at("192.0.2.1:22"), at("[fd00::1]:22"));
        let twice = ConnectError::new(vec![refused(one), refused(two), refused(one)]);
        assert_eq!(twice.to_string(), "192.0.2.1:22 refused the connection, and so did [fd00::1]:22");
        let only = ConnectError::new(vec![refused(two)]);
        assert_eq!(only.after(&two.into()), "it refused the connection");
        assert_eq!(only.after(&one.into()), "[fd00::1]:22 refused the connection");
        assert_eq!(twice.after(&two.into()), twice.to_string());
    }
}
