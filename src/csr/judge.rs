//! Whether a certificate may be issued: the approver's decision, which reads nothing but its arguments.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::{Apiserver, Asked, Content, Profile};
use crate::telemetry::printable;

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is none of our three: nobody here touches it.
    NotOurs,
    /// It may be issued.
    Approve,
    /// It may not, for that reason: one printable line of at most 200 bytes.
    Deny(String),
}

/// What the cluster says, as far as the request is about it.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The addresses of the requester's Node; `None`: there is no such Node.
    pub addresses: Option<BTreeSet<IpAddr>>,
    /// All names and addresses by which the pods' ports are reached, as certificates have them.
    pub reached: BTreeSet<String>,
}

/// Judges a request. `pods` is the user that the tunnel's pods are (their service account).
pub fn judge(asked: &Asked, pods: &str, apiserver: &Apiserver, facts: &Facts) -> Verdict {
    let Some(profile) = asked.profile() else { return Verdict::NotOurs };
    let permitted = sound(asked, profile).and_then(|()| match profile {
        Profile::Server => {
            by_pods(asked, pods).and_then(|()| server(&asked.content, apiserver, &facts.reached))
        }
        Profile::ProxyClient => by_pods(asked, pods).and_then(|()| proxy_client(&asked.content)),
        Profile::Agent => agent(asked, facts.addresses.as_ref()),
    });
    permitted.map_or_else(|why| Verdict::Deny(printable(&why)), |()| Verdict::Approve)
}

/// What holds for all three.
fn sound(asked: &Asked, profile: Profile) -> Result<(), String> {
    if let Some(odd) = asked.content.odd {
        return Err(format!("{odd}, and this approver takes none of that"));
    }
    let usages: BTreeSet<&str> = asked.usages.iter().map(String::as_str).collect();
    let wanted = profile.usages();
    if asked.usages.len() != wanted.len() || usages != BTreeSet::from(wanted) {
        return Err(format!("want exactly the usages {wanted:?}, and it has {:?}", asked.usages));
    }
    Ok(())
}

fn by_pods(asked: &Asked, pods: &str) -> Result<(), String> {
    if asked.requester == pods {
        return Ok(());
    }
    Err(format!("only {pods} may have one, and {:?} asks for it", asked.requester))
}

fn server(content: &Content, apiserver: &Apiserver, reached: &BTreeSet<String>) -> Result<(), String> {
    if content.dns.is_empty() && content.ips.is_empty() {
        return Err("it has no alternative name, so that no client could believe it".to_owned());
    }
    for name in content.dns.iter().cloned().chain(content.ips.iter().map(IpAddr::to_string)) {
        if apiserver.is_at(&name) {
            return Err(format!("{name:?} stands for kube-apiserver as well"));
        }
        if !reached.contains(&name) {
            return Err(format!(
                "no Service that this approver knows (--service) is reached by {name:?}, nor is it one of its --name"
            ));
        }
    }
    Ok(())
}

fn proxy_client(content: &Content) -> Result<(), String> {
    if content.dns.is_empty() && content.ips.is_empty() {
        return Ok(());
    }
    Err("it has alternative names, which a proxy client has none of".to_owned())
}

fn agent(asked: &Asked, addresses: Option<&BTreeSet<IpAddr>>) -> Result<(), String> {
    let Some(node) = asked.node() else {
        return Err(format!(
            "only a node may have one for itself (user system:node:NAME in group system:nodes), and {:?} asks for it",
            asked.requester
        ));
    };
    let Content { dns, ips, .. } = &asked.content;
    if *dns != [node] {
        return Err(format!(
            "want exactly {node:?}, the node that asks for it, as its DNS name, and it has {dns:?}"
        ));
    }
    let Some(addresses) = addresses else { return Err(format!("there is no Node {node}")) };
    match ips.iter().find(|ip| !addresses.contains(ip)) {
        Some(ip) => Err(format!("{ip} is no address of Node {node}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
