//! Whose an address is (`[mode.cloud.addresses]`), and what a pod dials itself (`[mode.cloud.direct]`).

use ipnet::IpNet;

use crate::config::server::kubernetes::{self, ClusterSettings};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, Environment, value};
use tunnel_base::names::NodeName;
use tunnel_base::policy;
use tunnel_base::policy::targets::{TargetEntry, Targets};

/// How clients may name a target other than by its node's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressSettings {
    /// Networks, and the nodes behind them.
    pub fixed: Vec<(IpNet, NodeName)>,
    /// The cluster that is asked for nodes, pods and Services; `None`: none is.
    pub cluster: Option<ClusterSettings>,
    /// What a pod dials itself for its clients, of all that is at no node.
    pub direct: Targets,
}

/// Reads both tables. To be called once the modules' tables have been asked for: some of them want Kubernetes asked.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> AddressSettings {
    let mut table = cloud.table("addresses", report);
    let wanted = table.read("kubernetes", value::flag, report);
    let by_default = || MODULES.iter().any(|module| cloud.has(module));
    let cluster = match (wanted.unwrap_or_else(by_default), kubernetes::reached(env)) {
        (false, _) => None,
        (true, Ok(cluster)) => Some(cluster),
        (true, Err(why)) => {
            if wanted.is_some() {
                table.error("kubernetes", Some("true".to_owned()), why, report);
            }
            None
        }
    };
    let entries = table.named(NODE, report);
    let fixed = entries.into_iter().filter_map(|(name, entry)| entry_of(&name, entry, report)).collect();
    let mut table = cloud.table("direct", report);
    let direct = table.list("targets", value::parsed::<TargetEntry>, report).unwrap_or_default();
    table.finish(report);
    AddressSettings { fixed, cluster, direct: direct.into_iter().collect() }
}

/// `None`: the entry is of no use, which is noted.
fn entry_of(name: &str, mut entry: ConfigTable<'_>, report: &mut Diagnostics) -> Option<(IpNet, NodeName)> {
    let net = policy::network(name);
    if let Err(why) = &net {
        entry.name_error(name, why.to_string(), report);
    }
    let node = entry.read(NODE, value::parsed::<NodeName>, report);
    entry.finish(report);
    Some((net.ok()?, node?))
}

/// The modules whose clients name pods and Services, or addresses alone.
const MODULES: [&str; 4] = ["egress", "http_proxy", "https", "intercept"];

/// The key that an entry which is a text stands for.
const NODE: &str = "node";
