//! Where to listen, written as an address (ours) or as a port on all interfaces (SuperEdge's).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use toml::de::DeValue;

use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{AdminConfig, AdminSocket, Diagnostics, Environment, ListenConfig, WarningKind};
use tunnel_base::policy::{CertificateGlob, Glob, Networks, Rule, Rules};

impl ListenConfig {
    /// Can only this machine reach it?
    pub fn is_local(&self) -> bool {
        self.at.ip().is_loopback()
    }

    /// Where nobody has asked for anything, and `key` would.
    pub(crate) fn by_default(ip: Ipv4Addr, port: u16, key: &'static str) -> Self {
        Self { at: (ip, port).into(), implicit: true, key }
    }
}

/// Where clients come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// An address with a port.
    Port(ListenConfig),
    /// A unix socket.
    Unix(PathBuf),
}

/// Reads `listen` or, instead, `port`. `None`: both are absent.
pub(crate) fn read(
    table: &mut ConfigTable<'_>,
    listen: &'static str,
    port: &'static str,
    report: &mut Diagnostics,
) -> Option<ListenConfig> {
    let place = one_of(table, (listen, |value| value::socket(value).map(Err)), &[port], report);
    match place? {
        ListenAddress::Port(listen) => Some(listen),
        ListenAddress::Unix(_) => None,
    }
}

/// Reads a table `admin`. `name` is that of the socket without `listen = "unix:/path"`.
pub(crate) fn admin(
    parent: &mut ConfigTable<'_>,
    name: &'static str,
    env: &Environment,
    report: &mut Diagnostics,
) -> AdminConfig {
    let mut table = parent.table("admin", report);
    let wanted = "want unix:/path, for example unix:/run/tunnel/cloud.sock";
    let reader =
        |value: &DeValue<'_>| unix_path(&value::text(value)?).ok_or_else(|| value::wrong(value, wanted));
    let path = table.read(LISTEN, reader, report);
    let socket = match path {
        Some(path) => AdminSocket::At(path),
        None => AdminSocket::Named(name, env.runtime_dir.clone()),
    };
    let key = table.key("users");
    let users = table.read("users", value::file_path, report);
    let auth = users.map_or(AuthConfig::None, |users| AuthConfig::Basic { users, key });
    table.finish(report);
    AdminConfig { socket, access: AccessConfig { auth, ..AccessConfig::default() } }
}

/// The path in `unix:/path`.
fn unix_path(text: &str) -> Option<PathBuf> {
    let path = text.strip_prefix("unix:")?;
    (path.starts_with('/') && !path.contains('\0')).then(|| path.into())
}

/// Reads `listen`, which may be `unix:/path`, or instead one of the spellings of a port. `None`: all are absent.
pub(crate) fn place(
    table: &mut ConfigTable<'_>,
    ports: &[&'static str],
    report: &mut Diagnostics,
) -> Option<ListenAddress> {
    let wanted = "want ip:port, for example 127.0.0.1:8000, or unix:/path";
    let reader = |value: &DeValue<'_>| match unix_path(&value::text(value)?) {
        Some(path) => Ok(Ok(path)),
        None => value::socket(value).map(Err).map_err(|_| value::wrong(value, wanted)),
    };
    one_of(table, (LISTEN, reader), ports, report)
}

/// Reads the address of an HTTP proxy, in each of SuperEdge's spellings; at `ip` unless a key has another one. `None`:
/// no key is set.
pub(crate) fn proxy(
    table: &mut ConfigTable<'_>,
    ip: Ipv4Addr,
    report: &mut Diagnostics,
) -> Option<ListenConfig> {
    let mut said = None;
    for key in ["ip", "proxyip"] {
        let found: Option<IpAddr> = table.read(key, value::parsed, report);
        said = said.or(found);
    }
    let socket = |value: &DeValue<'_>| value::socket(value).map(Err);
    let found = one_of(table, (LISTEN, socket), &["port", "proxyport"], report);
    if found.is_none()
        && table.is_present()
        && !["listen", "port", "proxyport"].iter().any(|key| table.has(key))
    {
        table.error(LISTEN, None, "say where the proxy listens: listen = \"ip:port\"", report);
    }
    match found? {
        ListenAddress::Port(listen) if listen.key == LISTEN => Some(listen),
        ListenAddress::Port(listen) => {
            Some(ListenConfig { at: (said.unwrap_or(ip.into()), listen.at.port()).into(), ..listen })
        }
        ListenAddress::Unix(_) => None,
    }
}

/// Reads one of several keys for an address to listen on.
fn one_of(
    table: &mut ConfigTable<'_>,
    (listen, reader): (
        &'static str,
        impl FnOnce(&DeValue<'_>) -> Result<Result<PathBuf, SocketAddr>, ValueError>,
    ),
    ports: &[&'static str],
    report: &mut Diagnostics,
) -> Option<ListenAddress> {
    let port = |at, key| ListenAddress::Port(ListenConfig { at, implicit: false, key });
    let mut found = table.read(listen, reader, report).map(|place| match place {
        Ok(path) => ListenAddress::Unix(path),
        Err(at) => port(at, listen),
    });
    let mut first = table.has(listen).then_some(listen);
    for key in ports {
        let number: Option<u16> = table.read(key, value::port_number, report);
        if let Some(first) = first.filter(|_| table.has(key)) {
            let found = format!("{key} is given as well");
            table.error(first, Some(found), format!("both say where to listen: keep {first}"), report);
        }
        if number == Some(0) {
            let text = "0 takes a free port, another one at each start; the log tells which";
            report.warn(table.key(key), WarningKind::Unexpected, text);
        }
        first = first.or(table.has(key).then_some(key));
        found = found.or(number.map(|number| port((Ipv4Addr::UNSPECIFIED, number).into(), key)));
    }
    found
}

/// Reads where health, log level and metrics are served. Absent: on loopback, where nobody else can turn the log up.
pub(crate) fn log(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> ListenConfig {
    let found = read(table, "log_listen", "log_port", report);
    let log = found.unwrap_or(ListenConfig::by_default(Ipv4Addr::LOCALHOST, LOG_PORT, "log_listen"));
    if !log.is_local() {
        let text = format!(
            "whoever reaches {} can read health and metrics and change the log level; log_listen = \"127.0.0.1:{}\" closes it",
            log.at,
            log.at.port()
        );
        report.warn(table.key(log.key), WarningKind::Insecure, text);
    }
    log
}

/// Reads where gRPC's debugging clients come in. `None`: nowhere, as with an empty text.
pub(crate) fn channelz(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<SocketAddr> {
    let read = |value: &DeValue<'_>| match value::text(value)?.is_empty() {
        true => Ok(None),
        false => value::socket(value).map(Some),
    };
    let at = table.read(CHANNELZ, read, report)??;
    if !at.ip().is_loopback() {
        let text = format!(
            "whoever reaches {at} sees the addresses and names of all links; 127.0.0.1:{} closes it",
            at.port()
        );
        report.warn(table.key(CHANNELZ), WarningKind::Insecure, text);
    }
    Some(at)
}

/// Reads the networks of balancers whose PROXY headers are believed. `None`: the key is absent.
pub(crate) fn proxies(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Option<Networks> {
    let proxies: Networks = table.list(PROXIES, value::network, report)?.into_iter().collect();
    if proxies.holds_everyone() {
        let text = "whoever connects may say to be anybody: name only the networks of your balancers";
        report.warn(table.key(PROXIES), WarningKind::Insecure, text);
    }
    Some(proxies)
}

/// The key for the address that clients connect to.
const LISTEN: &str = "listen";

/// The key of every table with a port that balancers may stand before.
const PROXIES: &str = "proxy_protocol";

/// SuperEdge's key for gRPC's debugging port.
const CHANNELZ: &str = "channelz_addr";

/// The port SuperEdge's manifests probe.
const LOG_PORT: u16 = 51010;

// Who may come in at a port for clients, and what for: the keys that the tables of all front ends have. What such a
// table leaves out is as `[mode.cloud.ssh]` has it.

/// Who may come in, and what for; by default everybody for everything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessConfig {
    /// Networks of balancers before the port.
    pub proxy_protocol: Networks,
    /// Where clients may come from; `None`: from anywhere.
    pub allow_from: Option<Networks>,
    /// How they prove who they are.
    pub auth: AuthConfig,
    /// What they may reach; none: everything.
    pub rules: Rules,
    /// Names (CN or DNS) of the client certificates that are accepted. Empty at ports that ask for none.
    pub names: Vec<CertificateGlob>,
}

/// How a client proves who it is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AuthConfig {
    /// Not at all.
    #[default]
    None,
    /// Name and password, checked against an htpasswd file (bcrypt).
    Basic {
        /// The htpasswd file.
        users: PathBuf,
        /// The whole key that names it: another table's, if this one leaves it out.
        key: String,
    },
}

/// How clients of a port can prove who they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AuthMethods {
    /// With name and password.
    pub(crate) password: bool,
    /// With a certificate, and whether one is asked for; `None`: never.
    pub(crate) certificate: Option<bool>,
}

impl AuthMethods {
    /// Who has to show a certificate needs no password.
    fn certified(self) -> bool {
        self.certificate == Some(true)
    }

    /// What closes the port to strangers.
    fn remedy(self) -> &'static str {
        match (self.password, self.certificate) {
            (true, None) => "auth = \"basic\" or allow_from closes it",
            (true, Some(_)) => "client_ca, auth = \"basic\" or allow_from closes it",
            (false, Some(_)) => "client_ca or allow_from closes it",
            (false, None) => "allow_from closes it",
        }
    }
}

impl AccessConfig {
    /// Reads the keys of a front end's table; what it leaves out is as in `default`.
    pub(crate) fn read(
        table: &mut ConfigTable<'_>,
        proofs: AuthMethods,
        default: &Self,
        report: &mut Diagnostics,
    ) -> Self {
        let rules = rules(table, proofs, report);
        let auth = auth(table, proofs, &default.auth, report);
        if let (Some(rules), Some(AuthConfig::None)) = (&rules, &auth)
            && rules.name_users()
            && !proofs.certified()
        {
            let wanted = "without auth = \"basic\" nobody is a user, and such a rule lets nobody in";
            table.error("rules", Some("a rule asks for users".to_owned()), wanted, report);
        }
        let allow_from = networks(table, "allow_from", report);
        Self {
            proxy_protocol: proxies(table, report).unwrap_or_else(|| default.proxy_protocol.clone()),
            allow_from: allow_from.or_else(|| default.allow_from.clone()),
            auth: auth.unwrap_or_default(),
            rules: rules.unwrap_or_else(|| default.rules.clone()),
            names: names(table, proofs, report),
        }
    }

    /// Warns of a port that lets every client in without proof: `key` is the key to change, `reached` what lies behind
    /// the port.
    pub(crate) fn warn_if_open(
        &self,
        key: String,
        at: SocketAddr,
        proofs: AuthMethods,
        reached: &str,
        report: &mut Diagnostics,
    ) {
        let fenced = self.allow_from.as_ref().is_some_and(|nets| !nets.holds_everyone());
        if self.auth != AuthConfig::None || proofs.certified() || at.ip().is_loopback() || fenced {
            return;
        }
        let text = format!("whoever reaches {at} reaches {reached}, unasked; {}", proofs.remedy());
        report.warn(key, WarningKind::Insecure, text);
    }
}

fn rules(table: &mut ConfigTable<'_>, proofs: AuthMethods, report: &mut Diagnostics) -> Option<Rules> {
    let tables = table.tables("rules", report);
    let rules: Rules = tables
        .into_iter()
        .map(|mut table| {
            let rule = rule(&mut table, proofs, report);
            table.finish(report);
            rule
        })
        .collect();
    table.has("rules").then_some(rules)
}

/// `None`: the table has a fault, which is noted.
fn auth(
    table: &mut ConfigTable<'_>,
    proofs: AuthMethods,
    default: &AuthConfig,
    report: &mut Diagnostics,
) -> Option<AuthConfig> {
    let users = table.read("users", value::file_path, report);
    let basic = table.read(
        "auth",
        |value| match value::text(value)?.as_str() {
            "basic" => Ok(true),
            "none" => Ok(false),
            _ => Err(value::wrong(value, "want \"none\" or \"basic\"")),
        },
        report,
    );
    if (users.is_none() && table.has("users")) || (basic.is_none() && table.has("auth")) {
        return None;
    }
    let silent = |found: &str| Some(found.to_owned());
    let auth = match (basic, users, default) {
        (Some(true), Some(users), _) | (None, Some(users), AuthConfig::Basic { .. }) => {
            AuthConfig::Basic { users, key: table.key("users") }
        }
        (Some(true) | None, None, default @ AuthConfig::Basic { .. }) => default.clone(),
        (Some(false) | None, None, _) => AuthConfig::None,
        (Some(true), None, AuthConfig::None) => {
            table.error("users", None, "auth is \"basic\": name the htpasswd file", report);
            return None;
        }
        (Some(false), Some(_), _) => {
            table.error("users", silent("given, but auth is \"none\""), "say auth = \"basic\"", report);
            return None;
        }
        (None, Some(_), AuthConfig::None) => {
            table.error("users", silent("given, but auth is not"), "say auth = \"basic\"", report);
            return None;
        }
    };
    if auth != AuthConfig::None && !proofs.password && !proofs.certified() && table.is_present() {
        let found = if basic.is_some() { "\"basic\"" } else { "\"basic\", as [mode.cloud.ssh] has it" };
        let wanted = "whoever comes here cannot give a password, so nobody would get in: say auth = \"none\" in this \
                      table, and with allow_from who may come";
        table.error("auth", silent(found), wanted, report);
        return None;
    }
    Some(auth)
}

fn names(table: &mut ConfigTable<'_>, proofs: AuthMethods, report: &mut Diagnostics) -> Vec<CertificateGlob> {
    let Some(asked) = proofs.certificate else { return Vec::new() };
    let names = filled(table, "names", value::parsed::<CertificateGlob>, report);
    if names.is_some() && !asked {
        let wanted = "no certificate is asked for: name with client_ca the authority that signed them";
        table.error("names", Some("given, but client_ca is not".to_owned()), wanted, report);
    }
    if asked && table.has("client_ca") && !table.has("names") {
        let wanted = "name the clients' certificates (CN or DNS name), for example [\"system:kube-apiserver\"]; \
                      [\"*\"] accepts every certificate that a CA of client_ca has signed or will sign";
        table.error("names", None, wanted, report);
    }
    names.unwrap_or_default()
}

fn rule(table: &mut ConfigTable<'_>, proofs: AuthMethods, report: &mut Diagnostics) -> Rule {
    let user = |value: &_| match value::nonempty(value)? {
        // A password's user has no ':' in his name; who is known by a certificate may.
        name if proofs.certified() && !name.contains('*') => Ok(name),
        name if name.contains([':', '*']) => Err(value::wrong(
            value,
            "want a user's name without ':' and '*'; for all users leave the list out",
        )),
        name => Ok(name),
    };
    Rule {
        users: filled(table, "users", user, report),
        from: networks(table, "from", report),
        nodes: filled(table, "nodes", value::parsed::<Glob>, report),
        ports: filled(table, "ports", value::target_port, report),
    }
}

fn networks(table: &mut ConfigTable<'_>, key: &'static str, report: &mut Diagnostics) -> Option<Networks> {
    filled(table, key, value::network, report).map(Networks::from_iter)
}

/// A list that may be absent, which lets everybody in, but not empty, which would let nobody in and looks the same.
fn filled<'t, T>(
    table: &mut ConfigTable<'t>,
    key: &'static str,
    reader: impl Fn(&DeValue<'t>) -> Result<T, ValueError>,
    report: &mut Diagnostics,
) -> Option<Vec<T>> {
    let (before, list) = (report.fault_count(), table.list(key, reader, report));
    if list.as_ref().is_some_and(Vec::is_empty) && report.fault_count() == before {
        let wanted = "nothing would match: leave the key out to match everything, or fill the list";
        table.error(key, Some("an empty list".to_owned()), wanted, report);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    const SSH: &str = "[ssh]\nallow_from = [\"10.0.0.0/8\"]\nproxy_protocol = [\"10.0.0.5\"]\nauth = \"basic\"\n\
                       users = \"/ssh\"\nrules = [{ ports = [22] }]\n[module]\n";

    const PASSWORD: AuthMethods = AuthMethods { password: true, certificate: None };
    const NOTHING: AuthMethods = AuthMethods { password: false, certificate: None };
    const UNASKED: AuthMethods = AuthMethods { password: false, certificate: Some(false) };
    const CERTIFICATE: AuthMethods = AuthMethods { password: false, certificate: Some(true) };

    /// What ssh and another module have, and the faults and warnings of the other one.
    fn read(text: &str, proofs: AuthMethods) -> (AccessConfig, AccessConfig, Vec<String>) {
        let mut report = Diagnostics::default();
        let mut file = ConfigTable::parse(text, &mut report);
        let mut table = file.table("ssh", &mut report);
        let ssh = AccessConfig::read(&mut table, PASSWORD, &AccessConfig::default(), &mut report);
        table.finish(&mut report);
        let mut table = file.table("module", &mut report);
        if proofs.certificate.is_some() {
            table.ignore("client_ca", &mut report);
        }
        let module = AccessConfig::read(&mut table, proofs, &ssh, &mut report);
        let at = "0.0.0.0:1".parse().unwrap();
        module.warn_if_open(table.key("listen"), at, proofs, "every node", &mut report);
        table.finish(&mut report);
        let reading = report.finish(text, ());
        let faults = reading.faults.iter().map(ToString::to_string);
        (ssh, module, faults.chain(reading.warnings.iter().map(ToString::to_string)).collect())
    }

    #[test]
    fn what_a_module_leaves_out_is_as_ssh_has_it() {
        let (ssh, module, reported) = read(SSH, PASSWORD);
        assert_eq!((&module, reported), (&ssh, vec![]));
        let AuthConfig::Basic { key, .. } = module.auth else { panic!("{module:?}") };
        assert_eq!(key, "ssh.users");
    }

    #[test]
    fn what_a_module_says_holds_for_it_alone() {
        let own = "allow_from = [\"192.0.2.0/24\"]\nproxy_protocol = []\nusers = \"/own\"\nrules = []\n";
        let (ssh, module, reported) = read(&format!("{SSH}{own}"), PASSWORD);
        assert_eq!(reported, [""; 0]);
        assert!(!ssh.rules.is_empty() && module.rules.is_empty());
        assert!(!ssh.proxy_protocol.is_empty() && module.proxy_protocol.is_empty());
        let from = module.allow_from.unwrap();
        assert!(from.contains("192.0.2.1".parse().unwrap()) && !from.contains("10.0.0.1".parse().unwrap()));
        assert_eq!(module.auth, AuthConfig::Basic { users: "/own".into(), key: "module.users".into() });
        let (_, module, reported) = read(&format!("{SSH}auth = \"none\""), PASSWORD);
        assert_eq!((module.auth, reported), (AuthConfig::None, vec![]), "allow_from fences it");
    }

    #[test]
    fn where_no_password_can_be_given_one_that_is_asked_for_is_a_fault() {
        for text in [SSH, "[module]\nauth = \"basic\"\nusers = \"/own\""] {
            let (_, module, reported) = read(text, NOTHING);
            assert_eq!(module.auth, AuthConfig::None);
            assert!(
                reported[0].contains("module.auth: \"basic\"") && reported[0].contains("auth = \"none\""),
                "{reported:?}"
            );
        }
        assert_eq!(read(&format!("{SSH}auth = \"none\""), NOTHING).2, [""; 0]);
        assert_eq!(read(SSH, CERTIFICATE).2, [""; 0], "a certificate stands for it");
    }

    #[test]
    fn names_are_of_a_certificate_that_is_asked_for() {
        let text = "[module]\nnames = [\"system:*\", \"*.example.org\"]";
        let (_, module, reported) = read(text, CERTIFICATE);
        let may = |name| module.names.iter().any(|glob| glob.matches(name));
        assert!(may("System:kube-apiserver") && may("a.example.org") && !may("example.org"));
        assert_eq!(reported, [""; 0]);
        assert!(read(text, UNASKED).2[0].contains("name with client_ca"));
        assert!(read(text, NOTHING).2[0].contains("module.names: not a key that is known"));
        let users = "[module]\nrules = [{ users = [\"kube-apiserver\"] }]";
        assert_eq!(read(users, CERTIFICATE).2, [""; 0]);
        assert!(read(users, UNASKED).2[0].contains("nobody is a user"));
    }

    #[test]
    fn who_asks_for_certificates_says_whose() {
        let (_, _, reported) = read("[module]\nclient_ca = \"/ca\"", CERTIFICATE);
        assert!(
            reported.len() == 1 && reported[0].contains("module.names: missing: name the clients'"),
            "{reported:?}"
        );
        assert!(reported[0].contains("[\"*\"] accepts every certificate"), "{reported:?}");
        let (_, module, reported) = read("[module]\nclient_ca = \"/ca\"\nnames = [\"*\"]", CERTIFICATE);
        assert_eq!(reported, [""; 0]);
        assert!(module.names[0].matches("anybody") && module.names[0].is_everyone());
        for wrong in ["[]", "[\"\"]", "1"] {
            let reported = read(&format!("[module]\nclient_ca = \"/ca\"\nnames = {wrong}"), CERTIFICATE).2;
            assert!(reported.len() == 1 && !reported[0].contains("missing"), "{reported:?}");
        }
    }

    #[test]
    fn an_open_port_is_named_with_what_closes_it() {
        for (proofs, remedy) in [
            (PASSWORD, "auth = \"basic\" or allow_from closes it"),
            (UNASKED, "client_ca or allow_from closes it"),
            (NOTHING, "; allow_from closes it"),
        ] {
            let reported = read("[module]", proofs).2;
            let begin = "module.listen: whoever reaches 0.0.0.0:1 reaches every node, unasked";
            assert!(reported[0].starts_with(begin) && reported[0].ends_with(remedy), "{reported:?}");
        }
        for closed in ["allow_from = [\"10.0.0.0/8\"]", "auth = \"basic\"\nusers = \"/own\""] {
            assert_eq!(read(&format!("[module]\n{closed}"), PASSWORD).2, [""; 0], "{closed}");
        }
        assert_eq!(read("[module]", CERTIFICATE).2, [""; 0]);
    }
}
