//! Sessions that a user's program opens over its link: admitted like those of other clients, and relayed to their node.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use tokio::time::Instant;

use crate::admission::basis::ClientIdentity;
use crate::admission::denial::Denial;
use crate::admission::{
    Admission, AdmittedClient, AuthorizedRequest, ClientPermit, DeniedRequest, ListenerContext, SessionPermit,
};
use crate::session_io::REVOKED;
use crate::session_io::judged::{JudgedSession, RelayedSession, SessionSubject};
use tunnel_base::access_log::AccessLogEntry;
use tunnel_base::metrics::ActiveSessionGuard;
use tunnel_link::link::Link;
use tunnel_link::relay::bindings::RelayOutcome;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::names::{DeviceName, NodeName, SessionId, UserDevice};

/// A session that this process relays for a user, with its access line, counter and permit.
#[derive(Debug)]
pub(crate) struct RelayedUserSession {
    /// Revoked when the session is no longer allowed.
    pub(crate) judged: JudgedSession,
    context: Arc<ListenerContext>,
    access: AccessLogEntry,
    alive: ActiveSessionGuard,
    /// Number of times it was resumed here, if it was parked before.
    parked: Option<Arc<AtomicU32>>,
    _permit: SessionPermit,
}

impl Admission {
    /// Creates the admission of one request over the link of a user's program at `from`.
    pub(crate) fn of_link(
        context: Arc<ListenerContext>,
        from: SocketAddr,
        proof: ClientIdentity,
        device: DeviceName,
        session: SessionId,
    ) -> Self {
        let client = AdmittedClient { from, proof, server_name: None, linked: Some((device, session)) };
        Self::of(context, client, ClientPermit::Link)
    }
}

impl AuthorizedRequest {
    /// Admits the session `id` of a device, which takes a session permit. `resumes` is true if it was open before.
    ///
    /// # Errors
    ///
    /// Returns the denial, which is counted and logged.
    pub(crate) fn admit_relay(
        self,
        id: SessionId,
        device: UserDevice,
        resumes: bool,
    ) -> Result<RelayedUserSession, DeniedRequest> {
        if self.destination.node == NodeName::direct() {
            let target = &self.destination.target;
            let denial = Denial::Forbidden(format!(
                "{target} is at no node, and users' links lead to nodes only; for targets of [server.direct], use a CONNECT \
                 port of the server"
            ));
            return Err(DeniedRequest::new(denial, self.access, &self.context, self.from));
        }
        let (Self { context, from, basis, mut access, .. }, permit) = self.with_permit()?;
        let parked = context.judged.unpark(id);
        access.set_pending(false);
        (access.id, access.resumed) = (Some(id), resumes.into());
        // It keeps start and count of the parked one, so that lists show one session instead of its paths.
        let (started, parked) = parked.map(|parked| (parked.started, parked.resumed)).unzip();
        let resumed = parked.clone().unwrap_or_default();
        resumed.fetch_add(access.resumed, Relaxed);
        let relayed = RelayedSession {
            device,
            target: access.target.clone(),
            client: access.client.clone(),
            started: started.unwrap_or_else(Instant::now),
            resumed,
        };
        let subject = SessionSubject { relayed: Some(Box::new(relayed)), ..(&access).into() };
        let judge = move |change: &_| basis.judge(change).map_err(|denial| denial.to_string());
        match context.judged.add(subject, judge) {
            Ok(judged) => {
                let alive = context.metrics.sessions.start(access.listener);
                Ok(RelayedUserSession { judged, context, access, alive, parked, _permit: permit })
            }
            Err(why) => Err(DeniedRequest::new(Denial::Forbidden(why), access, &context, from)),
        }
    }
}

impl RelayedUserSession {
    /// Returns the error for both ends if the session was revoked.
    pub(crate) fn revocation(&self) -> Option<SessionError> {
        self.judged.revocation().map(|why| SessionError::new(ErrorCode::NotAllowed, why))
    }

    /// Writes the access line of a session over a user's `link`, or of its path through this server. In the second case it
    /// is parked.
    pub(crate) fn end(mut self, ended: RelayOutcome, link: &Link) {
        let RelayOutcome { why, to_acceptor, to_opener } = ended;
        // The opener of a session whose node is not found tries again.
        let fails = why.as_ref().is_some_and(|why| why.code == ErrorCode::NodeNotConnected);
        let still_parked = self.parked.take().filter(|_| fails);
        if let Some(resumed) = &still_parked {
            resumed.fetch_sub(self.access.resumed, Relaxed);
        }
        if why.is_none() || still_parked.is_some() {
            let until = Instant::now() + self.context.route.resume_timeout;
            self.context.judged.park(self.judged.clone(), until);
        }
        (self.access.up, self.access.down) = (to_acceptor, to_opener);
        let metrics = &self.context.metrics;
        metrics.bytes_to_target.inc_by(to_acceptor);
        metrics.bytes_to_client.inc_by(to_opener);
        let (result, why) = match (self.revocation(), why) {
            (Some(why), _) => (REVOKED, why.reason),
            (None, None) if link.is_closed() => ("moved", "the user's link has ended".to_owned()),
            (None, None) => ("moved", "the session left this path, to resume on another".to_owned()),
            (None, Some(why)) if why.code == ErrorCode::NoError => ("ok", "both ends finished".to_owned()),
            (None, Some(why)) => (why.code.name(), why.reason),
        };
        self.alive.end(result);
        // A program may resume endlessly what never was, or open what a node refuses.
        if (to_acceptor, to_opener) == (0, 0) && !["ok", REVOKED].contains(&result) {
            self.access.set_opening(&metrics.refusals);
        }
        self.access.end(result, &why);
    }
}
