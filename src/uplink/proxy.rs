//! A user's proxy: listeners on her machine, whose sessions run over her links. Programs that know this proxy's socket
//! share its links.

use crate::listener::client_handler;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tracing::{Span, field, info, info_span};

use crate::listener::admission::destination::destination_mapping::DestinationMapping;
use crate::listener::admission::heads::PendingLimits;
use crate::listener::admission::{Admission, AdmissionOutcome, ListenerContext, ListenerProtocol, sessions};
use crate::listener::connect::ConnectProtocol;
use crate::listener::http_proxy;
use crate::listener::http_proxy::HttpProxyProtocol;
use crate::listener::socks5::Socks5;
use crate::session_io::grants::Grants;
use crate::session_io::session_stream::SessionStream;
use crate::startup::admin_socket::SocketDirs;
use crate::uplink::client::{ClientLinkConfig, ClientUplinks, MAX_SESSIONS};
use crate::uplink::path_report::{interruption, report_path};
use tunnel_base::drain::Drain;
use tunnel_base::policy::Networks;
use tunnel_base::process::memory;
use tunnel_net::listen::{Accept, TcpListenSocket};
use tunnel_net::records::{RecordStream, RecordStreamListener};
use tunnel_net::unix_accept::UnixAccept;
use tunnel_proto::frame::SessionCategory;

/// A user's proxy that serves clients.
#[derive(Debug)]
pub struct UserProxy {
    /// The links that it shares.
    pub links: ClientUplinks,
    clients: Drain,
}

impl UserProxy {
    /// Starts serving clients over `links`: of an HTTP proxy, of SOCKS5, and other programs of this user at the socket
    /// of [`bind_shared`].
    pub fn start(
        links: ClientUplinks,
        http: TcpListenSocket,
        socks5: TcpListenSocket,
        shared: UnixAccept,
    ) -> Self {
        let clients = Drain::new();
        let context = ListenerContext {
            listener: "",
            category: SessionCategory::HttpProxy,
            policy: Arc::default(),
            grants: Grants::default(),
            sessions: sessions(MAX_SESSIONS, MAX_SESSIONS),
            pending: PendingLimits::new(memory(), true),
            pool: links.pool.clone(),
            route: links.route.clone(),
            zone: Arc::default(),
            addresses: Arc::default(),
            direct: None,
            uplink: Some(DestinationMapping::User),
            metrics: links.metrics.clone(),
            drain: clients.clone(),
            stopping: clients.clone(),
        };
        clients
            .spawn(info_span!("refusals"), links.metrics.refusals.clone().sum_up(clients.clone().started()));
        spawn(http_proxy::KIND.name, http, HttpProxyProtocol, &context);
        spawn("socks5", socks5, Socks5, &context);
        let context = ListenerContext { category: SessionCategory::Ssh, ..context };
        spawn("shared", RecordStreamListener(shared), SharedSocketProtocol, &context);
        Self { links, clients }
    }

    /// Ends all sessions, and closes the links.
    pub async fn shutdown(self) {
        let Self { links, clients } = self;
        clients.start();
        links.reset_sessions();
        clients.finish(CLOSE_TIMEOUT, std::future::pending()).await;
        links.close().await;
    }
}

fn spawn<L, P>(name: &'static str, listener: L, protocol: P, context: &ListenerContext)
where
    L: Accept + 'static,
    P: ListenerProtocol<L::AnyStream>,
{
    info!(listener = name, local_addr = %listener.at(), "listening for clients");
    let context = ListenerContext { listener: name, ..context.clone() };
    let drain = context.drain.clone();
    let serving = client_handler::run(protocol, listener, Networks::default(), context);
    drain.spawn(info_span!("clients", listener = name), serving);
}

/// Time for clients to get the reason of their end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The protocol of the shared socket: CONNECT over records, which also report a lost path to the client.
struct SharedSocketProtocol;

impl ListenerProtocol<RecordStream> for SharedSocketProtocol {
    type Connection = RecordStream;

    fn span(&self, _from: SocketAddr) -> Span {
        info_span!("shared", trace_id = field::Empty, session = field::Empty)
    }

    async fn handshake(
        &self,
        socket: RecordStream,
        admission: &mut Admission,
    ) -> AdmissionOutcome<RecordStream> {
        let mut outcome = ConnectProtocol.handshake(socket, admission).await;
        if let AdmissionOutcome::Opened { session, socket, .. } = &mut outcome
            && let (SessionStream::Session(stream), Some(target)) = (&session.session, &session.access.target)
        {
            let path = stream.path_monitor();
            let client = socket.notifier();
            let report = report_path(path.clone(), target.clone(), move |line| client.notify(line));
            admission.context().drain.spawn(info_span!("path", session = %path.id()), report);
            socket.set_break_reason(move || interruption(&path));
        }
        outcome
    }
}

/// Listens on the socket of a proxy with these links. `runtime` is `XDG_RUNTIME_DIR`.
///
/// # Errors
///
/// Returns the reason if another proxy with these links runs, or no directory is usable.
pub fn bind_shared(links: &ClientLinkConfig, runtime: Option<&Path>) -> Result<UnixAccept, String> {
    SocketDirs::of_user(runtime).bind_own(&socket_name(links))
}

/// Connects to a proxy's socket, if a process of this user listens there. `on_notice` is called with each text for the
/// user.
pub async fn connect_shared(
    path: &Path,
    on_notice: impl FnMut(&str) + Send + 'static,
) -> Option<RecordStream> {
    let stream = UnixStream::connect(path).await.ok()?;
    let is_own = stream.peer_cred().is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw());
    is_own.then(|| RecordStream::new(stream, on_notice))
}

/// Returns where the socket of a proxy with these links may be. `runtime` is `XDG_RUNTIME_DIR`.
pub fn shared_sockets(links: &ClientLinkConfig, runtime: Option<&Path>) -> Vec<PathBuf> {
    SocketDirs::of_user(runtime).own_sockets(&socket_name(links))
}

fn socket_name(links: &ClientLinkConfig) -> String {
    format!("proxy-{:016x}.sock", links.fingerprint())
}
