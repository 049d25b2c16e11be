//! The table `server.http_proxy`: the HTTP proxy, for CONNECT and for plain requests.

use crate::config::listen::{self, AccessConfig, AuthConfig, AuthMethods};
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, Environment, ListenConfig, WarningKind};

/// `[server.http_proxy]`: the HTTP proxy for clients of this server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpProxyConfig {
    /// Address where clients connect.
    pub listen: ListenConfig,
    /// Access rules.
    pub access: AccessConfig,
}

/// Reads the table. Returns `None` if it is absent, or has no address to listen on, which is an error.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    ssh: &AccessConfig,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<HttpProxyConfig> {
    let mut table = cloud.table("http_proxy", report);
    let listen = listen::read(&mut table, "listen", report);
    listen::require(&table, listen.is_some(), report);
    let access = AccessConfig::read(&mut table, PROOFS, ssh, report);
    let proxy = listen.map(|listen| HttpProxyConfig { listen, access });
    if let Some(HttpProxyConfig { listen, access }) = &proxy {
        access.warn_if_open(table.key(listen.key), listen.at, PROOFS, "every node", report);
        as_superedge(access, env, report);
    }
    table.finish(report);
    proxy
}

/// Checks SuperEdge's environment variables for this port, which are keys here. A port that they restrict must not open
/// without the keys.
fn as_superedge(access: &AccessConfig, env: &Environment, report: &mut Diagnostics) {
    if env.proxy_authorization.as_deref() == Some("true") && access.auth == AuthConfig::None {
        let wanted =
            "it requires passwords; set auth = \"basic\" and users in [server.http_proxy], or unset it";
        report.error("PROXY_AUTHORIZATION", Some("true".to_owned()), wanted);
    }
    if env.cloud_proxy.as_deref().is_some_and(|list| !list.trim().is_empty()) {
        let text = "SuperEdge's list of targets that clients may not reach is ignored; set in rules what they may reach";
        report.warn("CLOUD_PROXY".to_owned(), WarningKind::Insecure, text);
    }
}

const PROOFS: AuthMethods = AuthMethods { password: true, certificate: None };

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str, env: &Environment) -> (Option<String>, Vec<String>) {
        let mut report = Diagnostics::default();
        let mut file = ConfigTable::parse(text, &Environment::default(), &mut report);
        let ssh = AccessConfig::default();
        let proxy = read(&mut file, &ssh, env, &mut report);
        let reading = report.finish(text, ());
        let errors = reading.errors.iter().map(ToString::to_string);
        let told = errors.chain(reading.warnings.iter().map(ToString::to_string)).collect();
        (proxy.map(|proxy| proxy.listen.at.to_string()), told)
    }

    #[test]
    fn it_listens_where_it_is_told_to() {
        let env = Environment::default();
        assert_eq!(told("[http_proxy]\nlisten = \"[::1]:8080\"", &env).0.as_deref(), Some("[::1]:8080"));
        assert_eq!(told("", &env), (None, vec![]));
        assert!(told("[http_proxy]", &env).1[0].contains("set the address to listen on"));
    }

    #[test]
    fn what_the_environment_closed_is_not_left_open() {
        let env = Environment {
            proxy_authorization: Some("true".into()),
            cloud_proxy: Some("10.0.0.0/8".into()),
            ..Environment::default()
        };
        let text = "[http_proxy]\nlisten = \"127.0.0.1:8080\"";
        let told_open = told(text, &env).1;
        assert!(told_open[0].contains("PROXY_AUTHORIZATION") && told_open[0].contains("auth = \"basic\""));
        assert!(told_open[1].contains("CLOUD_PROXY") && told_open[1].contains("rules"), "{told_open:?}");
        let closed = format!("{text}\nauth = \"basic\"\nusers = \"/users\"");
        assert_eq!(told(&closed, &env).1.len(), 1);
        assert_eq!(told("", &env).1, [""; 0], "no port is open");
    }
}
