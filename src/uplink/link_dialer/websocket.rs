//! Links inside of a WebSocket: why, for how long this is remembered, and the connection to the proxy.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use crate::uplink::link_dialer::messages;
use tunnel_link::grpc::dial::LinkDialError;
use tunnel_net::http_proxy::ProxiedStream;
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::{HTTP_1, TlsClientConfig, Trust, server_name};
use tunnel_net::websocket::WebSocket;
use tunnel_proto::names::Target;

/// Whether links to a server are inside of a WebSocket, and why.
#[derive(Debug, Default)]
pub(crate) struct WebSocketUse {
    /// Whether the config requires it.
    is_forced: bool,
    /// The reason, and until when it is not doubted.
    found: Mutex<Option<(Instant, String)>>,
    /// Whether the last attempt over HTTP/2 broke off.
    has_broken: AtomicBool,
}

/// Why there is no WebSocket.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct WebSocketError {
    text: String,
    /// Whether the TLS handshake with the proxy failed.
    pub(crate) is_tls: bool,
}

impl WebSocketUse {
    /// Returns the state at the start.
    pub(crate) fn new(is_forced: bool) -> Self {
        Self { is_forced, ..Self::default() }
    }

    /// Returns why the next link is inside of a WebSocket; `None` if it is not.
    pub(crate) fn reason(&self) -> Option<String> {
        if self.is_forced {
            return Some(FORCED.to_owned());
        }
        self.found.lock().as_ref().filter(|(until, _)| Instant::now() < *until).map(|(_, why)| why.clone())
    }

    /// Records how an attempt ended: why it was inside of a WebSocket, whether the server answered, and whether there is
    /// a link.
    pub(crate) fn tried(&self, reason: Option<String>, is_answered: bool, is_linked: bool) {
        let mut found = self.found.lock();
        let is_known = found.as_ref().is_some_and(|(until, _)| Instant::now() < *until);
        // A known reason is doubted after its time, even if links are made all the time.
        if !is_known || !is_answered {
            *found = reason.filter(|_| is_answered).map(|why| (Instant::now() + REMEMBERED, why));
        }
        if is_linked {
            self.has_broken.store(false, Relaxed);
        }
    }

    /// Returns why a link may pass inside of a WebSocket after a call over HTTP/2 that ended like this.
    ///
    /// A server that is crowded, or rejects the certificate that this end `shows`, closes connections, too. So the first
    /// time proves nothing, unless the path `is_odd` anyway or there is no second attempt.
    pub(crate) fn reason_after(&self, error: &LinkDialError, is_odd: bool, shows: bool) -> Option<String> {
        let is_sure = match error {
            LinkDialError::Broken(_) => is_odd || !shows && self.has_broken.swap(true, Relaxed),
            _ => true,
        };
        reason_of_call(error).filter(|_| is_sure)
    }
}

/// Returns why a link may pass inside of a WebSocket, where a TLS handshake failed like this.
pub(crate) fn reason_of_tls(error: &TlsHandshakeError) -> Option<String> {
    match error {
        TlsHandshakeError::Protocol => Some(NO_HTTP_2.to_owned()),
        TlsHandshakeError::UnknownIssuer | TlsHandshakeError::Name(_) => Some(OTHER_CERTIFICATE.to_owned()),
        _ => None,
    }
}

/// Returns why a link may pass inside of a WebSocket, where a call over HTTP/2 failed like this.
pub(crate) fn reason_of_call(error: &LinkDialError) -> Option<String> {
    match error {
        LinkDialError::NotGrpc(status) => Some(format!("HTTP/2 is answered with status {}", status.as_u16())),
        LinkDialError::Timeout => Some("a call over HTTP/2 gets no answer".to_owned()),
        LinkDialError::Broken(_) => Some("HTTP/2 breaks off".to_owned()),
        _ => None,
    }
}

/// Makes a WebSocket over a connection to `at`. Nothing secret is sent, so a proxy need only be trusted to pass it on.
pub(crate) async fn connect(
    socket: ProxiedStream,
    at: &Target,
    trust: Trust,
    pool: BufferPool,
) -> Result<WebSocket, WebSocketError> {
    let failed = |is_tls| move |text: String| WebSocketError { text, is_tls };
    let tls = TlsClientConfig { trust, identity: None, alpn: vec![HTTP_1.to_vec()] };
    // Reads the CAs of the system.
    let tls = spawn_blocking(|| tls.load()).await.map_err(|e| failed(true)(e.to_string()))?;
    let tls = TlsConnector::from(tls.map_err(|e| failed(false)(e.to_string()))?.load());
    let name = server_name(&at.host.to_string()).map_err(failed(true))?;
    let text = name.to_str().into_owned();
    let io = tls.connect(name, Buffered::new(socket, pool)).await;
    let io = io.map_err(|e| match TlsHandshakeError::of(&e) {
        TlsHandshakeError::Protocol => failed(true)(format!("no WebSocket to {at}: {NO_HTTP_1}")),
        _ => failed(true)(messages::no_tls(&e, at, &text, false)),
    })?;
    WebSocket::connect(io, &at.to_string())
        .await
        .map_err(|why| failed(false)(format!("no WebSocket to {at}: {why}")))
}

/// The reasons.
pub(crate) const FORCED: &str = "servers has wss:// here";
pub(crate) const NO_HTTP_2: &str = "a proxy offers no HTTP/2 in TLS";
const NO_HTTP_1: &str = "it offers no HTTP/1.1 in TLS; if no proxy is between, it is a server of an older version without WebSockets";
const OTHER_CERTIFICATE: &str = "a proxy ends TLS with another certificate";

/// How long a reason is remembered.
const REMEMBERED: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reason_is_doubted_after_ten_minutes_or_without_an_answer() {
        let state = WebSocketUse::default();
        let why = Some("why".to_owned());
        state.tried(why.clone(), false, false);
        assert_eq!(state.reason(), None);
        state.tried(why.clone(), true, true);
        advance(REMEMBERED / 2).await;
        state.tried(state.reason(), true, true);
        assert_eq!(state.reason(), why);
        advance(REMEMBERED / 2).await;
        assert_eq!(state.reason(), None, "however often it was used");
        state.tried(why.clone(), true, false);
        state.tried(why.clone(), false, false);
        assert_eq!(state.reason(), None);
        let forced = WebSocketUse::new(true);
        forced.tried(forced.reason(), false, false);
        assert_eq!(forced.reason().as_deref(), Some(FORCED));
    }

    #[test]
    fn http_2_that_breaks_off_once_is_no_reason() {
        let state = WebSocketUse::default();
        let broken = LinkDialError::Broken("reset".to_owned());
        let reasons = |is_odd, shows| state.reason_after(&broken, is_odd, shows).is_some();
        assert!(!reasons(false, true) && !reasons(false, false), "a rejected certificate is none");
        assert!(reasons(false, false) && reasons(true, false));
        state.tried(None, true, true);
        assert!(!reasons(false, false));
        assert!(state.reason_after(&LinkDialError::Timeout, false, true).is_some());
        assert!(state.reason_after(&LinkDialError::Itself, true, true).is_none());
    }
}
