//! `[server.dns]`: where this server publishes its nodes; and etcd clusters.

use std::net::SocketAddr;
use std::str::FromStr;

use educe::Educe;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

use crate::config::cluster::ObjectName;
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::{self, FilePath};
use tunnel_base::policy::NodeGlob;
use tunnel_proto::names::{NodeName, Target};
use tunnel_proto::serde_as_text;

/// `[server.dns]`: where a server publishes its nodes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct DnsConfig {
    /// Where to publish that a node is at this server, so that DNS resolves node names. "hosts" is a file for CoreDNS's
    /// hosts plugin, "configmap" the same in Kubernetes, to be mounted, and "etcd" is for its etcd plugin. The address
    /// is POD_IP of the environment.
    pub publish: PublishTo,
    /// DNS zone appended to node names when they are published and searched for. Default: empty, the bare name. Clients
    /// may request node1.ZONE:22 as well as node1:22. A separate zone is safer. Without a zone, nodes with names of one
    /// label are published. Longer names are published only if they have a line in the token file, are Nodes of the
    /// cluster, or match publish_names. Never published are localhost, wpad, names below svc or cluster.local, and
    /// names with an address in DNS at which no server answers. A warning names the nodes that are not published. DNS
    /// is queried only for nodes that may be published.
    #[serde(deserialize_with = "zone")]
    pub zone: String,
    /// Without a zone: patterns of names with several labels that are published too; '*' matches any run of characters,
    /// case is ignored.
    ///
    /// Example: `["*.edge.example.org"]`
    pub publish_names: Vec<NodeGlob>,
    /// File for publish = "hosts". Several servers may share it: each changes its own lines, and removes those of a
    /// server that was killed and has not checked the file for 30 s. Files that end in .lock, .signs and .new are
    /// created next to it, so this user must be allowed to write to its directory. No default.
    ///
    /// Example: `"/var/lib/tunnel/hosts"`
    pub hosts_file: Option<FilePath>,
    /// ConfigMap for publish = "configmap", which requires Kubernetes, as kubernetes_service of `[server.peers]` does.
    /// The role must be able to get, create and update it, and to list nodes if zone is empty and Nodes have dots in
    /// their names. In its key hosts only our own lines are changed, so several servers share it. It is created if it
    /// does not exist.
    // SuperEdge's name.
    #[educe(Default = "tunnel-nodes".into())]
    pub configmap: ObjectName,
    /// DNS servers (ip:port) that know the server of each node, queried before peers are. Default: the system's.
    /// Neither DNS nor peers are queried unless resolvers, zone or publish is set, or `[server.peers]` lists peers.
    ///
    /// Example: `["10.96.0.10:53"]`
    #[serde(deserialize_with = "forms::remote_addresses")]
    pub resolvers: Vec<SocketAddr>,
    /// The table below it.
    #[serde(skip)]
    pub etcd: EtcdSettings,
}

/// The kind of store in which a server publishes the nodes that are connected to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PublishTo {
    /// Nothing is published.
    #[default]
    None,
    /// A hosts file.
    Hosts,
    /// An etcd.
    Etcd,
    /// A ConfigMap.
    ConfigMap,
}

impl PublishTo {
    /// Returns its name in the config, or `None` if nothing is published.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Hosts => Some("hosts"),
            Self::Etcd => Some("etcd"),
            Self::ConfigMap => Some("configmap"),
        }
    }
}

/// `[server.dns.etcd]` and `[server.invitations.etcd]`: the etcd for publish = "etcd", or store = "etcd".
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct EtcdSettings {
    /// Its members, tried in turn. No default.
    ///
    /// Example: `["https://10.0.0.5:2379", "https://10.0.0.6:2379"]`
    pub endpoints: Vec<EtcdEndpoint>,
    /// Path of the records, as in CoreDNS's etcd plugin. For invitations: path of the key, without its last part, which
    /// is "enrolled".
    #[serde(deserialize_with = "prefix")]
    pub prefix: String,
    /// File (PEM) of the CA that signed the members' certificates. Required for https. No default.
    ///
    /// Example: `"/etc/tunnel/certs/etcd-ca.crt"`
    pub ca: Option<FilePath>,
    /// File (PEM) of the certificate presented to etcd. Re-read when it changes.
    ///
    /// Example: `"/etc/tunnel/certs/etcd-client.crt"`
    pub cert: Option<FilePath>,
    /// File (PEM) of its private key.
    ///
    /// Example: `"/etc/tunnel/certs/etcd-client.key"`
    pub key: Option<FilePath>,
    /// User of etcd that may write below prefix.
    ///
    /// Example: `"tunnel"`
    #[serde(deserialize_with = "forms::filled_text")]
    pub user: Option<String>,
    /// File of that user's password. Read at each login.
    ///
    /// Example: `"/etc/tunnel/auth/etcd-password"`
    pub password_file: Option<FilePath>,
}

/// The address of one member of an etcd cluster in the config.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
#[display("{}://{at}", if *tls { "https" } else { "http" })]
pub struct EtcdEndpoint {
    /// Whether it uses TLS.
    pub tls: bool,
    /// Its address.
    pub at: Target,
}

/// Reads `[server.dns]`. The caller closes the table.
pub(crate) fn read(table: &mut ConfigTableReader<'_>) -> DnsConfig {
    let mut dns: DnsConfig = table.fields();
    dns.etcd = etcd(table, dns.publish == PublishTo::Etcd, PREFIX);
    if dns.publish == PublishTo::Hosts && !table.has("hosts_file") {
        table.error("hosts_file", None, "set the hosts file that CoreDNS reads");
    }
    dns
}

/// Reads the keys of an etcd. `above` is the default prefix.
pub(crate) fn etcd(table: &mut ConfigTableReader<'_>, used: bool, above: &str) -> EtcdSettings {
    let mut table = table.table("etcd");
    let mut etcd: EtcdSettings = table.fields();
    if etcd.prefix.is_empty() {
        etcd.prefix = above.to_owned();
    }
    if used && etcd.endpoints.is_empty() && !table.is_wrong("endpoints") {
        table.error("endpoints", None, "list etcd's members: [\"https://10.0.0.5:2379\"]");
    }
    if !table.has("ca") && etcd.endpoints.iter().any(|member| member.tls) {
        let expected = "an https:// member requires the CA that signed its certificate";
        table.error("ca", None, expected);
    }
    for (one, other) in
        [("cert", "key"), ("key", "cert"), ("user", "password_file"), ("password_file", "user")]
    {
        if table.has(one) && !table.has(other) {
            table.error(other, None, format!("{one} is useless without it"));
        }
    }
    table.close(&etcd);
    etcd
}

impl FromStr for EtcdEndpoint {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let parts = text.strip_suffix('/').unwrap_or(text).split_once("://");
        let tls = match parts {
            Some(("http", _)) => Some(false),
            Some(("https", _)) => Some(true),
            _ => None,
        };
        let at = parts.and_then(|(_, at)| at.parse().or_else(|_| format!("{at}:{ETCD_PORT}").parse()).ok());
        match (tls, at) {
            (Some(tls), Some(at)) => Ok(Self { tls, at }),
            _ => Err("expected http://host:port or https://host:port"),
        }
    }
}

serde_as_text!(EtcdEndpoint);

/// Reads a DNS name, without dots at its ends, or an empty text.
fn zone<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    let bare = text.trim_matches('.');
    let sound = |label: &str| (1..=63).contains(&label.len());
    if bare.is_empty() || bare.parse::<NodeName>().is_ok() && bare.split('.').all(sound) {
        return Ok(bare.to_ascii_lowercase());
    }
    Err(D::Error::custom("expected a DNS name, for example \"nodes.example.org\", or an empty text"))
}

fn prefix<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text: String = forms::filled_text(deserializer)?;
    let bare = text.trim_end_matches('/');
    if bare.len() > 1 && bare.starts_with('/') && !bare.contains("//") {
        return Ok(bare.to_owned());
    }
    Err(D::Error::custom("expected the path of CoreDNS's etcd plugin, for example \"/skydns\""))
}

/// Default prefix of CoreDNS's etcd plugin.
const PREFIX: &str = "/skydns";

/// etcd's default client port.
const ETCD_PORT: u16 = 2379;
