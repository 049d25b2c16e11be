//! Readers for single values: each returns the parsed value or a description of the error.

pub(crate) mod forms;

use std::fmt;
use std::str::FromStr;

use strsim::osa_distance;
use toml::de::{DeInteger, DeValue};

use crate::config::value::forms::MAX_EXCERPT;

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

/// Formats a value for a message, shortened.
pub(crate) fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("{:?}", excerpt(text)),
        DeValue::Integer(number) => excerpt(&number.to_string()),
        DeValue::Float(number) => excerpt(&number.to_string()),
        DeValue::Boolean(flag) => flag.to_string(),
        other => kind(other).to_owned(),
    }
}

/// Returns a short copy of a text without control characters, which could disturb a terminal.
pub(crate) fn excerpt(text: &str) -> String {
    let clean = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut short: String = text.chars().take(MAX_EXCERPT).map(clean).collect();
    if short.len() < text.len() && text.chars().nth(MAX_EXCERPT).is_some() {
        short.push('…');
    }
    short
}

/// Returns the hint for an unknown key: the most similar known one, unless it differs in more than half of its letters.
pub(super) fn suggestion<'k>(unknown: &str, known: impl Iterator<Item = &'k str>) -> String {
    let unknown = excerpt(unknown);
    let known: Vec<_> = known.map(|known| (osa_distance(&unknown, known), known)).collect();
    match known.iter().min_by_key(|(distance, _)| *distance) {
        Some((distance, nearest)) if 2 * distance <= nearest.len() => format!("did you mean {nearest}?"),
        Some(_) => {
            let some =
                known.iter().take(MAX_SUGGESTED).map(|(_, known)| *known).collect::<Vec<_>>().join(", ");
            let more = if known.len() > MAX_SUGGESTED { ", and others" } else { "" };
            format!("known here are {some}{more}")
        }
        None => "no key is known here; remove it".to_owned(),
    }
}

/// Maximum number of known keys that a hint lists.
const MAX_SUGGESTED: usize = 8;

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

/// Returns the kind of a value, for messages that must not repeat the value.
pub(crate) fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(items) if items.is_empty() => "an empty list",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// Returns a number of the file, if it is not too large.
pub(crate) fn integer(number: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(number.as_str(), number.radix()).ok()
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

/// Returns the number multiplied by its unit; `None` if the unit is missing or the product overflows.
pub(crate) fn quantity(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits)?;
    let (_, each) = units.iter().find(|(name, _)| *name == unit.trim_start())?;
    number.parse::<u64>().ok()?.checked_mul(*each)
}

/// Formats a number with the largest unit that divides it.
pub(super) fn with_unit(number: u64, units: &[(&str, u64)]) -> String {
    let dividing = units.iter().rev().find(|(_, each)| number.is_multiple_of(*each) && number > 0);
    let (name, each) = dividing.or(units.get(1)).copied().unwrap_or(("", 1));
    format!("{}{name}", number / each)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::config::value::forms::ByteSize;
    use crate::config::value::forms::DURATIONS;
    use crate::config::value::forms::Millis;
    use crate::config::value::forms::SIZES;
    use std::time::Duration;

    fn any_duration(text: &str) -> Result<Duration, String> {
        Millis::<0, { u64::MAX }>::deserialize(json!(text))
            .map_err(|error: serde_json::Error| error.to_string())
    }

    fn any_size(text: &str) -> Result<usize, String> {
        ByteSize::<0>::deserialize(json!(text)).map_err(|error: serde_json::Error| error.to_string())
    }

    #[test]
    fn durations_and_sizes_need_a_unit() {
        assert_eq!(any_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(any_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(any_size("4MiB"), Ok(4 << 20));
        for bad in [
            "60",
            "",
            "s",
            "1.5s",
            "-1s",
            "1d",
            "1 s s",
            "+1s",
            "99999999999999999999s",
            "20000000000000000000m",
        ] {
            assert!(any_duration(bad).unwrap_err().contains("unit"), "{bad}");
        }
        for bad in ["4", "4MB", "4M", "99999999999GiB", "é"] {
            assert!(any_size(bad).unwrap_err().contains("unit"), "{bad}");
        }
    }

    #[test]
    fn a_port_may_be_quoted() {
        let quoted = |text: &str| DeValue::String(text.to_owned().into());
        assert_eq!(port_number(&quoted("51009")), Ok(51009));
        for bad in ["", "+1", "65536", " 1", "1.0", "ssh"] {
            assert!(port_number(&quoted(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_out_of_range_value_is_reported_with_its_limits() {
        let short: serde_json::Error =
            Millis::<1000, 9000>::deserialize::<Value, Duration>(json!("10s")).unwrap_err();
        assert_eq!(short.to_string(), "expected a duration from 1s to 9s");
        let short: serde_json::Error =
            ByteSize::<{ 1 << 20 }>::deserialize::<Value, usize>(json!("1KiB")).unwrap_err();
        assert_eq!(short.to_string(), "expected at least 1MiB");
    }

    proptest! {
        #[test]
        fn durations_and_sizes_are_read_as_written(n in 0_u64..1_000_000) {
            for (unit, millis) in DURATIONS {
                let read = any_duration(&format!("{n}{unit}")).unwrap();
                prop_assert_eq!(read, Duration::from_millis(n * millis));
                let written = Millis::<0, 0>::serialize(&read, serde_json::value::Serializer).unwrap();
                prop_assert_eq!(any_duration(written.as_str().unwrap()), Ok(read));
            }
            for (unit, bytes) in SIZES {
                let read = any_size(&format!("{n}{unit}")).unwrap();
                prop_assert_eq!(read as u64, n * bytes);
                let written = ByteSize::<0>::serialize(&read, serde_json::value::Serializer).unwrap();
                prop_assert_eq!(any_size(written.as_str().unwrap()), Ok(read));
            }
        }

        #[test]
        fn a_quoted_excerpt_is_short_and_printable(text in "\\PC{0,90}|.{0,90}") {
            let short = excerpt(&text);
            prop_assert!(short.chars().count() <= MAX_EXCERPT + 1 && !short.chars().any(char::is_control));
        }
    }
}
