//! The egress listener: where kube-apiserver sends CONNECT, over mutual TLS or a Unix socket.

use crate::config::listen_tls;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::listen::{self, ListenAddress};
use crate::config::listen_tls::{ListenerTlsConfig, PortTlsState};
use crate::config::table::ConfigTable;
use crate::config::value::forms;
use crate::listener::authenticated::UnixListenerProtocol;
use crate::listener::connect::ConnectProtocol;
use crate::listener::{BoundListener, ListenerConfig, ListenerKind, ListenerSetup, NamedFile, single};
use crate::startup::NotPrepared;
use tunnel_base::policy::Networks;
use tunnel_proto::frame::SessionCategory;

/// `[server.egress]`: CONNECT to node:port for kube-apiserver's egress selector (HTTPConnect). Without this table it is
/// disabled. For a Unix socket, the owner of its file replaces the access rules, except rules.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(default)]
struct EgressConfigKeys {
    /// Address (ip:port), with TLS, or "unix:/path": a socket that only the user of this program may open, created at
    /// start and removed at exit. With a socket, cert, key, client_ca, names, proxy_protocol, auth, users and
    /// allow_from are errors. Required.
    ///
    /// Required: `"[::]:8000"`
    listen: Option<ListenAddress>,
    /// File (PEM) of the certificate chain presented to clients, leaf first. Re-read when it changes.
    #[serde(deserialize_with = "forms::file")]
    cert: PathBuf,
    /// File (PEM) of its private key.
    #[serde(deserialize_with = "forms::file")]
    key: PathBuf,
    /// File (PEM) of the CA that signs clients' certificates. Re-read when it changes. Clients without such a
    /// certificate are denied; clients with one need no password, and its name is their user in rules and in the log.
    /// Default: none, no certificate is requested, with a warning as for `[server.connect]`.
    ///
    /// Example: `"/etc/tunnel/certs/egress-ca.crt"`
    #[serde(deserialize_with = "forms::file")]
    client_ca: Option<PathBuf>,
}

impl Default for EgressConfigKeys {
    /// SuperEdge's paths of certificate and key.
    fn default() -> Self {
        let [cert, key] = ["/etc/tunnel/certs/egress.crt", "/etc/tunnel/certs/egress.key"].map(PathBuf::from);
        Self { listen: None, cert, key, client_ca: None }
    }
}

/// The server's CONNECT listener for the egress selector of kube-apiserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EgressConfig {
    /// A port, always with TLS.
    Port {
        /// Address where clients connect.
        listen: SocketAddr,
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

pub(crate) const KIND: ListenerKind = ListenerKind {
    name: "egress",
    by_address: true,
    is_live: true,
    read: |tables| single(read(tables.server, &tables.inherited, tables.report)),
};

impl ListenerConfig for EgressConfig {
    fn files(&self) -> Vec<NamedFile> {
        match self {
            Self::Port { certificates, .. } => certificates.files(),
            Self::Unix { .. } => Vec::new(),
        }
    }

    fn access(&self) -> (&str, &AccessConfig) {
        let (Self::Port { access, .. } | Self::Unix { access, .. }) = self;
        ("server.egress", access)
    }

    fn bind(&self, setup: &mut ListenerSetup<'_>) -> Result<Vec<BoundListener>, NotPrepared> {
        let port = match self {
            Self::Port { listen, certificates, access } => {
                let access = setup.policies.prepare("server.egress", access, setup.startup);
                let tls = certificates.load(setup.tls, setup.startup);
                let listener = setup.startup.bind("server.egress.listen", *listen);
                let (access, tls, listener) = (access?, tls?, listener?);
                BoundListener::tcp_or_tls(
                    KIND.name,
                    SessionCategory::Egress,
                    listener,
                    access,
                    Some(tls),
                    ConnectProtocol,
                )
            }
            Self::Unix { path, access } => {
                let access = setup.policies.prepare("server.egress", access, setup.startup);
                let listener = setup.startup.bind_local("server.egress.listen", path);
                let (access, listener) = (access?, listener?);
                BoundListener::new(KIND.name, SessionCategory::Egress, listener, access, |_| {
                    UnixListenerProtocol(ConnectProtocol)
                })
            }
        };
        Ok(vec![port])
    }
}

/// Reads the table. Returns `None` if it is absent, or has no address to listen on, which is an error.
fn read(
    server: &mut ConfigTable<'_>,
    inherited: &AccessConfig,
    report: &mut ConfigDiagnostics,
) -> Option<EgressConfig> {
    let mut table = server.table(KIND.name, report);
    let keys: EgressConfigKeys = table.fields(report);
    listen::require(&table, report);
    let shown = keys.clone();
    let egress = match keys.listen.clone() {
        Some(ListenAddress::Unix(path)) => Some(unix(&mut table, path, inherited, report)),
        Some(ListenAddress::Port(listen)) => port(&mut table, keys, Some(listen), inherited, report),
        None => port(&mut table, keys, None, inherited, report),
    };
    table.close_optional(&shown, report);
    egress
}

fn port(
    table: &mut ConfigTable<'_>,
    EgressConfigKeys { cert, key, client_ca, .. }: EgressConfigKeys,
    listen: Option<SocketAddr>,
    inherited: &AccessConfig,
    report: &mut ConfigDiagnostics,
) -> Option<EgressConfig> {
    let certificates = ListenerTlsConfig { table: table.key(""), cert, key, client_ca };
    let proofs = AuthMethods { password: true, tls: PortTlsState::of(Some(&certificates)) };
    let access = AccessConfig::read(table, proofs, inherited, report);
    listen_tls::require_names(table, report);
    let listen = listen?;
    access.warn_if_open(table.key("listen"), listen, proofs, "every node", report);
    Some(EgressConfig::Port { listen, certificates, access })
}

/// Reads the keys of a Unix socket. Every process that may open its file has access, so keys that restrict clients are
/// useless.
fn unix(
    table: &mut ConfigTable<'_>,
    path: PathBuf,
    inherited: &AccessConfig,
    report: &mut ConfigDiagnostics,
) -> EgressConfig {
    let proofs = AuthMethods { password: false, tls: PortTlsState::On { client_certificate: true } };
    let access = AccessConfig::read(table, proofs, inherited, report);
    for key in TCP_ONLY_KEYS {
        if table.has(key) {
            let expected = "remove it; only the socket file's owner can connect, and without TLS";
            table.error(key, Some("set, but listen is a Unix socket".to_owned()), expected, report);
        }
    }
    EgressConfig::Unix {
        path,
        access: AccessConfig { allow_from: None, proxy_protocol: Networks::default(), ..access },
    }
}

/// Keys that have no meaning with a Unix socket.
const TCP_ONLY_KEYS: [&str; 8] =
    ["cert", "key", "client_ca", "names", "allow_from", "proxy_protocol", "auth", "users"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Environment;

    fn errors(text: &str) -> (Option<EgressConfig>, Vec<String>) {
        let mut report = ConfigDiagnostics::default();
        let mut file = ConfigTable::parse(text, &Environment::default(), &mut report);
        let inherited = AccessConfig { allow_from: Some(Networks::default()), ..AccessConfig::default() };
        let egress = read(&mut file, &inherited, &mut report);
        let errors = report.finish(text, ()).errors;
        (egress, errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn an_egress_unix_socket_takes_no_access_keys() {
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
    fn egress_needs_a_valid_listen_address() {
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
