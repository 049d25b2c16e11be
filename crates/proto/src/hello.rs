//! The hello of a link: gRPC metadata in both directions, which identifies both ends and the version of the protocol.

use std::ops::RangeInclusive;

use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};

use crate::frame::{MAX_VERSION_CHARS, MAX_WEBSOCKET_CHARS};
use crate::names::{DeviceName, Instance, NameError, NodeName, ServerDisplayName, UserName};
use crate::printable::printable;

/// The hello that an edge sends with the call for a link.
#[derive(derive_more::Debug, Clone, PartialEq, Eq)]
pub struct EdgeHello {
    /// Node that the caller claims to be.
    pub node: NodeName,
    /// Secret that proves the node's name.
    #[debug(skip)]
    pub token: String,
    /// The caller's process; `None` if the caller is plain.
    pub instance: Option<Instance>,
    /// Purpose of the link next to an older link of the same process.
    pub purpose: LinkPurpose,
}

/// The hello that a user's program sends with the call for a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserHello {
    /// How the caller proves its user.
    pub proof: UserProof,
    /// The user's machine.
    pub device: DeviceName,
    /// The caller's process.
    pub instance: Instance,
    /// Whether an older link of the same process stays open until that program closes one of them.
    pub is_backup: bool,
}

/// How a user's program proves its user.
#[derive(derive_more::Debug, Clone, PartialEq, Eq)]
pub enum UserProof {
    /// By the token of this user's device.
    Token {
        /// User that the caller claims to be.
        user: UserName,
        /// Secret that proves the user and the device.
        #[debug(skip)]
        token: String,
    },
    /// By the client certificate of the connection, which names the user.
    Certificate,
}

/// The purpose of an edge's new link, next to an older link of the same process if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkPurpose {
    /// The new link replaces the older one, which is closed.
    Primary,
    /// The older link stays until the edge closes one of the two: it is unresponsive, or its sessions are handed over to
    /// the new one.
    Backup,
    /// The older link is busy with bulk data and remains the node's primary link. The new link carries sessions with
    /// little data.
    Interactive,
    /// The older link, to another server, remains the node's primary link. The new link only carries sessions that the
    /// edge opens: its server does not find the node by it.
    Opener,
}

/// The process that makes the call for a link, as identified by the call's metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkCaller {
    /// An edge, with a token that proves its name.
    Edge(EdgeHello),
    /// A user's program, which is not authenticated yet. It is never plain.
    User(UserHello),
    /// Another server, which has presented the cloud's certificate. It is never plain.
    Peer {
        /// The server's process.
        instance: Instance,
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
    /// A caller with the role of a server is plain.
    #[error("server announces no version of the protocol")]
    PlainPeer,
    /// A caller with the role of a client is plain.
    #[error("client announces no version of the protocol")]
    PlainUser,
    /// The remote speaks another version of the protocol.
    #[error(transparent)]
    OtherVersion(#[from] OtherVersion),
}

/// The remote speaks another version of the protocol, so neither end understands the other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the remote speaks version {remote:?} of the protocol, and this program version {}; \
     update the end with the lower one",
    shown(&spoken())
)]
pub struct OtherVersion {
    /// Version or versions that the remote announced, cut to 20 characters.
    pub remote: String,
}

impl LinkCaller {
    /// Parses a request's metadata. `certified` is true if the connection presented a server's certificate.
    pub fn from_request(headers: &HeaderMap, certified: bool) -> Result<Self, HelloError> {
        match headers.get(&ROLE).map(HeaderValue::as_bytes) {
            Some(b"peer") => {}
            Some(b"client") => return UserHello::from_request(headers).map(Self::User),
            _ => return EdgeHello::from_request(headers).map(Self::Edge),
        }
        if headers.contains_key(http::header::AUTHORIZATION) {
            return Err(HelloError::BadRole("peer".into()));
        }
        if !certified {
            return Err(HelloError::NoCertificate);
        }
        let instance = remote_instance(headers)?.ok_or(HelloError::PlainPeer)?;
        Ok(Self::Peer { instance, backup: is_backup(headers) })
    }

    /// Returns the metadata of a server's request to a peer.
    pub fn peer_request(instance: Instance) -> HeaderMap {
        let mut headers = local_headers(instance);
        headers.insert(ROLE, HeaderValue::from_static("peer"));
        headers
    }

    /// Returns the caller's process; `None` if the caller is plain.
    pub fn instance(&self) -> Option<Instance> {
        match self {
            Self::Edge(hello) => hello.instance,
            Self::User(hello) => Some(hello.instance),
            Self::Peer { instance, .. } => Some(*instance),
        }
    }
}

impl UserHello {
    /// Parses a request's metadata. Without `authorization`, the connection's certificate is the proof.
    fn from_request(headers: &HeaderMap) -> Result<Self, HelloError> {
        let bad = |why: NameError| HelloError::BadName(why.to_string());
        let instance = remote_instance(headers)?.ok_or(HelloError::PlainUser)?;
        let (proof, device) = match headers.get(http::header::AUTHORIZATION) {
            Some(text) => {
                let members = AuthorizationMembers::read(text)?;
                let user = members.text("user")?.parse().map_err(bad)?;
                (UserProof::Token { user, token: members.text("token")? }, members.text("device")?)
            }
            None => {
                let device = headers.get(&DEVICE).and_then(|value| value.to_str().ok());
                (UserProof::Certificate, device.unwrap_or_default().to_owned())
            }
        };
        let device = device.parse().map_err(bad)?;
        Ok(Self { proof, device, instance, is_backup: is_backup(headers) })
    }

    /// Returns the metadata of a user's program.
    pub fn request(&self) -> HeaderMap {
        let mut headers = local_headers(self.instance);
        headers.insert(ROLE, HeaderValue::from_static("client"));
        if self.is_backup {
            headers.insert(LINK, BACKUP);
        }
        let device = self.device.to_string();
        match &self.proof {
            UserProof::Token { user, token } => {
                let user = user.as_str();
                insert_bearer(&mut headers, &json!({ "user": user, "device": device, "token": token }));
            }
            UserProof::Certificate => {
                headers.extend(HeaderValue::from_str(&device).ok().map(|device| (DEVICE, device)));
            }
        }
        headers
    }
}

impl EdgeHello {
    /// Parses a request's metadata leniently: unknown headers and JSON members are ignored.
    pub fn from_request(headers: &HeaderMap) -> Result<Self, HelloError> {
        let text = headers.get(http::header::AUTHORIZATION).ok_or(HelloError::NoToken)?;
        let members = AuthorizationMembers::read(text)?;
        let node = members.text("nodename")?;
        let token = members.text("token")?;
        let node = node.parse().map_err(|e: NameError| HelloError::BadName(e.to_string()))?;
        let instance = remote_instance(headers)?;
        let purpose = match headers.get(&ROLE).map(HeaderValue::as_bytes) {
            // A caller without a role is an edge, too.
            None | Some(b"edge") if instance.is_some() && is_backup(headers) => LinkPurpose::Backup,
            None | Some(b"edge") => LinkPurpose::Primary,
            Some(b"interactive") if instance.is_some() => LinkPurpose::Interactive,
            // An older server refuses it.
            Some(b"opener") if instance.is_some() => LinkPurpose::Opener,
            Some(role) => {
                return Err(HelloError::BadRole(String::from_utf8_lossy(role).chars().take(20).collect()));
            }
        };
        Ok(Self { node, token, instance, purpose })
    }

    /// Returns the metadata of an edge's request.
    pub fn edge_request(node: &NodeName, token: &str, instance: Instance) -> HeaderMap {
        let mut headers = local_headers(instance);
        insert_bearer(&mut headers, &json!({ "nodename": node.as_str(), "token": token }));
        headers.insert(ROLE, HeaderValue::from_static("edge"));
        headers
    }

    /// Adds the purpose of the link to the request of an edge or a server. A plain server ignores it, and closes the
    /// older link.
    pub fn with_purpose(headers: &mut HeaderMap, purpose: LinkPurpose) {
        match purpose {
            LinkPurpose::Primary => None,
            LinkPurpose::Backup => headers.insert(LINK, BACKUP),
            LinkPurpose::Interactive => headers.insert(ROLE, HeaderValue::from_static("interactive")),
            LinkPurpose::Opener => headers.insert(ROLE, HeaderValue::from_static("opener")),
        };
    }

    /// Marks the request of an edge whose config file is bad, so that it runs with the last good copy. The mark is in the
    /// version of the program, which all servers show.
    pub fn with_last_good_config(headers: &mut HeaderMap) {
        let version = concat!(env!("CARGO_PKG_VERSION"), "+last-good-config");
        headers.insert(PROGRAM, HeaderValue::from_static(version));
    }

    /// Adds the name of a server to the metadata of its request or response.
    pub fn with_server_name(headers: &mut HeaderMap, name: &ServerDisplayName) {
        headers.extend(HeaderValue::from_str(name.as_str()).ok().map(|name| (SERVER_NAME, name)));
    }

    /// Returns the name in the metadata of a server, or `None` if it sends none, like an older version, or no valid
    /// one.
    pub fn server_name(headers: &HeaderMap) -> Option<ServerDisplayName> {
        headers.get(&SERVER_NAME)?.to_str().ok()?.parse().ok()
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

fn is_backup(headers: &HeaderMap) -> bool {
    headers.get(&LINK) == Some(&BACKUP)
}

/// Adds credentials as JSON in `authorization`.
fn insert_bearer(headers: &mut HeaderMap, credentials: &Value) {
    if let Ok(mut value) = HeaderValue::from_str(&format!("Bearer {credentials}")) {
        value.set_sensitive(true);
        headers.insert(http::header::AUTHORIZATION, value);
    }
}

/// Returns the metadata that each program sends: its version and process. A server's response has no other.
pub fn local_headers(instance: Instance) -> HeaderMap {
    let mut headers = HeaderMap::new();
    insert_versions(&mut headers, &spoken());
    if let Ok(value) = HeaderValue::from_str(&instance.to_string()) {
        headers.insert(INSTANCE, value);
    }
    headers.insert(PROGRAM, HeaderValue::from_static(env!("CARGO_PKG_VERSION")));
    headers
}

/// Returns the name of the program that sent this metadata, for people: our version, or its `user-agent`. At most 40
/// printable characters.
pub fn user_agent(headers: &HeaderMap) -> Option<Box<str>> {
    let program = headers.get(&PROGRAM).or_else(|| headers.get(http::header::USER_AGENT))?;
    let text: String =
        program.to_str().ok()?.chars().filter(char::is_ascii_graphic).take(MAX_VERSION_CHARS).collect();
    (!text.is_empty()).then(|| text.into())
}

/// Adds to a request why its link is inside of a WebSocket.
pub fn with_websocket(headers: &mut HeaderMap, why: &str) {
    headers.extend(HeaderValue::from_str(why).ok().map(|why| (WEBSOCKET, why)));
}

/// Returns why the link of a request is inside of a WebSocket; `None` if it is not.
pub fn websocket(headers: &HeaderMap) -> Option<Box<str>> {
    let text = headers.get(&WEBSOCKET)?.to_str().ok()?;
    Some(printable(text).chars().take(MAX_WEBSOCKET_CHARS).collect())
}

/// Returns the remote's process. A remote that announces no version, or no process, is plain.
///
/// # Errors
///
/// Returns an error if the remote speaks no version of this program's.
pub fn remote_instance(headers: &HeaderMap) -> Result<Option<Instance>, OtherVersion> {
    let version = common_version(headers, &spoken())?;
    let text = version.and_then(|_| headers.get(&INSTANCE)?.to_str().ok());
    Ok(text.and_then(|text| text.parse().ok()))
}

/// Returns the version of the protocol that both ends of a link use. `None` if the remote is plain.
pub fn version(headers: &HeaderMap) -> Option<u32> {
    common_version(headers, &spoken()).ok().flatten()
}

/// Adds the versions that a program speaks: the lowest in the header that the oldest programs compare, and all in a
/// header of their own if there are several.
fn insert_versions(headers: &mut HeaderMap, spoken: &RangeInclusive<u32>) {
    headers.insert(DIALECT, HeaderValue::from(*spoken.start()));
    if spoken.start() != spoken.end() {
        headers.extend(HeaderValue::from_str(&shown(spoken)).ok().map(|all| (DIALECTS, all)));
    }
}

/// Returns the highest version that both ends speak, which both use. `None` if the remote announces none. Both ends have
/// the same result, because each knows what both speak.
fn common_version(headers: &HeaderMap, spoken: &RangeInclusive<u32>) -> Result<Option<u32>, OtherVersion> {
    let Some(lowest) = headers.get(&DIALECT) else { return Ok(None) };
    let text = String::from_utf8_lossy(headers.get(&DIALECTS).unwrap_or(lowest).as_bytes());
    let limit =
        |remote: RangeInclusive<u32>| *remote.start().max(spoken.start())..=*remote.end().min(spoken.end());
    match versions(&text).map(limit) {
        Some(common) if !common.is_empty() => Ok(Some(*common.end())),
        _ => Err(OtherVersion { remote: text.chars().take(20).collect() }),
    }
}

/// Parses versions as [`shown`].
fn versions(text: &str) -> Option<RangeInclusive<u32>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

/// Returns versions as in a header: one, or the first and the last.
fn shown(versions: &RangeInclusive<u32>) -> String {
    if versions.start() == versions.end() {
        versions.start().to_string()
    } else {
        format!("{}-{}", versions.start(), versions.end())
    }
}

/// Versions of the protocol that this program speaks. A change that a remote without it would misunderstand needs a new
/// number. The ones before it stay for two releases.
fn spoken() -> RangeInclusive<u32> {
    // Tests run debug builds as programs of later releases.
    #[expect(clippy::disallowed_methods, reason = "main knows no such option")]
    let later = cfg!(debug_assertions).then(|| std::env::var("TUNNEL_TEST_VERSIONS").ok());
    later.flatten().and_then(|text| versions(&text)).unwrap_or(4..=4)
}
const DIALECT: HeaderName = HeaderName::from_static("tunnel-dialect");
/// Header with the first and the last version that a program speaks, if there are several.
const DIALECTS: HeaderName = HeaderName::from_static("tunnel-dialects");
const INSTANCE: HeaderName = HeaderName::from_static("tunnel-instance");
const ROLE: HeaderName = HeaderName::from_static("tunnel-role");
/// Header of a backup link. The older link of its process is unresponsive and stays open.
const LINK: HeaderName = HeaderName::from_static("tunnel-link");
const BACKUP: HeaderValue = HeaderValue::from_static("backup");
/// Header with the name of a server, for people.
const SERVER_NAME: HeaderName = HeaderName::from_static("tunnel-server-name");
/// Header without meaning, as long as a full segment.
const PADDING: HeaderName = HeaderName::from_static("tunnel-padding");
/// Header with the version of the program, for people.
const WEBSOCKET: HeaderName = HeaderName::from_static("tunnel-websocket");
const PROGRAM: HeaderName = HeaderName::from_static("tunnel-version");
/// Header with the machine of a user who proves herself by a certificate.
const DEVICE: HeaderName = HeaderName::from_static("tunnel-device");

/// The members of the JSON in `authorization`. Their names are case-insensitive, as in Go.
struct AuthorizationMembers(serde_json::Map<String, serde_json::Value>);

impl AuthorizationMembers {
    fn read(header: &HeaderValue) -> Result<Self, HelloError> {
        let text = String::from_utf8_lossy(header.as_bytes());
        let json = text.strip_prefix("Bearer ").unwrap_or(&text);
        serde_json::from_str(json).map(Self).map_err(|e| HelloError::NotJson(e.to_string()))
    }

    /// Returns the text of a member; an absent one is empty.
    fn text(&self, name: &str) -> Result<String, HelloError> {
        match self.0.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)) {
            None => Ok(String::new()),
            Some((_, serde_json::Value::String(text))) => Ok(text.clone()),
            Some(_) => Err(HelloError::NotJson(format!("{name} is not a string"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_caller_has_only_the_role_that_its_metadata_names(
            role in "client|peer|edge|interactive|opener|[a-z]{0,3}",
            names in prop::collection::vec("[ -~]{0,12}|alice|laptop", 4),
            has_proof: bool,
            certified: bool,
            dialect in "4|[ -~]{0,3}",
        ) {
            let mut headers = local_headers(Instance::from_bits(1));
            headers.insert(DIALECT, HeaderValue::from_str(&dialect).unwrap());
            headers.insert(ROLE, HeaderValue::from_str(&role).unwrap());
            headers.insert(DEVICE, HeaderValue::from_str(&names[1]).unwrap());
            if has_proof {
                let [user, device, node, token] = &names[..] else { unreachable!() };
                let members = serde_json::json!({ "user": user, "device": device, "nodename": node, "token": token });
                insert_bearer(&mut headers, &members);
            }
            let is_possible = match LinkCaller::from_request(&headers, certified) {
                Ok(LinkCaller::User(_)) => role == "client",
                Ok(LinkCaller::Peer { .. }) => role == "peer" && certified && !has_proof,
                Ok(LinkCaller::Edge(_)) => has_proof && matches!(&*role, "edge" | "interactive" | "opener"),
                Err(_) => true,
            };
            prop_assert!(is_possible);
        }
    }

    fn request(authorization: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", HeaderValue::from_bytes(authorization.as_bytes()).unwrap());
        headers
    }

    #[test]
    fn an_edge_identifies_itself_and_another_version_is_refused() {
        let node = "edge-1".parse().unwrap();
        let mut headers = EdgeHello::edge_request(&node, "a<b>&c", Instance::from_bits(3));
        let hello = EdgeHello::from_request(&headers).unwrap();
        assert_eq!(hello.token, "a<b>&c");
        assert_eq!(hello.instance, Some(Instance::from_bits(3)));
        for version in ["1", "3", "5", "70000", "", "x", " 4"] {
            headers.insert("tunnel-dialect", HeaderValue::from_static(version));
            let refused = OtherVersion { remote: version.into() };
            assert_eq!(EdgeHello::from_request(&headers), Err(refused.clone().into()));
            assert_eq!(remote_instance(&headers), Err(refused));
        }
        headers.insert("tunnel-dialect", HeaderValue::from_static("4"));
        headers.remove("tunnel-instance");
        assert_eq!(EdgeHello::from_request(&headers).unwrap().instance, None);
    }

    #[test]
    fn both_ends_use_the_highest_version_that_they_share() {
        for (one, other, common) in [
            (4..=4, 4..=4, Some(4)),
            (4..=5, 4..=4, Some(4)),
            (5..=5, 4..=4, None),
            (4..=5, 4..=5, Some(5)),
            (4..=6, 5..=7, Some(6)),
            (4..=5, 6..=7, None),
        ] {
            for (local, remote) in [(&one, &other), (&other, &one)] {
                let mut headers = HeaderMap::new();
                insert_versions(&mut headers, remote);
                let refused = OtherVersion { remote: shown(remote) };
                assert_eq!(
                    common_version(&headers, local),
                    common.map(Some).ok_or(refused),
                    "{one:?} {other:?}"
                );
            }
        }
        let mut headers = HeaderMap::new();
        insert_versions(&mut headers, &(4..=5));
        assert_eq!(
            headers.get("tunnel-dialect").unwrap(),
            "4",
            "programs without the other header compare it"
        );
        for bad in ["5-4", "4-", "-", "4-5-6", "x", ""] {
            headers.insert("tunnel-dialects", HeaderValue::from_static(bad));
            assert_eq!(common_version(&headers, &(4..=5)), Err(OtherVersion { remote: bad.into() }));
        }
        let text = OtherVersion { remote: "5-6".into() }.to_string();
        assert!(text.contains("version \"5-6\" of the protocol, and this program version 4;"), "{text}");
    }

    #[test]
    fn the_remotes_program_is_read_as_short_printable_text() {
        let node = "edge-1".parse().unwrap();
        let ours = EdgeHello::edge_request(&node, "t", Instance::from_bits(3));
        assert_eq!(user_agent(&ours).as_deref(), Some(env!("CARGO_PKG_VERSION")));
        let go = |value: &[u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            user_agent(&HeaderMap::from_iter([(http::header::USER_AGENT, value)]))
        };
        assert_eq!(go(b"grpc-go/1.38.0").as_deref(), Some("grpc-go/1.38.0"));
        assert_eq!(go(&[b'a'; 100]).unwrap().len(), MAX_VERSION_CHARS);
        assert_eq!((go(b"\xff"), go(b"\t"), user_agent(&HeaderMap::new())), (None, None, None));
    }

    #[test]
    fn a_backup_link_is_marked_and_a_plain_edge_has_none() {
        let node = "edge-1".parse().unwrap();
        let mut headers = EdgeHello::edge_request(&node, "t", Instance::from_bits(3));
        let purpose_of = |headers: &HeaderMap| EdgeHello::from_request(headers).unwrap().purpose;
        assert_eq!(purpose_of(&headers), LinkPurpose::Primary);
        EdgeHello::with_purpose(&mut headers, LinkPurpose::Backup);
        assert_eq!(purpose_of(&headers), LinkPurpose::Backup);
        for other in ["0", "2"] {
            headers.insert("tunnel-link", HeaderValue::from_static(other));
            assert_eq!(purpose_of(&headers), LinkPurpose::Primary);
        }
        EdgeHello::with_purpose(&mut headers, LinkPurpose::Backup);
        headers.remove("tunnel-instance");
        assert_eq!(
            purpose_of(&headers),
            LinkPurpose::Primary,
            "a plain edge has no process that could have two links"
        );
    }

    #[test]
    fn interactive_links_and_those_of_openers_have_their_own_roles() {
        for purpose in [LinkPurpose::Interactive, LinkPurpose::Opener] {
            let mut headers =
                EdgeHello::edge_request(&"edge-1".parse().unwrap(), "t", Instance::from_bits(3));
            EdgeHello::with_purpose(&mut headers, purpose);
            assert_eq!(EdgeHello::from_request(&headers).unwrap().purpose, purpose);
            headers.remove("tunnel-instance");
            assert!(
                EdgeHello::from_request(&headers).is_err(),
                "a plain edge has no process that could have two links"
            );
        }
    }

    #[test]
    fn addresses_that_an_older_edge_claims_are_ignored() {
        let mut headers = EdgeHello::edge_request(&"edge-1".parse().unwrap(), "t", Instance::from_bits(3));
        let hello = EdgeHello::from_request(&headers).unwrap();
        headers.insert("tunnel-node-ips", HeaderValue::from_static("10.0.0.7,fd00::7"));
        assert_eq!(EdgeHello::from_request(&headers).unwrap(), hello);
    }

    #[test]
    fn credentials_of_go_edges_are_read_leniently() {
        for text in [
            r#"Bearer {"nodename":"n1","token":"t"}"#,
            r#"{"NodeName":"n1","TOKEN":"t","more":1}"#,
            "Bearer {\"nodename\":\"n1\",\"token\":\"\\u0074\"}",
        ] {
            let hello = EdgeHello::from_request(&request(text)).unwrap();
            assert_eq!((hello.node.as_str(), hello.token.as_str()), ("n1", "t"));
            assert_eq!(hello.instance, None);
        }
        assert_eq!(EdgeHello::from_request(&HeaderMap::new()), Err(HelloError::NoToken));
        assert!(matches!(EdgeHello::from_request(&request("Bearer nonsense")), Err(HelloError::NotJson(_))));
        assert!(matches!(EdgeHello::from_request(&request("{}")), Err(HelloError::BadName(_))));
        assert!(matches!(
            EdgeHello::from_request(&request(r#"{"nodename":1}"#)),
            Err(HelloError::NotJson(_))
        ));
    }

    #[test]
    fn a_server_with_a_token_is_refused_and_debug_output_has_no_token() {
        let mut headers = request(r#"{"nodename":"n1","token":"secret"}"#);
        assert!(!format!("{:?}", EdgeHello::from_request(&headers).unwrap()).contains("secret"));
        headers.insert("tunnel-role", HeaderValue::from_static("peer"));
        assert!(matches!(EdgeHello::from_request(&headers), Err(HelloError::BadRole(_))));
        let ours = EdgeHello::edge_request(&"n".parse().unwrap(), "secret", Instance::from_bits(1));
        assert!(!format!("{ours:?}").contains("secret"));
    }

    #[test]
    fn a_users_program_proves_a_user_and_is_never_taken_for_an_edge_or_a_server() {
        let hello = |proof| UserHello {
            proof,
            device: "laptop".parse().unwrap(),
            instance: Instance::from_bits(7),
            is_backup: false,
        };
        let token = || UserProof::Token { user: "alice".parse().unwrap(), token: "secret".into() };
        for (is_backup, proof) in [(false, token()), (true, token()), (false, UserProof::Certificate)] {
            let hello = UserHello { is_backup, ..hello(proof) };
            for certified in [false, true] {
                let caller = LinkCaller::from_request(&hello.request(), certified);
                assert_eq!(caller, Ok(LinkCaller::User(hello.clone())));
            }
            assert!(EdgeHello::from_request(&hello.request()).is_err(), "an older server refuses the role");
        }
        assert!(!format!("{:?}", hello(token())).contains("secret"));
        let mut as_edge = hello(token()).request();
        as_edge.insert("tunnel-role", HeaderValue::from_static("edge"));
        assert!(matches!(LinkCaller::from_request(&as_edge, true), Err(HelloError::BadName(_))));
        let mut as_client = EdgeHello::edge_request(&"n1".parse().unwrap(), "t", Instance::from_bits(3));
        as_client.insert("tunnel-role", HeaderValue::from_static("client"));
        assert!(matches!(LinkCaller::from_request(&as_client, true), Err(HelloError::BadName(_))));
        let mut plain = hello(token()).request();
        plain.remove("tunnel-dialect");
        assert_eq!(LinkCaller::from_request(&plain, true), Err(HelloError::PlainUser));
    }

    #[test]
    fn a_server_needs_a_certificate_and_an_instance_and_no_token() {
        let ours = LinkCaller::peer_request(Instance::from_bits(5));
        let server = LinkCaller::Peer { instance: Instance::from_bits(5), backup: false };
        assert_eq!(LinkCaller::from_request(&ours, true), Ok(server));
        assert_eq!(LinkCaller::from_request(&ours, false), Err(HelloError::NoCertificate));
        let mut plain = ours.clone();
        plain.remove("tunnel-instance");
        assert_eq!(LinkCaller::from_request(&plain, true), Err(HelloError::PlainPeer));
        let mut both = ours;
        both.extend(request(r#"{"nodename":"n1","token":"secret"}"#));
        assert_eq!(LinkCaller::from_request(&both, true), Err(HelloError::BadRole("peer".into())));
    }

    #[test]
    fn a_server_announces_its_name_and_one_that_sends_none_or_a_bad_one_has_none() {
        for mut headers in
            [LinkCaller::peer_request(Instance::from_bits(5)), local_headers(Instance::from_bits(5))]
        {
            assert_eq!(EdgeHello::server_name(&headers), None);
            EdgeHello::with_server_name(&mut headers, &"eu-1.example".parse().unwrap());
            assert_eq!(EdgeHello::server_name(&headers).unwrap().as_str(), "eu-1.example");
            for bad in ["", "a b", "<b>", &"x".repeat(65)] {
                headers.insert("tunnel-server-name", HeaderValue::from_str(bad).unwrap());
                assert_eq!(EdgeHello::server_name(&headers), None, "{bad}");
            }
        }
    }

    #[test]
    fn an_edge_is_an_edge_with_or_without_a_servers_certificate() {
        let headers = EdgeHello::edge_request(&"n1".parse().unwrap(), "t", Instance::from_bits(3));
        for certified in [false, true] {
            let caller = LinkCaller::from_request(&headers, certified).unwrap();
            assert!(matches!(&caller, LinkCaller::Edge(hello) if hello.node.as_str() == "n1"));
            assert_eq!(caller.instance(), Some(Instance::from_bits(3)));
        }
    }
}
