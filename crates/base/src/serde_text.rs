//! Serialization of policies as the texts that config files contain.

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use tunnel_proto::serde_as_text;

use crate::policy::ports::{HOST, PortTarget};
use crate::policy::targets::TargetEntry;
use crate::policy::{CertificateGlob, NodeGlob};

serde_as_text!(TargetEntry, NodeGlob, CertificateGlob);

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::Networks;
    use crate::policy::targets::Targets;
    use tunnel_proto::names::{NodeName, Target};

    fn stays<T: Serialize + for<'de> Deserialize<'de>>(json: &str) -> String {
        serde_json::to_string(&serde_json::from_str::<T>(json).unwrap()).unwrap()
    }

    #[test]
    fn values_serialise_as_they_are_parsed() {
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
        fn patterns_and_names_serialise_as_they_are_parsed(text in "[a-z0-9*][a-z0-9*._-]{0,20}[a-z0-9*]") {
            let json = format!("{text:?}");
            prop_assert_eq!(&stays::<NodeGlob>(&json), &json);
            if text.parse::<NodeName>().is_ok() {
                prop_assert_eq!(&stays::<NodeName>(&json), &json);
            }
        }
    }
}
