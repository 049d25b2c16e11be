//! The table `server.egress`: where kube-apiserver sends CONNECT, over mutual TLS or a Unix socket.

use std::path::PathBuf;

use crate::config::listen::{self, AccessConfig, AuthMethods, ListenAddress};
use crate::config::server::https::ListenerTlsConfig;
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, ListenConfig};
use tunnel_base::policy::Networks;

/// `[server.egress]`: the server's CONNECT listener for the egress selector of kube-apiserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EgressConfig {
    /// A port, always with TLS.
    Port {
        /// Address where clients connect.
        listen: ListenConfig,
        /// The server's certificate, and the CA of clients' certificates.
        certificates: ListenerTlsConfig,
        /// Access rules.
        access: AccessConfig,
    },
    /// A Unix socket. Only the owner of its file may open it.
    Unix {
        /// Path of the socket.
        path: PathBuf,
        /// What clients may reach.
        access: AccessConfig,
    },
}

impl EgressConfig {
    /// Returns the access rules.
    pub fn access(&self) -> &AccessConfig {
        match self {
            Self::Port { access, .. } | Self::Unix { access, .. } => access,
        }
    }
}

/// Reads the table. Returns `None` if it is absent, or has no address to listen on, which is an error.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    ssh: &AccessConfig,
    report: &mut Diagnostics,
) -> Option<EgressConfig> {
    let mut table = cloud.table("egress", report);
    let place = listen::place(&mut table, report);
    listen::require(&table, place.is_some(), report);
    let egress = match place {
        Some(ListenAddress::Unix(path)) => Some(unix(&mut table, path, ssh, report)),
        Some(ListenAddress::Port(listen)) => port(&mut table, Some(listen), ssh, report),
        None => port(&mut table, None, ssh, report),
    };
    table.finish(report);
    egress
}

fn port(
    table: &mut ConfigTable<'_>,
    listen: Option<ListenConfig>,
    ssh: &AccessConfig,
    report: &mut Diagnostics,
) -> Option<EgressConfig> {
    let certificates = ListenerTlsConfig::read(table, FILES, report);
    let proofs = AuthMethods { password: true, certificate: Some(certificates.client_ca.is_some()) };
    let access = AccessConfig::read(table, proofs, ssh, report);
    let listen = listen?;
    access.warn_if_open(table.key(listen.key), listen.at, proofs, "every node", report);
    Some(EgressConfig::Port { listen, certificates, access })
}

/// Reads the keys of a Unix socket. Every process that may open its file has access, so keys that restrict clients are
/// useless.
fn unix(
    table: &mut ConfigTable<'_>,
    path: PathBuf,
    ssh: &AccessConfig,
    report: &mut Diagnostics,
) -> EgressConfig {
    let proofs = AuthMethods { password: false, certificate: Some(true) };
    let access = AccessConfig::read(table, proofs, ssh, report);
    for key in ["cert", "key", "client_ca"] {
        table.ignore(key, report);
    }
    for key in USELESS {
        if table.has(key) {
            let wanted = "remove it; only the socket file's owner can connect, and without TLS";
            table.error(key, Some("set, but listen is a Unix socket".to_owned()), wanted, report);
        }
    }
    EgressConfig::Unix {
        path,
        access: AccessConfig { allow_from: None, proxy_protocol: Networks::default(), ..access },
    }
}

/// Keys that have no meaning with a Unix socket.
const USELESS: [&str; 8] =
    ["cert", "key", "client_ca", "names", "allow_from", "proxy_protocol", "auth", "users"];

/// SuperEdge's paths of certificate and key.
const FILES: [&str; 2] = ["/etc/tunnel/certs/egress.crt", "/etc/tunnel/certs/egress.key"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Environment;

    fn errors(text: &str) -> (Option<EgressConfig>, Vec<String>) {
        let mut report = Diagnostics::default();
        let mut file = ConfigTable::parse(text, &Environment::default(), &mut report);
        let ssh = AccessConfig { allow_from: Some(Networks::default()), ..AccessConfig::default() };
        let egress = read(&mut file, &ssh, &mut report);
        let errors = report.finish(text, ()).errors;
        (egress, errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_unix_socket_is_fenced_by_its_file() {
        let (egress, reported) = errors("[egress]\nlisten = \"unix:/run/tunnel/egress.sock\"");
        let Some(EgressConfig::Unix { path, access }) = egress else { panic!("{egress:?}") };
        assert_eq!(
            (path.to_str(), access.allow_from, reported),
            (Some("/run/tunnel/egress.sock"), None, vec![])
        );
        for key in ["client_ca = \"/ca\"", "allow_from = [\"10.0.0.0/8\"]", "key = \"/k\""] {
            let reported = errors(&format!("[egress]\nlisten = \"unix:/a\"\n{key}")).1;
            assert_eq!(reported.len(), 1, "{reported:?}");
        }
    }

    #[test]
    fn where_to_listen_must_be_said() {
        for (text, part) in [
            ("[egress]", "egress.listen: missing: set the address to listen on"),
            ("[egress]\nlisten = \"unix:relative\"", "or unix:/path"),
            ("[egress]\nlisten = \"8000\"", "expected ip:port"),
        ] {
            let reported = errors(text).1;
            assert!(reported.len() == 1 && reported[0].contains(part), "{text}: {reported:?}");
        }
        assert_eq!(errors("").0, None);
    }
}
