//! Single values: their forms in messages, units, and hints for misspelt keys.

pub(crate) mod forms;

use strsim::osa_distance;
use toml::de::{DeInteger, DeValue};

use crate::config::value::forms::MAX_EXCERPT;

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
        assert_eq!(any_duration("1d"), any_duration("24h"));
        assert_eq!(any_size("4MiB"), Ok(4 << 20));
        for bad in [
            "60",
            "",
            "s",
            "1.5s",
            "-1s",
            "1w",
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
