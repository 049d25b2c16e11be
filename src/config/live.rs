//! Follows the config file while the program runs: which changed keys take effect at once, and which wait for a restart.

use std::collections::BTreeMap;
use std::path::PathBuf;

use toml::de::{DeTable, DeValue};
use tracing::{error, info, info_span, warn};

use crate::config::{
    ConfigErrors, Diagnostics, Environment, ParsedConfig, Warning, WarningKind, superedge, value,
};
use tunnel_base::drain::Drain;
use tunnel_base::logging::AUDIT;
use tunnel_net::reload::{FileWatcher, Reload};

/// The keys that differ between two texts of a config, as written there; never their values.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConfigDiff {
    /// Access rules.
    pub live: Vec<String>,
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
        let mut changed = Self::default();
        for key in all.filter(differs) {
            let shown =
                new.get(key).or_else(|| old.get(key)).map(|leaf| leaf.shown.clone()).unwrap_or_default();
            if is_live(key) { changed.live.push(shown) } else { changed.at_start.push(shown) }
        }
        changed
    }
}

/// A value, with its key as written.
struct Leaf {
    shown: String,
    value: String,
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
                all.insert(path, Leaf { shown, value: plain(value) });
            }
        }
    }
}

/// Formats a value without its position in the file.
fn plain(value: &DeValue<'_>) -> String {
    match value {
        DeValue::Array(items) => {
            items.iter().fold("[".to_owned(), |text, item| text + &plain(item.get_ref()) + ",") + "]"
        }
        DeValue::Table(table) => {
            let keys: BTreeMap<_, _> = table
                .iter()
                .map(|(key, value)| (key.get_ref().to_string(), plain(value.get_ref())))
                .collect();
            format!("{keys:?}")
        }
        value => format!("{value:?}"),
    }
}

/// Returns true if the key takes effect without a restart: `allow_from`, `names` and `rules` of a listener, allowed targets
/// and nodes, and users who are admins.
fn is_live(key: &[String]) -> bool {
    let key: Vec<&str> = key.iter().map(String::as_str).collect();
    match key.as_slice() {
        ["server", "edge_access", "targets" | "nodes"]
        | ["server", "direct", "targets"]
        | ["server", "clients", "admins"]
        | ["edge", "allow", "targets"]
        | ["edge", "http_proxy", "allow_from" | "rules"] => true,
        // Not the rules of a listener, but names in certificates and of Nodes.
        ["server", "csr" | "node_names", "names"] => false,
        ["server", "tcp", _, last] | ["server", _, last] => matches!(*last, "allow_from" | "names" | "rules"),
        _ => false,
    }
}

// Watches the config file while the program runs. Access rules apply at once; other changed keys are logged as waiting
// for a restart.

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
    settings: T,
    warnings: Vec<Warning>,
}

impl ConfigFile {
    /// Re-reads the file when it changes, until draining starts, and passes the config to `apply`. A file with errors
    /// changes nothing.
    pub fn follow<T: Send + Sync + 'static>(
        self,
        examine: fn(&str, &Environment) -> ParsedConfig<T>,
        files: &FileWatcher,
        drain: &Drain,
        apply: impl Fn(&T) + Send + 'static,
    ) {
        let Self { path, text, environment } = self;
        let (parsed_with, at) = (environment.clone(), path.clone());
        let parse = move |content: &[u8]| {
            let text = String::from_utf8_lossy(content).into_owned();
            let in_one_line = |errors: ConfigErrors| errors.to_string().replace('\n', "; ");
            let (settings, warnings) = examine(&text, &parsed_with)
                .whole()
                .map_err(|errors| format!("{}: {}", at.display(), in_one_line(errors)))?;
            Ok(LoadedConfig { text, settings, warnings })
        };
        let config = match Reload::file(path, parse) {
            Ok(config) => config,
            Err(cause) => return error!(error = %cause, "cannot watch the config file"),
        };
        let (mut changes, mut text) = (config.changes(), text);
        files.watch("config", &config);
        let draining = drain.clone();
        drain.spawn(info_span!("config"), async move {
            loop {
                let read = config.load();
                if read.text != text {
                    tell(&text, &read, &environment);
                    apply(&read.settings);
                    text.clone_from(&read.text);
                }
                tokio::select! {
                    () = draining.draining() => return,
                    changed = changes.changed() => if changed.is_err() { return },
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

fn tell<T>(old: &str, new: &LoadedConfig<T>, environment: &Environment) {
    let ConfigDiff { live, at_start } = ConfigDiff::between(old, &new.text, environment);
    if !live.is_empty() {
        info!(
            target: AUDIT,
            actor = "the config",
            keys = shown(&live),
            "access rules reloaded"
        );
        tell_warnings(&new.warnings);
    }
    if !at_start.is_empty() {
        warn!(keys = shown(&at_start), "config changed; restart to apply");
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
        assert_eq!(removed.at_start, ["server.connect.listen", "server.tcp.\"0.0.0.0:1\".target"]);
    }

    #[test]
    fn spelling_comments_and_order_are_no_config_change() {
        let new = "[server.session]\nmax_sessions = 7 # seven\n[server.tcp]\n\"0.0.0.0:1\" = { target = 'a/b:1' }\n\
                   [server.connect]\nallow_from = [ \"10.0.0.0/8\" ]\nlisten = '[::]:22'\n";
        assert_eq!(between(OLD, new), ConfigDiff::default());
        let (old, new) = ("[mode.cloud.ssh]\nport = 22\n", "[Mode.Cloud.SSH]\nPort = \"22\"\n");
        assert_eq!(between(old, new), ConfigDiff::default());
        assert_eq!(between(old, "[mode.cloud.ssh]\nport = 23\n").at_start, ["mode.cloud.ssh.port"]);
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
    fn a_config_diff_contains_no_values() {
        let (old, new) = ("[edge.uplink]\ntoken = \"sw0rd\"\n", "[edge.uplink]\n");
        assert_eq!(between(old, new).at_start, ["edge.uplink.token"]);
    }
}
