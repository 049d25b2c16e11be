//! `tunnel doctor`: checks everything that a server, an edge or a user's program on this machine needs, and reports
//! errors.

mod client_checks;
mod edge_checks;
mod handshakes;
mod server_checks;
mod service_user;
mod tokens;

use crate::command::admin_sockets;
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use clap::ValueEnum;
use http::Method;
use serde::Serialize;
use tokio::time::timeout;

use crate::command::doctor::client_checks::check_client;
use crate::command::doctor::edge_checks::check_edge;
use crate::command::doctor::server_checks::check_server;
use crate::command::doctor::service_user::files;
use crate::command::serve::Settings;
use crate::command::{Format, Role, json};
use crate::config::Environment;
use crate::config::admin_listener::AdminConfig;
use crate::config::admin_ports::AdminPorts;
use crate::config::listen::ListenAddress;
use crate::startup::{NotPrepared, StartupErrorCollector};
use tunnel_net::dial::dial;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::tls::certificate::{self, CertWarningKind, CertificateWarning};
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::pem;
use tunnel_proto::names::{Host, NodeName, Target};

/// Arguments of `tunnel doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Role of this machine.
    #[arg(value_name = "ROLE")]
    pub role: DoctorRole,
    /// Its config file. [default: /etc/tunnel/ROLE.toml, of a client ~/.config/tunnel/client.toml]
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Target (host:port) that is also dialled from here, as the edge would, or asked for at the servers of a client; may
    /// be repeated.
    #[arg(long, value_name = "TARGET")]
    pub target: Vec<Target>,
    /// Node that is also looked up in DNS, as by clients and peers.
    #[arg(long, value_name = "NODE")]
    pub node: Option<NodeName>,
    /// Kubeconfig file of the program.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: Format,
}

/// What `tunnel doctor` checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DoctorRole {
    /// A server.
    Server,
    /// The edge of a node.
    Edge,
    /// A user's device, with what `tunnel join --user` wrote.
    Client,
}

/// The results, in the order of the checks.
#[derive(Debug, Default, Serialize)]
pub struct DoctorFindings(Vec<Finding>);

/// The result of one check of `tunnel doctor`, printed as a line or as JSON.
#[derive(Debug, Serialize)]
struct Finding {
    /// Name of the check; one or two fixed words.
    check: &'static str,
    /// Outcome; a warning is about what works, but perhaps not as intended, or not for long.
    status: CheckStatus,
    /// What was found.
    found: String,
    /// What was expected.
    #[serde(skip_serializing_if = "String::is_empty")]
    expected: String,
    /// A hint what to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    hint: String,
}

/// The outcome of one check of `tunnel doctor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum CheckStatus {
    Ok,
    /// It works, but perhaps not as intended, or not for long.
    Warning,
    Error,
}

/// Runs all checks. `variable` returns environment variables by name.
pub async fn run(args: &DoctorArgs, variable: fn(&str) -> Option<String>) -> DoctorFindings {
    let mut found = DoctorFindings::default();
    let role = match args.role {
        DoctorRole::Server => Role::Server,
        DoctorRole::Edge => Role::Edge,
        DoctorRole::Client => {
            Box::pin(check_client(args, variable, &mut found)).await;
            return found;
        }
    };
    let mut startup = StartupErrorCollector::checking();
    let path = args.config.clone().unwrap_or_else(|| role.config());
    let read = Settings::examine(role, &path, args.kubeconfig.as_deref(), variable, &mut startup);
    if let Ok((settings, _, warnings)) = &read {
        for warning in warnings {
            found.add_warning("config", format!("{}: {}", warning.key, warning.text), "");
        }
        settings.check(&mut startup);
    }
    let ports = startup.ports().to_vec();
    let errors = startup.into_errors();
    for fault in errors.iter() {
        found.add_error("config", fault.to_string(), "a config and files without errors", "");
    }
    if errors.iter().next().is_none() {
        found.add_ok("config", format!("{} and the files that it names are readable", path.display()));
    }
    match read {
        Ok((Settings::Cloud(settings), ..)) => {
            let public = settings.server_certificates().into_iter().chain(settings.ca_files()).collect();
            files(&path, public, settings.secrets(), &mut found);
            Box::pin(check_server(&settings, args, &ports, &mut found)).await;
        }
        Ok((Settings::Edge(settings), ..)) => {
            let public = vec![("edge.uplink.ca".to_owned(), settings.uplink.ca.clone())];
            files(&path, public, settings.secrets(&path), &mut found);
            Box::pin(check_edge(&settings, args, &ports, &mut found)).await;
        }
        Err(NotPrepared) => {}
    }
    found
}

/// Records that the program on this machine hangs, or that none runs. Then it tries its `ports`, each with its key.
fn not_responding(
    program: &'static str,
    at: &AdminAddress,
    why: &NoPage,
    ports: &[(String, SocketAddr)],
    found: &mut DoctorFindings,
) {
    let unit = if program == "edge" { "tunnel-edge" } else { "tunnel-server" };
    let NoPage::Unreachable(why) = why else {
        let text = format!("the {program} on this machine runs, but did not respond within {TIMEOUT:?}");
        let hint = format!("check its state and its log, or restart it with systemctl restart {unit}");
        return found.add_error(program, text, "a response", &hint);
    };
    if matches!(at, Some(ListenAddress::Port(at)) if at.port() == 0) {
        found.add_warning(program, "its admin_listen has port 0, so it cannot be asked whether it runs", "");
    } else {
        let text = format!("no {program} on this machine responds: {why}");
        let hint = format!("start it with systemctl start {unit}; if it ends, see journalctl -u {unit}");
        found.add_error(program, text, &format!("a running {program}"), &hint);
    }
    for (key, at) in ports {
        // The units grant the right to ports below 1024.
        if let Err(error) = TcpListenSocket::bind(*at)
            && error.cause.kind() != ErrorKind::PermissionDenied
        {
            let hint = "end that program, or set another address";
            found.add_error("port", format!("{key}: {error}"), "an address that is free", hint);
        }
    }
}

impl DoctorFindings {
    /// Returns true if no check failed.
    pub fn is_well(&self) -> bool {
        self.0.iter().all(|finding| finding.status != CheckStatus::Error)
    }

    /// Returns all results as text, a few lines each.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Finding { check, status, found, expected, hint } in &self.0 {
            let state = match status {
                CheckStatus::Ok => "ok",
                CheckStatus::Warning => "warn",
                CheckStatus::Error => "FAIL",
            };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{state:4} {check:18} {found}");
            for (what, given) in [("expected", expected), ("hint", hint)] {
                if !given.is_empty() {
                    let _ = writeln!(text, "     {what:>18} {given}");
                }
            }
        }
        let bad = self.0.iter().filter(|finding| finding.status == CheckStatus::Error).count();
        let _ = writeln!(text, "{} checks, {bad} failed", self.0.len());
        text
    }

    /// Returns all results as JSON: a list of objects with `check`, `status`, `found`, `expected`, `hint`.
    pub fn json(&self) -> String {
        json(self)
    }

    fn add_ok(&mut self, check: &'static str, found: impl Into<String>) {
        self.add(check, CheckStatus::Ok, found, "", "");
    }

    fn add_warning(&mut self, check: &'static str, found: impl Into<String>, hint: &str) {
        self.add(check, CheckStatus::Warning, found, "", hint);
    }

    fn add_error(&mut self, check: &'static str, found: impl Into<String>, expectation: &str, hint: &str) {
        self.add(check, CheckStatus::Error, found, expectation, hint);
    }

    /// Returns true if what was found contains this text.
    fn contains(&self, text: &str) -> bool {
        self.0.iter().any(|finding| finding.found.contains(text))
    }

    /// Adds a refused token, with the hint of its error, and one about the server.
    fn add_token_error(&mut self, error: impl Into<String>, hint: Option<&str>) {
        let at_server = "check that a Node of this name has an edge label";
        let hint = hint.map_or(at_server.to_owned(), |hint| format!("{hint}; {at_server}"));
        self.add_error("token", error, "a token or certificate that the server accepts", &hint);
    }

    fn add(
        &mut self,
        check: &'static str,
        status: CheckStatus,
        found: impl Into<String>,
        expected: &str,
        hint: &str,
    ) {
        let found = found.into();
        self.0.push(Finding { check, status, found, expected: expected.into(), hint: hint.into() });
    }
}

/// Returns the check that a TLS error belongs to.
fn check_of(fault: &TlsHandshakeError) -> &'static str {
    match fault {
        TlsHandshakeError::UnknownIssuer => "ca",
        TlsHandshakeError::Name(_) => "certificate name",
        TlsHandshakeError::Expired(..) => "certificate dates",
        TlsHandshakeError::NotValidYet(..) => "clock",
        TlsHandshakeError::CaUsedAsEndEntity
        | TlsHandshakeError::Purpose
        | TlsHandshakeError::OtherCertificate(_) => "certificate kind",
        TlsHandshakeError::NotTls | TlsHandshakeError::Protocol | TlsHandshakeError::Closed => "port",
        TlsHandshakeError::Stopping | TlsHandshakeError::AlertReceived(_) | TlsHandshakeError::Other(_) => {
            "tls"
        }
    }
}

/// Adds the names and the expiry of a file's certificate, and any problems with it.
fn check_certificate(file: &Path, key: &str, found: &mut DoctorFindings) {
    let Some(leaf) = pem::leaf(file) else { return };
    let summary = match certificate::summary(&leaf) {
        Ok(summary) => summary,
        Err(why) => {
            let text = format!("{key}: {} {why}", file.display());
            let expectation = "a certificate of version 3";
            return found.add_error("certificate kind", text, expectation, "reissue it: `tunnel cert issue`");
        }
    };
    let names = summary.names.join(", ");
    let until = &summary.until;
    if summary.oddities.is_empty() {
        found.add_ok("certificate", format!("{key}: for {names}, valid until {until}"));
    }
    for CertificateWarning { about, found: odd, hint } in summary.oddities {
        let check = match about {
            CertWarningKind::Kind => "certificate kind",
            CertWarningKind::Dates => "certificate dates",
            CertWarningKind::Clock => "clock",
        };
        found.add_error(
            check,
            format!("{key}: {} {odd}", file.display()),
            "a server certificate that is valid now",
            hint,
        );
    }
    if (0..WARN_BEFORE_EXPIRY_DAYS).contains(&summary.days) {
        let text = format!("{key}: {} expires on {until}, in {} days", file.display(), summary.days);
        found.add_warning(
            "certificate dates",
            text,
            "renew it where its CA's key is: `tunnel cert renew`; it is re-read without a restart",
        );
    }
}

/// Adds the conditions of a running program, which are the lines of its `/readyz`. Most of them are warnings.
fn add_conditions(program: &'static str, body: &str, found: &mut DoctorFindings) {
    for line in body.lines().filter(|line| *line != "ok") {
        match line.split(':').next() {
            Some("link") => {
                found.add_error(program, line, "", "see the check that fails below, or the log of the edge")
            }
            Some("draining") => found.add_error(program, line, "", "start it again once it has ended"),
            Some("node_name") => found.add_error("name", line, "", "give each machine its own name"),
            // The edge's text has the hint of its error.
            Some("token") => found.add_token_error(line, None),
            Some("certificates") if line.contains(" expired on ") => {
                found.add_error("certificate dates", line, "files that are valid now", "")
            }
            _ => found.add_warning(program, line, ""),
        }
    }
}

/// Where the program with a config responds: at the port that a key sets, unless it uses TLS. Otherwise at its socket,
/// as another program may have the default port. `None` if there is no socket.
type AdminAddress = Option<ListenAddress>;

async fn admin_address(ports: &AdminPorts, admin: &AdminConfig) -> AdminAddress {
    let at = ports.admin_listen;
    if !ports.is_default && admin.tls.is_none() {
        let local = SocketAddr::new([127, 0, 0, 1].into(), at.port());
        return Some(ListenAddress::Port(if at.ip().is_unspecified() { local } else { at }));
    }
    let env = Environment { runtime_dir: admin.runtime_dir.clone(), ..Environment::default() };
    let sockets = admin_sockets::sockets(admin.listen.clone(), &[admin.name], &env).await;
    sockets.into_iter().next().map(|(_, path)| ListenAddress::Unix(path))
}

/// Why the admin listener gave no page.
enum NoPage {
    /// It cannot be reached, or its response is wrong.
    Unreachable(String),
    /// It accepts connections, and does not respond.
    Hangs,
}

/// Returns status and body of a page of the admin listener, or why there is no response.
async fn fetch_page(at: &AdminAddress, path: &str) -> Result<(u16, String), NoPage> {
    match at {
        None => Err(NoPage::Unreachable("no admin socket at the default paths".to_owned())),
        Some(ListenAddress::Port(at)) => {
            let failed = |cause: String| NoPage::Unreachable(format!("{at}: {cause}"));
            let socket = dial(&Host::Ip(at.ip()), &[*at], TIMEOUT).await;
            let socket = socket.map_err(|cause| failed(cause.to_string()))?;
            let page = admin_sockets::exchange(socket, Method::GET, path, Bytes::new());
            timeout(TIMEOUT, page).await.map_err(|_| NoPage::Hangs)?.map_err(failed)
        }
        Some(ListenAddress::Unix(socket)) => {
            let page = timeout(TIMEOUT, admin_sockets::ask(socket, Method::GET, path, ""));
            page.await.map_err(|_| NoPage::Hangs)?.map_err(|error| NoPage::Unreachable(error.text))
        }
    }
}

/// Timeout for each step of a check.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A certificate causes a warning in this many days before its expiry.
const WARN_BEFORE_EXPIRY_DAYS: i64 = 30;
