//! One client at a front end: checks its request and opens the session.

use std::net::SocketAddr;

use http::{HeaderMap, StatusCode};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{Span, field};

use super::{FrontContext, FrontEnd, Granted};
use crate::carry::Opened;
use crate::frontend::auth::Gate;
use crate::frontend::{ClientKey, Denial};
use crate::names::{Host, NodeName, Target};
use crate::net::door::Slot;
use crate::protocol::{Category, Session};
use crate::route::Request;
use crate::telemetry::Access;

/// A client's request, as its front end has read it.
#[derive(Debug)]
pub struct OpenRequest {
    /// The node and its port.
    pub target: Target,
    /// The headers, of which `Proxy-Authorization` may hold a password.
    pub credentials: HeaderMap,
}

/// Why a client gets no session, and how much it may be told.
#[derive(Debug)]
pub struct Denied {
    /// Why.
    pub denial: Denial,
    /// Whether the answer may show addresses and times.
    pub trusted: bool,
    /// The trace, by which the operator finds the line in the log.
    pub trace: String,
}

/// One client from its connection to its session. Until it has gone it holds a slot: the one of the door, or after a
/// denied request the one among the sessions.
#[derive(Debug)]
pub struct Visit<'a> {
    context: &'a FrontContext,
    front: &'static str,
    category: Category,
    from: SocketAddr,
    /// The user that the connection itself proves (by a certificate, as a local user). The front end sets it before it
    /// calls [`Self::open`]; no password is asked for then.
    pub user: Option<String>,
    /// Dropped once the head is read.
    asked: Option<oneshot::Sender<()>>,
    door: Option<Slot>,
    session: Option<Slot<ClientKey>>,
}

impl<'a> Visit<'a> {
    pub(super) fn new<S, F: FrontEnd<S>>(
        context: &'a FrontContext,
        from: SocketAddr,
        door: Slot,
        asked: oneshot::Sender<()>,
    ) -> Self {
        let (front, category) = (F::NAME, F::CATEGORY);
        Self {
            context,
            front,
            category,
            from,
            user: None,
            asked: Some(asked),
            door: Some(door),
            session: None,
        }
    }

    /// Checks the request and opens the session; counts and logs it. An error in `request` is shown only to clients
    /// whose address is allowed. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// The denial, which the front end sends to the client.
    pub async fn open(
        &mut self,
        request: Result<OpenRequest, Denial>,
        trace: String,
    ) -> Result<Granted, Denied> {
        self.asked = None;
        let mut access = Access::begin(self.front, self.from.to_string());
        access.trace = trace;
        Span::current().record("trace", access.trace.as_str());
        let metrics = &self.context.metrics;
        match self.try_open(request, &mut access).await {
            Ok((session, slot)) => {
                access.id = Some(session.id());
                access.status = Some(StatusCode::OK.as_u16());
                Span::current().record("session", field::display(session.id()));
                Ok(Opened { session, access, alive: metrics.sessions.begin(self.front), slot })
            }
            Err(denial) => {
                metrics.sessions.refused(self.front, denial.name());
                access.status = Some(denial.status().as_u16());
                let trusted = self.from.ip().is_loopback() || access.user.is_some();
                let trace = access.trace.clone();
                access.refuse(denial.name(), &denial.to_string(), self.from.ip(), &metrics.refusals);
                Err(Denied { denial, trusted, trace })
            }
        }
    }

    async fn try_open(
        &mut self,
        request: Result<OpenRequest, Denial>,
        access: &mut Access,
    ) -> Result<(Session, Slot<ClientKey>), Denial> {
        if let Some(slot) = &self.door {
            slot.busy();
        }
        let (node, target) = self.check(request, access).await?;
        let key = ClientKey::of(access.user.as_deref(), self.from.ip());
        let slot = self.context.sessions.try_enter(&key)?;
        // Opening may take long; a client that has passed the checks must not keep others from the door meanwhile.
        self.door = None;
        let client = match &access.user {
            Some(user) => format!("{user}@{}", self.from),
            None => self.from.to_string(),
        };
        let begun = Instant::now();
        let request = Request { node, target, category: self.category, client };
        let opened = self.context.route.open(request).await;
        self.context.metrics.opening.observe(begun.elapsed());
        match opened {
            Ok(session) => Ok((session, slot)),
            Err(error) => {
                self.session = Some(slot);
                Err(error.into())
            }
        }
    }

    /// All checks that need no far end, in the order that shows a stranger least.
    pub(super) async fn check(
        &self,
        request: Result<OpenRequest, Denial>,
        access: &mut Access,
    ) -> Result<(NodeName, Target), Denial> {
        let (gate, from) = (self.context.gate.load_full(), self.from.ip());
        // Checked again, as the config may have changed since the connection was accepted.
        gate.admit(from)?;
        if self.context.drain.is_draining() {
            return Err(Denial::Busy("this pod is stopping"));
        }
        let OpenRequest { target, credentials } = request?;
        access.target = Some(target.clone());
        access.user = match &self.user {
            Some(user) => Some(user.clone()),
            None => gate.identify(&credentials, from).await?,
        };
        let (node, target) = gate.node(target)?;
        access.node = Some(node.clone());
        gate.permit(access.user.as_deref(), from, &node, target.port)?;
        Ok((node, target))
    }
}

impl Gate {
    /// The node that a target's host names, and the target as that node knows it.
    fn node(&self, target: Target) -> Result<(NodeName, Target), Denial> {
        let Host::Name(name) = &target.host else { return Err(Denial::NoNode(target)) };
        let named: NodeName = name.parse()?;
        let node = self.zone.as_ref().map_or_else(|| named.clone(), |zone| zone.node(named.clone()));
        // Whichever name the client used, the edge knows its own.
        let host = if node == named { target.host.clone() } else { node.as_str().parse()? };
        Ok((node, Target { host, port: target.port }))
    }
}
