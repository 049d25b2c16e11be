//! Servers that relay requests for a node: correctly, late, or to the wrong place.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tunnel_link::link::Link;
use tunnel_link::table::relay_request::RelayRequest;
use tunnel_proto::frame::{ErrorCode, Remote, SessionError};

use super::owner::Place;

impl Place {
    pub(crate) async fn relay_request(self, request: RelayRequest) {
        let rng = &self.rng;
        let lies = self.plan.borrow().lies;
        if rng.one_in(3) {
            sleep(rng.time(Duration::from_secs(1))).await;
        }
        let node = request.key().node.clone();
        if node.as_str() == CLOUD && request.instance().is_none() {
            // An edge's session that ends in the cloud. A session of a peer's edge must not get here.
            if matches!(request.from().peer, Remote::Edge(_))
                && let Some(offer) = request.offer()
            {
                self.spawner.spawn("acceptor".into(), self.clone().answer(offer));
            }
            return;
        }
        if rng.one_in(lies) {
            return self.relay_wrongly(request);
        }
        let far = matches!(request.from().peer, Remote::Edge(_));
        match self.paths.next(self.at, &node, request.instance(), far, rng) {
            Some(path) if far && rng.one_in(2) => self.relay(request, &path.link).await,
            Some(path) => request.pass(&path.link),
            None if request.instance().is_some_and(|there| self.ledger.is_dead(there)) && rng.one_in(2) => {
                request
                    .refuse(SessionError::new(ErrorCode::UnknownSession, "the node is now another process"));
            }
            None => request.refuse(SessionError::new(ErrorCode::NodeNotConnected, "the node is not here")),
        }
    }

    /// Tries one path after another while the acceptor is not there, or does not reply in time.
    async fn relay(&self, request: RelayRequest, first: &Arc<Link>) {
        let (rng, node) = (&self.rng, request.key().node.clone());
        request.try_path(first);
        loop {
            let is_over = match timeout(rng.time(Duration::from_secs(6)), request.path_failed()).await {
                Ok(false) => return,
                Ok(true) if rng.one_in(4) => {
                    return request.refuse(SessionError::new(ErrorCode::NodeNotConnected, "search timeout"));
                }
                Ok(true) => true,
                Err(_) => false,
            };
            match self.paths.next(self.at, &node, request.instance(), true, rng) {
                Some(path) => request.try_path(&path.link),
                None if is_over => {
                    return request.refuse(SessionError::new(ErrorCode::NodeNotConnected, "no other path"));
                }
                None => {}
            }
        }
    }

    /// Gives a stale reply, one that leads in a circle, or none.
    fn relay_wrongly(&self, request: RelayRequest) {
        let node = request.key().node.clone();
        let path = if self.rng.one_in(3) {
            self.paths.any(self.at, &self.rng).filter(|path| path.node.is_none())
        } else {
            self.paths.to_node(self.at, &node, &self.rng)
        };
        // A Resume must not reach another process, which does not know the session and would refuse it.
        let other = |instance| request.instance().is_some_and(|expected| Some(expected) != instance);
        match path {
            Some(path) if path.node.is_none() || !other(path.link.instance) => request.pass(&path.link),
            _ => request.refuse(SessionError::new(ErrorCode::NodeNotConnected, "wrong")),
        }
    }
}

/// Name under which edges request targets that the cloud itself can reach.
pub(crate) const CLOUD: &str = "cloud";
