//! What `[mode.cloud.registry]` takes, and what it refuses.

use super::*;
use crate::config::cloud::registry::{Endpoint, Etcd, Publish, Registry};
use crate::config::cloud::siblings::Siblings;

fn read(lines: &str) -> Result<(Registry, Vec<Warning>), Faults> {
    let env = Environment { pod_ip: Some("10.0.0.7".to_owned()), ..Environment::default() };
    let text = format!("[mode.cloud.ssh]\nlisten = \"127.0.0.1:22\"\n[mode.cloud.registry]\n{lines}");
    Cloud::read(&text, &env).map(|(cloud, warnings)| (cloud.registry, warnings))
}

#[test]
fn nothing_is_published_unless_asked_for() {
    let (absent, _) = cloud("");
    assert_eq!(
        absent.registry,
        Registry { zone: String::new(), publish: Publish::None, siblings: Siblings::default() }
    );
    assert_eq!(cloud(CLOUD).0.registry, absent.registry);
}

#[test]
fn a_publisher_is_read_with_its_defaults() {
    let (registry, warnings) = read("publish = \"hosts\"\nhosts = \"h\"\nzone = \".Nodes.Test.\"").unwrap();
    let siblings = Siblings { several: true, ..Siblings::default() };
    assert_eq!(
        registry,
        Registry { zone: "nodes.test".into(), publish: Publish::Hosts("h".into()), siblings }
    );
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
    let (registry, warnings) = read("publish = \"configmap\"").unwrap();
    assert_eq!(registry.publish, Publish::None);
    assert_eq!(warned(&warnings, Concern::NotServed), ["mode.cloud.registry.publish"]);
    assert_eq!(warnings.len(), 1);
}

#[test]
fn other_pods_are_named_in_several_ways_and_asked_only_if_something_says_that_there_are_any() {
    let siblings = |lines| read(lines).unwrap().0.siblings;
    let all = siblings(
        "dns = [\"10.96.0.10:53\"]\nsiblings = [\"10.0.0.7:9000\", \"[fd00::1]:9000\"]\n\
         siblings_service = \"Pods.Test:9000\"\nname = \"Cloud.Test\"",
    );
    let expected = Siblings {
        several: true,
        dns: vec!["10.96.0.10:53".parse().unwrap()],
        list: ["10.0.0.7:9000", "[fd00::1]:9000"].map(|at| at.parse().unwrap()).into(),
        service: Some("pods.test:9000".parse().unwrap()),
        name: Some("cloud.test".into()),
    };
    assert_eq!(all, expected);
    for (lines, several, named) in [
        ("", false, false),
        ("siblings = []\nname = \"a\"", false, false),
        ("dns = []", true, false),
        ("zone = \"nodes\"", true, false),
        ("publish = \"hosts\"\nhosts = \"h\"", true, false),
        ("siblings = [\"10.0.0.7:9000\"]", true, true),
        ("siblings_service = \"pods:9000\"", true, true),
    ] {
        let siblings = siblings(lines);
        assert_eq!((siblings.several, siblings.are_named()), (several, named), "{lines}");
    }
}

#[test]
fn what_a_publisher_lacks_is_a_fault() {
    for (lines, key) in [
        ("publish = \"hosts\"", "hosts"),
        ("publish = \"etcd\"", "etcd"),
        ("publish = \"etcd\"\netcd = []", "etcd"),
        ("publish = \"etcd\"\netcd = [\"10.0.0.5:2379\"]", "etcd[0]"),
        ("publish = \"etcd\"\netcd = [\"https://a\"]", "etcd_ca"),
        ("siblings = [\"pods:9000\"]", "siblings[0]"),
        ("dns = [\"10.0.0.5\"]", "dns[0]"),
        ("dns = [\"10.0.0.5:0\"]", "dns[0]"),
        ("siblings_service = \"10.0.0.7:9000\"", "siblings_service"),
        ("siblings_service = \"pods\"", "siblings_service"),
        ("name = \"10.0.0.7\"", "name"),
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
