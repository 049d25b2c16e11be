//! One session's search for paths: over which it asks next, and when.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::names::{Instance, NodeName};
use crate::net::backoff::Backoff;
use crate::protocol::{LinkSender, Peer};
use crate::registry::{NotFound, Path};

use super::Chance;
use super::paths::PathSource;

/// What one session knows of its paths. It asks over one at a time.
///
/// A search belongs to one task, so it needs no lock. Links and nodes change under it at any moment; it notices by a
/// waiter that is always made before the look it belongs to.
#[derive(Debug)]
pub(super) struct Search<'a> {
    paths: &'a PathSource,
    chance: Chance,
    node: &'a NodeName,
    /// The process of the node that is sought; `None` if any process will do.
    instance: Option<Instance>,
    /// When the search ends.
    until: Instant,
    /// How long it goes on looking for a node that no pod has; `None`: until the end of the search.
    patience: Option<Duration>,
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

impl<'a> Search<'a> {
    /// A search among `paths` for a path to `node`, and to its process `instance` if one is given.
    pub(super) fn new(
        paths: &'a PathSource,
        node: &'a NodeName,
        instance: Option<Instance>,
        until: Instant,
        chance: Chance,
    ) -> Self {
        Self {
            paths,
            chance,
            node,
            instance,
            until,
            patience: None,
            path: None,
            tried: false,
            wait: ANSWER_TIMEOUT,
            backoff: Backoff::new(),
            another: None,
        }
    }

    /// Limits how long it goes on looking each time that no pod has the node.
    pub(super) fn at_most(self, patience: Duration) -> Self {
        Self { patience: Some(patience), ..self }
    }

    /// Begins with a pause, which grows with `times`: so often in a row a path was found and was soon lost again.
    pub(super) async fn again(&mut self, times: u32) {
        if times > 0 {
            self.backoff = Backoff::after(times);
            sleep_until(self.until.min(Instant::now() + self.pause())).await;
        }
    }

    fn pause(&mut self) -> Duration {
        self.backoff.pause((self.chance)()).min(MAX_PAUSE)
    }

    /// The node that is looked for.
    pub(super) fn node(&self) -> &NodeName {
        self.node
    }

    /// The link over which it asks next, if that is a plain one.
    pub(super) fn plain(&self) -> Option<Arc<LinkSender>> {
        self.path.as_ref().map(|path| path.sender.clone()).filter(|link| !link.resumes)
    }

    /// Looks for the first path. A new session waits for a node that is moving from pod to pod, as a running session
    /// does; it waits for no other node. Cancel safe.
    ///
    /// # Errors
    ///
    /// No pod has the node, or the time is over.
    pub(super) async fn first(&mut self) -> Result<(), NotFound> {
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
    pub(super) async fn next(&mut self) -> Result<(), NotFound> {
        let until = self.patience.map_or(self.until, |patience| self.until.min(Instant::now() + patience));
        let before = self.path.take().filter(|_| self.tried);
        if let Some(before) = &before {
            self.paths.is_wrong(self.node, before);
        }
        let mut paused = before.is_none();
        // The pod that was asked may still answer that it has the node, and sooner than the pod that does. So the first
        // look leaves it out.
        let mut not = before.as_ref().map(|before| before.sender.clone());
        not.take_if(|link| link.peer != Peer::Pod || link.is_closed());
        let mut missing = NotFound::default();
        loop {
            // The waiter is made before the look: a link that comes between the two ends the wait below.
            let arrival = self.paths.arrival(self.node);
            let (others, not) = (not.is_some(), not.take());
            if self.paths.is_another(self.node, self.instance) {
                self.another.get_or_insert_with(Instant::now);
            }
            let looking = self.paths.find(self.node, self.instance, not.as_deref());
            let late = || Err(NotFound { another: self.another.is_some(), ..missing.clone() });
            let found = tokio::select! {
                looked = timeout_at(self.limit(until), looking) => looked.unwrap_or_else(|_| late()),
                () = arrival.come(), if others => late(),
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

    /// Asks over the path that was found, and then over others, as long as none has answered and others are left.
    /// Returns the answer to the last question; `answer` waits for it, and is polled only after something was asked.
    pub(super) async fn ask<A>(&mut self, ask: impl Fn(&Path), answer: impl Future<Output = A>) -> A {
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
                () = arrival.come() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// An error if the search should end.
    fn is_hopeless(&mut self, missing: &NotFound, until: Instant) -> Result<(), NotFound> {
        let now = Instant::now();
        if !missing.another {
            self.another = None;
        } else if self.paths.is_alone() || now - *self.another.get_or_insert(now) >= REPLACED_AFTER {
            return Err(missing.clone());
        }
        if now >= until { Err(NotFound { another: false, ..missing.clone() }) } else { Ok(()) }
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
