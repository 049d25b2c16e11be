//! Limits of the heads of requests and responses, and the memory for those of all connections.

use hyper::server::conn::http1;

use crate::config::{edge, server};
use tunnel_base::process::third_of_memory;
use tunnel_net::fd_limit;
use tunnel_net::limiter::{FairLimiter, PermitLimits};

/// Maximum length in bytes of a usual request's or response's head, and of the buffered part of a body.
pub(crate) const HEAD_BYTES: usize = 64 * 1024;
/// Maximum number of header fields of such a head. Parsing takes 64 bytes of scratch space for each, so it is low.
pub(crate) const HEAD_FIELDS: usize = 1024;

/// Returns hyper's server for such heads.
pub(crate) fn http_server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server
        .max_headers(HEAD_FIELDS)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(HEAD_BYTES)
        .half_close(true)
        .auto_date_header(false);
    server
}

/// Maximum length in bytes of a long head, as in kube-apiserver. Its connection needs a permit of [`long_heads`].
pub(crate) const LONG_HEAD_BYTES: usize = 1 << 20;
/// Maximum number of header fields of a long head.
pub(crate) const LONG_HEAD_FIELDS: usize = 4096;

/// Creates the limiter of connections with a long head, shared by all listeners of a process. Their memory must fit
/// into a quarter of the default memory for sessions. One source can take half of the permits.
pub fn long_heads(at_edge: bool) -> FairLimiter {
    let memory = third_of_memory(if at_edge { edge::MEMORY } else { server::MEMORY }) / 4;
    let permits = (memory / LONG_HEAD_MEMORY).max(2);
    FairLimiter::new(PermitLimits { permits, per_source: permits / 2, waiting: 0, idle_timeout: None })
}

/// Upper bound in bytes for the memory of a connection with a long head: the head, its parsed fields, its copy for the
/// other side, and the buffered part of a body.
const LONG_HEAD_MEMORY: usize = 4 * LONG_HEAD_BYTES;

/// Returns the maximum number of pending connections of a listener: without a head, or not yet past the checks.
///
/// Their heads of maximum size must fit into a quarter of a server's default memory for sessions, at an edge too.
pub(crate) fn max_pending() -> usize {
    fd_limit::at_most(MAX_PENDING.min(third_of_memory(server::MEMORY) / 4 / HEAD_BYTES), 8)
}

/// Upper bound for pending connections of a listener on any machine: without a head, or not yet past the checks.
pub(crate) const MAX_PENDING: usize = 4096;
