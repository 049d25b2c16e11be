//! What the kernel reports of a socket (`sock_diag`, as `ss` shows it): no privilege is needed.

use std::io::{self, Read as _};
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;

/// Bytes that were written to a socket and that its peer's kernel has not acknowledged; 0 once it is closed.
///
/// # Errors
///
/// The system does not report it.
pub(super) fn unacknowledged(socket: &TcpStream) -> io::Result<u32> {
    let Ok(to) = socket.peer_addr() else { return Ok(0) };
    let mut room = [0; ROOM];
    let answer = ask(&open()?, socket.local_addr()?, to, 0, &mut room);
    match answer {
        Ok(answer) => number(answer, WQUEUE).ok_or_else(|| io::ErrorKind::UnexpectedEof.into()),
        // The socket was closed.
        Err(cause) if cause.raw_os_error() == Some(ENOENT) => Ok(0),
        Err(cause) => Err(cause),
    }
}

/// A socket to ask the kernel with.
///
/// # Errors
///
/// The system has no such thing, or no file is left.
pub(super) fn open() -> io::Result<Socket> {
    netlink(NETLINK_SOCK_DIAG)
}

/// A socket to the kernel for one of netlink's protocols, which never waits.
///
/// # Errors
///
/// The system has no such thing, or no file is left.
pub(super) fn netlink(protocol: i32) -> io::Result<Socket> {
    let kernel = Socket::new(Domain::from(AF_NETLINK), Type::DGRAM, Some(Protocol::from(protocol)))?;
    kernel.set_nonblocking(true)?;
    Ok(kernel)
}

/// `nlmsg_len` and `nlmsg_type` of the first of some messages; none behind the last, or if it is none.
pub(super) fn head(messages: &[u8]) -> Option<(usize, u16)> {
    let len = usize::try_from(number(messages, 0)?).ok()?;
    (len >= HEAD).then_some((len, kind(messages)?))
}

/// Asks about the socket between two addresses, with an attribute unless that is 0. The answer stands in `room`.
///
/// # Errors
///
/// There is no such socket, or the system does not report it.
pub(super) fn ask<'a>(
    mut kernel: &Socket,
    from: SocketAddr,
    to: SocketAddr,
    attribute: u16,
    room: &'a mut [u8; ROOM],
) -> io::Result<&'a [u8]> {
    kernel.send(&question(from, to, attribute))?;
    let len = kernel.read(room)?;
    let answer = room.get(..len).unwrap_or_default();
    if kind(answer) == Some(SOCK_DIAG_BY_FAMILY) { Ok(answer) } else { Err(error(answer)) }
}

/// The value of one attribute of an answer.
pub(super) fn attribute(answer: &[u8], wanted: u16) -> Option<&[u8]> {
    find(answer.get(ATTRIBUTES..)?, wanted)
}

/// The value of one of some attributes.
pub(super) fn find(attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    split(attributes).find(|(kind, ..)| *kind == wanted).map(|(_, value, _)| value)
}

/// Each attribute: its kind, its value, and all of it with the bytes that fill it up.
pub(super) fn split(attributes: &[u8]) -> impl Iterator<Item = (u16, &[u8], &[u8])> {
    let mut rest = attributes;
    std::iter::from_fn(move || {
        let half = |at: usize| Some(u16::from_ne_bytes(rest.get(at..at + 2)?.try_into().ok()?));
        let (len, kind) = (usize::from(half(0)?), half(2)? & KIND);
        let value = rest.get(4..len)?;
        let (whole, left) = rest.split_at_checked(len.next_multiple_of(4)).unwrap_or((rest, &[]));
        rest = left;
        Some((kind, value, whole))
    })
}

/// `struct nlmsghdr`, then `struct inet_diag_req_v2`: the very socket between two addresses.
fn question(from: SocketAddr, to: SocketAddr, attribute: u16) -> Vec<u8> {
    let family = if from.is_ipv4() { AF_INET } else { AF_INET6 };
    let wanted = if attribute == 0 { 0 } else { 1 << (attribute - 1) };
    let mut question = Vec::with_capacity(QUESTION);
    question.extend(u32::try_from(QUESTION).unwrap_or_default().to_ne_bytes());
    question.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    question.extend(NLM_F_REQUEST.to_ne_bytes());
    question.extend([0; 8]);
    question.extend([family, IPPROTO_TCP, wanted, 0]);
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
    question
}

/// What an answer that is none says.
pub(super) fn error(answer: &[u8]) -> io::Error {
    match number(answer, 16) {
        // Errors are reported negated.
        Some(code) if kind(answer) == Some(NLMSG_ERROR) => {
            io::Error::from_raw_os_error(code.cast_signed().saturating_neg())
        }
        _ => io::ErrorKind::InvalidData.into(),
    }
}

/// The `nlmsg_type` of an answer.
fn kind(answer: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?))
}

fn number(answer: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?))
}

const AF_NETLINK: i32 = 16;
const NETLINK_SOCK_DIAG: i32 = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
const ENOENT: i32 = 2;
/// The length of `struct nlmsghdr`.
const HEAD: usize = 16;
const QUESTION: usize = 16 + 56;
/// Where `idiag_wqueue` stands: behind the header, family and state, the two addresses, the timer, and `idiag_rqueue`.
const WQUEUE: usize = 16 + 4 + 48 + 4 + 4;
/// Where attributes begin: behind the header and `struct inet_diag_msg`.
const ATTRIBUTES: usize = 16 + 72;
/// The part of an attribute's kind that is no flag.
const KIND: u16 = 0x3fff;
/// The attribute with `struct tcp_info`.
pub(super) const TCP_INFO: u16 = 2;
/// More than any answer about one socket takes.
pub(super) const ROOM: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn it_is_what_the_peer_has_not_got_yet() {
        for (at, to) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "127.0.0.1")] {
            let listener = TcpListener::bind(at).await.unwrap();
            let to = SocketAddr::new(to.parse().unwrap(), listener.local_addr().unwrap().port());
            let (far, near) = tokio::join!(TcpStream::connect(to), listener.accept());
            let (mut far, (near, _)) = (far.unwrap(), near.unwrap());
            assert_eq!(unacknowledged(&near).unwrap(), 0, "{at}");
            let mut written = 0;
            // As much as the kernels take while nobody reads.
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
            near.readable().await.unwrap();
            near.try_read(&mut [0; 9]).unwrap_err();
            assert_eq!(unacknowledged(&near).unwrap(), 0, "{at}, broken off");
        }
    }

    #[test]
    fn an_answer_of_any_shape_is_no_panic() {
        for len in 0..200 {
            let answer = vec![20; len];
            assert!(error(&answer).kind() == io::ErrorKind::InvalidData && attribute(&answer, 2).is_none());
        }
        let mut error = vec![0; 36];
        error[4] = 2;
        error[16..20].copy_from_slice(&(-95i32).to_ne_bytes());
        assert_eq!(super::error(&error).raw_os_error(), Some(95));
    }
}
