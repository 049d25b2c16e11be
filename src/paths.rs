//! Paths of sessions: the links that may lead to a node, from where they are found.

pub mod node_not_found;
pub mod uplinks;
pub mod waiters;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::paths::node_not_found::NodeNotFound;
use crate::paths::uplinks::Uplinks;
use crate::paths::waiters::NodeWaiter;
use tunnel_link::link::Link;
use tunnel_proto::names::{Host, Instance, NodeName};

/// A path to a node: the link over which a session is opened or resumed.
#[derive(Debug, Clone)]
pub struct Path {
    /// The node's own link, or the link to the peer that has it.
    pub link: Arc<Link>,
    /// The node's process; `None` for a plain node that is linked here.
    pub instance: Option<Instance>,
}

/// A search for a path in progress.
pub type Find<'a> = BoxFuture<'a, Result<Path, NodeNotFound>>;

/// The source of paths for a process's sessions. Every path of an edge or a user's program starts with one of its
/// [`Uplinks`]; a server finds nodes here and at peers.
pub trait PathProvider: fmt::Debug + Send + Sync {
    /// Finds a path to a node: to its process `instance` if given, and not over the link `not`. Cancel safe.
    ///
    /// # Errors
    ///
    /// No server has the node, or there is no link to a server.
    fn find<'a>(&'a self, node: &'a NodeName, instance: Option<Instance>, not: Option<&'a Link>) -> Find<'a>;

    /// Returns a waiter for a new path to the node.
    fn arrival(&self, node: &NodeName) -> NodeWaiter<'_>;

    /// Returns true if the node is known to be linked as another process than this one, here or elsewhere.
    fn is_replaced(&self, _node: &NodeName, _instance: Instance) -> bool {
        false
    }

    /// Invalidates this path: its server reported that the node is not connected there.
    fn invalidate(&self, _node: &NodeName, _path: &Path) {}

    /// Returns true if this process never asks another one.
    fn is_alone(&self) -> bool {
        false
    }

    /// Returns the node that is named by this host's address, if a search may find it: it is or was linked here, or
    /// peers can be asked.
    fn node_named_by_address(&self, _host: &Host) -> Option<NodeName> {
        None
    }

    /// Returns true if the node is known to be linked, or was linked here, without asking peers.
    fn has_linked(&self, _node: &NodeName) -> bool {
        false
    }

    /// Returns this process's links to servers, if every path starts with one of them.
    fn uplinks(&self) -> Option<&Uplinks> {
        None
    }
}

/// Time in which an edge usually links again after losing its link; its node counts as moving that long.
pub(crate) const RELINK_WINDOW: Duration = Duration::from_secs(3);
