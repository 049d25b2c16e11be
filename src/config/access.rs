//! Access rules: the keys that the tables of all listeners share. Absent keys are inherited from
//! `[server.connect]`.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::config::WarningKind;
use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::listen_tls::{PortTlsState, names};
use crate::config::table::ConfigTableReader;
use crate::config::value;
use crate::config::value::forms::FilePath;
use tunnel_base::policy::grants::GrantBounds;
use tunnel_base::policy::{CertificateGlob, Network, Networks, Rules};
use tunnel_base::serde_forms::non_empty;

/// `[server.connect] and [edge.http_proxy]`: access rules.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct AccessConfigKeys {
    /// Networks or addresses of load balancers in front of that port. Each of their connections must begin with a PROXY
    /// header (v1 or v2). Its address applies to allow_from, rules, shares and the log. A connection without a header
    /// is closed. Default: none.
    ///
    /// Example: `["10.0.0.5", "10.0.0.6"]`
    proxy_protocol: Option<Networks>,
    /// Authentication of clients: "none", or "basic" for user and password. Default: "none", with a warning unless
    /// listen is on loopback or allow_from is set.
    ///
    /// Required: `"none"`
    auth: Option<AuthKind>,
    /// File (htpasswd, bcrypt: htpasswd -B) of users for auth = "basic". Re-read when it changes. No default.
    ///
    /// Example: `"/etc/tunnel/auth/htpasswd"`
    users: Option<FilePath>,
    /// Networks or addresses of allowed clients. Default: any.
    ///
    /// Example: `["10.0.0.0/8", "fd00::/8"]`
    #[serde(deserialize_with = "non_empty::<_, Network, _>")]
    allow_from: Option<Networks>,
    /// Access rules: a request must match one rule, and a rule matches if all its parts do. users: names from the users
    /// file; if absent all clients, even those without a name. from: networks or addresses of clients; if absent all.
    /// nodes: patterns of node names, '*' matches any run of characters, case is ignored; if absent all. ports: target
    /// ports on the node, 1 to 65535; if absent all. Default: everything is allowed.
    ///
    /// Example: `[{ users = ["ops"], from = ["10.0.0.0/8"], nodes = ["edge-*"], ports = [22] }]`
    rules: Option<Rules>,
}

/// A value of `auth`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum AuthKind {
    None,
    Basic,
}

/// Access rules of a listener. By default all clients may reach all targets.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessConfig {
    /// Networks of load balancers in front of the port.
    pub proxy_protocol: Networks,
    /// Networks that clients may connect from; `None` allows any.
    pub allow_from: Option<Networks>,
    /// The passwords of clients; `None` requires none.
    pub auth: Option<PasswordFile>,
    /// What clients may reach; empty allows everything.
    pub rules: Rules,
    /// Names (CN or DNS) of accepted client certificates. Empty at ports that request none.
    pub names: Vec<CertificateGlob>,
    /// What grants give besides, over users' links.
    pub bounds: GrantBounds,
}

/// The htpasswd file (bcrypt) against which the user name and the password of a client are checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PasswordFile {
    /// The file.
    pub users: FilePath,
    /// The full key that sets it; in another table if it is inherited.
    pub key: String,
}

/// How clients of a port can authenticate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AuthMethods {
    /// Whether clients can send a user name and password.
    pub(crate) password: bool,
    /// Whether it can use TLS, and thus certificates.
    pub(crate) tls: PortTlsState,
}

impl AuthMethods {
    /// Returns true if clients must present a certificate, so that they need no password.
    fn certified(self) -> bool {
        self.tls == PortTlsState::On { client_certificate: true }
    }

    /// Returns a hint how to restrict the port.
    fn hint(self) -> &'static str {
        match (self.password, self.tls) {
            (true, PortTlsState::On { .. }) => "set client_ca, auth = \"basic\" or allow_from",
            (true, _) => "set auth = \"basic\" or allow_from",
            (false, PortTlsState::On { .. }) => "set client_ca or allow_from",
            (false, _) => "set allow_from",
        }
    }
}

impl AccessConfig {
    /// The keys that change while a listener is open. Others open it again.
    pub(crate) const LIVE_KEYS: [&str; 5] = ["allow_from", "auth", "names", "rules", "users"];

    /// Returns the values of those keys.
    pub(crate) fn rights(&self) -> (&Option<Networks>, Option<&FilePath>, &[CertificateGlob], &Rules) {
        let Self { proxy_protocol: _, allow_from, auth, rules, names, bounds: _ } = self;
        (allow_from, auth.as_ref().map(|auth| &auth.users), names, rules)
    }

    /// Reads the keys of a listener's table, and records the values in effect. Absent keys are taken from `default`.
    pub(crate) fn read(table: &mut ConfigTableReader<'_>, proofs: AuthMethods, default: &Self) -> Self {
        let AccessConfigKeys { proxy_protocol, auth: kind, users, allow_from, rules } = table.fields();
        let auth = auth(table, kind, users, proofs, &default.auth);
        if let Some(rules) = &rules {
            check_rule_users(table, "rules", rules, proofs.certified());
        }
        if let (Some(rules), Some(None)) = (&rules, &auth)
            && rules.has_users()
            && !proofs.certified()
        {
            let expected =
                "without auth = \"basic\" no client has a user name, so the rule matches no client";
            table.error("rules", Some("a rule requires users".to_owned()), expected);
        }
        if let Some(proxies) = &proxy_protocol {
            warn_trusted(table, proxies);
        }
        let access = Self {
            proxy_protocol: proxy_protocol.unwrap_or_else(|| default.proxy_protocol.clone()),
            allow_from: allow_from.or_else(|| default.allow_from.clone()),
            auth: auth.unwrap_or_default(),
            rules: rules.unwrap_or_else(|| default.rules.clone()),
            names: names(table, proofs.tls),
            bounds: GrantBounds::default(),
        };
        table.record(&access.keys());
        access
    }

    /// Returns the keys that set these rules.
    fn keys(&self) -> AccessConfigKeys {
        let users = self.rights().1.cloned();
        let auth = if users.is_some() { AuthKind::Basic } else { AuthKind::None };
        AccessConfigKeys {
            proxy_protocol: Some(self.proxy_protocol.clone()),
            auth: Some(auth),
            users,
            allow_from: self.allow_from.clone(),
            rules: Some(self.rules.clone()),
        }
    }

    /// Warns if clients can use the port without authentication, or send it passwords unencrypted. `key` is the key to
    /// change, `reached` what the port gives access to.
    pub(crate) fn warn_if_open(
        &self,
        key: String,
        at: SocketAddr,
        proofs: AuthMethods,
        reached: &str,
        report: &mut ConfigDiagnostics,
    ) {
        if self.auth.is_some() && proofs.password {
            return proofs.tls.warn_passwords(key, at, report);
        }
        let fenced = self.allow_from.as_ref().is_some_and(|nets| !nets.contains_all_addresses());
        if self.auth.is_some() || proofs.certified() || at.ip().is_loopback() || fenced {
            return;
        }
        let text =
            format!("anyone who reaches {at} can reach {reached} without authentication; {}", proofs.hint());
        report.warn(key, WarningKind::Insecure, text);
    }
}

/// Checks the keys for authentication. Returns `None` if they have an error, which is recorded.
pub(super) fn auth(
    table: &ConfigTableReader<'_>,
    kind: Option<AuthKind>,
    users: Option<FilePath>,
    proofs: AuthMethods,
    default: &Option<PasswordFile>,
) -> Option<Option<PasswordFile>> {
    // A key with an error was reported already. Conclusions from its absence would mislead.
    if table.is_wrong("users") || table.is_wrong("auth") {
        return None;
    }
    let basic = kind.map(|kind| kind == AuthKind::Basic);
    let silent = |found: &str| Some(found.to_owned());
    let auth = match (basic, users, default) {
        (Some(true), Some(users), _) | (None, Some(users), Some(_)) => {
            Some(PasswordFile { users, key: table.key("users") })
        }
        (Some(true) | None, None, Some(default)) => Some(default.clone()),
        (Some(false) | None, None, _) => None,
        (Some(true), None, None) => {
            table.error("users", None, "auth is \"basic\"; set the htpasswd file");
            return None;
        }
        (Some(false) | None, Some(_), _) => {
            let found = if basic.is_some() { "set, but auth is \"none\"" } else { "set, but auth is not" };
            table.error("users", silent(found), "set auth = \"basic\"");
            return None;
        }
    };
    if auth.is_some() && !proofs.password && !proofs.certified() && table.is_present() {
        let found = if basic.is_some() { "\"basic\"" } else { "\"basic\", inherited from [server.connect]" };
        let expected = "clients of this port cannot send a password, so none would be accepted; set auth = \"none\" in this \
                      table, and restrict clients with allow_from";
        table.error("auth", silent(found), expected);
        return None;
    }
    Some(auth)
}

/// Records an error for each user of a rule that no client can be. The user name of a password cannot contain ':', but
/// the name in a certificate can, if clients are `certified`.
pub(crate) fn check_rule_users(
    table: &ConfigTableReader<'_>,
    key: &'static str,
    rules: &Rules,
    certified: bool,
) {
    for (i, j, user) in rules.users() {
        if user.trim().is_empty() || user.contains('*') || user.contains(':') && !certified {
            let expected = "expected a user name without ':' and '*'; for all users leave the list out";
            let part = format!("[{i}].users[{j}]");
            let found = format!("{:?}", value::excerpt(user));
            table.error_in(key, &part, found, expected);
        }
    }
}

/// Warns if every client may send a PROXY header.
pub(crate) fn warn_trusted(table: &ConfigTableReader<'_>, proxies: &Networks) {
    if proxies.contains_all_addresses() {
        let text = "any client can claim any address; list only the networks of your load balancers";
        table.warn(PROXIES, WarningKind::Insecure, text);
    }
}

/// The key for load balancers, in every table with a port.
const PROXIES: &str = "proxy_protocol";
