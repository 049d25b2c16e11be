//! Nodes that join by invitation, as `[mode.cloud.invitations]` has it.

use std::sync::Arc;

use tracing::{info_span, warn};

use super::context::PodContext;
use super::etcd::etcd_access;
use super::files::PodFiles;
#[cfg(feature = "kubernetes")]
use super::kubernetes;
use crate::admin::Readiness;
use crate::config::cloud::{Cloud, Invitations};
use crate::drain::Drain;
use crate::enrol::{Enrolment, JoinRefusal};
use crate::protocol::grpc::{Joining, Petition, Wish};
use crate::protocol::{Code, Refusal};
#[cfg(feature = "kubernetes")]
use crate::registry::SecretCell;
use crate::registry::{Cell, EtcdCell, FileCell};

/// Opens the store, and follows it; `None`: nobody joins by invitation.
pub(super) fn start(
    settings: &Cloud,
    files: &PodFiles,
    readiness: &Readiness,
    drain: &Drain,
) -> Option<Arc<Enrolment>> {
    let (store, authority) = (settings.invitations.clone()?, files.authority.clone()?);
    let cell = match store {
        Invitations::File(file) => Cell::File(FileCell::new(file)),
        Invitations::Etcd(etcd) => {
            let key = format!("{}/{ETCD_KEY}", etcd.prefix);
            Cell::Etcd(Box::new(EtcdCell::new(etcd_access(etcd), &key, files.resolver.clone())))
        }
        #[cfg(feature = "kubernetes")]
        Invitations::Secret(cluster, name) => {
            Cell::Secret(Box::new(SecretCell::new(kubernetes::reached(&cluster), name)))
        }
        #[cfg(not(feature = "kubernetes"))]
        // This is a fault that was noted with the settings.
        Invitations::Secret(..) => return None,
    };
    drain.spawn(info_span!("authority"), authority.clone().watch(drain.clone()));
    let enrolment = Enrolment::new(cell, authority);
    let readiness = readiness.clone();
    let report = move |state| readiness.note(NAME, state);
    drain.spawn(info_span!("invitations"), enrolment.clone().follow(report, drain.clone()));
    Some(enrolment)
}

/// Judges what somebody asks who is no node yet.
pub(super) async fn judge(petition: Petition, shared: PodContext) {
    let refused = &shared.ground.metrics.calls_refused;
    let Some(enrolment) = &shared.enrolment else {
        refused.count("no_invitations");
        return petition.refuse(Refusal::new(Code::NotHere, "nobody joins this cloud by invitation"));
    };
    if shared.stopping.is_cancelled() {
        refused.count("stopping");
        return petition.refuse(Refusal::new(Code::Busy, "this pod is stopping"));
    }
    let from = petition.from.ip();
    if let Wish::Join(Joining { secret, node, token }) = &petition.wish
        && let Err(why) = enrolment.join(from, secret, node, token).await
    {
        refused.count("invitation");
        if shared.ground.metrics.refusals.may_log("invitation", from) {
            warn!(%from, node = crate::telemetry::printable(node), "not joined: {why}");
        }
        let code = if matches!(why, JoinRefusal::Later(_)) { Code::Busy } else { Code::NotAllowed };
        return petition.refuse(Refusal::new(code, why));
    }
    petition.grant(enrolment.certificates());
}

/// Below the prefix.
const ETCD_KEY: &str = "enrolled";

/// Its name in `/readyz`.
const NAME: &str = "invitations";
