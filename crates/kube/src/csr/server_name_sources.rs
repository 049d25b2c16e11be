//! The lookup of names and addresses in the cluster; requester and approver use the same.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

use crate::cluster::Cluster;
use crate::csr::apiserver_names::ApiserverNames;
use crate::csr::error::{CsrError, with_timeout};
use crate::partial::{EDGE_LABELS, MAX_NODE_ADDRESSES, PartialNode, has_label};

/// Where to look up the names and addresses by which clients reach the servers.
///
/// The renewer requests a certificate for them, and the approver denies a server's request for any other name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerNameSources {
    /// Services in the servers' namespace.
    pub services: Vec<String>,
    /// Additional names and addresses.
    pub names: BTreeSet<String>,
}

impl ServerNameSources {
    /// Looks up the Services in the namespace of `cluster`. Sends no request if there are none. Returns all names and
    /// addresses, including loopback, in the form that certificates use, and the error that a Service does not exist.
    ///
    /// # Errors
    ///
    /// Fails if kube-apiserver does not answer or does not authorize the request.
    pub(crate) async fn look_up(
        &self,
        cluster: &Cluster,
    ) -> Result<(BTreeSet<String>, Option<CsrError>), CsrError> {
        let mut missing = None;
        let mut all = self.names.clone();
        all.extend(LOOPBACK.map(str::to_owned));
        if !self.services.is_empty() {
            let (client, namespace) = cluster.connect().await?;
            let api: Api<Service> = Api::namespaced(client.clone(), &namespace);
            let domain = cluster.domain().await;
            let mut nodes = None;
            for name in &self.services {
                let Some(service) = with_timeout(api.get_opt(name)).await? else {
                    missing.get_or_insert_with(|| CsrError::NoService(name.clone(), namespace.clone()));
                    continue;
                };
                // Nodes are listed only if a Service needs them, and once: there may be thousands.
                if is_node_port(&service) && nodes.is_none() {
                    let apiserver = ApiserverNames::look_up(cluster, &client).await?;
                    nodes = Some(reachable_names(client.clone(), &apiserver).await?);
                }
                add_service_names(&service, nodes.as_ref().unwrap_or(&BTreeSet::new()), &domain, &mut all);
            }
        }
        Ok((canonical(all), missing))
    }
}

/// Returns the names and addresses of all Nodes that are neither edges nor part of the control plane. Lists them in
/// pages.
///
/// # Errors
///
/// Fails if kube-apiserver does not answer or does not authorize the request.
async fn reachable_names(client: Client, apiserver: &ApiserverNames) -> Result<BTreeSet<String>, CsrError> {
    let api: Api<PartialNode> = Api::all(client);
    let mut names = BTreeSet::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let nodes = with_timeout(api.list(&page)).await?;
        nodes.items.iter().for_each(|node| add_names(node, apiserver, &mut names));
        page = match nodes.metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => page.continue_token(&next),
            None => return Ok(names),
        };
    }
}

/// Adds the names and addresses of a Node, unless it is an edge or part of the control plane. Its kubelet reports them,
/// so invalid names and those of kube-apiserver are skipped: one would make the whole request be denied.
fn add_names(node: &PartialNode, apiserver: &ApiserverNames, names: &mut BTreeSet<String>) {
    let is_control_plane = CONTROL_PLANE.iter().any(|key| node.labels().contains_key(*key));
    if is_control_plane || EDGE_LABELS.iter().any(|(label, value)| has_label(node, label, value)) {
        return;
    }
    let own = node.status.of_kinds(["InternalIP", "Hostname"]).take(MAX_NODE_ADDRESSES);
    let own = own.map(str::to_ascii_lowercase);
    names.extend(own.filter(|at| (at.parse::<IpAddr>().is_ok() || is_dns_name(at)) && !apiserver.is_at(at)));
}

/// Returns true if this is a DNS name in lower case without wildcard and trailing dot.
fn is_dns_name(text: &str) -> bool {
    let is_label = |label: &str| {
        let sound = label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        (1..=63).contains(&label.len()) && sound && !label.starts_with('-') && !label.ends_with('-')
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Labels of control plane Nodes, current and former.
const CONTROL_PLANE: [&str; 2] = ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];

/// Nodes per page of a list.
const PAGE: u32 = 100;

/// Adds the names and addresses of a Service: its names in the cluster (below `domain`), and its cluster, external and
/// load balancer addresses. For a NodePort also adds `nodes`, because its port is reachable there.
fn add_service_names(
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
fn is_node_port(service: &Service) -> bool {
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
const LOOPBACK: [&str; 3] = ["127.0.0.1", "::1", "localhost"];

/// YurtTunnel's annotation for the external address of a Service.
const EXTERNAL: &str = "x-tunnel-server-external-addr";

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    fn node(labels: &Value, name: &str, ips: &[&str]) -> Value {
        let mut addresses = vec![json!({"type": "ExternalIP", "address": "203.0.113.1"})];
        addresses.push(json!({"type": "Hostname", "address": name}));
        addresses.extend(ips.iter().map(|ip| json!({"type": "InternalIP", "address": ip})));
        json!({"metadata": {"name": name, "labels": labels}, "status": {"addresses": addresses}})
    }

    fn names(nodes: &[Value]) -> Vec<String> {
        let (mut names, apiserver) = (BTreeSet::new(), ApiserverNames::new(["10.96.0.1".to_owned()]));
        for node in nodes {
            add_names(&serde_json::from_value(node.clone()).unwrap(), &apiserver, &mut names);
        }
        names.into_iter().collect()
    }

    #[test]
    fn only_nodes_other_than_edges_and_control_planes_are_reachable() {
        let nodes = [
            node(&json!({"openyurt.io/is-edge-worker": "false"}), "cloud1", &["10.0.0.1"]),
            node(&json!({"openyurt.io/is-edge-worker": "true"}), "edge1", &["10.9.0.1"]),
            node(&json!({"superedge.io/node-edge": "enable"}), "edge2", &["10.9.0.2"]),
            node(&json!({"node-role.kubernetes.io/control-plane": ""}), "plane1", &["10.0.0.8"]),
            node(&json!({"node-role.kubernetes.io/master": "true"}), "plane2", &["10.0.0.9"]),
            node(&json!({}), "Cloud2.example.org", &["10.0.0.2", "fd00::2"]),
        ];
        assert_eq!(names(&nodes), ["10.0.0.1", "10.0.0.2", "cloud1", "cloud2.example.org", "fd00::2"]);
        assert!(names(&[json!({"metadata": {"name": "new"}})]).is_empty());
    }

    #[test]
    fn names_and_addresses_of_a_node_that_would_be_denied_are_skipped() {
        let long = "a".repeat(64);
        for odd in ["*.example.org", "kubernetes", "kubernetes.default.svc", "10.96.0.1", "::ffff:10.96.0.1"]
        {
            assert_eq!(names(&[node(&json!({}), odd, &[odd, "10.0.0.1"])]), ["10.0.0.1"], "{odd}");
        }
        for odd in ["", "a b", "a..b", "a.", "-a", "a-", "a:1", "a/b", "ü", "a@b", long.as_str()] {
            assert_eq!(names(&[node(&json!({}), odd, &[odd, "10.0.0.1"])]), ["10.0.0.1"], "{odd}");
        }
        let many: Vec<_> = (0..100).map(|n| format!("10.0.0.{n}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert_eq!(names(&[node(&json!({}), "a", &many)]).len(), MAX_NODE_ADDRESSES);
    }

    #[tokio::test]
    async fn all_pages_of_the_node_list_are_read() {
        let answer = async |request: Request<Body>| {
            let query = request.uri().query().unwrap_or_default();
            assert!(query.contains("limit=100"), "{query}");
            let (name, next) = if query.contains("continue=more") { ("b", "") } else { ("a", "more") };
            let page = json!({
                "kind": "NodeList", "apiVersion": "v1", "metadata": {"continue": next},
                "items": [node(&json!({}), name, &[])],
            });
            Ok::<_, Infallible>(Response::new(Body::from(page.to_string().into_bytes())))
        };
        let client = Client::new(tower::service_fn(answer), "n");
        let names = reachable_names(client, &ApiserverNames::default()).await.unwrap();
        assert_eq!(names, ["a", "b"].map(str::to_owned).into());
    }
}

#[cfg(test)]
mod names_tests {
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
