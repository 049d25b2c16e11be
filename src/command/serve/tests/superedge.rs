//! Files from SuperEdge's manifests and documents; all of them load.

use crate::config::listen::ListenAddress;
use crate::listener::egress::EgressConfig;
use crate::listener::https::HttpsConfig;
use crate::listener::tcp::TcpListenerConfig;
use crate::server::Server;

use super::*;

/// From the documents of v0.1 to v0.3, with their original comments.
const CLOUD_OLD: &str = r#"
[mode]
  [mode.cloud]
    [mode.cloud.stream]                             # stream module
      [mode.cloud.stream.server]                    # gRPC server component
        grpcport = 9000                             # listening port of gRPC server
        logport = 8000                              # The listening port of the http server for log and health check,use (curl -X PUT http://podip:logport/debug/flags/v -d "8") to set the log level
        channelzaddr = "0.0.0.0:6000"               # The listening address of the gRPC [channlez](https://grpc.io/blog/a-short-introduction-to-channelz/)server
        key = "../../conf/certs/cloud.key"          # gRPC server的server端私钥
        cert = "../../conf/certs/cloud.crt"         # gRPC server的server端证书
        tokenfile = "../../conf/token"              # token的列表文件(nodename:随机字符串)
      [mode.cloud.stream.dns]                       # DNS组件
        configmap= "proxy-nodes"
        hosts = "/etc/superedge/proxy/nodes/hosts"
        service = "proxy-cloud-public"              # tunnel-cloud service name
        debug = true
      [mode.cloud.tcp]                              # TCP module
        "0.0.0.0:6443" = "127.0.0.1:6443"
      [mode.cloud.https]                            # HTTPS module
        cert ="../../conf/certs/kubelet.crt"        # HTTPS module server certificate
        key = "../../conf/certs/kubelet.key"        # HTTPS module server private key
        [mode.cloud.https.addr]
          "10250" = "101.206.162.213:10250"
"#;

const CLOUD_TCP: &str = r#"
[mode]
  [mode.cloud]
    [mode.cloud.stream]
        [mode.cloud.stream.server]
            grpcport = 9000
            key = "/etc/superedge/tunnel/certs/tunnel-cloud-server.key"
            cert = "/etc/superedge/tunnel/certs/tunnel-cloud-server.crt"
            tokenfile = "/etc/superedge/tunnel/token/token"
            logport = 51000
        [mode.cloud.stream.dns]
            debug = true
    [mode.cloud.tcp]
        "0.0.0.0:6443" = "127.0.0.1:6443"
    [mode.cloud.https]
"#;

const CLOUD_HTTPS: &str = r#"
[mode]
  [mode.cloud]
    [mode.cloud.stream]
        [mode.cloud.stream.server]
            grpcport = 9000
            logport = 51010
            key = "/etc/superedge/tunnel/certs/tunnel-cloud-server.key"
            cert = "/etc/superedge/tunnel/certs/tunnel-cloud-server.crt"
            tokenfile = "/etc/superedge/tunnel/token/token"
        [mode.cloud.stream.dns]
            configmap = "tunnel-nodes"
            hosts = "/etc/superedge/tunnel/nodes/hosts"
            service = "tunnel-cloud"
        [mode.cloud.https]
            cert = "/etc/superedge/tunnel/certs/apiserver-kubelet-server.crt"
            key = "/etc/superedge/tunnel/certs/apiserver-kubelet-server.key"
            [mode.cloud.https.addr]
                "10250" = "127.0.0.1:10250"
                "9100" = "127.0.0.1:9100"
        [mode.cloud.egress]
            servercert = "/etc/superedge/tunnel/certs/tunnel-server.crt"
            serverkey = "/etc/superedge/tunnel/certs/tunnel-server.key"
            egressport = "8000"
            kubeconfig = "/etc/superedge/kubeconfig"
        [mode.cloud.httpproxy]
            proxyport = "8080"
            proxyip = "0.0.0.0"
        [mode.cloud.ssh]
            port = 22
"#;

/// With tabs, as written by the installer since v0.8.2, and with the tables that only the newest version has.
const CLOUD_NEW: &str = "[mode]\n\t[mode.cloud]\n\t\t[mode.cloud.stream]\n\t\t\t[mode.cloud.stream.server]\n\
    \t\t\t\tgrpc_port = 9000\n\t\t\t\tlog_port = 51010\n\t\t\t\tmetrics_port = 6000\n\t\t\t\tchannelz_addr = \"\"\n\
    \t\t\t[mode.cloud.stream.register]\n\t\t\t\tservice = \"tunnel-cloud\"\n\
    \t\t[mode.cloud.egress]\n\t\t\tport = 8000\n\t\t[mode.cloud.http_proxy]\n\t\t\tport = 8080\n\
    \t\t[mode.cloud.ssh]\n\t\t\tport = 22\n\
    \t\t[mode.cloud.tls]\n\t\t\ttls_min_version = \"VersionTLS10\"\n\
    \t\t\ttls_cipher_suites = \"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,TLS_RSA_WITH_AES_128_CBC_SHA\"\n";

const EDGE_OLD: &str = r#"
[mode]
  [mode.edge]
    [mode.edge.stream]                              # stream模块
      [mode.edge.stream.client]                     # gRPC client组件
        token = "6ff2a1ea0f1611eb9896362096106d9d"  # 访问tunnel-cloud的验证token
        cert = "../../conf/certs/ca.crt"
        dns = "localhost"                           # tunnel-cloud的gRPC server证书签的IP或域名
        servername = "localhost:9000"               # tunnel-cloud的gRPC server的IP和端口
        logport = 7000
        channelzaddr = "0.0.0.0:5000"
    [mode.edge.https]
      cert= "../../conf/certs/kubelet-client.crt"
      key= "../../conf/certs/kubelet-client.key"
"#;

/// A manifest with unfilled templates.
const EDGE_TEMPLATE: &str = r#"
[mode]
  [mode.edge]
    [mode.edge.stream]
        [mode.edge.stream.client]
            token = "{{.TunnelCloudEdgeToken}}"
            cert = "/etc/superedge/tunnel/certs/tunnel-ca.crt"
            dns = "{{ServerName}}"
            servername = "{{.MasterIP}}:9000"
            logport = 51000
"#;

const EDGE_HTTPS: &str = r#"
[mode]
  [mode.edge]
    [mode.edge.stream]
        [mode.edge.stream.client]
            token = "6ff2a1ea0f1611eb9896362096106d9d"
            cert = "/etc/superedge/tunnel/certs/cluster-ca.crt"
            dns = "tunnel.cloud.io"
            servername = "192.0.2.10:9000"
            logport = 51000
    [mode.edge.https]
        cert = "/etc/superedge/tunnel/certs/apiserver-kubelet-client.crt"
        key = "/etc/superedge/tunnel/certs/apiserver-kubelet-client.key"
    [mode.edge.httpproxy]
        proxyip = "0.0.0.0"
        proxyport = "51009"
"#;

const EDGE_NEW: &str = "[mode]\n\t[mode.edge]\n\t\t[mode.edge.stream]\n\t\t\t[mode.edge.stream.client]\n\
    \t\t\t\ttoken = \"6ff2a1ea0f1611eb9896362096106d9d\"\n\t\t\t\tdns = \"127.0.0.1\"\n\
    \t\t\t\tserver_name = \"192.0.2.10:31234\"\n\t\t\t\tlog_port = 51010\n\
    \t\t[mode.edge.http_proxy]\n\t\t\tip = \"0.0.0.0\"\n\t\t\tport = \"51009\"\n";

#[test]
fn superedges_oldest_cloud_file_loads() {
    let (cloud, warnings) = cloud(CLOUD_OLD);
    assert_eq!(cloud.links.listen, "0.0.0.0:9000".parse().unwrap());
    assert_eq!(cloud.links.ports.admin_listen, "0.0.0.0:8000".parse().unwrap());
    assert_eq!(cloud.links.key.to_str(), Some("../../conf/certs/cloud.key"));
    assert_eq!(cloud.links.token_file.to_str(), Some("../../conf/token"));
    assert!(connect(&cloud).is_default);
    assert_eq!(warned(&warnings, WarningKind::Unsupported), Vec::<&str>::new());
    let limiters = [
        "mode.cloud.https.addr",
        "mode.cloud.ssh.auth",
        "mode.cloud.stream.server.channelzaddr",
        "mode.cloud.stream.server.logport",
        "mode.cloud.tcp.\"0.0.0.0:6443\"",
    ];
    assert_eq!(warned(&warnings, WarningKind::Insecure), limiters);
    for warning in warnings.iter().filter(|warning| warning.kind == WarningKind::Insecure) {
        assert!(
            warning.text.contains("tunnel migrate superedge"),
            "it names a key that the file cannot have: {warning}"
        );
    }
    let differences = ["mode.cloud.https.addr.\"10250\"", "mode.cloud.stream.dns.hosts"];
    assert_eq!(warned(&warnings, WarningKind::Unexpected), differences);
    let target = warnings.iter().find(|warning| warning.key == differences[0]).unwrap();
    assert!(target.text.contains("[edge.target_tls] of every edge"), "{target}");
}

#[test]
fn errors_about_a_superedge_file_use_its_own_keys() {
    let mut startup = StartupErrorCollector::checking();
    let (settings, _) = startup
        .settings(ServerConfig::examine(&CLOUD_OLD.replace("../../conf", "/none"), &Environment::default()));
    Server::validate(&settings, &mut startup);
    let errors = startup.into_errors();
    let keys: Vec<_> = errors.iter().map(|found| found.error.key.as_str()).collect();
    for key in ["stream.server.cert", "stream.server.key", "stream.server.tokenfile", "https.cert"] {
        assert!(keys.contains(&format!("mode.cloud.{key}").as_str()), "{key}: {keys:?}");
    }
    assert!(keys.iter().all(|key| key.starts_with("mode.cloud.")), "{keys:?}");
}

#[test]
fn a_missing_node_name_is_an_error_about_the_environment_variable() {
    let errors = EdgeConfig::read(EDGE_OLD, &Environment::default()).unwrap_err().to_string();
    assert_eq!(errors, "NODE_NAME: missing: set this environment variable to the node's name");
}

#[test]
fn only_a_superedge_file_has_superedges_default_certificate() {
    for (text, name) in
        [("[mode.cloud]\n", "cloud"), ("[server.connect]\nlisten = \"127.0.0.1:22\"\n", "server")]
    {
        let (links, at) = (cloud(text).0.links, format!("/etc/tunnel/certs/{name}"));
        assert_eq!((links.cert, links.key), (format!("{at}.crt").into(), format!("{at}.key").into()));
    }
}

#[test]
fn a_superedge_cloud_file_with_an_empty_https_table_loads() {
    let (cloud, warnings) = cloud(CLOUD_TCP);
    assert_eq!(cloud.links.ports.admin_listen.port(), 51000);
    assert_eq!(warned(&warnings, WarningKind::Unsupported), [""; 0]);
    assert!(cloud.listener::<HttpsConfig>().is_none());
    let [port] = cloud.listeners_of::<TcpListenerConfig>()[..] else { panic!("one port") };
    assert_eq!((port.ports.first(), port.to.node.clone()), ("0.0.0.0:6443".parse().unwrap(), None));
    assert_eq!(port.to.target, "127.0.0.1:6443".parse().unwrap());
}

#[test]
fn a_superedge_cloud_file_with_https_and_egress_loads() {
    let (cloud, warnings) = cloud(CLOUD_HTTPS);
    assert_eq!(cloud.links.ports.admin_listen.port(), 51010);
    assert_eq!(connect(&cloud).listen, "0.0.0.0:22".parse().ok());
    assert!(!connect(&cloud).is_default);
    let egress: &EgressConfig = cloud.listener().unwrap();
    let Some(ListenAddress::Port(listen)) = egress.listen else { panic!("{egress:?}") };
    assert_eq!(listen.to_string(), "0.0.0.0:8000");
    assert!(egress.cert.ends_with("tunnel-server.crt") && egress.key.ends_with("tunnel-server.key"));
    let unserved = ["stream.dns"];
    assert_eq!(warned(&warnings, WarningKind::Unsupported), unserved.map(|key| format!("mode.cloud.{key}")));
}

#[test]
fn superedges_newest_cloud_file_loads() {
    let (cloud, warnings) = cloud(CLOUD_NEW);
    assert_eq!(cloud.links.ports.metrics_listen, Some("0.0.0.0:6000".parse().unwrap()));
    assert_eq!(cloud.tls.min_version, TlsVersion::V12);
    assert_eq!(cloud.tls.cipher_suites.len(), 2);
    let egress: &EgressConfig = cloud.listener().unwrap();
    let Some(ListenAddress::Port(listen)) = egress.listen else { panic!("{egress:?}") };
    assert_eq!((listen.port(), egress.client_ca.as_ref()), (8000, None));
    assert_eq!(egress.cert.to_str(), Some("/etc/tunnel/certs/egress.crt"));
    assert_eq!(warned(&warnings, WarningKind::Insecure)[0], "mode.cloud.egress.port", "{warnings:?}");
    let unserved = ["mode.cloud.stream.register"];
    assert_eq!(warned(&warnings, WarningKind::Unsupported), unserved);
    assert_eq!(warned(&warnings, WarningKind::Unexpected), ["mode.cloud.tls.tls_min_version"]);
}

#[test]
fn superedges_edge_files_of_all_versions_load() {
    let (old, warnings) = edge(EDGE_OLD);
    assert_eq!(old.uplink.token, Some(SecretString::new("6ff2a1ea0f1611eb9896362096106d9d")));
    assert_eq!(old.uplink.ca.to_str(), Some("../../conf/certs/ca.crt"));
    let server = old.uplink.server_addresses().next().unwrap();
    assert_eq!(
        (server.dns.to_string(), server.at.to_string()),
        ("localhost".into(), "localhost:9000".into())
    );
    assert_eq!(warned(&warnings, WarningKind::Unsupported), Vec::<&str>::new());
    assert_eq!(old.target_tls.cert, Some("../../conf/certs/kubelet-client.crt".into()));
    assert_eq!(old.target_tls.key, Some("../../conf/certs/kubelet-client.key".into()));

    let (middle, warnings) = edge(EDGE_HTTPS);
    assert_eq!(middle.uplink.tls_server_name, Some("tunnel.cloud.io".parse().unwrap()));
    assert_eq!(middle.http_proxy.unwrap().listen, "0.0.0.0:51009".parse().ok());
    assert_eq!(warned(&warnings, WarningKind::Unsupported), [""; 0]);
    let limiters = ["mode.edge.httpproxy.proxyport", "mode.edge.stream.client.logport"];
    assert_eq!(warned(&warnings, WarningKind::Insecure), limiters);

    let (new, warnings) = edge(EDGE_NEW);
    let server = new.uplink.server_addresses().next().unwrap();
    assert_eq!((server.dns.to_string(), server.at.port), ("127.0.0.1".into(), 31234));
    assert_eq!(new.uplink.ca.to_str(), Some("/etc/tunnel/certs/ca.crt"));
    assert_eq!(new.http_proxy.unwrap().listen, "0.0.0.0:51009".parse().ok());
    assert_eq!(warned(&warnings, WarningKind::Unsupported), [""; 0]);
    let limiters = ["mode.edge.http_proxy.port", "mode.edge.stream.client.log_port"];
    assert_eq!(warned(&warnings, WarningKind::Insecure), limiters);
    let log_port = warnings.iter().find(|warning| warning.key == limiters[1]).unwrap();
    assert!(
        log_port.text.contains("firewall") && log_port.text.contains("tunnel migrate superedge"),
        "{log_port}"
    );
}

#[test]
fn an_unfilled_superedge_template_loads_with_warnings() {
    let (edge, warnings) = edge(EDGE_TEMPLATE);
    assert_eq!(edge.uplink.servers[0].at.port, 9000);
    let unfilled = ["mode.edge.stream.client.dns", "mode.edge.stream.client.servername"];
    assert_eq!(warned(&warnings, WarningKind::Unexpected), unfilled);
}

#[test]
fn a_misspelt_key_in_an_unsupported_superedge_table_is_an_error() {
    for (text, key) in [
        ("[mode.cloud.https]\nkay = 1", "mode.cloud.https.kay"),
        ("[mode.cloud.stream.dns]\nconfig = \"\"", "mode.cloud.stream.dns.config"),
    ] {
        assert_eq!(cloud_faults(text).iter().map(|f| f.key.as_str()).collect::<Vec<_>>(), [key]);
    }
}

#[test]
fn two_spellings_of_a_superedge_key_must_have_the_same_value() {
    let both = "[mode.cloud.stream.server]\ngrpcport = 9000\ngrpc_port = 9000\n";
    assert_eq!(cloud(both).0.links.listen.port(), 9000);
    assert_eq!(cloud_faults(&both.replace("grpcport = 9000", "grpcport = 9001")).iter().count(), 1);
}

#[test]
fn a_native_key_in_a_superedge_file_is_unknown() {
    let text = "[mode.cloud.ssh]\nport = 22\nauth = \"none\"\n[mode.cloud.session]\ngrace = \"1s\"\n\
                [mode.cloud.tcp.\"0.0.0.0:1\"]\ntarget = \"n/127.0.0.1:1\"\n";
    let errors: Vec<_> = cloud_faults(text).iter().map(ToString::to_string).collect();
    let expected = [
        "line 3: mode.cloud.ssh.auth: unknown key: known here are port",
        "line 4: mode.cloud.session: unknown key: known here are egress, http_proxy, https, ssh, stream, tcp, tls",
        "line 6: mode.cloud.tcp.\"0.0.0.0:1\": a table: expected a value",
    ];
    assert_eq!(errors, expected);
    let both = cloud_faults("[server.links]\nlisten = 9000\n[mode.cloud]\n").to_string();
    assert!(
        both.contains("mode: [server] is also in this file") && both.contains("server.links.listen"),
        "{both}"
    );
}
