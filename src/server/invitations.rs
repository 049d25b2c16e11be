//! Nodes and devices that join by invitation, as configured in `[server.invitations]`.

use std::collections::BTreeSet;
use std::sync::Arc;

use tracing::info_span;

use crate::config::server::invitations::InvitationStoreKind;
use crate::enrolment::shared_text::{EtcdTextStore, FileTextStore};
use crate::enrolment::store::{Enrolments, SecretHash};
use crate::enrolment::{AdvertisedCa, JoinRefusal, SharedEnrolments, next_change};
use crate::parts::with_kubernetes;
use crate::server::ServerContext;
use crate::server::config::ServerConfig;
use crate::server::registry::etcd_access;
use tunnel_base::drain::Drain;
use tunnel_base::files::with_suffix;
use tunnel_base::limited;
use tunnel_base::logging::AUDIT;
use tunnel_base::metrics::Door;
use tunnel_base::stores::TextStore;
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
    let Some(authority) = authority else { return };
    let stores = [ENROLLED, GRANTS, SEEN].map(|name| store(settings, name, &Resolver::system()));
    let [Some(enrolled), Some(grants), Some(seen)] = stores else { return };
    let most = if settings.invitations.store == InvitationStoreKind::Secret { 2_000 } else { 10_000 };
    let ServerContext { watcher, readiness, .. } = shared;
    let LinkContext { metrics, drain, .. } = &shared.link_context;
    watcher.watch("ca", &authority);
    let enrolment =
        SharedEnrolments::new(enrolled, ([grants, seen], most), authority, metrics.refusals.clone());
    if shared.enrolment.set(enrolment.clone()).is_ok() {
        let readiness = readiness.clone();
        let draining = drain.clone();
        let ending = metrics.devices_ending.clone();
        let follow = async move {
            let readiness = &readiness;
            let report = |name| move |state| readiness.set_degraded(name, state);
            let report_uses = |noted, devices: usize| {
                readiness.set_degraded(SEEN, noted);
                ending.set(i64::try_from(devices).unwrap_or(i64::MAX));
            };
            tokio::join!(
                enrolment.follow(report(INVITATIONS_CONDITION), draining.clone()),
                enrolment.grants.follow(report(GRANTS), draining.clone()),
                enrolment.follow_uses(report_uses, draining.clone())
            );
        };
        drain.spawn(info_span!("invitations"), follow);
    }
}

/// Opens the store of a text. Returns `None` if joining by invitation is not enabled.
fn store(settings: &ServerConfig, name: &'static str, resolver: &Resolver) -> Option<Box<dyn TextStore>> {
    let settings = settings.invitations.clone();
    Some(match settings.store {
        InvitationStoreKind::None => return None,
        InvitationStoreKind::File => {
            let ending = if name == ENROLLED { String::new() } else { format!(".{name}") };
            Box::new(FileTextStore::new(with_suffix(&settings.file?, &ending)))
        }
        InvitationStoreKind::Etcd => {
            let key = format!("{}/{name}", settings.etcd.prefix);
            Box::new(EtcdTextStore::new(etcd_access(settings.etcd), &key, resolver.clone()))
        }
        InvitationStoreKind::Secret => {
            let cluster = settings.cluster?;
            with_kubernetes!(api::server::shared_text(&cluster, settings.secret.0, name), else return None)
        }
    })
}

/// Returns the nodes that have joined by invitation, in lower case, or why the store cannot be read. Returns `None` if
/// joining by invitation is not enabled. Cancel safe.
pub(crate) async fn joined(
    settings: &ServerConfig,
    resolver: &Resolver,
) -> Option<Result<BTreeSet<String>, String>> {
    let mut cell = store(settings, ENROLLED, resolver)?;
    let read = cell.read().await.map_err(|why| why.to_string());
    Some(read.and_then(|read| Ok(Enrolments::parse(&read.text)?.joined())))
}

/// Judges the links and sessions of users again after each change of the store, until draining starts.
pub(crate) async fn follow_users(shared: Arc<ServerContext>, drain: Drain) {
    let mut changes = None;
    while drain.run_until(next_change(&shared.enrolment, &mut changes)).await.is_some() {
        if let Some(enrolment) = shared.enrolment.get() {
            let users = shared.user_links.policy().load_full();
            let grants = &users.rights.grants;
            grants.store(Arc::new(enrolment.user_grants(&grants.load())));
        }
        shared.clients.judged.rights_changed();
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
        let key = enrolment.known().key_of(&SecretHash::of(&join.secret));
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
    enrol_request.accept(enrolment.certificates(), &shared.named_servers.load());
}

/// The names of the texts: of machines, of what users may reach, and of when machines were seen.
const ENROLLED: &str = "enrolled";
const GRANTS: &str = "grants";
const SEEN: &str = "seen";

/// The name of the invitations' condition in `/readyz`.
const INVITATIONS_CONDITION: &str = "invitations";
