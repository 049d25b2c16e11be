//! Log output: destination, format and level.

pub mod dropped_lines;
pub mod files;
mod libraries;
pub(crate) mod line_formats;

use std::io;
use std::path::PathBuf;

use tracing::level_filters::LevelFilter;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::fmt::writer::{BoxMakeWriter, MakeWriterExt as _};
use tracing_subscriber::layer::{Layered, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt as lines, reload};

use crate::logging::dropped_lines::{AUDIT_FILE, OF_PROCESS};
use crate::logging::files::{FULL, LogFile};
use crate::logging::libraries::LibraryLogLimit;
use crate::logging::line_formats::{EscapingFormat, FlatJson};

/// Destination, format and initial level of the logs.
#[derive(Debug, Clone, Default)]
pub struct LogSettings {
    /// Whether lines are JSON objects instead of text.
    pub json: bool,
    /// Directory for files, of which 100 MiB are kept. It is created if missing. `None` logs to stderr only.
    pub dir: Option<PathBuf>,
    /// First part of the names of its files, `tunnel-cloud` or `tunnel-edge`, so that both can share a directory.
    pub name: &'static str,
    /// Whether lines also go to stderr if there is a directory. Without a directory they always go to stderr.
    pub also_stderr: bool,
    /// File that audit lines go to, in addition to those places. It is not rotated here.
    pub audit_file: Option<PathBuf>,
    /// Verbosity, as in `--verbosity`; see [`LogLevelHandle::set`].
    pub verbosity: i32,
}

/// The running loggers. Keep this until the process ends: dropping it flushes the queued lines.
#[derive(Debug)]
#[must_use = "dropping it stops the log writers"]
pub struct LoggingGuard {
    /// Changes the level.
    pub level: LogLevelHandle,
    /// Whether nothing is logged to stderr.
    pub in_files_only: bool,
    _writers: Vec<WorkerGuard>,
}

/// A handle that changes the log level at runtime. Cheap to clone.
#[derive(Debug, Clone)]
pub struct LogLevelHandle(reload::Handle<Targets, Registry>);

/// The reason why lines do not go to a file. Grant the permission, or set another path.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the log file {}: {cause}", .path.display())]
pub struct LogError {
    /// The flag that names the file or its directory.
    pub key: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The system's error.
    #[source]
    pub cause: io::Error,
}

/// Error changing the level after logging has ended.
#[derive(Debug, thiserror::Error)]
#[error("cannot set the log level: logging has ended")]
pub struct LogEnded;

impl LoggingGuard {
    /// Starts logging for the whole process; call it once. Also returns why the directory or the audit file cannot be
    /// used, if so: lines go to stderr instead of the directory.
    pub fn start(settings: LogSettings) -> (Self, Vec<LogError>) {
        let LogSettings { dir, audit_file, .. } = settings;
        let log_file = dir.map(|dir| dir.join(format!("{}.log", settings.name)));
        let open = |path, key, full| LogFile::open(path, key, full, OF_PROCESS.clone());
        let files = log_file.map(|path| open(path, "--log-dir", Some(FULL))).transpose();
        if let Some(path) = &audit_file {
            // Set once, as logging is started once.
            let _ = AUDIT_FILE.set(path.clone());
        }
        let audit = audit_file.map(|path| open(path, "--audit-file", None)).transpose();
        let mut writers = Vec::new();
        let mut unusable = Vec::new();
        let in_files_only = matches!(files, Ok(Some(_))) && !settings.also_stderr;
        // One layer for both outputs: with two, both would append a span's later fields to the text that they share.
        let mut to = BoxMakeWriter::new(io::sink);
        if !in_files_only {
            let (writer, guard) = in_background(io::stderr());
            writers.push(guard);
            to = BoxMakeWriter::new(writer);
        }
        if let Some(files) = files.map_err(|why| unusable.push(why)).ok().flatten() {
            let (writer, guard) = in_background(files);
            writers.push(guard);
            to = BoxMakeWriter::new(to.and(writer));
        }
        if let Some(audit) = audit.map_err(|why| unusable.push(why)).ok().flatten() {
            let (writer, guard) = in_background(audit);
            writers.push(guard);
            to = BoxMakeWriter::new(to.and(writer.with_filter(|line| line.target() == AUDIT)));
        }
        let (filter, level) = LogLevelHandle::new(settings.verbosity);
        let all = tracing_subscriber::registry()
            .with(filter)
            .with(LibraryLogLimit::default())
            .with(output(to, settings.json));
        // Fails only if logging was already started.
        let _ = all.try_init();
        (Self { level, in_files_only, _writers: writers }, unusable)
    }

    /// Runs `work` and writes its log lines directly to stderr, and nowhere else.
    pub fn on_stderr(json: bool, work: impl FnOnce()) {
        let (filter, _level) = LogLevelHandle::new(0);
        let lines = tracing_subscriber::registry()
            .with(filter)
            .with(LibraryLogLimit::default())
            .with(output(io::stderr, json));
        tracing::subscriber::with_default(lines, work);
    }
}

impl LogLevelHandle {
    /// Returns a filter layer for the registry and the handle that changes its level.
    pub fn new(verbosity: i32) -> (reload::Layer<Targets, Registry>, Self) {
        let (layer, handle) = reload::Layer::new(targets(verbosity));
        (layer, Self(handle))
    }

    /// Sets the level by klog's verbosity numbers:
    ///
    /// | `-v` | own lines | lines of libraries |
    /// | --- | --- | --- |
    /// | below 0 | warn | error |
    /// | 0, 1 | info | warn |
    /// | 2, 3 | debug | warn |
    /// | 4, 5 | debug | debug |
    /// | from 6 | trace | trace |
    ///
    /// From 8, every frame of a link is logged too ([`FRAMES`]). A library's module has at most 10 warnings a minute.
    ///
    /// # Errors
    ///
    /// Fails if logging has ended.
    pub fn set(&self, verbosity: i32) -> Result<(), LogEnded> {
        self.0.reload(targets(verbosity)).map_err(|_| LogEnded)
    }
}

fn targets(verbosity: i32) -> Targets {
    let (ours, others) = match verbosity {
        ..0 => (LevelFilter::WARN, LevelFilter::ERROR),
        0 | 1 => (LevelFilter::INFO, LevelFilter::WARN),
        2 | 3 => (LevelFilter::DEBUG, LevelFilter::WARN),
        4 | 5 => (LevelFilter::DEBUG, LevelFilter::DEBUG),
        6.. => (LevelFilter::TRACE, LevelFilter::TRACE),
    };
    // These libraries log every failed attempt. This program logs the failure once, with a hint.
    let kubernetes = if verbosity < 4 { LevelFilter::OFF } else { others };
    let targets = Targets::new().with_default(others).with_target("kube", kubernetes);
    let frames = if verbosity < 8 { LevelFilter::OFF } else { LevelFilter::TRACE };
    // `tunnel` includes the access lines. The others below it have levels of their own.
    let targets = targets.with_target("tunnel", ours).with_target(FRAMES, frames);
    targets.with_target(AUDIT, LevelFilter::INFO)
}

/// Returns a writer with its own thread, so that a full disk or a blocked pipe does not block the tunnel.
fn in_background(to: impl io::Write + Send + 'static) -> (NonBlocking, WorkerGuard) {
    let builder = NonBlockingBuilder::default().buffered_lines_limit(WAITING_LINES).thread_name("log");
    let (writer, guard) = builder.finish(to);
    OF_PROCESS.count_queue(writer.error_counter());
    (writer, guard)
}

type Output = Box<dyn Layer<FilteredSubscriber> + Send + Sync>;
type FilteredSubscriber = Layered<LibraryLogLimit, Layered<reload::Layer<Targets, Registry>, Registry>>;

fn output<W: for<'w> MakeWriter<'w> + Send + Sync + 'static>(to: W, json: bool) -> Output {
    let layer = lines::layer().with_writer(to).with_ansi(false);
    if json {
        layer.fmt_fields(JsonFields::new()).event_format(EscapingFormat { form: FlatJson, json }).boxed()
    } else {
        layer.map_event_format(|form| EscapingFormat { form, json }).boxed()
    }
}

/// Target of access lines.
pub(crate) const ACCESS: &str = "tunnel::access";
/// Target of audit lines: who changed permissions, and from where.
pub const AUDIT: &str = "tunnel::audit";
/// Target of lines about single frames.
pub const FRAMES: &str = "tunnel::frames";

/// Maximum number of lines queued for a slow disk before new lines are dropped. The queue is allocated at startup.
const WAITING_LINES: usize = 2048;

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};
    use tunnel_proto::printable::is_printable;

    use tracing::Level as At;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the log lines written by `work`.
    pub(crate) fn lines_of(json: bool, work: impl FnOnce()) -> String {
        let lines = Lines::default();
        let to = lines.clone();
        let (filter, _level) = LogLevelHandle::new(0);
        let log = tracing_subscriber::registry()
            .with(filter)
            .with(LibraryLogLimit::default())
            .with(output(move || to.clone(), json));
        tracing::subscriber::with_default(log, work);
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn logged_values_cannot_break_lines_or_emit_control_characters() {
        let wild = "a\nINFO forged\r\u{1b}[2J\u{9b}31m\u{2028}\u{202e}\u{7f}b \u{e9}";
        for json in [false, true] {
            let lines = lines_of(json, || {
                let _span = tracing::info_span!("span", node = %wild, quoted = wild).entered();
                tracing::info!(shown = %wild, quoted = wild, why = ?wild, "{wild}");
            });
            assert_eq!(lines.lines().count(), 1, "{lines}");
            assert!(lines.ends_with('\n') && lines.trim_end().chars().all(is_printable), "{lines:?}");
            assert!(lines.matches("b \u{e9}").count() >= 5, "{lines}");
            if json {
                let read: serde_json::Value = serde_json::from_str(&lines).unwrap();
                assert_eq!(read["message"], wild);
            }
        }
    }

    #[test]
    fn klog_verbosity_selects_the_log_levels() {
        for (verbosity, ours, others) in [
            (-1, At::WARN, At::ERROR),
            (0, At::INFO, At::WARN),
            (2, At::DEBUG, At::WARN),
            (4, At::DEBUG, At::DEBUG),
            (9, At::TRACE, At::TRACE),
        ] {
            let targets = targets(verbosity);
            for (target, most) in
                [("tunnel::route", ours), (ACCESS, ours), ("h2", others), ("tunnelling", ours)]
            {
                for level in [At::ERROR, At::WARN, At::INFO, At::DEBUG, At::TRACE] {
                    assert_eq!(
                        targets.would_enable(target, &level),
                        level <= most,
                        "{verbosity} {target} {level}"
                    );
                }
            }
        }
    }

    #[test]
    fn libraries_that_repeat_our_errors_are_silent_below_verbosity_4() {
        for target in ["kube_client::client::builder", "kube_core::request"] {
            assert!(!targets(0).would_enable(target, &At::ERROR));
            assert!(targets(4).would_enable(target, &At::WARN));
        }
    }

    #[test]
    fn the_log_level_can_be_changed_at_run_time() {
        let (filter, level) = LogLevelHandle::new(0);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(filter), || {
            assert!(!tracing::enabled!(target: "tunnel::x", At::DEBUG));
            level.set(2).unwrap();
            assert!(tracing::enabled!(target: "tunnel::x", At::DEBUG));
        });
        assert!(level.set(4).is_err(), "the subscriber was dropped");
    }
}
