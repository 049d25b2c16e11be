//! Follows the config file while the program runs: which changed keys take effect at once, and which wait for a restart.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use toml::de::{DeTable, DeValue};
use tracing::{error, info, info_span, warn};

use crate::config::{
    ConfigError, ConfigErrors, Diagnostics, Environment, ParsedConfig, Spelling, Warning, WarningKind,
    superedge, value,
};
use tunnel_base::drain::Drain;
use tunnel_base::logging::AUDIT;
use tunnel_net::reload::{FileWatcher, Reload, requests};

/// The keys that differ between two texts of a config, as written there; never their values.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConfigDiff {
    /// Access rules.
    pub live: Vec<String>,
    /// Other keys of listeners that open and close with the config.
    pub listeners: Vec<String>,
    /// All other keys: they take effect at the next start.
    pub at_start: Vec<String>,
}

impl ConfigDiff {
    /// Compares two texts, both free of errors.
    pub fn between(old: &str, new: &str, environment: &Environment) -> Self {
        let (old, new) = (leaves(old, environment), leaves(new, environment));
        let differs = |key: &&Vec<String>| {
            old.get(*key).map(|leaf| &leaf.value) != new.get(*key).map(|leaf| &leaf.value)
        };
        let all = old.keys().chain(new.keys().filter(|key| !old.contains_key(*key)));
        // The proxy of an edge neither opens nor closes with the config, and its rules apply while it is open.
        let is_of_proxy = |key: &Vec<String>| key.starts_with(&EDGE_PROXY.map(str::to_owned));
        let keeps_proxy = old.keys().any(is_of_proxy) == new.keys().any(is_of_proxy);
        let mut changed = Self::default();
        for key in all.filter(differs) {
            let shown =
                new.get(key).or_else(|| old.get(key)).map(|leaf| leaf.shown.clone()).unwrap_or_default();
            match effect(key) {
                _ if is_of_proxy(key) && !keeps_proxy => changed.at_start.push(shown),
                Effect::Live => changed.live.push(shown),
                Effect::Listener => changed.listeners.push(shown),
                Effect::AtStart => changed.at_start.push(shown),
            }
        }
        changed
    }
}

/// When a changed key takes effect.
enum Effect {
    /// At once, also for open listeners and sessions.
    Live,
    /// At once: its listener opens, closes, or both.
    Listener,
    /// At the next start.
    AtStart,
}

/// A value, with its key as written.
struct Leaf {
    shown: String,
    value: toml::Value,
}

/// Returns every value that is not a table, by its key.
fn leaves(text: &str, environment: &Environment) -> BTreeMap<Vec<String>, Leaf> {
    let (mut all, mut report) = (BTreeMap::new(), Diagnostics::default());
    let (table, _) = DeTable::parse_recoverable(text);
    let table = superedge::translate(table.into_inner(), environment, &mut report);
    gather(&table, &[], &report, &mut all);
    all
}

fn gather(table: &DeTable<'_>, path: &[String], report: &Diagnostics, all: &mut BTreeMap<Vec<String>, Leaf>) {
    for (name, value) in table {
        let path: Vec<_> = path.iter().cloned().chain([name.get_ref().to_string()]).collect();
        match value.get_ref() {
            DeValue::Table(table) => gather(table, &path, report, all),
            value => {
                let shown = report.spelling.of(&value::path(&path));
                all.insert(path, Leaf { shown, value: value::plain(value) });
            }
        }
    }
}

/// Returns when a key takes effect. At once do: keys of listeners, allowed targets and nodes, and users who are admins.
fn effect(key: &[String]) -> Effect {
    let key: Vec<&str> = key.iter().map(String::as_str).collect();
    match key.as_slice() {
        ["server", "edge_access", "targets" | "nodes"]
        | ["server", "direct", "targets"]
        | ["server", "clients", "admins"]
        | ["edge", "allow", "targets"]
        | ["edge", "http_proxy", "allow_from" | "rules"] => Effect::Live,
        // Not the rules of a listener, but names in certificates and of Nodes.
        ["server", "csr" | "node_names", "names"] => Effect::AtStart,
        ["server", "tcp", _, last] | ["server", _, last] if LIVE_ACCESS_KEYS.contains(last) => Effect::Live,
        ["server", table, _, ..] if LIVE_LISTENERS.contains(table) => Effect::Listener,
        _ => Effect::AtStart,
    }
}

/// The table of an edge's proxy.
const EDGE_PROXY: [&str; 2] = ["edge", "http_proxy"];

/// The keys of a listener's table that change while it is open.
pub(crate) const LIVE_ACCESS_KEYS: [&str; 3] = ["allow_from", "names", "rules"];

/// The tables of listeners that open and close with the config.
pub(crate) const LIVE_LISTENERS: [&str; 7] =
    ["connect", "egress", "http", "http_proxy", "https", "socks5", "tcp"];

// Watches the config file while the program runs. Access rules and listeners follow it at once; other changed keys are
// logged as waiting for a restart.

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
    spelling: Spelling,
}

/// Applies a config. If that fails, the previous config is still in force.
pub type Applying = BoxFuture<'static, Result<(), Vec<ConfigError>>>;

impl ConfigFile {
    /// Re-reads the file when it changes, until draining starts, and passes the config to `apply`. A file with errors
    /// changes nothing. A config that cannot be applied is tried again when the file changes, or a reload is requested.
    pub fn follow<T: Send + Sync + 'static>(
        self,
        examine: fn(&str, &Environment) -> ParsedConfig<T>,
        files: &FileWatcher,
        drain: &Drain,
        apply: impl Fn(Arc<T>) -> Applying + Send + 'static,
    ) {
        let Self { path, text: started, environment } = self;
        let (parsed_with, at) = (environment.clone(), path.clone());
        let parse = move |content: &[u8]| {
            let text = String::from_utf8_lossy(content).into_owned();
            let in_one_line = |errors: ConfigErrors| errors.to_string().replace('\n', "; ");
            let parsed = examine(&text, &parsed_with);
            let spelling = parsed.spelling.clone();
            let (settings, warnings) =
                parsed.whole().map_err(|errors| format!("{}: {}", at.display(), in_one_line(errors)))?;
            Ok(LoadedConfig { text, settings: Arc::new(settings), warnings, spelling })
        };
        let config = match Reload::file(path, parse) {
            Ok(config) => config,
            Err(cause) => return error!(error = %cause, "cannot watch the config file"),
        };
        files.watch("config", &config);
        let draining = drain.clone();
        drain.spawn(info_span!("config"), async move {
            let (mut changes, mut requests) = (config.changes(), requests());
            // The text in force, and the text that was tried last, unless that must be tried again.
            let (mut applied, mut tried) = (started.clone(), Some(started.clone()));
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
fn tell_rejected(errors: Vec<ConfigError>, spelling: &Spelling) {
    for ConfigError { key, text, .. } in errors {
        let hint = "the previous config stays in force; correct this, then reload";
        error!(key = %spelling.of(&key), error = %text, hint, "config change rejected");
    }
}

/// Returns the first keys, and the number of the rest.
fn shown(keys: &[String]) -> String {
    let mut text = keys.iter().take(MAX_SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if let Some(more) = keys.len().checked_sub(MAX_SHOWN).filter(|more| *more > 0) {
        text += &format!(", and {more} more");
    }
    text
}

/// Maximum number of keys in one line.
const MAX_SHOWN: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "[server.connect]\nlisten = \"[::]:22\"\nallow_from = [\"10.0.0.0/8\"]\n[server.tcp.\"0.0.0.0:1\"]\n\
                       target = \"a/b:1\"\n[server.session]\nmax_sessions = 7\n";

    fn between(old: &str, new: &str) -> ConfigDiff {
        ConfigDiff::between(old, new, &Environment::default())
    }

    #[test]
    fn changed_live_keys_are_distinguished_from_keys_that_need_a_restart() {
        let new = OLD
            .replace("10.0.0.0/8", "10.0.0.0/9")
            .replace("max_sessions = 7", "max_sessions = 8\nresume_timeout = \"1s\"");
        let new = new.replace("target = \"a/b:1\"", "target = \"a/b:1\"\nrules = [{ ports = [1] }]");
        let changed = between(OLD, &new);
        assert_eq!(changed.live, ["server.connect.allow_from", "server.tcp.\"0.0.0.0:1\".rules"]);
        assert_eq!(changed.at_start, ["server.session.max_sessions", "server.session.resume_timeout"]);
        let removed = between(OLD, "[server.session]\nmax_sessions = 7\n");
        assert_eq!(removed.live, ["server.connect.allow_from"]);
        assert_eq!(removed.listeners, ["server.connect.listen", "server.tcp.\"0.0.0.0:1\".target"]);
        let intercepts = format!("{OLD}[server.intercept]\nnetworks = [\"10.0.0.0/8\"]\n");
        assert_eq!(between(OLD, &intercepts).at_start, ["server.intercept.networks"]);
    }

    #[test]
    fn spelling_comments_and_order_are_no_config_change() {
        let new = "[server.session]\nmax_sessions = 7 # seven\n[server.tcp]\n\"0.0.0.0:1\" = { target = 'a/b:1' }\n\
                   [server.connect]\nallow_from = [ \"10.0.0.0/8\" ]\nlisten = '[::]:22'\n";
        assert_eq!(between(OLD, new), ConfigDiff::default());
        let (old, new) = ("[mode.cloud.ssh]\nport = 22\n", "[Mode.Cloud.SSH]\nPort = \"22\"\n");
        assert_eq!(between(old, new), ConfigDiff::default());
        assert_eq!(between(old, "[mode.cloud.ssh]\nport = 23\n").listeners, ["mode.cloud.ssh.port"]);
    }

    /// Tables that are no listeners have keys of the same names.
    #[test]
    fn only_access_keys_of_listeners_are_live() {
        for key in ["server.csr.names", "server.node_names.names"] {
            let text = |name: &str| format!("{key} = [\"{name}\"]\n");
            assert_eq!(between(&text("a"), &text("b")).at_start, [key]);
        }
    }

    #[test]
    fn an_edges_proxy_opens_and_closes_with_its_program() {
        let text =
            |port, from| format!("[edge.http_proxy]\nlisten = \"[::1]:{port}\"\nallow_from = [\"{from}\"]\n");
        let changed = between(&text(1, "::1"), &text(2, "::2"));
        assert_eq!(changed.live, ["edge.http_proxy.allow_from"]);
        assert_eq!(changed.at_start, ["edge.http_proxy.listen"]);
        for (old, new) in [("", &text(1, "::1")[..]), (&text(1, "::1"), "")] {
            let changed = between(old, new);
            assert_eq!(changed.at_start, ["edge.http_proxy.allow_from", "edge.http_proxy.listen"]);
            assert_eq!(changed.live, [""; 0]);
        }
    }

    #[test]
    fn a_config_diff_contains_no_values() {
        let (old, new) = ("[edge.uplink]\ntoken = \"sw0rd\"\n", "[edge.uplink]\n");
        assert_eq!(between(old, new).at_start, ["edge.uplink.token"]);
    }
}
