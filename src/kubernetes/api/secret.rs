//! Invitations in a Secret.

use futures_util::future::BoxFuture;

use crate::config::cluster::ClusterSettings;
use crate::invitations::shared_text::{EnrolmentStore, SharedStateError, VersionedText};
use crate::kubernetes::api::cluster::access;
use tunnel_kube::secret::SecretEntry;

/// Returns the Secret of a name as the store of invitations.
pub(crate) fn shared(cluster: &ClusterSettings, name: String) -> Box<dyn EnrolmentStore> {
    Box::new(SecretEntry::new(access(cluster), name, SECRET_KEY))
}

impl EnrolmentStore for SecretEntry {
    fn read(&mut self) -> BoxFuture<'_, Result<VersionedText, SharedStateError>> {
        Box::pin(async {
            let (text, version) = Self::read(self).await?;
            Ok(VersionedText { text, version, is_missing: false })
        })
    }

    fn write<'a>(
        &'a mut self,
        seen: &'a VersionedText,
        text: Vec<u8>,
    ) -> BoxFuture<'a, Result<bool, SharedStateError>> {
        Box::pin(async { Ok(Self::write(self, &seen.version, text).await?) })
    }
}

/// Key in the Secret's data.
const SECRET_KEY: &str = "enrolled";
