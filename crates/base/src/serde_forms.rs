//! Forms of config values that several tables share.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};
use serde::ser::{Serialize, Serializer};

/// A TCP port of at least `MIN`, written as a number or as a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConfigPort<const MIN: u16>(pub u16);

impl<'de, const MIN: u16> Deserialize<'de> for ConfigPort<MIN> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PortVisitor)
    }
}

impl<const MIN: u16> Serialize for ConfigPort<MIN> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u16(self.0)
    }
}

struct PortVisitor<const MIN: u16>;

impl<const MIN: u16> Visitor<'_> for PortVisitor<MIN> {
    type Value = ConfigPort<MIN>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a port: a number from {MIN} to 65535")
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
        let port = u16::try_from(number).ok().filter(|port| *port >= MIN);
        port.map(ConfigPort).ok_or_else(|| E::invalid_value(Unexpected::Signed(number), &self))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        self.visit_i64(number.try_into().unwrap_or(i64::MAX))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        let number = text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten();
        self.visit_i64(number.unwrap_or(-1))
    }
}

/// Reads a list that is not empty. An absent list matches everything; an empty one would match nothing and is easily
/// confused with it.
///
/// # Errors
///
/// Returns the error of an item, or that the list is empty.
pub fn non_empty<'de, D, I, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    I: Deserialize<'de>,
    T: FromIterator<I>,
{
    let items = Vec::<I>::deserialize(deserializer)?;
    if items.is_empty() {
        return Err(D::Error::custom(
            "it matches nothing; leave the key out to match everything, or fill the list",
        ));
    }
    Ok(Some(items.into_iter().collect()))
}
