//! Objects of one kind, by name, and by what each of them claims. A list that begins anew takes nothing away until it
//! is whole.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;

/// What an object is found by beside its name. Several may claim the same.
pub trait Claims {
    /// An address, or the name of another object.
    type Claim: Ord + Clone;

    /// All that it claims.
    fn claims(&self) -> impl Iterator<Item = Self::Claim>;

    /// The address that a claim is about; `None` if it is about a name.
    fn address(claim: &Self::Claim) -> Option<IpAddr>;
}

/// Objects of one kind. Names are shared between its two parts, so that many objects take little room.
#[derive(Debug)]
pub struct FactTable<V: Claims> {
    objects: HashMap<Arc<str>, Entry<V>>,
    claims: BTreeSet<(V::Claim, Arc<str>)>,
    /// The list that has begun last.
    list: u32,
    listed: bool,
}

#[derive(Debug)]
struct Entry<V> {
    object: V,
    /// The number of the list that was under way, or of the last one, when the object was last seen.
    list: u32,
}

impl<V: Claims> FactTable<V> {
    /// A list of all objects begins.
    pub fn begin(&mut self) {
        self.list = self.list.wrapping_add(1);
    }

    /// The list is whole: what it did not name is gone.
    pub fn finish(&mut self) {
        self.listed = true;
        let list = self.list;
        let gone: Vec<_> = self.objects.iter().filter(|(_, entry)| entry.list != list).collect();
        let gone: Vec<_> = gone.into_iter().map(|(name, _)| name.clone()).collect();
        for name in gone {
            self.remove(&name);
        }
    }

    /// Whether a list has ever been whole.
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// An object is this now. Returns the addresses that it claims and did not claim before.
    pub fn put(&mut self, name: &str, object: V) -> Vec<IpAddr> {
        let name = match self.objects.get_key_value(name) {
            Some((name, _)) => name.clone(),
            None => name.into(),
        };
        let entry = Entry { object, list: self.list };
        let claims: Vec<_> = entry.object.claims().collect();
        let is_new = |claim: &&V::Claim| !self.claims.contains(&((*claim).clone(), name.clone()));
        let new = claims.iter().filter(is_new).filter_map(V::address).collect();
        if let Some(old) = self.objects.insert(name.clone(), entry) {
            for claim in old.object.claims() {
                self.claims.remove(&(claim, name.clone()));
            }
        }
        self.claims.extend(claims.into_iter().map(|claim| (claim, name.clone())));
        new
    }

    /// All addresses that any object claims.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let mut all: Vec<_> = self.claims.iter().filter_map(|(claim, _)| V::address(claim)).collect();
        all.dedup();
        all
    }

    /// An object is gone, or none that counts any more.
    pub fn remove(&mut self, name: &str) {
        let Some((name, old)) = self.objects.remove_entry(name) else { return };
        for claim in old.object.claims() {
            self.claims.remove(&(claim, name.clone()));
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<&V> {
        self.objects.get(name).map(|entry| &entry.object)
    }

    /// All of them, in no order.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &V)> {
        self.objects.iter().map(|(name, entry)| (name.as_ref(), &entry.object))
    }

    /// Whether any claims this.
    pub(super) fn is_claimed(&self, claim: V::Claim) -> bool {
        self.claiming(claim).next().is_some()
    }

    /// Those that claim this, in the order of their names.
    pub(super) fn claiming(&self, claim: V::Claim) -> impl Iterator<Item = (&str, &V)> + Clone {
        let first = Bound::Included((claim.clone(), Arc::default()));
        let all = self.claims.range((first, Bound::Unbounded)).take_while(move |(own, _)| *own == claim);
        all.filter_map(|(_, name)| Some((name.as_ref(), self.get(name)?)))
    }
}

impl<V: Claims> Default for FactTable<V> {
    fn default() -> Self {
        Self { objects: HashMap::new(), claims: BTreeSet::new(), list: 0, listed: false }
    }
}
