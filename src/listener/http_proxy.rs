//! The HTTP proxy: CONNECT, and plain requests with an absolute URL. Each request is authorized separately.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::HOST;
use http::request::Parts;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tracing::{Span, field, info_span};

use crate::config::access::{AccessConfig, AuthMethods, PasswordAuthConfig};
use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::listen;
use crate::config::listen_tls;
use crate::config::listen_tls::{ListenerTlsConfig, PortTlsState};
use crate::config::server::Tls;
use crate::config::table::ConfigTableReader;
use crate::config::value::forms;
use crate::config::{Environment, WarningKind};
use crate::listener::admission::{Admission, AdmissionOutcome, ListenerProtocol, OpenRequest};
use crate::listener::connect::ConnectProtocol;
use crate::listener::denial::Denial;
use crate::listener::forward::forward;
use crate::listener::requests::credentials;
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigReader, ListenerKind, NamedFile, single};
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_base::policy::NodeGlob;
use tunnel_net::hooked::{Hooked, ReadHook};
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::SessionCategory;
use tunnel_proto::names::{NameError, Target};

/// `[server.http_proxy]`: HTTP proxy: CONNECT as in `[server.connect]`, and plain requests (GET http://node:port/…),
/// each of which is sent where its URL points to. Without this table there is no proxy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct HttpProxyConfig {
    /// Address (ip:port) of the proxy. Required.
    ///
    /// Required: `"127.0.0.1:8080"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub listen: Option<SocketAddr>,
    /// TLS of the port, if it has any.
    #[serde(skip)]
    pub tls: Option<ListenerTlsConfig>,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "http_proxy", by_address: true, read };

/// Reads the table. A table without an address to listen on is an error.
fn read(
    mut table: ConfigTableReader<'_>,
    tables: &mut ListenerConfigReader<'_>,
) -> Vec<Arc<dyn ListenerConfig>> {
    let report = &mut *tables.report;
    let mut proxy: HttpProxyConfig = table.fields(report);
    listen::require(&table, report);
    proxy.tls = ListenerTlsConfig::read(&mut table, report);
    let methods = AuthMethods { password: true, tls: PortTlsState::of(proxy.tls.as_ref()) };
    proxy.access = AccessConfig::read(&mut table, methods, &tables.inherited, report);
    listen_tls::require_names(&table, report);
    if let Some(at) = proxy.listen {
        proxy.access.warn_if_open(table.key("listen"), at, methods, "every node", report);
        check_superedge_variables(&proxy.access, tables.env, report);
    }
    table.close_optional(&proxy, report);
    single(proxy.listen.is_some().then_some(proxy))
}

/// Checks SuperEdge's environment variables for this port, which are keys here. A port that they restrict must not open
/// without the keys.
fn check_superedge_variables(access: &AccessConfig, env: &Environment, report: &mut ConfigDiagnostics) {
    if env.proxy_authorization.as_deref() == Some("true") && access.auth == PasswordAuthConfig::None {
        let expected =
            "it requires passwords; set auth = \"basic\" and users in [server.http_proxy], or unset it";
        report.error("PROXY_AUTHORIZATION", Some("true".to_owned()), expected);
    }
    if env.cloud_proxy.as_deref().is_some_and(|list| !list.trim().is_empty()) {
        let text = "SuperEdge's list of targets that clients may not reach is ignored; set in rules what they may reach";
        report.warn("CLOUD_PROXY".to_owned(), WarningKind::Insecure, text);
    }
}

impl ListenerConfig for HttpProxyConfig {
    fn files(&self) -> Vec<NamedFile> {
        self.tls.iter().flat_map(ListenerTlsConfig::files).collect()
    }

    fn access(&self) -> (&str, &AccessConfig) {
        ("server.http_proxy", &self.access)
    }

    fn bind(&self, tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let listener = startup.bind("server.http_proxy.listen", self.listen.ok_or(NotPrepared)?);
        let tls = self.tls.as_ref().map(|files| files.load(tls, startup)).transpose();
        let category = SessionCategory::HttpProxy;
        Ok(vec![BoundPort::tcp_or_tls(category, listener?, tls?, HttpProxyProtocol)])
    }
}

/// `[edge.http_proxy]`: HTTP proxy for programs on this node: CONNECT host:port, and plain requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct EdgeProxyConfig {
    /// Address (ip:port) of the proxy. Required.
    ///
    /// Required: `"127.0.0.1:3128"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub listen: Option<SocketAddr>,
    /// The hosts that are nodes.
    ///
    /// Example: `["edge-*"]`
    pub nodes: Option<Vec<NodeGlob>>,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

impl EdgeProxyConfig {
    /// Returns what an open port does not follow: it closes, and opens again.
    pub(crate) fn of_port(&self) -> impl PartialEq {
        (self.listen, &self.nodes, &self.access.proxy_protocol)
    }

    /// Binds its port.
    pub(crate) fn bind(&self, startup: &mut StartupErrorCollector) -> Result<TcpListenSocket, NotPrepared> {
        startup.bind("edge.http_proxy.listen", self.listen.ok_or(NotPrepared)?)
    }
}

/// Reads the table. Returns `None` if it is absent, or has no address to listen on, which is an error.
pub(crate) fn read_edge(
    edge: &mut ConfigTableReader<'_>,
    report: &mut ConfigDiagnostics,
) -> Option<EdgeProxyConfig> {
    let mut table = edge.table(KIND.name, report);
    let mut proxy: EdgeProxyConfig = table.fields(report);
    listen::require(&table, report);
    let methods = AuthMethods { password: true, tls: PortTlsState::Unsupported };
    proxy.access = AccessConfig::read(&mut table, methods, &AccessConfig::default(), report);
    if let Some(at) = proxy.listen {
        let reached = "everything that [server.edge_access] allows this edge";
        proxy.access.warn_if_open(table.key("listen"), at, methods, reached, report);
    }
    table.close_optional(&proxy, report);
    proxy.listen.is_some().then_some(proxy)
}

/// The table of an edge's proxy.
pub(crate) const EDGE_KEY: &str = "edge.http_proxy";

/// The protocol of an HTTP proxy listener: CONNECT, and plain HTTP requests.
#[derive(Debug)]
pub struct HttpProxyProtocol;

impl<C: Connection + 'static> ListenerProtocol<C> for HttpProxyProtocol {
    type Connection = Hooked<C, PrereadBytes>;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("proxy", client = %from, trace_id = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(
        &self,
        mut socket: C,
        admission: &mut Admission,
    ) -> AdmissionOutcome<Self::Connection> {
        let Ok(begin) = start(&mut socket).await else {
            let socket = Hooked { io: socket, hook: PrereadBytes::default() };
            return AdmissionOutcome::Failed { reason: "header_missing", socket: Some(socket) };
        };
        admission.mark_active();
        let connects = begin == CONNECT;
        let socket = Hooked { io: socket, hook: PrereadBytes(begin) };
        if connects {
            ConnectProtocol.handshake(socket, admission).await
        } else {
            let is_server = admission.context().uplink.is_none();
            forward(socket, admission, None, &|head: &Parts| parse_plain(head, is_server)).await
        }
    }
}

/// Returns the open request for a plain request: to the host of its URL or, as in SuperEdge's servers, of its Host
/// header.
fn parse_plain(head: &Parts, is_server: bool) -> Result<OpenRequest, Denial> {
    if head.uri.scheme().is_none() && !is_server {
        // Otherwise a web page could reach nodes by a name that resolves to this port. A browser that is configured to
        // use the proxy sends the whole URL, also across sites.
        return Err(Denial::Request(
            "a proxy expects the whole URL (http://node:port/path); configure it as a proxy",
        ));
    }
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
    let mut space = [0; CONNECT.len()];
    let mut have = 0;
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
#[derive(Debug, Default)]
pub struct PrereadBytes(Vec<u8>);

impl<T: AsyncRead + Unpin> ReadHook<T> for PrereadBytes {
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
    use std::any::Any;

    use super::*;

    fn read_text(text: &str, env: &Environment) -> (Option<String>, Vec<String>) {
        let mut report = ConfigDiagnostics::default();
        let mut file = ConfigTableReader::parse(text, &Environment::default(), &mut report);
        let table = file.table("http_proxy", &mut report);
        let inherited = AccessConfig::default();
        let proxy = read(table, &mut ListenerConfigReader { inherited, env, report: &mut report }).pop();
        let listen = |proxy: Arc<dyn ListenerConfig>| {
            let proxy: &HttpProxyConfig = (proxy.as_ref() as &dyn Any).downcast_ref().unwrap();
            proxy.listen.unwrap().to_string()
        };
        let reading = report.finish(text, ());
        let errors = reading.errors.iter().map(ToString::to_string);
        let read_text = errors.chain(reading.warnings.iter().map(ToString::to_string)).collect();
        (proxy.map(listen), read_text)
    }

    #[test]
    fn the_http_proxy_listens_on_the_configured_address() {
        let env = Environment::default();
        assert_eq!(read_text("[http_proxy]\nlisten = \"[::1]:8080\"", &env).0.as_deref(), Some("[::1]:8080"));
        assert_eq!(read_text("", &env), (None, vec![]));
        assert!(read_text("[http_proxy]", &env).1[0].contains("set the address to listen on"));
    }

    #[test]
    fn superedges_proxy_restrictions_in_the_environment_must_be_replaced() {
        let env = Environment {
            proxy_authorization: Some("true".into()),
            cloud_proxy: Some("10.0.0.0/8".into()),
            ..Environment::default()
        };
        let text = "[http_proxy]\nlisten = \"127.0.0.1:8080\"";
        let open_warnings = read_text(text, &env).1;
        assert!(
            open_warnings[0].contains("PROXY_AUTHORIZATION") && open_warnings[0].contains("auth = \"basic\"")
        );
        assert!(
            open_warnings[1].contains("CLOUD_PROXY") && open_warnings[1].contains("rules"),
            "{open_warnings:?}"
        );
        let closed = format!("{text}\nauth = \"basic\"\nusers = \"/users\"");
        assert_eq!(read_text(&closed, &env).1.len(), 1);
        assert_eq!(read_text("", &env).1, [""; 0], "no port is open");
    }

    fn read_edge_text(text: &str) -> (Option<EdgeProxyConfig>, Vec<String>) {
        let mut report = ConfigDiagnostics::default();
        let mut file = ConfigTableReader::parse(text, &Environment::default(), &mut report);
        let proxy = read_edge(&mut file, &mut report);
        let reading = report.finish(text, ());
        let errors = reading.errors.iter().map(ToString::to_string);
        (proxy, errors.chain(reading.warnings.iter().map(ToString::to_string)).collect())
    }

    #[test]
    fn the_edges_proxy_listens_on_the_configured_address() {
        let (proxy, read_text) = read_edge_text("[http_proxy]\nlisten = \"[::1]:3128\"");
        assert_eq!((proxy.unwrap().listen.unwrap().to_string().as_str(), read_text), ("[::1]:3128", vec![]));
        assert_eq!(read_edge_text(""), (None, vec![]), "no table, no port");
        assert!(read_edge_text("[http_proxy]").1[0].contains("set the address to listen on"));
    }

    #[test]
    fn an_open_edge_proxy_is_a_warning_unless_access_is_restricted() {
        let open = "[http_proxy]\nlisten = \"0.0.0.0:3128\"\n";
        let (_, read_text) = read_edge_text(open);
        let [read_text] = read_text.try_into().unwrap();
        let says = "http_proxy.listen: anyone who reaches 0.0.0.0:3128 can reach everything that [server.edge_access] allows";
        assert!(
            read_text.starts_with(says) && read_text.contains("set auth = \"basic\" or allow_from"),
            "{read_text}"
        );
        assert_eq!(read_edge_text(&format!("{open}allow_from = [\"10.244.1.0/24\"]")).1, [""; 0]);
    }

    #[test]
    fn node_name_patterns_of_the_edges_proxy_are_read() {
        let nodes = |line: &str| {
            read_edge_text(&format!("[http_proxy]\nlisten = \"127.0.0.1:1\"\n{line}")).0.unwrap().nodes
        };
        assert_eq!(nodes(""), None);
        assert_eq!(nodes("nodes = []"), Some(vec![]));
        assert_eq!(nodes("nodes = [\"*.site.example\"]"), Some(vec!["*.site.example".parse().unwrap()]));
    }
}
