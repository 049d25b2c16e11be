//! Routes sessions: from a request to an open session, and from a session without a path to its next path.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use educe::Educe;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::info_span;

use crate::paths::node_not_found::{NodeNotFound, RESTARTED};
use crate::paths::uplinks::LinkFailure;
use crate::paths::waiters::NodeWaiter;
use crate::paths::{Path, PathProvider};
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_base::unix_time::in_words;
use tunnel_link::link::Link;
use tunnel_link::table::handles::{OpenOutcome, PathSearchRight, Session};
use tunnel_link::table::session::AnyPermit;
use tunnel_link::table::{SessionTable, TableFull};
use tunnel_proto::frame::{ErrorCode, Remote, SessionCategory, SessionError};
use tunnel_proto::names::{Host, Instance, NodeName, SessionId, Target};

/// A request of a listener for a session.
#[derive(Debug, Clone)]
pub struct SessionRequest {
    /// Node of the target.
    pub node: NodeName,
    /// Target to dial there. Its host may be the node itself.
    pub target: Target,
    /// Kind of the listener.
    pub category: SessionCategory,
    /// Client (user and address), for the log of the remote.
    pub client: String,
    /// Name of the listener.
    pub listener: &'static str,
    /// The client's permit. The session keeps it until its last bytes are delivered, or the remote knows that it was
    /// cancelled.
    pub permit: Option<AnyPermit>,
}

/// Reason why a target could not be reached. The texts are shown to clients.
#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    /// The node is not connected to any server. Usually its edge is down, or still connecting.
    #[error("node {node} {}", missing.sentence())]
    Offline {
        /// Requested node.
        node: NodeName,
        /// Servers that were asked, and when the node was last connected.
        missing: NodeNotFound,
    },
    /// The node's edge refused the session; its link works.
    #[error("{}", refusal_text(.node, .refusal))]
    Refused {
        /// Node that refused.
        node: NodeName,
        /// Reason given by the edge.
        refusal: SessionError,
    },
    /// No reply within the timeout.
    #[error("node {node} did not answer within {timeout:?}")]
    Timeout {
        /// Requested node.
        node: NodeName,
        /// Timeout.
        timeout: Duration,
    },
    /// This process has reached a limit.
    #[error("this process has reached its limit of sessions, or of memory for them")]
    Busy,
}

/// Returns the text of a refusal for a session to that node. A server calls the node "it".
pub(crate) fn refusal_text(node: &NodeName, refusal: &SessionError) -> String {
    match refusal.reason.strip_prefix("it ") {
        Some(rest) => format!("node {node} {rest}"),
        None => format!("node {node}: {refusal}"),
    }
}

/// Reason why no session was opened, and the session's id if one was requested: the remote knows it.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct OpenError {
    /// Id that the remote may have logged.
    pub session: Option<SessionId>,
    /// Reason.
    #[source]
    pub why: RouteError,
}

impl From<RouteError> for OpenError {
    fn from(why: RouteError) -> Self {
        Self { session: None, why }
    }
}

/// A router that opens sessions, and finds new paths for sessions that lost theirs. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SessionRouter {
    paths: Arc<dyn PathProvider>,
    table: Arc<SessionTable>,
    /// Timeout for opening a session, over all paths.
    pub(crate) open_timeout: Duration,
    /// Timeout for resuming a session.
    pub(crate) resume_timeout: Duration,
    /// What sessions request; `None` unless they are those of a user's program.
    pub(crate) asked: Option<ResumeTimeouts>,
    chance: RandomFraction,
}

/// How long the sessions of a user's program may be without a path, as far as server and edge permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Educe)]
#[educe(Default)]
pub struct ResumeTimeouts {
    /// Sessions to port 22.
    #[educe(Default = Duration::from_secs(12 * 60 * 60))]
    pub ssh: Duration,
    /// All others.
    #[educe(Default = Duration::from_secs(10 * 60))]
    pub other: Duration,
}

/// A source of random numbers from 0 to 1, for the backoff between attempts.
pub type RandomFraction = fn() -> f64;

impl SessionRouter {
    /// Creates the router of a process with these paths.
    pub fn new(
        paths: Arc<dyn PathProvider>,
        table: Arc<SessionTable>,
        open_timeout: Duration,
        resume_timeout: Duration,
    ) -> Self {
        Self { paths, table, open_timeout, resume_timeout, asked: None, chance: rand::random }
    }

    /// Returns the node that is named by this host's address, if a search may find it.
    pub fn node_named_by_address(&self, host: &Host) -> Option<NodeName> {
        self.paths.node_named_by_address(host)
    }

    /// Returns true if the node is known to be linked, or was linked here, without asking peers.
    pub fn has_linked(&self, node: &NodeName) -> bool {
        self.paths.has_linked(node)
    }

    /// Returns why this process has no link, if it links to servers and its last attempt has failed.
    pub fn link_failure(&self) -> Option<String> {
        self.paths.uplinks()?.failure().map(|failure| failure.text)
    }

    /// Replaces the source of random numbers, for simulations with a seed.
    #[must_use]
    pub fn with_chance(self, chance: RandomFraction) -> Self {
        Self { chance, ..self }
    }

    /// Opens a session to the request's target.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// Returns an error if no session could be opened. Its text may be shown to the client.
    pub async fn open(&self, request: SessionRequest) -> Result<Session, OpenError> {
        let opened = self.open_over(None, request.clone()).await;
        let Err(OpenError { why: RouteError::Refused { refusal, .. }, .. }) = &opened else { return opened };
        if refusal.code != ErrorCode::TargetUnreachable {
            return opened;
        }
        // Another server of the list may have the node that this one does not find. At an edge, its own node's name stands
        // for the cloud, where an address may be a node's; servers dial names alike.
        let may_be_node = matches!(request.target.host, Host::Ip(_));
        let uplinks = self.paths.uplinks().filter(|uplinks| may_be_node || uplinks.node != request.node);
        let Some(uplinks) = uplinks else { return opened };
        let Some(link) = uplinks.other_server().await else { return opened };
        self.open_over(Some(link), request).await.or(opened)
    }

    /// Opens a session, and requests it over `link` first if that is given.
    async fn open_over(
        &self,
        link: Option<Arc<Link>>,
        request: SessionRequest,
    ) -> Result<Session, OpenError> {
        let SessionRequest { node, target, category, client, listener, permit } = request;
        let until = Instant::now() + self.open_timeout;
        let mut search = PathSearch::new(&*self.paths, &node, None, until, self.chance);
        match self.paths.uplinks() {
            None => search = search.at_most(MOVE_WAIT),
            // A laptop may just have woken up. Without a link the search fails, with its own reason.
            Some(uplinks) if uplinks.node == NodeName::none() => {
                let _ = timeout_at(until, uplinks.wait_decided()).await;
            }
            Some(_) => {}
        }
        search.found = link.map(|link| Path { instance: None, link });
        if search.found.is_none()
            && let Err(missing) = search.first().await
        {
            return Err(RouteError::Offline { node, missing }.into());
        }
        let asked = self.asked.map(|asked| if target.port == 22 { asked.ssh } else { asked.other });
        let opening = self.table.open(node.clone(), target, category, client, listener);
        let opening = opening.map_err(|TableFull| RouteError::Busy)?;
        if let Some(asked) = asked {
            opening.ask_resume_timeout(asked);
        }
        if let Some(permit) = permit {
            opening.keep(permit);
        }
        // Asks on one path after another until the session is open or refused.
        let attempts = async {
            loop {
                match search.ask(|path| opening.ask(&path.link, path.instance), opening.answer()).await {
                    OpenOutcome::Open => return Ok(()),
                    OpenOutcome::Refused(refusal) => {
                        return Err(RouteError::Refused { node: node.clone(), refusal });
                    }
                    OpenOutcome::NoPath => {
                        let found = search.next().await;
                        found.map_err(|missing| RouteError::Offline { node: node.clone(), missing })?;
                    }
                }
            }
        };
        let late = |_| Err(RouteError::Timeout { node: node.clone(), timeout: self.open_timeout });
        match timeout_at(until, attempts).await.unwrap_or_else(late) {
            Ok(()) => Ok(opening.into_session()),
            Err(why) => Err(OpenError { session: Some(opening.id()), why }),
        }
    }

    /// Evicts a session without an owner that its remote does not take, because this process has too many sessions.
    /// Returns false if there is none.
    pub fn evict_orphan(&self) -> bool {
        self.table.evict_orphan("sessions")
    }

    /// Runs [`Self::resume`] for each session that has lost its path, in its own task. Returns when draining starts.
    pub async fn resume_parked(self, drain: Drain) {
        while let Some(parked) = drain.run_until(self.table.next_parked()).await {
            let route = self.clone();
            let span = info_span!("resume", session = %parked.key().id);
            drain.spawn(span, async move { route.resume(parked).await });
        }
    }

    /// Searches for a new path until the session has one or has ended, or the resume timeout has passed.
    ///
    /// At most one task searches per session, because there is at most one [`PathSearchRight`] of it. If the new path is
    /// lost before this task notices, the loop continues with the same [`PathSearchRight`]. [`PathSearchRight::needs_path`]
    /// releases it only if, under the session's lock, no path is needed. So no loss remains without a search.
    pub async fn resume(&self, mut parked: PathSearchRight) {
        let timeout = parked.resume_timeout(self.resume_timeout);
        let until = Instant::now() + timeout;
        let node = parked.key().node.clone();
        let far = self.paths.call(&node);
        let mut search = PathSearch::new(&*self.paths, &node, parked.instance(), until, self.chance);
        search.restart_after_pause(parked.consecutive_losses).await;
        while parked.needs_path() {
            let found = search.next().await;
            if found.is_ok() {
                let answered = search.ask(|path| parked.resume(&path.link), parked.answered());
                if timeout_at(until, answered).await.is_ok() {
                    continue;
                }
            }
            let (code, why) = if found.is_err_and(|missing| missing.another) {
                (ErrorCode::UnknownSession, format!("{far} {RESTARTED}"))
            } else {
                self.paths.no_path(&far, timeout)
            };
            return parked.give_up(SessionError::new(code, why));
        }
    }
}

/// Time for which a new session waits for a node that was connected a moment ago, or was cached at a server that no
/// longer has it.
pub(crate) const MOVE_WAIT: Duration = Duration::from_secs(3);

/// The search of one session for paths. It asks over one path at a time.
///
/// A search belongs to one task, so it needs no lock. Links and nodes may change concurrently; a waiter that is always
/// created before the lookup notices that.
#[derive(Debug)]
pub(crate) struct PathSearch<'a> {
    paths: &'a dyn PathProvider,
    chance: RandomFraction,
    node: &'a NodeName,
    /// Process of the node that is searched for; `None` for any process.
    instance: Option<Instance>,
    /// Start and end of the search.
    started: Instant,
    until: Instant,
    /// Time for which it searches for a node that no server has; `None`: until the end of the search.
    timeout: Option<Duration>,
    /// Path to ask over next.
    found: Option<Path>,
    /// Path that was asked last; the next lookup searches for another one.
    asked: Option<Path>,
    /// Time to wait for a reply before searching for another path.
    wait: Duration,
    backoff: Backoff,
}

impl<'a> PathSearch<'a> {
    /// Creates a search among `paths` for `node`, and for its process `instance` if given.
    pub(crate) fn new(
        paths: &'a dyn PathProvider,
        node: &'a NodeName,
        instance: Option<Instance>,
        until: Instant,
        chance: RandomFraction,
    ) -> Self {
        Self {
            paths,
            chance,
            node,
            instance,
            started: Instant::now(),
            until,
            timeout: None,
            found: None,
            asked: None,
            wait: ANSWER_TIMEOUT,
            backoff: Backoff::new(),
        }
    }

    /// Limits how long each search continues while no server has the node.
    pub(crate) fn at_most(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// Starts with a delay that grows with `times`: the number of consecutive paths that were lost soon.
    pub(crate) async fn restart_after_pause(&mut self, times: u32) {
        if times > 0 {
            self.backoff = Backoff::after(times);
            sleep_until(self.until.min(Instant::now() + self.pause())).await;
        }
    }

    fn pause(&mut self) -> Duration {
        // The remote end may link again shortly before the end of the search.
        let left = self.until.saturating_duration_since(Instant::now());
        let most = MAX_PAUSE.max(self.started.elapsed() / 20);
        self.backoff.pause((self.chance)()).min(most).min(MIN_LAST_PAUSE + left / 10)
    }

    /// Returns the link to ask over next, if its remote resumes nothing.
    pub(crate) fn plain(&self) -> Option<Arc<Link>> {
        self.found.as_ref().map(|path| path.link.clone()).filter(|link| !link.abilities.resumes)
    }

    /// Searches for the first path. Cancel safe.
    ///
    /// A new session waits for a node that is moving between servers, as a running session does, but for no other node.
    ///
    /// # Errors
    ///
    /// Returns an error if no server has the node, or the search has timed out.
    pub(crate) async fn first(&mut self) -> Result<(), NodeNotFound> {
        match timeout_at(self.until, self.paths.find(self.node, self.instance, None)).await {
            Ok(Ok(path)) => {
                self.found = Some(path);
                Ok(())
            }
            Ok(Err(missing)) if !missing.is_moving() && self.instance.is_none() => Err(missing),
            Ok(Err(_)) | Err(_) => self.next().await,
        }
    }

    /// Searches until there is a path to ask over. Cancel safe.
    ///
    /// It may be the path that was asked before, but then only after a delay.
    ///
    /// # Errors
    ///
    /// Returns an error if the search has timed out, or the process that is searched for has been replaced.
    pub(crate) async fn next(&mut self) -> Result<(), NodeNotFound> {
        let until = self.timeout.map_or(self.until, |timeout| self.until.min(Instant::now() + timeout));
        let end =
            |replaced: Option<Instant>| replaced.map_or(until, |since| until.min(since + REPLACED_NODE_WAIT));
        // Time since which only another process of the node was found.
        let mut replaced: Option<Instant> = None;
        let mut missing = NodeNotFound::default();
        let mut failed = self.asked.take();
        if let Some(failed) = &failed {
            self.paths.invalidate(self.node, failed);
            if let Some(uplinks) = self.paths.uplinks()
                && self.started.elapsed() >= OTHER_SERVER_AFTER
            {
                uplinks.request_other_server();
            }
        }
        loop {
            // Create the waiter before the lookup: a link that is added in between ends the waits below.
            let arrival = self.paths.arrival(self.node);
            if self.instance.is_some_and(|instance| self.paths.is_replaced(self.node, instance)) {
                replaced.get_or_insert_with(Instant::now);
            }
            match self.look_up(failed.take(), &arrival, end(replaced)).await {
                Ok(Some(path)) => {
                    self.found = Some(path);
                    return Ok(());
                }
                Ok(None) => {}
                Err(not_found) => {
                    replaced = not_found.another.then(|| replaced.unwrap_or_else(Instant::now));
                    missing = not_found;
                }
            }
            let is_final = |since: Instant| self.paths.is_alone() || since.elapsed() >= REPLACED_NODE_WAIT;
            let another = replaced.is_some_and(is_final);
            if another || Instant::now() >= until {
                return Err(NodeNotFound { another, ..missing });
            }
            let pause = self.pause();
            let _ = timeout_at(end(replaced).min(Instant::now() + pause), arrival.wait()).await;
        }
    }

    /// Looks up a path, but not the one that failed. Returns `None` if there is no other one by `end`, or if
    /// a link arrives before.
    async fn look_up(
        &self,
        failed: Option<Path>,
        arrival: &NodeWaiter<'_>,
        end: Instant,
    ) -> Result<Option<Path>, NodeNotFound> {
        let failed = failed.map(|path| path.link);
        // One request over each of two links, and then a pause.
        if failed.as_ref().is_some_and(|failed| self.paths.is_other_server(failed)) {
            return Ok(None);
        }
        // A peer that failed may still claim to have the node, and reply sooner than the one that does.
        let is_peer = |link: &Link| matches!(link.peer, Remote::Peer | Remote::Server(_));
        let is_open_peer = |link: &&Link| is_peer(link) && !link.is_closed();
        let excluded = failed.as_deref().filter(is_open_peer);
        let found = tokio::select! {
            found = timeout_at(end, self.paths.find(self.node, self.instance, excluded)) => found,
            // The new path may be by the excluded link.
            () = arrival.wait(), if excluded.is_some() => return Ok(None),
        };
        let is_other = |path: &Path| failed.as_ref().is_none_or(|failed| failed.id != path.link.id);
        let Ok(found) = found else { return Ok(None) };
        found.map(|path| Some(path).filter(is_other))
    }

    /// Asks over the path that was found, and then over others while none has answered and others are left.
    ///
    /// Returns the reply to the last request. `answer` waits for it, and is polled only after a request.
    pub(crate) async fn ask<A>(&mut self, ask: impl Fn(&Path), answer: impl Future<Output = A>) -> A {
        let mut answer = pin!(answer);
        loop {
            if let Some(path) = self.found.take() {
                ask(&path);
                self.asked = Some(path);
            }
            let other = tokio::select! {
                biased;
                answer = &mut answer => return answer,
                other = self.other() => other,
            };
            tracing::debug!(node = %self.node, wait = ?self.wait, "no answer, trying another path");
            self.found = Some(other);
            self.wait = (self.wait * 2).min(MAX_ANSWER_TIMEOUT);
        }
    }

    /// Returns another path than the one that was asked, once no reply has arrived for too long and there is one.
    async fn other(&self) -> Path {
        sleep(self.wait).await;
        let mut backoff = Backoff::new();
        loop {
            let not = self.asked.as_ref().map(|path| path.link.as_ref());
            let arrival = self.paths.arrival(self.node);
            if let Ok(path) = self.paths.find(self.node, self.instance, not).await {
                return path;
            }
            // There is only this path. Its reply may be late because dialling the target is slow.
            let pause = backoff.pause((self.chance)()) + RETRY_INTERVAL;
            let _ = timeout(pause, arrival.wait()).await;
        }
    }
}

/// Time to wait for the first reply before searching for another path. It doubles each time, because a path may be
/// slower than that.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time to wait for a reply.
const MAX_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum delay between two lookups in the first minutes, and later a twentieth of the time so far. New links end the
/// delay; it is for changes that are not announced.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Delay between two lookups at the very end of a search.
const MIN_LAST_PAUSE: Duration = Duration::from_millis(100);
/// Time after which a user's program whose server does not find a node also asks another one.
const OTHER_SERVER_AFTER: Duration = Duration::from_secs(3);
/// Minimum delay between two lookups for another path.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// If only another process of the node was found for this long, the one that is searched for has been replaced.
const REPLACED_NODE_WAIT: Duration = Duration::from_secs(3);

impl dyn PathProvider + '_ {
    /// Returns true if this link leads to another server than the newest one, which is asked first.
    fn is_other_server(&self, link: &Link) -> bool {
        let newest = self.uplinks().and_then(|uplinks| uplinks.newest(None));
        !link.is_closed() && newest.is_some_and(|newest| newest.instance != link.instance)
    }

    /// Returns a name of the remote end of a session with `node`, for people.
    fn call(&self, node: &NodeName) -> String {
        match self.uplinks() {
            Some(uplinks) if uplinks.node == *node => "the server that dialled".to_owned(),
            _ => format!("node {node}"),
        }
    }

    /// Returns why a session found no path to `far` within `timeout`: this process itself may have had no link.
    fn no_path(&self, far: &str, timeout: Duration) -> (ErrorCode, String) {
        let timeout = in_words(timeout);
        let Some(uplinks) = self.uplinks() else {
            return (ErrorCode::Cancelled, format!("{far} did not reconnect within {timeout}"));
        };
        if uplinks.is_linked() {
            let why =
                format!("no server had a working link to {far} within {timeout}; this machine is linked");
            return (ErrorCode::Cancelled, why);
        }
        let why = format!("this machine had no link to a server for {timeout}");
        match uplinks.failure() {
            Some(LinkFailure { text, is_denied: true }) => (ErrorCode::NotAllowed, format!("{why}: {text}")),
            Some(LinkFailure { text, .. }) => (ErrorCode::Cancelled, format!("{why}: {text}")),
            None => (ErrorCode::Cancelled, why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::uplinks::Uplinks;

    #[test]
    fn a_session_that_found_no_path_says_whose_line_was_missing() {
        let minute = Duration::from_secs(60);
        let uplinks = Uplinks::new(NodeName::none());
        let paths: &dyn PathProvider = &*uplinks;
        let own = "this machine had no link to a server for 1 min";
        assert_eq!(paths.no_path("node node1", minute), (ErrorCode::Cancelled, own.to_owned()));
        uplinks.note_failure("the access of this device was revoked", true);
        let revoked = format!("{own}: the access of this device was revoked");
        assert_eq!(paths.no_path("node node1", minute), (ErrorCode::NotAllowed, revoked));
    }

    #[test]
    fn a_node_that_is_down_reads_alike_over_a_link_and_at_a_listener() {
        let node: NodeName = "node3".parse().unwrap();
        let seen = Some(Duration::from_secs(83));
        let missing = NodeNotFound {
            seen,
            dns: Some("not in DNS".into()),
            queried_peers: 1,
            ..NodeNotFound::default()
        };
        let refusal = SessionError::new(ErrorCode::TargetUnreachable, format!("it {}", missing.sentence()));
        let expected = "node node3 is not connected, last seen 1 min 23 s ago; not at 1 peer";
        assert_eq!(refusal_text(&node, &refusal), expected);
        assert_eq!(RouteError::Offline { node: node.clone(), missing }.to_string(), expected);
        let restarted =
            NodeNotFound { another: true, dns: Some("not in DNS".into()), ..NodeNotFound::default() };
        assert_eq!(restarted.sentence(), "was restarted, which ended this session");
    }
}
