//! Another pod, as a search sees it.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::reach::Unreachable;
use super::sibling::Sibling;
use crate::names::Instance;
use crate::protocol::LinkSender;

/// One other pod that can be asked: by its address, or over the link that it has made.
#[derive(Debug, Clone)]
pub struct SiblingPod(pub(super) Which);

#[derive(Debug, Clone)]
pub(super) enum Which {
    Known(Arc<Sibling>),
    Incoming(Arc<LinkSender>),
}

/// A pod has a node.
#[derive(Debug, Clone)]
pub struct NodeFound {
    /// Which pod.
    pub pod: SiblingPod,
    /// The link to it.
    pub sender: Arc<LinkSender>,
    /// The process that is a session's other end: the node's, or that pod's own if the node's link is plain.
    pub instance: Option<Instance>,
    /// How long ago the pod last read something from the node.
    pub silence: Duration,
    /// The addresses that its edge says it has.
    pub ips: Arc<[IpAddr]>,
}

/// What a pod has answered.
#[derive(Debug, Clone)]
pub struct FindAnswer {
    /// Which process it is.
    pub pod: Option<Instance>,
    /// Where the node is, if it has it.
    pub yes: Option<NodeFound>,
    /// How long ago it had the node, or knew of a pod that had it, if it did.
    pub seen: Option<Duration>,
    /// The process of the pod at which the node is instead, as far as this one knows.
    pub at: Option<Instance>,
    /// Whether it is a home of the node that would know if any pod had it.
    pub authoritative: bool,
}

impl SiblingPod {
    /// A link to it, made if need be. Waits at most 1 s.
    pub async fn link(&self) -> Result<Arc<LinkSender>, Unreachable> {
        match &self.0 {
            Which::Known(sibling) => sibling.link().await,
            Which::Incoming(sender) if sender.is_closed() => Err(Unreachable::Silent(self.to_string())),
            Which::Incoming(sender) => Ok(sender.clone()),
        }
    }

    /// The link to it, if there is one.
    pub fn up(&self) -> Option<Arc<LinkSender>> {
        match &self.0 {
            Which::Known(sibling) => sibling.up(),
            Which::Incoming(sender) => (!sender.is_closed()).then(|| sender.clone()),
        }
    }

    /// The process that it is, if that is known.
    pub fn process(&self) -> Option<Instance> {
        match &self.0 {
            Which::Known(sibling) => sibling.process().map(|member| member.pod),
            Which::Incoming(sender) => sender.instance,
        }
    }

    /// Why the last try to link to it failed; none once one succeeds.
    pub fn trouble(&self) -> Option<Unreachable> {
        match &self.0 {
            Which::Known(sibling) => sibling.trouble(),
            Which::Incoming(_) => None,
        }
    }

    /// Whether it can never be asked again: it was known by its own link only, and that has ended.
    pub fn is_gone(&self) -> bool {
        matches!(&self.0, Which::Incoming(sender) if sender.is_closed())
    }

    /// Whether both are the same.
    pub fn is(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Which::Known(one), Which::Known(two)) => Arc::ptr_eq(one, two),
            (Which::Incoming(one), Which::Incoming(two)) => one.id == two.id,
            _ => false,
        }
    }
}

impl fmt::Display for SiblingPod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Which::Known(sibling) => sibling.at.fmt(f),
            Which::Incoming(sender) => match sender.instance {
                Some(instance) => write!(f, "{instance:?}"),
                None => f.write_str("without a name"),
            },
        }
    }
}
