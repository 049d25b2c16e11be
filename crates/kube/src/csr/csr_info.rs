//! The fields of a CertificateSigningRequest that the approver reads.

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use crate::csr::content::CsrContent;
use crate::csr::profile::Profile;

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
