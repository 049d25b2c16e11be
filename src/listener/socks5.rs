//! The SOCKS5 listener (RFC 1928): CONNECT with a host name or an address, and passwords (RFC 1929).

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::StatusCode;
use http::header::{HeaderMap, HeaderValue, PROXY_AUTHORIZATION};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tracing::{Span, field, info_span};

use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen;
use crate::config::listen_tls::PortTlsState;
use crate::config::server::Tls;
use crate::config::table::ConfigTableReader;
use crate::config::value::forms;
use crate::listener::admission::{Admission, AdmissionOutcome, ListenerProtocol, OpenRequest};
use crate::listener::denial::Denial;
use crate::listener::trace_id::new_trace;
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigReader, ListenerKind, single};
use crate::session_io::OpenSession;
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_base::limited;
use tunnel_base::names::Target;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::SessionCategory;

/// `[server.socks5]`: SOCKS5 with host names (RFC 1928, CONNECT) and passwords (RFC 1929), for programs that know no
/// HTTP proxy. Without this table there is no such port.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Socks5Config {
    /// Address (ip:port) of the proxy. Required.
    ///
    /// Required: `"127.0.0.1:1080"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub listen: Option<SocketAddr>,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "socks5", by_address: true, read: settings };

/// Reads the table. Returns nothing if it is absent, or has no address to listen on, which is an error.
fn settings(
    mut table: ConfigTableReader<'_>,
    tables: &mut ListenerConfigReader<'_>,
) -> Vec<Arc<dyn ListenerConfig>> {
    let report = &mut *tables.report;
    let mut socks5: Socks5Config = table.fields(report);
    listen::require(&table, report);
    socks5.access = AccessConfig::read(&mut table, PASSWORD, &tables.inherited, report);
    if let Some(at) = socks5.listen {
        socks5.access.warn_if_open(table.key("listen"), at, PASSWORD, "every node", report);
    }
    table.close_optional(&socks5, report);
    single(socks5.listen.is_some().then_some(socks5))
}

/// Clients may send a password, and are asked for no certificate.
const PASSWORD: AuthMethods = AuthMethods { password: true, tls: PortTlsState::Unsupported };

impl ListenerConfig for Socks5Config {
    fn access(&self) -> (&str, &AccessConfig) {
        ("server.socks5", &self.access)
    }

    fn bind(&self, _tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let listener = startup.bind("server.socks5.listen", self.listen.ok_or(NotPrepared)?);
        Ok(vec![BoundPort::tcp(SessionCategory::HttpProxy, listener?, |_| Socks5)])
    }
}

/// The protocol of a SOCKS5 listener.
///
/// Each message is read to its last byte and no further, so that the next byte is the session's. Replies fit into any
/// socket's empty buffer, so they need no timeout.
#[derive(Debug)]
pub struct Socks5;

impl<C: Connection + 'static> ListenerProtocol<C> for Socks5 {
    type Connection = C;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("socks5", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, _denial: &Denial, _trace: &str) -> Bytes {
        Bytes::from_static(&[VERSION, NO_METHOD])
    }

    async fn handshake(&self, mut socket: C, admission: &mut Admission) -> AdmissionOutcome<C> {
        match handshake(&mut socket, admission).await {
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
async fn handshake<C: Connection>(
    socket: &mut C,
    admission: &mut Admission,
) -> Result<Option<OpenSession>, &'static str> {
    let request = match authenticate(socket, admission).await? {
        Ok(credentials) => read_request(socket, credentials).await?,
        Err(refused) => Err(refused),
    };
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

/// Agrees on a method and checks the password. Returns the credentials as the header that an HTTP client would send.
///
/// The request's check finds this password in the cache of recent logins.
async fn authenticate<C: Connection>(
    socket: &mut C,
    admission: &Admission,
) -> Result<Result<HeaderMap, SocksRejection>, &'static str> {
    let refusals = &admission.context().metrics.refusals;
    let [version, count] = read(socket).await?;
    if version != VERSION {
        limited!(
            refusals.may_log(NOT_SOCKS5, admission.from().ip()) => warn,
            first_byte = version,
            hint = "use socks5h://HOST:PORT as the proxy",
            "client does not speak SOCKS5"
        );
        return Err(NOT_SOCKS5);
    }
    let methods = read_bytes(socket, count).await?;
    let policy = admission.context().policy.load_full();
    let method = match policy.logins {
        None if methods.contains(&NO_PASSWORD) => NO_PASSWORD,
        // A client that always sends a password is served, too.
        _ if methods.contains(&USER_AND_PASSWORD) => USER_AND_PASSWORD,
        _ => {
            let denial = match policy.logins {
                Some(_) => Denial::Credentials,
                None => Denial::Request(
                    "the client offers neither SOCKS5 without authentication nor with a password",
                ),
            };
            return Ok(Err(SocksRejection { denial, reply: vec![VERSION, NO_METHOD] }));
        }
    };
    send(socket, &[VERSION, method]).await?;
    let mut credentials = HeaderMap::new();
    if method == NO_PASSWORD {
        return Ok(Ok(credentials));
    }
    let [version, length] = read(socket).await?;
    if version != PASSWORD_VERSION {
        return Err(NOT_SOCKS5);
    }
    let user = read_bytes(socket, length).await?;
    let [length] = read(socket).await?;
    let password = read_bytes(socket, length).await?;
    let login = format!("Basic {}", STANDARD.encode([&user[..], b":", &password[..]].concat()));
    if let Ok(login) = HeaderValue::from_str(&login) {
        credentials.insert(PROXY_AUTHORIZATION, login);
    }
    match policy.authenticate(&credentials, admission.from().ip()).await {
        Ok(_) => send(socket, &[PASSWORD_VERSION, SUCCEEDED]).await.map(|()| Ok(credentials)),
        Err(denial) => Ok(Err(SocksRejection { denial, reply: vec![PASSWORD_VERSION, FAILED] })),
    }
}

/// Reads the request.
async fn read_request<C: Connection>(
    socket: &mut C,
    credentials: HeaderMap,
) -> Result<Result<OpenRequest, SocksRejection>, &'static str> {
    let [version, command, _, kind] = read(socket).await?;
    if version != VERSION {
        return Err(NOT_SOCKS5);
    }
    let host = match kind {
        IPV4 => Ipv4Addr::from(read::<_, 4>(socket).await?).to_string(),
        IPV6 => format!("[{}]", Ipv6Addr::from(read::<_, 16>(socket).await?)),
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
        Ok(target) => Ok(OpenRequest { node: None, target, credentials }),
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
        (_, StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED) => FORBIDDEN,
        (_, StatusCode::SERVICE_UNAVAILABLE) => FAILED,
        _ => UNREACHABLE,
    }
}

/// Reads exactly `N` bytes.
async fn read<C: Connection, const N: usize>(socket: &mut C) -> Result<[u8; N], &'static str> {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes).await.map_err(|error| ended(&error))?;
    Ok(bytes)
}

/// Reads a field of this length, which is at most 255 bytes.
async fn read_bytes<C: Connection>(socket: &mut C, length: u8) -> Result<Vec<u8>, &'static str> {
    let mut bytes = vec![0; length.into()];
    socket.read_exact(&mut bytes).await.map_err(|error| ended(&error))?;
    Ok(bytes)
}

async fn send<C: Connection>(socket: &mut C, bytes: &[u8]) -> Result<(), &'static str> {
    socket.write_all(bytes).await.map_err(|_| "reset")?;
    socket.flush().await.map_err(|_| "reset")
}

/// Returns the label for a client that left before its request was complete.
fn ended(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::UnexpectedEof { "header_missing" } else { "reset" }
}

/// Label of a client that speaks another protocol.
const NOT_SOCKS5: &str = "not_socks5";

const VERSION: u8 = 5;
/// Version of the message with a password (RFC 1929).
const PASSWORD_VERSION: u8 = 1;

// Methods of authentication (RFC 1928, section 3).
const NO_PASSWORD: u8 = 0;
const USER_AND_PASSWORD: u8 = 2;
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
