//! YurtTunnel's ways to reach nodes: ports by Host, `[server.node_ports]`, `[server.node_names]`.

use tunnel_base::policy::ports::PortTarget;

use crate::listener::ListenerConfig as _;
use crate::listener::http::HttpConfig;

use super::*;

const CLOSED: &str = "[server.connect]\nlisten = \"127.0.0.1:22\"\n";
const BY_HOST: &str = "[server.http]\nlisten_ip = \"127.0.0.1\"\nports = { \"10264\" = \"host\" }\n";

#[test]
fn a_node_port_by_host_represents_every_port_of_every_node() {
    let (settings, warnings) = cloud(&format!("{CLOSED}{BY_HOST}"));
    assert_eq!(
        (&settings.listener::<HttpConfig>().unwrap().node_ports()[0].stands_for, warnings),
        (&PortTarget::Host, vec![])
    );
    let open = format!("{CLOSED}{}", BY_HOST.replace("listen_ip = \"127.0.0.1\"", ""));
    let message = "anyone who reaches [::]:10264 can reach every port at every node without authentication; set allow_from";
    assert_eq!(cloud(&open).1[0].text, message);
}

#[test]
fn a_port_by_host_is_an_error_in_passthrough_mode() {
    let text = format!("{CLOSED}{}", BY_HOST.replace("http]", "https]\nmode = \"passthrough\""));
    let message: Vec<_> = cloud_faults(&text).iter().map(ToString::to_string).collect();
    let want = "server.https.ports.\"10264\": \"host\", but mode is \"passthrough\": set the target that each node dials; the Host cannot be read in this mode";
    assert!(message.len() == 1 && message[0].ends_with(want), "{message:?}");
}

#[test]
fn node_ports_and_node_names_are_off_by_default_and_need_kubernetes() {
    let (settings, _) = cloud(CLOSED);
    assert_eq!((settings.ports, settings.node_names), (None, None));
    for table in ["node_ports", "node_names"] {
        let message = cloud_faults(&format!("{CLOSED}[server.{table}]\n")).to_string();
        let key = format!("server.{table}.configmap: requires Kubernetes: ");
        assert!(message.contains(&key), "{message}");
    }
}

mod inside {
    use super::*;

    fn inside(text: &str) -> Result<(ServerConfig, Vec<Warning>), Vec<String>> {
        let env = Environment {
            kubernetes_service_host: Some("10.96.0.1".to_owned()),
            pod_namespace: Some("edge-system".to_owned()),
            pod_ip: Some("10.0.0.1".to_owned()),
            ..Environment::default()
        };
        let read = ServerConfig::read(&format!("{CLOSED}{BY_HOST}{text}"), &env);
        read.map_err(|errors| errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn absent_keys_have_yurttunnels_defaults() {
        let (settings, warnings) = inside("[server.node_ports]\n[server.node_names]\n").unwrap();
        assert_eq!(warnings, []);
        let ports = settings.ports.unwrap();
        assert_eq!(
            (ports.namespace.0.as_str(), ports.configmap.0.as_str()),
            ("kube-system", "yurt-tunnel-server-cfg")
        );
        assert_eq!((ports.service, ports.http, ports.https), (None, Some(10264), None));
        assert_eq!(ports.cluster.namespace.unwrap(), "edge-system");
        let names = settings.node_names.unwrap();
        assert_eq!(
            (names.namespace.0.as_str(), names.configmap.0.as_str()),
            ("kube-system", "yurt-tunnel-nodes")
        );
        assert_eq!((names.key.0.as_str(), names.lease.0.as_str()), ("tunnel-nodes", "tunnel-node-names"));
        assert_eq!(names.edges, ("openyurt.io/is-edge-worker".to_owned(), "true".to_owned()));
        assert_eq!((names.service.0.as_str(), names.holders), ("x-tunnel-server-internal-svc", None));
    }

    #[test]
    fn node_names_resolve_to_a_server_only_with_published_names_without_a_zone() {
        let published =
            "[server.dns]\npublish = \"configmap\"\n[server.node_names]\nresolve_to = \"server\"\n";
        let (settings, _) = inside(published).unwrap();
        assert_eq!(settings.node_names.unwrap().holders.unwrap(), "tunnel-nodes");
        let zone = published.replace("[server.node_names]", "zone = \"n.test\"\n[server.node_names]");
        for text in ["[server.node_names]\nresolve_to = \"server\"\n", &zone] {
            let message = inside(text).unwrap_err();
            let want = "requires publish = \"configmap\" of [server.dns], without a zone";
            assert!(message.len() == 1 && message[0].ends_with(want), "{message:?}");
        }
    }

    #[test]
    fn an_invalid_node_names_setting_is_reported_with_its_key() {
        for (text, want) in [
            ("[server.node_names]\nedges = \"edge\"\n", "edges: \"edge\": expected label=value"),
            (
                "[server.node_names]\nresolve_to = \"x\"\n",
                "resolve_to: \"x\": expected \"service\" or \"server\"",
            ),
            ("[server.node_names]\nkey = \"a b\"\n", "key: \"a b\": expected a Kubernetes name"),
            ("[server.node_ports]\nport = 1\n", "server.node_ports.port: unknown key"),
            (
                "[server.dns]\npublish = \"configmap\"\nconfigmap = \"x\"\n[server.node_names]\nconfigmap = \"x\"\n",
                "configmap: \"x\", which publish of [server.dns] writes: use a separate ConfigMap",
            ),
        ] {
            let message = inside(text).unwrap_err();
            assert!(message.len() == 1 && message[0].contains(want), "{message:?}");
        }
        let nowhere = format!("{CLOSED}[server.node_ports]\nservice = \"s\"\n");
        let env =
            Environment { kubernetes_service_host: Some("10.96.0.1".to_owned()), ..Environment::default() };
        let message = ServerConfig::read(&nowhere, &env).unwrap_err().to_string();
        assert!(
            message.contains("server.node_ports.service: set, but it has no port to route to"),
            "{message}"
        );
    }
}
