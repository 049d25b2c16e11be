//! The egress listener: where kube-apiserver sends CONNECT, over mutual TLS or a Unix socket.

use educe::Educe;
use serde::{Deserialize, Serialize};

use crate::admission::connect::ConnectProtocol;
use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen::{self, ListenAddress};
use crate::config::listen_tls::{self, ListenerTlsConfig, PortTlsState, Tls};
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::FilePath;
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigs, ListenerKind, single};
use crate::startup::tls_files::NamedFile;
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_base::policy::Networks;
use tunnel_proto::frame::SessionCategory;

/// `[server.egress]`: CONNECT to node:port for kube-apiserver's egress selector (HTTPConnect). Without this table it is
/// disabled. For a Unix socket, the owner of its file replaces the access rules, except rules.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct EgressConfig {
    /// Address (ip:port), with TLS, or "unix:/path": a socket that only the user of this program may open, created at
    /// start and removed at exit. With a socket, cert, key, client_ca, names, proxy_protocol, auth, users and
    /// allow_from are errors. Required.
    ///
    /// Required: `"[::]:8000"`
    pub(crate) listen: Option<ListenAddress>,
    /// File (PEM) of the certificate chain presented to clients, leaf first. Re-read when it changes.
    // SuperEdge's paths of certificate and key.
    #[educe(Default = "/etc/tunnel/certs/egress.crt".into())]
    pub cert: FilePath,
    /// File (PEM) of its private key.
    #[educe(Default = "/etc/tunnel/certs/egress.key".into())]
    pub key: FilePath,
    /// File (PEM) of the CA that signs clients' certificates. Re-read when it changes. Clients without such a
    /// certificate are denied; clients with one need no password, and its name is their user in rules and in the log.
    /// Default: none, no certificate is requested, with a warning as for `[server.connect]`.
    ///
    /// Example: `"/etc/tunnel/certs/egress-ca.crt"`
    pub client_ca: Option<FilePath>,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "egress", by_address: true, read };

impl EgressConfig {
    /// Returns the files for TLS, which the port always has.
    fn tls(&self) -> ListenerTlsConfig {
        let Self { cert, key, client_ca, .. } = self.clone();
        ListenerTlsConfig { table: "server.egress.".to_owned(), cert, key, client_ca }
    }
}

impl ListenerConfig for EgressConfig {
    fn files(&self) -> Vec<NamedFile> {
        if let Some(ListenAddress::Unix(_)) = self.listen { Vec::new() } else { self.tls().files() }
    }

    fn access(&self) -> (&str, &AccessConfig) {
        ("server.egress", &self.access)
    }

    fn bind(&self, tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let key = "server.egress.listen";
        let category = SessionCategory::Egress;
        let port = match &self.listen {
            Some(ListenAddress::Unix(path)) => {
                BoundPort::new(category, startup.bind_local(key, path)?, |_| ConnectProtocol)
            }
            Some(ListenAddress::Port(at)) => {
                let tls = self.tls().load(tls, startup);
                let listener = startup.bind(key, *at);
                BoundPort::tcp_or_tls(category, listener?, Some(tls?), ConnectProtocol)
            }
            None => return Err(NotPrepared),
        };
        Ok(vec![port])
    }
}

/// Reads the table. A table without an address to listen on is an error.
fn read(mut table: ConfigTableReader<'_>, inherited: &mut AccessConfig) -> ListenerConfigs {
    let mut egress: EgressConfig = table.fields();
    listen::require(&table);
    let is_socket = matches!(egress.listen, Some(ListenAddress::Unix(_)));
    let client_certificate = is_socket || egress.client_ca.is_some();
    let methods = AuthMethods { password: !is_socket, tls: PortTlsState::On { client_certificate } };
    egress.access = AccessConfig::read(&mut table, methods, inherited);
    if is_socket {
        // Every process that may open its file has access, so keys that restrict clients are useless.
        for key in TCP_ONLY_KEYS.into_iter().filter(|key| table.has(key)) {
            let expected = "remove it; only the socket file's owner can connect, and without TLS";
            table.error(key, Some("set, but listen is a Unix socket".to_owned()), expected);
        }
        (egress.access.allow_from, egress.access.proxy_protocol) = (None, Networks::default());
    } else {
        listen_tls::require_names(&table);
    }
    if let Some(ListenAddress::Port(at)) = egress.listen {
        egress.access.warn_if_open(table.key("listen"), at, methods, "every node", &mut table.report());
    }
    table.close_optional(&egress);
    single(egress.listen.is_some().then_some(egress))
}

/// Keys that have no meaning with a Unix socket.
const TCP_ONLY_KEYS: [&str; 8] =
    ["cert", "key", "client_ca", "names", "allow_from", "proxy_protocol", "auth", "users"];

#[cfg(test)]
mod tests {
    use std::any::Any;

    use super::*;
    use crate::config::table::read_file;
    use crate::config::{Environment, ParsedConfig};

    fn errors(text: &str) -> (Option<EgressConfig>, Vec<String>) {
        let mut inherited = AccessConfig { allow_from: Some(Networks::default()), ..AccessConfig::default() };
        let ParsedConfig { mut settings, errors, .. } =
            read_file(text, &Environment::default(), |file| read(file.table("egress"), &mut inherited));
        let egress = settings.pop();
        let egress = egress.and_then(|egress| (egress.as_ref() as &dyn Any).downcast_ref().cloned());
        (egress, errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn an_egress_unix_socket_takes_no_access_keys() {
        let (egress, reported) = errors("[egress]\nlisten = \"unix:/run/tunnel/egress.sock\"");
        let EgressConfig { listen, access, .. } = egress.unwrap();
        let path = "/run/tunnel/egress.sock".into();
        assert_eq!((listen, access.allow_from, reported), (Some(ListenAddress::Unix(path)), None, vec![]));
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
