//! A limit of the warnings of libraries, which strangers can cause.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::time::{Duration, Instant};
use tracing::{Event, Level, Subscriber, warn};
use tracing_log::NormalizeEvent as _;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Drops warnings and errors of a library's module beyond [`MAX_LINES`] a minute.
///
/// This program limits its own lines where it logs them. Lines of libraries below a warning are only logged on request.
#[derive(Debug, Default)]
pub(crate) struct LibraryLogLimit(Mutex<HashMap<String, ModuleLineCount>>);

/// The lines of one module within a minute.
#[derive(Debug)]
struct ModuleLineCount {
    began: Instant,
    lines: u32,
}

impl<S: Subscriber> Layer<S> for LibraryLogLimit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        // Events of the crate `log` have their module in a field.
        let of_log = event.normalized_metadata();
        let metadata = of_log.as_ref().unwrap_or_else(|| event.metadata());
        let module = metadata.target();
        if *metadata.level() > Level::WARN || module.starts_with("tunnel") {
            return true;
        }
        let lines = self.count(module, Instant::now());
        if lines == MAX_LINES + 1 {
            warn!(module, max_per_minute = MAX_LINES, "further warnings of a library suppressed");
        }
        lines <= MAX_LINES
    }
}

impl LibraryLogLimit {
    /// Counts a line. Returns the number of the module's lines in this minute.
    fn count(&self, module: &str, now: Instant) -> u32 {
        let mut modules = self.0.lock();
        modules.retain(|_, minute| now.saturating_duration_since(minute.began) < MINUTE);
        let module = if modules.len() < MAX_MODULES || modules.contains_key(module) { module } else { "" };
        let minute = modules.entry(module.to_owned()).or_insert(ModuleLineCount { began: now, lines: 0 });
        minute.lines = minute.lines.saturating_add(1);
        minute.lines
    }
}

/// Maximum number of lines of a module in a minute.
const MAX_LINES: u32 = 10;
const MINUTE: Duration = Duration::from_secs(60);
/// Maximum number of modules that are counted separately.
const MAX_MODULES: usize = 64;

#[cfg(test)]
mod tests {
    use crate::logging::tests::lines_of;

    use super::*;

    #[test]
    fn library_warnings_are_limited_and_ours_are_not() {
        let lines = lines_of(false, || {
            for _ in 0..400 {
                tracing::warn!(target: "rustls::msgs::handshake", "illegal");
                tracing::error!(target: "rustls::msgs::handshake", "illegal");
                tracing::warn!(target: "h2::proto", "other");
                warn!("ours");
            }
        });
        let count = |text: &str| lines.matches(text).count();
        assert_eq!([count("illegal"), count("other"), count("ours")], [10, 10, 400]);
    }

    #[test]
    fn the_count_restarts_each_minute_and_the_number_of_modules_is_bounded() {
        let (limit, now) = (LibraryLogLimit::default(), Instant::now());
        assert_eq!([0, 0, 59, 60].map(|at| limit.count("a", now + Duration::from_secs(at))), [1, 2, 3, 1]);
        for module in 0..1000 {
            limit.count(&module.to_string(), now + Duration::from_secs(61));
        }
        assert!(limit.0.lock().len() <= MAX_MODULES + 1);
    }
}
