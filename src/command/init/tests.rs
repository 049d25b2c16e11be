use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use clap::Parser as _;

use crate::command::{Args, Command};
use crate::config::server::invitations::InvitationStore;

use super::*;

fn asked(dir: &Path, more: &[&str]) -> InitArgs {
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
fn what_is_made_loads_without_an_open_door_and_is_for_its_owner_alone() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    let told = run(&asked(&dir, &["--egress-client", "system:kube-apiserver"])).unwrap();
    let mut found = Vec::new();
    modes(&dir, &mut found);
    assert_eq!(found.len(), 27, "{found:?}");
    for (path, mode) in &found {
        assert_eq!(*mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
    }
    let read = |path: &str| fs::read_to_string(dir.join(path)).unwrap();
    let (cloud, warnings) = ServerConfig::read(&read("server/server.toml"), &Environment::default()).unwrap();
    assert_eq!(warnings, []);
    assert_eq!(cloud.invitations.store, InvitationStore::File);
    let kept = Some("/var/lib/tunnel/enrolled".into());
    assert_eq!(cloud.invitations.file, kept, "a service may not write below /etc");
    assert_eq!(cloud.links.token_file, Path::new("/etc/tunnel/token/token"));
    let (edge, warnings) = EdgeConfig::read(&read("edge-node2/edge.toml"), &Environment::default()).unwrap();
    assert_eq!((warnings, edge.uplink.node.as_str()), (Vec::new(), "node2"));
    let token = read("edge-node2/token/token");
    assert!(token.len() == 65 && token != read("edge-node1/token/token"), "each has its own");
    assert!(read("server/token/token").ends_with(&format!("node2:{token}")));
    assert!(read("client-system-kube-apiserver/egress-selector.yaml").contains("https://cloud.test:8000"));
    for says in ["ca.key stays here", "edge-node1/ ", "becomes /etc/tunnel on node2", "next, on the machine"]
    {
        assert!(told.contains(says), "{says}: {told}");
    }
}

#[test]
fn an_address_of_ipv6_has_brackets_wherever_a_port_follows() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    let mut asked = asked(&dir, &["--egress-client", "system:kube-apiserver"]);
    asked.names = vec!["[fd00::5]".parse().unwrap()];
    run(&asked).unwrap();
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
fn a_name_that_cannot_work_is_refused_before_anything_is_written() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    for node in ["default", "-", "pod", "127.0.0.1"] {
        let args = ["tunnel", "init", "dir", "--name", "cloud.test", &format!("--node={node}")];
        let told = Args::try_parse_from(args).unwrap_err().to_string();
        assert!(told.contains("no node can have the name"), "{told}");
    }
    for name in ["192.168.001.1", "cloud.7", &"x".repeat(64)] {
        let told = Args::try_parse_from(["tunnel", "init", "dir", "--name", name]).unwrap_err().to_string();
        assert!(told.contains("expected a DNS name, or an IP address without leading zeros"), "{told}");
    }
    let long = InitArgs { nodes: vec!["x".repeat(253).parse().unwrap()], ..asked(&dir, &[]) };
    let told = run(&long).unwrap_err().to_string();
    assert!(told.contains("too long for the name of its folder"), "{told}");
    assert!(!dir.exists());
}

#[test]
fn a_node_that_clients_of_tls_cannot_name_gets_a_note() {
    let place = tempfile::tempdir().unwrap();
    for (node, has_note) in [("worker-7.9", true), ("node1", false), ("192.0.2.33", false)] {
        let asked = InitArgs { nodes: vec![node.parse().unwrap()], ..asked(&place.path().join(node), &[]) };
        let told = run(&asked).unwrap();
        assert_eq!(
            told.contains(&format!("note: {node} is no valid server name for TLS")),
            has_note,
            "{told}"
        );
    }
}

#[test]
fn a_cloud_without_nodes_is_ready_for_invitations() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    let mut asked = asked(&dir, &[]);
    asked.nodes.clear();
    let told = run(&asked).unwrap();
    let mut found: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    found.sort();
    assert_eq!(found, ["ca.crt", "ca.key", "server"]);
    let tokens = fs::read_to_string(dir.join("server/token/token")).unwrap();
    assert!(tokens.lines().all(|line| line.starts_with('#')), "{tokens}");
    assert!(told.contains("tunnel invite --node NODE") && !told.contains("edge-"), "{told}");
}

#[test]
fn a_second_run_with_the_same_authority_makes_what_the_first_ones_machines_believe() {
    let place = tempfile::tempdir().unwrap();
    let (first, second) = (place.path().join("first"), place.path().join("second"));
    run(&asked(&first, &[])).unwrap();
    let told = run(&asked(&first, &[])).unwrap_err();
    assert_eq!(told.code, 73);
    for there in ["ca.crt", "ca.key", "server", "edge-node1", "edge-node2"] {
        assert!(told.text.contains(&first.join(there).display().to_string()), "{told}");
    }
    let [cert, key] = ["ca.crt", "ca.key"].map(|file| first.join(file).display().to_string());
    run(&asked(&second, &["--ca-cert", &cert, "--ca-key", &key])).unwrap();
    assert!(!second.join("ca.key").exists());
    let ca = |dir: &Path| fs::read_to_string(dir.join("server/certs/ca.crt")).unwrap();
    assert_eq!(ca(&first), ca(&second));
}

#[test]
fn kubelets_get_a_certificate_of_their_own_authority_one_for_each_node() {
    let place = tempfile::tempdir().unwrap();
    let (cert, key) = (place.path().join("k.crt"), place.path().join("k.key"));
    let kubelets = CertificateAuthority::new("kubernetes", DAY).unwrap();
    fs::write(&cert, kubelets.cert()).unwrap();
    fs::write(&key, kubelets.key()).unwrap();
    let [cert, key] = [cert, key].map(|file| file.display().to_string());
    let dir = place.path().join("files");
    run(&asked(&dir, &["--kubelet-ca-cert", &cert, "--kubelet-ca-key", &key])).unwrap();
    let read = |path: &str| fs::read_to_string(dir.join(path)).unwrap();
    let certificate = read("edge-node1/certs/apiserver-kubelet-client.crt");
    let der = rustls_pemfile::certs(&mut certificate.as_bytes()).next().unwrap().unwrap();
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
    let said = (certificate.subject().to_string(), certificate.issuer().to_string());
    assert_eq!(said, ("CN=tunnel:node1".to_owned(), "CN=kubernetes".to_owned()));
    assert!(read("edge-node1/edge.toml").contains("[edge.target_tls]"));
}

#[test]
fn printed_commands_are_quoted_for_a_shell() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("it's a folder");
    let told = run(&asked(&dir, &["--install-dir", "/etc/a b"])).unwrap();
    for command in [
        &format!("cp -rpT '{}/it'\\''s a folder/server' '/etc/a b'\n", place.path().display()),
        "tunnel server -c '/etc/a b/server.toml'\n",
        "tunnel edge -c '/etc/a b/edge.toml'\n",
    ] {
        assert!(told.contains(command), "{command}: {told}");
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
        let told = Args::read(args.split(' ').map(Into::into)).unwrap_err().to_string();
        let (flag, name) = line.rsplit_once(' ').unwrap();
        let flag = flag.rsplit(' ').next().unwrap();
        assert!(told.contains(&format!("invalid value '{name}' for '{flag} <")), "{line}: {told}");
        assert!(told.contains("expected a DNS name, or an IP address"), "{line}: {told}");
    }
}

#[test]
fn an_error_of_a_file_that_is_not_written_names_no_line_of_it() {
    let read = ServerConfig::read("[server.links]\nlisten = \"nowhere\"\n", &Environment::default());
    let told = checked("server.toml", read, Server::validate).unwrap_err();
    assert!(
        told.code == 78 && told.text.starts_with("cannot make server.toml of these arguments: server."),
        "{told}"
    );
}

#[test]
fn what_cannot_be_made_is_told_and_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("files");
    fs::write(place.path().join("junk"), "junk").unwrap();
    let junk = place.path().join("junk").display().to_string();
    for (more, says) in [
        (["--install-dir", "etc"], "expected an absolute path"),
        (["--egress-client", "a*"], "--egress-client \"a*\": expected"),
        (["--egress-client", "Tunnel:node1"], "names that begin with tunnel: are reserved"),
        (["--node", "Node1"], "--node Node1 is given twice"),
    ] {
        let told = run(&asked(&dir, &more)).unwrap_err();
        assert!(told.code == 64 && told.text.contains(says), "{told}");
    }
    let told = run(&asked(&dir, &["--ca-cert", &junk, "--ca-key", &junk])).unwrap_err();
    assert!(told.code == 78 && told.text.contains("junk holds no certificate"), "{told}");
    let twice = run(&asked(&dir, &["--egress-client", "a:b", "--egress-client", "a-b"])).unwrap_err();
    assert!(twice.text.contains("another client has the same folder client-a-b"), "{twice}");
    assert!(!dir.exists());
}

#[test]
fn servers_that_are_reached_by_address_alone_know_each_other() {
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
