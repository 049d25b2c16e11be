//! What a change of the config does: the plan of a reload, computed before anything changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use tracing::info;

use crate::config::KeySpellings;
use crate::config::access::AccessConfig;
use tunnel_base::logging::AUDIT;

/// What a reload does with a changed config, and what waits for a restart. Tables are named by their keys.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ConfigPlan {
    /// Tables with new rules, by which sessions are judged again.
    pub judges: BTreeSet<String>,
    /// Number of sessions that end, by user, as counted by the running server. Sessions without a user have an empty one.
    pub ends: BTreeMap<String, usize>,
    /// Listeners that close, and tables that end.
    pub closes: BTreeSet<String>,
    /// Listeners that close, and open again with other settings; tables that take effect with other settings.
    pub reopens: BTreeSet<String>,
    /// Listeners that open, tables that take effect, and a first store of invitations.
    pub opens: BTreeSet<String>,
    /// Tables with a change that waits for a restart.
    pub restart: BTreeSet<String>,
}

impl ConfigPlan {
    /// Adds the tables that stay, with other access rules.
    pub(crate) fn judge(&mut self, old: &[(&str, &AccessConfig)], new: &[(&str, &AccessConfig)]) {
        for (key, access) in new {
            let known = old.iter().find(|(known, _)| known == key);
            add(&mut self.judges, known.is_some_and(|(_, known)| known.rights() != access.rights()), key);
        }
    }

    /// Adds a table that takes effect without a restart if it has changed. `absent` is what an absent one is read as.
    pub(crate) fn follow<T: PartialEq>(&mut self, key: &str, old: &T, new: &T, absent: &T) {
        let keys = match (old == absent, new == absent) {
            (true, _) => &mut self.opens,
            (_, true) => &mut self.closes,
            _ => &mut self.reopens,
        };
        add(keys, old != new, key);
    }

    /// Returns the keys of all tables that open, close, or open again.
    pub(crate) fn changes(self) -> BTreeSet<String> {
        [self.opens, self.closes, self.reopens].into_iter().flatten().collect()
    }

    /// Returns the plan with the keys as the config spells them.
    pub(crate) fn spelled(self, spelling: &KeySpellings) -> Self {
        let of = |keys: BTreeSet<String>| keys.iter().map(|key| spelling.of(key)).collect();
        Self {
            judges: of(self.judges),
            ends: self.ends,
            closes: of(self.closes),
            reopens: of(self.reopens),
            opens: of(self.opens),
            restart: of(self.restart),
        }
    }
}

impl fmt::Display for ConfigPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { judges, ends, closes, reopens, opens, restart } = self;
        judges.iter().try_for_each(|key| writeln!(f, "reload: judges sessions of {key} again"))?;
        for (user, number) in ends {
            let sessions = if *number == 1 { "session" } else { "sessions" };
            let of = if user.is_empty() { "without a user".to_owned() } else { format!("of {user}") };
            writeln!(f, "reload: ends {number} {sessions} {of}")?;
        }
        for (what, keys) in [
            ("reload: closes", closes),
            ("reload: closes and opens again", reopens),
            ("reload: opens", opens),
            ("restart: changes", restart),
        ] {
            keys.iter().try_for_each(|key| writeln!(f, "{what} {key}"))?;
        }
        Ok(())
    }
}

/// Adds a key to a part of a plan, if it belongs there.
pub(crate) fn add(keys: &mut BTreeSet<String>, belongs: bool, key: &str) {
    if belongs {
        keys.insert(key.to_owned());
    }
}

/// Writes the audit line of tables whose change has taken effect, if there are any.
pub(crate) fn log_changed(tables: &BTreeSet<String>, message: &'static str) {
    if !tables.is_empty() {
        info!(target: AUDIT, actor = "the config", keys = shown(tables), "{message}");
    }
}

/// Returns that changes of these tables wait for a restart, if there are any.
pub(crate) fn waits(keys: &BTreeSet<String>) -> Result<(), String> {
    if keys.is_empty() { Ok(()) } else { Err(format!("needed to apply changes of {}", shown(keys))) }
}

/// Returns the first keys, and the number of the rest.
pub(crate) fn shown(keys: &BTreeSet<String>) -> String {
    let mut text = keys.iter().take(MAX_SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if let Some(more) = keys.len().checked_sub(MAX_SHOWN).filter(|more| *more > 0) {
        text += &format!(", and {more} more");
    }
    text
}

/// The audit line of rules that are in force.
pub(crate) const RIGHTS_CHANGED: &str = "access rules reloaded";

/// Maximum number of keys in one line.
const MAX_SHOWN: usize = 20;
