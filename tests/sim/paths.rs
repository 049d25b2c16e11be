//! A registry that means no good: where nodes are, told rightly, too late, or wrongly.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use tunnel_base::names::{Instance, NodeName};
use tunnel_link::sender::LinkSender;
use tunnel_proto::frame::Remote;

use super::chance::Dice;

/// All ends of links, some of which have ended and nobody was told yet. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Paths(Rc<RefCell<Vec<Path>>>);

/// From one process to another.
#[derive(Clone)]
pub(crate) struct Path {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) sender: Arc<LinkSender>,
    /// The node at its other end, if that is an edge.
    pub(crate) node: Option<NodeName>,
}

impl Paths {
    pub(crate) fn add(&self, from: usize, to: usize, sender: &Arc<LinkSender>) {
        let node = if let Remote::Edge(node) = &sender.peer { Some(node.clone()) } else { None };
        self.0.borrow_mut().push(Path { from, to, sender: sender.clone(), node });
    }

    /// A process has vanished.
    pub(crate) fn leave(&self, process: usize) {
        self.0.borrow_mut().retain(|path| path.from != process);
    }

    /// Forgets those that have ended: the registry is told late.
    pub(crate) fn tidy(&self) {
        self.0.borrow_mut().retain(|path| !path.sender.is_closed());
    }

    /// Any link of a process, live or not.
    pub(crate) fn any(&self, from: usize, dice: &Dice) -> Option<Path> {
        one_of(self.all(|path| path.from == from), dice)
    }

    /// The next step from the pod `from` to `node`, as well as it is known: its own link, or, if `far`, that of another
    /// pod which is linked to the node. With `instance`, to that process only.
    pub(crate) fn next(
        &self,
        from: usize,
        node: &NodeName,
        instance: Option<Instance>,
        far: bool,
        dice: &Dice,
    ) -> Option<Path> {
        let leads = |path: &Path| match instance {
            // What the cloud accepted is in a pod.
            Some(_) => path.sender.instance == instance,
            None => path.node.as_ref() == Some(node),
        };
        let near = self.all(|path| path.from == from && leads(path) && (far || path.node.is_some()));
        if !near.is_empty() || !far {
            return one_of(near, dice);
        }
        let holders: Vec<usize> =
            self.all(|path| path.node.is_some() && leads(path)).iter().map(|path| path.from).collect();
        one_of(self.all(|path| path.from == from && path.node.is_none() && holders.contains(&path.to)), dice)
    }

    /// A link to that node from anywhere else, right or wrong.
    pub(crate) fn to_node(&self, from: usize, node: &NodeName, dice: &Dice) -> Option<Path> {
        one_of(self.all(|path| path.from == from && path.node.as_ref() == Some(node)), dice)
    }

    fn all(&self, which: impl Fn(&Path) -> bool) -> Vec<Path> {
        self.0.borrow().iter().filter(|path| which(path)).cloned().collect()
    }
}

fn one_of(paths: Vec<Path>, dice: &Dice) -> Option<Path> {
    let at = dice.below(paths.len());
    paths.into_iter().nth(at)
}
