//! The settings that are printed.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::flags::{self, Server};
use super::old::Old;
use super::{Remark, Verdict};
use crate::policy::ProxyPorts;
use crate::telemetry::printable;

/// Settings of a pod.
///
/// # Errors
///
/// No server was found.
pub(super) fn cloud(old: &Old) -> Result<String, String> {
    let Some(flags) = &old.server else { return Err(missing("yurt-tunnel-server", "Deployment")) };
    let (server, of_flags) = flags::server(flags);
    let remarks = of_objects(old, &server, of_flags);
    let Server { bind, insecure_bind, agents, secure, insecure, meta, names } = server;
    let namespace = namespace(old).unwrap_or(NAMESPACE);
    let names = if names { format!("\n{NAMES}namespace = \"{namespace}\"\n") } else { String::new() };
    let (grpc, metrics) = (SocketAddr::new(bind, agents), SocketAddr::new(bind, meta));
    Ok(format!(
        r#"# Settings of a pod in the place of yurt-tunnel-server, printed by `tunnel migrate yurttunnel`; conf/cloud.toml describes
# every key, docs/migrating.md the way over. What became of each setting there:
{remarks}
[mode.cloud.stream.server]
listen = "{grpc}"
metrics_listen = "{metrics}"
cert = "/etc/tunnel/certs/cloud.crt"
key = "/etc/tunnel/certs/cloud.key"
ca = "/etc/tunnel/certs/ca.crt"
tokenfile = "/etc/tunnel/token/token"

# CONNECT, which YurtTunnel has not got: for this machine alone.
[mode.cloud.ssh]
listen = "127.0.0.1:2222"

# Who may come in has to be said: YurtTunnel let in who had any certificate of the cluster, or none.
[mode.cloud.https]
listen_ip = "{bind}"
addr = {{ "{secure}" = "host" }}
cert = "/etc/tunnel/certs/cloud.crt"
key = "/etc/tunnel/certs/cloud.key"
client_ca = "/etc/tunnel/certs/client-ca.crt"
names = ["kube-apiserver-kubelet-client", "system:serviceaccount:*"]
{SHOWN}
[mode.cloud.http]
listen_ip = "{insecure_bind}"
addr = {{ "{insecure}" = "host" }}
# No client proves itself here: put the networks of your metrics tools.
allow_from = ["127.0.0.0/8"]

[mode.cloud.ports]
namespace = "{namespace}"
configmap = "yurt-tunnel-server-cfg"
service = "x-tunnel-server-internal-svc"
{names}
[mode.cloud.addresses]
kubernetes = true

# Other pods: the headless Service that deploy/kustomize has for them.
[mode.cloud.registry]
service = "tunnel-cloud-pods"
"#,
        remarks = lines(&remarks),
    ))
}

/// What became of the flags, and of all else.
fn of_objects(old: &Old, server: &Server, mut remarks: Vec<Remark>) -> Vec<Remark> {
    let own = [server.agents, server.secure, server.insecure, server.meta].into();
    remarks.extend(ports(old, &own));
    remarks.extend(services(old));
    if old.has_names && server.names {
        let why = "[mode.cloud.node_names] writes it, by the same names".to_owned();
        let what = "ConfigMap yurt-tunnel-nodes".to_owned();
        remarks.push(Remark { verdict: Verdict::Kept, what, why });
    }
    remarks
}

/// Settings of an edge.
///
/// # Errors
///
/// No agent was found.
pub(super) fn edge(old: &Old) -> Result<String, String> {
    let Some(flags) = &old.agent else { return Err(missing("yurt-tunnel-agent", "DaemonSet")) };
    let (cloud, remarks) = flags::agent(flags);
    let server = cloud.map_or_else(
        || "# Where edges reach x-tunnel-server-svc from outside: put your balancer, or a node and its NodePort, here.\nserver_name = \"tunnel.example.org:10262\"".to_owned(),
        |at| format!("server_name = \"{at}\""),
    );
    Ok(format!(
        r#"# Settings of an edge in the place of yurt-tunnel-agent, printed by `tunnel migrate yurttunnel --edge`; conf/edge.toml
# describes every key, docs/migrating.md the way over. What became of each setting there:
{remarks}
# NODE_NAME of the environment names the node.
[mode.edge.stream.client]
{server}
cert = "/etc/tunnel/certs/ca.crt"

# The node's certificate proves the edge: it asks its cluster with --k=/etc/kubernetes/kubelet.conf, and somebody approves it
# (deploy/kustomize/yurttunnel/csr).
[mode.edge.csr]
agent = true

[mode.edge.allow]
targets = ["127.0.0.0/8:*", "[::1]:*", "own:*"]
"#,
        remarks = lines(&remarks),
    ))
}

/// Where the ConfigMap of ports is; `None`: there is none, or what stands there is no namespace's name.
fn namespace(old: &Old) -> Option<&str> {
    let (namespace, _) = old.ports.as_ref()?;
    let sound = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let is_label = (1..=63).contains(&namespace.len()) && namespace.bytes().all(sound);
    (is_label && !namespace.starts_with('-') && !namespace.ends_with('-')).then_some(namespace)
}

/// What became of the ports that the ConfigMap names.
fn ports(old: &Old, own: &BTreeSet<u16>) -> Vec<Remark> {
    let Some((found, data)) = &old.ports else { return Vec::new() };
    let odd = namespace(old).is_none().then(|| Remark {
        verdict: Verdict::Gone,
        what: format!("namespace {found:?} of yurt-tunnel-server-cfg"),
        why: format!("it is no namespace's name; {NAMESPACE} stands in its place"),
    });
    let (_, wrong) = ProxyPorts::parse(data, own);
    let kept = data.iter().filter(|(key, _)| READ.contains(&key.as_str())).map(|(key, value)| Remark {
        verdict: Verdict::Kept,
        what: format!("{key}: {value:?}"),
        why: "[mode.cloud.ports] reads it where it stands".to_owned(),
    });
    let wrong = wrong.into_iter().map(|wrong| Remark {
        verdict: Verdict::Gone,
        what: format!("{}: {:?}", wrong.key, wrong.found),
        why: wrong.remedy.to_owned(),
    });
    odd.into_iter().chain(kept).chain(wrong).collect()
}

fn services(old: &Old) -> impl Iterator<Item = Remark> {
    old.services.iter().map(|(name, kind)| {
        let why = match name.as_str() {
            "x-tunnel-server-internal-svc" => {
                "deploy/kustomize/yurttunnel has it; one of your own needs the annotation tunnel.cloud.io/ports: managed"
            }
            "x-tunnel-server-svc" => "deploy/kustomize/yurttunnel has it, as a NodePort: give it your type",
            _ => "no Service that any YurtTunnel is known to have",
        };
        let known = ["x-tunnel-server-internal-svc", "x-tunnel-server-svc"].contains(&name.as_str());
        let verdict = if known { Verdict::Changed } else { Verdict::Unknown };
        Remark { verdict, what: format!("Service {name} ({kind})"), why: why.to_owned() }
    })
}

fn lines(remarks: &[Remark]) -> String {
    let word = |verdict| match verdict {
        Verdict::Kept => "kept",
        Verdict::Changed => "changed",
        Verdict::Gone => "gone",
        Verdict::Unknown => "unknown",
    };
    // What stands there is somebody else's, and must not end a comment.
    let line = |Remark { verdict, what, why }: &Remark| {
        format!("#   {:<8} {}: {why}\n", word(*verdict), printable(what))
    };
    remarks.iter().map(line).collect()
}

fn missing(program: &str, kind: &str) -> String {
    format!(
        "there is no container of {program} in it: give the {kind} that starts it, `kubectl -n kube-system get {kind} -o yaml` prints it",
        kind = kind.to_lowercase()
    )
}

/// Where YurtTunnel is.
const NAMESPACE: &str = "kube-system";

const SHOWN: &str = r#"# What kubelets are shown, which YurtTunnel's server had for itself: take these lines and profiles of [mode.cloud.csr] in
# once somebody approves it (deploy/kustomize/yurttunnel/csr).
# target_cert = "/var/lib/tunnel/pki/proxy-client.pem"
# Who has signed kubelets' certificates; or target_insecure = true, as it was there.
# target_ca = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"

# Edges prove their Node by a certificate of the cluster.
[mode.cloud.csr]
agent_ca = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
# profiles = ["proxy-client"]
"#;

const NAMES: &str = "[mode.cloud.node_names]\n";

/// The keys of the ConfigMap that mean the same here.
const READ: [&str; 4] = ["http-proxy-ports", "https-proxy-ports", "localhost-proxy-ports", "dnat-ports-pair"];
