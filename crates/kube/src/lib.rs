//! What is read from a cluster's kube-apiserver and written to it. Only this crate knows the Kubernetes API.

#![cfg_attr(
    not(all(feature = "addresses", feature = "csr", feature = "keep")),
    allow(dead_code, reason = "each part uses some of the partial types")
)]

#[cfg(feature = "addresses")]
pub mod address_watch;
pub mod cluster;
pub mod configmap;
#[cfg(feature = "csr")]
pub mod csr;
pub mod members;
#[cfg(any(feature = "addresses", feature = "csr", feature = "keep"))]
mod partial;
#[cfg(feature = "keep")]
pub mod reconcile;
pub mod secret;
mod watcher;
