//! `[mode.cloud.registry]`: where this server publishes its nodes, and where it finds nodes of its peers.

use std::path::PathBuf;

use crate::config::server::kubernetes::{self, ClusterSettings, SuperEdgeTables};
use crate::config::server::peers::{self, PeerConfig};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};
use tunnel_base::names::{NodeName, Target};
use tunnel_base::policy::Glob;

/// `[mode.cloud.registry]`: where a server publishes its nodes, and where it finds its peers.
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

/// A value of `publish` in `[mode.cloud.registry]`: the kind of store to publish in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreKind {
    None,
    Hosts,
    Etcd,
    ConfigMap,
}

pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    superedge: SuperEdgeTables,
    env: &Environment,
    report: &mut Diagnostics,
) -> RegistrySettings {
    let mut table = cloud.table("registry", report);
    let zone = table.read("zone", zone, report).unwrap_or_default();
    let publish_names = table.list("publish_names", value::parsed::<Glob>, report).unwrap_or_default();
    let publish_kind = table.read("publish", kind, report);
    let kind = publish_kind.unwrap_or(StoreKind::None);
    let hosts = table.read("hosts", value::file_path, report);
    let etcd = etcd(&mut table, kind == StoreKind::Etcd, PREFIX, report);
    let mut peers = peers::read(&mut table, report);
    let rebalance = table.read("rebalance", value::flag, report).unwrap_or(true);
    let in_map = publish_kind.map(|kind| kind == StoreKind::ConfigMap);
    let (configmap, cluster, named) = kubernetes::read(&mut table, superedge, in_map, env, report);
    let publish = match kind {
        StoreKind::None | StoreKind::ConfigMap => {
            configmap.map_or(PublishConfig::None, PublishConfig::ConfigMap)
        }
        StoreKind::Hosts => hosts.map_or_else(
            || {
                if !table.has("hosts") {
                    table.error("hosts", None, "set the hosts file that CoreDNS reads", report);
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
    // Publishing and a zone imply several servers.
    peers.named = peers.named.or(named);
    peers.several |= publish != PublishConfig::None || !zone.is_empty() || cluster.is_some();
    RegistrySettings { zone, publish_names, publish, peers, rebalance, cluster }
}

/// Reads the keys of an etcd. `above` is the default prefix.
pub(crate) fn etcd(
    table: &mut ConfigTable<'_>,
    used: bool,
    above: &str,
    report: &mut Diagnostics,
) -> EtcdSettings {
    let before = report.fault_count();
    let endpoints = table.list("etcd", endpoint, report).unwrap_or_default();
    if used && endpoints.is_empty() && report.fault_count() == before {
        table.error("etcd", None, "list etcd's members: [\"https://10.0.0.5:2379\"]", report);
    }
    let prefix = table.read("etcd_prefix", prefix, report).unwrap_or_else(|| above.to_owned());
    let ca = table.read("etcd_ca", value::file_path, report);
    if ca.is_none() && !table.has("etcd_ca") && endpoints.iter().any(|member| member.tls) {
        let wanted = "an https:// member requires the CA that signed its certificate";
        table.error("etcd_ca", None, wanted, report);
    }
    let cert = table.read("etcd_cert", value::file_path, report);
    let key = table.read("etcd_key", value::file_path, report);
    let user = table.read("etcd_user", value::nonempty, report);
    let password_file = table.read("etcd_password_file", value::file_path, report);
    for (one, other) in [
        ("etcd_cert", "etcd_key"),
        ("etcd_key", "etcd_cert"),
        ("etcd_user", "etcd_password_file"),
        ("etcd_password_file", "etcd_user"),
    ] {
        if table.has(one) && !table.has(other) {
            table.error(other, None, format!("{one} is useless without it"), report);
        }
    }
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

/// Default prefix of CoreDNS's etcd plugin.
const PREFIX: &str = "/skydns";

/// etcd's default client port.
const ETCD_PORT: u16 = 2379;
