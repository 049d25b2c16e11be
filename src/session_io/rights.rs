//! Changes of rights as values: they can be judged by before they are in force.

use std::any::Any;
use std::sync::Arc;

use arc_swap::ArcSwap;

/// New rights, each with the one that it replaces. Without any, what is judged by them is judged by the current rights.
#[derive(derive_more::Debug, Default)]
#[debug("RightsChange({})", _0.len())]
pub struct RightsChange(Vec<Box<dyn Replacement>>);

/// A right of any type, and the one that replaces it.
trait Replacement: Any + Send + Sync {
    fn apply(&self);
}

struct Replaced<T> {
    right: Arc<ArcSwap<T>>,
    with: Arc<T>,
}

impl<T: Send + Sync + 'static> Replacement for Replaced<T> {
    fn apply(&self) {
        self.right.store(self.with.clone());
    }
}

impl RightsChange {
    /// Adds a replacement.
    pub fn replace<T: Send + Sync + 'static>(&mut self, right: &Arc<ArcSwap<T>>, with: T) {
        self.0.push(Box::new(Replaced { right: right.clone(), with: Arc::new(with) }));
    }

    /// Returns true if it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns what this right is with the change.
    pub fn load<T: Send + Sync + 'static>(&self, right: &Arc<ArcSwap<T>>) -> Arc<T> {
        let mut replaced = self.0.iter().filter_map(|one| (&**one as &dyn Any).downcast_ref::<Replaced<T>>());
        let found = replaced.find(|one| Arc::ptr_eq(&one.right, right));
        found.map_or_else(|| right.load_full(), |one| one.with.clone())
    }

    /// Puts the change into force. Sessions are judged by it at the next [`super::judged::JudgedSessions::rights_changed`].
    pub fn apply(self) {
        self.0.iter().for_each(|one| one.apply());
    }
}
