//! Invitations in a Secret.

use futures_util::future::BoxFuture;

use crate::config::cluster::ClusterSettings;
use crate::invitations::shared_text::{Revision, SharedState, SharedStateError};
use crate::kubernetes::api::cluster::access;
use tunnel_kube::secret::{KubernetesSecret, SecretText};

/// Returns the Secret of a name as the store of invitations.
pub(crate) fn shared(cluster: &ClusterSettings, name: String) -> Box<dyn SharedState> {
    Box::new(KubernetesSecret::new(access(cluster), name, SECRET_KEY))
}

impl SharedState for KubernetesSecret {
    fn read(&mut self) -> BoxFuture<'_, Result<Revision, SharedStateError>> {
        Box::pin(async {
            let SecretText { text, version } = Self::read(self).await?;
            Ok(Revision { text, version })
        })
    }

    fn write<'a>(
        &'a mut self,
        seen: &'a Revision,
        text: Vec<u8>,
    ) -> BoxFuture<'a, Result<bool, SharedStateError>> {
        let Revision { text: old, version } = seen.clone();
        Box::pin(async move { Ok(Self::write(self, &SecretText { text: old, version }, text).await?) })
    }
}

/// Key in the Secret's data.
const SECRET_KEY: &str = "enrolled";
