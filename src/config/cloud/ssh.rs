//! The table `mode.cloud.ssh`: where clients come in, and who may.

use std::net::Ipv4Addr;

use toml::de::DeValue;

use super::{Auth, Ssh};
use crate::config::fold::{Report, Table};
use crate::config::{Concern, Listen, listen, value};
use crate::policy::{Glob, Networks, Rule, Rules};

/// Reads the table, and warns if it leaves the door open.
pub(super) fn read(cloud: &mut Table<'_>, report: &mut Report) -> Ssh {
    let mut table = cloud.table("ssh", report);
    let found = listen::read(&mut table, "listen", "port", report);
    let listen = found.unwrap_or(Listen::by_default(Ipv4Addr::UNSPECIFIED, PORT, "listen"));
    let rules: Rules = table
        .tables("rules", report)
        .into_iter()
        .map(|mut table| {
            let rule = rule(&mut table, report);
            table.finish(report);
            rule
        })
        .collect();
    let auth = auth(&mut table, &rules, report);
    let allow_from = networks(&mut table, "allow_from", report);
    let proxy_protocol = listen::proxies(&mut table, report);
    let ssh = Ssh { listen, proxy_protocol, auth, allow_from, rules };
    let fenced = ssh.allow_from.as_ref().is_some_and(|nets| !nets.holds_everyone());
    if ssh.auth == Auth::None && !ssh.listen.is_local() && !fenced {
        let implicit = if table.is_present() { "" } else { "there is no such table, so as in SuperEdge " };
        let text = format!(
            "{implicit}whoever reaches {} reaches every node, unasked; auth = \"basic\" or allow_from closes it",
            ssh.listen.at
        );
        report.warn(table.key("auth"), Concern::OpenDoor, text);
    }
    table.finish(report);
    ssh
}

fn auth(table: &mut Table<'_>, rules: &Rules, report: &mut Report) -> Auth {
    let users = table.read("users", value::path, report);
    let basic = table.read(
        "auth",
        |value| match value::text(value)?.as_str() {
            "basic" => Ok(true),
            "none" => Ok(false),
            _ => Err(value::wrong(value, "want \"none\" or \"basic\"")),
        },
        report,
    );
    let silent = |found: &str| Some(found.to_owned());
    match (basic, users) {
        (Some(true), Some(users)) => return Auth::Basic { users },
        (Some(true), None) if !table.has("users") => {
            table.complain("users", None, "auth is \"basic\": name the htpasswd file", report);
        }
        (Some(false), Some(_)) => {
            table.complain("users", silent("given, but auth is \"none\""), "say auth = \"basic\"", report);
        }
        (None, Some(_)) if !table.has("auth") => {
            table.complain("users", silent("given, but auth is not"), "say auth = \"basic\"", report);
        }
        _ => {}
    }
    if rules.name_users() && basic != Some(true) && (basic.is_some() || !table.has("auth")) {
        let wanted = "without auth = \"basic\" nobody is a user, and such a rule lets nobody in";
        table.complain("rules", silent("a rule asks for users"), wanted, report);
    }
    Auth::None
}

fn rule(table: &mut Table<'_>, report: &mut Report) -> Rule {
    let user = |value: &_| match value::word(value)? {
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

fn networks(table: &mut Table<'_>, key: &'static str, report: &mut Report) -> Option<Networks> {
    filled(table, key, value::network, report).map(Networks::from_iter)
}

/// A list that may be absent, which lets everybody in, but not empty, which would let nobody in and looks the same.
fn filled<'t, T>(
    table: &mut Table<'t>,
    key: &'static str,
    reader: impl Fn(&DeValue<'t>) -> Result<T, value::Wrong>,
    report: &mut Report,
) -> Option<Vec<T>> {
    let (before, list) = (report.fault_count(), table.list(key, reader, report));
    if list.as_ref().is_some_and(Vec::is_empty) && report.fault_count() == before {
        let wanted = "nothing would match: leave the key out to match everything, or fill the list";
        table.complain(key, Some("an empty list".to_owned()), wanted, report);
    }
    list
}

/// What SuperEdge opens for ssh, whether its file says so or not.
const PORT: u16 = 22;
