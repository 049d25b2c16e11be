//! Certificates issued by Kubernetes, and the identity that the server presents to targets.

use crate::listener::https::HttpsConfig;

use super::*;
use crate::config::kubernetes::ProfileKind;

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
fn a_target_certificate_requires_authenticated_clients() {
    let proved = "client_ca = \"/ca\"\nnames = [\"a\"]\n";
    let shown = |lines: &str| {
        let (settings, warnings) = cloud(&https(&format!("{proved}{lines}")));
        let files = settings.listener::<HttpsConfig>().unwrap().target_files();
        let shown: Vec<_> = files.iter().map(|file| file.path.to_str().unwrap().to_owned()).collect();
        (shown, warned(&warnings, WarningKind::Insecure).into_iter().map(str::to_owned).collect::<Vec<_>>())
    };
    let files = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
    assert_eq!(shown(""), (vec![], vec![]));
    let usual = "target_cert = \"/c\"\ntarget_ca = \"/ca\"\n";
    assert_eq!(shown(usual), (files(&["/c", "/c", "/ca"]), vec![]));
    let apart = "target_cert = \"/c\"\ntarget_key = \"/k\"\ntarget_insecure_skip_verify = true\n";
    assert_eq!(
        shown(apart),
        (files(&["/c", "/k"]), vec!["server.https.target_insecure_skip_verify".to_owned()])
    );

    let certificate = "target_cert = \"/c\"\ntarget_ca = \"/ca\"\n";
    let anybody = "client_ca = \"/ca\"\nnames = [\"*\"]\n";
    for lines in ["allow_from = [\"10.0.0.0/8\"]\n", "client_ca = \"/ca\"\n", anybody] {
        let errors_found = errors(&https(&format!("{lines}{certificate}")));
        assert!(
            errors_found
                .iter()
                .any(|error| error.contains("not presented for clients identified only by address")),
            "{errors_found:?}"
        );
    }
    let errors_found = errors(&https(&format!("{proved}target_cert = \"/c\"\n")));
    assert!(
        errors_found[0].contains("target_ca")
            && errors_found[0].contains("target_insecure_skip_verify = true"),
        "{errors_found:?}"
    );
    let errors_found = errors(&https(&format!("{proved}target_ca = \"/ca\"\n")));
    assert!(errors_found[0].contains("target_cert"), "{errors_found:?}");
    let errors_found = errors(&https(&format!("mode = \"passthrough\"\n{certificate}")));
    assert!(errors_found[0].contains("client_ca and names"), "{errors_found:?}");
}

#[test]
fn certificates_are_requested_by_profile() {
    let outside = "[server.csr]\nprofiles = [\"proxy-client\"]\n";
    let errors_found = errors(outside);
    assert!(
        errors_found[0].contains("server.csr.profiles") && errors_found[0].contains("--kubeconfig"),
        "{errors_found:?}"
    );
    assert_eq!(cloud("[server.csr]\n").0.csr, None);
    let errors_found = errors("[server.csr]\nprofiles = [\"agent\"]\nlifetime = \"9m\"\nnames = [\"a:1\"]\n");
    for expected in ["expected \"server\" or \"proxy-client\"", "lifetime", "without a port"] {
        assert!(errors_found.iter().any(|error| error.contains(expected)), "{expected}: {errors_found:?}");
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
    assert_eq!(csr.services, ["s".into()]);
    assert_eq!(csr.names, ["fd00::1", "tunnel.test"].map(str::to_owned).into());
}

#[test]
fn edge_certificates_are_enabled_at_the_edge_and_trusted_at_the_server() {
    let outside = "[edge.csr]\nenabled = true\n";
    let errors_found = edge_faults(&format!("{LEAST}{outside}")).to_string();
    assert!(errors_found.contains("edge.csr.enabled"), "{errors_found}");
    assert_eq!(edge(&format!("{LEAST}[edge.csr]\nenabled = false\n")).0.csr, None);
    let errors_found = errors("[server.csr]\nedge_ca = \"/ca\"\n");
    assert!(errors_found[0].contains("server.csr.edge_ca"), "{errors_found:?}");
    let env = Environment { kubeconfig: Some("/k".into()), node_ip: Some("10.0.0.7".to_owned()), ..node1() };
    let text = format!("{LEAST}{outside}lifetime = \"24h\"\n");
    let csr = EdgeConfig::read(&text, &env).unwrap().0.csr.unwrap();
    assert_eq!(csr.file.to_str(), Some("/var/lib/tunnel/pki/agent.pem"));
    assert_eq!((csr.node_ip, csr.lifetime), ("10.0.0.7".parse().ok(), Some(Duration::from_secs(86_400))));
    let csr = ServerConfig::read("[server.csr]\nedge_ca = \"/ca\"\n", &env).unwrap().0.csr.unwrap();
    assert_eq!((csr.edge_ca, csr.profiles), (Some("/ca".into()), [].into()));
}

#[test]
fn tokens_of_a_service_account_are_accepted_only_if_it_is_named_and_there_is_a_cluster() {
    let named = "[server.service_account]\nname = \"tunnel-edge\"\n";
    let errors_found = errors(named);
    assert!(errors_found[0].contains("server.service_account.name"), "{errors_found:?}");
    let env = Environment { kubeconfig: Some("/k".into()), pod_namespace: Some("n".into()), ..node1() };
    let read = |text: &str| ServerConfig::read(text, &env).unwrap().0.service_account;
    let account = read(named).unwrap();
    assert_eq!((account.audience.as_str(), account.outage), ("tunnel.cloud.io", true));
    assert_eq!(account.cluster.namespace.as_deref(), Some("n"));
    assert_eq!(read("[server.service_account]\naudience = \"a\"\n"), None);
}

#[test]
fn an_edge_with_a_certificate_needs_no_token() {
    let tokenless = LEAST.replace("token = \"t0ken\"\n", "");
    assert_ne!(tokenless, LEAST);
    let errors_found = edge_faults(&tokenless).to_string();
    assert!(
        errors_found.contains("edge.uplink.token") && errors_found.contains("enabled = true in [edge.csr]"),
        "{errors_found}"
    );
    let env = Environment { kubeconfig: Some("/k".into()), ..node1() };
    let text = format!("{tokenless}[edge.csr]\nenabled = true\n");
    let (edge, warnings) = EdgeConfig::read(&text, &env).unwrap();
    assert_eq!((edge.uplink.token, warnings), (None, vec![]));
}
