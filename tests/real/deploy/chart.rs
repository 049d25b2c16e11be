//! The Helm chart: without values it renders the same objects as the kustomize base, and with values what they set.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::core::v1::Node;
use serde_json::{Deserializer, Value, json};

use super::{Cluster, args, container, deploy, mounted};
use crate::kubernetes::NAMESPACE;
use crate::parts::{are_installed, cached_program, free_port};
use crate::process::{TIMEOUT, run, run_command};
use crate::tunnel::{PROGRAM, TOKEN, TestDir};

/// The chart's release in a test.
pub(super) const RELEASE: Release = Release { name: "tunnel", namespace: NAMESPACE };

/// A release, of which there may be several.
#[derive(Clone, Copy)]
pub(super) struct Release {
    pub(super) name: &'static str,
    pub(super) namespace: &'static str,
}

/// Runs helm on the chart, with or without a cluster.
fn helm(program: &Path, cluster: Option<&Cluster>, place: &TestDir, task: &str, more: &[&str]) -> String {
    helm_of(RELEASE, program, cluster, place, task, more)
}

/// Like [`helm`], but for any release.
pub(super) fn helm_of(
    release: Release,
    program: &Path,
    cluster: Option<&Cluster>,
    place: &TestDir,
    task: &str,
    more: &[&str],
) -> String {
    let mut command = Command::new(program);
    command.args([task, release.name]).args(["-n", release.namespace]);
    if task != "uninstall" {
        command.arg(deploy("helm/tunnel")).arg("-f").arg(place.config("required", REQUIRED));
    }
    command.args(more);
    // Keep helm's files out of the user's home directory.
    command.envs(["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"].map(|name| (name, place.path())));
    if let Some(cluster) = cluster {
        command.arg("--kubeconfig").arg(cluster.kubernetes.admin());
    }
    let output = run_command("helm", &mut command, None, 3 * TIMEOUT);
    assert!(output.status.success(), "{task}: {output:?}");
    output.stdout
}

/// The values without which the chart is not installed, with those of the base.
const REQUIRED: &str =
    r#"{"image": {"repository": "tunnel"}, "edge": {"server": "tunnel.example.org:9000"}}"#;

/// Returns the objects of these manifests, by kind and name.
pub(crate) fn objects_of(cluster: &Cluster, from: &str, manifests: &Path) -> BTreeMap<String, Value> {
    let args = ["create", "--dry-run=client", "-o", "json", from, manifests.to_str().unwrap()];
    let (is_well, text) = cluster.try_kubectl_anywhere(&args);
    assert!(is_well, "{text}");
    let found: Vec<Value> = Deserializer::from_str(&text).into_iter().map(Result::unwrap).collect();
    let lists = |one: Value| match one["items"].as_array() {
        Some(items) => items.clone(),
        None => vec![one],
    };
    let name = |one: &Value| format!("{} {}", one["kind"], one["metadata"]["name"]).replace('"', "");
    found.into_iter().flat_map(lists).map(|one| (name(&one), one)).collect()
}

/// Removes the labels and annotations that only Helm sets.
fn without_helm(object: &mut Value) {
    match object {
        Value::Object(fields) => {
            for name in ["helm.sh/chart", "app.kubernetes.io/managed-by", "checksum/config"] {
                fields.remove(name);
            }
            fields.values_mut().for_each(without_helm);
            if fields
                .get("annotations")
                .is_some_and(|notes| notes.as_object().is_some_and(|all| all.is_empty()))
            {
                fields.remove("annotations");
            }
        }
        Value::Array(items) => items.iter_mut().for_each(without_helm),
        _ => {}
    }
}

/// Returns the annotation that starts new pods for a new config.
fn checksum(chart: &BTreeMap<String, Value>, workload: &str) -> Value {
    chart[workload]["spec"]["template"]["metadata"]["annotations"]["checksum/config"].clone()
}

/// Fails the test if the program finds errors in the configs of server and edge that a chart with these values
/// contains.
fn checked(cluster: &Cluster, place: &TestDir, chart: &BTreeMap<String, Value>) {
    for (mode, name) in [("cloud", "site-cloud-conf"), ("edge", "site-edge-conf")] {
        let text = chart[&format!("ConfigMap {name}")]["data"]["mode.toml"].as_str().unwrap();
        let dir = place.path().join(mode);
        // Both are the same certificate here.
        let text = text.replace("/etc/tunnel/tls/clients/tls.", "/etc/tunnel/certs/cloud.");
        let text = text.replace("/etc/tunnel", dir.to_str().unwrap());
        let text = text.replace("/var/run/secrets/tunnel", &format!("{}/token", dir.display()));
        mounted(&dir, place, &text);
        let tokens = if mode == "cloud" { format!("node1:{TOKEN}") } else { TOKEN.to_owned() };
        std::fs::write(dir.join("token/token"), tokens).unwrap();
        let (config, k) = (dir.join("conf/mode.toml"), cluster.kubernetes.admin());
        let mut command = Command::new(PROGRAM);
        command.args(["config", "check"]).arg(&config);
        command.env("NODE_NAME", "node1").env("POD_IP", "10.9.9.9");
        command.arg(format!("--kubeconfig={}", k.display()));
        let output = run_command("tunnel", &mut command, None, TIMEOUT);
        assert!(output.status.success() && !output.stderr.contains("ERROR"), "{text}\n{output:?}");
    }
}

#[test]
fn the_chart_renders_the_objects_of_the_base_and_applies_its_values() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let (Some(cluster), place) = (Cluster::new(), TestDir::new()) else { return };
    let rendered = |name: &str, more: &[&str]| -> PathBuf {
        let file = place.path().join(name);
        // The chart puts the namespace in front of names that are those of the whole cluster.
        let text = helm(&program, None, &place, "template", more);
        std::fs::write(&file, text.replace(&format!("{NAMESPACE}-tunnel-"), "tunnel-")).unwrap();
        file
    };
    let mut base = objects_of(&cluster, "-k", &deploy("kustomize"));
    assert!(
        base.remove(&format!("Namespace {NAMESPACE}")).is_some(),
        "helm creates it with --create-namespace"
    );
    let mut chart = objects_of(&cluster, "-f", &rendered("chart.yaml", &[]));
    let image = &container(&chart["Deployment tunnel-cloud"])["image"];
    assert_eq!(image, &format!("tunnel:{}", env!("CARGO_PKG_VERSION")), "the tag of a release's image");
    assert!(chart.remove("Pod tunnel-test").is_some(), "only helm runs tests");
    assert_eq!(chart.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>());
    for (name, expected) in base {
        let mut made = chart.remove(&name).unwrap();
        without_helm(&mut made);
        assert!(made == expected, "{name}: the chart has\n{made:#}\nand the base\n{expected:#}");
    }

    helm(&program, Some(&cluster), &place, "install", &[]);
    assert_eq!(cluster.object("deployment", "tunnel-cloud")["spec"]["replicas"], 2);
    helm(&program, Some(&cluster), &place, "upgrade", &["--reuse-values", "--set", "cloud.replicas=3"]);
    assert_eq!(cluster.object("deployment", "tunnel-cloud")["spec"]["replicas"], 3);
    assert!(!cluster.try_kubectl(&["get", "hpa", "tunnel-cloud"]).0, "not asked for");
    let scaled = ["--reuse-values", "--set", "cloud.autoscaling.enabled=true"];
    helm(&program, Some(&cluster), &place, "upgrade", &scaled);
    assert_eq!(cluster.object("hpa", "tunnel-cloud")["spec"]["minReplicas"], 3);
    assert_eq!(cluster.port_for_ssh(), "", "closed by default");
    let networks = ["cloud.clientsService=NodePort", "cloud.clientNetworks={203.0.113.0/24}"];
    let networks = networks.map(|set| ["--set", set]).concat();
    helm(&program, Some(&cluster), &place, "upgrade", &[&["--reuse-values"], networks.as_slice()].concat());
    assert_ne!(cluster.port_for_ssh(), "");
    cluster.is_open_to_clients();

    let values = json!({
        "fullnameOverride": "site", "image": {"repository": "registry.example.org/tunnel", "tag": "9"},
        "imagePullSecrets": [{"name": "registry"}],
        "publisher": "etcd", "dns": "etcd.endpoints = [\"http://10.0.0.5:2379\"]\nzone = \"nodes.example.org\"",
        "cloud": {"hostNetwork": true, "sshPort": 2222, "certSecret": "a",
            "nodeSelector": {"zone": "a"}, "tolerations": [{"operator": "Exists"}], "podAnnotations": {"a": "b"},
            "podLabels": {"team": "edge", "app.kubernetes.io/name": "other"}, "priorityClassName": "system-cluster-critical",
            "serviceAccountAnnotations": {"role": "arn"}, "extraVolumes": [{"name": "ca", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}], "tls": {"clients": "public"},
            "affinity": {"podAntiAffinity": {}}, "extraEnv": [{"name": "A", "value": "b"}], "tokenSecret": "7", "usersSecret": "on",
            "resources": {"limits": {"memory": "1Gi"}}, "moreConfig": "[server.session]\nresume_timeout = \"50s\"\n"},
        "edge": {"hostNetwork": false, "adminPort": 9011, "certSecret": "c", "kubeconfig": "/of/an/earlier/chart", "targets": ["10.244.0.0/16:*"],
            "moreConfig": "[edge.http_proxy]\nlisten = \"127.0.0.1:3128\"\n"},
        "coredns": {"enabled": false}, "approver": {"enabled": true},
        "ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv4"],
    });
    let file = place.path().join("values.json");
    std::fs::write(&file, values.to_string()).unwrap();
    let chart = objects_of(&cluster, "-f", &rendered("site.yaml", &["-f", file.to_str().unwrap()]));
    let is_named = |name: &String| name.contains(" site-") || name.contains(&format!(" {NAMESPACE}-site-"));
    assert!(chart.keys().all(is_named), "{:?}", chart.keys());
    for kind in ["HorizontalPodAutoscaler site-cloud", "Deployment site-coredns"] {
        assert!(!chart.contains_key(kind), "{kind}");
    }
    let (cloud, edge) = (&chart["Deployment site-cloud"], &chart["DaemonSet site-edge"]);
    for workload in [cloud, edge] {
        assert_eq!(container(workload)["image"], "registry.example.org/tunnel:9");
    }
    let pod = |workload: &Value| workload["spec"]["template"]["spec"].clone();
    for workload in [cloud, edge, &chart["Deployment site-approver"]] {
        assert_eq!(pod(workload)["imagePullSecrets"], json!([{"name": "registry"}]));
    }
    let nodes = json!({"node-restriction.kubernetes.io/tunnel-server": "true", "zone": "a"});
    assert_eq!(pod(cloud)["nodeSelector"], nodes, "the label that servers need stays");
    assert_eq!(pod(cloud)["tolerations"], json!([{"operator": "Exists"}]));
    assert_eq!(pod(cloud)["affinity"], json!({"podAntiAffinity": {}}));
    assert_eq!(cloud["spec"]["template"]["metadata"]["annotations"]["a"], "b");
    assert!(container(cloud)["env"].as_array().unwrap().contains(&json!({"name": "A", "value": "b"})));
    let labels = &cloud["spec"]["template"]["metadata"]["labels"];
    assert_eq!(
        (&labels["team"], &labels["app.kubernetes.io/name"]),
        (&json!("edge"), &json!("tunnel")),
        "the selector's labels stay"
    );
    assert_eq!(pod(cloud)["priorityClassName"], "system-cluster-critical");
    assert_eq!(pod(edge)["priorityClassName"], "system-node-critical");
    assert_eq!(chart["ServiceAccount site-cloud"]["metadata"]["annotations"]["role"], "arn");
    for (list, expected) in [
        (&pod(cloud)["volumes"], "ca"),
        (&container(cloud)["volumeMounts"], "ca"),
        (&pod(cloud)["volumes"], "tls-clients"),
    ] {
        assert!(list.as_array().unwrap().iter().any(|one| one["name"] == expected), "{list}");
    }
    for name in ["site-cloud", "site-cloud-edges", "site-cloud-pods"] {
        let spec = &chart[&format!("Service {name}")]["spec"];
        assert_eq!(
            (&spec["ipFamilyPolicy"], &spec["ipFamilies"][0]),
            (&json!("PreferDualStack"), &json!("IPv4")),
            "{name}"
        );
    }
    assert_eq!(pod(cloud)["hostNetwork"], true);
    assert_eq!(pod(cloud)["volumes"][1]["secret"]["secretName"], "a");
    assert_eq!(pod(cloud)["volumes"][2]["secret"]["secretName"], "7", "as a text");
    assert_eq!(pod(cloud)["volumes"][3]["secret"]["secretName"], "on");
    assert_eq!(container(cloud)["resources"]["limits"]["memory"], "1Gi");
    let service = &chart["Service site-cloud"]["spec"]["ports"];
    assert!(service.as_array().unwrap().iter().any(|port| port["name"] == "ssh"), "{service}");
    let config = chart["ConfigMap site-cloud-conf"]["data"]["mode.toml"].to_string();
    assert!(config.contains(r#"plain_listen = \"[::]:2222\""#), "{config}");
    assert!(config.contains("/etc/tunnel/tls/clients/tls.key"), "{config}");
    assert_eq!(pod(edge)["hostNetwork"], Value::Null);
    assert_eq!(pod(edge)["dnsPolicy"], "Default");
    assert_eq!(container(edge)["readinessProbe"]["httpGet"], json!({"path": "/readyz", "port": 6000}));
    assert_eq!(pod(edge)["serviceAccountName"], "site-edge");
    let config = chart["ConfigMap site-cloud-conf"]["data"]["mode.toml"].to_string();
    assert!(config.contains(r#"name = \"site-edge\""#), "{config}");
    checked(&cluster, &place, &chart);

    // A new config starts new pods. A list that running programs read again does not.
    let sums = |values: &[&str]| {
        let chart = objects_of(&cluster, "-f", &rendered("sums.yaml", values));
        ["Deployment tunnel-cloud", "DaemonSet tunnel-edge"].map(|name| checksum(&chart, name))
    };
    let [cloud, edge] = sums(&[]);
    assert!(cloud.is_string() && edge.is_string() && cloud != edge);
    let lists = ["--set", "cloud.allowFrom={10.1.0.0/16}", "--set", "edge.targets={self:22}"];
    assert_eq!(sums(&lists), [cloud.clone(), edge.clone()]);
    let [new_cloud, new_edge] = sums(&["--set", "publisher=none", "--set", "edge.dns=other.example.org"]);
    assert!(new_cloud != cloud && new_edge != edge);
}

/// Each message names the value to set, and what to set it to.
#[test]
fn the_chart_refuses_what_would_not_work() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let place = TestDir::new();
    let chart = deploy("helm/tunnel").display().to_string();
    let try_with = |release: &str, namespace: &str, values: &Value| {
        let file = place.config("values", &values.to_string());
        let args = ["template", release, &chart, "-n", namespace, "-f", file.to_str().unwrap()];
        let output = run(program.to_str().unwrap(), &args, None, TIMEOUT);
        (output.status.success(), output.stderr)
    };
    let long = "a-namespace-of-which-the-name-is-as-long-as-it-may-be-here";
    for (release, namespace, expected) in [
        ("tunnel", NAMESPACE, ""),
        ("tunnel", long, "approver.namespace: set it to"),
        ("1st", NAMESPACE, "fullnameOverride: set it, such as to st-tunnel"),
        ("a.b", NAMESPACE, "fullnameOverride: set it, such as to a-b-tunnel"),
        (
            "tunnel-with-a-name-of-more-than-forty-letters",
            NAMESPACE,
            "such as to tunnel-with-a-name-of-more-than-forty-le,",
        ),
        ("tunnel", "1e3", "1e3: choose another name"),
    ] {
        let mut values: Value = serde_json::from_str(REQUIRED).unwrap();
        values["approver"]["enabled"] = true.into();
        let (is_well, text) = try_with(release, namespace, &values);
        assert!(is_well == expected.is_empty() && text.contains(expected), "{release} {namespace}: {text}");
    }
    for (at, value, expected) in [
        ("/image/repository", json!(""), "image.repository: set it to"),
        ("/edge/server", json!(""), "edge.server: set it to"),
        ("/edge/server", json!("tunnel.example.org"), "does not match pattern"),
        ("/edge/server", json!("https://tunnel.example.org:443"), "does not match pattern"),
        ("/cloud", json!({"enabled": false}), "edge.join.secret: set it to"),
        ("/cloud", json!({"replica": 3}), "additional properties 'replica' not allowed"),
        ("/cloud", json!({"hostNetwork": true, "sshPort": 22}), "set cloud.sshPort"),
        ("/cloud", json!({"tls": {"links": "own"}, "certSecret": "a"}), "edge.certSecret: set it to"),
        ("/edge/join", json!({"secret": "key"}), "edge.join.secret: set cloud.enabled=false"),
        ("/edge/join", json!({"prefix": "a-"}), "edge.join.prefix: set cloud.enabled=false"),
        (
            "/edge/nodeSelector",
            json!({"superedge.io/node-edge": null, "zone": "a"}),
            "add superedge.io/node-edge: enable",
        ),
        ("/image/tag", json!(1.1), "image.tag: quote it, as it must be a text and YAML reads a number"),
        (
            "/edge/podLabels",
            json!({"on": true}),
            "edge.podLabels.on: quote it, as it must be a text and YAML reads a boolean",
        ),
        ("/coredns", json!({"podAnnotations": {"a": 1}}), "coredns.podAnnotations.a: quote it"),
        ("/edge/extraEnv", json!([{"name": "A", "value": 1}]), "edge.extraEnv[0].value: quote it"),
        (
            "/cloud",
            json!({"tolerations": [{"key": "a", "value": true}]}),
            "cloud.tolerations[0].value: quote it, as it must be a text and YAML reads a boolean",
        ),
        (
            "/cloud",
            json!({"clients": {"rules": [{"nodes": [7]}]}}),
            "cloud.clients.rules[0].nodes.0: quote it",
        ),
        ("/prometheusRule", json!({"labels": {"release": 2}}), "prometheusRule.labels.release: quote it"),
    ] {
        let mut values: Value = serde_json::from_str(REQUIRED).unwrap();
        values["edge"]["certSecret"] = "own".into();
        let (parent, key) = at.rsplit_once('/').unwrap();
        values.pointer_mut(parent).unwrap()[key] = value;
        let (is_well, text) = try_with("tunnel", NAMESPACE, &values);
        assert!(!is_well && text.contains(expected), "{at}: {text}");
    }
}

#[test]
fn the_chart_names_the_node_label_that_servers_need() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let (Some(cluster), place) = (Cluster::new(), TestDir::new()) else { return };
    let line = "kubectl label node NODE node-restriction.kubernetes.io/tunnel-server=true";
    let notes = helm(&program, Some(&cluster), &place, "install", &[]);
    assert!(notes.contains(line), "{notes}");
    let labels = json!({"node-restriction.kubernetes.io/tunnel-server": "true"});
    cluster.kubernetes.apply_everywhere::<Node>(
        &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cloud1", "labels": labels}}),
    );
    let notes = helm(&program, Some(&cluster), &place, "upgrade", &[]);
    assert!(!notes.contains(line) && notes.contains("tunnel.cloud.io/client=true"), "{notes}");
}

/// Writes the files of a Secret into a folder.
pub(super) fn write_secret(cluster: &Cluster, release: Release, secret: &str, keys: &[&str], to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for key in keys {
        let template = format!("go-template={{{{index .data {key:?} | base64decode}}}}");
        let args = ["-n", release.namespace, "get", "secret", secret, "-o", &template];
        let (is_well, text) = cluster.try_kubectl_anywhere(&args);
        assert!(is_well, "{secret}: {text}");
        std::fs::write(to.join(key), text).unwrap();
    }
}

/// Returns the contents of all Secrets of the servers and edges of release `tunnel`.
fn secrets(cluster: &Cluster, release: Release) -> Value {
    let names = ["cloud-cert", "cloud-token", "cloud-users", "edge-cert", "ca", "egress-client"];
    let names = names.map(|name| format!("tunnel-{name}"));
    let names = names.iter().map(String::as_str);
    let get = ["-n", release.namespace, "get", "secret", "-o", "json"];
    let (is_well, text) = cluster.try_kubectl_anywhere(&get.into_iter().chain(names).collect::<Vec<_>>());
    assert!(is_well, "{text}");
    let list: Value = serde_json::from_str(&text).unwrap();
    list["items"].as_array().unwrap().iter().map(|one| one["data"].clone()).collect()
}

/// `helm install` alone makes the certificates and users that servers, edges and kube-apiserver need.
#[test]
fn the_chart_makes_its_secrets_and_an_upgrade_keeps_them() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let (Some(cluster), place) = (Cluster::new(), TestDir::new()) else { return };
    helm(&program, Some(&cluster), &place, "install", &[]);
    let made = secrets(&cluster, RELEASE);

    let config =
        cluster.object("configmap", "tunnel-cloud-conf")["data"]["mode.toml"].as_str().unwrap().to_owned();
    let dir = place.path().join("server");
    let config = config.replace("/etc/tunnel", dir.to_str().unwrap());
    std::fs::create_dir_all(dir.join("conf")).unwrap();
    std::fs::write(dir.join("conf/mode.toml"), config).unwrap();
    let keys = ["cloud.crt", "cloud.key", "ca.crt", "egress.crt", "egress.key"];
    write_secret(&cluster, RELEASE, "tunnel-cloud-cert", &keys, &dir.join("certs"));
    write_secret(&cluster, RELEASE, "tunnel-cloud-token", &["token"], &dir.join("token"));
    write_secret(&cluster, RELEASE, "tunnel-cloud-users", &["htpasswd"], &dir.join("auth"));
    let mut command = Command::new(PROGRAM);
    command.args(["config", "check"]).arg(dir.join("conf/mode.toml")).env("POD_IP", "10.9.9.9");
    command.arg(format!("--kubeconfig={}", cluster.kubernetes.admin().display()));
    let output = run_command("tunnel", &mut command, None, TIMEOUT);
    assert!(output.status.success() && !output.stderr.contains("ERROR"), "{output:?}");
    let client = place.path().join("client");
    let keys = ["ca.crt", "client.crt", "client.key", "egress-selector.yaml"];
    write_secret(&cluster, RELEASE, "tunnel-egress-client", &keys, &client);
    let names = run(
        "openssl",
        &[
            "x509",
            "-noout",
            "-subject",
            "-ext",
            "subjectAltName",
            "-in",
            client.join("client.crt").to_str().unwrap(),
        ],
        None,
        TIMEOUT,
    );
    // A certificate without a name is no server's.
    assert!(names.stdout.contains("system:kube-apiserver") && !names.stdout.contains("DNS:"), "{names:?}");
    let verified = run(
        "openssl",
        &[
            "verify",
            "-CAfile",
            client.join("ca.crt").to_str().unwrap(),
            dir.join("certs/cloud.crt").to_str().unwrap(),
        ],
        None,
        TIMEOUT,
    );
    assert!(verified.status.success(), "{verified:?}");

    // A token that an operator has added stays, too.
    let token = r#"{"data":{"token":"bm9kZTE6c2VjcmV0LXNlY3JldC1zZWNyZXQ="}}"#;
    assert!(cluster.try_kubectl(&["patch", "secret", "tunnel-cloud-token", "--type=merge", "-p", token]).0);
    let changed = secrets(&cluster, RELEASE);
    assert_ne!(changed, made);
    helm(&program, Some(&cluster), &place, "upgrade", &["--reuse-values", "--set", "cloud.replicas=3"]);
    assert_eq!(secrets(&cluster, RELEASE), changed);

    // Another name or address is signed by the same CA, and an address is no DNS name.
    let names = ["--reuse-values", "--set", "secrets.names={192.0.2.7,2001:db8::7,more.example.org}"];
    let mut last = None;
    for _ in 0..2 {
        helm(&program, Some(&cluster), &place, "upgrade", &names);
        write_secret(&cluster, RELEASE, "tunnel-cloud-cert", &["cloud.crt", "ca.crt"], &dir.join("certs"));
        let cert = dir.join("certs/cloud.crt");
        let ca = dir.join("certs/ca.crt");
        for address in ["192.0.2.7", "2001:db8::7"] {
            let verified = run(
                "openssl",
                &["verify", "-verify_ip", address, "-CAfile", ca.to_str().unwrap(), cert.to_str().unwrap()],
                None,
                TIMEOUT,
            );
            assert!(verified.status.success(), "{address}: {verified:?}");
        }
        let names = ["x509", "-noout", "-ext", "subjectAltName", "-in", cert.to_str().unwrap()];
        let names = run("openssl", &names, None, TIMEOUT).stdout;
        assert!(names.contains("DNS:more.example.org") && !names.contains("DNS:192"), "{names}");
        let signed = std::fs::read(&cert).unwrap();
        assert!(last.as_ref().is_none_or(|last| *last == signed), "the same names are signed once");
        last = Some(signed);
    }
}

#[test]
fn two_releases_share_nothing_and_a_secret_of_an_operator_stays() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let (Some(cluster), place) = (Cluster::new(), TestDir::new()) else { return };
    helm(&program, Some(&cluster), &place, "install", &[]);
    let (roles, first) =
        (["get", "clusterrole,clusterrolebinding", "-o", "name"], secrets(&cluster, RELEASE));
    let roles_of_first = cluster.try_kubectl(&roles).1;

    let own = ["create", "secret", "generic", "tunnel-cloud-users", "--from-literal=htpasswd=x"];
    assert!(cluster.try_kubectl_anywhere(&["create", "namespace", "other"]).0);
    assert!(cluster.try_kubectl_anywhere(&[&["-n", "other"], own.as_slice()].concat()).0);
    let same_name = Release { name: "tunnel", namespace: "other" };
    let same_namespace = Release { name: "second", namespace: NAMESPACE };
    for release in [same_name, same_namespace] {
        helm_of(release, &program, Some(&cluster), &place, "install", &[]);
    }
    let users = ["-n", "other", "get", "secret", "tunnel-cloud-users", "-o", "jsonpath={.data}"];
    assert_eq!(cluster.try_kubectl_anywhere(&users).1, r#"{"htpasswd":"eA=="}"#);
    for (kind, name) in [("deployment", "second-tunnel-cloud"), ("daemonset", "second-tunnel-edge")] {
        let workload = cluster.object(kind, name);
        let selector = &workload["spec"]["selector"]["matchLabels"];
        assert_eq!(selector["app.kubernetes.io/instance"], "second", "{name}");
    }
    for release in [same_name, same_namespace] {
        helm_of(release, &program, Some(&cluster), &place, "uninstall", &[]);
    }
    assert_eq!(cluster.try_kubectl(&roles).1, roles_of_first);
    let ca = ["-n", "other", "get", "secret", "tunnel-ca"];
    assert!(cluster.try_kubectl_anywhere(&ca).0, "an uninstallation must not lock out all edges");
    assert_eq!(secrets(&cluster, RELEASE), first);
}

/// kube-apiserver itself refuses pods with more rights next to the approver, and accepts the approver's.
#[test]
fn the_approver_has_a_namespace_with_restricted_pod_security() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let (Some(cluster), place) = (Cluster::new(), TestDir::new()) else { return };
    helm(&program, Some(&cluster), &place, "install", &["--set", "approver.enabled=true"]);
    let namespace = format!("{NAMESPACE}-tunnel-approver");
    let at = ["-n", namespace.as_str()];
    let get = ["get", "deployment", "tunnel-approver", "-o", "json"];
    let (is_well, text) = cluster.try_kubectl_anywhere(&[&at[..], &get].concat());
    assert!(is_well, "{text}");
    let approver: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(args(&approver)[1], format!("--service-account={NAMESPACE}:tunnel-cloud"));
    let pod = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut spec = approver["spec"]["template"]["spec"].clone();
        // Without a kube-controller-manager, only accounts that the chart creates exist, and they have no tokens.
        spec["automountServiceAccountToken"] = false.into();
        change(&mut spec);
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
        let file = place.path().join(name);
        std::fs::write(&file, pod.to_string()).unwrap();
        let create = ["create", "--dry-run=server", "-f", file.to_str().unwrap()];
        cluster.try_kubectl_anywhere(&[&at[..], &create].concat())
    };
    let (is_well, text) = pod("approver", &|_| {});
    assert!(is_well && !text.contains("Warning"), "{text}");
    let (is_well, text) = pod("other", &|spec| spec["hostNetwork"] = true.into());
    assert!(!is_well && text.contains("violates PodSecurity"), "{text}");
}

#[test]
fn the_chart_passes_a_strict_lint_and_has_the_objects_of_prometheus_operator() {
    let Some(program) = cached_program("helm-4.3.1/helm") else { return };
    let place = TestDir::new();
    let chart = deploy("helm/tunnel").display().to_string();
    let required = place.config("required", REQUIRED);
    let lint = ["lint", "--strict", &chart, "-f", required.to_str().unwrap()];
    let output = run(program.to_str().unwrap(), &lint, None, TIMEOUT);
    assert!(output.status.success(), "{output:?}");
    let kinds = ["ServiceMonitor", "PodMonitor", "PrometheusRule"].map(|kind| format!("kind: {kind}\n"));
    let text = helm(&program, None, &place, "template", &[]);
    assert!(kinds.iter().all(|kind| !text.contains(kind)), "only where they are asked for");
    let all = ["cloud.serviceMonitor", "edge.podMonitor", "prometheusRule"];
    let all = all.map(|name| format!("{name}.enabled=true"));
    let all: Vec<&str> = all.iter().flat_map(|set| ["--set", set.as_str()]).collect();
    let text = helm(&program, None, &place, "template", &all);
    assert!(kinds.iter().all(|kind| text.contains(kind)), "{text}");
    assert!(text.contains("metrics_listen"), "an edge must serve what the PodMonitor scrapes");
    let rules = |file: &str| std::fs::read_to_string(deploy(file)).unwrap();
    let expected = rules("monitoring/alerts.yaml");
    assert_eq!(rules("helm/tunnel/files/alerts.yaml"), expected, "copy deploy/monitoring/alerts.yaml there");
}

/// Runs the script of the test's pod with the nc of busybox, as in its image, on ports of this machine.
#[test]
fn the_test_of_the_chart_fails_unless_all_ports_answer() {
    if !are_installed(&["busybox"]) {
        return;
    }
    let place = TestDir::new();
    let links = "ln -s \"$(command -v busybox)\" nc; ln -s nc timeout; ln -s /bin/true sleep";
    let reach = |targets: &[u16]| {
        let mut command = Command::new(deploy("helm/tunnel/files/reach.sh"));
        command.env("PATH", format!("{}:/usr/bin:/bin", place.path().display()));
        command.args(targets.iter().map(|port| format!("127.0.0.1:{port}")));
        run_command("reach.sh", &mut command, None, TIMEOUT)
    };
    assert!(
        run_command("sh", Command::new("sh").args(["-c", links]).current_dir(place.path()), None, TIMEOUT)
            .status
            .success()
    );
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let open = listener.local_addr().unwrap().port();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let output = reach(&[open, open]);
    assert!(output.status.success(), "{output:?}");
    let output = reach(&[open, free_port()]);
    assert!(!output.status.success() && output.stderr.contains("does not answer"), "{output:?}");
}
