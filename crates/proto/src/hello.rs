//! The hello of a link: gRPC metadata in both directions, from which both ends derive the dialect.

use std::fmt;
use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

use crate::frame::MAX_NODE_IPS;
use tunnel_base::names::{Instance, NodeName};

/// The dialect of the protocol that both ends of a link speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// SuperEdge's messages only. Sessions end with the link.
    Plain,
    /// The extension, with resumable sessions. The number is the version that both ends support.
    Extended(u8),
}

/// The hello that an edge sends with the call for a link.
#[derive(Clone, PartialEq, Eq)]
pub struct Hello {
    /// Node that the caller claims to be.
    pub node: NodeName,
    /// Secret that proves the node's name.
    pub token: String,
    /// The caller's process; `None` with the plain dialect.
    pub instance: Option<Instance>,
    /// Dialect of both ends.
    pub dialect: Dialect,
    /// Purpose of the link next to an older link of the same process.
    pub purpose: LinkPurpose,
    /// Addresses that the caller claims for its node, at most 8.
    pub ips: Box<[IpAddr]>,
}

/// The purpose of a new link of an edge's process that already has a link to the same server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkPurpose {
    /// The new link replaces the older one, which is closed.
    Primary,
    /// The older link is unresponsive, or is handed over to the new one. It stays until the edge closes one of the two.
    Backup,
    /// The older link is busy with bulk data and remains the node's primary link. The new link carries sessions with
    /// little data.
    Interactive,
}

/// The process that makes the call for a link, as identified by the call's metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// An edge, with a token that proves its name.
    Edge(Hello),
    /// Another server, which has presented the cloud's certificate. Its dialect is always extended.
    Peer {
        /// The server's process.
        instance: Instance,
        /// Dialect of both ends.
        dialect: Dialect,
        /// Whether an older link of the same process stays open until that server closes one of them.
        backup: bool,
    },
}

/// Reason why the metadata of a call is not accepted. Texts and codes are SuperEdge's; see
/// docs/reference/superedge-wire.md#authentication.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The call has no `authorization`.
    #[error("failed to obtain token")]
    NoToken,
    /// `authorization` is not the expected JSON object.
    #[error("cannot parse authorization as JSON: {0}")]
    NotJson(String),
    /// The node's name is not valid.
    #[error("{0}")]
    BadName(String),
    /// The role is unknown, or a server sent a token.
    #[error("role {0:?} is not allowed with a token")]
    BadRole(String),
    /// A caller with the role of a server has not presented a server's certificate.
    #[error(
        "server presented no valid certificate; use the cloud's certificate and set the CA file on this side"
    )]
    NoCertificate,
    /// A caller with the role of a server does not speak the extended dialect.
    #[error("server does not speak the extended dialect")]
    PlainPeer,
}

impl Dialect {
    /// The newest dialect of this program.
    pub const NEWEST: Self = Self::Extended(VERSION);
    /// First version in which Open and Resume carry the opener, Found carries the age of the link, and an edge receives
    /// a Conflict about its name.
    pub const CONFLICTS: u8 = 2;
    /// First version in which an end sends ResetAt after its last bytes if its connection failed, and receives a reply.
    pub const RESET_AT: u8 = 2;
    /// First version in which a server keeps an older link of a process next to a new backup link.
    pub const BACKUP_LINKS: u8 = 2;
    /// First version in which servers announce their number of nodes to each other.
    pub const PEER_LOAD: u8 = 2;
    /// First version in which a server announces a node only to the node's location replicas, which store its location.
    pub const LOCATION_REPLICAS: u8 = 3;
    /// First version in which a server accepts an interactive link next to one that is busy with bulk data.
    pub const INTERACTIVE: u8 = 4;

    /// Returns true if both ends support `version` of the extension, or a newer one.
    pub fn supports(self, version: u8) -> bool {
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
    /// Parses a request's metadata. `certified` is true if the connection presented a server's certificate.
    pub fn from_request(headers: &HeaderMap, certified: bool) -> Result<Self, HelloError> {
        if headers.get(&ROLE).is_none_or(|role| role.as_bytes() != PEER) {
            return Hello::from_request(headers).map(Self::Edge);
        }
        if headers.contains_key(http::header::AUTHORIZATION) {
            return Err(HelloError::BadRole("peer".into()));
        }
        if !certified {
            return Err(HelloError::NoCertificate);
        }
        match agreed(headers) {
            (dialect, Some(instance)) => {
                Ok(Self::Peer { instance, dialect, backup: purpose(headers, dialect) == LinkPurpose::Backup })
            }
            (_, None) => Err(HelloError::PlainPeer),
        }
    }

    /// Returns the metadata of a server's request to a peer.
    pub fn peer_request(instance: Instance) -> HeaderMap {
        let mut headers = local_headers(instance);
        headers.insert(ROLE, HeaderValue::from_static("peer"));
        headers
    }

    /// Like [`Self::peer_request`], but for a backup link, which leaves an older link of this process open.
    pub fn peer_backup_request(instance: Instance) -> HeaderMap {
        let mut headers = Self::peer_request(instance);
        headers.insert(LINK, BACKUP);
        headers
    }

    /// Returns the dialect of both ends.
    pub fn dialect(&self) -> Dialect {
        match self {
            Self::Edge(hello) => hello.dialect,
            Self::Peer { dialect, .. } => *dialect,
        }
    }

    /// Returns the caller's process; `None` with the plain dialect.
    pub fn instance(&self) -> Option<Instance> {
        match self {
            Self::Edge(hello) => hello.instance,
            Self::Peer { instance, .. } => Some(*instance),
        }
    }
}

impl Hello {
    /// Parses a request's metadata leniently: unknown headers and JSON members are ignored.
    pub fn from_request(headers: &HeaderMap) -> Result<Self, HelloError> {
        let text = headers.get(http::header::AUTHORIZATION).ok_or(HelloError::NoToken)?;
        let text = String::from_utf8_lossy(text.as_bytes());
        let json = text.strip_prefix("Bearer ").unwrap_or(&text);
        let claim = Credentials::read(json)?;
        let node = claim.nodename.parse().map_err(|e| HelloError::BadName(format!("{e}")))?;
        let (dialect, instance) = agreed(headers);
        let purpose = match headers.get(&ROLE).map(HeaderValue::as_bytes) {
            None | Some(EDGE) => purpose(headers, dialect),
            Some(INTERACTIVE) if dialect.supports(Dialect::INTERACTIVE) => LinkPurpose::Interactive,
            Some(role) => {
                return Err(HelloError::BadRole(String::from_utf8_lossy(role).chars().take(20).collect()));
            }
        };
        Ok(Self { node, token: claim.token, instance, dialect, purpose, ips: ips(headers) })
    }

    /// Returns the metadata of an edge's request.
    pub fn edge_request(node: &NodeName, token: &str, instance: Instance) -> HeaderMap {
        let claim = Credentials { nodename: node.as_str().into(), token: token.into() };
        let json = serde_json::to_string(&claim).unwrap_or_default();
        let mut headers = local_headers(instance);
        if let Ok(mut value) = HeaderValue::from_str(&format!("Bearer {json}")) {
            value.set_sensitive(true);
            headers.insert(http::header::AUTHORIZATION, value);
        }
        headers.insert(ROLE, HeaderValue::from_static("edge"));
        headers
    }

    /// Adds the purpose of the link to an edge's request.
    ///
    /// A server keeps the older link only if it has [`Dialect::BACKUP_LINKS`], or [`Dialect::INTERACTIVE`] for an
    /// interactive link. Any other server closes it.
    pub fn with_purpose(headers: &mut HeaderMap, purpose: LinkPurpose) {
        match purpose {
            LinkPurpose::Primary => None,
            LinkPurpose::Backup => headers.insert(LINK, BACKUP),
            LinkPurpose::Interactive => headers.insert(ROLE, HeaderValue::from_static("interactive")),
        };
    }

    /// Adds the addresses of the node to an edge's request, at most 8.
    pub fn with_node_ips(headers: &mut HeaderMap, ips: &[IpAddr]) {
        let all: Vec<_> = ips.iter().take(MAX_NODE_IPS).map(ToString::to_string).collect();
        let value = HeaderValue::from_str(&all.join(",")).ok().filter(|value| !value.is_empty());
        headers.extend(value.map(|value| (IPS, value)));
    }

    /// Returns the metadata of a server's response.
    pub fn response(instance: Instance) -> HeaderMap {
        local_headers(instance)
    }

    /// Parses the metadata of a server's response.
    pub fn from_response(headers: &HeaderMap) -> (Dialect, Option<Instance>) {
        agreed(headers)
    }
}

/// Adds padding to the metadata of either end, so that the handshake shows whether large packets arrive.
pub fn pad(headers: &mut HeaderMap, bytes: usize) {
    // HPACK does not compress this letter.
    if let Ok(mut value) = HeaderValue::from_str(&"X".repeat(bytes)) {
        // Otherwise both ends would keep it in HPACK's table.
        value.set_sensitive(true);
        headers.insert(PADDING, value);
    }
}

/// Returns true if the remote has padded its metadata, so that it expects the same.
pub fn is_padded(headers: &HeaderMap) -> bool {
    headers.contains_key(&PADDING)
}

fn ips(headers: &HeaderMap) -> Box<[IpAddr]> {
    let text = headers.get(&IPS).and_then(|value| value.to_str().ok()).unwrap_or_default();
    text.split(',').take(MAX_NODE_IPS).filter_map(|ip| ip.parse().ok()).collect()
}

fn purpose(headers: &HeaderMap, dialect: Dialect) -> LinkPurpose {
    let silent = dialect.supports(Dialect::BACKUP_LINKS) && headers.get(&LINK) == Some(&BACKUP);
    if silent { LinkPurpose::Backup } else { LinkPurpose::Primary }
}

impl fmt::Debug for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hello({}, {:?}, {:?})", self.node, self.dialect, self.instance)
    }
}

fn local_headers(instance: Instance) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(DIALECT, HeaderValue::from(u16::from(VERSION)));
    if let Ok(value) = HeaderValue::from_str(&instance.to_string()) {
        headers.insert(INSTANCE, value);
    }
    headers.insert(PROGRAM, HeaderValue::from_static(env!("CARGO_PKG_VERSION")));
    headers
}

/// Returns the name of the program that sent this metadata, for people: our version, or its `user-agent`. At most 40
/// printable characters.
pub fn user_agent(headers: &HeaderMap) -> Option<Box<str>> {
    let said = headers.get(&PROGRAM).or_else(|| headers.get(http::header::USER_AGENT))?;
    let text: String =
        said.to_str().ok()?.chars().filter(char::is_ascii_graphic).take(PROGRAM_CHARS).collect();
    (!text.is_empty()).then(|| text.into())
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

/// Highest version of the extended dialect that this program supports.
const VERSION: u8 = 4;
const DIALECT: HeaderName = HeaderName::from_static("tunnel-dialect");
const INSTANCE: HeaderName = HeaderName::from_static("tunnel-instance");
const ROLE: HeaderName = HeaderName::from_static("tunnel-role");
/// Header of a backup link. The older link of its process is unresponsive and stays open.
const LINK: HeaderName = HeaderName::from_static("tunnel-link");
const BACKUP: HeaderValue = HeaderValue::from_static("backup");
/// Header with the addresses of an edge's node.
const IPS: HeaderName = HeaderName::from_static("tunnel-node-ips");
/// Header without meaning, as long as a full segment.
const PADDING: HeaderName = HeaderName::from_static("tunnel-padding");
/// Header with the version of the program, for people.
const PROGRAM: HeaderName = HeaderName::from_static("tunnel-version");
/// Maximum number of characters kept of the program's version.
const PROGRAM_CHARS: usize = 40;
/// Role of a server. Without a role, or with another known one, the caller is an edge.
const PEER: &[u8] = b"peer";
const EDGE: &[u8] = b"edge";
/// Role of an edge's interactive link. It is a role because older servers refuse an unknown role, but ignore an unknown
/// header.
const INTERACTIVE: &[u8] = b"interactive";

/// The JSON in `authorization`. Member names are case-insensitive, as in Go.
#[derive(Serialize, Deserialize)]
pub(crate) struct Credentials {
    pub(crate) nodename: String,
    pub(crate) token: String,
}

impl Credentials {
    pub(crate) fn read(json: &str) -> Result<Self, HelloError> {
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
        assert_eq!((hello.dialect, hello.instance), (Dialect::Extended(4), Some(Instance::from_bits(3))));
        for (said, agreed) in [("1", 1), ("3", 3), ("7", 4), ("70000", 4)] {
            headers.insert("tunnel-dialect", HeaderValue::from_static(said));
            assert_eq!(Hello::from_request(&headers).unwrap().dialect, Dialect::Extended(agreed));
        }
        headers.remove("tunnel-instance");
        assert_eq!(Hello::from_request(&headers).unwrap().dialect, Dialect::Plain);
    }

    #[test]
    fn the_program_is_told_for_people_and_cut_to_what_can_be_printed() {
        let node = "edge-1".parse().unwrap();
        let ours = Hello::edge_request(&node, "t", Instance::from_bits(3));
        assert_eq!(user_agent(&ours).as_deref(), Some(env!("CARGO_PKG_VERSION")));
        let go = |value: &[u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            user_agent(&HeaderMap::from_iter([(http::header::USER_AGENT, value)]))
        };
        assert_eq!(go(b"grpc-go/1.38.0").as_deref(), Some("grpc-go/1.38.0"));
        assert_eq!(go(&[b'a'; 100]).unwrap().len(), PROGRAM_CHARS);
        assert_eq!((go(b"\xff"), go(b"\t"), user_agent(&HeaderMap::new())), (None, None, None));
    }

    #[test]
    fn a_link_beside_another_is_marked_and_the_mark_counts_only_where_both_know_it() {
        let node = "edge-1".parse().unwrap();
        let mut headers = Hello::edge_request(&node, "t", Instance::from_bits(3));
        let purpose_of = |headers: &HeaderMap| Hello::from_request(headers).unwrap().purpose;
        assert_eq!(purpose_of(&headers), LinkPurpose::Primary);
        Hello::with_purpose(&mut headers, LinkPurpose::Backup);
        for version in 1..=4_u8 {
            headers.insert("tunnel-dialect", HeaderValue::from(u16::from(version)));
            let known =
                if version >= Dialect::BACKUP_LINKS { LinkPurpose::Backup } else { LinkPurpose::Primary };
            assert_eq!(purpose_of(&headers), known, "version {version}");
        }
        for other in ["0", "2"] {
            headers.insert("tunnel-link", HeaderValue::from_static(other));
            assert_eq!(purpose_of(&headers), LinkPurpose::Primary);
        }
        Hello::with_purpose(&mut headers, LinkPurpose::Backup);
        headers.remove("tunnel-instance");
        assert_eq!(
            purpose_of(&headers),
            LinkPurpose::Primary,
            "a plain edge has no process that could have two links"
        );
    }

    #[test]
    fn an_interactive_link_has_a_role_of_its_own_and_who_does_not_know_it_refuses() {
        let mut headers = Hello::edge_request(&"edge-1".parse().unwrap(), "t", Instance::from_bits(3));
        Hello::with_purpose(&mut headers, LinkPurpose::Interactive);
        for version in 1..=4_u8 {
            headers.insert("tunnel-dialect", HeaderValue::from(u16::from(version)));
            let read = Hello::from_request(&headers).map(|hello| hello.purpose);
            let refused = Err(HelloError::BadRole("interactive".into()));
            assert_eq!(
                read,
                if version >= Dialect::INTERACTIVE { Ok(LinkPurpose::Interactive) } else { refused }
            );
        }
        headers.remove("tunnel-instance");
        assert!(
            Hello::from_request(&headers).is_err(),
            "a plain edge has no process that could have two links"
        );
    }

    #[test]
    fn an_edge_names_its_nodes_addresses_and_no_more_than_a_few_are_read() {
        let ours = |ips: &[IpAddr]| {
            let mut headers = Hello::edge_request(&"edge-1".parse().unwrap(), "t", Instance::from_bits(3));
            Hello::with_node_ips(&mut headers, ips);
            headers
        };
        let both: [IpAddr; 2] = [[10, 0, 0, 7].into(), "fd00::7".parse().unwrap()];
        assert_eq!(*Hello::from_request(&ours(&both)).unwrap().ips, both);
        assert!(!ours(&[]).contains_key("tunnel-node-ips"));
        let many: Vec<_> = (0..100).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        assert_eq!(*Hello::from_request(&ours(&many)).unwrap().ips, many[..MAX_NODE_IPS]);
        let mut headers = ours(&[]);
        let wild = "x,10.0.0.7,,fd00::7 ,1.2.3.4,a,b,c,10.0.0.9";
        headers.insert("tunnel-node-ips", HeaderValue::from_static(wild));
        assert_eq!(
            *Hello::from_request(&headers).unwrap().ips,
            ["10.0.0.7", "1.2.3.4"].map(|ip| ip.parse().unwrap()) as [IpAddr; 2]
        );
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
    fn a_server_with_a_token_is_refused_and_no_token_is_ever_shown() {
        let mut headers = request(r#"{"nodename":"n1","token":"secret"}"#);
        assert!(!format!("{:?}", Hello::from_request(&headers).unwrap()).contains("secret"));
        headers.insert("tunnel-role", HeaderValue::from_static("peer"));
        assert!(matches!(Hello::from_request(&headers), Err(HelloError::BadRole(_))));
        let ours = Hello::edge_request(&"n".parse().unwrap(), "secret", Instance::from_bits(1));
        assert!(!format!("{ours:?}").contains("secret"));
    }

    #[test]
    fn a_server_needs_its_certificate_its_instance_and_no_token() {
        let ours = Caller::peer_request(Instance::from_bits(5));
        let server =
            Caller::Peer { instance: Instance::from_bits(5), dialect: Dialect::NEWEST, backup: false };
        assert_eq!(Caller::from_request(&ours, true), Ok(server));
        assert_eq!(Caller::from_request(&ours, false), Err(HelloError::NoCertificate));
        let mut plain = ours.clone();
        plain.remove("tunnel-instance");
        assert_eq!(Caller::from_request(&plain, true), Err(HelloError::PlainPeer));
        let mut both = ours;
        both.extend(request(r#"{"nodename":"n1","token":"secret"}"#));
        assert_eq!(Caller::from_request(&both, true), Err(HelloError::BadRole("peer".into())));
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
