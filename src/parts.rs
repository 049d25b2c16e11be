//! Which optional parts of the program are compiled in.

use tunnel_base::part;
use tunnel_base::parts::Part;

/// The addresses of a cluster's Nodes, pods and Services.
pub(crate) const ADDRESSES: Part = part!("addresses", "the address watch of Kubernetes");
/// gRPC's debugging port.
pub(crate) const CHANNELZ: Part = part!("channelz", "gRPC's debugging port");
/// The pods of servers, ConfigMaps and Secrets.
pub(crate) const CLUSTER: Part = part!("cluster", "Kubernetes");
/// Certificates that a cluster's signers issue.
pub(crate) const CSR: Part = part!("csr", "certificates by Kubernetes");
/// Interception of traffic to addresses of nodes.
pub(crate) const INTERCEPT: Part = part!("intercept", "interception");
/// Machines that join by invitation.
pub(crate) const INVITATIONS: Part = part!("invitations", "invitations");
/// Objects of Kubernetes that servers keep up to date.
pub(crate) const KEEP: Part = part!("keep", "node names and node ports in Kubernetes");
/// Files and remote ends of SuperEdge.
pub(crate) const SUPEREDGE: Part = part!("superedge", "SuperEdge's config and dialect");

/// Returns the names of the features that are compiled in.
pub(crate) fn compiled_in() -> Vec<&'static str> {
    let all = [
        ("addresses", ADDRESSES),
        ("channelz", CHANNELZ),
        ("cluster", CLUSTER),
        ("csr", CSR),
        ("intercept", INTERCEPT),
        ("invitations", INVITATIONS),
        ("keep", KEEP),
        ("superedge", SUPEREDGE),
    ];
    all.into_iter().filter(|(_, part)| part.is_ok()).map(|(name, _)| name).collect()
}
