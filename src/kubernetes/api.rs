//! Watches and requests at kube-apiserver, for a server, an edge and the commands.

pub(crate) mod addresses;
pub(crate) mod cluster;
pub(crate) mod csr;
pub(crate) mod keep;
pub(crate) mod secret;

use serde_json::Value;

/// Returns the documents of a text as kubectl prints it, in YAML or JSON.
pub(crate) fn objects(text: &str) -> Result<Vec<Value>, serde_saphyr::Error> {
    serde_saphyr::from_multiple(text)
}
