//! The way to the cloud: its servers, tried in turn, what makes a link there, and the edge's certificate.

pub mod known_addresses;
pub mod messages;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context as _;
use rand::seq::SliceRandom as _;
use tokio::net::TcpStream;
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
#[cfg(feature = "kubernetes")]
use tracing::info_span;
use tracing::{debug, info};

use crate::config::Secret;
use crate::config::edge::ServerAddress;
use crate::config::edge::csr::EdgeCsrConfig;
use crate::edge::link_dialer::known_addresses::{Found, KnownAddresses};
#[cfg(feature = "kubernetes")]
use crate::kubernetes::cluster::Cluster;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::csr::Profile;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::csr::renewer::{CertificateNames, CertificateRenewer};
use tunnel_base::drain::Drain;
use tunnel_base::names::{Host, NodeName, Target};
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::LinkDialError;
use tunnel_link::link::Link;
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::HttpProxyClient;
use tunnel_net::listen::{tune_interactive, tune_link};
use tunnel_net::pool::Pool;
use tunnel_net::reload::{Reload, fingerprint};
use tunnel_net::resolver::LookupError;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::certificate::NotAfter;
use tunnel_net::tls::{self, Identity, TlsClientConfig, TlsError, Trust};
use tunnel_proto::hello::{Hello, LinkPurpose};

/// What a link to the cloud takes.
#[derive(Debug)]
pub(crate) struct LinkDialer {
    pub(crate) node: NodeName,
    /// The addresses that the node has, as far as the settings say.
    pub(crate) ips: Vec<IpAddr>,
    /// At least one, the one that is wanted most first.
    pub(crate) servers: Vec<ServerEndpoint>,
    /// What may prove our name, tried in turn.
    pub(crate) tokens: Reload<Vec<Secret>>,
    /// Which of them is tried next: the one that was taken last.
    pub(crate) turn: AtomicUsize,
    pub(crate) tls: Reload<ClientConfig>,
    /// What is shown beside the token, once it has been issued: to a server that seems not to take it at every second try.
    pub(crate) own: Option<EdgeCertificate>,
    pub(crate) proxy: Option<HttpProxyClient>,
    pub(crate) known: KnownAddresses,
    pub(crate) pool: Pool,
    pub(crate) link_context: LinkContext,
}

/// Where the cloud is.
#[derive(Debug)]
pub(crate) struct ServerEndpoint {
    at: Target,
    name: ServerName<'static>,
    authority: String,
    /// Whether the next try there shows no certificate.
    declined: AtomicBool,
}

/// A link that was made.
pub(crate) struct NewLink {
    pub(crate) link: Link,
    /// Which server it leads to, by number.
    pub(crate) server: usize,
    /// The address that was dialled; `None` through a proxy.
    pub(crate) at: Option<SocketAddr>,
}

/// Which of a server's addresses the pod that was linked to wants this edge to dial.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AddressHint {
    /// It comes first.
    pub(crate) to: Option<SocketAddr>,
    /// That pod's own, which comes last.
    pub(crate) exclude: Option<SocketAddr>,
}

impl ServerEndpoint {
    /// # Errors
    ///
    /// The name in its certificate cannot be one.
    pub(crate) fn new(server: &ServerAddress) -> Result<Self, TlsError> {
        // What goes into `:authority`: the name in the certificate, as Go's edges do.
        let authority = Target { host: server.dns.clone(), port: server.at.port }.to_string();
        let (at, name) = (server.at.clone(), tls::server_name(&server.dns.to_string())?);
        Ok(Self { at, name, authority, declined: AtomicBool::new(false) })
    }
}

impl AddressHint {
    fn sort(self, addresses: &mut [SocketAddr]) {
        let rank =
            |at: &SocketAddr| if Some(*at) == self.to { 0 } else { 1 + u8::from(Some(*at) == self.exclude) };
        addresses.sort_by_key(rank);
    }
}

impl LinkDialer {
    /// A link to the first server that gives one, beginning with number `first`; behind the last comes number 0.
    ///
    /// # Errors
    ///
    /// What each of them said. One that says that another process has this node's name is the last one asked.
    pub(crate) async fn connect(&self, first: usize, hint: AddressHint) -> anyhow::Result<NewLink> {
        let mut failed: Option<anyhow::Error> = None;
        for n in 0..self.servers.len() {
            let server = (first + n) % self.servers.len();
            let why = match self.connect_to(server, hint, LinkPurpose::Primary).await {
                Ok(made) => return Ok(made),
                Err(why) if self.servers.len() == 1 => why,
                Err(why) => why.context(format!("{}", self.servers[server].at)),
            };
            let taken = is_name_taken(&why);
            failed = Some(match failed {
                Some(before) if !taken => anyhow::anyhow!("{before:#}; {why:#}"),
                _ => why,
            });
            if taken {
                break;
            }
        }
        Err(failed.context("no server of the cloud is known")?)
    }

    /// A link to that server, whatever else there is. Cancel safe: a dropped call leaves no link.
    pub(crate) async fn connect_to(
        &self,
        server: usize,
        hint: AddressHint,
        older: LinkPurpose,
    ) -> anyhow::Result<NewLink> {
        let to = self.servers.get(server).context("there is no such server")?;
        let shown = self.certificate(to).await?;
        let patience = if self.servers.len() > 1 { FIRST_CONNECT_TIMEOUT } else { CONNECT };
        let (socket, at) =
            timeout(patience, self.dial(to, hint, patience)).await.context("connecting took too long")??;
        let congestion = self.link_context.congestion.as_deref();
        tune_link(&socket, congestion).context("connection was gone at once")?;
        if older == LinkPurpose::Interactive {
            tune_interactive(&socket);
        }
        let shows = shown.is_some();
        let made = self.link(to, older, socket, shown).await.map_err(|why| {
            // A cloud that takes none, or not this one, ends the connection.
            to.declined.store(shows && is_broken(&why), Relaxed);
            if shows { why.context(messages::SHOWN) } else { why }
        });
        Ok(NewLink { link: made?, server, at })
    }

    /// TLS that presents the certificate to that server, if there is one, and unless the server seems to have declined it.
    ///
    /// # Errors
    ///
    /// There is neither a certificate nor a token.
    async fn certificate(&self, to: &ServerEndpoint) -> anyhow::Result<Option<Arc<ClientConfig>>> {
        let alone = self.tokens.load().is_empty();
        let shown = match &self.own {
            Some(own) if alone || !to.declined.swap(false, Relaxed) => own.tls().await,
            _ => None,
        };
        anyhow::ensure!(shown.is_some() || !alone, messages::UNPROVEN);
        Ok(shown)
    }

    /// Makes a connection a link, with TLS that shows a certificate, if there is one.
    async fn link(
        &self,
        to: &ServerEndpoint,
        older: LinkPurpose,
        socket: TcpStream,
        shown: Option<Arc<ClientConfig>>,
    ) -> anyhow::Result<Link> {
        let shows = shown.is_some();
        let tls = TlsConnector::from(shown.unwrap_or_else(|| self.tls.load()));
        let io = timeout(CONNECT, tls.connect(to.name.clone(), Buffered::new(socket, self.pool.clone())));
        let io = io.await.context("the TLS handshake took too long")?;
        let io = io.map_err(|e| anyhow::anyhow!(messages::no_tls(&e, &to.at, &to.name.to_str(), shows)))?;
        let (tokens, turn) = (self.tokens.load(), self.turn.load(Relaxed));
        let token = tokens.get(turn % tokens.len().max(1)).map_or("", Secret::reveal);
        let (node, own) = (&self.node, self.link_context.table.instance());
        let mut said = Hello::edge_request(node, token, own);
        Hello::with_purpose(&mut said, older);
        Hello::with_node_ips(&mut said, &self.ips);
        let dialled = tunnel_link::grpc::dial::dial(io, &to.authority, node, said, &self.link_context).await;
        if dialled.as_ref().is_err_and(LinkDialError::is_token_refused) {
            self.turn.store(turn.wrapping_add(1), Relaxed);
        }
        Ok(dialled?)
    }

    /// Whether the cloud was reached and took none of the tokens.
    pub(crate) fn is_refused(&self, why: &anyhow::Error) -> bool {
        let tried_all = self.turn.load(Relaxed).is_multiple_of(self.tokens.load().len().max(1));
        tried_all && why.downcast_ref().is_some_and(LinkDialError::is_token_refused)
    }

    /// The name by which messages call a server.
    pub(crate) fn display_name(&self, server: usize) -> String {
        self.servers.get(server).map(|server| server.at.to_string()).unwrap_or_default()
    }

    async fn dial(
        &self,
        to: &ServerEndpoint,
        hint: AddressHint,
        patience: Duration,
    ) -> anyhow::Result<(TcpStream, Option<SocketAddr>)> {
        let proxy = self.proxy.as_ref().filter(|proxy| proxy.applies_to(&to.at));
        let (mut addresses, failure) = self.resolve(proxy.map_or(&to.at, HttpProxyClient::at)).await?;
        let dialled = async {
            if let Some(proxy) = proxy {
                return Ok((proxy.connect(&addresses, &to.at, patience).await?, None));
            }
            hint.sort(&mut addresses);
            let socket = dial(&addresses, patience).await;
            let socket = socket.map_err(|why| anyhow::anyhow!(messages::no_connection(&why.by_address())))?;
            let at = socket.peer_addr().ok();
            Ok((socket, at))
        };
        dialled.await.map_err(|why: anyhow::Error| match failure {
            Some(failure) => why.context(format!("{failure}; the last known addresses were dialled")),
            None => why,
        })
    }

    /// The addresses of a target, with why they are the last known ones if DNS did not give them.
    async fn resolve(&self, target: &Target) -> anyhow::Result<(Vec<SocketAddr>, Option<LookupError>)> {
        let (found, failure) = match &target.host {
            Host::Ip(ip) => (vec![*ip], None),
            Host::Name(name) => {
                let Found { addresses, failure } = self.known.of(name).await?;
                (addresses, failure)
            }
        };
        if let Some(error) = &failure {
            info!(%error, addresses = ?found, "DNS failed, dialling the last known addresses");
        }
        let mut addresses: Vec<_> = found.into_iter().map(|ip| SocketAddr::new(ip, target.port)).collect();
        // A name may stand for all pods: each edge takes any of them, and another one if that is stopping.
        addresses.shuffle(&mut rand::rng());
        Ok((addresses, failure))
    }
}

/// Whether a connection ended in its handshake, or before it was answered: in TLS 1.3 a certificate is judged between the
/// two.
fn is_broken(why: &anyhow::Error) -> bool {
    match why.downcast_ref() {
        Some(dialled) => matches!(dialled, LinkDialError::Broken(_)),
        None => !why.is::<Elapsed>(),
    }
}

/// Whether another living process has our name.
pub(crate) fn is_name_taken(why: &anyhow::Error) -> bool {
    why.downcast_ref().is_some_and(LinkDialError::is_name_taken)
}

/// For each step of connecting to the cloud.
const CONNECT: Duration = Duration::from_secs(10);
/// For the first of them, the way through the network, where there is another server to try.
const FIRST_CONNECT_TIMEOUT: Duration = Duration::from_secs(4);

// The certificate by which an edge proves itself, once `[mode.edge.csr]` has had it issued.

/// Where it is, and by whom the cloud's own is believed. Cheap to clone; clones share what was read.
#[derive(Debug, Clone)]
pub(crate) struct EdgeCertificate {
    /// Certificate and key.
    pub(crate) file: PathBuf,
    /// The file of authorities.
    pub(crate) ca: PathBuf,
    /// What was read last.
    kept: Arc<Mutex<Option<CachedCertificate>>>,
}

#[derive(Debug)]
struct CachedCertificate {
    /// The fingerprint of the files.
    text: u64,
    tls: Arc<ClientConfig>,
}

impl EdgeCertificate {
    pub(crate) fn new(file: PathBuf, ca: PathBuf) -> Self {
        Self { file, ca, kept: Arc::default() }
    }

    /// TLS with the certificate, as it stands now; `None`: there is none yet, or it is over, and the token has to do. As long as
    /// the files' text stays it is the same, with the tickets of the links before.
    pub(crate) async fn tls(&self) -> Option<Arc<ClientConfig>> {
        let Self { file, ca, kept } = self.clone();
        let read = move || {
            let texts = [&file, &ca].map(|path| std::fs::read(path).unwrap_or_default());
            let ends = NotAfter::of(&texts[0]);
            let now = UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs());
            if ends.is_some_and(|ends| ends.first < now) {
                return Err("it is over".to_owned());
            }
            let (text, mut kept) = (fingerprint(&texts), kept.lock().unwrap_or_else(PoisonError::into_inner));
            if let Some(kept) = kept.as_ref().filter(|kept| kept.text == text) {
                return Ok(kept.tls.clone());
            }
            let identity = Some(Identity { cert: file.clone(), key: file });
            let settings = TlsClientConfig { trust: Trust::Ca(ca), identity, alpn: vec![b"h2".to_vec()] };
            let tls = settings.load().map_err(|cause| cause.to_string())?.load();
            *kept = Some(CachedCertificate { text, tls: tls.clone() });
            Ok(tls)
        };
        // Read for each link: links are dialled seldom, and a certificate that was renewed counts at once.
        match tokio::task::spawn_blocking(read).await {
            Ok(Ok(config)) => Some(config),
            Ok(Err(cause)) => {
                debug!("no certificate is shown to the cloud: {cause}");
                None
            }
            Err(_) => None,
        }
    }
}

/// Has it issued and renewed until draining begins. `report` gets the condition of readiness and its state.
#[cfg(feature = "kubernetes")]
pub(crate) fn keep(
    csr: EdgeCsrConfig,
    node: &NodeName,
    drain: &Drain,
    report: impl Fn(&'static str, Result<(), String>) + Send + Sync + 'static,
) {
    let EdgeCsrConfig { cluster, file, lifetime, node_ip } = csr;
    let names =
        CertificateNames::Fixed(node_ip.iter().map(ToString::to_string).chain([node.to_string()]).collect());
    let cluster = Cluster { kubeconfig: cluster.kubeconfig, namespace: None };
    let keeper = CertificateRenewer::new(cluster, Profile::Edge, file, names, lifetime);
    let report = move |state| report(Profile::Edge.condition(), state);
    drain.spawn(info_span!("csr"), keeper.keep(report, drain.clone()));
}

/// Does nothing: a build without Kubernetes has no cluster in its settings.
#[cfg(not(feature = "kubernetes"))]
pub(crate) fn keep(_: EdgeCsrConfig, _: &NodeName, _: &Drain, _: impl Fn(&'static str, Result<(), String>)) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_server_wants_the_edge_comes_first_and_the_server_itself_last() {
        let at = |last: u8| SocketAddr::from(([10, 0, 0, last], 9000));
        let sorted = |to, not| {
            let mut addresses = [at(1), at(2), at(3), at(4)];
            AddressHint { to, exclude: not }.sort(&mut addresses);
            addresses.map(|at| match at.ip() {
                std::net::IpAddr::V4(ip) => ip.octets()[3],
                std::net::IpAddr::V6(_) => 0,
            })
        };
        assert_eq!(sorted(None, None), [1, 2, 3, 4]);
        assert_eq!(sorted(Some(at(3)), Some(at(1))), [3, 2, 4, 1]);
        assert_eq!(
            sorted(Some(at(9)), Some(at(2))),
            [1, 3, 4, 2],
            "an address that the name has not counts for nothing"
        );
    }
}

#[cfg(test)]
mod csr_tests {
    use std::ops::Range;

    use tunnel_net::tls::testing::Authority;

    use super::*;

    /// Issues one for those years, into one file with its key.
    fn issue(ca: &Authority, years: Range<i32>) -> PathBuf {
        let Identity { cert, key } = ca.issue_for("agent", "node1", years);
        let file = cert.with_extension("pem");
        let both = [cert, key].map(|part| std::fs::read_to_string(part).unwrap()).concat();
        std::fs::write(&file, both).unwrap();
        file
    }

    #[tokio::test]
    async fn a_certificate_that_is_over_is_not_shown() {
        let ca = Authority::new("ca");
        for (years, is_shown) in [(2020..2021, false), (2020..4000, true)] {
            let own = EdgeCertificate::new(issue(&ca, years), ca.ca());
            assert_eq!(own.tls().await.is_some(), is_shown);
        }
    }

    #[tokio::test]
    async fn tickets_are_kept_from_link_to_link_until_the_certificate_is_renewed() {
        let ca = Authority::new("ca");
        let own = EdgeCertificate::new(issue(&ca, 2020..4000), ca.ca());
        let (first, second) = (own.tls().await.unwrap(), own.clone().tls().await.unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        issue(&ca, 2020..4000);
        let renewed = own.tls().await.unwrap();
        assert!(!Arc::ptr_eq(&first, &renewed) && Arc::ptr_eq(&renewed, &own.tls().await.unwrap()));
        issue(&ca, 2020..2021);
        assert!(own.tls().await.is_none());
    }
}
