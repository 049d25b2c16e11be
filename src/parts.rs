//! Optional parts of the program, which are cargo's features.

/// `Ok` if the part is compiled in, otherwise the reason why it cannot be used, with a hint.
pub(crate) type Part = Result<(), &'static str>;

macro_rules! part {
    ($feature:tt, $what:tt) => {
        if cfg!(feature = $feature) {
            Ok(())
        } else {
            Err(concat!(
                "this program is built without ",
                $what,
                "; build it with cargo's feature \"",
                $feature,
                "\""
            ))
        }
    };
}

/// The pods of servers, ConfigMaps and Secrets.
pub(crate) const CLUSTER: Part = part!("cluster", "Kubernetes");
/// The addresses of a cluster's Nodes, pods and Services.
pub(crate) const ADDRESSES: Part = part!("addresses", "the address watch of Kubernetes");
/// Certificates that a cluster's signers issue.
pub(crate) const CSR: Part = part!("csr", "certificates by Kubernetes");
/// Objects of Kubernetes that servers keep up to date.
pub(crate) const KEEP: Part = part!("keep", "node names and node ports in Kubernetes");
