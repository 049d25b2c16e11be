//! Keeps the edge linked: dials the cloud, serves the link, and dials again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tracing::{info, warn};

use super::{Current, LINK, lock};
use crate::admin::Readiness;
use crate::backend::Backend;
use crate::config::edge::Client;
use crate::drain::Drain;
use crate::names::{Host, Target};
use crate::net::backoff::Backoff;
use crate::net::dial::dial;
use crate::net::listen::tune_link;
use crate::net::pool::Pool;
use crate::net::proxy::Proxy;
use crate::net::reload::Reload;
use crate::net::resolver::Resolver;
use crate::net::socket::Buffered;
use crate::tunnel::grpc::{self, DialError, Ground};
use crate::tunnel::{Code, Event, Link, LinkEnded, Refusal};

/// What the keeper of the link needs.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) client: Client,
    pub(super) name: ServerName<'static>,
    pub(super) authority: String,
    pub(super) token: Reload<String>,
    pub(super) tls: Reload<ClientConfig>,
    pub(super) proxy: Option<Proxy>,
    pub(super) resolver: Resolver,
    pub(super) pool: Pool,
    pub(super) ground: Ground,
    pub(super) backend: Backend,
    pub(super) sessions: Drain,
    pub(super) readiness: Readiness,
    pub(super) linked: Arc<AtomicBool>,
    pub(super) current: Current,
}

impl Keeper {
    /// Dials the cloud, serves the link, and dials again, until the edge stops.
    pub(super) async fn keep(self) {
        let mut backoff = Backoff::new();
        let mut said = String::new();
        let links = self.ground.drain.clone();
        loop {
            let pause = backoff.pause(rand::random());
            tokio::select! {
                () = links.draining() => return,
                () = sleep(pause) => {}
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
                    self.readiness.set(LINK, Err(text.clone()));
                    if said != text {
                        warn!(error = %text, "cannot link to the cloud; trying again, at most every {:?}", backoff.ceiling());
                        said = text;
                    }
                    if why.downcast_ref().is_some_and(DialError::is_name_taken) {
                        tokio::select! {
                            () = links.draining() => return,
                            () = sleep(NAME_TAKEN) => {}
                        }
                    }
                }
            }
            self.ground.metrics.reconnects.inc();
        }
    }

    async fn connect(&self) -> anyhow::Result<Link> {
        let socket = timeout(CONNECT, self.dial()).await.context("connecting took too long")??;
        tune_link(&socket).context("connection was gone at once")?;
        let tls = TlsConnector::from(self.tls.load());
        let io = timeout(CONNECT, tls.connect(self.name.clone(), Buffered::new(socket, self.pool.clone())));
        let io = io.await.context("the TLS handshake took too long")?;
        let io =
            io.with_context(|| format!("TLS with the cloud as {:?} failed", self.client.dns.to_string()))?;
        let token = self.token.load();
        Ok(grpc::dial(io, &self.authority, &self.client.node, &token, &self.ground).await?)
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
        Ok(found.into_iter().map(|ip| SocketAddr::new(ip, target.port)).collect())
    }

    /// Serves a link until it ends. Whether it carried a session.
    async fn run(&self, mut link: Link) -> bool {
        info!(pod = ?link.outbox.instance, "linked");
        self.readiness.set(LINK, Ok(()));
        self.linked.store(true, Relaxed);
        self.ground.metrics.links.inc();
        *lock(&self.current) = Some(link.outbox.clone());
        let mut carried = false;
        let why = loop {
            match link.next().await {
                Ok(Event::Offer(offer)) if self.sessions.is_draining() => {
                    offer.refuse(Refusal::new(Code::Busy, "the edge is stopping"));
                }
                Ok(Event::Offer(offer)) => {
                    carried = true;
                    self.backend.take(offer);
                }
                Ok(_) => {}
                Err(why) => break why,
            }
        };
        // A session that only went on here was carried as well.
        carried |= link.outbox.sessions() > 0;
        self.ended(&link, &why);
        carried
    }

    fn ended(&self, link: &Link, why: &LinkEnded) {
        *lock(&self.current) = None;
        self.linked.store(false, Relaxed);
        self.readiness.set(LINK, Err(format!("{why}; dialling again")));
        self.ground.metrics.links.dec();
        self.ground.metrics.links_ended.count(why.name());
        link.end(why);
        info!(%why, "link has ended");
    }
}

/// For each step of connecting to the cloud.
const CONNECT: Duration = Duration::from_secs(10);
/// How long to wait when another machine of our name is alive.
const NAME_TAKEN: Duration = Duration::from_secs(30);
