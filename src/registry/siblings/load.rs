//! How many nodes each pod has, as they tell each other.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Siblings;
use super::list::MOST_KNOWN;
use crate::protocol::{LinkSender, Load};

/// Another pod, and how many nodes it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodLoad {
    /// Its gRPC port, as this pod dials it; none if only it dials this one.
    pub at: Option<SocketAddr>,
    /// Nodes that are linked to it.
    pub nodes: u64,
}

impl Siblings {
    /// Tells every other pod how many nodes this one has; to be called every [`ANNOUNCE_EVERY`]. `hold`: links to all pods
    /// that are listed are made for that, and kept.
    pub fn announce_load(&self, load: Load, hold: bool) {
        if load.stopping {
            self.note_stopping(self.means.own);
        }
        self.means.catches.store(load.catches, Relaxed);
        self.note_catching(self.means.own, load.catches);
        let (known, incoming) = self.pods();
        let mut told = Vec::new();
        for sibling in known.iter().filter(|sibling| !sibling.is_ourselves()) {
            let hold = hold && sibling.listed.load(Relaxed);
            match sibling.up() {
                Some(up) => {
                    up.load(load);
                    told.extend(up.instance);
                    if hold {
                        sibling.touch();
                    }
                }
                None if hold => sibling.wanted.notify_one(),
                None => {}
            }
        }
        let untold = |sender: &&Arc<LinkSender>| sender.instance.is_none_or(|pod| !told.contains(&pod));
        for sender in incoming.iter().map(|incoming| &incoming.sender).filter(untold) {
            sender.load(load);
        }
    }

    /// Takes what another pod tells.
    pub fn on_load(&self, from: &LinkSender, load: Load) {
        let Some(pod) = from.instance else { return };
        if load.stopping {
            self.note_stopping(pod);
        }
        self.note_catching(pod, load.catches);
        let (now, mut loads) = (Instant::now(), self.loads.lock().unwrap_or_else(PoisonError::into_inner));
        loads.retain(|_, (_, at)| now - *at < FRESH);
        if loads.len() < MOST_KNOWN || loads.contains_key(&pod) {
            loads.insert(pod, (load, now));
        }
    }

    /// Every other pod with its nodes. `None`: one of them has said nothing for a while, is not linked, or is stopping.
    pub fn loads(&self) -> Option<Vec<PodLoad>> {
        let (known, incoming) = self.pods();
        let mut pods = Vec::new();
        for sibling in known.iter().filter(|sibling| !sibling.is_ourselves()) {
            match sibling.up() {
                Some(up) => pods.push((Some(sibling.at), up.instance?)),
                None if sibling.listed.load(Relaxed) => return None,
                None => {}
            }
        }
        for sender in
            incoming.into_iter().map(|incoming| incoming.sender).filter(|sender| !sender.is_closed())
        {
            pods.push((None, sender.instance?));
        }
        pods.sort_by_key(|(at, pod)| (pod.to_bytes(), at.is_none()));
        pods.dedup_by_key(|(_, pod)| *pod);
        let loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        let load = |(at, pod): (Option<SocketAddr>, _)| {
            let (load, heard) = loads.get(&pod)?;
            (!load.stopping && heard.elapsed() < FRESH).then_some(PodLoad { at, nodes: load.nodes })
        };
        pods.into_iter().map(load).collect()
    }
}

/// Between two times that a pod tells the others.
pub const ANNOUNCE_EVERY: Duration = Duration::from_secs(5);
/// What a pod has said counts for so long.
const FRESH: Duration = Duration::from_secs(16);
