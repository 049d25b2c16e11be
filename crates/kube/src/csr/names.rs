//! Names and addresses of a server's listeners, which its certificate contains.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;

/// Adds the names and addresses of a Service: its names in the cluster (below `domain`), and its cluster, external and
/// load balancer addresses. For a NodePort also adds `nodes`, because its port is reachable there.
pub(crate) fn add_service_names(
    service: &Service,
    nodes: &BTreeSet<String>,
    domain: &str,
    names: &mut BTreeSet<String>,
) {
    let metadata = &service.metadata;
    if let (Some(name), Some(namespace)) = (&metadata.name, &metadata.namespace) {
        let short = format!("{name}.{namespace}");
        names.extend([name.clone(), format!("{short}.svc.{domain}"), format!("{short}.svc"), short]);
    }
    let spec = service.spec.as_ref();
    let own = spec.and_then(|spec| spec.cluster_ips.clone()).unwrap_or_default();
    let outer = spec.and_then(|spec| spec.external_ips.clone()).unwrap_or_default();
    let ingress = service.status.as_ref().and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
    let balancers =
        ingress.into_iter().flatten().flat_map(|at| [at.ip.clone(), at.hostname.clone()]).flatten();
    // A headless Service has "None" as its address.
    let addresses = own.into_iter().chain(outer).filter(|ip| ip.parse::<IpAddr>().is_ok());
    let annotations = metadata.annotations.as_ref();
    let annotated = annotations.and_then(|all| all.get(EXTERNAL)).and_then(|at| host(at));
    names.extend(addresses.chain(balancers.chain(annotated).filter(|name| is_external(name, domain))));
    if is_node_port(service) {
        names.extend(nodes.iter().cloned());
    }
}

/// Returns the names with each address in the form that certificates use, for comparison.
pub(crate) fn canonical(names: BTreeSet<String>) -> BTreeSet<String> {
    let same = |name: String| name.parse::<IpAddr>().map_or(name, |ip| ip.to_string());
    names.into_iter().map(same).collect()
}

/// Returns true if the Service is also reachable at its nodes.
pub(crate) fn is_node_port(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.type_.as_deref()) == Some("NodePort")
}

/// Returns true if this is an address, or may be a name outside of the cluster. Otherwise anyone who can write a
/// Service's annotation could obtain a certificate for another Service's name.
fn is_external(name: &str, domain: &str) -> bool {
    if name.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = name.to_ascii_lowercase();
    // The search domains of a pod's resolver complete `web`, `web.shop` and `web.shop.svc` to names of Services. The
    // same names may end with a dot.
    let is_whole = name.split('.').all(|label| !label.is_empty());
    let is_short = name.split('.').count() < 3 || name.ends_with(".svc");
    let in_domain = name.strip_suffix(domain).is_some_and(|name| name.ends_with('.'));
    is_whole && !is_short && !in_domain
}

/// Returns the host of `host:port` or of a bare host.
fn host(at: &str) -> Option<String> {
    let at = at.trim();
    let host = match at.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() && at.parse::<IpAddr>().is_err() => host,
        _ => at,
    };
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    (!bare.is_empty()).then(|| bare.to_owned())
}

/// Loopback names and addresses, which every server's certificate contains.
pub(crate) const LOOPBACK: [&str; 3] = ["127.0.0.1", "::1", "localhost"];

/// YurtTunnel's annotation for the external address of a Service.
const EXTERNAL: &str = "x-tunnel-server-external-addr";

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn names(service: &Value, nodes: &[&str]) -> Vec<String> {
        let mut names = BTreeSet::new();
        let nodes = nodes.iter().map(|name| (*name).to_owned()).collect();
        add_service_names(
            &serde_json::from_value(service.clone()).unwrap(),
            &nodes,
            "cluster.local",
            &mut names,
        );
        names.into_iter().collect()
    }

    fn service(spec: &Value, ingress: &Value, external: &str) -> Value {
        let mut service = json!({
            "metadata": {"name": "s", "namespace": "n", "annotations": {}},
            "spec": spec, "status": {"loadBalancer": {"ingress": ingress}},
        });
        if !external.is_empty() {
            service["metadata"]["annotations"][EXTERNAL] = external.into();
        }
        service
    }

    const OWN: [&str; 4] = ["s", "s.n", "s.n.svc", "s.n.svc.cluster.local"];

    fn with(more: &[&str]) -> Vec<String> {
        let all: BTreeSet<_> = OWN.iter().chain(more).map(|name| (*name).to_owned()).collect();
        all.into_iter().collect()
    }

    #[test]
    fn a_service_is_reachable_by_its_names_addresses_and_load_balancers() {
        let cluster = service(
            &json!({"clusterIPs": ["10.96.0.9", "fd00::9"], "externalIPs": ["192.0.2.9"]}),
            &json!([]),
            "",
        );
        assert_eq!(names(&cluster, &[]), with(&["10.96.0.9", "fd00::9", "192.0.2.9"]));
        let headless = service(&json!({"clusterIPs": ["None"]}), &json!([]), "");
        assert_eq!(names(&headless, &[]), with(&[]));
        let balanced = service(
            &json!({"type": "LoadBalancer"}),
            &json!([{"ip": "203.0.113.7"}, {"hostname": "lb.example.org"}]),
            "",
        );
        assert_eq!(names(&balanced, &[]), with(&["203.0.113.7", "lb.example.org"]));
    }

    #[test]
    fn addresses_are_written_in_canonical_form() {
        let written = BTreeSet::from(["fd00:0:0::9", "10.0.0.1", "a.b"].map(str::to_owned));
        assert_eq!(canonical(written), ["10.0.0.1", "a.b", "fd00::9"].map(str::to_owned).into());
    }

    #[test]
    fn an_annotation_adds_the_external_host() {
        for (external, host) in [
            ("203.0.113.8:10262", "203.0.113.8"),
            ("tunnel.example.org:443", "tunnel.example.org"),
            ("tunnel.example.org", "tunnel.example.org"),
            ("[2001:db8::8]:10262", "2001:db8::8"),
            ("2001:db8::8", "2001:db8::8"),
        ] {
            let annotated = service(&json!({"type": "ClusterIP"}), &json!([]), external);
            assert_eq!(names(&annotated, &[]), with(&[host]), "{external}");
        }
        assert_eq!((host(""), host(":10262")), (None, None));
    }

    #[test]
    fn annotations_and_load_balancers_cannot_add_names_of_other_services() {
        for inside in [
            "",
            "web",
            "web.shop",
            "WEB.Shop",
            "web.shop.svc",
            "WEB.shop.SVC",
            "web.shop.svc.cluster.local",
            "a.cluster.local",
            "web.",
            "web.shop.",
            "web.shop.svc.",
            "web.shop.svc.cluster.local.",
            "tunnel.example.org.",
            "tunnel..example.org",
            ".example.org",
        ] {
            let annotated = service(
                &json!({"type": "ClusterIP"}),
                &json!([{"hostname": inside}]),
                &format!("{inside}:443"),
            );
            assert_eq!(names(&annotated, &[]), with(&[]), "{inside}");
        }
    }

    #[test]
    fn a_service_has_its_name_in_the_cluster_domain() {
        let (mut names, of) = (BTreeSet::new(), service(&json!({}), &json!([]), "a.cluster.local"));
        add_service_names(
            &serde_json::from_value(of).unwrap(),
            &BTreeSet::new(),
            "k8s.example.org",
            &mut names,
        );
        assert!(names.contains("s.n.svc.k8s.example.org") && names.contains("a.cluster.local"), "{names:?}");
        assert_eq!(names.len(), 5);
    }

    #[test]
    fn a_node_port_service_is_reachable_at_nodes() {
        let nodes = ["cloud1", "10.0.0.1"];
        let port = service(&json!({"type": "NodePort"}), &json!([]), "");
        assert_eq!(names(&port, &nodes), with(&nodes));
        let none = service(&json!({"type": "ClusterIP"}), &json!([]), "");
        assert_eq!(names(&none, &nodes), with(&[]));
    }
}
