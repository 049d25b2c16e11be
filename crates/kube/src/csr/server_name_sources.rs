//! The lookup of names and addresses in the cluster; requester and approver use the same.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

use crate::cluster::Cluster;
use crate::csr::apiserver_names::ApiserverNames;
use crate::csr::error::{CsrError, with_timeout};
use crate::csr::names::{LOOPBACK, add_service_names, canonical, is_node_port};
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
