//! Watches and requests at kube-apiserver, for a server, an edge and the commands.

#[cfg(feature = "edge")]
pub(crate) mod csr;
#[cfg(feature = "server")]
pub(crate) mod server;
