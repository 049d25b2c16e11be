//! Tables of the parts of a server that use Kubernetes: `[server.service_account]`, `[server.csr]`,
//! `[server.node_ports]` and `[server.node_names]`.

pub mod node_names;
pub mod ports;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use educe::Educe;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

use crate::config::cluster::{self, ClusterSettings, ObjectName};
use crate::config::required_cluster::{MAX_LIFETIME, MIN_LIFETIME, required_cluster};
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::{self, FilePath, Millis};
use tunnel_proto::names::Host;

/// `[server.csr]`: certificates for this server, issued by signers of Kubernetes (CertificateSigningRequests). Each key
/// is generated here, and stored with its certificate in one file of dir, which only this user may read. Set that file
/// as cert and key where it is presented. A certificate is renewed after 70 to 90 % of its lifetime, and when a Service
/// gets a new address, without closing connections. A server starts once it has its certificates, which
/// `tunnel approve` must approve. Requires a program built with Kubernetes, and the rights of deploy/kustomize/csr. The
/// command `tunnel config check` requires that the files exist.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct ServerCsrConfig {
    /// Certificates to request. "server" (server.pem): for the server's ports with TLS, signed by
    /// kubernetes.io/kubelet-serving. "proxy-client" (proxy-client.pem): for target_cert of `[server.https]`, signed by
    /// kubernetes.io/kube-apiserver-client. The port for edges and peers (cert of `[server.links]`) keeps its own,
    /// unless there is only one server: the cluster's CA signs for others too.
    ///
    /// Example: `["server", "proxy-client"]`
    pub profiles: BTreeSet<ProfileKind>,
    /// Directory of the files, created if it does not exist.
    #[educe(Default = "/var/lib/tunnel/pki".into())]
    pub dir: FilePath,
    /// For "server": Services of POD_NAMESPACE at which clients reach the ports. The certificate contains loopback's
    /// names, and the Services' names, cluster IPs, external IPs, load balancers and annotation
    /// x-tunnel-server-external-addr. For a NodePort it contains the addresses of cloud nodes, except those of the
    /// control plane, where kube-apiserver is. The approver must know the Services (--service).
    ///
    /// Example: `["tunnel-cloud"]`
    pub services: Vec<ObjectName>,
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
    /// closed. Other certificates of that CA authenticate nothing. It is kube-apiserver's --client-ca-file, which the
    /// ConfigMap extension-apiserver-authentication of kube-system contains. It must not contain a CA of peer_ca in
    /// `[server.links]`, which authenticates servers. Default: none, only tokens authenticate edges.
    ///
    /// Example: `"/etc/tunnel/client-ca/ca.crt"`
    pub edge_ca: Option<FilePath>,
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

/// Reads `[server.csr]`. Returns `None` if nothing is requested.
pub(crate) fn csr(cloud: &mut ConfigTableReader<'_>) -> Option<ServerCsrConfig> {
    let mut table = cloud.table("csr");
    let csr: ServerCsrConfig = table.fields();
    if csr.profiles.contains(&ProfileKind::Server) && csr.services.is_empty() && csr.names.is_empty() {
        let expected =
            "list the Services that route to this server's ports, or in names their DNS names and addresses";
        table.error("services", Some("neither services nor names is set".to_owned()), expected);
    }
    let issues_certificates = !csr.profiles.is_empty();
    let key = if issues_certificates { "profiles" } else { "edge_ca" };
    let cluster = required_cluster(&table, key, issues_certificates || csr.edge_ca.is_some());
    table.close(&csr);
    Some(ServerCsrConfig { cluster: cluster?, ..csr })
}

/// `[server.service_account]`: edges in pods prove their node with the token of their ServiceAccount. A projected volume
/// has it in a file, which is their token_file of `[edge.uplink]`. kube-apiserver reviews each token (TokenReview). It
/// must be bound to a pod that exists, and the node is that of the pod. The edge replaces its link when the kubelet has
/// renewed the token. Links and sessions of an edge end within 10 s after its pod or Node was deleted, and a link ends
/// with the token that proved it. Requires a program built with Kubernetes, and the rights of deploy/kustomize/base.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct ServiceAccountConfig {
    /// Name of the ServiceAccount, in the namespace POD_NAMESPACE. Default: none, so no such token is accepted.
    ///
    /// Example: `"tunnel-edge"`
    #[serde(deserialize_with = "cluster::optional_name")]
    pub name: Option<String>,
    /// Audience that the tokens must have, as the audience of their volume.
    #[serde(deserialize_with = "forms::filled_text")]
    #[educe(Default = "tunnel.cloud.io".to_owned())]
    pub audience: String,
    /// Whether edges may link while kube-apiserver does not answer, for a day at most: those of pods that this server
    /// or a peer knew before, if a published key of kube-apiserver has signed their tokens. Links then outlive tokens
    /// that the kubelet cannot renew. All others wait. The audit log names them. A server that starts meanwhile knows
    /// what its peers know, and if STATE_DIRECTORY is set what the one before it knew, by the file known-pods.json
    /// there.
    #[educe(Default = true)]
    pub outage: bool,
    /// The cluster of the pods.
    #[serde(skip)]
    pub cluster: ClusterSettings,
    /// The file in which the server keeps what it knows of them.
    #[serde(skip)]
    pub file: Option<PathBuf>,
}

/// Reads `[server.service_account]`. Returns `None` if no tokens of ServiceAccounts are accepted.
pub(crate) fn service_account(server: &mut ConfigTableReader<'_>) -> Option<ServiceAccountConfig> {
    let mut table = server.table("service_account");
    let account: ServiceAccountConfig = table.fields();
    let cluster = required_cluster(&table, "name", account.name.is_some());
    table.close(&account);
    let dir = server.env.state_dir.as_ref().filter(|_| account.outage);
    let file = dir.map(|dir| dir.join("known-pods.json"));
    Some(ServiceAccountConfig { cluster: cluster?, file, ..account })
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
