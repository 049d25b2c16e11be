//! What connections may use that have proven nothing: one budget for all ports, and the limits of heads.

use hyper::server::conn::http1;

use tunnel_net::fd_limit;
use tunnel_net::limiter::{FairLimiter, PermitLimits};
use tunnel_net::tls::handshake::{MAX_HANDSHAKES, handshake_limits};

/// Maximum length in bytes of a usual request's or response's head, and of the buffered part of a request's body.
pub(crate) const HEAD_BYTES: usize = 32 * 1024;
/// Maximum number of header fields of such a head. Parsing takes 64 bytes of scratch space for each, so it is low.
pub(crate) const HEAD_FIELDS: usize = 1024;

/// Returns hyper's server for heads of at most these sizes.
pub(crate) fn http_server(bytes: usize, fields: usize) -> http1::Builder {
    let mut server = http1::Builder::new();
    server
        .max_headers(fields)
        .max_header_size(bytes)
        .max_buf_size(bytes)
        .half_close(true)
        .auto_date_header(false);
    server
}

/// Maximum length in bytes of a long head, as in kube-apiserver. Its connection needs a permit of
/// [`PendingLimits::long_heads`].
pub(crate) const LONG_HEAD_BYTES: usize = 1 << 20;
/// Maximum number of header fields of a long head.
pub(crate) const LONG_HEAD_FIELDS: usize = 4096;

/// The connections that a process serves for those who have proven nothing, shared by all its ports. Cheap to clone;
/// clones share the permits.
///
/// Each limiter has as many permits as fit into its part of the process's memory, and shares them fairly among sources.
/// Together they may use 11/24 of it. An admin port has limits of its own, so that operators are served whatever
/// happens here.
#[derive(Debug, Clone)]
pub struct PendingLimits {
    /// Connections of clients without a complete head, between two requests, or not yet past the checks.
    pub heads: FairLimiter,
    /// Connections with a long head. One source can take half of the permits.
    pub long_heads: FairLimiter,
    /// Connections in a TLS handshake, and those of links until a call is accepted. More wait in turn.
    pub handshakes: FairLimiter,
    /// Connections of links that have sent nothing, or wait for a handshake. A rejected edge would dial again, so a crowd
    /// of edges should fit.
    pub waiting: FairLimiter,
}

impl PendingLimits {
    /// Creates the limits of a process that may use `memory` bytes. An edge has no port for links, so clients may use
    /// that part too.
    pub fn new(memory: usize, is_edge: bool) -> Self {
        let memory = memory.min(MAX_MEMORY);
        let heads = memory / if is_edge { 4 } else { 8 } / PENDING_MEMORY;
        let handshakes = MAX_HANDSHAKES.min(memory / 8 / CALL_MEMORY).max(8);
        let waiting = fd_limit::at_most((memory / 8 / WAITING_MEMORY).max(8), 4);
        let long = (memory / 12 / LONG_HEAD_MEMORY).max(2);
        let per_source = long / 2;
        let long = PermitLimits { permits: long, per_source, waiting: 0, idle_timeout: None };
        Self {
            heads: FairLimiter::new(PermitLimits::permits(fd_limit::at_most(heads.max(8), 8))),
            long_heads: FairLimiter::new(long),
            handshakes: FairLimiter::new(handshake_limits(handshakes, waiting)),
            waiting: FairLimiter::new(PermitLimits::permits(waiting)),
        }
    }
}

/// The most memory in bytes of which the limits are a part: a machine with more needs no more connections.
const MAX_MEMORY: usize = 768 << 20;
/// Upper bound in bytes for the memory of a client's connection without a complete head: TLS and most of a head.
const PENDING_MEMORY: usize = 96 * 1024;
/// Upper bound in bytes for the memory of a link's connection without an accepted call: TLS, and HTTP/2 with a pending
/// call and its frames.
const CALL_MEMORY: usize = 128 * 1024;
/// Upper bound in bytes for the memory of a connection before its handshake, with 1.5 KiB in the kernel.
const WAITING_MEMORY: usize = 7 * 1024;
/// Upper bound in bytes for the memory of a connection with a long head: the head, its parsed fields, its copy for the
/// other side, and the buffered part of a body.
const LONG_HEAD_MEMORY: usize = 4 * LONG_HEAD_BYTES;
