//! Valid and invalid values of `[server.dns]`.

use crate::config::cluster::ClusterSettings;
use crate::config::server::peers::{PeerConfig, PeerConfigKey};
use crate::config::server::registry::{DnsConfig, EtcdEndpoint, EtcdSettings, PublishTo};

use super::*;

fn read(lines: &str) -> Result<(ServerConfig, Vec<Warning>), ConfigErrors> {
    let env = Environment { pod_ip: Some("10.0.0.7".to_owned()), ..Environment::default() };
    let text = format!("[server.connect]\nlisten = \"127.0.0.1:22\"\n[server.dns]\n{lines}");
    ServerConfig::read(&text, &env)
}

#[test]
fn nothing_is_published_by_default() {
    let (absent, _) = cloud("");
    let etcd = EtcdSettings { prefix: "/skydns".into(), ..EtcdSettings::default() };
    assert_eq!(absent.dns, DnsConfig { etcd, ..DnsConfig::default() });
    assert_eq!(absent.peers, PeerConfig::default());
    let (documented, _) = cloud(CLOUD);
    assert_eq!((documented.dns, documented.peers), (absent.dns, absent.peers));
}

#[test]
fn rebalancing_can_be_disabled() {
    assert!(!read("[server.peers]\nrebalance = false").unwrap().0.peers.rebalance);
    let errors = read("[server.peers]\nrebalance = 1").unwrap_err();
    assert!(errors.to_string().contains("server.peers.rebalance"), "{errors}");
}

#[test]
fn a_publisher_is_read_with_its_defaults() {
    let (config, warnings) =
        read("publish = \"hosts\"\nhosts_file = \"h\"\nzone = \".Nodes.Test.\"").unwrap();
    assert_eq!(config.peers, PeerConfig { several: true, ..PeerConfig::default() });
    assert_eq!((config.dns.publish, config.dns.hosts_file), (PublishTo::Hosts, Some("h".into())));
    assert_eq!((config.dns.zone.as_str(), warnings), ("nodes.test", vec![]));
    let (config, _) =
        read("publish = \"etcd\"\netcd.endpoints = [\"http://a\", \"http://[fd00::1]:1/\"]").unwrap();
    let member = |at: &str| EtcdEndpoint { tls: false, at: at.parse().unwrap() };
    let endpoints = vec![member("a:2379"), member("[fd00::1]:1")];
    let etcd = EtcdSettings { endpoints, prefix: "/skydns".into(), ..EtcdSettings::default() };
    assert_eq!((config.dns.publish, config.dns.etcd), (PublishTo::Etcd, etcd));
}

#[test]
fn peers_are_searched_only_if_a_setting_implies_several_servers() {
    let peers = |lines| read(lines).unwrap().0.peers;
    let (all, _) = read(
        "resolvers = [\"10.96.0.10:53\"]\n[server.peers]\naddresses = [\"10.0.0.7:9000\", \"[fd00::1]:9000\"]\n\
         dns_name = \"Pods.Test:9000\"\ncertificate_name = \"Cloud.Test\"",
    )
    .unwrap();
    let expected = PeerConfig {
        several: true,
        named: Some(PeerConfigKey { key: "server.peers.addresses", must_link: true }),
        addresses: ["10.0.0.7:9000", "[fd00::1]:9000"].map(|at| at.parse().unwrap()).into(),
        dns_name: Some("pods.test:9000".parse().unwrap()),
        certificate_name: Some("cloud.test".into()),
        ..PeerConfig::default()
    };
    assert_eq!((all.peers, all.dns.resolvers), (expected, vec!["10.96.0.10:53".parse().unwrap()]));
    for (lines, several, named) in [
        ("", false, None),
        ("[server.peers]\naddresses = []\ncertificate_name = \"a\"", false, None),
        ("resolvers = []", true, None),
        ("zone = \"nodes\"", true, None),
        ("publish = \"hosts\"\nhosts_file = \"h\"", true, None),
        ("[server.peers]\naddresses = [\"10.0.0.7:9000\"]", true, Some("server.peers.addresses")),
        ("[server.peers]\ndns_name = \"pods:9000\"", true, Some("server.peers.dns_name")),
    ] {
        let peers = peers(lines);
        assert_eq!((peers.several, peers.named.map(|named| named.key)), (several, named), "{lines}");
    }
}

#[test]
fn an_incomplete_or_invalid_publisher_or_peer_setting_is_an_error() {
    for (lines, key) in [
        ("publish = \"hosts\"", "dns.hosts_file"),
        ("publish = \"etcd\"", "dns.etcd.endpoints"),
        ("publish = \"etcd\"\netcd.endpoints = []", "dns.etcd.endpoints"),
        ("publish = \"etcd\"\netcd.endpoints = [\"10.0.0.5:2379\"]", "dns.etcd.endpoints[0]"),
        ("publish = \"etcd\"\netcd.endpoints = [\"https://a\"]", "dns.etcd.ca"),
        ("[server.peers]\naddresses = [\"pods:9000\"]", "peers.addresses[0]"),
        ("resolvers = [\"10.0.0.5\"]", "dns.resolvers[0]"),
        ("resolvers = [\"10.0.0.5:0\"]", "dns.resolvers[0]"),
        ("[server.peers]\ndns_name = \"10.0.0.7:9000\"", "peers.dns_name"),
        ("[server.peers]\ndns_name = \"pods\"", "peers.dns_name"),
        ("[server.peers]\ncertificate_name = \"10.0.0.7\"", "peers.certificate_name"),
        ("etcd.cert = \"c\"", "dns.etcd.key"),
        ("etcd.key = \"c\"", "dns.etcd.cert"),
        ("etcd.user = \"c\"", "dns.etcd.password_file"),
        ("etcd.prefix = \"skydns\"", "dns.etcd.prefix"),
        ("etcd.prefix = \"/\"", "dns.etcd.prefix"),
        ("publish = \"dns\"", "dns.publish"),
        ("publish = \"configmap\"", "dns.publish"),
        ("[server.peers]\nkubernetes_service = \"tunnel-cloud\"", "peers.kubernetes_service"),
        ("configmap = \"a/b\"", "dns.configmap"),
        ("zone = \"a..b\"", "dns.zone"),
    ] {
        let errors = read(lines).unwrap_err();
        let keys: Vec<_> = errors.iter().map(|f| f.key.as_str()).collect();
        assert_eq!(keys, [format!("server.{key}")], "{lines}");
    }
    let errors = cloud_faults("[server.dns]\npublish = \"hosts\"\nhosts_file = \"h\"");
    assert_eq!(errors.iter().map(|f| f.key.as_str()).collect::<Vec<_>>(), ["POD_IP"]);
}

/// Reads the config of a server in a cluster, or with a kubeconfig.
fn inside(text: &str, kubeconfig: Option<&str>) -> Result<(ServerConfig, Vec<Warning>), ConfigErrors> {
    let env = Environment {
        pod_ip: Some("10.0.0.7".to_owned()),
        pod_namespace: Some("edge-system".to_owned()),
        kubernetes_service_host: kubeconfig.is_none().then(|| "10.96.0.1".to_owned()),
        kubeconfig: kubeconfig.map(Into::into),
        ..Environment::default()
    };
    let connect = if text.contains("[mode.") {
        "[mode.cloud.ssh]\nport = 22"
    } else {
        "[server.connect]\nlisten = \"127.0.0.1:22\""
    };
    ServerConfig::read(&format!("{connect}\n{text}"), &env)
}

/// The values in SuperEdge's manifests.
const NODES: &str =
    "[mode.cloud.stream.dns]\nconfigmap = \"nodes\"\nhosts = \"/etc/h\"\nservice = \"cloud\"\n";

#[test]
fn superedges_dns_table_publishes_to_its_configmap_unless_overridden() {
    let cluster = |service: Option<&str>| {
        let settings = ClusterSettings { kubeconfig: None, namespace: Some("edge-system".into()) };
        Some((settings, service.map(str::to_owned)))
    };
    let map = |name: &str| (PublishTo::ConfigMap, name.to_owned());
    let nothing = || (PublishTo::None, "tunnel-nodes".to_owned());
    let newer = "[mode.cloud.stream.register]\nservice = \"newer\"\n";
    for (text, publish, expected) in [
        (NODES.to_owned(), map("nodes"), cluster(Some("cloud"))),
        (format!("{NODES}debug = true"), nothing(), None),
        (format!("{NODES}debug = true\n{newer}"), nothing(), None),
        (format!("{NODES}{newer}"), map("nodes"), cluster(Some("newer"))),
        (newer.to_owned(), nothing(), cluster(Some("newer"))),
        ("[mode.cloud.stream.dns]\nconfigmap = \"\"".to_owned(), nothing(), None),
        (
            "[server.dns]\npublish = \"configmap\"\nconfigmap = \"ours\"\n[server.peers]\nkubernetes_service = \"pods\"".to_owned(),
            map("ours"),
            cluster(Some("pods")),
        ),
        ("[server.dns]\npublish = \"configmap\"".to_owned(), map("tunnel-nodes"), cluster(None)),
    ] {
        let (cloud, warnings) = inside(&text, None).unwrap();
        assert_eq!(warned(&warnings, WarningKind::Unsupported), [""; 0], "{text}");
        assert_eq!((cloud.dns.publish, cloud.dns.configmap.0), publish, "{text}");
        let PeerConfig { several, cluster, kubernetes_service, .. } = cloud.peers;
        let cluster = cluster.map(|cluster| (cluster, kubernetes_service));
        assert_eq!((several, cluster), (expected.is_some(), expected), "{text}");
    }
    let ours = "[server.peers]\nkubernetes_service = \"pods\"\n";
    for (text, key, must_link) in [
        (NODES.to_owned(), "server.peers.kubernetes_service", false),
        (ours.to_owned(), "server.peers.kubernetes_service", true),
        (format!("{ours}dns_name = \"pods:9000\""), "server.peers.dns_name", true),
    ] {
        let named = inside(&text, None).unwrap().0.peers.named;
        assert_eq!(named, Some(PeerConfigKey { key, must_link }), "{text}");
    }
    let (cloud, _) = inside(NODES, Some("/etc/kubeconfig")).unwrap();
    assert_eq!(cloud.peers.cluster.unwrap().kubeconfig, Some("/etc/kubeconfig".into()));
    let nowhere = Environment { kubernetes_service_host: Some("10.96.0.1".into()), ..Environment::default() };
    let errors = ServerConfig::read(NODES, &nowhere).unwrap_err();
    assert_eq!(errors.iter().map(|f| f.key.as_str()).collect::<Vec<_>>(), ["POD_IP"]);
}

#[test]
fn superedges_kubernetes_tables_load_with_a_warning_without_kubernetes() {
    let newer = "[mode.cloud.stream.register]\nservice = \"newer\"\n";
    let (dns, register) = ("mode.cloud.stream.dns", "mode.cloud.stream.register");
    for (text, tables) in [
        (NODES.to_owned(), vec![dns]),
        (format!("{NODES}{newer}"), vec![dns, register]),
        (newer.to_owned(), vec![register]),
        (format!("{NODES}debug = true"), vec![]),
    ] {
        let (cloud, warnings) = cloud(&format!("[mode.cloud.ssh]\nport = 22\n{text}"));
        assert_eq!(warned(&warnings, WarningKind::Unsupported), tables, "{text}");
        assert_eq!((cloud.dns.publish, cloud.peers.cluster), (PublishTo::None, None));
    }
}

#[test]
fn edge_access_allows_only_listed_targets_and_nodes() {
    let at = |at: &str| at.parse().unwrap();
    let (none, _) = inside("", None).unwrap();
    assert!(!none.edge_access.targets.allows(at("127.0.0.1:22"), &[]) && none.edge_access.nodes.is_empty());
    let text = "[server.edge_access]\ntargets = [\"10.0.0.0/8:443\"]\nnodes = [\"Edge-*\"]";
    let (some, _) = inside(text, None).unwrap();
    assert!(some.edge_access.targets.allows(at("10.1.2.3:443"), &[]));
    assert!(!some.edge_access.targets.allows(at("127.0.0.1:443"), &[]));
    assert!(some.edge_access.nodes[0].matches(&"edge-7".parse().unwrap()));
    for (line, key) in [("targets = [\"a:1\"]", "targets[0]"), ("nodes = [\"a b\"]", "nodes[0]")] {
        let errors = inside(&format!("[server.edge_access]\n{line}"), None).unwrap_err();
        let keys: Vec<_> = errors.iter().map(|f| f.key.as_str()).collect();
        assert_eq!(keys, [format!("server.edge_access.{key}")]);
    }
}
