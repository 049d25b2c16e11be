//! Bytes of a socket that the kernel still holds because the peer has not acknowledged them.
//!
//! Linux reports this for each socket (`sock_diag`, as `ss` shows it); no privilege is needed.

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
    let kernel = Socket::new(Domain::from(AF_NETLINK), Type::DGRAM, Some(Protocol::from(NETLINK_SOCK_DIAG)))?;
    kernel.set_nonblocking(true)?;
    kernel.send(&question(socket.local_addr()?, to))?;
    let mut answer = [0; ROOM];
    let len = (&kernel).read(&mut answer)?;
    waiting(answer.get(..len).unwrap_or_default())
}

/// `struct nlmsghdr`, then `struct inet_diag_req_v2`: the very socket between two addresses.
fn question(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let family = if from.is_ipv4() { AF_INET } else { AF_INET6 };
    let mut question = Vec::with_capacity(QUESTION);
    question.extend(u32::try_from(QUESTION).unwrap_or_default().to_ne_bytes());
    question.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    question.extend(NLM_F_REQUEST.to_ne_bytes());
    question.extend([0; 8]);
    question.extend([family, IPPROTO_TCP, 0, 0]);
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

/// The `idiag_wqueue` of an answer.
fn waiting(answer: &[u8]) -> io::Result<u32> {
    let part = |at: usize| answer.get(at..at + 4).and_then(|part| <[u8; 4]>::try_from(part).ok());
    let kind = part(4).map(|[low, high, ..]| u16::from_ne_bytes([low, high]));
    match kind {
        Some(SOCK_DIAG_BY_FAMILY) => {
            part(WQUEUE).map(u32::from_ne_bytes).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
        }
        Some(NLMSG_ERROR) => match part(16).map(i32::from_ne_bytes) {
            // The socket was closed.
            Some(ENOENT) => Ok(0),
            code => Err(io::Error::from_raw_os_error(code.unwrap_or_default().saturating_neg())),
        },
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

const AF_NETLINK: i32 = 16;
const NETLINK_SOCK_DIAG: i32 = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// The kernel reports errors negated.
const ENOENT: i32 = -2;
const QUESTION: usize = 16 + 56;
/// Where `idiag_wqueue` stands: behind the header, family and state, the two addresses, the timer, and `idiag_rqueue`.
const WQUEUE: usize = 16 + 4 + 48 + 4 + 4;
/// More than any answer about one socket takes.
const ROOM: usize = 1024;

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
        for len in 0..100 {
            let _ = waiting(&vec![20; len]);
        }
        let mut error = vec![0; 36];
        error[4] = 2;
        error[16..20].copy_from_slice(&(-2i32).to_ne_bytes());
        assert_eq!(waiting(&error).unwrap(), 0);
        error[16..20].copy_from_slice(&(-95i32).to_ne_bytes());
        assert_eq!(waiting(&error).unwrap_err().raw_os_error(), Some(95));
    }
}
