//! Readers for single values of SuperEdge's files: each returns the parsed value or a description of the error.

use std::fmt;
use std::str::FromStr;

use toml::de::DeValue;

use crate::config::value::{excerpt, integer, shown};

/// The error of parsing a config value: what was found, and what is allowed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ValueError {
    /// The value found; never a secret.
    pub(crate) found: String,
    /// What is allowed.
    pub(crate) expected: String,
}

/// Reads a text, possibly empty.
pub(crate) fn text(value: &DeValue<'_>) -> Result<String, ValueError> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        other => Err(wrong(other, "expected a text in quotes")),
    }
}

/// Reads a boolean.
pub(crate) fn flag(value: &DeValue<'_>) -> Result<bool, ValueError> {
    match value {
        DeValue::Boolean(flag) => Ok(*flag),
        other => Err(wrong(other, "expected true or false")),
    }
}

/// Reads a text with a parser: a node's name, a network, a target.
pub(crate) fn parsed<T: FromStr<Err: fmt::Display>>(value: &DeValue<'_>) -> Result<T, ValueError> {
    text(value)?.parse().map_err(|error: T::Err| wrong(value, error))
}

/// Reads a TCP port, as a number or (as in some of SuperEdge's files) a text. 0 means any free port.
pub(crate) fn port_number(value: &DeValue<'_>) -> Result<u16, ValueError> {
    let port = match value {
        DeValue::Integer(number) => integer(number).and_then(|n| u16::try_from(n).ok()),
        DeValue::String(text) if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    };
    port.ok_or_else(|| wrong(value, "expected a port: a number from 0 to 65535"))
}

/// Returns a key by its parts. Names that the user chose are in quotes.
pub(crate) fn path(parts: &[String]) -> String {
    let bare = |part: &str| {
        part.starts_with(|first: char| first.is_ascii_lowercase())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    let part = |part: &String| if bare(part) { part.clone() } else { format!("\"{}\"", excerpt(part)) };
    parts.iter().map(part).collect::<Vec<_>>().join(".")
}

/// Returns an error about a value that may be displayed.
pub(crate) fn wrong(value: &DeValue<'_>, expected: impl fmt::Display) -> ValueError {
    ValueError { found: shown(value), expected: expected.to_string() }
}

/// Returns a value without its place in the file.
pub(crate) fn plain(value: &DeValue<'_>) -> toml::Value {
    match value {
        DeValue::String(text) => toml::Value::String(text.to_string()),
        DeValue::Integer(number) => {
            integer(number).map_or_else(|| number.to_string().into(), toml::Value::Integer)
        }
        DeValue::Float(number) => {
            number.to_string().parse().map_or_else(|_| number.to_string().into(), toml::Value::Float)
        }
        DeValue::Boolean(flag) => toml::Value::Boolean(*flag),
        DeValue::Datetime(time) => toml::Value::Datetime(*time),
        DeValue::Array(items) => items.iter().map(|item| plain(item.get_ref())).collect::<Vec<_>>().into(),
        DeValue::Table(table) => {
            let entries =
                table.iter().map(|(name, value)| (name.get_ref().to_string(), plain(value.get_ref())));
            toml::Value::Table(entries.collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_may_be_quoted() {
        let quoted = |text: &str| DeValue::String(text.to_owned().into());
        assert_eq!(port_number(&quoted("51009")), Ok(51009));
        for bad in ["", "+1", "65536", " 1", "1.0", "ssh"] {
            assert!(port_number(&quoted(bad)).is_err(), "{bad}");
        }
    }
}
