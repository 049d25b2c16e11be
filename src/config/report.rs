//! What reading finds out: faults with their lines, warnings, and the keys that were given.

use std::collections::BTreeSet;

use super::{Concern, Fault, Reading, Warning};

/// What reading has found out so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    faults: Vec<PlacedFault>,
    warnings: Vec<Warning>,
    /// Every key that was asked for, whole: all that we know. Tests compare it with the documentation.
    pub(super) known: Vec<String>,
    /// Those of them that stand in the file and were understood.
    pub(super) given: BTreeSet<String>,
}

/// A fault whose line is not known yet: [`Report::finish`] finds it by the place.
#[derive(Debug)]
struct PlacedFault {
    /// In bytes from the start of the file, or [`NOWHERE`].
    place: usize,
    /// Whether it is that something is missing, or that nobody knows a key: what a broken line causes, too.
    doubt: Doubt,
    fault: Fault,
}

/// Whether a fault may only follow from a line that is not TOML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// It stands there, and is wrong.
    None,
    /// A key is missing: it may stand in that line.
    Missing,
    /// Nobody knows a key: behind such a line it may have got into another table.
    Unknown,
}

impl Report {
    /// Notes a key that nobody knows.
    pub(super) fn unknown(&mut self, place: usize, key: &str, wanted: &str) {
        let found = Some("not a key that is known".to_owned());
        self.place_fault(Some(place), key, found, wanted);
        if let Some(fault) = self.faults.last_mut() {
            fault.doubt = Doubt::Unknown;
        }
    }

    /// Notes what is wrong outside the file, or missing in it.
    pub(super) fn fault(&mut self, key: &str, found: Option<String>, wanted: impl Into<String>) {
        self.place_fault(None, key, found, wanted);
    }

    /// Notes what the operator should know.
    pub(super) fn warn(&mut self, key: impl Into<String>, kind: Concern, text: impl Into<String>) {
        self.warnings.push(Warning { key: key.into(), kind, text: text.into() });
    }

    /// How many faults there are so far.
    pub(super) fn fault_count(&self) -> usize {
        self.faults.len()
    }

    /// All that was found out, with the line of each fault.
    pub(super) fn finish<T>(mut self, text: &str, settings: T) -> Reading<T> {
        self.faults.sort_by_key(|found| found.place);
        let line = lines_of(text);
        let mut broken = BTreeSet::new();
        let mut faults = Vec::new();
        // Of lines that are not TOML only the first is sure to be wrong: what is left open there breaks others, and other
        // faults on those lines only follow from it.
        let mut first = None;
        for PlacedFault { place, fault, .. } in &self.faults {
            let line = (*place != NOWHERE).then(|| line(*place));
            if fault.key.is_empty() {
                broken.insert(line);
                if first.is_none() {
                    first = Some(*place);
                    faults.push(Fault { line, ..fault.clone() });
                }
            }
        }
        for PlacedFault { place, doubt, fault } in self.faults {
            let line = (place != NOWHERE).then(|| line(place));
            let unread = first.is_some_and(|first| match doubt {
                Doubt::None => false,
                Doubt::Missing => true,
                Doubt::Unknown => place > first,
            });
            if !fault.key.is_empty() && !unread && !broken.contains(&line) {
                faults.push(Fault { line, ..fault });
            }
        }
        faults.sort_by_key(|fault| fault.line.unwrap_or(NOWHERE));
        let given = if broken.is_empty() { self.given } else { BTreeSet::new() };
        Reading { settings, warnings: self.warnings, faults, given }
    }

    /// Notes what is wrong at that place, in bytes from the start of the file; none: it stands nowhere there.
    pub(super) fn place_fault(
        &mut self,
        place: Option<usize>,
        key: &str,
        found: Option<String>,
        wanted: impl Into<String>,
    ) {
        let doubt = if found.is_none() { Doubt::Missing } else { Doubt::None };
        let text = format!("{}: {}", found.unwrap_or_else(|| "missing".to_owned()), wanted.into());
        let fault = Fault { key: key.to_owned(), line: None, text };
        self.faults.push(PlacedFault { place: place.unwrap_or(NOWHERE), doubt, fault });
    }
}

/// Which line a place is in, counted from 1. The text is read once: a bad file may have a fault in every line.
fn lines_of(text: &str) -> impl Fn(usize) -> usize {
    let ends: Vec<_> = text.match_indices('\n').map(|(place, _)| place).collect();
    move |place| ends.partition_point(|end| *end < place) + 1
}

/// Place of what stands nowhere in the file: it is reported last.
const NOWHERE: usize = usize::MAX;
