//! A CertificateSigningRequest as the approver sees it.

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use super::{Content, Profile};

/// What is asked for, and by whom. kube-apiserver vouches for the requester.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asked {
    /// Who is to sign.
    pub signer: String,
    /// The user who has made the request.
    pub requester: String,
    /// The groups that this user is in.
    pub groups: Vec<String>,
    /// What the key is to be used for.
    pub usages: Vec<String>,
    /// What the request itself says.
    pub content: Content,
}

impl Asked {
    /// Reads one; `None`: its text is no request that can be read.
    pub fn read(csr: &CertificateSigningRequest) -> Option<Self> {
        let spec = &csr.spec;
        Some(Self {
            signer: spec.signer_name.clone(),
            requester: spec.username.clone().unwrap_or_default(),
            groups: spec.groups.clone().unwrap_or_default(),
            usages: spec.usages.clone().unwrap_or_default(),
            content: Content::read(&spec.request.0)?,
        })
    }

    /// The profile of which it has signer, common name and organization, exactly; `None`: it is not ours.
    pub fn profile(&self) -> Option<Profile> {
        let Content { common_names, organizations, .. } = &self.content;
        Profile::ALL.into_iter().find(|profile| {
            self.signer == profile.signer()
                && *common_names == [profile.common_name()]
                && *organizations == [profile.organization()]
        })
    }

    /// The node whose kubelet asks; `None`: somebody else does.
    pub fn node(&self) -> Option<&str> {
        // Both, as Kubernetes itself tells nodes.
        let grouped = self.groups.iter().any(|group| group == "system:nodes");
        self.requester.strip_prefix("system:node:").filter(|node| grouped && !node.is_empty())
    }
}
