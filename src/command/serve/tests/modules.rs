//! The tables of all listeners except CONNECT's.

use crate::config::server::invitations::InvitationStoreKind;
use crate::listener::ListenerConfig as _;
use crate::listener::http::NodePortConfig;
use crate::listener::https::{HttpsConfig, Mode};
use crate::listener::tcp::TcpListenerConfig;

use super::*;

/// Returns the errors of a server's file as texts.
fn errors(text: &str) -> Vec<String> {
    cloud_faults(text).iter().map(ToString::to_string).collect()
}

const CLOSED: &str = "[server.connect]\nlisten = \"127.0.0.1:22\"\n";

#[test]
fn a_tcp_listener_has_an_address_and_a_target_with_an_optional_node() {
    let text = r#"
        [server.tcp]
        "127.0.0.1:1" = "127.0.0.1:6443"
        "[::1]:2" = "node1/db.local:5432"
        ":3" = { target = "node1/[fd00::1]:22", send_proxy = true, allow_from = ["10.0.0.0/8"] }
        "#;
    let (settings, warnings) = cloud(&format!("{CLOSED}{text}"));
    assert_eq!(warnings, []);
    let shown = |port: &TcpListenerConfig| {
        let node = port.to.node.as_ref().map(ToString::to_string).unwrap_or_default();
        (port.ports.first().to_string(), node, port.to.target.to_string(), port.send_proxy)
    };
    let want = [
        ("127.0.0.1:1", "", "127.0.0.1:6443", false),
        ("[::1]:2", "node1", "db.local:5432", false),
        ("[::]:3", "node1", "[fd00::1]:22", true),
    ];
    let want =
        want.map(|(at, node, target, proxy)| (at.to_owned(), node.to_owned(), target.to_owned(), proxy));
    let tcp: Vec<&TcpListenerConfig> = settings.listeners_of();
    assert_eq!(tcp.iter().copied().map(shown).collect::<Vec<_>>(), want);
    assert!(tcp[2].access.allow_from.is_some() && tcp[0].access.allow_from.is_none());
}

#[test]
fn a_tcp_target_that_looks_like_a_node_is_a_warning() {
    let text = "[server.tcp]\n\"127.0.0.1:1\" = \"node1:22\"\n\"127.0.0.1:2\" = \"localhost:22\"\n";
    let warnings: Vec<_> = cloud(&format!("{CLOSED}{text}")).1.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(warnings[0].contains("for a node node1, write node1/127.0.0.1:22"), "{}", warnings[0]);
}

#[test]
fn an_invalid_tcp_listener_is_reported_with_its_key() {
    let lines = [
        "\"6443\" = \"127.0.0.1:6443\"",
        "\"127.0.0.1:1\" = \"6443\"",
        "\"127.0.0.1:2\" = \"a b/127.0.0.1:1\"",
        "\"127.0.0.1:3\" = 7",
        "\"127.0.0.1:4\" = { node = \"n\" }",
    ];
    let reported = errors(&format!("{CLOSED}[server.tcp]\n{}\n", lines.join("\n")));
    let want = [
        "line 4: server.tcp.\"6443\": \"6443\": expected an address to listen on",
        "line 5: server.tcp.\"127.0.0.1:1\".target: \"6443\": \"6443\" has no port",
        "line 6: server.tcp.\"127.0.0.1:2\".target: \"a b/127.0.0.1:1\": \"a b\" is not a name",
        "line 7: server.tcp.\"127.0.0.1:3\".target: 7: expected a text",
        "line 8: server.tcp.\"127.0.0.1:4\".target: missing: set the target",
        "line 8: server.tcp.\"127.0.0.1:4\".node: unknown key: known here are allow_from, auth,",
    ];
    assert_eq!(reported.len(), want.len(), "{reported:#?}");
    for (reported, want) in reported.iter().zip(want) {
        assert!(reported.starts_with(want), "{reported}\n{want}");
    }
}

#[test]
fn a_wrong_range_of_tcp_ports_is_reported_with_its_key_value_and_remedy() {
    let range = |key: &str, target: &str| format!("\"127.0.0.1:{key}\" = \"node1/127.0.0.1:{target}\"\n");
    let first = range("7000-7099", "7000");
    for (lines, want) in [
        (
            range("7099-7000", "1"),
            "\"127.0.0.1:7099-7000\": the last port of a range is not less than the first",
        ),
        (range("0-7", "1"), "a range begins with port 1"),
        (range("7000-7099", "65437"), ".target: port 65437: this is the target of the first of 100 ports"),
        (
            format!("{first}{}", range("7099", "1")),
            "server.tcp.\"127.0.0.1:7000-7099\" has some of these ports",
        ),
        (format!("{first}\"[::]:7050-7060\" = \"a:1\""), "list each port once"),
        (
            format!("{first}{}", range("8000-8900", "1")),
            "up to here [server.tcp] has 1001 ports, and at most 1000",
        ),
    ] {
        let reported = errors(&format!("{CLOSED}[server.tcp]\n{lines}\n"));
        assert!(reported.len() == 1 && reported[0].contains(want), "{lines}: {reported:?}");
    }
    let most = format!("{CLOSED}[server.tcp]\n{first}{}", range("8000-8899", "64636"));
    assert_eq!(cloud(&most).1, []);
    let open = format!("{CLOSED}[server.tcp]\n\"0.0.0.0:7000-7099\" = \"node1/127.0.0.1:1\"\n");
    let text = "can reach 127.0.0.1:1 at node node1 (other ports of this range: 99) without authentication";
    assert!(cloud(&open).1[0].text.contains(text));
}

#[test]
fn an_open_tcp_listener_is_a_warning_and_basic_auth_is_an_error() {
    let open = format!("{CLOSED}[server.tcp]\n\"0.0.0.0:6443\" = \"node1/127.0.0.1:6443\"\n");
    let (_, warnings) = cloud(&open);
    let key = "server.tcp.\"0.0.0.0:6443\"";
    assert_eq!(warned(&warnings, WarningKind::Insecure), [key]);
    let text = "anyone who reaches 0.0.0.0:6443 can reach 127.0.0.1:6443 at node node1 without authentication; set allow_from";
    assert_eq!(warnings[0].text, text);
    let fenced = open.replace("[server.tcp]", "allow_from = [\"10.0.0.0/8\"]\n[server.tcp]");
    assert_eq!(cloud(&fenced).1, []);
    let basic = open.replace("[server.tcp]", "auth = \"basic\"\nusers = \"/users\"\n[server.tcp]");
    let reported = errors(&basic);
    assert!(
        reported[0].contains(&format!("{key}.auth: \"basic\", inherited from [server.connect]")),
        "{reported:?}"
    );
}

#[test]
fn an_https_node_port_represents_one_port_of_every_node() {
    let text = r#"
        [server.https]
        mode = "passthrough"
        listen_ip = "127.0.0.1"
        rules = [{ nodes = ["edge-*"] }]
        [server.https.ports]
        "9100" = "localhost:9100"
        "10250" = "127.0.0.1:10250"
        "#;
    let (settings, warnings) = cloud(&format!("{CLOSED}{text}"));
    let https = settings.listener::<HttpsConfig>().unwrap();
    assert_eq!((https.mode, warnings), (Mode::Passthrough, vec![]));
    let shown = |port: &NodePortConfig| (port.at.to_string(), port.stands_for.to_string());
    let want = [("127.0.0.1:9100", "localhost:9100"), ("127.0.0.1:10250", "127.0.0.1:10250")];
    assert_eq!(
        https.node_ports().iter().map(shown).collect::<Vec<_>>(),
        want.map(|(at, to)| (at.to_owned(), to.to_owned()))
    );
    assert!(!https.access.rules.is_empty() && connect(&settings).access.rules.is_empty());
    let open = format!("{CLOSED}{}", text.replace("listen_ip = \"127.0.0.1\"", ""));
    let (settings, warnings) = cloud(&open);
    assert_eq!(settings.listener::<HttpsConfig>().unwrap().node_ports()[1].at, "[::]:10250".parse().unwrap());
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["server.https.ports"]);
    let text = "anyone who reaches [::]:9100 can reach localhost:9100 at every node (other entries of this table: 1) \
                without authentication; set client_ca or allow_from";
    assert_eq!(warnings[0].text.replace("client_ca or ", ""), text.replace("client_ca or ", ""));
}

#[test]
fn an_invalid_https_setting_is_reported_with_its_key() {
    for (lines, part) in [
        ("mode = \"relay\"\ncert = \"/c\"\nkey = \"/k\"", "expected \"terminate\" or \"passthrough\""),
        ("mode = \"passthrough\"\nclient_ca = \"/ca\"", "server.https.client_ca: set, but mode"),
        ("mode = \"passthrough\"\nnames = [\"a\"]", "server.https.names: set, but client_ca is not"),
        ("cert = \"/c\"\nkey = \"/k\"\nnames = [\"a\"]", "server.https.names: set, but client_ca is not"),
    ] {
        let reported = errors(&format!(
            "{CLOSED}[server.https]\n{lines}\n[server.https.ports]\n\"10250\" = \"127.0.0.1:10250\"\n"
        ));
        assert!(reported[0].contains(part), "{lines}: {reported:?}");
    }
    let reported = errors(&format!("{CLOSED}[server.http.ports]\n\"x\" = \"127.0.0.1:1\"\n\"1\" = \"a\"\n"));
    assert!(
        reported[0].contains("server.http.ports.\"x\": \"x\": expected a port: a number"),
        "{reported:?}"
    );
    assert!(reported[1].contains("server.http.ports.\"1\": \"a\": \"a\" has no port"), "{reported:?}");
    let (_, warnings) =
        cloud(&format!("{CLOSED}[server.https]\nmode = \"passthrough\"\ncert = \"/c\"\nkey = \"/k\"\n"));
    assert_eq!(warned(&warnings, WarningKind::Unexpected), ["server.https.mode", "server.https.ports"]);
    // Such a table serves nothing.
    let (_, warnings) = cloud(&format!("{CLOSED}[server.http]\nallow_from = [\"127.0.0.1\"]\n"));
    assert_eq!(warned(&warnings, WarningKind::Unexpected), ["server.http.ports"]);
}

#[test]
fn the_admin_socket_has_a_given_path_or_the_roles_default_name() {
    let (pod, _) = cloud("");
    assert_eq!((pod.admin.listen, pod.admin.name), (None, "server"));
    let (lone, _) = edge(LEAST);
    assert_eq!((lone.admin.listen, lone.admin.name), (None, "edge"));
    let (pod, _) = cloud("[server.admin]\nlisten = \"unix:/a/b\"\n");
    assert_eq!(pod.admin.listen, Some("/a/b".into()));
    for wrong in ["127.0.0.1:80", "unix:b", "/a/b"] {
        let errors = cloud_faults(&format!("[server.admin]\nlisten = \"{wrong}\"\n")).to_string();
        assert!(errors.contains("server.admin.listen") && errors.contains("expected unix:/path"), "{errors}");
    }
}

#[test]
fn invitations_are_off_unless_a_store_is_set() {
    let read = |lines: &str| {
        let text = format!("[server.connect]\nlisten = \"127.0.0.1:22\"\n[server.invitations]\n{lines}");
        ServerConfig::read(&text, &Environment::default()).map(|(cloud, _)| cloud.invitations)
    };
    assert_eq!(read("").unwrap().store, InvitationStoreKind::None);
    assert_eq!(read("store = \"none\"\nfile = \"f\"").unwrap().store, InvitationStoreKind::None);
    let file = read("store = \"file\"\nfile = \"f\"").unwrap();
    assert_eq!((file.store, file.file), (InvitationStoreKind::File, Some("f".into())));
    let etcd = read("store = \"etcd\"\netcd.endpoints = [\"http://a\"]").unwrap();
    assert_eq!(etcd.store, InvitationStoreKind::Etcd);
    assert_eq!((etcd.etcd.prefix.as_str(), etcd.etcd.endpoints.len()), ("/tunnel", 1));
    for (lines, key) in [
        ("store = \"file\"", "server.invitations.file"),
        ("store = \"etcd\"", "server.invitations.etcd"),
        ("store = \"secret\"", "server.invitations.store"),
        ("store = \"disk\"", "server.invitations.store"),
        ("stor = \"file\"", "server.invitations.stor"),
    ] {
        let errors = read(lines).unwrap_err().to_string();
        assert!(errors.contains(key), "{lines}: {errors}");
    }
}
