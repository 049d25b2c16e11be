//! The CONNECT front end: `CONNECT <node>:<port>`, then the session's bytes.

mod head;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method, Response};
use http_body_util::Full;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tracing::{Span, debug, field, info_span};

use super::auth::Gate;
use super::{Denial, TRACE};
use crate::drain::Drain;
use crate::names::{Host, NameError, NodeName, Target};
use crate::net::counted::{Counted, Tally};
use crate::net::listen::{Listener, breaks_off};
use crate::net::pool::Pool;
use crate::net::socket::Socket;
use crate::net::splice::{Ended, How, Side, deliver, linger, splice};
use crate::policy::plain;
use crate::route::{Request, Route};
use crate::telemetry::metrics::Alive;
use crate::telemetry::{Access, Metrics};
use crate::tunnel::{Category, Code, Refusal, Session};

use head::Head;

/// What a CONNECT front end needs besides its listener.
#[derive(Debug)]
pub struct Settings {
    /// Who may come in, and what for; swap it when the config changes, for whoever comes next.
    pub gate: Arc<ArcSwap<Gate>>,
    /// Sessions at once, of all front ends of this process together.
    pub sessions: Arc<Semaphore>,
    /// Buffers to read clients with.
    pub pool: Pool,
}

/// Serves clients until draining begins; those that are connected by then are the drain's to wait for.
pub async fn serve(listener: Listener, settings: Settings, route: Route, metrics: Metrics, drain: Drain) {
    let front = Arc::new(Front { settings, route, metrics, drain: drain.clone() });
    let heads = Arc::new(Semaphore::new(HEADS));
    loop {
        let (socket, peer) = tokio::select! {
            biased;
            () = drain.draining() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok(place) = Arc::clone(&heads).try_acquire_owned() else {
            front.metrics.connections_refused.count("too_many");
            continue;
        };
        let span = info_span!("connect", client = %peer, session = field::Empty);
        drain.spawn(span, Arc::clone(&front).client(socket, peer, place));
    }
}

#[derive(Debug)]
struct Front {
    settings: Settings,
    route: Route,
    metrics: Metrics,
    drain: Drain,
}

/// A session that was opened, with all that counts it.
struct Opened {
    session: Session,
    access: Access,
    alive: Alive,
    place: OwnedSemaphorePermit,
}

impl Front {
    async fn client(self: Arc<Self>, socket: TcpStream, peer: SocketAddr, place: OwnedSemaphorePermit) {
        let peer = SocketAddr::new(plain(peer.ip()), peer.port());
        let head = Box::pin(head::converse(socket, |parts| self.open(parts, peer))).await;
        match head {
            Head::Opened { session, socket, early } => {
                drop(place);
                let client = Socket::with_early(socket, self.settings.pool.clone(), early);
                carry(session, client, &self.metrics).await;
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

    async fn open(&self, head: Parts, peer: SocketAddr) -> Result<Opened, Response<Full<Bytes>>> {
        let mut access = Access::begin(FRONT, peer.to_string());
        access.trace = trace(&head.headers);
        match self.ask(&head, peer, &mut access).await {
            Ok((session, place)) => {
                access.id = Some(session.id());
                Span::current().record("session", field::display(session.id()));
                Ok(Opened { session, access, alive: self.metrics.sessions.begin(FRONT), place })
            }
            Err(denial) => {
                self.metrics.sessions.refused(FRONT, denial.name());
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
        access: &mut Access,
    ) -> Result<(Session, OwnedSemaphorePermit), Denial> {
        let gate = self.settings.gate.load_full();
        let (node, target) = gate.check(head, peer.ip(), &self.drain, access).await?;
        let sessions = Arc::clone(&self.settings.sessions);
        let place = sessions.try_acquire_owned().map_err(|_| Denial::Busy("this pod is full"))?;
        let client = match &access.user {
            Some(user) => format!("{user}@{peer}"),
            None => peer.to_string(),
        };
        let begun = Instant::now();
        let opened = self.route.open(Request { node, target, category: Category::Ssh, client }).await;
        self.metrics.opening.observe(begun.elapsed());
        Ok((opened?, place))
    }

    /// Closes a connection that has got its answer, or none, so that the answer arrives.
    async fn close(&self, socket: TcpStream) {
        linger(&mut Socket::new(socket, self.settings.pool.clone())).await;
    }
}

impl Gate {
    /// All checks that need no far end, in the order in which they tell a stranger least.
    async fn check(
        &self,
        head: &Parts,
        from: IpAddr,
        drain: &Drain,
        access: &mut Access,
    ) -> Result<(NodeName, Target), Denial> {
        self.admit(from)?;
        if drain.is_draining() {
            return Err(Denial::Busy("this pod is stopping"));
        }
        if head.method != Method::CONNECT {
            return Err(Denial::Method);
        }
        let target = target(head)?;
        access.target = Some(target.clone());
        access.user = self.identify(&head.headers).await?;
        let Host::Name(name) = &target.host else { return Err(Denial::NoNode(target)) };
        let named: NodeName = name.parse()?;
        let node = self.zone.as_ref().map_or_else(|| named.clone(), |zone| zone.node(named.clone()));
        // Whichever name the client used, the edge knows its own.
        let host = if node == named { target.host.clone() } else { node.as_str().parse()? };
        let target = Target { host, port: target.port };
        access.node = Some(node.clone());
        self.permit(access.user.as_deref(), from, &node, target.port)?;
        Ok((node, target))
    }
}

/// The target of the request line; never the Host header, which names the proxy, or nothing true, or is not there.
fn target(head: &Parts) -> Result<Target, NameError> {
    let asked = head.uri.to_string();
    let plain = head.uri.scheme().is_none() && head.uri.path_and_query().is_none();
    match head.uri.authority() {
        Some(authority) if plain => authority.as_str().parse(),
        // A whole URL is no target; its text holds no port where one is looked for, or a path behind it.
        _ => Err(NameError::Port(asked.chars().take(EXCERPT).collect())),
    }
}

/// Carries a session's bytes until both ends are done, and says how it went.
async fn carry(opened: Opened, mut client: Socket<TcpStream>, metrics: &Metrics) {
    let Opened { mut session, mut access, alive, place } = opened;
    let mut counted = Counted {
        stream: &mut session,
        taken: Tally { one: &mut access.down, all: &metrics.bytes_down },
        given: Tally { one: &mut access.up, all: &metrics.bytes_up },
    };
    breaks_off(client.io(), true);
    let ended = splice(&mut client, &mut counted).await.ended;
    let account = session.account();
    access.resumed = account.resumed;
    let (result, why) = verdict(ended, account.ended.as_ref());
    access.end(result, &why);
    alive.end(result);
    drop(place);
    leave(session, ended, &why);
    if ended.by == Side::A || ended.how == How::Finished {
        breaks_off(client.io(), false);
        linger(&mut client).await;
    } else {
        deliver(&mut client).await;
    }
}

/// Lets go of a session: one that the client broke off is reset with that reason, any other ends by itself.
fn leave(session: Session, ended: Ended, why: &str) {
    if ended.by == Side::A && ended.how != How::Finished {
        session.break_off(Refusal::new(Code::GivenUp, why));
    }
}

/// Who ended a session and why, as a word and a sentence. The client is side A.
fn verdict(ended: Ended, reset: Option<&Refusal>) -> (&'static str, String) {
    match (ended.by, ended.how) {
        (Side::A, How::Finished) => ("over", "the client finished first".into()),
        (Side::B, How::Finished) => ("over", "the target finished first".into()),
        (Side::A, How::ReadFailed(kind) | How::WriteFailed(kind)) => {
            ("client_failed", format!("the client's connection failed: {kind}"))
        }
        (Side::B, How::ReadFailed(kind) | How::WriteFailed(kind)) => match reset {
            Some(refusal) => (refusal.code.name(), refusal.reason.clone()),
            None => ("session_failed", format!("the session failed: {kind}")),
        },
    }
}

/// The client's own trace if it is fit to be repeated, else a new one. It stands in logs and answers, nowhere else.
fn trace(head: &HeaderMap) -> String {
    let given = head.get(TRACE).and_then(|t| t.to_str().ok()).filter(|t| t.len() <= TRACE_BYTES);
    match given {
        Some(given) if !given.is_empty() && given.bytes().all(|b| b.is_ascii_graphic()) => given.to_owned(),
        _ => format!("{:08x}", rand::random::<u32>()),
    }
}

/// This front end's name in metrics and logs: SuperEdge's module.
const FRONT: &str = "ssh";

/// Connections that have not yet got their answer, at most: a flood of slow heads or openings must not use up memory.
const HEADS: usize = 4096;

/// Longest trace that is taken from a client, in bytes: a UUID and some room.
const TRACE_BYTES: usize = 64;

/// Characters of a bad target that its error repeats.
const EXCERPT: usize = 64;

#[cfg(test)]
mod tests;
