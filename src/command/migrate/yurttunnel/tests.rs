use crate::config::Environment;
use crate::edge::config::EdgeConfig;
use crate::listener::ListenerConfig as _;
use crate::listener::http::HttpConfig;
use crate::listener::https::HttpsConfig;
use crate::listener::tcp::TcpListenerConfig;
use crate::server::config::ServerConfig;
use tunnel_base::policy::ports::PortTarget;

use crate::command::CommandError;
use crate::command::migrate::{MigrateArgs, MigrationOrigin, run};

use super::*;

/// Like YurtTunnel's own manifests, with each of its settings.
const OLD: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: { name: yurt-tunnel-server, namespace: kube-system }
spec:
  template:
    spec:
      hostNetwork: true
      containers:
      - name: yurt-tunnel-server
        image: openyurt/yurt-tunnel-server:v1.3.4
        command: [yurt-tunnel-server]
        args:
        - --bind-address=$(NODE_IP)
        - --insecure-bind-address=10.0.0.5
        - --server-count=1
        - --enable-iptables
        - --enable-dns-controller=true
        - --secure-port
        - "20263"
        - --cert-dns-names=tunnel.example.org
        - --odd=1
        - --v=2
---
apiVersion: v1
kind: ConfigMap
metadata: { name: yurt-tunnel-server-cfg, namespace: kube-system }
data:
  http-proxy-ports: "9051, x"
  https-proxy-ports: ""
  dnat-ports-pair: "9052=10264"
---
apiVersion: v1
kind: List
items:
- { apiVersion: v1, kind: ConfigMap, metadata: { name: yurt-tunnel-nodes }, data: {} }
- { apiVersion: v1, kind: Service, metadata: { name: x-tunnel-server-svc }, spec: { type: NodePort } }
- { apiVersion: v1, kind: Service, metadata: { name: kube-dns } }
---
apiVersion: apps/v1
kind: DaemonSet
metadata: { name: yurt-tunnel-agent }
spec:
  template:
    spec:
      containers:
      - name: agent
        image: openyurt/yurt-tunnel-agent:v1.3.4
        args: [--node-name=$(NODE_NAME), --tunnelserver-addr=tunnel.example.org:31008, --agent-identifiers=host=x]
"#;

fn migrated(text: &str, role: Role) -> Result<String, CommandError> {
    let migrate_args = MigrateArgs { from: MigrationOrigin::Yurttunnel, files: vec!["-".into()], role };
    run(&migrate_args, text.as_bytes())
}

fn remarks(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("#   ")).collect()
}

fn in_a_cluster() -> Environment {
    Environment {
        kubernetes_service_host: Some("10.96.0.1".to_owned()),
        pod_ip: Some("10.0.0.1".to_owned()),
        pod_namespace: Some("kube-system".to_owned()),
        node_name: Some("edge1".to_owned()),
        ..Environment::default()
    }
}

#[test]
fn migrated_server_settings_load_and_remark_on_each_old_setting() {
    let text = migrated(OLD, Role::Server).unwrap();
    let (settings, warnings) = ServerConfig::read(&text, &in_a_cluster()).unwrap();
    assert_eq!(warnings, []);
    assert_eq!(settings.links.listen, "0.0.0.0:10262".parse().unwrap());
    let https = &settings.listener::<HttpsConfig>().unwrap().node_ports()[0];
    let http = &settings.listener::<HttpConfig>().unwrap().node_ports()[0];
    assert_eq!((https.at, &https.stands_for), ("0.0.0.0:20263".parse().unwrap(), &PortTarget::Host));
    assert_eq!((http.at, &http.stands_for), ("10.0.0.5:10264".parse().unwrap(), &PortTarget::Host));
    let ports = settings.ports.unwrap();
    assert_eq!((ports.http, ports.https), (Some(10264), Some(20263)));
    assert_eq!(settings.node_names.unwrap().key, "tunnel-nodes");
    let found = remarks(&text);
    for (at, begin) in [
        "changed  --bind-address=$(NODE_IP): all addresses of the server",
        "kept     --insecure-bind-address=10.0.0.5: listen_ip of [server.http]",
        "removed  --server-count=1: servers find each other",
        "changed  --enable-iptables=true: ",
        "kept     --enable-dns-controller=true: [server.node_names]",
        "kept     --secure-port=20263: ",
        "changed  --cert-dns-names=tunnel.example.org: the certificate in cert must contain it",
        "unknown  --odd=1: not a flag of any known YurtTunnel",
        "changed  --v=2: ",
        "kept     dnat-ports-pair: \"9052=10264\": ",
        "kept     http-proxy-ports: \"9051, x\": ",
        "kept     https-proxy-ports: \"\": ",
        "removed  http-proxy-ports: \"x\": expected ports from 1 to 65535",
        "changed  Service x-tunnel-server-svc (NodePort): ",
        "kept     ConfigMap yurt-tunnel-nodes: ",
    ]
    .iter()
    .enumerate()
    {
        assert!(found[at].starts_with(begin), "{begin}: {found:#?}");
    }
    assert_eq!(found.len(), 15, "{found:#?}");
}

#[test]
fn the_migrated_http_port_keeps_the_address_of_the_old_one() {
    let old = OLD.replace("--insecure-bind-address=10.0.0.5", "--insecure-bind-address=$(NODE_IP)");
    for (old, at) in [
        (old.as_str(), "0.0.0.0:10264"),
        (
            &OLD.replace("--insecure-bind-address=10.0.0.5", "--insecure-bind-address=10.0.0"),
            "127.0.0.1:10264",
        ),
    ] {
        let text = migrated(old, Role::Server).unwrap();
        let (settings, _) = ServerConfig::read(&text, &in_a_cluster()).unwrap();
        assert_eq!(settings.listener::<HttpConfig>().unwrap().node_ports()[0].at, at.parse().unwrap());
    }
}

/// The remarks name flags of this program as "the flag --x" and "by --x", and commands in backticks.
#[test]
fn remarks_name_only_flags_and_commands_that_exist() {
    let all = OLD.replace("--odd=1", "--kube-config=/k\n        - --log-dir=/l\n        - --cert-dir=/c");
    let text = migrated(&all, Role::Server).unwrap() + &migrated(&all, Role::Edge).unwrap();
    let commands = <crate::command::Args as clap::CommandFactory>::command();
    let (mut flags, mut open) = (std::collections::BTreeSet::new(), vec![&commands]);
    while let Some(command) = open.pop() {
        flags.extend(command.get_arguments().filter_map(|arg| arg.get_long()));
        open.extend(command.get_subcommands());
    }
    let named: Vec<_> = ["flag --", "by --", "init --", "with --"]
        .iter()
        .flat_map(|before| text.split(before).skip(1))
        .map(|after| after.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap())
        .collect();
    assert!(named.contains(&"san") && named.contains(&"kubeconfig"), "{named:?}");
    for flag in named {
        assert!(flags.contains(flag), "{flag}");
    }
}

#[test]
fn a_malformed_namespace_is_not_copied_into_migrated_settings() {
    for namespace in [
        r#"x\"\n[server.tcp]\n\"0.0.0.0:22\" = \"0.0.0.0:22\"\n#"#,
        "Kube System",
        "",
        "a".repeat(64).as_str(),
    ] {
        let place = format!("name: yurt-tunnel-server-cfg, namespace: \"{namespace}\"");
        let old = OLD.replace("name: yurt-tunnel-server-cfg, namespace: kube-system", &place);
        let text = migrated(&old, Role::Server).unwrap();
        let (settings, _) = ServerConfig::read(&text, &in_a_cluster()).unwrap();
        assert!(settings.listener::<TcpListenerConfig>().is_none(), "{text}");
        assert_eq!(settings.ports.unwrap().namespace, "kube-system");
        assert_eq!(settings.node_names.unwrap().namespace, "kube-system");
        assert!(remarks(&text).iter().any(|line| line.contains("not a valid namespace")), "{text}");
    }
}

#[test]
fn migrated_edge_settings_load() {
    let text = migrated(OLD, Role::Edge).unwrap();
    let (_, warnings) = EdgeConfig::read(&text, &in_a_cluster()).unwrap();
    assert_eq!(warnings, []);
    assert!(text.contains("servers = [\"tunnel.example.org:31008\"]"), "{text}");
    assert_eq!(remarks(&text).len(), 3);
    let silent = OLD.replace("--tunnelserver-addr=tunnel.example.org:31008, ", "");
    EdgeConfig::read(&migrated(&silent, Role::Edge).unwrap(), &in_a_cluster()).unwrap();
}

/// The flags of all versions of YurtTunnel's programs, from their sources.
#[test]
fn each_flag_of_yurttunnel_is_known_and_others_are_marked_unknown() {
    let server = "version kube-config bind-address insecure-bind-address cert-dns-names cert-ips cert-dir enable-iptables \
                  enable-dns-controller egress-selector-enable iptables-sync-period dns-sync-period server-count \
                  proxy-strategy tunnel-agent-connect-port secure-port insecure-port meta-port v";
    let agent = "version node-name node-ip tunnelserver-addr apiserver-addr kube-config agent-identifiers meta-host meta-port \
                 cert-dir v";
    let flags = |names: &str, more: &str| {
        let all = names.split_whitespace().chain([more]);
        all.map(|name| (name.to_owned(), "1".to_owned())).collect::<Vec<_>>()
    };
    for remarks in
        [super::flags::server(&flags(server, "kubeconfig")).1, super::flags::agent(&flags(agent, "node")).1]
    {
        let (last, known) = remarks.split_last().unwrap();
        assert_eq!(last.verdict, MigrationVerdict::Unknown, "{last:?}");
        for remark in known {
            assert_ne!(remark.verdict, MigrationVerdict::Unknown, "{remark:?}");
        }
    }
    // Its default has a line too.
    let (_, remarks) = super::flags::server(&[]);
    assert_eq!(remarks.len(), 1);
    assert!(remarks[0].what == "--enable-iptables=true, its default" && remarks[0].why.contains("intercept"));
    // Kubelets probe the server's pods, so metrics cannot stay at --insecure-bind-address.
    let (server, remarks) = super::flags::server(&flags("enable-iptables", "meta-port"));
    assert_eq!((server.meta, remarks[1].verdict), (1, MigrationVerdict::Changed));
}

#[test]
fn json_is_read_and_node_names_stay_off_if_they_were_off() {
    let json = r#"{"kind": "List", "items": [{"kind": "Pod", "spec": {"containers": [
        {"name": "a", "command": ["/bin/yurt-tunnel-server", "--enable-dns-controller=false"]}]}}]}"#;
    let text = migrated(json, Role::Server).unwrap();
    let (settings, _) = ServerConfig::read(&text, &in_a_cluster()).unwrap();
    assert_eq!(settings.node_names, None);
}

#[test]
fn text_of_a_foreign_flag_stays_inside_its_comment() {
    let wild = OLD.replace("--odd=1", "\"--odd=1\\n[server.tcp]\"");
    let text = migrated(&wild, Role::Server).unwrap();
    assert!(ServerConfig::read(&text, &in_a_cluster()).is_ok() && !text.contains("\n[server.tcp]"), "{text}");
}

#[test]
fn a_file_that_is_no_yurttunnel_deployment_is_refused_with_a_remedy() {
    let error = |text: &str| migrated(text, Role::Server).unwrap_err();
    assert!(error("kind: Pod").text.contains("yurt-tunnel-server"));
    assert!(error("kind: Pod").text.contains("kubectl -n kube-system get deployment -o yaml"));
    let garbled = error("a: [b");
    assert!(garbled.code == 78 && garbled.text.starts_with("-: neither YAML nor JSON"), "{garbled}");
    let migrate_args =
        MigrateArgs { from: MigrationOrigin::Yurttunnel, files: vec!["/none/x".into()], role: Role::Server };
    assert!(run(&migrate_args, std::io::empty()).unwrap_err().text.starts_with("/none/x: "));
}

#[test]
fn a_superedge_file_is_migrated_with_the_same_meaning() {
    let old = "[mode.cloud.stream.server]\ngrpcport = 9000\nlog_port = 1\n[mode.cloud.ssh]\nport = 22\n\
               [mode.cloud.tcp]\n\"0.0.0.0:6443\" = \"n/127.0.0.1:6443\"\n\
               [mode.cloud.https.addr]\n\"10250\" = \"127.0.0.1:10250\"\n\
               [mode.cloud.stream.register]\nservice = \"pods\"\n";
    let migrate_args =
        MigrateArgs { from: MigrationOrigin::Superedge, files: vec!["-".into()], role: Role::Server };
    let text = run(&migrate_args, old.as_bytes()).unwrap();
    for line in [
        "[server.links]",
        "listen = \"0.0.0.0:9000\"",
        "admin_listen = \"0.0.0.0:1\"",
        "[server.connect]\n# Address",
        "\"0.0.0.0:6443\" = \"n/127.0.0.1:6443\"",
        "ports = { 10250 = \"127.0.0.1:10250\" }",
        "kubernetes_service = \"pods\"",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let (settings, _) = ServerConfig::read(&text, &in_a_cluster()).unwrap();
    assert_eq!(
        (
            settings.listeners_of::<TcpListenerConfig>().len(),
            settings.listener::<HttpsConfig>().unwrap().node_ports().len()
        ),
        (1, 1)
    );
    let remarks: Vec<_> = remarks(&text).iter().map(|line| line.split(": ").next().unwrap()).collect();
    assert_eq!(remarks, ["mode.cloud.stream.register.service"]);
    let bare = run(&migrate_args, "[mode.cloud]".as_bytes()).unwrap();
    assert!(bare.contains("[server.connect]") && bare.contains("listen = \"0.0.0.0:22\""), "{bare}");
    assert!(bare.contains("#   mode.cloud.ssh: SuperEdge opens port 22 to any client"), "{bare}");
    let off = run(
        &migrate_args,
        "[mode.cloud.stream.dns]\ndebug = true\nhosts = \"/h\"\nservice = \"s\"".as_bytes(),
    )
    .unwrap();
    for key in ["mode.cloud.stream.dns.debug: true", "mode.cloud.stream.dns.hosts: no effect"] {
        assert!(off.contains(&format!("#   {key}")), "{off}");
    }
    let wrong = run(&migrate_args, "[mode.cloud.ssh]\nprot = 1".as_bytes()).unwrap_err();
    assert!(wrong.text.contains("mode.cloud.ssh.prot: unknown key: did you mean port?"), "{}", wrong.text);
}
