//! Keeps the edge linked: dials the cloud, serves the link, and dials again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context as _;
use rand::seq::SliceRandom as _;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tracing::{field, info, info_span, warn};

use super::{LINK, NAME};
use crate::admin::Readiness;
use crate::backend::Backend;
use crate::config::Secret;
use crate::config::edge::Client;
use crate::drain::Drain;
use crate::names::{Host, Target};
use crate::net::backoff::{Backoff, MAX_PAUSE};
use crate::net::dial::dial;
use crate::net::listen::tune_link;
use crate::net::pool::Pool;
use crate::net::proxy::Proxy;
use crate::net::reload::Reload;
use crate::net::resolver::Resolver;
use crate::net::socket::Buffered;
use crate::protocol::grpc::{self, DialError, LinkContext};
use crate::protocol::{Code, Event, Link, LinkEnded, Refusal};
use crate::registry::Uplinks;
use crate::route::Route;

/// What the keeper of the link needs.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) client: Client,
    pub(super) name: ServerName<'static>,
    pub(super) authority: String,
    /// What may prove our name, tried in turn.
    pub(super) tokens: Reload<Vec<Secret>>,
    /// Which of them is tried next: the one that was taken last.
    pub(super) turn: AtomicUsize,
    pub(super) tls: Reload<ClientConfig>,
    pub(super) proxy: Option<Proxy>,
    pub(super) resolver: Resolver,
    pub(super) pool: Pool,
    pub(super) ground: LinkContext,
    pub(super) backend: Backend,
    pub(super) sessions: Drain,
    pub(super) readiness: Readiness,
    pub(super) uplinks: Arc<Uplinks>,
    pub(super) route: Route,
    /// Notified when the link to a pod that was stopping has ended.
    pub(super) freed: Notify,
}

impl Keeper {
    /// Dials the cloud, serves the link, and dials again, until the edge stops.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut backoff = Backoff::new();
        let mut said = String::new();
        let links = self.ground.drain.clone();
        loop {
            let pause = backoff.pause(rand::random());
            tokio::select! {
                () = links.draining() => return,
                () = sleep(pause) => {}
                () = self.freed.notified() => {
                    // The pod is gone for good, so what takes its place is there, or about to be.
                    backoff = Backoff::new();
                    continue;
                }
            }
            match self.connect().await {
                Ok(link) => {
                    said.clear();
                    let begun = Instant::now();
                    let carried = self.run(link).await;
                    backoff.ended(begun.elapsed(), carried);
                }
                Err(why) => {
                    let text = format!("{why:#}");
                    if !self.uplinks.is_linked() {
                        self.readiness.set(LINK, Err(text.clone()));
                    }
                    if said != text {
                        warn!(error = %text, "cannot link to the cloud; trying again, with pauses that grow to {MAX_PAUSE:?}");
                        said = text;
                    }
                    if why.downcast_ref().is_some_and(DialError::is_name_taken) {
                        self.leave_name().await;
                    }
                }
            }
            self.ground.metrics.reconnects.inc();
        }
    }

    async fn connect(&self) -> anyhow::Result<Link> {
        let socket = timeout(CONNECT, self.dial()).await.context("connecting took too long")??;
        let congestion = self.ground.congestion.as_deref();
        tune_link(&socket, congestion).context("connection was gone at once")?;
        let tls = TlsConnector::from(self.tls.load());
        let io = timeout(CONNECT, tls.connect(self.name.clone(), Buffered::new(socket, self.pool.clone())));
        let io = io.await.context("the TLS handshake took too long")?;
        let io =
            io.with_context(|| format!("TLS with the cloud as {:?} failed", self.client.dns.to_string()))?;
        let (tokens, turn) = (self.tokens.load(), self.turn.load(Relaxed));
        let token = tokens.get(turn % tokens.len().max(1)).map_or("", Secret::reveal);
        let dialled = grpc::dial(io, &self.authority, &self.client.node, token, &self.ground).await;
        if dialled.as_ref().is_err_and(DialError::is_token_refused) {
            self.turn.store(turn.wrapping_add(1), Relaxed);
        }
        Ok(dialled?)
    }

    async fn dial(&self) -> anyhow::Result<TcpStream> {
        let server = &self.client.server;
        match self.proxy.as_ref().filter(|proxy| proxy.applies_to(server)) {
            Some(proxy) => {
                let at = self.resolve(proxy.at()).await?;
                Ok(proxy.connect(&at, server, CONNECT).await?)
            }
            None => Ok(dial(&self.resolve(server).await?, CONNECT).await?),
        }
    }

    async fn resolve(&self, target: &Target) -> anyhow::Result<Vec<SocketAddr>> {
        let found = match &target.host {
            Host::Ip(ip) => vec![*ip],
            Host::Name(name) => self.resolver.lookup(name).await?,
        };
        let mut addresses: Vec<_> = found.into_iter().map(|ip| SocketAddr::new(ip, target.port)).collect();
        // A name may stand for all pods: each edge takes any of them, and another one if that is stopping.
        addresses.shuffle(&mut rand::rng());
        Ok(addresses)
    }

    /// Serves a link until it ends, or until its pod wants it to be replaced. Whether it carried a session.
    async fn run(self: &Arc<Self>, mut link: Link) -> bool {
        info!(link = %link.sender.id, pod = link.sender.instance.map(field::debug), dialect = %link.sender.dialect, "linked");
        self.readiness.set(LINK, Ok(()));
        self.ground.metrics.links.inc();
        self.uplinks.add(link.sender.clone());
        let mut carried = false;
        let why = loop {
            match link.next().await {
                Ok(Event::Drain) => {
                    info!("the pod is stopping: linking to another one");
                    let keeper = self.clone();
                    let span = info_span!("old link", pod = link.sender.instance.map(field::debug));
                    carried |= link.sender.sessions() > 0;
                    self.ground.drain.spawn(span, async move { keeper.hand_over(link).await });
                    return carried;
                }
                Ok(event) => carried |= self.take(event),
                Err(why) => break why,
            }
        };
        // A session that only went on here was carried as well.
        carried |= link.sender.sessions() > 0;
        self.ended(&link, &why);
        if let LinkEnded::NameTaken(why) = why {
            warn!("{why}");
            self.leave_name().await;
        }
        carried
    }

    /// Another process of our name is alive: dialling soon again is of no use.
    async fn leave_name(&self) {
        tokio::select! {
            () = self.ground.drain.draining() => {}
            () = sleep(NAME_TAKEN) => {}
        }
    }

    /// Serves a link whose pod is stopping: what we opened to nodes moves to the next link as soon as there is one;
    /// the rest may stay until it is over or the pod goes.
    async fn hand_over(&self, mut link: Link) {
        let sender = link.sender.clone();
        let mut moved = false;
        let mut look = tokio::time::interval(POLL_INTERVAL);
        let why = loop {
            tokio::select! {
                event = link.next() => match event {
                    Ok(event) => {
                        self.take(event);
                    }
                    Err(why) => break why,
                },
                () = self.uplinks.newer(sender.id), if !moved => {
                    moved = true;
                    // What that pod dialled itself ends with it, and no other path leads there as well as this one.
                    let moves = |_: &_, end: Option<_>| end.is_none() || end != sender.instance;
                    for parked in self.ground.table.leave(&sender, moves) {
                        self.route.mend(parked, &self.ground.drain);
                    }
                    sender.drain();
                }
                _ = look.tick(), if moved => {
                    if sender.sessions() == 0 {
                        sender.close();
                    }
                }
            }
        };
        self.ended(&link, &why);
        self.freed.notify_one();
    }

    /// Does what a link asks for. Whether that is a session.
    fn take(&self, event: Event) -> bool {
        match event {
            Event::Offer(offer) if self.sessions.is_draining() => {
                offer.refuse(Refusal::new(Code::Busy, "the edge is stopping"));
            }
            Event::Offer(offer) => {
                self.backend.take(offer);
                return true;
            }
            Event::Parked(parked) => self.route.mend(parked, &self.ground.drain),
            Event::Conflict(_, said) => {
                self.readiness.note_until(NAME, said.reason, Instant::now() + CONFLICT);
            }
            // A cloud sends an edge none of these, and a second Drain changes nothing.
            Event::RelayRequest(_) | Event::Find(..) | Event::Found(..) | Event::Drain => {}
        }
        false
    }

    fn ended(&self, link: &Link, why: &LinkEnded) {
        self.uplinks.remove(&link.sender);
        if !self.uplinks.is_linked() {
            self.readiness.set(LINK, Err(format!("{why}; dialling again")));
        }
        self.ground.metrics.links.dec();
        self.ground.metrics.links_ended.count(why.name());
        for parked in link.end(why) {
            self.route.mend(parked, &self.ground.drain);
        }
        info!(link = %link.sender.id, %why, "link has ended");
    }
}

/// How often a link that is not wanted any more is looked at: it is closed when no session runs on it.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// For each step of connecting to the cloud.
const CONNECT: Duration = Duration::from_secs(10);
/// How long to wait when another machine of our name is alive.
const NAME_TAKEN: Duration = Duration::from_secs(30);
/// How long a conflict over our name is shown: the other machine comes again within [`NAME_TAKEN`], if it is still
/// there.
const CONFLICT: Duration = Duration::from_secs(90);
