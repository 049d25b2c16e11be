//! What the front ends share: why a client gets no session, and the HTTP answer for each cause.

pub mod admission;
pub mod auth;
pub mod authenticated;
pub mod connect;
pub mod forward;
pub mod http_proxy;
pub mod https;
pub mod intercept;
pub mod requests;
pub mod tcp;

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, PROXY_AUTHENTICATE};
use http::{HeaderMap, HeaderName, Response, StatusCode, Version};
use hyper::ext::ReasonPhrase;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tracing::debug;

use crate::registry::NodeNotFound;
use crate::route::RouteError;
use tunnel_base::addresses::LocateError;
use tunnel_base::names::{NameError, Target};
use tunnel_net::tls::handshake::HandshakeError;
use tunnel_proto::frame::{ErrorCode, SessionError};

/// Why a client gets no session.
#[derive(Debug, thiserror::Error)]
pub enum Denial {
    /// The request names no host and port; the client's command line is wrong.
    #[error("bad target: {0}")]
    BadTarget(#[from] NameError),
    /// `allow_from` or `rules` in the config forbid it.
    #[error("{0}")]
    Forbidden(String),
    /// The method is not CONNECT: the client takes this port for a web server or a plain proxy.
    #[error("only CONNECT is served on this port")]
    Method,
    /// The CONNECT announces a body.
    #[error("a CONNECT has no body: leave out Content-Length and Transfer-Encoding")]
    Body,
    /// An HTTP request that is not passed on, as it could be read in more than one way.
    #[error("bad request: {0}")]
    Request(&'static str),
    /// Nothing in the request says for which node it is.
    #[error("neither the Host nor a TLS server name is a node's, and the path is no known pod's")]
    NoNodeInHost,
    /// The same of a request without TLS.
    #[error("the Host is no node's name, and the path is no known pod's")]
    NoHost,
    /// The target got a request, and gave no answer that could be passed on.
    #[error("the target gave no proper answer: {0}")]
    UpstreamFailed(String),
    /// The target was reached, and the TLS that this process speaks with it came to nothing.
    #[error("TLS with the target failed: {0}")]
    TargetTls(HandshakeError),
    /// User and password are missing.
    #[error("this proxy needs a user and a password")]
    Credentials,
    /// There is no such user, or the password is wrong.
    #[error("user {0:?} is not known here, or the password is wrong")]
    Password(String),
    /// This user has given too many wrong passwords from this address.
    #[error("too many wrong passwords of this user from your address: wait a minute")]
    WrongPasswords,
    /// The target is an address, and no node is known to have it.
    #[error("the node of {0} cannot be told")]
    NoNode(Target),
    /// A TLS client that names no server, so that the node cannot be told.
    #[error(
        "the client's TLS hello names no node (it has no SNI): for exec, attach and port-forward kube-apiserver names one \
         only if it is started with --kubelet-certificate-authority"
    )]
    NoServerName,
    /// The target is known, and at no node, or at two.
    #[error(transparent)]
    NotLocated(#[from] LocateError),
    /// Loopback, link-local, a cloud's metadata and the like: no pod dials them for clients.
    #[error("{0} is no target: the cloud never dials itself, its links or its metadata for clients")]
    OffLimits(Target),
    /// The target is at no node, and this process could not dial it.
    #[error("{0}")]
    Direct(SessionError),
    /// The port leads to whichever node there is, and there is none.
    #[error("no node is linked to this pod, and none is known to be linked to another")]
    NoNodeConnected,
    /// The target is the edge's own machine, or is called so. Usual cause: a program that sends all it asks for to its
    /// proxy.
    #[error("{0} is at this machine itself: ask there, not through its proxy")]
    OwnNode(Target),
    /// The edge has no link.
    #[error("this edge is not linked to the cloud")]
    EdgeOffline,
    /// The cloud did not dial the target for this edge.
    #[error("{0}")]
    DirectDenied(SessionError),
    /// This process has reached a limit, or is stopping.
    #[error("{0}")]
    Busy(&'static str),
    /// No session could be opened.
    #[error(transparent)]
    Route(#[from] RouteError),
}

impl Denial {
    /// The one for a certificate with no name that this front end lets in.
    fn unknown(names: &[String], front: &str) -> Self {
        let shown: String =
            names.first().into_iter().flat_map(|name| name.chars()).take(NAME_CHARS).collect();
        Self::Forbidden(format!(
            "no name (CN or DNS) in your certificate is allowed: {shown:?} is not in names of [mode.cloud.{front}]"
        ))
    }

    /// The status of the answer.
    pub fn status(&self) -> StatusCode {
        self.response_row().0
    }

    /// A fixed label for metrics and the access log.
    pub fn name(&self) -> &'static str {
        self.response_row().1
    }

    /// What the operator or the user can do about it: the answer's line `next:`.
    pub fn next_step(&self) -> &'static str {
        self.response_row().2
    }

    /// The whole answer. The reason phrase carries the cause, since ssh behind its helpers shows nothing else.
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
            Self::Credentials | Self::Password(_) => {
                headers.insert(PROXY_AUTHENTICATE, HeaderValue::from_static(CHALLENGE))
            }
            _ => None,
        };
        answer
    }

    /// The whole answer as text, for a client that is rejected before its head is read.
    fn text(&self, trace: &str) -> Bytes {
        written(Version::HTTP_11, &self.answer(false, trace))
    }

    fn body(&self, trusted: bool, trace: &str) -> String {
        format!("{}\ntrace: {trace}\nnext: {}\n", self.sentence(trusted), self.next_step())
    }
}

/// Why hyper has found no head, as a fixed word for metrics.
fn no_head(error: &hyper::Error) -> &'static str {
    if error.is_parse_too_large() {
        "long_head"
    } else if error.is_parse() {
        "bad_head"
    } else {
        "reset"
    }
}

/// Answers a client whose first bytes are those of HTTP/2, which nobody has offered it: hyper has no answer for it.
async fn reject_http2<S: AsyncWrite + Unpin>(socket: &mut S, begin: &[u8]) {
    if begin.starts_with(HTTP_2) {
        debug!("the client speaks HTTP/2 without asking for it: only HTTP/1.1 is served here");
        let _ = socket.write_all(NO_HTTP_2.as_bytes()).await;
        let _ = socket.flush().await;
    }
}

/// Answers a client whose first bytes are those of ssh: in ssh's own words, as it shows no others. Whether it is one.
async fn reject_ssh<S: AsyncWrite + Unpin>(socket: &mut S, begin: &[u8]) -> bool {
    let is_ssh = begin.starts_with(SSH_BEGIN);
    if is_ssh {
        let _ = socket.write_all(&ssh_disconnect(NO_SSH)).await;
        let _ = socket.flush().await;
    }
    is_ssh
}

/// A server's first line, and the packet with which it breaks off: RFC 4253, 4.2, 6 and 11.1.
fn ssh_disconnect(why: &str) -> Vec<u8> {
    let length = |of: usize| u32::try_from(of).unwrap_or(0).to_be_bytes();
    let mut said = vec![SSH_DISCONNECT];
    said.extend_from_slice(&SSH_BY_APPLICATION.to_be_bytes());
    said.extend_from_slice(&length(why.len()));
    said.extend_from_slice(why.as_bytes());
    said.extend_from_slice(&length(0));
    // At least four bytes, and the whole is a multiple of eight.
    let padding = 4 + (8 - (4 + 1 + said.len() + 4) % 8) % 8;
    let mut packet = b"SSH-2.0-tunnel\r\n".to_vec();
    packet.extend_from_slice(&length(1 + said.len() + padding));
    packet.push(u8::try_from(padding).unwrap_or(0));
    packet.extend_from_slice(&said);
    packet.resize(packet.len() + padding, 0);
    packet
}

/// An answer as it goes over an HTTP/1 connection.
fn written(version: Version, answer: &Response<Bytes>) -> Bytes {
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

/// A sentence fit for a status line: printable ASCII, cut to its limit.
fn phrase(sentence: &str) -> Vec<u8> {
    let plain = |c: char| u8::try_from(c).ok().filter(|b| matches!(b, b' '..=b'~')).unwrap_or(b'?');
    sentence.chars().take(PHRASE_BYTES).map(plain).collect()
}

/// How much of a client's own name for itself, in a certificate or beside a password, is repeated where it is refused.
const NAME_CHARS: usize = 64;

/// Longest reason phrase in bytes: what fits beside the status on one line of a terminal or two.
const PHRASE_BYTES: usize = 120;

/// How HTTP/2 begins.
const HTTP_2: &[u8] = b"PRI * HTTP/2.0\r\n";

/// How ssh begins.
const SSH_BEGIN: &[u8] = b"SSH-";

/// Why a client gets no session that has come here with ssh itself, as a fixed word.
const SSH: &str = "ssh_without_proxy_command";

/// What it is told.
const NO_SSH: &str =
    "this port takes HTTP CONNECT; ssh needs -o ProxyCommand=\"nc -X connect -x HOST:PORT %h %p\" NODE";
const SSH_DISCONNECT: u8 = 1;
const SSH_BY_APPLICATION: u32 = 11;
/// Short enough for any socket's empty buffer.
const NO_HTTP_2: &str =
    "HTTP/1.1 400 only HTTP/1.1 is served here\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// The value of `Proxy-Authenticate` in a 407.
const CHALLENGE: &str = "Basic realm=\"tunnel\"";

// The one table from what went wrong to an answer: in HTTP status, label for metrics and logs, and next step; in TLS an
// alert.

impl Denial {
    /// The answer where TLS comes in place of HTTP: the fatal alert that is closest, RFC 8446 6.2.
    pub(crate) fn alert(&self) -> Bytes {
        let description = match self {
            Self::Forbidden(_) => ACCESS_DENIED,
            Self::NoServerName | Self::BadTarget(_) => UNRECOGNIZED_NAME,
            _ => INTERNAL_ERROR,
        };
        Bytes::copy_from_slice(&[ALERT, 3, 3, 0, 2, FATAL, description])
    }

    /// What went wrong. A client that is not `trusted` is shown neither addresses nor times of last contact.
    pub fn sentence(&self, trusted: bool) -> String {
        match self {
            Self::Route(RouteError::Offline { node, .. }) if !trusted => {
                RouteError::Offline { node: node.clone(), missing: NodeNotFound::default() }.to_string()
            }
            Self::Route(RouteError::Refused { node, refusal }) if !trusted => {
                format!("node {node}: {}", in_general(refusal.code))
            }
            Self::UpstreamFailed(_) if !trusted => "the target gave no proper answer".to_owned(),
            Self::TargetTls(_) if !trusted => "TLS with the target failed".to_owned(),
            Self::Direct(refusal) | Self::DirectDenied(refusal) if !trusted => {
                in_general(refusal.code).to_owned()
            }
            Self::NotLocated(LocateError::Ambiguous { ip, .. }) if !trusted => {
                format!("{ip} is an address at several nodes")
            }
            Self::NotLocated(LocateError::NoService(_) | LocateError::NoPort { .. }) if !trusted => {
                "there is no such Service, or it has no such port".to_owned()
            }
            Self::NotLocated(LocateError::NoEndpoint(..)) if !trusted => {
                "the Service has no ready endpoint".to_owned()
            }
            other => other.to_string(),
        }
    }

    /// Status, fixed word and next step for each cause.
    pub(crate) fn response_row(&self) -> (StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::BadTarget(_) => {
                (S::BAD_REQUEST, "bad_target", "ask for <node>:<port>, for example node1:22")
            }
            Self::Forbidden(_) => (
                S::FORBIDDEN,
                "forbidden",
                "ask whoever runs this port to allow it there in allow_from, names or rules",
            ),
            Self::Method => (
                S::METHOD_NOT_ALLOWED,
                "method",
                "use this port as a proxy for CONNECT, as ssh and curl -p do",
            ),
            Self::Body => (S::BAD_REQUEST, "body", "leave out Content-Length and Transfer-Encoding"),
            Self::Request(_) => {
                (S::BAD_REQUEST, "bad_request", "see what the client, or a proxy before it, sends")
            }
            Self::NoNodeInHost => (S::MISDIRECTED_REQUEST, "no_node", NO_NODE),
            Self::NoHost => {
                (S::MISDIRECTED_REQUEST, "no_node", "ask by the node's name: http://<node>:<port>/")
            }
            Self::UpstreamFailed(_) => (S::BAD_GATEWAY, "no_answer", NO_ANSWER),
            Self::TargetTls(fault) => (S::BAD_GATEWAY, "target_tls", target_tls(fault)),
            Self::Credentials => (S::PROXY_AUTHENTICATION_REQUIRED, "credentials", GIVE_PASSWORD),
            Self::Password(_) => (S::PROXY_AUTHENTICATION_REQUIRED, "password", CHECK_PASSWORD),
            Self::NoNode(_) => (
                S::MISDIRECTED_REQUEST,
                "no_node",
                "ask for the node by its name, or list the address in [mode.cloud.addresses] of every pod",
            ),
            Self::NotLocated(why) => not_located(why),
            Self::OffLimits(_) => (
                S::FORBIDDEN,
                "off_limits",
                "ask for a node by its name; for its own loopback, as <node>:<port>",
            ),
            Self::Direct(refusal) => not_dialled(refusal, ALLOW_CLIENTS),
            Self::DirectDenied(refusal) => not_dialled(refusal, ALLOW_EDGES),
            Self::OwnNode(_) => (
                S::MISDIRECTED_REQUEST,
                "own_node",
                "list this machine's names and addresses in the client's no_proxy",
            ),
            Self::EdgeOffline => {
                (S::BAD_GATEWAY, "offline", "see /readyz of this edge, and what it logs about its link")
            }
            Self::NoServerName => {
                (S::MISDIRECTED_REQUEST, "no_node", "connect to the node by its name, not by an address")
            }
            Self::NoNodeConnected => {
                (S::BAD_GATEWAY, "offline", "see whether `tunnel --m=edge` runs on a node")
            }
            Self::WrongPasswords => (BUSY.0, BUSY.1, "try again in a minute, with the right password"),
            Self::Busy(_) => BUSY,
            Self::Route(why) => not_routed(why),
        }
    }
}

/// What to do about a target with which this process could not speak TLS.
fn target_tls(fault: &HandshakeError) -> &'static str {
    match fault {
        fault if fault.is_of_the_certificate() => TARGET_CERTIFICATE,
        HandshakeError::AlertReceived(_) => OUR_CERTIFICATE,
        _ => TARGET_TLS,
    }
}

/// The same for a session that found no way.
fn not_routed(why: &RouteError) -> (StatusCode, &'static str, &'static str) {
    match why {
        RouteError::Busy(_) => BUSY,
        RouteError::Offline { .. } => (
            StatusCode::BAD_GATEWAY,
            "offline",
            "check that `tunnel --m=edge` runs on that node, and read what it logs about its link",
        ),
        RouteError::Timeout { .. } => (
            StatusCode::GATEWAY_TIMEOUT,
            "timeout",
            "try again; check how busy that node and its network are",
        ),
        RouteError::Refused { refusal, .. } => refused(refusal),
    }
}

/// The same for a refusal by the far end, docs/protocol.md#codes.
fn refused(refusal: &SessionError) -> (StatusCode, &'static str, &'static str) {
    let (status, next) = match refusal.code {
        ErrorCode::TargetRefused => {
            (StatusCode::BAD_GATEWAY, "check that the service listens on that port of the node")
        }
        ErrorCode::TargetTimeout => (StatusCode::GATEWAY_TIMEOUT, "check that the node can reach the target"),
        ErrorCode::TargetUnreachable => {
            let next = "check that the node can resolve and reach the target; for a target's certificate, ca in \
                        [mode.edge.https] of that node's config";
            (StatusCode::BAD_GATEWAY, next)
        }
        ErrorCode::NotAllowed => (
            StatusCode::FORBIDDEN,
            "add the target to [mode.edge.allow] targets in that node's config, and keep what stands there: a list stands alone",
        ),
        ErrorCode::NodeNotAllowed => {
            (StatusCode::FORBIDDEN, "add the node to [mode.cloud.allow] nodes in the config of every pod")
        }
        ErrorCode::OwnPort => (
            StatusCode::FORBIDDEN,
            "ask for another port: no setting opens this one; for metrics, ask for the port of that edge's metrics_listen",
        ),
        ErrorCode::Overloaded => (
            StatusCode::SERVICE_UNAVAILABLE,
            "try again in a moment, or raise [mode.edge.session] memory in that node's config",
        ),
        ErrorCode::NodeNotConnected => (
            StatusCode::BAD_GATEWAY,
            "check that `tunnel --m=edge` runs on that node; if it is only moving to another pod, try again",
        ),
        ErrorCode::NoError
        | ErrorCode::UnknownSession
        | ErrorCode::ProtocolError
        | ErrorCode::Cancelled
        | ErrorCode::Internal => (StatusCode::BAD_GATEWAY, "search the pod's log for the trace"),
    };
    (status, refusal.code.name(), next)
}

/// The same for a target that is nowhere.
fn not_located(why: &LocateError) -> (StatusCode, &'static str, &'static str) {
    match why {
        LocateError::Ambiguous { .. } => {
            (StatusCode::MISDIRECTED_REQUEST, "ambiguous", "ask for the node by its name")
        }
        LocateError::NoAddress(_) => (
            StatusCode::MISDIRECTED_REQUEST,
            "no_address",
            "list the node's address in [mode.cloud.addresses] of every pod, or let the pods ask Kubernetes for it",
        ),
        LocateError::NoEndpoint(..) => {
            (StatusCode::SERVICE_UNAVAILABLE, "no_endpoint", "check that the pods of the Service are ready")
        }
        LocateError::NoService(_) | LocateError::NoPort { .. } => {
            (StatusCode::BAD_GATEWAY, "no_service", "check the name and the ports of the Service")
        }
    }
}

/// The same for a target that a pod could not dial; `allow` says how to let it.
fn not_dialled(refusal: &SessionError, allow: &'static str) -> (StatusCode, &'static str, &'static str) {
    let (status, name, _) = refused(refusal);
    let next = match refusal.code {
        ErrorCode::NotAllowed => allow,
        ErrorCode::OwnPort => "ask for another port: no setting opens this one",
        ErrorCode::Overloaded => BUSY.2,
        _ => "check that the pod can resolve and reach the target",
    };
    (status, name, next)
}

/// What a code means, without the far end's own text, which may hold addresses.
fn in_general(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::TargetRefused => "the target refused the connection",
        ErrorCode::TargetTimeout => "the target did not answer in time",
        ErrorCode::TargetUnreachable => "the target cannot be reached",
        ErrorCode::NotAllowed | ErrorCode::OwnPort => "the target is not allowed",
        ErrorCode::NodeNotAllowed => "edges may not reach that node",
        ErrorCode::NodeNotConnected => "the node is not here",
        ErrorCode::Overloaded => "the node can take no more sessions",
        ErrorCode::NoError | ErrorCode::UnknownSession | ErrorCode::Cancelled => "the session was given up",
        ErrorCode::ProtocolError => "the protocol was violated",
        ErrorCode::Internal => "internal error",
    }
}

/// There is no room, or no more work is taken.
const BUSY: (StatusCode, &str, &str) = (StatusCode::SERVICE_UNAVAILABLE, "busy", "try again in a moment");
/// Whoever has no terminal cannot be asked by `nc`.
const GIVE_PASSWORD: &str = "give the proxy a user and a password: curl -x http://user:password@..., ssh with \
                             ProxyCommand \"ncat --proxy-auth user:password ...\"; nc -P user asks for the password, and \
                             only at a terminal";
const CHECK_PASSWORD: &str = "check the user and the password; whoever runs this port finds the users in the file that users names there";
/// At a port for kubelets.
const NO_NODE: &str = "ask by the node's name; kube-apiserver always does with --kubelet-certificate-authority, and without \
                       it a pod that may ask Kubernetes knows where pods are";
/// A target that was reached has said nothing of use.
const NO_ANSWER: &str = "see what the service at that port of the node logs, whether it speaks HTTP, and, if it asks for a \
                         client's certificate, what it was shown: target_cert of [mode.cloud.https], or else cert and key of \
                         [mode.edge.https] in that node's config";
/// A target's certificate will not do.
const TARGET_CERTIFICATE: &str = "name the authority that signs kubelets' certificates in target_ca of [mode.cloud.https]; \
                                  each certificate has to carry its node's name, as those have that kubelets ask the \
                                  cluster for (serverTLSBootstrap); for those that kubelets have signed themselves, set \
                                  target_insecure = true";
/// A target does not take ours.
const OUR_CERTIFICATE: &str = "see who has signed target_cert of [mode.cloud.https]: for a kubelet it has to be the authority of \
                               its --client-ca-file";
/// TLS with a target has failed before certificates counted.
const TARGET_TLS: &str = "see what the target logs; a kubelet with serverTLSBootstrap answers so until its request for a \
                          certificate is approved: kubectl get csr";
/// What lets clients have a target dialled by a pod.
const ALLOW_CLIENTS: &str = "add the target to [mode.cloud.direct] targets of every pod";
/// The same for edges.
const ALLOW_EDGES: &str = "add the target to [mode.cloud.allow] targets of every pod";
/// TLS's type of record for alerts.
const ALERT: u8 = 21;
/// The level of an alert after which the connection ends.
const FATAL: u8 = 2;
const ACCESS_DENIED: u8 = 49;
const INTERNAL_ERROR: u8 = 80;
const UNRECOGNIZED_NAME: u8 = 112;

// The trace of a request: by it the operator finds the request's lines, and a client's own tracing finds them, too.

/// The client's own trace, or else a new one: its `Traceid` if that is short and printable, else the trace id of its
/// `traceparent` (W3C Trace Context) if that is well formed. It appears in logs and answers only.
pub(crate) fn of(head: &HeaderMap) -> String {
    let given = text(head, TRACE.as_str()).filter(|given| (1..=MAX_BYTES).contains(&given.len()));
    match given.filter(|given| given.bytes().all(|b| b.is_ascii_graphic())) {
        Some(given) => given.to_owned(),
        None => text(head, TRACEPARENT).and_then(trace_id).map_or_else(new, str::to_owned),
    }
}

fn text<'a>(head: &'a HeaderMap, name: &str) -> Option<&'a str> {
    head.get(name)?.to_str().ok()
}

/// A new trace: 8 hex digits tell apart what one log holds.
pub(crate) fn new() -> String {
    format!("{:08x}", rand::random::<u32>())
}

/// The trace id in a `traceparent`: version, trace id, parent id and flags, of which none is all zeros but the first and
/// the last. A later version may have more behind them.
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

/// The header in which SuperEdge passes its trace, both ways.
pub(crate) const TRACE: HeaderName = HeaderName::from_static("traceid");

const TRACEPARENT: &str = "traceparent";

/// Longest trace in bytes that is taken from a client.
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
    fn every_cause_has_its_status() {
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
    fn the_reason_phrase_and_the_body_tell_the_cause() {
        let answer = offline().answer(true, "1a2b3c4d");
        assert_eq!(phrase_of(&answer), "node edge7 is not connected, last seen 3m ago");
        assert_eq!(answer.headers()["connection"], "close");
        assert_eq!(answer.headers()["traceid"], "1a2b3c4d");
        let body = std::str::from_utf8(answer.body()).unwrap();
        assert!(
            body.starts_with("node edge7 is not connected, last seen 3m ago\ntrace: 1a2b3c4d\nnext: check "),
            "{body}"
        );
    }

    #[test]
    fn strangers_learn_no_addresses_and_no_times() {
        assert_eq!(offline().sentence(false), "node edge7 is not connected");
        let at = "10.1.2.3:9000".parse().unwrap();
        let trouble = vec![PeerError::NoLink { at, cause: "it is off".into() }];
        let missing =
            NodeNotFound { dns: Some("not in DNS".into()), asked: 2, trouble, ..NodeNotFound::default() };
        let nowhere: Denial = RouteError::Offline { node: "edge7".parse().unwrap(), missing }.into();
        assert_eq!(nowhere.sentence(false), "node edge7 is not connected");
        let all = "node edge7 is not connected; not in DNS; not at 2 peers; peer 10.1.2.3:9000 cannot be reached: it is off";
        assert_eq!(nowhere.sentence(true), all);
        let refused = refused_with(ErrorCode::TargetRefused, "10.1.2.3:22 refused the connection");
        assert_eq!(refused.sentence(false), "node edge7: the target refused the connection");
        assert_eq!(refused.sentence(true), "node edge7: 10.1.2.3:22 refused the connection");
    }

    #[test]
    fn strangers_are_told_of_services_no_more_than_they_asked() {
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
    fn a_reason_phrase_is_printable_and_short_whatever_it_is_told() {
        let wild = "line\r\nSet-Cookie: a=\u{e9}\u{7f} ".repeat(40);
        let phrase = phrase_of(&refused_with(ErrorCode::TargetRefused, &wild).answer(true, "t"));
        assert!(phrase.len() <= 120 && phrase.bytes().all(|b| (b' '..=b'~').contains(&b)), "{phrase:?}");
        let phrase = phrase_of(&Denial::Forbidden(wild).answer(true, "bad\ntrace"));
        assert_eq!(phrase.len(), 120);
    }

    #[test]
    fn an_answer_says_what_it_wants() {
        assert_eq!(Denial::Method.answer(false, "t").headers()["allow"], "CONNECT");
        let answer = Denial::Credentials.answer(false, "t");
        assert_eq!(answer.headers()["proxy-authenticate"], "Basic realm=\"tunnel\"");
    }
}

#[cfg(test)]
mod statuses_tests {
    use super::*;

    #[test]
    fn the_next_step_is_for_the_party_that_can_take_it() {
        let refused = |code| refused(&SessionError::new(code, "whatever the sentence says")).2;
        let cloud = |code| Denial::DirectDenied(SessionError::new(code, "x")).next_step();
        for (next, says) in [
            (refused(ErrorCode::NotAllowed), "[mode.edge.allow] targets in that node's config"),
            (refused(ErrorCode::NodeNotAllowed), "[mode.cloud.allow] nodes"),
            (refused(ErrorCode::OwnPort), "no setting opens this one"),
            (cloud(ErrorCode::NotAllowed), "[mode.cloud.allow] targets"),
            (cloud(ErrorCode::OwnPort), "no setting opens this one"),
            (Denial::Credentials.next_step(), "only at a terminal"),
            (Denial::Password("ops".into()).next_step(), "check the user and the password"),
            (Denial::WrongPasswords.next_step(), "in a minute"),
            (Denial::Busy("full").next_step(), "in a moment"),
        ] {
            assert!(next.contains(says), "{next}");
        }
        assert!(!refused(ErrorCode::NodeNotAllowed).contains("[mode.edge.allow]"));
    }

    #[test]
    fn what_to_do_about_a_targets_tls_depends_on_what_failed() {
        use tokio_rustls::rustls::AlertDescription::{InternalError, UnknownCA};
        let next = |fault| Denial::TargetTls(fault).next_step();
        for fault in [
            HandshakeError::UnknownIssuer,
            HandshakeError::Name(vec!["node9".to_owned()]),
            HandshakeError::CaUsedAsEndEntity,
        ] {
            assert!(next(fault.clone()).contains("target_ca of [mode.cloud.https]"), "{fault}");
        }
        assert!(next(HandshakeError::AlertReceived(UnknownCA)).contains("target_cert of [mode.cloud.https]"));
        assert!(next(HandshakeError::Other(format!("alert {InternalError:?}"))).contains("kubectl get csr"));
    }

    #[test]
    fn a_denial_is_an_alert() {
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

    fn made(trace: &str) -> bool {
        trace.len() == 8 && trace.bytes().all(|b| b.is_ascii_hexdigit())
    }

    #[test]
    fn a_clients_trace_is_kept_only_if_it_is_short_and_printable() {
        let with = |value: &[u8]| {
            let value = http::HeaderValue::from_bytes(value).unwrap();
            of(&HeaderMap::from_iter([(TRACE, value)]))
        };
        assert_eq!(with(b"3f2a-x"), "3f2a-x");
        for bad in [&b""[..], b"a b", b"\xff", &[b'a'; 65]] {
            assert!(made(&with(bad)), "{bad:?}");
        }
        assert_ne!(of(&HeaderMap::new()), of(&HeaderMap::new()));
    }

    #[test]
    fn the_id_of_a_well_formed_trace_context_is_the_trace() {
        const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        let with = |value: &str| {
            let value = http::HeaderValue::from_bytes(value.as_bytes()).unwrap();
            of(&HeaderMap::from_iter([(http::HeaderName::from_static(TRACEPARENT), value)]))
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
            assert!(made(&with(&bad)), "{bad}");
        }
        let both = [("traceid", "mine"), (TRACEPARENT, &format!("00-{ID}-00f067aa0ba902b7-01"))];
        let both = both.map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
        assert_eq!(of(&HeaderMap::from_iter(both)), "mine");
    }
}
