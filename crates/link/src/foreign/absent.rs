//! Stands in for the dialect of SuperEdge in a build without it: no link has it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use crate::grpc::read_ahead::ReadAhead;
use crate::sender::LinkSender;
use crate::table::{Event, SessionTable};
use tunnel_base::metrics::Metrics;
use tunnel_base::part;
use tunnel_proto::codec::EncodedMessage;
use tunnel_proto::codec::proto::StreamMsg;
use tunnel_proto::hello::Dialect;

/// Returns why a link with this dialect must be refused.
pub(crate) fn check(dialect: Dialect) -> Result<(), &'static str> {
    if dialect == Dialect::Plain { part!("superedge", "SuperEdge's dialect") } else { Ok(()) }
}

#[derive(Debug)]
pub(crate) enum ForeignDialect {}

impl ForeignDialect {
    pub(crate) fn of(
        _: Dialect,
        _: &Arc<LinkSender>,
        _: &Arc<SessionTable>,
        _: Duration,
    ) -> Option<Arc<Self>> {
        None
    }

    pub(crate) fn poll_message(&self, _: &mut Context<'_>) -> Poll<Option<EncodedMessage>> {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) enum ForeignReader {}

impl ForeignReader {
    pub(crate) fn new(dialect: Arc<ForeignDialect>, _: Metrics, _: bool) -> Self {
        match *dialect {}
    }

    pub(crate) fn silence_limit(&self) -> Duration {
        match *self {}
    }

    pub(crate) fn on_message(&mut self, _: StreamMsg, _: Instant, _: &mut VecDeque<Event>) {
        match *self {}
    }

    pub(crate) fn tick(&mut self, _: &mut Instant, _: Instant, _: &mut VecDeque<Event>) {
        match *self {}
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        match *self {}
    }

    pub(crate) async fn rescheduled(&self) {
        match *self {}
    }

    pub(crate) async fn pause_if_full(&mut self, _: &ReadAhead) -> bool {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_of_superedges_dialect_is_refused_with_the_name_of_the_feature() {
        assert_eq!(check(Dialect::NEWEST), Ok(()));
        assert!(check(Dialect::Plain).is_err_and(|why| why.contains("cargo's feature \"superedge\"")));
    }
}
