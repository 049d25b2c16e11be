//! `tunnel doctor`: checks everything that a server or an edge on this machine needs, and reports errors.

mod handshakes;
mod service_user;
mod tokens;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::Method;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

use crate::acceptor::{DialerRole, TargetDialer};
use crate::command::doctor::handshakes::handshakes;
use crate::command::doctor::service_user::files;
use crate::command::serve::Settings;
use crate::command::{Format, Role, admin_api, json};
use crate::config::Environment;
use crate::config::admin_ports::AdminPorts;
use crate::config::edge::ServerAddress;
use crate::config::listen::{AdminConfig, ListenAddress};
use crate::config::server::registry::PublishTo;
use crate::edge::config::EdgeConfig;
use crate::parts::with_kubernetes;
use crate::server::config::ServerConfig;
use crate::startup::{NotPrepared, Startup};
use crate::uplink::link_dialer::messages::connection_hint;
use tunnel_base::files;
use tunnel_base::names::{Host, NodeName, Target};
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::HttpProxyClient;
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::listen::TcpAccept;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::certificate::{self, CertWarningKind, CertificateWarning};
use tunnel_net::tls::error::HandshakeError;
use tunnel_net::tls::{self, Identity, TlsClientConfig, Trust};
use tunnel_proto::frame::ErrorCode;

/// Arguments of `tunnel doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Role of this machine: a server or an edge.
    #[arg(value_name = "ROLE")]
    pub role: Role,
    /// Its config file. [default: /etc/tunnel/ROLE.toml]
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Target (host:port) that is also dialled from here, as the edge would; may be repeated.
    #[arg(long, value_name = "TARGET")]
    pub target: Vec<Target>,
    /// Node that is also looked up in DNS, as by clients and peers.
    #[arg(long, value_name = "NODE")]
    pub node: Option<NodeName>,
    /// Kubeconfig file of the program.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: Format,
}

/// The results, in the order of the checks.
#[derive(Debug, Default, Serialize)]
pub struct Findings(Vec<Finding>);

/// The result of one check of `tunnel doctor`, printed as a line or as JSON.
#[derive(Debug, Serialize)]
struct Finding {
    /// Name of the check; one or two fixed words.
    check: &'static str,
    /// Outcome; a warning is about what works, but perhaps not as intended, or not for long.
    status: CheckStatus,
    /// What was found.
    found: String,
    /// What was expected.
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<String>,
    /// A hint what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

/// The outcome of one check of `tunnel doctor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum CheckStatus {
    Ok,
    /// It works, but perhaps not as intended, or not for long.
    Warning,
    Error,
}

/// Runs all checks. `variable` returns environment variables by name.
pub async fn run(args: &DoctorArgs, variable: fn(&str) -> Option<String>) -> Findings {
    let (mut found, mut startup) = (Findings::default(), Startup::checking());
    let path = args.config.clone().unwrap_or_else(|| args.role.config());
    let read = Settings::examine(args.role, &path, args.kubeconfig.as_deref(), variable, &mut startup);
    if let Ok((settings, _, warnings)) = &read {
        for warning in warnings {
            found.add_warning("config", format!("{}: {}", warning.key, warning.text), "");
        }
        settings.check(&mut startup);
    }
    let ports = startup.ports().to_vec();
    let errors = startup.into_errors();
    for fault in &errors {
        found.add_error("config", fault.to_string(), "a config and files without errors", "");
    }
    if errors.iter().next().is_none() {
        found.add_ok("config", format!("{} and the files that it names are readable", path.display()));
    }
    match read {
        Ok((Settings::Cloud(settings), ..)) => {
            let public = settings.server_certificates().into_iter().chain(settings.ca_files()).collect();
            files(&path, public, settings.secrets(), &mut found);
            Box::pin(check_server(&settings, args, &ports, &mut found)).await;
        }
        Ok((Settings::Edge(settings), ..)) => {
            let public = vec![("edge.uplink.ca".to_owned(), settings.uplink.ca.clone())];
            files(&path, public, settings.secrets(&path), &mut found);
            Box::pin(check_edge(&settings, args, &ports, &mut found)).await;
        }
        Err(NotPrepared) => {}
    }
    found
}

/// Records that nothing runs on this machine, and tries its `ports`, each with its key.
fn not_running(
    program: &'static str,
    at: &AdminAddress,
    why: &str,
    ports: &[(String, SocketAddr)],
    found: &mut Findings,
) {
    if matches!(at, Ok(ListenAddress::Port(at)) if at.port() == 0) {
        found.add_warning(program, "its admin_listen has port 0, so it cannot be asked whether it runs", "");
    } else {
        let unit = if program == "edge" { "tunnel-edge" } else { "tunnel-server" };
        let text = format!("no {program} on this machine responds: {why}");
        let hint = format!("start it with systemctl start {unit}; if it ends, see journalctl -u {unit}");
        found.add_error(program, text, &format!("a running {program}"), &hint);
    }
    for (key, at) in ports {
        // The units grant the right to ports below 1024.
        if let Err(error) = TcpAccept::bind(*at)
            && error.cause.kind() != ErrorKind::PermissionDenied
        {
            let hint = "end that program, or set another address";
            found.add_error("port", format!("{key}: {error}"), "an address that is free", hint);
        }
    }
}

impl Findings {
    /// Returns true if no check failed.
    pub fn is_well(&self) -> bool {
        self.0.iter().all(|finding| finding.status != CheckStatus::Error)
    }

    /// Returns all results as text, a few lines each.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Finding { check, status: state, found, expected: expectation, hint } in &self.0 {
            let state = match state {
                CheckStatus::Ok => "ok",
                CheckStatus::Warning => "warn",
                CheckStatus::Error => "FAIL",
            };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{state:4} {check:18} {found}");
            for (what, given) in [("expected", expectation), ("hint", hint)] {
                if let Some(given) = given {
                    let _ = writeln!(text, "     {what:>18} {given}");
                }
            }
        }
        let bad = self.0.iter().filter(|finding| finding.status == CheckStatus::Error).count();
        let _ = writeln!(text, "{} checks, {bad} failed", self.0.len());
        text
    }

    /// Returns all results as JSON: a list of objects with `check`, `status`, `found`, `expected`, `hint`.
    pub fn json(&self) -> String {
        json(self)
    }

    fn add_ok(&mut self, check: &'static str, found: impl Into<String>) {
        self.add(check, CheckStatus::Ok, found, "", "");
    }

    fn add_warning(&mut self, check: &'static str, found: impl Into<String>, hint: &str) {
        self.add(check, CheckStatus::Warning, found, "", hint);
    }

    fn add_error(&mut self, check: &'static str, found: impl Into<String>, expectation: &str, hint: &str) {
        self.add(check, CheckStatus::Error, found, expectation, hint);
    }

    /// Returns true if what was found contains this text.
    fn contains(&self, text: &str) -> bool {
        self.0.iter().any(|finding| finding.found.contains(text))
    }

    /// Adds a refused token, with the hint of its error, and one about the server.
    fn add_token_error(&mut self, error: impl Into<String>, hint: Option<&str>) {
        let at_server = "check that a Node of this name has an edge label; see the server's log";
        let hint = hint.map_or(at_server.to_owned(), |hint| format!("{hint}; {at_server}"));
        self.add_error("token", error, "a token or certificate that the server accepts", &hint);
    }

    fn add(
        &mut self,
        check: &'static str,
        state: CheckStatus,
        found: impl Into<String>,
        expectation: &str,
        hint: &str,
    ) {
        let given = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        self.0.push(Finding {
            check,
            status: state,
            found: found.into(),
            expected: given(expectation),
            hint: given(hint),
        });
    }
}

/// Returns the check that a TLS error belongs to.
fn check_of(fault: &HandshakeError) -> &'static str {
    match fault {
        HandshakeError::UnknownIssuer => "ca",
        HandshakeError::Name(_) => "certificate name",
        HandshakeError::Expired(..) => "certificate dates",
        HandshakeError::NotValidYet(..) => "clock",
        HandshakeError::CaUsedAsEndEntity | HandshakeError::Purpose | HandshakeError::OtherCertificate(_) => {
            "certificate kind"
        }
        HandshakeError::NotTls | HandshakeError::Protocol | HandshakeError::Closed => "port",
        HandshakeError::Stopping | HandshakeError::AlertReceived(_) | HandshakeError::Other(_) => "tls",
    }
}

/// Adds the names and the expiry of a file's certificate, and any problems with it.
fn check_certificate(file: &Path, key: &str, found: &mut Findings) {
    let read = files::read(file).ok().and_then(|text| tls::certs(file, &text).ok());
    let Some(leaf) = read.and_then(|certs| certs.into_iter().next()) else { return };
    let summary = match certificate::summary(&leaf) {
        Ok(summary) => summary,
        Err(why) => {
            let (text, expectation) =
                (format!("{key}: {} {why}", file.display()), "a certificate of version 3");
            return found.add_error("certificate kind", text, expectation, "reissue it: `tunnel cert issue`");
        }
    };
    let (names, until) = (summary.names.join(", "), &summary.until);
    if summary.oddities.is_empty() {
        found.add_ok("certificate", format!("{key}: for {names}, valid until {until}"));
    }
    for CertificateWarning { about, found: odd, hint } in summary.oddities {
        let check = match about {
            CertWarningKind::Kind => "certificate kind",
            CertWarningKind::Dates => "certificate dates",
            CertWarningKind::Clock => "clock",
        };
        found.add_error(
            check,
            format!("{key}: {} {odd}", file.display()),
            "a server certificate that is valid now",
            hint,
        );
    }
    if (0..WARN_BEFORE_EXPIRY_DAYS).contains(&summary.days) {
        let text = format!("{key}: {} expires on {until}, in {} days", file.display(), summary.days);
        found.add_warning(
            "certificate dates",
            text,
            "renew it where its CA's key is: `tunnel cert renew`; it is re-read without a restart",
        );
    }
}

/// Adds the conditions of a running program, which are the lines of its `/readyz`. Most of them are warnings.
fn add_conditions(program: &'static str, body: &str, found: &mut Findings) {
    for line in body.lines().filter(|line| *line != "ok") {
        match line.split(':').next() {
            Some("link") => {
                found.add_error(program, line, "", "see the check that fails below, or the log of the edge")
            }
            Some("draining") => found.add_error(program, line, "", "start it again once it has ended"),
            Some("node_name") => found.add_error("name", line, "", "give each machine its own name"),
            // The edge's text has the hint of its error.
            Some("token") => found.add_token_error(line, None),
            Some("certificates") if line.contains(" expired on ") => {
                found.add_error("certificate dates", line, "files that are valid now", "")
            }
            _ => found.add_warning(program, line, ""),
        }
    }
}

/// Where the program with a config responds: at the port that a key sets, unless it uses TLS. Otherwise at its socket, as
/// another program may have the default port. An error says why there is no socket.
type AdminAddress = Result<ListenAddress, String>;

async fn admin_address(ports: &AdminPorts, admin: &AdminConfig) -> AdminAddress {
    let at = ports.admin_listen;
    if !ports.is_default && admin.tls.is_none() {
        let local = SocketAddr::new([127, 0, 0, 1].into(), at.port());
        return Ok(ListenAddress::Port(if at.ip().is_unspecified() { local } else { at }));
    }
    let env = Environment { runtime_dir: admin.runtime_dir.clone(), ..Environment::default() };
    let socket = admin_api::socket(admin.listen.clone(), &[admin.name], &env).await;
    socket.map(|socket| ListenAddress::Unix(socket.path)).map_err(|error| error.text)
}

/// Returns status and body of a page of the admin listener, or why there is no response.
async fn fetch_page(at: &AdminAddress, path: &str) -> Result<(u16, String), String> {
    match at.as_ref()? {
        ListenAddress::Port(at) => {
            let failed = |cause: String| format!("{at}: {cause}");
            let socket =
                dial(&Host::Ip(at.ip()), &[*at], TIMEOUT).await.map_err(|cause| failed(cause.to_string()))?;
            admin_api::exchange(socket, Method::GET, path, Bytes::new()).await.map_err(failed)
        }
        ListenAddress::Unix(socket) => {
            admin_api::ask(socket, Method::GET, path, "").await.map_err(|error| error.text)
        }
    }
}

/// Timeout for each step of a check.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A certificate causes a warning in this many days before its expiry.
const WARN_BEFORE_EXPIRY_DAYS: i64 = 30;

// Checks of a server: certificates, tokens, peers, and records of its nodes.

async fn check_server(
    settings: &ServerConfig,
    args: &DoctorArgs,
    ports: &[(String, SocketAddr)],
    found: &mut Findings,
) {
    certificates(settings, found);
    let admin = admin_address(&settings.links.ports, &settings.admin).await;
    check_running_server(&admin, ports, found).await;
    check_server_nodes(settings, found).await;
    let resolver = match Resolver::system() {
        Ok(resolver) => resolver,
        Err(why) => return found.add_error("dns", why.to_string(), "", "fix /etc/resolv.conf"),
    };
    tokens::check(settings, &admin, &resolver, found).await;
    check_peers(settings, &resolver, found).await;
    check_hosts_file(settings, found);
    if let Some(node) = &args.node {
        check_dns_answer(settings, node, resolver, found).await;
    }
}

fn certificates(settings: &ServerConfig, found: &mut Findings) {
    for (key, file) in settings.server_certificates() {
        check_certificate(&file, &key, found);
    }
}

/// Checks that the cluster has a Node on which the manifests allow servers to run.
async fn check_server_nodes(settings: &ServerConfig, found: &mut Findings) {
    let Some(cluster) = &settings.addresses.cluster else { return };
    let nodes: Result<BTreeSet<String>, String> = with_kubernetes!(
        api::cluster::nodes(cluster.clone(), Some(SERVER_NODE_LABEL)).await,
        else Ok(Default::default())
    );
    match nodes {
        Ok(nodes) if nodes.is_empty() => {
            let text = format!(
                "no Node has the label {SERVER_NODE_LABEL}, so servers of the manifests stay Pending"
            );
            found.add_warning(
                "nodes",
                text,
                &format!("run `kubectl label node NODE {SERVER_NODE_LABEL}` for Nodes that are not edges"),
            );
        }
        Ok(nodes) => found.add_ok("nodes", format!("{} Nodes have the server label", nodes.len())),
        Err(why) => found.add_warning("nodes", why, ""),
    }
}

/// The label that the manifests require of a server's Node. No kubelet can set it on itself.
const SERVER_NODE_LABEL: &str = "node-restriction.kubernetes.io/tunnel-server=true";

/// Checks the server on this machine by its readiness.
async fn check_running_server(at: &AdminAddress, ports: &[(String, SocketAddr)], found: &mut Findings) {
    match fetch_page(at, "/readyz").await {
        Err(why) => not_running("server", at, &why, ports, found),
        Ok((200, body)) if body.trim() == "ok" => {
            found.add_ok("server", "the server on this machine is ready")
        }
        Ok((_, body)) => add_conditions("server", &body, found),
    }
}

/// Checks that peers can be found and reached, and present a server's certificate.
async fn check_peers(settings: &ServerConfig, resolver: &Resolver, found: &mut Findings) {
    let known = &settings.peers;
    let mut all = known.addresses.clone();
    if let Some(Target { host: Host::Name(name), port }) = &known.dns_name {
        match resolver.lookup(name).await {
            Ok(addresses) => all.extend(addresses.into_iter().map(|ip| SocketAddr::new(ip, *port))),
            Err(why) => {
                let hint = "check server.peers.dns_name: a headless Service with \
                              publishNotReadyAddresses, or another name of all servers";
                found.add_error("peers", format!("{name}: {why}"), "the addresses of all servers", hint);
            }
        }
    }
    let links = &settings.links;
    let identity = Identity { cert: links.cert.clone(), key: links.key.clone() };
    let client = TlsClientConfig {
        trust: Trust::Ca(links.peer_ca.clone()),
        identity: Some(identity),
        alpn: vec![b"h2".to_vec()],
    };
    let name = known.certificate_name.clone().or_else(|| {
        let leaf = tls::certs(&links.cert, &files::read(&links.cert).ok()?).ok()?;
        certificate::summary(leaf.first()?).ok()?.dns
    });
    let Some(name) = name.and_then(|name| tls::server_name(&name).ok()).filter(|_| !all.is_empty()) else {
        return;
    };
    let config = match client.load() {
        Ok(config) => config.load(),
        Err(why) => {
            let hint = "correct cert, key and peer_ca of [server.links]";
            return found.add_error("peers", why.to_string(), "files that belong together", hint);
        }
    };
    for at in all {
        let socket = match dial(&Host::Ip(at.ip()), &[at], TIMEOUT).await {
            Ok(socket) => socket,
            Err(why) => {
                let hint =
                    "check that this peer is running, and that firewalls between servers allow the port";
                found.add_error("peers", why.to_string(), "a server that responds", hint);
                continue;
            }
        };
        let accepted = TlsConnector::from(config.clone()).connect(name.clone(), socket);
        match timeout(TIMEOUT, accepted).await.unwrap_or_else(|late| Err(late.into())) {
            Ok(_) => found.add_ok("peers", format!("{at} is a server of this cloud")),
            Err(error) => {
                let fault = HandshakeError::of(&error);
                let expectation = format!("a certificate of server.links.peer_ca for {:?}", name.to_str());
                found.add_error(
                    check_of(&fault),
                    format!("server {at}: {fault}"),
                    &expectation,
                    peer_remedy(&fault),
                );
            }
        }
    }
}

/// Returns the hint for a failed handshake with a peer.
fn peer_remedy(fault: &HandshakeError) -> &'static str {
    match fault {
        HandshakeError::Expired(..) => {
            "renew server.links.cert of that server; it is reloaded without a restart"
        }
        HandshakeError::NotValidYet(..) => "set this machine's clock if it is wrong, or wait",
        _ => "give all servers certificates from one CA with one common name (server.peers.certificate_name)",
    }
}

/// Checks that the hosts file contains this server's lines. For other stores, `/readyz` of the running server reports
/// errors.
fn check_hosts_file(settings: &ServerConfig, found: &mut Findings) {
    let Some(file) = settings.dns.hosts_file.as_ref().filter(|_| settings.dns.publish == PublishTo::Hosts)
    else {
        return;
    };
    let own = settings.pod_ip.map(|ip| ip.to_string()).unwrap_or_default();
    match files::read_text(file) {
        Ok(text) => {
            let ours = text.lines().filter(|line| line.split_whitespace().next() == Some(&own)).count();
            found.add_ok("registry", format!("{} has {ours} lines of this server ({own})", file.display()));
        }
        Err(why) => {
            let hint = "put server.dns.hosts_file into a directory that the server's user may write to";
            found.add_error("registry", format!("{}: {why}", file.display()), "the hosts file", hint);
        }
    }
}

/// Checks that a node's name resolves to a server.
async fn check_dns_answer(settings: &ServerConfig, node: &NodeName, system: Resolver, found: &mut Findings) {
    let dns = &settings.dns;
    let servers = dns.resolvers.as_slice();
    let resolver = if servers.is_empty() { Ok(system) } else { Resolver::of_servers(servers) };
    let name = if dns.zone.is_empty() { node.to_string() } else { format!("{node}.{}", dns.zone) };
    let hint = "check that the node is connected (tunnel status), check publish and zone of [server.dns], and that the \
                  DNS servers in its dns read the published records";
    let answer = match resolver {
        Ok(resolver) => resolver.lookup(&name).await.map_err(|why| why.to_string()),
        Err(why) => Err(why.to_string()),
    };
    let servers: Vec<IpAddr> =
        settings.pod_ip.into_iter().chain(settings.peers.addresses.iter().map(SocketAddr::ip)).collect();
    match answer {
        Ok(addresses) if servers.is_empty() || addresses.iter().any(|ip| servers.contains(ip)) => {
            let shown: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            found.add_ok("registry", format!("{name} resolves to {}", shown.join(", ")));
        }
        Ok(addresses) => {
            found.add_error(
                "registry",
                format!("{name} resolves to {addresses:?}"),
                &format!("one of {servers:?}"),
                hint,
            );
        }
        Err(why) if dns.publish == PublishTo::None => {
            let hint = "set publish in [server.dns] if clients should find nodes by DNS";
            found.add_warning("registry", format!("{name}: {why}; this server publishes nothing"), hint);
        }
        Err(why) => {
            found.add_error("registry", format!("{name}: {why}"), "the address of the node's server", hint)
        }
    }
}

// Checks of an edge: connection to the servers, mutual authentication, and targets.

async fn check_edge(
    settings: &EdgeConfig,
    args: &DoctorArgs,
    ports: &[(String, SocketAddr)],
    found: &mut Findings,
) {
    let client = &settings.uplink;
    let admin = admin_address(&client.ports, &settings.admin).await;
    let linked = check_running_edge(&admin, client.token_file.as_deref(), ports, found).await;
    let resolver = match Resolver::system() {
        Ok(resolver) => resolver,
        Err(why) => return found.add_error("dns", why.to_string(), "", "fix /etc/resolv.conf"),
    };
    let url = client.https_proxy.as_ref().map(|url| url.reveal()).unwrap_or_default();
    let proxy = match HttpProxyClient::new(url, client.no_proxy.as_deref().unwrap_or_default()) {
        Ok(proxy) => proxy,
        Err(why) => return found.add_error("proxy", why.to_string(), "", "correct HTTPS_PROXY, or unset it"),
    };
    for server in &client.server_addresses().collect::<Vec<_>>() {
        let proxy = proxy.as_ref().filter(|proxy| proxy.applies_to(&server.at));
        let Some(socket) = reach(server, proxy, &resolver, found).await else { continue };
        handshakes(settings, server, socket, proxy, linked, found).await;
    }
    let dialer = TargetDialer {
        place: DialerRole::Node(client.node.clone()),
        own: LocalAddresses::of_interfaces(settings.own.clone()),
        targets: Arc::new(ArcSwap::from_pointee(settings.allow.targets.clone())),
        resolver,
    };
    for target in &args.target {
        match dialer.dial(target, TIMEOUT).await {
            Ok(_) => found.add_ok("target", format!("{target} accepts connections")),
            Err(why) => {
                let (expectation, hint) = target_remedy(why.refusal.code);
                found.add_error("target", why.refusal.reason, expectation, hint);
            }
        }
    }
}

/// Returns what was expected of a target that was not dialled because of this error, and a hint.
fn target_remedy(code: ErrorCode) -> (&'static str, &'static str) {
    match code {
        ErrorCode::NotAllowed => (
            "a target that the edge may dial",
            "add it to targets in [edge.allow], and keep the entries of the list",
        ),
        ErrorCode::TargetTimeout => {
            ("a target that answers", "check its address, and that no firewall drops connections to it")
        }
        _ => ("a target that accepts connections", "start the service, and check its address and port"),
    }
}

/// Checks that the edge on this machine runs. Returns true if it is connected.
async fn check_running_edge(
    at: &AdminAddress,
    token_file: Option<&Path>,
    ports: &[(String, SocketAddr)],
    found: &mut Findings,
) -> bool {
    let status = match fetch_page(at, "/edge/healthz").await {
        Ok((status, _)) => status,
        Err(why) => {
            not_running("edge", at, &why, ports, found);
            return false;
        }
    };
    if let (200, Some(file)) = (status, token_file) {
        wait_until_tried(file).await;
    }
    let (ready, body) = fetch_page(at, "/readyz").await.unwrap_or_default();
    add_conditions("edge", &body, found);
    // A link to a server that stops has only its earlier sessions.
    if status == 200 && ready == 200 {
        found.add_ok("link", "the edge on this machine runs and is connected");
    }
    status == 200
}

/// Waits until a connected edge has tried the tokens of a file that has just changed. Only the edge can try them: for
/// the servers, this command is another process with the name of its node.
async fn wait_until_tried(file: &Path) {
    let changed = std::fs::metadata(file).and_then(|found| found.modified());
    let age = changed.map_or(TOKEN_TRIED_WITHIN, |at| at.elapsed().unwrap_or_default());
    sleep(TOKEN_TRIED_WITHIN.saturating_sub(age)).await;
}

/// Time in which an edge reads a changed token file and dials with it.
const TOKEN_TRIED_WITHIN: Duration = Duration::from_secs(10);

/// Connects to a server's address.
async fn reach(
    server: &ServerAddress,
    proxy: Option<&HttpProxyClient>,
    resolver: &Resolver,
    found: &mut Findings,
) -> Option<TcpStream> {
    let Some(proxy) = proxy else {
        let addresses = resolve(&server.at, "edge.uplink.servers", resolver, found).await?;
        return match dial(&server.at.host, &addresses, TIMEOUT).await {
            Ok(socket) => {
                found.add_ok("port", format!("{} accepts connections", server.at));
                Some(socket)
            }
            Err(why) => {
                let hint = connection_hint(why.first());
                found.add_error("port", why.to_string(), "a server that listens there", hint);
                None
            }
        };
    };
    let addresses = resolve(proxy.at(), "HTTPS_PROXY", resolver, found).await?;
    match proxy.connect(&addresses, &server.at, TIMEOUT).await {
        Ok(socket) => {
            found.add_ok("proxy", format!("{} is reached through {} (HTTPS_PROXY)", server.at, proxy.at()));
            Some(socket)
        }
        Err(why) => {
            let hint = "add the server's host to NO_PROXY if it is reachable without the proxy, or correct HTTPS_PROXY";
            found.add_error("proxy", why.to_string(), "a proxy that connects to the server", hint);
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
                found.add_ok("dns", format!("{name} resolves to {}", shown.join(", ")));
                addresses
            }
            Err(why) => {
                let hint = format!("check {key}, and the DNS servers of this machine");
                found.add_error("dns", format!("{name}: {why}"), "an address", &hint);
                return None;
            }
        },
    };
    Some(addresses.into_iter().map(|ip| SocketAddr::new(ip, at.port)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_fails_only_for_conditions_that_need_action_now() {
        let mut found = Findings::default();
        let key = "edge.uplink.ca (/etc/tunnel/certs/ca.crt)";
        let body = format!(
            "ok\ncertificates: {key} expires in 10 days, on 2026-12-06; replace the file\nfiles: token is empty\n"
        );
        add_conditions("edge", &body, &mut found);
        assert!(found.is_well() && found.0.len() == 2, "{found:?}");
        for (line, check) in [
            (format!("certificates: {key} expired on 2026-11-01; replace the file"), "certificate dates"),
            ("token: no link with the changed token".to_owned(), "token"),
            ("link: no server answers; reconnecting".to_owned(), "edge"),
            ("node_name: two machines".to_owned(), "name"),
        ] {
            let mut found = Findings::default();
            add_conditions("edge", &line, &mut found);
            assert!(!found.is_well() && found.0[0].check == check, "{found:?}");
        }
    }

    #[test]
    fn doctor_gives_different_remedies_for_forbidden_refused_and_silent_targets() {
        let codes = [ErrorCode::NotAllowed, ErrorCode::TargetUnreachable, ErrorCode::TargetTimeout];
        let [forbidden, refused, silent] = codes.map(|code| target_remedy(code).1);
        assert!(forbidden.contains("[edge.allow]") && refused.contains("start the service"));
        assert!(silent.contains("firewall") && !refused.contains("edge.allow"));
    }

    #[test]
    fn doctor_prints_findings_with_expectation_and_hint() {
        let mut found = Findings::default();
        found.add_ok("config", "fine");
        assert!(found.is_well());
        found.add_error("token", "invalid token", "the cloud's", "compare them");
        assert!(!found.is_well());
        let text = found.text();
        for part in
            ["ok   config", "FAIL token", "expected the cloud's", "hint compare them", "2 checks, 1 failed"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&found.json()).unwrap();
        assert_eq!((&json[1]["status"], &json[1]["check"]), (&"error".into(), &"token".into()));
        assert!(json[0].get("hint").is_none());
    }
}
