//! Paths for sessions: from a request to an open session, and from a session without a path to its next one.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::info_span;

use crate::registry::{Finder, LinkedNode, NodeNotFound, NodeWaiter, NodeWaiters, Path, RELINK_WINDOW};
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_base::names::{Instance, NodeName, SessionId, Target};
use tunnel_link::sender::LinkSender;
use tunnel_link::session::stream::{OpenOutcome, Parked, PendingOpen, Session};
use tunnel_link::table::{SessionTable, TableFull};
use tunnel_proto::frame::{Category, ErrorCode, Remote, SessionError};
use tunnel_proto::state::LinkId;

/// What a front end asks for.
#[derive(Debug, Clone)]
pub struct SessionRequest {
    /// The node at which the target is.
    pub node: NodeName,
    /// What to dial there. Its host may be the node itself.
    pub target: Target,
    /// The front end that asks.
    pub category: Category,
    /// The client (user and address), for the log of the far end.
    pub client: String,
}

/// Why a target could not be reached. Each sentence is shown to the client as it is.
#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    /// The node is not linked to any pod. The usual cause: its edge is down, or still connecting.
    #[error("node {node} {}", missing.sentence())]
    Offline {
        /// The node that was asked for.
        node: NodeName,
        /// Which pods were asked, and when the node was last seen.
        missing: NodeNotFound,
    },
    /// The node's edge refused; its link works.
    #[error("node {node}: {refusal}")]
    Refused {
        /// The node that refused.
        node: NodeName,
        /// The edge's reason.
        refusal: SessionError,
    },
    /// No answer within the time to open.
    #[error("node {node} did not answer within {timeout:?}")]
    Timeout {
        /// The node that was asked.
        node: NodeName,
        /// How long the answer was waited for.
        timeout: Duration,
    },
    /// This pod has as many sessions as it may, or is draining.
    #[error("{0}")]
    Busy(&'static str),
}

/// Why no session was opened, and the id of the one that was asked for, if it came to that: the far end knows it.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct OpenError {
    /// The id that the far end may have logged.
    pub session: Option<SessionId>,
    /// Why.
    #[source]
    pub why: RouteError,
}

impl From<RouteError> for OpenError {
    fn from(why: RouteError) -> Self {
        Self { session: None, why }
    }
}

/// Opens sessions, and finds new paths for those that lost theirs. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SessionRouter {
    pub(crate) paths: PathSource,
    table: Arc<SessionTable>,
    /// How long opening may take in all.
    pub(crate) timeout: Duration,
    /// How long a session may be without a path.
    grace: Duration,
    pub(crate) chance: RandomFraction,
}

/// A random number from 0 to 1, for the pauses between tries.
pub type RandomFraction = fn() -> f64;

impl SessionRouter {
    /// For a pod: paths lead to the nodes that `finder` finds.
    pub fn new(finder: Arc<Finder>, table: Arc<SessionTable>, patience: Duration, grace: Duration) -> Self {
        Self { paths: PathSource::Pod(finder), table, timeout: patience, grace, chance: rand::random }
    }

    /// For an edge: every path leads over one of its links to the cloud.
    pub fn from_edge(
        uplinks: Arc<Uplinks>,
        table: Arc<SessionTable>,
        patience: Duration,
        grace: Duration,
    ) -> Self {
        Self { paths: PathSource::Edge(uplinks), table, timeout: patience, grace, chance: rand::random }
    }

    /// With pauses drawn from `chance`, for simulations with a seed.
    #[must_use]
    pub fn with_chance(self, chance: RandomFraction) -> Self {
        Self { chance, ..self }
    }

    /// Opens a session to the request's target. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// No session could be opened; the sentence is fit for the client.
    pub async fn open(&self, request: SessionRequest) -> Result<Session, OpenError> {
        let SessionRequest { node, target, category, client } = request;
        let until = Instant::now() + self.timeout;
        let late = || RouteError::Timeout { node: node.clone(), timeout: self.timeout };
        let mut search = PathSearch::new(&self.paths, &node, None, until, self.chance);
        if let PathSource::Pod(_) = self.paths {
            search = search.at_most(MOVING);
        }
        if let Err(missing) = search.first().await {
            return Err(RouteError::Offline { node, missing }.into());
        }
        let opening = self.table.open(node.clone(), target, category, client);
        let opening = opening.map_err(|TableFull| {
            RouteError::Busy(match self.paths {
                PathSource::Pod(_) | PathSource::Pods(_) => {
                    "this pod has no room left: [mode.cloud.session] max or memory of the pod"
                }
                PathSource::Edge(_) => "this edge has no room left: [mode.edge.session] memory of the edge",
            })
        })?;
        let asked = timeout_at(until, ask(&opening, &mut search)).await.unwrap_or_else(|_| Err(late()));
        match asked {
            Ok(()) => Ok(opening.into_session()),
            Err(why) => Err(OpenError { session: Some(opening.id()), why }),
        }
    }

    /// Has a new path looked for, as [`Self::seek`] does, in a task of its own.
    pub fn spawn_resume(&self, parked: Parked, drain: &Drain) {
        let (route, span) = (self.clone(), info_span!("seek", session = %parked.id()));
        drain.spawn(span, async move { route.resume(parked).await });
    }

    /// Looks for paths for openings that were given up when they had none, so that their acceptors get the reset, until
    /// draining begins.
    pub async fn resume_cancelled(self, drain: Drain) {
        loop {
            tokio::select! {
                () = drain.draining() => return,
                parked = self.table.given_up() => self.spawn_resume(parked, &drain),
            }
        }
    }

    /// Looks for a new path for a session until the session has one or is over, or the grace time has passed.
    ///
    /// At most one task looks for a path of a session, because there is at most one [`Parked`] of it. If the new path
    /// is lost before this notices, the loop goes on with the same [`Parked`], which is the right to look for a path:
    /// [`Parked::seeks`] gives it up only when it finds, under the session's lock, that no path is needed. So a loss is
    /// never left without a seeker.
    pub async fn resume(&self, parked: Parked) {
        let until = Instant::now() + self.grace;
        let node = parked.node().clone();
        let far = self.paths.call(&node);
        let mut search = PathSearch::new(&self.paths, &node, parked.instance(), until, self.chance);
        search.again(parked.consecutive_losses()).await;
        while parked.needs_path() {
            if let Err(missing) = search.next().await {
                let (code, why) = if missing.another {
                    (ErrorCode::UnknownSession, format!("{far} came back as another process"))
                } else {
                    (ErrorCode::Cancelled, format!("{far} did not come back within {:?}", self.grace))
                };
                return parked.give_up(SessionError::new(code, why));
            }
            let answered = search.ask(|path| parked.resume(&path.sender), parked.answered());
            if timeout_at(until, answered).await.is_err() {
                let why = format!("{far} did not resume");
                return parked.give_up(SessionError::new(ErrorCode::Cancelled, why));
            }
        }
    }
}

/// Asks on one path after another until the session is open or refused for good.
async fn ask(opening: &PendingOpen, search: &mut PathSearch<'_>) -> Result<(), RouteError> {
    loop {
        match search.ask(|path| opening.ask(&path.sender, path.instance), opening.answer()).await {
            OpenOutcome::Open => return Ok(()),
            OpenOutcome::Refused(refusal) => {
                return Err(RouteError::Refused { node: search.node().clone(), refusal });
            }
            OpenOutcome::NoPath => {
                let node = search.node().clone();
                search.next().await.map_err(|missing| RouteError::Offline { node, missing })?;
            }
        }
    }
}

/// How long a new session waits for a node that was linked a moment ago, or was remembered at a pod that no longer has
/// it.
pub(crate) const MOVING: Duration = Duration::from_secs(3);

// One session's search for paths: over which it asks next, and when.

/// What one session knows of its paths. It asks over one at a time.
///
/// A search belongs to one task, so it needs no lock. Links and nodes change under it at any moment; it notices by a
/// waiter that is always made before the look it belongs to.
#[derive(Debug)]
pub(crate) struct PathSearch<'a> {
    paths: &'a PathSource,
    chance: RandomFraction,
    node: &'a NodeName,
    /// The process of the node that is sought; `None` if any process will do.
    instance: Option<Instance>,
    /// When the search ends.
    until: Instant,
    /// How long it goes on looking for a node that no pod has; `None`: until the end of the search.
    timeout: Option<Duration>,
    /// The path over which it asks next, or has asked.
    path: Option<Path>,
    /// Whether it has asked over that path; then the next look is for another one.
    tried: bool,
    /// How long it waits for an answer before it looks for another path.
    wait: Duration,
    backoff: Backoff,
    /// Since when it finds the node only as another process.
    another: Option<Instant>,
}

impl<'a> PathSearch<'a> {
    /// A search among `paths` for a path to `node`, and to its process `instance` if one is given.
    pub(crate) fn new(
        paths: &'a PathSource,
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
            until,
            timeout: None,
            path: None,
            tried: false,
            wait: ANSWER_TIMEOUT,
            backoff: Backoff::new(),
            another: None,
        }
    }

    /// Limits how long it goes on looking each time that no pod has the node.
    pub(crate) fn at_most(self, patience: Duration) -> Self {
        Self { timeout: Some(patience), ..self }
    }

    /// Begins with a pause, which grows with `times`: so often in a row a path was found and was soon lost again.
    pub(crate) async fn again(&mut self, times: u32) {
        if times > 0 {
            self.backoff = Backoff::after(times);
            sleep_until(self.until.min(Instant::now() + self.pause())).await;
        }
    }

    fn pause(&mut self) -> Duration {
        self.backoff.pause((self.chance)()).min(MAX_PAUSE)
    }

    /// The node that is looked for.
    pub(crate) fn node(&self) -> &NodeName {
        self.node
    }

    /// The link over which it asks next, if that is a plain one.
    pub(crate) fn plain(&self) -> Option<Arc<LinkSender>> {
        self.path.as_ref().map(|path| path.sender.clone()).filter(|link| !link.resumes)
    }

    /// Looks for the first path. A new session waits for a node that is moving from pod to pod, as a running session
    /// does; it waits for no other node. Cancel safe.
    ///
    /// # Errors
    ///
    /// No pod has the node, or the time is over.
    pub(crate) async fn first(&mut self) -> Result<(), NodeNotFound> {
        match timeout_at(self.until, self.paths.find(self.node, self.instance, None)).await {
            Ok(Ok(path)) => {
                (self.path, self.tried) = (Some(path), false);
                Ok(())
            }
            Ok(Err(missing)) if !missing.moving && self.instance.is_none() => Err(missing),
            Ok(Err(_)) | Err(_) => self.next().await,
        }
    }

    /// Looks until there is a path to ask over. That may be the one that was asked before, but then only after a pause.
    /// Cancel safe.
    ///
    /// # Errors
    ///
    /// The time is over, or the process that is sought is gone.
    pub(crate) async fn next(&mut self) -> Result<(), NodeNotFound> {
        let until = self.timeout.map_or(self.until, |patience| self.until.min(Instant::now() + patience));
        let before = self.path.take().filter(|_| self.tried);
        if let Some(before) = &before {
            self.paths.is_wrong(self.node, before);
        }
        let mut paused = before.is_none();
        // The pod that was asked may still answer that it has the node, and sooner than the pod that does. So the first
        // look leaves it out.
        let mut not = before.as_ref().map(|before| before.sender.clone());
        not.take_if(|link| link.peer != Remote::Peer || link.is_closed());
        let mut missing = NodeNotFound::default();
        loop {
            // The waiter is made before the look: a link that comes between the two ends the wait below.
            let arrival = self.paths.arrival(self.node);
            let (others, not) = (not.is_some(), not.take());
            if self.paths.is_another(self.node, self.instance) {
                self.another.get_or_insert_with(Instant::now);
            }
            let looking = self.paths.find(self.node, self.instance, not.as_deref());
            let late = || Err(NodeNotFound { another: self.another.is_some(), ..missing.clone() });
            let found = tokio::select! {
                looked = timeout_at(self.limit(until), looking) => looked.unwrap_or_else(|_| late()),
                () = arrival.wait(), if others => late(),
            };
            match found {
                Ok(path) => {
                    let again = before.as_ref().is_some_and(|before| before.sender.id == path.sender.id);
                    if paused || !again {
                        (self.path, self.tried, self.another) = (Some(path), false, None);
                        return Ok(());
                    }
                }
                Err(not_found) => {
                    missing = not_found;
                    self.check_may_continue(&missing, until)?;
                }
            }
            paused = true;
            let pause = self.pause();
            tokio::select! {
                () = arrival.wait() => {}
                () = sleep_until(self.limit(until).min(Instant::now() + pause)) => {}
            }
        }
    }

    /// Asks over the path that was found, and then over others, as long as none has answered and others are left.
    /// Returns the answer to the last question; `answer` waits for it, and is polled only after something was asked.
    pub(crate) async fn ask<A>(&mut self, ask: impl Fn(&Path), answer: impl Future<Output = A>) -> A {
        let mut answer = pin!(answer);
        loop {
            if let Some(path) = self.path.as_ref().filter(|_| !self.tried) {
                ask(path);
                self.tried = true;
            }
            let other = tokio::select! {
                biased;
                answer = &mut answer => return answer,
                other = self.other() => other,
            };
            tracing::debug!(node = %self.node, wait = ?self.wait, "no answer: asking on another path");
            (self.path, self.tried) = (Some(other), false);
            self.wait = (self.wait * 2).min(MAX_ANSWER_TIMEOUT);
        }
    }

    /// Another path than the one that was asked, once no answer has come for too long and there is one.
    async fn other(&self) -> Path {
        sleep(self.wait).await;
        let mut backoff = Backoff::new();
        loop {
            let not = self.path.as_ref().map(|path| path.sender.as_ref());
            let arrival = self.paths.arrival(self.node);
            if let Ok(path) = self.paths.find(self.node, self.instance, not).await {
                return path;
            }
            // There is only this path: its answer may be late because the target is dialled slowly.
            let pause = backoff.pause((self.chance)()) + RETRY_INTERVAL;
            tokio::select! {
                biased;
                () = arrival.wait() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// An error if the search should end.
    fn check_may_continue(&mut self, missing: &NodeNotFound, until: Instant) -> Result<(), NodeNotFound> {
        let now = Instant::now();
        if !missing.another {
            self.another = None;
        } else if self.paths.is_alone() || now - *self.another.get_or_insert(now) >= REPLACED_AFTER {
            return Err(missing.clone());
        }
        if now >= until { Err(NodeNotFound { another: false, ..missing.clone() }) } else { Ok(()) }
    }

    /// When it stops looking: at `until`, or earlier if it has found only another process of the node for too long.
    fn limit(&self, until: Instant) -> Instant {
        self.another.map_or(until, |since| until.min(since + REPLACED_AFTER))
    }
}

/// How long the first answer is waited for before the search looks for another path. It doubles each time, because a
/// path may be slower than the wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest of these waits.
const MAX_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest pause between two looks. Links that come end the pause; it is for changes that nobody announces.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// The least pause between two looks for another path.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// After so long with only another process of the node found, the sought one counts as gone.
const REPLACED_AFTER: Duration = Duration::from_secs(3);

// Where paths come from: a pod finds nodes, an edge has its links to the cloud.

/// Where this process gets its paths from.
#[derive(Debug, Clone)]
pub(crate) enum PathSource {
    /// On a pod: paths to nodes.
    Pod(Arc<Finder>),
    /// On a pod: paths to other pods, by their process, for sessions whose target another pod has dialled for an edge.
    Pods(Arc<Finder>),
    /// On an edge: every path begins with a link to the cloud, which finds the rest.
    Edge(Arc<Uplinks>),
}

impl PathSource {
    /// A path to a node: to its process `instance` if one is given, and not over the link `not`. Cancel safe.
    pub(crate) async fn find(
        &self,
        node: &NodeName,
        instance: Option<Instance>,
        not: Option<&LinkSender>,
    ) -> Result<Path, NodeNotFound> {
        match self {
            Self::Pod(finder) => finder.find(node, instance, not).await,
            Self::Pods(finder) => finder.find_server(instance).await,
            Self::Edge(uplinks) => {
                let newest =
                    uplinks.newest(not.map(|not| not.id)).ok_or_else(|| uplinks.not_linked_reason())?;
                // By its own name it means the cloud: the pod that it asks is the one that dials.
                let own = || newest.instance.filter(|_| uplinks.node() == node);
                Ok(Path { instance: instance.or_else(own), sender: newest })
            }
        }
    }

    /// The same pod's paths to other pods.
    pub(crate) fn of_servers(&self) -> Self {
        match self {
            Self::Pod(finder) | Self::Pods(finder) => Self::Pods(finder.clone()),
            Self::Edge(uplinks) => Self::Edge(uplinks.clone()),
        }
    }

    /// The node's link to this pod, if it has one; an edge has no links of other nodes.
    pub(crate) fn here(&self, node: &NodeName) -> Option<LinkedNode> {
        match self {
            Self::Pod(finder) | Self::Pods(finder) => finder.registry().link_of(node),
            Self::Edge(_) => None,
        }
    }

    /// A waiter that notices when a path to the node may have come.
    pub(crate) fn arrival(&self, node: &NodeName) -> NodeWaiter<'_> {
        match self {
            Self::Pod(finder) | Self::Pods(finder) => finder.registry().arrival(node),
            Self::Edge(uplinks) => uplinks.arrival(),
        }
    }

    /// Whether the node is known to be linked as another process, here or elsewhere.
    pub(crate) fn is_another(&self, node: &NodeName, instance: Option<Instance>) -> bool {
        match self {
            Self::Pod(finder) => instance.is_some_and(|instance| finder.is_another(node, instance)),
            Self::Pods(_) | Self::Edge(_) => false,
        }
    }

    /// Forgets that the node is at the end of this path, because the node was not there.
    pub(crate) fn is_wrong(&self, node: &NodeName, path: &Path) {
        if let Self::Pod(finder) = self {
            finder.invalidate(node, path);
        }
    }

    /// The far end of a session with that node, in words for people.
    pub(crate) fn call(&self, node: &NodeName) -> String {
        match self {
            Self::Edge(uplinks) if uplinks.node() == node => "the pod that dialled".to_owned(),
            _ => format!("node {node}"),
        }
    }

    /// Whether this process never asks another one.
    pub(crate) fn is_alone(&self) -> bool {
        match self {
            Self::Pod(finder) | Self::Pods(finder) => finder.is_alone(),
            Self::Edge(_) => false,
        }
    }
}

// The links of an edge to the cloud: every path of an edge leads over one of them.

/// The links of an edge: one, and more while a draining pod still holds sessions.
#[derive(Debug)]
pub struct Uplinks {
    /// The node that this edge is.
    node: NodeName,
    /// The newest last.
    links: Mutex<Vec<Arc<LinkSender>>>,
    /// When a link has ended.
    lost: Mutex<Option<Instant>>,
    came: NodeWaiters,
}

impl Uplinks {
    /// No link yet.
    pub fn new(node: NodeName) -> Arc<Self> {
        Arc::new(Self { node, links: Mutex::default(), lost: Mutex::default(), came: NodeWaiters::default() })
    }

    /// The node that this edge is. A request for that name through the cloud means the cloud itself.
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// A link is up.
    pub fn add(&self, link: Arc<LinkSender>) {
        let oldest = {
            let mut links = self.lock();
            links.push(link);
            (links.len() > MAX_LINKS).then(|| links[0].clone())
        };
        if let Some(oldest) = oldest {
            oldest.close();
        }
        self.came.wake(&self.node);
    }

    /// A link has ended.
    pub fn remove(&self, link: &LinkSender) {
        self.lock().retain(|known| known.id != link.id);
        *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// The newest link, for whatever begins or looks for a path now.
    pub fn newest(&self, not: Option<LinkId>) -> Option<Arc<LinkSender>> {
        self.links().into_iter().rev().find(|link| !link.is_closed() && not != Some(link.id))
    }

    /// Why there is no link to use: one that has just ended is about to be replaced.
    pub fn not_linked_reason(&self) -> NodeNotFound {
        let lost = *self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        let moving = lost.is_some_and(|at| at.elapsed() < RELINK_WINDOW);
        NodeNotFound { moving, ..NodeNotFound::default() }
    }

    /// Whether there is a link.
    pub fn is_linked(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Notices the next link that comes.
    pub fn arrival(&self) -> NodeWaiter<'_> {
        self.came.arrival(&self.node)
    }

    /// Waits until there is a link. Cancel safe.
    pub async fn wait_any(&self) {
        loop {
            // As in [`Self::newer`].
            let arrival = self.arrival();
            if self.newest(None).is_some() {
                return;
            }
            arrival.wait().await;
        }
    }

    /// Waits until there is a newer link than this one. Cancel safe.
    pub async fn newer(&self, than: LinkId) {
        loop {
            // The arrival is made before the look: a link that is added between the two then ends the wait.
            let arrival = self.arrival();
            if self.newest(None).is_some_and(|newest| newest.id > than) {
                return;
            }
            arrival.wait().await;
        }
    }

    /// Asks every link's pod for a sign of life, by interactive links as well, as the way to it may have changed.
    pub fn probe(&self) {
        for link in self.links() {
            link.interactive().inspect(|beside| beside.probe());
            link.probe();
        }
    }

    /// Closes every link.
    pub fn close_all(&self) {
        for link in self.links() {
            link.close();
        }
    }

    /// Every link, the newest last.
    pub fn all(&self) -> Vec<Arc<LinkSender>> {
        self.links()
    }

    /// A copy of the list, so that no link's own lock is taken while this one is held.
    fn links(&self) -> Vec<Arc<LinkSender>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<LinkSender>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Links at once: two are usual while a pod stops. Beyond this the oldest is closed, so that a cloud of which every pod
/// is stopping does not make the edge grow.
const MAX_LINKS: usize = 8;
