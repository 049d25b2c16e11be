//! What `[mode.cloud.registry]` takes, and what it refuses.

use super::*;
use crate::config::cloud::registry::{Endpoint, Etcd, Publish, Registry};

fn read(lines: &str) -> Result<(Registry, Vec<Warning>), Faults> {
    let env = Environment { pod_ip: Some("10.0.0.7".to_owned()), ..Environment::default() };
    let text = format!("[mode.cloud.ssh]\nlisten = \"127.0.0.1:22\"\n[mode.cloud.registry]\n{lines}");
    Cloud::read(&text, &env).map(|(cloud, warnings)| (cloud.registry, warnings))
}

#[test]
fn nothing_is_published_unless_asked_for() {
    let (absent, _) = cloud("");
    assert_eq!(absent.registry, Registry { zone: String::new(), publish: Publish::None });
    assert_eq!(cloud(CLOUD).0.registry, absent.registry);
}

#[test]
fn a_publisher_is_read_with_its_defaults() {
    let (registry, warnings) = read("publish = \"hosts\"\nhosts = \"h\"\nzone = \".Nodes.Test.\"").unwrap();
    assert_eq!(registry, Registry { zone: "nodes.test".into(), publish: Publish::Hosts("h".into()) });
    assert_eq!(warnings, []);
    let (registry, _) = read("publish = \"etcd\"\netcd = [\"http://a\", \"http://[fd00::1]:1/\"]").unwrap();
    let member = |at: &str| Endpoint { tls: false, at: at.parse().unwrap() };
    let etcd = Etcd {
        endpoints: vec![member("a:2379"), member("[fd00::1]:1")],
        prefix: "/skydns".into(),
        ca: None,
        identity: None,
        login: None,
    };
    assert_eq!(registry.publish, Publish::Etcd(etcd));
}

#[test]
fn what_is_not_served_yet_is_named_once_each() {
    let (registry, warnings) = read(
        "publish = \"configmap\"\ndns = [\"10.96.0.10:53\"]\nsiblings = []\nsiblings_service = \"a:1\"\nname = \"b\"",
    )
    .unwrap();
    assert_eq!(registry.publish, Publish::None);
    let keys = ["dns", "name", "publish", "siblings", "siblings_service"];
    let keys = keys.map(|key| format!("mode.cloud.registry.{key}"));
    assert_eq!(warned(&warnings, Concern::NotServed), keys);
    assert_eq!(warnings.len(), keys.len());
}

#[test]
fn what_a_publisher_lacks_is_a_fault() {
    for (lines, key) in [
        ("publish = \"hosts\"", "hosts"),
        ("publish = \"etcd\"", "etcd"),
        ("publish = \"etcd\"\netcd = []", "etcd"),
        ("publish = \"etcd\"\netcd = [\"10.0.0.5:2379\"]", "etcd[0]"),
        ("publish = \"etcd\"\netcd = [\"https://a\"]", "etcd_ca"),
        ("etcd_cert = \"c\"", "etcd_key"),
        ("etcd_key = \"c\"", "etcd_cert"),
        ("etcd_user = \"c\"", "etcd_password_file"),
        ("etcd_prefix = \"skydns\"", "etcd_prefix"),
        ("etcd_prefix = \"/\"", "etcd_prefix"),
        ("publish = \"dns\"", "publish"),
        ("zone = \"a..b\"", "zone"),
    ] {
        let faults = read(lines).unwrap_err();
        let keys: Vec<_> = faults.iter().map(|f| f.key.as_str()).collect();
        assert_eq!(keys, [format!("mode.cloud.registry.{key}")], "{lines}");
    }
    let faults = cloud_faults("[mode.cloud.registry]\npublish = \"hosts\"\nhosts = \"h\"");
    assert_eq!(faults.iter().map(|f| f.key.as_str()).collect::<Vec<_>>(), ["POD_IP"]);
}
