//! Why a client is denied a session, and the HTTP response for each reason.

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, PROXY_AUTHENTICATE};
use http::{HeaderMap, HeaderName, Response, StatusCode, Version};
use hyper::ext::ReasonPhrase;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tracing::debug;

use crate::admin::page::BASIC;
use crate::registry::NodeNotFound;
use crate::route::{RouteError, SessionRouter};
use tunnel_base::addresses::LocateError;
use tunnel_base::names::{NameError, NodeName, Target};
use tunnel_net::tls::error::HandshakeError;
use tunnel_proto::frame::{ErrorCode, SessionError};

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
    TargetTls(HandshakeError),
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
    pub fn answer(&self, trusted: bool, trace: &str) -> Response<Bytes> {
        let sentence = self.sentence(trusted);
        let mut answer = Response::new(Bytes::from(self.body(trusted, trace)));
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
    pub(super) fn text(&self, trace: &str) -> Bytes {
        written(Version::HTTP_11, &self.answer(false, trace))
    }

    fn body(&self, trusted: bool, trace: &str) -> String {
        format!("{}\ntrace: {trace}\nhint: {}\n", self.sentence(trusted), self.next_step())
    }
}

/// Returns the denial for a head to which hyper would respond with this status. `bytes` and `fields` are the limits that
/// applied.
pub(super) fn bad_head(status: StatusCode, bytes: usize, fields: usize) -> Denial {
    match status {
        StatusCode::URI_TOO_LONG => Denial::UrlTooLong,
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => Denial::HeadTooLong { kib: bytes / 1024, fields },
        _ => Denial::Request(
            "the request line or a header field is invalid; an IPv6 address needs brackets: [fd00::1]:22",
        ),
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
pub(super) async fn reject_http2<S: AsyncWrite + Unpin>(socket: &mut S, begin: &[u8]) {
    if begin.starts_with(HTTP_2) {
        debug!("HTTP/2 client rejected, only HTTP/1.1 is served");
        let _ = socket.write_all(NO_HTTP_2.as_bytes()).await;
        let _ = socket.flush().await;
    }
}

/// Rejects a client that starts with the SSH protocol and returns true if it is one. The response is an SSH packet,
/// because ssh displays nothing else.
pub(super) async fn reject_ssh<S: AsyncWrite + Unpin>(socket: &mut S, begin: &[u8]) -> bool {
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
    let (status, body) = (answer.status(), answer.body());
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

// The single table that maps each denial to its response: HTTP status, label for metrics and logs, and hint; for TLS an
// alert.

impl Denial {
    /// Returns the closest fatal TLS alert (RFC 8446, section 6.2), for clients that speak TLS instead of HTTP.
    pub(crate) fn alert(&self) -> Bytes {
        let description = match self {
            Self::Forbidden(_) => ACCESS_DENIED,
            Self::NoServerName | Self::BadTarget(_) => UNRECOGNIZED_NAME,
            _ => INTERNAL_ERROR,
        };
        Bytes::copy_from_slice(&[ALERT, 3, 3, 0, 2, FATAL, description])
    }

    /// Returns the error text. It contains addresses and times of last contact only for `trusted` clients.
    pub fn sentence(&self, trusted: bool) -> String {
        match self {
            Self::Route(RouteError::Offline { node, missing }) if !trusted => {
                let missing =
                    NodeNotFound { unqueried_reason: missing.unqueried_reason, ..NodeNotFound::default() };
                RouteError::Offline { node: node.clone(), missing }.to_string()
            }
            Self::Route(RouteError::Refused { node, refusal }) if !trusted => {
                format!("node {node}: {}", generic_text(refusal.code))
            }
            Self::UpstreamTimeout(_) if !trusted => generic_text(ErrorCode::TargetTimeout).to_owned(),
            Self::UpstreamFailed(_) if !trusted => "invalid response from the target".to_owned(),
            Self::TargetTls(_) if !trusted => "TLS with the target failed".to_owned(),
            Self::Direct(refusal) | Self::DirectDenied(refusal) | Self::UserDenied { refusal, .. }
                if !trusted =>
            {
                generic_text(refusal.code).to_owned()
            }
            Self::NotLocated(LocateError::Ambiguous { ip, .. }) if !trusted => {
                format!("several nodes have the address {ip}")
            }
            Self::NotLocated(LocateError::NoService(_) | LocateError::NoPort { .. }) if !trusted => {
                "the Service or its port does not exist".to_owned()
            }
            Self::NotLocated(LocateError::NoEndpoint(..)) if !trusted => {
                "the Service has no ready endpoint".to_owned()
            }
            other => other.to_string(),
        }
    }

    /// Returns status, label and hint for this denial.
    pub(crate) fn response_row(&self) -> (StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::BadTarget(_) => {
                (S::BAD_REQUEST, "bad_target", "use <node>:<port> as the target, for example node1:22")
            }
            Self::Forbidden(_) => (S::FORBIDDEN, "forbidden", FORBIDDEN_HINT),
            Self::Method => (
                S::METHOD_NOT_ALLOWED,
                "method",
                "use this port as a proxy for CONNECT, as ssh and curl -p do",
            ),
            Self::Body => (S::BAD_REQUEST, "body", "leave out Content-Length and Transfer-Encoding"),
            Self::HeadTooLong { .. } => (
                S::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "head_too_long",
                "send fewer or shorter header fields, such as cookies",
            ),
            Self::UrlTooLong => (
                S::URI_TOO_LONG,
                "url_too_long",
                "shorten the URL, or use CONNECT or mode = \"passthrough\" of [server.https], which have no such limit",
            ),
            Self::Request(_) => {
                (S::BAD_REQUEST, "bad_request", "check what the client, or a proxy in between, sends")
            }
            Self::NoNodeInHost => node_not_named(KUBELET_NODE_HINT),
            Self::NoHost => node_not_named("use the node's name in the URL: http://<node>:<port>/"),
            Self::UpstreamFailed(_) => (S::BAD_GATEWAY, "upstream_no_response", UPSTREAM_HINT),
            Self::UpstreamTimeout(_) => (S::GATEWAY_TIMEOUT, "upstream_timeout", UPSTREAM_HINT),
            Self::TargetTls(fault) => (S::BAD_GATEWAY, "target_tls", target_tls(fault)),
            Self::Credentials => (S::PROXY_AUTHENTICATION_REQUIRED, "credentials_missing", LOGIN_HINT),
            Self::NotBasic => (S::PROXY_AUTHENTICATION_REQUIRED, "credentials_invalid", LOGIN_HINT),
            Self::Password(_) => (S::PROXY_AUTHENTICATION_REQUIRED, "credentials_invalid", PASSWORD_HINT),
            Self::NoNode(_) => node_not_named(
                "use the node's name, or list the address in [server.addresses] of every server",
            ),
            Self::NotLocated(why) => not_located(why),
            Self::OffLimits(_) => (S::FORBIDDEN, "target_forbidden", NODE_NAME_HINT),
            Self::Direct(refusal) => not_dialled(refusal, DIRECT_TARGETS_HINT),
            Self::DirectDenied(refusal) => not_dialled(refusal, EDGE_TARGETS_HINT),
            Self::OwnNode(_) => (
                S::MISDIRECTED_REQUEST,
                "target_is_local_node",
                "list this machine's names and addresses in the client's no_proxy",
            ),
            Self::EdgeOffline => {
                node_not_connected("check /readyz of this edge and what it logs about its link")
            }
            Self::UserOffline(_) => {
                node_not_connected("check this machine's network, and what tunnel proxy logs about its link")
            }
            Self::UserDenied { refusal, .. } => user_denied(refusal),
            Self::NoServerName => node_not_named("connect to the node by its name, not by an address"),
            Self::NoNodeConnected => node_not_connected("check that `tunnel edge` runs on a node"),
            Self::WrongPasswords => (BUSY.0, BUSY.1, "try again in a minute, with the right password"),
            Self::Busy(_) => BUSY,
            Self::Route(why) => not_routed(why),
        }
    }
}

/// Returns status, label and hint for a request that names no node.
fn node_not_named(hint: &'static str) -> (StatusCode, &'static str, &'static str) {
    (StatusCode::MISDIRECTED_REQUEST, "node_not_named", hint)
}

/// Returns status, label and hint if the node, or this edge, has no link.
fn node_not_connected(hint: &'static str) -> (StatusCode, &'static str, &'static str) {
    (StatusCode::BAD_GATEWAY, "node_not_connected", hint)
}

/// Returns the hint for a failed TLS handshake of this process with a target.
fn target_tls(fault: &HandshakeError) -> &'static str {
    match fault {
        fault if fault.is_of_the_certificate() => TARGET_CA_HINT,
        HandshakeError::AlertReceived(_) => TARGET_CERT_HINT,
        _ => TARGET_TLS_HINT,
    }
}

/// Returns status, label and hint for a session that could not be routed.
fn not_routed(why: &RouteError) -> (StatusCode, &'static str, &'static str) {
    match why {
        RouteError::Busy(_) => BUSY,
        RouteError::Offline { missing: NodeNotFound { unqueried_reason: Some(_), .. }, .. } => {
            node_not_connected("check /readyz of the server, which says why it cannot ask the other servers")
        }
        RouteError::Offline { .. } => {
            node_not_connected("check that `tunnel edge` runs on that node and what it logs about its link")
        }
        RouteError::Timeout { .. } => (
            StatusCode::GATEWAY_TIMEOUT,
            "timeout",
            "try again; check how busy that node and its network are",
        ),
        RouteError::Refused { refusal, .. } => refused(refusal),
    }
}

/// Returns status, label and hint for a refusal by the remote end, see docs/protocol.md#codes.
fn refused(refusal: &SessionError) -> (StatusCode, &'static str, &'static str) {
    let (status, next) = match refusal.code {
        ErrorCode::TargetRefused => {
            (StatusCode::BAD_GATEWAY, "check that the service listens on that port of the node")
        }
        ErrorCode::TargetTimeout => (StatusCode::GATEWAY_TIMEOUT, "check that the node can reach the target"),
        ErrorCode::TargetUnreachable => {
            let next = "check that the node can resolve and reach the target; for the target's certificate, check ca in \
                        [edge.target_tls] of that node's config";
            (StatusCode::BAD_GATEWAY, next)
        }
        ErrorCode::NotAllowed => (
            StatusCode::FORBIDDEN,
            "add the target to [edge.allow] targets in that node's config and keep the entries that are there: a list \
             replaces the default",
        ),
        ErrorCode::NodeNotAllowed => (
            StatusCode::FORBIDDEN,
            "add the node to [server.edge_access] nodes in the config of every server",
        ),
        ErrorCode::OwnPort => (
            StatusCode::FORBIDDEN,
            "use another port: no setting opens this one; for metrics use the port of that edge's metrics_listen",
        ),
        ErrorCode::Overloaded => (
            StatusCode::SERVICE_UNAVAILABLE,
            "try again in a moment, or raise the limit of that node's edge: [edge.session] buffer_memory in its config, or its \
             open files (LimitNOFILE)",
        ),
        ErrorCode::NodeNotConnected => (
            StatusCode::BAD_GATEWAY,
            "check that `tunnel edge` runs on that node; if it is only moving to another server, try again",
        ),
        ErrorCode::NoError
        | ErrorCode::UnknownSession
        | ErrorCode::ProtocolError
        | ErrorCode::Cancelled
        | ErrorCode::ConnectionFailed
        | ErrorCode::Internal => (StatusCode::BAD_GATEWAY, "search the server's log for the trace"),
    };
    (status, refusal.code.name(), next)
}

/// Returns status, label and hint for a user's session that was refused at the other end of her link.
fn user_denied(refusal: &SessionError) -> (StatusCode, &'static str, &'static str) {
    let (status, name, next) = refused(refusal);
    let next = match refusal.code {
        ErrorCode::NotAllowed => {
            "ask an operator of the servers: a rule of [server.clients] must name you, the node and the port, and [edge.allow] \
             of the node its target; a revoked device needs a new invitation"
        }
        // Also the code for a node that no server has.
        ErrorCode::TargetUnreachable => {
            "check that `tunnel edge` runs on that node, and that the node can resolve and reach the target"
        }
        _ => next,
    };
    (status, name, next)
}

/// Returns the text of such a refusal. A server that denies access names the node itself.
fn user_denied_text(node: &NodeName, refusal: &SessionError) -> String {
    match refusal.code {
        ErrorCode::NotAllowed => refusal.to_string(),
        _ => format!("node {node}: {refusal}"),
    }
}

/// Returns status, label and hint for a target that cannot be located.
fn not_located(why: &LocateError) -> (StatusCode, &'static str, &'static str) {
    match why {
        LocateError::Ambiguous { .. } => {
            (StatusCode::MISDIRECTED_REQUEST, "address_ambiguous", "use the node's name")
        }
        LocateError::NoAddress(_) => (
            StatusCode::MISDIRECTED_REQUEST,
            "address_unknown",
            "list the node's address in [server.addresses] of every server, or let the servers get it from Kubernetes",
        ),
        LocateError::NoEndpoint(..) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "no_ready_endpoint",
            "check that the pods of the Service are ready",
        ),
        LocateError::NoService(_) | LocateError::NoPort { .. } => {
            (StatusCode::BAD_GATEWAY, "service_unknown", "check the name and the ports of the Service")
        }
    }
}

/// Returns status, label and hint for a target that a server did not dial; `allow` is the hint for allowing it.
fn not_dialled(refusal: &SessionError, allow: &'static str) -> (StatusCode, &'static str, &'static str) {
    let (status, name, _) = refused(refusal);
    let next = match refusal.code {
        ErrorCode::NotAllowed => allow,
        ErrorCode::OwnPort => "use another port: no setting opens this one",
        ErrorCode::Overloaded => BUSY.2,
        _ => {
            "no node is known by that name or address, so the server dialled it itself: use the node's name, list its address \
             in [server.addresses], or check that the server reaches the target"
        }
    };
    (status, name, next)
}

/// Returns the meaning of a code without the remote end's own text, which may contain addresses.
fn generic_text(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::TargetRefused => "the target refused the connection",
        ErrorCode::TargetTimeout => "the target did not answer in time",
        ErrorCode::TargetUnreachable => "the target cannot be reached",
        ErrorCode::NotAllowed | ErrorCode::OwnPort => "the target is not allowed",
        ErrorCode::NodeNotAllowed => "edges may not reach that node",
        ErrorCode::NodeNotConnected => "the node is not connected",
        ErrorCode::Overloaded => "the node accepts no more sessions",
        ErrorCode::NoError | ErrorCode::UnknownSession | ErrorCode::Cancelled => "the session was cancelled",
        ErrorCode::ConnectionFailed => "the connection at the other end failed",
        ErrorCode::ProtocolError => "protocol error",
        ErrorCode::Internal => "internal error",
    }
}

/// Response if a limit is reached or the process is stopping.
const BUSY: (StatusCode, &str, &str) =
    (StatusCode::SERVICE_UNAVAILABLE, "overloaded", "try again in a moment");
/// Hint for missing credentials. `nc` can prompt for a password only at a terminal.
const LOGIN_HINT: &str = "give the proxy a user name and a password: curl -x http://user:password@..., ssh with \
                             ProxyCommand \"ncat --proxy-auth user:password ...\"; nc -P user prompts for the password, \
                             but only at a terminal";
const PASSWORD_HINT: &str =
    "check the user and the password; the operator of this port finds the users in the file set as users";
const FORBIDDEN_HINT: &str = "ask the operator of this port to allow it in allow_from, names or rules";
const NODE_NAME_HINT: &str = "use a node's name; for a port on the node's loopback use <node>:<port>";
/// Hint at a port for kubelets if the node is unknown.
const KUBELET_NODE_HINT: &str = "use the node's name; kube-apiserver always does with --kubelet-certificate-authority; without it, a \
                       server with access to Kubernetes finds the node by the pod";
/// Hint for an invalid response.
const UPSTREAM_HINT: &str = "check the log of the service at that port of the node and whether it speaks HTTP; if it requires a \
                         client certificate, check target_cert of [server.https] or, without that, cert and key of \
                         [edge.target_tls] in that node's config";
/// Hint if a target's certificate is not trusted.
const TARGET_CA_HINT: &str = "set target_ca of [server.https] to the CA that signs kubelets' certificates; each \
                                  certificate must contain its node's name, as those issued by the cluster do \
                                  (serverTLSBootstrap); for kubelets' self-signed certificates, set \
                                  target_insecure_skip_verify = true";
/// Hint if a target does not trust this process's certificate.
const TARGET_CERT_HINT: &str = "check which CA signed target_cert of [server.https]: for a kubelet it must be in its \
                               --client-ca-file";
/// Hint for other failures of a TLS handshake with a target.
const TARGET_TLS_HINT: &str = "check the target's log; a kubelet with serverTLSBootstrap fails like this until its certificate \
                          request is approved: kubectl get csr";
/// Hint for a target that servers may not dial for clients.
const DIRECT_TARGETS_HINT: &str = "add the target to [server.direct] targets of every server";
/// Hint for a target that servers may not dial for edges.
const EDGE_TARGETS_HINT: &str = "add the target to [server.edge_access] targets of every server";
/// TLS record type of alerts.
const ALERT: u8 = 21;
/// Level of an alert that ends the connection.
const FATAL: u8 = 2;
const ACCESS_DENIED: u8 = 49;
const INTERNAL_ERROR: u8 = 80;
const UNRECOGNIZED_NAME: u8 = 112;

// The trace ID of a request, which operators and a client's own tracing use to find the request's log lines.

/// Returns the client's trace ID, or a new one if it sent none.
///
/// A short, printable `Traceid` takes precedence over the trace ID of a well-formed `traceparent` (W3C Trace Context).
/// The trace ID appears only in logs and responses.
pub(super) fn trace_of(head: &HeaderMap) -> String {
    let given = text(head, TRACE.as_str()).filter(|given| (1..=MAX_BYTES).contains(&given.len()));
    match given.filter(|given| given.bytes().all(|b| b.is_ascii_graphic())) {
        Some(given) => given.to_owned(),
        None => text(head, TRACEPARENT).and_then(trace_id).map_or_else(new_trace, str::to_owned),
    }
}

fn text<'a>(head: &'a HeaderMap, name: &str) -> Option<&'a str> {
    head.get(name)?.to_str().ok()
}

/// Returns a new trace ID. 8 hex digits are enough to distinguish the requests in one log.
pub(super) fn new_trace() -> String {
    format!("{:08x}", rand::random::<u32>())
}

/// Returns the trace ID of a `traceparent`, or `None` if it is malformed.
///
/// Its fields are version, trace ID, parent ID and flags; the two IDs must not be all zeros. Later versions may append
/// fields.
fn trace_id(parent: &str) -> Option<&str> {
    let mut parts = parent.splitn(5, '-');
    let mut part = |digits: usize| {
        let part = parts.next()?;
        let hex = part.len() == digits && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        hex.then_some(part)
    };
    let (version, id, parent, _flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
    let whole = version != "ff" && (version != "00" || parts.next().is_none());
    let named = [id, parent].iter().all(|part| part.bytes().any(|b| b != b'0'));
    (whole && named).then_some(id)
}

/// Header in which SuperEdge passes its trace ID, in requests and responses.
pub(crate) const TRACE: HeaderName = HeaderName::from_static("traceid");

const TRACEPARENT: &str = "traceparent";

/// Maximum length in bytes of a trace ID that is accepted from a client.
const MAX_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::registry::NodeNotFound;
    use crate::registry::peers::peer::PeerError;
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
            (RouteError::Busy("full").into(), 503),
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
        assert_eq!(phrase_of(&answer), "node edge7 is not connected, last seen 3m ago");
        assert_eq!(answer.headers()["connection"], "close");
        assert_eq!(answer.headers()["traceid"], "1a2b3c4d");
        let body = std::str::from_utf8(answer.body()).unwrap();
        assert!(
            body.starts_with("node edge7 is not connected, last seen 3m ago\ntrace: 1a2b3c4d\nhint: check "),
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

#[cfg(test)]
mod statuses_tests {
    use tunnel_base::metrics::{CODES, DENIALS};

    use super::*;

    #[test]
    fn a_denials_hint_is_for_the_party_that_can_act() {
        let refused = |code| refused(&SessionError::new(code, "whatever the sentence says")).2;
        let cloud = |code| Denial::DirectDenied(SessionError::new(code, "x")).next_step();
        for (next, says) in [
            (refused(ErrorCode::NotAllowed), "[edge.allow] targets in that node's config"),
            (refused(ErrorCode::NodeNotAllowed), "[server.edge_access] nodes"),
            (refused(ErrorCode::OwnPort), "no setting opens this one"),
            (cloud(ErrorCode::NotAllowed), "[server.edge_access] targets"),
            (cloud(ErrorCode::OwnPort), "no setting opens this one"),
            (Denial::Credentials.next_step(), "only at a terminal"),
            (Denial::Password("ops".into()).next_step(), "check the user and the password"),
            (Denial::WrongPasswords.next_step(), "in a minute"),
            (Denial::Busy("full").next_step(), "in a moment"),
        ] {
            assert!(next.contains(says), "{next}");
        }
        assert!(!refused(ErrorCode::NodeNotAllowed).contains("[edge.allow]"));
    }

    #[test]
    fn the_http_errors_reference_has_a_row_for_each_status_and_label() {
        let reference = std::fs::read_to_string("docs/reference/http-errors.md").unwrap();
        let node = || "node1".parse().unwrap();
        let codes = (0..11).map(|code| SessionError::new(ErrorCode::from_wire(code), "x"));
        let mut denials: Vec<Denial> =
            codes.map(|refusal| RouteError::Refused { node: node(), refusal }.into()).collect();
        denials.extend([
            Denial::BadTarget(NameError::Session),
            Denial::Forbidden(String::new()),
            Denial::Method,
            Denial::Body,
            Denial::Request(""),
            Denial::NoHost,
            Denial::UpstreamFailed(String::new()),
            Denial::UpstreamTimeout(String::new()),
            Denial::TargetTls(HandshakeError::UnknownIssuer),
            Denial::Credentials,
            Denial::NotBasic,
            Denial::Password(String::new()),
            LocateError::NoAddress(node()).into(),
            LocateError::NoService(String::new()).into(),
            LocateError::NoEndpoint(String::new(), true).into(),
            Denial::OffLimits("127.0.0.1:22".parse().unwrap()),
            Denial::OwnNode("node1:22".parse().unwrap()),
            Denial::EdgeOffline,
            Denial::UserOffline(String::new()),
            Denial::Busy(""),
            RouteError::Timeout { node: node(), timeout: std::time::Duration::ZERO }.into(),
        ]);
        for denial in denials {
            let (status, label, _) = denial.response_row();
            assert!(
                CODES.contains(&label) || DENIALS.contains(&label),
                "{label} is not exposed from the start"
            );
            let has_row = |line: &str| {
                let mut cells = line.split(" | ");
                cells.next() == Some(&format!("| {}", status.as_u16()))
                    && cells.next().is_some_and(|labels| labels.contains(&format!("`{label}`")))
            };
            assert!(reference.lines().any(has_row), "{} {label}", status.as_u16());
        }
    }

    #[test]
    fn the_hint_for_a_targets_tls_error_depends_on_the_error() {
        use tokio_rustls::rustls::AlertDescription::{InternalError, UnknownCA};
        let next = |fault| Denial::TargetTls(fault).next_step();
        for fault in [
            HandshakeError::UnknownIssuer,
            HandshakeError::Name(vec!["node9".to_owned()]),
            HandshakeError::CaUsedAsEndEntity,
        ] {
            assert!(next(fault.clone()).contains("target_ca of [server.https]"), "{fault}");
        }
        assert!(next(HandshakeError::AlertReceived(UnknownCA)).contains("target_cert of [server.https]"));
        assert!(next(HandshakeError::Other(format!("alert {InternalError:?}"))).contains("kubectl get csr"));
    }

    #[test]
    fn a_denial_has_its_tls_alert() {
        for (denial, description) in
            [(Denial::NoServerName, 112), (Denial::Forbidden(String::new()), 49), (Denial::Busy("full"), 80)]
        {
            assert_eq!(denial.alert()[..], [21, 3, 3, 0, 2, 2, description]);
        }
    }
}

#[cfg(test)]
mod trace_tests {
    use super::*;

    fn is_generated(trace: &str) -> bool {
        trace.len() == 8 && trace.bytes().all(|b| b.is_ascii_hexdigit())
    }

    #[test]
    fn a_clients_trace_is_kept_only_if_it_is_short_and_printable() {
        let with = |value: &[u8]| {
            let value = http::HeaderValue::from_bytes(value).unwrap();
            trace_of(&HeaderMap::from_iter([(TRACE, value)]))
        };
        assert_eq!(with(b"3f2a-x"), "3f2a-x");
        for bad in [&b""[..], b"a b", b"\xff", &[b'a'; 65]] {
            assert!(is_generated(&with(bad)), "{bad:?}");
        }
        assert_ne!(trace_of(&HeaderMap::new()), trace_of(&HeaderMap::new()));
    }

    #[test]
    fn a_valid_traceparent_provides_the_trace_id() {
        const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        let with = |value: &str| {
            let value = http::HeaderValue::from_bytes(value.as_bytes()).unwrap();
            trace_of(&HeaderMap::from_iter([(http::HeaderName::from_static(TRACEPARENT), value)]))
        };
        for good in
            [format!("00-{ID}-00f067aa0ba902b7-01"), format!("cc-{ID}-00f067aa0ba902b7-01-what-comes")]
        {
            assert_eq!(with(&good), ID, "{good}");
        }
        for bad in [
            String::new(),
            ID.to_owned(),
            format!("00-{ID}-00f067aa0ba902b7"),
            format!("00-{ID}-00f067aa0ba902b7-01-more"),
            format!("ff-{ID}-00f067aa0ba902b7-01"),
            format!("00-{ID}-0000000000000000-01"),
            format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            format!("00-{}-00f067aa0ba902b7-01", ID.to_uppercase()),
            format!("00-{}-00f067aa0ba902b7-01", "é".repeat(16)),
            format!("00-{ID}x-00f067aa0ba902b7-01"),
        ] {
            assert!(is_generated(&with(&bad)), "{bad}");
        }
        let both = [("traceid", "mine"), (TRACEPARENT, &format!("00-{ID}-00f067aa0ba902b7-01"))];
        let both = both.map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
        assert_eq!(trace_of(&HeaderMap::from_iter(both)), "mine");
    }
}
