//! The HTTP proxy of an edge: its table and its port.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::admission::http_proxy::NAME;
use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen;
use crate::config::listen_tls::PortTlsState;
use crate::config::table::ConfigTableReader;
use crate::config::value::forms;
use crate::startup::{NotPrepared, Prepared, StartupErrorCollector};
use tunnel_base::policy::NodeGlob;
use tunnel_net::listen::TcpListenSocket;

/// `[edge.http_proxy]`: HTTP proxy for programs on this node: CONNECT host:port, and plain requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct EdgeProxyConfig {
    /// Address (ip:port) of the proxy. Required.
    ///
    /// Required: `"127.0.0.1:3128"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub listen: Option<SocketAddr>,
    /// The hosts that are nodes.
    ///
    /// Example: `["edge-*"]`
    pub nodes: Option<Vec<NodeGlob>>,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

impl EdgeProxyConfig {
    /// Returns what an open port does not follow: it closes, and opens again.
    pub(crate) fn of_port(&self) -> impl PartialEq {
        (self.listen, &self.nodes, &self.access.proxy_protocol)
    }

    /// Binds its port.
    pub(crate) fn bind(&self, startup: &mut StartupErrorCollector) -> Prepared<TcpListenSocket> {
        startup.bind("edge.http_proxy.listen", self.listen.ok_or(NotPrepared)?)
    }
}

/// Reads the table. Returns `None` if it is absent, or has no address to listen on, which is an error.
pub(crate) fn read(edge: &mut ConfigTableReader<'_>) -> Option<EdgeProxyConfig> {
    let mut table = edge.table(NAME);
    let mut proxy: EdgeProxyConfig = table.fields();
    listen::require(&table);
    let methods = AuthMethods { password: true, tls: PortTlsState::Unsupported };
    proxy.access = AccessConfig::read(&mut table, methods, &AccessConfig::default());
    if let Some(at) = proxy.listen {
        let reached = "everything that [server.edge_access] allows this edge";
        proxy.access.warn_if_open(table.key("listen"), at, methods, reached, &mut table.report());
    }
    table.close_optional(&proxy);
    proxy.listen.is_some().then_some(proxy)
}

/// The table of an edge's proxy.
pub(crate) const KEY: &str = "edge.http_proxy";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Environment;
    use crate::config::table::read_file;

    fn read_edge_text(text: &str) -> (Option<EdgeProxyConfig>, Vec<String>) {
        let reading = read_file(text, &Environment::default(), read);
        let errors = reading.errors.iter().map(ToString::to_string);
        let all = errors.chain(reading.warnings.iter().map(ToString::to_string)).collect();
        (reading.settings, all)
    }

    #[test]
    fn the_edges_proxy_listens_on_the_configured_address() {
        let (proxy, read_text) = read_edge_text("[http_proxy]\nlisten = \"[::1]:3128\"");
        assert_eq!((proxy.unwrap().listen.unwrap().to_string().as_str(), read_text), ("[::1]:3128", vec![]));
        assert_eq!(read_edge_text(""), (None, vec![]), "no table, no port");
        assert!(read_edge_text("[http_proxy]").1[0].contains("set the address to listen on"));
    }

    #[test]
    fn an_open_edge_proxy_is_a_warning_unless_access_is_restricted() {
        let open = "[http_proxy]\nlisten = \"0.0.0.0:3128\"\n";
        let (_, read_text) = read_edge_text(open);
        let [read_text] = read_text.try_into().unwrap();
        let says = "http_proxy.listen: anyone who reaches 0.0.0.0:3128 can reach everything that [server.edge_access] allows";
        assert!(
            read_text.starts_with(says) && read_text.contains("set auth = \"basic\" or allow_from"),
            "{read_text}"
        );
        assert_eq!(read_edge_text(&format!("{open}allow_from = [\"10.244.1.0/24\"]")).1, [""; 0]);
    }

    #[test]
    fn node_name_patterns_of_the_edges_proxy_are_read() {
        let nodes = |line: &str| {
            read_edge_text(&format!("[http_proxy]\nlisten = \"127.0.0.1:1\"\n{line}")).0.unwrap().nodes
        };
        assert_eq!(nodes(""), None);
        assert_eq!(nodes("nodes = []"), Some(vec![]));
        assert_eq!(nodes("nodes = [\"*.site.example\"]"), Some(vec!["*.site.example".parse().unwrap()]));
    }
}
