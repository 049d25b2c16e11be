//! Watches the config file while the program runs. What a change does is planned, then done; what waits for a restart is
//! logged.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use futures_util::future::BoxFuture;
use tracing::{error, info_span, warn};

use crate::config::plan::{ConfigPlan, shown};
use crate::config::{
    ConfigError, ConfigErrors, Environment, KeySpellings, ParsedConfig, Warning, WarningKind,
};
use tunnel_base::drain::Drain;
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
    /// The path of the last good copy of the file, if one is kept.
    pub copy: Option<PathBuf>,
}

/// One version of the config file that parsed without errors.
#[derive(Debug)]
struct LoadedConfig<T> {
    settings: Arc<T>,
    warnings: Vec<Warning>,
    spelling: KeySpellings,
    text: String,
}

/// How a role's config is read, and what a change of it does.
pub(crate) type ConfigReader<T> = (fn(&str, &Environment) -> ParsedConfig<T>, fn(&T, &T) -> ConfigPlan);

impl ConfigFile {
    /// Re-reads the file when it changes, until draining starts, and passes the config to `apply`, with the plan. A file
    /// with errors changes nothing. If `apply` fails, it has applied what it could; it is called again when the file
    /// changes, or a reload is requested. `applied` gets the text of each version of the file that was applied without
    /// an error, and each time the tables that wait for a restart, also by earlier changes.
    ///
    /// Returns a function from another text to its config, with the plan for it. Its error is that of the text.
    pub fn follow<T, A, F>(
        self,
        (examine, plan): ConfigReader<T>,
        files: &FileWatcher,
        drain: &Drain,
        apply: A,
        applied: F,
    ) -> impl Fn(&str) -> Result<(Arc<T>, ConfigPlan), String> + Send + Sync + use<T, A, F>
    where
        T: Send + Sync + 'static,
        A: Fn(Arc<T>, ConfigPlan) -> BoxFuture<'static, Result<(), ConfigErrors>> + Send + 'static,
        F: Fn(Option<&str>, &BTreeSet<String>) + Send + 'static,
    {
        let Self { path, text, environment, copy: _ } = self;
        // From the text of the start: if the file differs, that is the first change to plan. A start from the last good
        // copy has another text, even if the file is corrected to that text later.
        let ParsedConfig { settings, warnings, spelling, .. } = examine(&text, &environment);
        let is_in_file = tunnel_base::files::read_text(&path).is_ok_and(|now| now == text);
        let seen = is_in_file.then(|| text.clone().into_bytes());
        let started = Arc::new(settings);
        let first = LoadedConfig { settings: started.clone(), warnings, spelling, text };
        let running = Arc::new(ArcSwap::from(started.clone()));
        let read = Arc::new(move |text: &str| {
            let parsed = examine(text, &environment);
            let spelling = parsed.spelling.clone();
            let (settings, warnings) = parsed.whole()?;
            let text = text.to_owned();
            Ok::<_, ConfigErrors>(LoadedConfig { settings: Arc::new(settings), warnings, spelling, text })
        });
        let watched = read.clone();
        let at = path.clone();
        let config = ReloadedValue::known(first, vec![path], seen.as_slice(), move |contents| {
            let config = watched(&String::from_utf8_lossy(contents.first().map_or(&[], Vec::as_slice)));
            config.map_err(|errors| format!("{}: {}", at.display(), errors.to_string().replace('\n', "; ")))
        });
        files.watch("config", &config);
        let following = follow(config, plan, started.clone(), running.clone(), apply, is_in_file, applied);
        let draining = drain.clone();
        drain.spawn(info_span!("config"), async move {
            draining.run_until(following).await;
        });
        move |text: &str| {
            let config = read(text).map_err(|errors| errors.to_string())?;
            let mut planned = plan(&running.load(), &config.settings);
            // An earlier change may still wait.
            planned.restart.extend(plan(&started, &config.settings).restart);
            Ok((config.settings, planned.spelled(&config.spelling)))
        }
    }
}

/// Applies each version of a config. Not cancel safe, like `apply`.
async fn follow<T: Send + Sync + 'static>(
    config: ReloadedValue<LoadedConfig<T>>,
    plan: fn(&T, &T) -> ConfigPlan,
    started: Arc<T>,
    running: Arc<ArcSwap<T>>,
    apply: impl Fn(Arc<T>, ConfigPlan) -> BoxFuture<'static, Result<(), ConfigErrors>> + Send,
    mut is_in_file: bool,
    report: impl Fn(Option<&str>, &BTreeSet<String>) + Send,
) {
    let mut changes = config.changes();
    let mut requests = requests();
    let mut failed = false;
    let mut opened = BTreeSet::new();
    let mut waiting = BTreeSet::new();
    loop {
        let LoadedConfig { settings, warnings, spelling, text } = &*config.load();
        let planned = plan(&running.load(), settings).spelled(spelling);
        // After a failure an equal config is applied again, because a port may be free by now.
        if failed || planned != ConfigPlan::default() {
            let changed = planned.restart.clone();
            opened.extend(planned.opens.iter().cloned());
            let applied = apply(settings.clone(), planned).await;
            // After a failure too: what could be applied is in force, and the next plan starts there.
            running.store(settings.clone());
            failed = applied.is_err();
            tell_warnings(warnings);
            tell_failures(applied, spelling);
            // All of them: an earlier change may still wait. What a reload has opened is not as at the start.
            waiting = plan(&started, settings).spelled(spelling).restart;
            waiting.extend(changed.iter().filter(|key| opened.contains(*key)).cloned());
            if !changed.is_empty() && !waiting.is_empty() {
                warn!(keys = shown(&waiting), "config changed; restart to apply");
            }
        }
        // Also if a key waits for a restart: what is kept must not bring back rights that this config has taken away.
        report((is_in_file && !failed).then_some(text), &waiting);
        is_in_file = true;
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            _ = requests.changed(), if failed => {}
        }
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

/// Logs why a part of a config cannot be applied.
fn tell_failures(applied: Result<(), ConfigErrors>, spelling: &KeySpellings) {
    for ConfigError { key, text, .. } in applied.err().iter().flat_map(ConfigErrors::iter) {
        let hint = "all other changes are in force; correct this, then reload";
        error!(key = %spelling.of(key), error = %text, hint, "config change applied in part");
    }
}
