//! A shared text in a Secret of Kubernetes.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Error};
use tokio::time::timeout;

use crate::invitations::store::{Revision, SharedStateError};
use crate::kubernetes::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT};

/// The enrolment state in a Secret of Kubernetes, in this server's namespace.
pub struct SecretSharedState {
    cluster: Cluster,
    name: String,
    api: Option<Api<Secret>>,
}

impl SecretSharedState {
    /// Creates the store without connecting. The Secret is created by the first write.
    pub fn new(cluster: Cluster, name: String) -> Self {
        Self { cluster, name, api: None }
    }

    pub(crate) async fn read(&mut self) -> Result<Revision, SharedStateError> {
        let found = self.found().await;
        self.checked(found).map(|found| found.as_ref().map_or_else(Revision::default, seen))
    }

    pub(crate) async fn write(&mut self, before: &Revision, text: Vec<u8>) -> Result<bool, SharedStateError> {
        if text.len() > MAX_BYTES {
            return Err(SharedStateError::Full { bytes: text.len(), most: MAX_BYTES });
        }
        let written = self.try_write(before, text).await;
        self.checked(written)
    }

    async fn try_write(&mut self, before: &Revision, text: Vec<u8>) -> Result<bool, ClusterError> {
        // Data of other programs in the Secret must stay unchanged.
        let found = self.found().await?;
        if found.as_ref().map_or_else(Revision::default, seen) != *before {
            return Ok(false);
        }
        let there = found.is_some();
        let mut object = found.unwrap_or_default();
        object.metadata.name = Some(self.name.clone());
        object.data.get_or_insert_default().insert(KEY.to_owned(), ByteString(text));
        let api = self.connected().await?;
        let params = PostParams::default();
        let write = async {
            if there {
                api.replace(&self.name, &params, &object).await
            } else {
                api.create(&params, &object).await
            }
        };
        match timeout(REQUEST_TIMEOUT, write).await.map_err(|_| ClusterError::Silent)? {
            Ok(_) => Ok(true),
            // Changed, created or deleted meanwhile: kube-apiserver compares the object's resource version.
            Err(Error::Api(status)) if status.code == 409 || there && status.code == 404 => Ok(false),
            Err(cause) => Err(cause.into()),
        }
    }

    async fn found(&mut self) -> Result<Option<Secret>, ClusterError> {
        let api = self.connected().await?;
        let found = timeout(REQUEST_TIMEOUT, api.get_opt(&self.name)).await;
        Ok(found.map_err(|_| ClusterError::Silent)??)
    }

    async fn connected(&mut self) -> Result<Api<Secret>, ClusterError> {
        if let Some(api) = &self.api {
            return Ok(api.clone());
        }
        let (client, namespace) = self.cluster.connect().await?;
        Ok(self.api.insert(Api::namespaced(client, &namespace)).clone())
    }

    fn checked<T>(&mut self, done: Result<T, ClusterError>) -> Result<T, SharedStateError> {
        done.map_err(|cause| {
            // The next attempt reads the files again: a certificate or token may have expired.
            self.api = None;
            SharedStateError::Secret { name: self.name.clone(), cause }
        })
    }
}

impl std::fmt::Debug for SecretSharedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecretCell").field("name", &self.name).finish_non_exhaustive()
    }
}

fn seen(found: &Secret) -> Revision {
    let text = found.data.as_ref().and_then(|data| data.get(KEY)).map(|text| text.0.clone());
    Revision {
        text: text.unwrap_or_default(),
        version: found.metadata.resource_version.clone().unwrap_or_default(),
    }
}

/// Key in the Secret's data.
const KEY: &str = "enrolled";

/// Kubernetes' limit for a Secret, minus the rest of the object.
const MAX_BYTES: usize = 1_000_000;
