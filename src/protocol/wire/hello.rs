//! What the two ends of a link tell each other in gRPC metadata, and what both agreed.

use std::fmt;

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

use crate::names::{Instance, NodeName};

/// How the peer talks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// SuperEdge's words only; its sessions die with the link.
    Plain,
    /// With ours, which lets sessions be resumed. The number is the version that both ends speak.
    Extended(u8),
}

/// What a caller says of itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Hello {
    /// Which node, as it claims.
    pub node: NodeName,
    /// The secret that proves it.
    pub token: String,
    /// Its process, if it speaks extended.
    pub instance: Option<Instance>,
    /// What both ends speak.
    pub dialect: Dialect,
    /// Whether an older link of the same process is to stay beside this one, until the edge ends one of them.
    pub beside: bool,
}

/// Who calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// An edge, which has a token to prove its name.
    Edge(Hello),
    /// Another pod, which proved itself with the cloud's certificate. It always speaks extended.
    Pod {
        /// Its process.
        instance: Instance,
        /// What both ends speak.
        dialect: Dialect,
    },
}

/// Why a call's metadata cannot be used. The texts and codes are SuperEdge's (docs/superedge.md#authentication).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// No `authorization`.
    #[error("failed to obtain token")]
    NoToken,
    /// Not the JSON object it should be.
    #[error("authorization is not the JSON that an edge sends: {0}")]
    NotJson(String),
    /// The node's name cannot be one.
    #[error("{0}")]
    BadName(String),
    /// A pod that shows a token, or a role we do not know.
    #[error("role {0:?} cannot come with a token")]
    BadRole(String),
    /// Who says that it is a pod has to show a pod's certificate.
    #[error("a pod has to show its certificate: give it the cloud's, and name the CA file on this side")]
    NoCertificate,
    /// A pod of another program, or none.
    #[error("a pod has to speak the extended dialect")]
    PlainPod,
}

impl Dialect {
    /// The newest that this program speaks.
    pub const NEWEST: Self = Self::Extended(VERSION);
    /// From this version on each Open and Resume says who opened, Found how old a link is, and an edge is told of a
    /// conflict over its name.
    pub const CONFLICTS: u8 = 2;
    /// From this version on an end whose connection broke off says so behind what it has accepted, and is answered.
    pub const BREAKS: u8 = 2;

    /// From this version on a pod keeps an older link of a process beside a newer one that is marked so.
    pub const BESIDE: u8 = 2;

    /// Whether both ends speak that version of the extended dialect, or a newer one.
    pub fn has(self, version: u8) -> bool {
        matches!(self, Self::Extended(both) if both >= version)
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => f.write_str("plain"),
            Self::Extended(version) => write!(f, "extended/{version}"),
        }
    }
}

impl Caller {
    /// Reads a request's metadata. `certified`: whether the connection has shown a pod's certificate.
    pub fn from_request(headers: &HeaderMap, certified: bool) -> Result<Self, HelloError> {
        if headers.get(&ROLE).is_none_or(|role| role.as_bytes() != POD) {
            return Hello::from_request(headers).map(Self::Edge);
        }
        if headers.contains_key(http::header::AUTHORIZATION) {
            return Err(HelloError::BadRole("pod".into()));
        }
        if !certified {
            return Err(HelloError::NoCertificate);
        }
        match agreed(headers) {
            (dialect, Some(instance)) => Ok(Self::Pod { instance, dialect }),
            (_, None) => Err(HelloError::PlainPod),
        }
    }

    /// The metadata of a pod's request to another pod.
    pub fn pod_request(instance: Instance) -> HeaderMap {
        let mut headers = ours(instance);
        headers.insert(ROLE, HeaderValue::from_static("pod"));
        headers
    }

    /// What both ends speak.
    pub fn dialect(&self) -> Dialect {
        match self {
            Self::Edge(hello) => hello.dialect,
            Self::Pod { dialect, .. } => *dialect,
        }
    }

    /// Its process, if it speaks extended.
    pub fn instance(&self) -> Option<Instance> {
        match self {
            Self::Edge(hello) => hello.instance,
            Self::Pod { instance, .. } => Some(*instance),
        }
    }
}

impl Hello {
    /// Reads a request's metadata, leniently: unknown headers and JSON members are ignored.
    pub fn from_request(headers: &HeaderMap) -> Result<Self, HelloError> {
        let text = headers.get(http::header::AUTHORIZATION).ok_or(HelloError::NoToken)?;
        let text = String::from_utf8_lossy(text.as_bytes());
        let json = text.strip_prefix("Bearer ").unwrap_or(&text);
        let claim = Claim::read(json)?;
        let node = claim.nodename.parse().map_err(|e| HelloError::BadName(format!("{e}")))?;
        if let Some(role) = headers.get(&ROLE).filter(|role| role.as_bytes() != b"edge") {
            return Err(HelloError::BadRole(
                String::from_utf8_lossy(role.as_bytes()).chars().take(20).collect(),
            ));
        }
        let (dialect, instance) = agreed(headers);
        let marked = headers.get(&BESIDE).is_some_and(|mark| mark.as_bytes() == b"1");
        let beside = marked && dialect.has(Dialect::BESIDE);
        Ok(Self { node, token: claim.token, instance, dialect, beside })
    }

    /// The metadata of an edge's request.
    pub fn edge_request(node: &NodeName, token: &str, instance: Instance) -> HeaderMap {
        let claim = Claim { nodename: node.as_str().into(), token: token.into() };
        let json = serde_json::to_string(&claim).unwrap_or_default();
        let mut headers = ours(instance);
        if let Ok(mut value) = HeaderValue::from_str(&format!("Bearer {json}")) {
            value.set_sensitive(true);
            headers.insert(http::header::AUTHORIZATION, value);
        }
        headers.insert(ROLE, HeaderValue::from_static("edge"));
        headers
    }

    /// As [`Self::edge_request`], for a link that leaves an older one of this process in place. To be said only to a pod
    /// that has [`Dialect::BESIDE`]: any other closes the older one.
    pub fn beside_request(node: &NodeName, token: &str, instance: Instance) -> HeaderMap {
        let mut headers = Self::edge_request(node, token, instance);
        headers.insert(BESIDE, HeaderValue::from_static("1"));
        headers
    }

    /// The metadata of a pod's answer.
    pub fn response(instance: Instance) -> HeaderMap {
        ours(instance)
    }

    /// What a pod's answer says of it.
    pub fn from_response(headers: &HeaderMap) -> (Dialect, Option<Instance>) {
        agreed(headers)
    }
}

impl fmt::Debug for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hello({}, {:?}, {:?})", self.node, self.dialect, self.instance)
    }
}

/// The JSON in `authorization`. Go matches member names without regard to case, and so do we.
#[derive(Serialize, Deserialize)]
struct Claim {
    nodename: String,
    token: String,
}

impl Claim {
    fn read(json: &str) -> Result<Self, HelloError> {
        let members: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(json).map_err(|e| HelloError::NotJson(e.to_string()))?;
        let member = |name: &str| {
            let found = members.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            match found {
                None => Ok(String::new()),
                Some((_, serde_json::Value::String(text))) => Ok(text.clone()),
                Some(_) => Err(HelloError::NotJson(format!("{name} is not a string"))),
            }
        };
        Ok(Self { nodename: member("nodename")?, token: member("token")? })
    }
}

fn ours(instance: Instance) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(DIALECT, HeaderValue::from(u16::from(VERSION)));
    if let Ok(value) = HeaderValue::from_str(&instance.to_string()) {
        headers.insert(INSTANCE, value);
    }
    headers
}

fn agreed(headers: &HeaderMap) -> (Dialect, Option<Instance>) {
    let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let version = text(&DIALECT).and_then(|v| v.parse::<u64>().ok()).filter(|v| *v > 0);
    let instance = text(&INSTANCE).and_then(|i| i.parse().ok());
    match (version, instance) {
        (Some(version), Some(instance)) => {
            let both = version.min(u64::from(VERSION));
            (Dialect::Extended(u8::try_from(both).unwrap_or(VERSION)), Some(instance))
        }
        _ => (Dialect::Plain, None),
    }
}

/// The highest version of the extended dialect that this program speaks.
const VERSION: u8 = 2;
const DIALECT: HeaderName = HeaderName::from_static("tunnel-dialect");
const INSTANCE: HeaderName = HeaderName::from_static("tunnel-instance");
const ROLE: HeaderName = HeaderName::from_static("tunnel-role");
/// Mark of a link that leaves an older one of its process in place.
const BESIDE: HeaderName = HeaderName::from_static("tunnel-beside");
/// The role of a pod; absent, or any other that is known, it is an edge.
const POD: &[u8] = b"pod";

#[cfg(test)]
mod tests {
    use super::*;

    fn request(authorization: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", HeaderValue::from_bytes(authorization.as_bytes()).unwrap());
        headers
    }

    #[test]
    fn an_edge_says_who_it_is_and_both_agree_on_the_smaller_version() {
        let node = "edge-1".parse().unwrap();
        let mut headers = Hello::edge_request(&node, "a<b>&c", Instance::from_bits(3));
        let hello = Hello::from_request(&headers).unwrap();
        assert_eq!(hello.token, "a<b>&c");
        assert_eq!((hello.dialect, hello.instance), (Dialect::Extended(2), Some(Instance::from_bits(3))));
        for (said, agreed) in [("1", 1), ("2", 2), ("7", 2), ("70000", 2)] {
            headers.insert("tunnel-dialect", HeaderValue::from_static(said));
            assert_eq!(Hello::from_request(&headers).unwrap().dialect, Dialect::Extended(agreed));
        }
        headers.remove("tunnel-instance");
        assert_eq!(Hello::from_request(&headers).unwrap().dialect, Dialect::Plain);
    }

    #[test]
    fn a_link_beside_another_is_marked_and_the_mark_counts_only_where_both_know_it() {
        let node = "edge-1".parse().unwrap();
        let mut headers = Hello::beside_request(&node, "t", Instance::from_bits(3));
        let beside = |headers: &HeaderMap| Hello::from_request(headers).unwrap().beside;
        assert!(beside(&headers));
        assert!(!beside(&Hello::edge_request(&node, "t", Instance::from_bits(3))));
        headers.insert("tunnel-dialect", HeaderValue::from_static("1"));
        assert!(!beside(&headers), "the older dialect does not know it");
        headers.insert("tunnel-dialect", HeaderValue::from_static("2"));
        headers.insert("tunnel-beside", HeaderValue::from_static("0"));
        assert!(!beside(&headers));
        headers.insert("tunnel-beside", HeaderValue::from_static("1"));
        headers.remove("tunnel-instance");
        assert!(!beside(&headers), "a plain edge has no process that could have two links");
    }

    #[test]
    fn what_go_edges_send_is_read_leniently() {
        for text in [
            r#"Bearer {"nodename":"n1","token":"t"}"#,
            r#"{"NodeName":"n1","TOKEN":"t","more":1}"#,
            "Bearer {\"nodename\":\"n1\",\"token\":\"\\u0074\"}",
        ] {
            let hello = Hello::from_request(&request(text)).unwrap();
            assert_eq!((hello.node.as_str(), hello.token.as_str()), ("n1", "t"));
            assert_eq!(hello.dialect, Dialect::Plain);
        }
        assert_eq!(Hello::from_request(&HeaderMap::new()), Err(HelloError::NoToken));
        assert!(matches!(Hello::from_request(&request("Bearer nonsense")), Err(HelloError::NotJson(_))));
        assert!(matches!(Hello::from_request(&request("{}")), Err(HelloError::BadName(_))));
        assert!(matches!(Hello::from_request(&request(r#"{"nodename":1}"#)), Err(HelloError::NotJson(_))));
    }

    #[test]
    fn a_pod_with_a_token_is_refused_and_no_token_is_ever_shown() {
        let mut headers = request(r#"{"nodename":"n1","token":"secret"}"#);
        assert!(!format!("{:?}", Hello::from_request(&headers).unwrap()).contains("secret"));
        headers.insert("tunnel-role", HeaderValue::from_static("pod"));
        assert!(matches!(Hello::from_request(&headers), Err(HelloError::BadRole(_))));
        let ours = Hello::edge_request(&"n".parse().unwrap(), "secret", Instance::from_bits(1));
        assert!(!format!("{ours:?}").contains("secret"));
    }

    #[test]
    fn a_pod_needs_its_certificate_its_instance_and_no_token() {
        let ours = Caller::pod_request(Instance::from_bits(5));
        let pod = Caller::Pod { instance: Instance::from_bits(5), dialect: Dialect::NEWEST };
        assert_eq!(Caller::from_request(&ours, true), Ok(pod));
        assert_eq!(Caller::from_request(&ours, false), Err(HelloError::NoCertificate));
        let mut plain = ours.clone();
        plain.remove("tunnel-instance");
        assert_eq!(Caller::from_request(&plain, true), Err(HelloError::PlainPod));
        let mut both = ours;
        both.extend(request(r#"{"nodename":"n1","token":"secret"}"#));
        assert_eq!(Caller::from_request(&both, true), Err(HelloError::BadRole("pod".into())));
    }

    #[test]
    fn an_edge_is_an_edge_whatever_certificate_it_shows() {
        let headers = Hello::edge_request(&"n1".parse().unwrap(), "t", Instance::from_bits(3));
        for certified in [false, true] {
            let caller = Caller::from_request(&headers, certified).unwrap();
            assert!(matches!(&caller, Caller::Edge(hello) if hello.node.as_str() == "n1"));
            assert_eq!(
                (caller.instance(), caller.dialect()),
                (Some(Instance::from_bits(3)), Dialect::NEWEST)
            );
        }
    }
}
