//! Why a client is denied a session, and the HTTP response for each reason.

mod responses;

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, PROXY_AUTHENTICATE};
use http::{Response, StatusCode, Version};
use hyper::ext::ReasonPhrase;
use tokio::io::AsyncWriteExt as _;
use tracing::debug;

use crate::admin::page::BASIC;
use crate::admission::denial::responses::user_denied_text;
use crate::admission::trace_id::TRACE;
use crate::route::{RouteError, SessionRouter};
use tunnel_base::addresses::LocateError;
use tunnel_net::socket::Connection;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::frame::SessionError;
use tunnel_proto::names::{NameError, NodeName, Target};

/// A reason for denying a client its session.
#[derive(Debug, thiserror::Error)]
pub enum Denial {
    /// The request names no valid host and port. Usual cause: an error in the client's command line.
    #[error("bad target: {0}")]
    BadTarget(#[from] NameError),
    /// `allow_from`, `names` or `rules` in the config forbid it.
    #[error("{0}")]
    Forbidden(String),
    /// The method is not CONNECT: the client mistakes this port for a web server or a plain proxy.
    #[error("only CONNECT is served on this port")]
    Method,
    /// The CONNECT request announces a body.
    #[error("CONNECT must not have a body; leave out Content-Length and Transfer-Encoding")]
    Body,
    /// The request's head exceeds one of these limits.
    #[error("the request's head is too long: at most {kib} KiB and {fields} header fields are accepted")]
    HeadTooLong {
        /// Maximum length in KiB.
        kib: usize,
        /// Maximum number of header fields.
        fields: usize,
    },
    /// The request's URL is longer than the HTTP library can represent.
    #[error("the request's URL is too long: at most 65534 bytes are accepted")]
    UrlTooLong,
    /// The HTTP request is not forwarded, because it is malformed or ambiguous.
    #[error("bad request: {0}")]
    Request(&'static str),
    /// Nothing in the request identifies a node.
    #[error("neither Host nor TLS server name is a node's name, and the path names no known pod")]
    NoNodeInHost,
    /// Like [`Self::NoNodeInHost`], but for a request without TLS.
    #[error("Host is not a node's name, and the path names no known pod")]
    NoHost,
    /// The target received a request, but its response cannot be forwarded.
    #[error("invalid response from the target: {0}")]
    UpstreamFailed(String),
    /// The target received a request, and the remote end reports that it does not respond.
    #[error("{0}")]
    UpstreamTimeout(String),
    /// The target was reached, but the TLS handshake of this process with it failed.
    #[error("TLS with the target failed: {0}")]
    TargetTls(TlsHandshakeError),
    /// The user name and password are missing.
    #[error("this proxy requires a user name and a password")]
    Credentials,
    /// `Proxy-Authorization` has another form.
    #[error("Proxy-Authorization is not Basic with the base64 of user:password")]
    NotBasic,
    /// The user does not exist, or the password is wrong.
    #[error("unknown user {0:?} or wrong password")]
    Password(String),
    /// Too many wrong passwords were tried for this user from this address.
    #[error("too many wrong passwords for this user from your address; wait a minute")]
    WrongPasswords,
    /// The target is an address that belongs to no known node.
    #[error("no node is known for {0}")]
    NoNode(Target),
    /// The TLS client sent no server name, so the node is unknown.
    #[error(
        "the client's TLS ClientHello has no server name (SNI); for exec, attach and port-forward kube-apiserver sends \
         one only with --kubelet-certificate-authority"
    )]
    NoServerName,
    /// The target is known, but it is at no node or at more than one.
    #[error(transparent)]
    NotLocated(#[from] LocateError),
    /// Loopback, link-local and cloud metadata addresses, which no server dials for clients.
    #[error("{0} is not allowed as a target: servers never dial loopback, link-local or metadata addresses")]
    OffLimits(Target),
    /// The target is at no node, and this process failed to dial it.
    #[error("{0}")]
    Direct(SessionError),
    /// The port may use any connected node, but there is none.
    #[error("no node is connected to this server or, as far as known, to a peer")]
    NoNodeConnected,
    /// The target is the edge's own machine. Usual cause: a program that sends every request to its proxy.
    #[error("{0} is this machine itself; connect to it directly, not through its proxy")]
    OwnNode(Target),
    /// The edge has no link to a server.
    #[error("this edge is not connected to the cloud")]
    EdgeOffline,
    /// No server has a link of this user's program.
    #[error("this machine has no link to a server: {0}")]
    UserOffline(String),
    /// A server, or the node behind it, refused a user's session.
    #[error("{}", user_denied_text(.node, .refusal))]
    UserDenied {
        /// Requested node.
        node: NodeName,
        /// Reason given by the server or the node's edge.
        refusal: SessionError,
    },
    /// A server did not dial the target for this edge.
    #[error("{0}")]
    DirectDenied(SessionError),
    /// This process has reached a limit or is stopping.
    #[error("{0}")]
    Busy(&'static str),
    /// Opening a session failed.
    #[error(transparent)]
    Route(#[from] RouteError),
}

impl Denial {
    /// Returns the denial for a user's session that `route` could not open over her link.
    pub(crate) fn of_user(why: RouteError, route: &SessionRouter) -> Self {
        match why {
            RouteError::Offline { .. } => {
                Self::UserOffline(route.link_failure().unwrap_or_else(|| "it is dialled again".to_owned()))
            }
            RouteError::Refused { node, refusal } => Self::UserDenied { node, refusal },
            why => why.into(),
        }
    }

    /// Returns the denial for a certificate without a name that this listener accepts.
    pub(super) fn unknown(names: &[String], table: &str) -> Self {
        let shown: String =
            names.first().into_iter().flat_map(|name| name.chars()).take(NAME_CHARS).collect();
        Self::Forbidden(format!(
            "no name (CN or DNS) in your certificate is allowed: {shown:?} is not in names of [server.{table}]"
        ))
    }

    /// Returns the HTTP status of the response.
    pub fn status(&self) -> StatusCode {
        self.response_row().0
    }

    /// Returns true if access is denied, and not only the target or a server missing.
    pub(crate) fn is_forbidden(&self) -> bool {
        self.status() == StatusCode::FORBIDDEN
    }

    /// Returns a fixed label for metrics and the access log.
    pub fn name(&self) -> &'static str {
        self.response_row().1
    }

    /// Returns the hint for the operator or user, sent as the line `hint:` of the response.
    pub fn next_step(&self) -> &'static str {
        self.response_row().2
    }

    /// Returns the whole response. The reason phrase contains the reason, because ssh with a proxy command displays
    /// nothing else.
    pub fn answer(&self, sees_details: bool, trace: &str) -> Response<Bytes> {
        let sentence = self.sentence(sees_details);
        let mut answer = Response::new(Bytes::from(self.body(sees_details, trace)));
        *answer.status_mut() = self.status();
        if let Ok(phrase) = ReasonPhrase::try_from(phrase(&sentence)) {
            answer.extensions_mut().insert(phrase);
        }
        let headers = answer.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        if let Ok(trace) = HeaderValue::from_str(trace) {
            headers.insert(TRACE, trace);
        }
        match self {
            Self::Method => headers.insert(ALLOW, HeaderValue::from_static("CONNECT")),
            Self::Credentials | Self::NotBasic | Self::Password(_) => {
                headers.insert(PROXY_AUTHENTICATE, HeaderValue::from_static(BASIC))
            }
            _ => None,
        };
        answer
    }

    /// Returns the whole response as bytes, for a client that is rejected before its request is read.
    pub(crate) fn text(&self, trace: &str) -> Bytes {
        written(Version::HTTP_11, &self.answer(false, trace))
    }

    fn body(&self, sees_details: bool, trace: &str) -> String {
        format!("{}\ntrace: {trace}\nhint: {}\n", self.sentence(sees_details), self.next_step())
    }
}

/// Returns the denial for a head to which hyper would respond with this status, and that it left `unread`. `bytes` and
/// `fields` are the limits that applied; `invalid` is said of what is no HTTP.
pub(super) fn bad_head(
    status: StatusCode,
    unread: &[u8],
    bytes: usize,
    fields: usize,
    invalid: &'static str,
) -> Denial {
    match status {
        StatusCode::URI_TOO_LONG => Denial::UrlTooLong,
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => {
            // hyper leaves a long head, but has read one whose body is too long for it.
            let lines = unread.iter().filter(|byte| **byte == b'\n').count();
            match unread.len() >= bytes || lines > fields {
                true => Denial::HeadTooLong { kib: bytes / 1024, fields },
                false => Denial::Request("Content-Length is too large"),
            }
        }
        _ => Denial::Request(invalid),
    }
}

/// Returns the status of a response that hyper itself sends if it cannot parse a head. It has no text.
pub(super) fn automatic_response(bytes: &[u8]) -> Option<StatusCode> {
    let status = bytes.strip_prefix(b"HTTP/1.1 ")?.get(..3)?;
    let statuses =
        [StatusCode::BAD_REQUEST, StatusCode::URI_TOO_LONG, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE];
    let is_whole = bytes.ends_with(b"content-length: 0\r\n\r\n");
    statuses.into_iter().find(|is| is_whole && is.as_str().as_bytes() == status)
}

/// Returns a fixed metrics label for hyper's failure to read a request head.
pub(super) fn header_failure(error: &hyper::Error) -> &'static str {
    if error.is_parse_too_large() {
        "header_too_large"
    } else if error.is_parse() {
        "header_invalid"
    } else {
        "reset"
    }
}

/// Rejects a client that starts with HTTP/2, which this port does not offer. hyper itself sends no response to it.
pub(super) async fn reject_http2(socket: &mut dyn Connection, begin: &[u8]) {
    if begin.starts_with(HTTP_2) {
        debug!("HTTP/2 client rejected, only HTTP/1.1 is served");
        let _ = socket.write_all(NO_HTTP_2.as_bytes()).await;
        let _ = socket.flush().await;
    }
}

/// Rejects a client that starts with the SSH protocol and returns true if it is one. The response is an SSH packet,
/// because ssh displays nothing else.
pub(super) async fn reject_ssh(socket: &mut dyn Connection, begin: &[u8]) -> bool {
    let is_ssh = begin.starts_with(SSH_BEGIN);
    if is_ssh {
        let _ = socket.write_all(&ssh_disconnect(NO_SSH)).await;
        let _ = socket.flush().await;
    }
    is_ssh
}

/// Returns an SSH server's identification line followed by a disconnect packet (RFC 4253, sections 4.2, 6 and 11.1).
fn ssh_disconnect(why: &str) -> Vec<u8> {
    let length = |of: usize| u32::try_from(of).unwrap_or(0).to_be_bytes();
    let mut message = vec![SSH_DISCONNECT];
    message.extend_from_slice(&SSH_BY_APPLICATION.to_be_bytes());
    message.extend_from_slice(&length(why.len()));
    message.extend_from_slice(why.as_bytes());
    message.extend_from_slice(&length(0));
    // The padding is at least four bytes and makes the packet's length a multiple of eight.
    let padding = 4 + (8 - (4 + 1 + message.len() + 4) % 8) % 8;
    let mut packet = b"SSH-2.0-tunnel\r\n".to_vec();
    packet.extend_from_slice(&length(1 + message.len() + padding));
    packet.push(u8::try_from(padding).unwrap_or(0));
    packet.extend_from_slice(&message);
    packet.resize(packet.len() + padding, 0);
    packet
}

/// Returns a response as bytes for an HTTP/1 connection.
pub(super) fn written(version: Version, answer: &Response<Bytes>) -> Bytes {
    let status = answer.status();
    let body = answer.body();
    let usual = status.canonical_reason().unwrap_or_default().as_bytes();
    let phrase = answer.extensions().get::<ReasonPhrase>().map_or(usual, ReasonPhrase::as_bytes);
    let mut text = format!("{version:?} {} ", status.as_str()).into_bytes();
    text.extend_from_slice(phrase);
    for (name, value) in answer.headers() {
        text.extend_from_slice(&[b"\r\n", name.as_str().as_bytes(), b": ", value.as_bytes()].concat());
    }
    text.extend_from_slice(format!("\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes());
    text.extend_from_slice(body);
    text.into()
}

/// Converts a sentence for a status line: printable ASCII, at most [`PHRASE_BYTES`] bytes.
fn phrase(sentence: &str) -> Vec<u8> {
    let plain = |c: char| u8::try_from(c).ok().filter(|b| matches!(b, b' '..=b'~')).unwrap_or(b'?');
    sentence.chars().take(PHRASE_BYTES).map(plain).collect()
}

/// Maximum number of characters of a client's user or certificate name that a denial repeats.
pub(super) const NAME_CHARS: usize = 64;

/// Maximum length of a reason phrase in bytes. With the status it fits on one or two lines of a terminal.
const PHRASE_BYTES: usize = 120;

/// First line of an HTTP/2 connection.
const HTTP_2: &[u8] = b"PRI * HTTP/2.0\r\n";

/// First bytes of an SSH connection.
const SSH_BEGIN: &[u8] = b"SSH-";

/// Metrics label for an ssh client that connects here without a proxy command.
pub(super) const SSH: &str = "ssh_without_proxy_command";

/// Text sent to such an ssh client.
pub(super) const NO_SSH: &str =
    "this port accepts HTTP CONNECT; ssh needs -o ProxyCommand=\"nc -X connect -x HOST:PORT %h %p\" NODE";
const SSH_DISCONNECT: u8 = 1;
const SSH_BY_APPLICATION: u32 = 11;
/// Response to an HTTP/2 client. It is short enough for any socket's empty buffer.
const NO_HTTP_2: &str =
    "HTTP/1.1 400 only HTTP/1.1 is served here\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::paths::node_not_found::NodeNotFound;
    use crate::paths::node_not_found::PeerError;
    use tunnel_proto::frame::ErrorCode;

    use super::*;

    fn offline() -> Denial {
        let missing = NodeNotFound { seen: Some(Duration::from_secs(180)), ..NodeNotFound::default() };
        RouteError::Offline { node: "edge7".parse().unwrap(), missing }.into()
    }

    fn refused_with(code: ErrorCode, reason: &str) -> Denial {
        let refusal = SessionError::new(code, reason);
        RouteError::Refused { node: "edge7".parse().unwrap(), refusal }.into()
    }

    fn phrase_of(answer: &Response<Bytes>) -> String {
        String::from_utf8(answer.extensions().get::<ReasonPhrase>().unwrap().as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn each_denial_has_its_status() {
        let node = || "n".parse().unwrap();
        for (denial, status) in [
            (Denial::BadTarget(NameError::Session), 400),
            (Denial::Forbidden("no".into()), 403),
            (Denial::Method, 405),
            (Denial::Credentials, 407),
            (Denial::Password("ops".into()), 407),
            (Denial::WrongPasswords, 503),
            (Denial::NoNode("10.0.0.1:22".parse().unwrap()), 421),
            (Denial::NoNodeConnected, 502),
            (Denial::NoServerName, 421),
            (Denial::Busy("draining"), 503),
            (RouteError::Busy.into(), 503),
            (offline(), 502),
            (RouteError::Timeout { node: node(), timeout: Duration::ZERO }.into(), 504),
        ] {
            assert_eq!(denial.status(), status, "{denial}");
        }
        let codes = [502, 502, 504, 502, 403, 502, 503, 502, 502, 502, 502];
        for (code, status) in (0..).zip(codes) {
            assert_eq!(refused_with(ErrorCode::from_wire(code), "x").status(), status, "code {code}");
        }
    }

    #[test]
    fn the_reason_phrase_and_the_body_contain_the_cause() {
        let answer = offline().answer(true, "1a2b3c4d");
        assert_eq!(phrase_of(&answer), "node edge7 is not connected, last seen 3 min ago");
        assert_eq!(answer.headers()["connection"], "close");
        assert_eq!(answer.headers()["traceid"], "1a2b3c4d");
        let body = std::str::from_utf8(answer.body()).unwrap();
        assert!(
            body.starts_with(
                "node edge7 is not connected, last seen 3 min ago\ntrace: 1a2b3c4d\nhint: check "
            ),
            "{body}"
        );
    }

    #[test]
    fn denials_reveal_no_addresses_or_times_to_unauthenticated_clients() {
        assert_eq!(offline().sentence(false), "node edge7 is not connected");
        let at = "10.1.2.3:9000".parse().unwrap();
        let trouble = vec![PeerError::NoLink { at, cause: "it is off".into() }];
        let missing = NodeNotFound {
            dns: Some("not in DNS".into()),
            queried_peers: 2,
            trouble,
            ..NodeNotFound::default()
        };
        let nowhere: Denial = RouteError::Offline { node: "edge7".parse().unwrap(), missing }.into();
        assert_eq!(nowhere.sentence(false), "node edge7 is not connected");
        let all = "node edge7 is not connected; not in DNS; not at 2 peers; peer 10.1.2.3:9000 cannot be reached: it is off";
        assert_eq!(nowhere.sentence(true), all);
        let refused = refused_with(ErrorCode::TargetRefused, "10.1.2.3:22 refused the connection");
        assert_eq!(refused.sentence(false), "node edge7: the target refused the connection");
        assert_eq!(refused.sentence(true), "node edge7: 10.1.2.3:22 refused the connection");
    }

    #[test]
    fn denials_reveal_no_services_to_unauthenticated_clients() {
        let service = || "shop/db".to_owned();
        for why in [
            LocateError::NoService(service()),
            LocateError::NoPort { service: service(), port: 5432 },
            LocateError::NoEndpoint(service(), true),
            LocateError::Ambiguous {
                ip: [10, 0, 0, 7].into(),
                one: "shop1".parse().unwrap(),
                other: "shop2".parse().unwrap(),
            },
        ] {
            let denial = Denial::from(why.clone());
            assert_eq!(denial.sentence(true), why.to_string());
            assert!(!denial.sentence(false).contains("shop"), "{denial}");
        }
    }

    #[test]
    fn a_reason_phrase_is_always_printable_and_short() {
        let wild = "line\r\nSet-Cookie: a=\u{e9}\u{7f} ".repeat(40);
        let phrase = phrase_of(&refused_with(ErrorCode::TargetRefused, &wild).answer(true, "t"));
        assert!(phrase.len() <= 120 && phrase.bytes().all(|b| (b' '..=b'~').contains(&b)), "{phrase:?}");
        let phrase = phrase_of(&Denial::Forbidden(wild).answer(true, "bad\ntrace"));
        assert_eq!(phrase.len(), 120);
    }

    #[test]
    fn denials_have_allow_and_proxy_authenticate_headers() {
        assert_eq!(Denial::Method.answer(false, "t").headers()["allow"], "CONNECT");
        let answer = Denial::Credentials.answer(false, "t");
        assert_eq!(answer.headers()["proxy-authenticate"], "Basic realm=\"tunnel\", charset=\"UTF-8\"");
    }
}
