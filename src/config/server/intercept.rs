//! The table `mode.cloud.intercept`: traffic of the pod's host that is caught on its way to edge nodes' addresses.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;

use crate::config::listen::{AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{self, Diagnostics, Environment};
use tunnel_base::policy::Networks;

/// What is caught, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterceptConfig {
    /// Only addresses in these are ever caught.
    pub networks: Networks,
    /// The ports of nodes that are caught.
    pub ports: BTreeSet<u16>,
    /// Whether an edge's own word counts where no cluster is asked, which could contradict it.
    pub trust_edges: bool,
    /// Name of the table of nftables.
    pub table: String,
    /// What our own connections carry.
    pub mark: MarkBits,
    /// Networks whose traffic is caught that this host forwards; none: only the host's own is.
    pub forwarded: Vec<IpNet>,
    /// Where it is led on this host; 0 takes free ports.
    pub port: u16,
    /// `HOST_IP`: the address of the machine on which Kubernetes runs this pod.
    pub host_ip: Option<IpAddr>,
    /// Who may come in.
    pub access: AccessConfig,
}

/// Some bits of a connection's mark, as `0x40/0x40`: their values, and which bits they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkBits {
    /// The values.
    pub mark: u32,
    /// Which bits.
    pub mask: u32,
}

/// Reads the table; `ssh` holds for what it leaves out of who may come in. `None`: it is absent, or of no use, which is
/// noted.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    ssh: &AccessConfig,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<InterceptConfig> {
    let mut table = cloud.table("intercept", report);
    let networks = networks(&mut table, report);
    let ports = table.list("ports", value::target_port, report);
    let trust_edges = table.read("trust_edges", value::flag, report).unwrap_or_default();
    let name = table.read("table", name, report);
    let mark = table.read("mark", value::parsed::<MarkBits>, report);
    let forwarded = table.list("forwarded", value::network, report).unwrap_or_default();
    let port = table.read("port", value::port_number, report).unwrap_or_default();
    // No balancer stands between the kernel and its listeners.
    let default = AccessConfig { proxy_protocol: Networks::default(), ..ssh.clone() };
    let access = AccessConfig::read(&mut table, PROOFS, &default, report);
    if !forwarded.is_empty() {
        let at = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
        // Whoever sends through this host is let in by these networks and no others.
        let fence = || Some(forwarded.iter().copied().collect());
        let fenced = AccessConfig { allow_from: access.allow_from.clone().or_else(fence), ..access.clone() };
        fenced.warn_if_open(table.key("forwarded"), at, PROOFS, "the caught ports of all edge nodes", report);
    }
    table.finish(report);
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

/// `None`: the table is absent, or this is missing or wrong, which is noted.
fn networks(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<Networks> {
    let before = report.fault_count();
    let networks = table.list("networks", value::network, report).filter(|networks| !networks.is_empty());
    if networks.is_none() && table.is_present() && report.fault_count() == before {
        let found = table.has("networks").then(|| "an empty list".to_owned());
        let wanted = "name the networks in which edge nodes have their addresses, as in networks = [\"10.0.0.0/16\"]: \
                      nothing else is ever caught";
        table.error("networks", found, wanted, report);
    }
    networks.map(Networks::from_iter)
}

/// A name that nft takes without quotes.
fn name(value: &toml::de::DeValue<'_>) -> Result<String, ValueError> {
    let name = value::text(value)?;
    let is_one = name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.len() <= MAX_NAME
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let wanted = "want a letter, then letters, digits and '_', 64 in all at most";
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
                Err("want a mark and which of its bits count, as in \"0x40/0x40\", where at least one is set")
            }
        }
    }
}

/// The protocol of what is caught is the target's, so nobody can be asked for a password or a certificate.
const PROOFS: AuthMethods = AuthMethods { password: false, certificate: None };

/// Those of kubelets.
const PORTS: [u16; 2] = [10250, 10255];

const TABLE: &str = "tunnel";

/// A bit that neither Kubernetes nor the usual networks of pods take.
const MARK: MarkBits = MarkBits { mark: 0x40, mask: 0x40 };

const MAX_NAME: usize = 64;
