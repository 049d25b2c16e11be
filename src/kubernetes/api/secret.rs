//! Invitations in a Secret.

use futures_util::future::BoxFuture;

use crate::config::cluster::ClusterSettings;
use crate::invitations::shared_text::{EnrolmentStore, SharedStateError, VersionedText};
use crate::kubernetes::api::cluster::access;
use tunnel_kube::secret::{KubernetesSecretText, SecretEntry};

/// Returns the Secret of a name as the store of invitations.
pub(crate) fn shared(cluster: &ClusterSettings, name: String) -> Box<dyn EnrolmentStore> {
    Box::new(SecretEntry::new(access(cluster), name, SECRET_KEY))
}

impl EnrolmentStore for SecretEntry {
    fn read(&mut self) -> BoxFuture<'_, Result<VersionedText, SharedStateError>> {
        Box::pin(async {
            let KubernetesSecretText { text, version } = Self::read(self).await?;
            Ok(VersionedText { text, version })
        })
    }

    fn write<'a>(
        &'a mut self,
        seen: &'a VersionedText,
        text: Vec<u8>,
    ) -> BoxFuture<'a, Result<bool, SharedStateError>> {
        let VersionedText { text: old, version } = seen.clone();
        Box::pin(
            async move { Ok(Self::write(self, &KubernetesSecretText { text: old, version }, text).await?) },
        )
    }
}

/// Key in the Secret's data.
const SECRET_KEY: &str = "enrolled";
