//! The front ends of node ports: a port of this pod stands for one port of every node, and each request names its node.
//! With TLS (`[mode.cloud.https]`, `mode = "terminate"`) or without (`[mode.cloud.http]`).

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;
use tokio::net::TcpStream;
use tokio_rustls::rustls::ClientConfig;
use tracing::{Span, field, info_span};

use super::requests::{Requests, credentials};
use super::{Denial, FrontEnd, Gate, Handshake, OpenRequest, Proof, Visit, forward};
use crate::names::{NodeName, Target};
use crate::net::reload::Reload;
use crate::net::socket::Connection;
use crate::net::tls::TlsSocket;
use crate::protocol::Category;
use crate::registry::{AddressBook, Finder};

/// What one port stands for, and who knows the nodes.
#[derive(Debug, Clone)]
pub struct NodePort {
    /// What the node dials.
    pub target: Target,
    /// Knows which nodes there are.
    pub finder: Arc<Finder>,
}

/// A node port without TLS.
#[derive(Debug)]
pub struct Http(pub NodePort);

/// A node port behind TLS; the edge uses TLS to the target again.
#[derive(Debug)]
pub struct Https(pub NodePort);

/// A node port behind TLS, where this pod uses TLS to the target as well, with a certificate of its own that no edge has:
/// only for clients that have shown one.
#[derive(Debug)]
pub struct Reencrypted {
    /// The port.
    pub port: NodePort,
    /// What is shown to targets, and which of them are believed.
    pub tls: Reload<ClientConfig>,
}

impl FrontEnd<TcpStream> for Http {
    const NAME: &'static str = "http";
    /// Not `Https`, with which the edge would use TLS to the target.
    const CATEGORY: Category = Category::HttpProxy;
    type Connection = TcpStream;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("http", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TcpStream, visit: &mut Visit<'_>) -> Handshake<TcpStream> {
        self.0.serve(socket, None, (None, || Denial::NoHost), visit).await
    }
}

impl FrontEnd<TlsSocket> for Https {
    const NAME: &'static str = "https";
    const CATEGORY: Category = Category::Https;
    type Connection = TlsSocket;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("https", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TlsSocket, visit: &mut Visit<'_>) -> Handshake<TlsSocket> {
        let name = socket.get_ref().1.server_name().map(str::to_owned);
        self.0.serve(socket, name, (None, || Denial::Unnamed), visit).await
    }
}

impl FrontEnd<TlsSocket> for Reencrypted {
    const NAME: &'static str = Https::NAME;
    /// Not `Https`, with which the edge would use TLS to the target.
    const CATEGORY: Category = Category::HttpProxy;
    type Connection = TlsSocket;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("https", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: TlsSocket, visit: &mut Visit<'_>) -> Handshake<TlsSocket> {
        let name = socket.get_ref().1.server_name().map(str::to_owned);
        self.port.serve(socket, name, (Some(self.tls.clone()), || Denial::Unnamed), visit).await
    }
}

impl NodePort {
    async fn serve<C: Connection>(
        &self,
        socket: C,
        server_name: Option<String>,
        (tls, unnamed): (Option<Reload<ClientConfig>>, fn() -> Denial),
        visit: &mut Visit<'_>,
    ) -> Handshake<C> {
        let context = visit.context();
        let shown = tls.is_none() || matches!(visit.proof, Proof::Certificate(_));
        let parse = |head: &Parts| {
            if !shown {
                return Err(Denial::Forbidden("this port is for clients that show a certificate".to_owned()));
            }
            let gate = context.gate.load();
            let node = self.node(head, server_name.as_deref(), &gate, &context.addresses);
            let node = Some(node.ok_or_else(unnamed)?);
            Ok(OpenRequest { node, target: self.target.clone(), credentials: credentials(&head.headers) })
        };
        forward(socket, Requests::over(tls, visit, parse), context).await
    }

    /// The node that a request is for: of those that Host and server name (SNI) name, the one that is known; else the
    /// one where the pod of a kubelet's path is.
    ///
    /// kube-apiserver sends its own Host with exec, attach and port-forward, and no server name unless it verifies
    /// kubelets' certificates.
    fn node(
        &self,
        head: &Parts,
        server_name: Option<&str>,
        gate: &Gate,
        addresses: &AddressBook,
    ) -> Option<NodeName> {
        let named = |host: &str| named(host).map(|name| gate.own_name(name));
        let host = head.headers.get(HOST).and_then(|host| Authority::try_from(host.as_bytes()).ok());
        let of_host = host.as_ref().and_then(|host| named(host.host()));
        if let Some(node) = of_host.as_ref().filter(|node| self.finder.knows(node)) {
            return Some(node.clone());
        }
        let of_pod = || {
            let (namespace, pod) = pod(head.uri.path())?;
            addresses.node_of_pod(namespace, pod)
        };
        server_name.and_then(&named).or_else(of_pod).or(of_host)
    }
}

/// A node by a host's name; an address is none.
fn named(host: &str) -> Option<NodeName> {
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_address = host.starts_with('[') || host.parse::<std::net::IpAddr>().is_ok();
    host.parse().ok().filter(|_| !is_address)
}

/// Namespace and name of the pod that a request to a kubelet is about.
fn pod(path: &str) -> Option<(&str, &str)> {
    let mut parts = path.strip_prefix('/')?.split('/');
    let about_a_pod = POD_PATHS.contains(&parts.next()?);
    let (namespace, pod) = (parts.next()?, parts.next()?);
    (about_a_pod && !namespace.is_empty() && !pod.is_empty()).then_some((namespace, pod))
}

/// A kubelet's paths that go on with a pod's namespace and name.
const POD_PATHS: [&str; 6] = ["exec", "attach", "portForward", "containerLogs", "run", "checkpoint"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Instance;
    use crate::policy::Zone;
    use crate::protocol::{Dialect, LinkId, LinkSender, Peer};
    use crate::registry::{Linked, PodFacts, Registry};
    use crate::telemetry::Metrics;

    fn head(host: &str, path: &str) -> Parts {
        http::Request::get(path).header(HOST, host).body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_pod_is_read_from_the_kubelets_paths() {
        assert_eq!(pod("/exec/shop/web-0/nginx"), Some(("shop", "web-0")));
        assert_eq!(pod("/exec/shop/web-0/some-uid/nginx"), Some(("shop", "web-0")));
        for path in ["/attach/a/b/c", "/portForward/a/b", "/containerLogs/a/b/c", "/run/a/b/c"] {
            assert_eq!(pod(path), Some(("a", "b")), "{path}");
        }
        for path in ["/metrics", "/exec", "/exec/a", "/exec//b", "/exec/a/", "/pods/a/b", "exec/a/b", "*"] {
            assert_eq!(pod(path), None, "{path}");
        }
    }

    #[test]
    fn an_address_is_no_node() {
        for host in ["10.0.0.7", "[fd00::1]", "127.0.0.1", "", "a b"] {
            assert_eq!(named(host), None, "{host}");
        }
        assert_eq!(named("Edge1.").unwrap(), "edge1".parse().unwrap());
    }

    #[test]
    fn the_node_is_the_hosts_or_the_server_names_or_the_pods() {
        let registry = Registry::new(Metrics::edge());
        let edge4 = LinkSender::new(LinkId(1), Peer::Edge("edge4".parse().unwrap()), None, Dialect::NEWEST);
        registry.insert(Linked { sender: edge4, instance: None, from: ([10, 0, 0, 4], 1).into() }, false);
        let addresses = AddressBook::default();
        let at_edge3 = PodFacts { node: "edge3".parse().unwrap(), ips: Box::default() };
        addresses.change(|facts| facts.pods.put("shop/db", at_edge3));
        let target = "127.0.0.1:10250".parse().unwrap();
        let port = NodePort { target, finder: Finder::alone(registry, Instance::random()) };
        let zone = Zone::new("nodes.test".into(), Vec::new(), |_| false);
        let gate = Gate { zone: Some(Arc::new(zone)), ..Gate::default() };
        let node = |host, path, name| {
            port.node(&head(host, path), name, &gate, &addresses).map(|node| node.to_string())
        };
        assert_eq!(node("edge1:10250", "/pods", None).unwrap(), "edge1");
        assert_eq!(node("edge1:10250", "/pods", Some("edge2")).unwrap(), "edge2");
        assert_eq!(node("127.0.0.1:6443", "/pods", Some("edge2")).unwrap(), "edge2");
        assert_eq!(node("apiserver:6443", "/exec/shop/db/c", None).unwrap(), "edge3");
        assert_eq!(node("apiserver:6443", "/exec/shop/db/c", Some("edge2")).unwrap(), "edge2");
        for host in ["edge4:10250", "edge4.nodes.test:10250", "Edge4.Nodes.Test."] {
            assert_eq!(node(host, "/exec/shop/db/c", None).unwrap().to_lowercase(), "edge4", "{host}");
        }
        assert_eq!(node("127.0.0.1:6443", "/exec/shop/web-0/nginx", None), None);
        let kubelets = [Denial::Unnamed, Denial::NoHost].map(|denied| {
            assert_eq!(denied.status(), 421);
            denied.next_step().contains("--kubelet-certificate-authority")
        });
        assert_eq!(kubelets, [true, false], "without TLS that flag helps nobody");
    }
}
