//! The PROXY protocol, v1 and v2: transmits the client's address on connections from a balancer.

use std::io;
use std::net::{IpAddr, SocketAddr};

use bytes::Bytes;
use ppp::{HeaderResult, v1, v2};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use crate::exact_read::read_until;
use tunnel_base::policy::canonical_ip;

/// The reason for closing a balancer's connection.
#[derive(Debug, thiserror::Error)]
pub enum ProxyProtocolError {
    /// The connection ended without a byte, as balancers check whether a port is open.
    #[error("connection ended without a byte")]
    Closed,
    /// The connection ended or failed before its header was complete.
    #[error("connection ended before its PROXY header: {0}")]
    Io(#[from] io::Error),
    /// The first bytes are not a header.
    #[error("invalid PROXY header (v1 or v2): {0}")]
    Header(String),
}

/// Reads a connection's header, and not a byte more.
///
/// Returns the client that it names, or `None` if the balancer connects on its own behalf, for example for a health
/// check.
///
/// # Errors
///
/// Fails if the header is missing or malformed. Not cancel safe.
pub async fn read<S>(socket: &mut S) -> Result<Option<SocketAddr>, ProxyProtocolError>
where
    S: AsyncRead + Unpin,
{
    let mut header = vec![0; v2::PROTOCOL_PREFIX.len()];
    let Ok(read @ 1..) = socket.read(&mut header).await else { return Err(ProxyProtocolError::Closed) };
    socket.read_exact(&mut header[read..]).await?;
    if header == v2::PROTOCOL_PREFIX {
        binary(socket, &mut header).await?;
    } else if header.starts_with(v1::PROTOCOL_PREFIX.as_bytes()) {
        // The header is one line.
        if !read_until(socket, &mut header, b"\r\n", MAX_LINE).await? {
            return Err(ProxyProtocolError::Header("line too long".into()));
        }
    }
    source(&header)
}

/// Returns the v2 header of a forwarded connection: the client's address, and the local address it connected to.
pub fn header(from: SocketAddr, to: SocketAddr) -> Bytes {
    let mapped = |at: SocketAddr| match at.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), at.port()),
        IpAddr::V6(_) => at,
    };
    // Both addresses are written in one family. They differ if a balancer uses another family here than with its
    // client.
    let pair = if from.is_ipv4() == to.is_ipv4() { (from, to) } else { (mapped(from), mapped(to)) };
    let header =
        v2::Builder::with_addresses(v2::Version::Two | v2::Command::Proxy, v2::Protocol::Stream, pair);
    // Building fails only if the header does not fit into the length field.
    header.build().unwrap_or_default().into()
}

/// Reads the rest of a v2 header. Its first part contains the length.
async fn binary<S>(socket: &mut S, header: &mut Vec<u8>) -> Result<(), ProxyProtocolError>
where
    S: AsyncRead + Unpin,
{
    let mut rest = [0; 4];
    socket.read_exact(&mut rest).await?;
    header.extend_from_slice(&rest);
    let length = usize::from(u16::from_be_bytes([rest[2], rest[3]]));
    if length > MAX_HEADER {
        return Err(ProxyProtocolError::Header(format!("{length} bytes long, the limit is {MAX_HEADER}")));
    }
    let read = header.len();
    header.resize(read + length, 0);
    socket.read_exact(&mut header[read..]).await?;
    Ok(())
}

pub(super) fn source(header: &[u8]) -> Result<Option<SocketAddr>, ProxyProtocolError> {
    let source = match HeaderResult::parse(header) {
        HeaderResult::V1(Ok(header)) => match header.addresses {
            v1::Addresses::Unknown => None,
            v1::Addresses::Tcp4(a) => Some((a.source_address, a.source_port).into()),
            v1::Addresses::Tcp6(a) => Some((a.source_address, a.source_port).into()),
        },
        HeaderResult::V2(Ok(header)) => match (header.command, header.addresses) {
            (v2::Command::Local, _) | (_, v2::Addresses::Unspecified) => None,
            (_, v2::Addresses::IPv4(a)) => Some((a.source_address, a.source_port).into()),
            (_, v2::Addresses::IPv6(a)) => Some((a.source_address, a.source_port).into()),
            (_, v2::Addresses::Unix(_)) => {
                return Err(ProxyProtocolError::Header("contains a Unix socket; expected TCP".into()));
            }
        },
        HeaderResult::V1(Err(error)) => return Err(ProxyProtocolError::Header(error.to_string())),
        HeaderResult::V2(Err(error)) => return Err(ProxyProtocolError::Header(error.to_string())),
    };
    Ok(source.map(|at: SocketAddr| SocketAddr::new(canonical_ip(at.ip()), at.port())))
}

/// Maximum length of a v2 header after its first part, in bytes: addresses, and TLS data that balancers add.
const MAX_HEADER: usize = 4096;

/// Maximum length of a v1 header in bytes, as the protocol defines it.
const MAX_LINE: usize = 107;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn a_written_proxy_header_is_read_back_with_its_source() {
        for (from, to) in [
            ("192.0.2.7:1234", "10.0.0.1:443"),
            ("[2001:db8::7]:1234", "[2001:db8::1]:443"),
            ("192.0.2.7:1234", "[2001:db8::1]:443"),
            ("[2001:db8::7]:1234", "10.0.0.1:443"),
        ] {
            let from: SocketAddr = from.parse().unwrap();
            let written = header(from, to.parse().unwrap());
            let (read, left) = reads(&[&written, &b"rest"[..]].concat(), 1000).await;
            assert_eq!((read.unwrap(), left), (Some(from), b"rest".to_vec()), "{to}");
        }
    }

    /// Returns the result of reading these bytes, sent in pieces, and the bytes left after it.
    async fn reads(bytes: &[u8], piece: usize) -> (Result<Option<SocketAddr>, ProxyProtocolError>, Vec<u8>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        far.set_nodelay(true).unwrap();
        let (mut near, _) = listener.accept().await.unwrap();
        let send = async {
            for piece in bytes.chunks(piece) {
                far.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            far.shutdown().await.unwrap();
        };
        let read = async {
            let read = read(&mut near).await;
            let mut rest = Vec::new();
            near.read_to_end(&mut rest).await.unwrap();
            (read, rest)
        };
        tokio::join!(send, read).1
    }

    fn v2_header(command: v2::Command, addresses: v2::Addresses) -> Vec<u8> {
        v2::Builder::with_addresses(v2::Version::Two | command, v2::Protocol::Stream, addresses)
            .build()
            .unwrap()
    }

    #[tokio::test]
    async fn the_source_is_read_and_no_byte_after_the_header() {
        let four = v2::Addresses::IPv4(v2::IPv4::new([203, 0, 113, 7], [10, 0, 0, 1], 4000, 22));
        let mapped = "::ffff:203.0.113.7".parse::<std::net::Ipv6Addr>().unwrap();
        let six = v2::Addresses::IPv6(v2::IPv6::new(mapped, mapped, 4000, 22));
        let from = Some("203.0.113.7:4000".parse().unwrap());
        for (header, from) in [
            (b"PROXY TCP4 203.0.113.7 10.0.0.1 4000 22\r\n".to_vec(), from),
            (b"PROXY TCP6 ::ffff:203.0.113.7 fd00::1 4000 22\r\n".to_vec(), from),
            (b"PROXY UNKNOWN\r\n".to_vec(), None),
            (b"PROXY UNKNOWN ffff:f...f:ffff 1\r\n".to_vec(), None),
            (v2_header(v2::Command::Proxy, four), from),
            (v2_header(v2::Command::Proxy, six), from),
            (v2_header(v2::Command::Local, four), None),
            (v2_header(v2::Command::Proxy, v2::Addresses::Unspecified), None),
        ] {
            for piece in [1, 5, 1000] {
                let (read, rest) = reads(&[header.as_slice(), b"\r\nCONNECT"].concat(), piece).await;
                assert_eq!((read.unwrap(), rest.as_slice()), (from, &b"\r\nCONNECT"[..]), "{header:?}");
            }
        }
    }

    #[tokio::test]
    async fn an_invalid_proxy_header_is_refused() {
        let mut long = v2_header(v2::Command::Local, v2::Addresses::Unspecified);
        long[14..16].copy_from_slice(&u16::MAX.to_be_bytes());
        long.resize(70_000, 0);
        for bad in [
            &b"CONNECT node1:22 HTTP/1.1\r\n\r\n"[..],
            b"PROXY TCP4 203.0.113.7 10.0.0.1 4000\r\n",
            b"PROXY TCP4 edge1 10.0.0.1 4000 22\r\n",
            b"PROXY TCP4 203.0.113.7 10.0.0.1 4000 22",
            b"",
            b"PROXY ",
            b"PROXY \r\nABCDEF",
            b"PROXY\r\nABCDEF\r\n",
            b"\r\n\r\n\0\r\nQUIT\n\x31\x11\0\0",
            &[b"PROXY ".as_slice(), &[b'x'; 1000]].concat(),
            &long,
        ] {
            assert!(reads(bad, 1 << 20).await.0.is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), v2: bool) {
            let prefix = if v2 { v2::PROTOCOL_PREFIX } else { b"PROXY " };
            let _ = (source(&bytes), source(&[prefix, &bytes].concat()));
        }
    }
}
