//! What the front ends share: why a client gets no session, and the HTTP answer for each cause.

mod auth;
mod client;
mod connect;
mod forward;
mod intercept;
mod passthrough;
mod proved;
mod proxy;
mod requests;
mod serve;
mod statuses;
mod tcp;
mod trace;
mod web;

pub use auth::{Gate, Logins, Users, UsersError};
pub use client::{ClientKey, sessions};
pub use connect::{Connect, Egress, Module, Ssh};
pub use forward::{Router, forward};
pub use intercept::{Caught, CaughtNode, Intercept};
pub use passthrough::Passthrough;
pub use proved::{Local, Tls};
pub use proxy::Proxy;
pub use serve::{
    Denied, FrontContext, FrontEnd, Granted, HEAD_TIME, Handshake, OpenRequest, OwnNode, Permitted, Proof,
    Visit, serve,
};
pub use tcp::Tcp;
pub use web::{Http, Https, NodePort, Reencrypted};

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, PROXY_AUTHENTICATE};
use http::{Response, StatusCode, Version};
use hyper::ext::ReasonPhrase;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tracing::debug;

use crate::names::{NameError, Target};
use crate::net::tls::Fault;
use crate::protocol::Refusal;
use crate::registry::NotLocated;
use crate::route::RouteError;
use trace::TRACE;

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
    Unnamed,
    /// The same of a request without TLS.
    #[error("the Host is no node's name, and the path is no known pod's")]
    NoHost,
    /// The target got a request, and gave no answer that could be passed on.
    #[error("the target gave no proper answer: {0}")]
    Unanswered(String),
    /// The target was reached, and the TLS that this process speaks with it came to nothing.
    #[error("TLS with the target failed: {0}")]
    TargetTls(Fault),
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
    NotLocated(#[from] NotLocated),
    /// Loopback, link-local, a cloud's metadata and the like: no pod dials them for clients.
    #[error("{0} is no target: the cloud never dials itself, its links or its metadata for clients")]
    OffLimits(Target),
    /// The target is at no node, and this process could not dial it.
    #[error("{0}")]
    Direct(Refusal),
    /// The port leads to whichever node there is, and there is none.
    #[error("no node is linked to this pod, and none is known to be linked to another")]
    NoNodes,
    /// The target is the edge's own machine, or is called so. Usual cause: a program that sends all it asks for to its
    /// proxy.
    #[error("{0} is at this machine itself: ask there, not through its proxy")]
    OwnNode(Target),
    /// The edge has no link.
    #[error("this edge is not linked to the cloud")]
    Unlinked,
    /// The cloud did not dial the target for this edge.
    #[error("{0}")]
    Cloud(Refusal),
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
        self.row().0
    }

    /// A fixed label for metrics and the access log.
    pub fn name(&self) -> &'static str {
        self.row().1
    }

    /// What the operator or the user can do about it: the answer's line `next:`.
    pub fn next_step(&self) -> &'static str {
        self.row().2
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
async fn turn_away_http_2<S: AsyncWrite + Unpin>(socket: &mut S, begin: &[u8]) {
    if begin.starts_with(HTTP_2) {
        debug!("the client speaks HTTP/2 without asking for it: only HTTP/1.1 is served here");
        let _ = socket.write_all(NO_HTTP_2.as_bytes()).await;
        let _ = socket.flush().await;
    }
}

/// Answers a client whose first bytes are those of ssh: in ssh's own words, as it shows no others. Whether it is one.
async fn turn_away_ssh<S: AsyncWrite + Unpin>(socket: &mut S, begin: &[u8]) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Code;
    use crate::registry::NotFound;
    use crate::registry::Unreachable;
    use std::time::Duration;

    fn offline() -> Denial {
        let missing = NotFound { seen: Some(Duration::from_secs(180)), ..NotFound::default() };
        RouteError::Offline { node: "edge7".parse().unwrap(), missing }.into()
    }

    fn refused_with(code: Code, reason: &str) -> Denial {
        let refusal = Refusal::new(code, reason);
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
            (Denial::NoNodes, 502),
            (Denial::NoServerName, 421),
            (Denial::Busy("draining"), 503),
            (RouteError::Busy("full").into(), 503),
            (offline(), 502),
            (RouteError::Timeout { node: node(), patience: Duration::ZERO }.into(), 504),
        ] {
            assert_eq!(denial.status(), status, "{denial}");
        }
        let codes = [502, 502, 504, 502, 403, 502, 503, 502, 502, 502, 502];
        for (code, status) in (0..).zip(codes) {
            assert_eq!(refused_with(Code::from_wire(code), "x").status(), status, "code {code}");
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
        let trouble = vec![Unreachable::NoLink { at, cause: "it is off".into() }];
        let missing = NotFound { dns: Some("not in DNS".into()), asked: 2, trouble, ..NotFound::default() };
        let nowhere: Denial = RouteError::Offline { node: "edge7".parse().unwrap(), missing }.into();
        assert_eq!(nowhere.sentence(false), "node edge7 is not connected");
        let all = "node edge7 is not connected; not in DNS; not at 2 other pods; pod 10.1.2.3:9000 cannot be reached: it is off";
        assert_eq!(nowhere.sentence(true), all);
        let refused = refused_with(Code::TargetRefused, "10.1.2.3:22 refused the connection");
        assert_eq!(refused.sentence(false), "node edge7: the target refused the connection");
        assert_eq!(refused.sentence(true), "node edge7: 10.1.2.3:22 refused the connection");
    }

    #[test]
    fn strangers_are_told_of_services_no_more_than_they_asked() {
        let service = || "shop/db".to_owned();
        for why in [
            NotLocated::NoService(service()),
            NotLocated::NoPort { service: service(), port: 5432 },
            NotLocated::NoEndpoint(service(), true),
            NotLocated::Ambiguous {
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
        let phrase = phrase_of(&refused_with(Code::TargetRefused, &wild).answer(true, "t"));
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
