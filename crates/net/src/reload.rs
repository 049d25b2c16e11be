//! Values reloaded when their files change, secrets among them. Holders of an old value keep it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use std::{fmt, io};

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tracing::{error, info, warn};

use tunnel_base::drain::Drain;

/// A value parsed from one or more files and reloaded when their content changes. Cheap to clone; clones share the
/// value.
///
/// It compares content, not times. So it notices a replaced symbolic link (Kubernetes mounts) and an edit, and ignores
/// a touched file. New content takes effect once it was read twice unchanged, so a file that is still being written
/// never does. An empty or removed file changes nothing. Until [`Self::watch`] runs, the value remains the first one.
pub struct Reload<T>(Arc<Shared<T>>);

/// The reason why a value could not be read from its files.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// A file is missing, or this user may not read it.
    #[error("cannot read {}: {cause}; check the path, and that this user may read it", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// A file with content is empty now. Usual causes: a full disk, or a writer that died.
    #[error("{} is empty; restore its content", .0.display())]
    Empty(PathBuf),
    /// The content cannot be used. The text names the file and contains a hint.
    #[error("{0}")]
    Content(String),
}

impl<T: Send + Sync + 'static> Reload<T> {
    /// Reads the files now and parses their contents, which are passed in the same order. Blocks on the disk: for
    /// startup only.
    pub fn new<F>(paths: Vec<PathBuf>, parse: F) -> Result<Self, ReloadError>
    where
        F: Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync + 'static,
    {
        let read = |path: &PathBuf| std::fs::read(path).map_err(|cause| unreadable(path, cause));
        let contents = paths.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let value = parse(&contents).map_err(ReloadError::Content)?;
        Ok(Self(Arc::new(Shared {
            value: ArcSwap::from_pointee(value),
            first: fingerprint(&contents),
            paths,
            parse: Box::new(parse),
            changed: watch::Sender::new(()),
            error: watch::Sender::new(None),
        })))
    }

    /// Like [`Self::new`], but for a value of one file.
    pub fn file<F>(path: impl Into<PathBuf>, parse: F) -> Result<Self, ReloadError>
    where
        F: Fn(&[u8]) -> Result<T, String> + Send + Sync + 'static,
    {
        Self::new(vec![path.into()], move |contents| parse(contents.first().map_or(&[], Vec::as_slice)))
    }

    /// Creates a value that never changes.
    pub fn fixed(value: T) -> Self {
        let value = ArcSwap::from_pointee(value);
        let parse = Box::new(|_: &[Vec<u8>]| Err("is fixed".to_owned()));
        let (changed, error) = (watch::Sender::new(()), watch::Sender::new(None));
        Self(Arc::new(Shared { value, first: fingerprint(&[]), paths: Vec::new(), parse, changed, error }))
    }

    /// Returns the current value. Call it for each use, because the result is not updated.
    pub fn load(&self) -> Arc<T> {
        self.0.value.load_full()
    }

    /// Returns a receiver that is notified of future changes. Several changes between two checks are one notification.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    /// Returns a receiver of the error that keeps the files from being reloaded; `None` while there is none.
    pub fn error(&self) -> watch::Receiver<Option<String>> {
        self.0.error.subscribe()
    }

    /// Polls the files every few seconds and after [`reload_now`], until draining begins. A change takes effect within
    /// 6 s.
    ///
    /// If reading or parsing fails, the old value remains, and each new error is logged once. Cancel safe.
    pub async fn watch(self, drain: Drain) {
        if self.0.paths.is_empty() {
            return;
        }
        let mut seen = FileState { content: self.0.first, ..FileState::default() };
        let mut look_now = asked();
        loop {
            let pause = if seen.unsettled.is_some() { DEBOUNCE } else { CHECK_INTERVAL };
            tokio::select! {
                biased;
                () = drain.draining() => return,
                // The sender is never dropped.
                _ = look_now.changed() => {}
                () = tokio::time::sleep(pause) => {}
            }
            let next = self.look(&seen).await;
            seen = self.report(seen, next);
        }
    }

    async fn look(&self, seen: &FileState) -> FileCheck<T> {
        let mut contents = Vec::with_capacity(self.0.paths.len());
        for path in &self.0.paths {
            match tokio::fs::read(path).await {
                Ok(content) if content.trim_ascii().is_empty() => {
                    return FileCheck::Failed(seen.content, ReloadError::Empty(path.clone()));
                }
                Ok(content) => contents.push(content),
                Err(cause) => return FileCheck::Failed(seen.content, unreadable(path, cause)),
            }
        }
        let content = fingerprint(&contents);
        if content == seen.content {
            return FileCheck::Unchanged;
        }
        if seen.unsettled != Some(content) {
            return FileCheck::Changing(content);
        }
        match (self.0.parse)(&contents) {
            Ok(value) => FileCheck::New(content, value),
            Err(cause) => FileCheck::Failed(content, ReloadError::Content(cause)),
        }
    }

    /// Stores the new value, or logs the error.
    fn report(&self, seen: FileState, found: FileCheck<T>) -> FileState {
        match found {
            // Unchanged bad content was logged before.
            FileCheck::Unchanged if seen.bad => FileState { unsettled: None, ..seen },
            FileCheck::Unchanged => {
                self.set_error(None);
                FileState { unsettled: None, ..seen }
            }
            FileCheck::Changing(content) => FileState { unsettled: Some(content), ..seen },
            FileCheck::New(content, value) => {
                self.0.value.store(Arc::new(value));
                info!(files = %self.0, "files reloaded");
                self.0.changed.send_replace(());
                self.set_error(None);
                FileState { content, ..FileState::default() }
            }
            FileCheck::Failed(content, cause) => {
                if self.set_error(Some(cause.to_string())) {
                    error!(files = %self.0, error = %cause, "cannot reload files, keeping previous content");
                }
                FileState { content, unsettled: None, bad: matches!(cause, ReloadError::Content(_)) }
            }
        }
    }

    /// Sets the current error. Returns true if it differs from the last one.
    fn set_error(&self, error: Option<String>) -> bool {
        self.0.error.send_if_modified(|current| {
            let is_new = *current != error;
            *current = error;
            is_new
        })
    }
}

impl<T> Clone for Reload<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for Reload<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reload({})", self.0)
    }
}

/// The current value and its files, shared by the clones of a [`Reload`].
struct Shared<T> {
    value: ArcSwap<T>,
    paths: Vec<PathBuf>,
    parse: Box<Parse<T>>,
    changed: watch::Sender<()>,
    /// The error that was logged last, until the files can be read again.
    error: watch::Sender<Option<String>>,
    /// Fingerprint of the first value's content.
    first: u64,
}

type Parse<T> = dyn Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync;

/// The progress of a watch on files: what was read last.
#[derive(Default, Clone, Copy)]
struct FileState {
    /// Fingerprint of the content that was parsed last.
    content: u64,
    /// Fingerprint of newer content that was read only once.
    unsettled: Option<u64>,
    /// Whether the parsed content was bad.
    bad: bool,
}

/// The result of one check of the files.
enum FileCheck<T> {
    Unchanged,
    /// New content that was read only once: its fingerprint. A writer may not have finished.
    Changing(u64),
    /// Changed content that was parsed: its fingerprint and value.
    New(u64, T),
    /// Files that cannot be read or parsed; with the content's fingerprint.
    Failed(u64, ReloadError),
}

impl<T> fmt::Display for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, path) in self.paths.iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { ", " }, path.display())?;
        }
        Ok(())
    }
}

fn unreadable(path: &Path, cause: io::Error) -> ReloadError {
    ReloadError::Read { path: path.into(), cause }
}

/// Returns a hash of the contents, so that keys are not kept in memory only for comparison.
pub fn fingerprint(contents: &[Vec<u8>]) -> u64 {
    let mut hasher = DefaultHasher::new();
    contents.hash(&mut hasher);
    hasher.finish()
}

/// Makes all watchers in this process check their files now.
pub fn reload_now() {
    LOOK_NOW.send_replace(());
}

/// Returns a receiver that is notified by [`reload_now`].
pub fn asked() -> watch::Receiver<()> {
    LOOK_NOW.subscribe()
}

/// Global, because SIGHUP concerns the whole process.
static LOOK_NOW: LazyLock<watch::Sender<()>> = LazyLock::new(|| watch::Sender::new(()));

/// Time between two checks. A Kubernetes mount takes a minute or more to change, so a few seconds do not matter.
const CHECK_INTERVAL: Duration = Duration::from_secs(4);

/// Time between two checks of changed content: longer than a writer needs.
const DEBOUNCE: Duration = Duration::from_secs(2);

// Files that hold secrets.

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

    /// Checks twice, as [`Reload::watch`] does within a few seconds.
    async fn look(reload: &Reload<u32>, mut seen: FileState) -> FileState {
        for _ in 0..2 {
            let found = reload.look(&seen).await;
            seen = reload.report(seen, found);
        }
        seen
    }

    fn first(reload: &Reload<u32>) -> FileState {
        FileState { content: reload.0.first, ..FileState::default() }
    }

    #[tokio::test]
    async fn a_changed_file_is_read_again_and_a_bad_one_keeps_the_old_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = Reload::file(&path, number).unwrap();
        let old = reload.load();
        let mut seen = first(&reload);
        let (changes, error) = (reload.changes(), || reload.error().borrow().clone());

        std::fs::write(&path, "2").unwrap();
        seen = look(&reload, seen).await;
        assert_eq!((*old, *reload.load()), (1, 2));

        std::fs::write(&path, "two").unwrap();
        seen = look(&reload, seen).await;
        assert_eq!((*reload.load(), error().as_deref()), (2, Some("not a number")));

        std::fs::remove_file(&path).unwrap();
        seen = look(&reload, seen).await;
        assert!(error().unwrap().contains("cannot read"), "{:?}", error());

        assert!(changes.has_changed().unwrap());
        std::fs::write(&path, " \n").unwrap();
        seen = look(&reload, seen).await;
        assert!(error().unwrap().contains("is empty"), "{:?}", error());

        std::fs::write(&path, "3").unwrap();
        look(&reload, seen).await;
        assert_eq!((*reload.load(), error()), (3, None));
    }

    #[tokio::test]
    async fn what_somebody_is_writing_counts_once_it_was_read_twice_alike() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = Reload::file(&path, number).unwrap();
        let mut seen = first(&reload);
        for (content, counts) in [("", 1), ("2", 1), ("", 1), ("2", 1), ("23", 1), ("234", 1), ("234", 234)] {
            std::fs::write(&path, content).unwrap();
            let found = reload.look(&seen).await;
            seen = reload.report(seen, found);
            assert_eq!(*reload.load(), counts, "{content}");
        }
    }

    #[tokio::test]
    async fn an_unchanged_bad_file_is_not_parsed_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let parsed = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&parsed);
        let reload = Reload::file(&path, move |content| {
            count.fetch_add(1, Ordering::Relaxed);
            number(content)
        })
        .unwrap();
        std::fs::write(&path, "bad").unwrap();
        let mut seen = first(&reload);
        for _ in 0..3 {
            seen = look(&reload, seen).await;
        }
        assert_eq!(parsed.load(Ordering::Relaxed), 2);
        assert!(reload.error().borrow().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_notices_and_ends_with_the_drain() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = Reload::file(&path, number).unwrap();
        let drain = Drain::new();
        drain.spawn(tracing::Span::none(), reload.clone().watch(drain.clone()));
        std::fs::write(&path, "2").unwrap();
        while *reload.load() != 2 {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        let ended = drain.finish(Duration::from_secs(1), std::future::pending()).await;
        assert_eq!(ended, Drained::Finished);
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_need_not_wait_for_the_next_look() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let reload = Reload::file(&path, number).unwrap();
        let (drain, mut changes) = (Drain::new(), reload.changes());
        drain.spawn(tracing::Span::none(), reload.clone().watch(drain.clone()));
        tokio::task::yield_now().await;
        let started = tokio::time::Instant::now();
        std::fs::write(&path, "2").unwrap();
        reload_now();
        changes.changed().await.unwrap();
        assert_eq!((*reload.load(), started.elapsed() <= DEBOUNCE), (2, true), "{:?}", started.elapsed());
        drain.finish(Duration::from_secs(1), std::future::pending()).await;
    }

    #[test]
    fn a_missing_file_is_named_at_start() {
        let failed = Reload::file("/nowhere/token", number).unwrap_err().to_string();
        assert!(failed.contains("/nowhere/token"), "{failed}");
    }
}
