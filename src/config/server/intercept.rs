//! The table `server.intercept`: traffic of the server's host to edge nodes' addresses, intercepted by nftables.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;

use crate::config::listen::{AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{self, Diagnostics, Environment};
use crate::parts;
use tunnel_base::policy::Networks;

/// `[server.intercept]`: which connections to addresses of nodes a server intercepts on its host, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterceptConfig {
    /// Networks of intercepted addresses; nothing else is intercepted.
    pub networks: Networks,
    /// The nodes' ports that are intercepted.
    pub ports: BTreeSet<u16>,
    /// Whether addresses reported by an edge are accepted if no cluster is queried, which could contradict them.
    pub trust_edges: bool,
    /// Name of the nftables table.
    pub table: String,
    /// The mark of our own connections.
    pub mark: MarkBits,
    /// Networks whose traffic, forwarded by this host, is intercepted; empty intercepts only the host's own.
    pub forwarded: Vec<IpNet>,
    /// The port on this host that traffic is redirected to; 0 selects free ports.
    pub port: u16,
    /// `HOST_IP`: the address of the machine on which Kubernetes runs this pod.
    pub host_ip: Option<IpAddr>,
    /// Access rules.
    pub access: AccessConfig,
}

/// Some bits of a connection's mark, such as `0x40/0x40`: their values and their mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkBits {
    /// Values of the bits.
    pub mark: u32,
    /// The bits that apply.
    pub mask: u32,
}

/// Reads the table. Absent access rules are inherited from `ssh`. Returns `None` if the table is absent, or unusable,
/// which is recorded.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    ssh: &AccessConfig,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<InterceptConfig> {
    let mut table = cloud.table("intercept", report);
    let networks = networks(&mut table, report);
    let ports = table.list("ports", value::target_port, report);
    let trust_edges = table.read("trust_edge_addresses", value::flag, report).unwrap_or_default();
    let name = table.read("table", name, report);
    let mark = table.read("mark", value::parsed::<MarkBits>, report);
    let forwarded = table.list("forwarded_networks", value::network, report).unwrap_or_default();
    let port = table.read("port", value::port_number, report).unwrap_or_default();
    // There is no load balancer between the kernel and its listeners.
    let default = AccessConfig { proxy_protocol: Networks::default(), ..ssh.clone() };
    let access = AccessConfig::read(&mut table, PROOFS, &default, report);
    if !forwarded.is_empty() {
        let at = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
        // For traffic through this host, these networks restrict the clients.
        let fence = || Some(forwarded.iter().copied().collect());
        let fenced = AccessConfig { allow_from: access.allow_from.clone().or_else(fence), ..access.clone() };
        fenced.warn_if_open(
            table.key("forwarded_networks"),
            at,
            PROOFS,
            "the intercepted ports of all edge nodes",
            report,
        );
    }
    if let (true, Err(why)) = (table.is_present(), parts::INTERCEPT) {
        table.error("networks", None, why, report);
    }
    table.finish(report);
    parts::INTERCEPT.ok()?;
    Some(InterceptConfig {
        networks: networks?,
        ports: ports.map_or_else(|| PORTS.into(), BTreeSet::from_iter),
        trust_edges,
        table: name.unwrap_or_else(|| TABLE.to_owned()),
        mark: mark.unwrap_or(MARK),
        forwarded,
        port,
        host_ip: config::address("HOST_IP", env.host_ip.as_deref(), report),
        access,
    })
}

/// Reads the networks. Returns `None` if the table is absent, or the key is missing or wrong, which is recorded.
fn networks(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<Networks> {
    let before = report.fault_count();
    let networks = table.list("networks", value::network, report).filter(|networks| !networks.is_empty());
    if networks.is_none() && table.is_present() && report.fault_count() == before {
        let found = table.has("networks").then(|| "an empty list".to_owned());
        let wanted = "list the networks of edge nodes' addresses, as in networks = [\"10.0.0.0/16\"]: \
                      nothing else is intercepted";
        table.error("networks", found, wanted, report);
    }
    networks.map(Networks::from_iter)
}

/// Reads a name that nft accepts without quotes.
fn name(value: &toml::de::DeValue<'_>) -> Result<String, ValueError> {
    let name = value::text(value)?;
    let is_one = name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.len() <= MAX_NAME
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let wanted = "expected a letter, then letters, digits and '_', at most 64 in total";
    if is_one { Ok(name) } else { Err(value::wrong(value, wanted)) }
}

impl FromStr for MarkBits {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(digits) if !digits.starts_with('+') => u32::from_str_radix(digits, 16).ok(),
            Some(_) => None,
            None => text.parse().ok(),
        };
        let (mark, mask) = text.split_once('/').unwrap_or((text, "0xffffffff"));
        match (number(mark), number(mask)) {
            (Some(mark), Some(mask)) if mark != 0 && mark & !mask == 0 => Ok(Self { mark, mask }),
            _ => {
                Err("expected a mark and the mask of its bits, as in \"0x40/0x40\", and at least one bit set")
            }
        }
    }
}

/// Intercepted traffic has the target's protocol, so clients cannot be asked for a password or a certificate.
const PROOFS: AuthMethods = AuthMethods { password: false, certificate: None };

/// The kubelet's ports.
const PORTS: [u16; 2] = [10250, 10255];

const TABLE: &str = "tunnel";

/// A bit that neither Kubernetes nor common pod networks use.
const MARK: MarkBits = MarkBits { mark: 0x40, mask: 0x40 };

const MAX_NAME: usize = 64;
