//! SuperEdge's keys, with their places in this program's schema.

/// A key of a file, the key of the schema that it sets, and how its value changes. A `*` is a name that the user chose.
pub(super) type KeyTranslation = (&'static str, &'static str, ValueConversion);

/// How a value becomes the value of a key of the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueConversion {
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
    /// The value is used elsewhere in this file, or not at all.
    Dropped,
}

use ValueConversion::{Dropped, Filled, List, Port, Same, Split, TlsVersion};

/// All addresses of a machine.
const ANY: &str = "0.0.0.0";

/// SuperEdge's keys of `[mode.cloud]`.
pub(super) const SERVER: &[KeyTranslation] = &[
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
pub(super) const EDGE: &[KeyTranslation] = &[
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
