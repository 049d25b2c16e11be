//! `[server.dns]`: where this server publishes its nodes, and where it finds nodes of its peers.

use std::path::PathBuf;

use crate::config::cluster::{self, ClusterSettings};
use crate::config::server::peers::{self, PeerConfig, PeerKey};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};
use crate::parts;
use tunnel_base::names::{NodeName, Target};
use tunnel_base::policy::Glob;

/// `[server.dns]`: where a server publishes its nodes, and where it finds its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrySettings {
    /// Suffix of published node names, without dots at its ends; may be empty.
    pub zone: String,
    /// Without a zone: patterns of dotted names that are published and looked up in DNS, in addition to the known
    /// names.
    pub publish_names: Vec<Glob>,
    /// Where nodes are published.
    pub publish: PublishConfig,
    /// Where the peers are.
    pub peers: PeerConfig,
    /// Whether edges are asked to connect to peers that have fewer nodes.
    pub rebalance: bool,
    /// The Kubernetes cluster, if it is used. Always set if records are published in a ConfigMap.
    pub cluster: Option<ClusterSettings>,
}

/// The store where a server publishes which nodes are connected to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishConfig {
    /// Nothing is published.
    None,
    /// A hosts file.
    Hosts(PathBuf),
    /// An etcd.
    Etcd(EtcdSettings),
    /// The ConfigMap of this name.
    ConfigMap(String),
}

impl PublishConfig {
    /// Returns the ConfigMap, if nodes are published in one.
    pub(crate) fn configmap(&self) -> Option<&String> {
        if let Self::ConfigMap(name) = self { Some(name) } else { None }
    }
}

impl PublishConfig {
    /// Returns its name in the config, or `None` if nothing is published.
    pub fn name(&self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Hosts(_) => Some("hosts"),
            Self::Etcd(_) => Some("etcd"),
            Self::ConfigMap(_) => Some("configmap"),
        }
    }
}

/// An etcd cluster in the config of a server, with the credentials for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdSettings {
    /// Its members, tried in turn; at least one.
    pub endpoints: Vec<EtcdEndpoint>,
    /// Prefix of all keys. Begins with `/` and does not end with it.
    pub prefix: String,
    /// PEM file of the CA that signs the members' certificates; set if a member uses TLS.
    pub ca: Option<PathBuf>,
    /// PEM files of the client certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// User name, and the file of its password.
    pub login: Option<(String, PathBuf)>,
}

/// The address of one member of an etcd cluster in the config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdEndpoint {
    /// Whether it uses TLS.
    pub tls: bool,
    /// Its address.
    pub at: Target,
}

/// A value of `publish` in `[server.dns]`: the kind of store to publish in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreKind {
    None,
    Hosts,
    Etcd,
    ConfigMap,
}

/// Reads `[server.dns]` and `[server.peers]`.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> RegistrySettings {
    let mut table = cloud.table("dns", report);
    let mut peer_table = cloud.table("peers", report);
    let zone = table.read("zone", zone, report).unwrap_or_default();
    let publish_names = table.list("publish_names", value::parsed::<Glob>, report).unwrap_or_default();
    let kind = table.read("publish", kind, report).unwrap_or(StoreKind::None);
    let hosts = table.read("hosts_file", value::file_path, report);
    let etcd = etcd(&mut table, kind == StoreKind::Etcd, PREFIX, report);
    let mut peers = peers::read(&mut peer_table, &mut table, report);
    let rebalance = peer_table.read("rebalance", value::flag, report).unwrap_or(true);
    let configmap = table.read("configmap", cluster::name, report).flatten();
    let service = peer_table.read("kubernetes_service", cluster::name, report).flatten();
    let reached = cluster::reached(parts::CLUSTER, env);
    if let Err(why) = reached {
        let requires = Some("requires Kubernetes".to_owned());
        if kind == StoreKind::ConfigMap {
            table.error("publish", requires.clone(), why, report);
        }
        if service.is_some() {
            peer_table.error("kubernetes_service", requires, why, report);
        }
    }
    let in_map = kind == StoreKind::ConfigMap;
    let cluster = reached.ok().filter(|_| in_map || service.is_some());
    let publish = match kind {
        StoreKind::ConfigMap if cluster.is_some() => {
            PublishConfig::ConfigMap(configmap.unwrap_or_else(|| CONFIGMAP.to_owned()))
        }
        StoreKind::None | StoreKind::ConfigMap => PublishConfig::None,
        StoreKind::Hosts => hosts.map_or_else(
            || {
                if !table.has("hosts_file") {
                    table.error("hosts_file", None, "set the hosts file that CoreDNS reads", report);
                }
                PublishConfig::None
            },
            PublishConfig::Hosts,
        ),
        StoreKind::Etcd => PublishConfig::Etcd(etcd),
    };
    let pod_ip_needed = publish != PublishConfig::None || kind != StoreKind::None || cluster.is_some();
    if pod_ip_needed && env.pod_ip.as_ref().is_none_or(String::is_empty) {
        let wanted = "set it to the address for publishing and for peers; in Kubernetes from status.podIP";
        report.error("POD_IP", None, wanted);
    }
    table.finish(report);
    peer_table.finish(report);
    if service.is_some() && cluster.is_some() && peers.named.is_none() {
        let must_link = !report.implied.contains(SERVICE);
        peers.named = Some(PeerKey { key: SERVICE, must_link });
    }
    // Publishing and a zone imply several servers.
    peers.several |= publish != PublishConfig::None || !zone.is_empty() || cluster.is_some();
    let cluster = cluster.map(|cluster| ClusterSettings { service, ..cluster });
    RegistrySettings { zone, publish_names, publish, peers, rebalance, cluster }
}

/// Reads the keys of an etcd. `above` is the default prefix.
pub(crate) fn etcd(
    table: &mut ConfigTable<'_>,
    used: bool,
    above: &str,
    report: &mut Diagnostics,
) -> EtcdSettings {
    let mut etcd = table.table("etcd", report);
    let before = report.fault_count();
    let endpoints = etcd.list("endpoints", endpoint, report).unwrap_or_default();
    if used && endpoints.is_empty() && report.fault_count() == before {
        etcd.error("endpoints", None, "list etcd's members: [\"https://10.0.0.5:2379\"]", report);
    }
    let prefix = etcd.read("prefix", prefix, report).unwrap_or_else(|| above.to_owned());
    let ca = etcd.read("ca", value::file_path, report);
    if ca.is_none() && !etcd.has("ca") && endpoints.iter().any(|member| member.tls) {
        let wanted = "an https:// member requires the CA that signed its certificate";
        etcd.error("ca", None, wanted, report);
    }
    let cert = etcd.read("cert", value::file_path, report);
    let key = etcd.read("key", value::file_path, report);
    let user = etcd.read("user", value::nonempty, report);
    let password_file = etcd.read("password_file", value::file_path, report);
    for (one, other) in
        [("cert", "key"), ("key", "cert"), ("user", "password_file"), ("password_file", "user")]
    {
        if etcd.has(one) && !etcd.has(other) {
            etcd.error(other, None, format!("{one} is useless without it"), report);
        }
    }
    etcd.finish(report);
    EtcdSettings { endpoints, prefix, ca, identity: cert.zip(key), login: user.zip(password_file) }
}

fn kind(value: &toml::de::DeValue<'_>) -> Result<StoreKind, ValueError> {
    match value::text(value)?.as_str() {
        "none" => Ok(StoreKind::None),
        "hosts" => Ok(StoreKind::Hosts),
        "etcd" => Ok(StoreKind::Etcd),
        "configmap" => Ok(StoreKind::ConfigMap),
        _ => Err(value::wrong(value, "expected \"none\", \"hosts\", \"etcd\" or \"configmap\"")),
    }
}

/// Reads a DNS name, without dots at its ends, or an empty text.
fn zone(value: &toml::de::DeValue<'_>) -> Result<String, ValueError> {
    let text = value::text(value)?;
    let bare = text.trim_matches('.');
    let sound = |label: &str| (1..=63).contains(&label.len());
    if bare.is_empty() || bare.parse::<NodeName>().is_ok() && bare.split('.').all(sound) {
        return Ok(bare.to_ascii_lowercase());
    }
    Err(value::wrong(value, "expected a DNS name, for example \"nodes.example.org\", or an empty text"))
}

fn prefix(value: &toml::de::DeValue<'_>) -> Result<String, ValueError> {
    let text = value::nonempty(value)?;
    let bare = text.trim_end_matches('/');
    if bare.len() > 1 && bare.starts_with('/') && !bare.contains("//") {
        return Ok(bare.to_owned());
    }
    Err(value::wrong(value, "expected the path of CoreDNS's etcd plugin, for example \"/skydns\""))
}

fn endpoint(value: &toml::de::DeValue<'_>) -> Result<EtcdEndpoint, ValueError> {
    let text = value::text(value)?;
    let parts = text.strip_suffix('/').unwrap_or(&text).split_once("://");
    let tls = match parts {
        Some(("http", _)) => Some(false),
        Some(("https", _)) => Some(true),
        _ => None,
    };
    let at = parts.and_then(|(_, at)| at.parse().or_else(|_| format!("{at}:{ETCD_PORT}").parse()).ok());
    match (tls, at) {
        (Some(tls), Some(at)) => Ok(EtcdEndpoint { tls, at }),
        _ => Err(value::wrong(value, "expected http://host:port or https://host:port")),
    }
}

/// SuperEdge's name of the ConfigMap.
const CONFIGMAP: &str = "tunnel-nodes";

/// The key that names a Service of which the endpoints are the servers.
const SERVICE: &str = "server.peers.kubernetes_service";

/// Default prefix of CoreDNS's etcd plugin.
const PREFIX: &str = "/skydns";

/// etcd's default client port.
const ETCD_PORT: u16 = 2379;
