//! `[server.csr]`: certificates that the cluster's signers issue for this server.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use toml::de::DeValue;

use crate::config::server::kubernetes::{self, ClusterSettings};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};

/// The certificates to request, and where they are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerCsrConfig {
    /// The cluster that issues them.
    pub cluster: ClusterSettings,
    /// Directory of the files, one for each certificate with its key.
    pub dir: PathBuf,
    /// Names in the certificate for the ports with TLS; `None` requests none.
    pub server: Option<ServerNames>,
    /// Whether to request a certificate that is presented to targets.
    pub proxy_client: bool,
    /// The requested validity; `None` leaves it to the signer.
    pub lifetime: Option<Duration>,
    /// PEM file of the CA that signs edges' certificates; `None` if edges have only tokens.
    pub edge_ca: Option<PathBuf>,
}

/// The names at which clients reach the ports of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerNames {
    /// Services in our namespace.
    pub services: Vec<String>,
    /// Names and addresses in addition to those of the Services.
    pub names: BTreeSet<String>,
}

/// A profile of certificates that `[server.csr]` can request for a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProfileKind {
    Server,
    ProxyClient,
}

/// Reads the table. Returns `None` if nothing is requested.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<ServerCsrConfig> {
    let mut table = cloud.table("csr", report);
    let kinds = table.list("profiles", kind, report).unwrap_or_default();
    let dir = table.read("dir", value::file_path, report).unwrap_or_else(|| DIR.into());
    let services = table.list("services", kubernetes::name, report).unwrap_or_default();
    let services: Vec<_> = services.into_iter().flatten().collect();
    let names: BTreeSet<_> = table.list("names", name, report).unwrap_or_default().into_iter().collect();
    let lifetime = issuing::lifetime(&mut table, report);
    let edge_ca = table.read("edge_ca", value::file_path, report);
    let server = kinds.contains(&ProfileKind::Server);
    if server && services.is_empty() && names.is_empty() {
        let wanted =
            "list the Services that route to this server's ports, or in names their DNS names and addresses";
        table.error("services", Some("neither services nor names is set".to_owned()), wanted, report);
    }
    let asks = if kinds.is_empty() { "edge_ca" } else { "profiles" };
    let cluster = issuing::cluster(&mut table, asks, !kinds.is_empty() || edge_ca.is_some(), env, report);
    table.finish(report);
    let server = server.then_some(ServerNames { services, names });
    let proxy_client = kinds.contains(&ProfileKind::ProxyClient);
    Some(ServerCsrConfig { cluster: cluster?, dir, server, proxy_client, lifetime, edge_ca })
}

/// Keys that the tables of servers and edges share.
pub(crate) mod issuing {
    use super::Duration;
    use crate::config::server::csr::{LONGEST, SHORTEST};
    use crate::config::server::kubernetes::{self, ClusterSettings};
    use crate::config::table::ConfigTable;
    use crate::config::{Diagnostics, Environment, value};
    use crate::parts;

    /// Reads the requested validity of a certificate.
    pub(crate) fn lifetime(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<Duration> {
        table.read("lifetime", value::duration(SHORTEST..=LONGEST), report)
    }

    /// Returns the cluster if one is `wanted`; `key` is the key that requires it.
    pub(crate) fn cluster(
        table: &mut ConfigTable<'_>,
        key: &'static str,
        wanted: bool,
        env: &Environment,
        report: &mut Diagnostics,
    ) -> Option<ClusterSettings> {
        let reached = kubernetes::reached(parts::CSR, env);
        if let (Err(why), true) = (&reached, wanted) {
            table.error(key, Some("requires Kubernetes".to_owned()), *why, report);
        }
        reached.ok().filter(|_| wanted)
    }
}

fn kind(value: &DeValue<'_>) -> Result<ProfileKind, ValueError> {
    match value::text(value)?.as_str() {
        "server" => Ok(ProfileKind::Server),
        "proxy-client" => Ok(ProfileKind::ProxyClient),
        _ => Err(value::wrong(value, "expected \"server\" or \"proxy-client\"")),
    }
}

/// Reads a DNS name or an address.
fn name(value: &DeValue<'_>) -> Result<String, ValueError> {
    let name = value::nonempty(value)?;
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b':');
    if name.bytes().all(sound) && (!name.contains(':') || name.parse::<std::net::IpAddr>().is_ok()) {
        return Ok(name.to_ascii_lowercase());
    }
    Err(value::wrong(value, "expected a DNS name or an address, without a port"))
}

const DIR: &str = "/var/lib/tunnel/pki";

/// The minimum in Kubernetes.
const SHORTEST: Duration = Duration::from_secs(600);
const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
