//! Tables of the parts that use Kubernetes: `[server.csr]`, `[edge.csr]`, `[server.node_ports]` and
//! `[server.node_names]`.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

use crate::config::cluster::{self, ClusterSettings, reached};
use crate::config::table::ConfigTable;
use crate::config::value::{self, Millis};
use crate::config::{Diagnostics, Environment};
use tunnel_base::names::Host;
use tunnel_base::policy::Glob;

/// `[server.csr]`: certificates for this server, issued by signers of Kubernetes (CertificateSigningRequests). Each key is
/// generated here, and stored with its certificate in one file of dir, which only this user may read. Set that file as
/// cert and key where it is presented. A certificate is renewed after 70 to 90 % of its lifetime, and when a Service gets
/// a new address, without closing connections. A server starts once it has its certificates, which
/// `tunnel approve` must approve. Requires a program built with Kubernetes, and the rights of deploy/kustomize/csr. The
/// command `tunnel config check` requires that the files exist.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct ServerCsrConfig {
    /// Certificates to request. "server" (server.pem): for the server's ports with TLS, signed by
    /// kubernetes.io/kubelet-serving. "proxy-client" (proxy-client.pem): for target_cert of `[server.https]`, signed by
    /// kubernetes.io/kube-apiserver-client. The port for edges and peers (cert of `[server.links]`) keeps its own, unless
    /// there is only one server: the cluster's CA signs for others too.
    ///
    /// Example: `["server", "proxy-client"]`
    pub profiles: BTreeSet<ProfileKind>,
    /// Directory of the files, created if it does not exist.
    #[serde(deserialize_with = "value::file")]
    pub dir: PathBuf,
    /// For "server": Services of POD_NAMESPACE at which clients reach the ports. The certificate contains loopback's
    /// names, and the Services' names, cluster IPs, external IPs, load balancers and annotation
    /// x-tunnel-server-external-addr. For a NodePort it contains the addresses of cloud nodes, except those of the
    /// control plane, where kube-apiserver is. The approver must know the Services (--service).
    ///
    /// Example: `["tunnel-cloud"]`
    #[serde(deserialize_with = "cluster::object_names")]
    pub services: Vec<String>,
    /// For "server": names and addresses in addition to those, which the approver must know too (--san). services or
    /// names is required.
    ///
    /// Example: `["tunnel.example.org"]`
    #[serde(deserialize_with = "certificate_names")]
    pub names: BTreeSet<String>,
    /// Requested validity of each certificate. Default: the signer decides, usually a year.
    ///
    /// Example: `"720h"`
    #[serde(with = "Millis::<MIN_LIFETIME, MAX_LIFETIME>")]
    pub lifetime: Option<Duration>,
    /// File (PEM) of the CA that signs edges' certificates (enabled = true in their `[edge.csr]`). An edge with a
    /// certificate for its node needs no token while Kubernetes has that Node; if the Node is deleted, its link is
    /// closed. Other certificates of that CA authenticate nothing. It must not contain a CA of peer_ca in
    /// `[server.links]`, which authenticates servers. Default: none, only tokens authenticate edges.
    ///
    /// Example: `"/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"`
    #[serde(deserialize_with = "value::file")]
    pub edge_ca: Option<PathBuf>,
    /// The cluster that issues them.
    #[serde(skip)]
    pub cluster: ClusterSettings,
}

/// A profile of certificates that a server can request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileKind {
    /// A certificate for the server's ports with TLS.
    Server,
    /// A certificate that is presented to targets.
    ProxyClient,
}

impl Default for ServerCsrConfig {
    fn default() -> Self {
        Self {
            profiles: BTreeSet::new(),
            dir: "/var/lib/tunnel/pki".into(),
            services: Vec::new(),
            names: BTreeSet::new(),
            lifetime: None,
            edge_ca: None,
            cluster: ClusterSettings::default(),
        }
    }
}

/// Reads `[server.csr]`. Returns `None` if nothing is requested.
pub(crate) fn csr(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<ServerCsrConfig> {
    let mut table = cloud.table("csr", report);
    let csr: ServerCsrConfig = table.fields(report);
    if csr.profiles.contains(&ProfileKind::Server) && csr.services.is_empty() && csr.names.is_empty() {
        let expected =
            "list the Services that route to this server's ports, or in names their DNS names and addresses";
        table.error("services", Some("neither services nor names is set".to_owned()), expected, report);
    }
    let issues_certificates = !csr.profiles.is_empty();
    let key = if issues_certificates { "profiles" } else { "edge_ca" };
    let cluster = required_cluster(&table, key, issues_certificates || csr.edge_ca.is_some(), env, report);
    table.close(&csr, report);
    Some(ServerCsrConfig { cluster: cluster?, ..csr })
}

/// Returns the cluster if a table needs one. `key` is the key that needs it, for the error if there is none.
fn required_cluster(
    table: &ConfigTable<'_>,
    key: &'static str,
    is_needed: bool,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<ClusterSettings> {
    let error = |why| table.error(key, Some("requires Kubernetes".to_owned()), why, report);
    is_needed.then(|| reached(env).map_err(error).ok()).flatten()
}

/// One of the names in a certificate.
struct CertificateName(Host);

impl<'de> Deserialize<'de> for CertificateName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?.parse().map(Self);
        name.map_err(|_| D::Error::custom("expected a DNS name or an address, without a port"))
    }
}

fn certificate_names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    let names = Vec::<CertificateName>::deserialize(deserializer)?;
    Ok(names.into_iter().map(|CertificateName(name)| name.to_string()).collect())
}

/// The minimum in Kubernetes, in milliseconds.
const MIN_LIFETIME: u64 = 600 * 1000;

/// Ten years, in milliseconds.
const MAX_LIFETIME: u64 = 10 * 366 * 24 * 3600 * 1000;

/// `[edge.csr]`: certificate that identifies this edge, with or without a token, issued by a signer of its cluster
/// (CertificateSigningRequests). The edge requests it as its node with the kubeconfig of --kubeconfig=FILE,
/// usually the kubelet's. Only root may read that file and its key, so the edge runs as root. The command
/// `tunnel approve` approves the request. The servers must accept such certificates first (edge_ca of `[server.csr]`). The
/// token is used until a certificate is issued, and for every second attempt with a server that closes connections made
/// with it. Without a token the edge waits for its certificate. Requires a program built with Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct EdgeCsrConfig {
    /// Whether to request the certificate.
    pub enabled: bool,
    /// File of certificate and key, written and renewed by the edge. Only its user may read it.
    #[serde(deserialize_with = "value::file")]
    pub file: PathBuf,
    /// Requested validity. Default: the signer decides, usually a year.
    ///
    /// Example: `"720h"`
    #[serde(with = "Millis::<MIN_LIFETIME, MAX_LIFETIME>")]
    pub lifetime: Option<Duration>,
    /// The cluster to send the request to, as this node.
    #[serde(skip)]
    pub cluster: ClusterSettings,
    /// `NODE_IP`, which the certificate contains.
    #[serde(skip)]
    pub node_ip: Option<IpAddr>,
}

impl Default for EdgeCsrConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            file: "/var/lib/tunnel/pki/agent.pem".into(),
            lifetime: None,
            cluster: ClusterSettings::default(),
            node_ip: None,
        }
    }
}

/// Reads `[edge.csr]`. Returns `None` if the token alone identifies this edge.
pub(crate) fn edge_csr(
    edge: &mut ConfigTable<'_>,
    node_ip: Option<IpAddr>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<EdgeCsrConfig> {
    let mut table = edge.table("csr", report);
    let csr: EdgeCsrConfig = table.fields(report);
    let cluster = required_cluster(&table, "enabled", csr.enabled, env, report);
    table.close(&csr, report);
    Some(EdgeCsrConfig { cluster: cluster?, node_ip, ..csr })
}

// Ports of nodes.

/// `[server.node_ports]`: ports of nodes, listed in a ConfigMap while the servers run, as in YurtTunnel. Keys of the
/// ConfigMap: http-proxy-ports and https-proxy-ports, such as "9051,9052", for services at nodes that speak HTTP, and HTTP
/// over TLS. localhost-proxy-ports: ports that are on a node's loopback only (10266,10267 if the key is absent).
/// dnat-ports-pair: the older form, such as "9051=10264" for HTTP and "9443=10263" for TLS. 10250 and 10255 are always
/// served, and ports that servers listen on are rejected. Errors are logged and reported by /readyz; the valid entries
/// apply. Requires Kubernetes, as kubernetes_service of `[server.peers]` does. Requires a role that may get, list and watch
/// the ConfigMap, and get and update the Service. Without this table no ConfigMap is read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct NodePortsConfig {
    /// Name of the ConfigMap.
    #[serde(deserialize_with = "cluster::object_name")]
    pub configmap: String,
    /// Its namespace.
    #[serde(deserialize_with = "cluster::object_name")]
    pub namespace: String,
    /// Service in the servers' namespace that gets an entry dnat-PORT for each port. The entry points to the port of
    /// `[server.http]` or `[server.https]` that is set to "host". The Service is written only if it has the annotation
    /// tunnel.cloud.io/ports: managed, and only these entries are changed. Default: none is written.
    ///
    /// Example: `"x-tunnel-server-internal-svc"`
    #[serde(deserialize_with = "cluster::optional_name")]
    pub service: Option<String>,
    /// The cluster of the objects.
    #[serde(skip)]
    pub cluster: ClusterSettings,
    /// Port of this server that forwards to the node's port in a request's Host: the Service's target for HTTP ports;
    /// `None` if there is none.
    #[serde(skip)]
    pub http: Option<u16>,
    /// The same port with TLS: the Service's target for HTTPS ports; `None` if there is none.
    #[serde(skip)]
    pub https: Option<u16>,
}

impl Default for NodePortsConfig {
    /// Names that YurtTunnel uses.
    fn default() -> Self {
        Self {
            configmap: "yurt-tunnel-server-cfg".to_owned(),
            namespace: NAMESPACE.to_owned(),
            service: None,
            cluster: ClusterSettings::default(),
            http: None,
            https: None,
        }
    }
}

/// Reads `[server.node_ports]`. `http` and `https` are the ports that forward by Host. Returns `None` if the table is
/// absent, or unusable, which is recorded.
pub(crate) fn node_ports(
    cloud: &mut ConfigTable<'_>,
    http: Option<u16>,
    https: Option<u16>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<NodePortsConfig> {
    let mut table = cloud.table("node_ports", report);
    let ports: NodePortsConfig = table.fields(report);
    if !table.is_present() {
        return None;
    }
    let cluster = required_cluster(&table, "configmap", true, env, report);
    if ports.service.is_some() && http.is_none() && https.is_none() {
        let found = Some("set, but it has no port to route to".to_owned());
        let expected = "route a port of [server.http] or [server.https] by Host: ports = { \
                      \"10264\" = \"host\" }";
        table.error("service", found, expected, report);
    }
    table.close(&ports, report);
    Some(NodePortsConfig { cluster: cluster?, http, https, ..ports })
}

/// The namespace that YurtTunnel uses.
const NAMESPACE: &str = "kube-system";

// Names of nodes.

/// `[server.node_names]`: addresses of all nodes of the cluster, in a ConfigMap that CoreDNS's hosts plugin mounts, as in
/// YurtTunnel. Names of edges resolve to a Service of the servers, all others to the nodes themselves. The server that
/// holds a Lease writes it. Servers do not use these names to find peers. A Node is left out, with a warning, in three
/// cases. Its name collides with names that programs look up (localhost, or below svc or cluster.local). Its name has dots
/// and matches none of names. Or the ConfigMap is full. Requires Kubernetes, as kubernetes_service of `[server.peers]` does.
/// Requires a role that may list and watch nodes, get, create and update the ConfigMap and the Lease, and get the Service.
/// Without this table none is written.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct NodeNameSettings {
    /// Name of the ConfigMap. Its key belongs entirely to the servers. It is created if it does not exist.
    #[serde(deserialize_with = "cluster::object_name")]
    pub configmap: String,
    /// Key in the ConfigMap.
    #[serde(deserialize_with = "cluster::object_name")]
    pub key: String,
    /// Name of the Lease.
    #[serde(deserialize_with = "cluster::object_name")]
    pub lease: String,
    /// Namespace of both.
    #[serde(deserialize_with = "cluster::object_name")]
    pub namespace: String,
    /// Label and value of the Nodes that are edges. Nodes without it, and without superedge.io/node-edge=enable or
    /// openyurt.io/is-edge-worker=true, cannot link.
    #[serde(with = "NodeLabel")]
    pub edges: (String, String),
    /// Patterns of allowed Node names with dots. Anyone who can add a Node chooses its name, which could otherwise be
    /// that of any host on the Internet. Default: none, only Nodes with names of one label are written.
    ///
    /// Example: `["*.nodes.example.org"]`
    pub names: Vec<Glob>,
    /// Service in the servers' namespace that edges' names resolve to.
    #[serde(deserialize_with = "cluster::object_name")]
    pub service: String,
    /// What an edge's name resolves to. "service": the Service. "server": the server that the node is connected to, or
    /// the Service if there is none; requires what publish = "configmap" of `[server.dns]` writes, without a zone.
    pub resolve_to: ResolveTo,
    /// The cluster of the objects.
    #[serde(skip)]
    pub cluster: ClusterSettings,
    /// The ConfigMap that lists the server of each edge, if edges' names resolve to servers; `None` resolves them to
    /// the Service.
    #[serde(skip)]
    pub holders: Option<String>,
}

/// What the names of edges resolve to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ResolveTo {
    /// The Service of the servers.
    #[default]
    Service,
    /// The server that the edge is connected to.
    Server,
}

impl Default for NodeNameSettings {
    /// Names that YurtTunnel uses; the Lease is ours.
    fn default() -> Self {
        Self {
            configmap: "yurt-tunnel-nodes".to_owned(),
            key: "tunnel-nodes".to_owned(),
            lease: "tunnel-node-names".to_owned(),
            namespace: NAMESPACE.to_owned(),
            edges: ("openyurt.io/is-edge-worker".to_owned(), "true".to_owned()),
            names: Vec::new(),
            service: "x-tunnel-server-internal-svc".to_owned(),
            resolve_to: ResolveTo::Service,
            cluster: ClusterSettings::default(),
            holders: None,
        }
    }
}

/// Reads `[server.node_names]`. `published` is the ConfigMap in which nodes are published, `zone` their zone. Returns
/// `None` if the table is absent, or unusable, which is recorded.
pub(crate) fn node_names(
    cloud: &mut ConfigTable<'_>,
    published: Option<&String>,
    zone: &str,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<NodeNameSettings> {
    let mut table = cloud.table("node_names", report);
    let names: NodeNameSettings = table.fields(report);
    if !table.is_present() {
        return None;
    }
    let cluster = required_cluster(&table, "configmap", true, env, report);
    if published == Some(&names.configmap) {
        let found = Some(format!("{:?}, which publish of [server.dns] writes", names.configmap));
        table.error("configmap", found, "use a separate ConfigMap", report);
    }
    let is_to_server = names.resolve_to == ResolveTo::Server;
    let holders = published.filter(|_| is_to_server && zone.is_empty()).cloned();
    if is_to_server && holders.is_none() {
        let expected = "requires publish = \"configmap\" of [server.dns], without a zone";
        table.error("resolve_to", Some("\"server\"".to_owned()), expected, report);
    }
    table.close(&names, report);
    Some(NodeNameSettings { cluster: cluster?, holders, ..names })
}

/// The form of a label with its value.
struct NodeLabel;

impl NodeLabel {
    fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(String, String), D::Error> {
        let text = String::deserialize(deserializer)?;
        let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/');
        match text.split_once('=') {
            Some((label, value)) if !label.is_empty() && label.bytes().chain(value.bytes()).all(sound) => {
                Ok((label.to_owned(), value.to_owned()))
            }
            _ => {
                let expected = "expected label=value, for example \"openyurt.io/is-edge-worker=true\"";
                Err(D::Error::custom(expected))
            }
        }
    }

    fn serialize<S: Serializer>(label: &(String, String), serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}={}", label.0, label.1))
    }
}
