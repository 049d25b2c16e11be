//! Where a client's target is: at a node, or dialled by this process itself; and how it is opened there.

use crate::carry::FarEnd;
use crate::dialer::{DirectDialer, NotDialled};
use crate::frontend::auth::Gate;
use crate::frontend::{Denial, FrontContext};
use crate::names::{Host, NodeName, Target};
use crate::policy::{is_number, is_off_limits};
use crate::protocol::{Category, Code, Refusal};
use crate::registry::{Location, NotFound};
use crate::route::{NotOpened, Request, RouteError};
use crate::telemetry::Access;

/// Where a client's target is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Destination {
    /// The node; [`NodeName::outside`] if this process dials.
    pub(super) node: NodeName,
    /// The target, as it is known there.
    pub(super) target: Target,
    /// What this process dials if no edge runs at the node.
    direct: Option<Target>,
    /// Whether the client may have it dial all that is not off limits.
    all: bool,
}

impl Gate {
    /// The node that a client means by a name: its own one, or the one that it has in the zone.
    pub(in crate::frontend) fn own_name(&self, name: NodeName) -> NodeName {
        match &self.zone {
            Some(zone) => zone.node(name),
            None => name,
        }
    }

    /// Where the target is; only this function decides it. `node` is the node if the front end knows it; `all`: whether
    /// the client may have every target dialled that no edge reaches.
    pub(super) fn locate(
        &self,
        node: Option<NodeName>,
        target: Target,
        context: &FrontContext,
        all: bool,
    ) -> Result<Destination, Denial> {
        if let Some(own_node) = &context.own_node {
            return own_node.locate(target);
        }
        if let Some(node) = node {
            return Ok(Destination { all, ..Destination::at(self.own_name(node), target) });
        }
        let asked = match &target.host {
            Host::Ip(_) => target.clone(),
            // Whichever name the client used, the edge knows its own.
            Host::Name(name) => {
                let host = self.own_name(name.parse()?).as_str().parse()?;
                Target { host, port: target.port }
            }
        };
        match context.addresses.locate(&asked, rand::random())? {
            Location::Node { node, target, direct } => Ok(Destination { node, target, direct, all }),
            Location::Nobody(direct) => {
                if matches!(direct.host, Host::Ip(ip) if is_off_limits(ip)) {
                    return Err(Denial::OffLimits(target));
                }
                if context.direct_dialer(direct.port, all).is_none() {
                    return Err(Denial::NoNode(target));
                }
                let node = NodeName::outside();
                Ok(Destination { node, target: direct.clone(), direct: Some(direct), all })
            }
        }
    }
}

impl Destination {
    /// There, and nowhere else.
    pub(super) fn at(node: NodeName, target: Target) -> Self {
        Self { node, target, direct: None, all: false }
    }

    /// Forgets what this process would dial, unless `may` returns that the client may have that port dialled.
    pub(super) fn narrow(&mut self, may: impl FnOnce(&NodeName, u16) -> bool) {
        self.direct = self.direct.take().filter(|direct| may(&NodeName::outside(), direct.port));
    }

    /// Opens it. `as_whom` is the front end, and the client in words. What is known of the session is noted in
    /// `access`.
    pub(super) async fn open(
        self,
        context: &FrontContext,
        as_whom: (Category, String),
        access: &mut Access,
    ) -> Result<FarEnd, Denial> {
        let Self { node, target, direct, all } = self;
        if let Some(own_node) = &context.own_node {
            return own_node.open((node, target), context, as_whom, access).await;
        }
        let direct = direct.and_then(|direct| Some((context.direct_dialer(direct.port, all)?, direct)));
        if node == NodeName::outside() {
            let Some((dialer, direct)) = direct else { return Err(Denial::NoNode(target)) };
            let connected = connect(dialer, &direct, all, context).await;
            return connected.map_err(|why| not_dialled(why, target));
        }
        let (category, client) = as_whom;
        let request = Request { node: node.clone(), target: target.clone(), category, client };
        let why = match context.route.open(request).await {
            Ok(session) => return Ok(session.into()),
            Err(NotOpened { session, why }) => {
                access.id = session;
                why
            }
        };
        match (why, direct) {
            (RouteError::Refused { refusal, .. }, _) if refusal.code == Code::NotAllowed => {
                let refusal = with_remedy(refusal, &node, &target, context);
                Err(RouteError::Refused { node, refusal }.into())
            }
            // The node may have no edge at all.
            (RouteError::Offline { missing, .. }, Some((dialer, direct))) if missing.is_of_a_stranger() => {
                match connect(dialer, &direct, all, context).await {
                    Ok(connection) => {
                        access.node = Some(NodeName::outside());
                        Ok(connection)
                    }
                    Err(why) if why.off_limits || is_literal(&direct) => Err(not_dialled(why, target)),
                    // Neither way is open, and the node is what was asked for.
                    Err(NotDialled { refusal, .. }) if refusal.code == Code::NotAllowed => {
                        Err(RouteError::Offline { node, missing }.into())
                    }
                    Err(NotDialled { refusal, .. }) if refusal.code == Code::TargetUnreachable => {
                        let missing = NotFound { dns: Some(refusal.reason), ..missing };
                        Err(RouteError::Offline { node, missing }.into())
                    }
                    Err(why) => Err(not_dialled(why, target)),
                }
            }
            (why, _) => Err(why.into()),
        }
    }
}

/// Is it an address, however it is spelt?
fn is_literal(target: &Target) -> bool {
    match &target.host {
        Host::Ip(_) => true,
        Host::Name(name) => is_number(name),
    }
}

async fn connect(
    dialer: &DirectDialer,
    target: &Target,
    all: bool,
    context: &FrontContext,
) -> Result<FarEnd, NotDialled> {
    let connection = dialer.dial(target, all).await?;
    Ok(FarEnd::direct(connection, context.pool.clone()))
}

fn not_dialled(why: NotDialled, target: Target) -> Denial {
    if why.off_limits { Denial::OffLimits(target) } else { Denial::Direct(why.refusal) }
}

/// An edge does not take its pods' addresses for its own: a client that may know the reason gets the key to set there.
fn with_remedy(refusal: Refusal, node: &NodeName, target: &Target, context: &FrontContext) -> Refusal {
    let Host::Ip(ip) = target.host else { return refusal };
    let net = context.addresses.pod_network(node, ip);
    let entry = if ip.is_ipv4() { format!("{net}:*") } else { format!("[{net}]:*") };
    let why = format!(
        "{}; add \"{entry}\" to [mode.edge.allow] targets there and keep what stands in the list: a list stands alone",
        refusal.reason
    );
    Refusal::new(refusal.code, why)
}
