//! Certificates issued by Kubernetes, and the identity that the server presents to targets.

use crate::listener::https::{HttpsConfig, HttpsMode, TargetIdentity};

use super::*;
use crate::config::server::kubernetes::ProfileKind;

const CLOSED: &str =
    "[server.connect]\nlisten = \"127.0.0.1:22\"\n[server.https]\nports = { \"1\" = \"127.0.0.1:2\" }\n";

fn https(lines: &str) -> String {
    format!("{CLOSED}{lines}")
}

/// Returns the errors of a server's file as texts.
fn errors(text: &str) -> Vec<String> {
    cloud_faults(text).iter().map(ToString::to_string).collect()
}

#[test]
fn a_server_shows_targets_a_certificate_for_proved_clients_only() {
    let proved = "client_ca = \"/ca\"\nnames = [\"a\"]\n";
    let shown = |lines: &str| {
        let (settings, warnings) = cloud(&https(&format!("{proved}{lines}")));
        let HttpsMode::Terminate(_, shown) = settings.listener::<HttpsConfig>().unwrap().mode.clone() else {
            panic!("terminate")
        };
        (shown, warned(&warnings, WarningKind::Insecure).into_iter().map(str::to_owned).collect::<Vec<_>>())
    };
    let identity = |key: &str, ca: Option<&str>| {
        Some(TargetIdentity { cert: "/c".into(), key: key.into(), ca: ca.map(Into::into) })
    };
    assert_eq!(shown(""), (None, vec![]));
    assert_eq!(shown("target_cert = \"/c\"\ntarget_ca = \"/ca\"\n"), (identity("/c", Some("/ca")), vec![]));
    let apart = "target_cert = \"/c\"\ntarget_key = \"/k\"\ntarget_insecure_skip_verify = true\n";
    assert_eq!(
        shown(apart),
        (identity("/k", None), vec!["server.https.target_insecure_skip_verify".to_owned()])
    );

    let certificate = "target_cert = \"/c\"\ntarget_ca = \"/ca\"\n";
    let anybody = "client_ca = \"/ca\"\nnames = [\"*\"]\n";
    for lines in ["allow_from = [\"10.0.0.0/8\"]\n", "client_ca = \"/ca\"\n", anybody] {
        let told = errors(&https(&format!("{lines}{certificate}")));
        assert!(
            told.iter().any(|told| told.contains("not presented for clients identified only by address")),
            "{told:?}"
        );
    }
    let told = errors(&https(&format!("{proved}target_cert = \"/c\"\n")));
    assert!(
        told[0].contains("target_ca") && told[0].contains("target_insecure_skip_verify = true"),
        "{told:?}"
    );
    let told = errors(&https(&format!("{proved}target_ca = \"/ca\"\n")));
    assert!(told[0].contains("target_cert"), "{told:?}");
    let told = errors(&https(&format!("mode = \"passthrough\"\n{certificate}")));
    assert!(told[0].contains("client_ca and names"), "{told:?}");
}

#[test]
fn certificates_are_asked_for_by_profile() {
    let outside = "[server.csr]\nprofiles = [\"proxy-client\"]\n";
    let told = errors(outside);
    assert!(told[0].contains("server.csr.profiles") && told[0].contains("--kubeconfig"), "{told:?}");
    assert_eq!(cloud("[server.csr]\n").0.csr, None);
    let told = errors("[server.csr]\nprofiles = [\"agent\"]\nlifetime = \"9m\"\nnames = [\"a:1\"]\n");
    for wanted in ["expected \"server\" or \"proxy-client\"", "lifetime", "without a port"] {
        assert!(told.iter().any(|told| told.contains(wanted)), "{wanted}: {told:?}");
    }
    let inside =
        Environment { kubernetes_service_host: Some("10.96.0.1".to_owned()), ..Environment::default() };
    let read = |text: &str| ServerConfig::read(text, &inside);
    let nameless = read("[server.csr]\nprofiles = [\"server\"]\n").unwrap_err().to_string();
    assert!(nameless.contains("server.csr.services"), "{nameless}");
    let text = "[server.csr]\nprofiles = [\"server\", \"proxy-client\"]\nservices = [\"s\"]\nnames = [\"Tunnel.Test\", \"fd00::1\"]\nlifetime = \"2h\"\n";
    let csr = read(text).unwrap().0.csr.unwrap();
    assert_eq!(csr.dir.to_str(), Some("/var/lib/tunnel/pki"));
    assert_eq!(csr.profiles, [ProfileKind::Server, ProfileKind::ProxyClient].into());
    assert_eq!(csr.lifetime, Some(Duration::from_secs(7200)));
    assert_eq!(csr.services, ["s"]);
    assert_eq!(csr.names, ["fd00::1", "tunnel.test"].map(str::to_owned).into());
}

#[test]
fn an_edge_and_its_servers_say_whether_certificates_prove_it() {
    let outside = "[edge.csr]\nenabled = true\n";
    let told = edge_faults(&format!("{LEAST}{outside}")).to_string();
    assert!(told.contains("edge.csr.enabled"), "{told}");
    assert_eq!(edge(&format!("{LEAST}[edge.csr]\nenabled = false\n")).0.csr, None);
    let told = errors("[server.csr]\nedge_ca = \"/ca\"\n");
    assert!(told[0].contains("server.csr.edge_ca"), "{told:?}");
    let env = Environment { kubeconfig: Some("/k".into()), node_ip: Some("10.0.0.7".to_owned()), ..node1() };
    let text = format!("{LEAST}{outside}lifetime = \"24h\"\n");
    let csr = EdgeConfig::read(&text, &env).unwrap().0.csr.unwrap();
    assert_eq!(csr.file.to_str(), Some("/var/lib/tunnel/pki/agent.pem"));
    assert_eq!((csr.node_ip, csr.lifetime), ("10.0.0.7".parse().ok(), Some(Duration::from_secs(86_400))));
    let csr = ServerConfig::read("[server.csr]\nedge_ca = \"/ca\"\n", &env).unwrap().0.csr.unwrap();
    assert_eq!((csr.edge_ca, csr.profiles), (Some("/ca".into()), [].into()));
}

#[test]
fn an_edge_with_a_certificate_needs_no_token() {
    let tokenless = LEAST.replace("token = \"t0ken\"\n", "");
    assert_ne!(tokenless, LEAST);
    let told = edge_faults(&tokenless).to_string();
    assert!(told.contains("edge.uplink.token") && told.contains("enabled = true in [edge.csr]"), "{told}");
    let env = Environment { kubeconfig: Some("/k".into()), ..node1() };
    let text = format!("{tokenless}[edge.csr]\nenabled = true\n");
    let (edge, warnings) = EdgeConfig::read(&text, &env).unwrap();
    assert_eq!((edge.uplink.token, warnings), (None, vec![]));
}
