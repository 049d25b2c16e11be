//! The SOCKS5 port of a user's proxy (RFC 1928): CONNECT with a host name or an address, without authentication.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use http::StatusCode;
use http::header::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::admission::denial::Denial;
use crate::admission::trace_id::new_trace;
use crate::admission::{Admission, AdmissionOutcome, ListenerProtocol, NO_PENDING, OpenRequest};
use crate::session_io::OpenSession;
use tunnel_base::limited;
use tunnel_net::socket::Connection;
use tunnel_proto::names::Target;

/// The protocol of a SOCKS5 listener.
///
/// Each message is read to its last byte and no further, so that the next byte is the session's. Replies fit into any
/// socket's empty buffer, so they need no timeout.
#[derive(Debug)]
pub struct Socks5;

impl ListenerProtocol<TcpStream> for Socks5 {
    fn rejection_bytes(&self, _denial: &Denial, _trace: &str) -> Bytes {
        Bytes::from_static(&[VERSION, NO_METHOD])
    }

    async fn handshake(&self, mut socket: TcpStream, admission: &mut Admission) -> AdmissionOutcome {
        let opened = handshake(&mut socket, admission).await;
        let socket = Box::new(socket);
        match opened {
            Ok(Some(session)) => AdmissionOutcome::Opened { session, socket, buffered: Bytes::new() },
            Ok(None) => AdmissionOutcome::Closed(Some(socket)),
            Err(reason) => AdmissionOutcome::Failed { reason, socket: Some(socket) },
        }
    }
}

/// Serves one client until it has the reply to its request. Returns the session, or `None` if the client was denied.
///
/// # Errors
///
/// Returns a label for metrics if the client left, or speaks another protocol.
async fn handshake(
    socket: &mut TcpStream,
    admission: &mut Admission,
) -> Result<Option<OpenSession>, &'static str> {
    // A client that loses its place after its first byte gets an answer to the message that it has not finished.
    let evicted = admission.evicted();
    let lost = |reply| Ok(Err(SocksRejection { denial: Denial::Busy(NO_PENDING), reply }));
    let [version] = read(socket).await?;
    let greeted = tokio::select! {
        biased;
        greeted = greet(version, socket, admission) => Some(greeted?),
        () = evicted.cancelled() => None,
    };
    let request = match greeted {
        Some(true) => tokio::select! {
            biased;
            request = read_request(socket) => request,
            () = evicted.cancelled() => lost(reply_of(FAILED)),
        },
        Some(false) => {
            let denial = Denial::Request("the client does not offer SOCKS5 without authentication");
            Ok(Err(SocksRejection { denial, reply: vec![VERSION, NO_METHOD] }))
        }
        None => lost(vec![VERSION, NO_METHOD]),
    }?;
    // Errors pass through admission: it counts them, and a forbidden client learns no more than that.
    let (request, early) = match request {
        Ok(request) => (Ok(request), None),
        Err(SocksRejection { denial, reply }) => (Err(denial), Some(reply)),
    };
    let Some(opened) = admission.open(socket.remote_reset(), request, new_trace()).await else {
        return Err("reset_while_opening");
    };
    let reply = match (&opened, early) {
        (_, Some(reply)) => reply,
        (Ok(_), None) => reply_of(SUCCEEDED),
        (Err(denied), None) => reply_of(code(&denied.denial)),
    };
    send(socket, &reply).await?;
    Ok(opened.ok())
}

/// A client that is denied before its request is checked, and the reply to its last message.
struct SocksRejection {
    denial: Denial,
    reply: Vec<u8>,
}

/// Agrees to use no authentication. Returns false if the client does not offer that.
async fn greet(version: u8, socket: &mut TcpStream, admission: &Admission) -> Result<bool, &'static str> {
    admission.mark_active();
    if version != VERSION {
        limited!(
            admission.context.metrics.refusals.may_log(NOT_SOCKS5, admission.client.from.ip()) => warn,
            first_byte = version,
            hint = "use socks5h://HOST:PORT as the proxy",
            "client does not speak SOCKS5"
        );
        // The first letter of a method of HTTP: a browser or curl shows the answer.
        if b"CDGHOPT".contains(&version) {
            send(socket, NO_HTTP).await?;
        }
        return Err(NOT_SOCKS5);
    }
    let [count] = read(socket).await?;
    if !read_bytes(socket, count).await?.contains(&NO_PASSWORD) {
        return Ok(false);
    }
    send(socket, &[VERSION, NO_PASSWORD]).await.map(|()| true)
}

/// Reads the request.
async fn read_request(socket: &mut TcpStream) -> Result<Result<OpenRequest, SocksRejection>, &'static str> {
    let [version, command, _, kind] = read(socket).await?;
    if version != VERSION {
        return Err(NOT_SOCKS5);
    }
    let host = match kind {
        IPV4 => Ipv4Addr::from(read::<4>(socket).await?).to_string(),
        IPV6 => format!("[{}]", Ipv6Addr::from(read::<16>(socket).await?)),
        NAME => {
            let [length] = read(socket).await?;
            String::from_utf8_lossy(&read_bytes(socket, length).await?).into_owned()
        }
        _ => {
            let denial = Denial::Request("the request's address is neither a name nor an IP address");
            return Ok(Err(SocksRejection { denial, reply: reply_of(NO_SUCH_ADDRESS_KIND) }));
        }
    };
    let port = u16::from_be_bytes(read(socket).await?);
    if command != CONNECT {
        let denial = Denial::Request("this port serves the SOCKS5 command CONNECT, and neither BIND nor UDP");
        return Ok(Err(SocksRejection { denial, reply: reply_of(NO_SUCH_COMMAND) }));
    }
    Ok(match format!("{host}:{port}").parse::<Target>() {
        Ok(target) => Ok(OpenRequest { node: None, target, credentials: HeaderMap::new() }),
        Err(error) => Err(SocksRejection { denial: error.into(), reply: reply_of(UNREACHABLE) }),
    })
}

/// Returns the reply to a request. It has no bound address, which a client of CONNECT does not need.
fn reply_of(code: u8) -> Vec<u8> {
    vec![VERSION, code, 0, IPV4, 0, 0, 0, 0, 0, 0]
}

/// Returns the closest reply code; the access log has the whole reason.
fn code(denial: &Denial) -> u8 {
    match (denial.name(), denial.status()) {
        ("target_refused", _) => REFUSED,
        (_, StatusCode::FORBIDDEN) => FORBIDDEN,
        (_, StatusCode::SERVICE_UNAVAILABLE) => FAILED,
        _ => UNREACHABLE,
    }
}

/// Reads exactly `N` bytes.
async fn read<const N: usize>(socket: &mut TcpStream) -> Result<[u8; N], &'static str> {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes).await.map_err(|error| ended(&error))?;
    Ok(bytes)
}

/// Reads a field of this length, which is at most 255 bytes.
async fn read_bytes(socket: &mut TcpStream, length: u8) -> Result<Vec<u8>, &'static str> {
    let mut bytes = vec![0; length.into()];
    socket.read_exact(&mut bytes).await.map_err(|error| ended(&error))?;
    Ok(bytes)
}

async fn send(socket: &mut TcpStream, bytes: &[u8]) -> Result<(), &'static str> {
    socket.write_all(bytes).await.map_err(|_| "reset")?;
    socket.flush().await.map_err(|_| "reset")
}

/// Returns the label for a client that left before its request was complete.
fn ended(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::UnexpectedEof { "header_missing" } else { "reset" }
}

/// Label of a client that speaks another protocol.
const NOT_SOCKS5: &str = "not_socks5";

/// Response to a client that takes this port for an HTTP proxy.
const NO_HTTP: &[u8] =
    b"HTTP/1.1 400 this port serves SOCKS5: use socks5h://HOST:PORT as the proxy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

const VERSION: u8 = 5;

// Methods of authentication (RFC 1928, section 3).
const NO_PASSWORD: u8 = 0;
const NO_METHOD: u8 = 0xff;

// Command and kinds of addresses in a request (section 4).
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

// Reply codes (section 6).
const SUCCEEDED: u8 = 0;
const FAILED: u8 = 1;
const FORBIDDEN: u8 = 2;
const UNREACHABLE: u8 = 4;
const REFUSED: u8 = 5;
const NO_SUCH_COMMAND: u8 = 7;
const NO_SUCH_ADDRESS_KIND: u8 = 8;
