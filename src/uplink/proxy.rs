//! A user's proxy: listeners on her machine, whose sessions run over her links.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tracing::{info, info_span};

use crate::admission::destination::destination_mapping::DestinationMapping;
use crate::admission::heads::PendingLimits;
use crate::admission::http_proxy::{self, HttpProxyProtocol};
use crate::admission::socks5::Socks5;
use crate::admission::{ListenerContext, ListenerProtocol, client_handler, sessions};
use crate::session_io::judged::JudgedSessions;
use crate::uplink::client::{MAX_SESSIONS, UserUplinks};
use tunnel_base::drain::Drain;
use tunnel_base::limited;
use tunnel_base::policy::Networks;
use tunnel_base::refusal_log::RefusalLog;
use tunnel_net::listen::{Accept, TcpListenSocket};
use tunnel_net::os::KNOWS_REMOTE_USERS;
use tunnel_net::os::memory;
use tunnel_net::os::sockets::remote_user;
use tunnel_proto::frame::SessionCategory;

/// A user's proxy that serves clients.
#[derive(Debug)]
pub struct UserProxy {
    /// The links that carry its sessions.
    pub links: UserUplinks,
    clients: Drain,
}

impl UserProxy {
    /// Starts serving clients over `links`: of an HTTP proxy, and of SOCKS5, each if it has a port.
    pub fn start(links: UserUplinks, http: Option<TcpListenSocket>, socks5: Option<TcpListenSocket>) -> Self {
        let clients = Drain::new();
        let context = ListenerContext {
            listener: "",
            category: SessionCategory::HttpProxy,
            policy: Arc::default(),
            judged: JudgedSessions::default(),
            sessions: sessions(MAX_SESSIONS, MAX_SESSIONS),
            pending: PendingLimits::new(memory(None), true),
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
        spawn(http_proxy::NAME, http, HttpProxyProtocol, &context);
        spawn("socks5", socks5, Socks5, &context);
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

/// A listening socket that on loopback accepts only connections of this user's processes, and of root's, if the system
/// tells whose they are.
struct OwnProcesses {
    socket: TcpListenSocket,
    refusals: RefusalLog,
}

impl Accept for OwnProcesses {
    type AnyStream = TcpStream;

    fn at(&self) -> impl fmt::Display {
        self.socket.at()
    }

    async fn accept(&self) -> (TcpStream, SocketAddr) {
        let refused = |from: SocketAddr, user| {
            limited!(
                self.refusals.may_log_once("other_user", from.ip()) => warn,
                client = %from,
                user,
                "closed a connection of another user's process"
            );
        };
        accept_own(&self.socket, refused).await
    }
}

/// Returns true if a port at this address serves only this user and root: on loopback, if the system tells whose a
/// connection is.
pub(crate) fn serves_own_user_only(at: SocketAddr) -> bool {
    KNOWS_REMOTE_USERS && at.ip().is_loopback()
}

/// Accepts the next connection that the port serves, see [`serves_own_user_only`]. Closes others, with a call of `refused`
/// with address and user. Cancel safe.
pub(crate) async fn accept_own(
    socket: &TcpListenSocket,
    refused: impl Fn(SocketAddr, Option<u32>),
) -> (TcpStream, SocketAddr) {
    loop {
        let (stream, from) = socket.accept().await;
        if !serves_own_user_only(socket.at()) {
            return (stream, from);
        }
        let user = remote_user(&stream).ok();
        if [Some(0), Some(rustix::process::geteuid().as_raw())].contains(&user) {
            return (stream, from);
        }
        refused(from, user);
    }
}

fn spawn(
    name: &'static str,
    socket: Option<TcpListenSocket>,
    protocol: impl ListenerProtocol<TcpStream>,
    context: &ListenerContext,
) {
    let Some(socket) = socket else { return };
    let listener = OwnProcesses { socket, refusals: context.metrics.refusals.clone() };
    info!(listener = name, local_addr = %Accept::at(&listener), "listening for clients");
    let context = ListenerContext { listener: name, ..context.clone() };
    let drain = context.drain.clone();
    let serving = client_handler::run(protocol, listener, Networks::default(), context);
    drain.spawn(info_span!("clients", listener = name), serving);
}

/// Time for clients to get the reason of their end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
