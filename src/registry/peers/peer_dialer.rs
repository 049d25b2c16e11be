//! Making a link to a peer, and why there is none.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::AlertDescription;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::paths::node_not_found::PeerError;
use crate::registry::Registry;
use tunnel_base::drain::Drain;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::{LinkDialError, dial_peer};
use tunnel_link::link::Link;
use tunnel_link::link_reader::LinkReader;
use tunnel_net::dial::dial;
use tunnel_net::listen::tune_link;
use tunnel_net::path_mtu;
use tunnel_net::pool::BufferPool;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::peer::PeerTls;
use tunnel_proto::names::{Host, Instance};

impl PeerError {
    /// Returns true if the remote end is not a peer.
    pub(crate) fn is_strange(&self) -> bool {
        matches!(self, Self::NotAPeer { .. })
    }

    /// Returns the pause before the next attempt, after that number of failures in a row. `listed` is false for a peer
    /// that DNS returned.
    pub(crate) fn pause(&self, failures: u32, listed: bool) -> Duration {
        match (self.is_strange(), listed) {
            (true, true) => NOT_A_PEER_BACKOFF,
            (true, false) => NAMED_NOT_A_PEER_BACKOFF,
            (false, true) => {
                let again = REDIAL_DELAY.saturating_mul(1 << failures.saturating_sub(1).min(3));
                again.mul_f64(0.75 + rand::random::<f64>() / 2.0)
            }
            // A client chooses the name that DNS is asked for, so it must not cause a dial for each answer.
            (false, false) => NAMED_RETRY_AFTER,
        }
    }
}

/// A dialer of links to peers, replaced in tests.
pub trait PeerDialer: fmt::Debug + Send + Sync {
    /// Makes a link to the server at an address, as a backup link if `is_backup`, and hands it to the driver. Returns
    /// its sending side. Cancel safe: a dropped call leaves no link.
    fn dial(&self, at: SocketAddr, is_backup: bool) -> BoxFuture<'_, Result<Arc<Link>, PeerError>>;
}

/// A dialer over TLS. New links are sent to a channel, for their driver.
#[derive(Debug)]
pub struct TlsPeerDialer {
    link_context: LinkContext,
    tls: ReloadedValue<PeerTls>,
    pool: BufferPool,
    /// Receives new links, which are driven at the other end.
    links: mpsc::Sender<LinkReader>,
}

/// The state shared by the tasks of all peers.
#[derive(Debug, Clone)]
pub(crate) struct PeerDialContext {
    pub(crate) dialer: Arc<dyn PeerDialer>,
    /// This process.
    pub(crate) own: Instance,
    pub(crate) registry: Arc<Registry>,
    pub(crate) drain: Drain,
    /// Notified when the set of unreachable peers may have changed.
    pub(crate) changed: watch::Sender<()>,
    /// Notified when a link to a peer was made, or the one used for announcements has ended.
    pub(crate) links_changed: Arc<Notify>,
}

/// A link, or why there is none, with a fixed label for metrics.
type PeerLinkResult = Result<LinkReader, (&'static str, PeerError)>;

impl TlsPeerDialer {
    /// Returns the dialer and the receiver of its links, which the caller drives.
    pub fn new(
        tls: ReloadedValue<PeerTls>,
        pool: BufferPool,
        link_context: LinkContext,
    ) -> (Arc<Self>, mpsc::Receiver<LinkReader>) {
        let (links, made) = mpsc::channel(MAX_DIALLED);
        (Arc::new(Self { link_context, tls, pool, links }), made)
    }

    /// Makes a link to the peer at an address. Nothing is sent before TLS has proved that it is a peer.
    async fn connect(&self, at: SocketAddr, is_backup: bool) -> PeerLinkResult {
        let no = |cause: String| PeerError::NoLink { at, cause };
        let connect = async |_| {
            let socket = dial(&Host::Ip(at.ip()), &[at], CONNECT_TIMEOUT).await.map_err(|e| {
                let why = e.after(&at.into());
                (e.reason(), no(format!("{why}; check that it runs, and that firewalls allow this port")))
            })?;
            tune_link(&socket, self.link_context.congestion.as_deref())
                .map_err(|e| ("closed_by_remote", no(e.to_string())))?;
            Ok(socket)
        };
        path_mtu::handshake(connect, |socket, is_again| self.link(at, is_backup || is_again, socket)).await
    }

    /// Makes the TLS and link handshakes over a connection to a peer.
    async fn link(&self, at: SocketAddr, is_backup: bool, socket: TcpStream) -> PeerLinkResult {
        let no = |cause: String| PeerError::NoLink { at, cause };
        let tls = self.tls.load();
        let connector = TlsConnector::from(tls.config.clone());
        let io = connector.connect(tls.name.clone(), Buffered::new(socket, self.pool.clone())).await;
        let io = io.map_err(|e| {
            let error = TlsHandshakeError::of(&e);
            let name = tls.name.to_str();
            let cause = format!("TLS handshake as {name:?} failed: {error}{}", hint(&error));
            let is_strange = error.is_of_the_certificate();
            ("tls", if is_strange { PeerError::NotAPeer { at, cause } } else { no(cause) })
        })?;
        let authority = match &tls.name {
            ServerName::DnsName(name) => name.as_ref().to_owned(),
            _ => at.to_string(),
        };
        dial_peer(Box::new(io), &authority, is_backup, &self.link_context).await.map_err(|e| match e {
            LinkDialError::Itself => (e.reason(), PeerError::SelfDial(at)),
            LinkDialError::CertificateRejected(ref alert) => (e.reason(), no(format!("{e}{}", hint(alert)))),
            e => (e.reason(), no(e.to_string())),
        })
    }
}

impl PeerDialer for TlsPeerDialer {
    fn dial(&self, at: SocketAddr, is_backup: bool) -> BoxFuture<'_, Result<Arc<Link>, PeerError>> {
        async move {
            let no = |cause: String| PeerError::NoLink { at, cause };
            let made = timeout(CONNECT_TIMEOUT, self.connect(at, is_backup)).await;
            let made =
                made.unwrap_or_else(|_| Err(("timeout", no(format!("no link within {CONNECT_TIMEOUT:?}")))));
            let reader = made.map_err(|(reason, why)| {
                // The list of peers may contain this server's own address; that is no failure.
                if !matches!(why, PeerError::SelfDial(_)) {
                    self.link_context.metrics.link_dial_failures.count(reason);
                }
                why
            })?;
            let link = reader.link.clone();
            self.links.send(reader).await.map_err(|_| no("this server is stopping".into()))?;
            Ok(link)
        }
        .boxed()
    }
}

/// Returns a hint with the config key that fixes the error.
fn hint(error: &TlsHandshakeError) -> &'static str {
    match error {
        TlsHandshakeError::Expired(..) => "; replace the certificate of that server",
        TlsHandshakeError::AlertReceived(AlertDescription::CertificateExpired) => {
            "; replace this server's certificate, which server.links.cert names"
        }
        TlsHandshakeError::UnknownIssuer | TlsHandshakeError::AlertReceived(_) => {
            "; issue all servers' certificates from one CA and set server.links.peer_ca to it"
        }
        TlsHandshakeError::Name(_) => "; issue every server certificate for server.peers.certificate_name",
        _ => "",
    }
}

/// Maximum number of links that wait to be driven.
const MAX_DIALLED: usize = 16;
/// Timeout of making a link. On a slow or lossy line this may exceed a search's wait; the next search then uses the
/// link.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// The first pause after a failure, doubled up to eight times. A dead server then delays no search, and one that is
/// back is soon dialled again. Once it has a node, it dials on its own.
pub(crate) const REDIAL_DELAY: Duration = Duration::from_millis(250);
/// Pause after a failure of a peer that DNS returned.
const NAMED_RETRY_AFTER: Duration = Duration::from_secs(1);
/// Pause after a failed check of certificates: a certificate of either side has to change first. The operator who
/// replaces it watches `/readyz`.
const NOT_A_PEER_BACKOFF: Duration = Duration::from_secs(10);
/// The same for an address that DNS returned, and that may belong to a stranger.
const NAMED_NOT_A_PEER_BACKOFF: Duration = Duration::from_secs(60);
