//! `tunnel status`: the current state of a server or edge, as a table for people.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use serde::de::IgnoredAny;
use tokio::time::sleep;

use crate::admin::nodes::NodesResponse;
use crate::admin::readiness::ReadinessCondition;
use crate::admin::status::{LinkStatus, StatusResponse};
use crate::command::admin_client::{AdminClient, query};
use crate::command::format::{bytes, duration, round_trip};
use crate::command::table::Table;
use crate::command::{CommandResult, Format, ssh};
use crate::config::Environment;
use tunnel_proto::printable::{one_line as clean, plain_text};

/// Arguments of `tunnel nodes`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct NodesArgs {
    /// Admin socket of the server. [default: that of a server of this user, otherwise a link of client.toml; the
    /// server's log contains the path]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: NodesFormat,
    /// List the nodes that this server or a peer has lost within a day and that no server has, the latest first,
    /// with the reason.
    #[arg(long)]
    pub down: bool,
    /// List only the nodes with edges of this version.
    #[arg(long = "version", value_name = "VERSION", conflicts_with = "down")]
    pub of_version: Option<String>,
}

/// The format of the list of nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum NodesFormat {
    /// Text for people.
    #[default]
    Text,
    /// Text with more columns.
    Wide,
    /// One name on each line, for shells.
    Name,
    /// JSON for programs.
    Json,
    /// An inventory for Ansible, in JSON, whose ssh goes through `tunnel connect`.
    Ansible,
}

/// Queries a server or edge on this machine, or the server of a link. Returns its status as a table, or as JSON. The
/// table is preceded by the sockets of other programs that run here.
///
/// # Errors
///
/// Returns an error if there is no response.
pub async fn status(named: Option<PathBuf>, output: Format, env: &Environment) -> CommandResult {
    query(named, &["server", "edge"], env, async |api| report(api, output).await).await
}

async fn report(api: &AdminClient, output: Format) -> CommandResult {
    let body = api.get("/status").await?;
    if output == Format::Json {
        return api.parse(&body).map(|_: IgnoredAny| body);
    }
    let mut status_report: StatusResponse = api.parse(&body)?;
    let others = if status_report.peers.is_empty() {
        String::new()
    } else {
        let all: NodesResponse = api.parse(&api.get("/nodes").await?)?;
        // A node that has moved to a peer is not missing.
        let is_linked = |name: &str| all.nodes.iter().any(|node| node.name.eq_ignore_ascii_case(name));
        status_report.disconnected.retain(|disconnected_node| !is_linked(&disconnected_node.name));
        let nodes = nodes_text(&all, false, false);
        if nodes.is_empty() { nodes } else { format!("\n\n{nodes}") }
    };
    Ok(api.choice.clone() + &text(&status_report) + &others)
}

/// Shows the status like [`status`] again and again, until `until` ends. Each `show` replaces the terminal's content.
///
/// # Errors
///
/// Returns an error if there is no response at first; a later error is shown.
pub async fn watch(
    named: Option<PathBuf>,
    env: &Environment,
    until: impl Future<Output = ()>,
    show: impl Fn(&str),
) -> CommandResult {
    let mut until = std::pin::pin!(until);
    let watch = async |api: &AdminClient| {
        let mut output = report(api, Format::Text).await?;
        loop {
            show(&format!("{CLEAR}{output}"));
            let next = async {
                sleep(WATCH_INTERVAL).await;
                report(api, Format::Text).await.unwrap_or_else(|error| error.text)
            };
            output = tokio::select! {
                () = &mut until => return Ok(String::new()),
                next = next => next,
            };
        }
    };
    query(named, &["server", "edge"], env, watch).await
}

/// Lists the nodes of all servers of the cloud, through the server on this machine or the server of a link: as a table,
/// names or JSON, only those of a version if one is given. With `down`, it lists instead the nodes that this server has
/// lost and no server has.
///
/// # Errors
///
/// Returns an error if there is no response.
pub async fn nodes(args: NodesArgs, env: &Environment) -> CommandResult {
    let NodesArgs { socket, output, down, of_version } = args;
    let list = async |api: &AdminClient| {
        let mut body = api.get("/nodes").await?;
        let mut all: NodesResponse = api.parse(&body)?;
        let counted = versions(&all);
        if let Some(wanted) = of_version.as_deref() {
            // What follows a plus is no version of its own.
            let is_wanted = |found: &str| found == wanted || found.split('+').next() == Some(wanted);
            all.nodes.retain(|node| node.version.as_deref().is_some_and(is_wanted));
            all.count();
            body = plain_text(&serde_json::to_string(&all).unwrap_or_default());
        }
        let names: Vec<_> = match down {
            true => all.down.iter().map(|node| node.name.as_str()).collect(),
            false => all.nodes.iter().map(|node| node.name.as_str()).collect(),
        };
        Ok(match output {
            NodesFormat::Json if down => plain_text(&serde_json::to_string(&all.down).unwrap_or_default()),
            NodesFormat::Json => body,
            NodesFormat::Name => names.into_iter().map(|name| clean(name) + "\n").collect(),
            NodesFormat::Ansible => ssh::inventory(names.into_iter())?,
            _ if all.nodes.is_empty() && of_version.is_some() => {
                format!("no node has this version; there are: {counted}")
            }
            _ if down => api.choice.clone() + &down_text(&all),
            _ => api.choice.clone() + &nodes_text(&all, true, output == NodesFormat::Wide),
        })
    };
    query(socket, &["server"], env, list).await
}

/// Formats the nodes that are down.
fn down_text(all: &NodesResponse) -> String {
    let mut table = Table::new(&["NODE", "JOINED", "LAST SEEN", "REASON"]);
    for node in &all.down {
        let reason = node.error.as_ref().map_or("-".to_owned(), |error| clean(&error.text));
        let time = duration(all.now - node.time);
        // Such a node was not seen since the server started, so its time is that start.
        let seen = match node.last_seen {
            Some(at) if node.state == "absent" => ago(all, Some(at)),
            None if node.state == "absent" => format!("over {time} ago"),
            _ => format!("{time} ago"),
        };
        table.row(vec![clean(&node.name), ago(all, node.joined_at), seen, reason]);
    }
    table.to_string()
}

/// Formats a time in seconds since 1970.
fn ago(all: &NodesResponse, at: Option<u64>) -> String {
    at.map_or("-".to_owned(), |at| format!("{} ago", duration(all.now - at as f64)))
}

/// Formats the nodes of all servers, or those of the peers. Wide text has their addresses, too.
fn nodes_text(all: &NodesResponse, with_own: bool, is_wide: bool) -> String {
    let own = all.servers.first().map_or("", |own| own.name.as_str());
    let columns = ["NODE", "SERVER", "LINKED", "RTT", "SESSIONS", "VERSION", "JOINED", "ADDRESS"];
    let shown = if is_wide { columns.len() } else { columns.len() - 1 };
    let mut table = Table::new(&columns[..shown]);
    for node in all.nodes.iter().filter(|node| with_own || node.server != own) {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let mut row = vec![
            clean(&node.name),
            clean(&node.server),
            duration(all.now - node.since),
            or_dash(node.rtt_seconds.map(round_trip)),
            or_dash(node.sessions.map(|sessions| sessions.to_string())),
            or_dash(node.version.as_deref().map(clean)),
            ago(all, node.joined_at),
            or_dash(node.address.as_deref().map(clean)),
        ];
        row.truncate(shown);
        table.row(row);
    }
    let mut lines = Vec::new();
    if with_own || table.rows.len() > 1 {
        lines.push(table.to_string());
    }
    let nodes = all.nodes.iter().map(|node| (&node.name, &node.websocket));
    lines.extend(websockets(nodes));
    for server in &all.servers {
        let name = clean(&server.name);
        match server.state.as_str() {
            "truncated" => lines.push(format!("! {name} has more nodes; query its own socket")),
            "does_not_tell" => lines.push(format!(
                "! {name} does not tell its nodes; it is busy, cannot be reached, has no [server.peers], or its version does not know the request"
            )),
            "not_linked" => {
                lines.push(format!("! {name}: {}", clean(server.error.as_deref().unwrap_or("no link"))));
            }
            _ => {}
        }
    }
    if with_own && !all.nodes.is_empty() {
        lines.push(versions(all));
    }
    if with_own && !all.down.is_empty() {
        lines.push(format!("! nodes that are down: {}; tunnel nodes --down lists them", all.down.len()));
    }
    lines.join("\n")
}

/// Counts the nodes by the version of their edges, the most frequent first: `4998 of version 0.3.0, 2 of 0.2.1`.
fn versions(all: &NodesResponse) -> String {
    let mut counts = BTreeMap::new();
    for node in &all.nodes {
        *counts.entry(node.version.as_deref().map_or("unknown".to_owned(), clean)).or_insert(0) += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| Reverse(*count));
    let counts: Vec<_> = counts.iter().map(|(version, count)| format!("{count} of {version}")).collect();
    counts.join(", ").replacen(" of ", " of version ", 1)
}

/// Moves the cursor to the top, and clears the terminal.
const CLEAR: &str = "\x1b[H\x1b[2J";
/// Interval between two requests of `status --watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Formats a condition that is not ready.
fn problem(condition: &ReadinessCondition) -> Option<String> {
    Some(format!("! {}: {}", clean(&condition.name), clean(condition.message.as_ref()?)))
}

/// Formats the status for people.
fn text(status_report: &StatusResponse) -> String {
    let what = status_report
        .node
        .as_ref()
        .map_or_else(|| "server".to_owned(), |node| format!("edge of {}", clean(node)));
    let name = status_report.name.as_ref().map(|name| format!(" {}", clean(name))).unwrap_or_default();
    let state = if status_report.ready { "ready" } else { "not ready" };
    let up = duration(status_report.now - status_report.started_at);
    let mut lines = vec![format!(
        "{what}{name} {}, version {}, up {up}, {state}",
        clean(&status_report.instance),
        clean(&status_report.version)
    )];
    let totals = status_report.totals;
    lines.push(format!(
        "{} session{}, {} relayed; {} to targets, {} from targets",
        totals.sessions,
        if totals.sessions == 1 { "" } else { "s" },
        totals.sessions_relayed,
        bytes(totals.bytes_to_target),
        bytes(totals.bytes_to_client)
    ));
    lines.extend(status_report.room.map(|edges| format!("room for {edges} more edges")));
    // What is wrong comes before the tables, which may be longer than the screen.
    lines.extend(status_report.conditions.iter().filter_map(problem));
    let problems_at = |peer: &LinkStatus| {
        Some(format!("! server {}: {}", clean(&peer.name), clean(peer.problems.as_ref()?)))
    };
    lines.extend(status_report.peers.iter().filter_map(problems_at));
    if let Some(publisher) = &status_report.publisher {
        let error = publisher.error.as_ref().map(|error| format!("; failing: {}", clean(error)));
        lines.push(format!(
            "published: {} records ({}), {} failures{}",
            publisher.records,
            clean(&publisher.store),
            publisher.failures,
            error.unwrap_or_default()
        ));
    }
    if !status_report.refusals.is_empty() {
        let mut counts: Vec<_> = status_report.refusals.iter().collect();
        counts.sort_by_key(|(_, count)| Reverse(**count));
        let counts: Vec<_> = counts.iter().map(|(why, count)| format!("{count} {}", clean(why))).collect();
        lines.push(format!("refusals in the last hour: {}", counts.join(", ")));
    }
    let server = status_report.role == "server";
    let now = status_report.now;
    lines.push(String::new());
    lines.push(links(if server { "NODE" } else { "LINK" }, &status_report.links, now));
    if status_report.links.is_empty() {
        lines.push(
            if server { "no node is connected" } else { "not connected; see the reason above" }.to_owned(),
        );
    }
    lines.extend(websockets(status_report.links.iter().map(|link| (&link.name, &link.websocket))));
    if !status_report.disconnected.is_empty() {
        let mut table = Table::new(&["NOT LINKED HERE", "AGO", "LAST ERROR"]);
        for disconnected_node in &status_report.disconnected {
            let why = disconnected_node.error.as_ref().map_or("-".to_owned(), |error| clean(&error.text));
            table.row(vec![clean(&disconnected_node.name), duration(now - disconnected_node.time), why]);
        }
        lines.extend([String::new(), table.to_string()]);
    }
    if !status_report.peers.is_empty() {
        lines.extend([String::new(), links("PEER", &status_report.peers, now)]);
    }
    lines.join("\n")
}

/// Formats which of these are linked through a WebSocket, and why.
fn websockets<'n>(all: impl Iterator<Item = (&'n String, &'n Option<String>)>) -> Option<String> {
    let mut reasons = BTreeMap::<_, BTreeSet<_>>::new();
    for (name, reason) in all {
        reasons.entry(reason.as_deref()).or_default().insert(clean(name));
    }
    let lines = reasons.into_iter().filter_map(|(reason, names)| {
        let why = clean(reason?);
        let names = Vec::from_iter(names);
        let more = if names.len() > MAX_NAMES { " and others" } else { "" };
        let names = names[..names.len().min(MAX_NAMES)].join(" ");
        Some(format!("! through a WebSocket, because {why}: {names}{more}"))
    });
    Some(lines.collect::<Vec<_>>().join("\n")).filter(|text| !text.is_empty())
}

/// Maximum number of names in a line.
const MAX_NAMES: usize = 20;

fn links(title: &'static str, links: &[LinkStatus], now: f64) -> String {
    let mut table = Table::new(&[
        title,
        "STATE",
        "LINKED",
        "RTT",
        "SESSIONS",
        "SENT",
        "RECEIVED",
        "VERSION",
        "DIALECT",
        "ADDRESS",
        "LAST ERROR",
    ]);
    let or_dash = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), clean);
    for link in links {
        let error = link.error.as_ref().map_or("-".to_owned(), |error| {
            let ago = error.time.map(|at| format!(" ({} ago)", duration(now - at)));
            clean(&error.text) + &ago.unwrap_or_default()
        });
        table.row(vec![
            clean(&link.name),
            clean(&link.state),
            link.since.map_or("-".to_owned(), |since| duration(now - since)),
            link.rtt_seconds.map_or("-".to_owned(), round_trip),
            link.sessions.to_string(),
            bytes(link.sent_bytes),
            bytes(link.received_bytes),
            or_dash(&link.version),
            or_dash(&link.dialect),
            or_dash(&link.address),
            error,
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests;
