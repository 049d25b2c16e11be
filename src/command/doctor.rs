//! `tunnel doctor`: checks everything that a server, an edge or a user's program on this machine needs, and reports
//! errors.

mod client_checks;
#[cfg(feature = "edge")]
mod edge_checks;
mod links;
mod running;
#[cfg(feature = "server")]
mod server_checks;
mod service_user;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use crate::command::doctor::client_checks::{caller, check_user_targets};
use crate::command::doctor::links::check_servers;
use crate::command::{Format, Role, json, serve};
use crate::config::Environment;
use crate::startup::StartupErrorCollector;
use crate::startup::daemon::DaemonConfig;
use crate::uplink::link_dialer::messages::for_user;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::names::{NodeName, Target};

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

/// What a test has given for the next ones, or the finding that it has failed.
type Tested<T = ()> = Result<T, Finding>;

/// The outcome of one check of `tunnel doctor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum CheckStatus {
    Ok,
    /// It works, but perhaps not as intended, or not for long.
    Warning,
    Error,
}

/// A program whose config was read, and what its checks need.
struct CheckedProgram<'a> {
    settings: &'a dyn DaemonConfig,
    /// The config file.
    path: &'a Path,
    args: &'a DoctorArgs,
    /// The ports that its config asks for, each with its key.
    ports: &'a [(String, SocketAddr)],
    resolver: Resolver,
}

/// Runs all checks.
pub async fn run(args: &DoctorArgs, env: Environment) -> DoctorFindings {
    let mut found = DoctorFindings::default();
    let resolver = Resolver::system();
    let role = match args.role {
        DoctorRole::Server => Role::Server,
        DoctorRole::Edge => Role::Edge,
        DoctorRole::Client => {
            if let Some((caller, links)) = found.test(async |found| caller(args, env, found)).await {
                found.test(async |found| check_servers(&caller, &resolver, found).await).await;
                found.test(async |found| check_user_targets(links, args, found).await).await;
            }
            // The checks of links name the keys of an edge.
            found.0.iter_mut().for_each(|finding| finding.hint = for_user(std::mem::take(&mut finding.hint)));
            return found;
        }
    };
    // What prevents a start, the config included. Without a readable config there is nothing else to check.
    let mut startup = StartupErrorCollector::checking();
    let path = args.config.clone().unwrap_or_else(|| role.config());
    let env = Environment { kubeconfig: args.kubeconfig.clone(), ..env };
    let read = serve::examine(role, &path, &env, &mut startup);
    if let Ok((settings, _, warnings)) = &read {
        for warning in warnings {
            found.add_warning("config", format!("{}: {}", warning.key, warning.text), "");
        }
        settings.check(&mut startup);
    }
    let ports = startup.ports().to_vec();
    let errors = startup.into_errors();
    for fault in errors.iter() {
        found.add_error("config", fault, "a config and files without errors", "");
    }
    if errors.iter().next().is_none() {
        found.add_ok("config", format!("{} and the files that it names are readable", path.display()));
    }
    if let Ok((settings, ..)) = read {
        let checked = CheckedProgram { settings: &*settings, path: &path, args, ports: &ports, resolver };
        // Each check has its tests with their remedies. What the running process knows is asked of it, before the checks
        // that depend on it.
        match role {
            #[cfg(feature = "server")]
            Role::Server => Box::pin(server_checks::check(&checked, &mut found)).await,
            #[cfg(feature = "edge")]
            Role::Edge => Box::pin(edge_checks::check(&checked, &mut found)).await,
            #[cfg(not(all(feature = "server", feature = "edge")))]
            _ => {}
        }
    }
    found
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

    /// Makes a test. Adds its finding if it fails, otherwise returns what it gives.
    async fn test<T>(&mut self, test: impl AsyncFnOnce(&mut Self) -> Tested<T>) -> Option<T> {
        let tested = Box::pin(test(self)).await;
        tested.map_err(|failure| self.0.push(failure)).ok()
    }

    fn add_ok(&mut self, check: &'static str, found: impl ToString) {
        self.0.push(Finding { status: CheckStatus::Ok, ..Finding::error(check, found, "", "") });
    }

    fn add_warning(&mut self, check: &'static str, found: impl ToString, hint: &str) {
        self.0.push(Finding { status: CheckStatus::Warning, ..Finding::error(check, found, "", hint) });
    }

    fn add_error(&mut self, check: &'static str, found: impl ToString, expected: &str, hint: &str) {
        self.0.push(Finding::error(check, found, expected, hint));
    }
}

impl Finding {
    #[expect(clippy::needless_pass_by_value, reason = "a text that was made for it, or the error of map_err")]
    fn error(check: &'static str, found: impl ToString, expected: &str, hint: &str) -> Self {
        let status = CheckStatus::Error;
        Self { check, status, found: found.to_string(), expected: expected.into(), hint: hint.into() }
    }

    /// Returns the finding of a refused token, with the hint of its error, and one about the server.
    fn token(error: impl ToString, hint: Option<&str>) -> Self {
        let at_server = "compare it with the server's token file, or invite the machine again; in Kubernetes, check that \
                         its Node has an edge label";
        let hint = hint.map_or(at_server.to_owned(), |hint| format!("{hint}; {at_server}"));
        Self::error("token", error, "a token or certificate that the server accepts", &hint)
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

/// Timeout for each step of a check.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A certificate causes a warning in this many days before its expiry.
const WARN_BEFORE_EXPIRY_DAYS: i64 = 30;
