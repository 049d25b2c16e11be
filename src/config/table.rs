//! Tables that report the keys that were never requested.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::{Environment, superedge, value};

/// A table whose keys are requested one by one. [`ConfigTableReader::finish`] records an error for each key that was never
/// requested.
#[derive(Debug, Default)]
pub(crate) struct ConfigTableReader<'t> {
    /// The full key of the table itself; empty for the file.
    path: String,
    /// Its position in the file, if present.
    place: Option<usize>,
    entries: DeTable<'t>,
    /// The keys that were requested, with their positions if present.
    requested: BTreeMap<&'static str, Option<usize>>,
}

impl<'t> ConfigTableReader<'t> {
    /// Parses a file, and translates one of SuperEdge. Records its syntax errors like all other errors, and continues
    /// with what could be parsed.
    pub(crate) fn parse(text: &'t str, env: &Environment, report: &mut ConfigDiagnostics) -> Self {
        Self::of(String::new(), 0, superedge::translate(report.parse(text), env, report))
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
    pub(crate) fn is_wrong(&self, key: &'static str, report: &ConfigDiagnostics) -> bool {
        self.has(key) && !report.given.contains(&self.key(key))
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
    pub(crate) fn table(&mut self, key: &'static str, report: &mut ConfigDiagnostics) -> Self {
        let path = self.key(key);
        match self.take(key, report) {
            None => Self { path, ..Self::default() },
            Some((place, DeValue::Table(table))) => Self::of(path, place, table),
            Some((place, other)) => {
                report.place_error(Some(place), &path, Some(value::shown(&other)), "expected a table");
                Self::of(path, place, DeTable::new())
            }
        }
    }

    /// Reads a nested table that has the keys of `T` and no others, and records the values in effect.
    pub(crate) fn settings<T>(&mut self, key: &'static str, report: &mut ConfigDiagnostics) -> T
    where
        T: DeserializeOwned + Default + Serialize,
    {
        let mut table = self.table(key, report);
        let settings = table.fields(report);
        table.close(&settings, report);
        settings
    }

    /// Takes all remaining keys, which are names chosen by the user, each with its table, in file order. A value of
    /// another type is read as a table with the single key `short`.
    pub(crate) fn named(
        &mut self,
        short: &'static str,
        report: &mut ConfigDiagnostics,
    ) -> Vec<(String, Self)> {
        let mut entries: Vec<_> = std::mem::take(&mut self.entries).into_iter().collect();
        entries.sort_by_key(|(name, _)| name.span().start);
        let mut tables = Vec::new();
        for (name, value) in entries {
            let span = name.span();
            let name = name.into_inner().into_owned();
            let path = self.key(format_args!("\"{}\"", value::excerpt(&name)));
            report.known.insert(path.clone());
            report.given.insert(path.clone());
            let place = span.start;
            let table = match value.into_inner() {
                DeValue::Table(table) => table,
                value => {
                    let key = Spanned::new(span.clone(), Cow::Borrowed(short));
                    DeTable::from_iter([(key, Spanned::new(span, value))])
                }
            };
            tables.push((name, Self::of(path, place, table)));
        }
        tables
    }

    /// Records an error about the table's own name.
    pub(crate) fn name_error(
        &self,
        found: &str,
        expected: impl Into<String>,
        report: &mut ConfigDiagnostics,
    ) {
        report.place_error(self.place, &self.path, Some(format!("{:?}", value::excerpt(found))), expected);
    }

    /// Takes a key and ignores its value. Returns true if the key is present.
    pub(crate) fn ignore(&mut self, key: &'static str, report: &mut ConfigDiagnostics) -> bool {
        self.take(key, report).is_some()
    }

    /// Records an error about this key, already requested, or about the table if the key is absent.
    pub(crate) fn error(
        &self,
        key: &'static str,
        found: Option<String>,
        expected: impl Into<String>,
        report: &mut ConfigDiagnostics,
    ) {
        let place = self.requested.get(key).copied().flatten();
        report.place_error(place.or(self.place), &self.key(key), found, expected);
    }

    /// Like [`Self::error`], about a part of the key's value.
    pub(crate) fn error_in(
        &self,
        key: &'static str,
        part: &str,
        found: String,
        expected: &str,
        report: &mut ConfigDiagnostics,
    ) {
        let place = self.requested.get(key).copied().flatten();
        report.place_error(place, &format!("{}{part}", self.key(key)), Some(found), expected);
    }

    /// Records the values in effect of a table that is present: a struct with a field for each key. Several structs may
    /// share a table.
    pub(crate) fn record<T: Serialize>(&self, settings: &T, report: &mut ConfigDiagnostics) {
        if self.is_present() {
            report.record(&self.path, settings);
        }
    }

    /// Like [`Self::finish`], and records the values in effect, which an absent table has, too.
    pub(crate) fn close<T: Serialize>(self, settings: &T, report: &mut ConfigDiagnostics) {
        report.record(&self.path, settings);
        self.finish(report);
    }

    /// Like [`Self::close`], but an absent table has no values.
    pub(crate) fn close_optional<T: Serialize>(self, settings: &T, report: &mut ConfigDiagnostics) {
        self.record(settings, report);
        self.finish(report);
    }

    /// Records an error for every key that was never requested, with the most similar known key.
    pub(crate) fn finish(self, report: &mut ConfigDiagnostics) {
        for name in self.entries.keys() {
            let expected = value::suggestion(name.get_ref(), self.requested.keys().copied());
            report.unknown(name.span().start, &self.key(value::excerpt(name.get_ref())), &expected);
        }
    }

    fn of(path: String, place: usize, entries: DeTable<'t>) -> Self {
        Self { path, place: Some(place), entries, ..Self::default() }
    }

    /// Returns the position and the value of a key.
    pub(super) fn entry(&self, key: &str) -> Option<(usize, &DeValue<'t>)> {
        let (name, value) = self.entries.get_key_value(key)?;
        Some((name.span().start, value.get_ref()))
    }

    /// Takes a key, which is then known, and returns its position and value.
    pub(super) fn take(
        &mut self,
        key: &'static str,
        report: &mut ConfigDiagnostics,
    ) -> Option<(usize, DeValue<'t>)> {
        report.known.insert(self.key(key));
        let refused = report.refused.contains(&self.key(key)).then(|| self.place.unwrap_or_default());
        let (name, value) = self.entries.remove_entry(key).unzip();
        let place = name.map(|name| name.span().start);
        self.requested.insert(key, place.or(refused));
        place.zip(value.map(Spanned::into_inner))
    }
}
