//! Checks of a server: certificates, tokens, peers, and records of its nodes.

mod tokens;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::command::doctor::running::{admin_address, check_running};
use crate::command::doctor::server_checks::tokens::check_tokens;
use crate::command::doctor::service_user::check_files;
use crate::command::doctor::{
    CheckedProgram, DoctorFindings, Finding, TIMEOUT, Tested, WARN_BEFORE_EXPIRY_DAYS, check_of,
};
use crate::config::server::registry::PublishTo;
use crate::parts::with_kubernetes;
use crate::server::config::ServerConfig;
use tunnel_base::files;
use tunnel_net::dial::dial;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::certificate::{self, CertWarningKind, CertificateWarning};
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::{self, IdentityFiles, TlsClientConfig, Trust, pem};
use tunnel_proto::names::{Host, Target};

/// Makes all checks of a server.
pub(super) async fn check(checked: &CheckedProgram<'_>, found: &mut DoctorFindings) {
    let Some(settings) = checked.settings.of::<ServerConfig>() else { return };
    let resolver = &checked.resolver;
    let public = settings.server_certificates().into_iter().chain(settings.ca_files()).collect();
    check_files(checked.path, public, settings.secrets(), found);
    for (key, file) in settings.server_certificates() {
        found.test(async |found| check_certificate(&file, &key, found)).await;
    }
    let admin = admin_address(&settings.links.ports, &settings.admin).await;
    check_running("server", &admin, None, checked.ports, found).await;
    check_nodes(settings, found).await;
    found.test(async |found| check_tokens(settings, &admin, resolver, found).await).await;
    found.test(async |found| check_peers(settings, resolver, found).await).await;
    found.test(async |found| check_hosts_file(settings, found)).await;
    check_dns_answer(settings, checked, found).await;
}

/// Adds the names and the expiry of a file's certificate, and any problems with it.
fn check_certificate(file: &Path, key: &str, found: &mut DoctorFindings) -> Tested {
    let Some(leaf) = pem::leaf(file) else { return Ok(()) };
    let shown = format!("{key}: {}", file.display());
    let summary = certificate::summary(&leaf).map_err(|why| {
        let hint = "reissue it: `tunnel cert issue`";
        Finding::error("certificate kind", format!("{shown} {why}"), "a certificate of version 3", hint)
    })?;
    let until = &summary.until;
    if summary.oddities.is_empty() {
        found.add_ok("certificate", format!("{key}: for {}, valid until {until}", summary.names.join(", ")));
    }
    for CertificateWarning { about, found: odd, hint } in summary.oddities {
        let check = match about {
            CertWarningKind::Kind => "certificate kind",
            CertWarningKind::Dates => "certificate dates",
            CertWarningKind::Clock => "clock",
        };
        found.add_error(check, format!("{shown} {odd}"), "a server certificate that is valid now", hint);
    }
    if (0..WARN_BEFORE_EXPIRY_DAYS).contains(&summary.days) {
        let text = format!("{shown} expires on {until}, in {} days", summary.days);
        let hint = "renew it where its CA's key is: `tunnel cert renew`; it is re-read without a restart";
        found.add_warning("certificate dates", text, hint);
    }
    Ok(())
}

/// Checks that the cluster has a Node on which the manifests allow servers to run.
async fn check_nodes(settings: &ServerConfig, found: &mut DoctorFindings) {
    let Some(cluster) = &settings.addresses.cluster else { return };
    let nodes: Result<BTreeSet<String>, String> = with_kubernetes!(
        api::server::nodes(cluster.clone(), Some(SERVER_NODE_LABEL)).await,
        else Ok(Default::default())
    );
    match nodes {
        Ok(nodes) if nodes.is_empty() => {
            let text = format!(
                "no Node has the label {SERVER_NODE_LABEL}, so servers of the manifests stay Pending"
            );
            let hint =
                format!("run `kubectl label node NODE {SERVER_NODE_LABEL}` for Nodes that are not edges");
            found.add_warning("nodes", text, &hint);
        }
        Ok(nodes) => found.add_ok("nodes", format!("{} Nodes have the server label", nodes.len())),
        Err(why) => found.add_warning("nodes", why, ""),
    }
}

/// The label that the manifests require of a server's Node. No kubelet can set it on itself.
const SERVER_NODE_LABEL: &str = "node-restriction.kubernetes.io/tunnel-server=true";

/// Checks that peers can be found and reached, and present a server's certificate.
async fn check_peers(settings: &ServerConfig, resolver: &Resolver, found: &mut DoctorFindings) -> Tested {
    let known = &settings.peers;
    let mut all = known.addresses.clone();
    if let Some(at @ Target { host: Host::Name(name), .. }) = &known.dns_name {
        let hint = "check server.peers.dns_name: a headless Service with publishNotReadyAddresses, or another name of \
                    all servers";
        match resolver.lookup_target(at).await {
            Ok(addresses) => all.extend(addresses),
            Err(why) => {
                found.add_error("peers", format!("{name}: {why}"), "the addresses of all servers", hint)
            }
        }
    }
    let links = &settings.links;
    let name =
        known.certificate_name.clone().or_else(|| certificate::summary(&pem::leaf(&links.cert)?).ok()?.dns);
    let Some(name) = name.and_then(|name| tls::server_name(&name).ok()).filter(|_| !all.is_empty()) else {
        return Ok(());
    };
    let identity = Some(IdentityFiles { cert: links.cert.to_path_buf(), key: links.key.to_path_buf() });
    let trust = Trust::Ca(links.peer_ca.to_path_buf());
    let client = TlsClientConfig { trust, identity, alpn: vec![b"h2".to_vec()] }.load().map_err(|why| {
        let hint = "correct cert, key and peer_ca of [server.links]";
        Finding::error("peers", why, "files that belong together", hint)
    })?;
    for at in all {
        found
            .test(async |found| {
                let socket = dial(&Host::Ip(at.ip()), &[at], TIMEOUT).await.map_err(|why| {
                    let hint =
                        "check that this peer is running, and that firewalls between servers allow the port";
                    Finding::error("peers", why, "a server that responds", hint)
                })?;
                let accepted = TlsConnector::from(client.load()).connect(name.clone(), socket);
                timeout(TIMEOUT, accepted).await.unwrap_or_else(|late| Err(late.into())).map_err(
                    |error| {
                        let fault = TlsHandshakeError::of(&error);
                        let text = format!("server {at}: {fault}");
                        let expectation =
                            format!("a certificate of server.links.peer_ca for {:?}", name.to_str());
                        Finding::error(check_of(&fault), text, &expectation, peer_remedy(&fault))
                    },
                )?;
                found.add_ok("peers", format!("{at} is a server of this cloud"));
                Ok(())
            })
            .await;
    }
    Ok(())
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
fn check_hosts_file(settings: &ServerConfig, found: &mut DoctorFindings) -> Tested {
    let file = settings.dns.hosts_file.as_ref().filter(|_| settings.dns.publish == PublishTo::Hosts);
    let Some(file) = file else { return Ok(()) };
    let text = files::read_text(file).map_err(|why| {
        let hint = "put server.dns.hosts_file into a directory that the server's user may write to";
        Finding::error("registry", format!("{}: {why}", file.display()), "the hosts file", hint)
    })?;
    let own = settings.pod_ip.map(|ip| ip.to_string()).unwrap_or_default();
    let ours = text.lines().filter(|line| line.split_whitespace().next() == Some(&own)).count();
    found.add_ok("registry", format!("{} has {ours} lines of this server ({own})", file.display()));
    Ok(())
}

/// Checks that the name of the requested node resolves to a server.
async fn check_dns_answer(settings: &ServerConfig, checked: &CheckedProgram<'_>, found: &mut DoctorFindings) {
    let Some(node) = &checked.args.node else { return };
    let dns = &settings.dns;
    let name = if dns.zone.is_empty() { node.to_string() } else { format!("{node}.{}", dns.zone) };
    let hint = "check that the node is connected (tunnel status), check publish and zone of [server.dns], and that the \
                  DNS servers in its dns read the published records";
    let servers = dns.resolvers.as_slice();
    let resolver =
        if servers.is_empty() { Ok(checked.resolver.clone()) } else { Resolver::of_servers(servers) };
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
            let text = format!("{name} resolves to {addresses:?}");
            found.add_error("registry", text, &format!("one of {servers:?}"), hint);
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
