//! Values reloaded when their files change, secrets among them. Holders of an old value keep it.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;
use std::{fmt, io};

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tracing::{error, info, info_span, warn};

use tunnel_base::drain::Drain;
use tunnel_base::files;

/// A value parsed from one or more files and reloaded when their content changes. Cheap to clone; clones share the
/// value.
///
/// It compares content, not times. So it notices a replaced symbolic link (Kubernetes mounts) and an edit, and ignores
/// a touched file. New content takes effect once it was read twice unchanged, so a file that is still being written
/// never does. An empty or removed file changes nothing. The value remains the first one unless a [`FileWatcher`]
/// watches its files.
#[derive(derive_more::Debug)]
#[debug("ReloadedValue({_0})")]
pub struct ReloadedValue<T>(Arc<Shared<T>>);

/// The reason why a value could not be read from its files.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ReloadError(String);

impl<T: Send + Sync + 'static> ReloadedValue<T> {
    /// Reads the files now and parses their contents, which are passed in the same order. Blocks on the disk: for
    /// startup only.
    pub fn new<F: Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync + 'static>(
        paths: Vec<PathBuf>,
        parse: F,
    ) -> Result<Self, ReloadError> {
        let read = |path: &PathBuf| files::read(path).map_err(|cause| unreadable(path, &cause));
        let contents = paths.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let value = parse(&contents).map_err(ReloadError)?;
        Ok(Self::known(value, paths, &contents, parse))
    }

    /// Creates a value that was read before. Contents that are not those of the files take part in no comparison: the
    /// files are then read as if they had changed.
    pub fn known<F: Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync + 'static>(
        value: T,
        paths: Vec<PathBuf>,
        contents: &[Vec<u8>],
        parse: F,
    ) -> Self {
        Self(Arc::new(Shared {
            value: ArcSwap::from_pointee(value),
            first: fingerprint(contents),
            source: ArcSwap::from_pointee(Source { paths, parse: Box::new(parse) }),
            changed: watch::Sender::new(()),
            is_stale: AtomicBool::new(false),
        }))
    }

    /// Like [`Self::new`], but for a value of one file.
    pub fn file<F: Fn(&[u8]) -> Result<T, String> + Send + Sync + 'static>(
        path: impl Into<PathBuf>,
        parse: F,
    ) -> Result<Self, ReloadError> {
        Self::new(vec![path.into()], move |contents| parse(contents.first().map_or(&[], Vec::as_slice)))
    }

    /// Creates a value that never changes.
    pub fn fixed(value: T) -> Self {
        Self::known(value, Vec::new(), &[], |_| Err("is fixed".to_owned()))
    }

    /// Returns the current value. Call it for each use, because the result is not updated.
    pub fn load(&self) -> Arc<T> {
        self.0.value.load_full()
    }

    /// Takes over the value and the files of another one.
    pub fn replace(&self, other: &Self) {
        self.0.source.store(other.0.source.load_full());
        self.0.value.store(other.load());
        self.0.changed.send_replace(());
    }

    /// Returns true if the files cannot be read or parsed now, so that the value may be outdated.
    pub fn is_stale(&self) -> bool {
        self.0.is_stale.load(Relaxed)
    }

    /// Returns a receiver that is notified of future changes. Several changes between two checks are one notification.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    /// Checks the files until draining begins, or until no other clone of the value is left.
    async fn follow(watched: Weak<Shared<T>>, mut seen: FileState, status: FileErrorSlot) {
        let mut look_now = requests();
        loop {
            let pause = if seen.unsettled.is_some() { DEBOUNCE } else { CHECK_INTERVAL };
            // The sender is never dropped.
            let waited = tokio::time::timeout(pause, look_now.changed());
            if status.files.drain.run_until(waited).await.is_none() {
                return;
            }
            let Some(value) = watched.upgrade().map(Self) else {
                status.set_readable();
                return;
            };
            seen = value.check_files(seen, &status).await;
        }
    }

    fn first_state(&self) -> FileState {
        FileState { content: Some(self.0.first), ..FileState::default() }
    }

    /// Reads the files. If they have changed, stores the new value, or reports the error.
    async fn check_files(&self, seen: FileState, status: &FileErrorSlot) -> FileState {
        let source = self.0.source.load_full();
        let contents = match source.read().await {
            Ok(contents) => contents,
            Err(cause) => {
                self.report_error(&cause.0, status);
                // If bad content returns, it must be reported again.
                return FileState { content: seen.content.filter(|_| !seen.bad), ..FileState::default() };
            }
        };
        let content = fingerprint(&contents);
        if seen.content == Some(content) {
            // Unchanged bad content was reported before.
            self.0.is_stale.store(seen.bad, Relaxed);
            if !seen.bad && status.set_readable() {
                info!(files = %self.0, "files can be read again, unchanged");
            }
            return FileState { unsettled: None, ..seen };
        }
        // A writer may not have finished.
        if seen.unsettled != Some(content) {
            return FileState { unsettled: Some(content), ..seen };
        }
        let parsed = (source.parse)(&contents);
        if !Arc::ptr_eq(&source, &self.0.source.load()) {
            return seen;
        }
        let bad = parsed.is_err();
        match parsed {
            Ok(value) => {
                self.0.value.store(Arc::new(value));
                self.0.is_stale.store(false, Relaxed);
                info!(files = %self.0, "files reloaded");
                self.0.changed.send_replace(());
                status.set_reloaded();
            }
            Err(cause) => self.report_error(&cause, status),
        }
        FileState { content: Some(content), unsettled: None, bad }
    }

    fn report_error(&self, cause: &str, status: &FileErrorSlot) {
        self.0.is_stale.store(true, Relaxed);
        if status.set_error(cause.to_owned()) {
            error!(files = %self.0, error = %cause, "cannot reload files, keeping previous content");
        }
    }
}

impl<T> Clone for ReloadedValue<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The current value and its files, shared by the clones of a [`ReloadedValue`].
struct Shared<T> {
    value: ArcSwap<T>,
    source: ArcSwap<Source<T>>,
    changed: watch::Sender<()>,
    is_stale: AtomicBool,
    /// Fingerprint of the first value's content.
    first: u64,
}

/// The files of a value, and how it is parsed.
struct Source<T> {
    paths: Vec<PathBuf>,
    parse: Box<Parse<T>>,
}

impl<T> Source<T> {
    async fn read(&self) -> Result<Vec<Vec<u8>>, ReloadError> {
        let mut contents = Vec::with_capacity(self.paths.len());
        for path in &self.paths {
            let content = tokio::fs::read(path).await.and_then(files::decode);
            let content = content.map_err(|cause| unreadable(path, &cause))?;
            if content.trim_ascii().is_empty() {
                return Err(ReloadError(format!("{} is empty; restore its content", path.display())));
            }
            contents.push(content);
        }
        Ok(contents)
    }
}

type Parse<T> = dyn Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync;

/// The progress of a watch on files: what was read last.
#[derive(Default, Clone, Copy)]
struct FileState {
    /// Fingerprint of the content that was parsed last; `None` if that was bad and has gone since.
    content: Option<u64>,
    /// Fingerprint of newer content that was read only once.
    unsettled: Option<u64>,
    /// Whether the parsed content was bad.
    bad: bool,
}

impl<T> fmt::Display for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, path) in self.source.load().paths.iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { ", " }, path.display())?;
        }
        Ok(())
    }
}

fn unreadable(path: &Path, cause: &io::Error) -> ReloadError {
    ReloadError(format!("cannot read {}: {cause}{}", path.display(), files::hint(cause)))
}

/// Returns a hash of the contents, so that keys are not kept in memory only for comparison.
pub fn fingerprint(contents: &[Vec<u8>]) -> u64 {
    let mut hasher = DefaultHasher::new();
    contents.hash(&mut hasher);
    hasher.finish()
}

/// Watches the files of a server or an edge until draining begins, and collects the errors that keep them from being
/// reloaded. Cheap to clone; clones share the errors.
#[derive(Debug, Clone)]
pub struct FileWatcher {
    drain: Drain,
    errors: watch::Sender<WatchedFileErrors>,
}

/// The current errors of watched values.
#[derive(Debug, Default)]
pub struct WatchedFileErrors {
    /// The number of the next value.
    next: u64,
    by_value: BTreeMap<u64, String>,
}

impl FileWatcher {
    /// Returns a watcher without files.
    pub fn new(drain: &Drain) -> Self {
        Self { drain: drain.clone(), errors: watch::Sender::default() }
    }

    /// Polls the files of a value every few seconds and after [`reload_now`], while another clone of the value is in
    /// use. A change takes effect within 6 s.
    ///
    /// If reading or parsing fails, the old value remains, and each new error is logged once. `what` names the task.
    pub fn watch<T: Send + Sync + 'static>(&self, what: &'static str, value: &ReloadedValue<T>) {
        if value.0.source.load().paths.is_empty() {
            return;
        }
        let mut number = 0;
        self.errors.send_modify(|errors| {
            number = errors.next;
            errors.next += 1;
        });
        let status = FileErrorSlot { files: self.clone(), number };
        let following = ReloadedValue::follow(Arc::downgrade(&value.0), value.first_state(), status);
        self.drain.spawn(info_span!("files", value = what), following);
    }

    /// Returns the errors that keep files from being reloaded, each once.
    ///
    /// # Errors
    ///
    /// At least one file cannot be reloaded.
    pub fn check(&self) -> Result<(), String> {
        let errors = self.errors.borrow();
        // Values that share a file have the same error.
        let distinct: BTreeSet<_> = errors.by_value.values().map(String::as_str).collect();
        if distinct.is_empty() {
            return Ok(());
        }
        let all = distinct.into_iter().collect::<Vec<_>>().join("; ");
        Err(format!("{all}; the previous content stays in use, but only until a restart"))
    }

    /// Returns a channel that changes when files were reloaded, or when [`Self::check`] may have another result.
    pub fn changes(&self) -> watch::Receiver<WatchedFileErrors> {
        self.errors.subscribe()
    }
}

/// One watched value's place among the errors of a [`FileWatcher`].
struct FileErrorSlot {
    files: FileWatcher,
    number: u64,
}

impl FileErrorSlot {
    fn set_reloaded(&self) {
        self.files.errors.send_modify(|errors| _ = errors.by_value.remove(&self.number));
    }

    /// Clears the error. Returns true if there was one.
    fn set_readable(&self) -> bool {
        self.files.errors.send_if_modified(|errors| errors.by_value.remove(&self.number).is_some())
    }

    /// Sets the error. Returns true if no watched value had the same one.
    fn set_error(&self, error: String) -> bool {
        let mut is_new = false;
        self.files.errors.send_if_modified(|errors| {
            is_new = !errors.by_value.values().any(|known| *known == error);
            let changed = errors.by_value.get(&self.number) != Some(&error);
            errors.by_value.insert(self.number, error);
            changed
        });
        is_new
    }
}

/// Makes all watchers in this process check their files now.
pub fn reload_now() {
    RELOAD_NOW.send_replace(());
}

/// Returns a receiver that is notified by each later [`reload_now`].
pub fn requests() -> watch::Receiver<()> {
    RELOAD_NOW.subscribe()
}

/// Global, because SIGHUP concerns the whole process.
static RELOAD_NOW: LazyLock<watch::Sender<()>> = LazyLock::new(|| watch::Sender::new(()));

/// Time between two checks. A Kubernetes mount takes a minute or more to change, so a few seconds do not matter.
const CHECK_INTERVAL: Duration = Duration::from_secs(4);

/// Time between two checks of changed content: longer than a writer needs.
const DEBOUNCE: Duration = Duration::from_secs(2);

/// Warns if a secret file is world-readable; `key` is its config key. Ignores a missing file. Blocks on the disk: for
/// startup only.
pub fn warn_of_readers(key: &str, path: &Path) {
    if is_world_readable(path) {
        let file = path.display();
        warn!(
            key,
            %file,
            hint = %format_args!("chmod o-rwx {file}"),
            "secret file is readable by every user of this machine"
        );
    }
}

/// Returns true if every user of this machine may read a file. Blocks on the disk.
pub fn is_world_readable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.mode() & OTHERS_READ != 0)
}

/// The mode bit that allows every user to read a file.
const OTHERS_READ: u32 = 0o004;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tunnel_base::drain::Drained;

    use super::*;

    fn number(content: &[u8]) -> Result<u32, String> {
        String::from_utf8_lossy(content).trim().parse().map_err(|_| "not a number".to_owned())
    }

    /// Checks twice, as [`ReloadedValue::watch`] does within a few seconds.
    async fn check_twice(
        reload: &ReloadedValue<u32>,
        mut seen: FileState,
        status: &FileErrorSlot,
    ) -> FileState {
        for _ in 0..2 {
            seen = reload.check_files(seen, status).await;
        }
        seen
    }

    /// Returns the places of that number of values.
    fn watched<const N: usize>() -> [FileErrorSlot; N] {
        let (files, mut number) = (FileWatcher::new(&Drain::new()), 0..);
        std::array::from_fn(|_| FileErrorSlot { files: files.clone(), number: number.next().unwrap() })
    }

    #[tokio::test]
    async fn a_changed_file_is_reloaded_and_an_invalid_one_keeps_the_old_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = ReloadedValue::file(&path, number).unwrap();
        let old = reload.load();
        let mut seen = reload.first_state();
        let [status] = watched();
        let (changes, error) = (reload.changes(), || status.files.check().err());

        std::fs::write(&path, "2").unwrap();
        seen = check_twice(&reload, seen, &status).await;
        assert_eq!((*old, *reload.load()), (1, 2));

        std::fs::write(&path, "two").unwrap();
        seen = check_twice(&reload, seen, &status).await;
        assert_eq!(*reload.load(), 2);
        assert!(error().unwrap().starts_with("not a number; the previous content"), "{:?}", error());

        std::fs::remove_file(&path).unwrap();
        seen = check_twice(&reload, seen, &status).await;
        assert!(error().unwrap().contains("cannot read"), "{:?}", error());

        std::fs::write(&path, "two").unwrap();
        seen = check_twice(&reload, seen, &status).await;
        assert!(error().unwrap().starts_with("not a number"), "{:?}", error());

        assert!(changes.has_changed().unwrap());
        std::fs::write(&path, " \n").unwrap();
        seen = check_twice(&reload, seen, &status).await;
        assert!(error().unwrap().contains("is empty"), "{:?}", error());

        std::fs::write(&path, "3").unwrap();
        check_twice(&reload, seen, &status).await;
        assert_eq!((*reload.load(), error()), (3, None));
    }

    #[tokio::test]
    async fn a_changed_file_applies_once_two_reads_are_equal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = ReloadedValue::file(&path, number).unwrap();
        let (mut seen, [status]) = (reload.first_state(), watched());
        for (content, counts) in [("", 1), ("2", 1), ("", 1), ("2", 1), ("23", 1), ("234", 1), ("234", 234)] {
            std::fs::write(&path, content).unwrap();
            seen = reload.check_files(seen, &status).await;
            assert_eq!(*reload.load(), counts, "{content}");
        }
    }

    #[tokio::test]
    async fn an_unchanged_invalid_file_is_not_parsed_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let parsed = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&parsed);
        let reload = ReloadedValue::file(&path, move |content| {
            count.fetch_add(1, Ordering::Relaxed);
            number(content)
        })
        .unwrap();
        std::fs::write(&path, "bad").unwrap();
        let (mut seen, [status]) = (reload.first_state(), watched());
        for _ in 0..3 {
            seen = check_twice(&reload, seen, &status).await;
        }
        assert_eq!(parsed.load(Ordering::Relaxed), 2);
        assert!(status.files.check().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_reloads_a_changed_file_and_ends_with_the_drain() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = ReloadedValue::file(&path, number).unwrap();
        let drain = Drain::new();
        FileWatcher::new(&drain).watch("number", &reload);
        std::fs::write(&path, "2").unwrap();
        while *reload.load() != 2 {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        let ended = drain.finish(Duration::from_secs(1), std::future::pending()).await;
        assert_eq!(ended, Drained::Finished);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_and_its_error_end_with_the_last_use_of_the_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = ReloadedValue::file(&path, number).unwrap();
        let drain = Drain::new();
        let files = FileWatcher::new(&drain);
        files.watch("number", &reload);
        std::fs::remove_file(&path).unwrap();
        while files.check().is_ok() {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        drop(reload);
        while drain.tasks() > 0 {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        assert_eq!(files.check(), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn reload_now_does_not_wait_for_the_next_check() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = ReloadedValue::file(&path, number).unwrap();
        let (drain, mut changes) = (Drain::new(), reload.changes());
        FileWatcher::new(&drain).watch("number", &reload);
        tokio::task::yield_now().await;
        let started = tokio::time::Instant::now();
        std::fs::write(&path, "2").unwrap();
        reload_now();
        changes.changed().await.unwrap();
        assert_eq!((*reload.load(), started.elapsed() <= DEBOUNCE), (2, true), "{:?}", started.elapsed());
        drain.finish(Duration::from_secs(1), std::future::pending()).await;
    }

    #[tokio::test]
    async fn values_of_one_invalid_file_report_it_once_until_all_have_reloaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let [one, other] = [(); 2].map(|()| ReloadedValue::file(&path, number).unwrap());
        let [first, second] = watched();
        std::fs::write(&path, "two").unwrap();
        let seen = check_twice(&one, one.first_state(), &first).await;
        assert!(!second.set_error("not a number".to_owned()), "the same error is no news");
        check_twice(&other, other.first_state(), &second).await;
        let mut changes = first.files.changes();
        changes.mark_unchanged();
        assert_eq!(first.files.check().unwrap_err().matches("not a number").count(), 1);
        std::fs::write(&path, "2").unwrap();
        check_twice(&one, seen, &first).await;
        assert!(first.files.check().is_err() && changes.has_changed().unwrap());
        second.set_reloaded();
        assert_eq!(first.files.check(), Ok(()));
    }

    #[test]
    fn a_missing_file_is_named_at_start() {
        let failed = ReloadedValue::file("/nowhere/token", number).unwrap_err().to_string();
        assert!(failed.contains("/nowhere/token"), "{failed}");
    }
}
