//! Keys of a process's ports for operators, which servers and edges share.

use crate::config::value::forms;
use std::net::{Ipv4Addr, SocketAddr};

use educe::Educe;
use serde::{Deserialize, Serialize};

use crate::config::WarningKind;
use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::table::ConfigTableReader;

/// `[server.links] and [edge.uplink]`: ports for operators.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct AdminPorts {
    /// Address (ip:port) of the admin listener: health, metrics and status page. Requests must use an address or
    /// localhost as Host; with any other Host only /livez, /readyz and /metrics are served. No edge dials it. If no key
    /// sets it and another program has the port, the process runs without it.
    #[serde(deserialize_with = "forms::listen_address")]
    // The kernel gives clients ports from 32768 to 60999, so another program takes 9010 only on purpose.
    #[educe(Default = SocketAddr::from((Ipv4Addr::LOCALHOST, 9010)))]
    pub admin_listen: SocketAddr,
    /// Address (ip:port) of /metrics, /livez and /readyz only, for Prometheus and probes; a server has /metrics/nodes and
    /// /sd/nodes there, too. At an edge it is the only port of the edge itself that clients may reach, so that a Prometheus can
    /// connect through the tunnel. Default: none; the admin listener serves them too.
    ///
    /// Example: `"127.0.0.1:9011"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub metrics_listen: Option<SocketAddr>,
    /// Address (ip:port) of channelz, gRPC's debugging service for gRPC's own clients. It lists links with addresses
    /// and counts, without TLS or a password.
    ///
    /// Example: `"127.0.0.1:5000"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub channelz_listen: Option<SocketAddr>,
    /// Whether no key sets `admin_listen`. The process then starts without it if the port is not available.
    #[serde(skip)]
    #[educe(Default = true)]
    pub is_default: bool,
    /// Whether the admin listener sets the log level, as SuperEdge's does.
    #[serde(skip)]
    pub sets_level: bool,
}

impl AdminPorts {
    /// Reads the keys of a table, and records the values in effect. Warns if other machines can reach gRPC's debugging
    /// port.
    pub(crate) fn read(table: &mut ConfigTableReader<'_>) -> Self {
        let mut ports: Self = table.fields();
        let key = table.key("admin_listen");
        ports.is_default = !table.has("admin_listen") || table.report().implied.contains(&key);
        ports.sets_level = table.report().spelling.0.contains_key(&key);
        if let Some(channelz) = ports.channelz_listen.filter(|at| !at.ip().is_loopback()) {
            let text = format!(
                "anyone who reaches {channelz} can read the addresses and names of all links; use 127.0.0.1:{}",
                channelz.port()
            );
            table.warn("channelz_listen", WarningKind::Insecure, text);
        }
        table.report().record(table.path(), &ports);
        ports
    }

    /// Warns if other machines can reach the admin listener, whose address this key sets.
    pub(crate) fn warn_if_reachable(&self, key: String, report: &mut ConfigDiagnostics) {
        let at = self.admin_listen;
        if at.ip().is_loopback() {
            return;
        }
        let local = format!("\"127.0.0.1:{}\"", at.port());
        let text = if self.sets_level {
            format!(
                "anyone who reaches {at} can read health and metrics and change the log level; restrict it with a \
                 firewall, or set admin_listen = {local} in the file that `tunnel migrate superedge` prints"
            )
        } else {
            format!("anyone who reaches {at} can read health and metrics; set admin_listen = {local}")
        };
        report.warn(key, WarningKind::Insecure, text);
    }
}
