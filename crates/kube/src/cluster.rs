//! Clients of kube-apiserver.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use http::Uri;
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
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tower::retry::RetryLayer;
use tower::{BoxError, ServiceBuilder, service_fn};

use tunnel_base::policy::zone::CLUSTER_DOMAIN;
use tunnel_net::dial::dial;
use tunnel_net::resolver::Resolver;

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
    /// The request was not authorized. Usual cause: a role that lacks a verb.
    #[error(
        "{0}; grant the server's role get, create and update on configmaps, list and watch on endpointslices (discovery.k8s.io), and list on nodes if zone is empty; with [server.addresses] also list and watch on nodes, pods, services and configmaps; with [server.node_ports] also get, list and watch on its ConfigMap, and get and update on its Service"
    )]
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

impl Cluster {
    /// Returns a client and the namespace to use. Reads files, but sends no request.
    ///
    /// # Errors
    ///
    /// Returns [`ClusterError::Config`] if the files cannot be read or are invalid.
    pub async fn connect(&self) -> Result<(Client, String), ClusterError> {
        let mut config = self.config().await?;
        (config.read_timeout, config.reset_reader_on_write) = (Some(IDLE_TIMEOUT), true);
        let client = client(config)?;
        let namespace = self.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        Ok((client, namespace))
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
    /// Fails if kube-apiserver does not answer within `REQUEST_TIMEOUT` or does not authorize the request. The role
    /// needs list on nodes.
    pub async fn nodes(&self, label: Option<&str>) -> Result<BTreeSet<String>, ClusterError> {
        let list = async {
            let (client, _) = self.connect().await?;
            let which = ListParams { label_selector: label.map(str::to_owned), ..ListParams::default() };
            let all = Api::<Node>::all(client).list_metadata(&which).await?;
            Ok(all.items.into_iter().filter_map(|node| node.metadata.name).collect())
        };
        timeout(REQUEST_TIMEOUT, list).await.unwrap_or(Err(ClusterError::Silent))
    }
}

impl From<Error> for ClusterError {
    fn from(cause: Error) -> Self {
        match cause {
            Error::Api(status) if matches!(status.code, 401 | 403) => Self::Forbidden(status.message),
            Error::Api(status) => Self::Failed(status.message),
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

/// Timeout for one operation at kube-apiserver, including retries. It normally takes milliseconds.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The resolver config that kubelet writes for each container.
const RESOLVER: &str = "/etc/resolv.conf";

/// Read timeout of connections to kube-apiserver; longer than a watch without events lasts. It alone ends a list, or
/// the start of a watch, when kube-apiserver vanishes without closing the connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);

/// Returns a client like kube's own, but dials with this crate's [`dial`]. Sends no request.
///
/// # Errors
///
/// Returns [`ClusterError::Config`] if the config contains a proxy, or its credentials are invalid.
pub(crate) fn client(config: Config) -> Result<Client, ClusterError> {
    if config.proxy_url.is_some() {
        let why = "proxies are not supported: remove proxy-url from the kubeconfig, or HTTPS_PROXY from the \
                   environment";
        return Err(ClusterError::Config(why.to_owned()));
    }
    let dials = service_fn(|to: Uri| async move { connect(&to).await.map(TokioIo::new) });
    let https = config.rustls_https_connector_with_connector(dials).map_err(|cause| config_error(&cause))?;
    let mut timed = TimeoutConnector::new(https);
    timed.set_connect_timeout(config.connect_timeout);
    timed.set_read_timeout(config.read_timeout);
    timed.set_write_timeout(config.write_timeout);
    timed.set_reset_reader_on_write(config.reset_reader_on_write);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry())))
        .option_layer(config.auth_layer().map_err(|cause| config_error(&cause))?)
        .layer(config.extra_headers_layer().map_err(|cause| config_error(&cause))?)
        .map_err(BoxError::from)
        .service(legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(timed));
    Ok(Client::new(service, config.default_namespace))
}

async fn connect(to: &Uri) -> io::Result<TcpStream> {
    let host = to.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = to.port_u16().unwrap_or(if to.scheme_str() == Some("http") { 80 } else { 443 });
    let ips = match host.parse() {
        Ok(ip) => vec![ip],
        Err(_) => {
            // The resolver's files may have changed since the last connection.
            let resolver = spawn_blocking(Resolver::system).await?.map_err(io::Error::other)?;
            resolver.lookup(host).await.map_err(io::Error::other)?
        }
    };
    let at: Vec<_> = ips.into_iter().map(|ip| (ip, port).into()).collect();
    let host = host.parse().map_err(io::Error::other)?;
    dial(&host, &at, REQUEST_TIMEOUT / 2).await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    #[tokio::test]
    async fn apiserver_names_are_its_host_and_its_tls_server_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kubeconfig");
        let text = "{apiVersion: v1, kind: Config, current-context: a, users: [{name: a, user: {}}],\n\
             contexts: [{name: a, context: {cluster: a, user: a}}],\n\
             clusters: [{name: a, cluster: {server: 'https://[fd00::1]:6443', tls-server-name: api.test}}]}\n";
        std::fs::write(&file, text).unwrap();
        let cluster = Cluster { kubeconfig: Some(file), namespace: None };
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
        let file = dir.path().join("kubeconfig");
        let text = format!(
            "{{apiVersion: v1, kind: Config, current-context: a, users: [{{name: a, user: {{}}}}],\n\
             contexts: [{{name: a, context: {{cluster: a, user: a}}}}],\n\
             clusters: [{{name: a, cluster: {{server: 'http://{}'}}}}]}}\n",
            silent.local_addr().unwrap()
        );
        std::fs::write(&file, text).unwrap();
        let cluster = Cluster { kubeconfig: Some(file), namespace: Some("n".to_owned()) };
        let (client, namespace) = cluster.connect().await.unwrap();
        let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
        let answer = tokio::time::timeout(10 * IDLE_TIMEOUT, maps.list(&ListParams::default())).await;
        assert!(answer.expect("it is given up").is_err());
    }
}
