//! What is read from a cluster's kube-apiserver and written to it. Only this crate knows the Kubernetes API.

pub mod address_watch;
pub mod cluster;
pub mod configmap;
pub mod csr;
pub mod endpoint_watch;
pub mod node_watch;
mod partial;
pub mod pod_tokens;
pub mod reconcile;
pub mod secret;
mod watcher;
