//! Tables of a server's config, except those of its listeners.

pub mod addresses;
pub mod clients;
pub mod invitations;
pub mod peers;
pub mod registry;

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use educe::Educe;
use serde::{Deserialize, Serialize};

use crate::config::admin_ports::AdminPorts;
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::{self, ByteSize, FilePath, Millis};
use crate::config::{self, DAY, MIN_MEMORY, WarningKind, access};
use tunnel_base::policy::targets::Targets;
use tunnel_base::policy::{Networks, NodeGlob};
use tunnel_link::grpc::PLAIN_IDLE_TIMEOUT;
use tunnel_proto::names::ServerDisplayName;

/// `[server.links]`: the port on which edges and peers make links, its certificates and tokens, and the ports for
/// operators.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct LinkListenerConfig {
    /// Name of this server on the live page, in `tunnel nodes` and `tunnel status`, here and at its peers. It is sent
    /// to peers, edges and users that link, and identifies no one. Default: the host's name.
    ///
    /// Example: `"eu-1"`
    pub name: Option<ServerDisplayName>,
    /// Address (ip:port) that edges link to: gRPC, always over TLS.
    #[serde(deserialize_with = "forms::listen_address")]
    // SuperEdge's port.
    #[educe(Default = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9000)))]
    pub listen: SocketAddr,
    /// Networks or addresses of load balancers in front of that port. Each of their connections must begin with a PROXY
    /// header (v1 or v2) that contains the client's address; a connection without one is closed.
    ///
    /// Example: `["10.0.0.5", "10.0.0.6"]`
    pub proxy_protocol: Networks,
    /// Networks or addresses of HTTP proxies in front of that port, through which links come inside of a WebSocket. The
    /// address of such a link is the last one in X-Forwarded-For that is none of these.
    ///
    /// Example: `["10.0.0.7"]`
    pub trusted_proxies: Networks,
    /// The ports for operators.
    #[serde(skip)]
    pub ports: AdminPorts,
    /// The kernel's congestion control for links, one of /proc/sys/net/ipv4/tcp_allowed_congestion_control. "bbr"
    /// handles packet loss better than "cubic". But once in ten seconds of bulk transfer it pauses for 0.2 s and one or
    /// two RTTs, for keystrokes too. An edge's interactive link next to a bulk link always uses "cubic", or "reno" if
    /// that is not allowed. Default: the system's, net.ipv4.tcp_congestion_control.
    ///
    /// Example: `"bbr"`
    #[serde(deserialize_with = "forms::filled_text")]
    pub congestion: Option<String>,
    /// File (PEM) of the private key for that TLS. Re-read when it changes.
    // The paths of `tunnel init`.
    #[educe(Default = "/etc/tunnel/certs/server.key".into())]
    pub key: FilePath,
    /// File (PEM) of its certificate chain, leaf first. Re-read when it changes.
    #[educe(Default = "/etc/tunnel/certs/server.crt".into())]
    pub cert: FilePath,
    /// File of lines "node:token" that edges must match; "default:token" applies to all other nodes. A line without a
    /// token ("node:") rejects its node, even with a certificate. With "default" any edge can take any other name. That
    /// causes a warning, and so do tokens of less than 32 characters. If this server queries Kubernetes, a Node without
    /// an edge label is rejected, even with a valid token or certificate (see edges of `[server.node_names]`). Re-read
    /// when it changes. Within 10 s of a change, links with tokens that were removed are closed, and their sessions
    /// with them. A file that is missing, empty, or has no token at all changes nothing. To change a token without
    /// cutting sessions, run `tunnel token rotate`: "node:NEW previous=OLD" accepts both tokens until the edge has the
    /// new one.
    #[educe(Default = "/etc/tunnel/token/token".into())]
    pub token_file: FilePath,
    /// File (PEM) of the CA that signs servers' certificates, with which servers authenticate each other. Re-read when
    /// it changes. Not required while there is only one server. Once it exists, a caller that presents
    /// another certificate than a server's is rejected.
    #[educe(Default = config::CA.into())]
    pub peer_ca: FilePath,
}

/// `[server.session]`: limits of sessions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct SessionConfig {
    /// Timeout for resuming a session while its edge is disconnected.
    #[serde(with = "Millis::<0, DAY>")]
    #[educe(Default = config::RESUME_TIMEOUT)]
    pub resume_timeout: Duration,
    /// Maximum time for which a session of a user's link may be without a path. Her program requests 12h on port 22 and
    /// 10m on others, and the smallest value of her program, her servers and the edge applies. Sessions of all other
    /// clients have resume_timeout.
    #[serde(with = "Millis::<0, DAY>")]
    #[educe(Default = config::MAX_RESUME_TIMEOUT)]
    pub max_resume_timeout: Duration,
    /// Timeout for the target to answer a client.
    #[serde(with = "Millis::<100, 600_000>")]
    // Two seconds more than an edge's dial timeout, so that its reason arrives.
    #[educe(Default = Duration::from_secs(12))]
    pub open_timeout: Duration,
    /// Maximum number of concurrent sessions; further ones get 503.
    #[serde(deserialize_with = "forms::count::<MAX_SESSIONS, _>")]
    // A process reaches its memory limit long before.
    #[educe(Default = 100_000)]
    pub max_sessions: usize,
    /// Maximum number of concurrent sessions per client; further ones get 503. A client is a user if auth = "basic",
    /// otherwise an IPv4 address or an IPv6 /64. A session counts until its last bytes are delivered. Default: a
    /// quarter of max_sessions.
    #[serde(deserialize_with = "forms::count::<MAX_SESSIONS, _>")]
    #[educe(Default = 25_000)]
    pub max_per_client: usize,
    /// Timeout for sessions to finish once the server is stopping.
    #[serde(with = "Millis::<0, DAY>")]
    #[educe(Default = config::DRAIN_TIMEOUT)]
    pub drain_timeout: Duration,
    /// Timeout for sessions without traffic to an edge of SuperEdge v0.8 or v0.9. Such an edge does not report that a
    /// target has closed, so without traffic nothing else ends the session before its client does.
    #[serde(with = "Millis::<60_000, DAY>")]
    #[educe(Default = PLAIN_IDLE_TIMEOUT)]
    pub superedge_idle_timeout: Duration,
    /// Maximum number of bytes that sessions may reserve for incoming data. Default: a fifth of the memory limit, at
    /// most 256MiB. As many bytes again may be unacknowledged, and as many may be relayed. Half of it may be queued for
    /// programs of SuperEdge. The metrics tunnel_buffer_bytes and tunnel_buffer_limit_bytes
    /// report each.
    ///
    /// Example: `"256MiB"`
    #[serde(with = "ByteSize::<MIN_MEMORY>")]
    pub buffer_memory: Option<usize>,
    /// Maximum number of bytes of memory that this process may use: its limits of sessions, links and connections are
    /// parts of it. Default: the smallest limit of its control groups, or all memory of the machine. A larger value has
    /// no effect.
    ///
    /// Example: `"1GiB"`
    #[serde(with = "ByteSize::<MIN_MEMORY>")]
    pub memory_limit: Option<usize>,
}

/// `[server.edge_access]`: what edges may reach through this server.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct EdgeAccessConfig {
    /// Targets that edges may have this server dial, each "network:port" or "network:*", such as "10.96.0.10:53" or
    /// "10.0.0.0/8:443". "self" as network is this server's addresses, without loopback and those of dummy interfaces.
    /// This server resolves names, and dials only addresses that an entry contains. Loopback, link-local and similar
    /// addresses and the metadata addresses of clouds are dialled only if an entry contains nothing else, such as
    /// "127.0.0.1:5432". The request must contain a name that resolves to them: an edge's proxy rejects such an address
    /// itself, however it is written. Any edge with a token may reach all these targets, and programs at its node do so
    /// with its `[edge.http_proxy]`.
    #[educe(Default = Targets::none())]
    pub targets: Targets,
    /// Patterns of nodes that edges may reach, such as "edge-*"; '*' matches any run of characters, case is ignored. A
    /// target with the address of such a node, or a Service there, is reached through the node's edge.
    pub nodes: Vec<NodeGlob>,
}

/// `[server.direct]`: targets at no node with an edge that a server dials itself for its clients.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct DirectConfig {
    /// Targets, each "network:port" or "network:*". This server resolves names, and dials only addresses that an entry
    /// contains. In rules the node is "-". Never dialled are loopback, link-local, multicast, unspecified and reserved
    /// addresses, the metadata addresses of clouds, and this server's own ports. Clients of egress with a certificate
    /// need no entry.
    ///
    /// Example: `["10.0.0.0/8:443"]`
    #[educe(Default = Targets::none())]
    pub targets: Targets,
}

/// Default maximum of bytes that sessions may reserve.
pub const MEMORY: usize = 256 << 20;

pub(crate) fn links(cloud: &mut ConfigTableReader<'_>) -> LinkListenerConfig {
    let mut table = cloud.table("links");
    let mut links: LinkListenerConfig = table.fields();
    links.ports = AdminPorts::read(&mut table);
    access::warn_trusted(&table, &links.proxy_protocol);
    table.close(&links);
    links
}

pub(crate) fn session(cloud: &mut ConfigTableReader<'_>) -> SessionConfig {
    let mut table = cloud.table("session");
    let mut session: SessionConfig = table.fields();
    if !table.has("max_per_client") {
        session.max_per_client = session.max_sessions.div_ceil(CLIENTS);
    }
    table.close(&session);
    session
}

pub(crate) fn edge_access(cloud: &mut ConfigTableReader<'_>) -> EdgeAccessConfig {
    let access: EdgeAccessConfig = cloud.settings("edge_access");
    let listed = cloud.env.edge_no_proxy.as_deref().is_some_and(|list| !list.trim().is_empty());
    if listed && !(access.targets.is_empty() && access.nodes.is_empty()) {
        let text = "SuperEdge's list of targets that edges may not reach is ignored; [server.edge_access] lists what they may reach";
        cloud.report().warn("EDGE_NO_PROXY", WarningKind::Insecure, text);
    }
    access
}

/// Number of clients that together may use all sessions, unless the file sets a limit.
const CLIENTS: usize = 4;

/// Upper limit; more than a process can have sockets for.
const MAX_SESSIONS: usize = 10_000_000;
