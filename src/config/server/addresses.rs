//! `[server.addresses]`: assignment of addresses to nodes.

use ipnet::IpNet;

use crate::config::cluster::{self, ClusterSettings};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, Environment, value};
use crate::parts;
use tunnel_base::names::NodeName;
use tunnel_base::policy;

/// How clients may address a target other than by its node's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressSettings {
    /// Networks, and the nodes that reach them.
    pub fixed: Vec<(IpNet, NodeName)>,
    /// The cluster that is queried for nodes, pods and Services; `None` queries none.
    pub cluster: Option<ClusterSettings>,
}

/// Reads `[server.addresses]`. `by_address` is true if a listener's clients name targets by address.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    by_address: bool,
    env: &Environment,
    report: &mut Diagnostics,
) -> AddressSettings {
    let mut table = cloud.table("addresses", report);
    let wanted = table.read("kubernetes", value::flag, report);
    let cluster = match (wanted.unwrap_or(by_address), cluster::reached(parts::ADDRESSES, env)) {
        (false, _) => None,
        (true, Ok(cluster)) => Some(cluster),
        (true, Err(why)) => {
            if wanted.is_some() {
                table.error("kubernetes", Some("true".to_owned()), why, report);
            }
            None
        }
    };
    let mut nodes = table.table("nodes", report);
    table.finish(report);
    let entries = nodes.named(NODE, report);
    let fixed = entries.into_iter().filter_map(|(name, entry)| entry_of(&name, entry, report)).collect();
    AddressSettings { fixed, cluster }
}

/// Reads one entry. Returns `None` if it is unusable, which is recorded.
fn entry_of(name: &str, mut entry: ConfigTable<'_>, report: &mut Diagnostics) -> Option<(IpNet, NodeName)> {
    let net = policy::network(name);
    if let Err(why) = &net {
        entry.name_error(name, why.to_string(), report);
    }
    let node = entry.read(NODE, value::parsed::<NodeName>, report);
    entry.finish(report);
    Some((net.ok()?, node?))
}

/// The key that a plain text value stands for.
const NODE: &str = "node";
