//! Watches the config file while the program runs. Access rules and listeners follow it at once; other changed keys
//! are logged as waiting for a restart.

use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tracing::{error, info, info_span, warn};

use crate::config::live::ConfigDiff;
use crate::config::{
    ConfigError, ConfigErrors, Environment, KeySpellings, ParsedConfig, Warning, WarningKind,
};
use tunnel_base::drain::Drain;
use tunnel_base::logging::AUDIT;
use tunnel_net::reload::{FileWatcher, ReloadedValue, requests};

/// The config that the program was started with.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The text at the start.
    pub text: String,
    /// The environment that was read with it.
    pub environment: Environment,
}

/// One version of the config file that parsed without errors; the next version is compared with its text.
#[derive(Debug)]
struct LoadedConfig<T> {
    text: String,
    settings: Arc<T>,
    warnings: Vec<Warning>,
    spelling: KeySpellings,
}

impl ConfigFile {
    /// Re-reads the file when it changes, until draining starts, and passes the config to `apply`. A file with errors
    /// changes nothing. If a config cannot be applied, the previous one stays in force; the new one is tried again when
    /// the file changes, or a reload is requested.
    pub fn follow<T: Send + Sync + 'static>(
        self,
        examine: fn(&str, &Environment) -> ParsedConfig<T>,
        files: &FileWatcher,
        drain: &Drain,
        apply: impl Fn(Arc<T>) -> BoxFuture<'static, Result<(), Vec<ConfigError>>> + Send + 'static,
    ) {
        let Self { path, text: started, environment } = self;
        let parsed_with = environment.clone();
        let at = path.clone();
        let parse = move |content: &[u8]| {
            let text = String::from_utf8_lossy(content).into_owned();
            let in_one_line = |errors: ConfigErrors| errors.to_string().replace('\n', "; ");
            let parsed = examine(&text, &parsed_with);
            let spelling = parsed.spelling.clone();
            let (settings, warnings) =
                parsed.whole().map_err(|errors| format!("{}: {}", at.display(), in_one_line(errors)))?;
            Ok(LoadedConfig { text, settings: Arc::new(settings), warnings, spelling })
        };
        let config = match ReloadedValue::file(path, parse) {
            Ok(config) => config,
            Err(cause) => return error!(error = %cause, "cannot watch the config file"),
        };
        files.watch("config", &config);
        let draining = drain.clone();
        drain.spawn(info_span!("config"), async move {
            let mut changes = config.changes();
            let mut requests = requests();
            // The text in force, and the text that was tried last, unless that must be tried again.
            let mut applied = started.clone();
            let mut tried = Some(started.clone());
            loop {
                let read = config.load();
                if tried.as_ref() != Some(&read.text) {
                    match apply(read.settings.clone()).await {
                        Ok(()) => {
                            tell(&started, &applied, &read, &environment);
                            applied.clone_from(&read.text);
                        }
                        Err(errors) => tell_rejected(errors, &read.spelling),
                    }
                    tried = Some(read.text.clone());
                }
                tokio::select! {
                    () = draining.draining() => return,
                    changed = changes.changed() => if changed.is_err() { return },
                    _ = requests.changed(), if tried.as_ref() != Some(&applied) => tried = None,
                }
            }
        });
    }
}

/// Logs the warnings of a config.
pub fn tell_warnings(warnings: &[Warning]) {
    for Warning { key, kind, text } in warnings {
        match kind {
            WarningKind::Insecure => warn!(%key, risk = %text, "insecure configuration"),
            WarningKind::Unsupported | WarningKind::Unexpected => warn!(%key, reason = %text, "config issue"),
        }
    }
}

/// Logs what a config has changed, and which keys differ from those at the start.
fn tell<T>(started: &str, old: &str, new: &LoadedConfig<T>, environment: &Environment) {
    let ConfigDiff { live, listeners, at_start } = ConfigDiff::between(old, &new.text, environment);
    for (keys, message) in [(&live, "access rules reloaded"), (&listeners, "listeners reloaded")] {
        if !keys.is_empty() {
            info!(target: AUDIT, actor = "the config", keys = shown(keys), "{message}");
        }
    }
    if !(live.is_empty() && listeners.is_empty()) {
        tell_warnings(&new.warnings);
    }
    let waiting = ConfigDiff::between(started, &new.text, environment).at_start;
    if !at_start.is_empty() && !waiting.is_empty() {
        warn!(keys = shown(&waiting), "config changed; restart to apply");
    }
}

/// Logs why a config cannot be applied.
fn tell_rejected(errors: Vec<ConfigError>, spelling: &KeySpellings) {
    for ConfigError { key, text, .. } in errors {
        let hint = "the previous config stays in force; correct this, then reload";
        error!(key = %spelling.of(&key), error = %text, hint, "config change rejected");
    }
}

/// Returns the first keys, and the number of the rest.
pub(super) fn shown(keys: &[String]) -> String {
    let mut text = keys.iter().take(MAX_SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if let Some(more) = keys.len().checked_sub(MAX_SHOWN).filter(|more| *more > 0) {
        text += &format!(", and {more} more");
    }
    text
}

/// Maximum number of keys in one line.
const MAX_SHOWN: usize = 20;
