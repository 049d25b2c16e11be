//! `tunnel doctor`: each error that is made on purpose is reported by the right check.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, date_time_ymd,
};
use tunnel::command::Format;
use tunnel::command::doctor::{self, DoctorArgs, DoctorFindings, DoctorRole};
use tunnel::config::Environment;

use crate::certificates::Authority;
use crate::enrol::join_at;
use crate::support::clients::get;
use crate::support::programs::{NAME, TOKEN, TestDir, TestServer, at, edge, start_edge};
use crate::support::remote::ScriptedServer;
use crate::support::servers;
use crate::support::users::{self, USER_TOKEN};
use crate::support::{assert_eventually, pause_time, targets};

/// Returns the doctor's findings for a config: name, state and text of each check.
pub(crate) async fn findings(
    place: &TestDir,
    role: DoctorRole,
    text: &str,
    more: impl FnOnce(&mut DoctorArgs),
) -> Vec<(String, String, String)> {
    found_in(place, role, text, |_| None, more).await
}

async fn found_in(
    place: &TestDir,
    role: DoctorRole,
    text: &str,
    variable: fn(&str) -> Option<String>,
    more: impl FnOnce(&mut DoctorArgs),
) -> Vec<(String, String, String)> {
    let config = place.file("doctor.toml", text);
    if role == DoctorRole::Client {
        std::fs::set_permissions(&config, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let config = Some(config);
    let mut doctor_args =
        DoctorArgs { role, config, target: Vec::new(), node: None, kubeconfig: None, output: Format::Json };
    more(&mut doctor_args);
    let found =
        assert_eventually("the doctor's findings", doctor::run(&doctor_args, Environment::read(variable)))
            .await;
    let json: Vec<serde_json::Value> = serde_json::from_str(&found.json()).unwrap();
    let text = |finding: &serde_json::Value, key: &str| finding[key].as_str().unwrap_or_default().to_owned();
    let all: Vec<_> =
        json.iter().map(|one| (text(one, "check"), text(one, "status"), text(one, "found"))).collect();
    assert_eq!(found.is_well(), all.iter().all(|(_, state, _)| state != "error"), "{all:?}");
    let mended = |one: &serde_json::Value| {
        one["status"] != "error" || one["check"] == "config" || !text(one, "hint").is_empty()
    };
    assert!(json.iter().all(mended), "each error has a hint: {json:#?}");
    assert!(remedies(&found) <= 1, "{}", found.text());
    all
}

/// Returns how often the remedy for a refused token is printed.
fn remedies(found: &DoctorFindings) -> usize {
    found.text().matches("compare token or token_file").count()
}

/// Checks that exactly this check fails.
async fn assert_only_check_fails(place: &TestDir, text: &str, check: &str, found_text: &str) {
    let all = findings(place, DoctorRole::Edge, text, |_| ()).await;
    let bad: Vec<_> = all.iter().filter(|(_, state, _)| state == "error").collect();
    assert!(
        matches!(bad.as_slice(), [(name, _, detail)] if name == check && detail.contains(found_text)),
        "{check}: {all:#?}"
    );
}

#[tokio::test]
async fn an_edge_without_errors_passes_all_checks() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    let text = place.edge("node1", server.server.bound.grpc, "");
    let all =
        findings(&place, DoctorRole::Edge, &text, |doctor_args| doctor_args.target = vec![echo.into()]).await;
    for check in ["config", "port", "tls", "token", "dialect", "target"] {
        assert!(all.iter().any(|(name, state, _)| name == check && state == "ok"), "{check}: {all:#?}");
    }
    assert!(all.iter().all(|(_, state, _)| state != "error"), "{all:#?}");
}

#[tokio::test]
async fn each_error_on_the_path_to_the_cloud_is_reported() {
    let place = TestDir::new();
    let other = tempfile::tempdir().unwrap();
    let server = TestServer::start(&place);
    let (text, nothing) = (place.edge("node1", server.server.bound.grpc, ""), targets::closed_port().await);
    assert_only_check_fails(&place, &place.edge("node1", nothing, ""), "port", "refused").await;
    assert_only_check_fails(&place, &place.edge("node1", server.connect, ""), "port", "does not speak TLS")
        .await;
    assert_only_check_fails(&place, &text.replace(TOKEN, "wrong"), "token", "invalid token").await;
    assert_only_check_fails(&place, &text.replace(NAME, "other.test"), "certificate name", NAME).await;
    let strange = Authority::new().write(other.path(), &[NAME]).ca;
    let strange = text.replace(place.files.ca.to_str().unwrap(), strange.to_str().unwrap());
    assert_only_check_fails(&place, &strange, "ca", "a CA that this end does not trust").await;
    assert_only_check_fails(
        &place,
        &place.edge("node1", "no-such-name.invalid:9000", ""),
        "dns",
        "no-such-name.invalid",
    )
    .await;
    let all = findings(&place, DoctorRole::Edge, &text.replace("token = ", "tokken = "), |_| ()).await;
    assert!(
        all.iter()
            .any(|(check, state, detail)| check == "config" && state == "error" && detail.contains("tokken"))
    );
    let proxied = |name: &str| (name == "HTTPS_PROXY").then(|| "http://127.0.0.1:1".to_owned());
    let away = place.edge("node1", "192.0.2.1:9000", "");
    let all = found_in(&place, DoctorRole::Edge, &away, proxied, |_| ()).await;
    assert!(all.iter().any(|(check, state, _)| check == "proxy" && state == "error"), "{all:#?}");
}

#[tokio::test]
async fn two_machines_with_one_name_and_an_older_dialect_are_reported() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let _edge = edge(&place, &server, "node1").await;
    assert_only_check_fails(&place, &place.edge("node1", server.server.bound.grpc, ""), "name", "node1")
        .await;

    let mut plain = ScriptedServer::start(&place).await;
    let text = place.edge("node1", plain.at, "");
    let answers = async {
        let mut call = plain.call().await;
        call.answer(None);
        call
    };
    let (all, _call) = tokio::join!(findings(&place, DoctorRole::Edge, &text, |_| ()), answers);
    let dialect = all.iter().find(|(check, ..)| check == "dialect").unwrap();
    assert_eq!(dialect.1, "warning", "{all:#?}");
}

#[tokio::test]
async fn a_forbidden_or_unreachable_target_is_reported() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let (text, nothing) = (place.edge("node1", server.server.bound.grpc, ""), targets::closed_port().await);
    let doctor_args = ["10.1.2.3:22".parse().unwrap(), nothing.into()];
    let all = findings(&place, DoctorRole::Edge, &text, |asking| asking.target = doctor_args.into()).await;
    let details: Vec<_> =
        all.iter().filter(|(check, ..)| check == "target").map(|(_, _, details)| details).collect();
    assert!(details[0].contains("may not dial 10.1.2.3:22") && details[1].contains("refused"), "{details:?}");
}

/// Replaces the server's certificate and CA file with those of a new CA. `change` modifies the certificate.
pub(crate) fn certify(place: &TestDir, change: impl FnOnce(&mut CertificateParams)) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    std::fs::write(&place.files.ca, params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, key);
    let (key, mut params) =
        (KeyPair::generate().unwrap(), CertificateParams::new([NAME.to_owned()]).unwrap());
    change(&mut params);
    std::fs::write(&place.files.cert, params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
    std::fs::write(&place.files.key, key.serialize_pem()).unwrap();
}

#[tokio::test]
async fn dates_clock_and_kind_of_a_certificate_are_checked() {
    let year = |params: &mut CertificateParams, from, to| {
        params.not_before = date_time_ymd(from, 1, 1);
        params.not_after = date_time_ymd(to, 1, 1);
    };
    type Change = Box<dyn FnOnce(&mut CertificateParams)>;
    let changes: [(&str, Change); 3] = [
        ("certificate dates", Box::new(move |params| year(params, 2000, 2001))),
        ("clock", Box::new(move |params| year(params, 2190, 2191))),
        (
            "certificate kind",
            Box::new(|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]),
        ),
    ];
    for (check, change) in changes {
        let place = TestDir::new();
        certify(&place, change);
        let server = TestServer::start(&place);
        assert_only_check_fails(
            &place,
            &place.edge("node1", server.server.bound.grpc, ""),
            check,
            "its certificate",
        )
        .await;
        let all = findings(&place, DoctorRole::Server, &place.cloud(""), |_| ()).await;
        let detail = |(name, state, detail): &(String, String, String)| {
            name == check && state == "error" && detail.contains("cloud.crt")
        };
        assert!(all.iter().any(detail), "the server's doctor reports it as well: {check}: {all:#?}");
    }
}

#[tokio::test]
async fn a_certificate_for_targets_needs_no_server_key_usage() {
    let (place, key) = (TestDir::new(), KeyPair::generate().unwrap());
    let mut params = CertificateParams::default();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let client = place.file("client.pem", &(params.self_signed(&key).unwrap().pem() + &key.serialize_pem()));
    let (files, client) = (&place.files, client.display());
    let https = format!(
        "[server.https]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"0\" = \"127.0.0.1:10250\" }}\ncert = {:?}\n\
         key = {:?}\nclient_ca = {ca:?}\nnames = [\"a\"]\ntarget_cert = \"{client}\"\ntarget_ca = {ca:?}\n",
        files.cert,
        files.key,
        ca = files.ca
    );
    let all = findings(&place, DoctorRole::Server, &place.cloud(&https), |_| ()).await;
    assert!(all.iter().all(|(_, state, _)| state != "error"), "{all:#?}");
    let checked = |(check, _, detail): &&(String, String, String)| {
        check == "certificate" && detail.starts_with("server.https.cert: ")
    };
    assert_eq!(all.iter().filter(checked).count(), 1, "{all:#?}");
}

#[tokio::test]
async fn a_servers_peers_and_its_publishing_are_checked() {
    let (place, other) = (TestDir::new(), TestDir::new());
    let (peer, stranger) = (TestServer::start(&place), TestServer::start(&other));
    let nothing = targets::closed_port().await;
    let list = [peer.server.bound.grpc, stranger.server.bound.grpc, nothing]
        .map(|at| format!("\"{at}\""))
        .join(", ");
    let dns = servers::Dns::start(servers::DnsScript::NoSuchName).await;
    let registry = format!(
        "[server.peers]\naddresses = [{list}]\n[server.dns]\npublish = \"hosts\"\nhosts_file = \"{}/none/hosts\"\nresolvers = [\"{}\"]\n",
        place.path().display(),
        dns.at
    );
    let pod_ip = |name: &str| (name == "POD_IP").then(|| "127.0.0.9".to_owned());
    let set_node = |doctor_args: &mut DoctorArgs| doctor_args.node = Some("node1".parse().unwrap());
    let all = found_in(&place, DoctorRole::Server, &place.cloud(&registry), pod_ip, set_node).await;
    let states = |check: &str| {
        all.iter().filter(|(name, ..)| name == check).map(|(_, state, _)| state.as_str()).collect::<Vec<_>>()
    };
    assert_eq!((states("peers"), states("ca")), (vec!["ok", "error"], vec!["error"]), "{all:#?}");
    assert_eq!(states("registry"), ["error", "error"], "{all:#?}");
    assert_eq!(states("token"), ["warning"], "all nodes share the test's token: {all:#?}");
    assert!(Path::new(&place.files.cert).exists());
}

/// Returns true if a check has that state, and a text that contains this.
fn has(all: &[(String, String, String)], check: &str, state: &str, text: &str) -> bool {
    all.iter().any(|(name, is, detail)| name == check && is == state && detail.contains(text))
}

#[tokio::test]
async fn doctor_without_a_running_program_fails_and_tries_its_ports() {
    let place = TestDir::new();
    let nothing = targets::closed_port().await;
    let admin = format!("admin_listen = \"{nothing}\"");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap();
    let text = place.cloud("").replacen("admin_listen = \"127.0.0.1:0\"", &admin, 1).replace(
        "[server.connect]\nlisten = \"127.0.0.1:0\"",
        &format!("[server.connect]\nlisten = \"{at}\""),
    );
    let all = findings(&place, DoctorRole::Server, &text, |_| ()).await;
    assert!(
        has(&all, "server", "error", &format!("no server on this machine responds: {nothing}")),
        "{all:#?}"
    );
    assert!(has(&all, "port", "error", &format!("server.connect.listen: cannot listen on {at}")), "{all:#?}");
    let text = place.edge("node1", at, "").replacen("admin_listen = \"127.0.0.1:0\"", &admin, 1);
    let all = findings(&place, DoctorRole::Edge, &text, |_| ()).await;
    assert!(has(&all, "edge", "error", "no edge on this machine responds"), "{all:#?}");
}

#[tokio::test]
async fn a_program_that_hangs_is_reported_instead_of_its_ports() {
    pause_time();
    let place = TestDir::new();
    let hung = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = hung.local_addr().unwrap();
    for (role, program, text) in [
        (DoctorRole::Server, "server", place.cloud("")),
        (DoctorRole::Edge, "edge", place.edge("node1", at, "")),
    ] {
        let text = text.replace("admin_listen = \"127.0.0.1:0\"", &format!("admin_listen = \"{at}\""));
        let all = findings(&place, role, &text, |_| ()).await;
        let expected = format!("the {program} on this machine runs, but did not respond within 5s");
        assert!(has(&all, program, "error", &expected), "{all:#?}");
        assert!(!has(&all, "port", "error", "cannot listen on"), "{all:#?}");
    }
}

#[tokio::test]
async fn world_readable_secrets_are_reported() {
    let place = TestDir::new();
    let mode = |mode| {
        let rights = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&place.files.key, rights).unwrap();
    };
    mode(0o600);
    let all = findings(&place, DoctorRole::Server, &place.cloud(""), |_| ()).await;
    assert!(!has(&all, "secrets", "warning", "server.links.key"), "{all:#?}");
    mode(0o644);
    let all = findings(&place, DoctorRole::Server, &place.cloud(""), |_| ()).await;
    assert!(has(&all, "secrets", "warning", "server.links.key"), "{all:#?}");
}

#[tokio::test]
async fn a_server_that_publishes_nothing_has_no_error_in_dns_and_invited_nodes_are_counted() {
    let place = TestDir::new();
    let joined = place.file("joined", r#"{"tokens":{"edge1":"a","edge2":"b","alice/laptop":"c"}}"#);
    let dns = servers::Dns::start(servers::DnsScript::NoSuchName).await;
    let tables = format!(
        "[server.dns]\npublish = \"none\"\nresolvers = [\"{}\"]\n[server.invitations]\nstore = \"file\"\nfile = \"{}\"\n",
        dns.at,
        joined.display()
    );
    let set_node = |doctor_args: &mut DoctorArgs| doctor_args.node = Some("node1".parse().unwrap());
    let all = findings(&place, DoctorRole::Server, &place.cloud(&tables), set_node).await;
    assert!(all.iter().all(|(_, state, _)| state != "error"), "{all:#?}");
    let own =
        "nodes with their own token: 0 in the token file, 2 joined by invitation; all others share one token";
    assert!(has(&all, "token", "warning", own), "{all:#?}");
}

#[tokio::test]
async fn a_token_file_without_a_valid_line_is_reported_with_its_faulty_lines() {
    let place = TestDir::new();
    place.file("token", "node1\n");
    let all = findings(&place, DoctorRole::Server, &place.cloud(""), |_| ()).await;
    assert!(has(&all, "token", "warning", "so every edge is refused"), "{all:#?}");
    assert!(has(&all, "token", "warning", "line 1: it has no ':'"), "{all:#?}");
    place.file("token", "node1:\n");
    let all = findings(&place, DoctorRole::Server, &place.cloud(""), |_| ()).await;
    assert!(has(&all, "token", "warning", "0 in the token file, so every edge is refused"), "{all:#?}");
    place.file("token", "node1:t\n");
    let all = findings(&place, DoctorRole::Server, &place.cloud(""), |_| ()).await;
    assert!(has(&all, "token", "ok", "1 in the token file"), "{all:#?}");
}

#[tokio::test]
async fn a_peer_with_an_expired_certificate_gets_the_hint_to_renew_it() {
    let place = TestDir::new();
    certify(&place, |params| {
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(2001, 1, 1);
    });
    let peer = TestServer::start(&place);
    let config = Some(place.file(
        "doctor.toml",
        &place.cloud(&format!("[server.peers]\naddresses = [\"{}\"]\n", peer.server.bound.grpc)),
    ));
    let doctor_args = DoctorArgs {
        role: DoctorRole::Server,
        config,
        target: Vec::new(),
        node: None,
        kubeconfig: None,
        output: Format::Json,
    };
    let findings = doctor::run(&doctor_args, Environment::default()).await.json();
    assert!(findings.contains("renew server.links.cert of that server"), "{findings}");
    assert!(!findings.contains("from one CA"), "{findings}");
}

#[tokio::test]
async fn a_check_of_the_config_fails_with_an_expired_certificate() {
    let place = TestDir::new();
    certify(&place, |params| {
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(2001, 1, 1);
    });
    let all = findings(&place, DoctorRole::Server, &place.cloud(""), |_| ()).await;
    assert!(has(&all, "config", "error", "server.links.cert"), "{all:#?}");
}

#[tokio::test]
async fn the_hint_for_a_refused_token_is_printed_once_even_if_the_edge_runs() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let text = place.edge("node1", server.server.bound.grpc, "").replace(TOKEN, "wrong");
    let edge = start_edge(&text);
    let admin = edge.bound.log.unwrap();
    assert_eventually("the edge is refused", async {
        while !get(admin, "/readyz").await.body.contains("invalid token") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let config = Some(place.file("doctor.toml", &text.replace("127.0.0.1:0", &admin.to_string())));
    let doctor_args = DoctorArgs {
        role: DoctorRole::Edge,
        config,
        target: Vec::new(),
        node: None,
        kubeconfig: None,
        output: Format::Text,
    };
    let found =
        assert_eventually("the doctor's findings", doctor::run(&doctor_args, Environment::default())).await;
    assert_eq!(remedies(&found), 1, "{}", found.text());
    assert!(found.text().contains("FAIL edge") && found.text().contains("FAIL token"), "{}", found.text());
}

#[tokio::test]
async fn a_wrong_token_in_the_changed_file_of_a_linked_edge_is_reported() {
    let place = TestDir::new();
    place.file("token", "node1:right\n");
    let mine = place.file("mine", "right\n");
    let server = TestServer::start(&place);
    let text = place.edge("node1", server.server.bound.grpc, "");
    let text = text.replace(&format!("token = \"{TOKEN}\""), &format!("token_file = {mine:?}"));
    let edge = start_edge(&text);
    server.wait_for_node("node1").await;
    let admin = edge.bound.log.unwrap().to_string();
    place.file("mine", "wrong\n");
    assert_only_check_fails(&place, &text.replace("127.0.0.1:0", &admin), "token", "invalid token").await;
    assert!(server.link("node1").is_some(), "the link with the earlier token stays");
}

#[tokio::test]
async fn a_key_of_another_certificate_fails_although_the_server_still_runs_with_the_old_pair() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let admin = format!("admin_listen = \"{}\"", server.server.bound.log);
    std::fs::write(&place.files.key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
    let text = place.cloud("").replacen("admin_listen = \"127.0.0.1:0\"", &admin, 1);
    let all = findings(&place, DoctorRole::Server, &text, |_| ()).await;
    assert!(has(&all, "config", "error", "does not belong to the certificate"), "{all:#?}");
}

#[tokio::test]
async fn a_node_at_a_peer_that_does_not_share_its_store_is_reported() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    place.file("token", "other:0123456789\n");
    let all = servers::addresses(2);
    let text = |number: usize| {
        let file = place.path().join(format!("enrolled{number}"));
        let store = format!("[server.invitations]\nstore = \"file\"\nfile = {file:?}");
        servers::config(&place, all[number], &format!("{}\n{store}", servers::peers(&all)))
    };
    let servers = [0, 1].map(|number| TestServer::from_text(&text(number)));
    let enrolment = servers[0].server.enrolment.get().unwrap();
    let node = "edge7".parse().unwrap();
    let invited = enrolment.invite(&node, None, Duration::from_secs(60), false, "test").await.unwrap();
    let token = "a".repeat(64);
    join_at(&servers[0], &invited.code.secret(), "edge7", &token).await.unwrap();
    let _edge = start_edge(&place.edge("edge7", all[0], "").replace(TOKEN, &token));
    servers[0].wait_for_node("edge7").await;
    // A session through the other server needs a link between the two.
    servers[1].open(&at("edge7", echo)).await;
    let found_at = async |number: usize| {
        let admin = format!("admin_listen = \"{}\"", servers[number].server.bound.log);
        let text = text(number).replacen("admin_listen = \"127.0.0.1:0\"", &admin, 1);
        findings(&place, DoctorRole::Server, &text, |_| ()).await
    };
    let expected = "this server would refuse node edge7 of peer";
    let all = found_at(1).await;
    assert!(has(&all, "token", "warning", expected), "{all:#?}");
    let all = found_at(0).await;
    assert!(!has(&all, "token", "warning", ""), "{all:#?}");
}

/// Returns a user's file with links to this server.
fn client_file(place: &TestDir, server: impl std::fmt::Display, user: &str, token: &str) -> String {
    format!(
        "servers = [\"{server}\"]\nuser = \"{user}\"\ndevice = \"laptop\"\ntoken = \"{token}\"\n\
         ca = {:?}\ntls_server_name = \"{NAME}\"\n",
        place.files.ca
    )
}

#[tokio::test]
async fn a_users_device_is_checked_from_its_file_to_the_targets_that_she_may_reach() {
    let place = TestDir::new();
    let echo = targets::echo().await;
    let server = users::server(&place, "").await;
    let _edge = edge(&place, &server, "node1").await;
    let grpc = server.server.bound.grpc;
    let text = client_file(&place, grpc, "alice", USER_TOKEN);
    let targets = [format!("node1:{}", echo.port()), "other1:22".to_owned()];
    let all = findings(&place, DoctorRole::Client, &text, |doctor_args| {
        doctor_args.target = targets.iter().map(|target| target.parse().unwrap()).collect();
    })
    .await;
    for check in ["config", "port", "tls", "token", "dialect", "packets"] {
        assert!(has(&all, check, "ok", ""), "{check}: {all:#?}");
    }
    assert!(has(&all, "target", "ok", &targets[0]), "{all:#?}");
    assert!(has(&all, "target", "error", "no rule lets alice reach port 22 of node other1"), "{all:#?}");
    assert_eq!(all.iter().filter(|(_, state, _)| state == "error").count(), 1, "{all:#?}");
}

#[tokio::test]
async fn each_error_between_a_users_device_and_a_server_is_reported() {
    let place = TestDir::new();
    let other = tempfile::tempdir().unwrap();
    let server = users::server(&place, "").await;
    let grpc = server.server.bound.grpc;
    let nothing = targets::closed_port().await;
    let text = client_file(&place, grpc, "alice", USER_TOKEN);
    let strange = Authority::new().write(other.path(), &[NAME]).ca;
    let no_ca = text.replace(place.files.ca.to_str().unwrap(), strange.to_str().unwrap());
    for (text, check, detail) in [
        (client_file(&place, nothing, "alice", USER_TOKEN), "port", "refused"),
        (client_file(&place, server.connect, "alice", USER_TOKEN), "port", "does not speak TLS"),
        (client_file(&place, "no-such-name.invalid:9000", "alice", USER_TOKEN), "dns", "no-such-name"),
        (client_file(&place, grpc, "alice", "another token of thirty-two chars"), "token", "token"),
        (text.replace(NAME, "other.test"), "certificate name", NAME),
        (no_ca, "ca", "a CA that this end does not trust"),
        (text.replace("user =", "usr ="), "config", "usr: unknown key"),
        ("server = \"a:1\"\n".to_owned(), "config", "names no servers"),
        (
            format!("{text}websocket_ca = {{ \"{grpc}\" = \"/missing.crt\" }}\n"),
            "config",
            "websocket_ca: cannot read /missing.crt",
        ),
    ] {
        let all = findings(&place, DoctorRole::Client, &text, |_| ()).await;
        let bad: Vec<_> = all.iter().filter(|(_, state, _)| state == "error").collect();
        let [(name, _, found)] = bad.as_slice() else { panic!("{check}: {all:#?}") };
        assert!(name == check && found.contains(detail), "{check}: {all:#?}");
        assert!(!format!("{all:?}").contains("thirty-two"), "{all:#?}");
    }
}
