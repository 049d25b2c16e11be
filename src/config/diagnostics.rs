//! Diagnostics: errors with their lines, warnings, and the keys that were set.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use toml::de::DeTable;

use crate::config::removed::{IGNORED, REFUSED, replacement};
use crate::config::{ConfigError, KeySpellings, ParsedConfig, Warning, WarningKind, value};

/// The errors, warnings and keys collected while reading.
#[derive(Debug, Default)]
pub(crate) struct ConfigDiagnostics {
    errors: Vec<PlacedError>,
    warnings: Vec<Warning>,
    /// Full names of all keys that were requested, which is all known keys. Tests compare them with the documentation.
    pub(crate) known: BTreeSet<String>,
    /// The known keys that were present in the file and valid.
    pub(crate) given: BTreeSet<String>,
    /// The file's spelling of keys.
    pub(crate) spelling: KeySpellings,
    /// Keys that a translation sets although the file does not have them. What they ask for is not required.
    pub(crate) implied: BTreeSet<String>,
    /// Keys that a translated file has, with a value that is wrong.
    pub(crate) refused: BTreeSet<String>,
    /// The tables by their full keys, with the values in effect.
    pub(crate) effective: BTreeMap<String, toml::Table>,
}

/// An error with an unknown line. [`ConfigDiagnostics::finish`] derives the line from the position.
#[derive(Debug)]
struct PlacedError {
    /// Byte offset from the start of the file, or [`NOWHERE`].
    place: usize,
    /// Whether a line that is not TOML could have caused this error.
    doubt: SyntaxCause,
    error: ConfigError,
}

/// Whether a line that is not TOML could be the cause of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SyntaxCause {
    /// No: the value is present and wrong.
    None,
    /// The key is missing, but that line may contain it.
    Missing,
    /// The key is unknown, but after such a line a key may appear to be in the wrong table.
    Unknown,
}

impl ConfigDiagnostics {
    /// Adds values in effect to those of a table.
    pub(crate) fn record<T: Serialize>(&mut self, table: &str, settings: &T) {
        let values = toml::Table::try_from(settings);
        debug_assert!(values.is_ok(), "{table}: {values:?}");
        self.effective.entry(table.to_owned()).or_default().extend(values.unwrap_or_default());
    }

    /// Records an unknown key: an error with this hint, unless the key is a removed one.
    pub(crate) fn unknown(&mut self, place: usize, key: &str, expected: &str) {
        if let Some(instead) = replacement(IGNORED, key) {
            let text = format!("removed and ignored; {instead}");
            return self.warn(key, WarningKind::Unexpected, text);
        }
        match replacement(REFUSED, key) {
            Some(instead) => self.place_error(Some(place), key, Some("removed key".to_owned()), instead),
            None => self.place_error(Some(place), key, Some("unknown key".to_owned()), expected),
        }
        if let Some(error) = self.errors.last_mut() {
            error.doubt = SyntaxCause::Unknown;
        }
    }

    /// Records an error outside the file, or something missing in it.
    pub(crate) fn error(&mut self, key: &str, found: Option<String>, expected: impl Into<String>) {
        self.place_error(None, key, found, expected);
    }

    /// Records a warning.
    pub(crate) fn warn(&mut self, key: impl Into<String>, kind: WarningKind, text: impl Into<String>) {
        let ours = key.into();
        let mut text = text.into();
        let key = self.spelling.of(&ours);
        if key != ours && kind == WarningKind::Insecure {
            text.push_str(
                "; for a key that SuperEdge lacks, convert this file with `tunnel migrate superedge`",
            );
        }
        self.warnings.push(Warning { key, kind, text });
    }

    /// Parses TOML as far as possible, and records its syntax errors.
    pub(crate) fn parse<'t>(&mut self, text: &'t str) -> DeTable<'t> {
        let (table, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            // The error's Display output contains the line, which may hold a secret; its message does not.
            let span = error.span();
            let remedy = match error.message() {
                "duplicate key" => {
                    let key = span.clone().and_then(|span| text.get(span)).unwrap_or_default();
                    format!(" {}; merge the two", value::excerpt(key))
                }
                wrong if UNQUOTED.iter().any(|kind| wrong.starts_with(kind)) => {
                    "; a text needs quotes".to_owned()
                }
                _ => String::new(),
            };
            let message = format!("{}{remedy}", error.message());
            self.place_error(span.map(|span| span.start), "", Some("not TOML".to_owned()), message);
        }
        table.into_inner()
    }

    /// Returns everything that was found, with the line of each error.
    pub(crate) fn finish<T>(mut self, text: &str, settings: T) -> ParsedConfig<T> {
        self.errors.sort_by_key(|found| found.place);
        let line = lines_of(text);
        let mut broken = BTreeSet::new();
        let mut errors = Vec::new();
        // Only the first line that is not TOML is certainly wrong. An unclosed quote or bracket in it breaks later
        // lines and causes other errors on them.
        let mut first = None;
        for PlacedError { place, error, .. } in &self.errors {
            let line = (*place != NOWHERE).then(|| line(*place));
            if error.key.is_empty() {
                broken.insert(line);
                if first.is_none() {
                    first = Some(*place);
                    errors.push(ConfigError { line, ..error.clone() });
                }
            }
        }
        for PlacedError { place, doubt, error } in self.errors {
            let line = (place != NOWHERE).then(|| line(place));
            let unread = first.is_some_and(|first| match doubt {
                SyntaxCause::None => false,
                SyntaxCause::Missing => true,
                SyntaxCause::Unknown => place > first,
            });
            if !error.key.is_empty() && !unread && !broken.contains(&line) {
                errors.push(ConfigError { line, ..error });
            }
        }
        errors.sort_by_key(|error| error.line.unwrap_or(NOWHERE));
        let given = if broken.is_empty() { self.given } else { BTreeSet::new() };
        let Self { warnings, effective, spelling, .. } = self;
        ParsedConfig { settings, warnings, errors, given, effective, spelling }
    }

    /// Records an error at a byte offset from the start of the file; `None` if it is not in the file.
    pub(crate) fn place_error(
        &mut self,
        place: Option<usize>,
        key: &str,
        found: Option<String>,
        expected: impl Into<String>,
    ) {
        let doubt = if found.is_none() { SyntaxCause::Missing } else { SyntaxCause::None };
        let text = format!("{}: {}", found.unwrap_or_else(|| "missing".to_owned()), expected.into());
        let error = ConfigError { key: self.spelling.of(key), line: None, text };
        self.errors.push(PlacedError { place: place.unwrap_or(NOWHERE), doubt, error });
    }
}

/// Returns a function from byte offsets to lines, counted from 1. Scans the text once, as every line may have an error.
fn lines_of(text: &str) -> impl Fn(usize) -> usize {
    let ends: Vec<_> = text.match_indices('\n').map(|(place, _)| place).collect();
    move |place| ends.partition_point(|end| *end < place) + 1
}

/// What the parser takes a text without quotes for.
const UNQUOTED: [&str; 8] = [
    "invalid boolean",
    "invalid date",
    "invalid time",
    "invalid float",
    "invalid integer",
    "invalid hexadecimal",
    "invalid octal",
    "invalid binary",
];

/// Position of errors that are not in the file. They are reported last.
const NOWHERE: usize = usize::MAX;
