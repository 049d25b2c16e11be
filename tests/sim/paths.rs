//! An unreliable registry: it returns the location of nodes correctly, too late, or wrongly.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use tunnel_link::link::Link;
use tunnel_proto::frame::Remote;
use tunnel_proto::names::{Instance, NodeName};

use super::chance::SeededRng;

/// All ends of links. Some of them are closed, but this is not known yet. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Paths(Rc<RefCell<Vec<Path>>>);

/// A link from one process to another.
#[derive(Clone)]
pub(crate) struct Path {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) link: Arc<Link>,
    /// Node at its other end, if that is an edge.
    pub(crate) node: Option<NodeName>,
}

impl Paths {
    pub(crate) fn add(&self, from: usize, to: usize, link: &Arc<Link>) {
        let node = if let Remote::Edge(node) = &link.peer { Some(node.clone()) } else { None };
        self.0.borrow_mut().push(Path { from, to, link: link.clone(), node });
    }

    /// Removes the links of a process that has died.
    pub(crate) fn leave(&self, process: usize) {
        self.0.borrow_mut().retain(|path| path.from != process);
    }

    /// Removes closed links. The registry learns of them late.
    pub(crate) fn tidy(&self) {
        self.0.borrow_mut().retain(|path| !path.link.is_closed());
    }

    /// Returns any link of a process, alive or not.
    pub(crate) fn any(&self, from: usize, rng: &SeededRng) -> Option<Path> {
        one_of(self.all(|path| path.from == from), rng)
    }

    /// Returns the next hop from the server `from` to `node`, as far as known: its own link, or if `far`, the link to
    /// another server that has the node. With `instance`, only a hop to that process.
    pub(crate) fn next(
        &self,
        from: usize,
        node: &NodeName,
        instance: Option<Instance>,
        far: bool,
        rng: &SeededRng,
    ) -> Option<Path> {
        let leads = |path: &Path| match instance {
            // A session accepted by the cloud is in a server.
            Some(_) => path.link.instance == instance,
            None => path.node.as_ref() == Some(node),
        };
        let near = self.all(|path| path.from == from && leads(path) && (far || path.node.is_some()));
        if !near.is_empty() || !far {
            return one_of(near, rng);
        }
        let holders: Vec<usize> =
            self.all(|path| path.node.is_some() && leads(path)).iter().map(|path| path.from).collect();
        one_of(self.all(|path| path.from == from && path.node.is_none() && holders.contains(&path.to)), rng)
    }

    /// Returns a link to that node, correct or wrong.
    pub(crate) fn to_node(&self, from: usize, node: &NodeName, rng: &SeededRng) -> Option<Path> {
        one_of(self.all(|path| path.from == from && path.node.as_ref() == Some(node)), rng)
    }

    fn all(&self, which: impl Fn(&Path) -> bool) -> Vec<Path> {
        self.0.borrow().iter().filter(|path| which(path)).cloned().collect()
    }
}

fn one_of(paths: Vec<Path>, rng: &SeededRng) -> Option<Path> {
    let at = rng.below(paths.len());
    paths.into_iter().nth(at)
}
