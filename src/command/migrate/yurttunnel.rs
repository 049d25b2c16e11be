//! A deployment of YurtTunnel as a config of this program, with a remark on each of its settings.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use crate::command::migrate::yurttunnel::Mapping::{Changed, Gone, Kept, Unknown};
use crate::command::{CommandError, Role};
use crate::parts::with_kubernetes;
use tunnel_base::logging::printable;
use tunnel_base::names::Target;
use tunnel_base::policy::ports::ConfigMapPorts;

/// Returns a config of servers or edges that replaces the objects in these texts, each with the name of its file.
pub(crate) fn migrate(texts: &[(String, String)], role: Role) -> Result<String, CommandError> {
    let mut old = YurtObjects::default();
    for (text, name) in texts {
        old.add(text).map_err(|why| CommandError::unusable(format!("{name}: {why}")))?;
    }
    match role {
        Role::Server => cloud(&old),
        Role::Edge => edge(&old),
    }
    .map_err(CommandError::unusable)
}

/// A comment line in the config that `tunnel migrate` prints: what becomes of one flag or object of the old tunnel, and
/// why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Remark {
    verdict: Mapping,
    /// The setting with its value.
    what: String,
    why: String,
}

/// What `tunnel migrate` makes of a setting of the old tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mapping {
    /// It has the same meaning here.
    Kept,
    /// It has another form, or must be handled by hand.
    Changed,
    /// It has no counterpart.
    Gone,
    /// Its purpose is not known.
    Unknown,
}

// Remarks on each flag of YurtTunnel's programs.

/// The flags of OpenYurt's tunnel server that have a counterpart in this program's config; the defaults are OpenYurt's.
#[derive(Debug)]
pub(crate) struct YurtServerFlags {
    /// Address for edges and TLS.
    pub(crate) bind: IpAddr,
    /// Address for HTTP.
    pub(crate) insecure_bind: IpAddr,
    /// The port for agents.
    pub(crate) agents: u16,
    /// The port with TLS.
    pub(crate) secure: u16,
    /// The port without TLS.
    pub(crate) insecure: u16,
    /// The port of metrics.
    pub(crate) meta: u16,
    /// Whether names of nodes are published.
    pub(crate) names: bool,
}

/// The server's defaults.
impl Default for YurtServerFlags {
    fn default() -> Self {
        Self {
            bind: [0, 0, 0, 0].into(),
            insecure_bind: [127, 0, 0, 1].into(),
            agents: 10262,
            secure: 10263,
            insecure: 10264,
            meta: 10265,
            names: true,
        }
    }
}

/// Reads the server's flags.
pub(crate) fn server(flags: &[(String, String)]) -> (YurtServerFlags, Vec<Remark>) {
    let mut server = YurtServerFlags::default();
    let remarks = flags.iter().map(|(name, value)| {
        let (verdict, why) = match name.as_str() {
            "bind-address" => bind(&mut server.bind, value, "listen of [server.links], listen_ip of [server.https]"),
            "insecure-bind-address" => bind(&mut server.insecure_bind, value, "listen_ip of [server.http]"),
            "tunnel-agent-connect-port" => set(&mut server.agents, value, "the port in listen of [server.links]"),
            "secure-port" => set(&mut server.secure, value, "the port in ports of [server.https]"),
            "insecure-port" => set(&mut server.insecure, value, "the port in ports of [server.http]"),
            "meta-port" => match set(&mut server.meta, value, METRICS) {
                (Kept, why) => (Changed, why),
                unread => unread,
            },
            "enable-dns-controller" => {
                server.names = value != "false";
                (Kept, if server.names { "[server.node_names]" } else { "without [server.node_names]" })
            }
            "kube-config" => (Changed, "the flag --kubeconfig of this program"),
            "cert-dns-names" | "cert-ips" => (Changed, "the certificate in cert must contain it; tunnel init --name makes one, or [server.csr] requests one with names, which `tunnel approve` accepts by --san"),
            "cert-dir" => (Changed, "each file has its own key: cert, key, client_ca"),
            IPTABLES if value == "false" => (Kept, "nothing is intercepted unless the config enables it"),
            IPTABLES => (Changed, INTERCEPT),
            "iptables-sync-period" | "dns-sync-period" => (Gone, "changes are applied immediately, and everything is checked again every 30 min"),
            "egress-selector-enable" => (Gone, "it had no effect there; here [server.egress] serves kube-apiserver's egress selector"),
            "server-count" => (Gone, "servers find each other by kubernetes_service of [server.peers], and an edge needs a link to one of them"),
            "proxy-strategy" => (Gone, "a request always goes to the node that it names"),
            name => of_any_program(name),
        };
        remark(verdict, name, value, why)
    });
    let mut remarks: Vec<_> = remarks.collect();
    // Its default, even without the flag.
    if !flags.iter().any(|(name, _)| name == IPTABLES) {
        remarks.push(remark(Changed, IPTABLES, "true, its default", INTERCEPT));
    }
    (server, remarks)
}

/// Reads the agent's flags. Returns the server's address, if a flag contains it.
pub(crate) fn agent(flags: &[(String, String)]) -> (Option<Target>, Vec<Remark>) {
    let mut cloud = None;
    let remarks = flags.iter().map(|(name, value)| {
        let (verdict, why) = match name.as_str() {
            "tunnelserver-addr" => match value.parse() {
                Ok(at) => {
                    cloud = Some(at);
                    (Kept, "servers of [edge.uplink]")
                }
                Err(_) => (Changed, "not host:port; set servers of [edge.uplink]"),
            },
            "node-name" => {
                (Changed, "NODE_NAME of the environment, or node of [edge.uplink], different for each node")
            }
            "node-ip" => (Changed, "NODE_IP of the environment, or node_ips of [edge.uplink]"),
            "agent-identifiers" => (
                Gone,
                "an edge is identified by its node's name, and by the addresses of --node-ip and of its Node",
            ),
            "apiserver-addr" => (Gone, "an edge uses Kubernetes only for a certificate, with a kubeconfig"),
            "kube-config" => (
                Changed,
                "the flag --kubeconfig of this program, needed only if [edge.csr] requests a certificate",
            ),
            "cert-dir" => {
                (Changed, "the CA is in ca of [edge.uplink], the issued certificate in file of [edge.csr]")
            }
            "meta-host" | "meta-port" => {
                (Changed, "metrics_listen of [edge.uplink], which is off by default")
            }
            name => of_any_program(name),
        };
        remark(verdict, name, value, why)
    });
    let remarks = remarks.collect();
    (cloud, remarks)
}

/// Returns the remark on a flag that all Kubernetes programs have, mostly for logs.
fn of_any_program(name: &str) -> (Mapping, &'static str) {
    match name.replace('_', "-").as_str() {
        "v" => (Changed, "the flag -v of this program has different levels; 2 is debug"),
        "logtostderr" | "alsologtostderr" | "log-dir" => (Kept, "the flag of the same name"),
        "log-file"
        | "log-file-max-size"
        | "log-flush-frequency"
        | "log-backtrace-at"
        | "vmodule"
        | "stderrthreshold"
        | "skip-headers"
        | "skip-log-headers"
        | "add-dir-header"
        | "one-output" => (Gone, "this program logs to stderr, or with --log-dir to files there"),
        "version" | "help" => (Gone, "not a setting"),
        _ => (Unknown, UNKNOWN),
    }
}

fn remark(verdict: Mapping, name: &str, value: &str, why: &str) -> Remark {
    Remark { verdict, what: format!("--{name}={value}"), why: why.to_owned() }
}

/// Takes over a value. An invalid value leaves the default.
fn set<T: std::str::FromStr>(to: &mut T, value: &str, why: &'static str) -> (Mapping, &'static str) {
    match value.parse() {
        Ok(value) => {
            *to = value;
            (Kept, why)
        }
        Err(_) => (Gone, "invalid value; the default is used"),
    }
}

/// Takes over an address to listen on. A variable such as `$(NODE_IP)` has another value on each machine.
fn bind(to: &mut IpAddr, value: &str, why: &'static str) -> (Mapping, &'static str) {
    if value.starts_with("$(") && value.ends_with(')') {
        *to = IpAddr::from([0, 0, 0, 0]);
        return (Changed, "all addresses of the server, as the variable differs from machine to machine");
    }
    set(to, value, why)
}

const IPTABLES: &str = "enable-iptables";
const INTERCEPT: &str =
    "[server.intercept] does that with nftables; set the networks of the edge nodes; iptables is not touched";
const METRICS: &str = "the port in metrics_listen of [server.links], at --bind-address, as kubelets probe it; there are no profiles (pprof)";
const UNKNOWN: &str = "not a flag of any known YurtTunnel; handle its purpose by hand";

// The objects of an old deployment.

/// The objects of YurtTunnel that were found.
#[derive(Debug, Default)]
pub(crate) struct YurtObjects {
    /// The server's flags, in their order, without dashes.
    pub(crate) server: Option<Vec<(String, String)>>,
    /// The agent's flags.
    pub(crate) agent: Option<Vec<(String, String)>>,
    /// Namespace and contents of the ConfigMap of ports.
    pub(crate) ports: Option<(String, BTreeMap<String, String>)>,
    /// Whether the ConfigMap of node names exists.
    pub(crate) has_names: bool,
    /// Name and type of each of its Services.
    pub(crate) services: Vec<(String, String)>,
}

impl YurtObjects {
    /// Adds the objects of a text, which consists of documents or lists of objects.
    ///
    /// # Errors
    ///
    /// Returns an error if it is neither YAML nor JSON.
    pub(crate) fn add(&mut self, text: &str) -> Result<(), String> {
        let objects =
            with_kubernetes!(api::objects(text).map_err(|cause| first_line(&cause)), else Ok(Vec::new()));
        let objects: Vec<Value> = objects
            .map_err(|cause: String| format!("neither YAML nor JSON as kubectl prints it: {cause}"))?;
        objects.iter().for_each(|object| self.take(object, LISTS_IN_LISTS));
        Ok(())
    }

    fn take(&mut self, object: &Value, depth: usize) {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        match object["kind"].as_str().unwrap_or_default() {
            list if list.ends_with("List") && depth > 0 => {
                object["items"].as_array().into_iter().flatten().for_each(|item| self.take(item, depth - 1));
            }
            "ConfigMap" if name == PORTS => {
                let namespace = object["metadata"]["namespace"].as_str().unwrap_or("kube-system");
                self.ports = Some((namespace.to_owned(), data(&object["data"])));
            }
            "ConfigMap" if name == OLD_NAMES => self.has_names = true,
            "Service" if name.starts_with(SERVICES) => {
                let kind = object["spec"]["type"].as_str().unwrap_or("ClusterIP");
                self.services.push((name.to_owned(), kind.to_owned()));
            }
            "Deployment" | "DaemonSet" | "StatefulSet" => self.workload(&object["spec"]["template"]["spec"]),
            "Pod" => self.workload(&object["spec"]),
            _ => {}
        }
    }

    fn workload(&mut self, spec: &Value) {
        for container in spec["containers"].as_array().into_iter().flatten() {
            let words: Vec<_> = ["command", "args"]
                .iter()
                .flat_map(|key| container[key].as_array().into_iter().flatten())
                .filter_map(Value::as_str)
                .collect();
            let says = |program: &str| {
                let named = [&container["name"], &container["image"]];
                let named = named.into_iter().filter_map(Value::as_str).chain(words.first().copied());
                named.into_iter().any(|text| text.contains(program))
            };
            if says(SERVER) {
                self.server = Some(flags(&words));
            } else if says(AGENT) {
                self.agent = Some(flags(&words));
            }
        }
    }
}

/// Returns name and value of each flag: `--name=value`, `--name value`, or a switch.
fn flags(words: &[&str]) -> Vec<(String, String)> {
    let mut flags = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let name = word.trim_start_matches('-');
        if name.len() == word.len() || name.is_empty() {
            continue;
        }
        let (name, value) = match name.split_once('=') {
            Some((name, value)) => (name, value),
            None => (name, words.next_if(|next| !next.starts_with('-')).copied().unwrap_or("true")),
        };
        flags.push((name.to_owned(), value.to_owned()));
    }
    flags
}

/// Returns texts by their keys. A number without quotes is read as a text.
fn data(data: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    data.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), text(value))).collect()
}

fn first_line(cause: &impl ToString) -> String {
    cause.to_string().lines().next().unwrap_or_default().to_owned()
}

const SERVER: &str = "yurt-tunnel-server";
const AGENT: &str = "yurt-tunnel-agent";
const PORTS: &str = "yurt-tunnel-server-cfg";
const OLD_NAMES: &str = "yurt-tunnel-nodes";
const SERVICES: &str = "x-tunnel-server-";

/// Maximum nesting of lists. `kubectl get` prints lists of objects, so few levels are enough.
const LISTS_IN_LISTS: usize = 3;

// The printed config.

/// Returns the config of a server.
///
/// # Errors
///
/// Returns an error if no server was found.
pub(crate) fn cloud(old: &YurtObjects) -> Result<String, String> {
    let Some(flags) = &old.server else { return Err(missing("yurt-tunnel-server", "Deployment")) };
    let (server, of_flags) = server(flags);
    let remarks = of_objects(old, &server, of_flags);
    let YurtServerFlags { bind, insecure_bind, agents, secure, insecure, meta, names } = server;
    let namespace = namespace(old).unwrap_or(NAMESPACE);
    let names = if names { format!("\n{NAMES}namespace = \"{namespace}\"\n") } else { String::new() };
    let (grpc, metrics) = (SocketAddr::new(bind, agents), SocketAddr::new(bind, meta));
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
fn of_objects(old: &YurtObjects, server: &YurtServerFlags, mut remarks: Vec<Remark>) -> Vec<Remark> {
    let own = [server.agents, server.secure, server.insecure, server.meta].into();
    remarks.extend(ports(old, &own));
    remarks.extend(services(old));
    if old.has_names && server.names {
        let why = "[server.node_names] writes it under the same names".to_owned();
        let what = "ConfigMap yurt-tunnel-nodes".to_owned();
        remarks.push(Remark { verdict: Mapping::Kept, what, why });
    }
    remarks
}

/// Returns the config of an edge.
///
/// # Errors
///
/// Returns an error if no agent was found.
pub(crate) fn edge(old: &YurtObjects) -> Result<String, String> {
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
fn namespace(old: &YurtObjects) -> Option<&str> {
    let (namespace, _) = old.ports.as_ref()?;
    let sound = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let is_label = (1..=63).contains(&namespace.len()) && namespace.bytes().all(sound);
    (is_label && !namespace.starts_with('-') && !namespace.ends_with('-')).then_some(namespace)
}

/// Returns remarks on the ports in the ConfigMap.
fn ports(old: &YurtObjects, own: &BTreeSet<u16>) -> Vec<Remark> {
    let Some((found, data)) = &old.ports else { return Vec::new() };
    let odd = namespace(old).is_none().then(|| Remark {
        verdict: Mapping::Gone,
        what: format!("namespace {found:?} of yurt-tunnel-server-cfg"),
        why: format!("not a valid namespace; {NAMESPACE} is used instead"),
    });
    let (_, wrong) = ConfigMapPorts::parse(data, own);
    let kept = data.iter().filter(|(key, _)| READ.contains(&key.as_str())).map(|(key, value)| Remark {
        verdict: Mapping::Kept,
        what: format!("{key}: {value:?}"),
        why: "[server.node_ports] reads it there".to_owned(),
    });
    let wrong = wrong.into_iter().map(|wrong| Remark {
        verdict: Mapping::Gone,
        what: format!("{}: {:?}", wrong.key, wrong.found),
        why: wrong.hint.to_owned(),
    });
    odd.into_iter().chain(kept).chain(wrong).collect()
}

fn services(old: &YurtObjects) -> impl Iterator<Item = Remark> {
    old.services.iter().map(|(name, kind)| {
        let why = match name.as_str() {
            "x-tunnel-server-internal-svc" => {
                "deploy/kustomize/yurttunnel contains it; your own needs the annotation tunnel.cloud.io/ports: managed"
            }
            "x-tunnel-server-svc" => "deploy/kustomize/yurttunnel contains it as a NodePort; set your type",
            _ => "not a Service of any known YurtTunnel",
        };
        let known = ["x-tunnel-server-internal-svc", "x-tunnel-server-svc"].contains(&name.as_str());
        let verdict = if known { Mapping::Changed } else { Mapping::Unknown };
        Remark { verdict, what: format!("Service {name} ({kind})"), why: why.to_owned() }
    })
}

fn lines(remarks: &[Remark]) -> String {
    let word = |verdict| match verdict {
        Mapping::Kept => "kept",
        Mapping::Changed => "changed",
        Mapping::Gone => "removed",
        Mapping::Unknown => "unknown",
    };
    // The text is untrusted, and must not end the comment.
    let line = |Remark { verdict, what, why }: &Remark| {
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

#[cfg(test)]
mod tests;
