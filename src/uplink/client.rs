//! The links of a user's program: it opens sessions over a link to one of several servers, and accepts none.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tracing::info_span;

use crate::admin::readiness::Readiness;
use crate::config::edge::ServerAddress;
use crate::config::{ProxyVariables, RESUME_TIMEOUT, SecretString};
use crate::paths::uplinks::Uplinks;
use crate::route::{OpenError, ResumeTimeouts, SessionRequest, SessionRouter};
use crate::uplink::link_dialer::caching_resolver::CachingResolver;
use crate::uplink::link_dialer::{DialRequest, LinkDialer, ServerEndpoint, UplinkFailure, UserIdentity};
use crate::uplink::reconnect::{LINK_CONDITION, Reconnector};
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_link::grpc::LinkContext;
use tunnel_link::table::handles::Session;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_net::os::memory;
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::{FileWatcher, ReloadedValue};
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, link_alpn};
use tunnel_proto::frame::{ErrorCode, SessionCategory, SessionError};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::hello::LinkPurpose;
use tunnel_proto::names::{DeviceName, Host, Instance, NodeName, Target, UserName};

/// The servers of a user, and how she proves herself there.
#[derive(Debug, Clone)]
pub struct UserLinkConfig {
    /// Servers in order of preference, at least one.
    pub servers: Vec<ServerAddress>,
    /// The user's machine.
    pub device: DeviceName,
    /// How the user is proved.
    pub proof: UserCredentials,
    /// The file of CAs that may sign the servers' certificate; `None`: those of this system.
    pub ca: Option<PathBuf>,
    /// The proxy to dial through.
    pub proxy: ProxyVariables,
    /// How long sessions may be without a path.
    pub resume_timeouts: ResumeTimeouts,
}

/// How a user is proved.
#[derive(Debug, Clone)]
pub enum UserCredentials {
    /// By the token of this user's device, which another invitation replaces in its file.
    Token(UserName, ReloadedValue<Vec<SecretString>>),
    /// By a client certificate, which names the user.
    Certificate(IdentityFiles),
}

/// The links of a user's program, of which one is used for new sessions. Sessions continue over the next one.
#[derive(Debug)]
pub struct UserUplinks {
    pub(crate) route: SessionRouter,
    pub(crate) uplinks: Arc<Uplinks>,
    table: Arc<SessionTable>,
    pub(crate) pool: BufferPool,
    pub(crate) metrics: Metrics,
    links: Drain,
}

/// Why no server linked with a user's program. The text is for the user.
#[derive(Debug, thiserror::Error)]
pub enum UserLinkError {
    /// A file or a setting is wrong.
    #[error("{0}")]
    Config(String),
    /// A server refused the user's proof, or permits her no link.
    #[error("{0}")]
    Denied(String),
    /// No server gave a link.
    #[error("{0}")]
    Unreachable(String),
}

impl From<UplinkFailure> for UserLinkError {
    fn from(UplinkFailure { text, is_denied, .. }: UplinkFailure) -> Self {
        if is_denied { Self::Denied(text) } else { Self::Unreachable(text) }
    }
}

impl UserUplinks {
    /// Links to the first server that accepts it, and keeps a link until [`Self::close`].
    ///
    /// # Errors
    ///
    /// Returns the errors of all servers, or of a file.
    pub async fn connect(config: UserLinkConfig) -> Result<Self, UserLinkError> {
        Self::link(config, |_| true).await
    }

    /// Like [`Self::connect`], but keeps dialling if no server is reached now, which is logged.
    ///
    /// # Errors
    ///
    /// Returns an error if a server denies the link, or of a file.
    pub async fn start(config: UserLinkConfig) -> Result<Self, UserLinkError> {
        // Without a link, it is dialled again at once, which is logged.
        Self::link(config, |failure| failure.is_denied).await
    }

    /// Links to the first server that accepts it, and keeps a link. Fails if none does for a reason that `is_final`.
    async fn link(
        config: UserLinkConfig,
        is_final: impl FnOnce(&UplinkFailure) -> bool,
    ) -> Result<Self, UserLinkError> {
        // What keeps the links, from the files.
        let metrics = Metrics::edge();
        let links = Drain::new();
        let limits = SessionLimits {
            windows: WINDOWS,
            memory: MEMORY.min(memory(None) / 5),
            sessions: MAX_SESSIONS,
            resume_timeout: RESUME_TIMEOUT,
            max_resume_timeout: Duration::ZERO,
        };
        let asked = config.resume_timeouts;
        let table = SessionTable::new(Instance::random(), limits, metrics.clone());
        let link_context = LinkContext::new(table.clone(), metrics.clone(), links.clone());
        let uplinks = Uplinks::new(NodeName::none());
        let pool = BufferPool::new();
        let dialer = dialer(config, link_context, pool.clone()).map_err(UserLinkError::Config)?;
        let readiness = Readiness::waiting_for(&[LINK_CONDITION]);
        let reconnector = Reconnector::new(dialer, None, Drain::new(), readiness, uplinks.clone());
        let first = match reconnector.dialer.connect(0, DialRequest::new(LinkPurpose::Primary)).await {
            Ok(first) => Some(first),
            Err(failure) if is_final(&failure) => return Err(failure.into()),
            Err(_) => None,
        };
        // The tasks that keep a link, which is `first` or yet to be dialled.
        let mut route = SessionRouter::new(uplinks.clone(), table.clone(), OPEN_TIMEOUT, RESUME_TIMEOUT);
        route.asked = Some(asked);
        let files = FileWatcher::new(&links);
        files.watch("tls", &reconnector.dialer.tls);
        files.watch("tokens", &reconnector.dialer.tokens);
        links.spawn(info_span!("upkeep"), table.clone().upkeep(pool.clone(), links.clone()));
        links.spawn(info_span!("resume_parked"), route.clone().resume_parked(links.clone()));
        links.spawn(info_span!("network"), reconnector.clone().follow_network());
        links.spawn(info_span!("link"), reconnector.run(first));
        Ok(Self { route, uplinks, table, pool, metrics, links })
    }

    /// Opens a session to a target, as servers know it. Waits for a link if there is none now. Cancel safe.
    ///
    /// # Errors
    ///
    /// Returns why no session was opened.
    pub async fn open(&self, target: &Target) -> Result<Session, OpenError> {
        self.request(target.clone(), SessionCategory::Ssh).await
    }

    /// Opens a session to the admin API of a server, for one request. It ends with its link. Cancel safe.
    ///
    /// # Errors
    ///
    /// Like [`Self::open`].
    pub async fn open_admin(&self) -> Result<Session, OpenError> {
        // The server of the link is the target, whatever the frame names.
        let target = Target { host: Host::Ip(Ipv4Addr::LOCALHOST.into()), port: 80 };
        self.request(target, SessionCategory::Admin).await
    }

    async fn request(&self, target: Target, category: SessionCategory) -> Result<Session, OpenError> {
        let request = SessionRequest {
            // The server finds the node by the target.
            node: target.host.node().unwrap_or_else(NodeName::direct),
            target,
            category,
            client: String::new(),
            listener: "client",
            permit: None,
        };
        self.route.open(request).await
    }

    /// Returns the number of links.
    pub fn links(&self) -> usize {
        self.uplinks.all().len()
    }

    /// Resets the sessions that are open.
    pub(crate) fn reset_sessions(&self) {
        self.table.reset_all(&SessionError::new(ErrorCode::Cancelled, "the user's program has ended"));
    }

    /// Delivers the last bytes of sessions, resets those that are open, and closes the links.
    pub async fn close(self) {
        // Bounded by the time for which a session without a path is kept.
        let _ = timeout(RESUME_TIMEOUT, self.table.wait_delivered()).await;
        self.reset_sessions();
        self.links.start();
        sleep(FLUSH_TIMEOUT).await;
        self.uplinks.all().iter().for_each(|link| link.close());
        self.links.finish(CLOSE_TIMEOUT, std::future::pending()).await;
    }
}

/// Reads the files, and creates the dialer of the links.
fn dialer(config: UserLinkConfig, link_context: LinkContext, pool: BufferPool) -> Result<LinkDialer, String> {
    let UserLinkConfig { servers, device, proof, ca, proxy, .. } = config;
    let (name, tokens, identity) = match proof {
        UserCredentials::Token(user, tokens) => (Some(user), tokens, None),
        UserCredentials::Certificate(identity) => (None, ReloadedValue::fixed(Vec::new()), Some(identity)),
    };
    let trust = ca.clone().map_or(Trust::System, Trust::Ca);
    let tls = TlsClientConfig { trust, identity, alpn: link_alpn() };
    let tls = tls.load().map_err(|cause| cause.to_string())?;
    let servers = servers.into_iter().map(ServerEndpoint::new).collect::<Result<_, _>>()?;
    Ok(LinkDialer {
        node: NodeName::none(),
        is_last_good: Arc::default(),
        user: Some(UserIdentity { name, device }),
        servers,
        tokens,
        turn: AtomicUsize::new(0),
        tls,
        ca,
        own: None,
        proxy: proxy.parse().map_err(|cause| cause.to_string())?,
        known: CachingResolver::new(Resolver::system(), RESUME_TIMEOUT, link_context.drain.clone()),
        pool,
        link_context,
    })
}

/// Timeout for a link and for opening a session; a server and a node have 12 s.
const OPEN_TIMEOUT: Duration = Duration::from_secs(14);
/// Receive windows, which start large: a user's program has few sessions.
const WINDOWS: WindowLimits = WindowLimits { start: 64 * 1024, max: 4 << 20 };
/// Default maximum of bytes that sessions may reserve.
const MEMORY: usize = 64 << 20;
/// Maximum number of concurrent sessions.
pub(crate) const MAX_SESSIONS: usize = 10_000;
/// Time for the last resets to be sent before the links are closed.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(100);
/// Time for connections to end on their own.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
