//! Keys of listeners: an address (our form) or a port on all interfaces (SuperEdge's form), and access rules.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

use crate::config::admin_ports::AdminPorts;
use crate::config::table::ConfigTable;
use crate::config::{Diagnostics, Environment, WarningKind, value};
use tunnel_base::policy::{CertificateGlob, Network, Networks, Rules};
use tunnel_base::serde_forms::non_empty;

/// The address of a listener that may be a port or a Unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// An address with a port.
    Port(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl<'de> Deserialize<'de> for ListenAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let expected = |_| D::Error::custom("expected ip:port, for example 127.0.0.1:8000, or unix:/path");
        unix_path(&text)
            .map_or_else(|| text.parse().map(Self::Port).map_err(expected), |path| Ok(Self::Unix(path)))
    }
}

impl Serialize for ListenAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Port(at) => at.serialize(serializer),
            Self::Unix(path) => serializer.collect_str(&format_args!("unix:{}", path.display())),
        }
    }
}

/// Records an error if a listener's table is present without an address. Returns true if it has a valid one.
pub(crate) fn require(table: &ConfigTable<'_>, report: &mut Diagnostics) -> bool {
    if table.is_present() && !table.has(LISTEN) {
        table.error(LISTEN, None, "set the address to listen on: listen = \"ip:port\"", report);
    }
    table.has(LISTEN) && !table.is_wrong(LISTEN, report)
}

/// The address in a table without `listen`, which is not used.
pub(crate) const NO_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

// TLS of a port: its files, and the names in clients' certificates.

/// `[server.connect] and [server.http_proxy] and [server.https] and [server.egress] and [server.admin] and [edge.admin]`:
/// names of clients.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct NameKeys {
    /// Patterns of the names (CN or DNS name) of accepted certificates; '*' matches any run of characters. The user in
    /// rules is the first accepted name. Required with client_ca. ["*"] accepts every certificate that this CA has
    /// signed or will sign, except those made for edges, which are never accepted. No default.
    ///
    /// Example: `["kube-apiserver-kubelet-client"]`
    #[serde(deserialize_with = "non_empty::<_, CertificateGlob, _>")]
    names: Option<Vec<CertificateGlob>>,
}

/// `[server.connect] and [server.http_proxy] and [server.admin] and [edge.admin]`: TLS.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct TlsKeys {
    /// File (PEM) of the certificate chain presented to clients, leaf first. With it the port accepts only TLS. In an
    /// admin table, the port is that of admin_listen. Re-read when it changes. Default: none, no TLS.
    ///
    /// Example: `"/etc/tunnel/certs/server.crt"`
    #[serde(deserialize_with = "value::file")]
    cert: Option<PathBuf>,
    /// File (PEM) of its private key. No default.
    ///
    /// Example: `"/etc/tunnel/certs/server.key"`
    #[serde(deserialize_with = "value::file")]
    key: Option<PathBuf>,
    /// File (PEM) of the CA that signs clients' certificates. Re-read when it changes. Clients without such a
    /// certificate are denied; clients with one need no password, and its name is their user in rules and in the log.
    /// Default: none, no certificate is requested.
    ///
    /// Example: `"/etc/tunnel/certs/client-ca.crt"`
    #[serde(deserialize_with = "value::file")]
    client_ca: Option<PathBuf>,
}

/// The TLS files of a listener: its certificate and key, and the CA of its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerTlsConfig {
    /// The table that sets them.
    pub table: String,
    /// PEM file of the certificate chain, leaf first.
    pub cert: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
    /// PEM file of the CA that signs clients' certificates; `None` requests no certificates.
    pub client_ca: Option<PathBuf>,
}

/// TLS of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PortTls {
    /// The port cannot use TLS.
    Unsupported,
    /// The port could use TLS, but no certificate is set.
    Off,
    /// The port uses TLS.
    On {
        /// Whether clients must present a certificate.
        client_certificate: bool,
    },
}

impl ListenerTlsConfig {
    /// Reads the keys of a table without TLS by default, and records the values in effect. Returns `None` if they set no
    /// TLS, or after an error, which is recorded.
    pub(crate) fn read(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<Self> {
        let keys: TlsKeys = table.fields(report);
        require_pair(table, report);
        if table.has("client_ca") && !table.has("cert") {
            let expected = "set cert and key, because clients present certificates only over TLS";
            table.error("client_ca", Some("set, but cert is not".to_owned()), expected, report);
        }
        table.record(&keys, report);
        let TlsKeys { cert, key, client_ca } = keys;
        Some(Self { table: table.key(""), cert: cert?, key: key?, client_ca })
    }

    /// Returns the full key of one of the files.
    pub fn key(&self, file: &str) -> String {
        format!("{}{file}", self.table)
    }
}

impl PortTls {
    /// Returns the TLS of a port that has these files, if it has any.
    pub(crate) fn of(files: Option<&ListenerTlsConfig>) -> Self {
        files.map_or(Self::Off, |files| Self::On { client_certificate: files.client_ca.is_some() })
    }

    /// Warns if passwords for a port cross a network unencrypted. `key` is the key to change.
    fn warn_passwords(self, key: String, at: SocketAddr, report: &mut Diagnostics) {
        let hint = match self {
            Self::On { .. } => return,
            Self::Off => "set cert and key",
            Self::Unsupported => "this port cannot use TLS: listen on loopback, or offer another port",
        };
        if !at.ip().is_loopback() {
            let text = format!("passwords for {at} cross the network unencrypted; {hint}");
            report.warn(key, WarningKind::Insecure, text);
        }
    }
}

/// Records an error if a table has a certificate without its key, or the other way round.
pub(crate) fn require_pair(table: &ConfigTable<'_>, report: &mut Diagnostics) {
    for (given, other) in [("cert", "key"), ("key", "cert")] {
        if table.has(given) && !table.has(other) {
            table.error(other, None, "a certificate needs its key; set both files", report);
        }
    }
}

/// Records an error if a listener requests certificates, and does not say whose.
pub(crate) fn require_names(table: &ConfigTable<'_>, report: &mut Diagnostics) {
    if table.has("client_ca") && !table.has("names") {
        let expected = "list the names (CN or DNS) of client certificates, for example [\"system:kube-apiserver\"]; \
                      [\"*\"] accepts every certificate that a CA of client_ca has signed or will sign";
        table.error("names", None, expected, report);
    }
}

fn names(table: &mut ConfigTable<'_>, tls: PortTls, report: &mut Diagnostics) -> Vec<CertificateGlob> {
    if tls == PortTls::Unsupported {
        return Vec::new();
    }
    let keys: NameKeys = table.fields(report);
    if keys.names.is_some() && tls != (PortTls::On { client_certificate: true }) {
        let expected = "no certificate is requested; set client_ca to the CA that signs them";
        table.error("names", Some("set, but client_ca is not".to_owned()), expected, report);
    }
    table.record(&keys, report);
    keys.names.unwrap_or_default()
}

// The admin listener, and the socket for commands.

/// `[server.admin]` and `[edge.admin]`: operators' access to the process.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct AdminConfig {
    /// Unix socket ("unix:/path") for commands on this machine, such as tunnel status. Only the user of this program and
    /// root may open its file, which is created at start and removed at exit. If a path is set and fails, the program
    /// does not start. Default: server.sock, or edge.sock of an edge, in the first usable directory: /run/tunnel, which
    /// systemd or root creates; tunnel in $XDG_RUNTIME_DIR; /tmp/tunnel-UID. Only the user may access the last two
    /// (0700). If another process has the socket, the name is server-2.sock, and so on. The path is logged. If no socket
    /// can be made, the reason is logged and the program runs without one.
    ///
    /// Example: `"unix:/run/tunnel/admin.sock"`
    #[serde(with = "UnixSocket")]
    pub listen: Option<PathBuf>,
    /// File (htpasswd, bcrypt: htpasswd -B) of users who may open the live page and the status at the admin listener from
    /// other machines, with name and password. Re-read when it changes. Set cert and key, too. Default: none, only this
    /// machine may, and clients with an accepted certificate.
    ///
    /// Example: `"/etc/tunnel/auth/operators"`
    #[serde(deserialize_with = "value::file")]
    pub users: Option<PathBuf>,
    /// TLS of the admin listener, if it has any.
    #[serde(skip)]
    pub tls: Option<ListenerTlsConfig>,
    /// Who may open private pages from other machines.
    #[serde(skip)]
    pub access: AccessConfig,
    /// The name of the socket (without `.sock`) if no key sets its path.
    #[serde(skip)]
    pub name: &'static str,
    /// `XDG_RUNTIME_DIR`, a directory for such sockets.
    #[serde(skip)]
    pub runtime_dir: Option<PathBuf>,
}

/// Reads a table `admin`, and warns if other machines can reach the admin listener, whose address `key` sets in the
/// parent. `name` is the socket's name if there is no `listen = "unix:/path"`.
pub(crate) fn admin(
    parent: &mut ConfigTable<'_>,
    name: &'static str,
    (key, ports): (&str, &AdminPorts),
    env: &Environment,
    report: &mut Diagnostics,
) -> AdminConfig {
    let mut table = parent.table("admin", report);
    let mut admin: AdminConfig = table.fields(report);
    (admin.name, admin.runtime_dir) = (name, env.runtime_dir.clone());
    admin.tls = ListenerTlsConfig::read(&mut table, report);
    let tls = PortTls::of(admin.tls.as_ref());
    admin.access.names = names(&mut table, tls, report);
    require_names(&table, report);
    if let Some(users) = admin.users.clone() {
        let key = table.key("users");
        tls.warn_passwords(key.clone(), ports.admin_listen, report);
        admin.access.auth = AuthConfig::Basic { users, key };
    }
    if tls != (PortTls::On { client_certificate: true }) {
        ports.warn_if_reachable(parent.key(key), report);
    }
    table.close(&admin, report);
    admin
}

/// The form `unix:/path` of a socket's path.
struct UnixSocket;

impl UnixSocket {
    fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
        let expected = || D::Error::custom("expected unix:/path, for example unix:/run/tunnel/server.sock");
        unix_path(&String::deserialize(deserializer)?).map(Some).ok_or_else(expected)
    }

    fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_ref().map(|path| format!("unix:{}", path.display())).serialize(serializer)
    }
}

/// Returns the path in `unix:/path`.
fn unix_path(text: &str) -> Option<PathBuf> {
    let path = text.strip_prefix("unix:")?;
    (path.starts_with('/') && !path.contains('\0')).then(|| path.into())
}

/// Warns if every client may send a PROXY header.
pub(crate) fn warn_trusted(table: &ConfigTable<'_>, proxies: &Networks, report: &mut Diagnostics) {
    if proxies.contains_all_addresses() {
        let text = "any client can claim any address; list only the networks of your load balancers";
        report.warn(table.key(PROXIES), WarningKind::Insecure, text);
    }
}

/// The key for the address that clients connect to.
const LISTEN: &str = "listen";

/// The key for load balancers, in every table with a port.
const PROXIES: &str = "proxy_protocol";

// Access rules: the keys that the tables of all listeners share. Absent keys are inherited from `[server.connect]`.

/// `[server.connect] and [edge.http_proxy]`: access rules.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct AccessKeys {
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
    #[serde(deserialize_with = "value::file")]
    users: Option<PathBuf>,
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
enum AuthKind {
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
    /// How clients authenticate.
    pub auth: AuthConfig,
    /// What clients may reach; empty allows everything.
    pub rules: Rules,
    /// Names (CN or DNS) of accepted client certificates. Empty at ports that request none.
    pub names: Vec<CertificateGlob>,
}

/// How clients of a listener authenticate, besides certificates.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AuthConfig {
    /// No authentication.
    #[default]
    None,
    /// User name and password, checked against an htpasswd file (bcrypt).
    Basic {
        /// The htpasswd file.
        users: PathBuf,
        /// The full key that sets it; in another table if it is inherited.
        key: String,
    },
}

/// How clients of a port can authenticate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AuthMethods {
    /// Whether clients can send a user name and password.
    pub(crate) password: bool,
    /// Whether it can use TLS, and thus certificates.
    pub(crate) tls: PortTls,
}

impl AuthMethods {
    /// Returns true if clients must present a certificate, so that they need no password.
    fn certified(self) -> bool {
        self.tls == PortTls::On { client_certificate: true }
    }

    /// Returns a hint how to restrict the port.
    fn hint(self) -> &'static str {
        match (self.password, self.tls) {
            (true, PortTls::On { .. }) => "set client_ca, auth = \"basic\" or allow_from",
            (true, _) => "set auth = \"basic\" or allow_from",
            (false, PortTls::On { .. }) => "set client_ca or allow_from",
            (false, _) => "set allow_from",
        }
    }
}

impl AccessConfig {
    /// Reads the keys of a listener's table, and records the values in effect. Absent keys are taken from `default`.
    pub(crate) fn read(
        table: &mut ConfigTable<'_>,
        proofs: AuthMethods,
        default: &Self,
        report: &mut Diagnostics,
    ) -> Self {
        let AccessKeys { proxy_protocol, auth: kind, users, allow_from, rules } = table.fields(report);
        let auth = auth(table, kind, users, proofs, &default.auth, report);
        if let Some(rules) = &rules {
            check_rule_users(table, rules, proofs.certified(), report);
        }
        if let (Some(rules), Some(AuthConfig::None)) = (&rules, &auth)
            && rules.has_users()
            && !proofs.certified()
        {
            let expected =
                "without auth = \"basic\" no client has a user name, so the rule matches no client";
            table.error("rules", Some("a rule requires users".to_owned()), expected, report);
        }
        if let Some(proxies) = &proxy_protocol {
            warn_trusted(table, proxies, report);
        }
        let access = Self {
            proxy_protocol: proxy_protocol.unwrap_or_else(|| default.proxy_protocol.clone()),
            allow_from: allow_from.or_else(|| default.allow_from.clone()),
            auth: auth.unwrap_or_default(),
            rules: rules.unwrap_or_else(|| default.rules.clone()),
            names: names(table, proofs.tls, report),
        };
        table.record(&access.keys(), report);
        access
    }

    /// Returns the keys that set these rules.
    fn keys(&self) -> AccessKeys {
        let (auth, users) = match &self.auth {
            AuthConfig::None => (AuthKind::None, None),
            AuthConfig::Basic { users, .. } => (AuthKind::Basic, Some(users.clone())),
        };
        AccessKeys {
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
        report: &mut Diagnostics,
    ) {
        if self.auth != AuthConfig::None && proofs.password {
            return proofs.tls.warn_passwords(key, at, report);
        }
        let fenced = self.allow_from.as_ref().is_some_and(|nets| !nets.contains_all_addresses());
        if self.auth != AuthConfig::None || proofs.certified() || at.ip().is_loopback() || fenced {
            return;
        }
        let text =
            format!("anyone who reaches {at} can reach {reached} without authentication; {}", proofs.hint());
        report.warn(key, WarningKind::Insecure, text);
    }
}

/// Checks the keys for authentication. Returns `None` if they have an error, which is recorded.
fn auth(
    table: &ConfigTable<'_>,
    kind: Option<AuthKind>,
    users: Option<PathBuf>,
    proofs: AuthMethods,
    default: &AuthConfig,
    report: &mut Diagnostics,
) -> Option<AuthConfig> {
    if table.is_wrong("users", report) || table.is_wrong("auth", report) {
        return None;
    }
    let basic = kind.map(|kind| kind == AuthKind::Basic);
    let silent = |found: &str| Some(found.to_owned());
    let auth = match (basic, users, default) {
        (Some(true), Some(users), _) | (None, Some(users), AuthConfig::Basic { .. }) => {
            AuthConfig::Basic { users, key: table.key("users") }
        }
        (Some(true) | None, None, default @ AuthConfig::Basic { .. }) => default.clone(),
        (Some(false) | None, None, _) => AuthConfig::None,
        (Some(true), None, AuthConfig::None) => {
            table.error("users", None, "auth is \"basic\"; set the htpasswd file", report);
            return None;
        }
        (Some(false), Some(_), _) => {
            table.error("users", silent("set, but auth is \"none\""), "set auth = \"basic\"", report);
            return None;
        }
        (None, Some(_), AuthConfig::None) => {
            table.error("users", silent("set, but auth is not"), "set auth = \"basic\"", report);
            return None;
        }
    };
    if auth != AuthConfig::None && !proofs.password && !proofs.certified() && table.is_present() {
        let found = if basic.is_some() { "\"basic\"" } else { "\"basic\", inherited from [server.connect]" };
        let expected = "clients of this port cannot send a password, so none would be accepted; set auth = \"none\" in this \
                      table, and restrict clients with allow_from";
        table.error("auth", silent(found), expected, report);
        return None;
    }
    Some(auth)
}

/// Records an error for each user of a rule that no client can be. The user name of a password cannot contain ':', but the
/// name in a certificate can, if clients are `certified`.
pub(crate) fn check_rule_users(
    table: &ConfigTable<'_>,
    rules: &Rules,
    certified: bool,
    report: &mut Diagnostics,
) {
    for (i, j, user) in rules.users() {
        if user.trim().is_empty() || user.contains('*') || user.contains(':') && !certified {
            let expected = "expected a user name without ':' and '*'; for all users leave the list out";
            let (part, found) = (format!("[{i}].users[{j}]"), format!("{:?}", value::excerpt(user)));
            table.error_in("rules", &part, found, expected, report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SSH: &str = "[ssh]\nallow_from = [\"10.0.0.0/8\"]\nproxy_protocol = [\"10.0.0.5\"]\nauth = \"basic\"\n\
                       users = \"/ssh\"\nrules = [{ ports = [22] }]\n[module]\n";

    const PASSWORD: AuthMethods = AuthMethods { password: true, tls: PortTls::Unsupported };
    const PASSWORD_OVER_TLS: AuthMethods =
        AuthMethods { password: true, tls: PortTls::On { client_certificate: false } };
    const NO_METHOD: AuthMethods = AuthMethods { password: false, tls: PortTls::Unsupported };
    const CERTIFICATE_NOT_REQUESTED: AuthMethods =
        AuthMethods { password: false, tls: PortTls::On { client_certificate: false } };
    const CERTIFICATE: AuthMethods =
        AuthMethods { password: false, tls: PortTls::On { client_certificate: true } };

    /// Returns the rules of `ssh` and of another module, and the errors and warnings.
    fn read(text: &str, proofs: AuthMethods) -> (AccessConfig, AccessConfig, Vec<String>) {
        let mut report = Diagnostics::default();
        let mut file = ConfigTable::parse(text, &Environment::default(), &mut report);
        let mut table = file.table("ssh", &mut report);
        let ssh = AccessConfig::read(&mut table, PASSWORD, &AccessConfig::default(), &mut report);
        table.finish(&mut report);
        let mut table = file.table("module", &mut report);
        if proofs.tls != PortTls::Unsupported {
            table.ignore("client_ca", &mut report);
        }
        let module = AccessConfig::read(&mut table, proofs, &ssh, &mut report);
        require_names(&table, &mut report);
        let at = "0.0.0.0:1".parse().unwrap();
        module.warn_if_open(table.key("listen"), at, proofs, "every node", &mut report);
        table.finish(&mut report);
        let reading = report.finish(text, ());
        let errors = reading.errors.iter().map(ToString::to_string);
        (ssh, module, errors.chain(reading.warnings.iter().map(ToString::to_string)).collect())
    }

    #[test]
    fn a_listener_inherits_absent_access_keys_from_the_connect_listener() {
        let (ssh, module, reported) = read(SSH, PASSWORD_OVER_TLS);
        assert_eq!((&module, reported), (&ssh, vec![]));
        let AuthConfig::Basic { key, .. } = module.auth else { panic!("{module:?}") };
        assert_eq!(key, "ssh.users");
    }

    #[test]
    fn a_listeners_access_keys_override_only_its_own() {
        let own = "allow_from = [\"192.0.2.0/24\"]\nproxy_protocol = []\nusers = \"/own\"\nrules = []\n";
        let (ssh, module, reported) = read(&format!("{SSH}{own}"), PASSWORD_OVER_TLS);
        assert_eq!(reported, [""; 0]);
        assert!(!ssh.rules.is_empty() && module.rules.is_empty());
        assert!(!ssh.proxy_protocol.is_empty() && module.proxy_protocol.is_empty());
        let from = module.allow_from.unwrap();
        assert!(from.contains("192.0.2.1".parse().unwrap()) && !from.contains("10.0.0.1".parse().unwrap()));
        assert_eq!(module.auth, AuthConfig::Basic { users: "/own".into(), key: "module.users".into() });
        let (_, module, reported) = read(&format!("{SSH}auth = \"none\""), PASSWORD);
        assert_eq!((module.auth, reported), (AuthConfig::None, vec![]), "restricted by allow_from");
    }

    #[test]
    fn basic_auth_is_an_error_for_a_protocol_without_passwords() {
        for text in [SSH, "[module]\nauth = \"basic\"\nusers = \"/own\""] {
            let (_, module, reported) = read(text, NO_METHOD);
            assert_eq!(module.auth, AuthConfig::None);
            assert!(
                reported[0].contains("module.auth: \"basic\"") && reported[0].contains("auth = \"none\""),
                "{reported:?}"
            );
        }
        assert_eq!(read(&format!("{SSH}auth = \"none\""), NO_METHOD).2, [""; 0]);
        assert_eq!(read(SSH, CERTIFICATE).2, [""; 0], "the certificate replaces the password");
    }

    #[test]
    fn names_require_client_certificates() {
        let text = "[module]\nnames = [\"system:*\", \"*.example.org\"]";
        let (_, module, reported) = read(text, CERTIFICATE);
        let may = |name| module.names.iter().any(|glob| glob.matches(name));
        assert!(may("System:kube-apiserver") && may("a.example.org") && !may("example.org"));
        assert_eq!(reported, [""; 0]);
        assert!(read(text, CERTIFICATE_NOT_REQUESTED).2[0].contains("set client_ca"));
        assert!(read(text, NO_METHOD).2[0].contains("module.names: unknown key"));
        let users = "[module]\nrules = [{ users = [\"kube-apiserver\"] }]";
        assert_eq!(read(users, CERTIFICATE).2, [""; 0]);
        assert!(read(users, CERTIFICATE_NOT_REQUESTED).2[0].contains("no client has a user name"));
    }

    #[test]
    fn client_ca_requires_a_list_of_names() {
        let (_, _, reported) = read("[module]\nclient_ca = \"/ca\"", CERTIFICATE);
        assert!(
            reported.len() == 1 && reported[0].contains("module.names: missing: list the names"),
            "{reported:?}"
        );
        assert!(reported[0].contains("[\"*\"] accepts every certificate"), "{reported:?}");
        let (_, module, reported) = read("[module]\nclient_ca = \"/ca\"\nnames = [\"*\"]", CERTIFICATE);
        assert_eq!(reported, [""; 0]);
        assert!(module.names[0].matches("anyone") && module.names[0].matches_everything());
        for wrong in ["[]", "[\"\"]", "1"] {
            let reported = read(&format!("[module]\nclient_ca = \"/ca\"\nnames = {wrong}"), CERTIFICATE).2;
            assert!(reported.len() == 1 && !reported[0].contains("missing"), "{reported:?}");
        }
    }

    #[test]
    fn an_open_listener_is_a_warning_with_the_keys_that_restrict_it() {
        for (proofs, hint) in [
            (PASSWORD, "set auth = \"basic\" or allow_from"),
            (PASSWORD_OVER_TLS, "set client_ca, auth = \"basic\" or allow_from"),
            (CERTIFICATE_NOT_REQUESTED, "set client_ca or allow_from"),
            (NO_METHOD, "; set allow_from"),
        ] {
            let reported = read("[module]", proofs).2;
            let begin =
                "module.listen: anyone who reaches 0.0.0.0:1 can reach every node without authentication";
            assert!(reported[0].starts_with(begin) && reported[0].ends_with(hint), "{reported:?}");
        }
        for closed in ["allow_from = [\"10.0.0.0/8\"]", "auth = \"basic\"\nusers = \"/own\""] {
            assert_eq!(read(&format!("[module]\n{closed}"), PASSWORD_OVER_TLS).2, [""; 0], "{closed}");
        }
        assert_eq!(read("[module]", CERTIFICATE).2, [""; 0]);
    }
}
