//! The enrolment state that all servers of a cloud share as a text, as last read, and how it is changed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::{MutexGuard, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::warn;

use crate::enrolment::store::Enrolments;
use tunnel_base::drain::Drain;
use tunnel_base::stores::{StoreError, TextStore, VersionedText};
use tunnel_base::unix_time::now;

/// The enrolment state that all servers of a cloud share, as last read.
#[derive(Debug)]
pub struct SharedState {
    /// What the text contains, and where it is, for error texts.
    what: &'static str,
    place: String,
    cell: tokio::sync::Mutex<StoreCell>,
    known: ArcSwap<Enrolments>,
    changed: watch::Sender<()>,
    looked: Mutex<Option<LastStoreRead>>,
    /// Why the last write failed.
    write_error: Mutex<Option<String>>,
    /// Whether a caller needed something that was not known. Until then, a store that was never written is no problem.
    was_needed: AtomicBool,
    /// Whether the store was read once, so that what is not known does not exist.
    was_read: AtomicBool,
    /// Held by the caller that reads the store on behalf of all that wait for a read.
    reader: tokio::sync::Mutex<()>,
}

/// The store with its last text, which is not parsed again.
#[derive(Debug)]
pub(super) struct StoreCell {
    store: Box<dyn TextStore>,
    seen: VersionedText,
}

/// The last read of the store.
#[derive(Debug, Clone)]
struct LastStoreRead {
    began: Instant,
    result: Result<(), String>,
}

impl SharedState {
    /// Creates an empty state. It is filled by [`Self::follow`] and by reads on demand. `changed` is notified when
    /// [`Self::known`] changes.
    pub(super) fn new(what: &'static str, store: Box<dyn TextStore>, changed: watch::Sender<()>) -> Self {
        Self {
            what,
            place: store.to_string(),
            cell: tokio::sync::Mutex::new(StoreCell { store, seen: VersionedText::default() }),
            known: ArcSwap::default(),
            changed,
            looked: Mutex::default(),
            write_error: Mutex::default(),
            was_needed: AtomicBool::default(),
            was_read: AtomicBool::default(),
            reader: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the state as last read.
    pub fn known(&self) -> Arc<Enrolments> {
        self.known.load_full()
    }

    /// Returns true if the store was read once.
    pub fn was_read(&self) -> bool {
        self.was_read.load(Relaxed)
    }

    /// Returns true if the last read of the store has worked.
    pub(crate) fn is_current(&self) -> bool {
        self.looked.lock().as_ref().is_some_and(|last| last.result.is_ok())
    }

    /// Returns a receiver that is notified when [`Self::known`] changes.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Reads the store every second or so until draining starts. Calls `report` with the result of each read, or of a
    /// write that failed and is tried again.
    pub async fn follow(&self, report: impl Fn(Result<(), String>), drain: Drain) {
        let mut failing = false;
        loop {
            let looked = match self.read_store().await {
                Ok(()) => self.retry_write().await,
                failed => failed,
            };
            if let Err(why) = &looked
                && !failing
            {
                warn!(error = %why, "cannot use the store, retrying");
            }
            failing = looked.is_err();
            report(looked);
            let pause = sleep(REFRESH_INTERVAL.mul_f64(0.5 + rand::random::<f64>()));
            if drain.run_until(pause).await.is_none() {
                return;
            }
        }
    }

    /// Waits for a read of the store that began after this call: a machine may have just joined at another server.
    /// Callers may be strangers, so they share one read a second. Cancel safe.
    ///
    /// # Errors
    ///
    /// Fails if the read failed.
    pub async fn refresh(&self) -> Result<(), String> {
        let called = Instant::now();
        self.was_needed.store(true, Relaxed);
        let refreshed = async {
            let _reader = self.reader.lock().await;
            let last = self.looked.lock().clone();
            match last {
                Some(last) if last.began > called => return last.result,
                Some(last) => sleep_until(last.began + MIN_REFRESH_PAUSE).await,
                None => {}
            }
            // `follow` reports failures.
            self.read_store().await
        };
        let refreshed = timeout(REFRESH_TIMEOUT, refreshed).await;
        refreshed.unwrap_or_else(|_| Err(format!("the store did not answer within {REFRESH_TIMEOUT:?}")))
    }

    pub(super) async fn lock(&self) -> MutexGuard<'_, StoreCell> {
        self.cell.lock().await
    }

    /// Writes the store, and notes for [`Self::follow`] whether that works.
    async fn write_store(
        &self,
        cell: &mut StoreCell,
        seen: &VersionedText,
        text: Vec<u8>,
    ) -> Result<bool, String> {
        let written = cell.store.write(seen, text).await.map_err(|why| self.no_access(&why));
        match &written {
            // Another server was faster, so nothing is known about a write of this one.
            Ok(false) => {}
            done => *self.write_error.lock() = done.clone().err(),
        }
        written
    }

    /// If the last write failed, writes the store's text again as it is, because the next change may be days away.
    async fn retry_write(&self) -> Result<(), String> {
        if self.write_error.lock().is_some() {
            let mut cell = self.cell.lock().await;
            let seen = cell.store.read().await.map_err(|why| self.no_access(&why))?;
            // A store that was never written stays so.
            if !seen.text.is_empty() {
                self.write_store(&mut cell, &seen, seen.text.clone()).await?;
            }
        }
        self.write_error.lock().clone().map_or(Ok(()), Err)
    }

    pub(super) async fn read_store(&self) -> Result<(), String> {
        let mut cell = self.cell.lock().await;
        let began = Instant::now();
        let StoreCell { store, seen } = &mut *cell;
        let new = store.read_since(seen).await.map_err(|why| self.no_access(&why));
        let read = new.and_then(|new| {
            let is_missing = new.as_ref().map_or(seen.is_missing, |new| new.is_missing);
            // A disk that is not mounted looks the same as a store that was never written.
            if is_missing && **self.known.load() == Enrolments::default() && self.was_needed.load(Relaxed) {
                return Err(NEVER_WRITTEN.to_owned());
            }
            let parsed = new.as_ref().map(|new| self.parse(&new.text)).transpose()?;
            if let Some(new) = new {
                *seen = new;
            }
            Ok(parsed)
        });
        let result = read.as_ref().map(drop).map_err(Clone::clone);
        let was_current = self.is_current();
        *self.looked.lock() = Some(LastStoreRead { began, result: result.clone() });
        // What ends with time does so even if nothing was read.
        if let Some(known) = read.ok().flatten().or_else(|| self.known.load().expired(now())) {
            self.set_known(known);
        }
        if result.is_ok() && !was_current {
            self.was_read.store(true, Relaxed);
            self.changed.send_replace(());
        }
        result
    }

    /// Changes the shared state: reads it, applies the change, and writes it unless another server changed it
    /// meanwhile. Retries after such a conflict.
    pub(super) async fn change<R>(
        &self,
        apply: impl FnMut(&mut Enrolments) -> Result<R, String>,
    ) -> Result<R, String> {
        self.change_in(&mut *self.cell.lock().await, apply).await
    }

    pub(super) async fn change_in<R>(
        &self,
        cell: &mut StoreCell,
        mut apply: impl FnMut(&mut Enrolments) -> Result<R, String>,
    ) -> Result<R, String> {
        // What the last write would have done. It may have been carried out although its response was lost.
        let mut tried = None;
        let mut failed = false;
        for _ in 0..MAX_ATTEMPTS {
            let seen = cell.store.read().await.map_err(|why| self.no_access(&why))?;
            let old = self.parse(&seen.text)?;
            let mut new = old.clone();
            let done = apply(&mut new)?;
            if new == old {
                cell.seen = seen;
                self.set_known(new);
                return Ok(tried.unwrap_or(done));
            }
            let text = new.to_text();
            match self.write_store(cell, &seen, text.clone()).await {
                Ok(true) => {
                    // Another server may undo this, and the text is then again as it was read last.
                    cell.seen = VersionedText { text, ..VersionedText::default() };
                    self.set_known(new);
                    return Ok(done);
                }
                Ok(false) => {}
                // One more try: the first error may be a response that was lost with its connection.
                Err(why) if failed => return Err(why),
                Err(_) => failed = true,
            }
            tried = Some(done);
            // A random pause, so that servers in conflict do not collide again.
            sleep(MAX_RETRY_PAUSE.mul_f64(rand::random())).await;
        }
        Err(format!(
            "{} not changed: {MAX_ATTEMPTS} conflicting updates by other servers; try again",
            self.what
        ))
    }

    /// Parses the store's text. An empty store, for example on a disk that is not mounted, takes nothing away.
    fn parse(&self, text: &[u8]) -> Result<Enrolments, String> {
        if text.trim_ascii().is_empty() && **self.known.load() != Enrolments::default() {
            return Err(self.foreign("the store is empty, keeping the last known state"));
        }
        let content = Enrolments::parse(text).map_err(|why| self.foreign(&why))?;
        Ok(content.expired(now()).unwrap_or(content))
    }

    fn set_known(&self, content: Enrolments) {
        if **self.known.load() != content {
            self.known.store(Arc::new(content));
            self.changed.send_replace(());
        }
    }

    /// Returns the error of a store that is not available now.
    fn no_access(&self, cause: &StoreError) -> String {
        format!("cannot access the store of {}: {cause}", self.what)
    }

    /// Returns the error of a store that contains something else.
    fn foreign(&self, why: &str) -> String {
        let Self { what, place, .. } = self;
        format!("cannot read {what} in {place}: {why}; restore a copy of it, or name another store")
    }
}

/// The error of a file that does not exist, and was never read.
const NEVER_WRITTEN: &str = "the file of invitations does not exist; `tunnel invite` creates it; if machines have joined, \
                             check that its disk is mounted";

/// Average interval between reads of the store. A change is in force everywhere within 2 s.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Minimum interval between reads on behalf of unauthenticated callers.
const MIN_REFRESH_PAUSE: Duration = Duration::from_secs(1);

/// Timeout of a caller that waits for such a read, on the whole: its own server's answer has a limit too. Reads of
/// [`SharedState::follow`] have none.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of attempts to change the shared state, and the longest delay between them.
const MAX_ATTEMPTS: usize = 30;
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(50);
