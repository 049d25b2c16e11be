//! Clients of kube-apiserver.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use http::Uri;
use hyper_rustls::MaybeHttpsStream;
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, PostParams};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ConfigExt as _};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Error};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio_util::either::Either;
use tower::retry::RetryLayer;
use tower::{BoxError, ServiceBuilder, service_fn};

use tunnel_base::policy::zone::CLUSTER_DOMAIN;
use tunnel_base::silence::unless_silent;
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::OutboundProxy;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::Trust;
use tunnel_proto::names::{Host, Target};
use tunnel_proto::printable::printable;

/// A Kubernetes cluster, and the namespace to use in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// Kubeconfig file. `None` selects the service account that Kubernetes mounts into each pod.
    pub kubeconfig: Option<PathBuf>,
    /// Namespace to use. `None` selects the one of the service account, or the one in the kubeconfig file.
    pub namespace: Option<String>,
}

/// An error of a request to kube-apiserver.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The address or the credentials are unknown. Usual cause: no service account is mounted.
    #[error(
        "cannot reach kube-apiserver: {0}; check --kubeconfig, or that the pod's service account token is mounted"
    )]
    Config(String),
    /// The credential was not accepted. Usual cause: it has expired, or it is another cluster's.
    #[error(
        "kube-apiserver: {0}; renew the credential: that of --kubeconfig, or the pod's service account token"
    )]
    Unauthorized(String),
    /// The request was not permitted. Usual cause: a role that lacks a verb, which kube-apiserver names.
    #[error("{0}; grant it to the role of this account, see docs/reference/rbac.md")]
    Forbidden(String),
    /// The request timed out. Usual cause: kube-apiserver is down, or a network policy blocks it.
    #[error(
        "kube-apiserver did not answer within {REQUEST_TIMEOUT:?}; check that it is up and reachable from here"
    )]
    Silent,
    /// kube-apiserver was not reached, or it refused the request.
    #[error("kube-apiserver: {0}")]
    Failed(String),
}

/// A proxy, and the CAs that may prove it if it speaks HTTPS.
type ProxyTrust = (OutboundProxy, Trust);

/// A callback for the state of what is followed: complete, or why not. It must not block.
pub type StateReport = Box<dyn Fn(Result<(), String>) + Send + Sync>;

impl Cluster {
    /// Returns a client and the namespace to use. Reads files, but sends no request.
    ///
    /// # Errors
    ///
    /// Returns [`ClusterError::Config`] if the files cannot be read or are invalid.
    pub async fn connect(&self) -> Result<(Client, String), ClusterError> {
        let mut config = self.config().await?;
        config.read_timeout = Some(IDLE_TIMEOUT);
        config.reset_reader_on_write = true;
        let client = client(config, self.proxy()?)?;
        let namespace = self.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        Ok((client, namespace))
    }

    /// Returns the proxy to kube-apiserver, as kubectl chooses it: the one in the kubeconfig, otherwise that of the
    /// environment, unless `NO_PROXY` has the host. A service account's kube-apiserver is in the same cluster.
    fn proxy(&self) -> Result<Option<ProxyTrust>, ClusterError> {
        let Some(file) = &self.kubeconfig else { return Ok(None) };
        let file = Kubeconfig::read_from(file).map_err(|cause| config_error(&cause))?;
        let context =
            file.contexts.iter().find(|context| Some(&context.name) == file.current_context.as_ref());
        let name = context.and_then(|context| context.context.as_ref()).map(|context| &context.cluster);
        let cluster = file.clusters.iter().find(|cluster| Some(&cluster.name) == name);
        let cluster = cluster.and_then(|cluster| cluster.cluster.as_ref());
        let own = cluster.and_then(|cluster| cluster.proxy_url.as_deref());
        let proxy = match own.filter(|url| !url.is_empty()) {
            Some(url) => OutboundProxy::new(url, ""),
            None => OutboundProxy::new(&variable("HTTPS_PROXY"), &variable("NO_PROXY")),
        };
        let ca = cluster.and_then(|cluster| cluster.certificate_authority.as_ref());
        let trust = Trust::Public(ca.map(PathBuf::from).into_iter().collect());
        Ok(proxy.map_err(|cause| config_error(&cause))?.map(|proxy| (proxy, trust)))
    }

    /// Returns the names and addresses in the URL and in the expected certificate of kube-apiserver. IPv6 addresses are
    /// in brackets.
    ///
    /// # Errors
    ///
    /// Returns [`ClusterError::Config`] if the files cannot be read or are invalid.
    pub async fn apiserver_names(&self) -> Result<Vec<String>, ClusterError> {
        let config = self.config().await?;
        let host = config.cluster_url.host().map(str::to_owned);
        Ok(host.into_iter().chain(config.tls_server_name).collect())
    }

    /// Returns the cluster's DNS domain. Reads it from the search list in `/etc/resolv.conf`; without an entry there,
    /// returns the default `CLUSTER_DOMAIN`.
    pub async fn domain(&self) -> String {
        let resolver = tokio::fs::read_to_string(RESOLVER).await.unwrap_or_default();
        search_domain(&resolver).unwrap_or(CLUSTER_DOMAIN).to_owned()
    }

    async fn config(&self) -> Result<Config, ClusterError> {
        let Some(file) = &self.kubeconfig else {
            return Config::incluster().map_err(|cause| config_error(&cause));
        };
        let file = Kubeconfig::read_from(file).map_err(|cause| config_error(&cause))?;
        let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
        config.map_err(|cause| config_error(&cause))
    }

    /// Returns the names of all Nodes with this label (`name=value`), or of all Nodes if there is no label.
    ///
    /// # Errors
    ///
    /// Fails if kube-apiserver is silent for `REQUEST_TIMEOUT` or does not authorize the request. The role
    /// needs list on nodes.
    pub async fn nodes(&self, label: Option<&str>) -> Result<BTreeSet<String>, ClusterError> {
        let list = async {
            let (client, _) = self.connect().await?;
            let which = ListParams { label_selector: label.map(str::to_owned), ..ListParams::default() };
            let all = Api::<Node>::all(client).list_metadata(&which).await?;
            Ok(all.items.into_iter().filter_map(|node| node.metadata.name).collect())
        };
        unless_silent(REQUEST_TIMEOUT, list).await.unwrap_or(Err(ClusterError::Silent))
    }
}

impl ClusterError {
    /// Adds the rights that an operation needs, if it was not permitted.
    pub(crate) fn needing(self, rights: &str) -> Self {
        match self {
            Self::Forbidden(what) => Self::Forbidden(format!("{what}; it needs {rights}")),
            other => other,
        }
    }
}

impl From<Error> for ClusterError {
    fn from(cause: Error) -> Self {
        match cause {
            Error::Api(status) => {
                let message = printable(&status.message);
                match status.code {
                    401 => Self::Unauthorized(message),
                    403 => Self::Forbidden(message),
                    // An answer of a balancer may be a page, or empty.
                    code => Self::Failed(format!("{code} {message}")),
                }
            }
            other => Self::Failed(chain(&other)),
        }
    }
}

/// Writes an object: replaces it if it `exists`, otherwise creates it. Returns false if it was changed, created or deleted
/// since it was read, which kube-apiserver finds by its resource version.
pub(crate) async fn write<K>(api: &Api<K>, name: &str, object: &K, exists: bool) -> Result<bool, ClusterError>
where
    K: Clone + DeserializeOwned + Debug + Serialize,
{
    let params = PostParams::default();
    let written = match exists {
        true => api.replace(name, &params, object).await,
        false => api.create(&params, object).await,
    };
    match written {
        Ok(_) => Ok(true),
        Err(Error::Api(status)) if status.code == 409 || exists && status.code == 404 => Ok(false),
        Err(cause) => Err(cause.into()),
    }
}

/// Returns the cluster's domain from the text of a `resolv.conf`: its search list contains `svc.DOMAIN`.
fn search_domain(resolver: &str) -> Option<&str> {
    let lists = resolver.lines().filter_map(|line| line.trim().strip_prefix("search"));
    let domain = lists.flat_map(str::split_whitespace).find_map(|name| name.strip_prefix("svc."))?;
    Some(domain.trim_end_matches('.')).filter(|domain| !domain.is_empty())
}

fn config_error(cause: &dyn std::error::Error) -> ClusterError {
    ClusterError::Config(chain(cause))
}

/// Formats an error with its sources: the outermost text alone is often just "service error".
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

/// Timeout for one operation at kube-apiserver, including retries, which normally takes milliseconds. For a list it is
/// the maximum time without a byte.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The resolver config that kubelet writes for each container.
const RESOLVER: &str = "/etc/resolv.conf";

/// Read timeout of connections to kube-apiserver; longer than a watch without events lasts. It alone ends a list, or
/// the start of a watch, when kube-apiserver vanishes without closing the connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);

/// First and longest pause before a request that kube-apiserver cannot serve now is sent again, three times. All take
/// about 2 s, so that the caller soon knows why; kube's own retries would hide it for minutes.
const RETRY_PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// Returns an environment variable in upper or lower case; empty if it is not set.
#[expect(clippy::disallowed_methods, reason = "kube reads the proxy of the environment too")]
fn variable(name: &str) -> String {
    std::env::var(name).or_else(|_| std::env::var(name.to_lowercase())).unwrap_or_default()
}

/// Returns a client like kube's own, but dials with this crate's [`dial`]. Sends no request.
///
/// # Errors
///
/// Returns [`ClusterError::Config`] if the credentials are invalid.
pub(crate) fn client(config: Config, proxy: Option<ProxyTrust>) -> Result<Client, ClusterError> {
    let dials = service_fn(move |to| connect(to, proxy.clone()));
    let https = config.rustls_https_connector_with_connector(dials).map_err(|cause| config_error(&cause))?;
    let mut timed = TimeoutConnector::new(https);
    timed.set_connect_timeout(config.connect_timeout);
    timed.set_read_timeout(config.read_timeout);
    timed.set_write_timeout(config.write_timeout);
    timed.set_reset_reader_on_write(config.reset_reader_on_write);
    let [first, longest] = RETRY_PAUSES;
    let retries = RetryPolicy::new(first, longest, 3, false).ok();
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(retries.map(RetryLayer::new))
        .option_layer(config.auth_layer().map_err(|cause| config_error(&cause))?)
        .layer(config.extra_headers_layer().map_err(|cause| config_error(&cause))?)
        .map_err(BoxError::from)
        .service(legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(timed));
    Ok(Client::new(service, config.default_namespace))
}

/// Dials kube-apiserver, or the proxy if it applies.
async fn connect(to: Uri, proxy: Option<ProxyTrust>) -> io::Result<MaybeHttpsStream<TokioIo<TcpStream>>> {
    let host = to.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = to.port_u16().unwrap_or(if to.scheme_str() == Some("http") { 80 } else { 443 });
    let target = Target { host: host.parse().map_err(io::Error::other)?, port };
    let proxy = proxy.filter(|(proxy, _)| proxy.applies_to(&target));
    let next = proxy.as_ref().map_or(&target, |(proxy, _)| proxy.at());
    let at = match next.host {
        Host::Ip(ip) => vec![(ip, next.port).into()],
        Host::Name(_) => Resolver::system().lookup_target(next).await.map_err(io::Error::other)?,
    };
    let patience = REQUEST_TIMEOUT / 2;
    let Some((proxy, trust)) = proxy else {
        let socket = dial(&target.host, &at, patience).await.map_err(io::Error::other)?;
        return Ok(TokioIo::new(socket).into());
    };
    let socket = proxy.connect(&at, &target, patience).await.map_err(io::Error::other)?;
    let socket = TokioIo::new(TokioIo::new(socket));
    let socket = OutboundProxy::encrypted(Some(&proxy), socket, &target, trust, patience).await;
    socket.map_err(io::Error::other).map(|socket| match socket {
        Either::Left(socket) => socket.into_inner().into(),
        Either::Right(tls) => (*tls).into(),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use tunnel_net::tls::params::TlsParams;
    use tunnel_net::tls::testing::TestCa;
    use tunnel_net::tls::{ClientAuth, TlsServerConfig};

    use super::*;

    impl Cluster {
        /// Returns a cluster by a kubeconfig in this directory. `server` is its entry, without braces.
        pub(crate) fn of_test(dir: &tempfile::TempDir, server: &str) -> Self {
            let file = dir.path().join("kubeconfig");
            let text = format!(
                "{{apiVersion: v1, kind: Config, current-context: a, users: [{{name: a, user: {{}}}}],\n\
                 contexts: [{{name: a, context: {{cluster: a, user: a}}}}],\n\
                 clusters: [{{name: a, cluster: {{{server}}}}}]}}\n"
            );
            std::fs::write(&file, text).unwrap();
            Self { kubeconfig: Some(file), namespace: None }
        }
    }

    #[tokio::test]
    async fn apiserver_names_are_its_host_and_its_tls_server_name() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster::of_test(&dir, "server: 'https://[fd00::1]:6443', tls-server-name: api.test");
        assert_eq!(cluster.apiserver_names().await.unwrap(), ["[fd00::1]", "api.test"]);
    }

    #[test]
    fn the_cluster_domain_is_read_from_the_resolvers_search_list() {
        let of_a_pod =
            "nameserver 10.96.0.10\nsearch a.svc.k8s.example.org svc.k8s.example.org k8s.example.org\n";
        assert_eq!(search_domain(of_a_pod), Some("k8s.example.org"));
        assert_eq!(search_domain("search\tsvc.cluster.local. example.org"), Some("cluster.local"));
        for elsewhere in ["", "nameserver 10.0.0.1\nsearch example.org\n", "search svc.", "# svc.a.b"] {
            assert_eq!(search_domain(elsewhere), None, "{elsewhere}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_to_a_silent_apiserver_times_out() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster::of_test(&dir, &format!("server: 'http://{}'", silent.local_addr().unwrap()));
        let (client, namespace) = cluster.connect().await.unwrap();
        let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
        let answer = tokio::time::timeout(10 * IDLE_TIMEOUT, maps.list(&ListParams::default())).await;
        assert!(answer.expect("it is given up").is_err());
    }

    /// Returns a cluster, and its kube-apiserver, which answers a request with this body in parts.
    pub(crate) async fn answer_slowly(body: &str) -> (Cluster, impl Future<Output = ()>) {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster::of_test(&dir, &format!("server: 'http://{}'", server.local_addr().unwrap()));
        let slow = async move {
            let _dir = dir;
            let (mut socket, _) = server.accept().await.unwrap();
            let mut head = vec![0; 1000];
            let _ = socket.read(&mut head).await.unwrap();
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            socket.write_all(head.as_bytes()).await.unwrap();
            for part in body.as_bytes().chunks(40) {
                tokio::time::sleep(REQUEST_TIMEOUT - Duration::from_secs(1)).await;
                socket.write_all(part).await.unwrap();
            }
        };
        (cluster, slow)
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_list_of_nodes_may_arrive_slowly() {
        let (cluster, slow) = answer_slowly(r#"{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{},"items":[{"metadata":{"name":"a"}}]}"#).await;
        let (nodes, ()) = tokio::join!(cluster.nodes(None), slow);
        assert_eq!(nodes.unwrap().into_iter().collect::<Vec<_>>(), ["a"]);
    }

    #[tokio::test]
    async fn kube_apiserver_is_dialled_through_the_proxy_of_the_kubeconfig() {
        let proxy = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kubeconfig");
        let text = format!(
            "{{apiVersion: v1, kind: Config, current-context: a, users: [{{name: a, user: {{}}}}],\n\
             contexts: [{{name: b, context: {{cluster: b, user: a}}}}, {{name: a, context: {{cluster: a, user: a}}}}],\n\
             clusters: [{{name: b, cluster: {{server: 'http://other.test'}}}},\n\
             {{name: a, cluster: {{server: 'http://apiserver.test:6443', proxy-url: 'http://{}'}}}}]}}\n",
            proxy.local_addr().unwrap()
        );
        std::fs::write(&file, text).unwrap();
        let cluster = Cluster { kubeconfig: Some(file), namespace: None };
        let (request, _) = tokio::join!(
            async {
                let (mut socket, _) = proxy.accept().await.unwrap();
                let mut head = vec![0; 200];
                let length = socket.read(&mut head).await.unwrap();
                socket.write_all(b"HTTP/1.1 403 no\r\n\r\n").await.unwrap();
                String::from_utf8_lossy(&head[..length]).into_owned()
            },
            async {
                let refused = cluster.nodes(None).await.unwrap_err().to_string();
                assert!(
                    refused.contains("did not connect to apiserver.test:6443: HTTP/1.1 403 no"),
                    "{refused}"
                );
            }
        );
        assert!(request.starts_with("CONNECT apiserver.test:6443 HTTP/1.1\r\n"), "{request}");
    }

    #[tokio::test]
    async fn a_proxy_of_https_proves_its_name_by_a_ca_of_the_kubeconfig_before_it_is_asked() {
        let [ca, other] = ["ca", "other"].map(TestCa::new);
        let tls = TlsServerConfig {
            identity: ca.issue("proxy", "127.0.0.1"),
            clients: ClientAuth::Anonymous,
            params: TlsParams::default(),
            alpn: Vec::new(),
        };
        let tls = tls.load().unwrap().load().acceptor();
        let proxy = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = proxy.local_addr().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let nodes = async |ca: &TestCa| {
            let server = format!(
                "server: 'http://apiserver.test:6443', proxy-url: 'https://me:secret@{at}', certificate-authority: {:?}",
                ca.ca()
            );
            Cluster::of_test(&dir, &server).nodes(None).await
        };
        let play = async {
            let (socket, _) = proxy.accept().await.unwrap();
            let mut socket = tls.accept(socket).await.ok()?;
            let mut asked = String::new();
            for answer in ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 403 no\r\nContent-Length: 0\r\n\r\n"] {
                let mut head = vec![0; 1000];
                let length = socket.read(&mut head).await.unwrap();
                asked += &String::from_utf8_lossy(&head[..length]);
                socket.write_all(answer.as_bytes()).await.unwrap();
            }
            Some(asked)
        };
        let (asked, refused) = tokio::join!(play, nodes(&ca));
        let asked = asked.unwrap();
        assert!(asked.starts_with("CONNECT apiserver.test:6443 HTTP/1.1\r\n"), "{asked}");
        assert!(
            asked.contains("Proxy-Authorization: Basic ") && asked.contains("GET /api/v1/nodes"),
            "{asked}"
        );
        assert!(matches!(refused, Err(ClusterError::Forbidden(_))), "{refused:?}");
        let doubted = async { tls.accept(proxy.accept().await.unwrap().0).await.is_err() };
        let (doubted, refused) = tokio::join!(doubted, nodes(&other));
        let refused = refused.unwrap_err().to_string();
        assert!(doubted && refused.contains(&format!("no TLS with the proxy {at}: ")), "{refused}");
    }

    #[test]
    fn an_answer_without_a_reason_still_has_its_status_and_401_asks_for_another_credential() {
        for (code, message, expected) in [
            (503, "<html>\nbusy</html>", "kube-apiserver: 503 <html> busy</html>"),
            (429, "", "kube-apiserver: 429 "),
            (401, "Unauthorized", "renew the credential"),
            (403, "secrets \"a\" is forbidden", "secrets \"a\" is forbidden; grant it"),
        ] {
            let status = kube::core::Status::failure(message, "").with_code(code).boxed();
            let text = ClusterError::from(Error::Api(status)).to_string();
            assert!(text.contains(expected), "{text}");
            assert!(!text.contains("configmaps"), "{text}");
        }
    }
}
