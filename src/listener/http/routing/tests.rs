use std::sync::Arc;

use tokio::sync::watch;

use crate::registry::{Finder, LinkedNode, Registry};
use tunnel_base::addresses::cluster_state::{KubeNode, KubePod};
use tunnel_base::metrics::Metrics;
use tunnel_base::policy::ports::ConfigMapPorts;
use tunnel_base::policy::zone::NodeZone;
use tunnel_base::policy::{Networks, network};
use tunnel_link::link::Link;
use tunnel_net::tls::testing::client_certificate;
use tunnel_proto::frame::Remote;
use tunnel_proto::names::Instance;
use tunnel_proto::state::LinkId;

use super::*;

fn head(host: &str, path: &str) -> Parts {
    http::Request::get(path).header(HOST, host).body(()).unwrap().into_parts().0
}

/// Returns a request with these headers.
fn with(headers: &[(&HeaderName, &str)]) -> Parts {
    let mut head = head("10.96.0.20:9051", "/metrics");
    for (name, value) in headers {
        head.headers.append(*name, value.parse().unwrap());
    }
    head
}

/// A server with a link to edge4. Pod shop/db is at edge3, and Kubernetes knows the addresses of edge3 and edge4.
struct Site {
    finder: Arc<Finder>,
    addresses: AddressBook,
    zone: NodeZone,
}

impl Site {
    fn new() -> Self {
        let registry = Registry::new(Metrics::edge());
        let edge4 = Link::new(LinkId(1), Remote::Edge("edge4".parse().unwrap()), Some(Instance::random()));
        registry.insert(LinkedNode { link: edge4, from: ([10, 0, 0, 4], 1).into() }, false);
        let addresses = AddressBook::new(
            vec![
                (network("10.0.0.9").unwrap(), "edge9".parse().unwrap()),
                (network("10.9.0.0/16").unwrap(), "edge9".parse().unwrap()),
            ],
            false,
        );
        let at_edge3 = KubePod { node: "edge3".parse().unwrap(), ips: [ip("10.3.0.1")].into() };
        addresses.change(|facts| {
            facts.pods.put("shop/db", at_edge3);
            for (node, own) in [("edge3", "10.0.0.3"), ("edge4", "10.0.0.4")] {
                facts.nodes.put(node, KubeNode { ips: [ip(own)].into(), ..KubeNode::default() });
            }
        });
        let zone = NodeZone::new("nodes.test".into(), Vec::new(), |_| false);
        Self { finder: Finder::without_peers(registry, Instance::random()), addresses, zone }
    }

    /// Returns the route of a request as `target at node`, `-` if it names no node, or the denial.
    fn route(
        &self,
        stands_for: &str,
        head: &Parts,
        server_name: Option<&str>,
        may_name_target: bool,
    ) -> String {
        let ports = watch::channel(ConfigMapPorts::default()).1;
        let port = NodePortProtocol {
            stands_for: stands_for.parse().unwrap(),
            is_tls: false,
            target_tls: None,
            finder: self.finder.clone(),
            ports,
        };
        let (zone, addresses) = (&self.zone, &self.addresses);
        let port = &port;
        let router = NodePortRouter { port, server_name, may_name_target, default_port: 80, zone, addresses };
        match router.route(head) {
            Ok(Some((node, target))) => format!("{target} at {}", node.as_str().to_lowercase()),
            Ok(None) => "-".to_owned(),
            Err(denial) => format!("{} {denial}", denial.status().as_u16()),
        }
    }

    /// Like [`Self::place`], for a port that stands for the host in the Host header.
    fn by_host(&self, host: &str, path: &str, server_name: Option<&str>) -> String {
        self.route("host", &head(host, path), server_name, false)
    }

    /// Like [`Self::place`], for a client that sends these headers.
    fn route_headers(
        &self,
        stands_for: &str,
        headers: &[(&HeaderName, &str)],
        may_name_target: bool,
    ) -> String {
        self.route(stands_for, &with(headers), None, may_name_target)
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn a_pod_is_parsed_from_the_kubelets_paths() {
    assert_eq!(pod_of_path("/exec/shop/web-0/nginx"), Some(("shop", "web-0")));
    assert_eq!(pod_of_path("/exec/shop/web-0/some-uid/nginx"), Some(("shop", "web-0")));
    for path in ["/attach/a/b/c", "/portForward/a/b", "/containerLogs/a/b/c", "/run/a/b/c"] {
        assert_eq!(pod_of_path(path), Some(("a", "b")), "{path}");
    }
    for path in ["/metrics", "/exec", "/exec/a", "/exec//b", "/exec/a/", "/pods/a/b", "exec/a/b", "*"] {
        assert_eq!(pod_of_path(path), None, "{path}");
    }
}

#[test]
fn the_node_is_from_host_server_name_pod_or_address() {
    let site = Site::new();
    let node = |host, path, name| {
        let place = site.route("127.0.0.1:10250", &head(host, path), name, false);
        place.strip_prefix("127.0.0.1:10250 at ").map_or(place.clone(), str::to_owned)
    };
    assert_eq!(node("edge1:10250", "/pods", None), "edge1");
    assert_eq!(node("edge1:10250", "/pods", Some("edge2")), "edge2");
    assert_eq!(node("127.0.0.1:6443", "/pods", Some("edge2")), "edge2");
    assert_eq!(node("apiserver:6443", "/exec/shop/db/c", None), "edge3");
    assert_eq!(node("apiserver:6443", "/exec/shop/db/c", Some("edge2")), "edge2");
    for host in ["edge4:10250", "edge4.nodes.test:10250", "Edge4.Nodes.Test."] {
        assert_eq!(node(host, "/exec/shop/db/c", None), "edge4", "{host}");
    }
    assert_eq!(node("127.0.0.1:6443", "/exec/shop/web-0/nginx", None), "-");
    for host in ["10.0.0.3:10250", "[::ffff:10.0.0.3]:10250", "10.3.0.1"] {
        assert_eq!(node(host, "/pods", None), "edge3", "{host}");
    }
    assert_eq!(
        node("10.0.0.4:6443", "/exec/shop/db/c", None),
        "edge3",
        "the pod determines the node, not the address in Host"
    );
    assert_eq!(node("10.0.0.5:10250", "/pods", None), "-");
    let kubelets = [Denial::NoNodeInHost, Denial::NoHost].map(|denied| {
        assert_eq!(denied.status(), 421);
        denied.next_step().contains("--kubelet-certificate-authority")
    });
    assert_eq!(kubelets, [true, false], "without TLS that flag has no effect");
}

#[test]
fn a_port_by_host_routes_to_that_port_of_the_node() {
    let site = Site::new();
    for (host, place) in [
        ("edge4:9051", "10.0.0.4:9051 at edge4"),
        ("edge4", "10.0.0.4:80 at edge4"),
        ("edge4:10250", "127.0.0.1:10250 at edge4"),
        ("edge4:10266", "127.0.0.1:10266 at edge4"),
        ("10.0.0.4:10255", "127.0.0.1:10255 at edge4"),
        ("10.0.0.4:9051", "10.0.0.4:9051 at edge4"),
        ("10.3.0.1:10266", "10.3.0.1:10266 at edge3"),
        ("edge9:9051", "10.0.0.9:9051 at edge9"),
        ("10.0.0.9:10266", "127.0.0.1:10266 at edge9"),
        ("10.9.0.1:10266", "10.9.0.1:10266 at edge9"),
        ("127.0.0.1:9051", "-"),
        ("169.254.169.254:80", "-"),
    ] {
        assert_eq!(site.by_host(host, "/metrics", None), place, "{host}");
    }
    let unknown = site.by_host("edge1:9051", "/metrics", None);
    assert!(unknown.starts_with("421 no address of node edge1 is known"), "{unknown}");
    let twice = KubeNode { ips: [ip("10.0.0.4")].into(), ..KubeNode::default() };
    site.addresses.change(|facts| facts.nodes.put("edge5", twice));
    let both = site.by_host("10.0.0.4:9051", "/metrics", None);
    assert!(both.starts_with("421 10.0.0.4 is claimed by both"), "{both}");
}

#[test]
fn a_port_by_host_routes_to_the_kubelet_if_host_names_no_node() {
    let site = Site::new();
    let kubelet = "127.0.0.1:10250 at edge3";
    assert_eq!(site.by_host("10.96.0.1:6443", "/exec/shop/db/c", None), kubelet);
    assert_eq!(site.by_host("127.0.0.1:6443", "/pods", Some("edge3")), kubelet);
    assert_eq!(site.by_host("edge3:9443", "/metrics", Some("edge3")), "10.0.0.3:9443 at edge3");
    assert_eq!(site.by_host("10.0.0.3:9443", "/exec/shop/db/c", None), "10.0.0.3:9443 at edge3");
}

#[test]
fn a_trusted_client_names_node_and_target_by_headers() {
    let site = Site::new();
    let route_headers = |headers: &[(&HeaderName, &str)]| site.route_headers("host", headers, true);
    assert_eq!(route_headers(&[(&TUNNEL_HOST, "edge4")]), "10.0.0.4:9051 at edge4");
    assert_eq!(route_headers(&[(&TUNNEL_HOST, "edge4.nodes.test:10250")]), "10.0.0.4:9051 at edge4");
    assert_eq!(route_headers(&[(&TUNNEL_HOST, "10.0.0.4")]), "10.0.0.4:9051 at edge4");
    assert_eq!(route_headers(&[(&TUNNEL_DEST, "edge4:9052")]), "10.0.0.4:9052 at edge4");
    assert_eq!(route_headers(&[(&TUNNEL_DEST, "10.3.0.1:9052")]), "10.3.0.1:9052 at edge3");
    assert_eq!(route_headers(&[(&TUNNEL_DEST, "10.0.0.3:10266")]), "127.0.0.1:10266 at edge3");
    let both = |dest| route_headers(&[(&TUNNEL_HOST, "edge4"), (&TUNNEL_DEST, dest)]);
    assert_eq!(both("192.168.7.7:80"), "192.168.7.7:80 at edge4", "the edge decides whether it is allowed");
    assert_eq!(both("edge4:9052"), "10.0.0.4:9052 at edge4");
    assert_eq!(both("127.0.0.1:10266"), "127.0.0.1:10266 at edge4");
    for loopback in ["127.0.0.1:9052", "127.8.8.8:9052", "[::1]:9052", "[::ffff:127.0.0.1]:9052"] {
        assert!(both(loopback).starts_with("403 addresses local to a node"), "{loopback}");
    }
    for unspecified in ["0.0.0.0:9052", "[::]:9052", "[::ffff:0.0.0.0]:9052"] {
        assert!(both(unspecified).starts_with("403 addresses local to a node"), "{unspecified}");
    }
    assert_eq!(both("0.0.0.0:10266"), "127.0.0.1:10266 at edge4");
    assert!(both("edge3:9052").starts_with("400 "), "{}", both("edge3:9052"));
    assert!(both("localhost:9052").starts_with("400 "));
    assert_eq!(route_headers(&[(&TUNNEL_HOST, "10.0.0.5")]), "421 no node is known for 10.0.0.5:80");
    for bad in [
        &[(&TUNNEL_HOST, "a b")][..],
        &[(&TUNNEL_HOST, "")],
        &[(&TUNNEL_HOST, "edge3"), (&TUNNEL_HOST, "edge4")],
    ] {
        assert!(route_headers(bad).starts_with("400 "), "{bad:?}");
    }
    let fixed = |headers: &[(&HeaderName, &str)]| site.route_headers("127.0.0.1:10250", headers, true);
    assert_eq!(fixed(&[(&TUNNEL_HOST, "edge4")]), "127.0.0.1:10250 at edge4");
    assert!(fixed(&[(&TUNNEL_DEST, "edge4:9052")]).starts_with("403 X-Tunnel-Proxy-Dest is allowed only"));
}

#[test]
fn no_client_reaches_an_address_local_to_a_node() {
    let site = Site::new();
    let kept = [
        "169.254.2.1",
        "169.254.169.254",
        "127.0.0.1",
        "0.0.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "100.100.100.200",
        "[fe80::1]",
        "[ff02::1]",
        "[fd00:ec2::254]",
        "[::ffff:169.254.2.1]",
        "[64:ff9b::a9fe:201]",
        "[2002:a9fe:201::]",
    ];
    let refused =
        |text: String| assert!(text.starts_with("403 addresses local to a node are not reachable"), "{text}");
    for host in kept {
        let dest = format!("{host}:10261");
        refused(site.route_headers("host", &[(&TUNNEL_HOST, "edge4"), (&TUNNEL_DEST, &dest)], true));
        refused(site.route("host", &with(&[(&TUNNEL_DEST, &dest)]), Some("edge3"), true));
    }
    // The kubelet's ports and those of localhost-proxy-ports are reachable only on loopback.
    let dest =
        |dest: &str| site.route_headers("host", &[(&TUNNEL_HOST, "edge4"), (&TUNNEL_DEST, dest)], true);
    for port in [10250, 10255, 10266, 10267] {
        assert_eq!(dest(&format!("127.0.0.1:{port}")), format!("127.0.0.1:{port} at edge4"));
        assert_eq!(dest(&format!("[::1]:{port}")), format!("[::1]:{port} at edge4"));
        refused(dest(&format!("169.254.2.1:{port}")));
        refused(dest(&format!("100.100.100.200:{port}")));
    }
    // A kubelet itself writes its Node's addresses, so they may be local ones.
    for own in ["169.254.2.1", "127.0.0.1"] {
        let facts = KubeNode { ips: [ip(own)].into(), ..KubeNode::default() };
        site.addresses.change(|all| all.nodes.put("edge4", facts));
        refused(site.by_host(&format!("{own}:10261"), "/metrics", None));
        refused(site.by_host("edge4:10261", "/metrics", None));
        assert_eq!(site.by_host("edge4:10250", "/metrics", None), "127.0.0.1:10250 at edge4");
        assert_eq!(site.by_host(&format!("{own}:10250"), "/metrics", None), "127.0.0.1:10250 at edge4");
    }
}

#[test]
fn the_config_decides_a_nodes_address_before_its_kubelet() {
    let site = Site::new();
    let facts = KubeNode { ips: [ip("10.0.0.4")].into(), ..KubeNode::default() };
    site.addresses.change(|all| all.nodes.put("edge9", facts));
    assert_eq!(site.by_host("edge9:9051", "/metrics", None), "10.0.0.9:9051 at edge9");
}

#[test]
fn the_server_name_does_not_change_a_target_given_by_header() {
    let site = Site::new();
    let dest =
        |dest, server_name| site.route("host", &with(&[(&TUNNEL_DEST, dest)]), Some(server_name), true);
    assert_eq!(
        dest("10.0.0.2:9100", "edge3"),
        "10.0.0.2:9100 at edge3",
        "the edge decides whether it is allowed"
    );
    assert_eq!(dest("10.0.0.4:9100", "edge3"), "10.0.0.4:9100 at edge4", "it is that node's own address");
    assert_eq!(dest("10.0.0.3:9100", "edge3"), "10.0.0.3:9100 at edge3");
    assert_eq!(dest("10.9.0.1:9100", "edge3"), "10.9.0.1:9100 at edge9", "it is behind that node");
    assert_eq!(dest("127.0.0.1:10266", "edge3"), "127.0.0.1:10266 at edge3");
    let unknown = dest("elsewhere:9100", "edge3");
    assert!(unknown.starts_with("421 no address of node elsewhere is known"), "{unknown}");
    let mut of_a_pod = with(&[(&TUNNEL_DEST, "10.0.0.2:9100")]);
    of_a_pod.uri = "/exec/shop/db/c".parse().unwrap();
    let place = site.route("host", &of_a_pod, None, true);
    assert_eq!(place, "10.0.0.2:9100 at edge3");
}

#[test]
fn routing_headers_of_an_untrusted_client_are_refused() {
    let site = Site::new();
    for header in [TUNNEL_HOST, TUNNEL_DEST] {
        let refused = site.route_headers("host", &[(&header, "edge4:9051")], false);
        assert!(refused.starts_with("403 ") && refused.contains("names or allow_from"), "{refused}");
    }
    let certificate = |name: &str| ClientIdentity::Certificate(client_certificate(&[name]));
    let from = ip("10.0.0.1");
    let open = AccessPolicy::default();
    for proof in [ClientIdentity::None, ClientIdentity::User("uid=0".to_owned()), certificate("prometheus")] {
        assert!(!open.is_trusted_proxy(&proof, from), "{proof:?}: the config names no client");
    }
    let listed = |net: &str| AccessPolicy {
        allow_from: Some([network(net).unwrap()].into_iter().collect::<Networks>()),
        ..AccessPolicy::default()
    };
    assert!(listed("10.0.0.0/8").is_trusted_proxy(&ClientIdentity::None, from));
    assert!(!listed("10.1.0.0/16").is_trusted_proxy(&ClientIdentity::None, from));
    assert!(
        !listed("0.0.0.0/0").is_trusted_proxy(&ClientIdentity::None, from),
        "a network of all clients names no client"
    );
    let of_names =
        |glob: &str| AccessPolicy { names: vec![glob.parse().unwrap()], ..AccessPolicy::default() };
    assert!(!of_names("*").is_trusted_proxy(&certificate("prometheus"), from), "that names no client either");
    let named = of_names("prom*");
    assert!(named.is_trusted_proxy(&certificate("prometheus"), from));
    assert!(
        !named.is_trusted_proxy(&certificate("grafana"), from)
            && !named.is_trusted_proxy(&ClientIdentity::None, from)
    );
}
