//! Stands in for interception in a build without it. The config has no table for it then.

use tokio::sync::oneshot;

use crate::config::server::ServerConfig;
use crate::server::{ClientListener, ServerCore};
use crate::startup::Startup;
use crate::startup::access::AccessPolicyBuilder;

#[derive(Debug)]
pub(crate) enum PreparedIntercept {}

#[expect(clippy::unnecessary_wraps, reason = "interception may not be possible")]
pub(crate) fn prepare(
    _: &ServerConfig,
    _: &mut AccessPolicyBuilder,
    _: &mut Startup,
) -> Option<(Vec<ClientListener>, Option<PreparedIntercept>)> {
    Some((Vec::new(), None))
}

impl PreparedIntercept {
    pub(crate) fn mark_sockets(&self) {
        match *self {}
    }

    pub(crate) fn spawn(self, _: &ServerCore, _: &ServerConfig) -> oneshot::Receiver<()> {
        match self {}
    }
}
