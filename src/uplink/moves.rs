//! How an edge moves to another server, and its place in the list of servers. Pure: the dials are an argument.

use std::fmt;
use std::ops::Range;

use tracing::debug;
use tunnel_proto::names::Instance;

/// A place in the list of servers, which is in order of preference.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ListPlace {
    /// Index of the server.
    pub(crate) server: usize,
    /// Whether another server has requested a link there.
    pub(crate) is_requested: bool,
}

impl ListPlace {
    /// Returns the place of the next link, which leads to this server.
    pub(crate) fn linked(self, server: usize) -> Self {
        Self { server, is_requested: self.is_requested && server == self.server }
    }

    /// Returns the servers whose links replace that of this place. There are none if its link was requested: they would
    /// soon request it again.
    pub(crate) fn preferred(self) -> Range<usize> {
        0..if self.is_requested { 0 } else { self.server }
    }
}

/// Returns the indices of `servers` servers in the order in which they are dialled.
pub(crate) fn dial_order(first: usize, servers: usize) -> impl ExactSizeIterator<Item = usize> {
    (0..servers).map(move |n| (first + n) % servers)
}

/// Dials up to `dials` times until a link leads to another `process` than `from`. The name of a server may be a load
/// balancer's, which leads anywhere.
///
/// # Cancel safety
///
/// Cancel safe if `dial` is.
pub(crate) async fn dial_elsewhere<T, E: fmt::Display, F: Future<Output = Result<T, E>>>(
    from: Option<Instance>,
    dials: u32,
    mut dial: impl FnMut() -> F,
    process: impl Fn(&T) -> Option<Instance>,
) -> Option<T> {
    for _ in 0..dials {
        match dial().await {
            Ok(made) if process(&made) != from => return Some(made),
            Ok(_) => debug!("a new link leads to the server that requested another one"),
            Err(why) => debug!(error = %why, "cannot link to another server"),
        }
    }
    None
}

/// Maximum number of dials for one request. A single address gets one: it is that of a load balancer, which leads half
/// of the edges elsewhere, or of the only server.
pub(crate) const MAX_DIALS: u32 = 3;

#[cfg(test)]
mod tests;
