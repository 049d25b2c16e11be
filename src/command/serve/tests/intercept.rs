//! Valid and invalid values of `[server.intercept]`.

use crate::listener::intercept::{InterceptConfig, MarkBits};

use super::*;

const CLOSED: &str = "[server.connect]\nlisten = \"127.0.0.1:22\"\nallow_from = [\"10.0.0.0/8\"]\nproxy_protocol = [\"10.0.0.5\"]\n";

fn read(lines: &str) -> Result<(Option<InterceptConfig>, Vec<Warning>), ConfigErrors> {
    let env = Environment { host_ip: Some("10.0.0.1".to_owned()), ..Environment::default() };
    let text = format!("{CLOSED}[server.intercept]\n{lines}\n");
    ServerConfig::read(&text, &env).map(|(cloud, warnings)| (cloud.listener().cloned(), warnings))
}

#[test]
fn nothing_is_intercepted_unless_networks_are_named() {
    assert!(cloud("").0.listener::<InterceptConfig>().is_none());
    for lines in ["", "networks = []", "networks = 7", "networks = [\"10.0.0.7/8\"]"] {
        let errors = read(lines).unwrap_err().to_string();
        assert!(errors.contains("server.intercept.networks"), "{lines}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{lines}: {errors}");
    }
}

#[test]
fn intercept_needs_only_networks_and_has_defaults() {
    let (intercept, warnings) = read("networks = [\"10.0.0.0/16\"]").unwrap();
    let intercept = intercept.unwrap();
    assert_eq!(warnings, []);
    assert!(intercept.networks.contains("10.0.3.4".parse().unwrap()) && !intercept.networks.is_empty());
    assert_eq!(Vec::from_iter(intercept.ports.iter().map(|port| port.0)), [10250, 10255]);
    assert_eq!((intercept.table.as_str(), intercept.port.0), ("tunnel", 0));
    assert_eq!(intercept.mark, MarkBits { mark: 0x40, mask: 0x40 });
    assert_eq!((intercept.forwarded_networks.is_empty(), intercept.host_ip), (true, "10.0.0.1".parse().ok()));
    assert!(intercept.access.allow_from.is_some(), "inherited from [server.connect]");
    assert!(intercept.access.proxy_protocol.is_empty(), "no load balancer in front of it");
}

#[test]
fn an_invalid_intercept_setting_is_reported_with_its_key_and_a_remedy() {
    for (line, key, hint) in [
        ("ports = [0]", "ports[0]", "1 to 65535"),
        ("table = \"a b\"", "table", "expected a letter"),
        ("table = \"7\"", "table", "expected a letter"),
        ("mark = \"0x40/0x80\"", "mark", "as in \"0x40/0x40\""),
        ("mark = \"0\"", "mark", "as in \"0x40/0x40\""),
        ("mark = \"0x+1\"", "mark", "as in \"0x40/0x40\""),
        ("forwarded_networks = [\"x\"]", "forwarded_networks[0]", "not a network"),
        ("network = []", "network", "did you mean networks?"),
    ] {
        let errors = read(&format!("networks = [\"10.0.0.0/16\"]\n{line}")).unwrap_err().to_string();
        assert!(errors.contains(&format!("server.intercept.{key}: ")), "{line}: {errors}");
        assert!(errors.contains(hint) && errors.lines().count() == 1, "{line}: {errors}");
    }
}

#[test]
fn a_mark_without_a_mask_is_a_full_mark() {
    let mark = |text: &str| {
        let lines = format!("networks = [\"10.0.0.0/16\"]\nmark = \"{text}\"");
        read(&lines).unwrap().0.unwrap().mark
    };
    assert_eq!(mark("7"), MarkBits { mark: 7, mask: u32::MAX });
    assert_eq!(mark("0x30/0xf0"), MarkBits { mark: 0x30, mask: 0xf0 });
}

#[test]
fn forwarding_from_all_networks_is_a_warning() {
    let (_, warnings) = read(
        "networks = [\"10.0.0.0/16\"]\nforwarded_networks = [\"0.0.0.0/0\"]\nallow_from = [\"0.0.0.0/0\"]",
    )
    .unwrap();
    assert_eq!(warned(&warnings, WarningKind::Insecure), ["server.intercept.forwarded_networks"]);
}
