//! What a pod does with those who want to reach a node through it: the right thing, late, or the wrong one.

use std::time::Duration;

use tokio::time::sleep;
use tunnel::tunnel::{Asked, Code, Peer, Refusal};

use super::owner::Place;

impl Place {
    pub(crate) async fn guide(self, asked: Asked) {
        let dice = &self.dice;
        let lies = self.plan.borrow().lies;
        if dice.one_in(3) {
            sleep(dice.time(Duration::from_secs(1))).await;
        }
        let node = asked.node().clone();
        if node.as_str() == CLOUD && asked.instance().is_none() {
            // An edge's session that ends in the cloud; another pod's edge may not come this far.
            if matches!(asked.from().peer, Peer::Edge(_))
                && let Some(offer) = asked.offer()
            {
                self.cradle.spawn("acceptor".into(), self.clone().answer(offer));
            }
            return;
        }
        if dice.one_in(lies) {
            return self.misguide(asked);
        }
        let far = matches!(asked.from().peer, Peer::Edge(_));
        match self.ways.next(self.at, &node, asked.instance(), far, dice) {
            Some(way) => asked.pass(&way.outbox),
            None if asked.instance().is_some_and(|there| self.ledger.is_dead(there)) && dice.one_in(2) => {
                asked.refuse(Refusal::new(Code::Unknown, "the node is another process now"));
            }
            None => asked.refuse(Refusal::new(Code::NotHere, "the node is not here")),
        }
    }

    /// A stale answer, one that goes in circles, or none at all.
    fn misguide(&self, asked: Asked) {
        let node = asked.node().clone();
        let way = if self.dice.one_in(3) {
            self.ways.any(self.at, &self.dice).filter(|way| way.node.is_none())
        } else {
            self.ways.to_node(self.at, &node, &self.dice)
        };
        // Whoever resumes must not meet another process: that one knows nothing of it, and says so.
        let other = |instance| asked.instance().is_some_and(|meant| Some(meant) != instance);
        match way {
            Some(way) if way.node.is_none() || !other(way.outbox.instance) => asked.pass(&way.outbox),
            _ => asked.refuse(Refusal::new(Code::NotHere, "wrong")),
        }
    }
}

/// The name under which edges ask for what the cloud itself can reach.
pub(crate) const CLOUD: &str = "cloud";
