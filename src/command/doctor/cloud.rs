//! What a pod needs: certificates, tokens, the other pods, and who answers for its nodes.

use std::net::{IpAddr, SocketAddr};

use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::{Doctor, Findings, PATIENCE, certificate, check_of, page};
use crate::config::cloud::{Cloud, Egress, HttpsMode, Publish};
use crate::names::{Host, NodeName, Target};
use crate::net::dial::dial;
use crate::net::resolver::Resolver;
use crate::net::tls::{self, ClientSettings, Fault, Identity, Trust};
#[cfg(feature = "kubernetes")]
use crate::registry::Cluster;

pub(super) async fn look(settings: &Cloud, asked: &Doctor, found: &mut Findings) {
    certificates(settings, found);
    tokens(settings, found);
    running(settings, found).await;
    #[cfg(feature = "kubernetes")]
    places(settings, found).await;
    let resolver = match Resolver::system() {
        Ok(resolver) => resolver,
        Err(why) => return found.bad("dns", why.to_string(), "", "mend /etc/resolv.conf"),
    };
    siblings(settings, &resolver, found).await;
    published(settings, found);
    if let Some(node) = &asked.node {
        answered(settings, node, resolver, found).await;
    }
}

fn certificates(settings: &Cloud, found: &mut Findings) {
    certificate(&settings.server.cert, "mode.cloud.stream.server.cert", found);
    if let Some(Egress::Port { certificates, .. }) = &settings.egress {
        certificate(&certificates.cert, "mode.cloud.egress.cert", found);
    }
    if let HttpsMode::Terminate(certificates, _) = &settings.https.mode
        && !settings.https.ports.is_empty()
    {
        certificate(&certificates.cert, "mode.cloud.https.cert", found);
    }
}

fn tokens(settings: &Cloud, found: &mut Findings) {
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
async fn places(settings: &Cloud, found: &mut Findings) {
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
async fn running(settings: &Cloud, found: &mut Findings) {
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
async fn siblings(settings: &Cloud, resolver: &Resolver, found: &mut Findings) {
    let known = &settings.registry.siblings;
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
    let client = ClientSettings {
        trust: Trust::Ca(server.ca.clone()),
        identity: Some(identity),
        alpn: vec![b"h2".to_vec()],
    };
    let name = known.name.clone().or_else(|| {
        let leaf = crate::net::pem::certs(&server.cert, &std::fs::read(&server.cert).ok()?).ok()?;
        tls::summary(leaf.first()?).ok()?.dns
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
        let socket = match dial(&[at], PATIENCE).await {
            Ok(socket) => socket,
            Err(why) => {
                let remedy = "see whether that pod runs, and let firewalls between pods pass the port";
                found.bad("siblings", why.to_string(), "a pod that answers", remedy);
                continue;
            }
        };
        let shaken = TlsConnector::from(config.clone()).connect(name.clone(), socket);
        match timeout(PATIENCE, shaken).await.unwrap_or_else(|late| Err(late.into())) {
            Ok(_) => found.good("siblings", format!("{at} is a pod of this cloud")),
            Err(error) => {
                let fault = Fault::of(&error);
                let wanted = format!("a certificate of mode.cloud.stream.server.ca for {:?}", name.to_str());
                let remedy = "all pods need certificates of one authority with one name in common (mode.cloud.registry.name)";
                found.bad(check_of(&fault), format!("pod {at}: {fault}"), &wanted, remedy);
            }
        }
    }
}

/// Whether this pod's lines stand in the hosts file; of other stores the running pod says in `/readyz` what is wrong.
fn published(settings: &Cloud, found: &mut Findings) {
    let Publish::Hosts(file) = &settings.registry.publish else { return };
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
async fn answered(settings: &Cloud, node: &NodeName, system: Resolver, found: &mut Findings) {
    let registry = &settings.registry;
    let servers = registry.siblings.dns.as_slice();
    let resolver = if servers.is_empty() { Ok(system) } else { Resolver::of_servers(servers) };
    let name = if registry.zone.is_empty() { node.to_string() } else { format!("{node}.{}", registry.zone) };
    let remedy = "see whether the node is linked (tunnel status), publish and zone of [mode.cloud.registry], and that the \
                  DNS servers in its dns read what is published";
    let answer = match resolver {
        Ok(resolver) => resolver.lookup(&name).await.map_err(|why| why.to_string()),
        Err(why) => Err(why.to_string()),
    };
    let pods: Vec<IpAddr> =
        settings.pod_ip.into_iter().chain(registry.siblings.list.iter().map(SocketAddr::ip)).collect();
    match answer {
        Ok(addresses) if pods.is_empty() || addresses.iter().any(|ip| pods.contains(ip)) => {
            let shown: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            found.good("registry", format!("{name} is {}", shown.join(", ")));
        }
        Ok(addresses) => {
            found.bad("registry", format!("{name} is {addresses:?}"), &format!("one of {pods:?}"), remedy);
        }
        Err(why) => {
            found.bad("registry", format!("{name}: {why}"), "the address of the pod that has it", remedy)
        }
    }
}
