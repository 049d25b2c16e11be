//! Readiness of this process.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// The conditions of this process's readiness. Cheap to clone; clones share their state.
#[derive(Debug, Clone)]
pub struct Readiness {
    all: Arc<Mutex<BTreeMap<&'static str, ReadinessState>>>,
    /// The names of the conditions that were set here, if they may be forgotten.
    of_part: Option<Arc<Mutex<BTreeSet<&'static str>>>>,
}

/// Condition: records are published for DNS.
pub(crate) const DNS_CONDITION: &str = "dns";
/// Condition: the listeners of the changed config are open, and its files read.
pub(crate) const LISTENERS_CONDITION: &str = "listeners";
/// Condition: no change of the config waits for a restart. Set once the config is followed.
pub(crate) const RESTART_CONDITION: &str = "restart";
/// Condition: the process is not stopping. It is set only when it stops.
pub(crate) const DRAINING_CONDITION: &str = "draining";

/// One condition of a process's readiness, as JSON in its status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadinessCondition {
    /// Name of the condition, as in `/readyz`.
    pub name: String,
    /// `ready`, `not_ready`, or `degraded`: something does not work, but the process stays ready.
    pub status: String,
    /// The problem, unless it is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The state of one condition of a process's readiness.
#[derive(Debug)]
enum ReadinessState {
    Ready,
    /// No client should be routed here.
    NotReady(String),
    /// Something does not work, but clients would not be served better elsewhere. If a time is given, the state expires
    /// then.
    Degraded(String, Option<Instant>),
}

impl ReadinessState {
    fn trouble(&self) -> Option<&String> {
        match self {
            Self::Ready => None,
            Self::Degraded(_, Some(until)) if *until <= Instant::now() => None,
            Self::NotReady(why) | Self::Degraded(why, _) => Some(why),
        }
    }
}

impl Readiness {
    /// Creates conditions that are not ready until each is set to `Ok`.
    pub fn waiting_for(conditions: &[&'static str]) -> Self {
        let all =
            conditions.iter().map(|name| (*name, ReadinessState::NotReady("not yet".to_owned()))).collect();
        Self { all: Arc::new(Mutex::new(all)), of_part: None }
    }

    /// Returns a handle for a part of the process, which may end before it.
    pub(crate) fn of_part(&self) -> Self {
        Self { of_part: Some(Arc::default()), ..self.clone() }
    }

    /// Removes the conditions that were set by clones of this handle of a part.
    pub(crate) fn forget(&self) {
        let of_part = self.of_part.iter().flat_map(|names| std::mem::take(&mut *names.lock()));
        let mut all = self.all.lock();
        of_part.for_each(|name| _ = all.remove(name));
    }

    /// Sets the state of a condition; `/readyz` reports why it is not met.
    pub fn set(&self, condition: &'static str, state: Result<(), String>) {
        self.insert(condition, state.map_or_else(ReadinessState::NotReady, |()| ReadinessState::Ready));
    }

    /// Sets the state of something that this process can serve without. `/readyz` reports it, but the process stays
    /// ready.
    pub fn set_degraded(&self, what: &'static str, state: Result<(), String>) {
        self.insert(
            what,
            state.map_or_else(|why| ReadinessState::Degraded(why, None), |()| ReadinessState::Ready),
        );
    }

    /// Reports a problem like [`Self::set_degraded`], but it expires at `until` unless it is reported again.
    pub fn note_until(&self, what: &'static str, why: String, until: Instant) {
        self.insert(what, ReadinessState::Degraded(why, Some(until)));
    }

    /// Returns the reported problems, one line each, if all conditions are met.
    ///
    /// # Errors
    ///
    /// Returns one line for each unmet condition and each other problem.
    pub fn check(&self) -> Result<String, String> {
        let all = self.all.lock();
        let lines = all.iter().filter_map(|(name, state)| Some(format!("{name}: {}\n", state.trouble()?)));
        let lines: String = lines.collect();
        if all.values().any(|state| matches!(state, ReadinessState::NotReady(_))) {
            Err(lines)
        } else {
            Ok(lines)
        }
    }

    /// Returns all conditions by name, each with its state and the problem, if there is one.
    pub fn conditions(&self) -> Vec<ReadinessCondition> {
        let all = self.all.lock();
        let status = |(name, state): (&&'static str, &ReadinessState)| ReadinessCondition {
            name: (*name).to_owned(),
            status: match (state, state.trouble()) {
                (_, None) => "ready",
                (ReadinessState::NotReady(_), _) => "not_ready",
                _ => "degraded",
            }
            .to_owned(),
            message: state.trouble().cloned(),
        };
        all.iter().map(status).collect()
    }

    /// Returns the current problem of a condition, if there is one.
    pub fn trouble(&self, condition: &str) -> Option<String> {
        let all = self.all.lock();
        all.get(condition).and_then(ReadinessState::trouble).cloned()
    }

    fn insert(&self, condition: &'static str, state: ReadinessState) {
        self.of_part.iter().for_each(|names| _ = names.lock().insert(condition));
        self.all.lock().insert(condition, state);
    }
}
