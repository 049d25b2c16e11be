//! Installations of the chart whose pods run: edges whose servers are outside of the cluster, and servers with
//! invitations, users and certificates of cert-manager.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::chart::{RELEASE, helm_of, write_secret};
use super::{Cluster, container};
use crate::enrol::run_tunnel;
use crate::kubernetes::{NAMESPACE, PODS};
use crate::parts::{cached_program, free_port, loopback};
use crate::process::{Running, TIMEOUT, run_command};
use crate::tunnel::{PROGRAM, TestDir, clear_environment};

/// Installs the chart with these values.
fn install(cluster: &Cluster, place: &TestDir, values: &Value) -> Option<()> {
    let program = cached_program("helm-4.3.1/helm")?;
    let file = place.config("values", &values.to_string());
    helm_of(RELEASE, &program, Some(cluster), place, "install", &["-f", file.to_str().unwrap()]);
    Some(())
}

/// Returns the command of a container, as the kubelet of the Node `node1` would run it, with its volumes below `root`.
/// `changed` is replaced in its config.
fn command(
    cluster: &Cluster,
    pod: &Value,
    container: &Value,
    root: &Path,
    changed: &[(&str, &str)],
) -> Command {
    let mut paths = Vec::new();
    for mount in container["volumeMounts"].as_array().unwrap() {
        let at = mount["mountPath"].as_str().unwrap();
        let volumes = pod["volumes"].as_array().unwrap();
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        let on_machine = volume["hostPath"]["path"].as_str().unwrap_or(at);
        let here = root.join(on_machine.trim_start_matches('/'));
        std::fs::create_dir_all(&here).unwrap();
        if let Some(name) = volume["secret"]["secretName"].as_str() {
            let (is_there, text) = cluster.try_kubectl(&["get", "secret", name, "-o", "json"]);
            assert!(is_there || volume["secret"]["optional"] == true, "{text}");
            if is_there {
                let secret: Value = serde_json::from_str(&text).unwrap();
                let keys: Vec<_> = secret["data"].as_object().unwrap().keys().map(String::as_str).collect();
                write_secret(cluster, RELEASE, name, &keys, &here);
            }
        }
        if let Some(name) = volume["configMap"]["name"].as_str() {
            let map = cluster.object("configmap", name);
            for (key, text) in map["data"].as_object().unwrap() {
                std::fs::write(here.join(key), text.as_str().unwrap()).unwrap();
            }
        }
        paths.push((at.to_owned(), here.display().to_string()));
    }
    let local = |text: &str| paths.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
    let config = local("/etc/tunnel/conf/mode.toml");
    if let Ok(text) = std::fs::read_to_string(&config) {
        let text = changed.iter().fold(local(&text), |text, (from, to)| {
            assert!(text.contains(from), "{from}: {text}");
            text.replace(from, to)
        });
        std::fs::write(&config, text).unwrap();
    }
    let mut command = clear_environment(Command::new(PROGRAM));
    command.args(container["args"].as_array().unwrap().iter().map(|arg| local(arg.as_str().unwrap())));
    for variable in container["env"].as_array().unwrap() {
        let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            None => variable["value"].as_str().unwrap().replace("$(KUBERNETES_NODE)", "node1"),
            Some("spec.nodeName") => "node1".to_owned(),
            Some("metadata.name") => "tunnel-cloud-0".to_owned(),
            Some("metadata.namespace") => NAMESPACE.to_owned(),
            Some(_) => "127.0.0.1".to_owned(),
        };
        command.env(variable["name"].as_str().unwrap(), local(&value));
    }
    command
}

/// A server on a machine outside of all clusters.
struct Outside {
    place: TestDir,
    config: String,
    grpc: u16,
    admin: u16,
    process: Running,
}

impl Outside {
    fn start() -> Self {
        let place = TestDir::new();
        let (_, table) = place.admin_socket("server");
        let [grpc, admin] = [(); 2].map(|()| free_port());
        let file = place.path().join("enrolled");
        let config = format!(
            "{}{table}[server.invitations]\nstore = \"file\"\nfile = {file:?}\n",
            place.cloud_config(loopback(grpc), admin)
        );
        let process = place.tunnel(("server", "outside"), &config, &[], &[]);
        Self { place, config, grpc, admin, process }
    }

    fn restart(&mut self) {
        self.process = self.place.tunnel(("server", "outside-again"), &self.config, &[], &[]);
    }

    /// Returns the join key for nodes with these names.
    fn key(&mut self, pattern: &str) -> String {
        self.process.wait_for_answer(self.admin, "/readyz", "");
        let socket = format!("--socket={}", self.place.admin_socket("server").0.display());
        let made =
            run_tunnel(&["invite", "--nodes", pattern, "--uses=9", "--expires=1d", "-o=json", &socket]);
        assert!(made.status.success(), "{made:?}");
        let made: Value = serde_json::from_str(&made.stdout).unwrap();
        made["code"].as_str().unwrap().to_owned()
    }
}

/// A small cluster in which the chart has installed only edges.
struct Site {
    cluster: Cluster,
    place: TestDir,
    name: &'static str,
}

impl Site {
    fn install(name: &'static str, outside: &mut Outside) -> Option<Self> {
        let (cluster, place) = (Cluster::new()?, TestDir::new());
        let key = outside.key(&format!("{name}-*"));
        let literal = format!("--from-literal=key={key}");
        assert!(cluster.try_kubectl(&["create", "secret", "generic", "join", &literal]).0);
        let values = json!({
            "cloud": {"enabled": false},
            "edge": {"server": format!("localhost:{}", outside.grpc), "adminPort": free_port(),
                "join": {"secret": "join", "prefix": format!("{name}-")}},
        });
        install(&cluster, &place, &values)?;
        Some(Self { cluster, place, name })
    }

    /// Starts a pod of the edge, once its init container has ended.
    fn pod(&self, attempt: &str) -> Running {
        let daemonset = self.cluster.object("daemonset", "tunnel-edge");
        let pod = &daemonset["spec"]["template"]["spec"];
        let init = &pod["initContainers"][0];
        let root = self.place.path().join(attempt);
        std::fs::create_dir_all(self.place.path().join("machine")).unwrap();
        // Only the machine's folder outlives a pod.
        std::fs::create_dir_all(root.join("var/lib")).unwrap();
        let machine = self.place.path().join("machine");
        std::os::unix::fs::symlink(machine, root.join("var/lib/tunnel-edge")).unwrap();
        let output =
            run_command("join", &mut command(&self.cluster, pod, init, &root, &[]), None, 3 * TIMEOUT);
        assert!(output.status.success(), "{output:?}");
        let mut edge = command(&self.cluster, pod, container(&daemonset), &root, &[]);
        Running::start(&format!("{}-{attempt}", self.name), self.place.path(), &mut edge)
    }
}

#[test]
fn edges_of_two_clusters_join_a_server_outside_and_start_again_without_key_or_server() {
    let mut outside = Outside::start();
    let sites = ["paris", "rome"].map(|name| Site::install(name, &mut outside));
    let [Some(paris), Some(rome)] = sites else { return };
    for kind in ["deployment", "service", "networkpolicy", "clusterrole"] {
        let (_, text) =
            paris.cluster.try_kubectl(&["get", kind, "-o", "name", "-l", "app.kubernetes.io/name=tunnel"]);
        assert_eq!(text, "", "{kind}");
    }
    let [mut in_paris, mut in_rome] = [&paris, &rome].map(|site| site.pod("first"));
    let admin = outside.admin;
    for node in ["paris-node1", "rome-node1"] {
        outside.process.wait_for_answer(admin, "/cloud/healthz", node);
    }
    let mut kept = std::fs::read_dir(paris.place.path().join("machine")).unwrap();
    assert!(kept.any(|file| file.unwrap().path().extension().is_some_and(|ending| ending == "last-good")));

    // The pod starts again while the server is away, and the key was deleted.
    assert!(paris.cluster.try_kubectl(&["delete", "secret", "join"]).0);
    outside.process.kill();
    in_paris.terminate();
    in_paris.wait_for_exit(TIMEOUT);
    let _again = paris.pod("again");
    outside.restart();
    for node in ["paris-node1", "rome-node1"] {
        outside.process.wait_for_answer(admin, "/cloud/healthz", node);
    }
    in_rome.assert_running();
}

#[test]
fn servers_of_the_chart_invite_people_and_machines_with_the_names_of_cert_manager() {
    let (Some(cluster), place) = (Cluster::new(), TestDir::serving(&["tunnel.cloud.io", "127.0.0.1"])) else {
        return;
    };
    for (name, file) in [("links-tls", "tls"), ("public-tls", "public")] {
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "kubernetes.io/tls",
            "stringData": {"tls.crt": read(&place.files.cert), "tls.key": read(&place.files.key), "ca.crt": read(&place.files.ca)}});
        let file = place.config(file, &secret.to_string());
        assert!(cluster.try_kubectl(&["create", "-f", file.to_str().unwrap()]).0);
    }
    let socket = place.path().join("server.sock");
    let values = json!({"cloud": {
        "tls": {"links": "links-tls", "clients": "public-tls"}, "invitations": {"enabled": true},
        "clients": {"enabled": true, "rules": [{"users": ["alice"], "nodes": ["*"], "ports": [22]}], "admins": ["alice"]},
        "moreConfig": format!("[server.admin]\nlisten = \"unix:{}\"\n", socket.display()),
    }});
    if install(&cluster, &place, &values).is_none() {
        return;
    }
    for secret in ["tunnel-cloud-cert", "tunnel-ca", "tunnel-egress-client"] {
        assert!(!cluster.try_kubectl(&["get", "secret", secret]).0, "{secret} would have another CA");
    }
    let [grpc, admin] = [(); 2].map(|()| free_port());
    let links = format!("\"127.0.0.1:{grpc}\"\nadmin_listen = \"127.0.0.1:{admin}\"");
    let others = [(); 4].map(|()| format!("\"127.0.0.1:{}\"", free_port()));
    let ports = ["6000", "8443", "8000", "8080"].map(|port| format!("\"[::]:{port}\""));
    let mut changed = vec![("\"[::]:9000\"", links.as_str())];
    changed.extend(ports.iter().zip(&others).map(|(from, to)| (from.as_str(), to.as_str())));
    let deployment = cluster.object("deployment", "tunnel-cloud");
    let pod = &deployment["spec"]["template"]["spec"];
    let mut server = command(&cluster, pod, container(&deployment), &place.path().join("pod"), &changed);
    server.arg(format!("--kubeconfig={}", cluster.kubernetes.kubeconfig_as(PODS).display()));
    let mut server = Running::start("server", place.path(), &mut server);
    server.wait_for_answer(admin, "/readyz", "");

    let socket = format!("--socket={}", socket.display());
    let invited = run_tunnel(&["invite", "--user", "alice", "-o=json", &socket]);
    assert!(invited.status.success(), "{invited:?}");
    let invited: Value = serde_json::from_str(&invited.stdout).unwrap();
    let secret = cluster.object("secret", "tunnel-invitations");
    assert!(secret["data"].is_object(), "{secret}");
    let may = |verb: &str, what: &str| cluster.lets(&["--as", PODS], verb, what);
    assert!(may("update", "secrets/tunnel-invitations") && !may("get", "secrets/tunnel-cloud-users"));
    let as_alice = |args: &[&str]| {
        let mut command = clear_environment(Command::new(PROGRAM));
        command.args(args).env("XDG_CONFIG_HOME", place.path()).env("XDG_RUNTIME_DIR", place.path());
        run_command("tunnel", &mut command, None, TIMEOUT)
    };
    let at = format!("127.0.0.1:{grpc}");
    let joined = as_alice(&["join", &at, "--user", "--invitation", invited["code"].as_str().unwrap()]);
    assert!(joined.status.success(), "{joined:?}");
    // Her link and her rule: one port is allowed, and there is no such node.
    let allowed = as_alice(&["connect", "node1:22"]);
    assert!(allowed.stderr.contains("not connected"), "{allowed:?}");
    let refused = as_alice(&["connect", "node1:23"]);
    assert!(refused.stderr.contains("alice"), "{refused:?}");
    server.assert_running();
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap()
}
