//! The decision whether a certificate may be issued. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use crate::csr::apiserver_names::ApiserverNames;
use crate::csr::content::CsrContent;
use crate::csr::profile::Profile;
use tunnel_proto::printable::printable;

/// A request and its requester, which kube-apiserver has authenticated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsrSpec {
    /// Name of the signer.
    pub signer: String,
    /// User who created the request.
    pub requester: String,
    /// Groups of this user.
    pub groups: Vec<String>,
    /// Requested key usages.
    pub usages: Vec<String>,
    /// Content of the PKCS#10 request.
    pub content: CsrContent,
}

impl CsrSpec {
    /// Reads a CertificateSigningRequest. Returns `None` if its PKCS#10 text is invalid.
    pub fn read(csr: &CertificateSigningRequest) -> Option<Self> {
        let spec = &csr.spec;
        Some(Self {
            signer: spec.signer_name.clone(),
            requester: spec.username.clone().unwrap_or_default(),
            groups: spec.groups.clone().unwrap_or_default(),
            usages: spec.usages.clone().unwrap_or_default(),
            content: CsrContent::read(&spec.request.0)?,
        })
    }

    /// Returns the profile with exactly this signer, common name and organization, or `None` if the request is not
    /// ours.
    pub fn profile(&self) -> Option<Profile> {
        let CsrContent { common_names, organizations, .. } = &self.content;
        Profile::ALL.into_iter().find(|profile| {
            self.signer == profile.signer()
                && *common_names == [profile.common_name()]
                && *organizations == [profile.organization()]
        })
    }

    /// Returns the node if its kubelet is the requester, otherwise `None`.
    pub fn node(&self) -> Option<&str> {
        // Both name and group are required, as in Kubernetes itself.
        let grouped = self.groups.iter().any(|group| group == "system:nodes");
        self.requester.strip_prefix("system:node:").filter(|node| grouped && !node.is_empty())
    }
}

/// The approver's decision on a CertificateSigningRequest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CsrDecision {
    /// The request matches none of the three profiles and is left untouched.
    NotOurs,
    /// The certificate may be issued.
    Approve,
    /// The certificate must not be issued, for this reason: one printable line of at most 200 bytes.
    Deny(String),
}

/// The state of the cluster that a decision depends on.
#[derive(Debug, Clone, Default)]
pub struct CsrFacts {
    /// Addresses of the requester's Node. `None` means that there is no such Node.
    pub addresses: Option<BTreeSet<IpAddr>>,
    /// Names and addresses of the servers' listeners, in the form used in certificates.
    pub reachable_names: BTreeSet<String>,
}

/// Decides on a request. `pods` is the servers' user (their service account).
pub fn decide(request: &CsrSpec, pods: &str, apiserver: &ApiserverNames, facts: &CsrFacts) -> CsrDecision {
    let Some(profile) = request.profile() else { return CsrDecision::NotOurs };
    let permitted = check_common(request, profile).and_then(|()| match profile {
        Profile::Server => check_requester(request, pods)
            .and_then(|()| check_server(&request.content, apiserver, &facts.reachable_names)),
        Profile::ProxyClient => {
            check_requester(request, pods).and_then(|()| check_proxy_client(&request.content))
        }
        Profile::Edge => check_edge(request, facts.addresses.as_ref()),
    });
    permitted.map_or_else(|why| CsrDecision::Deny(printable(&why)), |()| CsrDecision::Approve)
}

/// Checks the rules common to all profiles.
fn check_common(request: &CsrSpec, profile: Profile) -> Result<(), String> {
    if let Some(odd) = request.content.odd {
        return Err(format!("{odd}, which this approver does not accept"));
    }
    let usages: BTreeSet<&str> = request.usages.iter().map(String::as_str).collect();
    let expected = profile.usages();
    if request.usages.len() != expected.len() || usages != BTreeSet::from(expected) {
        return Err(format!("expected exactly the usages {expected:?}, found {:?}", request.usages));
    }
    Ok(())
}

fn check_requester(request: &CsrSpec, pods: &str) -> Result<(), String> {
    if request.requester == pods {
        return Ok(());
    }
    Err(format!("only {pods} may request this certificate, not {:?}", request.requester))
}

fn check_server(
    content: &CsrContent,
    apiserver: &ApiserverNames,
    reachable_names: &BTreeSet<String>,
) -> Result<(), String> {
    if content.dns.is_empty() && content.ips.is_empty() {
        return Err("it has no alternative name, so no client would accept it".to_owned());
    }
    for name in content.dns.iter().cloned().chain(content.ips.iter().map(IpAddr::to_string)) {
        if apiserver.is_at(&name) {
            return Err(format!("{name:?} is a name of kube-apiserver"));
        }
        if !reachable_names.contains(&name) {
            return Err(format!(
                "no known Service (--service) is reachable at {name:?}, and it is not listed with --san"
            ));
        }
    }
    Ok(())
}

fn check_proxy_client(content: &CsrContent) -> Result<(), String> {
    if content.dns.is_empty() && content.ips.is_empty() {
        return Ok(());
    }
    Err("it has alternative names, but a proxy client must have none".to_owned())
}

fn check_edge(request: &CsrSpec, addresses: Option<&BTreeSet<IpAddr>>) -> Result<(), String> {
    let Some(node) = request.node() else {
        return Err(format!(
            "only a node may request this certificate, for itself (user system:node:NAME in group system:nodes), not {:?}",
            request.requester
        ));
    };
    let CsrContent { dns, ips, .. } = &request.content;
    if *dns != [node] {
        return Err(format!("expected exactly {node:?}, the requesting node, as DNS name, found {dns:?}"));
    }
    let Some(addresses) = addresses else { return Err(format!("there is no Node {node}")) };
    match ips.iter().find(|ip| !addresses.contains(ip)) {
        Some(ip) => Err(format!("{ip} is no address of Node {node}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
