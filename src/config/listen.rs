//! Where to listen, written as an address (ours) or as a port on all interfaces (SuperEdge's).

use std::net::{Ipv4Addr, SocketAddr};

use super::fold::{Report, Table};
use super::{Concern, Listen, value};
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

/// Reads `listen` or, instead, `port`. `None`: both are absent.
pub(super) fn read(
    table: &mut Table<'_>,
    listen: &'static str,
    port: &'static str,
    report: &mut Report,
) -> Option<Listen> {
    let address: Option<SocketAddr> = table.read(listen, value::socket, report);
    let number: Option<u16> = table.read(port, value::port, report);
    if table.has(listen) && table.has(port) {
        let found = format!("{port} is given as well");
        table.complain(listen, Some(found), format!("both say where to listen: keep {listen}"), report);
    }
    if number == Some(0) {
        let text = "0 takes a free port, another one at each start; the log tells which";
        report.warn(table.key(port), Concern::Surprise, text);
    }
    let everywhere = |number| (SocketAddr::from((Ipv4Addr::UNSPECIFIED, number)), port);
    let found = address.map(|at| (at, listen)).or(number.map(everywhere));
    found.map(|(at, key)| Listen { at, implicit: false, key })
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

/// Reads the networks of balancers whose PROXY headers are believed. `None`: the key is absent.
pub(super) fn proxies(table: &mut Table<'_>, report: &mut Report) -> Option<Networks> {
    let proxies: Networks = table.list(PROXIES, value::network, report)?.into_iter().collect();
    if proxies.holds_everyone() {
        let text = "whoever connects may say to be anybody: name only the networks of your balancers";
        report.warn(table.key(PROXIES), Concern::OpenDoor, text);
    }
    Some(proxies)
}

/// The key of every table with a port that balancers may stand before.
const PROXIES: &str = "proxy_protocol";

/// The port SuperEdge's manifests probe.
const LOG_PORT: u16 = 51010;
