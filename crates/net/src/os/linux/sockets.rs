//! Queries the kernel about a socket (`sock_diag`, as `ss` does). No privilege is needed.

use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use socket2::Socket;
use tokio::net::TcpStream;

use super::netlink::{self, u32_at as number};
use crate::keepalive::TcpSilence;
use crate::tcp_info::{LossInfo, TcpInfo};

/// Returns how many written bytes the remote's kernel has not acknowledged; 0 once the socket is closed.
///
/// # Errors
///
/// The system does not report it.
pub fn unacknowledged(socket: &TcpStream) -> io::Result<u32> {
    let mut room = [0; ROOM];
    match query_open(socket, &[], &mut room)? {
        Some(answer) => number(answer, WQUEUE).ok_or_else(|| io::ErrorKind::UnexpectedEof.into()),
        None => Ok(0),
    }
}

/// Returns the silence of a remote, or `None` if its kernel has all written bytes or the socket is closed.
///
/// A reader that pauses answers each probe of its closed window, so it has answered all attempts.
///
/// # Errors
///
/// The system does not report it.
pub fn silence(socket: &TcpStream) -> io::Result<Option<TcpSilence>> {
    let mut room = [0; ROOM];
    let Some(answer) = query_open(socket, &[TCP_INFO], &mut room)? else { return Ok(None) };
    if number(answer, WQUEUE) == Some(0) {
        return Ok(None);
    }
    let silence = attribute(answer, TCP_INFO).and_then(silence_of);
    silence.map(Some).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Parses a [`TcpSilence`] from `struct tcp_info`.
fn silence_of(info: &[u8]) -> Option<TcpSilence> {
    let [retransmissions, probes] = [2, 3].map(|at| info.get(at).copied().map(u32::from));
    // Milliseconds since the last data and since the last acknowledgement.
    let [data, acknowledgement] = [52, 56].map(|at| number(info, at));
    let time = Duration::from_millis(data?.min(acknowledgement?).into());
    Some(TcpSilence { time, attempts: retransmissions?.max(probes?) })
}

/// Returns the kernel's state of the connection between two addresses, or `None` if it does not respond.
pub(crate) fn tcp_info(from: SocketAddr, to: SocketAddr) -> Option<TcpInfo> {
    let mut room = [0; ROOM];
    let answer = query(from, to, &[TCP_INFO], &mut room).ok()?;
    parse_tcp_info(attribute(answer, TCP_INFO)?)
}

/// Like [`tcp_info`], about lost segments.
pub(crate) fn losses(from: SocketAddr, to: SocketAddr) -> Option<LossInfo> {
    let mut room = [0; ROOM];
    parse_losses(query(from, to, &[TCP_INFO, MEMORY], &mut room).ok()?)
}

/// Returns the user whose process has the remote end of a connection, which is on this machine.
///
/// # Errors
///
/// No process has it any more, or the system does not report it.
pub fn remote_user(socket: &TcpStream) -> io::Result<u32> {
    let mut room = [0; ROOM];
    let answer = query(socket.peer_addr()?, socket.local_addr()?, &[], &mut room)?;
    // A socket without a process has no inode, and some kernels report root as its user.
    let has_process = number(answer, WQUEUE + 8).is_some_and(|inode| inode != 0);
    has_process.then(|| number(answer, WQUEUE + 4)).flatten().ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Parses `struct tcp_info` of Linux 4.19 and later; newer kernels only add fields at the end.
fn parse_tcp_info(info: &[u8]) -> Option<TcpInfo> {
    let short = |at| number(info, at);
    let long = |at| long(info, at);
    let [segment, unacknowledged, selected, lost, again] = [16, 24, 28, 32, 36].map(short);
    let segment = u64::from(segment?);
    let under_way = u64::from(unacknowledged?) + u64::from(again?);
    let unsent = u64::from(short(144)?);
    let round_trip = Duration::from_micros(short(68)?.into());
    Some(TcpInfo {
        rtt: round_trip,
        // Before the first measurement the kernel reports the maximum value.
        least_round_trip: round_trip.min(Duration::from_micros(short(148)?.into())),
        variation: Duration::from_micros(short(72)?.into()),
        pacing: long(104)?,
        delivered: short(192)?,
        segment,
        in_flight: under_way.saturating_sub(u64::from(selected?) + u64::from(lost?)) * segment,
        unsent,
        written: long(200)?.saturating_sub(long(208)?) + unsent,
    })
}

/// Parses what a response about a socket contains of lost segments.
fn parse_losses(answer: &[u8]) -> Option<LossInfo> {
    let info = attribute(answer, TCP_INFO)?;
    let memory = attribute(answer, MEMORY)?;
    Some(LossInfo {
        timeouts: *info.get(2)?,
        remote_has_gap: number(info, 28)? > 0,
        // Memory for received bytes, of which none can be read.
        has_gap: number(memory, 0)? > 0 && number(answer, RQUEUE)? == 0,
        path_mtu: number(info, 60)?.into(),
        rtt: Duration::from_micros(number(info, 68)?.into()),
        received: long(info, 128)?,
    })
}

/// A listening socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListeningSocket {
    /// The address that it is bound to.
    pub(super) at: SocketAddr,
    /// The user of the process that opened it.
    pub(super) user: u32,
    /// The kernel's number of it, which no other socket has or will have.
    pub(super) cookie: u64,
}

/// Returns the socket that accepts connections to an address, as the kernel chooses it.
///
/// # Errors
///
/// The system does not report it.
pub(super) fn listening_at(at: SocketAddr) -> io::Result<Option<ListeningSocket>> {
    let nobody = if at.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let mut room = [0; ROOM];
    let Some(answer) = if_found(query(at, SocketAddr::new(nobody, 0), &[], &mut room))? else {
        return Ok(None);
    };
    let socket = ListeningSocket::parse(answer, at.port());
    socket.map(Some).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

impl ListeningSocket {
    fn parse(answer: &[u8], port: u16) -> Option<Self> {
        let ip = answer.get(SOURCE..)?;
        let ip: IpAddr = match *answer.get(netlink::HEADER_LEN)? {
            netlink::AF_INET => (*ip.first_chunk::<4>()?).into(),
            _ => (*ip.first_chunk::<16>()?).into(),
        };
        let at = SocketAddr::new(ip, port);
        Some(Self { at, user: number(answer, WQUEUE + 4)?, cookie: long(answer, COOKIE)? })
    }
}

/// Queries the kernel about a socket. Returns `None` if it is closed.
fn query_open<'a>(
    socket: &TcpStream,
    attributes: &[u16],
    room: &'a mut [u8; ROOM],
) -> io::Result<Option<&'a [u8]>> {
    let Ok(to) = socket.peer_addr() else { return Ok(None) };
    if_found(query(socket.local_addr()?, to, attributes, room))
}

/// Returns `None` instead of the kernel's error that there is no such socket.
fn if_found(answer: io::Result<&[u8]>) -> io::Result<Option<&[u8]>> {
    match answer {
        Err(cause) if Errno::from_io_error(&cause) == Some(Errno::NOENT) => Ok(None),
        answer => answer.map(Some),
    }
}

/// Queries the socket between two addresses, with these attributes. The response is stored in `room`.
///
/// # Errors
///
/// There is no such socket, or the system does not report it.
fn query<'a>(
    from: SocketAddr,
    to: SocketAddr,
    attributes: &[u16],
    room: &'a mut [u8; ROOM],
) -> io::Result<&'a [u8]> {
    let mut kernel = KERNEL.lock();
    let kernel = match &mut *kernel {
        Some(open) => open,
        none => none.insert(netlink::open(NETLINK_SOCK_DIAG)?),
    };
    kernel.send(&question(from, to, attributes))?;
    let len = kernel.read(room)?;
    let answer = room.get(..len).unwrap_or_default();
    if netlink::kind(answer) == Some(SOCK_DIAG_BY_FAMILY) { Ok(answer) } else { Err(netlink::error(answer)) }
}

/// Calls `each` with the name of each Unix socket of this network namespace that has one and no remote, and with its
/// owner. Before Linux 5.3 the owner is unknown.
///
/// # Errors
///
/// The system does not list them.
pub(super) fn unix_sockets(mut each: impl FnMut(&[u8], Option<u32>)) -> io::Result<()> {
    // `struct unix_diag_req`: the family, the states, any inode, the attributes, and no cookie.
    let mut question = vec![AF_UNIX, 0, 0, 0];
    for word in [TCP_CLOSE | TCP_LISTEN, 0, UDIAG_SHOW_NAME | UDIAG_SHOW_UID, u32::MAX, u32::MAX] {
        question.extend(word.to_ne_bytes());
    }
    let kernel = netlink::open(NETLINK_SOCK_DIAG)?;
    kernel.send(&netlink::request(SOCK_DIAG_BY_FAMILY, netlink::NLM_F_DUMP, 0, &question))?;
    let mut room = vec![0; netlink::DUMP_ROOM];
    let mut read = |socket: &[u8]| {
        let attributes = socket.get(UNIX_ATTRIBUTES..).unwrap_or_default();
        if let Some(name) = netlink::find(attributes, UNIX_DIAG_NAME) {
            each(name, netlink::find(attributes, UNIX_DIAG_UID).and_then(|owner| number(owner, 0)));
        }
    };
    while netlink::read_dump(&kernel, &mut room, &mut read)? {}
    Ok(())
}

/// One socket for the process; `None` before the first query, or if the system does not support it.
///
/// A process that had too many open files tries again with the next query.
static KERNEL: Mutex<Option<Socket>> = Mutex::new(None);

/// Returns the value of one attribute of a response.
fn attribute(answer: &[u8], expected_kind: u16) -> Option<&[u8]> {
    netlink::find(answer.get(ATTRIBUTES..)?, expected_kind)
}

/// Returns the request for the socket between two addresses; its body is `struct inet_diag_req_v2`.
fn question(from: SocketAddr, to: SocketAddr, attributes: &[u16]) -> Vec<u8> {
    let family = if from.is_ipv4() { netlink::AF_INET } else { netlink::AF_INET6 };
    let requested = attributes.iter().fold(0, |requested, attribute| requested | 1 << (attribute - 1));
    let mut question = vec![family, IPPROTO_TCP, requested, 0];
    question.extend(u32::MAX.to_ne_bytes());
    question.extend(from.port().to_be_bytes());
    question.extend(to.port().to_be_bytes());
    for ip in [from.ip(), to.ip()] {
        match ip {
            IpAddr::V4(ip) => {
                question.extend(ip.octets());
                question.extend([0; 12]);
            }
            IpAddr::V6(ip) => question.extend(ip.octets()),
        }
    }
    // Any interface, and no cookie.
    question.extend([0; 4]);
    question.extend([u8::MAX; 8]);
    netlink::request(SOCK_DIAG_BY_FAMILY, 0, 0, &question)
}

fn long(answer: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(answer.get(at..at + 8)?.try_into().ok()?))
}

const NETLINK_SOCK_DIAG: i32 = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const IPPROTO_TCP: u8 = 6;
/// Offset of the socket's own address: after the header, family and state, and the two ports.
const SOURCE: usize = netlink::HEADER_LEN + 8;
/// Offset of `idiag_cookie`: after the two addresses and the interface.
const COOKIE: usize = SOURCE + 36;
/// Offset of `idiag_rqueue`: after the header, family and state, the two addresses, and the timer.
const RQUEUE: usize = netlink::HEADER_LEN + 4 + 48 + 4;
/// Offset of `idiag_wqueue`.
const WQUEUE: usize = RQUEUE + 4;
/// Offset of the attributes: after the header and `struct inet_diag_msg`.
const ATTRIBUTES: usize = netlink::HEADER_LEN + 72;
/// The same after the header and `struct unix_diag_msg`.
const UNIX_ATTRIBUTES: usize = netlink::HEADER_LEN + 16;
const AF_UNIX: u8 = 1;
/// States of a socket without a remote, as bits.
const TCP_CLOSE: u32 = 1 << 7;
const TCP_LISTEN: u32 = 1 << 10;
const UDIAG_SHOW_NAME: u32 = 1;
const UDIAG_SHOW_UID: u32 = 0x40;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_UID: u16 = 7;
/// The attribute with `struct tcp_info`.
const TCP_INFO: u16 = 2;
/// The attribute with the socket's memory (`INET_DIAG_SKMEMINFO`).
const MEMORY: u16 = 7;
/// Larger than any response about one socket.
const ROOM: usize = 1024;

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn unacknowledged_counts_the_bytes_that_the_peer_has_not_received() {
        for (at, to) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "127.0.0.1")] {
            let listener = TcpListener::bind(at).await.unwrap();
            let to = SocketAddr::new(to.parse().unwrap(), listener.local_addr().unwrap().port());
            let (far, near) = tokio::join!(TcpStream::connect(to), listener.accept());
            let (mut far, (near, _)) = (far.unwrap(), near.unwrap());
            assert_eq!(remote_user(&near).unwrap(), rustix::process::geteuid().as_raw(), "{at}");
            assert_eq!(unacknowledged(&near).unwrap(), 0, "{at}");
            let mut written = 0;
            // As much as the kernels accept while no one reads.
            while unacknowledged(&near).unwrap() == 0 {
                near.writable().await.unwrap();
                written += near.try_write(&[0; 64 << 10]).unwrap_or_default();
            }
            let mut read = vec![0; written];
            far.read_exact(&mut read).await.unwrap();
            while unacknowledged(&near).unwrap() > 0 {
                tokio::task::yield_now().await;
            }
            near.try_write(b"more").unwrap();
            drop(far);
            remote_user(&near).unwrap_err();
            near.readable().await.unwrap();
            near.try_read(&mut [0; 9]).unwrap_err();
            assert_eq!(unacknowledged(&near).unwrap(), 0, "{at}, reset");
        }
    }

    #[test]
    fn parsing_a_tcp_info_of_any_length_never_panics() {
        assert!((0..300).filter_map(|len| parse_tcp_info(&vec![1; len])).count() == 300 - 216);
        assert!((0..300).filter_map(|len| silence_of(&vec![1; len])).count() == 300 - 60);
        assert!((0..300).all(|len| parse_losses(&vec![1; len]).is_none()));
        assert!((0..200).all(|len| attribute(&vec![20; len], 2).is_none()));
    }
}
