//! What says who may reach what through a pod, and may change while it runs.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::config::cloud::Cloud;
use crate::policy::{Glob, Targets};
use crate::startup::Doors;

/// What a pod lets others reach; each user of a part loads it anew for whoever comes. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Policies {
    /// What edges may have this pod dial.
    pub(super) for_edges: Arc<ArcSwap<Targets>>,
    /// What clients may have it dial that is at no node.
    pub(super) for_clients: Arc<ArcSwap<Targets>>,
    /// The nodes that edges may reach through this pod.
    pub(super) nodes: Arc<ArcSwap<Vec<Glob>>>,
}

impl Policies {
    pub(super) fn new(settings: &Cloud) -> Self {
        Self {
            for_edges: Arc::new(ArcSwap::from_pointee(settings.allow.targets.clone())),
            for_clients: Arc::new(ArcSwap::from_pointee(settings.addresses.direct.clone())),
            nodes: Arc::new(ArcSwap::from_pointee(settings.allow.nodes.clone())),
        }
    }

    /// What these settings say counts for whoever comes next, here and at the doors.
    pub(super) fn apply(&self, settings: &Cloud, doors: &Doors) {
        self.for_edges.store(Arc::new(settings.allow.targets.clone()));
        self.for_clients.store(Arc::new(settings.addresses.direct.clone()));
        self.nodes.store(Arc::new(settings.allow.nodes.clone()));
        doors.apply(&settings.doors());
    }
}
