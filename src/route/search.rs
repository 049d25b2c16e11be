//! One session's search for paths: which to ask next, and when.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::names::{Instance, NodeName};
use crate::net::backoff::Backoff;
use crate::protocol::{LinkSender, Peer};
use crate::registry::find::{NotFound, Path};

use super::Chance;
use super::ways::PathSource;

/// What one session knows of its paths. It asks on one at a time.
#[derive(Debug)]
pub(super) struct Search<'a> {
    ways: &'a PathSource,
    chance: Chance,
    node: &'a NodeName,
    /// Only this process will do.
    instance: Option<Instance>,
    /// When it ends.
    until: Instant,
    /// How long it looks on for a node that nobody has, if it does not to the end.
    patience: Option<Duration>,
    /// Where it asks next, or has asked.
    way: Option<Path>,
    /// Whether it has asked there, so that another is looked for.
    asked: bool,
    /// How long an answer is waited for before another path is looked for.
    wait: Duration,
    backoff: Backoff,
    /// Since when only another process of the node is found.
    another: Option<Instant>,
}

impl<'a> Search<'a> {
    /// Among `ways`, for one to `node`, and to that process of it if one is given.
    pub(super) fn new(
        (ways, chance): (&'a PathSource, Chance),
        node: &'a NodeName,
        instance: Option<Instance>,
        until: Instant,
    ) -> Self {
        Self {
            ways,
            chance,
            node,
            instance,
            until,
            patience: None,
            way: None,
            asked: false,
            wait: ANSWER_TIMEOUT,
            backoff: Backoff::new(),
            another: None,
        }
    }

    /// Looks on for so long at most each time that nobody has the node.
    pub(super) fn at_most(self, patience: Duration) -> Self {
        Self { patience: Some(patience), ..self }
    }

    /// Paths were found so often before, and were of no use: it begins with a pause.
    pub(super) async fn again(&mut self, times: u32) {
        if times > 0 {
            self.backoff = Backoff::after(times);
            sleep_until(self.until.min(Instant::now() + self.pause())).await;
        }
    }

    fn pause(&mut self) -> Duration {
        self.backoff.pause((self.chance)()).min(MAX_PAUSE)
    }

    /// Who is looked for.
    pub(super) fn node(&self) -> &NodeName {
        self.node
    }

    /// The link on which it asks next, if that speaks plain.
    pub(super) fn plain(&self) -> Option<Arc<LinkSender>> {
        self.way.as_ref().map(|way| way.sender.clone()).filter(|link| !link.resumes)
    }

    /// Looks for the first way. Who opens a session waits for a node that is changing pods, as a session that runs does,
    /// and for no other. Cancel safe.
    ///
    /// # Errors
    ///
    /// Nobody has the node, or the time is over.
    pub(super) async fn first(&mut self) -> Result<(), NotFound> {
        match timeout_at(self.until, self.ways.find(self.node, self.instance, None)).await {
            Ok(Ok(way)) => {
                (self.way, self.asked) = (Some(way), false);
                Ok(())
            }
            Ok(Err(missing)) if !missing.moving && self.instance.is_none() => Err(missing),
            Ok(Err(_)) | Err(_) => self.next().await,
        }
    }

    /// Looks until there is a way to ask on, which may be the one that was asked before; then after a pause. Cancel
    /// safe.
    ///
    /// # Errors
    ///
    /// The time is over, or the process that is looked for is gone.
    pub(super) async fn next(&mut self) -> Result<(), NotFound> {
        let until = self.patience.map_or(self.until, |patience| self.until.min(Instant::now() + patience));
        let before = self.way.take().filter(|_| self.asked);
        if let Some(before) = &before {
            self.ways.is_wrong(self.node, before);
        }
        let mut paused = before.is_none();
        // It may go on saying that it has the node, sooner than whoever does: at first the others are believed.
        let mut not = before.as_ref().map(|before| before.sender.clone());
        not.take_if(|link| link.peer != Peer::Pod || link.is_closed());
        let mut missing = NotFound::default();
        loop {
            // Begun before looking, so that a link that comes in between is not missed.
            let arrival = self.ways.arrival(self.node);
            let (others, not) = (not.is_some(), not.take());
            if self.ways.is_another(self.node, self.instance) {
                self.another.get_or_insert_with(Instant::now);
            }
            let looking = self.ways.find(self.node, self.instance, not.as_deref());
            let late = || Err(NotFound { another: self.another.is_some(), ..missing.clone() });
            let found = tokio::select! {
                looked = timeout_at(self.limit(until), looking) => looked.unwrap_or_else(|_| late()),
                () = arrival.come(), if others => late(),
            };
            match found {
                Ok(way) => {
                    let again = before.as_ref().is_some_and(|before| before.sender.id == way.sender.id);
                    if paused || !again {
                        (self.way, self.asked, self.another) = (Some(way), false, None);
                        return Ok(());
                    }
                }
                Err(said) => {
                    missing = said;
                    self.is_hopeless(&missing, until)?;
                }
            }
            paused = true;
            let pause = self.pause();
            tokio::select! {
                () = arrival.come() => {}
                () = sleep_until(self.limit(until).min(Instant::now() + pause)) => {}
            }
        }
    }

    /// Asks on the way that was found, and on others while there is no answer and there are others. Returns the answer
    /// to what was asked last; `answer` waits for it, and is not looked at before something was asked.
    pub(super) async fn ask<A>(
        &mut self,
        ask: impl Fn(&Arc<LinkSender>),
        answer: impl Future<Output = A>,
    ) -> A {
        let mut answer = pin!(answer);
        loop {
            if let Some(way) = self.way.as_ref().filter(|_| !self.asked) {
                ask(&way.sender);
                self.asked = true;
            }
            let other = tokio::select! {
                biased;
                answer = &mut answer => return answer,
                other = self.other() => other,
            };
            tracing::debug!(node = %self.node, wait = ?self.wait, "no answer: asking on another path");
            (self.way, self.asked) = (Some(other), false);
            self.wait = (self.wait * 2).min(MAX_ANSWER_TIMEOUT);
        }
    }

    /// Another way than the one that was asked, once that was silent for too long and there is one.
    async fn other(&self) -> Path {
        sleep(self.wait).await;
        let mut backoff = Backoff::new();
        loop {
            let not = self.way.as_ref().map(|way| way.sender.as_ref());
            let arrival = self.ways.arrival(self.node);
            if let Ok(way) = self.ways.find(self.node, self.instance, not).await {
                return way;
            }
            // A slow dial is no reason to leave the only path.
            let pause = backoff.pause((self.chance)()) + RETRY_INTERVAL;
            tokio::select! {
                biased;
                () = arrival.come() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Whether there is no use in looking on.
    fn is_hopeless(&mut self, missing: &NotFound, until: Instant) -> Result<(), NotFound> {
        let now = Instant::now();
        if !missing.another {
            self.another = None;
        } else if self.ways.is_alone() || now - *self.another.get_or_insert(now) >= REPLACED_AFTER {
            return Err(missing.clone());
        }
        if now >= until { Err(NotFound { another: false, ..missing.clone() }) } else { Ok(()) }
    }

    /// Until when it looks: `until`, or until another process of the node has been there for too long.
    fn limit(&self, until: Instant) -> Instant {
        self.another.map_or(until, |since| until.min(since + REPLACED_AFTER))
    }
}

/// How long an answer is waited for at first, before another path is looked for; doubled each time, since a path may be
/// slower than the wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two searches: what comes is told, so this is for what nobody could tell.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Between two looks for another path, beside the jitter.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Only another process of the node is found for so long: then the one that is sought is believed to be gone.
const REPLACED_AFTER: Duration = Duration::from_secs(3);
