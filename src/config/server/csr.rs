//! `[mode.cloud.csr]`: certificates that the cluster's signers issue for this pod.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use toml::de::DeValue;

use crate::config::server::kubernetes::{self, ClusterSettings};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};

/// What is asked for, and where it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerCsrConfig {
    /// The cluster that is asked.
    pub cluster: ClusterSettings,
    /// Directory of the files, one for each certificate with its key.
    pub dir: PathBuf,
    /// Whether there is one for the ports behind TLS, and by which names those are reached.
    pub server: Option<ServerNames>,
    /// Whether there is one that is shown to targets.
    pub proxy_client: bool,
    /// How long each is to be valid; `None`: the signer decides.
    pub lifetime: Option<Duration>,
    /// PEM file of the authority that signs edges' certificates; `None`: edges prove themselves by tokens alone.
    pub agent_ca: Option<PathBuf>,
}

/// By what the ports of a pod are reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerNames {
    /// Services of our namespace.
    pub services: Vec<String>,
    /// Names and addresses beside what those have.
    pub names: BTreeSet<String>,
}

/// The profiles that a pod may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProfileKind {
    Server,
    ProxyClient,
}

/// Reads the table; `None`: nothing is asked for.
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
    let agent_ca = table.read("agent_ca", value::file_path, report);
    let server = kinds.contains(&ProfileKind::Server);
    if server && services.is_empty() && names.is_empty() {
        let wanted =
            "name the Services by which this pod's ports are reached, or with names what they are reached by";
        table.error("services", Some("neither services nor names".to_owned()), wanted, report);
    }
    let asks = if kinds.is_empty() { "agent_ca" } else { "profiles" };
    let cluster = issuing::cluster(&mut table, asks, !kinds.is_empty() || agent_ca.is_some(), env, report);
    table.finish(report);
    let server = server.then_some(ServerNames { services, names });
    let proxy_client = kinds.contains(&ProfileKind::ProxyClient);
    Some(ServerCsrConfig { cluster: cluster?, dir, server, proxy_client, lifetime, agent_ca })
}

/// What the tables of pods and edges share.
pub(crate) mod issuing {
    use super::Duration;
    use crate::config::server::csr::{LONGEST, SHORTEST};
    use crate::config::server::kubernetes::{self, ClusterSettings};
    use crate::config::table::ConfigTable;
    use crate::config::{Diagnostics, Environment, value};

    /// How long a certificate is to be valid.
    pub(crate) fn lifetime(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<Duration> {
        table.read("lifetime", value::duration(SHORTEST..=LONGEST), report)
    }

    /// The cluster, if one is `wanted`; `key` asks for it.
    pub(crate) fn cluster(
        table: &mut ConfigTable<'_>,
        key: &'static str,
        wanted: bool,
        env: &Environment,
        report: &mut Diagnostics,
    ) -> Option<ClusterSettings> {
        let reached = kubernetes::reached(env);
        if let (Err(why), true) = (&reached, wanted) {
            table.error(key, Some("asks for Kubernetes".to_owned()), *why, report);
        }
        reached.ok().filter(|_| wanted)
    }
}

fn kind(value: &DeValue<'_>) -> Result<ProfileKind, ValueError> {
    match value::text(value)?.as_str() {
        "server" => Ok(ProfileKind::Server),
        "proxy-client" => Ok(ProfileKind::ProxyClient),
        _ => Err(value::wrong(value, "want \"server\" or \"proxy-client\"")),
    }
}

/// A DNS name, or an address.
fn name(value: &DeValue<'_>) -> Result<String, ValueError> {
    let name = value::nonempty(value)?;
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b':');
    if name.bytes().all(sound) && (!name.contains(':') || name.parse::<std::net::IpAddr>().is_ok()) {
        return Ok(name.to_ascii_lowercase());
    }
    Err(value::wrong(value, "want a DNS name or an address, without a port"))
}

const DIR: &str = "/var/lib/tunnel/pki";

/// What Kubernetes takes at the least.
const SHORTEST: Duration = Duration::from_secs(600);
const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
