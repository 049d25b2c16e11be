use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use clap::Parser as _;

use crate::command::{Args, Command};
use crate::config::server::invitations::InvitationStoreKind;

use crate::config::Environment;
use crate::edge::config::EdgeConfig;
use crate::server::config::ServerConfig;

use super::*;

fn init_args(dir: &Path, more: &[&str]) -> InitArgs {
    let dir = dir.to_str().unwrap();
    let args = ["tunnel", "init", dir, "--name", "cloud.test", "--node", "node1", "--node", "node2"];
    match Args::parse_from(args.iter().chain(more)).command {
        Command::Init(init) => init,
        other => panic!("{other:?}"),
    }
}

/// Collects every file and folder in `dir`, with its mode.
fn modes(dir: &Path, found: &mut Vec<(PathBuf, u32)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        found.push((path.clone(), fs::metadata(&path).unwrap().permissions().mode() & 0o777));
        if path.is_dir() {
            modes(&path, found);
        }
    }
}

#[test]
fn init_writes_configs_that_load_without_warnings_and_are_private() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    let output = run(&init_args(&dir, &["--egress-client", "system:kube-apiserver"])).unwrap();
    let mut found = Vec::new();
    modes(&dir, &mut found);
    assert_eq!(found.len(), 27, "{found:?}");
    for (path, mode) in &found {
        assert_eq!(*mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
    }
    let read = |path: &str| fs::read_to_string(dir.join(path)).unwrap();
    let (cloud, warnings) = ServerConfig::read(&read("server/server.toml"), &Environment::default()).unwrap();
    assert_eq!(warnings, []);
    assert_eq!(cloud.invitations.store, InvitationStoreKind::File);
    let kept = Some("/var/lib/tunnel/enrolled".into());
    assert_eq!(cloud.invitations.file, kept, "a service may not write below /etc");
    assert_eq!(cloud.links.token_file, "/etc/tunnel/token/token".into());
    let (edge, warnings) = EdgeConfig::read(&read("edge-node2/edge.toml"), &Environment::default()).unwrap();
    assert_eq!((warnings, edge.uplink.node.as_str()), (Vec::new(), "node2"));
    let token = read("edge-node2/token/token");
    assert!(token.len() == 65 && token != read("edge-node1/token/token"), "each has its own");
    assert!(read("server/token/token").ends_with(&format!("node2:{token}")));
    assert!(read("client-system-kube-apiserver/egress-selector.yaml").contains("https://cloud.test:8000"));
    for expected in
        ["ca.key stays here", "edge-node1/ ", "becomes /etc/tunnel on node2", "next, on the machine"]
    {
        assert!(output.contains(expected), "{expected}: {output}");
    }
}

#[test]
fn init_writes_ipv6_addresses_in_brackets_before_a_port() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    let mut init_args = init_args(&dir, &["--egress-client", "system:kube-apiserver"]);
    init_args.names = vec!["[fd00::5]".parse().unwrap()];
    run(&init_args).unwrap();
    let read = |path: &str| fs::read_to_string(dir.join(path)).unwrap();
    let (server, _) = ServerConfig::read(&read("server/server.toml"), &Environment::default()).unwrap();
    assert_eq!(server.links.listen, "[::]:9000".parse().unwrap());
    assert!(read("server/server.toml").contains("listen = \"[::]:8000\""));
    let (edge, _) = EdgeConfig::read(&read("edge-node1/edge.toml"), &Environment::default()).unwrap();
    assert_eq!(edge.uplink.servers[0].to_string(), "[fd00::5]:9000");
    assert!(
        read("client-system-kube-apiserver/egress-selector.yaml").contains("url: https://[fd00::5]:8000\n")
    );
}

#[test]
fn init_refuses_unusable_names_before_it_writes_anything() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    for node in ["default", "-", "pod", "127.0.0.1"] {
        let args = ["tunnel", "init", "dir", "--name", "cloud.test", &format!("--node={node}")];
        let error = Args::try_parse_from(args).unwrap_err().to_string();
        assert!(error.contains("no node can have the name"), "{error}");
    }
    for name in ["192.168.001.1", "cloud.7", &"x".repeat(64)] {
        let error = Args::try_parse_from(["tunnel", "init", "dir", "--name", name]).unwrap_err().to_string();
        assert!(error.contains("expected a DNS name, or an IP address without leading zeros"), "{error}");
    }
    let long = InitArgs { nodes: vec!["x".repeat(253).parse().unwrap()], ..init_args(&dir, &[]) };
    let error = run(&long).unwrap_err().to_string();
    assert!(error.contains("too long for the name of its folder"), "{error}");
    assert!(!dir.exists());
}

#[test]
fn init_notes_a_node_whose_name_is_no_valid_tls_server_name() {
    let place = tempfile::tempdir().unwrap();
    for (node, has_note) in [("worker-7.9", true), ("node1", false), ("192.0.2.33", false)] {
        let init_args =
            InitArgs { nodes: vec![node.parse().unwrap()], ..init_args(&place.path().join(node), &[]) };
        let output = run(&init_args).unwrap();
        assert_eq!(
            output.contains(&format!("note: {node} is no valid server name for TLS")),
            has_note,
            "{output}"
        );
    }
}

#[test]
fn init_without_nodes_prepares_a_server_for_invitations() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    let mut init_args = init_args(&dir, &[]);
    init_args.nodes.clear();
    let output = run(&init_args).unwrap();
    let mut found: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    found.sort();
    assert_eq!(found, ["ca.crt", "ca.key", "server"]);
    let tokens = fs::read_to_string(dir.join("server/token/token")).unwrap();
    assert!(tokens.lines().all(|line| line.starts_with('#')), "{tokens}");
    assert!(output.contains("tunnel invite --node NODE") && !output.contains("edge-"), "{output}");
}

#[test]
fn a_second_init_with_the_same_ca_writes_the_same_ca_certificate() {
    let place = tempfile::tempdir().unwrap();
    let (first, second) = (place.path().join("first"), place.path().join("second"));
    run(&init_args(&first, &[])).unwrap();
    let error = run(&init_args(&first, &[])).unwrap_err();
    assert_eq!(error.code, 73);
    for there in ["ca.crt", "ca.key", "server", "edge-node1", "edge-node2"] {
        assert!(error.text.contains(&first.join(there).display().to_string()), "{error}");
    }
    let [cert, key] = ["ca.crt", "ca.key"].map(|file| first.join(file).display().to_string());
    run(&init_args(&second, &["--ca-cert", &cert, "--ca-key", &key])).unwrap();
    assert!(!second.join("ca.key").exists());
    let ca = |dir: &Path| fs::read_to_string(dir.join("server/certs/ca.crt")).unwrap();
    assert_eq!(ca(&first), ca(&second));
}

#[test]
fn init_issues_each_node_a_kubelet_client_certificate_of_the_kubelet_ca() {
    let place = tempfile::tempdir().unwrap();
    let (cert, key) = (place.path().join("k.crt"), place.path().join("k.key"));
    let kubelets = CertificateAuthority::new("kubernetes", DAY).unwrap();
    fs::write(&cert, kubelets.cert()).unwrap();
    fs::write(&key, kubelets.key()).unwrap();
    let [cert, key] = [cert, key].map(|file| file.display().to_string());
    let dir = place.path().join("files");
    run(&init_args(&dir, &["--kubelet-ca-cert", &cert, "--kubelet-ca-key", &key])).unwrap();
    let read = |path: &str| fs::read_to_string(dir.join(path)).unwrap();
    let certificate = read("edge-node1/certs/apiserver-kubelet-client.crt");
    let der = rustls_pemfile::certs(&mut certificate.as_bytes()).next().unwrap().unwrap();
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
    let names_in_certificate = (certificate.subject().to_string(), certificate.issuer().to_string());
    assert_eq!(names_in_certificate, ("CN=tunnel:node1".to_owned(), "CN=kubernetes".to_owned()));
    assert!(read("edge-node1/edge.toml").contains("[edge.target_tls]"));
}

#[test]
fn init_prints_commands_quoted_for_a_shell() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("it's a folder");
    let output = run(&init_args(&dir, &["--install-dir", "/etc/a b"])).unwrap();
    for command in [
        &format!("cp -rpT '{}/it'\\''s a folder/server' '/etc/a b'\n", place.path().display()),
        "tunnel server -c '/etc/a b/server.toml'\n",
        "tunnel edge -c '/etc/a b/edge.toml'\n",
    ] {
        assert!(output.contains(command), "{command}: {output}");
    }
}

#[test]
fn a_name_that_no_certificate_can_contain_is_refused_with_its_flag() {
    for line in [
        "init --name 192.168.001.1",
        "cert issue server --name 1.2.3",
        "cert issue egress-client system:kube-apiserver --server 0x7f.1",
        "join cloud.test:9000 --invitation - --tls-server-name 10.0.0.01",
    ] {
        let args = format!("tunnel {line}");
        let error = Args::read(args.split(' ').map(Into::into)).unwrap_err().to_string();
        let (flag, name) = line.rsplit_once(' ').unwrap();
        let flag = flag.rsplit(' ').next().unwrap();
        assert!(error.contains(&format!("invalid value '{name}' for '{flag} <")), "{line}: {error}");
        assert!(error.contains("expected a DNS name, or an IP address"), "{line}: {error}");
    }
}

#[test]
fn an_error_in_a_generated_config_names_no_line() {
    let error = checked(Role::Server, "[server.links]\nlisten = \"nowhere\"\n").unwrap_err();
    assert!(
        error.code == 78 && error.text.starts_with("cannot make server.toml of these arguments: server."),
        "{error}"
    );
}

#[test]
fn a_failed_init_reports_the_error_and_leaves_no_files() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    fs::write(place.path().join("junk"), "junk").unwrap();
    let junk = place.path().join("junk").display().to_string();
    for (more, expected) in [
        (["--install-dir", "etc"], "expected an absolute path"),
        (["--egress-client", "a*"], "--egress-client \"a*\": expected"),
        (["--egress-client", "Tunnel:node1"], "names that begin with tunnel: are reserved"),
        (["--node", "Node1"], "--node Node1 is given twice"),
    ] {
        let error = run(&init_args(&dir, &more)).unwrap_err();
        assert!(error.code == 64 && error.text.contains(expected), "{error}");
    }
    let error = run(&init_args(&dir, &["--ca-cert", &junk, "--ca-key", &junk])).unwrap_err();
    assert!(error.code == 78 && error.text.contains("junk holds no certificate"), "{error}");
    let twice = run(&init_args(&dir, &["--egress-client", "a:b", "--egress-client", "a-b"])).unwrap_err();
    assert!(twice.text.contains("another client has the same folder client-a-b"), "{twice}");
    assert!(!dir.exists());
}

#[test]
fn a_server_certificate_for_two_addresses_has_a_third_name_for_peers() {
    let place = tempfile::tempdir().unwrap();
    let args = ["tunnel", "init", "--name", "10.0.0.5", "--name", "::1", "--node", "n"];
    let Command::Init(mut init) = Args::parse_from(args).command else { panic!() };
    init.dir = place.path().join("files");
    run(&init).unwrap();
    let text = fs::read_to_string(init.dir.join("server/certs/server.crt")).unwrap();
    let der = rustls_pemfile::certs(&mut text.as_bytes()).next().unwrap().unwrap();
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
    let names = certificate.subject_alternative_name().unwrap().unwrap().value.general_names.len();
    assert_eq!(names, 3);
}
