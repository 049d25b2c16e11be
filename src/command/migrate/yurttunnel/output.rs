//! The printed config.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use crate::command::migrate::yurttunnel::flags::{YurtServerFlags, agent, server};
use crate::command::migrate::yurttunnel::objects::YurtTunnelDeployment;
use crate::command::migrate::yurttunnel::{MigrationRemark, MigrationVerdict};
use tunnel_base::logging::printable::printable;
use tunnel_base::policy::ports::ConfigMapPorts;

/// Returns the config of a server.
///
/// # Errors
///
/// Returns an error if no server was found.
pub(crate) fn cloud(old: &YurtTunnelDeployment) -> Result<String, String> {
    let Some(flags) = &old.server else { return Err(missing("yurt-tunnel-server", "Deployment")) };
    let (server, of_flags) = server(flags);
    let remarks = of_objects(old, &server, of_flags);
    let YurtServerFlags { bind, insecure_bind, agents, secure, insecure, meta, names } = server;
    let namespace = namespace(old).unwrap_or(NAMESPACE);
    let names = if names { format!("\n{NAMES}namespace = \"{namespace}\"\n") } else { String::new() };
    let grpc = SocketAddr::new(bind, agents);
    let metrics = SocketAddr::new(bind, meta);
    Ok(format!(
        r#"# Config of a server that replaces yurt-tunnel-server, printed by `tunnel migrate yurttunnel`; docs/reference/server.toml
# describes every key, docs/how-to/from-yurttunnel.md the migration. Remarks on each old setting:
{remarks}
[server.links]
listen = "{grpc}"
metrics_listen = "{metrics}"
cert = "/etc/tunnel/certs/cloud.crt"
key = "/etc/tunnel/certs/cloud.key"
peer_ca = "/etc/tunnel/certs/ca.crt"
token_file = "/etc/tunnel/token/token"

# CONNECT, which YurtTunnel does not have; for this machine only.
[server.connect]
listen = "127.0.0.1:2222"

# Access rules are required. YurtTunnel accepted clients with any certificate of the cluster, or with none.
[server.https]
listen_ip = "{bind}"
ports = {{ "{secure}" = "host" }}
cert = "/etc/tunnel/certs/cloud.crt"
key = "/etc/tunnel/certs/cloud.key"
client_ca = "/etc/tunnel/certs/client-ca.crt"
names = ["kube-apiserver-kubelet-client", "system:serviceaccount:*"]
{CERTIFICATE_EXAMPLE}
[server.http]
listen_ip = "{insecure_bind}"
ports = {{ "{insecure}" = "host" }}
# Clients do not authenticate here; list the networks of your metrics tools.
allow_from = ["127.0.0.0/8"]

[server.node_ports]
namespace = "{namespace}"
configmap = "yurt-tunnel-server-cfg"
service = "x-tunnel-server-internal-svc"
{names}
[server.addresses]
kubernetes = true

# Peers: the headless Service in deploy/kustomize.
[server.peers]
kubernetes_service = "tunnel-cloud-pods"
"#,
        remarks = lines(&remarks),
    ))
}

/// Adds remarks on all other objects to those on the flags.
fn of_objects(
    old: &YurtTunnelDeployment,
    server: &YurtServerFlags,
    mut remarks: Vec<MigrationRemark>,
) -> Vec<MigrationRemark> {
    let own = [server.agents, server.secure, server.insecure, server.meta].into();
    remarks.extend(ports(old, &own));
    remarks.extend(services(old));
    if old.has_names && server.names {
        let why = "[server.node_names] writes it under the same names".to_owned();
        let what = "ConfigMap yurt-tunnel-nodes".to_owned();
        remarks.push(MigrationRemark { verdict: MigrationVerdict::Kept, what, why });
    }
    remarks
}

/// Returns the config of an edge.
///
/// # Errors
///
/// Returns an error if no agent was found.
pub(crate) fn edge(old: &YurtTunnelDeployment) -> Result<String, String> {
    let Some(flags) = &old.agent else { return Err(missing("yurt-tunnel-agent", "DaemonSet")) };
    let (cloud, remarks) = agent(flags);
    let server = cloud.map_or_else(
        || "# The external address of x-tunnel-server-svc: your load balancer, or a node and its NodePort.\nservers = [\"tunnel.example.org:10262\"]".to_owned(),
        |at| format!("servers = [\"{at}\"]"),
    );
    Ok(format!(
        r#"# Config of an edge that replaces yurt-tunnel-agent, printed by `tunnel migrate yurttunnel --role edge`; docs/reference/edge.toml
# describes every key, docs/how-to/from-yurttunnel.md the migration. Remarks on each old setting:
{remarks}
# The environment variable NODE_NAME sets the node's name.
[edge.uplink]
{server}
ca = "/etc/tunnel/certs/ca.crt"

# The node's certificate identifies the edge. It is requested with --kubeconfig=/etc/kubernetes/kubelet.conf, and must be approved
# (deploy/kustomize/yurttunnel/csr).
[edge.csr]
enabled = true

[edge.allow]
targets = ["127.0.0.0/8:*", "[::1]:*", "self:*"]
"#,
        remarks = lines(&remarks),
    ))
}

/// Returns the namespace of the ConfigMap of ports; `None` if there is no ConfigMap, or its namespace is not a valid
/// name.
pub(super) fn namespace(old: &YurtTunnelDeployment) -> Option<&str> {
    let (namespace, _) = old.ports.as_ref()?;
    let sound = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let is_label = (1..=63).contains(&namespace.len()) && namespace.bytes().all(sound);
    (is_label && !namespace.starts_with('-') && !namespace.ends_with('-')).then_some(namespace)
}

/// Returns remarks on the ports in the ConfigMap.
pub(super) fn ports(old: &YurtTunnelDeployment, own: &BTreeSet<u16>) -> Vec<MigrationRemark> {
    let Some((found, data)) = &old.ports else { return Vec::new() };
    let odd = namespace(old).is_none().then(|| MigrationRemark {
        verdict: MigrationVerdict::Gone,
        what: format!("namespace {found:?} of yurt-tunnel-server-cfg"),
        why: format!("not a valid namespace; {NAMESPACE} is used instead"),
    });
    let (_, wrong) = ConfigMapPorts::parse(data, own);
    let kept =
        data.iter().filter(|(key, _)| READ.contains(&key.as_str())).map(|(key, value)| MigrationRemark {
            verdict: MigrationVerdict::Kept,
            what: format!("{key}: {value:?}"),
            why: "[server.node_ports] reads it there".to_owned(),
        });
    let wrong = wrong.into_iter().map(|wrong| MigrationRemark {
        verdict: MigrationVerdict::Gone,
        what: format!("{}: {:?}", wrong.key, wrong.found),
        why: wrong.hint.to_owned(),
    });
    odd.into_iter().chain(kept).chain(wrong).collect()
}

pub(super) fn services(old: &YurtTunnelDeployment) -> impl Iterator<Item = MigrationRemark> {
    old.services.iter().map(|(name, kind)| {
        let why = match name.as_str() {
            "x-tunnel-server-internal-svc" => {
                "deploy/kustomize/yurttunnel contains it; your own needs the annotation tunnel.cloud.io/ports: managed"
            }
            "x-tunnel-server-svc" => "deploy/kustomize/yurttunnel contains it as a NodePort; set your type",
            _ => "not a Service of any known YurtTunnel",
        };
        let known = ["x-tunnel-server-internal-svc", "x-tunnel-server-svc"].contains(&name.as_str());
        let verdict = if known { MigrationVerdict::Changed } else { MigrationVerdict::Unknown };
        MigrationRemark { verdict, what: format!("Service {name} ({kind})"), why: why.to_owned() }
    })
}

pub(super) fn lines(remarks: &[MigrationRemark]) -> String {
    let word = |verdict| match verdict {
        MigrationVerdict::Kept => "kept",
        MigrationVerdict::Changed => "changed",
        MigrationVerdict::Gone => "removed",
        MigrationVerdict::Unknown => "unknown",
    };
    // The text is untrusted, and must not end the comment.
    let line = |MigrationRemark { verdict, what, why }: &MigrationRemark| {
        format!("#   {:<8} {}: {why}\n", word(*verdict), printable(what))
    };
    remarks.iter().map(line).collect()
}

fn missing(program: &str, kind: &str) -> String {
    format!(
        "no container of {program} found; add the {kind} that starts it, printed by `kubectl -n kube-system get {kind} -o yaml`",
        kind = kind.to_lowercase()
    )
}

/// The namespace of YurtTunnel.
const NAMESPACE: &str = "kube-system";

const CERTIFICATE_EXAMPLE: &str = r#"# The client certificate for kubelets, which YurtTunnel's server made itself. Enable these lines and profiles of [server.csr]
# once an approver runs (deploy/kustomize/yurttunnel/csr).
# target_cert = "/var/lib/tunnel/pki/proxy-client.pem"
# The CA of kubelets' certificates; or target_insecure_skip_verify = true, as in YurtTunnel.
# target_ca = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"

# Edges identify their Node by a certificate of the cluster.
[server.csr]
edge_ca = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
# profiles = ["proxy-client"]
"#;

const NAMES: &str = "[server.node_names]\n";

/// The keys of the ConfigMap that have the same meaning here.
const READ: [&str; 4] = ["http-proxy-ports", "https-proxy-ports", "localhost-proxy-ports", "dnat-ports-pair"];
