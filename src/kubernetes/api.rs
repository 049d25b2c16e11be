//! Watches and requests at kube-apiserver, for a server, an edge and the commands.

pub(crate) mod addresses;
pub(crate) mod cluster;
pub(crate) mod csr;
pub(crate) mod keep;
pub(crate) mod pod_tokens;
pub(crate) mod secret;
