mod addresses;
mod csr;
mod intercept;
mod modules;
mod nodes;
mod registry;
mod superedge;

use crate::config::listen::AuthConfig;
use std::fmt::Write;

use proptest::prelude::*;

use crate::config::edge::{EdgeConfig, Token};
use crate::config::server::{ServerConfig, TlsVersion};
use tunnel_base::policy::targets::Targets;

use super::*;

const CLOUD: &str = include_str!("../../conf/cloud.toml");
const EDGE: &str = include_str!("../../conf/edge.toml");

/// The minimal config of an edge.
const LEAST: &str = "[mode.edge.stream.client]\ntoken = \"t0ken\"\nserver_name = \"cloud:9000\"\n";

fn cloud(text: &str) -> (ServerConfig, Vec<Warning>) {
    ServerConfig::read(text, &Environment::default()).unwrap_or_else(|errors| panic!("{errors}"))
}

fn edge(text: &str) -> (EdgeConfig, Vec<Warning>) {
    EdgeConfig::read(text, &node1()).unwrap_or_else(|errors| panic!("{errors}"))
}

fn cloud_faults(text: &str) -> ConfigErrors {
    ServerConfig::read(text, &Environment::default()).unwrap_err()
}

fn edge_faults(text: &str) -> ConfigErrors {
    EdgeConfig::read(text, &node1()).unwrap_err()
}

fn node1() -> Environment {
    Environment { node_name: Some("node1".to_owned()), ..Environment::default() }
}

/// Returns the sorted keys of all warnings of one kind.
fn warned(warnings: &[Warning], kind: WarningKind) -> Vec<&str> {
    let mut keys: Vec<_> = warnings.iter().filter(|w| w.kind == kind).map(|w| w.key.as_str()).collect();
    keys.sort_unstable();
    keys
}

fn ssh(lines: &str) -> String {
    format!("[mode.cloud.ssh]\n{lines}")
}

#[test]
fn an_empty_file_is_a_server_as_superedge_would_have_it() {
    let (cloud, warnings) = cloud("");
    assert_eq!(
        cloud.server.listen,
        ListenConfig { at: "0.0.0.0:9000".parse().unwrap(), implicit: true, key: "listen" }
    );
    assert_eq!(
        cloud.server.log_listen,
        ListenConfig { at: "127.0.0.1:51010".parse().unwrap(), implicit: true, key: "log_listen" }
    );
    assert_eq!(cloud.server.metrics_listen, None);
    assert_eq!(cloud.server.tokenfile.to_str(), Some("/etc/tunnel/token/token"));
    assert_eq!(
        cloud.ssh.listen,
        ListenConfig { at: "0.0.0.0:22".parse().unwrap(), implicit: true, key: "listen" }
    );
    assert_eq!(cloud.session.grace, Duration::from_secs(60));
    assert_eq!(cloud.session.open_timeout, Duration::from_secs(12));
    assert_eq!((cloud.session.max, cloud.session.memory), (100_000, None));
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["mode.cloud.ssh.auth"]);
    assert_eq!(warnings.len(), 1);
}

#[test]
fn the_documented_server_is_closed_and_says_the_defaults() {
    let (documented, warnings) = cloud(CLOUD);
    assert_eq!(warnings, []);
    assert!(documented.ssh.listen.is_local() && documented.server.log_listen.is_local());
    let (absent, _) = cloud("");
    assert_eq!(documented.session, absent.session);
    assert_eq!(documented.tls, absent.tls);
    let same = |a: ListenConfig, b: ListenConfig| assert_eq!(a.at, b.at);
    same(documented.server.listen, absent.server.listen);
    same(documented.server.log_listen, absent.server.log_listen);
    assert_eq!(documented.server.key, absent.server.key);
    assert_eq!(documented.server.cert, absent.server.cert);
    assert_eq!(documented.server.tokenfile, absent.server.tokenfile);
    assert_eq!(documented.server.ca, absent.server.ca);
    assert_eq!(documented.ssh.access, absent.ssh.access);
}

#[test]
fn the_documented_edge_is_closed_and_says_the_defaults() {
    let (documented, warnings) = edge(EDGE);
    assert_eq!(warnings, []);
    let (least, warnings) = edge(LEAST);
    assert_eq!(warnings, []);
    assert_eq!(documented.session, least.session);
    assert_eq!(documented.targets, least.targets);
    assert_eq!(documented.targets, Targets::default());
    assert_eq!(documented.client.ca, least.client.ca);
    assert_eq!(documented.client.log_listen.at, least.client.log_listen.at);
    assert_eq!(documented.client.servers[0].dns.to_string(), "tunnel.example.org");
}

/// Returns the full keys in a documented config, commented out or not.
fn documented(text: &str) -> Vec<String> {
    let mut table = String::new();
    let mut keys = Vec::new();
    for line in text.lines() {
        let line = line.trim_start_matches('#').trim();
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            table = name.to_owned();
        } else if let Some((key, _)) = line.split_once(" = ")
            && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        {
            keys.push(format!("{table}.{key}"));
        }
        if let Some((shared, _)) = line.split_once(": as in [mode.cloud.ssh]") {
            keys.extend(shared.split(", ").map(|key| format!("{table}.{key}")));
        }
        if line.starts_with("rules = ") {
            let parts = ["users", "from", "nodes", "ports"]
                .iter()
                .filter(|part| line.contains(&format!("{part} = [")));
            keys.extend(parts.map(|part| format!("{table}.rules[0].{part}")));
        }
    }
    keys
}

/// Returns the known keys of our mode, without tables.
fn known(report: Diagnostics, ours: &str) -> Vec<String> {
    // A name chosen by the user is in quotes, and may contain dots.
    let table = |key: &String| match key.strip_suffix('"') {
        Some(named) => Some(named.rsplit_once(".\"")?.0.to_owned()),
        None => Some(key.rsplit_once('.')?.0.to_owned()),
    };
    let tables: Vec<String> = report.known.iter().filter_map(table).collect();
    let leaf =
        |key: &String| key.starts_with(ours) && !tables.contains(key) && *key != ours.trim_end_matches('.');
    let mut keys: Vec<String> = report.known.into_iter().filter(leaf).collect();
    keys.retain(|key| !key.ends_with(".rules"));
    keys
}

#[test]
fn every_known_key_is_documented_and_every_documented_key_is_known() {
    let mut report = Diagnostics::default();
    let named = "rules = [{}]\n[mode.cloud.tcp.\"0.0.0.0:6443\"]\n";
    ServerConfig::gather(&ssh(named), &Environment::default(), &mut report);
    let mut keys = (known(report, "mode.cloud."), documented(CLOUD));
    keys.1.retain(|key| !key.ends_with(".rules"));
    keys.0.sort();
    keys.1.sort();
    assert_eq!(keys.0, keys.1);

    let mut report = Diagnostics::default();
    let ruled = "[mode.edge.http_proxy]\nrules = [{}]\n";
    EdgeConfig::gather(ruled, &Environment::default(), &mut report);
    let mut keys = (known(report, "mode.edge."), documented(EDGE));
    keys.1.retain(|key| !key.ends_with(".rules"));
    keys.0.sort();
    keys.1.sort();
    assert_eq!(keys.0, keys.1);
}

#[test]
fn a_ports_owner_may_write_it_as_a_number_a_text_or_an_address() {
    for (line, at) in [
        ("grpc_port = 9001", "0.0.0.0:9001"),
        ("grpcport = \"9001\"", "0.0.0.0:9001"),
        ("GrpcPort = 0x2329", "0.0.0.0:9001"),
        ("listen = \"[::]:9001\"", "[::]:9001"),
    ] {
        let (cloud, _) = cloud(&format!("[mode.cloud.stream.server]\n{line}"));
        let ListenConfig { at: found, implicit, key } = cloud.server.listen;
        assert_eq!((found, implicit), (at.parse().unwrap(), false), "{line}");
        let written = line.split(' ').next().unwrap().replace('_', "").to_lowercase();
        assert_eq!(key.replace('_', ""), written);
    }
}

#[test]
fn a_random_port_is_named_in_a_warning() {
    let (cloud, warnings) =
        cloud("[mode.cloud.stream.server]\nmetrics_port = 0\n[mode.cloud.ssh]\nlisten = \"[::1]:0\"");
    assert_eq!(cloud.server.metrics_listen.map(|l| l.at), Some("0.0.0.0:0".parse().unwrap()));
    assert_eq!(warned(&warnings, WarningKind::Unexpected), ["mode.cloud.stream.server.metrics_port"]);
}

#[test]
fn an_open_door_is_named_and_a_closed_one_is_not() {
    for closed in [
        "listen = \"127.0.0.1:22\"",
        "port = 22\nallow_from = [\"10.0.0.0/8\"]",
        "port = 22\nauth = \"basic\"\nusers = \"users\"",
    ] {
        assert_eq!(warned(&cloud(&ssh(closed)).1, WarningKind::Insecure), [""; 0], "{closed}");
    }
    for open in [
        "",
        "port = 22",
        "listen = \"[::]:22\"",
        "port = 22\nauth = \"none\"",
        "allow_from = [\"0.0.0.0/0\"]",
    ] {
        assert_eq!(warned(&cloud(&ssh(open)).1, WarningKind::Insecure), ["mode.cloud.ssh.auth"], "{open}");
    }
    let (_, warnings) = edge(&format!("{LEAST}log_port = 51010"));
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["mode.edge.stream.client.log_port"]);
}

#[test]
fn who_lets_edges_in_is_told_that_superedges_list_of_exceptions_is_not_read() {
    let env = Environment { edge_no_proxy: Some("*.secret".into()), ..Environment::default() };
    let warned = |text: &str| {
        let (_, warnings) = ServerConfig::read(text, &env).unwrap();
        warnings.iter().any(|w| w.key == "EDGE_NO_PROXY" && w.kind == WarningKind::Insecure)
    };
    assert!(!warned("[mode.cloud.allow]\ntargets = []\nnodes = []"), "nothing is allowed");
    assert!(warned("[mode.cloud.allow]\ntargets = [\"10.0.0.0/8:*\"]"));
    assert!(warned("[mode.cloud.allow]\nnodes = [\"*\"]"));
}

#[test]
fn our_own_keys_become_what_they_mean() {
    let (cloud, _) = cloud(
        r#"
        [mode.cloud.ssh]
        listen = "0.0.0.0:2222"
        auth = "basic"
        users = "/etc/users"
        allow_from = ["10.0.0.0/8"]
        proxy_protocol = ["10.0.0.5"]
        rules = [{ users = ["ops"], from = ["10.0.0.0/8"], nodes = ["edge-*"], ports = [22] }]
        [mode.cloud.session]
        grace = "2m"
        open_timeout = "500ms"
        max = 7
        drain = "0s"
        memory = "64MiB"
        [mode.cloud.tls]
        tls_min_version = "VersionTLS13"
        tls_cipher_suites = "A,B, C"
        "#,
    );
    let key = "mode.cloud.ssh.users".to_owned();
    assert_eq!(cloud.ssh.access.auth, AuthConfig::Basic { users: "/etc/users".into(), key });
    let ask = |user, from: &str, node: &str, port| {
        cloud.ssh.access.rules.allows(user, from.parse().unwrap(), &node.parse().unwrap(), port)
    };
    assert!(ask(Some("ops"), "10.1.1.1", "edge-1", 22));
    assert!(!ask(None, "10.1.1.1", "edge-1", 22));
    assert!(cloud.ssh.access.allow_from.unwrap().contains("::ffff:10.0.0.1".parse().unwrap()));
    assert_eq!(cloud.session.grace, Duration::from_secs(120));
    assert_eq!(cloud.session.open_timeout, Duration::from_millis(500));
    assert_eq!((cloud.session.max, cloud.session.drain), (7, Duration::ZERO));
    assert_eq!(cloud.session.max_for_client, 2, "a quarter, rounded up");
    assert!(cloud.ssh.access.proxy_protocol.contains("10.0.0.5".parse().unwrap()));
    assert!(cloud.server.proxy_protocol.is_empty());
    assert_eq!(cloud.session.memory, Some(64 << 20));
    assert_eq!(cloud.tls.min_version, TlsVersion::V13);
    assert_eq!(cloud.tls.cipher_suites, ["A", "B", "C"]);
}

#[test]
fn whose_word_is_believed_is_named_narrowly() {
    let (settings, warnings) = cloud("[mode.cloud.stream.server]\nproxy_protocol = [\"0.0.0.0/0\"]");
    assert!(settings.server.proxy_protocol.holds_everyone());
    let key = "mode.cloud.stream.server.proxy_protocol";
    assert!(warned(&warnings, WarningKind::Insecure).contains(&key), "{warnings:?}");
    let errors = cloud_faults("[mode.cloud.ssh]\nproxy_protocol = [\"balancer\"]").to_string();
    assert!(errors.contains("mode.cloud.ssh.proxy_protocol[0]"), "{errors}");
}

#[test]
fn an_edge_knows_its_name_from_the_file_or_else_from_the_environment() {
    assert_eq!(edge(LEAST).0.client.node.as_str(), "node1");
    assert_eq!(edge(&format!("{LEAST}node = \"node2\"")).0.client.node.as_str(), "node2");
    let nobody = EdgeConfig::read(LEAST, &Environment::default()).unwrap_err().to_string();
    assert_eq!(
        nobody,
        "line 1: mode.edge.stream.client.node: missing: set this node's name here or in the environment variable NODE_NAME"
    );
    let env =
        Environment { node_name: Some("a b".to_owned()), pod_ip: Some("nowhere".to_owned()), ..node1() };
    let errors = EdgeConfig::read(LEAST, &env).unwrap_err();
    assert_eq!(errors.iter().map(|f| f.key.as_str()).collect::<Vec<_>>(), ["NODE_NAME", "POD_IP"]);
}

#[test]
fn an_edge_takes_its_addresses_and_proxy_from_the_environment() {
    let env = Environment {
        node_ip: Some("192.0.2.1".to_owned()),
        pod_ip: Some("fd00::1".to_owned()),
        https_proxy: Some(Secret::new("http://user:word@proxy:3128")),
        no_proxy: Some(String::new()),
        ..node1()
    };
    let (edge, _) = EdgeConfig::read(LEAST, &env).unwrap();
    assert_eq!(edge.own, ["192.0.2.1".parse::<IpAddr>().unwrap(), "fd00::1".parse().unwrap()]);
    assert!(edge.client.https_proxy.is_some() && edge.client.no_proxy.is_none());
}

#[test]
fn every_fault_is_told_at_once_in_the_order_of_the_file() {
    let errors = cloud_faults(
        "[mode.cloud.stream.server]\ngrpc_port = 70000\nlog_listen = \"localhost:1\"\ntokenfile = 5\n\
         [mode.cloud.ssh]\nprot = 22\nauth = \"basik\"\nallow_from = [\"10.0.0.1/8\", \"x\"]\n\
         rules = [{ nodes = [], port = [22] }, 5]\n[mode.cloud.session]\ngrace = 60\nmemory = \"1KiB\"\n\
         [mode.cloud.shh]\n[mode.clout]\n",
    );
    let expected = [
        "line 2: mode.cloud.stream.server.grpc_port: 70000: expected a port: a number from 0 to 65535",
        "line 3: mode.cloud.stream.server.log_listen: \"localhost:1\": expected ip:port, for example 127.0.0.1:9000, 0.0.0.0:9000 or [::]:9000",
        "line 4: mode.cloud.stream.server.tokenfile: 5: expected a text in quotes",
        "line 6: mode.cloud.ssh.prot: unknown key: did you mean port?",
        "line 7: mode.cloud.ssh.auth: \"basik\": expected \"none\" or \"basic\"",
        "line 8: mode.cloud.ssh.allow_from[0]: \"10.0.0.1/8\": address has bits set after the prefix; for the whole network write 10.0.0.0/8, for one address remove the '/' and the length",
        "line 8: mode.cloud.ssh.allow_from[1]: \"x\": not a network; expected an address or a network, for example 10.0.0.0/8, 10.1.2.3 or fd00::/8",
        "line 9: mode.cloud.ssh.rules[0].nodes: an empty list: it matches nothing; leave the key out to match everything, or fill the list",
        "line 9: mode.cloud.ssh.rules[0].port: unknown key: did you mean ports?",
        "line 9: mode.cloud.ssh.rules[1]: 5: expected table: { … }",
        "line 11: mode.cloud.session.grace: 60: expected a whole number with its unit (ms, s, m or h) in quotes, for example \"5s\" or \"500ms\"",
        "line 12: mode.cloud.session.memory: \"1KiB\": expected at least 1024 KiB",
        "line 13: mode.cloud.shh: unknown key: did you mean ssh?",
        "line 14: mode.clout: unknown key: did you mean cloud?",
    ];
    assert_eq!(errors.to_string().lines().collect::<Vec<_>>(), expected);
}

#[test]
fn keys_that_contradict_each_other_are_faults() {
    for (lines, key) in [
        ("listen = \"127.0.0.1:1\"\nport = 1", "listen"),
        ("auth = \"basic\"", "users"),
        ("users = \"f\"", "users"),
        ("auth = \"none\"\nusers = \"f\"", "users"),
        ("rules = [{ users = [\"ops\"] }]", "rules"),
        ("auth = \"none\"\nrules = [{ users = [\"ops\"] }]", "rules"),
        ("allow_from = []", "allow_from"),
        ("auth = \"basic\"\nusers = \"f\"\nrules = [{ users = [\"*\"] }]", "rules[0].users[0]"),
    ] {
        let errors = cloud_faults(&ssh(lines));
        assert_eq!(
            errors.iter().map(|f| f.key.as_str()).collect::<Vec<_>>(),
            [format!("mode.cloud.ssh.{key}")],
            "{lines}"
        );
    }
    let both = edge_faults(&format!("{LEAST}token_file = \"f\""));
    assert_eq!(both.iter().count(), 1);
}

#[test]
fn a_cloud_at_several_places_has_the_name_of_each_unless_one_is_given() {
    let list = LEAST.replace("\"cloud:9000\"", "[\"one:9000\", \"10.0.0.7:443\"]");
    let places = |text: &str| -> Vec<_> {
        edge(text).0.client.servers.iter().map(|server| format!("{} {}", server.at, server.dns)).collect()
    };
    assert_eq!(places(LEAST), ["cloud:9000 cloud"]);
    assert_eq!(places(&list), ["one:9000 one", "10.0.0.7:443 10.0.0.7"]);
    assert_eq!(places(&format!("{list}dns = \"a.b\"")), ["one:9000 a.b", "10.0.0.7:443 a.b"]);
    for (wrong, key) in
        [("[\"one:9000\", \"two\"]", "server_name[1]"), ("[]", "server_name"), ("7", "server_name")]
    {
        let errors = edge_faults(&LEAST.replace("\"cloud:9000\"", wrong));
        let keys: Vec<_> = errors.iter().map(|f| f.key.clone()).collect();
        assert_eq!(keys, [format!("mode.edge.stream.client.{key}")], "{wrong}");
    }
}

#[test]
fn an_edge_without_a_cloud_or_a_token_is_told_both() {
    let errors = edge_faults("");
    let keys: Vec<_> = errors.iter().map(|f| f.key.as_str()).collect();
    assert_eq!(keys, ["mode.edge.stream.client.server_name", "mode.edge.stream.client.token"]);
}

#[test]
fn the_wrong_modes_file_is_told_as_such() {
    let errors = cloud_faults(LEAST);
    assert_eq!(
        errors.to_string(),
        "line 1: mode.edge: the only mode in this file: start with --m=edge, or use the other file"
    );
    let (_, warnings) = cloud(&format!("{LEAST}[mode.cloud.ssh]\nlisten = \"127.0.0.1:22\""));
    assert_eq!(warned(&warnings, WarningKind::Unexpected), ["mode.edge"]);
}

#[test]
fn a_secret_is_in_no_message() {
    let (edge, warnings) = edge(&LEAST.replace("t0ken", "sw0rd fish"));
    assert_eq!(edge.client.token, Some(Token::Text(Secret::new("sw0rd fish"))));
    let mut reported = format!("{edge:?} {warnings:?}");
    for broken in [
        "token = [\"sw0rdfish\"]",
        "token = sw0rdfish",
        "token = \"sw0rdfish",
        "token = 'sw0rdfish' x",
        "tokn = \"sw0rdfish\"",
        "token = \"a\"\ntoken = \"sw0rdfish\"",
        "token = \"sw0rdfish\"\nTOKEN = \"a\"",
        "token = \"sw0rdfish\"\ntoken_file = \"a\"",
    ] {
        let errors = edge_faults(&format!("[mode.edge.stream.client]\n{broken}\n"));
        write!(reported, "{errors} {errors:?}").unwrap();
    }
    assert!(!reported.contains("sw0rd"), "{reported}");
}

#[test]
fn a_text_that_is_not_toml_is_told_with_its_line_beside_the_other_faults() {
    let errors = cloud_faults("[mode.cloud.ssh]\nport = 99999\nauth = = 1\n");
    let lines: Vec<_> = errors.iter().map(|f| (f.line, f.key.as_str())).collect();
    assert_eq!(lines, [(Some(2), "mode.cloud.ssh.port"), (Some(3), "")], "{errors}");
}

#[test]
fn what_only_follows_from_a_line_that_is_not_toml_is_not_told() {
    for (text, line) in [
        ("[mode.cloud.ssh\nlisten = \"127.0.0.1:2222\"\n", 1),
        ("[mode.cloud.ssh]\nlisten = \"127.0.0.1:2222\nauth = \"none\"\n", 2),
        ("[mode.cloud.ssh]\nrules = [{ ports = [22] ]\nauth = 'none'\n[mode.cloud.session]\nmax = 7\n", 2),
    ] {
        let errors = cloud_faults(text);
        let told: Vec<_> = errors.iter().map(|f| (f.line, f.key.as_str())).collect();
        assert_eq!(told, [(Some(line), "")], "{text}: {errors}");
    }
}

#[test]
fn an_empty_token_loads_loudly() {
    let (_, warnings) = edge(&LEAST.replace("t0ken", ""));
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["mode.edge.stream.client.token"]);
}

#[test]
fn what_nests_deeply_is_a_fault_and_no_crash() {
    for text in
        ["[".repeat(20_000), "a.".repeat(20_000) + "a = 1", format!("mode = {}", "{a=".repeat(20_000))]
    {
        cloud_faults(&text);
        edge_faults(&text);
    }
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "(?s).{0,200}") {
        let _ = (ServerConfig::read(&text, &node1()), EdgeConfig::read(&text, &node1()));
    }

    #[test]
    fn no_text_that_looks_like_a_file_makes_the_reader_panic(
        lines in prop::collection::vec((any::<prop::sample::Index>(), "[a-z_]{0,9}|[0-9\"'\\[\\]{}=.,#x-]{0,12}", any::<bool>()), 0..12)
    ) {
        for whole in [CLOUD, EDGE] {
            let known: Vec<&str> = whole.lines().collect();
            let mut text = String::new();
            for (index, noise, before) in &lines {
                let line = index.get(&known).trim_start_matches("# ");
                let at = if *before { 0 } else { line.len() / 2 };
                let (head, tail) = line.split_at(at);
                writeln!(text, "{head}{noise}{tail}").unwrap();
            }
            let read = ServerConfig::read(&text, &node1());
            if let Err(errors) = read {
                prop_assert!(!errors.to_string().is_empty());
            }
            if let Err(errors) = EdgeConfig::read(&text, &node1()) {
                prop_assert!(!errors.to_string().is_empty());
            }
        }
    }

    #[test]
    fn each_misspelt_key_is_told_with_the_one_that_was_meant(
        chosen in prop::sample::subsequence(
            vec!["grpc_port", "log_listen", "metrics_port", "key", "cert", "tokenfile", "ca", "channelz_addr"], 1..=8),
        slip in "[qxz]",
    ) {
        let mut text = "[mode.cloud.stream.server]\n".to_owned();
        for key in &chosen {
            writeln!(text, "{key}{slip} = 1").unwrap();
        }
        let errors = cloud_faults(&text);
        let reported: Vec<_> = errors.iter().map(|f| (f.key.clone(), f.text.clone())).collect();
        let expected: Vec<_> = chosen
            .iter()
            .map(|key| (format!("mode.cloud.stream.server.{key}{slip}"), format!("unknown key: did you mean {key}?")))
            .collect();
        prop_assert_eq!(reported, expected);
    }

    #[test]
    fn case_and_underscores_do_not_count(upper in prop::collection::vec(any::<bool>(), 40)) {
        let odd = |key: &str| -> String {
            key.chars().zip(&upper).map(|(c, up)| if *up { c.to_ascii_uppercase() } else { c }).collect()
        };
        let text = format!("[{}.{}.{}.{}]\n{} = 7\n{} = 8",
            odd("mode"), odd("cloud"), odd("stream"), odd("server"), odd("grpcport"), odd("metrics_port"));
        let (cloud, _) = cloud(&text);
        prop_assert_eq!(cloud.server.listen.at.port(), 7);
        prop_assert_eq!(cloud.server.metrics_listen.map(|l| l.at.port()), Some(8));
    }
}

#[test]
fn a_file_with_faults_tells_which_keys_were_understood_so_that_only_those_are_looked_into() {
    let text = "[mode.cloud.stream.server]\ncert = \"/c\"\nkey = 7\n[mode.cloud.ssh]\nprot = 22\n\
                [mode.cloud.registry]\nsiblings = [\"10.0.0.7:9000\"]\ndns = [\"10.0.0.7:53\", \"x\"]\n";
    let read = ServerConfig::examine(text, &Environment::default());
    assert_eq!(read.errors.len(), 3, "{:?}", read.errors);
    let given: Vec<_> = read.given.iter().collect();
    assert_eq!(given, ["mode.cloud.registry.siblings", "mode.cloud.stream.server.cert"]);
    assert_eq!(read.settings.server.cert.to_str(), Some("/c"));
    let read = EdgeConfig::examine("[mode.edge.stream.client]\ncert = \"/c\"\n", &Environment::default());
    assert_eq!((read.settings.client.ca.to_str(), read.errors.len()), (Some("/c"), 3));
    let broken = ServerConfig::examine(&format!("{text}= ="), &Environment::default());
    assert_eq!(broken.given.len(), 0, "a broken file has no reliable keys");
}
