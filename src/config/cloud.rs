//! Settings of a pod, as read from the table `mode.cloud`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::fold::{Report, Table};
use super::{AdminSettings, Concern, Environment, Faults, Listen, Reading, Warning, listen, value};
use crate::policy::{Glob, Networks, TargetEntry, Targets};

mod addresses;
mod certificates;
mod cluster;
mod csr;
mod egress;
mod https;
mod intercept;
mod invitations;
mod lists;
mod node_names;
mod ports;
mod proxy;
mod registry;
mod siblings;
mod ssh;
mod tcp;
mod tls;

pub use addresses::AddressSettings;
pub use certificates::Certificates;
pub use cluster::ClusterSettings;
pub(super) use csr::issuing;
pub use csr::{Csr, ServerNames};
pub use egress::Egress;
pub use https::{Http, Https, HttpsMode, NodePort, TargetIdentity};
pub use intercept::{Intercept, MarkBits};
pub use invitations::Invitations;
pub use node_names::NodeNameSettings;
pub use ports::PortSettings;
pub use proxy::HttpProxy;
pub use registry::{EtcdEndpoint, EtcdSettings, Publish, RegistrySettings};
pub use siblings::{Named, SiblingSettings};
pub use ssh::Ssh;
pub use tcp::{Forward, TcpPort};
pub use tls::{Tls, TlsVersion};

/// All settings of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cloud {
    /// Where edges link, and who may.
    pub server: Server,
    /// Versions and cipher suites of TLS on that port.
    pub tls: Tls,
    /// Where clients come in with CONNECT, and who may.
    pub ssh: Ssh,
    /// Where kube-apiserver comes in with CONNECT; `None`: nowhere.
    pub egress: Option<Egress>,
    /// The HTTP proxy; `None`: there is none.
    pub http_proxy: Option<HttpProxy>,
    /// Traffic of the host that is caught by its address; `None`: none is.
    pub intercept: Option<Intercept>,
    /// TCP ports, each for one target.
    pub tcp: Vec<TcpPort>,
    /// TLS ports, each for one port of every node.
    pub https: Https,
    /// HTTP ports, each for one port of every node.
    pub http: Http,
    /// Where ports of nodes are named; `None`: nowhere.
    pub ports: Option<PortSettings>,
    /// Where DNS reads the addresses of every node; `None`: nowhere.
    pub node_names: Option<NodeNameSettings>,
    /// Where commands of this machine come in.
    pub admin: AdminSettings,
    /// Limits of sessions.
    pub session: PodSessions,
    /// Where others learn which node is at this pod.
    pub registry: RegistrySettings,
    /// Where it is kept who joins by invitation; `None`: nobody does.
    pub invitations: Option<Invitations>,
    /// The certificates that the cluster's signers issue for this pod; `None`: none.
    pub csr: Option<Csr>,
    /// How clients may name a target other than by its node's name.
    pub addresses: AddressSettings,
    /// What edges may ask for.
    pub allow: Allow,
    /// `POD_NAME`, a label of the metrics; may be empty.
    pub pod_name: String,
    /// `POD_NAMESPACE`, a label of the metrics; may be empty.
    pub pod_namespace: String,
    /// `POD_IP`: where clients and other pods reach this one; there if anything is published, or Kubernetes is asked.
    pub pod_ip: Option<IpAddr>,
}

/// `[mode.cloud.stream.server]`: the port edges dial, and those for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// gRPC, always TLS.
    pub listen: Listen,
    /// Networks of balancers before that port.
    pub proxy_protocol: Networks,
    /// Health, log level, metrics.
    pub log_listen: Listen,
    /// Metrics alone; `None`: only on the log port.
    pub metrics_listen: Option<Listen>,
    /// gRPC's debugging port; `None`: there is none.
    pub channelz: Option<std::net::SocketAddr>,
    /// The kernel's congestion control for links; `None`: the system's default.
    pub congestion: Option<Arc<str>>,
    /// PEM file of the server's private key.
    pub key: PathBuf,
    /// PEM file of the server's certificates.
    pub cert: PathBuf,
    /// File of lines `node:token`.
    pub tokenfile: PathBuf,
    /// PEM file of the authority that signs pods' certificates. Need not exist while pods have no siblings.
    pub ca: PathBuf,
}

/// `[mode.cloud.session]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSessions {
    /// How long a session without a path is kept.
    pub grace: Duration,
    /// How long a client waits for its target.
    pub open_timeout: Duration,
    /// How many sessions at once.
    pub max: usize,
    /// How many of them for one client.
    pub max_for_client: usize,
    /// How long sessions may go on once the pod is stopping.
    pub drain: Duration,
    /// Bytes that sessions may promise; `None`: a third of the process's memory limit, at most [`MEMORY`].
    pub memory: Option<usize>,
}

/// `[mode.cloud.allow]`: what edges may ask this pod for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allow {
    /// What they may have this pod dial; by default nothing.
    pub targets: Targets,
    /// Which nodes they may reach; none: no node.
    pub nodes: Vec<Glob>,
}

/// Bytes that sessions may promise at most, unless the file sets it.
pub const MEMORY: usize = 256 << 20;

impl Cloud {
    /// Reads a pod's settings.
    ///
    /// # Errors
    /// Everything that is wrong with the text, at once.
    pub fn read(text: &str, env: &Environment) -> Result<(Self, Vec<Warning>), Faults> {
        Self::examine(text, env).whole()
    }

    /// As [`Self::read`], for who goes on looking for faults where the text has some.
    pub fn examine(text: &str, env: &Environment) -> Reading<Self> {
        let mut report = Report::default();
        let cloud = Self::gather(text, env, &mut report);
        report.finish(text, cloud)
    }

    pub(super) fn gather(text: &str, env: &Environment, report: &mut Report) -> Self {
        let mut file = Table::parse(text, report);
        let mut mode = file.table("mode", report);
        let mut cloud = mode.table("cloud", report);
        super::other_mode(&mut mode, &cloud, "edge", report);
        let mut stream = cloud.table("stream", report);
        let server = server(&mut stream, report);
        let superedge = cluster::superedge(&mut stream, report);
        stream.finish(report);
        let ssh = ssh::read(&mut cloud, report);
        let registry = registry::read(&mut cloud, superedge, env, report);
        let https = https::read(&mut cloud, &ssh.access, report);
        let http = https::read_http(&mut cloud, &ssh.access, report);
        let settings = Self {
            server,
            tls: tls::read(&mut cloud, report),
            egress: egress::read(&mut cloud, &ssh.access, report),
            http_proxy: proxy::read(&mut cloud, &ssh.access, env, report),
            intercept: intercept::read(&mut cloud, &ssh.access, env, report),
            tcp: tcp::read(&mut cloud, &ssh.access, report),
            ports: ports::read(&mut cloud, (&http, &https), env, report),
            https,
            http,
            ssh,
            admin: listen::admin(&mut cloud, "cloud", env, report),
            session: session(&mut cloud, report),
            node_names: node_names::read(&mut cloud, &registry, env, report),
            registry,
            invitations: invitations::read(&mut cloud, env, report),
            csr: csr::read(&mut cloud, env, report),
            allow: allow(&mut cloud, env, report),
            pod_name: env.pod_name.clone().unwrap_or_default(),
            pod_namespace: env.pod_namespace.clone().unwrap_or_default(),
            pod_ip: super::address("POD_IP", env.pod_ip.as_deref(), report),
            // Behind the modules.
            addresses: addresses::read(&mut cloud, env, report),
        };
        for table in [cloud, mode, file] {
            table.finish(report);
        }
        settings
    }
}

fn server(stream: &mut Table<'_>, report: &mut Report) -> Server {
    let mut table = stream.table("server", report);
    let grpc = listen::read(&mut table, "listen", "grpc_port", report);
    let server = Server {
        listen: grpc.unwrap_or(Listen::by_default(Ipv4Addr::UNSPECIFIED, GRPC_PORT, "listen")),
        proxy_protocol: listen::proxies(&mut table, report).unwrap_or_default(),
        log_listen: listen::log(&mut table, report),
        metrics_listen: listen::read(&mut table, "metrics_listen", "metrics_port", report),
        channelz: listen::channelz(&mut table, report),
        congestion: table.read("congestion", value::nonempty, report).map(Arc::from),
        key: table.read("key", value::path, report).unwrap_or_else(|| KEY_FILE.into()),
        cert: table.read("cert", value::path, report).unwrap_or_else(|| CERT.into()),
        tokenfile: table.read("tokenfile", value::path, report).unwrap_or_else(|| TOKENFILE.into()),
        ca: table.read("ca", value::path, report).unwrap_or_else(|| super::CA.into()),
    };
    table.finish(report);
    server
}

fn session(cloud: &mut Table<'_>, report: &mut Report) -> PodSessions {
    let mut table = cloud.table("session", report);
    let wait = value::duration(Duration::from_millis(100)..=Duration::from_secs(600));
    let max = table.read("max", value::count(1..=MOST_SESSIONS), report).unwrap_or(MAX);
    let for_client = table.read("max_for_client", value::count(1..=MOST_SESSIONS), report);
    let session = PodSessions {
        grace: super::grace(&mut table, report),
        open_timeout: table.read("open_timeout", wait, report).unwrap_or(OPEN_TIMEOUT),
        max,
        max_for_client: for_client.unwrap_or(max.div_ceil(CLIENTS)),
        drain: super::drain(&mut table, report),
        memory: table.read("memory", value::size(super::LEAST_MEMORY), report),
    };
    table.finish(report);
    session
}

fn allow(cloud: &mut Table<'_>, env: &Environment, report: &mut Report) -> Allow {
    let mut table = cloud.table("allow", report);
    let targets = table.list("targets", value::parsed::<TargetEntry>, report).unwrap_or_default();
    let nodes = table.list("nodes", value::parsed::<Glob>, report).unwrap_or_default();
    table.finish(report);
    let listed = env.edge_no_proxy.as_deref().is_some_and(|list| !list.trim().is_empty());
    if listed && !(targets.is_empty() && nodes.is_empty()) {
        let text =
            "SuperEdge's list of what edges may not reach is not read: [mode.cloud.allow] says what they may";
        report.warn("EDGE_NO_PROXY".to_owned(), Concern::OpenDoor, text);
    }
    Allow { targets: targets.into_iter().collect(), nodes }
}

/// What SuperEdge's manifests open for edges.
const GRPC_PORT: u16 = 9000;

/// Two seconds more than an edge takes to give up a target, so that its reason arrives.
const OPEN_TIMEOUT: Duration = Duration::from_secs(12);

/// Sessions at once: a pod's memory limit is met long before.
const MAX: usize = 100_000;

/// Clients that together may have all sessions, unless the file sets it.
const CLIENTS: usize = 4;

/// More sessions than a process can have sockets for.
const MOST_SESSIONS: usize = 10_000_000;

/// SuperEdge's fixed path of the server's key.
const KEY_FILE: &str = "/etc/tunnel/certs/cloud.key";

/// SuperEdge's fixed path of the server's certificate.
const CERT: &str = "/etc/tunnel/certs/cloud.crt";

/// SuperEdge's fixed path of the token file.
const TOKENFILE: &str = "/etc/tunnel/token/token";
