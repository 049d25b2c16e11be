//! `[mode.cloud.registry]`: where other programs learn which node is at this pod, and we at which other pod one is.

use std::path::PathBuf;

use crate::config::server::kubernetes::{self, ClusterSettings, SuperEdge};
use crate::config::server::peers::{self, PeerConfig};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};
use tunnel_base::names::{NodeName, Target};
use tunnel_base::policy::Glob;

/// `[mode.cloud.registry]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrySettings {
    /// Appended to node names where they are published, without dots at its ends; may be empty.
    pub zone: String,
    /// Without a zone: which names of several labels are published and asked of DNS, beside those that are known.
    pub publish_names: Vec<Glob>,
    /// Where they are published.
    pub publish: PublishConfig,
    /// Where the other pods are.
    pub peers: PeerConfig,
    /// Whether edges are asked to link to a pod that has fewer nodes.
    pub rebalance: bool,
    /// The cluster of Kubernetes that is asked for something; there if records are published in a ConfigMap.
    pub cluster: Option<ClusterSettings>,
}

/// Where "node is at this pod" is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishConfig {
    /// Nowhere.
    None,
    /// In a hosts file.
    Hosts(PathBuf),
    /// In etcd.
    Etcd(EtcdSettings),
    /// In the ConfigMap of this name.
    ConfigMap(String),
}

impl PublishConfig {
    /// The word for it in the settings; `None`: nowhere.
    pub fn name(&self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Hosts(_) => Some("hosts"),
            Self::Etcd(_) => Some("etcd"),
            Self::ConfigMap(_) => Some("configmap"),
        }
    }
}

/// An etcd, and how to be let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdSettings {
    /// Its members, tried in turn; at least one.
    pub endpoints: Vec<EtcdEndpoint>,
    /// Above all keys; begins with `/` and does not end with it.
    pub prefix: String,
    /// PEM file of the authority that signs the members' certificates; present if a member takes TLS.
    pub ca: Option<PathBuf>,
    /// PEM files of the certificate to show, and of its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// User, and the file of its password.
    pub login: Option<(String, PathBuf)>,
}

/// One member of an etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdEndpoint {
    /// Whether it takes TLS.
    pub tls: bool,
    /// Where it listens.
    pub at: Target,
}

/// The values of `publish`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreKind {
    None,
    Hosts,
    Etcd,
    ConfigMap,
}

pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    superedge: SuperEdge,
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
                    table.error("hosts", None, "name the hosts file that CoreDNS reads", report);
                }
                PublishConfig::None
            },
            PublishConfig::Hosts,
        ),
        StoreKind::Etcd => PublishConfig::Etcd(etcd),
    };
    let pod_ip_needed = publish != PublishConfig::None || kind != StoreKind::None || cluster.is_some();
    if pod_ip_needed && env.pod_ip.as_ref().is_none_or(String::is_empty) {
        let wanted = "it is the address that is published, and known to other pods: set it, in Kubernetes from status.podIP";
        report.error("POD_IP", None, wanted);
    }
    table.finish(report);
    // Publishing and a zone are for several pods.
    peers.named = peers.named.or(named);
    peers.several |= publish != PublishConfig::None || !zone.is_empty() || cluster.is_some();
    RegistrySettings { zone, publish_names, publish, peers, rebalance, cluster }
}

/// The keys that name an etcd; `above` is the prefix by default.
pub(crate) fn etcd(
    table: &mut ConfigTable<'_>,
    used: bool,
    above: &str,
    report: &mut Diagnostics,
) -> EtcdSettings {
    let before = report.fault_count();
    let endpoints = table.list("etcd", endpoint, report).unwrap_or_default();
    if used && endpoints.is_empty() && report.fault_count() == before {
        table.error("etcd", None, "name etcd's members: [\"https://10.0.0.5:2379\"]", report);
    }
    let prefix = table.read("etcd_prefix", prefix, report).unwrap_or_else(|| above.to_owned());
    let ca = table.read("etcd_ca", value::file_path, report);
    if ca.is_none() && !table.has("etcd_ca") && endpoints.iter().any(|member| member.tls) {
        let wanted = "an https:// member is only believed with the authority that signed its certificate";
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
            table.error(other, None, format!("{one} is of no use without it"), report);
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
        _ => Err(value::wrong(value, "want \"none\", \"hosts\", \"etcd\" or \"configmap\"")),
    }
}

/// A DNS name, its dots at the ends taken off, or nothing.
fn zone(value: &toml::de::DeValue<'_>) -> Result<String, ValueError> {
    let text = value::text(value)?;
    let bare = text.trim_matches('.');
    let sound = |label: &str| (1..=63).contains(&label.len());
    if bare.is_empty() || bare.parse::<NodeName>().is_ok() && bare.split('.').all(sound) {
        return Ok(bare.to_ascii_lowercase());
    }
    Err(value::wrong(value, "want a DNS name, for example \"nodes.example.org\", or an empty text"))
}

fn prefix(value: &toml::de::DeValue<'_>) -> Result<String, ValueError> {
    let text = value::nonempty(value)?;
    let bare = text.trim_end_matches('/');
    if bare.len() > 1 && bare.starts_with('/') && !bare.contains("//") {
        return Ok(bare.to_owned());
    }
    Err(value::wrong(value, "want the path of CoreDNS's etcd plugin, for example \"/skydns\""))
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
        _ => Err(value::wrong(value, "want http://host:port or https://host:port")),
    }
}

/// Where CoreDNS's etcd plugin looks by default.
const PREFIX: &str = "/skydns";

/// etcd's own port for clients.
const ETCD_PORT: u16 = 2379;
