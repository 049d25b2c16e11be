//! What a change of the config does: the plan of a reload, computed before anything changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use tracing::info;

use crate::config::KeySpellings;
use crate::config::access::AccessConfig;
use tunnel_base::logging::AUDIT;

/// What a reload does with a changed config, in the order in which it does it, and what waits for a restart.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ConfigPlan(pub Vec<ConfigChange>);

/// A part of what a changed config does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigChange {
    /// What happens. A reload `ends` sessions of a user, and `judges` sessions and new requests of a table by its new
    /// rules. It `closes`, `opens` or `reopens` a listener. A change of the table waits for a `restart`.
    pub change: ChangeKind,
    /// The key of the table. For `ends` the user, empty for sessions without a user.
    pub key: String,
    /// For `ends`: the number of sessions of that user, as counted by the running program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<usize>,
}

/// What a changed config does with a table, or with sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// Sessions end.
    Ends,
    /// Sessions and new requests are judged by other rules.
    Judges,
    /// A listener closes.
    Closes,
    /// A listener opens.
    Opens,
    /// A listener closes, and opens again with other settings.
    Reopens,
    /// The change waits for a restart.
    Restart,
}

impl ConfigPlan {
    /// Adds what happens to a table, if it happens.
    pub(crate) fn add(&mut self, happens: bool, change: ChangeKind, key: &str) {
        if happens && !self.keys(change).contains(key) {
            self.0.push(ConfigChange { change, key: key.to_owned(), sessions: None });
        }
    }

    /// Adds the tables that stay, with other access rules.
    pub(crate) fn judge(&mut self, old: &[(&str, &AccessConfig)], new: &[(&str, &AccessConfig)]) {
        for (key, access) in new {
            let known = old.iter().find(|(known, _)| known == key);
            let differs = known.is_some_and(|(_, known)| known.rights() != access.rights());
            self.add(differs, ChangeKind::Judges, key);
        }
    }

    /// Adds how many sessions end, by user.
    pub(crate) fn end(&mut self, sessions: BTreeMap<Option<Box<str>>, usize>) {
        self.0.extend(sessions.into_iter().map(|(user, sessions)| ConfigChange {
            change: ChangeKind::Ends,
            key: user.unwrap_or_default().into(),
            sessions: Some(sessions),
        }));
    }

    /// Returns the plan as JSON.
    pub(crate) fn json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Returns the keys of the tables with these changes, each once.
    pub(crate) fn keys(&self, change: ChangeKind) -> BTreeSet<&str> {
        self.0.iter().filter(|one| one.change == change).map(|one| one.key.as_str()).collect()
    }

    /// Returns the plan with the keys as the config spells them.
    pub(crate) fn spelled(&self, spelling: &KeySpellings) -> Self {
        let spelled = |one: &ConfigChange| ConfigChange { key: spelling.of(&one.key), ..one.clone() };
        Self(self.0.iter().map(spelled).collect())
    }

    /// Writes the audit line of rules that are in force now, if the plan changes any.
    pub(crate) fn log_judged(&self) {
        log_changed(&self.keys(ChangeKind::Judges), "access rules reloaded");
    }
}

impl fmt::Display for ConfigChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, key, sessions } = self;
        match change {
            ChangeKind::Ends => {
                let number = sessions.unwrap_or_default();
                let sessions = if number == 1 { "session" } else { "sessions" };
                let of = if key.is_empty() { "without a user".to_owned() } else { format!("of {key}") };
                write!(f, "reload: ends {number} {sessions} {of}")
            }
            ChangeKind::Judges => write!(f, "reload: judges sessions of {key} again"),
            ChangeKind::Closes => write!(f, "reload: closes {key}"),
            ChangeKind::Opens => write!(f, "reload: opens {key}"),
            ChangeKind::Reopens => write!(f, "reload: closes and opens again {key}"),
            ChangeKind::Restart => write!(f, "restart: changes {key}"),
        }
    }
}

/// Writes the audit line of tables whose change has taken effect, if there are any.
pub(crate) fn log_changed(tables: &BTreeSet<&str>, message: &'static str) {
    if !tables.is_empty() {
        info!(target: AUDIT, actor = "the config", keys = shown(tables), "{message}");
    }
}

/// Returns the first keys, and the number of the rest.
pub(crate) fn shown(keys: &BTreeSet<&str>) -> String {
    let mut text = keys.iter().take(MAX_SHOWN).copied().collect::<Vec<_>>().join(", ");
    if let Some(more) = keys.len().checked_sub(MAX_SHOWN).filter(|more| *more > 0) {
        text += &format!(", and {more} more");
    }
    text
}

/// Maximum number of keys in one line.
const MAX_SHOWN: usize = 20;
