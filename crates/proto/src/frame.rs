//! Protocol-neutral frames between the two ends of a link, the remote that sends them, and the opener of a session.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;

use crate::names::{Instance, NodeName, SessionId, Target, UserDevice};
use crate::printable::printable;

/// A message on a link. See the table in docs/protocol.md#frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The node that the frame concerns.
    ///
    /// On an edge's link it is that edge, but Open and Resume name the acceptor's node. Between servers it is the
    /// acceptor's node in all session frames.
    pub node: NodeName,
    /// Kind and fields of the frame.
    pub body: FrameKind,
}

/// The kind of a [`Frame`], with its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameKind {
    /// A session frame.
    Session(SessionId, SessionCategory, SessionFrame),
    /// A ping. The remote replies with a [`FrameKind::Pong`] of the same number; plain remotes send no number.
    Ping(Option<u64>),
    /// The reply to a ping. Everything sent before that ping has arrived.
    Pong(Option<u64>),
    /// Between servers: asks whether the node is linked to the remote. The reply repeats the number.
    Find(u64),
    /// Between servers: the reply to Find. With question 0, an announcement that a node has linked there,
    /// or has left.
    Found(Found),
    /// From a server: requests that the edge connects to another server, preferably the one at this address if the edge
    /// knows it. Nothing is closed yet. From an edge: it has done so.
    Drain(Option<SocketAddr>),
    /// From a server: another running process has the same name.
    Conflict(Conflict),
    /// Between servers: the number of nodes connected to the sender.
    Load(Load),
    /// Between servers: requests a page of the nodes that are connected to the remote.
    ListNodes(ListNodes),
    /// Between servers: the reply to ListNodes.
    NodePage(NodePage),
    /// Between servers: what the sender knows of its Kubernetes cluster, or a question about that.
    Cluster(Bytes),
}

/// A request for a page of a server's nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListNodes {
    /// Number of the request, which the reply repeats.
    pub question: u64,
    /// Last node of the previous page; `None` requests the first page.
    pub after: Option<NodeName>,
}

/// A page of the nodes that are connected to a server, in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePage {
    /// Number of the request.
    pub question: u64,
    /// The nodes, at most [`MAX_PAGE_NODES`].
    pub nodes: Vec<ListedNode>,
    /// Whether further nodes follow the last one.
    pub more: bool,
}

/// A node in a [`NodePage`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedNode {
    /// Name of the node.
    pub node: NodeName,
    /// Time since its link was made, in whole milliseconds.
    pub age: Duration,
    /// Address from which it is linked, if known.
    pub address: Option<SocketAddr>,
    /// Latest RTT in whole microseconds, once measured.
    pub round_trip: Option<Duration>,
    /// Number of its current sessions, including relayed ones; servers of earlier versions do not tell it.
    pub sessions: Option<u64>,
    /// The edge's own description of its program, at most [`MAX_VERSION_CHARS`] characters.
    pub version: Option<Box<str>>,
    /// Bytes sent to it and received from it since it was linked; servers of earlier versions do not tell them.
    pub bytes: Option<[u64; 2]>,
    /// Why it is linked through a WebSocket, at most [`MAX_WEBSOCKET_CHARS`] characters; `None` if it is not.
    pub websocket: Option<Box<str>>,
}

/// Maximum number of nodes in a [`NodePage`].
pub const MAX_PAGE_NODES: usize = 500;

/// Maximum length of a program's version in a [`ListedNode`].
pub const MAX_VERSION_CHARS: usize = 40;

/// Maximum length of the reason for a WebSocket.
pub const MAX_WEBSOCKET_CHARS: usize = 80;

/// The load of a server, as announced to its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// Number of nodes connected to it.
    pub nodes: u64,
    /// Whether it accepts no new links.
    pub stopping: bool,
    /// Its problems in one line of at most 200 bytes, for operators; empty if there are none. Servers of earlier
    /// versions tell none.
    pub problems: String,
}

/// A server's reply or announcement about a node: whether the node is connected there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Number of the Find that it answers; 0 for an announcement.
    pub question: u64,
    /// Whether the node is connected to the sender.
    pub here: bool,
    /// Age of the last frame from the node at the sender, in whole milliseconds. If the node is not connected there:
    /// the time since it was; zero if unknown.
    pub silence: Duration,
    /// The node's process; `None` if it is plain, or not linked there.
    pub instance: Option<Instance>,
    /// Age of the node's link in whole milliseconds, if the node is connected to the sender.
    pub age: Option<Duration>,
}

/// Two running processes use the same node name. Sent to an edge that keeps or loses it, and between servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The process that keeps the name. Between servers, that process is linked to the sender, and the receiver closes
    /// its link to the other process.
    pub instance: Option<Instance>,
    /// Explanation for people: printable, at most 200 bytes.
    pub reason: String,
}

/// The key of a session: its id, the kind of its listener, and the node of its acceptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionKey {
    /// Id of the session, the same on all links.
    pub id: SessionId,
    /// Kind of the listener that opened it.
    pub category: SessionCategory,
    /// Node of the acceptor.
    pub node: NodeName,
}

/// A frame about a session.
///
/// - `limit`: the offset below which the sender of the frame accepts bytes.
/// - `received`: the offset up to which it has stored them; an end of stream counts as one.
/// - `epoch`: the number of the attempt to open or resume that the frame belongs to.
/// - `instance`: the process that holds the acceptor.
/// - `opener`: the party that opened the session. An edge names none, as its server adds it.
/// - `place`: where a server has located the target of a user's session. Only frames of her link have it.
/// - `resume_timeout`: how long a user's session may be without a path, in whole seconds: asked for by Open, and granted by
///   Opened. `None`: as long as the two ends keep all others.
/// - `boot`: in its upper half the machine of a user's program, in its lower one that machine's boot, if known.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are documented above, once for all variants")]
pub enum SessionFrame {
    /// Dial `target` for `client`. The first frame of a session.
    Open {
        target: Target,
        limit: u64,
        epoch: u64,
        client: String,
        opener: Option<Opener>,
        resume_timeout: Option<Duration>,
        boot: Option<u128>,
    },
    /// The target accepted the connection. Precedes data of that direction.
    Opened {
        limit: u64,
        epoch: u64,
        instance: Option<Instance>,
        place: Option<Place>,
        resume_timeout: Option<Duration>,
    },
    /// The target cannot be reached. Sent instead of [`SessionFrame::Opened`].
    Refused { epoch: u64, refusal: SessionError },
    /// Bytes, in order.
    Data(Bytes),
    /// End of this direction, which had `total` bytes; the end counts as one.
    Fin { total: u64 },
    /// The connection of this end's owner failed. Everything that it wrote precedes this frame: `total` bytes, an end
    /// of stream counts as one.
    ///
    /// With `total` 0 the remaining bytes are discarded. The other direction is dropped. The remote replies with a
    /// Reset; until then the frame is repeated on each new path.
    ResetAt { total: u64, refusal: SessionError },
    /// The session has ended in both directions.
    Reset { epoch: u64, refusal: SessionError },
    /// Acknowledges bytes and raises the limit.
    Credit { received: u64, limit: u64 },
    /// From the opener: the first frame on a new path. It repeats the target, because another server may authorize it.
    Resume {
        received: u64,
        limit: u64,
        epoch: u64,
        instance: Option<Instance>,
        opener: Option<Opener>,
        target: Target,
        place: Option<Place>,
    },
    /// The acceptor's reply to Resume. Precedes data of that direction.
    Resumed { received: u64, limit: u64, epoch: u64 },
    /// The path beyond the sender is broken.
    PathLost { epoch: u64 },
    /// From a server: it has refused a Resume of this opener, so the acceptor need not keep the session any longer.
    Revoked { opener: Option<Opener>, refusal: SessionError },
    /// From an edge: a session of this device to this target waits for a path. Its server answers with Revoked if it may
    /// not be resumed.
    Parked(Box<(UserDevice, Target)>),
}

/// The node of a session, and the target as that node knows it.
pub type Place = Box<(NodeName, Target)>;

/// The kind of listener that opened a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SessionCategory {
    /// A CONNECT listener.
    Ssh,
    /// CONNECT over TLS, for kube-apiserver's egress selector.
    Egress,
    /// An HTTP proxy.
    HttpProxy,
    /// A mapped TCP port.
    Tcp,
    /// An HTTPS listener; the acceptor uses TLS to the target.
    Https,
    /// A user's program that sends requests of the admin API to the server of its link. It concerns no node, and ends
    /// with its link.
    Admin,
}

impl Found {
    /// Returns the reply of a server to which the node is not connected.
    pub fn not_here(question: u64) -> Self {
        Self { question, here: false, silence: Duration::ZERO, instance: None, age: None }
    }
}

impl SessionFrame {
    /// Returns an Open that names no opener and asks for nothing more.
    pub fn open(target: Target, limit: u64, epoch: u64, client: String) -> Self {
        Self::Open { target, limit, epoch, client, opener: None, resume_timeout: None, boot: None }
    }

    /// Returns an Opened of an acceptor that names and grants nothing more.
    pub fn opened(limit: u64, epoch: u64) -> Self {
        Self::Opened { limit, epoch, instance: None, place: None, resume_timeout: None }
    }

    /// Returns the name that docs/protocol.md#frames gives the frame.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "Open",
            Self::Opened { .. } => "Opened",
            Self::Refused { .. } => "Refused",
            Self::Data(_) => "Data",
            Self::Fin { .. } => "Fin",
            Self::ResetAt { .. } => "ResetAt",
            Self::Reset { .. } => "Reset",
            Self::Credit { .. } => "Credit",
            Self::Resume { .. } => "Resume",
            Self::Resumed { .. } => "Resumed",
            Self::PathLost { .. } => "PathLost",
            Self::Revoked { .. } => "Revoked",
            Self::Parked(_) => "Parked",
        }
    }

    /// Returns the opener field of frames that have one.
    pub fn opener(&mut self) -> Option<&mut Option<Opener>> {
        match self {
            Self::Open { opener, .. } | Self::Resume { opener, .. } | Self::Revoked { opener, .. } => {
                Some(opener)
            }
            _ => None,
        }
    }

    /// Returns the epoch of frames that have one.
    pub fn epoch(&self) -> Option<u64> {
        match self {
            Self::Open { epoch, .. }
            | Self::Opened { epoch, .. }
            | Self::Refused { epoch, .. }
            | Self::Reset { epoch, .. }
            | Self::Resume { epoch, .. }
            | Self::Resumed { epoch, .. }
            | Self::PathLost { epoch } => Some(*epoch),
            Self::Data(_)
            | Self::Fin { .. }
            | Self::ResetAt { .. }
            | Self::Credit { .. }
            | Self::Revoked { .. }
            | Self::Parked(_) => None,
        }
    }

    /// Returns the reason of frames that end a session.
    pub fn refusal(&self) -> Option<&SessionError> {
        match self {
            Self::Refused { refusal, .. }
            | Self::Reset { refusal, .. }
            | Self::ResetAt { refusal, .. }
            | Self::Revoked { refusal, .. } => Some(refusal),
            _ => None,
        }
    }
}

/// Reason why a session was refused or reset: a code for programs, a text for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct SessionError {
    /// Cause, for programs.
    pub code: ErrorCode,
    /// Explanation for people: printable, at most 200 bytes.
    pub reason: String,
}

/// An error code. See the table in docs/protocol.md#codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ErrorCode {
    /// Both directions have ended, and everything was received.
    NoError = 0,
    /// The target refused the connection.
    TargetRefused = 1,
    /// The target did not respond in time.
    TargetTimeout = 2,
    /// The target cannot be reached or resolved.
    TargetUnreachable = 3,
    /// The acceptor's policy forbids the target.
    NotAllowed = 4,
    /// The node is not connected here.
    NodeNotConnected = 5,
    /// The server is draining, or a limit is reached.
    Overloaded = 6,
    /// No such session exists here.
    UnknownSession = 7,
    /// The protocol was violated.
    ProtocolError = 8,
    /// The owner of the session cancelled it.
    Cancelled = 9,
    /// An internal error.
    Internal = 10,
    /// The servers let no edge reach that node.
    NodeNotAllowed = 11,
    /// The target is a port of the dialling program itself. No setting allows that.
    OwnPort = 12,
    /// The connection of the client or the target at that end failed.
    ConnectionFailed = 13,
}

impl SessionError {
    /// Returns an error with a reason made printable and cut to 200 bytes.
    pub fn new(code: ErrorCode, reason: impl fmt::Display) -> Self {
        Self { code, reason: printable(&reason.to_string()) }
    }
}

impl ErrorCode {
    /// All codes, each at its number on the wire, with its name in metrics and logs.
    pub const ALL: [(Self, &'static str); 14] = [
        (Self::NoError, "ok"),
        (Self::TargetRefused, "target_refused"),
        (Self::TargetTimeout, "target_timeout"),
        (Self::TargetUnreachable, "target_unreachable"),
        (Self::NotAllowed, "not_allowed"),
        (Self::NodeNotConnected, "node_not_connected"),
        (Self::Overloaded, "overloaded"),
        (Self::UnknownSession, "unknown_session"),
        (Self::ProtocolError, "protocol_error"),
        (Self::Cancelled, "cancelled"),
        (Self::Internal, "internal"),
        (Self::NodeNotAllowed, "node_not_allowed"),
        (Self::OwnPort, "own_port"),
        (Self::ConnectionFailed, "connection_failed"),
    ];

    /// Returns the code of a number from the wire. Unknown numbers become [`Self::Internal`].
    pub fn from_wire(number: u32) -> Self {
        usize::try_from(number)
            .ok()
            .and_then(|at| Self::ALL.get(at))
            .map_or(Self::Internal, |(code, _)| *code)
    }

    /// Returns the name in metrics and logs.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(code, _)| *code == self).map_or("internal", |(_, name)| name)
    }
}

impl SessionCategory {
    /// Returns the category's text on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ssh => "ssh",
            Self::Egress => "egress",
            Self::HttpProxy => "httpProxy",
            Self::Tcp => "tcp",
            Self::Https => "https",
            Self::Admin => "admin",
        }
    }

    /// Returns the category of a text from the wire.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Ssh, Self::Egress, Self::HttpProxy, Self::Tcp, Self::Https, Self::Admin]
            .into_iter()
            .find(|c| c.name() == name)
    }
}

/// The kind of process at the remote end of a link, with its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remote {
    /// At a server: an edge, with the node that it has proved to be.
    Edge(NodeName),
    /// At an edge: a server. The name is the edge's own node; at a user's program it is [`NodeName::none`].
    Server(NodeName),
    /// At a server: a user's program, with the user and device that it has proved to be. It only opens sessions.
    User(UserDevice),
    /// At a server: a peer.
    Peer,
}

impl Remote {
    /// Returns a fixed label for metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Edge(_) => "edge",
            Self::Server(_) => "server",
            Self::User(_) => "client",
            Self::Peer => "peer",
        }
    }

    /// Returns the node of the link; `None` at a server for a user's program or a peer.
    pub fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Edge(node) | Self::Server(node) => Some(node),
            Self::User(_) | Self::Peer => None,
        }
    }

    /// Returns the node that all frames of the link name, except Open and Resume; `None` between servers.
    pub fn frame_node(&self) -> Option<&NodeName> {
        match self {
            Self::Edge(node) | Self::Server(node) => Some(node),
            Self::User(_) => Some(&NO_NODE),
            Self::Peer => None,
        }
    }

    /// Returns the source under which sessions that the remote requests here are counted. `None` for a server, which
    /// counts them itself.
    pub fn requester(&self) -> Option<String> {
        Opener::verified(None, self, None).map(|opener| opener.source())
    }

    /// Returns true for an edge and a user's program: their server proves who they are, and authorizes each request.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Self::Edge(_) | Self::User(_))
    }
}

/// The node in frames of a user's link.
static NO_NODE: LazyLock<NodeName> = LazyLock::new(NodeName::none);

/// The process, node or user's device that opened a session. Only the same opener may resume it; knowing the id is not
/// enough.
#[derive(Debug, Clone, PartialEq, Eq, derive_more::Display)]
pub enum Opener {
    /// An edge, by its proven name: any process of that node. `node/NAME` on the wire.
    #[display("node/{_0}")]
    Node(NodeName),
    /// A user's program, by the user and device that it has proved: any process there. `client/USER/DEVICE` on the
    /// wire.
    #[display("client/{_0}")]
    User(UserDevice),
    /// A server, on behalf of one of its clients. `server/` and the 32 hex digits of its process on the wire.
    #[display("server/{_0}")]
    Server(Instance),
}

/// The text is neither `node/NAME` nor `client/USER/DEVICE` nor `server/INSTANCE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an opener; expected node/NAME, client/USER/DEVICE or server/INSTANCE")]
pub struct ParseOpenerError;

impl Opener {
    /// Returns the opener of a request that came over a link to process `instance` of `peer`, whose frame contains the
    /// opener `sent`.
    ///
    /// An edge is the node that it has proved to be, and a user's program its user and device, whatever the frame
    /// contains. A peer vouches for both, and opens for its other clients as itself. An edge trusts its server. A plain
    /// server names no opener.
    pub fn verified(sent: Option<Self>, peer: &Remote, instance: Option<Instance>) -> Option<Self> {
        match (peer, sent) {
            (Remote::Edge(node), _) => Some(Self::Node(node.clone())),
            (Remote::User(client), _) => Some(Self::User(client.clone())),
            (Remote::Peer, Some(Self::Server(_))) => instance.map(Self::Server),
            (Remote::Peer | Remote::Server(_), sent) => sent,
        }
    }
}

impl Opener {
    /// Returns the source under which its sessions are counted: the edge, or the user; empty for a server.
    pub fn source(&self) -> String {
        match self {
            Self::Node(node) => format!("node {node}"),
            Self::User(client) => client.user.to_string(),
            Self::Server(_) => String::new(),
        }
    }
}

impl FromStr for Opener {
    type Err = ParseOpenerError;

    fn from_str(text: &str) -> Result<Self, ParseOpenerError> {
        let (kind, name) = text.split_once('/').ok_or(ParseOpenerError)?;
        match kind {
            "node" => name.parse().map(Self::Node).map_err(|_| ParseOpenerError),
            "client" => name.parse().map(Self::User).map_err(|_| ParseOpenerError),
            "server" => name.parse().map(Self::Server).map_err(|_| ParseOpenerError),
            _ => Err(ParseOpenerError),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_is_at_its_number() {
        for (number, (code, name)) in (0..).zip(ErrorCode::ALL) {
            assert_eq!((code as u32, ErrorCode::from_wire(number), code.name()), (number, code, name));
        }
        assert_eq!(ErrorCode::from_wire(14), ErrorCode::Internal);
    }

    #[test]
    fn an_edge_opens_as_itself_and_its_server_vouches_for_other_openers() {
        let (node, server) = ("node/edge-1", "server/0000000000000000000000000000000a");
        let edge = Remote::Edge("edge-1".parse().unwrap());
        let (other, cloud) = (Remote::Peer, Remote::Server("edge-2".parse().unwrap()));
        let forged = "server/0000000000000000000000000000000b";
        let (laptop, alice) = (Remote::User("alice/laptop".parse().unwrap()), "client/alice/laptop");
        for (peer, claimed, expected) in [
            (&laptop, None, Some(alice)),
            (&laptop, Some("client/bob/laptop"), Some(alice)),
            (&laptop, Some(node), Some(alice)),
            (&edge, Some(alice), Some(node)),
            (&other, Some(alice), Some(alice)),
            (&edge, None, Some(node)),
            (&edge, Some(server), Some(node)),
            (&edge, Some("node/edge-2"), Some(node)),
            (&other, Some(node), Some(node)),
            (&other, Some(server), Some(server)),
            (&other, Some(forged), Some(server)),
            (&other, None, None),
            (&cloud, Some(forged), Some(forged)),
            (&cloud, None, None),
        ] {
            let claimed = claimed.map(|text| text.parse().unwrap());
            let counted = Opener::verified(claimed.clone(), peer, Some(Instance::from_bits(10)))
                .map(|opener| opener.to_string());
            assert_eq!(counted.as_deref(), expected, "{claimed:?} from {peer:?}");
        }
        for bad in ["", "edge-1", "node/", "node/a b", "server/12", "user/root", "client/alice"] {
            assert_eq!(bad.parse::<Opener>(), Err(ParseOpenerError), "{bad}");
        }
    }
}
