//! `tunnel doctor`: looks at all that a pod or an edge of this machine needs, and says what is wrong with it.

mod cloud;
mod edge;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Mode, Settings};
use crate::names::{NodeName, Target};
use crate::net::tls::{About, Fault, Oddity};
use crate::startup::Startup;

/// What to look at.
#[derive(Debug, clap::Args)]
pub struct Doctor {
    /// What this machine has: a pod or an edge.
    #[arg(long = "m", value_name = "MODE", default_value = "cloud")]
    pub mode: Mode,
    /// Its config file. [default: /etc/tunnel/MODE.toml]
    #[arg(long = "c", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Also dial this target from here, as the edge would: host:port; as often as you like.
    #[arg(long, value_name = "TARGET")]
    pub target: Vec<Target>,
    /// Also ask DNS for this node, as clients and other pods would.
    #[arg(long, value_name = "NODE")]
    pub node: Option<NodeName>,
    /// kubeconfig file, as the program itself has it.
    #[arg(long = "k", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// All findings as JSON.
    #[arg(long)]
    pub json: bool,
}

/// What was found out, in the order of the checks.
#[derive(Debug, Default, Serialize)]
pub struct Findings(Vec<Finding>);

/// One check.
#[derive(Debug, Serialize)]
struct Finding {
    /// A fixed word or two.
    check: &'static str,
    state: State,
    /// What there is.
    found: String,
    /// What there should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted: Option<String>,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Good,
    /// It works, though perhaps not as meant, or not for long.
    Doubt,
    Bad,
}

/// Looks at everything. `variable` gives those of the environment.
pub async fn run(asked: &Doctor, variable: fn(&str) -> Option<String>) -> Findings {
    let (mut found, mut startup) = (Findings::default(), Startup::checking());
    let path = asked.config.clone().unwrap_or_else(|| asked.mode.config().into());
    let read = Settings::examine((asked.mode, &path), asked.kubeconfig.clone(), variable, &mut startup);
    if let Some((settings, _, warnings)) = &read {
        for warning in warnings {
            found.doubt("config", format!("{}: {}", warning.key, warning.text), "");
        }
        settings.check(&mut startup);
    }
    let faults = startup.into_faults();
    for fault in &faults {
        found.bad("config", fault.to_string(), "a config and files without a fault", "");
    }
    if faults.iter().next().is_none() {
        found.good("config", format!("{} and the files that it names can be read", path.display()));
    }
    match read {
        Some((Settings::Cloud(settings), ..)) => Box::pin(cloud::look(&settings, asked, &mut found)).await,
        Some((Settings::Edge(settings), ..)) => Box::pin(edge::look(&settings, asked, &mut found)).await,
        None => {}
    }
    found
}

impl Findings {
    /// Whether nothing is wrong.
    pub fn is_well(&self) -> bool {
        self.0.iter().all(|finding| finding.state != State::Bad)
    }

    /// All of them, a few lines each.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Finding { check, state, found, wanted, remedy } in &self.0 {
            let state = match state {
                State::Good => "ok",
                State::Doubt => "look",
                State::Bad => "FAIL",
            };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{state:4} {check:18} {found}");
            for (what, said) in [("wanted", wanted), ("do", remedy)] {
                if let Some(said) = said {
                    let _ = writeln!(text, "     {what:>18} {said}");
                }
            }
        }
        let bad = self.0.iter().filter(|finding| finding.state == State::Bad).count();
        let _ = writeln!(text, "{} checks, {bad} failed", self.0.len());
        text
    }

    /// The same for programs: a list of objects with `check`, `state` (`good`, `doubt`, `bad`), `found`, `wanted`, `remedy`.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    fn good(&mut self, check: &'static str, found: impl Into<String>) {
        self.add(check, State::Good, found, "", "");
    }

    fn doubt(&mut self, check: &'static str, found: impl Into<String>, remedy: &str) {
        self.add(check, State::Doubt, found, "", remedy);
    }

    fn bad(&mut self, check: &'static str, found: impl Into<String>, wanted: &str, remedy: &str) {
        self.add(check, State::Bad, found, wanted, remedy);
    }

    fn add(
        &mut self,
        check: &'static str,
        state: State,
        found: impl Into<String>,
        wanted: &str,
        remedy: &str,
    ) {
        let said = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        self.0.push(Finding {
            check,
            state,
            found: found.into(),
            wanted: said(wanted),
            remedy: said(remedy),
        });
    }
}

/// Which check a fault of TLS belongs to.
fn check_of(fault: &Fault) -> &'static str {
    match fault {
        Fault::Authority => "authority",
        Fault::Name(_) => "certificate name",
        Fault::Expired(..) => "certificate dates",
        Fault::TooEarly(..) => "clock",
        Fault::IsAuthority | Fault::Purpose | Fault::OtherCertificate(_) => "certificate kind",
        Fault::NoTls | Fault::Protocol | Fault::Closed => "port",
        Fault::Disbelieves(_) | Fault::Other(_) => "tls",
    }
}

/// Adds what a file's certificate is for, until when, and what is odd about it.
fn certificate(file: &Path, key: &str, found: &mut Findings) {
    let read = std::fs::read(file).ok().and_then(|text| crate::net::pem::certs(file, &text).ok());
    let Some(leaf) = read.and_then(|certs| certs.into_iter().next()) else { return };
    let summary = match crate::net::tls::summary(&leaf) {
        Ok(summary) => summary,
        Err(why) => {
            let (text, wanted) = (format!("{key}: {} {why}", file.display()), "a certificate of version 3");
            return found.bad("certificate kind", text, wanted, "issue it anew: `tunnel init` makes one");
        }
    };
    let (names, until) = (summary.names.join(", "), &summary.until);
    if summary.oddities.is_empty() {
        found.good("certificate", format!("{key}: for {names}, until {until}"));
    }
    for Oddity { about, found: odd, remedy } in summary.oddities {
        let check = match about {
            About::Kind => "certificate kind",
            About::Dates => "certificate dates",
            About::Clock => "clock",
        };
        found.bad(check, format!("{key}: {} {odd}", file.display()), "a server's certificate, today", remedy);
    }
    if (0..SOON).contains(&summary.days) {
        let text = format!("{key}: {} ends on {until}, in {} days", file.display(), summary.days);
        found.doubt("certificate dates", text, "issue it anew; it is read again without a restart");
    }
}

/// Status and body of a page of an admin port; `None`: nobody answers.
async fn page(at: SocketAddr, path: &str) -> Option<(u16, String)> {
    let ask = async {
        let mut socket = TcpStream::connect(at).await.ok()?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
        socket.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        socket.take(PAGE_BYTES).read_to_string(&mut answer).await.ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
    };
    timeout(PATIENCE, ask).await.ok().flatten()
}

/// For each step of a check.
const PATIENCE: Duration = Duration::from_secs(5);
/// Of an admin port's page.
const PAGE_BYTES: u64 = 64 * 1024;
/// Days before its end in which a certificate is told of.
const SOON: i64 = 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_told_with_what_was_wanted_and_what_to_do() {
        let mut found = Findings::default();
        found.good("config", "fine");
        assert!(found.is_well());
        found.bad("token", "invalid token", "the cloud's", "compare them");
        assert!(!found.is_well());
        let text = found.text();
        for part in
            ["ok   config", "FAIL token", "wanted the cloud's", "do compare them", "2 checks, 1 failed"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&found.json()).unwrap();
        assert_eq!((&json[1]["state"], &json[1]["check"]), (&"bad".into(), &"token".into()));
        assert!(json[0].get("remedy").is_none());
    }
}
