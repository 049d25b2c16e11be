//! Checks of a server: certificates, tokens, peers, and records of its nodes.

use crate::command::doctor::tokens;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::command::doctor::{
    AdminAddress, DoctorArgs, DoctorFindings, TIMEOUT, add_conditions, admin_address, check_certificate,
    check_of, fetch_page, not_responding,
};
use crate::config::server::registry::PublishTo;
use crate::parts::with_kubernetes;
use crate::server::config::ServerConfig;
use tunnel_base::files;
use tunnel_net::dial::dial;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::certificate::{self};
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::{self, IdentityFiles, TlsClientConfig, Trust, pem};
use tunnel_proto::names::{Host, NodeName, Target};

pub(super) async fn check_server(
    settings: &ServerConfig,
    args: &DoctorArgs,
    ports: &[(String, SocketAddr)],
    found: &mut DoctorFindings,
) {
    certificates(settings, found);
    let admin = admin_address(&settings.links.ports, &settings.admin).await;
    check_running_server(&admin, ports, found).await;
    check_server_nodes(settings, found).await;
    let resolver = Resolver::system();
    tokens::check(settings, &admin, &resolver, found).await;
    check_peers(settings, &resolver, found).await;
    check_hosts_file(settings, found);
    if let Some(node) = &args.node {
        check_dns_answer(settings, node, resolver, found).await;
    }
}

pub(super) fn certificates(settings: &ServerConfig, found: &mut DoctorFindings) {
    for (key, file) in settings.server_certificates() {
        check_certificate(&file, &key, found);
    }
}

/// Checks that the cluster has a Node on which the manifests allow servers to run.
async fn check_server_nodes(settings: &ServerConfig, found: &mut DoctorFindings) {
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
async fn check_running_server(at: &AdminAddress, ports: &[(String, SocketAddr)], found: &mut DoctorFindings) {
    match fetch_page(at, "/readyz").await {
        Err(why) => not_responding("server", at, &why, ports, found),
        Ok((200, body)) if body.trim() == "ok" => {
            found.add_ok("server", "the server on this machine is ready")
        }
        Ok((_, body)) => add_conditions("server", &body, found),
    }
}

/// Checks that peers can be found and reached, and present a server's certificate.
async fn check_peers(settings: &ServerConfig, resolver: &Resolver, found: &mut DoctorFindings) {
    let known = &settings.peers;
    let mut all = known.addresses.clone();
    if let Some(at @ Target { host: Host::Name(name), .. }) = &known.dns_name {
        match resolver.lookup_target(at).await {
            Ok(addresses) => all.extend(addresses),
            Err(why) => {
                let hint = "check server.peers.dns_name: a headless Service with \
                              publishNotReadyAddresses, or another name of all servers";
                found.add_error("peers", format!("{name}: {why}"), "the addresses of all servers", hint);
            }
        }
    }
    let links = &settings.links;
    let identity = IdentityFiles { cert: links.cert.clone(), key: links.key.clone() };
    let client = TlsClientConfig {
        trust: Trust::Ca(links.peer_ca.clone()),
        identity: Some(identity),
        alpn: vec![b"h2".to_vec()],
    };
    let name =
        known.certificate_name.clone().or_else(|| certificate::summary(&pem::leaf(&links.cert)?).ok()?.dns);
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
                let fault = TlsHandshakeError::of(&error);
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
fn peer_remedy(fault: &TlsHandshakeError) -> &'static str {
    match fault {
        TlsHandshakeError::Expired(..) => {
            "renew server.links.cert of that server; it is reloaded without a restart"
        }
        TlsHandshakeError::NotValidYet(..) => "set this machine's clock if it is wrong, or wait",
        _ => "give all servers certificates from one CA with one common name (server.peers.certificate_name)",
    }
}

/// Checks that the hosts file contains this server's lines. For other stores, `/readyz` of the running server reports
/// errors.
fn check_hosts_file(settings: &ServerConfig, found: &mut DoctorFindings) {
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
async fn check_dns_answer(
    settings: &ServerConfig,
    node: &NodeName,
    system: Resolver,
    found: &mut DoctorFindings,
) {
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
