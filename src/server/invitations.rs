//! Nodes and devices that join by invitation, as configured in `[server.invitations]`.

use std::collections::BTreeSet;
use std::sync::Arc;

use tracing::info_span;

use crate::config::server::invitations::InvitationStoreKind;
use crate::enrolment::shared_text::{EtcdTextStore, FileTextStore, TextStore};
use crate::enrolment::store::Enrolments;
use crate::enrolment::{AdvertisedCa, JoinRefusal, OpenedEnrolments, SharedEnrolments, next_change};
use crate::parts::with_kubernetes;
use crate::server::ServerContext;
use crate::server::config::ServerConfig;
use crate::server::registry::etcd_access;
use crate::session_io::judged::JudgedSessions;
use tunnel_base::drain::Drain;
use tunnel_base::limited;
use tunnel_base::logging::AUDIT;
use tunnel_base::metrics::Door;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::enrol::{EnrolOperation, EnrolRequest};
use tunnel_net::reload::ReloadedValue;
use tunnel_net::resolver::Resolver;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::printable;

/// Opens the store and watches it, if joining by invitation is enabled.
pub(crate) fn start(
    settings: &ServerConfig,
    authority: Option<ReloadedValue<AdvertisedCa>>,
    shared: &ServerContext,
) {
    let Some((authority, cell)) = authority.zip(store(settings, &Resolver::system())) else { return };
    let ServerContext { watcher, readiness, .. } = shared;
    let LinkContext { metrics, drain, .. } = &shared.link_context;
    watcher.watch("ca", &authority);
    let enrolment = SharedEnrolments::new(cell, authority, metrics.refusals.clone());
    if shared.enrolment.set(enrolment.clone()).is_ok() {
        let readiness = readiness.clone();
        let report = move |state| readiness.set_degraded(INVITATIONS_CONDITION, state);
        let draining = drain.clone();
        let follow = async move { enrolment.follow(report, draining).await };
        drain.spawn(info_span!("invitations"), follow);
    }
}

/// Opens the store. Returns `None` if joining by invitation is not enabled.
fn store(settings: &ServerConfig, resolver: &Resolver) -> Option<Box<dyn TextStore>> {
    let settings = settings.invitations.clone();
    Some(match settings.store {
        InvitationStoreKind::None => return None,
        InvitationStoreKind::File => Box::new(FileTextStore::new(settings.file?)),
        InvitationStoreKind::Etcd => {
            let key = format!("{}/{ETCD_KEY}", settings.etcd.prefix);
            Box::new(EtcdTextStore::new(etcd_access(settings.etcd), &key, resolver.clone()))
        }
        InvitationStoreKind::Secret => {
            let cluster = settings.cluster?;
            with_kubernetes!(api::server::secret::shared(&cluster, settings.secret), else return None)
        }
    })
}

/// Returns the nodes that have joined by invitation, in lower case, or why the store cannot be read. Returns `None` if
/// joining by invitation is not enabled. Cancel safe.
pub(crate) async fn joined(
    settings: &ServerConfig,
    resolver: &Resolver,
) -> Option<Result<BTreeSet<String>, String>> {
    let mut cell = store(settings, resolver)?;
    let read = cell.read().await.map_err(|why| why.to_string());
    Some(read.and_then(|read| Ok(Enrolments::parse(&read.text)?.joined())))
}

/// Judges the links and sessions of users again after each change of the store, until draining starts.
pub(crate) async fn follow_devices(enrolment: OpenedEnrolments, judged: JudgedSessions, drain: Drain) {
    let mut changes = None;
    while drain.run_until(next_change(&enrolment, &mut changes)).await.is_some() {
        judged.rights_changed();
    }
}

/// Authorizes an enrolment request from a caller that has not joined yet, in its own task.
pub(crate) fn spawn(enrol_request: EnrolRequest, shared: Arc<ServerContext>) {
    let links = shared.link_context.drain.clone();
    let span = info_span!("enrol", remote_addr = %enrol_request.from);
    links.spawn(span, judge(enrol_request, shared));
}

async fn judge(enrol_request: EnrolRequest, shared: Arc<ServerContext>) {
    let metrics = &shared.link_context.metrics;
    // Without a store no request is read.
    let Some(enrolment) = shared.enrolment.get() else { return };
    if shared.stopping.is_cancelled() {
        metrics.count_refusal(Door::Links, "stopping");
        return enrol_request.refuse(SessionError::new(ErrorCode::Overloaded, "this server is stopping"));
    }
    let from = enrol_request.from.ip();
    if let EnrolOperation::Join(join) = &enrol_request.wish
        && let Err(why) = enrolment.join(from, join, |node| shared.edge_links.has_line(node)).await
    {
        let may_log = metrics.refuse(Door::Links, "invitation", from);
        let name = printable::printable(&join.name);
        let key = enrolment.key_of(&join.secret);
        // The caller is told to see the log.
        let reason = match &why {
            JoinRefusal::Later(cause) => cause.clone(),
            why => why.to_string(),
        };
        // A stranger's guesses do not belong into the audit log.
        if key.is_some() {
            limited!(may_log => info, target: AUDIT, actor = name, remote_addr = %from, key, reason, "join rejected");
        } else {
            limited!(may_log => warn, remote_addr = %from, name, reason, "join rejected");
        }
        let code =
            if matches!(why, JoinRefusal::Later(_)) { ErrorCode::Overloaded } else { ErrorCode::NotAllowed };
        return enrol_request.refuse(SessionError::new(code, why));
    }
    enrol_request.accept(enrolment.certificates(), &shared.named_servers);
}

/// The key below the prefix.
const ETCD_KEY: &str = "enrolled";

/// The name of the invitations' condition in `/readyz`.
const INVITATIONS_CONDITION: &str = "invitations";
