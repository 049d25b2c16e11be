//! Objects of one kind, indexed by name and by claims. A list that starts again removes nothing until it is
//! complete.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;

/// Index keys of an object besides its name.
pub trait IndexKeys {
    /// Returns all keys of the object.
    fn keys(&self) -> impl Iterator<Item = IndexKey>;
}

/// A key that objects claim. Several objects may claim the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum IndexKey {
    /// An address by which the object is found.
    Internal(IpAddr),
    /// An address from outside of the cluster.
    External(IpAddr),
    /// A name by which the object is found, besides its own.
    Name(Arc<str>),
    /// The Service of the object, as `namespace/name`.
    Service(Arc<str>),
}

impl IndexKey {
    fn address(&self) -> Option<IpAddr> {
        if let Self::Internal(ip) | Self::External(ip) = self { Some(*ip) } else { None }
    }
}

/// An index of objects of one kind. Its two maps share the names, to save memory.
#[derive(Debug, educe::Educe)]
#[educe(Default)]
pub struct ObjectIndex<V> {
    objects: HashMap<Arc<str>, Entry<V>>,
    claims: BTreeSet<(IndexKey, Arc<str>)>,
    /// Number of the latest list.
    list: u32,
    listed: bool,
}

/// An object in an [`ObjectIndex`], with the list that contained it last.
#[derive(Debug)]
struct Entry<V> {
    object: V,
    /// Number of the list that was current when the object was last seen.
    list: u32,
}

impl<V: IndexKeys> ObjectIndex<V> {
    /// Starts a list of all objects.
    pub fn start(&mut self) {
        self.list = self.list.wrapping_add(1);
    }

    /// Completes the list, and removes all objects that were not in it.
    pub fn finish(&mut self) {
        self.listed = true;
        let list = self.list;
        let removed: Vec<_> = self.objects.iter().filter(|(_, entry)| entry.list != list).collect();
        let removed: Vec<_> = removed.into_iter().map(|(name, _)| name.clone()).collect();
        for name in removed {
            self.remove(&name);
        }
    }

    /// Returns true if any list was completed.
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// Inserts or replaces an object. Returns the addresses that it claims now but did not claim before.
    pub fn put(&mut self, name: &str, object: V) -> Vec<IpAddr> {
        let name = match self.objects.get_key_value(name) {
            Some((name, _)) => name.clone(),
            None => name.into(),
        };
        let entry = Entry { object, list: self.list };
        let claims: Vec<_> = entry.object.keys().collect();
        let is_new = |claim: &&IndexKey| !self.claims.contains(&((*claim).clone(), name.clone()));
        let new = claims.iter().filter(is_new).filter_map(IndexKey::address).collect();
        if let Some(old) = self.objects.insert(name.clone(), entry) {
            for claim in old.object.keys() {
                self.claims.remove(&(claim, name.clone()));
            }
        }
        self.claims.extend(claims.into_iter().map(|claim| (claim, name.clone())));
        new
    }

    /// Returns all claimed addresses.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let mut all: Vec<_> = self.claims.iter().filter_map(|(claim, _)| claim.address()).collect();
        all.dedup();
        all
    }

    /// Removes an object that was deleted or is no longer relevant.
    pub fn remove(&mut self, name: &str) {
        let Some((name, old)) = self.objects.remove_entry(name) else { return };
        for claim in old.object.keys() {
            self.claims.remove(&(claim, name.clone()));
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&V> {
        self.objects.get(name).map(|entry| &entry.object)
    }

    /// Returns all objects, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &V)> {
        self.objects.iter().map(|(name, entry)| (name.as_ref(), &entry.object))
    }

    /// Returns true if any object makes this claim.
    pub(crate) fn is_claimed(&self, claim: IndexKey) -> bool {
        self.claiming(claim).next().is_some()
    }

    /// Returns the objects that make this claim, ordered by name.
    pub(crate) fn claiming(&self, claim: IndexKey) -> impl Iterator<Item = (&str, &V)> + Clone {
        let first = Bound::Included((claim.clone(), Arc::default()));
        let all = self.claims.range((first, Bound::Unbounded)).take_while(move |(own, _)| *own == claim);
        all.filter_map(|(_, name)| Some((name.as_ref(), self.get(name)?)))
    }
}
