//! The permissions of the accounts that request and approve certificates, and a server that intercepts by address.

use serde_json::{Deserializer, Value};

use super::{Cluster, container, deploy, overlay};
use crate::process::TIMEOUT;
use crate::wait::wait_until;

/// Applies a folder of `deploy`.
fn applied(cluster: &Cluster, folder: &str) {
    let folder = deploy(folder);
    wait_until("all objects are accepted", 3 * TIMEOUT, || {
        cluster.try_kubectl_anywhere(&["apply", "-k", folder.to_str().unwrap()]).0
    });
}

/// Waits until an account (NAMESPACE:NAME) has these rights in that namespace, or has not.
fn can(cluster: &Cluster, namespace: &str, account: &str, rights: &[(&str, &str)], expected: bool) {
    let user_flags = format!("--as=system:serviceaccount:{account}");
    // kube-apiserver learns of new roles with a short delay.
    for (verb, what) in rights {
        wait_until(&format!("{account} of {namespace}: {verb} {what}: {expected}"), TIMEOUT, || {
            cluster.lets(&["-n", namespace, &user_flags], verb, what) == expected
        });
    }
}

/// The approver's account. Its namespace is not that of the servers.
const APPROVER: &str = "tunnel-approver:tunnel-approver";

const CSRS: &str = "certificatesigningrequests.certificates.k8s.io";

/// kubectl cannot report for which signers an account may approve: the tests of `csr` use these roles.
#[test]
fn requesters_and_approvers_of_certificates_may_do_nothing_else() {
    let Some(cluster) = Cluster::new() else { return };
    for (folder, namespace) in [("kustomize/csr", "edge-system"), ("kustomize/yurttunnel/csr", "kube-system")]
    {
        applied(&cluster, folder);
        let servers = format!("{namespace}:tunnel-cloud");
        let approval = format!("{CSRS}:approval");
        let approver = [
            ("list", CSRS),
            ("watch", CSRS),
            ("patch", &approval),
            ("get", "nodes"),
            ("list", "nodes"),
            ("get", "services"),
        ];
        can(&cluster, namespace, APPROVER, &approver, true);
        can(&cluster, "default", APPROVER, &[("get", "services")], false);
        let none = [("create", CSRS), ("get", "secrets"), ("create", "pods"), ("update", "services")];
        can(&cluster, namespace, APPROVER, &none, false);
        let pods =
            [("create", CSRS), ("get", CSRS), ("list", "nodes"), ("watch", "nodes"), ("get", "services")];
        can(&cluster, namespace, &servers, &pods, true);
        let none = [
            ("list", CSRS),
            ("patch", &approval),
            ("get", "nodes:proxy"),
            ("update", "nodes"),
            ("get", "secrets"),
        ];
        can(&cluster, namespace, &servers, &none, false);
    }
    let of_kubernetes = ["services/kubernetes", "endpointslices.discovery.k8s.io/kubernetes"];
    for account in [APPROVER, "kube-system:tunnel-cloud"] {
        let user_flags = format!("--as=system:serviceaccount:{account}");
        for what in of_kubernetes {
            assert!(cluster.lets(&["-n", "default", &user_flags], "get", what), "{account}: {what}");
        }
    }
    // Only the user of the proxy client may use kubelets; the group, which edges are in as well, may not.
    let of_group = ["--as=edge", "--as-group=openyurt:yurttunnel", "--as-group=system:authenticated"];
    for (user_flags, expected) in [(&["--as=tunnel-proxy-client"][..], true), (&of_group, false)] {
        for (verb, what) in [("create", "nodes:proxy"), ("get", "nodes:metrics")] {
            assert_eq!(cluster.lets(user_flags, verb, what), expected, "{user_flags:?} {what}");
        }
    }
}

/// Applies the overlay from the component's comment.
#[test]
fn the_documented_overlay_for_intercepting_servers_is_accepted() {
    let Some(cluster) = Cluster::with_base() else { return };
    let place = tempfile::tempdir().unwrap();
    let site = overlay(place.path(), "intercept");
    let dry = ["apply", "--dry-run=server", "-k", site.to_str().unwrap()];
    let (is_well, output) = cluster.try_kubectl(&dry);
    assert!(is_well && output.contains("deployment.apps/tunnel-cloud configured"), "{output}");
    let (is_well, text) = cluster.try_kubectl(&[&dry[..], &["-o", "json"]].concat());
    assert!(is_well, "{text}");
    // The JSON is followed by kubectl's warnings.
    let made: Value = Deserializer::from_str(&text).into_iter().next().unwrap().unwrap();
    let items = made["items"].as_array().unwrap();
    let cloud =
        items.iter().find(|one| one["kind"] == "Deployment" && one["metadata"]["name"] == "tunnel-cloud");
    let cloud = cloud.unwrap();
    let pod = &cloud["spec"]["template"]["spec"];
    assert_eq!((&pod["hostNetwork"], &pod["securityContext"]["runAsUser"]), (&true.into(), &0.into()));
    let added = container(cloud)["securityContext"]["capabilities"]["add"].as_array().unwrap();
    assert!(added.contains(&"NET_ADMIN".into()), "{added:?}");
    let ports = container(cloud)["ports"].as_array().unwrap();
    assert!(
        ports.iter().all(|port| port["containerPort"].as_u64().unwrap() > 1023),
        "the host's sshd uses port 22: {ports:?}"
    );
}

/// Only the component has an autoscaler, and then nothing else sets the number of pods.
#[test]
fn servers_are_scaled_only_with_the_component_for_it() {
    let Some(cluster) = Cluster::with_base() else { return };
    assert!(!cluster.try_kubectl(&["get", "hpa", "tunnel-cloud"]).0);
    let place = tempfile::tempdir().unwrap();
    let site = overlay(place.path(), "autoscale");
    assert!(cluster.try_kubectl(&["apply", "-k", site.to_str().unwrap()]).0);
    assert_eq!(cluster.object("hpa", "tunnel-cloud")["spec"]["minReplicas"], 2);
    let (_, text) = cluster.try_kubectl(&["kustomize", site.to_str().unwrap()]);
    let servers = text
        .split("---\n")
        .find(|one| one.contains("kind: Deployment") && one.contains("\n  name: tunnel-cloud\n"));
    assert!(!servers.unwrap().contains("replicas:"), "{text}");
}

#[test]
fn the_components_for_invitations_and_cert_manager_are_accepted_and_give_what_they_are_for() {
    let Some(cluster) = Cluster::with_base() else { return };
    let with = |component: &str| {
        let place = tempfile::tempdir().unwrap();
        let site = overlay(place.path(), component);
        let (is_well, text) = cluster.try_kubectl(&["apply", "-k", site.to_str().unwrap()]);
        assert!(is_well, "{text}");
    };
    with("invitations");
    let account = "edge-system:tunnel-cloud";
    let rights = [("update", "secrets/tunnel-invitations"), ("create", "secrets")];
    can(&cluster, "edge-system", account, &rights, true);
    can(&cluster, "edge-system", account, &[("get", "secrets/other"), ("list", "secrets")], false);
    with("cert-manager");
    let pod = cluster.object("deployment", "tunnel-cloud")["spec"]["template"]["spec"].clone();
    let certs = pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == "certs").unwrap();
    let items = certs["secret"]["items"].as_array().unwrap();
    let paths: Vec<_> = items.iter().map(|item| &item["path"]).collect();
    assert_eq!(paths, ["cloud.crt", "cloud.key", "egress.crt", "egress.key", "ca.crt"]);
    assert_eq!(certs["secret"]["secretName"], "tunnel-cloud-tls");
}
