//! Which changed keys of a config take effect while the program runs, and which wait for a restart.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::{Environment, superedge, value};

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
        let old = leaves(old, environment);
        let new = leaves(new, environment);
        let differs = |key: &&Vec<String>| {
            old.get(*key).map(|(_, value)| value) != new.get(*key).map(|(_, value)| value)
        };
        let all = old.keys().chain(new.keys().filter(|key| !old.contains_key(*key)));
        // The proxy of an edge neither opens nor closes with the config, and its rules apply while it is open.
        let is_of_proxy = |key: &Vec<String>| key.starts_with(&EDGE_PROXY.map(str::to_owned));
        let keeps_proxy = old.keys().any(is_of_proxy) == new.keys().any(is_of_proxy);
        let mut changed = Self::default();
        for key in all.filter(differs) {
            let shown =
                new.get(key).or_else(|| old.get(key)).map(|(shown, _)| shown.clone()).unwrap_or_default();
            match effect(key) {
                _ if is_of_proxy(key) && !keeps_proxy => changed.at_start.push(shown),
                EffectTime::Live => changed.live.push(shown),
                EffectTime::Listener => changed.listeners.push(shown),
                EffectTime::AtStart => changed.at_start.push(shown),
            }
        }
        changed
    }
}

/// When a changed key takes effect.
enum EffectTime {
    /// At once, also for open listeners and sessions.
    Live,
    /// At once: its listener opens, closes, or both.
    Listener,
    /// At the next start.
    AtStart,
}

/// Returns every value that is not a table, by its key. Each also has its key as written.
fn leaves(text: &str, environment: &Environment) -> BTreeMap<Vec<String>, (String, toml::Value)> {
    let mut all = BTreeMap::new();
    let mut report = ConfigDiagnostics::default();
    let (table, _) = DeTable::parse_recoverable(text);
    let table = superedge::translate(table.into_inner(), environment, &mut report);
    gather(&table, &[], &report, &mut all);
    all
}

fn gather(
    table: &DeTable<'_>,
    path: &[String],
    report: &ConfigDiagnostics,
    all: &mut BTreeMap<Vec<String>, (String, toml::Value)>,
) {
    for (name, value) in table {
        let path: Vec<_> = path.iter().cloned().chain([name.get_ref().to_string()]).collect();
        match value.get_ref() {
            DeValue::Table(table) => gather(table, &path, report, all),
            value => {
                let shown = report.spelling.of(&value::path(&path));
                all.insert(path, (shown, value::plain(value)));
            }
        }
    }
}

/// Returns when a key takes effect. At once do: keys of listeners, allowed targets and nodes, and users who are admins.
fn effect(key: &[String]) -> EffectTime {
    let key: Vec<&str> = key.iter().map(String::as_str).collect();
    match key.as_slice() {
        ["server", "edge_access", "targets" | "nodes"]
        | ["server", "direct", "targets"]
        | ["server", "clients", "admins"]
        | ["edge", "allow", "targets"]
        | ["edge", "http_proxy", "allow_from" | "rules"] => EffectTime::Live,
        // Not the rules of a listener, but names in certificates and of Nodes.
        ["server", "csr" | "node_names", "names"] => EffectTime::AtStart,
        ["server", "tcp", _, last] | ["server", _, last] if LIVE_ACCESS_KEYS.contains(last) => {
            EffectTime::Live
        }
        ["server", table, _, ..] if LIVE_LISTENERS.contains(table) => EffectTime::Listener,
        _ => EffectTime::AtStart,
    }
}

/// The table of an edge's proxy.
const EDGE_PROXY: [&str; 2] = ["edge", "http_proxy"];

/// The keys of a listener's table that change while it is open.
pub(crate) const LIVE_ACCESS_KEYS: [&str; 3] = ["allow_from", "names", "rules"];

/// The tables of listeners that open and close with the config. Not `intercept`: its table of nftables and its mark are
/// the process's.
pub(crate) const LIVE_LISTENERS: [&str; 6] = ["connect", "egress", "http", "http_proxy", "https", "tcp"];

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
