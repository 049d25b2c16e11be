mod addresses;
mod csr;
mod intercept;
mod modules;
mod nodes;
mod parts;
mod reference;
mod registry;
mod schema;
#[cfg(feature = "superedge")]
mod superedge;

use std::cell::RefCell;
use std::fmt::Write;
use std::net::IpAddr;

use proptest::prelude::*;

use crate::config::access::{AccessConfig, PasswordFile};
use crate::config::admin_ports::AdminPorts;
use crate::config::listen_tls::TlsVersion;
use crate::config::server::LinkListenerConfig;
use crate::config::table::ConfigTableReader;
use crate::edge::config::EdgeConfig;
use crate::server::config::ServerConfig;
use tunnel_base::policy::targets::Targets;

use crate::config::{ConfigErrors, Environment, ProxyVariables, SecretString, Warning, WarningKind, removed};
use crate::listener::ListenerConfig;
use crate::listener::connect::ConnectConfig;
use crate::startup::StartupErrorCollector;
use std::time::Duration;

const CLOUD: &str = include_str!("../../../docs/reference/server.toml");
const EDGE: &str = include_str!("../../../docs/reference/edge.toml");

/// The files that people start from.
const FIRST_SERVER: &str = include_str!("../../../conf/server.toml");
const FIRST_EDGE: &str = include_str!("../../../conf/edge.toml");

/// The minimal config of an edge.
const LEAST: &str = "[edge.uplink]\ntoken = \"t0ken\"\nservers = [\"cloud:9000\"]\n";

impl ServerConfig {
    /// Returns the settings of the first listener with this type.
    pub(crate) fn listener<T: ListenerConfig>(&self) -> Option<&T> {
        self.listeners_of().into_iter().next()
    }

    /// Returns the settings of the listeners with this type.
    pub(crate) fn listeners_of<T: ListenerConfig>(&self) -> Vec<&T> {
        let listeners = self.listeners.iter().filter_map(|listener| {
            let listener: &dyn std::any::Any = listener.config.as_ref();
            listener.downcast_ref()
        });
        listeners.collect()
    }
}

fn connect(settings: &ServerConfig) -> &ConnectConfig {
    settings.listener().unwrap()
}

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
    format!("[server.connect]\n{lines}")
}

#[test]
fn an_empty_file_is_a_server_without_listeners() {
    let (cloud, warnings) = cloud("");
    assert_eq!(cloud.links, LinkListenerConfig::default());
    assert_eq!(cloud.links.listen, "[::]:9000".parse().unwrap());
    assert_eq!(cloud.links.ports.admin_listen, "127.0.0.1:9010".parse().unwrap());
    assert!(cloud.links.ports.is_default && !cloud.links.ports.sets_level);
    assert_eq!(cloud.links.token_file.to_str(), Some("/etc/tunnel/token/token"));
    assert!(cloud.listener::<ConnectConfig>().is_none());
    assert_eq!(cloud.session.resume_timeout, Duration::from_secs(60));
    assert_eq!(cloud.session.open_timeout, Duration::from_secs(12));
    assert_eq!(cloud.session.superedge_idle_timeout, Duration::from_secs(600));
    assert_eq!((cloud.session.max_sessions, cloud.session.buffer_memory), (100_000, None));
    assert_eq!(warnings, []);
}

#[test]
fn an_empty_superedge_table_has_superedges_defaults() {
    let (cloud, warnings) = cloud("[mode.cloud]\n");
    assert_eq!(connect(&cloud).listen, "0.0.0.0:22".parse().ok());
    assert!(connect(&cloud).is_default);
    assert_eq!(cloud.links.ports.admin_listen, "127.0.0.1:51010".parse().unwrap());
    assert!(cloud.links.ports.is_default && cloud.links.ports.sets_level);
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["mode.cloud.ssh.auth"]);
    assert_eq!(warnings.len(), 1);
}

#[test]
fn the_documented_server_config_is_secure_and_shows_the_defaults() {
    let (documented, warnings) = cloud(CLOUD);
    assert_eq!(warnings, []);
    assert!(connect(&documented).listen.unwrap().ip().is_loopback());
    let (absent, _) = cloud("");
    assert_eq!(documented.session, absent.session);
    assert_eq!(documented.tls, absent.tls);
    let ports = AdminPorts { is_default: false, ..AdminPorts::default() };
    assert_eq!(documented.links, LinkListenerConfig { ports, ..absent.links });
    assert_eq!(connect(&documented).access, AccessConfig::default());
}

#[test]
fn the_documented_edge_config_is_secure_and_shows_the_defaults() {
    let (documented, warnings) = edge(EDGE);
    assert_eq!(warnings, []);
    let (least, warnings) = edge(LEAST);
    assert_eq!(warnings, []);
    assert_eq!(documented.session, least.session);
    assert_eq!(documented.allow, least.allow);
    assert_eq!(documented.allow.targets, Targets::default());
    assert_eq!(documented.uplink.ca, least.uplink.ca);
    assert_eq!(documented.uplink.ports.admin_listen, least.uplink.ports.admin_listen);
    assert_eq!(documented.uplink.servers[0].at.host.to_string(), "tunnel.example.org");
}

#[test]
fn a_removed_key_is_ignored_with_a_warning_or_refused_and_names_what_to_use() {
    for (key, instead) in removed::IGNORED {
        let text = format!("{key} = 1\n");
        let warnings = match key.split_once('.') {
            Some(("edge", _)) => EdgeConfig::examine(&text, &node1()).warnings,
            _ => ServerConfig::examine(&text, &Environment::default()).warnings,
        };
        let expected = format!("{key}: removed and ignored; {instead}");
        assert_eq!(warnings.iter().map(ToString::to_string).collect::<Vec<_>>(), [expected], "{text}");
    }
    for (key, instead) in removed::REFUSED {
        let text = format!("{key} = 1\n");
        let errors = if key.starts_with("edge.") { edge_faults(&text) } else { cloud_faults(&text) };
        let expected = format!("line 1: {key}: removed key: {instead}");
        assert!(errors.iter().any(|error| error.to_string() == expected), "{errors}");
    }
}

#[test]
fn the_starter_configs_are_short_and_load_without_warnings() {
    assert_eq!(cloud(FIRST_SERVER).1, []);
    assert_eq!(edge(FIRST_EDGE).1, []);
    for first in [FIRST_SERVER, FIRST_EDGE] {
        assert!(first.lines().count() <= 25, "{first}");
    }
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
        if let Some((shared, _)) = line.split_once(": as in [server.connect]") {
            keys.extend(shared.split(", ").map(|key| format!("{table}.{key}")));
        }
    }
    keys
}

/// Returns the known keys of our mode, without tables.
fn known<T>(text: &str, gather: fn(&mut ConfigTableReader<'_>) -> T, ours: &str) -> Vec<String> {
    let report = RefCell::default();
    gather(&mut ConfigTableReader::parse(text, &Environment::default(), &report));
    let known = report.into_inner().known;
    // A name chosen by the user is in quotes, and may contain dots.
    let table = |key: &String| match key.strip_suffix('"') {
        Some(named) => Some(named.rsplit_once(".\"")?.0.to_owned()),
        None => Some(key.rsplit_once('.')?.0.to_owned()),
    };
    let tables: Vec<String> = known.iter().filter_map(table).collect();
    let leaf =
        |key: &String| key.starts_with(ours) && !tables.contains(key) && *key != ours.trim_end_matches('.');
    known.into_iter().filter(leaf).collect()
}

#[test]
fn every_known_key_is_documented_and_every_documented_key_is_known() {
    let named = "[server.tcp.\"[::]:6443\"]\n";
    let mut keys = (known(&ssh(named), ServerConfig::gather, "server."), documented(CLOUD));
    keys.0.sort();
    keys.1.sort();
    assert_eq!(keys.0, keys.1);

    let mut keys = (known("", EdgeConfig::gather, "edge."), documented(EDGE));
    keys.0.sort();
    keys.1.sort();
    assert_eq!(keys.0, keys.1);
}

#[test]
fn a_port_may_be_a_number_a_text_or_an_address() {
    for (text, at) in [
        ("[mode.cloud.stream.server]\ngrpc_port = 9001", "0.0.0.0:9001"),
        ("[mode.cloud.stream.server]\ngrpcport = \"9001\"", "0.0.0.0:9001"),
        ("[mode.cloud.stream.server]\nGrpcPort = 0x2329", "0.0.0.0:9001"),
        ("[server.links]\nlisten = \"[::]:9001\"", "[::]:9001"),
    ] {
        let (cloud, _) = cloud(text);
        assert_eq!(cloud.links.listen, at.parse().unwrap(), "{text}");
    }
}

#[test]
fn a_random_port_is_a_warning() {
    let (cloud, warnings) =
        cloud("[mode.cloud.stream.server]\nmetrics_port = 0\n[mode.cloud.ssh]\nport = 22");
    assert_eq!(cloud.links.ports.metrics_listen, Some("0.0.0.0:0".parse().unwrap()));
    assert_eq!(warned(&warnings, WarningKind::Unexpected), ["mode.cloud.stream.server.metrics_port"]);
}

#[test]
fn an_insecure_listener_is_a_warning_and_a_restricted_one_is_not() {
    for closed in [
        "listen = \"127.0.0.1:22\"",
        "listen = \"0.0.0.0:22\"\nallow_from = [\"10.0.0.0/8\"]",
        "listen = \"127.0.0.1:22\"\nauth = \"basic\"\nusers = \"users\"",
        "listen = \"0.0.0.0:22\"\nauth = \"basic\"\nusers = \"users\"\ncert = \"c\"\nkey = \"k\"",
        "listen = \"0.0.0.0:22\"\ncert = \"c\"\nkey = \"k\"\nclient_ca = \"ca\"\nnames = [\"a\"]",
    ] {
        assert_eq!(warned(&cloud(&ssh(closed)).1, WarningKind::Insecure), [""; 0], "{closed}");
    }
    for open in [
        "listen = \"0.0.0.0:22\"",
        "listen = \"[::]:22\"",
        "listen = \"0.0.0.0:22\"\nauth = \"none\"",
        "listen = \"0.0.0.0:22\"\nallow_from = [\"0.0.0.0/0\"]",
        "listen = \"0.0.0.0:22\"\ncert = \"c\"\nkey = \"k\"",
        "listen = \"0.0.0.0:22\"\nallow_from = [\"10.0.0.0/8\"]\nauth = \"basic\"\nusers = \"users\"",
    ] {
        assert_eq!(warned(&cloud(&ssh(open)).1, WarningKind::Insecure), ["server.connect.auth"], "{open}");
    }
    let (_, warnings) = edge(&format!("{LEAST}admin_listen = \"0.0.0.0:9010\""));
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["edge.uplink.admin_listen"]);
}

#[test]
fn passwords_that_cross_a_network_unencrypted_are_a_warning_at_each_listener() {
    let basic = "auth = \"basic\"\nusers = \"/users\"\n";
    let (cert, public) = ("cert = \"/c\"\nkey = \"/k\"\n", "listen = \"[::]:1\"\n");
    let admin = "[server.links]\nadmin_listen = \"10.0.0.1:1\"\n[server.admin]\nusers = \"/users\"\n";
    for (text, key, hint) in [
        (format!("[server.connect]\n{public}{basic}"), "server.connect.auth", "set cert and key"),
        (
            format!("[server.connect]\n{public}{basic}{cert}plain_listen = \"[::]:2\"\n"),
            "server.connect.plain_listen",
            "this port cannot use TLS",
        ),
        (format!("[server.http_proxy]\n{public}{basic}"), "server.http_proxy.listen", "set cert and key"),
        (admin.to_owned(), "server.admin.users", "set cert and key"),
    ] {
        let (_, warnings) = cloud(&text);
        let warning = warnings.iter().find(|warning| warning.key == key);
        let warning = warning.unwrap_or_else(|| panic!("{text}: {warnings:?}"));
        assert_eq!(warning.kind, WarningKind::Insecure);
        assert!(warning.text.contains("unencrypted") && warning.text.contains(hint), "{warning:?}");
        let local = text.replace("[::]", "[::1]").replace("10.0.0.1", "127.0.0.1");
        assert_eq!(warned(&cloud(&local).1, WarningKind::Insecure), [""; 0], "{local}");
    }
    let (_, warnings) = edge(&format!("{LEAST}[edge.http_proxy]\n{public}{basic}"));
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["edge.http_proxy.listen"]);
    let (_, warnings) = cloud(&format!("{admin}{cert}"));
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["server.links.admin_listen"], "health and metrics");
    let (_, warnings) = cloud(&format!("{admin}{cert}client_ca = \"/ca\"\nnames = [\"ops\"]\n"));
    assert_eq!(warnings, []);
}

#[test]
fn tls_of_a_listener_needs_all_its_keys() {
    for table in ["server.connect", "server.http_proxy", "server.admin"] {
        let listen = if table == "server.admin" { "" } else { "listen = \"127.0.0.1:1\"\n" };
        for (lines, part) in [
            ("cert = \"/c\"", "key: missing: a certificate needs its key"),
            ("key = \"/k\"", "cert: missing: a certificate needs its key"),
            ("client_ca = \"/ca\"\nnames = [\"a\"]", "client_ca: set, but cert is not: set cert and key"),
            ("cert = \"/c\"\nkey = \"/k\"\nclient_ca = \"/ca\"", "names: missing: list the names"),
            ("cert = \"/c\"\nkey = \"/k\"\nnames = [\"a\"]", "names: set, but client_ca is not"),
        ] {
            let errors = cloud_faults(&format!("[{table}]\n{listen}{lines}\n")).to_string();
            assert!(errors.contains(&format!("{table}.{part}")), "{errors}");
        }
    }
    let errors = cloud_faults(&ssh("listen = \"127.0.0.1:1\"\nplain_listen = \"127.0.0.1:2\""));
    assert!(errors.to_string().contains("server.connect.plain_listen: set, but cert is not"), "{errors}");
}

#[test]
fn edge_access_warns_that_edge_no_proxy_is_ignored() {
    let env = Environment { edge_no_proxy: Some("*.secret".into()), ..Environment::default() };
    let warned = |text: &str| {
        let (_, warnings) = ServerConfig::read(text, &env).unwrap();
        warnings.iter().any(|w| w.key == "EDGE_NO_PROXY" && w.kind == WarningKind::Insecure)
    };
    assert!(!warned("[server.edge_access]\ntargets = []\nnodes = []"), "nothing is allowed");
    assert!(warned("[server.edge_access]\ntargets = [\"10.0.0.0/8:*\"]"));
    assert!(warned("[server.edge_access]\nnodes = [\"*\"]"));
}

#[test]
fn all_access_and_session_keys_are_read() {
    let (cloud, _) = cloud(
        r#"
        [server.connect]
        listen = "0.0.0.0:2222"
        auth = "basic"
        users = "/etc/users"
        allow_from = ["10.0.0.0/8"]
        proxy_protocol = ["10.0.0.5"]
        rules = [{ users = ["ops"], from = ["10.0.0.0/8"], nodes = ["edge-*"], ports = [22] }]
        [server.session]
        resume_timeout = "2m"
        open_timeout = "500ms"
        max_sessions = 7
        drain_timeout = "0s"
        superedge_idle_timeout = "90s"
        buffer_memory = "64MiB"
        [server.tls]
        min_version = "1.3"
        cipher_suites = ["A", "B", "C"]
        "#,
    );
    let key = "server.connect.users".to_owned();
    assert_eq!(connect(&cloud).access.auth, Some(PasswordFile { users: "/etc/users".into(), key }));
    let ask = |user, from: &str, node: &str, port| {
        connect(&cloud).access.rules.allow(user, from.parse().ok(), &node.parse().unwrap(), port)
    };
    assert!(ask(Some("ops"), "10.1.1.1", "edge-1", 22));
    assert!(!ask(None, "10.1.1.1", "edge-1", 22));
    assert!(connect(&cloud).access.allow_from.as_ref().unwrap().contains("::ffff:10.0.0.1".parse().unwrap()));
    assert_eq!(cloud.session.resume_timeout, Duration::from_secs(120));
    assert_eq!(cloud.session.open_timeout, Duration::from_millis(500));
    assert_eq!(cloud.session.superedge_idle_timeout, Duration::from_secs(90));
    assert_eq!((cloud.session.max_sessions, cloud.session.drain_timeout), (7, Duration::ZERO));
    assert_eq!(cloud.session.max_per_client, 2, "a quarter, rounded up");
    assert!(connect(&cloud).access.proxy_protocol.contains("10.0.0.5".parse().unwrap()));
    assert!(cloud.links.proxy_protocol.is_empty());
    assert_eq!(cloud.session.buffer_memory, Some(64 << 20));
    assert_eq!(cloud.tls.min_version, TlsVersion::V13);
    assert_eq!(cloud.tls.cipher_suites, ["A", "B", "C"]);
}

#[test]
fn proxy_protocol_from_everyone_is_a_warning_and_takes_no_names() {
    let (settings, warnings) = cloud("[server.links]\nproxy_protocol = [\"0.0.0.0/0\"]");
    assert!(settings.links.proxy_protocol.contains_all_addresses());
    let key = "server.links.proxy_protocol";
    assert!(warned(&warnings, WarningKind::Insecure).contains(&key), "{warnings:?}");
    let errors = cloud_faults("[server.connect]\nlisten = \"127.0.0.1:1\"\nproxy_protocol = [\"balancer\"]")
        .to_string();
    assert!(errors.contains("server.connect.proxy_protocol[0]"), "{errors}");
}

#[test]
fn an_edges_node_name_is_from_the_file_or_else_from_the_environment() {
    assert_eq!(edge(LEAST).0.uplink.node.as_str(), "node1");
    assert_eq!(edge(&format!("{LEAST}node = \"node2\"")).0.uplink.node.as_str(), "node2");
    let nobody = EdgeConfig::read(LEAST, &Environment::default()).unwrap_err().to_string();
    assert_eq!(
        nobody,
        "line 1: edge.uplink.node: missing: set this node's name here or in the environment variable NODE_NAME"
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
        proxy: ProxyVariables {
            https_proxy: Some(SecretString::new("http://user:word@proxy:3128")),
            no_proxy: Some(String::new()),
        },
        ..node1()
    };
    let (edge, _) = EdgeConfig::read(LEAST, &env).unwrap();
    assert_eq!(edge.own, ["192.0.2.1".parse::<IpAddr>().unwrap(), "fd00::1".parse().unwrap()]);
    assert!(edge.uplink.proxy.parse().unwrap().is_some());
}

#[test]
fn all_config_errors_are_reported_at_once_in_file_order() {
    let errors = cloud_faults(
        "[server.links]\nlisten = \"0.0.0.0:70000\"\nadmin_listen = \"localhost:1\"\ntoken_file = 5\n\
         [server.connect]\nlisten = \"127.0.0.1:22\"\nlisen = 22\nauth = \"basik\"\nallow_from = [\"10.0.0.1/8\", \"x\"]\n\
         rules = [{ nodes = [], port = [22] }, 5]\n[server.session]\nresume_timeout = 60\nbuffer_memory = \"1KiB\"\n\
         [server.conect]\n[sever]\n",
    );
    let expected = [
        "line 2: server.links.listen: \"0.0.0.0:70000\": expected ip:port, for example 127.0.0.1:9000, 0.0.0.0:9000 or [::]:9000",
        "line 3: server.links.admin_listen: \"localhost:1\": expected ip:port, for example 127.0.0.1:9000, 0.0.0.0:9000 or [::]:9000",
        "line 4: server.links.token_file: 5: expected a text in quotes",
        "line 7: server.connect.lisen: unknown key: did you mean listen?",
        "line 8: server.connect.auth: \"basik\": expected \"none\" or \"basic\"",
        "line 9: server.connect.allow_from[0]: \"10.0.0.1/8\": address has bits set after the prefix; for the whole network write 10.0.0.0/8, for one address remove the '/' and the length",
        "line 9: server.connect.allow_from[1]: \"x\": not a network; expected an address or a network, for example 10.0.0.0/8, 10.1.2.3 or fd00::/8",
        "line 10: server.connect.rules[0].nodes: an empty list: it matches nothing; leave the key out to match everything, or fill the list",
        "line 10: server.connect.rules[0].port: unknown key: did you mean ports?",
        "line 10: server.connect.rules[1]: 5: expected table: { … }",
        "line 12: server.session.resume_timeout: 60: expected a whole number with its unit (ms, s, m, h or d) in quotes, for example \"5s\" or \"500ms\"",
        "line 13: server.session.buffer_memory: \"1KiB\": expected at least 1MiB",
        "line 14: server.conect: unknown key: did you mean connect?",
        "line 15: sever: unknown key: did you mean server?",
    ];
    assert_eq!(errors.to_string().lines().collect::<Vec<_>>(), expected);
}

#[test]
fn contradicting_keys_are_errors() {
    for (lines, key) in [
        ("auth = \"basic\"", "users"),
        ("users = \"f\"", "users"),
        ("auth = \"none\"\nusers = \"f\"", "users"),
        ("rules = [{ users = [\"ops\"] }]", "rules"),
        ("auth = \"none\"\nrules = [{ users = [\"ops\"] }]", "rules"),
        ("allow_from = []", "allow_from"),
        ("auth = \"basic\"\nusers = \"f\"\nrules = [{ users = [\"*\"] }]", "rules[0].users[0]"),
    ] {
        let errors = cloud_faults(&ssh(&format!("listen = \"127.0.0.1:1\"\n{lines}")));
        assert_eq!(
            errors.iter().map(|f| f.key.as_str()).collect::<Vec<_>>(),
            [format!("server.connect.{key}")],
            "{lines}"
        );
    }
    let both = edge_faults(&format!("{LEAST}token_file = \"f\""));
    assert_eq!(both.iter().count(), 1);
}

#[test]
fn each_server_is_verified_by_its_own_name_unless_one_is_given() {
    let list = LEAST.replace("\"cloud:9000\"", "\"one:9000\", \"10.0.0.7:443\"");
    let places = |text: &str| -> Vec<_> {
        edge(text).0.uplink.server_addresses().map(|server| format!("{} {}", server.at, server.dns)).collect()
    };
    assert_eq!(places(LEAST), ["cloud:9000 cloud"]);
    assert_eq!(places(&list), ["one:9000 one", "10.0.0.7:443 10.0.0.7"]);
    assert_eq!(places(&format!("{list}tls_server_name = \"a.b\"")), ["one:9000 a.b", "10.0.0.7:443 a.b"]);
    for (wrong, key) in [("[\"one:9000\", \"two\"]", "servers[1]"), ("[]", "servers"), ("7", "servers")] {
        let errors = edge_faults(&LEAST.replace("[\"cloud:9000\"]", wrong));
        let keys: Vec<_> = errors.iter().map(|f| f.key.clone()).collect();
        assert_eq!(keys, [format!("edge.uplink.{key}")], "{wrong}");
    }
}

#[test]
fn an_edge_without_servers_and_token_gets_both_errors() {
    let errors = edge_faults("");
    let keys: Vec<_> = errors.iter().map(|f| f.key.as_str()).collect();
    assert_eq!(keys, ["edge.uplink.servers", "edge.uplink.token"]);
}

#[test]
fn a_file_of_the_other_role_is_refused_as_such() {
    let errors = cloud_faults(LEAST);
    assert_eq!(
        errors.to_string(),
        "line 1: edge: the only table in this file: run `tunnel edge` with it, or use the other file"
    );
    let (_, warnings) = cloud(&format!("{LEAST}[server.connect]\nlisten = \"127.0.0.1:22\""));
    assert_eq!(warned(&warnings, WarningKind::Unexpected), ["edge"]);
}

#[test]
fn no_config_error_contains_a_secret() {
    let (edge, warnings) = edge(&LEAST.replace("t0ken", "sw0rd fish"));
    assert_eq!(edge.uplink.token, Some(SecretString::new("sw0rd fish")));
    let mut reported = format!("{edge:?} {warnings:?}");
    for broken in [
        "token = [\"sw0rdfish\"]",
        "token = sw0rdfish",
        "token = \"sw0rdfish",
        "token = 'sw0rdfish' x",
        "tokn = \"sw0rdfish\"",
        "token = \"a\"\ntoken = \"sw0rdfish\"",
        "token = \"sw0rdfish\"\ntoken_file = \"a\"",
    ] {
        let errors = edge_faults(&format!("[edge.uplink]\n{broken}\n"));
        write!(reported, "{errors} {errors:?}").unwrap();
    }
    assert!(!reported.contains("sw0rd"), "{reported}");
}

#[test]
fn a_toml_syntax_error_is_reported_with_its_line_and_the_other_errors() {
    let errors = cloud_faults("[server.connect]\nlisten = \"0.0.0.0:99999\"\nauth = = 1\n");
    let lines: Vec<_> = errors.iter().map(|f| (f.line, f.key.as_str())).collect();
    assert_eq!(lines, [(Some(2), "server.connect.listen"), (Some(3), "")], "{errors}");
}

#[test]
fn consequences_of_a_toml_syntax_error_are_not_reported() {
    for (text, line) in [
        ("[server.connect\nlisten = \"127.0.0.1:2222\"\n", 1),
        ("[server.connect]\nlisten = \"127.0.0.1:2222\nauth = \"none\"\n", 2),
        (
            "[server.connect]\nrules = [{ ports = [22] ]\nauth = 'none'\n[server.session]\nmax_sessions = 7\n",
            2,
        ),
    ] {
        let errors = cloud_faults(text);
        let reported_errors: Vec<_> = errors.iter().map(|f| (f.line, f.key.as_str())).collect();
        assert_eq!(reported_errors, [(Some(line), "")], "{text}: {errors}");
    }
}

#[test]
fn an_empty_token_is_a_warning() {
    let (_, warnings) = edge(&LEAST.replace("t0ken", ""));
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["edge.uplink.token"]);
}

#[test]
fn deep_nesting_is_an_error_and_no_crash() {
    for text in
        ["[".repeat(20_000), "a.".repeat(20_000) + "a = 1", format!("mode = {}", "{a=".repeat(20_000))]
    {
        cloud_faults(&text);
        edge_faults(&text);
    }
}

proptest! {
    #[test]
    fn no_text_makes_the_config_reader_panic(text in "(?s).{0,200}") {
        let _ = (ServerConfig::read(&text, &node1()), EdgeConfig::read(&text, &node1()));
    }

    #[test]
    fn no_text_similar_to_a_config_makes_the_reader_panic(
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
    fn each_misspelt_key_is_reported_with_the_closest_known_key(
        chosen in prop::sample::subsequence(
            vec!["listen", "admin_listen", "metrics_listen", "key", "cert", "token_file", "peer_ca", "channelz_listen"], 1..=8),
        slip in "[qxz]",
    ) {
        let mut text = "[server.links]\n".to_owned();
        for key in &chosen {
            writeln!(text, "{key}{slip} = 1").unwrap();
        }
        let errors = cloud_faults(&text);
        let reported: Vec<_> = errors.iter().map(|f| (f.key.clone(), f.text.clone())).collect();
        let expected: Vec<_> = chosen
            .iter()
            .map(|key| (format!("server.links.{key}{slip}"), format!("unknown key: did you mean {key}?")))
            .collect();
        prop_assert_eq!(reported, expected);
    }

    #[test]
    fn superedge_keys_ignore_case_and_underscores(upper in prop::collection::vec(any::<bool>(), 40)) {
        let odd = |key: &str| -> String {
            key.chars().zip(&upper).map(|(c, up)| if *up { c.to_ascii_uppercase() } else { c }).collect()
        };
        let text = format!("[{}.{}.{}.{}]\n{} = 7\n{} = 8",
            odd("mode"), odd("cloud"), odd("stream"), odd("server"), odd("grpcport"), odd("metrics_port"));
        let (cloud, _) = cloud(&text);
        prop_assert_eq!(cloud.links.listen.port(), 7);
        prop_assert_eq!(cloud.links.ports.metrics_listen.map(|at| at.port()), Some(8));
    }
}

#[test]
fn a_config_with_errors_reports_which_keys_were_understood() {
    let text = "[server.links]\ncert = \"/c\"\nkey = 7\n[server.connect]\nlisten = \"127.0.0.1:1\"\nprot = 22\n\
                [server.dns]\nresolvers = [\"10.0.0.7:53\", \"x\"]\n[server.peers]\naddresses = [\"10.0.0.7:9000\"]\n";
    let read = ServerConfig::examine(text, &Environment::default());
    assert_eq!(read.errors.len(), 3, "{:?}", read.errors);
    let given: Vec<_> = read.given.iter().collect();
    assert_eq!(given, ["server.connect.listen", "server.links.cert", "server.peers.addresses"]);
    assert_eq!(read.settings.links.cert.to_str(), Some("/c"));
    let read = EdgeConfig::examine("[edge.uplink]\nca = \"/c\"\n", &Environment::default());
    assert_eq!((read.settings.uplink.ca.to_str(), read.errors.len()), (Some("/c"), 3));
    let broken = ServerConfig::examine(&format!("{text}= ="), &Environment::default());
    assert_eq!(broken.given.len(), 0, "a broken file has no reliable keys");
}

#[tokio::test]
async fn a_config_with_errors_has_only_its_given_keys_checked() {
    let text =
        "[edge.uplink]\nservers = [\"a:1\"]\nnode = \"n\"\ntoken = \"t\"\nca = \"/nowhere/c\"\nport = 1\n";
    let mut startup = StartupErrorCollector::default();
    let (settings, _) = startup.settings(EdgeConfig::examine(text, &Environment::default()));
    for key in ["edge.uplink.ca", "edge.target_tls.key"] {
        assert!(!startup.check_file(key, &settings.uplink.ca, |_| Ok::<_, String>(())));
    }
    let reported_errors = startup.into_errors().to_string();
    assert!(
        reported_errors.contains("ca: cannot read /nowhere/c") && reported_errors.contains("uplink.port"),
        "{reported_errors}"
    );
    assert_eq!(reported_errors.lines().count(), 2, "{reported_errors}");

    // The errors of one role say nothing about the other one.
    let text = text.replace("port = 1\n", "[server.links]\nport = 1\n");
    let mut startup = StartupErrorCollector::checking();
    let _ = startup.settings(ServerConfig::examine(&text, &Environment::default()));
    let (settings, _) = startup.settings(EdgeConfig::examine(&text, &Environment::default()));
    assert!(!startup.check_file("edge.target_tls.ca", &settings.uplink.ca, |_| Ok::<_, String>(())));
    let reported_errors = startup.into_errors().to_string();
    assert!(reported_errors.contains("target_tls.ca: cannot read /nowhere/c"), "{reported_errors}");
}

#[test]
fn a_duplicate_role_table_is_an_error() {
    let text = "[mode.cloud.stream]\n[mode.Cloud.ssh]\nport = 22\n";
    let errors = ServerConfig::read(text, &Environment::default()).unwrap_err().to_string();
    assert!(errors.contains("a second table of that name"), "{errors}");
}

#[test]
fn a_text_without_quotes_and_a_second_table_have_a_remedy() {
    let unquoted = [
        "node2",
        "tunnel.example.org:9000",
        "fred",
        "info",
        "10.0.0.1:9000",
        "127.0.0.1",
        "0xzz",
        "2025-01-01x",
        "[\"a\", node1]",
        "edge-1",
        "30s",
    ];
    for value in unquoted {
        let errors = edge_faults(&format!("[edge.uplink]\nservers = {value}\n")).to_string();
        assert!(errors.contains("line 2: not TOML: ") && errors.contains("quote"), "{value}: {errors}");
    }
    let errors = edge_faults(&format!("{LEAST}[edge.uplink]\nnode = \"a\"\n")).to_string();
    assert!(errors.contains("line 4: not TOML: duplicate key uplink; merge the two"), "{errors}");
}
