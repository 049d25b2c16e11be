//! `tunnel status`: the current state of a server or edge on this machine, as a table for people.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use clap::ValueEnum;
use http::{Method, Request};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use crate::admin::nodes::NodesResponse;
use crate::admin::readiness::ConditionStatus;
use crate::admin::status::{LinkStatus, Status};
use crate::command::{CommandError, Format};
use crate::config::Environment;
use crate::startup::admin_socket::SocketDirs;
use tunnel_base::logging::{one_line as clean, plain_text};

/// The format of the list of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NodesFormat {
    /// Text for people.
    Text,
    /// Text with more columns.
    Wide,
    /// One name on each line, for shells.
    Name,
    /// JSON for programs.
    Json,
}

/// Queries a server or edge on this machine. Returns its status as a table, or as JSON. The table is preceded by the
/// sockets of other programs that run here.
///
/// # Errors
///
/// Returns an error if there is no response.
pub async fn status(
    named: Option<PathBuf>,
    output: Format,
    env: &Environment,
) -> Result<String, CommandError> {
    let socket = socket(named, &["server", "edge"], env).await?;
    let body = get(&socket.path, "/status").await?;
    if output == Format::Json {
        return parse(&socket.path, &body).map(|_: IgnoredAny| body);
    }
    let mut status_report: Status = parse(&socket.path, &body)?;
    let others = if status_report.peers.is_empty() {
        String::new()
    } else {
        let all: NodesResponse = parse(&socket.path, &get(&socket.path, "/nodes").await?)?;
        // A node that has moved to a peer is not missing.
        let is_linked = |name: &str| all.nodes.iter().any(|node| node.name.eq_ignore_ascii_case(name));
        status_report.disconnected.retain(|disconnected_node| !is_linked(&disconnected_node.name));
        let nodes = nodes_text(&all, false, false);
        if nodes.is_empty() { nodes } else { format!("\n\n{nodes}") }
    };
    Ok(socket.choice() + &text(&status_report) + &others)
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
) -> Result<String, CommandError> {
    let mut until = std::pin::pin!(until);
    let mut output = Some(status(named.clone(), Format::Text, env).await?);
    loop {
        show(&format!("{CLEAR}{}", output.take().unwrap_or_default()));
        tokio::select! {
            () = &mut until => return Ok(String::new()),
            () = sleep(WATCH_INTERVAL) => {}
        }
        output = tokio::select! {
            () = &mut until => return Ok(String::new()),
            output = status(named.clone(), Format::Text, env) => Some(output.unwrap_or_else(|error| error.text)),
        };
    }
}

/// Lists the nodes of all servers of the cloud, through the server on this machine, as a table, names or JSON. With
/// `down`, it lists instead the nodes that this server has lost and no server has.
///
/// # Errors
///
/// Returns an error if there is no response.
pub async fn nodes(
    named: Option<PathBuf>,
    output: NodesFormat,
    down: bool,
    env: &Environment,
) -> Result<String, CommandError> {
    let socket = socket(named, &["server"], env).await?;
    let body = get(&socket.path, "/nodes").await?;
    let all: NodesResponse = parse(&socket.path, &body)?;
    Ok(match output {
        NodesFormat::Json if down => plain_text(&serde_json::to_string(&all.down).unwrap_or_default()),
        NodesFormat::Json => body,
        NodesFormat::Name if down => names(all.down.iter().map(|node| &node.name)),
        NodesFormat::Name => names(all.nodes.iter().map(|node| &node.name)),
        NodesFormat::Text | NodesFormat::Wide if down => socket.choice() + &down_text(&all),
        NodesFormat::Text | NodesFormat::Wide => {
            socket.choice() + &nodes_text(&all, true, output == NodesFormat::Wide)
        }
    })
}

fn names<'n>(names: impl Iterator<Item = &'n String>) -> String {
    names.map(|name| clean(name) + "\n").collect()
}

/// Requests a path. Returns the body of the response.
pub(crate) async fn get(socket: &Path, path: &str) -> Result<String, CommandError> {
    let (code, body) = ask(socket, Method::GET, path, "").await?;
    if code == 200 {
        return Ok(body);
    }
    Err(CommandError::unavailable(format!("{} responded with {code}: {}", socket.display(), clean(&body))))
}

/// Parses a response. Its texts are cleaned where they are printed, as JSON can escape any character.
pub(crate) fn parse<T: DeserializeOwned>(socket: &Path, body: &str) -> Result<T, CommandError> {
    serde_json::from_str(body).map_err(|cause| incompatible(socket, &cause))
}

/// Returns the error of a response that this version does not understand.
pub(crate) fn incompatible(socket: &Path, cause: &dyn fmt::Display) -> CommandError {
    let cause = clean(&cause.to_string());
    CommandError::unavailable(format!("incompatible version at {}: {cause}", socket.display()))
}

/// Formats the nodes that are down.
fn down_text(all: &NodesResponse) -> String {
    let mut table = Table::new(&["NODE", "LAST SEEN", "REASON"]);
    for node in &all.down {
        let reason = node.error.as_ref().map_or("-".to_owned(), |error| clean(&error.text));
        table.row(vec![clean(&node.name), format!("{} ago", duration(all.now - node.time)), reason]);
    }
    table.to_string()
}

/// Formats the nodes of all servers, or those of the peers. Wide text has their addresses, too.
fn nodes_text(all: &NodesResponse, with_own: bool, is_wide: bool) -> String {
    let own = all.servers.first().map_or("", |own| own.name.as_str());
    let columns = ["NODE", "SERVER", "LINKED", "RTT", "SESSIONS", "VERSION", "ADDRESS"];
    let shown = if is_wide { columns.len() } else { columns.len() - 1 };
    let mut table = Table::new(&columns[..shown]);
    for node in all.nodes.iter().filter(|node| with_own || node.server != own) {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let mut row = vec![
            clean(&node.name),
            if node.server == own { "this server".to_owned() } else { clean(&node.server) },
            duration(all.now - node.since),
            or_dash(node.rtt_seconds.map(round_trip)),
            or_dash(node.sessions.map(|sessions| sessions.to_string())),
            or_dash(node.version.as_deref().map(clean)),
            or_dash(node.address.as_deref().map(clean)),
        ];
        row.truncate(shown);
        table.row(row);
    }
    let mut lines = Vec::new();
    if with_own || table.rows.len() > 1 {
        lines.push(table.to_string());
    }
    for server in &all.servers {
        let name = clean(&server.name);
        match server.state.as_str() {
            "truncated" => lines.push(format!("! {name} has more nodes; query its own socket")),
            "does_not_tell" => lines.push(format!(
                "! {name} does not tell its nodes; it is busy, has no [server.peers], or its version does not know the request"
            )),
            "not_linked" => {
                lines.push(format!("! {name}: {}", clean(server.error.as_deref().unwrap_or("no link"))));
            }
            _ => {}
        }
    }
    lines.join("\n")
}

/// Moves the cursor to the top, and clears the terminal.
const CLEAR: &str = "\x1b[H\x1b[2J";
/// Interval between two requests of `status --watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Formats a condition that is not ready.
fn problem(condition: &ConditionStatus) -> Option<String> {
    Some(format!("! {}: {}", clean(&condition.name), clean(condition.message.as_ref()?)))
}

/// Formats the status for people.
fn text(status_report: &Status) -> String {
    let what = status_report
        .node
        .as_ref()
        .map_or_else(|| "server".to_owned(), |node| format!("edge of {}", clean(node)));
    let state = if status_report.ready { "ready" } else { "not ready" };
    let up = duration(status_report.now - status_report.started_at);
    let mut lines = vec![format!(
        "{what} {}, version {}, up {up}, {state}",
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
    lines.extend(status_report.conditions.iter().filter_map(problem));
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
    let (server, now) = (status_report.role == "server", status_report.now);
    lines.push(String::new());
    lines.push(links(if server { "NODE" } else { "LINK" }, &status_report.links, now));
    if status_report.links.is_empty() {
        lines.push(
            if server { "no node is connected" } else { "not connected; see the reason above" }.to_owned(),
        );
    }
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

// Tables with aligned columns.

/// A table of text with aligned columns, printed by commands.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(titles: &[&str]) -> Self {
        Self { rows: vec![titles.iter().map(|title| (*title).to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let cells = |column: usize| self.rows.iter().filter_map(move |row| row.get(column));
        let width = |column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or_default();
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (number, row) in self.rows.iter().enumerate() {
            if number > 0 {
                f.write_str("\n")?;
            }
            let line: String =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  ")).collect();
            f.write_str(line.trim_end())?;
        }
        Ok(())
    }
}

// Durations, sizes and untrusted texts, formatted for people.

/// Formats seconds in their two largest units: `45s`, `3m20s`, `5h12m`, `12d3h`.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{whole}s"),
        (0, 0, _) => format!("{minutes}m{}s", whole % 60),
        (0, ..) => format!("{hours}h{minutes}m"),
        _ => format!("{days}d{hours}h"),
    }
}

/// Formats seconds as milliseconds, with as many digits as are significant.
pub(crate) fn round_trip(seconds: f64) -> String {
    let millis = seconds * 1000.0;
    if millis < 10.0 { format!("{millis:.2} ms") } else { format!("{millis:.0} ms") }
}

/// Formats bytes in a suitable unit.
pub(crate) fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

// Requests to programs on this machine: to a server or an edge over its admin socket, to others at their port.

/// The admin socket of a process on this machine that a command queries.
pub(crate) struct Socket {
    pub(crate) path: PathBuf,
    /// The sockets of other programs that run on this machine.
    others: Vec<PathBuf>,
}

impl Socket {
    /// Names the socket that was chosen among several, and the others. Empty if there is only one.
    pub(crate) fn choice(&self) -> String {
        if self.others.is_empty() {
            return String::new();
        }
        let others: Vec<_> = self.others.iter().map(|path| format!("--socket={}", path.display())).collect();
        format!("queried {}; others on this machine: {}\n", self.path.display(), others.join(" "))
    }
}

/// Chooses the socket to query: the named one, otherwise the first default socket of a program with one of these names.
/// Programs that respond come first, then programs that this user may not query, then programs that have ended.
///
/// # Errors
///
/// Returns an error if no socket is named, and none is found.
pub(crate) async fn socket(
    named: Option<PathBuf>,
    names: &[&str],
    env: &Environment,
) -> Result<Socket, CommandError> {
    if let Some(path) = named {
        return Ok(Socket { path, others: Vec::new() });
    }
    let mut found = Vec::new();
    for path in SocketDirs::of_user(env.runtime_dir.as_deref()).sockets(names) {
        let state = match UnixStream::connect(&path).await.map_err(|cause| cause.kind()) {
            Ok(_) => SocketState::Answers,
            Err(io::ErrorKind::PermissionDenied) => SocketState::Denied,
            Err(_) => SocketState::Ended,
        };
        found.push((state, path));
    }
    found.sort_by_key(|(state, _)| *state);
    let mut running = found.iter().filter(|(state, _)| *state != SocketState::Ended);
    let first = running.next().or(found.first()).map(|(_, path)| path.clone());
    let others = running.map(|(_, path)| path.clone()).collect();
    first.map(|path| Socket { path, others }).ok_or_else(|| {
        let text = format!(
            "no admin socket of {} found at the default paths; check that one of this user is running on this machine. Its log at \
             the start contains the socket's path; set it with --socket=PATH, or run this as the user of the program",
            if names.contains(&"edge") { "a server or edge" } else { "a server" },
        );
        CommandError::unavailable(text)
    })
}

/// Whether the process at an admin socket answers. The best state comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SocketState {
    /// A process accepts the connection.
    Answers,
    /// This user may not connect.
    Denied,
    /// No process listens there.
    Ended,
}

/// Sends one request with a body, which may be empty, and returns HTTP status and body of the response.
///
/// # Cancel safety
///
/// Not cancel safe: the request may have been executed.
///
/// # Errors
///
/// Returns an error if there is no response, or this user has no permission.
pub(crate) async fn ask(
    socket: &Path,
    method: Method,
    path: &str,
    body: impl Into<Bytes>,
) -> Result<(u16, String), CommandError> {
    let failed = |cause: &dyn std::fmt::Display| {
        CommandError::unavailable(format!("{} does not respond: {cause}", socket.display()))
    };
    let stream = UnixStream::connect(socket).await.map_err(|cause| match cause.kind() {
        io::ErrorKind::PermissionDenied => CommandError::refused(format!(
            "permission denied for {}; only the user that runs its program and root (sudo) may open it",
            socket.display()
        )),
        io::ErrorKind::ConnectionRefused => {
            failed(&"its program has ended; start it, or set another --socket")
        }
        io::ErrorKind::NotFound => failed(&"no such socket; start its program, or set another --socket"),
        _ => failed(&cause),
    })?;
    exchange(stream, method, path, body.into()).await.map_err(|cause| failed(&cause))
}

/// Sends one request over a stream, like [`ask`]. Returns the response, or the reason why there is none. The other end
/// may be any program, so its text cannot control a terminal.
pub(crate) async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<(u16, String), String> {
    let exchange = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = http::Uri::try_from(path).unwrap_or_default();
        request.headers_mut().insert(http::header::HOST, http::HeaderValue::from_static("localhost"));
        // Owns the sender, so that the connection ends with the response.
        let answer = async move {
            let answer = sender.send_request(request).await?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, MAX_BYTES).collect().await;
            Ok::<_, hyper::Error>((head.status.as_u16(), body.map(|body| body.to_bytes())))
        };
        // The connection is driven at the same time. If it ends first, the sender returns the error.
        let (answer, _) = tokio::join!(answer, connection);
        answer
    };
    match timeout(TIMEOUT, exchange).await {
        Ok(Ok((status, Ok(body)))) => Ok((status, plain_text(&String::from_utf8_lossy(&body)))),
        Ok(Ok((_, Err(cause)))) => Err(cause.to_string()),
        Ok(Err(cause)) => Err(cause.to_string()),
        Err(_) => Err(format!(
            "no response within {TIMEOUT:?}; the process is stopped or overloaded: check its state and its log"
        )),
    }
}

/// Timeout for a complete response. A server with 20,000 nodes needs some time to list them.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a response, for some 100,000 nodes.
const MAX_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests;
