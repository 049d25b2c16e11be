//! The sessions that users' programs open: each request is authorized by `[server.clients]`, also the Resume of a
//! session that another server has relayed until then. They are relayed like those of edges, but for requests of the
//! admin API, which this server answers.

use std::sync::Arc;

use http::HeaderMap;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::info_span;

use crate::admin::requester::LinkedUser;
use crate::admission::basis::{AccessBasis, ClientIdentity};
use crate::admission::denial::Denial;
use crate::admission::{Admission, DeniedRequest, ListenerContext, OpenRequest};
use crate::server::ServerContext;
use crate::server::link_events::TOO_MANY_SESSIONS;
use crate::server::link_events::bridge::{BridgeRequester, bridge_to_plain};
use crate::server::user_links::{AuthenticatedUser, LISTENER, lacks_grants};
use crate::session_io::judged::{RelayedSession, SessionSubject, UNTIL_CHANGED};
use crate::session_io::rights::RightsChange;
use tunnel_link::link::Link;
use tunnel_link::table::relay_request::RelayRequest;
use tunnel_proto::frame::{ErrorCode, SessionCategory, SessionError, SessionKey};
use tunnel_proto::names::{Target, UserDevice};

/// Relays a request of a user's program if it is allowed, in its own task, because the search for a path may take
/// seconds.
pub(crate) fn spawn_request(request: RelayRequest, shared: &Arc<ServerContext>, room: &Arc<Semaphore>) {
    let Some(user) = shared.user_links.user_of(request.from()) else {
        return request
            .refuse(SessionError::new(ErrorCode::NotAllowed, "the access of this user was revoked"));
    };
    let drain = shared.link_context.drain.clone();
    if request.key().category == SessionCategory::Admin {
        let span = info_span!("admin", user = %user.device.user, device = %user.device.device);
        return drain.spawn(span, answer(request, user, shared.clone()));
    }
    let span = info_span!("relay", user = %user.device.user, device = %user.device.device, session = %request.key().id);
    let room = room.clone();
    let shared = shared.clone();
    drain.spawn(span, relay(request, user, room, shared));
}

/// Answers a request of the admin API, as the end of its session.
async fn answer(request: RelayRequest, user: AuthenticatedUser, shared: Arc<ServerContext>) {
    // Checked again, because the config may have changed.
    let until = match user.judge(&RightsChange::default()) {
        Ok(until) => {
            let has_certificate = matches!(user.identity, ClientIdentity::Certificate(_));
            has_certificate.then_some(until).filter(|until| *until != UNTIL_CHANGED)
        }
        Err(denial) => return request.refuse(refusal(&denial, &user.context, false, false)),
    };
    let AuthenticatedUser { device, from, context, leaves, .. } = user;
    let Ok(_permit) = shared.user_links.requests.try_acquire(&device.user) else {
        let why =
            format!("user {} waits for too many answers, or all users together do; try again", device.user);
        return request.refuse(SessionError::new(ErrorCode::Overloaded, why));
    };
    let is_over_rate = !shared.user_links.request_rates.allows(&device.user);
    let rights = context.policy.load().rights.clone();
    // A session that should be resumed gets no offer.
    if let (Some(offer), Some(admin)) = (request.offer(), shared.admin.get()) {
        let user = LinkedUser { device, from, rights, is_over_rate, leaves, until };
        admin.serve_linked(offer.accept(), user).await;
    }
}

async fn relay(
    mut request: RelayRequest,
    user: AuthenticatedUser,
    room: Arc<Semaphore>,
    shared: Arc<ServerContext>,
) {
    let id = request.key().id;
    let link = request.from().clone();
    let resumes = request.resumes();
    // What an earlier server has chosen is authorized, and never located again.
    let (node, target) = match request.place().cloned() {
        Some((node, target)) => (Some(node), target),
        None => (None, request.target().clone()),
    };
    let is_guessed = resumes && node.is_none();
    let open_request = OpenRequest { node, target, credentials: HeaderMap::new() };
    let may_open = shared.session_rates.allows(&user.device.user.to_string());
    let open_request = may_open.then_some(open_request).ok_or(Denial::Busy(TOO_MANY_SESSIONS));
    let AuthenticatedUser { device, identity, from, context, .. } = user;
    let is_loading = is_guessed && context.addresses.is_loading();
    let lacks_rights = is_loading || resumes && lacks_grants(&context.policy.load().rights, &shared);
    let mut admission = Admission::of_link(context.clone(), from, identity, device.device.clone(), id);
    let authorized = admission.authorize(open_request, String::new()).await;
    let refusal = |denied: DeniedRequest, lacks| refusal(&denied.denial, &context, is_guessed, lacks);
    let admitted = authorized.map_err(|denied| refusal(denied, lacks_rights)).and_then(|authorized| {
        let at = (authorized.node().clone(), authorized.target().clone());
        Ok((at, authorized.admit_relay(id, device, resumes).map_err(|denied| refusal(denied, is_loading))?))
    });
    let ((node, target), admitted) = match admitted {
        Ok(admitted) => admitted,
        Err(why) => return request.refuse(why),
    };
    request.redirect(node, target);
    let mut end = request.watch_end();
    if let Some((request, plain)) = Box::pin(shared.relay(request, &room)).await {
        let access = BridgeRequester::User(admitted.judged.clone());
        return admitted.end(bridge_to_plain(request, plain, access, shared).await, &link);
    }
    let ended = tokio::select! {
        biased;
        ended = &mut end => ended,
        () = admitted.judged.revoked() => {
            admitted.revocation().inspect(|why| shared.link_context.table.relays.reset(id, why));
            end.await
        }
    };
    if let Ok(ended) = ended {
        admitted.end(ended, &link);
    }
}

/// Lists the session that a device has at its node without a path, or ends it if an operator has, or if she may no longer
/// resume it. As long as it is listed, it is judged after each change of rights.
pub(super) fn judge_parked(
    link: &Link,
    key: &SessionKey,
    (device, target): (UserDevice, Target),
    shared: &ServerContext,
) {
    if shared.link_context.table.relays.traffic(key.id).is_some() {
        // It has just been resumed here.
        return;
    }
    let basis = AccessBasis {
        policy: shared.user_links.policy(),
        listener: LISTENER,
        // From any address: she may resume it in another network.
        from: None,
        identity: ClientIdentity::User(device.user.to_string()),
        node: key.node.clone(),
        port: target.port,
        grant: Arc::default(),
        direct: None,
    };
    let store = shared.enrolment.clone();
    let client = device.to_string();
    let user = device.user.clone();
    let judge = move |change: &RightsChange| {
        let policy = change.load(&basis.policy);
        if let Some(store) = store.get() {
            let is_current = store.is_current() && store.grants.is_current();
            if !is_current || !policy.rights.grants.load().is_read() {
                // It is not known now, which is no reason to end it.
                return Ok(UNTIL_CHANGED);
            }
            // By a certificate she may be linked without having joined.
            if policy.names.is_empty() && !store.known().has_joined(&client) {
                return Err(format!("the access of user {user} was revoked"));
            }
        }
        basis.judge(change).map_err(|denial| denial.to_string())
    };
    let now = Instant::now();
    let relayed = RelayedSession {
        device: device.clone(),
        target: Some(target),
        client: device.to_string(),
        started: now,
        resumed: Arc::default(),
    };
    let subject = SessionSubject {
        id: Some(key.id),
        node: Some(key.node.clone()),
        user: Some(device.user.as_str().into()),
        relayed: Some(Box::new(relayed)),
    };
    let until = now + shared.clients.route.resume_timeout;
    if let Err(why) = shared.clients.judged.list_parked(subject, until, judge) {
        link.send_revoked(key, device, &why);
    }
}

/// Returns the error for the opener of a denied request. While the server stops, the opener searches elsewhere. So it
/// does if this server has `guessed` where an open session is, as its lists may not be complete yet, or if it still lacks
/// what rights depend on.
fn refusal(denial: &Denial, context: &ListenerContext, guessed: bool, lacks_rights: bool) -> SessionError {
    let code = match denial {
        Denial::Busy(_) if context.drain.is_draining() => ErrorCode::NodeNotConnected,
        Denial::NoNode(_) | Denial::NotLocated(_) if guessed => ErrorCode::NodeNotConnected,
        Denial::Forbidden(_) if lacks_rights => ErrorCode::NodeNotConnected,
        Denial::Busy(_) => ErrorCode::Overloaded,
        _ => ErrorCode::NotAllowed,
    };
    SessionError::new(code, denial)
}

#[cfg(test)]
mod tests {
    use crate::admission::AccessPolicy;
    use crate::admission::tests::context;
    use crate::session_io::tests::linked;
    use tunnel_base::drain::Drain;

    use super::*;

    #[tokio::test]
    async fn a_server_that_cannot_locate_an_open_session_yet_does_not_end_it() {
        let drain = Drain::new();
        let (table, _link, _offered) = linked(&drain);
        let context = context(AccessPolicy::default(), drain.clone(), table, None);
        let (no_node, forbidden) =
            (Denial::NoNode("10.0.0.7:22".parse().unwrap()), Denial::Forbidden(String::new()));
        for (denial, guessed, lacks_rights, code) in [
            (&no_node, true, false, ErrorCode::NodeNotConnected),
            (&no_node, false, false, ErrorCode::NotAllowed),
            (&forbidden, true, true, ErrorCode::NodeNotConnected),
            (&forbidden, false, true, ErrorCode::NodeNotConnected),
            (&forbidden, true, false, ErrorCode::NotAllowed),
        ] {
            assert_eq!(refusal(denial, &context, guessed, lacks_rights).code, code, "{denial:?}, {guessed}");
        }
    }
}
