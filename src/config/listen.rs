//! Where to listen, written as an address (ours) or as a port on all interfaces (SuperEdge's).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use toml::de::DeValue;

use super::fold::{Report, Table};
use super::{Access, AdminSettings, AdminSocket, Auth, Concern, Environment, Listen, value};
use crate::policy::Networks;

impl Listen {
    /// Can only this machine reach it?
    pub fn is_local(&self) -> bool {
        self.at.ip().is_loopback()
    }

    /// Where nobody has asked for anything, and `key` would.
    pub(super) fn by_default(ip: Ipv4Addr, port: u16, key: &'static str) -> Self {
        Self { at: (ip, port).into(), implicit: true, key }
    }
}

/// Where clients come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// An address with a port.
    Port(Listen),
    /// A unix socket.
    Unix(PathBuf),
}

/// Reads `listen` or, instead, `port`. `None`: both are absent.
pub(super) fn read(
    table: &mut Table<'_>,
    listen: &'static str,
    port: &'static str,
    report: &mut Report,
) -> Option<Listen> {
    let place = one_of(table, (listen, |value| value::socket(value).map(Err)), &[port], report);
    match place? {
        Place::Port(listen) => Some(listen),
        Place::Unix(_) => None,
    }
}

/// Reads a table `admin`. `name` is that of the socket without `listen = "unix:/path"`.
pub(super) fn admin(
    parent: &mut Table<'_>,
    name: &'static str,
    env: &Environment,
    report: &mut Report,
) -> AdminSettings {
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
    let users = table.read("users", value::path, report);
    let auth = users.map_or(Auth::None, |users| Auth::Basic { users, key });
    table.finish(report);
    AdminSettings { socket, access: Access { auth, ..Access::default() } }
}

/// The path in `unix:/path`.
fn unix_path(text: &str) -> Option<PathBuf> {
    let path = text.strip_prefix("unix:")?;
    (path.starts_with('/') && !path.contains('\0')).then(|| path.into())
}

/// Reads `listen`, which may be `unix:/path`, or instead one of the spellings of a port. `None`: all are absent.
pub(super) fn place(table: &mut Table<'_>, ports: &[&'static str], report: &mut Report) -> Option<Place> {
    let wanted = "want ip:port, for example 127.0.0.1:8000, or unix:/path";
    let reader = |value: &DeValue<'_>| match unix_path(&value::text(value)?) {
        Some(path) => Ok(Ok(path)),
        None => value::socket(value).map(Err).map_err(|_| value::wrong(value, wanted)),
    };
    one_of(table, (LISTEN, reader), ports, report)
}

/// Reads the address of an HTTP proxy, in each of SuperEdge's spellings; at `ip` unless a key has another one. `None`:
/// no key is set.
pub(super) fn proxy(table: &mut Table<'_>, ip: Ipv4Addr, report: &mut Report) -> Option<Listen> {
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
        table.complain(LISTEN, None, "say where the proxy listens: listen = \"ip:port\"", report);
    }
    match found? {
        Place::Port(listen) if listen.key == LISTEN => Some(listen),
        Place::Port(listen) => {
            Some(Listen { at: (said.unwrap_or(ip.into()), listen.at.port()).into(), ..listen })
        }
        Place::Unix(_) => None,
    }
}

/// Reads one of several keys for an address to listen on.
fn one_of(
    table: &mut Table<'_>,
    (listen, reader): (
        &'static str,
        impl FnOnce(&DeValue<'_>) -> Result<Result<PathBuf, SocketAddr>, value::Wrong>,
    ),
    ports: &[&'static str],
    report: &mut Report,
) -> Option<Place> {
    let port = |at, key| Place::Port(Listen { at, implicit: false, key });
    let mut found = table.read(listen, reader, report).map(|place| match place {
        Ok(path) => Place::Unix(path),
        Err(at) => port(at, listen),
    });
    let mut first = table.has(listen).then_some(listen);
    for key in ports {
        let number: Option<u16> = table.read(key, value::port, report);
        if let Some(first) = first.filter(|_| table.has(key)) {
            let found = format!("{key} is given as well");
            table.complain(first, Some(found), format!("both say where to listen: keep {first}"), report);
        }
        if number == Some(0) {
            let text = "0 takes a free port, another one at each start; the log tells which";
            report.warn(table.key(key), Concern::Surprise, text);
        }
        first = first.or(table.has(key).then_some(key));
        found = found.or(number.map(|number| port((Ipv4Addr::UNSPECIFIED, number).into(), key)));
    }
    found
}

/// Reads where health, log level and metrics are served. Absent: on loopback, where nobody else can turn the log up.
pub(super) fn log(table: &mut Table<'_>, report: &mut Report) -> Listen {
    let found = read(table, "log_listen", "log_port", report);
    let log = found.unwrap_or(Listen::by_default(Ipv4Addr::LOCALHOST, LOG_PORT, "log_listen"));
    if !log.is_local() {
        let text = format!(
            "whoever reaches {} can read health and metrics and change the log level; log_listen = \"127.0.0.1:{}\" closes it",
            log.at,
            log.at.port()
        );
        report.warn(table.key(log.key), Concern::OpenDoor, text);
    }
    log
}

/// Reads where gRPC's debugging clients come in. `None`: nowhere, as with an empty text.
pub(super) fn channelz(table: &mut Table<'_>, report: &mut Report) -> Option<SocketAddr> {
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
        report.warn(table.key(CHANNELZ), Concern::OpenDoor, text);
    }
    Some(at)
}

/// Reads the networks of balancers whose PROXY headers are believed. `None`: the key is absent.
pub(super) fn proxies(table: &mut Table<'_>, report: &mut Report) -> Option<Networks> {
    let proxies: Networks = table.list(PROXIES, value::network, report)?.into_iter().collect();
    if proxies.holds_everyone() {
        let text = "whoever connects may say to be anybody: name only the networks of your balancers";
        report.warn(table.key(PROXIES), Concern::OpenDoor, text);
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
