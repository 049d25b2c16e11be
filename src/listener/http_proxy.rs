//! The HTTP proxy: CONNECT, and plain requests with an absolute URL. Each request is authorized separately.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::HOST;
use http::request::Parts;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tracing::{Span, field, info_span};

use crate::config::listen::{self, AccessConfig, AuthConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, Environment, ListenConfig, WarningKind};
use crate::listener::admission::{Admission, HandshakeOutcome, ListenerProtocol, OpenRequest};
use crate::listener::denial::Denial;
use crate::listener::forward::forward;
use crate::listener::requests::credentials;
use crate::listener::{BoundListener, ListenerConfig, ListenerKind, ListenerSetup, connect};
use tunnel_base::names::{NameError, Target};
use tunnel_net::socket::{Connection, Hooked, ReadHook};
use tunnel_proto::frame::Category;

/// `[server.http_proxy]`: the HTTP proxy for clients of this server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpProxyConfig {
    /// Address where clients connect.
    pub listen: ListenConfig,
    /// Access rules.
    pub access: AccessConfig,
}

pub(crate) const KIND: ListenerKind = ListenerKind {
    name: "http_proxy",
    about: "an HTTP proxy: CONNECT, and plain requests with an absolute URL",
    by_address: true,
    read: |tables| Some(Arc::new(read(tables.server, &tables.inherited, tables.env, tables.report)?)),
};

/// Reads the table. Returns `None` if it is absent, or has no address to listen on, which is an error.
fn read(
    server: &mut ConfigTable<'_>,
    inherited: &AccessConfig,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<HttpProxyConfig> {
    let mut table = server.table(KIND.name, report);
    let listen = listen::read(&mut table, "listen", report);
    listen::require(&table, listen.is_some(), report);
    let access = AccessConfig::read(&mut table, PASSWORD, inherited, report);
    let proxy = listen.map(|listen| HttpProxyConfig { listen, access });
    if let Some(HttpProxyConfig { listen, access }) = &proxy {
        access.warn_if_open(table.key(listen.key), listen.at, PASSWORD, "every node", report);
        as_superedge(access, env, report);
    }
    table.finish(report);
    proxy
}

/// Checks SuperEdge's environment variables for this port, which are keys here. A port that they restrict must not open
/// without the keys.
fn as_superedge(access: &AccessConfig, env: &Environment, report: &mut Diagnostics) {
    if env.proxy_authorization.as_deref() == Some("true") && access.auth == AuthConfig::None {
        let wanted =
            "it requires passwords; set auth = \"basic\" and users in [server.http_proxy], or unset it";
        report.error("PROXY_AUTHORIZATION", Some("true".to_owned()), wanted);
    }
    if env.cloud_proxy.as_deref().is_some_and(|list| !list.trim().is_empty()) {
        let text = "SuperEdge's list of targets that clients may not reach is ignored; set in rules what they may reach";
        report.warn("CLOUD_PROXY".to_owned(), WarningKind::Insecure, text);
    }
}

/// Clients may send a password, and are asked for no certificate.
const PASSWORD: AuthMethods = AuthMethods { password: true, certificate: None };

impl ListenerConfig for HttpProxyConfig {
    fn name(&self) -> &'static str {
        KIND.name
    }

    fn access(&self) -> Vec<(&str, &AccessConfig)> {
        vec![("server.http_proxy", &self.access)]
    }

    fn bind(&self, setup: &mut ListenerSetup<'_>) -> Option<Vec<BoundListener>> {
        let access = setup.policies.prepare("server.http_proxy", &self.access, setup.startup);
        let key = format!("server.http_proxy.{}", self.listen.key);
        let listener = setup.startup.bind(&key, self.listen.at);
        Some(vec![BoundListener::tcp(KIND.name, listener?, access?, |_| Proxy)])
    }
}

/// The protocol of an HTTP proxy listener: CONNECT, and plain HTTP requests.
#[derive(Debug)]
pub struct Proxy;

impl<C: Connection + 'static> ListenerProtocol<C> for Proxy {
    type Connection = C;

    fn category(&self) -> Category {
        Category::HttpProxy
    }

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("proxy", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, mut socket: C, admission: &mut Admission) -> HandshakeOutcome<C> {
        let Ok(begin) = start(&mut socket).await else {
            return HandshakeOutcome::Failed { reason: "header_missing", socket: Some(socket) };
        };
        let connects = begin == CONNECT;
        let socket = Hooked { io: socket, hook: Begun(begin) };
        let served = if connects {
            connect::serve(socket, admission).await
        } else {
            forward(socket, admission, None, &plain).await
        };
        // The buffered first bytes were read with the first head, so the wrapper is no longer needed.
        served.map(|socket| socket.io)
    }
}

/// Returns the open request for a plain request: to the host of its URL or, as in SuperEdge, of its Host header.
fn plain(head: &Parts) -> Result<OpenRequest, Denial> {
    if head.uri.scheme().is_some_and(|scheme| *scheme != http::uri::Scheme::HTTP) {
        return Err(Denial::Request("only http:// URLs are accepted; use CONNECT for other protocols"));
    }
    // The check of the head has already replaced Host by the URL's host, if there is one.
    let host = head.headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let target: Result<Target, NameError> = host.parse();
    let target = match target {
        Err(NameError::Port(_)) if !host.is_empty() => format!("{host}:80").parse()?,
        target => target?,
    };
    Ok(OpenRequest { node: None, target, credentials: credentials(&head.headers) })
}

/// Reads as many bytes as are needed to distinguish CONNECT from other requests.
async fn start<C: AsyncRead + Unpin>(socket: &mut C) -> io::Result<Vec<u8>> {
    let (mut space, mut have) = ([0; CONNECT.len()], 0);
    while have < CONNECT.len() && space.get(..have) == CONNECT.get(..have) {
        let room = space.get_mut(have..).unwrap_or_default();
        match socket.read(room).await? {
            0 if have == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            0 => break,
            n => have += n,
        }
    }
    Ok(space.get(..have).unwrap_or_default().to_vec())
}

/// The bytes already read from a stream, which are read again first.
#[derive(Debug)]
struct Begun(Vec<u8>);

impl<T: AsyncRead + Unpin> ReadHook<T> for Begun {
    fn poll_read(
        &mut self,
        io: Pin<&mut T>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.is_empty() {
            return io.poll_read(cx, out);
        }
        let n = self.0.len().min(out.remaining());
        out.put_slice(self.0.get(..n).unwrap_or_default());
        self.0.drain(..n);
        Poll::Ready(Ok(()))
    }
}

/// First bytes of a CONNECT request.
const CONNECT: &[u8; 8] = b"CONNECT ";

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str, env: &Environment) -> (Option<String>, Vec<String>) {
        let mut report = Diagnostics::default();
        let mut file = ConfigTable::parse(text, &Environment::default(), &mut report);
        let proxy = read(&mut file, &AccessConfig::default(), env, &mut report);
        let reading = report.finish(text, ());
        let errors = reading.errors.iter().map(ToString::to_string);
        let told = errors.chain(reading.warnings.iter().map(ToString::to_string)).collect();
        (proxy.map(|proxy| proxy.listen.at.to_string()), told)
    }

    #[test]
    fn it_listens_where_it_is_told_to() {
        let env = Environment::default();
        assert_eq!(told("[http_proxy]\nlisten = \"[::1]:8080\"", &env).0.as_deref(), Some("[::1]:8080"));
        assert_eq!(told("", &env), (None, vec![]));
        assert!(told("[http_proxy]", &env).1[0].contains("set the address to listen on"));
    }

    #[test]
    fn what_the_environment_closed_is_not_left_open() {
        let env = Environment {
            proxy_authorization: Some("true".into()),
            cloud_proxy: Some("10.0.0.0/8".into()),
            ..Environment::default()
        };
        let text = "[http_proxy]\nlisten = \"127.0.0.1:8080\"";
        let told_open = told(text, &env).1;
        assert!(told_open[0].contains("PROXY_AUTHORIZATION") && told_open[0].contains("auth = \"basic\""));
        assert!(told_open[1].contains("CLOUD_PROXY") && told_open[1].contains("rules"), "{told_open:?}");
        let closed = format!("{text}\nauth = \"basic\"\nusers = \"/users\"");
        assert_eq!(told(&closed, &env).1.len(), 1);
        assert_eq!(told("", &env).1, [""; 0], "no port is open");
    }
}
