//! Builds and runs an edge.

mod keeper;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, info_span, warn};

use keeper::Keeper;

use crate::admin::{Admin, Readiness, Side};
use crate::backend::{Backend, LocalAddresses, TargetDialer};
use crate::config::Secret;
use crate::config::edge::{Client, Edge as Settings, MEMORY, Token};
use crate::drain::{Drain, Drained};
use crate::names::{Instance, Target};
use crate::net::listen::Listener;
use crate::net::pool::Pool;
use crate::net::proxy::Proxy;
use crate::net::reload::Reload;
use crate::net::resolver::Resolver;
use crate::net::tls::{self, Trust};
use crate::protocol::grpc::LinkContext;
use crate::protocol::{Code, Limits, Refusal, SessionTable, Windows};
use crate::registry::uplinks::Uplinks;
use crate::route::Route;
use crate::telemetry::log::Level;
use crate::telemetry::{Metrics, third_of_memory};

/// A running edge, and where its admin port listens.
#[derive(Debug)]
pub struct Edge {
    /// Health, log level, metrics; none if the implicit port could not be had.
    pub log: Option<SocketAddr>,
    /// Metrics alone.
    pub metrics_at: Option<SocketAddr>,
    /// The numbers.
    pub metrics: Metrics,
    /// The sessions.
    pub table: Arc<SessionTable>,
    /// The way to other nodes and to the cloud.
    pub route: Route,
    readiness: Readiness,
    uplinks: Arc<Uplinks>,
    sessions: Drain,
    links: Drain,
    admin: Drain,
    deadline: Duration,
}

impl Edge {
    /// Reads the files that the settings name, binds the admin port, then keeps a link to the cloud.
    ///
    /// # Errors
    ///
    /// A file that will not do, or a port that was asked for and cannot be had. Nothing runs then.
    pub fn start(settings: Settings, level: Option<Level>) -> anyhow::Result<Self> {
        let Settings { client, session, targets, own } = settings;
        let (sessions, links, admin_drain) = (Drain::new(), Drain::new(), Drain::new());
        let metrics = Metrics::edge();
        let key = "mode.edge.stream.client.log_listen";
        let log = Listener::bind_optional(client.log_listen.at, client.log_listen.implicit).context(key)?;
        let metrics_at = client.metrics_listen.map(Listener::bind).transpose();
        let metrics_at = metrics_at.context("mode.edge.stream.client.metrics_listen")?;
        let limits = Limits {
            windows: WINDOWS,
            memory: session.memory.unwrap_or_else(|| third_of_memory(MEMORY)),
            sessions: MOST_SESSIONS,
            grace: session.grace,
        };
        let table = SessionTable::new(Instance::random(), limits, metrics.clone());
        let readiness = Readiness::waiting_for(&[LINK]);
        let uplinks = Uplinks::new(client.node.clone());
        let healthy = uplinks.clone();
        let admin = Admin {
            side: Side::Edge(Arc::new(move || healthy.is_linked())),
            metrics: metrics.clone(),
            readiness: readiness.clone(),
            level,
            level_from_anywhere: !client.log_listen.is_local(),
        };
        let pool = Pool::new();
        let resolver = Resolver::system()?;
        let place = TargetDialer {
            node: Some(client.node.clone()),
            own: LocalAddresses::of_interfaces(own),
            targets: Arc::new(ArcSwap::from_pointee(targets)),
            // Not the one for metrics: it is read-only, and so that others reach it.
            listening: log.iter().map(Listener::at).collect(),
            resolver: resolver.clone(),
        };
        let backend = Backend::new(place, pool.clone(), metrics.clone(), sessions.clone());
        let ground = LinkContext { table: table.clone(), metrics: metrics.clone(), drain: links.clone() };
        let route = Route::from_edge(uplinks.clone(), table.clone(), OPEN_TIMEOUT, session.grace);
        let keeper = Keeper {
            name: tls::server_name(&client.dns.to_string()).context("mode.edge.stream.client.dns")?,
            authority: authority(&client),
            tokens: tokens(&client.token)?,
            turn: AtomicUsize::new(0),
            tls: tls::Client {
                trust: Trust::Ca(client.ca.clone()),
                identity: None,
                alpn: vec![b"h2".to_vec()],
            }
            .load()
            .context("mode.edge.stream.client.cert")?,
            proxy: proxy(&client)?,
            resolver,
            pool: pool.clone(),
            ground,
            backend,
            sessions: sessions.clone(),
            readiness: readiness.clone(),
            uplinks: uplinks.clone(),
            route: route.clone(),
            freed: Notify::new(),
            client,
        };
        if let Some(log) = &log {
            info!(log = %log.at(), "edge is up");
        }
        let edge = Self {
            log: log.as_ref().map(Listener::at),
            metrics_at: metrics_at.as_ref().map(Listener::at),
            metrics,
            table: table.clone(),
            readiness,
            uplinks,
            route,
            sessions,
            links: links.clone(),
            admin: admin_drain.clone(),
            deadline: session.drain,
        };
        admin.spawn(log, metrics_at, &admin_drain);
        links.spawn(info_span!("token"), keeper.tokens.clone().watch(links.clone()));
        links.spawn(info_span!("tls"), keeper.tls.clone().watch(links.clone()));
        links.spawn(info_span!("dns"), keeper.resolver.clone().watch(links.clone()));
        links.spawn(info_span!("refusals"), edge.metrics.refusals.clone().sum_up(links.clone().begun()));
        links.spawn(info_span!("upkeep"), table.upkeep(pool, links.clone()));
        let span = info_span!("link", node = %keeper.client.node, cloud = %keeper.client.server);
        links.spawn(span, Arc::new(keeper).keep());
        Ok(edge)
    }

    /// Stops: not ready, no new sessions, those that run until the deadline or until `at_once` completes.
    pub async fn stop(self, at_once: impl Future<Output = ()>) -> Drained {
        self.readiness.set(RUNNING, Err("stopping".into()));
        info!(sessions = self.table.len(), deadline = ?self.deadline, "stopping: no new sessions, waiting for those that run");
        let (at_once, until) = (at_once.shared(), Instant::now() + self.deadline);
        let why = Refusal::new(Code::Busy, "the edge is stopping");
        let farewell = async {
            self.table.reset_all(&why);
            sleep(FLUSH_TIMEOUT).await;
        };
        let drained = self.sessions.finish_after(self.deadline, at_once.clone(), farewell).await;
        if let Drained::Cut(left) = drained {
            warn!(left, "deadline over: sessions are cut");
        }
        // What targets have said to the end is still on its way.
        tokio::select! {
            () = self.table.delivered() => {}
            () = sleep_until(until) => {}
            () = at_once => {}
        }
        self.table.reset_all(&why);
        self.links.begin();
        sleep(FLUSH_TIMEOUT).await;
        self.uplinks.close_all();
        self.links.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        self.admin.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        drained
    }
}

/// What proves the node: the token itself, or a file that holds nothing else and may change. One token, or two.
fn tokens(token: &Token) -> anyhow::Result<Reload<Vec<Secret>>> {
    match token {
        Token::Text(secret) => Ok(Reload::fixed(vec![secret.clone()])),
        Token::File(path) => Reload::file(path, |text| {
            let text = String::from_utf8_lossy(text);
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            let tokens: Vec<Secret> = lines.map(Secret::new).collect();
            match tokens.len() {
                0 => Err("the token file is empty: write the token into it".into()),
                1 | 2 => Ok(tokens),
                n => Err(format!(
                    "the token file holds {n} lines: write one token into it, or two, a line each"
                )),
            }
        })
        .with_context(|| format!("mode.edge.stream.client.token_file: {}", path.display())),
    }
}

fn proxy(client: &Client) -> anyhow::Result<Option<Proxy>> {
    let Some(url) = &client.https_proxy else { return Ok(None) };
    Ok(Proxy::new(url.reveal(), client.no_proxy.as_deref().unwrap_or_default())?)
}

/// What goes into `:authority`: the name in the certificate, as Go's edges do.
fn authority(client: &Client) -> String {
    Target { host: client.dns.clone(), port: client.server.port }.to_string()
}

/// How long opening a session from here may take.
const OPEN_TIMEOUT: Duration = Duration::from_secs(12);
/// Condition of readiness: there is a link.
const LINK: &str = "link";
/// Shown beside readiness: another machine has our name, too.
const NAME: &str = "name";
/// Condition of readiness: not stopping.
const RUNNING: &str = "running";
/// Receive windows of an edge's sessions: a target on loopback or in the same network takes what comes.
const WINDOWS: Windows = Windows { start: 32 * 1024, max: 1 << 20 };
/// Sessions at once; each costs a few KiB, and the cloud has its own limit.
const MOST_SESSIONS: usize = 20_000;
/// For sessions to end by themselves once they are told why, and for the last resets to leave before the link is closed.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(100);
/// For connections to end by themselves at the very end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
