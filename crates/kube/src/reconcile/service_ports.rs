//! The change of a Service's managed ports. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// The ports that a Service should have, and what changes.
#[derive(Debug, PartialEq)]
pub(crate) struct ServicePortChange {
    /// All ports: first foreign ones, unchanged, then managed ones.
    pub(crate) ports: Vec<ServicePort>,
    pub(crate) added: Vec<u16>,
    pub(crate) removed: Vec<u16>,
    /// Ports with a new target port.
    pub(crate) moved: Vec<u16>,
    /// Wanted ports that are foreign.
    pub(crate) taken: Vec<u16>,
}

/// Returns the change that makes a Service forward each node port to the right port of this server.
pub(crate) fn changed(old: &[ServicePort], required: &BTreeMap<u16, u16>) -> ServicePortChange {
    // Operators may add ports to the Service, which stay as they are.
    let (ours, others): (Vec<_>, Vec<_>) = old.iter().cloned().partition(is_port_of_ours);
    let taken: BTreeSet<_> = others.iter().filter(|port| is_tcp(port)).filter_map(number).collect();
    let before: BTreeMap<u16, ServicePort> =
        ours.into_iter().filter_map(|port| Some((number(&port)?, port))).collect();
    let mut change = ServicePortChange {
        ports: others,
        added: Vec::new(),
        removed: before.keys().filter(|port| !required.contains_key(port)).copied().collect(),
        moved: Vec::new(),
        taken: Vec::new(),
    };
    for (port, front) in required {
        let known = before.get(port);
        // Kubernetes refuses a Service that has one TCP port twice, so this port would block the whole change.
        if taken.contains(port) {
            change.taken.push(*port);
            change.removed.extend(known.map(|_| *port));
            continue;
        }
        let entry = ServicePort {
            name: Some(format!("{PREFIX}{port}")),
            port: i32::from(*port),
            protocol: Some(TCP.to_owned()),
            target_port: Some(IntOrString::Int(i32::from(*front))),
            // Values that Kubernetes has assigned are kept.
            ..known.cloned().unwrap_or_default()
        };
        match known {
            None => change.added.push(*port),
            Some(known) if *known != entry => change.moved.push(*port),
            Some(_) => {}
        }
        change.ports.push(entry);
    }
    change
}

/// Returns true if the Service's annotation permits changes of its ports.
pub(crate) fn is_ours(service: &Service) -> bool {
    let annotations = service.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(ANNOTATION)).is_some_and(|value| value == MANAGED)
}

/// The reason why a Service is not changed.
pub(crate) const NOT_OURS: &str = "it has no annotation tunnel.cloud.io/ports: managed";

const ANNOTATION: &str = "tunnel.cloud.io/ports";
const MANAGED: &str = "managed";

fn is_port_of_ours(port: &ServicePort) -> bool {
    port.name.as_ref().is_some_and(|name| name.starts_with(PREFIX))
}

fn is_tcp(port: &ServicePort) -> bool {
    port.protocol.as_ref().is_none_or(|protocol| protocol == TCP)
}

pub(super) fn number(port: &ServicePort) -> Option<u16> {
    u16::try_from(port.port).ok()
}

/// The prefix of the names of managed ports.
const PREFIX: &str = "dnat-";

const TCP: &str = "TCP";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn port(name: &str, number: u16, target: u16) -> ServicePort {
        ServicePort {
            name: Some(name.to_owned()),
            port: number.into(),
            protocol: Some(TCP.to_owned()),
            target_port: Some(IntOrString::Int(target.into())),
            ..ServicePort::default()
        }
    }

    fn required(ports: &[(u16, u16)]) -> BTreeMap<u16, u16> {
        ports.iter().copied().collect()
    }

    #[test]
    fn ports_are_added_removed_and_moved_and_foreign_ones_stay() {
        let base = [port("https", 10250, 10263), port("http", 10255, 10264)];
        let first = changed(&base, &required(&[(9051, 10264), (9443, 10263)]));
        assert_eq!(first.ports[..2], base);
        assert_eq!(first.ports[2..], [port("dnat-9051", 9051, 10264), port("dnat-9443", 9443, 10263)]);
        assert_eq!((first.added, first.removed, first.moved), (vec![9051, 9443], vec![], vec![]));
        let mut given = first.ports;
        given[2].node_port = Some(31_000);
        let same = changed(&given, &required(&[(9051, 10264), (9443, 10263)]));
        assert_eq!((&same.ports, same.added, same.removed, same.moved), (&given, vec![], vec![], vec![]));
        let next = changed(&given, &required(&[(9051, 10263), (9052, 10264)]));
        assert_eq!((next.added, next.removed, next.moved), (vec![9052], vec![9443], vec![9051]));
        assert_eq!(next.ports[2].node_port, Some(31_000), "values assigned by Kubernetes are kept");
    }

    #[test]
    fn a_port_of_another_owner_is_not_replaced() {
        let theirs = port("metrics", 9051, 1);
        let change = changed(std::slice::from_ref(&theirs), &required(&[(9051, 10264)]));
        assert_eq!((change.ports, change.taken), (vec![theirs], vec![9051]));
        let udp = ServicePort { protocol: Some("UDP".to_owned()), ..port("dns", 9051, 1) };
        assert_eq!(changed(&[udp], &required(&[(9051, 10264)])).added, [9051]);
    }

    #[test]
    fn a_service_is_ours_only_with_the_annotation() {
        let mut service = Service::default();
        assert!(!is_ours(&service));
        let mut with_annotation = |value: &str| {
            service.metadata.annotations = Some([(ANNOTATION.to_owned(), value.to_owned())].into());
            is_ours(&service)
        };
        assert!(with_annotation(MANAGED) && !with_annotation("yes"));
        assert!(NOT_OURS.contains(ANNOTATION) && NOT_OURS.contains(MANAGED));
    }

    proptest! {
        #[test]
        fn a_change_leaves_each_required_port_once_and_a_second_change_is_empty(
            old in proptest::collection::vec((any::<bool>(), 1_u16..30, 1_u16..4), 0..20),
            required in proptest::collection::btree_map(1_u16..30, 1_u16..4, 0..20),
        ) {
            let named = |ours: bool, number: u16| if ours { format!("dnat-{number}") } else { format!("x-{number}") };
            let mut seen = BTreeSet::new();
            let old = old.into_iter().filter(|(_, number, _)| seen.insert(*number));
            let old: Vec<_> = old.map(|(ours, number, target)| port(&named(ours, number), number, target)).collect();
            let change = changed(&old, &required);
            let others: Vec<_> = old.iter().filter(|port| !is_port_of_ours(port)).cloned().collect();
            prop_assert_eq!(&change.ports[..others.len()], &others[..]);
            let numbers: Vec<_> = change.ports.iter().filter_map(number).collect();
            let once: BTreeSet<_> = numbers.iter().copied().collect();
            prop_assert_eq!(once.len(), numbers.len());
            prop_assert!(required.keys().all(|port| once.contains(port)));
            let again = changed(&change.ports, &required);
            prop_assert!(again.added.is_empty() && again.removed.is_empty() && again.moved.is_empty());
        }
    }
}
