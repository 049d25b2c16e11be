//! The addresses of Nodes, pods and Services.

use std::sync::Arc;

use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::config::cluster::ClusterSettings;
use crate::kubernetes::api::server::access;
use tunnel_base::addresses::AddressBook;
use tunnel_base::drain::Drain;
use tunnel_kube::address_watch::AddressBookUpdater;

/// Keeps the address book up to date with the cluster. Problems with the cluster appear in `readiness`.
pub(crate) fn follow(
    cluster: &ClusterSettings,
    book: &Arc<AddressBook>,
    readiness: &Readiness,
    drain: &Drain,
) {
    let readiness = readiness.clone();
    let report = move |what, state| readiness.set_degraded(what, state);
    let watch = AddressBookUpdater::new(access(cluster), book.clone(), report);
    drain.spawn(info_span!("addresses"), watch.follow(drain.clone()));
}
