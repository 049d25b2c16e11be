//! Valid and invalid values of `[server.addresses]` and `[server.direct]`.

use super::*;

fn inside() -> Environment {
    let host = Some("10.96.0.1".to_owned());
    Environment {
        kubernetes_service_host: host,
        pod_namespace: Some("edge-system".into()),
        ..Environment::default()
    }
}

#[test]
fn by_default_the_address_book_is_empty_and_nothing_is_dialled_directly() {
    let (settings, _) = cloud("");
    assert_eq!((settings.addresses.nodes, settings.addresses.cluster), (vec![], None));
    assert_eq!(settings.direct.targets, Targets::from_iter([]));
}

#[test]
fn node_networks_and_direct_targets_are_read() {
    let text = "[server.addresses.nodes]\n\"10.0.0.7\" = \"node1\"\n\"fd01::/64\" = \"node2\"\n\
                [server.direct]\ntargets = [\"10.0.0.0/8:443\", \"[fd00::/8]:*\"]\n";
    let (settings, _) = cloud(text);
    let expected = [("10.0.0.7/32", "node1"), ("fd01::/64", "node2")];
    let expected: Vec<_> = expected.map(|(net, node)| (net.parse().unwrap(), node.parse().unwrap())).into();
    assert_eq!(settings.addresses.nodes, expected);
    let direct = settings.direct.targets;
    assert!(
        direct.allows("10.1.2.3:443".parse().unwrap(), &[])
            && !direct.allows("10.1.2.3:80".parse().unwrap(), &[])
    );
}

#[test]
fn an_invalid_address_entry_is_an_error() {
    let errors = cloud_faults(
        "[server.addresses.nodes]\n\"10.0.0.7/8\" = \"node1\"\nnode1 = \"node1\"\n\"10.0.0.8\" = \"a node\"\n\
         \"10.0.0.9\" = { node = \"node1\" }\n",
    );
    let reported: Vec<_> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(reported.len(), 4, "{reported:?}");
    // A node is a text, as in the JSON Schema.
    for expected in ["10.0.0.0/8", "\"10.0.0.9\"", "expected a text in quotes"] {
        assert!(reported.iter().any(|error| error.contains(expected)), "{reported:?}");
    }
}

#[test]
fn kubernetes_addresses_are_used_if_enabled_or_a_listener_needs_them() {
    let cluster = |text: &str| ServerConfig::read(text, &inside()).unwrap().0.addresses.cluster;
    assert!(cluster("[server.addresses]\nkubernetes = true\n").is_some());
    assert_eq!(cluster(""), None);
    let module = "[server]\nhttp_proxy = { listen = \"0.0.0.0:8080\" }\n";
    assert_eq!(cluster(module).unwrap().namespace.as_deref(), Some("edge-system"));
    assert_eq!(cluster(&format!("{module}[server.addresses]\nkubernetes = false\n")), None);
}

#[test]
fn missing_kubernetes_is_an_error_only_if_it_is_enabled() {
    let errors = cloud_faults("[server.addresses]\nkubernetes = true\n");
    assert_eq!(errors.iter().next().unwrap().key, "server.addresses.kubernetes");
    assert_eq!(cloud("[server]\nhttp_proxy = { listen = \"0.0.0.0:8080\" }\n").0.addresses.cluster, None);
}
