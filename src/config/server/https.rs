//! The tables `mode.cloud.https` and `mode.cloud.http`: ports that stand for one port of every node; the client's TLS
//! or its request names the node.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use crate::config::listen::{AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, WarningKind, value};
use tunnel_base::policy::CertificateGlob;
use tunnel_base::policy::ports::PortTarget;

/// `[mode.cloud.https]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpsConfig {
    /// Whether the pod or the target ends the clients' TLS.
    pub mode: HttpsMode,
    /// Its ports.
    pub ports: Vec<NodePortConfig>,
    /// Who may come in.
    pub access: AccessConfig,
}

/// `[mode.cloud.http]`: the same without TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpConfig {
    /// Its ports.
    pub ports: Vec<NodePortConfig>,
    /// Who may come in.
    pub access: AccessConfig,
}

/// Who ends the TLS of clients of `[mode.cloud.https]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HttpsMode {
    /// This pod, with these files; the pod as well speaks TLS with the target, or else the edge does.
    Terminate(ListenerTlsConfig, Option<TargetIdentity>),
    /// The target: of the client's TLS only the name is read.
    Passthrough,
}

/// What this pod shows targets with which it speaks TLS itself, for clients that have shown a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetIdentity {
    /// PEM file of the certificate.
    pub cert: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
    /// PEM file of the authorities that may sign targets' certificates; `None`: any target is believed.
    pub ca: Option<PathBuf>,
}

/// A port of this pod, and what it stands for at each node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePortConfig {
    /// Address where clients come in.
    pub at: SocketAddr,
    /// The whole key of the entry.
    pub key: String,
    /// What the node dials.
    pub stands_for: PortTarget,
}

/// Reads `[mode.cloud.https]`; `ssh` holds for what it leaves out of who may come in.
pub(crate) fn read(cloud: &mut ConfigTable<'_>, ssh: &AccessConfig, report: &mut Diagnostics) -> HttpsConfig {
    let mut table = cloud.table("https", report);
    let passthrough = table.read(
        "mode",
        |value| match value::text(value)?.as_str() {
            "terminate" => Ok(false),
            "passthrough" => Ok(true),
            _ => Err(value::wrong(value, "want \"terminate\" or \"passthrough\"")),
        },
        report,
    );
    let passthrough = passthrough.unwrap_or_default();
    let certificates = ListenerTlsConfig::read(&mut table, FILES, None, report);
    let ports = ports(&mut table, !passthrough, report);
    let asked = !passthrough && certificates.client_ca.is_some();
    let proofs = AuthMethods { password: false, certificate: Some(asked) };
    if passthrough && (table.has("cert") || table.has("key")) {
        let text = "cert and key are not read: in this mode clients speak TLS with the target";
        report.warn(table.key("mode"), WarningKind::Unexpected, text);
    }
    if passthrough && table.has("client_ca") {
        let found = Some("given, but mode is \"passthrough\"".to_owned());
        let wanted = "have the target ask for certificates: in this mode clients speak TLS with it";
        table.error("client_ca", found, wanted, report);
    }
    let access = AccessConfig::read(&mut table, proofs, ssh, report);
    let named = !access.names.is_empty() && !access.names.iter().any(CertificateGlob::is_everyone);
    let targets = target_identity(&mut table, asked && named, report);
    let mode = if passthrough { HttpsMode::Passthrough } else { HttpsMode::Terminate(certificates, targets) };
    warn_if_open(&table, &ports, &access, proofs, report);
    table.finish(report);
    HttpsConfig { mode, ports, access }
}

/// Reads `[mode.cloud.http]`; `ssh` holds for what it leaves out of who may come in.
pub(crate) fn read_http(
    cloud: &mut ConfigTable<'_>,
    ssh: &AccessConfig,
    report: &mut Diagnostics,
) -> HttpConfig {
    let mut table = cloud.table("http", report);
    let proofs = AuthMethods { password: false, certificate: None };
    let ports = ports(&mut table, true, report);
    let access = AccessConfig::read(&mut table, proofs, ssh, report);
    warn_if_open(&table, &ports, &access, proofs, report);
    table.finish(report);
    HttpConfig { ports, access }
}

/// `None`: edges speak TLS with targets, or there is a fault, which is noted. `proved`: clients are known by certificates,
/// and some of them only.
fn target_identity(
    table: &mut ConfigTable<'_>,
    proved: bool,
    report: &mut Diagnostics,
) -> Option<TargetIdentity> {
    let cert = table.read("target_cert", value::file_path, report);
    let key = table.read("target_key", value::file_path, report);
    let ca = table.read("target_ca", value::file_path, report);
    let insecure = table.read("target_insecure", value::flag, report).unwrap_or(false);
    for given in ["target_key", "target_ca", "target_insecure"] {
        if table.has(given) && !table.has("target_cert") {
            table.error("target_cert", None, format!("{given} is given: name the certificate too"), report);
        }
    }
    if !table.has("target_cert") {
        return None;
    }
    if !proved {
        let found = Some("given, but not both client_ca and names, or names let everybody in".to_owned());
        let wanted = "say with them whose requests it is shown for: it may carry rights over every node, so it is shown for \
                      nobody who is known by an address alone";
        table.error("target_cert", found, wanted, report);
    }
    if ca.is_none() && !insecure {
        let wanted = "name the authority that signs targets' certificates, or say target_insecure = true";
        table.error("target_ca", None, wanted, report);
    }
    if insecure {
        let text = "targets are not verified: whoever stands between an edge and a target can pose as it";
        report.warn(table.key("target_insecure"), WarningKind::Insecure, text);
    }
    // One file may hold both.
    let (cert, ca) = (cert?, ca.filter(|_| !insecure));
    Some(TargetIdentity { key: key.unwrap_or_else(|| cert.clone()), cert, ca })
}

/// `reads_host`: whether the Host of requests can be known there.
fn ports(table: &mut ConfigTable<'_>, reads_host: bool, report: &mut Diagnostics) -> Vec<NodePortConfig> {
    let ip = table.read("listen_ip", value::parsed, report).unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let mut all = table.table("addr", report);
    let entries = all.named(TO, report).into_iter();
    entries.filter_map(|(name, entry)| node_port((ip, reads_host), &name, entry, report)).collect()
}

/// `None`: the entry is of no use, which is noted.
fn node_port(
    (ip, reads_host): (IpAddr, bool),
    name: &str,
    mut entry: ConfigTable<'_>,
    report: &mut Diagnostics,
) -> Option<NodePortConfig> {
    let port = name.parse::<u16>().ok().filter(|_| name.bytes().all(|b| b.is_ascii_digit()));
    if port.is_none() {
        entry.name_error(name, "want a port as the key: a number from 0 to 65535 in quotes", report);
    }
    let stands_for = entry.read(TO, value::parsed::<PortTarget>, report);
    if stands_for.is_none() && !entry.has(TO) {
        entry.error(
            TO,
            None,
            "name what each node dials, as in \"127.0.0.1:10250\", or say \"host\"",
            report,
        );
    }
    if stands_for == Some(PortTarget::Host) && !reads_host {
        let found = Some("\"host\", but mode is \"passthrough\"".to_owned());
        entry.error(TO, found, "name what each node dials: no Host is read in this mode", report);
    }
    let key = entry.path().to_owned();
    entry.finish(report);
    Some(NodePortConfig { at: SocketAddr::new(ip, port?), key, stands_for: stands_for? })
}

fn warn_if_open(
    table: &ConfigTable<'_>,
    ports: &[NodePortConfig],
    access: &AccessConfig,
    proofs: AuthMethods,
    report: &mut Diagnostics,
) {
    if let Some(NodePortConfig { at, stands_for, .. }) = ports.first() {
        let reached = match ports.len() {
            1 => format!("{stands_for} at every node"),
            more => format!("{stands_for} at every node, and so with {} more of this table", more - 1),
        };
        access.warn_if_open(table.key("addr"), *at, proofs, &reached, report);
    }
}

/// Where SuperEdge has certificate and key.
const FILES: [&str; 2] =
    ["/etc/tunnel/certs/apiserver-kubelet-server.crt", "/etc/tunnel/certs/apiserver-kubelet-server.key"];

/// The key that an entry which is a text stands for.
const TO: &str = "to";

// What a port behind TLS shows its clients, and asks of them: keys that the tables of several front ends have.

/// The files of a port behind TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerTlsConfig {
    /// The table in which they are named.
    pub table: String,
    /// PEM file of the certificate, own first.
    pub cert: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
    /// PEM file of the authority that signs clients' certificates; `None`: none is asked for.
    pub client_ca: Option<PathBuf>,
}

impl ListenerTlsConfig {
    /// Reads the keys. `files` are certificate and key by default, `older` their keys' older names.
    pub(crate) fn read(
        table: &mut ConfigTable<'_>,
        files: [&str; 2],
        older: Option<[&'static str; 2]>,
        report: &mut Diagnostics,
    ) -> Self {
        let older = older.map_or([None; 2], |older| older.map(Some));
        let mut file = |key, older: Option<&'static str>, default: &str| {
            let path = table.read(key, value::file_path, report);
            let Some(older) = older else { return path.unwrap_or_else(|| default.into()) };
            let other = table.read(older, value::file_path, report);
            if table.has(key) && table.has(older) {
                let found = format!("{older} is given as well");
                table.error(key, Some(found), format!("both name one file: keep {key}"), report);
            }
            path.or(other).unwrap_or_else(|| default.into())
        };
        Self {
            cert: file("cert", older[0], files[0]),
            key: file("key", older[1], files[1]),
            client_ca: table.read("client_ca", value::file_path, report),
            table: table.key(""),
        }
    }

    /// The whole key of one of the files.
    pub fn key(&self, file: &str) -> String {
        format!("{}{file}", self.table)
    }
}
