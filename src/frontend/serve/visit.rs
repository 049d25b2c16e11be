//! One client at a front end: checks its request and opens the session.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{Span, field};

use super::destination::Destination;
use super::{FrontContext, FrontEnd, Granted};
use crate::carry::Opened;
use crate::frontend::{ClientKey, Denial, trace};
use crate::names::{NodeName, Target};
use crate::net::door::Slot;
use crate::net::socket::Connection;
use crate::protocol::Category;
use crate::telemetry::Access;

/// A client's request, as its front end has read it.
#[derive(Debug)]
pub struct OpenRequest {
    /// The node, where the front end knows it; else the target's host names it.
    pub node: Option<NodeName>,
    /// What is to be dialled there.
    pub target: Target,
    /// The headers, of which `Proxy-Authorization` may hold a password.
    pub credentials: HeaderMap,
}

/// Who a client's connection proves it to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Proof {
    /// Nobody: a password is asked for if the gate wants one.
    #[default]
    None,
    /// A user of this machine.
    User(String),
    /// The CN and DNS names of the certificate that it has shown. The gate may know some of them only.
    Certificate(Vec<String>),
}

/// Why a client gets no session, and how much of that it may know.
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
///
/// A front end whose clients ask once calls [`Self::open`], which gives the slot at the door back. A front end that
/// serves many requests over one connection calls [`Self::judge`] for each, opens what it needs by [`Permitted::open`],
/// and calls [`Self::waits`] after each answer. Its clients keep their slots at the door, but step aside from there for
/// a request that is permitted: a slot among the sessions bounds it, and strangers who fill the door must not end it.
#[derive(Debug)]
pub struct Visit<'a> {
    context: &'a Arc<FrontContext>,
    front: &'static str,
    category: Category,
    from: SocketAddr,
    /// Who the connection itself proves the client to be. The front end sets it before it calls [`Self::open`] or
    /// [`Self::judge`]; no password is asked for then.
    pub proof: Proof,
    /// Dropped once the head is read.
    head_done: Option<oneshot::Sender<()>>,
    door: Option<Slot>,
    session: Option<Slot<ClientKey>>,
}

/// What a client asked for and may have. It owns what it needs, so that it can outlive the visit.
#[derive(Debug)]
#[must_use = "dropping it says in the access log that the client went away"]
pub struct Permitted {
    context: Arc<FrontContext>,
    category: Category,
    from: SocketAddr,
    destination: Destination,
    access: Access,
}

impl<'a> Visit<'a> {
    pub(super) fn new<S, F: FrontEnd<S>>(
        context: &'a Arc<FrontContext>,
        from: SocketAddr,
        door: Slot,
        head_done: oneshot::Sender<()>,
    ) -> Self {
        Self {
            context,
            front: F::NAME,
            category: F::CATEGORY,
            from,
            proof: Proof::None,
            head_done: Some(head_done),
            door: Some(door),
            session: None,
        }
    }

    /// Its slot at the door, until its session is opened.
    pub(in crate::frontend) fn slot(&self) -> Option<&Slot> {
        self.door.as_ref()
    }

    /// Address of the client.
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// What the front end serves with.
    pub fn context(&self) -> &'a FrontContext {
        self.context
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
        let permitted = self.judge(request, trace).await?;
        let (permitted, slot) = permitted.enter().map_err(|denied| *denied)?;
        // Opening may take long; a client that has passed the checks must not keep others from the door meanwhile.
        self.door = None;
        permitted.open_in(slot).await.map_err(|(denied, slot)| {
            self.session = Some(slot);
            denied
        })
    }

    /// As [`Self::open`], for a front end that knows the node. `None`: the client has gone meanwhile.
    pub async fn open_at<C: Connection>(
        &mut self,
        node: Result<NodeName, Denial>,
        target: &Target,
        client: &C,
    ) -> Option<Result<Granted, Denied>> {
        let (target, credentials) = (target.clone(), HeaderMap::new());
        let request = node.map(|node| OpenRequest { node: Some(node), target, credentials });
        tokio::select! {
            biased;
            opened = self.open(request, trace::new()) => Some(opened),
            () = client.gone() => None,
        }
    }

    /// Whether the client may have what it asks for. A denial is counted and logged. Until [`Self::waits`] the client
    /// waits for this end. Cancel safe.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub async fn judge(
        &mut self,
        request: Result<OpenRequest, Denial>,
        trace: String,
    ) -> Result<Permitted, Denied> {
        self.head_done = None;
        if let Some(slot) = &self.door {
            slot.busy();
        }
        let mut access = Access::begin(self.front, self.from.to_string());
        access.trace = trace;
        Span::current().record("trace", access.trace.as_str());
        let (context, category, from) = (Arc::clone(self.context), self.category, self.from);
        match self.check(request, &mut access).await {
            Ok(destination) => Ok(Permitted { context, category, from, destination, access }),
            Err(denial) => Err(Denied::new(denial, access, &context, from)),
        }
    }

    /// The client was answered: from now on this process waits for it.
    pub fn waits(&self) {
        if let Some(slot) = &self.door {
            slot.waits();
        }
    }

    /// All checks that need no far end, in the order that shows a stranger least.
    pub(super) async fn check(
        &self,
        request: Result<OpenRequest, Denial>,
        access: &mut Access,
    ) -> Result<Destination, Denial> {
        let (gate, from) = (self.context.gate.load_full(), self.from.ip());
        // Checked again, as the config may have changed since the connection was accepted.
        gate.admit(from)?;
        if self.context.drain.is_draining() {
            return Err(self.context.stops());
        }
        let OpenRequest { node, target, credentials } = request?;
        access.target = Some(target.clone());
        access.user = match &self.proof {
            Proof::User(user) => Some(user.clone()),
            Proof::Certificate(names) => Some(gate.recognise(names, self.front)?),
            Proof::None => gate.identify(&credentials, from).await?,
        };
        // kube-apiserver's egress selector sends every target here, also those that no edge reaches.
        let trusted = self.category == Category::Egress && matches!(self.proof, Proof::Certificate(_));
        let mut destination = gate.locate(node, target, self.context, trusted)?;
        access.node = Some(destination.node.clone());
        let permit = |node: &_, port| gate.permit(access.user.as_deref(), from, node, port);
        permit(&destination.node, destination.target.port)?;
        destination.narrow(|node, port| permit(node, port).is_ok());
        Ok(destination)
    }
}

impl Permitted {
    /// The node, by its own name; [`NodeName::outside`] if this process dials.
    pub fn node(&self) -> &NodeName {
        &self.destination.node
    }

    /// What is to be dialled there.
    pub fn target(&self) -> &Target {
        &self.destination.target
    }

    /// Who the client has proved to be.
    pub fn user(&self) -> Option<&str> {
        self.access.user.as_deref()
    }

    /// Whether the client may be shown addresses and times.
    pub fn is_trusted(&self) -> bool {
        self.from.ip().is_loopback() || self.access.user.is_some()
    }

    /// Needs no session of its own: the one that serves it has a line in the access log.
    pub fn forget(self) {
        self.access.forget();
    }

    /// Opens it; counts and logs that. Cancel safe: a dropped call leaves nothing behind.
    ///
    /// # Errors
    ///
    /// The denial for the client.
    pub async fn open(self) -> Result<Granted, Denied> {
        let (permitted, slot) = self.enter().map_err(|denied| *denied)?;
        permitted.open_in(slot).await.map_err(|(denied, _slot)| denied)
    }

    /// Takes a slot among the sessions.
    fn enter(self) -> Result<(Self, Slot<ClientKey>), Box<Denied>> {
        let key = ClientKey::of(self.access.user.as_deref(), self.from.ip());
        match self.context.sessions.try_enter(&key).map_err(|why| self.context.full(why)) {
            Ok(slot) => Ok((self, slot)),
            Err(full) => Err(Box::new(Denied::new(full, self.access, &self.context, self.from))),
        }
    }

    /// Opens it in that slot, which comes back with a denial.
    async fn open_in(self, slot: Slot<ClientKey>) -> Result<Granted, (Denied, Slot<ClientKey>)> {
        let Self { context, category, from, destination, mut access } = self;
        let client = access.user.as_ref().map_or_else(|| from.to_string(), |user| format!("{user}@{from}"));
        let begun = Instant::now();
        let opened = destination.open(&context, (category, client), &mut access).await;
        context.metrics.opening.observe(begun.elapsed());
        match opened {
            Ok(session) => {
                access.id = session.id();
                access.status = Some(StatusCode::OK.as_u16());
                if let Some(id) = session.id() {
                    Span::current().record("session", field::display(id));
                }
                let alive = context.metrics.sessions.begin(access.front);
                Ok(Opened { session, early: Bytes::new(), access, alive, slot })
            }
            Err(denial) => Err((Denied::new(denial, access, &context, from), slot)),
        }
    }
}

impl Denied {
    /// Counts and logs it.
    fn new(denial: Denial, mut access: Access, context: &FrontContext, from: SocketAddr) -> Self {
        let metrics = &context.metrics;
        metrics.sessions.refused(access.front, denial.name());
        access.status = Some(denial.status().as_u16());
        let trusted = from.ip().is_loopback() || access.user.is_some();
        let trace = access.trace.clone();
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &metrics.refusals);
        Self { denial, trusted, trace }
    }
}
