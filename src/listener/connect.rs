//! The CONNECT listener of a server: its table and its ports.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::admission::connect::ConnectProtocol;
use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen;
use crate::config::listen_tls::{self, ListenerTlsConfig, PortTlsState, Tls};
use crate::config::table::ConfigTableReader;
use crate::config::value::forms;
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigs, ListenerKind, single};
use crate::startup::tls_files::NamedFile;
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_proto::frame::SessionCategory;

/// `[server.connect]`: the CONNECT listener for users and their tools, such as ssh. Its access rules are the defaults
/// of all other listeners' tables. Without this table there is no such port.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct ConnectConfig {
    /// Address (ip:port) where clients request node:port with HTTP CONNECT. Required.
    ///
    /// Required: `"127.0.0.1:8443"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub listen: Option<SocketAddr>,
    /// Address (ip:port) of a second port without TLS, for programs that know none, such as nc and corkscrew. Their
    /// passwords cross the network unencrypted. Requires cert. Default: none.
    ///
    /// Example: `"127.0.0.1:2222"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub plain_listen: Option<SocketAddr>,
    /// TLS of `listen`, if it has any.
    #[serde(skip)]
    pub tls: Option<ListenerTlsConfig>,
    /// Whether no key sets `listen`. The server then starts without it if it is not available.
    #[serde(skip)]
    pub is_default: bool,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "connect", by_address: false, read };

/// Reads the table, and warns if the port is open to all clients.
fn read(mut table: ConfigTableReader<'_>, inherited: &mut AccessConfig) -> ListenerConfigs {
    let mut connect: ConnectConfig = table.fields();
    listen::require(&table);
    connect.tls = ListenerTlsConfig::read(&mut table);
    let methods = AuthMethods { password: true, tls: PortTlsState::of(connect.tls.as_ref()) };
    connect.access = AccessConfig::read(&mut table, methods, &AccessConfig::default());
    listen_tls::require_names(&table);
    if table.has("plain_listen") && !table.has("cert") {
        let expected = "set cert and key, or remove it, because listen is without TLS already";
        table.error("plain_listen", Some("set, but cert is not".to_owned()), expected);
    }
    if let Some(at) = connect.listen {
        let key = table.key("auth");
        connect.access.warn_if_open(key, at, methods, "every node", &mut table.report());
    }
    if let Some(at) = connect.plain_listen {
        let key = table.key("plain_listen");
        let methods = AuthMethods { password: true, tls: PortTlsState::Unsupported };
        connect.access.warn_if_open(key, at, methods, "every node", &mut table.report());
    }
    connect.is_default = table.report().implied.contains(&table.key("listen"));
    *inherited = connect.access.clone();
    table.close_optional(&connect);
    single(connect.listen.is_some().then_some(connect))
}

impl ListenerConfig for ConnectConfig {
    fn files(&self) -> Vec<NamedFile> {
        self.tls.iter().flat_map(ListenerTlsConfig::files).collect()
    }

    fn access(&self) -> (&str, &AccessConfig) {
        ("server.connect", &self.access)
    }

    fn bind(&self, tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let key = "server.connect.listen";
        let by_default = self.is_default;
        let listener = startup.bind_optional(key, self.listen.ok_or(NotPrepared)?, by_default);
        let plain = self.plain_listen.map(|at| startup.bind("server.connect.plain_listen", at));
        let tls = self.tls.as_ref().map(|files| files.load(tls, startup)).transpose();
        let listener = listener?;
        let plain = plain.transpose()?;
        let tls = tls?;
        let ports =
            listener.map(|listener| (listener, tls)).into_iter().chain(plain.map(|plain| (plain, None)));
        let port =
            |(listener, tls)| BoundPort::tcp_or_tls(SessionCategory::Ssh, listener, tls, ConnectProtocol);
        Ok(ports.map(port).collect())
    }
}
