//! The extended dialect: neutral frames as messages, and back.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use prost::Message as _;

use crate::names::{Instance, NodeName, SessionId};
use crate::protocol::wire::codec::StreamMsg;
use crate::protocol::wire::codec::proto::Control;
use crate::protocol::wire::frame::{
    Category, Code, Conflict, Found, Frame, FrameKind, Load, MOST_IPS, Refusal, SessionFrame,
};
use crate::protocol::wire::opener::Opener;
use crate::protocol::wire::peer::Peer;
use crate::telemetry::printable;

/// Why a message is not a frame. The message is counted and dropped; the link goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotAFrame {
    /// This version does not know its type or category.
    #[error("unknown_type")]
    UnknownType,
    /// The topic is not a session id.
    #[error("bad_session_id")]
    BadSession,
    /// A field cannot be read.
    #[error("bad_field")]
    BadField,
    /// It names a node that is not the link's.
    #[error("wrong_node")]
    WrongNode,
}

impl NotAFrame {
    /// A fixed label for metrics.
    pub fn cause(self) -> &'static str {
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
        FrameKind::Find(question) => between_pods(node, FIND, question, Control::default()),
        FrameKind::Found(found) => between_pods(node, FOUND, found.question, about(&found)),
        FrameKind::Drain(to) => {
            let addr = to.map(|to| to.to_string()).unwrap_or_default();
            StreamMsg { addr, ..signal(node, DRAIN, None) }
        }
        FrameKind::Load(Load { nodes, stopping, catches }) => {
            let code = u32::from(if stopping { Code::Busy } else { Code::Over } as u8);
            StreamMsg {
                data: pack(&Control { nodes, code, catches, ..Control::default() }),
                ..signal(node, LOAD, None)
            }
        }
        FrameKind::Conflict(Conflict { instance, reason }) => {
            let said = Control { instance: wire(instance), reason, ..Control::default() };
            StreamMsg { data: pack(&said), ..signal(node, CONFLICT, None) }
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

/// Decodes a message that came over a link to `peer`.
pub fn from_message(message: StreamMsg, peer: &Peer) -> Result<Frame, NotAFrame> {
    let pods = *peer == Peer::Pod;
    let body = match (message.category.as_str(), message.r#type.as_str()) {
        (STREAM, HEARTBEAT) => FrameKind::Ping(number(&message.data)),
        (STREAM, PONG) => FrameKind::Pong(number(&message.data)),
        (STREAM, DRAIN) if !pods => FrameKind::Drain(message.addr.parse().ok()),
        (STREAM, CONFLICT) if !matches!(peer, Peer::Edge(_)) => {
            let said = control(&message)?;
            let reason = Refusal::new(Code::Busy, said.reason).reason;
            FrameKind::Conflict(Conflict { instance: Instance::from_bytes(&said.instance), reason })
        }
        (STREAM, FIND) if pods => FrameKind::Find(control(&message)?.epoch),
        (STREAM, FOUND) if pods => FrameKind::Found(found(&control(&message)?)),
        (STREAM, LOAD) if pods => {
            let said = control(&message)?;
            let stopping = Code::from_wire(said.code) != Code::Over;
            FrameKind::Load(Load { nodes: said.nodes, stopping, catches: said.catches })
        }
        (STREAM, _) => return Err(NotAFrame::UnknownType),
        (category, kind) => {
            let names_acceptor = matches!(kind, OPEN | RESUME) && matches!(peer, Peer::Edge(_));
            let category = Category::from_name(category).ok_or(NotAFrame::UnknownType)?;
            let id: SessionId = message.topic.parse().map_err(|_| NotAFrame::BadSession)?;
            let node = named(&message, peer, names_acceptor)?;
            return Ok(Frame { node, body: FrameKind::Session(id, category, session_frame(message)?) });
        }
    };
    // Pings and pongs concern no node, so their node is not checked.
    let node = match (&body, peer.node()) {
        (FrameKind::Ping(_) | FrameKind::Pong(_), Some(node)) => node.clone(),
        _ => named(&message, peer, false)?,
    };
    Ok(Frame { node, body })
}

/// The node that a message names. On an edge's link it must be the edge itself, unless `any` node is allowed.
fn named(message: &StreamMsg, peer: &Peer, any: bool) -> Result<NodeName, NotAFrame> {
    match peer {
        Peer::Edge(node) | Peer::Cloud(node) if message.node.eq_ignore_ascii_case(node.as_str()) => {
            Ok(node.clone())
        }
        Peer::Edge(_) | Peer::Cloud(_) if !any => Err(NotAFrame::WrongNode),
        _ => message.node.parse().map_err(|_| NotAFrame::BadField),
    }
}

fn parts(frame: SessionFrame) -> (&'static str, String, Bytes) {
    let blank = Control::default();
    let (kind, control) = match frame {
        SessionFrame::Data(bytes) => return ("tcp-forward", String::new(), bytes),
        SessionFrame::Open { target, limit, epoch, client, opener } => {
            let opener = text(opener);
            return (OPEN, target.to_string(), pack(&Control { limit, epoch, client, opener, ..blank }));
        }
        SessionFrame::Opened { limit, epoch, instance } => {
            ("connected", Control { limit, epoch, instance: wire(instance), ..blank })
        }
        SessionFrame::Refused { epoch, refusal } => ("connect-failed", why(epoch, refusal)),
        SessionFrame::Finish { total } => ("finish", Control { total, ..blank }),
        SessionFrame::Broken { total, refusal } => ("broken", Control { total, ..why(0, refusal) }),
        SessionFrame::Reset { epoch, refusal } => ("reset", why(epoch, refusal)),
        SessionFrame::Credit { received, limit } => ("credit", Control { received, limit, ..blank }),
        SessionFrame::Resume { received, limit, epoch, instance, opener } => {
            let (instance, opener) = (wire(instance), text(opener));
            (RESUME, Control { received, limit, epoch, instance, opener, ..blank })
        }
        SessionFrame::Resumed { received, limit, epoch } => {
            ("resumed", Control { received, limit, epoch, ..blank })
        }
        SessionFrame::Lost { epoch } => ("lost", Control { epoch, ..blank }),
    };
    (kind, String::new(), pack(&control))
}

fn session_frame(message: StreamMsg) -> Result<SessionFrame, NotAFrame> {
    if message.r#type == "tcp-forward" {
        return Ok(SessionFrame::Data(message.data));
    }
    let c = control(&message)?;
    let refusal = || Refusal::new(Code::from_wire(c.code), &c.reason);
    Ok(match message.r#type.as_str() {
        OPEN => SessionFrame::Open {
            target: message.addr.parse().map_err(|_| NotAFrame::BadField)?,
            limit: c.limit,
            epoch: c.epoch,
            client: printable(&c.client),
            opener: c.opener.parse().ok(),
        },
        "connected" => SessionFrame::Opened {
            limit: c.limit,
            epoch: c.epoch,
            instance: Instance::from_bytes(&c.instance),
        },
        "connect-failed" => SessionFrame::Refused { epoch: c.epoch, refusal: refusal() },
        "finish" => SessionFrame::Finish { total: c.total },
        "broken" => SessionFrame::Broken { total: c.total, refusal: refusal() },
        "reset" => SessionFrame::Reset { epoch: c.epoch, refusal: refusal() },
        "credit" => SessionFrame::Credit { received: c.received, limit: c.limit },
        RESUME => SessionFrame::Resume {
            received: c.received,
            limit: c.limit,
            epoch: c.epoch,
            instance: Instance::from_bytes(&c.instance),
            opener: c.opener.parse().ok(),
        },
        "resumed" => SessionFrame::Resumed { received: c.received, limit: c.limit, epoch: c.epoch },
        "lost" => SessionFrame::Lost { epoch: c.epoch },
        _ => return Err(NotAFrame::UnknownType),
    })
}

fn between_pods(node: String, kind: &str, question: u64, said: Control) -> StreamMsg {
    let data = pack(&Control { epoch: question, ..said });
    let topic = question.to_string();
    StreamMsg { node, category: STREAM.into(), r#type: kind.into(), topic, data, addr: String::new() }
}

fn about(found: &Found) -> Control {
    let code = if found.here { Code::Over } else { Code::NotHere };
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    // 0 stands for none.
    let age = found.age.map_or(0, |age| millis(age).max(1));
    let instance = wire(found.instance);
    let (silence, at) = (millis(found.silence), wire(found.at));
    let authoritative = found.authoritative;
    let ips = found.ips.iter().take(MOST_IPS).map(|ip| match ip {
        IpAddr::V4(ip) => Bytes::copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => Bytes::copy_from_slice(&ip.octets()),
    });
    let (code, ips) = (u32::from(code as u8), ips.collect());
    Control { code, silence, instance, age, at, authoritative, ips, ..Control::default() }
}

fn found(c: &Control) -> Found {
    let here = Code::from_wire(c.code) == Code::Over;
    let silence = Duration::from_millis(c.silence);
    let age = (c.age > 0).then(|| Duration::from_millis(c.age));
    let [instance, at] = [&c.instance, &c.at].map(|bytes| Instance::from_bytes(bytes));
    let ips = if here { c.ips.iter().take(MOST_IPS).filter_map(ip).collect() } else { Arc::default() };
    Found { question: c.epoch, here, silence, instance, age, at, authoritative: c.authoritative, ips }
}

fn ip(bytes: &Bytes) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(&bytes[..]).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(&bytes[..]).map(IpAddr::from)).ok()
}

fn control(message: &StreamMsg) -> Result<Control, NotAFrame> {
    Control::decode(message.data.clone()).map_err(|_| NotAFrame::BadField)
}

fn signal(node: String, kind: &str, number: Option<u64>) -> StreamMsg {
    let data = number.map(|n| Bytes::copy_from_slice(&n.to_be_bytes())).unwrap_or_default();
    let topic = format!("{node}heartbeat");
    StreamMsg { node, category: STREAM.into(), r#type: kind.into(), topic, data, addr: String::new() }
}

fn number(data: &Bytes) -> Option<u64> {
    (data.len() == 8).then(|| data.clone().get_u64())
}

fn why(epoch: u64, refusal: Refusal) -> Control {
    Control { epoch, code: u32::from(refusal.code as u8), reason: refusal.reason, ..Control::default() }
}

fn wire(instance: Option<Instance>) -> Bytes {
    instance.map(|i| Bytes::copy_from_slice(&i.to_bytes())).unwrap_or_default()
}

fn text(opener: Option<Opener>) -> String {
    opener.map(|o| o.to_string()).unwrap_or_default()
}

fn pack(control: &Control) -> Bytes {
    control.encode_to_vec().into()
}

/// Category of frames about the link itself.
pub const STREAM: &str = "stream";
/// Type of a ping in both dialects.
pub const HEARTBEAT: &str = "heartbeat";
const PONG: &str = "pong";
const FIND: &str = "find";
const FOUND: &str = "found";
const DRAIN: &str = "drain";
const CONFLICT: &str = "conflict";
const LOAD: &str = "load";
const OPEN: &str = "connecting";
const RESUME: &str = "resume";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_word() -> impl Strategy<Value = SessionFrame> {
        let refusal =
            || (0u32..11, "[ -~]{0,100}").prop_map(|(code, text)| Refusal::new(Code::from_wire(code), text));
        let instance = || prop::option::of(any::<u128>().prop_map(Instance::from_bits));
        let opener = || {
            prop::option::of(prop_oneof![
                "[a-z]{1,20}".prop_map(|name| Opener::Node(name.parse().unwrap())),
                any::<u128>().prop_map(|bits| Opener::Pod(Instance::from_bits(bits))),
            ])
        };
        prop_oneof![
            (any::<u64>(), any::<u64>(), "[ -~]{0,100}", opener()).prop_map(
                |(limit, epoch, client, opener)| {
                    SessionFrame::Open {
                        target: "[fd00::1]:22".parse().unwrap(),
                        limit,
                        epoch,
                        client,
                        opener,
                    }
                }
            ),
            (any::<u64>(), any::<u64>(), instance())
                .prop_map(|(limit, epoch, instance)| SessionFrame::Opened { limit, epoch, instance }),
            (any::<u64>(), refusal()).prop_map(|(epoch, refusal)| SessionFrame::Refused { epoch, refusal }),
            prop::collection::vec(any::<u8>(), 0..100).prop_map(|b| SessionFrame::Data(b.into())),
            any::<u64>().prop_map(|total| SessionFrame::Finish { total }),
            (any::<u64>(), refusal()).prop_map(|(total, refusal)| SessionFrame::Broken { total, refusal }),
            (any::<u64>(), refusal()).prop_map(|(epoch, refusal)| SessionFrame::Reset { epoch, refusal }),
            (any::<u64>(), any::<u64>())
                .prop_map(|(received, limit)| SessionFrame::Credit { received, limit }),
            (any::<u64>(), any::<u64>(), any::<u64>(), instance(), opener()).prop_map(
                |(received, limit, epoch, instance, opener)| SessionFrame::Resume {
                    received,
                    limit,
                    epoch,
                    instance,
                    opener
                }
            ),
            (any::<u64>(), any::<u64>(), any::<u64>())
                .prop_map(|(received, limit, epoch)| SessionFrame::Resumed { received, limit, epoch }),
            any::<u64>().prop_map(|epoch| SessionFrame::Lost { epoch }),
        ]
    }

    proptest! {
        #[test]
        fn every_frame_survives_the_wire(word in any_word(), bits: u128) {
            let node: NodeName = "edge-1".parse().unwrap();
            let frame = Frame { node: node.clone(), body: FrameKind::Session(SessionId::from_bits(bits), Category::Ssh, word) };
            for peer in [Peer::Edge(node.clone()), Peer::Cloud(node), Peer::Pod] {
                prop_assert_eq!(from_message(to_message(frame.clone()), &peer), Ok(frame.clone()));
            }
        }

        #[test]
        fn no_message_makes_us_panic(kind in "[a-z-]{0,15}", topic in ".{0,40}", addr in ".{0,40}", data in prop::collection::vec(any::<u8>(), 0..80)) {
            let message = StreamMsg { node: "n".into(), category: "ssh".into(), r#type: kind, topic, data: data.into(), addr };
            for peer in [Peer::Edge("n".parse().unwrap()), Peer::Pod] {
                let _ = from_message(message.clone(), &peer);
            }
        }
    }

    #[test]
    fn an_edge_speaks_for_itself_only_but_asks_for_any_node() {
        let frame = |word| Frame {
            node: "a".parse().unwrap(),
            body: FrameKind::Session(SessionId::random(), Category::Ssh, word),
        };
        let open = SessionFrame::Open {
            target: "a:1".parse().unwrap(),
            limit: 1,
            epoch: 1,
            client: "c".into(),
            opener: None,
        };
        let (edge, cloud) = (Peer::Edge("b".parse().unwrap()), Peer::Cloud("b".parse().unwrap()));
        let finish = frame(SessionFrame::Finish { total: 1 });
        assert_eq!(from_message(to_message(finish.clone()), &edge), Err(NotAFrame::WrongNode));
        assert_eq!(from_message(to_message(finish), &cloud), Err(NotAFrame::WrongNode));
        let open = frame(open);
        assert_eq!(from_message(to_message(open.clone()), &cloud), Err(NotAFrame::WrongNode));
        assert_eq!(from_message(to_message(open.clone()), &edge), Ok(open));
    }

    #[test]
    fn signals_keep_their_numbers_and_only_pods_ask_for_nodes() {
        let node: NodeName = "edge-1".parse().unwrap();
        let instance = Some(Instance::from_bits(9));
        let (silence, age) = (Duration::from_millis(1500), Some(Duration::from_millis(1)));
        let ips = [IpAddr::from([10, 0, 0, 7]), "fd00::7".parse().unwrap()].into();
        let found = Found { here: true, silence, instance, age, ips, ..Found::away(3) };
        let away = Found { question: 0, at: instance, authoritative: true, ..Found::away(0) };
        let (edge, pod) = ([Peer::Edge(node.clone()), Peer::Cloud(node.clone())], [Peer::Pod]);
        let conflict = FrameKind::Conflict(Conflict { instance, reason: "two machines".into() });
        let load = |nodes| Load { nodes, stopping: false, catches: false };
        for (body, theirs, others) in [
            (FrameKind::Ping(Some(7)), [&edge[..], &pod].concat(), vec![]),
            (FrameKind::Pong(Some(7)), [&edge[..], &pod].concat(), vec![]),
            (FrameKind::Drain(None), edge.to_vec(), pod.to_vec()),
            (FrameKind::Drain(Some(([10, 0, 0, 7], 9000).into())), edge.to_vec(), pod.to_vec()),
            (FrameKind::Load(load(0)), pod.to_vec(), edge.to_vec()),
            (FrameKind::Load(Load { stopping: true, ..load(300) }), pod.to_vec(), edge.to_vec()),
            (FrameKind::Load(Load { catches: true, ..load(1) }), pod.to_vec(), edge.to_vec()),
            (FrameKind::Find(5), pod.to_vec(), edge.to_vec()),
            (FrameKind::Found(found), pod.to_vec(), edge.to_vec()),
            (FrameKind::Found(away), pod.to_vec(), edge.to_vec()),
            (conflict, vec![edge[1].clone(), Peer::Pod], edge[..1].to_vec()),
        ] {
            let frame = Frame { node: node.clone(), body };
            for peer in &theirs {
                assert_eq!(from_message(to_message(frame.clone()), peer), Ok(frame.clone()));
            }
            for peer in &others {
                assert_eq!(from_message(to_message(frame.clone()), peer), Err(NotAFrame::UnknownType));
            }
        }
    }

    #[test]
    fn of_the_addresses_that_a_pod_tells_few_count_and_none_that_is_no_address() {
        let many: Vec<_> = (0..20).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        let read = |ips: Vec<Bytes>, code: u32| found(&Control { ips, code, ..Control::default() }).ips;
        let bytes = |ips: &[IpAddr]| about(&Found { here: true, ips: ips.into(), ..Found::away(1) }).ips;
        assert_eq!(bytes(&many).len(), MOST_IPS);
        let all = many.iter().map(|ip| bytes(&[*ip]).remove(0)).collect::<Vec<_>>();
        assert_eq!(read(all.clone(), 0)[..], many[..MOST_IPS]);
        let wild = [&[Bytes::from_static(b"seven"), Bytes::new()], &all[..1]].concat();
        assert_eq!(read(wild, 0)[..], many[..1]);
        assert!(read(all, u32::from(Code::NotHere as u8)).is_empty(), "it is not there");
    }
}
