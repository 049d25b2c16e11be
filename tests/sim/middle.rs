//! Servers that relay requests for a node: correctly, late, or to the wrong place.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tunnel_link::sender::LinkSender;
use tunnel_link::table::RelayRequest;
use tunnel_proto::frame::{ErrorCode, Remote, SessionError};

use super::owner::Place;

impl Place {
    pub(crate) async fn guide(self, asked: RelayRequest) {
        let dice = &self.dice;
        let lies = self.plan.borrow().lies;
        if dice.one_in(3) {
            sleep(dice.time(Duration::from_secs(1))).await;
        }
        let node = asked.node().clone();
        if node.as_str() == CLOUD && asked.instance().is_none() {
            // An edge's session that ends in the cloud. A session of a peer's edge must not get here.
            if matches!(asked.from().peer, Remote::Edge(_))
                && let Some(offer) = asked.offer()
            {
                self.cradle.spawn("acceptor".into(), self.clone().answer(offer));
            }
            return;
        }
        if dice.one_in(lies) {
            return self.misguide(asked);
        }
        let far = matches!(asked.from().peer, Remote::Edge(_));
        match self.paths.next(self.at, &node, asked.instance(), far, dice) {
            Some(path) if far && dice.one_in(2) => self.relay(asked, &path.sender).await,
            Some(path) => asked.pass(&path.sender),
            None if asked.instance().is_some_and(|there| self.ledger.is_dead(there)) && dice.one_in(2) => {
                asked.refuse(SessionError::new(ErrorCode::UnknownSession, "the node is now another process"));
            }
            None => asked.refuse(SessionError::new(ErrorCode::NodeNotConnected, "the node is not here")),
        }
    }

    /// Tries one path after another while the acceptor is not there, or does not reply in time.
    async fn relay(&self, asked: RelayRequest, first: &Arc<LinkSender>) {
        let (dice, node) = (&self.dice, asked.node().clone());
        asked.try_path(first);
        loop {
            let sought = match timeout(dice.time(Duration::from_secs(6)), asked.path_failed()).await {
                Ok(false) => return,
                Ok(true) if dice.one_in(4) => {
                    return asked.refuse(SessionError::new(ErrorCode::NodeNotConnected, "search timeout"));
                }
                Ok(true) => true,
                Err(_) => false,
            };
            match self.paths.next(self.at, &node, asked.instance(), true, dice) {
                Some(path) => asked.try_path(&path.sender),
                None if sought => {
                    return asked.refuse(SessionError::new(ErrorCode::NodeNotConnected, "no other path"));
                }
                None => {}
            }
        }
    }

    /// Gives a stale reply, one that leads in a circle, or none.
    fn misguide(&self, asked: RelayRequest) {
        let node = asked.node().clone();
        let path = if self.dice.one_in(3) {
            self.paths.any(self.at, &self.dice).filter(|path| path.node.is_none())
        } else {
            self.paths.to_node(self.at, &node, &self.dice)
        };
        // A Resume must not reach another process, which does not know the session and would refuse it.
        let other = |instance| asked.instance().is_some_and(|meant| Some(meant) != instance);
        match path {
            Some(path) if path.node.is_none() || !other(path.sender.instance) => asked.pass(&path.sender),
            _ => asked.refuse(SessionError::new(ErrorCode::NodeNotConnected, "wrong")),
        }
    }
}

/// Name under which edges request targets that the cloud itself can reach.
pub(crate) const CLOUD: &str = "cloud";
