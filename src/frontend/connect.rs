//! The CONNECT front end: `CONNECT <node>:<port>`, then the session's bytes.

mod head;
mod request;

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Response, StatusCode};
use http_body_util::Full;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tracing::{Span, debug, field, info_span};

use super::auth::Gate;
use super::{Client, Denial};
use crate::carry::{Near, Opened, carry};
use crate::drain::Drain;
use crate::net::door::{Door, Limits, Place};
use crate::net::entrance::{Away, Entrance, Guest, Host};
use crate::net::files;
use crate::net::listen::Listener;
use crate::net::pool::Pool;
use crate::net::socket::Socket;
use crate::net::splice::linger;
use crate::policy::Networks;
use crate::protocol::{Category, Session};
use crate::route::{Request, Route};
use crate::telemetry::{Access, Metrics};

use head::Head;
use request::trace;

/// What a CONNECT front end needs besides its listener.
#[derive(Debug)]
pub struct Settings {
    /// Who may come in, and what for; swap it when the config changes, for whoever comes next.
    pub gate: Arc<ArcSwap<Gate>>,
    /// Sessions at once, of all front ends of this process together.
    pub sessions: Door<Client>,
    /// Buffers to read clients with.
    pub pool: Pool,
}

/// Serves clients until draining begins; those that are connected by then are the drain's to wait for.
pub async fn serve(
    (listener, proxies): (Listener, Networks),
    settings: Settings,
    route: Route,
    metrics: Metrics,
    drain: Drain,
) {
    let door = Door::new(Limits::places(files::at_most(HEADS, 8)));
    let entrance = Entrance {
        listener,
        door,
        proxies,
        refused: metrics.connections_refused.clone(),
        refusals: metrics.refusals.clone(),
    };
    entrance.run(Arc::new(Front { settings, route, metrics, drain: drain.clone() }), drain).await;
}

#[derive(Debug)]
struct Front {
    settings: Settings,
    route: Route,
    metrics: Metrics,
    drain: Drain,
}

/// What a client holds of what all share until it has gone: a place at the door, or that of the session it did not get.
struct Held {
    door: Option<Place>,
    session: Option<Place<Client>>,
}

impl Host for Front {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("connect", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn admits(&self, from: SocketAddr) -> bool {
        self.settings.gate.load().admit(from.ip()).is_ok()
    }

    fn farewell(&self, from: SocketAddr, why: Away) -> Bytes {
        let denial = match why {
            Away::Forbidden => match self.settings.gate.load().admit(from.ip()) {
                Err(denial) => denial,
                Ok(()) => return Bytes::new(),
            },
            Away::Full => Denial::Busy("too many connections at once that have not asked for anything"),
            Away::Files => {
                Denial::Busy("this pod has no more files to open: raise its limit (ulimit -Hn, LimitNOFILE)")
            }
        };
        self.metrics.sessions.refused(FRONT, denial.name());
        let mut access = Access::begin(FRONT, from.to_string());
        access.trace = trace(&HeaderMap::new());
        access.status = Some(denial.status().as_u16());
        let text = denial.text(&access.trace);
        access.refuse(denial.name(), &denial.to_string(), from.ip(), &self.metrics.refusals);
        text.into()
    }

    async fn serve(self: Arc<Self>, guest: Guest) {
        let Guest { socket, from, place } = guest;
        let mut held = Held { door: Some(place), session: None };
        let head = Box::pin(head::converse(socket, |parts| self.open(parts, from, &mut held))).await;
        match head {
            Head::Opened { session, socket, early } => {
                let client = Socket::with_early(socket, self.settings.pool.clone(), early);
                carry(session, Near::Client, client, &self.metrics).await;
            }
            Head::Denied(socket) => self.close(socket).await,
            Head::Failed { cause, socket } => {
                debug!(cause, "no session");
                self.metrics.connections_refused.count(cause);
                if let Some(socket) = socket {
                    self.close(socket).await;
                }
            }
        }
    }
}

impl Front {
    async fn open(
        &self,
        head: Parts,
        peer: SocketAddr,
        held: &mut Held,
    ) -> Result<Opened<Place<Client>>, Response<Full<Bytes>>> {
        let mut access = Access::begin(FRONT, peer.to_string());
        access.trace = trace(&head.headers);
        Span::current().record("trace", access.trace.as_str());
        match self.ask(&head, peer, held, &mut access).await {
            Ok((session, place)) => {
                access.id = Some(session.id());
                access.status = Some(StatusCode::OK.as_u16());
                Span::current().record("session", field::display(session.id()));
                Ok(Opened { session, access, alive: self.metrics.sessions.begin(FRONT), place })
            }
            Err(denial) => {
                self.metrics.sessions.refused(FRONT, denial.name());
                access.status = Some(denial.status().as_u16());
                let trusted = peer.ip().is_loopback() || access.user.is_some();
                let answer = denial.answer(trusted, &access.trace);
                access.refuse(denial.name(), &denial.to_string(), peer.ip(), &self.metrics.refusals);
                Err(answer)
            }
        }
    }

    async fn ask(
        &self,
        head: &Parts,
        peer: SocketAddr,
        held: &mut Held,
        access: &mut Access,
    ) -> Result<(Session, Place<Client>), Denial> {
        if let Some(place) = &held.door {
            place.busy();
        }
        let gate = self.settings.gate.load_full();
        let (node, target) = gate.check(head, peer.ip(), &self.drain, access).await?;
        let place = self.settings.sessions.try_enter(&Client::of(access.user.as_deref(), peer.ip()))?;
        // Opening may take long, and whoever may open a session does not keep others from the door.
        held.door = None;
        let client = match &access.user {
            Some(user) => format!("{user}@{peer}"),
            None => peer.to_string(),
        };
        let begun = Instant::now();
        let opened = self.route.open(Request { node, target, category: Category::Ssh, client }).await;
        self.metrics.opening.observe(begun.elapsed());
        match opened {
            Ok(session) => Ok((session, place)),
            Err(error) => {
                held.session = Some(place);
                Err(error.into())
            }
        }
    }

    /// Closes a connection that has got its answer, or none, so that the answer arrives.
    async fn close(&self, socket: TcpStream) {
        linger(&mut Socket::new(socket, self.settings.pool.clone())).await;
    }
}

/// This front end's name in metrics and logs: SuperEdge's module.
const FRONT: &str = "ssh";

/// Connections that have not yet asked for anything they may have, at most.
const HEADS: usize = 4096;

#[cfg(test)]
mod tests;
