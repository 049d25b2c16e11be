//! What the rest of a link sees instead of `plain` in a build without SuperEdge: no remote is plain.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use crate::link::Link;
use crate::table::{FrameEvent, SessionTable};
use tunnel_base::metrics::Metrics;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::codec::{DecodeError, EncodedMessage};

/// The reason why SuperEdge's programs cannot be served, with a hint.
pub const SUPEREDGE: Result<(), &str> = Err(
    "this program was built without SuperEdge's config and links; build it with cargo's feature \"superedge\"",
);

#[derive(Debug)]
pub(crate) enum PlainRemote {}

#[derive(Debug)]
pub(crate) struct PlainRemoteReader(PlainRemote);

impl PlainRemote {
    pub(crate) fn of(_: &Arc<Link>, _: &Arc<SessionTable>, _: Duration) -> Option<Arc<Self>> {
        None
    }

    pub(crate) fn poll_message(&self, _: &mut Context<'_>) -> Poll<Option<EncodedMessage>> {
        match *self {}
    }
}

impl PlainRemoteReader {
    #[expect(clippy::needless_pass_by_value, reason = "the other reader keeps it")]
    pub(crate) fn new(remote: Arc<PlainRemote>, _: Metrics) -> Self {
        match *remote {}
    }

    pub(crate) fn charge_unfinished(&mut self, _: usize) -> Result<(), DecodeError> {
        match self.0 {}
    }

    pub(crate) fn on_message(&mut self, _: StreamMsg, _: Instant, _: &mut VecDeque<FrameEvent>) {
        match self.0 {}
    }

    pub(crate) fn tick(&mut self, _: Instant, _: &mut VecDeque<FrameEvent>) {
        match self.0 {}
    }

    pub(crate) async fn due(&self) {
        match self.0 {}
    }

    pub(crate) async fn pause_if_full(&mut self) -> bool {
        match self.0 {}
    }
}
