//! What a pod does with those who want to reach a node through it: the right thing, late, or the wrong one.

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
            // An edge's session that ends in the cloud; another pod's edge may not come this far.
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
                asked.refuse(SessionError::new(ErrorCode::UnknownSession, "the node is another process now"));
            }
            None => asked.refuse(SessionError::new(ErrorCode::NodeNotConnected, "the node is not here")),
        }
    }

    /// Tries one path after the other while the acceptor is not there, or while it says nothing for too long.
    async fn relay(&self, asked: RelayRequest, first: &Arc<LinkSender>) {
        let (dice, node) = (&self.dice, asked.node().clone());
        asked.try_path(first);
        loop {
            let sought = match timeout(dice.time(Duration::from_secs(6)), asked.path_failed()).await {
                Ok(false) => return,
                Ok(true) if dice.one_in(4) => {
                    return asked
                        .refuse(SessionError::new(ErrorCode::NodeNotConnected, "looked for long enough"));
                }
                Ok(true) => true,
                Err(_) => false,
            };
            match self.paths.next(self.at, &node, asked.instance(), true, dice) {
                Some(path) => asked.try_path(&path.sender),
                None if sought => {
                    return asked
                        .refuse(SessionError::new(ErrorCode::NodeNotConnected, "it is nowhere else"));
                }
                None => {}
            }
        }
    }

    /// A stale answer, one that goes in circles, or none at all.
    fn misguide(&self, asked: RelayRequest) {
        let node = asked.node().clone();
        let path = if self.dice.one_in(3) {
            self.paths.any(self.at, &self.dice).filter(|path| path.node.is_none())
        } else {
            self.paths.to_node(self.at, &node, &self.dice)
        };
        // Whoever resumes must not meet another process: that one knows nothing of it, and says so.
        let other = |instance| asked.instance().is_some_and(|meant| Some(meant) != instance);
        match path {
            Some(path) if path.node.is_none() || !other(path.sender.instance) => asked.pass(&path.sender),
            _ => asked.refuse(SessionError::new(ErrorCode::NodeNotConnected, "wrong")),
        }
    }
}

/// The name under which edges ask for what the cloud itself can reach.
pub(crate) const CLOUD: &str = "cloud";
