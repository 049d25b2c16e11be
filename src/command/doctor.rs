//! `tunnel doctor`: looks at all that a pod or an edge of this machine needs, and says what is wrong with it.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::acceptor::{DialerRole, TargetDialer};
use crate::command::{Mode, Settings};
use crate::config::edge::{EdgeConfig, ServerAddress, Token};
use crate::config::server::ServerConfig;
use crate::config::server::egress::EgressConfig;
use crate::config::server::https::HttpsMode;
use crate::config::server::registry::PublishConfig;
use crate::edge::link_dialer::messages::remedy as tls_remedy;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::cluster::Cluster;
use crate::startup::Startup;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::names::{Host, Instance, NodeName, Target};
use tunnel_base::policy::targets::OwnListeners;
use tunnel_link::grpc::LinkContext;
use tunnel_link::grpc::dial::LinkDialError;
use tunnel_link::table::{SessionLimits, SessionTable};
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::HttpProxyClient;
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::pool::Pool;
use tunnel_net::resolver::Resolver;
use tunnel_net::socket::Buffered;
use tunnel_net::tls::certificate::{self, CertWarningKind, CertificateWarning};
use tunnel_net::tls::handshake::HandshakeError;
use tunnel_net::tls::{self, Identity, TlsClientConfig, Trust};
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::hello::{Dialect, Hello};

/// What to look at.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// What this machine has: a pod or an edge.
    #[arg(long = "m", value_name = "MODE", default_value = "cloud")]
    pub mode: Mode,
    /// Its config file. [default: /etc/tunnel/MODE.toml]
    #[arg(long = "c", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Also dial this target from here, as the edge would: host:port; as often as you like.
    #[arg(long, value_name = "TARGET")]
    pub target: Vec<Target>,
    /// Also ask DNS for this node, as clients and other pods would.
    #[arg(long, value_name = "NODE")]
    pub node: Option<NodeName>,
    /// kubeconfig file, as the program itself has it.
    #[arg(long = "k", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// All findings as JSON.
    #[arg(long)]
    pub json: bool,
}

/// What was found out, in the order of the checks.
#[derive(Debug, Default, Serialize)]
pub struct Findings(Vec<Finding>);

/// One check.
#[derive(Debug, Serialize)]
struct Finding {
    /// A fixed word or two.
    check: &'static str,
    state: CheckStatus,
    /// What there is.
    found: String,
    /// What there should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted: Option<String>,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum CheckStatus {
    Ok,
    /// It works, though perhaps not as meant, or not for long.
    Warning,
    Error,
}

/// Looks at everything. `variable` gives those of the environment.
pub async fn run(asked: &DoctorArgs, variable: fn(&str) -> Option<String>) -> Findings {
    let (mut found, mut startup) = (Findings::default(), Startup::checking());
    let path = asked.config.clone().unwrap_or_else(|| asked.mode.config().into());
    let read = Settings::examine((asked.mode, &path), asked.kubeconfig.clone(), variable, &mut startup);
    if let Some((settings, _, warnings)) = &read {
        for warning in warnings {
            found.doubt("config", format!("{}: {}", warning.key, warning.text), "");
        }
        settings.check(&mut startup);
    }
    let faults = startup.into_faults();
    for fault in &faults {
        found.bad("config", fault.to_string(), "a config and files without a fault", "");
    }
    if faults.iter().next().is_none() {
        found.good("config", format!("{} and the files that it names can be read", path.display()));
    }
    match read {
        Some((Settings::Cloud(settings), ..)) => Box::pin(look_server(&settings, asked, &mut found)).await,
        Some((Settings::Edge(settings), ..)) => Box::pin(look_edge(&settings, asked, &mut found)).await,
        None => {}
    }
    found
}

impl Findings {
    /// Whether nothing is wrong.
    pub fn is_well(&self) -> bool {
        self.0.iter().all(|finding| finding.state != CheckStatus::Error)
    }

    /// All of them, a few lines each.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Finding { check, state, found, wanted, remedy } in &self.0 {
            let state = match state {
                CheckStatus::Ok => "ok",
                CheckStatus::Warning => "look",
                CheckStatus::Error => "FAIL",
            };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{state:4} {check:18} {found}");
            for (what, said) in [("wanted", wanted), ("do", remedy)] {
                if let Some(said) = said {
                    let _ = writeln!(text, "     {what:>18} {said}");
                }
            }
        }
        let bad = self.0.iter().filter(|finding| finding.state == CheckStatus::Error).count();
        let _ = writeln!(text, "{} checks, {bad} failed", self.0.len());
        text
    }

    /// The same for programs: a list of objects with `check`, `state` (`good`, `doubt`, `bad`), `found`, `wanted`, `remedy`.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    fn good(&mut self, check: &'static str, found: impl Into<String>) {
        self.add(check, CheckStatus::Ok, found, "", "");
    }

    fn doubt(&mut self, check: &'static str, found: impl Into<String>, remedy: &str) {
        self.add(check, CheckStatus::Warning, found, "", remedy);
    }

    fn bad(&mut self, check: &'static str, found: impl Into<String>, wanted: &str, remedy: &str) {
        self.add(check, CheckStatus::Error, found, wanted, remedy);
    }

    fn add(
        &mut self,
        check: &'static str,
        state: CheckStatus,
        found: impl Into<String>,
        wanted: &str,
        remedy: &str,
    ) {
        let said = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        self.0.push(Finding {
            check,
            state,
            found: found.into(),
            wanted: said(wanted),
            remedy: said(remedy),
        });
    }
}

/// Which check a fault of TLS belongs to.
fn check_of(fault: &HandshakeError) -> &'static str {
    match fault {
        HandshakeError::UnknownIssuer => "authority",
        HandshakeError::Name(_) => "certificate name",
        HandshakeError::Expired(..) => "certificate dates",
        HandshakeError::NotValidYet(..) => "clock",
        HandshakeError::CaUsedAsEndEntity | HandshakeError::Purpose | HandshakeError::OtherCertificate(_) => {
            "certificate kind"
        }
        HandshakeError::NotTls | HandshakeError::Protocol | HandshakeError::Closed => "port",
        HandshakeError::AlertReceived(_) | HandshakeError::Other(_) => "tls",
    }
}

/// Adds what a file's certificate is for, until when, and what is odd about it.
fn certificate(file: &Path, key: &str, found: &mut Findings) {
    let read = std::fs::read(file).ok().and_then(|text| tls::certs(file, &text).ok());
    let Some(leaf) = read.and_then(|certs| certs.into_iter().next()) else { return };
    let summary = match certificate::summary(&leaf) {
        Ok(summary) => summary,
        Err(why) => {
            let (text, wanted) = (format!("{key}: {} {why}", file.display()), "a certificate of version 3");
            return found.bad("certificate kind", text, wanted, "issue it anew: `tunnel init` makes one");
        }
    };
    let (names, until) = (summary.names.join(", "), &summary.until);
    if summary.oddities.is_empty() {
        found.good("certificate", format!("{key}: for {names}, until {until}"));
    }
    for CertificateWarning { about, found: odd, remedy } in summary.oddities {
        let check = match about {
            CertWarningKind::Kind => "certificate kind",
            CertWarningKind::Dates => "certificate dates",
            CertWarningKind::Clock => "clock",
        };
        found.bad(check, format!("{key}: {} {odd}", file.display()), "a server's certificate, today", remedy);
    }
    if (0..WARN_BEFORE_EXPIRY_DAYS).contains(&summary.days) {
        let text = format!("{key}: {} ends on {until}, in {} days", file.display(), summary.days);
        found.doubt("certificate dates", text, "issue it anew; it is read again without a restart");
    }
}

/// Status and body of a page of an admin port; `None`: nobody answers.
async fn page(at: SocketAddr, path: &str) -> Option<(u16, String)> {
    let ask = async {
        let mut socket = TcpStream::connect(at).await.ok()?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
        socket.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        socket.take(PAGE_BYTES).read_to_string(&mut answer).await.ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
    };
    timeout(TIMEOUT, ask).await.ok().flatten()
}

/// For each step of a check.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Of an admin port's page.
const PAGE_BYTES: u64 = 64 * 1024;
/// Days before its end in which a certificate is told of.
const WARN_BEFORE_EXPIRY_DAYS: i64 = 30;

// What a pod needs: certificates, tokens, the other pods, and who answers for its nodes.

pub(crate) async fn look_server(settings: &ServerConfig, asked: &DoctorArgs, found: &mut Findings) {
    certificates(settings, found);
    tokens(settings, found);
    running_server(settings, found).await;
    #[cfg(feature = "kubernetes")]
    places(settings, found).await;
    let resolver = match Resolver::system() {
        Ok(resolver) => resolver,
        Err(why) => return found.bad("dns", why.to_string(), "", "mend /etc/resolv.conf"),
    };
    peers(settings, &resolver, found).await;
    published(settings, found);
    if let Some(node) = &asked.node {
        answered(settings, node, resolver, found).await;
    }
}

fn certificates(settings: &ServerConfig, found: &mut Findings) {
    certificate(&settings.server.cert, "mode.cloud.stream.server.cert", found);
    if let Some(EgressConfig::Port { certificates, .. }) = &settings.egress {
        certificate(&certificates.cert, "mode.cloud.egress.cert", found);
    }
    if let HttpsMode::Terminate(certificates, _) = &settings.https.mode
        && !settings.https.ports.is_empty()
    {
        certificate(&certificates.cert, "mode.cloud.https.cert", found);
    }
}

fn tokens(settings: &ServerConfig, found: &mut Findings) {
    let Ok(text) = std::fs::read_to_string(&settings.server.tokenfile) else { return };
    let names = text.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
    let (shared, own): (Vec<_>, Vec<_>) = names.partition(|name| *name == "default");
    if shared.is_empty() {
        found.good("token", format!("{} nodes have a token of their own, and no other may link", own.len()));
    } else {
        let text = format!("{} nodes have a token of their own, all others share one", own.len());
        found.doubt(
            "token",
            text,
            "whoever has the shared one can take any name: give each node a line of its own",
        );
    }
}

/// Checks that the cluster has a Node on which the manifests let servers run.
#[cfg(feature = "kubernetes")]
async fn places(settings: &ServerConfig, found: &mut Findings) {
    let Some(cluster) = &settings.addresses.cluster else { return };
    let cluster = Cluster { kubeconfig: cluster.kubeconfig.clone(), namespace: None };
    match cluster.nodes(Some(SERVERS)).await {
        Ok(nodes) if nodes.is_empty() => {
            let text = format!("no Node has the label {SERVERS}: servers of the manifests stay Pending");
            found.doubt(
                "nodes",
                text,
                &format!("kubectl label node NODE {SERVERS}, for nodes that are no edges"),
            );
        }
        Ok(nodes) => found.good("nodes", format!("{} Nodes have the label of servers", nodes.len())),
        Err(why) => found.doubt("nodes", why.to_string(), ""),
    }
}

/// The label that the manifests require of a server's Node; no kubelet can set it on itself.
#[cfg(feature = "kubernetes")]
const SERVERS: &str = "node-restriction.kubernetes.io/tunnel-server=true";

/// What the pod of this machine says of itself.
async fn running_server(settings: &ServerConfig, found: &mut Findings) {
    let at = settings.server.log_listen.at;
    let at = if at.ip().is_unspecified() { SocketAddr::new([127, 0, 0, 1].into(), at.port()) } else { at };
    match page(at, "/readyz").await {
        None => found.doubt(
            "pod",
            format!("no pod of this machine answers at {at}"),
            "start it: systemctl start tunnel-cloud",
        ),
        Some((200, body)) if body.trim() == "ok" => found.good("pod", "the pod of this machine is ready"),
        Some((200, body)) => {
            body.lines().filter(|line| *line != "ok").for_each(|line| found.doubt("pod", line, ""));
        }
        Some((_, body)) => body.lines().for_each(|line| found.bad("pod", line, "a pod that is ready", "")),
    }
}

/// Whether the other pods can be found and reached, and show a certificate as pods have it.
async fn peers(settings: &ServerConfig, resolver: &Resolver, found: &mut Findings) {
    let known = &settings.registry.peers;
    let mut all = known.list.clone();
    if let Some(Target { host: Host::Name(name), port }) = &known.service {
        match resolver.lookup(name).await {
            Ok(addresses) => all.extend(addresses.into_iter().map(|ip| SocketAddr::new(ip, *port))),
            Err(why) => {
                let remedy = "check mode.cloud.registry.siblings_service: a headless Service with \
                              publishNotReadyAddresses, or another name of all pods";
                found.bad("siblings", format!("{name}: {why}"), "the addresses of all pods", remedy);
            }
        }
    }
    let server = &settings.server;
    let identity = Identity { cert: server.cert.clone(), key: server.key.clone() };
    let client = TlsClientConfig {
        trust: Trust::Ca(server.ca.clone()),
        identity: Some(identity),
        alpn: vec![b"h2".to_vec()],
    };
    let name = known.name.clone().or_else(|| {
        let leaf = tls::certs(&server.cert, &std::fs::read(&server.cert).ok()?).ok()?;
        certificate::summary(leaf.first()?).ok()?.dns
    });
    let Some(name) = name.and_then(|name| tls::server_name(&name).ok()).filter(|_| !all.is_empty()) else {
        return;
    };
    let config = match client.load() {
        Ok(config) => config.load(),
        Err(why) => {
            let remedy = "put the authority that has signed the certificates of all pods there";
            return found.bad("siblings", why.to_string(), "the file mode.cloud.stream.server.ca", remedy);
        }
    };
    for at in all {
        let socket = match dial(&[at], TIMEOUT).await {
            Ok(socket) => socket,
            Err(why) => {
                let remedy = "see whether that pod runs, and let firewalls between pods pass the port";
                found.bad("siblings", why.to_string(), "a pod that answers", remedy);
                continue;
            }
        };
        let shaken = TlsConnector::from(config.clone()).connect(name.clone(), socket);
        match timeout(TIMEOUT, shaken).await.unwrap_or_else(|late| Err(late.into())) {
            Ok(_) => found.good("siblings", format!("{at} is a pod of this cloud")),
            Err(error) => {
                let fault = HandshakeError::of(&error);
                let wanted = format!("a certificate of mode.cloud.stream.server.ca for {:?}", name.to_str());
                let remedy = "all pods need certificates of one authority with one name in common (mode.cloud.registry.name)";
                found.bad(check_of(&fault), format!("pod {at}: {fault}"), &wanted, remedy);
            }
        }
    }
}

/// Whether this pod's lines stand in the hosts file; of other stores the running pod says in `/readyz` what is wrong.
fn published(settings: &ServerConfig, found: &mut Findings) {
    let PublishConfig::Hosts(file) = &settings.registry.publish else { return };
    let own = settings.pod_ip.map(|ip| ip.to_string()).unwrap_or_default();
    match std::fs::read_to_string(file) {
        Ok(text) => {
            let ours = text.lines().filter(|line| line.split_whitespace().next() == Some(&own)).count();
            found.good("registry", format!("{} has {ours} lines of this pod ({own})", file.display()));
        }
        Err(why) => {
            let remedy =
                "mode.cloud.registry.hosts has to be in a directory that the pod's user may write to";
            found.bad("registry", format!("{}: {why}", file.display()), "the hosts file", remedy);
        }
    }
}

/// Whether DNS leads the name of a node to a pod.
async fn answered(settings: &ServerConfig, node: &NodeName, system: Resolver, found: &mut Findings) {
    let registry = &settings.registry;
    let servers = registry.peers.dns.as_slice();
    let resolver = if servers.is_empty() { Ok(system) } else { Resolver::of_servers(servers) };
    let name = if registry.zone.is_empty() { node.to_string() } else { format!("{node}.{}", registry.zone) };
    let remedy = "see whether the node is linked (tunnel status), publish and zone of [mode.cloud.registry], and that the \
                  DNS servers in its dns read what is published";
    let answer = match resolver {
        Ok(resolver) => resolver.lookup(&name).await.map_err(|why| why.to_string()),
        Err(why) => Err(why.to_string()),
    };
    let servers: Vec<IpAddr> =
        settings.pod_ip.into_iter().chain(registry.peers.list.iter().map(SocketAddr::ip)).collect();
    match answer {
        Ok(addresses) if servers.is_empty() || addresses.iter().any(|ip| servers.contains(ip)) => {
            let shown: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            found.good("registry", format!("{name} is {}", shown.join(", ")));
        }
        Ok(addresses) => {
            found.bad("registry", format!("{name} is {addresses:?}"), &format!("one of {servers:?}"), remedy);
        }
        Err(why) => {
            found.bad("registry", format!("{name}: {why}"), "the address of the pod that has it", remedy)
        }
    }
}

// What an edge needs: the way to its cloud, what proves both to each other, and its targets.

type Secured = tokio_rustls::client::TlsStream<Buffered<TcpStream>>;

pub(crate) async fn look_edge(settings: &EdgeConfig, asked: &DoctorArgs, found: &mut Findings) {
    let client = &settings.client;
    let linked = running_edge(client.log_listen.at, found).await;
    let resolver = match Resolver::system() {
        Ok(resolver) => resolver,
        Err(why) => return found.bad("dns", why.to_string(), "", "mend /etc/resolv.conf"),
    };
    let url = client.https_proxy.as_ref().map(|url| url.reveal()).unwrap_or_default();
    let proxy = match HttpProxyClient::new(url, client.no_proxy.as_deref().unwrap_or_default()) {
        Ok(proxy) => proxy,
        Err(why) => return found.bad("proxy", why.to_string(), "", "correct HTTPS_PROXY, or take it away"),
    };
    for server in &client.servers {
        let proxy = proxy.as_ref().filter(|proxy| proxy.applies_to(&server.at));
        let Some(socket) = reach(server, proxy, &resolver, found).await else { continue };
        let Some(io) = secure(settings, server, socket, found).await else { continue };
        if !linked {
            call(settings, server, io, found).await;
        }
    }
    let dialer = TargetDialer {
        place: DialerRole::Node(client.node.clone()),
        own: LocalAddresses::of_interfaces(settings.own.clone()),
        targets: Arc::new(ArcSwap::from_pointee(settings.targets.clone())),
        listening: OwnListeners::default(),
        resolver,
    };
    for target in &asked.target {
        match dialer.dial(target, TIMEOUT).await {
            Ok(_) => found.good("target", format!("{target} answers")),
            Err(why) => {
                let remedy =
                    "start the service, or list the target in mode.edge.allow.targets if that forbids it";
                found.bad(
                    "target",
                    why.refusal.reason,
                    "a target that this edge may dial and that answers",
                    remedy,
                );
            }
        }
    }
}

/// Whether the edge of this machine runs and is linked.
async fn running_edge(at: SocketAddr, found: &mut Findings) -> bool {
    let Some((status, _)) = page(at, "/edge/healthz").await else {
        found.doubt(
            "edge",
            format!("no edge of this machine answers at {at}"),
            "start it: systemctl start tunnel-edge",
        );
        return false;
    };
    let (ready, body) = page(at, "/readyz").await.unwrap_or_default();
    for line in body.lines().filter(|line| *line != "ok") {
        let name = line.starts_with("name:");
        if ready == 200 && !name {
            found.doubt("edge", line, "");
        } else {
            let check = if name { "name" } else { "edge" };
            found.bad(check, line, "", if name { "give each machine its own name" } else { "" });
        }
    }
    if status == 200 {
        found.good("link", "the edge of this machine runs, and is linked");
    }
    status == 200
}

/// A connection to a place of the cloud.
async fn reach(
    server: &ServerAddress,
    proxy: Option<&HttpProxyClient>,
    resolver: &Resolver,
    found: &mut Findings,
) -> Option<TcpStream> {
    let Some(proxy) = proxy else {
        let addresses = resolve(&server.at, "mode.edge.stream.client.server_name", resolver, found).await?;
        return match dial(&addresses, TIMEOUT).await {
            Ok(socket) => {
                found.good("port", format!("{} answers", server.at));
                Some(socket)
            }
            Err(why) => {
                let remedy = "see whether a pod runs there, and let the firewalls between pass this port";
                found.bad("port", why.to_string(), "a pod that listens there", remedy);
                None
            }
        };
    };
    let addresses = resolve(proxy.at(), "HTTPS_PROXY", resolver, found).await?;
    match proxy.connect(&addresses, &server.at, TIMEOUT).await {
        Ok(socket) => {
            found.good("proxy", format!("{} is reached through {} (HTTPS_PROXY)", server.at, proxy.at()));
            Some(socket)
        }
        Err(why) => {
            let remedy = "list the cloud's host in NO_PROXY if it is reached without the proxy, or correct HTTPS_PROXY";
            found.bad("proxy", why.to_string(), "a proxy that leads to the cloud", remedy);
            None
        }
    }
}

async fn resolve(
    at: &Target,
    key: &str,
    resolver: &Resolver,
    found: &mut Findings,
) -> Option<Vec<SocketAddr>> {
    let addresses = match &at.host {
        Host::Ip(ip) => vec![*ip],
        Host::Name(name) => match resolver.lookup(name).await {
            Ok(addresses) => {
                let shown: Vec<_> = addresses.iter().map(ToString::to_string).collect();
                found.good("dns", format!("{name} is {}", shown.join(", ")));
                addresses
            }
            Err(why) => {
                let remedy = format!("check {key}, and the DNS servers of this machine");
                found.bad("dns", format!("{name}: {why}"), "an address", &remedy);
                return None;
            }
        },
    };
    Some(addresses.into_iter().map(|ip| SocketAddr::new(ip, at.port)).collect())
}

/// TLS as the edge wants it.
async fn secure(
    settings: &EdgeConfig,
    server: &ServerAddress,
    socket: TcpStream,
    found: &mut Findings,
) -> Option<Secured> {
    let trust = Trust::Ca(settings.client.ca.clone());
    let certificate = settings.csr.as_ref().filter(|_| settings.client.token.is_none()).map(|csr| &csr.file);
    if let Some(file) = certificate.filter(|file| !file.exists()) {
        let remedy =
            "see the edge's log; `tunnel approve` has to run: kubectl apply -k deploy/kustomize/approver";
        found.bad(
            "certificate",
            format!("there is no {} yet", file.display()),
            "a certificate, or a token",
            remedy,
        );
        return None;
    }
    let identity = certificate.map(|file| Identity { cert: file.clone(), key: file.clone() });
    // What is wrong with the file, or the name, was told of the config.
    let config = TlsClientConfig { trust, identity, alpn: vec![b"h2".to_vec()] }.load().ok()?;
    let name = tls::server_name(&server.dns.to_string()).ok()?;
    let shaken = TlsConnector::from(config.load()).connect(name, Buffered::new(socket, Pool::new()));
    match timeout(TIMEOUT, shaken).await {
        Ok(Ok(io)) => {
            found.good(
                "tls",
                format!("{} shows a certificate for {} of our authority", server.at, server.dns),
            );
            Some(io)
        }
        Ok(Err(error)) => {
            let fault = HandshakeError::of(&error);
            let wanted = format!("a certificate for {}, signed by mode.edge.stream.client.cert", server.dns);
            found.bad(check_of(&fault), format!("{}: {fault}", server.at), &wanted, tls_remedy(&fault));
            None
        }
        Err(_) => {
            let remedy = "see whether a pod listens there, or something that only waits";
            found.bad("tls", format!("{}: no handshake within {TIMEOUT:?}", server.at), "", remedy);
            None
        }
    }
}

/// A link as the edge makes it, given up at once: only so it shows whether token, name and dialect will do.
async fn call(settings: &EdgeConfig, server: &ServerAddress, io: Secured, found: &mut Findings) {
    let client = &settings.client;
    let text = match &client.token {
        None => String::new(),
        Some(Token::Text(token)) => token.reveal().to_owned(),
        Some(Token::File(file)) => std::fs::read_to_string(file).unwrap_or_default(),
    };
    let token = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let metrics = Metrics::edge();
    let limits = SessionLimits {
        windows: WindowLimits { start: 32 * 1024, max: 32 * 1024 },
        memory: 1 << 20,
        sessions: 1,
        grace: Duration::ZERO,
    };
    let table = SessionTable::new(Instance::random(), limits, metrics.clone());
    let link_context = LinkContext { table, metrics, drain: Drain::new(), congestion: None };
    let authority = Target { host: server.dns.clone(), port: server.at.port }.to_string();
    let said = Hello::edge_request(&client.node, token, link_context.table.instance());
    match tunnel_link::grpc::dial::dial(io, &authority, &client.node, said, &link_context).await {
        Ok(link) => {
            found.good("token", format!("{} takes it for {}", server.at, client.node));
            if link.sender.dialect == Dialect::Plain {
                let text = "the cloud speaks SuperEdge's dialect only: a session ends with its link";
                found.doubt("dialect", text, "run this program as the cloud, too");
            } else {
                found.good("dialect", link.sender.dialect.to_string());
            }
            link.sender.close();
        }
        Err(why @ LinkDialError::Refused { .. }) if why.is_token_refused() => {
            let remedy = "compare token or token_file here with this node's line in the cloud's tokenfile, and see that a Node of \
                          this name has an edge label; the pod's log says more";
            found.bad("token", why.to_string(), "proof of this node that the cloud takes", remedy);
        }
        Err(why) if why.is_name_taken() => {
            let remedy = "give each machine its own name (node, or NODE_NAME)";
            found.bad("name", why.to_string(), "a name that no other machine has", remedy);
        }
        Err(why) => found.bad("link", why.to_string(), "a link", "see the pod's log"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_told_with_what_was_wanted_and_what_to_do() {
        let mut found = Findings::default();
        found.good("config", "fine");
        assert!(found.is_well());
        found.bad("token", "invalid token", "the cloud's", "compare them");
        assert!(!found.is_well());
        let text = found.text();
        for part in
            ["ok   config", "FAIL token", "wanted the cloud's", "do compare them", "2 checks, 1 failed"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&found.json()).unwrap();
        assert_eq!((&json[1]["state"], &json[1]["check"]), (&"bad".into(), &"token".into()));
        assert!(json[0].get("remedy").is_none());
    }
}
