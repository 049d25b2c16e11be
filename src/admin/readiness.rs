//! Whether this process is ready, and why not.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;

/// What this process waits for before it is ready, and whether it has it. Cheap to clone; clones share the truth.
#[derive(Debug, Clone)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, State>>>);

/// How one condition stands.
#[derive(Debug)]
enum State {
    Met,
    /// Nobody should be sent here.
    Unmet(String),
    /// Something does not work, but nobody is served better elsewhere. Forgotten at that time, if one is given.
    Troubled(String, Option<Instant>),
}

impl State {
    fn trouble(&self) -> Option<&String> {
        match self {
            Self::Met => None,
            Self::Troubled(_, Some(until)) if *until <= Instant::now() => None,
            Self::Unmet(why) | Self::Troubled(why, _) => Some(why),
        }
    }
}

impl Readiness {
    /// Not ready until each of these conditions has been set to `Ok`.
    pub fn waiting_for(conditions: &[&'static str]) -> Self {
        let all = conditions.iter().map(|name| (*name, State::Unmet("not yet".to_owned()))).collect();
        Self(Arc::new(Mutex::new(all)))
    }

    /// Sets the state of a condition; `/readyz` shows why it is not met.
    pub fn set(&self, condition: &'static str, state: Result<(), String>) {
        self.insert(condition, state.map_or_else(State::Unmet, |()| State::Met));
    }

    /// Sets the state of something that this process can serve without: `/readyz` shows it, but it does not make the
    /// process unready.
    pub fn note(&self, what: &'static str, state: Result<(), String>) {
        self.insert(what, state.map_or_else(|why| State::Troubled(why, None), |()| State::Met));
    }

    /// As [`Self::note`], for something that is over unless it is noted again before `until`.
    pub fn note_until(&self, what: &'static str, why: String, until: Instant) {
        self.insert(what, State::Troubled(why, Some(until)));
    }

    /// Whether all is met. One line for each trouble.
    ///
    /// # Errors
    ///
    /// One line for each condition that is not met, and for each trouble.
    pub fn check(&self) -> Result<String, String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = all.iter().filter_map(|(name, state)| Some(format!("{name}: {}\n", state.trouble()?)));
        let lines: String = lines.collect();
        if all.values().any(|state| matches!(state, State::Unmet(_))) { Err(lines) } else { Ok(lines) }
    }

    /// What troubles a condition, if anything does now.
    pub fn trouble(&self, condition: &str) -> Option<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(condition).and_then(State::trouble).cloned()
    }

    fn insert(&self, condition: &'static str, state: State) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(condition, state);
    }
}
