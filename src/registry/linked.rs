//! A node's link, as the registry keeps it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::names::Instance;
use crate::protocol::{Found, LinkSender};

/// A node's link.
#[derive(Debug, Clone)]
pub struct Linked {
    /// The sending side of the link.
    pub sender: Arc<LinkSender>,
    /// The edge's process; none on a plain link, whose edge does not name it.
    pub instance: Option<Instance>,
    /// The address that the edge connected from.
    pub from: SocketAddr,
    /// The addresses that the edge says its node has.
    pub ips: Arc<[IpAddr]>,
}

impl Linked {
    /// The answer to another pod's `question` about this node. `own` is this pod's process: it stands for a plain node,
    /// because this pod is the end of that node's sessions.
    pub fn found(&self, question: u64, own: Instance) -> Found {
        Found {
            here: true,
            silence: self.sender.silence(),
            instance: Some(self.instance.unwrap_or(own)),
            age: Some(self.sender.age()),
            ips: self.ips.clone(),
            ..Found::away(question)
        }
    }
}
