//! A kube-apiserver with its etcd, and with a namespace and a role for the tunnel's servers.

use std::future::Future;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::apiserver::acts_as;
pub(crate) use crate::apiserver::{NAMESPACE, PODS};
use crate::certificates::Authority;
use crate::parts::{cached_program, free_port, loopback};
use crate::process::{Running, TIMEOUT};
use crate::publish::Etcd;
use crate::tunnel::TestDir;
use crate::wait::wait_until;

/// The Service with the servers' endpoints.
pub(crate) const SERVICE: &str = "tunnel-cloud";

/// A kube-apiserver.
pub(crate) struct Kubernetes {
    // Fields drop in order: kube-apiserver before its etcd, both before their files.
    pub(crate) apiserver: Running,
    _etcd: Etcd,
    program: PathBuf,
    etcd_url: String,
    port: u16,
    place: TestDir,
    runtime: Runtime,
    admin: Client,
}

impl Kubernetes {
    /// Starts it. Returns `None` if its programs are not installed.
    pub(crate) fn start() -> Option<Self> {
        let (etcd, program) =
            (cached_program("etcd-3.6.16/etcd")?, cached_program("kubernetes-1.36.3/kube-apiserver")?);
        let (place, port) = (TestDir::new(), free_port());
        let etcd = Etcd::start(&place, &etcd, false);
        let etcd_url = etcd.url.clone();
        let apiserver = apiserver(&place, &program, &etcd_url, port);
        let runtime = Runtime::new().unwrap();
        let admin = runtime.block_on(client(&place.path().join("admin")));
        let mut new = Self { apiserver, _etcd: etcd, program, etcd_url, port, place, runtime, admin };
        new.is_ready();
        new.grant();
        Some(new)
    }

    /// Returns the kubeconfig of the tunnel's servers, with exactly the permissions that the documentation lists.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.place.path().join("pod")
    }

    /// Returns the kubeconfig of the administrator.
    pub(crate) fn admin(&self) -> PathBuf {
        self.place.path().join("admin")
    }

    /// Returns the kubeconfig of a service account.
    pub(crate) fn kubeconfig_as(&self, account: &str) -> PathBuf {
        acts_as(&self.place, account)
    }

    /// Starts a kube-controller-manager with these controllers. Returns `None` if it is not installed.
    pub(crate) fn manager(&self, controllers: &str) -> Option<Running> {
        let command = Command::new(cached_program("kubernetes-1.36.3/kube-controller-manager")?);
        let mut command = crate::apiserver::manager(command, &self.place, free_port(), controllers);
        Some(Running::start("controller-manager", self.place.path(), &mut command))
    }

    /// Runs a task concurrently with the test.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    /// Returns the files that it was started with. It trusts client certificates of their CA.
    pub(crate) fn place(&self) -> &TestDir {
        &self.place
    }

    /// Returns a client that uses that kubeconfig.
    pub(crate) fn client(&self, kubeconfig: &Path) -> Client {
        self.run(client(kubeconfig))
    }

    pub(crate) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    pub(crate) fn stop(&mut self) {
        self.apiserver.kill();
    }

    pub(crate) fn restart(&mut self) {
        self.apiserver = apiserver(&self.place, &self.program, &self.etcd_url, self.port);
        self.is_ready();
    }

    /// Returns the hosts of a ConfigMap in the test's namespace. Returns `None` if there is no such ConfigMap.
    pub(crate) fn hosts(&self, name: &str) -> Option<String> {
        let maps: Api<ConfigMap> = Api::namespaced(self.admin.clone(), NAMESPACE);
        let map = self.run(maps.get_opt(name)).unwrap()?;
        Some(map.data.unwrap_or_default().remove("hosts").unwrap_or_default())
    }

    /// Creates or changes an object in the test's namespace.
    pub(crate) fn apply<K>(&self, object: &Value)
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let api: Api<K> = Api::namespaced(self.admin.clone(), NAMESPACE);
        let name = object["metadata"]["name"].as_str().unwrap();
        self.does(name, async || {
            api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(object)).await
        });
    }

    /// Like [`Self::apply`], but for an object without a namespace.
    pub(crate) fn apply_everywhere<K>(&self, object: &Value)
    where
        K: kube::Resource<Scope = k8s_openapi::ClusterResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let api: Api<K> = Api::all(self.admin.clone());
        let name = object["metadata"]["name"].as_str().unwrap();
        self.does(name, async || {
            api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(object)).await
        });
    }

    /// Returns an object in the test's namespace. Returns `None` if there is none of that name.
    pub(crate) fn object<K>(&self, name: &str) -> Option<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        self.run(Api::<K>::namespaced(self.admin.clone(), NAMESPACE).get_opt(name)).unwrap()
    }

    /// Deletes an object in the test's namespace.
    pub(crate) fn delete<K>(&self, name: &str)
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let api = Api::<K>::namespaced(self.admin.clone(), NAMESPACE);
        self.run(api.delete(name, &DeleteParams::default())).unwrap();
    }

    /// Deletes an object without a namespace.
    pub(crate) fn delete_everywhere<K>(&self, name: &str)
    where
        K: kube::Resource<Scope = k8s_openapi::ClusterResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let api = Api::<K>::all(self.admin.clone());
        self.run(api.delete(name, &DeleteParams::default())).unwrap();
    }

    /// Merges `status` into a Node's status.
    pub(crate) fn set_node_status(&self, name: &str, status: &Value) {
        let nodes: Api<Node> = Api::all(self.admin.clone());
        let status = Patch::Merge(json!({"status": status}));
        self.does(name, async || nodes.patch_status(name, &PatchParams::default(), &status).await);
    }

    /// Merges `status` into a pod's status.
    pub(crate) fn set_pod_status(&self, name: &str, status: &Value) {
        let pods: Api<Pod> = Api::namespaced(self.admin.clone(), NAMESPACE);
        let status = Patch::Merge(json!({"status": status}));
        self.does(name, async || pods.patch_status(name, &PatchParams::default(), &status).await);
    }

    /// Creates these numbers of objects: pods as large as in real clusters, each with an address and a node, and
    /// endpoints for each Service.
    pub(crate) async fn fill(&self, pods: usize, nodes: usize, services: usize) {
        use futures_util::StreamExt as _;
        let ip = |n: usize| format!("10.{}.{}.{}", 128 + n / 65_536, n / 256 % 256, n % 256);
        let padding = "a value as annotations and variables have it ".repeat(20);
        let note = |n: usize| {
            (0..8)
                .map(|i| (format!("example.org/note-{i}"), json!(format!("{n} {padding}"))))
                .collect::<serde_json::Map<_, _>>()
        };
        let namespaced = format!("/api/v1/namespaces/{NAMESPACE}");
        let mut work = Vec::new();
        for n in 0..nodes {
            let node = json!({"metadata": {"name": format!("node-{n}")}});
            let status =
                json!({"status": {"addresses": [{"type": "InternalIP", "address": ip(1_000_000 + n)}]}});
            work.push(("/api/v1/nodes".to_owned(), format!("node-{n}"), node, Some(status)));
        }
        for n in 0..services {
            let cluster_ip = if n < 200 { json!(format!("10.96.0.{}", n + 20)) } else { json!("None") };
            let service = json!({"metadata": {"name": format!("service-{n}")},
                "spec": {"clusterIP": cluster_ip, "ports": [{"name": "http", "port": 80}]}});
            work.push((format!("{namespaced}/services"), format!("service-{n}"), service, None));
            let endpoint =
                |i: usize| json!({"addresses": [ip(n * 10 + i)], "nodeName": format!("node-{}", n % nodes)});
            let slice = json!({"metadata": {"name": format!("service-{n}-a"), "labels": {"kubernetes.io/service-name": format!("service-{n}")}},
                "addressType": "IPv4", "ports": [{"name": "http", "port": 8080}], "endpoints": (0..10).map(endpoint).collect::<Vec<_>>()});
            work.push((
                format!("/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"),
                format!("service-{n}-a"),
                slice,
                None,
            ));
        }
        for n in 0..pods {
            let pod = json!({"metadata": {"name": format!("pod-{n}"), "annotations": note(n)},
                "spec": {"nodeName": format!("node-{}", n % nodes), "containers": [{"name": "c", "image": "none"}]}});
            let status = json!({"status": {"phase": "Running", "podIP": ip(n), "podIPs": [{"ip": ip(n)}]}});
            work.push((format!("{namespaced}/pods"), format!("pod-{n}"), pod, Some(status)));
        }
        let admin = &self.admin;
        futures_util::stream::iter(work)
            .for_each_concurrent(32, |(path, name, object, status)| async move {
                let post = http::Request::post(&path).header("content-type", "application/json");
                admin.request_text(post.body(object.to_string().into_bytes()).unwrap()).await.unwrap();
                if let Some(status) = status {
                    let patch = http::Request::patch(format!("{path}/{name}/status"));
                    let patch = patch.header("content-type", "application/merge-patch+json");
                    admin.request_text(patch.body(status.to_string().into_bytes()).unwrap()).await.unwrap();
                }
            })
            .await;
    }

    /// Sets the endpoints of a slice of the Service; each is ready or not.
    pub(crate) fn endpoints(&self, slice: &str, endpoints: &[(&str, bool)]) {
        let endpoint =
            |(ip, ready): &(&str, bool)| json!({"addresses": [ip], "conditions": {"ready": ready}});
        self.apply::<EndpointSlice>(&json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": slice, "labels": {"kubernetes.io/service-name": SERVICE}},
            "endpoints": endpoints.iter().map(endpoint).collect::<Vec<_>>(),
        }));
    }

    pub(crate) fn delete_slice(&self, slice: &str) {
        let slices: Api<EndpointSlice> = Api::namespaced(self.admin.clone(), NAMESPACE);
        self.run(slices.delete(slice, &DeleteParams::default())).unwrap();
    }

    /// Writes an object, repeatedly: just after its start, kube-apiserver refuses some objects for a moment.
    fn does<T>(&self, name: &str, write: impl AsyncFn() -> kube::Result<T>) {
        wait_until(&format!("{name} is written"), 3 * TIMEOUT, || match self.run(write()) {
            Ok(_) => true,
            Err(why) => {
                let _ = writeln!(std::io::stderr(), "{name}: {why}");
                false
            }
        });
    }

    /// Returns the number of writes of ConfigMaps that it has refused because of a conflict.
    pub(crate) fn conflicts(&self) -> u64 {
        let text = self.raw("/metrics").unwrap();
        let of_puts = |line: &&str| {
            line.starts_with("apiserver_request_total{")
                && ["code=\"409\"", "resource=\"configmaps\"", "verb=\"PUT\""]
                    .iter()
                    .all(|part| line.contains(part))
        };
        text.lines()
            .filter(of_puts)
            .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
            .sum()
    }

    fn raw(&self, path: &str) -> Option<String> {
        let request = http::Request::get(path).body(Vec::new()).unwrap();
        let answer =
            async { tokio::time::timeout(ONE_ANSWER, self.admin.request_text(request)).await.ok()?.ok() };
        self.run(answer)
    }

    fn is_ready(&mut self) {
        wait_until("kube-apiserver is ready", 6 * TIMEOUT, || {
            self.apiserver.assert_running();
            self.raw("/readyz").is_some_and(|body| body == "ok")
        });
    }

    /// Grants the permissions that the documentation requires for `publish = "configmap"`.
    fn grant(&self) {
        use k8s_openapi::api::core::v1::Namespace;
        use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
        self.apply_everywhere::<Namespace>(
            &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        );
        let rbac = "rbac.authorization.k8s.io";
        self.apply::<Role>(&json!({
            "apiVersion": format!("{rbac}/v1"), "kind": "Role", "metadata": {"name": "tunnel"},
            "rules": [
                {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch", "create", "update"]},
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            ],
        }));
        let watched = |group: &str, kinds: &[&str]| json!({"apiGroups": [group], "resources": kinds, "verbs": ["list", "watch"]});
        let rules =
            [watched("", &["nodes", "pods", "services"]), watched("discovery.k8s.io", &["endpointslices"])];
        self.apply_everywhere::<ClusterRole>(&json!({
            "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRole", "metadata": {"name": "tunnel-addresses"},
            "rules": rules,
        }));
        self.apply_everywhere::<ClusterRoleBinding>(&json!({
            "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "tunnel-addresses"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "tunnel-addresses"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": "pod"}],
        }));
        self.apply::<RoleBinding>(&json!({
            "apiVersion": format!("{rbac}/v1"), "kind": "RoleBinding", "metadata": {"name": "tunnel"},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "tunnel"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": "pod"}],
        }));
    }
}

fn apiserver(place: &TestDir, program: &Path, etcd: &str, port: u16) -> Running {
    let node = ("node1", "system:node:node1", "system:nodes");
    let users = [("admin", "admin", "system:masters"), ("pod", "pod", ""), node];
    let mut command = crate::apiserver::apiserver(Command::new(program), place, etcd, loopback(port), &users);
    // As in k3s: the CA of its clients is not that of its own certificate.
    let clients = place.path().join("client-ca.crt");
    std::fs::write(&clients, Authority::new().0.cert()).unwrap();
    command.arg("--client-ca-file").arg(clients);
    Running::start("apiserver", place.path(), command.args(["--authorization-mode", "Node,RBAC"]))
}

async fn client(kubeconfig: &Path) -> Client {
    let file = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

/// Timeout for a request that is repeated if there is no response.
const ONE_ANSWER: Duration = Duration::from_secs(2);
