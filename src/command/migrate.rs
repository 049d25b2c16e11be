//! `tunnel migrate`: our settings for what another tunnel was set to do, with a line for each setting of that.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::Value;

use crate::command::CommandError;
use crate::command::migrate::Mapping::{Changed, Gone, Kept, Unknown};
use tunnel_base::logging::printable;
use tunnel_base::names::Target;
use tunnel_base::policy::ports::ProxyPorts;

/// What to read, and for whom to write.
#[derive(Debug, Clone, clap::Args)]
pub struct MigrateArgs {
    /// Whose deployment it is.
    #[arg(value_name = "FROM")]
    pub from: Origin,
    /// Files with its objects, in YAML or JSON as `kubectl get -o yaml` prints them: Deployments, DaemonSets, ConfigMaps
    /// and Services; `-` is stdin.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Print the settings of edges, made from the agents' flags, and not those of pods.
    #[arg(long)]
    pub edge: bool,
}

/// Another tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Origin {
    /// OpenYurt's.
    Yurttunnel,
}

/// What became of a setting, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Remark {
    verdict: Mapping,
    /// The setting with its value.
    what: String,
    why: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mapping {
    /// It means the same here.
    Kept,
    /// It has another form, or somebody has to see to it.
    Changed,
    /// Nothing stands for it.
    Gone,
    /// Nobody here knows what it was for.
    Unknown,
}

/// Our settings, and behind `#` a line for each setting of the old deployment. `stdin` is read where a file is `-`. Blocks
/// on files.
///
/// # Errors
///
/// A file cannot be read, or holds nothing of such a deployment.
pub fn run(asked: &MigrateArgs, stdin: impl Read) -> Result<String, CommandError> {
    let Origin::Yurttunnel = asked.from;
    let mut stdin = Some(stdin);
    let mut old = YurtObjects::default();
    for file in &asked.files {
        let name = file.display().to_string();
        let text = match (name.as_str(), stdin.take_if(|_| name == "-")) {
            ("-", Some(stdin)) => read(stdin),
            ("-", None) => return Err(CommandError::usage("- stands twice: stdin is read once")),
            _ => std::fs::File::open(file).and_then(read),
        };
        let text = text.map_err(|cause| CommandError::unusable(format!("{name}: {cause}")))?;
        old.add(&text).map_err(|why| CommandError::unusable(format!("{name}: {why}")))?;
    }
    if asked.edge { edge(&old) } else { cloud(&old) }.map_err(CommandError::unusable)
}

fn read(from: impl Read) -> io::Result<String> {
    let mut text = String::new();
    if from.take(MAX_BYTES + 1).read_to_string(&mut text)? as u64 > MAX_BYTES {
        return Err(io::Error::other("it is larger than 16 MiB: give the tunnel's own objects alone"));
    }
    Ok(text)
}

/// Of one file.
const MAX_BYTES: u64 = 16 << 20;

// What became of each flag of YurtTunnel's programs.

/// What the server's flags say that has a place in our settings.
#[derive(Debug)]
pub(crate) struct YurtServerFlags {
    /// Where edges and TLS come in.
    pub(crate) bind: IpAddr,
    /// Where HTTP comes in.
    pub(crate) insecure_bind: IpAddr,
    /// The port for agents.
    pub(crate) agents: u16,
    /// The port with TLS.
    pub(crate) secure: u16,
    /// The port without.
    pub(crate) insecure: u16,
    /// The port of metrics.
    pub(crate) meta: u16,
    /// Whether names of nodes are kept.
    pub(crate) names: bool,
}

/// What the server does without any flag.
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
            "bind-address" => set(&mut server.bind, value, "listen of [mode.cloud.stream.server], listen_ip of [mode.cloud.https]"),
            "insecure-bind-address" => set(&mut server.insecure_bind, value, "listen_ip of [mode.cloud.http]"),
            "tunnel-agent-connect-port" => set(&mut server.agents, value, "the port in listen of [mode.cloud.stream.server]"),
            "secure-port" => set(&mut server.secure, value, "the port in addr of [mode.cloud.https]"),
            "insecure-port" => set(&mut server.insecure, value, "the port in addr of [mode.cloud.http]"),
            "meta-port" => match set(&mut server.meta, value, METRICS) {
                (Kept, why) => (Changed, why),
                unread => unread,
            },
            "enable-dns-controller" => {
                server.names = value != "false";
                (Kept, if server.names { "[mode.cloud.node_names]" } else { "without [mode.cloud.node_names]" })
            }
            "kube-config" => (Changed, "the flag --k of this program"),
            "cert-dns-names" | "cert-ips" => (Changed, "the certificate in cert has to carry it: tunnel init --name makes one, or [mode.cloud.csr] has it issued with names, which the approver takes by --name"),
            "cert-dir" => (Changed, "each file is named by its own key: cert, key, client_ca"),
            IPTABLES if value == "false" => (Kept, "nothing is intercepted unless the settings say so"),
            IPTABLES => (Changed, INTERCEPT),
            "iptables-sync-period" | "dns-sync-period" => (Gone, "changes are taken up when they happen, and all is looked at anew every 30 min"),
            "egress-selector-enable" => (Gone, "it did nothing there; here [mode.cloud.egress] serves kube-apiserver's egress selector"),
            "server-count" => (Gone, "pods find each other by service of [mode.cloud.registry], and an edge needs a link to one of them"),
            "proxy-strategy" => (Gone, "a request goes to the node that it names, always"),
            name => of_any_program(name),
        };
        remark(verdict, name, value, why)
    });
    let mut remarks: Vec<_> = remarks.collect();
    // It did so without being told.
    if !flags.iter().any(|(name, _)| name == IPTABLES) {
        remarks.push(remark(Changed, IPTABLES, "true, its default", INTERCEPT));
    }
    (server, remarks)
}

/// Reads the agent's flags: where its edge finds the cloud, if one says so.
pub(crate) fn agent(flags: &[(String, String)]) -> (Option<Target>, Vec<Remark>) {
    let mut cloud = None;
    let remarks = flags.iter().map(|(name, value)| {
        let (verdict, why) = match name.as_str() {
            "tunnelserver-addr" => match value.parse() {
                Ok(at) => {
                    cloud = Some(at);
                    (Kept, "server_name of [mode.edge.stream.client]")
                }
                Err(_) => (Changed, "it is no host:port: put it into server_name of [mode.edge.stream.client]"),
            },
            "node-name" => (Changed, "NODE_NAME of the environment, or node of [mode.edge.stream.client]: it is another one for each node"),
            "node-ip" => (Changed, "NODE_IP of the environment, or node_ips of [mode.edge.stream.client]"),
            "agent-identifiers" => (Gone, "an edge is known by its node's name, and by the addresses of --node-ip and of its Node"),
            "apiserver-addr" => (Gone, "an edge asks Kubernetes for nothing but a certificate, and that by a kubeconfig"),
            "kube-config" => (Changed, "the flag --k of this program, where [mode.edge.csr] has a certificate issued; all else does without"),
            "cert-dir" => (Changed, "the authority is in cert of [mode.edge.stream.client]; file of [mode.edge.csr] has what is issued"),
            "meta-host" | "meta-port" => (Changed, "metrics_listen of [mode.edge.stream.client], which is off unless it is set"),
            name => of_any_program(name),
        };
        remark(verdict, name, value, why)
    });
    let remarks = remarks.collect();
    (cloud, remarks)
}

/// What became of a flag that programs of Kubernetes have, for their logs above all.
fn of_any_program(name: &str) -> (Mapping, &'static str) {
    match name.replace('_', "-").as_str() {
        "v" => (Changed, "the flag --v of this program has other steps: 2 is debug"),
        "logtostderr" | "alsologtostderr" | "log-dir" => (Kept, "a flag of this program by the same name"),
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
        "version" | "help" => (Gone, "it sets nothing"),
        _ => (Unknown, UNKNOWN),
    }
}

fn remark(verdict: Mapping, name: &str, value: &str, why: &str) -> Remark {
    Remark { verdict, what: format!("--{name}={value}"), why: why.to_owned() }
}

/// Takes a value over; one that is none stays as it was.
fn set<T: std::str::FromStr>(to: &mut T, value: &str, why: &'static str) -> (Mapping, &'static str) {
    match value.parse() {
        Ok(value) => {
            *to = value;
            (Kept, why)
        }
        Err(_) => (Gone, "it cannot be read: its default stands here"),
    }
}

const IPTABLES: &str = "enable-iptables";
const INTERCEPT: &str = "[mode.cloud.intercept] does that by nftables: give it the networks of the edge nodes; iptables is not touched";
const METRICS: &str = "the port in metrics_listen of [mode.cloud.stream.server], at --bind-address, as kubelets probe it; profiles (pprof) there are none";
const UNKNOWN: &str =
    "no flag that any YurtTunnel is known to have: what it was for has to be seen to by hand";

// What the objects of an old deployment say.

/// What was found of YurtTunnel.
#[derive(Debug, Default)]
pub(crate) struct YurtObjects {
    /// The server's flags, in their order, without dashes.
    pub(crate) server: Option<Vec<(String, String)>>,
    /// The agent's.
    pub(crate) agent: Option<Vec<(String, String)>>,
    /// What the ConfigMap of ports holds, and its namespace.
    pub(crate) ports: Option<(String, BTreeMap<String, String>)>,
    /// Whether there is the ConfigMap of node names.
    pub(crate) has_names: bool,
    /// Service and type of each Service of it.
    pub(crate) services: Vec<(String, String)>,
}

impl YurtObjects {
    /// Takes in the objects of a text, which are several documents or lists of them.
    ///
    /// # Errors
    ///
    /// It is neither YAML nor JSON.
    pub(crate) fn add(&mut self, text: &str) -> Result<(), String> {
        let objects: Vec<Value> = serde_saphyr::from_multiple(text)
            .map_err(|cause| format!("neither YAML nor JSON as kubectl prints it: {}", first_line(&cause)))?;
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

/// Name and value of each flag: `--name=value`, `--name value`, or a switch.
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

/// Texts by their keys; a number that somebody has written without quotes is one.
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

/// What `kubectl get` prints are lists of objects; of more than a few in each other there is no need.
const LISTS_IN_LISTS: usize = 3;

// The settings that are printed.

/// Settings of a pod.
///
/// # Errors
///
/// No server was found.
pub(crate) fn cloud(old: &YurtObjects) -> Result<String, String> {
    let Some(flags) = &old.server else { return Err(missing("yurt-tunnel-server", "Deployment")) };
    let (server, of_flags) = server(flags);
    let remarks = of_objects(old, &server, of_flags);
    let YurtServerFlags { bind, insecure_bind, agents, secure, insecure, meta, names } = server;
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
fn of_objects(old: &YurtObjects, server: &YurtServerFlags, mut remarks: Vec<Remark>) -> Vec<Remark> {
    let own = [server.agents, server.secure, server.insecure, server.meta].into();
    remarks.extend(ports(old, &own));
    remarks.extend(services(old));
    if old.has_names && server.names {
        let why = "[mode.cloud.node_names] writes it, by the same names".to_owned();
        let what = "ConfigMap yurt-tunnel-nodes".to_owned();
        remarks.push(Remark { verdict: Mapping::Kept, what, why });
    }
    remarks
}

/// Settings of an edge.
///
/// # Errors
///
/// No agent was found.
pub(crate) fn edge(old: &YurtObjects) -> Result<String, String> {
    let Some(flags) = &old.agent else { return Err(missing("yurt-tunnel-agent", "DaemonSet")) };
    let (cloud, remarks) = agent(flags);
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
fn namespace(old: &YurtObjects) -> Option<&str> {
    let (namespace, _) = old.ports.as_ref()?;
    let sound = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let is_label = (1..=63).contains(&namespace.len()) && namespace.bytes().all(sound);
    (is_label && !namespace.starts_with('-') && !namespace.ends_with('-')).then_some(namespace)
}

/// What became of the ports that the ConfigMap names.
fn ports(old: &YurtObjects, own: &BTreeSet<u16>) -> Vec<Remark> {
    let Some((found, data)) = &old.ports else { return Vec::new() };
    let odd = namespace(old).is_none().then(|| Remark {
        verdict: Mapping::Gone,
        what: format!("namespace {found:?} of yurt-tunnel-server-cfg"),
        why: format!("it is no namespace's name; {NAMESPACE} stands in its place"),
    });
    let (_, wrong) = ProxyPorts::parse(data, own);
    let kept = data.iter().filter(|(key, _)| READ.contains(&key.as_str())).map(|(key, value)| Remark {
        verdict: Mapping::Kept,
        what: format!("{key}: {value:?}"),
        why: "[mode.cloud.ports] reads it where it stands".to_owned(),
    });
    let wrong = wrong.into_iter().map(|wrong| Remark {
        verdict: Mapping::Gone,
        what: format!("{}: {:?}", wrong.key, wrong.found),
        why: wrong.remedy.to_owned(),
    });
    odd.into_iter().chain(kept).chain(wrong).collect()
}

fn services(old: &YurtObjects) -> impl Iterator<Item = Remark> {
    old.services.iter().map(|(name, kind)| {
        let why = match name.as_str() {
            "x-tunnel-server-internal-svc" => {
                "deploy/kustomize/yurttunnel has it; one of your own needs the annotation tunnel.cloud.io/ports: managed"
            }
            "x-tunnel-server-svc" => "deploy/kustomize/yurttunnel has it, as a NodePort: give it your type",
            _ => "no Service that any YurtTunnel is known to have",
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
        Mapping::Gone => "gone",
        Mapping::Unknown => "unknown",
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

#[cfg(test)]
mod tests;
