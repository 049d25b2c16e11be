//! The neutral frames: what two ends of a link send to each other, whatever the dialect.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use crate::names::{Instance, NodeName, SessionId, Target};
use crate::protocol::wire::opener::Opener;
use crate::telemetry::said;

/// One message on a link; docs/protocol.md#frames has the table of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Which node it is about: on an edge's link that edge, but for Open and Resume, which name the acceptor; on a link
    /// between pods the acceptor in all words about a session.
    pub node: NodeName,
    /// What it carries.
    pub body: FrameKind,
}

/// What a [`Frame`] carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameKind {
    /// Something about one session.
    Session(SessionId, Category, SessionFrame),
    /// Are you there? Answered by [`FrameKind::Pong`] with the same number; plain peers send no number.
    Ping(Option<u64>),
    /// Everything before that ping has arrived.
    Pong(Option<u64>),
    /// Between pods: is the node linked to you? The number is repeated by the answer.
    Find(u64),
    /// Between pods: the answer, or unasked that a node has come.
    Found(Found),
    /// From a pod: attach elsewhere, nothing is cut yet. From an edge: I have.
    Drain,
    /// From a pod: another process has this name as well.
    Conflict(Conflict),
}

/// A pod's answer or announcement about a node, from its own links only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Which question it answers; 0 if nobody asked.
    pub question: u64,
    /// Whether the node is linked there.
    pub here: bool,
    /// How long ago the node was last heard there, in whole milliseconds.
    pub heard: Duration,
    /// The node's process, unless it speaks plain.
    pub instance: Option<Instance>,
    /// How long ago its link was made, in whole milliseconds; a pod of version 1 does not say.
    pub age: Option<Duration>,
}

/// Two processes have one name, and both are alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The one that keeps it: between pods, to which this pod is linked; the other pod's has to give way.
    pub instance: Option<Instance>,
    /// For people; at most 200 bytes, printable.
    pub reason: String,
}

/// Which session: its name everywhere, which front end asked for it, and at which node its acceptor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionKey {
    /// Its name everywhere.
    pub id: SessionId,
    /// Which front end asked.
    pub category: Category,
    /// The node at which the target is.
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
    /// The target answered; before data of that direction.
    Opened { limit: u64, epoch: u64, instance: Option<Instance> },
    /// The target cannot be reached; instead of [`SessionFrame::Opened`].
    Refused { epoch: u64, refusal: Refusal },
    /// Bytes, in order.
    Data(Bytes),
    /// End of this direction, which had `total` bytes, its end counted as one.
    Finish { total: u64 },
    /// The owner of this end is gone, and all that it accepted, `total` bytes with an end, stands before this; with 0 the
    /// rest is forgotten. The other direction is dropped. Answered by a Reset; until then sent again on each new path.
    Broken { total: u64, refusal: Refusal },
    /// The session is over, in both directions.
    Reset { epoch: u64, refusal: Refusal },
    /// What was stored, and how far to send.
    Credit { received: u64, limit: u64 },
    /// From the opener, first on a new path.
    Resume { received: u64, limit: u64, epoch: u64, instance: Option<Instance>, opener: Option<Opener> },
    /// The acceptor's answer, before data of that direction.
    Resumed { received: u64, limit: u64, epoch: u64 },
    /// This path is gone beyond here.
    Lost { epoch: u64 },
}

/// Which front end opened a session.
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
    /// An HTTPS listener; the acceptor speaks TLS to the target.
    Https,
}

impl Found {
    /// The answer of a pod to which the node is not linked.
    pub fn away(question: u64) -> Self {
        Self { question, here: false, heard: Duration::ZERO, instance: None, age: None }
    }
}

impl SessionFrame {
    /// Who opened the session, for the frames that carry it.
    pub fn opener(&mut self) -> Option<&mut Option<Opener>> {
        match self {
            Self::Open { opener, .. } | Self::Resume { opener, .. } => Some(opener),
            _ => None,
        }
    }

    /// Which attempt it opens, resumes, answers or ends, for the frames that carry an epoch.
    pub fn epoch(&self) -> Option<u64> {
        match self {
            Self::Open { epoch, .. }
            | Self::Opened { epoch, .. }
            | Self::Refused { epoch, .. }
            | Self::Reset { epoch, .. }
            | Self::Resume { epoch, .. }
            | Self::Resumed { epoch, .. }
            | Self::Lost { epoch } => Some(*epoch),
            Self::Data(_) | Self::Finish { .. } | Self::Broken { .. } | Self::Credit { .. } => None,
        }
    }
}

/// Why a session was refused or reset: a code for programs, a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// For programs.
    pub code: Code,
    /// For people; at most 200 bytes, printable.
    pub reason: String,
}

/// The codes of docs/protocol.md#codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Code {
    /// Both directions have ended, and everything was received.
    Over = 0,
    /// The target refused the connection.
    TargetRefused = 1,
    /// The target did not answer in time.
    TargetTimeout = 2,
    /// The target cannot be reached or resolved.
    TargetUnreachable = 3,
    /// Policy at the acceptor forbids the target.
    NotAllowed = 4,
    /// The node is not here.
    NotHere = 5,
    /// Draining, or at a limit.
    Busy = 6,
    /// No such session here.
    Unknown = 7,
    /// The protocol was violated.
    Violation = 8,
    /// Given up by its owner.
    GivenUp = 9,
    /// Our own fault.
    Internal = 10,
}

impl Refusal {
    /// A refusal whose reason is made printable and cut to 200 bytes.
    pub fn new(code: Code, reason: impl fmt::Display) -> Self {
        Self { code, reason: said(&reason.to_string()) }
    }
}

impl Code {
    /// The code of a number from the wire; one we do not know is [`Code::Internal`].
    pub fn from_wire(number: u32) -> Self {
        const ALL: [Code; 11] = [
            Code::Over,
            Code::TargetRefused,
            Code::TargetTimeout,
            Code::TargetUnreachable,
            Code::NotAllowed,
            Code::NotHere,
            Code::Busy,
            Code::Unknown,
            Code::Violation,
            Code::GivenUp,
            Code::Internal,
        ];
        usize::try_from(number).ok().and_then(|at| ALL.get(at).copied()).unwrap_or(Self::Internal)
    }

    /// A short, stable name, for metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Over => "over",
            Self::TargetRefused => "target_refused",
            Self::TargetTimeout => "target_timeout",
            Self::TargetUnreachable => "target_unreachable",
            Self::NotAllowed => "not_allowed",
            Self::NotHere => "not_here",
            Self::Busy => "busy",
            Self::Unknown => "unknown",
            Self::Violation => "violation",
            Self::GivenUp => "given_up",
            Self::Internal => "internal",
        }
    }
}

impl Category {
    /// As it stands on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ssh => "ssh",
            Self::Egress => "egress",
            Self::HttpProxy => "httpProxy",
            Self::Tcp => "tcp",
            Self::Https => "https",
        }
    }

    /// From the wire.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Ssh, Self::Egress, Self::HttpProxy, Self::Tcp, Self::Https]
            .into_iter()
            .find(|c| c.name() == name)
    }
}
