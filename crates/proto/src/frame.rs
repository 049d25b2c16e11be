//! The neutral frames that two ends of a link send, the peer that sends them, and the opener of a session.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use tunnel_base::logging::printable;
use tunnel_base::names::{Instance, NodeName, SessionId, Target};

/// One message on a link; docs/protocol.md#frames has the table of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The node that the frame concerns. On an edge's link it is that edge, but Open and Resume name the acceptor's
    /// node; on a link between pods it is the acceptor's node in all session frames.
    pub node: NodeName,
    /// Its kind and fields.
    pub body: FrameKind,
}

/// The kind of a [`Frame`], with its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameKind {
    /// A session frame.
    Session(SessionId, Category, SessionFrame),
    /// A ping. The peer answers it with a [`FrameKind::Pong`] of the same number; plain peers send no number.
    Ping(Option<u64>),
    /// The answer to a ping: all that was sent before that ping has arrived.
    Pong(Option<u64>),
    /// Between pods: asks whether the node is linked to the peer. The answer repeats the number.
    Find(u64),
    /// Between pods: the answer to Find; with question 0 the announcement that a node was linked.
    Found(Found),
    /// From a pod: asks the edge to link to another pod, rather to the one at that address if the edge knows it; nothing
    /// is cut yet. From an edge: it has done so.
    Drain(Option<SocketAddr>),
    /// From a pod: another living process has the same name.
    Conflict(Conflict),
    /// Between pods: how many nodes are linked to the sender.
    Load(Load),
}

/// How much a pod has to do, as it tells the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Nodes that are linked to it.
    pub nodes: u64,
    /// Whether it takes no new links.
    pub stopping: bool,
    /// Whether it is to be told of every node, as it catches what is sent to their addresses.
    pub intercepts: bool,
}

/// A pod's answer or announcement about a node: whether it is linked to that pod itself, else where it is instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The number of the Find that it answers; 0 for an announcement.
    pub question: u64,
    /// Whether the node is linked to the sender.
    pub here: bool,
    /// Age of the last frame from the node at the sender, in whole milliseconds. If it is not there: how long ago it
    /// was, or another pod of which the sender knew had it; zero if neither is known.
    pub silence: Duration,
    /// The node's process; `None` with the plain dialect.
    pub instance: Option<Instance>,
    /// Age of its link in whole milliseconds; `None` from a pod of version 1.
    pub age: Option<Duration>,
    /// The pod at which the node is, as far as the sender knows, if it is not linked to the sender.
    pub at: Option<Instance>,
    /// Whether the sender, as a home of the node, would know if the node were linked to another pod.
    pub authoritative: bool,
    /// If it is linked to the sender: the addresses that its edge says it has; [`MAX_NODE_IPS`] at most.
    pub ips: Arc<[IpAddr]>,
}

/// Two living processes have the same name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The process that keeps the name. Between pods, the sender is linked to it, and the receiver ends its own link.
    pub instance: Option<Instance>,
    /// A sentence for people; at most 200 bytes, printable.
    pub reason: String,
}

/// The key of a session: its id, its front end, and the node of its acceptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionKey {
    /// The session's id, the same on all links.
    pub id: SessionId,
    /// The front end that opened it.
    pub category: Category,
    /// The node of the acceptor.
    pub node: NodeName,
}

/// A frame about a session.
///
/// In all of them: `limit` is the offset below which the sender of the frame takes bytes, `received` the offset up to
/// which it has stored them (an end of stream counted as one), `epoch` the number of the attempt to open or resume that
/// the frame belongs to, `instance` the process that holds the acceptor, `opener` who opened the session, where that is
/// known.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are explained above, once for all words")]
pub enum SessionFrame {
    /// Dial `target` for `client`; first of a session.
    Open { target: Target, limit: u64, epoch: u64, client: String, opener: Option<Opener> },
    /// The target answered; comes before data of that direction.
    Opened { limit: u64, epoch: u64, instance: Option<Instance> },
    /// The target cannot be reached; comes instead of [`SessionFrame::Opened`].
    Refused { epoch: u64, refusal: SessionError },
    /// Bytes, in order.
    Data(Bytes),
    /// End of this direction, which had `total` bytes, its end counted as one.
    Fin { total: u64 },
    /// The owner of this end is gone. All that it wrote, `total` bytes with an end counted as one, comes before this
    /// frame; with 0 the rest is forgotten. The other direction is dropped. The peer answers with a Reset; until then
    /// the frame is sent again on each new path.
    ResetAt { total: u64, refusal: SessionError },
    /// The session is over, in both directions.
    Reset { epoch: u64, refusal: SessionError },
    /// Acknowledges bytes and raises the limit.
    Credit { received: u64, limit: u64 },
    /// From the opener, first on a new path.
    Resume { received: u64, limit: u64, epoch: u64, instance: Option<Instance>, opener: Option<Opener> },
    /// The acceptor's answer, before data of that direction.
    Resumed { received: u64, limit: u64, epoch: u64 },
    /// The path is broken behind the sender.
    PathLost { epoch: u64 },
}

/// The kind of front end that opened a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// The CONNECT front end.
    Ssh,
    /// CONNECT behind TLS, for kube-apiserver's egress selector.
    Egress,
    /// The HTTP proxy.
    HttpProxy,
    /// A mapped TCP port.
    Tcp,
    /// An HTTPS listener; the acceptor uses TLS to the target.
    Https,
}

impl Found {
    /// The answer of a pod to which the node is not linked.
    pub fn not_here(question: u64) -> Self {
        Self {
            question,
            here: false,
            silence: Duration::ZERO,
            instance: None,
            age: None,
            at: None,
            authoritative: false,
            ips: Arc::default(),
        }
    }
}

impl SessionFrame {
    /// The opener, for the frames that carry it.
    pub fn opener(&mut self) -> Option<&mut Option<Opener>> {
        match self {
            Self::Open { opener, .. } | Self::Resume { opener, .. } => Some(opener),
            _ => None,
        }
    }

    /// The epoch, for the frames that carry one.
    pub fn epoch(&self) -> Option<u64> {
        match self {
            Self::Open { epoch, .. }
            | Self::Opened { epoch, .. }
            | Self::Refused { epoch, .. }
            | Self::Reset { epoch, .. }
            | Self::Resume { epoch, .. }
            | Self::Resumed { epoch, .. }
            | Self::PathLost { epoch } => Some(*epoch),
            Self::Data(_) | Self::Fin { .. } | Self::ResetAt { .. } | Self::Credit { .. } => None,
        }
    }
}

/// Why a session was refused or reset: a code for programs, a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct SessionError {
    /// The cause, for programs.
    pub code: ErrorCode,
    /// A sentence for people; at most 200 bytes, printable.
    pub reason: String,
}

/// The codes of docs/protocol.md#codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ErrorCode {
    /// Both directions have ended, and everything was received.
    NoError = 0,
    /// The target refused the connection.
    TargetRefused = 1,
    /// The target did not answer in time.
    TargetTimeout = 2,
    /// The target cannot be reached or resolved.
    TargetUnreachable = 3,
    /// Policy at the acceptor forbids the target.
    NotAllowed = 4,
    /// The node is not here.
    NodeNotConnected = 5,
    /// Draining, or at a limit.
    Overloaded = 6,
    /// No such session here.
    UnknownSession = 7,
    /// The protocol was violated.
    ProtocolError = 8,
    /// Given up by its owner.
    Cancelled = 9,
    /// An internal error.
    Internal = 10,
    /// The pods let no edge reach that node.
    NodeNotAllowed = 11,
    /// A port of the program itself that would dial, which no setting opens.
    OwnPort = 12,
}

impl SessionError {
    /// A refusal whose reason is made printable and cut to 200 bytes.
    pub fn new(code: ErrorCode, reason: impl fmt::Display) -> Self {
        Self { code, reason: printable(&reason.to_string()) }
    }
}

impl ErrorCode {
    /// The code of a number from the wire; an unknown number is [`Code::Internal`].
    pub fn from_wire(number: u32) -> Self {
        const ALL: [ErrorCode; 13] = [
            ErrorCode::NoError,
            ErrorCode::TargetRefused,
            ErrorCode::TargetTimeout,
            ErrorCode::TargetUnreachable,
            ErrorCode::NotAllowed,
            ErrorCode::NodeNotConnected,
            ErrorCode::Overloaded,
            ErrorCode::UnknownSession,
            ErrorCode::ProtocolError,
            ErrorCode::Cancelled,
            ErrorCode::Internal,
            ErrorCode::NodeNotAllowed,
            ErrorCode::OwnPort,
        ];
        usize::try_from(number).ok().and_then(|at| ALL.get(at).copied()).unwrap_or(Self::Internal)
    }

    /// A short, stable name, for metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoError => "over",
            Self::TargetRefused => "target_refused",
            Self::TargetTimeout => "target_timeout",
            Self::TargetUnreachable => "target_unreachable",
            Self::NotAllowed => "not_allowed",
            Self::NodeNotConnected => "not_here",
            Self::Overloaded => "busy",
            Self::UnknownSession => "unknown",
            Self::ProtocolError => "violation",
            Self::Cancelled => "given_up",
            Self::Internal => "internal",
            Self::NodeNotAllowed => "node_not_allowed",
            Self::OwnPort => "own_port",
        }
    }
}

impl Category {
    /// Its text on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ssh => "ssh",
            Self::Egress => "egress",
            Self::HttpProxy => "httpProxy",
            Self::Tcp => "tcp",
            Self::Https => "https",
        }
    }

    /// The category of a text from the wire.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Ssh, Self::Egress, Self::HttpProxy, Self::Tcp, Self::Https]
            .into_iter()
            .find(|c| c.name() == name)
    }
}

/// Addresses that an edge may claim for its node.
pub const MAX_NODE_IPS: usize = 8;

// The peer at the other end of a link.

/// The peer at the other end of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remote {
    /// At a pod: an edge, by the node that it has proved to be.
    Edge(NodeName),
    /// At an edge: the cloud. The name is the edge's own node.
    Server(NodeName),
    /// At a pod: another pod of this cloud.
    Peer,
}

impl Remote {
    /// The node whose link it is; `None` between pods.
    pub fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Edge(node) | Self::Server(node) => Some(node),
            Self::Peer => None,
        }
    }
}

// The opener of a session, as vouched for by the pod that holds the opener's link.

/// The process or node that opened a session. Only the same one may resume it: knowing the id is not enough.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opener {
    /// An edge, by the name that it has proved: `node/NAME` on the wire. Any process of that node.
    Node(NodeName),
    /// A pod, for one of its clients: `server/` and the 32 hex digits of its process.
    Server(Instance),
}

/// The text is neither `node/NAME` nor `server/INSTANCE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an opener: want node/NAME or pod/INSTANCE")]
pub struct ParseOpenerError;

impl Opener {
    /// The opener of a request that came over a link to process `instance` of `peer` whose frame has the opener `sent`.
    /// An edge is the node that it has proved to be, whatever its frame has. A pod vouches for its edges, and opens for
    /// its clients as itself. An edge trusts its pod. `None`: a pod on the path is too old to send it.
    pub fn verified(sent: Option<Self>, peer: &Remote, instance: Option<Instance>) -> Option<Self> {
        match (peer, sent) {
            (Remote::Edge(node), _) => Some(Self::Node(node.clone())),
            (Remote::Peer, Some(Self::Server(_))) => instance.map(Self::Server),
            (Remote::Peer | Remote::Server(_), sent) => sent,
        }
    }

    /// Whether two openers are the same, as far as both are known. An edge cannot hide its name, as its own pod adds
    /// it; so an unknown opener comes through an older pod.
    pub fn is_compatible(one: Option<&Self>, other: Option<&Self>) -> bool {
        match (one, other) {
            (Some(one), Some(other)) => one == other,
            _ => true,
        }
    }
}

impl fmt::Display for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "node/{node}"),
            Self::Server(instance) => write!(f, "pod/{instance}"),
        }
    }
}

impl FromStr for Opener {
    type Err = ParseOpenerError;

    fn from_str(text: &str) -> Result<Self, ParseOpenerError> {
        let (kind, name) = text.split_once('/').ok_or(ParseOpenerError)?;
        match kind {
            "node" => name.parse().map(Self::Node).map_err(|_| ParseOpenerError),
            "pod" => name.parse().map(Self::Server).map_err(|_| ParseOpenerError),
            _ => Err(ParseOpenerError),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_is_its_proven_name_and_a_server_vouches_for_others() {
        let (node, server) = ("node/edge-1", "pod/0000000000000000000000000000000a");
        let edge = Remote::Edge("edge-1".parse().unwrap());
        let (other, cloud) = (Remote::Peer, Remote::Server("edge-2".parse().unwrap()));
        let forged = "pod/0000000000000000000000000000000b";
        for (peer, said, counts) in [
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
            let said = said.map(|text| text.parse().unwrap());
            let counted = Opener::verified(said.clone(), peer, Some(Instance::from_bits(10)))
                .map(|opener| opener.to_string());
            assert_eq!(counted.as_deref(), counts, "{said:?} from {peer:?}");
        }
        for bad in ["", "edge-1", "node/", "node/a b", "pod/12", "user/root"] {
            assert_eq!(bad.parse::<Opener>(), Err(ParseOpenerError), "{bad}");
        }
    }
}
