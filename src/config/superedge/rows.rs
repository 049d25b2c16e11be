//! SuperEdge's keys, and those that this program had in such files before its own schema, with their places in the schema.

/// A key of a file, the key of the schema that it sets, and how its value changes. A `*` is a name that the user chose.
pub(super) type Row = (&'static str, &'static str, Change);

/// How a value becomes the value of a key of the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// The value stays as it is.
    Same,
    /// A port becomes an address: on the IP of `ip` or `proxyip` in the same table, by default on this one.
    Port(&'static str),
    /// An empty text means that the key is absent.
    Filled,
    /// A text with commas becomes a list.
    Split,
    /// A single text becomes a list.
    List,
    /// A version of TLS loses Go's prefix.
    TlsVersion,
    /// Keys of nested tables lose case and `_`.
    Rules,
    /// The value is used elsewhere in this file, or not at all.
    Dropped,
    /// A text of the first spelling becomes one of the second.
    Text(&'static str, &'static str),
}

use Change::{Dropped, Filled, List, Port, Same, Split, Text, TlsVersion};

/// All addresses of a machine.
const ANY: &str = "0.0.0.0";

/// SuperEdge's keys of `[mode.cloud]`.
pub(super) const SERVER: &[Row] = &[
    ("stream.server.grpc_port", "links.listen", Port(ANY)),
    ("stream.server.log_port", "links.admin_listen", Port(ANY)),
    ("stream.server.metrics_port", "links.metrics_listen", Port(ANY)),
    ("stream.server.channelz_addr", "links.channelz_listen", Filled),
    ("stream.server.key", "links.key", Same),
    ("stream.server.cert", "links.cert", Same),
    ("stream.server.tokenfile", "links.token_file", Same),
    ("stream.dns.configmap", "", Dropped),
    ("stream.dns.hosts", "", Dropped),
    ("stream.dns.service", "", Dropped),
    ("stream.dns.debug", "", Dropped),
    ("stream.register.service", "", Dropped),
    ("ssh.port", "connect.listen", Port(ANY)),
    ("egress.port", "egress.listen", Port(ANY)),
    ("egress.egressport", "egress.listen", Port(ANY)),
    ("egress.servercert", "egress.cert", Same),
    ("egress.serverkey", "egress.key", Same),
    ("egress.cert", "egress.cert", Same),
    ("egress.key", "egress.key", Same),
    ("egress.kubeconfig", "", Dropped),
    ("http_proxy.port", "http_proxy.listen", Port(ANY)),
    ("http_proxy.proxyport", "http_proxy.listen", Port(ANY)),
    ("http_proxy.ip", "", Dropped),
    ("http_proxy.proxyip", "", Dropped),
    ("https.addr.*", "https.ports.*", Same),
    ("https.cert", "https.cert", Same),
    ("https.key", "https.key", Same),
    ("tcp.*", "tcp.*", Same),
    ("tls.tls_min_version", "tls.min_version", TlsVersion),
    ("tls.tls_cipher_suites", "tls.cipher_suites", Split),
];

/// SuperEdge's keys of `[mode.edge]`.
pub(super) const EDGE: &[Row] = &[
    ("stream.client.token", "uplink.token", Same),
    ("stream.client.cert", "uplink.ca", Same),
    ("stream.client.dns", "uplink.tls_server_name", Filled),
    ("stream.client.server_name", "uplink.servers", List),
    ("stream.client.log_port", "uplink.admin_listen", Port(ANY)),
    ("stream.client.channelz_addr", "uplink.channelz_listen", Filled),
    ("https.cert", "target_tls.cert", Same),
    ("https.key", "target_tls.key", Same),
    ("http_proxy.port", "http_proxy.listen", Port("127.0.0.1")),
    ("http_proxy.proxyport", "http_proxy.listen", Port("127.0.0.1")),
    ("http_proxy.ip", "", Dropped),
    ("http_proxy.proxyip", "", Dropped),
];

/// Keys that this program had below `[mode.cloud]` before its own schema.
pub(super) const SERVER_OURS: &[Row] = &[
    ("stream.server.listen", "links.listen", Same),
    ("stream.server.proxy_protocol", "links.proxy_protocol", Same),
    ("stream.server.log_listen", "links.admin_listen", Same),
    ("stream.server.metrics_listen", "links.metrics_listen", Same),
    ("stream.server.congestion", "links.congestion", Same),
    ("stream.server.ca", "links.peer_ca", Same),
    ("admin.listen", "admin.listen", Same),
    ("admin.users", "admin.users", Same),
    ("ssh.listen", "connect.listen", Same),
    ("egress.listen", "egress.listen", Same),
    ("egress.client_ca", "egress.client_ca", Same),
    ("http_proxy.listen", "http_proxy.listen", Same),
    ("https.mode", "https.mode", Same),
    ("https.listen_ip", "https.listen_ip", Same),
    ("https.addr.*.to", "https.ports.*.target", Same),
    ("https.client_ca", "https.client_ca", Same),
    ("https.target_cert", "https.target_cert", Same),
    ("https.target_key", "https.target_key", Same),
    ("https.target_ca", "https.target_ca", Same),
    ("https.target_insecure", "https.target_insecure_skip_verify", Same),
    ("http.listen_ip", "http.listen_ip", Same),
    ("http.addr.*", "http.ports.*", Same),
    ("http.addr.*.to", "http.ports.*.target", Same),
    ("tcp.*.to", "tcp.*.target", Same),
    ("tcp.*.send_proxy", "tcp.*.send_proxy", Same),
    ("intercept.networks", "intercept.networks", Same),
    ("intercept.ports", "intercept.ports", Same),
    ("intercept.trust_edges", "intercept.trust_edge_addresses", Same),
    ("intercept.forwarded", "intercept.forwarded_networks", Same),
    ("intercept.port", "intercept.port", Same),
    ("intercept.table", "intercept.table", Same),
    ("intercept.mark", "intercept.mark", Same),
    ("ports.configmap", "node_ports.configmap", Same),
    ("ports.namespace", "node_ports.namespace", Same),
    ("ports.service", "node_ports.service", Same),
    ("node_names.configmap", "node_names.configmap", Same),
    ("node_names.key", "node_names.key", Same),
    ("node_names.lease", "node_names.lease", Same),
    ("node_names.namespace", "node_names.namespace", Same),
    ("node_names.edges", "node_names.edges", Same),
    ("node_names.names", "node_names.names", Same),
    ("node_names.service", "node_names.service", Same),
    ("node_names.lead_to", "node_names.resolve_to", Text("pod", "server")),
    ("session.grace", "session.resume_timeout", Same),
    ("session.open_timeout", "session.open_timeout", Same),
    ("session.max", "session.max_sessions", Same),
    ("session.max_for_client", "session.max_per_client", Same),
    ("session.drain", "session.drain_timeout", Same),
    ("session.memory", "session.buffer_memory", Same),
    ("registry.publish", "dns.publish", Same),
    ("registry.zone", "dns.zone", Same),
    ("registry.publish_names", "dns.publish_names", Same),
    ("registry.hosts", "dns.hosts_file", Same),
    ("registry.configmap", "dns.configmap", Same),
    ("registry.dns", "dns.resolvers", Same),
    ("registry.etcd", "dns.etcd.endpoints", Same),
    ("registry.etcd_prefix", "dns.etcd.prefix", Same),
    ("registry.etcd_ca", "dns.etcd.ca", Same),
    ("registry.etcd_cert", "dns.etcd.cert", Same),
    ("registry.etcd_key", "dns.etcd.key", Same),
    ("registry.etcd_user", "dns.etcd.user", Same),
    ("registry.etcd_password_file", "dns.etcd.password_file", Same),
    ("registry.siblings", "peers.addresses", Same),
    ("registry.siblings_service", "peers.dns_name", Same),
    ("registry.service", "peers.kubernetes_service", Same),
    ("registry.name", "peers.certificate_name", Same),
    ("registry.rebalance", "peers.rebalance", Same),
    ("allow.targets", "edge_access.targets", Text("own:", "self:")),
    ("allow.nodes", "edge_access.nodes", Same),
    ("addresses.kubernetes", "addresses.kubernetes", Same),
    ("addresses.*", "addresses.nodes.*", Same),
    ("direct.targets", "direct.targets", Same),
    ("invitations.store", "invitations.store", Same),
    ("invitations.file", "invitations.file", Same),
    ("invitations.secret", "invitations.secret", Same),
    ("invitations.etcd", "invitations.etcd.endpoints", Same),
    ("invitations.etcd_prefix", "invitations.etcd.prefix", Same),
    ("invitations.etcd_ca", "invitations.etcd.ca", Same),
    ("invitations.etcd_cert", "invitations.etcd.cert", Same),
    ("invitations.etcd_key", "invitations.etcd.key", Same),
    ("invitations.etcd_user", "invitations.etcd.user", Same),
    ("invitations.etcd_password_file", "invitations.etcd.password_file", Same),
    ("csr.profiles", "csr.profiles", Same),
    ("csr.dir", "csr.dir", Same),
    ("csr.services", "csr.services", Same),
    ("csr.names", "csr.names", Same),
    ("csr.lifetime", "csr.lifetime", Same),
    ("csr.agent_ca", "csr.edge_ca", Same),
];

/// Keys that this program had below `[mode.edge]` before its own schema.
pub(super) const EDGE_OURS: &[Row] = &[
    ("stream.client.node", "uplink.node", Same),
    ("stream.client.node_ips", "uplink.node_ips", Same),
    ("stream.client.token_file", "uplink.token_file", Same),
    ("stream.client.log_listen", "uplink.admin_listen", Same),
    ("stream.client.metrics_listen", "uplink.metrics_listen", Same),
    ("stream.client.congestion", "uplink.congestion", Same),
    ("admin.listen", "admin.listen", Same),
    ("admin.users", "admin.users", Same),
    ("session.grace", "session.resume_timeout", Same),
    ("session.drain", "session.drain_timeout", Same),
    ("session.memory", "session.buffer_memory", Same),
    ("allow.targets", "allow.targets", Text("own:", "self:")),
    ("https.ca", "target_tls.ca", Same),
    ("http_proxy.listen", "http_proxy.listen", Same),
    ("http_proxy.nodes", "http_proxy.nodes", Same),
    ("csr.agent", "csr.enabled", Same),
    ("csr.file", "csr.file", Same),
    ("csr.lifetime", "csr.lifetime", Same),
];

/// The tables of listeners, old and new. Each had the keys of [`ACCESS`], which are this program's.
pub(super) const LISTENERS: [(&str, &str); 7] = [
    ("ssh", "connect"),
    ("egress", "egress"),
    ("http_proxy", "http_proxy"),
    ("https", "https"),
    ("http", "http"),
    ("intercept", "intercept"),
    ("tcp.*", "tcp.*"),
];

/// The keys of every listener, which are the same in the schema.
pub(super) const ACCESS: [&str; 6] = ["proxy_protocol", "allow_from", "auth", "users", "rules", "names"];
