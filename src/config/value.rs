//! Readers for single values: each returns the parsed value or a description of the error.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};
use strsim::osa_distance;
use toml::de::{DeInteger, DeValue};

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
fn quantity(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits)?;
    let (_, each) = units.iter().find(|(name, _)| *name == unit.trim_start())?;
    number.parse::<u64>().ok()?.checked_mul(*each)
}

/// Formats a number with the largest unit that divides it.
fn with_unit(number: u64, units: &[(&str, u64)]) -> String {
    let dividing = units.iter().rev().find(|(_, each)| number.is_multiple_of(*each) && number > 0);
    let (name, each) = dividing.or(units.get(1)).copied().unwrap_or(("", 1));
    format!("{}{name}", number / each)
}

// Forms of values in structs, for serde's attribute `with`. Optional fields have the same form.

/// A duration from `MIN` to `MAX` milliseconds: a whole number with `ms`, `s`, `m` or `h`.
pub(crate) struct Millis<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> Millis<MIN, MAX> {
    pub(crate) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: From<Duration>,
    {
        let text = String::deserialize(deserializer).map_err(|_| D::Error::custom(DURATION))?;
        let millis = quantity(&text, &DURATIONS).ok_or_else(|| D::Error::custom(DURATION))?;
        if (MIN..=MAX).contains(&millis) {
            return Ok(Duration::from_millis(millis).into());
        }
        let [least, most] = [MIN, MAX].map(|limit| with_unit(limit, &DURATIONS));
        Err(D::Error::custom(format_args!("expected a duration from {least} to {most}")))
    }

    pub(crate) fn serialize<S, T>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
        T: Copy + Into<Option<Duration>>,
    {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        (*value).into().map(|time| with_unit(millis(time), &DURATIONS)).serialize(serializer)
    }
}

/// A size of at least `MIN` bytes: a whole number with `B`, `KiB`, `MiB` or `GiB`.
pub(crate) struct Bytes<const MIN: usize>;

impl<const MIN: usize> Bytes<MIN> {
    pub(crate) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: From<usize>,
    {
        let text = String::deserialize(deserializer).map_err(|_| D::Error::custom(SIZE))?;
        let bytes = quantity(&text, &SIZES).and_then(|bytes| usize::try_from(bytes).ok());
        match bytes.ok_or_else(|| D::Error::custom(SIZE))? {
            bytes if bytes < MIN => {
                Err(D::Error::custom(format_args!("expected at least {}", with_unit(MIN as u64, &SIZES))))
            }
            bytes => Ok(bytes.into()),
        }
    }

    pub(crate) fn serialize<S, T>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
        T: Copy + Into<Option<usize>>,
    {
        (*value).into().map(|bytes| with_unit(bytes as u64, &SIZES)).serialize(serializer)
    }
}

/// A whole number from `MIN` to `MAX`.
pub(crate) struct Count<const MIN: usize, const MAX: usize>;

impl<const MIN: usize, const MAX: usize> Count<MIN, MAX> {
    pub(crate) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: From<usize>,
    {
        let number = usize::deserialize(deserializer).ok().filter(|number| (MIN..=MAX).contains(number));
        let expected = || D::Error::custom(format_args!("expected a whole number from {MIN} to {MAX}"));
        number.map(T::from).ok_or_else(expected)
    }

    pub(crate) fn serialize<S: Serializer, T: Serialize>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.serialize(serializer)
    }
}

/// Reads a file name.
pub(crate) fn file<'de, D: Deserializer<'de>, T: From<PathBuf>>(deserializer: D) -> Result<T, D::Error> {
    let text: String = filled_text(deserializer)?;
    if text.contains('\0') {
        return Err(D::Error::custom("expected a file name"));
    }
    Ok(PathBuf::from(text).into())
}

/// Reads a text that is not empty.
pub(crate) fn filled_text<'de, D: Deserializer<'de>, T: From<String>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.trim().is_empty() {
        return Err(D::Error::custom("expected a non-empty text; otherwise leave the key out"));
    }
    Ok(text.into())
}

/// Reads an address to listen on.
pub(crate) fn listen_address<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: From<SocketAddr>,
{
    let at = String::deserialize(deserializer)?.parse::<SocketAddr>();
    at.map(T::from).map_err(|_| D::Error::custom(LISTEN_ADDRESS))
}

/// Reads an IP address.
pub(crate) fn ip<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpAddr, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(|_| D::Error::custom("expected an IP address"))
}

/// The address of a remote port.
struct RemoteAddress(SocketAddr);

impl<'de> Deserialize<'de> for RemoteAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.parse::<SocketAddr>() {
            Ok(at) if at.port() > 0 && !at.ip().is_unspecified() => Ok(Self(at)),
            _ => Err(D::Error::custom("expected ip:port, for example 10.96.0.10:53 or [fd00::1]:9000")),
        }
    }
}

/// Reads a list of addresses of remote ports.
pub(crate) fn remote_addresses<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<SocketAddr>, D::Error> {
    let addresses = Vec::<RemoteAddress>::deserialize(deserializer)?;
    Ok(addresses.into_iter().map(|RemoteAddress(at)| at).collect())
}

const LISTEN_ADDRESS: &str = "expected ip:port, for example 127.0.0.1:9000, 0.0.0.0:9000 or [::]:9000";

const DURATION: &str =
    "expected a whole number with its unit (ms, s, m or h) in quotes, for example \"5s\" or \"500ms\"";

const SIZE: &str = "expected a whole number with its unit (KiB, MiB or GiB) in quotes, for example \"4MiB\"";

/// Units of time, in milliseconds. No timeout needs a smaller unit.
pub(crate) const DURATIONS: [(&str, u64); 4] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];

/// Units of size, in bytes. Powers of two only: "MB" is ambiguous.
pub(crate) const SIZES: [(&str, u64); 4] = [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

/// Maximum number of characters of a wrong value in a message.
const MAX_EXCERPT: usize = 60;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn any_duration(text: &str) -> Result<Duration, String> {
        Millis::<0, { u64::MAX }>::deserialize(json!(text))
            .map_err(|error: serde_json::Error| error.to_string())
    }

    fn any_size(text: &str) -> Result<usize, String> {
        Bytes::<0>::deserialize(json!(text)).map_err(|error: serde_json::Error| error.to_string())
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
            Bytes::<{ 1 << 20 }>::deserialize::<Value, usize>(json!("1KiB")).unwrap_err();
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
                let written = Bytes::<0>::serialize(&read, serde_json::value::Serializer).unwrap();
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
