//! The table `edge.http_proxy`: the HTTP proxy for programs on this node.

use crate::config::listen::{self, AccessConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, ListenConfig, value};
use tunnel_base::policy::Glob;

/// `[edge.http_proxy]`: the HTTP proxy of an edge, for programs on its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpProxyConfig {
    /// Address where clients connect.
    pub listen: ListenConfig,
    /// Access rules.
    pub access: AccessConfig,
    /// The hosts that are nodes; `None` means names without a dot.
    pub nodes: Option<Vec<Glob>>,
}

/// Reads the table. Returns `None` if it is absent, or has no address to listen on, which is an error.
pub(crate) fn read(edge: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<HttpProxyConfig> {
    let mut table = edge.table("http_proxy", report);
    let listen = listen::read(&mut table, "listen", report);
    listen::require(&table, listen.is_some(), report);
    let access = AccessConfig::read(&mut table, PROOFS, &AccessConfig::default(), report);
    let nodes = table.list("nodes", value::parsed::<Glob>, report);
    let proxy = listen.map(|listen| HttpProxyConfig { listen, access, nodes });
    if let Some(HttpProxyConfig { listen, access, .. }) = &proxy {
        let reached = "everything that [server.edge_access] allows this edge";
        access.warn_if_open(table.key(listen.key), listen.at, PROOFS, reached, report);
    }
    table.finish(report);
    proxy
}

const PROOFS: AuthMethods = AuthMethods { password: true, certificate: None };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Environment;

    fn read_text(text: &str) -> (Option<HttpProxyConfig>, Vec<String>) {
        let mut report = Diagnostics::default();
        let mut file = ConfigTable::parse(text, &Environment::default(), &mut report);
        let proxy = read(&mut file, &mut report);
        let reading = report.finish(text, ());
        let errors = reading.errors.iter().map(ToString::to_string);
        (proxy, errors.chain(reading.warnings.iter().map(ToString::to_string)).collect())
    }

    #[test]
    fn it_listens_where_it_is_told_to() {
        let (proxy, told) = read_text("[http_proxy]\nlisten = \"[::1]:51009\"");
        assert_eq!((proxy.unwrap().listen.at.to_string().as_str(), told), ("[::1]:51009", vec![]));
        assert_eq!(read_text(""), (None, vec![]), "no table, no port");
        assert!(read_text("[http_proxy]").1[0].contains("set the address to listen on"));
    }

    #[test]
    fn who_opens_it_to_others_is_warned_unless_those_are_named() {
        let open = "[http_proxy]\nlisten = \"0.0.0.0:51009\"\n";
        let (_, told) = read_text(open);
        let [told] = told.try_into().unwrap();
        let says = "http_proxy.listen: anyone who reaches 0.0.0.0:51009 can reach everything that [server.edge_access] allows";
        assert!(told.starts_with(says) && told.contains("set auth = \"basic\" or allow_from"), "{told}");
        for closed in ["auth = \"basic\"\nusers = \"/users\"", "allow_from = [\"10.244.1.0/24\"]"] {
            assert_eq!(read_text(&format!("{open}{closed}")).1, [""; 0], "{closed}");
        }
    }

    #[test]
    fn which_hosts_are_nodes_may_be_said() {
        let nodes = |line: &str| {
            read_text(&format!("[http_proxy]\nlisten = \"127.0.0.1:1\"\n{line}")).0.unwrap().nodes
        };
        assert_eq!(nodes(""), None);
        assert_eq!(nodes("nodes = []"), Some(vec![]));
        assert_eq!(nodes("nodes = [\"*.site.example\"]"), Some(vec!["*.site.example".parse().unwrap()]));
    }
}
