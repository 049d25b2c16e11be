//! The extended dialect: neutral frames as messages, and back.

use bytes::{Buf, Bytes};
use prost::Message as _;

use super::codec::StreamMsg;
use super::codec::proto::Control;
use super::frame::{Body, Category, Code, Frame, Refusal, Word};
use crate::names::{Instance, NodeName, SessionId};

/// A message that is no frame. It is counted and dropped; the link goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotAFrame {
    /// A type or category this version does not know.
    #[error("unknown_type")]
    UnknownType,
    /// The topic is not a session id.
    #[error("bad_session_id")]
    BadSession,
    /// A field cannot be read.
    #[error("bad_field")]
    BadField,
    /// It speaks for a node that is not the link's.
    #[error("wrong_node")]
    WrongNode,
}

impl NotAFrame {
    /// A fixed word for metrics.
    pub fn cause(self) -> &'static str {
        match self {
            Self::UnknownType => "unknown_type",
            Self::BadSession => "bad_session_id",
            Self::BadField => "bad_field",
            Self::WrongNode => "wrong_node",
        }
    }
}

/// The message that says `frame`.
pub fn to_message(frame: Frame) -> StreamMsg {
    let node = frame.node.as_str().to_owned();
    match frame.body {
        Body::Ping(number) => signal(node, HEARTBEAT, number),
        Body::Pong(Some(number)) => signal(node, PONG, Some(number)),
        Body::Pong(None) => signal(node, HEARTBEAT, None),
        Body::Session(id, category, word) => {
            let (kind, addr, data) = parts(word);
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

/// The frame that `message` says, on a link of `node`.
pub fn from_message(message: StreamMsg, node: &NodeName) -> Result<Frame, NotAFrame> {
    let body = match (message.category.as_str(), message.r#type.as_str()) {
        (STREAM, HEARTBEAT) => Body::Ping(number(&message.data)),
        (STREAM, PONG) => Body::Pong(number(&message.data)),
        (STREAM, _) => return Err(NotAFrame::UnknownType),
        (category, _) => {
            if !message.node.eq_ignore_ascii_case(node.as_str()) {
                return Err(NotAFrame::WrongNode);
            }
            let category = Category::from_name(category).ok_or(NotAFrame::UnknownType)?;
            let id: SessionId = message.topic.parse().map_err(|_| NotAFrame::BadSession)?;
            Body::Session(id, category, word(message)?)
        }
    };
    Ok(Frame { node: node.clone(), body })
}

fn parts(word: Word) -> (&'static str, String, Bytes) {
    let blank = Control::default();
    let (kind, control) = match word {
        Word::Data(bytes) => return ("tcp-forward", String::new(), bytes),
        Word::Open { target, limit, epoch, client } => {
            return ("connecting", target.to_string(), pack(&Control { limit, epoch, client, ..blank }));
        }
        Word::Opened { limit, epoch, instance } => {
            ("connected", Control { limit, epoch, instance: wire(instance), ..blank })
        }
        Word::Refused { epoch, refusal } => ("connect-failed", why(epoch, refusal)),
        Word::Finish { total } => ("finish", Control { total, ..blank }),
        Word::Reset { epoch, refusal } => ("reset", why(epoch, refusal)),
        Word::Credit { received, limit } => ("credit", Control { received, limit, ..blank }),
        Word::Resume { received, limit, epoch, instance } => {
            ("resume", Control { received, limit, epoch, instance: wire(instance), ..blank })
        }
        Word::Resumed { received, limit, epoch } => ("resumed", Control { received, limit, epoch, ..blank }),
        Word::Lost { epoch } => ("lost", Control { epoch, ..blank }),
    };
    (kind, String::new(), pack(&control))
}

fn word(message: StreamMsg) -> Result<Word, NotAFrame> {
    if message.r#type == "tcp-forward" {
        return Ok(Word::Data(message.data));
    }
    let c = Control::decode(message.data).map_err(|_| NotAFrame::BadField)?;
    let refusal = || Refusal::new(Code::from_wire(c.code), &c.reason);
    Ok(match message.r#type.as_str() {
        "connecting" => Word::Open {
            target: message.addr.parse().map_err(|_| NotAFrame::BadField)?,
            limit: c.limit,
            epoch: c.epoch,
            client: Refusal::new(Code::Over, &c.client).reason,
        },
        "connected" => {
            Word::Opened { limit: c.limit, epoch: c.epoch, instance: Instance::from_bytes(&c.instance) }
        }
        "connect-failed" => Word::Refused { epoch: c.epoch, refusal: refusal() },
        "finish" => Word::Finish { total: c.total },
        "reset" => Word::Reset { epoch: c.epoch, refusal: refusal() },
        "credit" => Word::Credit { received: c.received, limit: c.limit },
        "resume" => Word::Resume {
            received: c.received,
            limit: c.limit,
            epoch: c.epoch,
            instance: Instance::from_bytes(&c.instance),
        },
        "resumed" => Word::Resumed { received: c.received, limit: c.limit, epoch: c.epoch },
        "lost" => Word::Lost { epoch: c.epoch },
        _ => return Err(NotAFrame::UnknownType),
    })
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

fn pack(control: &Control) -> Bytes {
    control.encode_to_vec().into()
}

/// Category of what is about the link itself.
pub const STREAM: &str = "stream";
/// Type of a ping in both dialects.
pub const HEARTBEAT: &str = "heartbeat";
const PONG: &str = "pong";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_word() -> impl Strategy<Value = Word> {
        let refusal =
            || (0u32..11, "[ -~]{0,100}").prop_map(|(code, text)| Refusal::new(Code::from_wire(code), text));
        let instance = || prop::option::of(any::<u128>().prop_map(Instance::from_bits));
        prop_oneof![
            (any::<u64>(), any::<u64>(), "[ -~]{0,100}").prop_map(|(limit, epoch, client)| Word::Open {
                target: "[fd00::1]:22".parse().unwrap(),
                limit,
                epoch,
                client
            }),
            (any::<u64>(), any::<u64>(), instance()).prop_map(|(limit, epoch, instance)| Word::Opened {
                limit,
                epoch,
                instance
            }),
            (any::<u64>(), refusal()).prop_map(|(epoch, refusal)| Word::Refused { epoch, refusal }),
            prop::collection::vec(any::<u8>(), 0..100).prop_map(|b| Word::Data(b.into())),
            any::<u64>().prop_map(|total| Word::Finish { total }),
            (any::<u64>(), refusal()).prop_map(|(epoch, refusal)| Word::Reset { epoch, refusal }),
            (any::<u64>(), any::<u64>()).prop_map(|(received, limit)| Word::Credit { received, limit }),
            (any::<u64>(), any::<u64>(), any::<u64>(), instance()).prop_map(
                |(received, limit, epoch, instance)| Word::Resume { received, limit, epoch, instance }
            ),
            (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(received, limit, epoch)| Word::Resumed {
                received,
                limit,
                epoch
            }),
            any::<u64>().prop_map(|epoch| Word::Lost { epoch }),
        ]
    }

    proptest! {
        #[test]
        fn every_frame_survives_the_wire(word in any_word(), bits: u128) {
            let node: NodeName = "edge-1".parse().unwrap();
            let frame = Frame { node: node.clone(), body: Body::Session(SessionId::from_bits(bits), Category::Ssh, word) };
            prop_assert_eq!(from_message(to_message(frame.clone()), &node), Ok(frame));
        }

        #[test]
        fn no_message_makes_us_panic(kind in "[a-z-]{0,15}", topic in ".{0,40}", addr in ".{0,40}", data in prop::collection::vec(any::<u8>(), 0..80)) {
            let message = StreamMsg { node: "n".into(), category: "ssh".into(), r#type: kind, topic, data: data.into(), addr };
            let _ = from_message(message, &"n".parse().unwrap());
        }
    }

    #[test]
    fn a_frame_for_another_node_is_dropped() {
        let frame = Frame {
            node: "a".parse().unwrap(),
            body: Body::Session(SessionId::random(), Category::Ssh, Word::Finish { total: 1 }),
        };
        assert_eq!(from_message(to_message(frame), &"b".parse().unwrap()), Err(NotAFrame::WrongNode));
    }

    #[test]
    fn pings_and_pongs_keep_their_numbers() {
        let node: NodeName = "edge-1".parse().unwrap();
        for body in [Body::Ping(Some(7)), Body::Pong(Some(7)), Body::Ping(None)] {
            let frame = Frame { node: node.clone(), body };
            assert_eq!(from_message(to_message(frame.clone()), &node), Ok(frame));
        }
    }
}
