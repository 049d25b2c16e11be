//! Tables that report the keys that were never requested.

use std::borrow::Cow;
use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::{Environment, ParsedConfig, WarningKind, superedge, value};

/// A table whose keys are requested one by one. [`ConfigTableReader::finish`] records an error for each key that was never
/// requested.
#[derive(Debug)]
pub(crate) struct ConfigTableReader<'t> {
    /// The full key of the table itself; empty for the file.
    path: String,
    /// Its position in the file, if present.
    place: Option<usize>,
    entries: DeTable<'t>,
    /// The keys that were requested, with their positions if present.
    requested: BTreeMap<&'static str, Option<usize>>,
    /// What was found in the file, which all its tables share.
    report: &'t RefCell<ConfigDiagnostics>,
    /// The environment that the file is read with.
    pub(crate) env: &'t Environment,
}

impl<'t> ConfigTableReader<'t> {
    /// Parses a file, and translates one of SuperEdge. Records its syntax errors like all other errors, and continues
    /// with what could be parsed.
    pub(crate) fn parse(text: &'t str, env: &'t Environment, report: &'t RefCell<ConfigDiagnostics>) -> Self {
        let file = report.borrow_mut().parse(text);
        let entries = superedge::translate(file, env, &mut report.borrow_mut());
        Self { path: String::new(), place: Some(0), entries, requested: BTreeMap::new(), report, env }
    }

    /// Returns what was found in the file so far.
    pub(crate) fn report(&self) -> RefMut<'_, ConfigDiagnostics> {
        self.report.borrow_mut()
    }

    /// Returns true if the table is present in the file.
    pub(crate) fn is_present(&self) -> bool {
        self.place.is_some()
    }

    /// Returns true if this key, already requested, is present in the file.
    pub(crate) fn has(&self, key: &'static str) -> bool {
        self.requested.get(key).is_some_and(Option::is_some)
    }

    /// Returns true if this key, already requested, is present in the file with a value that is wrong.
    pub(crate) fn is_wrong(&self, key: &'static str) -> bool {
        self.has(key) && !self.report().given.contains(&self.key(key))
    }

    /// Returns the full key of the table itself; empty for the file.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Returns the full key of an entry.
    pub(crate) fn key(&self, key: impl fmt::Display) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    /// Returns a nested table. It is empty if it is absent, or not a table, which is recorded.
    pub(crate) fn table(&mut self, key: &'static str) -> Self {
        let path = self.key(key);
        match self.take(key) {
            None => self.below(path, None, DeTable::new()),
            Some((place, DeValue::Table(table))) => self.below(path, Some(place), table),
            Some((place, other)) => {
                self.report().place_error(Some(place), &path, Some(value::shown(&other)), "expected a table");
                self.below(path, Some(place), DeTable::new())
            }
        }
    }

    /// Reads a nested table that has the keys of `T` and no others, and records the values in effect.
    pub(crate) fn settings<T>(&mut self, key: &'static str) -> T
    where
        T: DeserializeOwned + Default + Serialize,
    {
        let mut table = self.table(key);
        let settings = table.fields();
        table.close(&settings);
        settings
    }

    /// Takes all remaining keys, which are names chosen by the user, each with its table, in file order. A value of
    /// another type is read as a table with the single key `short`.
    pub(crate) fn named(&mut self, short: &'static str) -> Vec<(String, Self)> {
        let mut entries: Vec<_> = std::mem::take(&mut self.entries).into_iter().collect();
        entries.sort_by_key(|(name, _)| name.span().start);
        let mut tables = Vec::new();
        for (name, value) in entries {
            let span = name.span();
            let name = name.into_inner().into_owned();
            let path = self.key(format_args!("\"{}\"", value::excerpt(&name)));
            self.report().known.insert(path.clone());
            self.report().given.insert(path.clone());
            let place = span.start;
            let table = match value.into_inner() {
                DeValue::Table(table) => table,
                value => {
                    let key = Spanned::new(span.clone(), Cow::Borrowed(short));
                    DeTable::from_iter([(key, Spanned::new(span, value))])
                }
            };
            tables.push((name, self.below(path, Some(place), table)));
        }
        tables
    }

    /// Records an error about the table's own name.
    pub(crate) fn name_error(&self, found: &str, expected: impl Into<String>) {
        self.report().place_error(
            self.place,
            &self.path,
            Some(format!("{:?}", value::excerpt(found))),
            expected,
        );
    }

    /// Takes a key and ignores its value. Returns true if the key is present.
    pub(crate) fn ignore(&mut self, key: &'static str) -> bool {
        self.take(key).is_some()
    }

    /// Records an error about this key, already requested, or about the table if the key is absent.
    pub(crate) fn error(&self, key: &'static str, found: Option<String>, expected: impl Into<String>) {
        let place = self.requested.get(key).copied().flatten();
        self.report().place_error(place.or(self.place), &self.key(key), found, expected);
    }

    /// Like [`Self::error`], about a part of the key's value.
    pub(crate) fn error_in(&self, key: &'static str, part: &str, found: String, expected: &str) {
        let place = self.requested.get(key).copied().flatten();
        self.report().place_error(place, &format!("{}{part}", self.key(key)), Some(found), expected);
    }

    /// Records a warning about this key.
    pub(crate) fn warn(&self, key: impl fmt::Display, kind: WarningKind, text: impl Into<String>) {
        self.report().warn(self.key(key), kind, text);
    }

    /// Records the values in effect of a table that is present: a struct with a field for each key. Several structs may
    /// share a table.
    pub(crate) fn record<T: Serialize>(&self, settings: &T) {
        if self.is_present() {
            self.report().record(&self.path, settings);
        }
    }

    /// Like [`Self::finish`], and records the values in effect, which an absent table has, too.
    pub(crate) fn close<T: Serialize>(self, settings: &T) {
        self.report().record(&self.path, settings);
        self.finish();
    }

    /// Like [`Self::close`], but an absent table has no values.
    pub(crate) fn close_optional<T: Serialize>(self, settings: &T) {
        self.record(settings);
        self.finish();
    }

    /// Records an error for every key that was never requested, with the most similar known key.
    pub(crate) fn finish(self) {
        for name in self.entries.keys() {
            let expected = value::suggestion(name.get_ref(), self.requested.keys().copied());
            self.report().unknown(name.span().start, &self.key(value::excerpt(name.get_ref())), &expected);
        }
    }

    /// Returns a table below this one.
    fn below(&self, path: String, place: Option<usize>, entries: DeTable<'t>) -> Self {
        Self { path, place, entries, requested: BTreeMap::new(), ..*self }
    }

    /// Returns the position and the value of a key.
    pub(super) fn entry(&self, key: &str) -> Option<(usize, &DeValue<'t>)> {
        let (name, value) = self.entries.get_key_value(key)?;
        Some((name.span().start, value.get_ref()))
    }

    /// Takes a key, which is then known, and returns its position and value.
    pub(super) fn take(&mut self, key: &'static str) -> Option<(usize, DeValue<'t>)> {
        let path = self.key(key);
        let refused = self.report().refused.contains(&path).then(|| self.place.unwrap_or_default());
        self.report().known.insert(path);
        let (name, value) = self.entries.remove_entry(key).unzip();
        let place = name.map(|name| name.span().start);
        self.requested.insert(key, place.or(refused));
        place.zip(value.map(Spanned::into_inner))
    }
}

/// Reads a whole file. `read` reads the tables for which it is made.
pub(crate) fn read_file<T>(
    text: &str,
    env: &Environment,
    read: impl FnOnce(&mut ConfigTableReader<'_>) -> T,
) -> ParsedConfig<T> {
    let report = RefCell::default();
    let mut file = ConfigTableReader::parse(text, env, &report);
    let settings = read(&mut file);
    file.finish();
    report.into_inner().finish(text, settings)
}
