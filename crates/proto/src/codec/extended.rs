//! Frames of this program as messages, and back.

use std::time::Duration;

use bytes::{Buf, Bytes};
use prost::Message as _;

use crate::codec::proto::{self, Control, StreamMsg};
use crate::frame::{
    Conflict, ErrorCode, Found, Frame, FrameKind, ListNodes, ListedNode, Load, MAX_PAGE_NODES,
    MAX_VERSION_CHARS, MAX_WEBSOCKET_CHARS, NodePage, Opener, Place, Remote, SessionCategory, SessionError,
    SessionFrame,
};
use crate::names::{Instance, NodeName, SessionId};
use crate::printable::printable;

/// Reason why a message is not a frame. The message is counted and dropped; the link continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.reason())]
pub enum FrameError {
    /// This version does not know the message's type or category.
    UnknownType,
    /// The topic is not a session id.
    BadSession,
    /// A field cannot be parsed.
    BadField,
    /// The message names a node other than the link's.
    WrongNode,
}

impl FrameError {
    /// Returns a fixed label for metrics.
    pub fn reason(self) -> &'static str {
        match self {
            Self::UnknownType => "unknown_type",
            Self::BadSession => "bad_session_id",
            Self::BadField => "bad_field",
            Self::WrongNode => "wrong_node",
        }
    }
}

/// Encodes a frame as a message.
pub fn to_message(frame: Frame) -> StreamMsg {
    let node = frame.node.as_str().to_owned();
    match frame.body {
        FrameKind::Ping(number) => signal(node, HEARTBEAT, number),
        FrameKind::Pong(Some(number)) => signal(node, PONG, Some(number)),
        FrameKind::Pong(None) => signal(node, HEARTBEAT, None),
        FrameKind::Find(question) => peer_message(node, FIND, question, Control::default()),
        FrameKind::Found(found) => peer_message(node, FOUND, found.question, found_control(&found)),
        FrameKind::Drain(to) => {
            let addr = to.map(|to| to.to_string()).unwrap_or_default();
            StreamMsg { addr, ..signal(node, DRAIN, None) }
        }
        FrameKind::Load(Load { nodes, stopping, problems: reason }) => {
            let code = u32::from(if stopping { ErrorCode::Overloaded } else { ErrorCode::NoError } as u8);
            StreamMsg {
                data: pack(&Control { nodes, code, reason, ..Control::default() }),
                ..signal(node, LOAD, None)
            }
        }
        FrameKind::ListNodes(ListNodes { question, after }) => {
            let addr = after.map(|after| after.as_str().to_owned()).unwrap_or_default();
            StreamMsg { addr, ..peer_message(node, LIST_NODES, question, Control::default()) }
        }
        FrameKind::NodePage(page) => {
            let message = peer_message(node, NODE_PAGE, page.question, Control::default());
            StreamMsg { data: packed_page(page), ..message }
        }
        FrameKind::Cluster(data) => StreamMsg { data, ..signal(node, CLUSTER, None) },
        FrameKind::Conflict(Conflict { instance, reason }) => {
            let fields = Control { instance: instance_bytes(instance), reason, ..Control::default() };
            StreamMsg { data: pack(&fields), ..signal(node, CONFLICT, None) }
        }
        FrameKind::Session(id, category, frame) => {
            let (kind, addr, data) = parts(frame);
            StreamMsg {
                node,
                category: category.name().into(),
                r#type: kind.into(),
                topic: id.topic(),
                data,
                addr,
            }
        }
    }
}

/// Decodes a message that arrived over a link to `peer`.
pub fn from_message(message: StreamMsg, peer: &Remote) -> Result<Frame, FrameError> {
    let servers = *peer == Remote::Peer;
    // The guards keep edges and users' programs from frames of servers: these announce nodes, or search for them.
    let body = match (message.category.as_str(), message.r#type.as_str()) {
        (STREAM, HEARTBEAT) => FrameKind::Ping(number(&message.data)),
        (STREAM, PONG) => FrameKind::Pong(number(&message.data)),
        (STREAM, DRAIN) if !servers => FrameKind::Drain(message.addr.parse().ok()),
        (STREAM, CONFLICT) if !peer.is_leaf() => {
            let fields = control(&message)?;
            let reason = SessionError::new(ErrorCode::Overloaded, fields.reason).reason;
            FrameKind::Conflict(Conflict { instance: Instance::from_bytes(&fields.instance), reason })
        }
        (STREAM, FIND) if servers => FrameKind::Find(control(&message)?.epoch),
        (STREAM, FOUND) if servers => FrameKind::Found(found(&control(&message)?)),
        (STREAM, LOAD) if servers => {
            let fields = control(&message)?;
            let stopping = ErrorCode::from_wire(fields.code) != ErrorCode::NoError;
            let problems = SessionError::new(ErrorCode::NoError, fields.reason).reason;
            FrameKind::Load(Load { nodes: fields.nodes, stopping, problems })
        }
        (STREAM, LIST_NODES) if servers => {
            let question = control(&message)?.epoch;
            let after = Some(&message.addr).filter(|after| !after.is_empty());
            let after = after.map(|after| after.parse().map_err(|_| FrameError::BadField)).transpose()?;
            FrameKind::ListNodes(ListNodes { question, after })
        }
        (STREAM, NODE_PAGE) if servers => FrameKind::NodePage(page(&message)?),
        (STREAM, CLUSTER) if servers => FrameKind::Cluster(message.data.clone()),
        (STREAM, _) => return Err(FrameError::UnknownType),
        (category, kind) => {
            // Only Open and Resume of such a link may name another node than its own: that of the acceptor.
            let names_acceptor = matches!(kind, OPEN | RESUME) && peer.is_leaf();
            let category = SessionCategory::from_name(category).ok_or(FrameError::UnknownType)?;
            let id: SessionId = message.topic.parse().map_err(|_| FrameError::BadSession)?;
            let node = named(&message, peer, names_acceptor)?;
            return Ok(Frame { node, body: FrameKind::Session(id, category, session_frame(message)?) });
        }
    };
    // Pings and pongs concern no node, so their node is not checked.
    let node = match (&body, peer.frame_node()) {
        (FrameKind::Ping(_) | FrameKind::Pong(_), Some(node)) => node.clone(),
        _ => named(&message, peer, false)?,
    };
    Ok(Frame { node, body })
}

/// Returns the node that a message names. On the link of an edge or a user's program it must be the link's, unless
/// `any` is set.
fn named(message: &StreamMsg, peer: &Remote, any: bool) -> Result<NodeName, FrameError> {
    match peer.frame_node() {
        Some(node) if message.node.eq_ignore_ascii_case(node.as_str()) => Ok(node.clone()),
        Some(_) if !any => Err(FrameError::WrongNode),
        _ => NodeName::placeholder(&message.node)
            .map_or_else(|| message.node.parse(), Ok)
            .map_err(|_| FrameError::BadField),
    }
}

pub(super) fn parts(frame: SessionFrame) -> (&'static str, String, Bytes) {
    let blank = Control::default();
    let (kind, control) = match frame {
        SessionFrame::Data(bytes) => return ("tcp-forward", String::new(), bytes),
        SessionFrame::Open { target, limit, epoch, client, opener, resume_timeout, boot } => {
            let opener = text(opener);
            let resume_timeout = resume_timeout.unwrap_or_default().as_secs();
            let boot = boot.map_or_else(Bytes::new, |boot| Bytes::copy_from_slice(&boot.to_be_bytes()));
            let control = Control { limit, epoch, client, opener, resume_timeout, boot, ..blank };
            return (OPEN, target.to_string(), pack(&control));
        }
        SessionFrame::Opened { limit, epoch, instance, place, resume_timeout } => {
            let instance = instance_bytes(instance);
            let resume_timeout = resume_timeout.unwrap_or_default().as_secs();
            ("connected", Control { limit, epoch, instance, resume_timeout, ..placed(place) })
        }
        SessionFrame::Refused { epoch, refusal } => ("connect-failed", why(epoch, refusal)),
        SessionFrame::Fin { total } => ("fin", Control { total, ..blank }),
        SessionFrame::ResetAt { total, refusal } => ("reset-at", Control { total, ..why(0, refusal) }),
        SessionFrame::Reset { epoch, refusal } => ("reset", why(epoch, refusal)),
        SessionFrame::Credit { received, limit } => ("credit", Control { received, limit, ..blank }),
        SessionFrame::Resume { received, limit, epoch, instance, opener, target, place } => {
            let instance = instance_bytes(instance);
            let opener = text(opener);
            let control = Control { received, limit, epoch, instance, opener, ..placed(place) };
            return (RESUME, target.to_string(), pack(&control));
        }
        SessionFrame::Resumed { received, limit, epoch } => {
            ("resumed", Control { received, limit, epoch, ..blank })
        }
        SessionFrame::PathLost { epoch } => ("path-lost", Control { epoch, ..blank }),
        SessionFrame::Revoked { opener, refusal } => {
            ("revoked", Control { opener: text(opener), ..why(0, refusal) })
        }
        SessionFrame::Parked(of) => {
            let (device, target) = *of;
            let opener = text(Some(Opener::User(device)));
            return ("parked", target.to_string(), pack(&Control { opener, ..blank }));
        }
    };
    (kind, String::new(), pack(&control))
}

fn session_frame(message: StreamMsg) -> Result<SessionFrame, FrameError> {
    // Data comes first: its bytes are those of the session, and no message with fields.
    if message.r#type == "tcp-forward" {
        return Ok(SessionFrame::Data(message.data));
    }
    let c = control(&message)?;
    let refusal = || SessionError::new(ErrorCode::from_wire(c.code), &c.reason);
    Ok(match message.r#type.as_str() {
        OPEN => SessionFrame::Open {
            target: message.addr.parse().map_err(|_| FrameError::BadField)?,
            limit: c.limit,
            epoch: c.epoch,
            client: printable(&c.client),
            opener: c.opener.parse().ok(),
            resume_timeout: resume_timeout(&c),
            boot: c.boot.first_chunk().copied().map(u128::from_be_bytes),
        },
        "connected" => SessionFrame::Opened {
            limit: c.limit,
            epoch: c.epoch,
            instance: Instance::from_bytes(&c.instance),
            place: place(&c),
            resume_timeout: resume_timeout(&c),
        },
        "connect-failed" => SessionFrame::Refused { epoch: c.epoch, refusal: refusal() },
        "fin" => SessionFrame::Fin { total: c.total },
        "reset-at" => SessionFrame::ResetAt { total: c.total, refusal: refusal() },
        "reset" => SessionFrame::Reset { epoch: c.epoch, refusal: refusal() },
        "credit" => SessionFrame::Credit { received: c.received, limit: c.limit },
        RESUME => SessionFrame::Resume {
            received: c.received,
            limit: c.limit,
            epoch: c.epoch,
            instance: Instance::from_bytes(&c.instance),
            opener: c.opener.parse().ok(),
            target: message.addr.parse().map_err(|_| FrameError::BadField)?,
            place: place(&c),
        },
        "resumed" => SessionFrame::Resumed { received: c.received, limit: c.limit, epoch: c.epoch },
        "path-lost" => SessionFrame::PathLost { epoch: c.epoch },
        "revoked" => SessionFrame::Revoked { opener: c.opener.parse().ok(), refusal: refusal() },
        "parked" => match (c.opener.parse(), message.addr.parse()) {
            (Ok(Opener::User(device)), Ok(target)) => SessionFrame::Parked(Box::new((device, target))),
            _ => return Err(FrameError::BadField),
        },
        _ => return Err(FrameError::UnknownType),
    })
}

fn peer_message(node: String, kind: &str, question: u64, fields: Control) -> StreamMsg {
    let data = pack(&Control { epoch: question, ..fields });
    let topic = question.to_string();
    StreamMsg { node, category: STREAM.into(), r#type: kind.into(), topic, data, addr: String::new() }
}

fn found_control(found: &Found) -> Control {
    let code = if found.here { ErrorCode::NoError } else { ErrorCode::NodeNotConnected };
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    // 0 means none.
    let age = found.age.map_or(0, |age| millis(age).max(1));
    let instance = instance_bytes(found.instance);
    let silence = millis(found.silence);
    Control { code: u32::from(code as u8), silence, instance, age, ..Control::default() }
}

fn found(c: &Control) -> Found {
    let here = ErrorCode::from_wire(c.code) == ErrorCode::NoError;
    let silence = Duration::from_millis(c.silence);
    let age = (c.age > 0).then(|| Duration::from_millis(c.age));
    let instance = Instance::from_bytes(&c.instance);
    Found { question: c.epoch, here, silence, instance, age }
}

fn packed_page(NodePage { question, nodes, more }: NodePage) -> Bytes {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let nodes = nodes.into_iter().take(MAX_PAGE_NODES).map(|listed| proto::ListedNode {
        name: listed.node.as_str().to_owned(),
        age: millis(listed.age),
        address: listed.address.map(|address| address.to_string()).unwrap_or_default(),
        round_trip: listed.round_trip.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        sessions: listed.sessions,
        version: listed.version.map(String::from).unwrap_or_default(),
        sent: listed.bytes.map(|[sent, _]| sent),
        received: listed.bytes.map(|[_, received]| received),
        websocket: listed.websocket.map(String::from).unwrap_or_default(),
    });
    proto::NodePage { question, nodes: nodes.collect(), more }.encode_to_vec().into()
}

/// Reads a page. Nodes with invalid names, and those past the limit, are left out.
fn page(message: &StreamMsg) -> Result<NodePage, FrameError> {
    let fields = proto::NodePage::decode(message.data.clone()).map_err(|_| FrameError::BadField)?;
    let nodes = fields.nodes.iter().take(MAX_PAGE_NODES).filter_map(|listed| {
        let text = |text: &str, most| -> Option<Box<str>> {
            let text: String = printable(text).chars().take(most).collect();
            (!text.is_empty()).then(|| text.into())
        };
        Some(ListedNode {
            node: listed.name.parse().ok()?,
            age: Duration::from_millis(listed.age),
            address: listed.address.parse().ok(),
            round_trip: (listed.round_trip > 0).then(|| Duration::from_micros(listed.round_trip)),
            sessions: listed.sessions,
            version: text(&listed.version, MAX_VERSION_CHARS),
            bytes: listed.sent.zip(listed.received).map(<[u64; 2]>::from),
            websocket: text(&listed.websocket, MAX_WEBSOCKET_CHARS),
        })
    });
    Ok(NodePage { question: fields.question, nodes: nodes.collect(), more: fields.more })
}

fn control(message: &StreamMsg) -> Result<Control, FrameError> {
    Control::decode(message.data.clone()).map_err(|_| FrameError::BadField)
}

fn signal(node: String, kind: &str, number: Option<u64>) -> StreamMsg {
    let data = number.map(|n| Bytes::copy_from_slice(&n.to_be_bytes())).unwrap_or_default();
    let topic = format!("{node}heartbeat");
    StreamMsg { node, category: STREAM.into(), r#type: kind.into(), topic, data, addr: String::new() }
}

pub(super) fn number(data: &Bytes) -> Option<u64> {
    (data.len() == 8).then(|| data.clone().get_u64())
}

fn why(epoch: u64, refusal: SessionError) -> Control {
    Control { epoch, code: u32::from(refusal.code as u8), reason: refusal.reason, ..Control::default() }
}

fn instance_bytes(instance: Option<Instance>) -> Bytes {
    instance.map(|i| Bytes::copy_from_slice(&i.to_bytes())).unwrap_or_default()
}

fn placed(place: Option<Place>) -> Control {
    let place = place.map(|place| (place.0.to_string(), place.1.to_string()));
    let (node, target) = place.unwrap_or_default();
    Control { node, target, ..Control::default() }
}

fn place(c: &Control) -> Option<Place> {
    Some(Box::new((c.node.parse().ok()?, c.target.parse().ok()?)))
}

fn resume_timeout(c: &Control) -> Option<Duration> {
    (c.resume_timeout > 0).then(|| Duration::from_secs(c.resume_timeout))
}

fn text(opener: Option<Opener>) -> String {
    opener.map(|o| o.to_string()).unwrap_or_default()
}

fn pack(control: &Control) -> Bytes {
    control.encode_to_vec().into()
}

/// Returns SuperEdge's ping, which is the same message in both directions.
pub fn heartbeat(node: &NodeName) -> StreamMsg {
    signal(node.as_str().to_owned(), HEARTBEAT, None)
}

/// Category of frames about the link itself.
pub const STREAM: &str = "stream";
/// Type of a ping, also of plain remotes.
pub const HEARTBEAT: &str = "heartbeat";
const PONG: &str = "pong";
const FIND: &str = "find";
const FOUND: &str = "found";
const DRAIN: &str = "drain";
const CONFLICT: &str = "conflict";
const LOAD: &str = "load";
const LIST_NODES: &str = "list-nodes";
const NODE_PAGE: &str = "node-page";
const CLUSTER: &str = "cluster";
const OPEN: &str = "connecting";
const RESUME: &str = "resume";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn client() -> Remote {
        Remote::User("alice/laptop".parse().unwrap())
    }

    fn any_session_frame() -> impl Strategy<Value = SessionFrame> {
        let refusal = || {
            (0u32..11, "[ -~]{0,100}")
                .prop_map(|(code, text)| SessionError::new(ErrorCode::from_wire(code), text))
        };
        let instance = || prop::option::of(any::<u128>().prop_map(Instance::from_bits));
        let place = || {
            let place = |(node, port): (String, u16)| {
                Box::new((node.parse().unwrap(), format!("10.0.0.1:{port}").parse().unwrap()))
            };
            prop::option::of(("[a-z]{1,20}", 1u16..).prop_map(place))
        };
        let opener = || {
            prop::option::of(prop_oneof![
                "[a-z]{1,20}".prop_map(|name| Opener::Node(name.parse().unwrap())),
                "[a-z]{1,9}/[a-z]{1,9}".prop_map(|name| Opener::User(name.parse().unwrap())),
                any::<u128>().prop_map(|bits| Opener::Server(Instance::from_bits(bits))),
            ])
        };
        let resume_timeout = || prop::option::of((1u64..).prop_map(Duration::from_secs));
        prop_oneof![
            (any::<u64>(), any::<u64>(), "[ -~]{0,100}", opener(), resume_timeout(), any::<Option<u128>>())
                .prop_map(|(limit, epoch, client, opener, resume_timeout, boot)| {
                    SessionFrame::Open {
                        target: "[fd00::1]:22".parse().unwrap(),
                        limit,
                        epoch,
                        client,
                        opener,
                        resume_timeout,
                        boot,
                    }
                }),
            (any::<u64>(), any::<u64>(), instance(), place(), resume_timeout()).prop_map(
                |(limit, epoch, instance, place, resume_timeout)| {
                    SessionFrame::Opened { limit, epoch, instance, place, resume_timeout }
                }
            ),
            (any::<u64>(), refusal()).prop_map(|(epoch, refusal)| SessionFrame::Refused { epoch, refusal }),
            prop::collection::vec(any::<u8>(), 0..100).prop_map(|b| SessionFrame::Data(b.into())),
            any::<u64>().prop_map(|total| SessionFrame::Fin { total }),
            (any::<u64>(), refusal()).prop_map(|(total, refusal)| SessionFrame::ResetAt { total, refusal }),
            (any::<u64>(), refusal()).prop_map(|(epoch, refusal)| SessionFrame::Reset { epoch, refusal }),
            (any::<u64>(), any::<u64>())
                .prop_map(|(received, limit)| SessionFrame::Credit { received, limit }),
            (any::<u64>(), any::<u64>(), any::<u64>(), instance(), opener(), place()).prop_map(
                |(received, limit, epoch, instance, opener, place)| SessionFrame::Resume {
                    received,
                    limit,
                    epoch,
                    instance,
                    opener,
                    target: "[fd00::1]:22".parse().unwrap(),
                    place,
                }
            ),
            (any::<u64>(), any::<u64>(), any::<u64>())
                .prop_map(|(received, limit, epoch)| SessionFrame::Resumed { received, limit, epoch }),
            any::<u64>().prop_map(|epoch| SessionFrame::PathLost { epoch }),
            (opener(), refusal()).prop_map(|(opener, refusal)| SessionFrame::Revoked { opener, refusal }),
            "[a-z]{1,9}/[a-z]{1,9}".prop_map(|device| {
                let target = "[fd00::1]:22".parse().unwrap();
                SessionFrame::Parked(Box::new((device.parse().unwrap(), target)))
            }),
        ]
    }

    proptest! {
        #[test]
        fn every_session_frame_round_trips_through_the_wire(session_frame in any_session_frame(), bits: u128) {
            let node: NodeName = "edge-1".parse().unwrap();
            let frame = Frame { node: node.clone(), body: FrameKind::Session(SessionId::from_bits(bits), SessionCategory::Ssh, session_frame) };
            for peer in [Remote::Edge(node.clone()), Remote::Server(node), Remote::Peer] {
                prop_assert_eq!(from_message(to_message(frame.clone()), &peer), Ok(frame.clone()));
            }
            let of_user = Frame { node: NodeName::none(), ..frame };
            prop_assert_eq!(from_message(to_message(of_user.clone()), &client()), Ok(of_user));
        }

        #[test]
        fn parsing_a_message_never_panics(kind in "[a-z-]{0,15}", topic in ".{0,40}", addr in ".{0,40}", data in prop::collection::vec(any::<u8>(), 0..80)) {
            let message = StreamMsg { node: "n".into(), category: "ssh".into(), r#type: kind, topic, data: data.into(), addr };
            for peer in [Remote::Edge("n".parse().unwrap()), client(), Remote::Peer] {
                let _ = from_message(message.clone(), &peer);
            }
        }
    }

    #[test]
    fn an_edge_sends_only_for_its_own_node_but_opens_to_any_node() {
        let frame = |session_frame| Frame {
            node: "a".parse().unwrap(),
            body: FrameKind::Session(SessionId::random(), SessionCategory::Ssh, session_frame),
        };
        let open = SessionFrame::Open {
            target: "a:1".parse().unwrap(),
            limit: 1,
            epoch: 1,
            client: "c".into(),
            opener: None,
            resume_timeout: None,
            boot: None,
        };
        let (edge, cloud) = (Remote::Edge("b".parse().unwrap()), Remote::Server("b".parse().unwrap()));
        let finish = frame(SessionFrame::Fin { total: 1 });
        assert_eq!(from_message(to_message(finish.clone()), &edge), Err(FrameError::WrongNode));
        assert_eq!(from_message(to_message(finish), &cloud), Err(FrameError::WrongNode));
        let open = frame(open);
        assert_eq!(from_message(to_message(open.clone()), &cloud), Err(FrameError::WrongNode));
        assert_eq!(from_message(to_message(open.clone()), &edge), Ok(open));
    }

    #[test]
    fn a_users_program_speaks_for_no_node_but_opens_to_any_node() {
        let client = client();
        let frame = |node: &NodeName, body| Frame { node: node.clone(), body };
        let session = |frame| FrameKind::Session(SessionId::random(), SessionCategory::Ssh, frame);
        let (none, node) = (NodeName::none(), "edge-1".parse().unwrap());
        let (target, client_text) = ("a:1".parse().unwrap(), String::new());
        let open = SessionFrame::Open {
            target,
            limit: 1,
            epoch: 1,
            client: client_text,
            opener: None,
            resume_timeout: None,
            boot: None,
        };
        for sound in [
            frame(&none, FrameKind::Ping(Some(7))),
            frame(&none, FrameKind::Drain(None)),
            frame(&none, session(SessionFrame::Fin { total: 1 })),
            frame(&node, session(open)),
        ] {
            assert_eq!(from_message(to_message(sound.clone()), &client), Ok(sound));
        }
        let fin = frame(&node, session(SessionFrame::Fin { total: 1 }));
        assert_eq!(from_message(to_message(fin), &client), Err(FrameError::WrongNode));
        let conflict = FrameKind::Conflict(Conflict { instance: None, reason: String::new() });
        let found = FrameKind::Found(Found { here: true, ..Found::not_here(0) });
        let load = FrameKind::Load(Load { nodes: 0, stopping: true, problems: String::new() });
        let cluster = FrameKind::Cluster(Bytes::from_static(b"{}"));
        for body in [FrameKind::Find(5), found, load, cluster, conflict] {
            let refused = from_message(to_message(frame(&node, body)), &client);
            assert_eq!(refused, Err(FrameError::UnknownType));
        }
    }

    #[test]
    fn signals_round_trip_and_only_servers_may_query_nodes() {
        let node: NodeName = "edge-1".parse().unwrap();
        let instance = Some(Instance::from_bits(9));
        let (silence, age) = (Duration::from_millis(1500), Some(Duration::from_millis(1)));
        let found = Found { here: true, silence, instance, age, ..Found::not_here(3) };
        let away = Found { silence, ..Found::not_here(0) };
        let (edge, server) = ([Remote::Edge(node.clone()), Remote::Server(node.clone())], [Remote::Peer]);
        let conflict = FrameKind::Conflict(Conflict { instance, reason: "two machines".into() });
        let load = |nodes| Load { nodes, stopping: false, problems: "store: cannot be read".into() };
        let first = ListNodes { question: 7, after: None };
        let next = ListNodes { after: Some(node.clone()), ..first.clone() };
        let listed = |address: Option<&str>| ListedNode {
            node: node.clone(),
            age: Duration::from_secs(3),
            address: address.map(|address| address.parse().unwrap()),
            round_trip: address.map(|_| Duration::from_micros(1500)),
            sessions: address.map(|_| 0),
            version: address.map(Into::into),
            bytes: address.map(|_| [0, u64::MAX]),
            websocket: address.map(|_| "a proxy".into()),
        };
        let nodes = vec![listed(None), listed(Some("10.0.0.7:1")), listed(Some("[fd00::7]:2"))];
        let page = NodePage { question: 7, nodes, more: true };
        for (body, theirs, others) in [
            (FrameKind::Ping(Some(7)), [&edge[..], &server].concat(), vec![]),
            (FrameKind::Pong(Some(7)), [&edge[..], &server].concat(), vec![]),
            (FrameKind::Drain(None), edge.to_vec(), server.to_vec()),
            (FrameKind::Drain(Some(([10, 0, 0, 7], 9000).into())), edge.to_vec(), server.to_vec()),
            (FrameKind::Load(load(0)), server.to_vec(), edge.to_vec()),
            (FrameKind::Load(Load { stopping: true, ..load(300) }), server.to_vec(), edge.to_vec()),
            (FrameKind::Find(5), server.to_vec(), edge.to_vec()),
            (FrameKind::ListNodes(first), server.to_vec(), edge.to_vec()),
            (FrameKind::ListNodes(next), server.to_vec(), edge.to_vec()),
            (FrameKind::NodePage(page), server.to_vec(), edge.to_vec()),
            (FrameKind::Found(found), server.to_vec(), edge.to_vec()),
            (FrameKind::Found(away), server.to_vec(), edge.to_vec()),
            (conflict, vec![edge[1].clone(), Remote::Peer], edge[..1].to_vec()),
        ] {
            let frame = Frame { node: node.clone(), body };
            for peer in &theirs {
                assert_eq!(from_message(to_message(frame.clone()), peer), Ok(frame.clone()));
            }
            for peer in &others {
                assert_eq!(from_message(to_message(frame.clone()), peer), Err(FrameError::UnknownType));
            }
        }
    }

    #[test]
    fn a_page_of_nodes_is_bounded_and_leaves_out_invalid_names() {
        let listed = |name: &str| proto::ListedNode { name: name.to_owned(), ..Default::default() };
        let read = |nodes: Vec<_>| {
            let data = proto::NodePage { question: 1, nodes, more: false }.encode_to_vec().into();
            page(&StreamMsg { data, ..StreamMsg::default() })
        };
        let names = |nodes| {
            read(nodes).unwrap().nodes.into_iter().map(|one| one.node.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(vec![listed("a"), listed(""), listed("\u{1b}[2J"), listed("b")]), ["a", "b"]);
        assert_eq!(names(vec![listed("a"); MAX_PAGE_NODES + 1]).len(), MAX_PAGE_NODES);
        let junk = StreamMsg { data: Bytes::from_static(b"\xff"), ..StreamMsg::default() };
        assert_eq!(page(&junk), Err(FrameError::BadField));
    }

    #[test]
    fn addresses_that_an_older_server_announces_are_ignored() {
        let found = Found { here: true, ..Found::not_here(3) };
        let mut message =
            to_message(Frame { node: "edge-1".parse().unwrap(), body: FrameKind::Found(found.clone()) });
        // Field 15, of four bytes.
        message.data = [&message.data[..], &[0x7a, 4, 10, 0, 0, 7]].concat().into();
        assert_eq!(from_message(message, &Remote::Peer).unwrap().body, FrameKind::Found(found));
    }
}
