//! The live page: one file that loads only its own events.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::take;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::Full;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::info_span;

use crate::admin::status::{LinkStatus, Status};
use crate::admin::{Admin, Reply, Requester, plain_text};
use tunnel_base::drain::Drain;
use tunnel_net::limiter::{Limits, Permit, Source};
use tunnel_net::tls::verify::ClientCertificate;

/// The name of an authenticated user; `None` if there is none.
pub(crate) type UserFuture = BoxFuture<'static, Option<String>>;

/// Authenticates a client by its certificate, or otherwise by the name and password in a request's headers.
type Authenticate = dyn Fn(Option<ClientCertificate>, HeaderMap, IpAddr) -> UserFuture + Send + Sync;

/// Users who may view pages from other machines. By default there are none.
#[derive(Clone, Default)]
pub struct AdminUsers(Option<Viewers>);

#[derive(Clone)]
struct Viewers {
    authenticate: Arc<Authenticate>,
    /// Whether there are users with passwords.
    has_passwords: bool,
}

impl AdminUsers {
    /// Creates the users that `authenticate` accepts. With `has_passwords`, clients are asked for a password.
    pub(crate) fn new(
        has_passwords: bool,
        authenticate: impl Fn(Option<ClientCertificate>, HeaderMap, IpAddr) -> UserFuture + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Viewers { authenticate: Arc::new(authenticate), has_passwords }))
    }
}

impl Admin {
    /// Returns who has sent a request, if access is allowed: the requester, see [`Requester::check_access`], or a user.
    /// A user's certificate or password replaces both checks: a browser never sends them to a host name under an
    /// attacker's control.
    ///
    /// # Errors
    ///
    /// Returns the response that denies the request.
    pub(crate) async fn authenticate(
        &self,
        requester: &Requester,
        head: &HeaderMap,
        private: bool,
    ) -> Result<Requester, Response<Full<Bytes>>> {
        match requester.check_access(head, private) {
            Ok(()) => Ok(requester.clone()),
            Err(why) => self.authenticate_person(requester, head).await.map_err(|denied| {
                let is_asked = denied.status() == StatusCode::UNAUTHORIZED;
                if is_asked { denied } else { denied.map(|_| format!("{why}; or {PERSON_HINT}\n").into()) }
            }),
        }
    }

    /// Returns the user of the admin socket, or the user who has proved a name at a port.
    ///
    /// # Errors
    ///
    /// Returns the response that denies the request.
    pub(crate) async fn authenticate_person(
        &self,
        requester: &Requester,
        head: &HeaderMap,
    ) -> Result<Requester, Response<Full<Bytes>>> {
        let Requester::Address(ip, certificate) = requester else { return Ok(requester.clone()) };
        if let Some(viewers) = &self.viewers.0 {
            if let Some(user) = (viewers.authenticate)(certificate.clone(), head.clone(), *ip).await {
                return Ok(Requester::Person(user));
            }
            if viewers.has_passwords && certificate.is_none() {
                let mut answer = plain_text(StatusCode::UNAUTHORIZED, "name and password required\n");
                answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(BASIC));
                return Err(answer);
            }
        }
        let why = format!("only for users who have proved a name; {PERSON_HINT}\n");
        Err(plain_text(StatusCode::FORBIDDEN, why))
    }

    /// Returns a response with the stream of events for the live page.
    pub(crate) fn events(&self, requester: &Requester, head: &HeaderMap, drain: &Drain) -> Response<Reply> {
        let source = match requester {
            Requester::Address(ip, _) => Source::of(*ip),
            Requester::User(_) | Requester::Person(_) | Requester::Linked(_) => {
                Source::of(std::net::Ipv4Addr::LOCALHOST.into())
            }
        };
        match self.streams.try_acquire(&source) {
            Ok(permit) => {
                let reader = (requester.clone(), head.clone());
                let events = Events::start(self.clone(), permit, reader, drain);
                let mut answer = Response::new(Reply::Right(events));
                set_security_headers(answer.headers_mut(), "text/event-stream");
                answer
            }
            Err(_) => {
                let why = "too many live pages are open; close one\n";
                plain_text(StatusCode::SERVICE_UNAVAILABLE, why).map(Reply::Left)
            }
        }
    }
}

/// Returns the live page. Its script and style have a random nonce that injected text cannot know.
pub(crate) fn live_page() -> Response<Full<Bytes>> {
    let nonce = format!("{:032x}", rand::random::<u128>());
    let mut answer = Response::new(Full::new(PAGE.replace("{{nonce}}", &nonce).into()));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        answer.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    }
    set_security_headers(answer.headers_mut(), "text/html; charset=utf-8");
    answer
}

impl fmt::Debug for AdminUsers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "AdminUsers(users)" } else { "AdminUsers(none)" })
    }
}

fn set_security_headers(headers: &mut HeaderMap, kind: &'static str) {
    for (name, value) in [
        (CONTENT_TYPE, kind),
        (CACHE_CONTROL, "no-store"),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// How clients of a port prove a name.
const PERSON_HINT: &str =
    "set users, or client_ca and names for certificates, in the admin table of the config";

/// The challenge for a name and password (RFC 7617).
pub(crate) const BASIC: &str = "Basic realm=\"tunnel\", charset=\"UTF-8\"";
const PAGE: &str = include_str!("page.html");
/// Number of open live pages, in total and for one source.
pub(crate) const STREAMS: Limits = Limits { per_source: 8, ..Limits::permits(16) };

// The stream of the live page: the changes since the last event, once a second.

/// A stream of server-sent events. It ends when the process drains or another source needs its permit.
#[derive(Debug)]
pub(crate) struct Events(mpsc::Receiver<Bytes>);

/// The changes of one list: new and changed items with their keys, and the keys of removed items.
#[derive(Serialize)]
struct ListDelta {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    set: Vec<(String, serde_json::Value)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    removed: Vec<String>,
}

/// The items that the reader of one stream has received, as hashes.
#[derive(Debug, Default)]
struct SentState {
    links: HashMap<String, u64>,
    sessions: HashMap<String, u64>,
    peers: HashMap<String, u64>,
    disconnected: HashMap<String, u64>,
    drops: HashMap<String, u64>,
}

impl Events {
    /// Starts a stream, and a task that feeds it. The task ends with the stream, or when its reader loses access.
    pub(crate) fn start(
        admin: Admin,
        permit: Permit,
        (requester, head): (Requester, HeaderMap),
        drain: &Drain,
    ) -> Self {
        // One event waits for a slow reader; the next is created when it is taken.
        let (send, events) = mpsc::channel(1);
        let (lost, draining) = (permit.revoked(), drain.clone());
        drain.spawn(info_span!("events"), async move {
            let (mut sent, _slot) = (SentState::default(), permit);
            loop {
                tokio::select! {
                    biased;
                    () = draining.draining() => return,
                    () = lost.cancelled() => return,
                    () = send.closed() => return,
                    permit = send.reserve() => {
                        let Ok(permit) = permit else { return };
                        if admin.authenticate(&requester, &head, true).await.is_err() {
                            return;
                        }
                        let Some(event) = sent.event(admin.status(), admin.viewers.0.is_some()) else { return };
                        permit.send(event);
                    }
                }
                tokio::select! {
                    () = sleep(CHECK_INTERVAL) => {}
                    () = draining.draining() => return,
                    () = send.closed() => return,
                }
            }
        });
        Self(events)
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

impl SentState {
    /// Returns the next event: the status, with the changes of its lists instead of these. Returns `None` if it cannot be
    /// serialized, which does not happen.
    fn event(&mut self, mut status: Status, may_end: bool) -> Option<Bytes> {
        let links_total = status.links.len();
        status.links.truncate(MAX_LINKS);
        let by_link =
            |link: &LinkStatus| link.link.map_or_else(|| link.name.clone(), |number| number.to_string());
        let deltas = [
            ("links", list_delta(&mut self.links, take(&mut status.links), by_link)),
            (
                "sessions",
                list_delta(&mut self.sessions, take(&mut status.sessions), |one| {
                    format!("{} {}", one.id, one.since)
                }),
            ),
            ("peers", list_delta(&mut self.peers, take(&mut status.peers), by_link)),
            (
                "disconnected",
                list_delta(&mut self.disconnected, take(&mut status.disconnected), |one| one.name.clone()),
            ),
            (
                "drops",
                list_delta(&mut self.drops, take(&mut status.drops), |one| {
                    format!("{} {}", one.name, one.time)
                }),
            ),
        ];
        let mut event = serde_json::to_value(&status).ok()?;
        for (list, delta) in deltas {
            event[list] = serde_json::to_value(delta).ok()?;
        }
        // At most `MAX_LINKS` of them are in the list.
        event["links_total"] = links_total.into();
        // Whether the reader may end sessions, if it proves a name.
        event["may_end"] = may_end.into();
        Some(format!("event: status\ndata: {event}\n\n").into())
    }
}

fn list_delta<T: Serialize>(
    sent: &mut HashMap<String, u64>,
    now: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> String,
) -> ListDelta {
    let (mut seen, mut set) = (HashMap::new(), Vec::new());
    for item in now {
        let (key, value) = (key(&item), serde_json::to_value(&item).unwrap_or_default());
        let mut hasher = DefaultHasher::new();
        value.to_string().hash(&mut hasher);
        let hash = hasher.finish();
        if sent.get(&key) != Some(&hash) {
            set.push((key.clone(), value));
        }
        seen.insert(key, hash);
    }
    let removed = sent.keys().filter(|key| !seen.contains_key(*key)).cloned().collect();
    *sent = seen;
    ListDelta { set, removed }
}

/// Time between two events.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of links in the list. More are hardly read, and each costs the browser time and memory.
const MAX_LINKS: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_stays_small_for_slow_lines() {
        assert!(PAGE.len() <= 40_000, "{} bytes", PAGE.len());
    }

    #[test]
    fn a_list_delta_contains_only_changed_and_removed_entries() {
        let mut sent = HashMap::new();
        let change = |sent: &mut HashMap<String, u64>, now: &[(&str, u32)]| {
            let change = list_delta(sent, now.iter().copied(), |(key, _)| (*key).to_owned());
            let set: Vec<_> =
                change.set.into_iter().map(|(key, value)| format!("{key}={}", value[1])).collect();
            (set.join(" "), change.removed.join(" "))
        };
        assert_eq!(change(&mut sent, &[("a", 1), ("b", 2)]), ("a=1 b=2".into(), String::new()));
        assert_eq!(change(&mut sent, &[("a", 1), ("b", 3)]), ("b=3".into(), String::new()));
        assert_eq!(change(&mut sent, &[("b", 3), ("c", 1)]), ("c=1".into(), "a".into()));
        assert_eq!(change(&mut sent, &[("b", 3), ("c", 1)]), (String::new(), String::new()));
    }
}
