//! The live page: one file that loads only its own events.

use std::net::IpAddr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, Response, StatusCode};
use http_body_util::Full;

use crate::admin::requester::AdminRequester;
use crate::admin::responses::{AdminResponse, plain_text};
use crate::admin::{AdminBody, AdminContext};
use tunnel_base::drain::Drain;
use tunnel_net::limiter::Source;
use tunnel_net::tls::client_certificate::ClientCertificate;

/// The name of an authenticated user, or why there is none: a fixed label for metrics, and a sentence.
pub(crate) type UserFuture = BoxFuture<'static, Result<String, (&'static str, String)>>;

/// Authenticates a client by its certificate, or otherwise by the name and password in a request's headers.
type PageAuthenticator = dyn Fn(Option<ClientCertificate>, HeaderMap, IpAddr) -> UserFuture + Send + Sync;

/// Users who may view pages from other machines.
#[derive(derive_more::Debug, Clone)]
#[debug("PageViewers")]
pub struct PageViewers {
    /// Finds the user that has sent a request.
    pub(crate) authenticate: Arc<PageAuthenticator>,
    /// Whether there are users with passwords, so that clients are asked for one.
    pub(crate) has_passwords: bool,
}

impl AdminContext {
    /// Returns who has sent a request, if access is allowed: the requester, see [`AdminRequester::check_access`], or a
    /// user. A user's certificate or password replaces both checks: a browser never sends them to a host name under an
    /// attacker's control.
    ///
    /// # Errors
    ///
    /// Returns the response that denies the request.
    pub(crate) async fn authenticate(
        &self,
        requester: &AdminRequester,
        head: &HeaderMap,
        private: bool,
    ) -> Result<AdminRequester, AdminResponse> {
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
        requester: &AdminRequester,
        head: &HeaderMap,
    ) -> Result<AdminRequester, AdminResponse> {
        let AdminRequester::Address(ip, certificate) = requester else { return Ok(requester.clone()) };
        if let Some(viewers) = &self.viewers {
            match (viewers.authenticate)(certificate.clone(), head.clone(), *ip).await {
                Ok(user) => return Ok(AdminRequester::User(user)),
                Err((result, why)) => self.refuse(requester, result, &why),
            }
            if viewers.has_passwords && certificate.is_none() {
                let mut answer = plain_text(StatusCode::UNAUTHORIZED, "name and password required\n");
                answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(BASIC));
                return Err(answer);
            }
        }
        if self.viewers.is_none() {
            self.refuse(requester, "forbidden", "no users may use this port from there");
        }
        let why = format!("only for users who have proved a name; {PERSON_HINT}\n");
        Err(plain_text(StatusCode::FORBIDDEN, why))
    }

    /// Returns a response with the stream of events for the live page.
    pub(crate) fn events(
        &self,
        requester: &AdminRequester,
        head: &HeaderMap,
        drain: &Drain,
    ) -> Response<AdminBody> {
        let source = match requester {
            AdminRequester::Address(ip, _) => Source::of(*ip),
            AdminRequester::LocalUser(_) | AdminRequester::User(_) | AdminRequester::Linked(_) => {
                Source::of(std::net::Ipv4Addr::LOCALHOST.into())
            }
        };
        match self.streams.try_acquire(&source) {
            Ok(permit) => {
                let reader = (requester.clone(), head.clone());
                let events = self.clone().event_stream(permit, reader, drain);
                let mut answer = Response::new(AdminBody::Right(events));
                set_security_headers(answer.headers_mut(), "text/event-stream");
                answer
            }
            Err(_) => {
                let why = "too many live pages are open; close one\n";
                plain_text(StatusCode::SERVICE_UNAVAILABLE, why).map(AdminBody::Left)
            }
        }
    }
}

/// Returns the live page. Its script and style have a random nonce that injected text cannot know.
pub(crate) fn live_page() -> AdminResponse {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_stays_small_for_slow_lines() {
        assert!(PAGE.len() <= 40_000, "{} bytes", PAGE.len());
    }
}
