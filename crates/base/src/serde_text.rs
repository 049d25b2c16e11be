//! Serialization of names and policies as the texts that config files contain.

use std::fmt;

use ipnet::IpNet;
use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::names::{Host, NodeName, Target};
use crate::policy::ports::{HOST, PortTarget};
use crate::policy::targets::{TargetEntry, Targets};
use crate::policy::{CertificateGlob, Glob, Networks, network, network_text};

/// Serializes types through `Display` and deserializes them through `FromStr`.
macro_rules! as_text {
    ($($of:ty),*) => {$(
        impl Serialize for $of {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $of {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    )*};
}

as_text!(NodeName, Host, Target, TargetEntry, Glob, CertificateGlob);

/// One of [`Networks`]: a network, or a single address.
#[derive(Debug)]
pub struct Network(IpNet);

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        network(&String::deserialize(deserializer)?).map(Self).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Networks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::<Network>::deserialize(deserializer).map(Self::from_iter)
    }
}

impl FromIterator<Network> for Networks {
    fn from_iter<I: IntoIterator<Item = Network>>(networks: I) -> Self {
        networks.into_iter().map(|Network(network)| network).collect()
    }
}

impl Serialize for Networks {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(network_text))
    }
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::<TargetEntry>::deserialize(deserializer).map(Self::from_iter)
    }
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for PortTarget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Serialize for PortTarget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Target(target) => target.serialize(serializer),
            Self::Host => HOST.serialize(serializer),
        }
    }
}

/// A TCP port of at least `MIN`, written as a number or as a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port<const MIN: u16>(pub u16);

impl<'de, const MIN: u16> Deserialize<'de> for Port<MIN> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PortVisitor)
    }
}

impl<const MIN: u16> Serialize for Port<MIN> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u16(self.0)
    }
}

struct PortVisitor<const MIN: u16>;

impl<const MIN: u16> Visitor<'_> for PortVisitor<MIN> {
    type Value = Port<MIN>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a port: a number from {MIN} to 65535")
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
        let port = u16::try_from(number).ok().filter(|port| *port >= MIN);
        port.map(Port).ok_or_else(|| E::invalid_value(Unexpected::Signed(number), &self))
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
pub fn filled<'de, D, I, T>(deserializer: D) -> Result<Option<T>, D::Error>
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stays<T: Serialize + for<'de> Deserialize<'de>>(json: &str) -> String {
        serde_json::to_string(&serde_json::from_str::<T>(json).unwrap()).unwrap()
    }

    #[test]
    fn values_are_written_as_they_are_read() {
        let networks = r#"["10.0.0.0/8","10.1.2.3","fd00::/8","::1"]"#;
        assert_eq!(stays::<Networks>(networks), networks);
        let targets = r#"["127.0.0.0/8:*","10.1.2.3:443","[fd00::/8]:22","[::1]:*","self:*"]"#;
        assert_eq!(stays::<Targets>(targets), targets);
        for target in [r#""node1:22""#, r#""[fd00::1]:22""#] {
            assert_eq!(stays::<Target>(target), target);
        }
        assert_eq!(stays::<CertificateGlob>(r#""System:*""#), r#""system:*""#);
    }

    proptest! {
        #[test]
        fn every_pattern_and_name_is_written_as_it_is_read(text in "[a-z0-9*][a-z0-9*._-]{0,20}[a-z0-9*]") {
            let json = format!("{text:?}");
            prop_assert_eq!(&stays::<Glob>(&json), &json);
            if text.parse::<NodeName>().is_ok() {
                prop_assert_eq!(&stays::<NodeName>(&json), &json);
            }
        }
    }
}
