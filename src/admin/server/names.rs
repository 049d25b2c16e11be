//! The names of servers for operators: each server has one, on every page and in every list.

use crate::admin::AdminContext;
use crate::admin::server::ServerAdmin;
use crate::registry::peers::PeerHandle;
use tunnel_proto::names::{Instance, ServerDisplayName};

impl AdminContext {
    /// Returns the name of this server, then those of `peers`, in their order.
    ///
    /// A server has the name that it announces. If another server has the same, the id of its process follows, which is
    /// the same at all servers. An older version announces none: it has its address or the id of its process.
    pub(crate) fn server_names(&self, server: &ServerAdmin, peers: &[PeerHandle]) -> Vec<String> {
        let own = (server.name.clone(), Some(self.table.instance()), String::new());
        let peer =
            |peer: &PeerHandle| (peer.name(), peer.up().and_then(|link| link.instance), peer.to_string());
        unique(&std::iter::once(own).chain(peers.iter().map(peer)).collect::<Vec<_>>())
    }
}

/// Returns the names of servers, each given as the name that it announces, its process if it is linked, and its
/// address.
fn unique(servers: &[(Option<ServerDisplayName>, Option<Instance>, String)]) -> Vec<String> {
    let name = |(name, process, address): &(Option<ServerDisplayName>, Option<Instance>, String)| {
        let Some(name) = name else {
            let id = process.filter(|_| address.is_empty());
            return id.map_or_else(|| address.clone(), |id| format!("{id:?}"));
        };
        let is_other = |other: &Option<Instance>| other.is_some() && other != process;
        let is_shared = servers.iter().any(|(same, other, _)| same.as_ref() == Some(name) && is_other(other));
        match process {
            Some(process) if is_shared => format!("{name} ({process:?})"),
            _ => name.to_string(),
        }
    };
    servers.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_one_name_have_the_id_of_their_process_and_one_without_a_name_its_address() {
        let server = |name: &str, process: u128, address: &str| {
            let process = (process > 0).then(|| Instance::from_bits(process << 96));
            (name.parse().ok(), process, address.to_owned())
        };
        let names = |servers: &[_]| unique(servers).join(", ");
        let (eu, us, old) = (server("eu", 1, ""), server("us", 2, "10.0.0.2:1"), server("", 3, "10.0.0.3:1"));
        assert_eq!(names(&[eu.clone(), us, old]), "eu, us, 10.0.0.3:1");
        assert_eq!(names(&[eu.clone(), server("eu", 2, "10.0.0.2:1")]), "eu (00000001), eu (00000002)");
        // Its last name stays while it has no link, also while its next process has one.
        let lost = server("us", 0, "10.0.0.2:1");
        assert_eq!(names(&[eu, lost.clone(), server("us", 4, "10.0.0.2:2")]), "eu, us, us");
        assert_eq!(names(&[server("", 7, ""), lost]), "00000007, us");
    }
}
