//! A text in a Secret that several servers share and may change.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;

use crate::cluster::{Cluster, ClusterError, REQUEST_TIMEOUT, write};
use tunnel_base::silence::unless_silent;
use tunnel_base::stores::{StoreFuture, TextStore, VersionedText};

/// A shared text in a Secret of this server's namespace, under one key.
#[derive(Debug, derive_more::Display)]
#[display("{key} of Secret {name}")]
pub struct SecretEntry {
    cluster: Cluster,
    name: String,
    key: &'static str,
    api: Option<Api<Secret>>,
}

impl TextStore for SecretEntry {
    fn read(&mut self) -> StoreFuture<'_, VersionedText> {
        Box::pin(async {
            let found = self.found().await;
            let found = self.checked(found)?;
            let data = found.as_ref().and_then(|found| found.data.as_ref()?.get(self.key));
            let text = data.map(|text| text.0.clone()).unwrap_or_default();
            Ok(VersionedText { text, version: version(found.as_ref()), is_missing: false })
        })
    }

    /// Asks for the version first: the text may be long, and is read every second.
    fn read_since<'a>(&'a mut self, seen: &'a VersionedText) -> StoreFuture<'a, Option<VersionedText>> {
        Box::pin(async move {
            if !seen.version.is_empty() {
                let version = self.version().await;
                if self.checked(version)? == seen.version {
                    return Ok(None);
                }
            }
            Ok(Some(self.read().await?).filter(|read| read != seen))
        })
    }

    /// Fails if all texts of the Secret together are longer than Kubernetes allows.
    fn write<'a>(&'a mut self, seen: &'a VersionedText, text: Vec<u8>) -> StoreFuture<'a, bool> {
        Box::pin(async {
            let written = self.try_write(&seen.version, text).await;
            Ok(self.checked(written)??)
        })
    }
}

impl SecretEntry {
    /// Creates the store without connecting. The Secret is created by the first write.
    pub fn new(cluster: Cluster, name: String, key: &'static str) -> Self {
        Self { cluster, name, key, api: None }
    }

    /// Returns the version of the Secret alone, which is empty if it does not exist.
    async fn version(&mut self) -> Result<String, ClusterError> {
        let api = self.connected().await?;
        let found = unless_silent(REQUEST_TIMEOUT, api.get_metadata_opt(&self.name)).await;
        let found = found.ok_or(ClusterError::Silent)??;
        Ok(found.and_then(|found| found.metadata.resource_version).unwrap_or_default())
    }

    /// Writes the text. The inner error is that it is too long.
    async fn try_write(&mut self, before: &str, text: Vec<u8>) -> Result<Result<bool, String>, ClusterError> {
        // Data of other programs in the Secret must stay unchanged.
        let found = self.found().await?;
        if version(found.as_ref()) != before {
            return Ok(Ok(false));
        }
        let there = found.is_some();
        let mut object = found.unwrap_or_default();
        object.metadata.name = Some(self.name.clone());
        let data = object.data.get_or_insert_default();
        data.insert(self.key.to_owned(), ByteString(text));
        let bytes: usize = data.values().map(|text| text.0.len()).sum();
        if bytes > MAX_BYTES {
            return Ok(Err(format!(
                "{bytes} bytes exceed the limit of {MAX_BYTES} for a Secret; use etcd, or revoke nodes that no longer exist"
            )));
        }
        let api = self.connected().await?;
        let written = unless_silent(REQUEST_TIMEOUT, write(&api, &self.name, &object, there)).await;
        written.unwrap_or(Err(ClusterError::Silent)).map(Ok)
    }

    async fn found(&mut self) -> Result<Option<Secret>, ClusterError> {
        let api = self.connected().await?;
        let found = unless_silent(REQUEST_TIMEOUT, api.get_opt(&self.name)).await;
        Ok(found.ok_or(ClusterError::Silent)??)
    }

    async fn connected(&mut self) -> Result<Api<Secret>, ClusterError> {
        if let Some(api) = &self.api {
            return Ok(api.clone());
        }
        let (client, namespace) = self.cluster.connect().await?;
        Ok(self.api.insert(Api::namespaced(client, &namespace)).clone())
    }

    fn checked<T>(&mut self, done: Result<T, ClusterError>) -> Result<T, String> {
        done.map_err(|cause| {
            // The next attempt reads the files again: a certificate or token may have expired.
            self.api = None;
            format!("Secret {}: {}", self.name, cause.needing("get, create and update on secrets"))
        })
    }
}

/// Returns the version of a Secret. Each change of any of its data gives it another one.
fn version(found: Option<&Secret>) -> String {
    found.and_then(|found| found.metadata.resource_version.clone()).unwrap_or_default()
}

/// Kubernetes' limit for a Secret, minus the rest of the object.
const MAX_BYTES: usize = 1_000_000;
