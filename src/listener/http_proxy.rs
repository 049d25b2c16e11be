//! The HTTP proxy of a server: its table and its port.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::admission::http_proxy::{HttpProxyProtocol, NAME};
use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen_tls::{self, ListenerTlsConfig, PortTlsState, Tls};
use crate::config::table::ConfigTableReader;
use crate::config::value::forms;
use crate::config::{WarningKind, listen};
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigs, ListenerKind, single};
use crate::startup::tls_files::NamedFile;
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_proto::frame::SessionCategory;

/// `[server.http_proxy]`: HTTP proxy: CONNECT as in `[server.connect]`, and plain requests (GET http://node:port/…),
/// each of which is sent where its URL points to. Without this table there is no proxy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct HttpProxyConfig {
    /// Address (ip:port) of the proxy. Required.
    ///
    /// Required: `"127.0.0.1:8080"`
    #[serde(deserialize_with = "forms::listen_address")]
    pub listen: Option<SocketAddr>,
    /// TLS of the port, if it has any.
    #[serde(skip)]
    pub tls: Option<ListenerTlsConfig>,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: NAME, by_address: true, read };

/// Reads the table. A table without an address to listen on is an error.
fn read(mut table: ConfigTableReader<'_>, inherited: &mut AccessConfig) -> ListenerConfigs {
    let mut proxy: HttpProxyConfig = table.fields();
    listen::require(&table);
    proxy.tls = ListenerTlsConfig::read(&mut table);
    let methods = AuthMethods { password: true, tls: PortTlsState::of(proxy.tls.as_ref()) };
    proxy.access = AccessConfig::read(&mut table, methods, inherited);
    listen_tls::require_names(&table);
    if let Some(at) = proxy.listen {
        proxy.access.warn_if_open(table.key("listen"), at, methods, "every node", &mut table.report());
        check_superedge_variables(&table, &proxy.access);
    }
    table.close_optional(&proxy);
    single(proxy.listen.is_some().then_some(proxy))
}

/// Checks SuperEdge's environment variables for this port, which are keys here. A port that they restrict must not open
/// without the keys.
fn check_superedge_variables(table: &ConfigTableReader<'_>, access: &AccessConfig) {
    if table.env.proxy_authorization.as_deref() == Some("true") && access.auth.is_none() {
        let expected =
            "it requires passwords; set auth = \"basic\" and users in [server.http_proxy], or unset it";
        table.report().error("PROXY_AUTHORIZATION", Some("true".to_owned()), expected);
    }
    if table.env.cloud_proxy.as_deref().is_some_and(|list| !list.trim().is_empty()) {
        let text = "SuperEdge's list of targets that clients may not reach is ignored; set in rules what they may reach";
        table.report().warn("CLOUD_PROXY", WarningKind::Insecure, text);
    }
}

impl ListenerConfig for HttpProxyConfig {
    fn files(&self) -> Vec<NamedFile> {
        self.tls.iter().flat_map(ListenerTlsConfig::files).collect()
    }

    fn access(&self) -> (&str, &AccessConfig) {
        ("server.http_proxy", &self.access)
    }

    fn bind(&self, tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let listener = startup.bind("server.http_proxy.listen", self.listen.ok_or(NotPrepared)?);
        let tls = self.tls.as_ref().map(|files| files.load(tls, startup)).transpose();
        let category = SessionCategory::HttpProxy;
        Ok(vec![BoundPort::tcp_or_tls(category, listener?, tls?, HttpProxyProtocol)])
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;

    use super::*;
    use crate::config::Environment;
    use crate::config::table::read_file;

    fn read_text(text: &str, env: &Environment) -> (Option<String>, Vec<String>) {
        let mut inherited = AccessConfig::default();
        let reading = read_file(text, env, |file| read(file.table("http_proxy"), &mut inherited).pop());
        let listen = |proxy: std::sync::Arc<dyn ListenerConfig>| {
            let proxy: &HttpProxyConfig = (proxy.as_ref() as &dyn Any).downcast_ref().unwrap();
            proxy.listen.unwrap().to_string()
        };
        let errors = reading.errors.iter().map(ToString::to_string);
        let read_text = errors.chain(reading.warnings.iter().map(ToString::to_string)).collect();
        (reading.settings.map(listen), read_text)
    }

    #[test]
    fn the_http_proxy_listens_on_the_configured_address() {
        let env = Environment::default();
        assert_eq!(read_text("[http_proxy]\nlisten = \"[::1]:8080\"", &env).0.as_deref(), Some("[::1]:8080"));
        assert_eq!(read_text("", &env), (None, vec![]));
        assert!(read_text("[http_proxy]", &env).1[0].contains("set the address to listen on"));
    }

    #[test]
    fn superedges_proxy_restrictions_in_the_environment_must_be_replaced() {
        let env = Environment {
            proxy_authorization: Some("true".into()),
            cloud_proxy: Some("10.0.0.0/8".into()),
            ..Environment::default()
        };
        let text = "[http_proxy]\nlisten = \"127.0.0.1:8080\"";
        let open_warnings = read_text(text, &env).1;
        assert!(
            open_warnings[0].contains("PROXY_AUTHORIZATION") && open_warnings[0].contains("auth = \"basic\"")
        );
        assert!(
            open_warnings[1].contains("CLOUD_PROXY") && open_warnings[1].contains("rules"),
            "{open_warnings:?}"
        );
        let closed = format!("{text}\nauth = \"basic\"\nusers = \"/users\"");
        assert_eq!(read_text(&closed, &env).1.len(), 1);
        assert_eq!(read_text("", &env).1, [""; 0], "no port is open");
    }
}
