//! Which other pods there are: those that are listed, and those that DNS names.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tokio::sync::watch;
use tracing::info_span;

use super::pod::Which;
use super::sibling::Sibling;
use super::{SiblingPod, Siblings};

impl Siblings {
    /// The pods at an address that DNS named: those of the list that have it, else the one at `port`. None if that is
    /// ourselves.
    pub fn at(&self, ip: IpAddr, port: u16) -> Vec<SiblingPod> {
        let (mut found, over) = split(self.known());
        found.retain(|sibling| sibling.at.ip() == ip);
        if found.is_empty() {
            self.strike(&over);
            found.extend(self.add(SocketAddr::new(ip, port), false));
        }
        found.retain(|sibling| !sibling.is_ourselves());
        found.into_iter().map(|sibling| SiblingPod(Which::Known(sibling))).collect()
    }

    /// The addresses of those of which one is known.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let known = self.known().into_iter();
        known.filter(|sibling| !sibling.is_ourselves()).map(|sibling| sibling.at.ip()).collect()
    }

    /// Which of those that are listed cannot be linked to, and why.
    ///
    /// # Errors
    ///
    /// Some: a sentence of all.
    pub fn check(&self) -> Result<(), String> {
        let mut all = self.known();
        all.retain(|sibling| sibling.listed.load(Relaxed));
        let troubles: Vec<_> =
            all.iter().filter_map(|sibling| sibling.trouble()).map(|why| why.to_string()).collect();
        if troubles.is_empty() { Ok(()) } else { Err(troubles.join("; ")) }
    }

    /// Changes when [`Self::check`] may have another result.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.means.changed.subscribe()
    }

    pub(super) async fn follow(self: Arc<Self>, mut addresses: watch::Receiver<Vec<SocketAddr>>) {
        let drain = self.means.drain.clone();
        loop {
            tokio::select! {
                () = drain.draining() => return,
                changed = addresses.changed() => if changed.is_err() { return },
            }
            let list = addresses.borrow_and_update().clone();
            self.list(&list);
        }
    }

    /// From now on these are listed. One that is not any more stays one of the pods as long as its link lives.
    pub(super) fn list(&self, list: &[SocketAddr]) {
        let (known, mut over) = split(self.known());
        for sibling in known {
            if list.contains(&sibling.at) {
                sibling.listed.store(true, Relaxed);
            } else if sibling.listed.load(Relaxed) && sibling.unlist() {
                over.push(sibling);
            }
        }
        self.strike(&over);
        for at in list {
            self.add(*at, true);
        }
        self.means.registry.told_of_a_pod();
        self.means.members_changed.notify_one();
    }

    fn strike(&self, over: &[Arc<Sibling>]) {
        let mut pods = self.lock();
        for sibling in over {
            if pods.known.get(&sibling.at).is_some_and(|known| Arc::ptr_eq(known, sibling)) {
                pods.known.remove(&sibling.at);
            }
        }
    }

    /// The one at that address. None if there are too many for one that is not listed.
    fn add(&self, at: SocketAddr, listed: bool) -> Option<Arc<Sibling>> {
        let new = Sibling::new(at, listed);
        {
            let mut pods = self.lock();
            if let Some(known) = pods.known.get(&at) {
                return Some(known.clone());
            }
            if !listed && pods.known.len() >= MOST_KNOWN {
                return None;
            }
            pods.known.insert(at, new.clone());
        }
        let keeping = new.clone().keep(self.means.clone());
        self.means.drain.spawn(info_span!("sibling", %at), keeping);
        Some(new)
    }

    /// Those whose address is known, to look at each without the lock.
    pub(super) fn known(&self) -> Vec<Arc<Sibling>> {
        self.lock().known.values().cloned().collect()
    }
}

/// Those that are pods, and those of which nobody takes care any more.
fn split(known: Vec<Arc<Sibling>>) -> (Vec<Arc<Sibling>>, Vec<Arc<Sibling>>) {
    known.into_iter().partition(|sibling| !sibling.is_over())
}

/// Pods whose address is known; beyond it DNS names strangers.
pub(super) const MOST_KNOWN: usize = 1000;
