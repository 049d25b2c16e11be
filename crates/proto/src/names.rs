//! Names from outside, parsed once and trusted afterwards: nodes, users and their devices, sessions, processes,
//! targets.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use crate::{debug_as_display, serde_as_text};

/// A node's name, which is its Kubernetes node name if it has one. It may be an IPv4 address. [`FromStr`] is the only
/// check of such a name.
///
/// Keeps the spelling it was given, as SuperEdge's edges expect their own name back byte for byte. Comparison ignores
/// case, like DNS. Cheap to clone.
#[derive(Clone, Eq, derive_more::Display)]
pub struct NodeName(Arc<str>);

/// A user's name. Comparison respects case, as in access rules and users files. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, derive_more::Display)]
pub struct UserName(Arc<str>);

/// The name of one of a user's machines: a DNS label, in lower case. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, derive_more::Display)]
pub struct DeviceName(Arc<str>);

/// A machine of a user, `USER/DEVICE`. No node's name has a slash, so neither can be taken for the other.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, derive_more::Display)]
#[display("{user}/{device}")]
pub struct UserDevice {
    /// The user.
    pub user: UserName,
    /// The machine.
    pub device: DeviceName,
}

/// A server's name for operators: 1 to 64 letters, digits, `-`, `_` or `.`, like the name of a host. Several servers
/// may have the same. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, derive_more::Display)]
pub struct ServerDisplayName(Arc<str>);

/// A session's ID: 16 random bytes, a version 4 UUID on the wire.
///
/// A process that knows the ID can resume the session, so logs and pages only show the first 8 digits
/// ([`Display`](std::fmt::Display)).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, derive_more::Display)]
#[display("{:08x}", _0 >> 96)]
pub struct SessionId(u128);

/// A running process's ID: 16 random bytes generated at its start, 32 hex digits on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, derive_more::Display, derive_more::Debug)]
#[display("{_0:032x}")]
#[debug("{:08x}", _0 >> 96)]
pub struct Instance(u128);

/// The host part of a [`Target`], without the port.
#[derive(Clone, PartialEq, Eq, Hash, derive_more::Display)]
pub enum Host {
    /// An IP address.
    Ip(IpAddr),
    /// A name: a node's, or one that the acceptor resolves. Lower case, 1 to 253 bytes.
    Name(Arc<str>),
}

/// A host and port that a client requests, as in `CONNECT host:port`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Target {
    /// Host.
    pub host: Host,
    /// TCP port, never 0.
    pub port: u16,
}

/// Error parsing a name. Sent to clients unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Not a DNS-like name of letters, digits, `-`, `_` and `.`.
    #[error("{0:?} is not a name; expected 1 to 253 letters, digits, '-', '_' or '.', the first not '-'")]
    Name(String),
    /// Not a user's name.
    #[error(
        "{0:?} is not a user; expected 1 to 63 letters, digits, '-', '_', '.', '@' or '+', the first a letter or digit"
    )]
    User(String),
    /// Not a label of DNS.
    #[error(
        "{0:?} is not a device; expected 1 to 63 letters, digits or '-', the first and last a letter or digit"
    )]
    Device(String),
    /// Not a server's name.
    #[error("{0:?} is not a server; expected 1 to 64 letters, digits, '-', '_' or '.'")]
    Server(String),
    /// A name that no node may have, because it has another meaning in token files, rules or frames.
    #[error("no node can have the name {0:?}, which has a meaning of its own; choose another name")]
    Reserved(String),
    /// An address that does not belong to one machine.
    #[error("no node can have the name {0:?}, an address that means no single machine; choose another name")]
    Address(String),
    /// No port, or not a number.
    #[error(
        "{0:?} has no port; expected host:port, for example node1:22, [fd00::1]:22, or a server's tunnel.example.org:9000"
    )]
    Port(String),
    /// A number out of range.
    #[error("{0:?} is not a port; expected 1 to 65535")]
    NoSuchPort(String),
    /// Not a UUID.
    #[error("not a session id")]
    Session,
    /// Not 32 hex digits.
    #[error("not an instance; expected 32 hex digits")]
    Instance,
}

/// Implements `as_str`.
macro_rules! as_str {
    ($($of:ty),*) => {$(
        impl $of {
            /// Returns the name.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
    )*};
}

as_str!(NodeName, UserName, DeviceName, ServerDisplayName);
debug_as_display!(NodeName, UserName, DeviceName, ServerDisplayName, UserDevice, SessionId, Host, Target);
serde_as_text!(NodeName, UserName, ServerDisplayName, Host, Target);

impl NodeName {
    /// Returns the placeholder for a target at no node: the receiver dials the target itself.
    pub fn direct() -> Self {
        Self("-".into())
    }

    /// Returns the placeholder in frames that concern no node: between servers, and on a user's link.
    pub fn none() -> Self {
        Self("pod".into())
    }

    /// Returns the placeholder for the line of a token file that applies to nodes without their own line.
    pub fn any() -> Self {
        Self("default".into())
    }

    /// Returns the placeholder of that text, if it is one. No node has its name.
    pub fn placeholder(text: &str) -> Option<Self> {
        [Self::direct(), Self::none(), Self::any()].into_iter().find(|name| name.0.eq_ignore_ascii_case(text))
    }

    /// Returns the address that is the node's name, if it is one.
    pub fn address(&self) -> Option<IpAddr> {
        self.0.parse().ok()
    }

    /// Returns the target at a port of the node itself. The edge would dial a name that is an address as that address,
    /// so `localhost` replaces it.
    pub fn target(&self, port: u16) -> Target {
        let name = if self.address().is_some() { LOCALHOST.to_owned() } else { self.0.to_ascii_lowercase() };
        Target { host: Host::Name(name.into()), port }
    }

    /// Returns true if a host in a target at this node means the node itself: its name, or `localhost`.
    pub fn matches_host(&self, host: &Host) -> bool {
        host.is_localhost() || matches!(host, Host::Name(name) if name.eq_ignore_ascii_case(&self.0))
    }
}

impl SessionId {
    /// Returns a new ID from the operating system's random source.
    pub fn random() -> Self {
        Self::from_bits(rand::random())
    }

    /// Returns an ID of 128 bits, 6 of which are replaced by the UUID's version and variant. For simulations with a
    /// seed.
    pub fn from_bits(bits: u128) -> Self {
        Self(bits & !(0xf << 76) & !(0b11 << 62) | (4 << 76) | (0b10 << 62))
    }

    /// Returns the index of the shard that the ID belongs to, out of `shards`.
    pub fn shard(self, shards: usize) -> usize {
        usize::try_from(self.0 % 65_521).unwrap_or(0) % shards.max(1)
    }

    /// Returns a number from 0 to 1 that is the same at every server.
    pub fn chance(self) -> f64 {
        f64::from(u32::try_from(self.0 & u128::from(u32::MAX)).unwrap_or(0)) / f64::from(u32::MAX)
    }

    /// Returns the whole ID, as sent in `topic`. It is a secret: never log it.
    pub fn topic(self) -> String {
        // Not formatted, because each frame has it.
        let mut text = String::with_capacity(36);
        for byte in self.0.to_be_bytes() {
            if DASHES.contains(&text.len()) {
                text.push('-');
            }
            for digit in [byte >> 4, byte & 0xf] {
                text.push(char::from(if digit < 10 { b'0' + digit } else { b'a' - 10 + digit }));
            }
        }
        text
    }
}

impl Instance {
    /// Returns a new ID from the operating system's random source. Called once in each process.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// Returns an ID of the given bits. For simulations with a seed.
    pub fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// Returns the 16 bytes of `Control.instance`.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// Parses the 16 bytes of `Control.instance`; returns `None` for any other length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(u128::from_be_bytes(bytes.try_into().ok()?)))
    }
}

impl Host {
    /// Returns the node that a client may mean by this host: that of the name or, if the node is named by its address,
    /// of the address. No other function turns a client's text into a node.
    pub fn node(&self) -> Option<NodeName> {
        match self {
            Self::Ip(ip) => ip.to_canonical().to_string().parse().ok(),
            Self::Name(name) => name.parse().ok(),
        }
    }

    /// Returns true for the name `localhost`, which is never resolved by DNS.
    pub fn is_localhost(&self) -> bool {
        matches!(self, Self::Name(name) if **name == *LOCALHOST)
    }
}

impl From<SocketAddr> for Target {
    fn from(at: SocketAddr) -> Self {
        Self { host: Host::Ip(at.ip()), port: at.port() }
    }
}

impl FromStr for NodeName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if !is_name(text) {
            return Err(NameError::Name(excerpt(text)));
        }
        match text.parse() {
            Ok(ip) if !is_machine_address(ip) => Err(NameError::Address(text.to_owned())),
            _ if Self::placeholder(text).is_some() || is_loopback_name(text) => {
                Err(NameError::Reserved(text.to_owned()))
            }
            // ssh and others would take it for an option.
            _ if text.starts_with('-') => Err(NameError::Name(excerpt(text))),
            _ => Ok(Self(text.into())),
        }
    }
}

impl FromStr for UserName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.@+".contains(&b);
        // A leading dash would be parsed as an option in command lines.
        let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        if starts_well && text.len() <= MAX_LABEL && text.bytes().all(plain) {
            Ok(Self(text.into()))
        } else {
            Err(NameError::User(excerpt(text)))
        }
    }
}

impl FromStr for DeviceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        let dashes = text.starts_with('-') || text.ends_with('-');
        if matches!(text.len(), 1..=MAX_LABEL) && text.bytes().all(plain) && !dashes {
            Ok(Self(text.to_ascii_lowercase().into()))
        } else {
            Err(NameError::Device(excerpt(text)))
        }
    }
}

impl FromStr for ServerDisplayName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        if matches!(text.len(), 1..=MAX_HOST_NAME) && text.bytes().all(plain) {
            Ok(Self(text.into()))
        } else {
            Err(NameError::Server(excerpt(text)))
        }
    }
}

impl FromStr for UserDevice {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (user, device) = text.split_once('/').ok_or_else(|| NameError::Device(excerpt(text)))?;
        Ok(Self { user: user.parse()?, device: device.parse()? })
    }
}

/// The places of the dashes in a session's whole ID.
const DASHES: [usize; 4] = [8, 13, 18, 23];

impl FromStr for SessionId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let mut bits = 0;
        for (at, byte) in text.bytes().enumerate() {
            match char::from(byte).to_digit(16) {
                Some(digit) if !DASHES.contains(&at) => bits = bits << 4 | u128::from(digit),
                None if byte == b'-' && DASHES.contains(&at) => {}
                _ => return Err(NameError::Session),
            }
        }
        if text.len() == 36 { Ok(Self(bits)) } else { Err(NameError::Session) }
    }
}

impl FromStr for Instance {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(NameError::Instance);
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| NameError::Instance)
    }
}

impl FromStr for Host {
    type Err = NameError;

    /// Parses an address (IPv6 with or without brackets) or a name. A trailing dot of a name is dropped.
    fn from_str(text: &str) -> Result<Self, NameError> {
        let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
        if let Ok(ip) = bare.unwrap_or(text).parse() {
            return if bare.is_some() && matches!(ip, IpAddr::V4(_)) {
                Err(NameError::Name(excerpt(text)))
            } else {
                Ok(Self::Ip(ip))
            };
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        if is_name(name) && name.parse::<IpAddr>().is_err() {
            Ok(Self::Name(name.to_ascii_lowercase().into()))
        } else {
            Err(NameError::Name(excerpt(text)))
        }
    }
}

impl FromStr for Target {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (host, port) = text.rsplit_once(':').ok_or_else(|| NameError::Port(excerpt(text)))?;
        let bare = host.contains(':') && !host.starts_with('[');
        if bare || port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(NameError::Port(excerpt(text)));
        }
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self { host: host.parse()?, port }),
            _ => Err(NameError::NoSuchPort(excerpt(port))),
        }
    }
}

impl PartialEq for NodeName {
    fn eq(&self, other: &Self) -> bool {
        self.0.eq_ignore_ascii_case(&other.0)
    }
}

impl Hash for NodeName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for byte in self.0.bytes() {
            state.write_u8(byte.to_ascii_lowercase());
        }
    }
}

impl fmt::Display for Target {
    /// Writes the target as in a URL: an IPv6 address in brackets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host {
            Host::Ip(ip) => SocketAddr::new(ip, self.port).fmt(f),
            Host::Name(ref name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Returns true if one machine may have the address, so that its node may be named by it.
fn is_machine_address(ip: Ipv4Addr) -> bool {
    let [first, ..] = ip.octets();
    !(matches!(first, 0 | 240..) || ip.is_loopback() || ip.is_link_local() || ip.is_multicast())
}

fn is_name(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let dots = text.starts_with('.') || text.ends_with('.') || text.contains("..");
    matches!(text.len(), 1..=253) && text.bytes().all(plain) && !dots
}

/// Maximum length in bytes of a label of DNS, and of a user's name.
const MAX_LABEL: usize = 63;
/// The longest host name that Linux allows.
const MAX_HOST_NAME: usize = 64;

fn is_loopback_name(text: &str) -> bool {
    let first = text.split('.').next().unwrap_or(text);
    LOOPBACK_NAMES.iter().any(|name| name.eq_ignore_ascii_case(first))
}

/// The name that means the dialling machine everywhere.
const LOCALHOST: &str = "localhost";

/// First labels of the names that each machine has for itself, also one whose name was never set.
const LOOPBACK_NAMES: [&str; 3] = [LOCALHOST, "localhost4", "localhost6"];

/// Returns the start of a remote's text for an error message: long enough to recognise, too short to flood a log.
fn excerpt(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_target_needs_a_host_and_a_port() {
        for (text, shown) in [
            ("node1:22", "node1:22"),
            ("Node1.:22", "node1:22"),
            ("[::1]:22", "[::1]:22"),
            ("10.0.0.1:65535", "10.0.0.1:65535"),
        ] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), shown);
        }
        for bad in [
            "",
            "node1",
            "node1:",
            "node1:0",
            "node1:65536",
            "node1:+22",
            ":22",
            "::1:22",
            "a b:22",
            "g..:1",
            "1.7.0.18.:6",
            "[node]:1",
            "[10.0.0.1]:1",
        ] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
        let error = |text: &str| text.parse::<Target>().unwrap_err().to_string();
        assert_eq!(error("node1:99999"), "\"99999\" is not a port; expected 1 to 65535");
        assert!(
            error("node1").starts_with("\"node1\" has no port; expected host:port"),
            "{}",
            error("node1")
        );
    }

    #[test]
    fn node_names_compare_without_case_and_keep_their_spelling() {
        let name: NodeName = "Edge-1".parse().unwrap();
        assert_eq!(name, "edge-1".parse().unwrap());
        assert_eq!(name.as_str(), "Edge-1");
    }

    #[test]
    fn names_of_users_and_devices_are_plain_words_without_a_slash() {
        let long = "a".repeat(63);
        for user in ["alice", "Alice.B", "alice@example.org", "7", "a+b_c-d", &long] {
            assert_eq!(user.parse::<UserName>().unwrap().as_str(), user);
        }
        for bad in ["", "-a", ".a", "a/b", "a:b", "a*", "a b", "a\"b", "a\n", "\u{e4}", &format!("{long}a")] {
            assert!(bad.parse::<UserName>().unwrap_err().to_string().contains("is not a user"), "{bad}");
        }
        assert_eq!("LapTop-1".parse::<DeviceName>().unwrap().as_str(), "laptop-1");
        assert!(long.parse::<DeviceName>().is_ok());
        for bad in ["", "-a", "a-", "a.b", "a_b", "a/b", "a b", &format!("{long}a")] {
            assert!(bad.parse::<DeviceName>().unwrap_err().to_string().contains("is not a device"), "{bad}");
        }
    }

    #[test]
    fn a_client_is_a_user_and_a_device_and_never_a_node() {
        for (text, shown) in [("alice/laptop", "alice/laptop"), ("A@b.example/Lap-2", "A@b.example/lap-2")] {
            assert_eq!(text.parse::<UserDevice>().unwrap().to_string(), shown);
            assert!(text.parse::<NodeName>().is_err(), "{text}");
        }
        for bad in ["alice", "/laptop", "alice/", "a/b/c"] {
            assert!(bad.parse::<UserDevice>().is_err(), "{bad}");
        }
    }

    #[test]
    fn reserved_words_and_special_addresses_are_refused_as_node_names() {
        assert!(matches!("-node".parse::<NodeName>(), Err(NameError::Name(_))), "an option of a command");
        for text in ["default", "Default", "-", "pod", "POD"] {
            assert_eq!(text.parse::<NodeName>(), Err(NameError::Reserved(text.to_owned())), "{text}");
            assert!(NodeName::placeholder(text).is_some(), "{text}");
        }
        for text in ["localhost", "LocalHost", "localhost.localdomain", "localhost6"] {
            assert_eq!(text.parse::<NodeName>(), Err(NameError::Reserved(text.to_owned())), "{text}");
        }
        for text in ["127.0.0.1", "0.0.0.0", "0.1.2.3", "169.254.169.254", "224.0.0.1", "255.255.255.255"] {
            assert_eq!(text.parse::<NodeName>(), Err(NameError::Address(text.to_owned())), "{text}");
        }
        for text in ["defaults", "pod1", "a--", "node-", "192.168.4.33", "node-7.9", "1", "localhost-7"] {
            assert_eq!(text.parse::<NodeName>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn a_host_names_the_node_of_that_name_even_if_it_is_an_address() {
        let node = |host: &str| host.parse::<Host>().unwrap().node().map(|node| node.to_string());
        assert_eq!(node("Node1.").as_deref(), Some("node1"));
        assert_eq!(node("docker-worker-7.9").as_deref(), Some("docker-worker-7.9"));
        assert_eq!(node(&"x".repeat(64)), Some("x".repeat(64)));
        assert_eq!(node("192.168.4.33").as_deref(), Some("192.168.4.33"));
        assert_eq!(node("[::ffff:192.168.4.33]").as_deref(), Some("192.168.4.33"));
        for none in ["fd00::1", "127.0.0.1", "pod", "default", "-", "localhost"] {
            assert_eq!(node(none), None, "{none}");
        }
    }

    #[test]
    fn the_target_for_a_node_itself_is_never_an_address() {
        for (node, target) in [("Node1", "node1:22"), ("192.168.4.33", "localhost:22"), ("7.9", "7.9:22")] {
            let node: NodeName = node.parse().unwrap();
            let Target { host, port } = node.target(22);
            assert_eq!(Target { host: host.clone(), port }.to_string(), target);
            assert!(node.matches_host(&host) && node.matches_host(&"localhost".parse().unwrap()));
            assert!(!node.matches_host(&"192.168.4.33".parse().unwrap()));
        }
    }

    #[test]
    fn only_a_uuid_is_a_whole_session_id() {
        let text = "01234567-89ab-4def-8123-456789abcDEF";
        let id: SessionId = text.parse().unwrap();
        assert_eq!(id.topic(), text.to_lowercase());
        let far = "0".repeat(36);
        for bad in [
            &text[1..],
            "0123456-789ab-4def-8123-456789abcdef",
            &far,
            &format!("{text}0"),
            "é1234567-89ab-4def-8123-456789abcde",
        ] {
            assert_eq!(bad.parse::<SessionId>(), Err(NameError::Session), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_session_id_round_trips_through_its_text(bits: u128) {
            let id = SessionId::from_bits(bits);
            prop_assert_eq!(id.topic().parse::<SessionId>(), Ok(id));
            prop_assert_eq!(&id.topic()[14..15], "4");
            prop_assert_eq!(id.to_string().len(), 8);
        }

        #[test]
        fn no_text_makes_a_parser_panic(text in ".{0,300}") {
            let _ = (text.parse::<Target>(), text.parse::<NodeName>(), text.parse::<SessionId>(), text.parse::<Instance>());
        }
    }
}
