//! The live page: one file that loads nothing but its own events.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, Response, StatusCode};
use http_body_util::Full;

use super::asker::{Asker, Unasked};
use super::events::Events;
use super::response::plain_text;
use super::{Admin, Reply};
use crate::drain::Drain;
use crate::net::door::{Door, Limits, Source};

/// Checks the name and password in a request's headers, of a client at that address.
type Check = dyn Fn(HeaderMap, std::net::IpAddr) -> BoxFuture<'static, bool> + Send + Sync;

/// Who may look from other machines, by name and password; by default nobody.
#[derive(Clone, Default)]
pub struct Viewers(Option<Arc<Check>>);

/// The streams of the live page that are open. Clones count together.
#[derive(Debug, Clone)]
pub struct Streams(Door);

impl Viewers {
    /// Those that `check` lets in.
    pub fn new(
        check: impl Fn(HeaderMap, std::net::IpAddr) -> BoxFuture<'static, bool> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(check)))
    }
}

impl Default for Streams {
    fn default() -> Self {
        Self(Door::new(Limits { for_one: STREAMS_OF_ONE, ..Limits::slots(STREAMS) }))
    }
}

impl Admin {
    /// The answer for an asker who may not ask that, see [`Asker::may_ask`]; `None` if it may. Name and password of a
    /// viewer stand for both checks: no browser sends them to a stranger's name.
    pub(super) async fn turned_away(
        &self,
        asker: Asker,
        head: &HeaderMap,
        private: bool,
    ) -> Option<Response<Full<Bytes>>> {
        let why = asker.may_ask(head, private).err()?;
        if let (Some(check), Asker::Address(ip)) = (&self.viewers.0, asker) {
            if check(head.clone(), ip).await {
                return None;
            }
            let mut answer =
                plain_text(StatusCode::UNAUTHORIZED, "this is for users: give name and password\n");
            let asks = HeaderValue::from_static("Basic realm=\"tunnel\"");
            answer.headers_mut().insert(WWW_AUTHENTICATE, asks);
            return Some(answer);
        }
        let remedy =
            if why == Unasked::Elsewhere { "; or set users in the table admin of its config" } else { "" };
        Some(plain_text(StatusCode::FORBIDDEN, format!("{why}{remedy}\n")))
    }

    /// What happens from now on, for the page.
    pub(super) fn events(&self, asker: Asker, drain: &Drain) -> Response<Reply> {
        let source = match asker {
            Asker::Address(ip) => Source::of(ip),
            Asker::User(_) => Source::of(std::net::Ipv4Addr::LOCALHOST.into()),
        };
        match self.streams.0.try_enter(&source) {
            Ok(slot) => {
                let mut answer = Response::new(Reply::Right(Events::begin(self.clone(), slot, drain)));
                guard(answer.headers_mut(), "text/event-stream");
                answer
            }
            Err(_) => {
                let why = "too many of these pages are open: close one\n";
                plain_text(StatusCode::SERVICE_UNAVAILABLE, why).map(Reply::Left)
            }
        }
    }
}

/// The page itself. Its one script and its one style are named by a number that no stranger's text can know.
pub(super) fn live_page() -> Response<Full<Bytes>> {
    let nonce = format!("{:032x}", rand::random::<u128>());
    let mut answer = Response::new(Full::new(PAGE.replace("{{nonce}}", &nonce).into()));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        answer.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    }
    guard(answer.headers_mut(), "text/html; charset=utf-8");
    answer
}

impl fmt::Debug for Viewers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Viewers(users)" } else { "Viewers(nobody)" })
    }
}

fn guard(headers: &mut HeaderMap, kind: &'static str) {
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

const PAGE: &str = include_str!("page.html");
/// Streams at once.
const STREAMS: usize = 16;
/// Streams of one source.
const STREAMS_OF_ONE: usize = 8;
