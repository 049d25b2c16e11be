//! The tables `server.https` and `server.http`: ports that each stand for one port of every node. The client's
//! TLS or its request names the node.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use crate::config::listen::{AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, WarningKind, value};
use tunnel_base::policy::CertificateGlob;
use tunnel_base::policy::ports::PortTarget;

/// `[server.https]`: ports of a server, with TLS, that each stand for one port of every node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpsConfig {
    /// Whether the server or the target terminates clients' TLS.
    pub mode: HttpsMode,
    /// The ports.
    pub ports: Vec<NodePortConfig>,
    /// Access rules.
    pub access: AccessConfig,
}

/// `[server.http]`: ports of a server, without TLS, that each stand for one port of every node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpConfig {
    /// The ports.
    pub ports: Vec<NodePortConfig>,
    /// Access rules.
    pub access: AccessConfig,
}

/// Who terminates the TLS of clients of `[server.https]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HttpsMode {
    /// This server, with these files. TLS to the target is spoken by the server if it has an identity, otherwise by the
    /// edge.
    Terminate(ListenerTlsConfig, Option<TargetIdentity>),
    /// The target. Only the name is read from the client's TLS.
    Passthrough,
}

/// The identity that this server presents to targets with its own TLS, for clients that have presented a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetIdentity {
    /// PEM file of the certificate.
    pub cert: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
    /// PEM file of the CAs that may sign targets' certificates; `None` trusts any target.
    pub ca: Option<PathBuf>,
}

/// A port of this server, and the port of each node that it stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePortConfig {
    /// Address where clients connect.
    pub at: SocketAddr,
    /// The full key of the entry.
    pub key: String,
    /// The target that the node dials.
    pub stands_for: PortTarget,
}

/// Reads `[server.https]`. Absent access rules are inherited from `ssh`.
pub(crate) fn read(cloud: &mut ConfigTable<'_>, ssh: &AccessConfig, report: &mut Diagnostics) -> HttpsConfig {
    let mut table = cloud.table("https", report);
    let passthrough = table.read(
        "mode",
        |value| match value::text(value)?.as_str() {
            "terminate" => Ok(false),
            "passthrough" => Ok(true),
            _ => Err(value::wrong(value, "expected \"terminate\" or \"passthrough\"")),
        },
        report,
    );
    let passthrough = passthrough.unwrap_or_default();
    let certificates = ListenerTlsConfig::read(&mut table, FILES, report);
    let ports = ports(&mut table, !passthrough, report);
    let asked = !passthrough && certificates.client_ca.is_some();
    let proofs = AuthMethods { password: false, certificate: Some(asked) };
    if passthrough && (table.has("cert") || table.has("key")) {
        let text = "cert and key are ignored: in this mode clients speak TLS with the target";
        report.warn(table.key("mode"), WarningKind::Unexpected, text);
    }
    if passthrough && table.has("client_ca") {
        let found = Some("set, but mode is \"passthrough\"".to_owned());
        let wanted = "let the target request certificates; in this mode clients speak TLS with it";
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

/// Reads `[server.http]`. Absent access rules are inherited from `ssh`.
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

/// Reads the keys for TLS to targets. Returns `None` if edges speak TLS with targets, or after an error, which is
/// recorded. `proved` is true if only some clients are accepted, by their certificates.
fn target_identity(
    table: &mut ConfigTable<'_>,
    proved: bool,
    report: &mut Diagnostics,
) -> Option<TargetIdentity> {
    let cert = table.read("target_cert", value::file_path, report);
    let key = table.read("target_key", value::file_path, report);
    let ca = table.read("target_ca", value::file_path, report);
    let insecure = table.read("target_insecure_skip_verify", value::flag, report).unwrap_or(false);
    for given in ["target_key", "target_ca", "target_insecure_skip_verify"] {
        if table.has(given) && !table.has("target_cert") {
            table.error("target_cert", None, format!("{given} is set; set the certificate too"), report);
        }
    }
    if !table.has("target_cert") {
        return None;
    }
    if !proved {
        let found =
            Some("set, but client_ca or names is missing, or names accepts any certificate".to_owned());
        let wanted = "set client_ca and names to the clients that may use it; it may have rights over every node, so it is not \
                      presented for clients identified only by address";
        table.error("target_cert", found, wanted, report);
    }
    if ca.is_none() && !insecure {
        let wanted = "set the CA that signs targets' certificates, or set target_insecure_skip_verify = true";
        table.error("target_ca", None, wanted, report);
    }
    if insecure {
        let text = "targets are not verified: anyone between an edge and a target can impersonate the target";
        report.warn(table.key("target_insecure_skip_verify"), WarningKind::Insecure, text);
    }
    // One file may contain both.
    let (cert, ca) = (cert?, ca.filter(|_| !insecure));
    Some(TargetIdentity { key: key.unwrap_or_else(|| cert.clone()), cert, ca })
}

/// Reads the ports. `reads_host` is true if the Host of requests can be read there.
fn ports(table: &mut ConfigTable<'_>, reads_host: bool, report: &mut Diagnostics) -> Vec<NodePortConfig> {
    let ip = table.read("listen_ip", value::parsed, report).unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let mut all = table.table("ports", report);
    let entries = all.named(TARGET, report).into_iter();
    entries.filter_map(|(name, entry)| node_port((ip, reads_host), &name, entry, report)).collect()
}

/// Reads one port. Returns `None` if the entry is unusable, which is recorded.
fn node_port(
    (ip, reads_host): (IpAddr, bool),
    name: &str,
    mut entry: ConfigTable<'_>,
    report: &mut Diagnostics,
) -> Option<NodePortConfig> {
    let port = name.parse::<u16>().ok().filter(|_| name.bytes().all(|b| b.is_ascii_digit()));
    if port.is_none() {
        entry.name_error(name, "expected a port as the key: a number from 0 to 65535 in quotes", report);
    }
    let stands_for = entry.read(TARGET, value::parsed::<PortTarget>, report);
    if stands_for.is_none() && !entry.has(TARGET) {
        entry.error(
            TARGET,
            None,
            "set the target that each node dials, as in \"127.0.0.1:10250\", or \"host\"",
            report,
        );
    }
    if stands_for == Some(PortTarget::Host) && !reads_host {
        let found = Some("\"host\", but mode is \"passthrough\"".to_owned());
        entry.error(
            TARGET,
            found,
            "set the target that each node dials; the Host cannot be read in this mode",
            report,
        );
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
            more => format!("{stands_for} at every node (other entries of this table: {})", more - 1),
        };
        access.warn_if_open(table.key("ports"), *at, proofs, &reached, report);
    }
}

/// SuperEdge's paths of certificate and key.
const FILES: [&str; 2] =
    ["/etc/tunnel/certs/apiserver-kubelet-server.crt", "/etc/tunnel/certs/apiserver-kubelet-server.key"];

/// The key that a plain text value stands for.
const TARGET: &str = "target";

// TLS of a listener: keys that the tables of several listeners share.

/// The TLS files of a server's listener: its certificate and key, and the CA of its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerTlsConfig {
    /// The table that sets them.
    pub table: String,
    /// PEM file of the certificate chain, leaf first.
    pub cert: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
    /// PEM file of the CA that signs clients' certificates; `None` requests no certificates.
    pub client_ca: Option<PathBuf>,
}

impl ListenerTlsConfig {
    /// Reads the keys. `files` are the default paths of certificate and key.
    pub(crate) fn read(table: &mut ConfigTable<'_>, files: [&str; 2], report: &mut Diagnostics) -> Self {
        let [cert, key] = files;
        Self {
            cert: table.read("cert", value::file_path, report).unwrap_or_else(|| cert.into()),
            key: table.read("key", value::file_path, report).unwrap_or_else(|| key.into()),
            client_ca: table.read("client_ca", value::file_path, report),
            table: table.key(""),
        }
    }

    /// Returns the full key of one of the files.
    pub fn key(&self, file: &str) -> String {
        format!("{}{file}", self.table)
    }
}
