//! What the parts of a server start from.

use std::sync::Arc;

use crate::admin::readiness::Readiness;
use crate::server::ServerContext;
use crate::server::config::ServerConfig;
use tunnel_base::drain::Drain;

/// A part of a server that runs by this config. It has no task if its tables require none.
#[derive(Debug)]
pub(crate) struct RunningPart {
    pub(crate) server: Arc<ServerContext>,
    pub(crate) settings: Arc<ServerConfig>,
    /// Its conditions are removed when the part ends.
    pub(crate) readiness: Readiness,
    /// Starts when the part ends.
    pub(crate) drain: Drain,
}
