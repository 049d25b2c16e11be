//! Paths for sessions that others request to relay through this server, found by the same search as for its own.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::paths::PathProvider;
use crate::paths::node_not_found::{NodeNotFound, RESTARTED};
use crate::registry::PeerPaths;
use crate::route::{MOVE_WAIT, PathSearch};
use crate::server::ServerContext;

use tunnel_link::link::Link;
use tunnel_link::table::relay_request::RelayRequest;
use tunnel_proto::frame::{ErrorCode, Remote, SessionError};
use tunnel_proto::names::NodeName;

impl ServerContext {
    /// Relays an edge's request to its node, or to the server that has dialled for the edge. Continues searching while
    /// the answer is *not here*.
    ///
    /// Only the opener of a session moves it to another path. Once a request may have reached its acceptor, this server
    /// does not try a second path on its own. It sends PathLost to the opener, and what it has learned serves the
    /// opener's next attempt.
    ///
    /// Returns the request with the node's link if that is plain: this server must then be the end of the session.
    /// `room` has the permits for searches of the request's link.
    pub(crate) async fn relay(
        &self,
        request: RelayRequest,
        room: &Semaphore,
    ) -> Option<(RelayRequest, Arc<Link>)> {
        let node = request.key().node.clone();
        let instance = request.instance();
        // An edge serves its own node itself, so with that name it means the cloud.
        let own = matches!(&request.from().peer, Remote::Edge(edge) if *edge == node);
        let finder = self.finder.clone();
        let paths: Arc<dyn PathProvider> = if own { Arc::new(PeerPaths(finder)) } else { finder };
        let resumes = request.resumes();
        let timeout = if resumes { PATH_SEARCH_TIME } else { self.clients.route.open_timeout };
        let mut search = PathSearch::new(&*paths, &node, instance, Instant::now() + timeout, rand::random);
        if !resumes {
            search = search.at_most(MOVE_WAIT);
        }
        let mut first = true;
        loop {
            let looking = async { if first { search.first().await } else { search.next().await } };
            let found = tokio::select! {
                biased;
                () = request.wait_cancelled() => return None,
                found = self.with_search_permit(looking, room) => found,
            };
            match found {
                Ok(Ok(())) => {}
                Ok(Err(missing)) => {
                    request.refuse(refusal(&missing, &node, own, resumes));
                    return None;
                }
                Err(why) => {
                    let code = if resumes { ErrorCode::NodeNotConnected } else { ErrorCode::Overloaded };
                    request.refuse(SessionError::new(code, why));
                    return None;
                }
            }
            if let Some(plain) = search.plain() {
                return Some((request, plain));
            }
            if !search.ask(|path| request.try_path(&path.link), request.path_failed()).await {
                return None;
            }
            first = false;
        }
    }

    /// Relays a peer's request to a node that is linked here. That peer has already searched and only local links are
    /// used here, so there is at most one hop between servers.
    ///
    /// Returns the request like [`Self::relay`].
    pub(super) fn pass(&self, request: RelayRequest) -> Option<(RelayRequest, Arc<Link>)> {
        let Some(linked) =
            self.registry.link_of(&request.key().node).filter(|linked| !linked.link.is_closed())
        else {
            let why = format!("node {} is not linked to this server", request.key().node);
            request.refuse(SessionError::new(ErrorCode::NodeNotConnected, why));
            return None;
        };
        if request.instance().is_some_and(|required| linked.link.instance != Some(required)) {
            let why = format!("node {} {RESTARTED}", request.key().node);
            request.refuse(SessionError::new(ErrorCode::UnknownSession, why));
            return None;
        }
        if !linked.link.abilities.resumes {
            return Some((request, linked.link));
        }
        request.pass(&linked.link);
        None
    }

    /// Runs a search, with a permit of its link and one of this server unless it is ready at once: a node that is
    /// linked here, or cached, needs no search. The error names the limit that was reached.
    pub(super) async fn with_search_permit<T>(
        &self,
        looking: impl Future<Output = T>,
        room: &Semaphore,
    ) -> Result<T, &'static str> {
        let mut looking = pin!(looking);
        if let Some(found) = looking.as_mut().now_or_never() {
            return Ok(found);
        }
        let own = room.try_acquire();
        let _own = own.map_err(|_| "too many concurrent node searches on this link")?;
        let all = self.search_permits.try_acquire();
        let _all = all.map_err(|_| "too many concurrent node searches on this server")?;
        Ok(looking.await)
    }
}

/// Returns the error for the opener if no path was found. For an Open it is final, because the search has taken as long
/// as a client waits. After a Resume the opener may try again.
pub(super) fn refusal(missing: &NodeNotFound, node: &NodeName, own: bool, resumes: bool) -> SessionError {
    if own && missing.trouble.is_empty() {
        return SessionError::new(
            ErrorCode::UnknownSession,
            "the server that dialled for this session has stopped",
        );
    }
    if own {
        return SessionError::new(
            ErrorCode::NodeNotConnected,
            format!("the server that holds this session was not found{missing}"),
        );
    }
    let code = match (resumes, missing.another) {
        (false, _) => ErrorCode::TargetUnreachable,
        (true, false) => ErrorCode::NodeNotConnected,
        (true, true) => ErrorCode::UnknownSession,
    };
    let subject = if resumes { format!("node {node}") } else { "it".to_owned() };
    SessionError::new(code, format!("{subject} {}", missing.sentence()))
}

/// How long a server searches for the remote end of a session before the opener tries again. Names and lists of peers
/// take up to 5 s to refresh.
const PATH_SEARCH_TIME: Duration = Duration::from_secs(6);
