//! YurtTunnel's ways to reach nodes: ports by Host, `[server.node_ports]`, `[server.node_names]`.

use tunnel_base::policy::ports::PortTarget;

use crate::listener::http::HttpConfig;

use super::*;

const CLOSED: &str = "[server.connect]\nlisten = \"127.0.0.1:22\"\n";
const BY_HOST: &str = "[server.http]\nlisten_ip = \"127.0.0.1\"\nports = { \"10264\" = \"host\" }\n";

#[test]
fn a_port_stands_for_what_host_names() {
    let (settings, warnings) = cloud(&format!("{CLOSED}{BY_HOST}"));
    assert_eq!(
        (&settings.listener::<HttpConfig>().unwrap().ports[0].stands_for, warnings),
        (&PortTarget::Host, vec![])
    );
    let open = format!("{CLOSED}{}", BY_HOST.replace("listen_ip = \"127.0.0.1\"", ""));
    let told = "anyone who reaches [::]:10264 can reach every port at every node without authentication; set allow_from";
    assert_eq!(cloud(&open).1[0].text, told);
}

#[test]
fn where_no_host_is_read_no_port_stands_for_it() {
    let text = format!("{CLOSED}{}", BY_HOST.replace("http]", "https]\nmode = \"passthrough\""));
    let told: Vec<_> = cloud_faults(&text).iter().map(ToString::to_string).collect();
    let want = "server.https.ports.\"10264\": \"host\", but mode is \"passthrough\": set the target that each node dials; the Host cannot be read in this mode";
    assert!(told.len() == 1 && told[0].ends_with(want), "{told:?}");
}

#[test]
fn neither_table_is_there_by_default_and_both_need_kubernetes() {
    let (settings, _) = cloud(CLOSED);
    assert_eq!((settings.ports, settings.node_names), (None, None));
    for table in ["node_ports", "node_names"] {
        let told = cloud_faults(&format!("{CLOSED}[server.{table}]\n")).to_string();
        let key = format!("server.{table}.configmap: requires Kubernetes: ");
        assert!(told.contains(&key), "{told}");
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
    fn what_is_left_out_is_as_yurttunnel_has_it() {
        let (settings, warnings) = inside("[server.node_ports]\n[server.node_names]\n").unwrap();
        assert_eq!(warnings, []);
        let ports = settings.ports.unwrap();
        assert_eq!(
            (ports.namespace.as_str(), ports.configmap.as_str()),
            ("kube-system", "yurt-tunnel-server-cfg")
        );
        assert_eq!((ports.service, ports.http, ports.https), (None, Some(10264), None));
        assert_eq!(ports.cluster.namespace.unwrap(), "edge-system");
        let names = settings.node_names.unwrap();
        assert_eq!(
            (names.namespace.as_str(), names.configmap.as_str()),
            ("kube-system", "yurt-tunnel-nodes")
        );
        assert_eq!((names.key.as_str(), names.lease.as_str()), ("tunnel-nodes", "tunnel-node-names"));
        assert_eq!(names.edges, ("openyurt.io/is-edge-worker".to_owned(), "true".to_owned()));
        assert_eq!((names.service.as_str(), names.holders), ("x-tunnel-server-internal-svc", None));
    }

    #[test]
    fn edges_names_lead_to_servers_that_are_published_without_a_zone() {
        let published =
            "[server.dns]\npublish = \"configmap\"\n[server.node_names]\nresolve_to = \"server\"\n";
        let (settings, _) = inside(published).unwrap();
        assert_eq!(settings.node_names.unwrap().holders.unwrap(), "tunnel-nodes");
        let zone = published.replace("[server.node_names]", "zone = \"n.test\"\n[server.node_names]");
        for text in ["[server.node_names]\nresolve_to = \"server\"\n", &zone] {
            let told = inside(text).unwrap_err();
            let want = "requires publish = \"configmap\" of [server.dns], without a zone";
            assert!(told.len() == 1 && told[0].ends_with(want), "{told:?}");
        }
    }

    #[test]
    fn whatever_is_wrong_is_told_with_its_key() {
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
            let told = inside(text).unwrap_err();
            assert!(told.len() == 1 && told[0].contains(want), "{told:?}");
        }
        let nowhere = format!("{CLOSED}[server.node_ports]\nservice = \"s\"\n");
        let env =
            Environment { kubernetes_service_host: Some("10.96.0.1".to_owned()), ..Environment::default() };
        let told = ServerConfig::read(&nowhere, &env).unwrap_err().to_string();
        assert!(told.contains("server.node_ports.service: set, but it has no port to route to"), "{told}");
    }
}
