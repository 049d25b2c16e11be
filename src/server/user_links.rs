//! Links of users' programs: who may link, and until when.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::admission::basis::ClientIdentity;
use crate::admission::denial::Denial;
use crate::admission::{AccessPolicy, ListenerContext};
use crate::invitations::JoinedDevice;
use crate::server::ServerContext;
use crate::server::link_denial::LinkDenial;
use crate::server::rates::RateLimiter;
use crate::session_io::judged::SessionSubject;
use crate::session_io::rights::RightsChange;
use tunnel_base::metrics::label_values::DENIALS;
use tunnel_base::policy::grants::Rights;
use tunnel_base::unix_time::now;
use tunnel_link::grpc::accept::{CallRejection, CallerCertificate, LinkCall};
use tunnel_link::link::Link;
use tunnel_net::guesses::GuessError;
use tunnel_net::limiter::{FairLimiter, Permit, PermitLimits};
use tunnel_proto::hello::{UserHello, UserProof};
use tunnel_proto::names::{NameError, UserDevice, UserName};
use tunnel_proto::state::LinkId;

/// The links of users' programs to this server.
#[derive(Debug)]
pub(crate) struct UserLinks {
    /// The access policy and what it is judged with.
    context: Arc<ListenerContext>,
    links: Mutex<HashMap<LinkId, UserLink>>,
    permits: FairLimiter<UserName>,
    /// Permits for requests of the admin API.
    pub(crate) requests: FairLimiter<UserName>,
    /// Rates of these requests.
    pub(crate) request_rates: RateLimiter<UserName>,
}

/// A user's program, as it has proved to be.
#[derive(Debug, Clone)]
pub(crate) struct AuthenticatedUser {
    pub(crate) device: UserDevice,
    pub(crate) identity: ClientIdentity,
    pub(crate) from: SocketAddr,
    /// The access policy for users, and what it is judged with.
    pub(crate) context: Arc<ListenerContext>,
    /// Whether the device has asked to be revoked, over this link.
    pub(crate) leaves: Arc<AtomicBool>,
}

/// A link with its user.
#[derive(Debug, Clone)]
struct UserLink {
    link: Arc<Link>,
    user: AuthenticatedUser,
}

impl UserLinks {
    /// Accepts links of users by this policy.
    pub(crate) fn new(policy: Arc<ArcSwap<AccessPolicy>>, context: ListenerContext) -> Self {
        if !policy.load().rights.bounds.links_need_grant {
            context.metrics.sessions.expose(LISTENER, &DENIALS);
        }
        Self {
            context: Arc::new(ListenerContext { listener: LISTENER, policy, ..context }),
            links: Mutex::default(),
            permits: FairLimiter::new(LINK_LIMITS),
            requests: FairLimiter::new(REQUEST_LIMITS),
            request_rates: RateLimiter::new(MAX_REQUESTS_PER_SECOND, Duration::from_secs(1)),
        }
    }

    /// Returns the policy by which users are admitted.
    pub(crate) fn policy(&self) -> Arc<ArcSwap<AccessPolicy>> {
        self.context.policy.clone()
    }

    /// Returns the user of an open link whose credentials are not revoked.
    pub(crate) fn user_of(&self, link: &Link) -> Option<AuthenticatedUser> {
        self.links.lock().get(&link.id).map(|link| link.user.clone())
    }

    /// Adds a link. Unless it is a backup link, closes the older ones of its process.
    pub(crate) fn add(&self, link: &Arc<Link>, user: &AuthenticatedUser, hello: &UserHello) {
        let is_replaced = |known: &&UserLink| {
            !hello.is_backup && known.link.instance == link.instance && known.user.device == user.device
        };
        let mut links = self.links.lock();
        let older: Vec<_> = links.values().filter(is_replaced).map(|known| known.link.clone()).collect();
        links.insert(link.id, UserLink { link: link.clone(), user: user.clone() });
        drop(links);
        for older in older {
            older.close();
        }
    }

    /// Removes a link that has ended, or whose user may no longer be linked.
    pub(crate) fn remove(&self, link: &Link) {
        self.links.lock().remove(&link.id);
    }

    /// Returns every link: a copy, so that no link's own lock is taken while this lock is held.
    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        self.links.lock().values().map(|known| known.link.clone()).collect()
    }
}

/// The label of users' links in metrics and the access log.
pub(crate) const LISTENER: &str = "clients";
/// Number of users' links, in total and for one user; [`ServerContext::check_room`] bounds the total by the memory.
/// A user's commands have a link each, and a backup link at times.
const LINK_LIMITS: PermitLimits =
    PermitLimits { permits: 20_000, per_source: MAX_USER_LINKS, waiting: 0, idle_timeout: None };
/// Maximum number of concurrent links of a user, over all her devices: with a certificate she names these herself.
pub(crate) const MAX_USER_LINKS: usize = 128;

/// Number of requests of the admin API that users' programs have sent and not received the answer to, in total and for
/// one user: as many as an admin port has.
const REQUEST_LIMITS: PermitLimits =
    PermitLimits { permits: 64, per_source: 8, waiting: 0, idle_timeout: None };

/// Maximum number of these requests of a user within a second. Each has a line in the audit log.
const MAX_REQUESTS_PER_SECOND: u32 = 20;

/// Checks whether a user's program may link.
pub(crate) async fn authenticate(
    call: &LinkCall,
    hello: &UserHello,
    shared: &Arc<ServerContext>,
) -> Result<(AuthenticatedUser, Permit<UserName>), LinkDenial> {
    let context = &shared.user_links.context;
    let policy = context.policy.load_full();
    let needs_grant = policy.rights.bounds.links_need_grant;
    if needs_grant && lacks_grants(&policy.rights, shared) {
        return Err(LinkDenial::new("unchecked", CallRejection::Unknown).logged());
    }
    if needs_grant && policy.rights.grants.load().is_empty() {
        let answer = CallRejection::Forbidden(NO_USERS.to_owned());
        return Err(LinkDenial::new("no_users", answer).logged());
    }
    // The address comes before the proof, so that no token can be guessed from elsewhere.
    policy.check_source(call.from.ip()).map_err(LinkDenial::forbidden)?;
    let identity = match (&hello.proof, &call.certificate) {
        (UserProof::Token { user, token }, _) => {
            let device = UserDevice { user: user.clone(), device: hello.device.clone() };
            ClientIdentity::Device(prove(device, token, call.from.ip(), shared).await?)
        }
        (UserProof::Certificate, CallerCertificate::User(certificate)) => {
            ClientIdentity::Certificate(certificate.clone())
        }
        (UserProof::Certificate, _) => {
            let why = "neither a token nor a client certificate of a user was presented";
            return Err(LinkDenial::forbidden(why));
        }
    };
    let (name, _) = identity.judge(&policy, LISTENER).map_err(LinkDenial::forbidden)?;
    let user = name.unwrap_or_default().parse();
    let wrong = |why: NameError| LinkDenial::forbidden(format!("the certificate's name: {why}"));
    let user: UserName = user.map_err(wrong)?;
    let device = UserDevice { user, device: hello.device.clone() };
    let context = context.clone();
    let user = AuthenticatedUser { device, identity, from: call.from, context, leaves: Arc::default() };
    user.judge(&RightsChange::default()).map_err(LinkDenial::forbidden)?;
    if shared.stopping.is_cancelled() {
        return Err(LinkDenial::new("stopping", CallRejection::Stopping).logged());
    }
    // Last, and without an await until the link is accepted, so that no other call takes this place.
    shared.check_room()?;
    let permit = shared.user_links.permits.try_acquire(&user.device.user).map_err(|_| {
        let answer =
            CallRejection::TooManyUserLinks { user: user.device.user.clone(), links: MAX_USER_LINKS };
        LinkDenial::new("too_many_links", answer).logged()
    })?;
    Ok((user, permit))
}

/// Returns true if users may have grants that this server has not read yet.
pub(crate) fn lacks_grants(rights: &Rights, shared: &ServerContext) -> bool {
    shared.enrolment.get().is_some() && !rights.grants.load().is_read()
}

/// Waits until a user who is linked may no longer be, and returns why.
pub(crate) async fn revoked(user: &AuthenticatedUser, shared: &Arc<ServerContext>) -> String {
    let user = user.clone();
    let judge = move |change: &_| user.judge(change).map_err(|denial| denial.to_string());
    // A link is no session, which operators end by its user.
    match shared.clients.judged.add(SessionSubject::default(), judge) {
        Ok(judged) => {
            judged.revoked().await;
            judged.revocation().unwrap_or_default().to_owned()
        }
        Err(why) => why,
    }
}

/// Checks a token of a device.
async fn prove(
    device: UserDevice,
    token: &str,
    from: IpAddr,
    shared: &ServerContext,
) -> Result<Arc<dyn JoinedDevice>, LinkDenial> {
    let why =
        "the device has not joined for this user, was revoked or unused for 90 days, or has another token";
    let enrolment = shared.enrolment.get().ok_or_else(|| LinkDenial::token(&GuessError::Wrong(why)))?;
    let name = device.to_string();
    let joined = enrolment.device(device, token);
    let judged = shared.edge_links.judge_token(from, &name, token, || joined.check().map_err(|_| why));
    judged.await.map_err(|why| LinkDenial::token(&why))?;
    Ok(joined)
}

impl AuthenticatedUser {
    /// Checks whether the user may be linked with a change of rights. Returns the last second (Unix time) for which that
    /// holds.
    pub(crate) fn judge(&self, change: &RightsChange) -> Result<u64, Denial> {
        let policy = change.load(&self.context.policy);
        policy.check_source(self.from.ip())?;
        let (name, until) = self.identity.judge(&policy, LISTENER)?;
        let user = self.device.user.as_str();
        if name.as_deref() != Some(user) {
            let why = "names of [server.clients] give the certificate another user now";
            return Err(Denial::Forbidden(why.to_owned()));
        }
        match policy.rights.last_end(user, now()) {
            _ if !policy.rights.bounds.links_need_grant => Ok(until),
            Some(end) => Ok(until.min(end.saturating_sub(1))),
            None => Err(Denial::Forbidden(format!(
                "user {user} has no grant, or it has expired or was revoked; {NO_USERS}"
            ))),
        }
    }
}

/// The answer of a server without `[server.clients]` to users without grants.
const NO_USERS: &str =
    "this server accepts no links of users; they require a table [server.clients] in its config, or a grant";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_with_too_many_links_gets_no_more_and_other_users_still_do() {
        let [alice, bob]: [UserName; 2] = ["alice", "bob"].map(|name| name.parse().unwrap());
        let permits = FairLimiter::new(LINK_LIMITS);
        let acquire = |user: &UserName| permits.try_acquire(user);
        let mut held: Vec<_> = (0..MAX_USER_LINKS).map(|_| acquire(&alice).unwrap()).collect();
        assert!(acquire(&alice).is_err() && acquire(&bob).is_ok());
        held.pop();
        assert!(acquire(&alice).is_ok());
    }
}
