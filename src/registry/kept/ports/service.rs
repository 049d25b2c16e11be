//! The ports of a Service that are ours: what is to change.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// The ports that a Service is to have, and what of it is new.
#[derive(Debug, PartialEq)]
pub(super) struct Change {
    /// All of them; those that are not ours as they were, and before ours.
    pub(super) ports: Vec<ServicePort>,
    pub(super) added: Vec<u16>,
    pub(super) removed: Vec<u16>,
    /// Those that led to another port of ours.
    pub(super) moved: Vec<u16>,
    /// Those that are wanted, and that somebody else has put there.
    pub(super) taken: Vec<u16>,
}

/// What makes the ports of a Service lead where they should: from each port of nodes to one of ours.
pub(super) fn changed(old: &[ServicePort], wanted: &BTreeMap<u16, u16>) -> Change {
    let (ours, others): (Vec<_>, Vec<_>) = old.iter().cloned().partition(is_port_of_ours);
    let taken: BTreeSet<_> = others.iter().filter(|port| is_tcp(port)).filter_map(number).collect();
    let before: BTreeMap<u16, ServicePort> =
        ours.into_iter().filter_map(|port| Some((number(&port)?, port))).collect();
    let mut change = Change {
        ports: others,
        added: Vec::new(),
        removed: before.keys().filter(|port| !wanted.contains_key(port)).copied().collect(),
        moved: Vec::new(),
        taken: Vec::new(),
    };
    for (port, front) in wanted {
        let known = before.get(port);
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
            // What Kubernetes has given it stays its own.
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

/// Whether a Service says that its ports may be written.
pub(super) fn is_ours(service: &Service) -> bool {
    let annotations = service.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(ANNOTATION)).is_some_and(|value| value == MANAGED)
}

/// Why a Service is not written.
pub(super) const NOT_OURS: &str = "it has no annotation tunnel.cloud.io/ports: managed";

const ANNOTATION: &str = "tunnel.cloud.io/ports";
const MANAGED: &str = "managed";

fn is_port_of_ours(port: &ServicePort) -> bool {
    port.name.as_ref().is_some_and(|name| name.starts_with(PREFIX))
}

fn is_tcp(port: &ServicePort) -> bool {
    port.protocol.as_ref().is_none_or(|protocol| protocol == TCP)
}

fn number(port: &ServicePort) -> Option<u16> {
    u16::try_from(port.port).ok()
}

/// How the names of our ports begin.
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

    fn wanted(ports: &[(u16, u16)]) -> BTreeMap<u16, u16> {
        ports.iter().copied().collect()
    }

    #[test]
    fn ports_come_go_and_move_and_those_of_others_stay() {
        let base = [port("https", 10250, 10263), port("http", 10255, 10264)];
        let first = changed(&base, &wanted(&[(9051, 10264), (9443, 10263)]));
        assert_eq!(first.ports[..2], base);
        assert_eq!(first.ports[2..], [port("dnat-9051", 9051, 10264), port("dnat-9443", 9443, 10263)]);
        assert_eq!((first.added, first.removed, first.moved), (vec![9051, 9443], vec![], vec![]));
        let mut given = first.ports;
        given[2].node_port = Some(31_000);
        let same = changed(&given, &wanted(&[(9051, 10264), (9443, 10263)]));
        assert_eq!((&same.ports, same.added, same.removed, same.moved), (&given, vec![], vec![], vec![]));
        let next = changed(&given, &wanted(&[(9051, 10263), (9052, 10264)]));
        assert_eq!((next.added, next.removed, next.moved), (vec![9052], vec![9443], vec![9051]));
        assert_eq!(next.ports[2].node_port, Some(31_000), "what Kubernetes has given stays");
    }

    #[test]
    fn a_port_that_somebody_else_has_put_there_is_not_taken_from_him() {
        let theirs = port("metrics", 9051, 1);
        let change = changed(std::slice::from_ref(&theirs), &wanted(&[(9051, 10264)]));
        assert_eq!((change.ports, change.taken), (vec![theirs], vec![9051]));
        let udp = ServicePort { protocol: Some("UDP".to_owned()), ..port("dns", 9051, 1) };
        assert_eq!(changed(&[udp], &wanted(&[(9051, 10264)])).added, [9051]);
    }

    #[test]
    fn a_service_is_ours_only_if_it_says_so() {
        let mut service = Service::default();
        assert!(!is_ours(&service));
        let mut says = |value: &str| {
            service.metadata.annotations = Some([(ANNOTATION.to_owned(), value.to_owned())].into());
            is_ours(&service)
        };
        assert!(says(MANAGED) && !says("yes"));
        assert!(NOT_OURS.contains(ANNOTATION) && NOT_OURS.contains(MANAGED));
    }

    proptest! {
        #[test]
        fn whatever_there_was_all_that_is_wanted_is_there_once_and_a_second_change_is_none(
            old in proptest::collection::vec((any::<bool>(), 1_u16..30, 1_u16..4), 0..20),
            wanted in proptest::collection::btree_map(1_u16..30, 1_u16..4, 0..20),
        ) {
            let named = |ours: bool, number: u16| if ours { format!("dnat-{number}") } else { format!("x-{number}") };
            let mut seen = BTreeSet::new();
            let old = old.into_iter().filter(|(_, number, _)| seen.insert(*number));
            let old: Vec<_> = old.map(|(ours, number, target)| port(&named(ours, number), number, target)).collect();
            let change = changed(&old, &wanted);
            let others: Vec<_> = old.iter().filter(|port| !is_port_of_ours(port)).cloned().collect();
            prop_assert_eq!(&change.ports[..others.len()], &others[..]);
            let numbers: Vec<_> = change.ports.iter().filter_map(number).collect();
            let once: BTreeSet<_> = numbers.iter().copied().collect();
            prop_assert_eq!(once.len(), numbers.len());
            prop_assert!(wanted.keys().all(|port| once.contains(port)));
            let again = changed(&change.ports, &wanted);
            prop_assert!(again.added.is_empty() && again.removed.is_empty() && again.moved.is_empty());
        }
    }
}
