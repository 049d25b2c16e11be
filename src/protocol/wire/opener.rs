//! The opener of a session, as vouched for by the pod that holds the opener's link.

use std::fmt;
use std::str::FromStr;

use crate::names::{Instance, NodeName};
use crate::protocol::wire::peer::Peer;

/// The process or node that opened a session. Only the same one may resume it: knowing the id is not enough.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opener {
    /// An edge, by the name that it has proved: `node/NAME` on the wire. Any process of that node.
    Node(NodeName),
    /// A pod, for one of its clients: `pod/` and the 32 hex digits of its process.
    Pod(Instance),
}

/// The text is neither `node/NAME` nor `pod/INSTANCE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an opener: want node/NAME or pod/INSTANCE")]
pub struct NotAnOpener;

impl Opener {
    /// The opener of a request that came over a link to process `instance` of `peer` whose frame has the opener `sent`.
    /// An edge is the node that it has proved to be, whatever its frame has. A pod vouches for its edges, and opens for
    /// its clients as itself. An edge trusts its pod. `None`: a pod on the path is too old to send it.
    pub(crate) fn vouched(sent: Option<Self>, peer: &Peer, instance: Option<Instance>) -> Option<Self> {
        match (peer, sent) {
            (Peer::Edge(node), _) => Some(Self::Node(node.clone())),
            (Peer::Pod, Some(Self::Pod(_))) => instance.map(Self::Pod),
            (Peer::Pod | Peer::Cloud(_), sent) => sent,
        }
    }

    /// Whether two openers are the same, as far as both are known. An edge cannot hide its name, as its own pod adds
    /// it; so an unknown opener comes through an older pod.
    pub(crate) fn agree(one: Option<&Self>, other: Option<&Self>) -> bool {
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
            Self::Pod(instance) => write!(f, "pod/{instance}"),
        }
    }
}

impl FromStr for Opener {
    type Err = NotAnOpener;

    fn from_str(text: &str) -> Result<Self, NotAnOpener> {
        let (kind, name) = text.split_once('/').ok_or(NotAnOpener)?;
        match kind {
            "node" => name.parse().map(Self::Node).map_err(|_| NotAnOpener),
            "pod" => name.parse().map(Self::Pod).map_err(|_| NotAnOpener),
            _ => Err(NotAnOpener),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_is_its_proven_name_and_a_pod_vouches_for_others() {
        let (node, pod) = ("node/edge-1", "pod/0000000000000000000000000000000a");
        let edge = Peer::Edge("edge-1".parse().unwrap());
        let (other, cloud) = (Peer::Pod, Peer::Cloud("edge-2".parse().unwrap()));
        let forged = "pod/0000000000000000000000000000000b";
        for (peer, said, counts) in [
            (&edge, None, Some(node)),
            (&edge, Some(pod), Some(node)),
            (&edge, Some("node/edge-2"), Some(node)),
            (&other, Some(node), Some(node)),
            (&other, Some(pod), Some(pod)),
            (&other, Some(forged), Some(pod)),
            (&other, None, None),
            (&cloud, Some(forged), Some(forged)),
            (&cloud, None, None),
        ] {
            let said = said.map(|text| text.parse().unwrap());
            let counted = Opener::vouched(said.clone(), peer, Some(Instance::from_bits(10)))
                .map(|opener| opener.to_string());
            assert_eq!(counted.as_deref(), counts, "{said:?} from {peer:?}");
        }
        for bad in ["", "edge-1", "node/", "node/a b", "pod/12", "user/root"] {
            assert_eq!(bad.parse::<Opener>(), Err(NotAnOpener), "{bad}");
        }
    }
}
