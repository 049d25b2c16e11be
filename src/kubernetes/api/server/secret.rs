//! Invitations and grants in a Secret.

use crate::config::cluster::ClusterSettings;
use crate::enrolment::shared_text::{StoreFuture, TextStore, VersionedText};
use crate::kubernetes::api::server::access;
use tunnel_kube::secret::SecretEntry;

/// Returns the key of a Secret as a store.
pub(crate) fn shared(cluster: &ClusterSettings, name: String, key: &'static str) -> Box<dyn TextStore> {
    Box::new(SecretEntry::new(access(cluster), name, key))
}

impl TextStore for SecretEntry {
    fn read(&mut self) -> StoreFuture<'_, VersionedText> {
        Box::pin(async {
            let (text, version) = Self::read(self).await?;
            Ok(VersionedText { text, version, is_missing: false })
        })
    }

    /// Asks for the version first: the text may be long, and is read every second.
    fn read_since<'a>(&'a mut self, seen: &'a VersionedText) -> StoreFuture<'a, Option<VersionedText>> {
        Box::pin(async move {
            if !seen.version.is_empty() && self.version().await? == seen.version {
                return Ok(None);
            }
            Ok(Some(TextStore::read(self).await?).filter(|read| read != seen))
        })
    }

    fn write<'a>(&'a mut self, seen: &'a VersionedText, text: Vec<u8>) -> StoreFuture<'a, bool> {
        Box::pin(async { Ok(Self::write(self, &seen.version, text).await?) })
    }
}
