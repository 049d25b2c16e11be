//! Open sessions with the facts by which they were allowed: after each change of rights, each is judged again, and ended
//! if it would not be admitted now.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use tracing::warn;

use crate::session_io::rights::RightsChange;
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::drain::Drain;
use tunnel_base::unix_time::now;
use tunnel_net::fair_map::FairMap;
use tunnel_net::reload::FileWatcher;
use tunnel_proto::names::{NodeName, SessionId, Target, UserDevice};

/// The judged sessions of a process. Cheap to clone.
///
/// A session is judged once when it is added, after it is listed. So either the session is judged by the new
/// rights, or the change finds it in the list.
#[derive(Debug, Clone, Default)]
pub struct JudgedSessions(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The sessions by number, in the order in which they were added.
    open: Mutex<BTreeMap<u64, Weak<Inner>>>,
    /// Sessions that lost their path through this process, with the time until which they may resume.
    parked: Mutex<FairMap<Arc<str>, SessionId, (Instant, JudgedSession)>>,
    next: AtomicU64,
    /// The first second (Unix time) in which a judgement may change with time alone.
    due: AtomicU64,
    /// Notified after each change of rights.
    changed: watch::Sender<()>,
}

/// An open session, as it is judged. Its clones are the same one, which is judged until the last of them is dropped.
#[derive(Debug, Clone)]
pub struct JudgedSession(Arc<Inner>);

/// What a session is, for operators.
#[derive(Debug, Clone, Default)]
pub struct SessionSubject {
    /// Its id; `None` if this process dials the target itself.
    pub id: Option<SessionId>,
    /// Its node.
    pub node: Option<NodeName>,
    /// Its authenticated user.
    pub user: Option<Box<str>>,
    /// Set if this process only relays it, so that the table of sessions does not list it.
    pub relayed: Option<Box<RelayedSession>>,
}

/// What operators see of a relayed session.
#[derive(Debug, Clone)]
pub struct RelayedSession {
    /// The user's device that has opened it.
    pub device: UserDevice,
    /// Its target.
    pub target: Option<Target>,
    /// Address of the client.
    pub client: String,
    /// Start of the session, as far as this process knows.
    pub started: Instant,
    /// Number of times it was resumed here.
    pub resumed: Arc<AtomicU32>,
}

impl From<&AccessLogEntry> for SessionSubject {
    fn from(access: &AccessLogEntry) -> Self {
        let user = access.user.as_deref().map(Into::into);
        Self { id: access.id, node: access.node.clone(), user, relayed: None }
    }
}

#[derive(derive_more::Debug)]
#[debug("JudgedSession({number}, {revoked:?})")]
struct Inner {
    number: u64,
    subject: SessionSubject,
    list: JudgedSessions,
    judge: Box<Judge>,
    /// Why the session may no longer run.
    revoked: OnceLock<String>,
    /// The task that must end the session.
    owner: AtomicWaker,
}

/// Returns the last second (Unix time) for which the session is admitted with a change of rights, or why it is not.
/// Without changes, the current rights decide.
type Judge = dyn Fn(&RightsChange) -> Result<u64, String> + Send + Sync;

/// What a judge returns if only a change of rights can end the session.
pub const UNTIL_CHANGED: u64 = u64::MAX;

impl Default for Shared {
    fn default() -> Self {
        Self {
            open: Mutex::default(),
            parked: Mutex::new(FairMap::new(MAX_PARKED)),
            next: AtomicU64::default(),
            due: AtomicU64::new(UNTIL_CHANGED),
            changed: watch::Sender::new(()),
        }
    }
}

impl JudgedSessions {
    /// Judges a session that is about to open, and again after each change until the result is dropped.
    ///
    /// # Errors
    ///
    /// Returns why the session may not run.
    pub fn add(
        &self,
        subject: SessionSubject,
        judge: impl Fn(&RightsChange) -> Result<u64, String> + Send + Sync + 'static,
    ) -> Result<JudgedSession, String> {
        let judged = JudgedSession(Arc::new(Inner {
            number: self.0.next.fetch_add(1, SeqCst),
            subject,
            list: self.clone(),
            judge: Box::new(judge),
            revoked: OnceLock::new(),
            owner: AtomicWaker::new(),
        }));
        self.0.open.lock().insert(judged.0.number, Arc::downgrade(&judged.0));
        let until = (judged.0.judge)(&RightsChange::default())?;
        if until != UNTIL_CHANGED && self.judge_after(until) == UNTIL_CHANGED {
            // The first that ends with time.
            self.rights_changed();
        }
        Ok(judged)
    }

    /// Ends the selected sessions for this reason. Returns them.
    pub fn end(&self, why: &str, is_selected: impl Fn(&SessionSubject) -> bool) -> Vec<SessionSubject> {
        let selected = self.lasting().filter(|one| is_selected(&one.subject));
        let ended = selected.filter(|one| one.revoked.set(why.to_owned()).is_ok());
        ended.inspect(|one| one.owner.wake()).map(|one| one.subject.clone()).collect()
    }

    /// Ends a session that a peer has ended. If it is not here, it may not resume here until that time.
    pub(crate) fn refuse(&self, id: SessionId, why: &str, until: Instant) {
        let subject = SessionSubject { id: Some(id), ..SessionSubject::default() };
        if self.end(why, |one| one.id == subject.id).is_empty()
            && let Ok(judged) = self.add(subject, |_| Ok(UNTIL_CHANGED))
            && judged.0.revoked.set(why.to_owned()).is_ok()
        {
            self.park(judged, until);
        }
    }

    /// Returns how many sessions of each user would end with a change of rights. Those without a user have an empty one.
    /// Links have no node, and are no sessions.
    pub fn ended_by(&self, change: &RightsChange) -> BTreeMap<String, usize> {
        let mut ended = BTreeMap::new();
        let sessions = self.lasting().filter(|one| one.subject.node.is_some());
        for one in sessions.filter(|one| (one.judge)(change).is_err()) {
            *ended.entry(one.subject.user.as_deref().unwrap_or_default().to_owned()).or_default() += 1;
        }
        ended
    }

    /// Keeps a session that has lost its path through this process. Until it resumes here, or until that
    /// time, it is listed, judged and ended like others.
    pub(crate) fn park(&self, judged: JudgedSession, until: Instant) {
        self.forget_parked();
        let user = judged.0.subject.user.as_deref().unwrap_or_default().into();
        if let Some(id) = judged.0.subject.id {
            self.0.parked.lock().insert(&user, id, (until, judged), Instant::now());
        }
    }

    /// Lists a session that waits at its node, where it was opened through any server, as parked until that time. It is
    /// judged like others, from now on by this `judge`.
    ///
    /// # Errors
    ///
    /// Returns why it was ended meanwhile.
    pub(crate) fn list_parked(
        &self,
        subject: SessionSubject,
        until: Instant,
        judge: impl Fn(&RightsChange) -> Result<u64, String> + Send + Sync + 'static,
    ) -> Result<(), String> {
        let Some((id, node)) = subject.id.zip(subject.node.clone()) else { return Ok(()) };
        self.check_parked(id)?;
        // In its node's share: a node may name any user.
        let source = format!("node {node}").into();
        // Only what it was remains: she may resume it in another network, or with a newer certificate.
        let known = self.0.parked.lock().get(&id).map(|(_, one)| one.0.subject.clone());
        if known.is_none() {
            self.forget_parked();
            if self.0.parked.lock().count(&source) >= MAX_PARKED_OF_NODE {
                return Ok(());
            }
        }
        let judged = self.add(known.unwrap_or(subject), judge)?;
        self.0.parked.lock().insert(&source, id, (until, judged), Instant::now());
        Ok(())
    }

    /// Checks whether a session may resume here.
    ///
    /// # Errors
    ///
    /// Returns why it may not, if it was ended while it was parked.
    pub(crate) fn check_parked(&self, id: SessionId) -> Result<(), String> {
        let parked = self.0.parked.lock();
        let why = parked.get(&id).and_then(|(_, judged)| judged.revocation());
        why.map_or(Ok(()), |why| Err(why.to_owned()))
    }

    /// Forgets the parked session that resumes here. Returns what it was, if it was parked.
    pub(crate) fn unpark(&self, id: SessionId) -> Option<RelayedSession> {
        let (_, judged) = self.0.parked.lock().remove(&id)?.value;
        judged.0.subject.relayed.as_deref().cloned()
    }

    fn forget_parked(&self) {
        let now = Instant::now();
        // A session that was ended must not return for as long as its node may keep it.
        self.0
            .parked
            .lock()
            .retain(|(until, one)| *until > now || one.revocation().is_some() && *until + MAX_KEPT > now);
    }

    /// Returns the sessions that this process only relays, the longest first.
    pub fn relayed(&self) -> Vec<SessionSubject> {
        let relayed = self.lasting().filter(|one| one.subject.relayed.is_some());
        relayed.map(|one| one.subject.clone()).collect()
    }

    /// Notifies the tasks that judge. Call it after new rights have been stored.
    pub fn rights_changed(&self) {
        self.0.changed.send_replace(());
    }

    /// Returns a receiver that is notified by [`Self::rights_changed`], for what is not judged here.
    pub fn changes(&self) -> watch::Receiver<()> {
        let mut changes = self.0.changed.subscribe();
        // The rights may have changed before the caller was started.
        changes.mark_changed();
        changes
    }

    /// Judges all sessions after each change of rights or of a watched file, and when a certificate expires. Calls
    /// `ended` with those that it ends, and the reason. Returns when draining starts.
    pub async fn follow(self, files: FileWatcher, ended: impl Fn(&SessionSubject, &str), drain: Drain) {
        let mut changes = self.changes();
        let mut files = files.changes();
        loop {
            let ends_with_time = self.0.due.load(SeqCst) != UNTIL_CHANGED;
            tokio::select! {
                biased;
                () = drain.draining() => return,
                _ = changes.changed() => {}
                Ok(()) = files.changed() => {}
                () = sleep(TICK), if ends_with_time => {
                    if now() < self.0.due.load(SeqCst) {
                        continue;
                    }
                }
            }
            self.judge_all(&ended).await;
        }
    }

    async fn judge_all(&self, ended: impl Fn(&SessionSubject, &str)) {
        // Before judging: each session that depends on time sets it again.
        self.0.due.store(UNTIL_CHANGED, SeqCst);
        let mut revoked = 0_u64;
        let current = RightsChange::default();
        for batch in self.batches() {
            for inner in batch.iter().filter_map(Weak::upgrade) {
                match (inner.judge)(&current) {
                    Ok(until) => {
                        self.judge_after(until);
                    }
                    Err(why) => {
                        if inner.revoked.set(why.clone()).is_ok() {
                            revoked += 1;
                            ended(&inner.subject, &why);
                        }
                        inner.owner.wake();
                    }
                }
            }
            // Judging thousands of sessions must not delay the bytes of others.
            yield_now().await;
        }
        if revoked > 0 {
            warn!(
                sessions = revoked,
                hint = "the access log has the reasons",
                "sessions ended: access revoked"
            );
        }
    }

    /// Returns the sessions in the order in which they were added. The lock is held only while a batch is copied.
    fn batches(&self) -> impl Iterator<Item = Vec<Weak<Inner>>> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let open = self.0.open.lock();
            let (numbers, batch): (Vec<_>, Vec<_>) =
                open.range(next..).take(BATCH).map(|(number, one)| (*number, one.clone())).unzip();
            next = numbers.last()? + 1;
            Some(batch)
        })
    }

    /// Returns the sessions that have not ended, as far as this process knows.
    fn lasting(&self) -> impl Iterator<Item = Arc<Inner>> {
        self.forget_parked();
        let all = self.batches().flatten().filter_map(|one| one.upgrade());
        all.filter(|one| one.revoked.get().is_none())
    }

    /// Makes sure that sessions are judged after this second. Returns the earlier value of `due`.
    fn judge_after(&self, until: u64) -> u64 {
        self.0.due.fetch_min(until.saturating_add(1), SeqCst)
    }
}

impl JudgedSession {
    /// Returns why the session may no longer run, if that is so.
    pub fn revocation(&self) -> Option<&str> {
        self.0.revoked.get().map(String::as_str)
    }

    /// Completes once the session may no longer run. Only one task may wait.
    pub fn poll_revoked(&self, cx: &Context<'_>) -> Poll<()> {
        self.0.owner.register(cx.waker());
        if self.0.revoked.get().is_some() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Waits until the session may no longer run. Only one task may wait. Cancel safe.
    pub async fn revoked(&self) {
        poll_fn(|cx| self.poll_revoked(cx)).await;
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.list.0.open.lock().remove(&self.number);
    }
}

/// Number of sessions that are copied while the lock is held, and then judged before other tasks may run. Judging one
/// costs at most about 0.1 ms, to verify a certificate that was not verified yet.
const BATCH: usize = 64;
/// Maximum number of parked sessions; the user with most of them loses the oldest.
const MAX_PARKED: usize = 8192;
/// Maximum number of parked sessions that are listed because their node names them. It keeps half as many at once.
const MAX_PARKED_OF_NODE: usize = 64;
/// How long beyond its time a parked session that was ended is kept: the most that a node may keep it.
const MAX_KEPT: Duration = Duration::from_secs(24 * 3600);
/// How often the time is compared, while sessions end with a certificate.
const TICK: Duration = Duration::from_secs(1);
