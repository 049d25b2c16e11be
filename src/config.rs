//! Configuration: a TOML text becomes checked settings, or a list of every fault in it.
//!
//! SuperEdge's files load unchanged, old spelling and new. A table is folded (upper case, `_`), then read leaf by leaf,
//! so that all faults are found in one go. Keys of SuperEdge that are not served yet are named in a warning; any other
//! unknown key is a fault, for a slip of the pen must never leave a door open. What every key means stands in
//! `conf/cloud.toml` and `conf/edge.toml`.

pub mod edge;
pub mod listen;
pub mod live;
pub mod server;
pub mod table;
pub mod value;

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::config::listen::AccessConfig;
use crate::config::table::ConfigTable;

/// Values of the environment and the command line, as plain text; empty means absent. `main` alone reads it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment {
    /// `NODE_NAME`: the edge's node, where the file does not name it.
    pub node_name: Option<String>,
    /// `NODE_IP`: an address of this machine.
    pub node_ip: Option<String>,
    /// `POD_IP`: an address of this machine or pod.
    pub pod_ip: Option<String>,
    /// `HOST_IP`: an address of the machine on which Kubernetes runs this pod.
    pub host_ip: Option<String>,
    /// `POD_NAME`: a label of the metrics.
    pub pod_name: Option<String>,
    /// `POD_NAMESPACE`: a label of the metrics, and where in Kubernetes we are.
    pub pod_namespace: Option<String>,
    /// `KUBERNETES_SERVICE_HOST`: there inside a cluster, and nowhere else.
    pub kubernetes_service_host: Option<String>,
    /// `--k`: how to reach a cluster from outside.
    pub kubeconfig: Option<PathBuf>,
    /// `PROXY_AUTHORIZATION`: SuperEdge's way to ask for passwords at the HTTP proxy.
    pub proxy_authorization: Option<String>,
    /// `CLOUD_PROXY`: SuperEdge's list of what clients of the HTTP proxy may not reach.
    pub cloud_proxy: Option<String>,
    /// `EDGE_NO_PROXY`: SuperEdge's list of what edges may not reach through the cloud.
    pub edge_no_proxy: Option<String>,
    /// `HTTPS_PROXY` or `https_proxy`: through which HTTP proxy an edge dials its cloud. May hold a password.
    pub https_proxy: Option<Secret>,
    /// `NO_PROXY` or `no_proxy`: hosts that are dialled without it.
    pub no_proxy: Option<String>,
    /// `XDG_RUNTIME_DIR`: where sockets of this user's programs may be.
    pub runtime_dir: Option<PathBuf>,
}

/// A text that no log may show; prints as `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// Where to listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenConfig {
    /// Port 0 takes any free port.
    pub at: SocketAddr,
    /// The port is a default that no key names: if it cannot be had, the program warns and goes on without it. If a
    /// port that a key names cannot be had, the program ends.
    pub implicit: bool,
    /// The key of its table that names it, for example `listen` or `port`.
    pub key: &'static str,
}

/// The table `admin`: how operators look at the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminConfig {
    /// The unix socket for commands of this machine, as `tunnel status`; only its owner may open it.
    pub socket: AdminSocket,
    /// Who may look at the log port from other machines: users, or else nobody.
    pub access: AccessConfig,
}

/// Where the admin socket is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminSocket {
    /// At the path that a key names; without it the program ends.
    At(PathBuf),
    /// No key names it: it has this name (without `.sock`) in a directory for such sockets, for example in this
    /// `XDG_RUNTIME_DIR`. Without it the program runs all the same.
    Named(&'static str, Option<PathBuf>),
}

/// The settings of a file and the environment, as far as they can be read.
#[derive(Debug)]
pub struct ParsedConfig<T> {
    /// The settings. With faults they are good for nothing but to look further: what is wrong or missing is made up.
    pub settings: T,
    /// What the operator should know.
    pub warnings: Vec<Warning>,
    /// All that is wrong, in the order of the file.
    pub faults: Vec<ConfigError>,
    /// The whole keys that stand in the file and were understood; none if the file is not TOML.
    pub given: BTreeSet<String>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The whole key, as `mode.cloud.ssh.port`, or what else is wrong (`NODE_IP`); empty for a text that is not TOML.
    pub key: String,
    /// The line in the file, from 1, where there is one.
    pub line: Option<usize>,
    /// What stands there, never a secret, and what is allowed or what to do.
    pub text: String,
}

/// All that is wrong. Displays as one line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors<F = ConfigError>(Vec<F>);

/// Something the operator should know of a file that loads nevertheless.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The whole key, or the table.
    pub key: String,
    /// Why it matters.
    pub kind: WarningKind,
    /// What is the matter and what to do about it; does not repeat the key.
    pub text: String,
}

/// Why a [`Warning`] matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarningKind {
    /// A port is open to everybody who can reach it.
    Insecure,
    /// SuperEdge's key is understood, but what it asks for is not served yet.
    Unsupported,
    /// It works, though perhaps not as meant.
    Unexpected,
}

impl Environment {
    /// What the variables have, each by its name; no kubeconfig.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Self {
        Self {
            node_name: variable("NODE_NAME"),
            node_ip: variable("NODE_IP"),
            pod_ip: variable("POD_IP"),
            host_ip: variable("HOST_IP"),
            pod_name: variable("POD_NAME"),
            pod_namespace: variable("POD_NAMESPACE"),
            kubernetes_service_host: variable("KUBERNETES_SERVICE_HOST"),
            proxy_authorization: variable("PROXY_AUTHORIZATION"),
            cloud_proxy: variable("CLOUD_PROXY"),
            edge_no_proxy: variable("EDGE_NO_PROXY"),
            kubeconfig: None,
            https_proxy: variable("HTTPS_PROXY").or_else(|| variable("https_proxy")).map(Secret::new),
            no_proxy: variable("NO_PROXY").or_else(|| variable("no_proxy")),
            runtime_dir: variable("XDG_RUNTIME_DIR").map(PathBuf::from),
        }
    }
}

impl Secret {
    /// Wraps a text, from now on hidden.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the one place that must send or compare it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl<T> ParsedConfig<T> {
    /// The settings and all warnings, or else all faults.
    ///
    /// # Errors
    ///
    /// Everything that is wrong.
    pub fn whole(self) -> Result<(T, Vec<Warning>), ConfigErrors> {
        if self.faults.is_empty() {
            Ok((self.settings, self.warnings))
        } else {
            Err(ConfigErrors(self.faults))
        }
    }
}

impl<F> ConfigErrors<F> {
    /// Each of them.
    pub fn iter(&self) -> std::slice::Iter<'_, F> {
        self.0.iter()
    }
}

impl<F> FromIterator<F> for ConfigErrors<F> {
    fn from_iter<I: IntoIterator<Item = F>>(faults: I) -> Self {
        Self(faults.into_iter().collect())
    }
}

impl<'a, F> IntoIterator for &'a ConfigErrors<F> {
    type Item = &'a F;
    type IntoIter = std::slice::Iter<'a, F>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<F: fmt::Debug + fmt::Display> std::error::Error for ConfigErrors<F> {}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.text)
    }
}

impl<F: fmt::Display> fmt::Display for ConfigErrors<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            fault.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.text)
    }
}

/// Two modes may share a file: the other one's table is left alone. Alone it is the wrong file.
fn other_mode(
    mode: &mut ConfigTable<'_>,
    ours: &ConfigTable<'_>,
    other: &'static str,
    report: &mut Diagnostics,
) {
    if !mode.ignore(other, report) {
        return;
    }
    if ours.is_present() {
        report.warn(
            mode.key(other),
            WarningKind::Unexpected,
            "this table is for the other mode and is not read",
        );
    } else {
        let found = Some("the only mode in this file".to_owned());
        mode.error(other, found, format!("start with --m={other}, or give the other file"), report);
    }
}

/// An address from the environment; empty is absent.
fn address(key: &str, text: Option<&str>, report: &mut Diagnostics) -> Option<IpAddr> {
    let text = text.filter(|text| !text.is_empty())?;
    text.parse().map_err(|_| report.error(key, Some(value::excerpt(text)), "want an address")).ok()
}

fn grace(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Duration {
    table.read("grace", value::duration(Duration::ZERO..=DAY), report).unwrap_or(GRACE)
}

fn drain(table: &mut ConfigTable<'_>, report: &mut Diagnostics) -> Duration {
    table.read("drain", value::duration(Duration::ZERO..=DAY), report).unwrap_or(DRAIN)
}

/// kubectl gives an exec up after 60 s of silence: to keep its session longer is of no use to it.
const GRACE: Duration = Duration::from_secs(60);

/// Kubernetes kills a process 30 s after it asked it to stop: this leaves time for the last frames.
const DRAIN: Duration = Duration::from_secs(25);

/// The longest that waiting can be meant.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Below this not even a few sessions have their windows.
const MIN_MEMORY: usize = 1 << 20;

/// SuperEdge's fixed path of the certificate authority.
const CA: &str = "/etc/tunnel/certs/ca.crt";

// What reading finds out: faults with their lines, warnings, and the keys that were given.

/// What reading has found out so far.
#[derive(Debug, Default)]
pub(crate) struct Diagnostics {
    faults: Vec<PlacedFault>,
    warnings: Vec<Warning>,
    /// Every key that was asked for, whole: all that we know. Tests compare it with the documentation.
    pub(crate) known: Vec<String>,
    /// Those of them that stand in the file and were understood.
    pub(crate) given: BTreeSet<String>,
}

/// A fault whose line is not known yet: [`Report::finish`] finds it by the place.
#[derive(Debug)]
struct PlacedFault {
    /// In bytes from the start of the file, or [`NOWHERE`].
    place: usize,
    /// Whether it is that something is missing, or that nobody knows a key: what a broken line causes, too.
    doubt: Certainty,
    fault: ConfigError,
}

/// Whether a fault may only follow from a line that is not TOML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Certainty {
    /// It stands there, and is wrong.
    None,
    /// A key is missing: it may stand in that line.
    Missing,
    /// Nobody knows a key: behind such a line it may have got into another table.
    Unknown,
}

impl Diagnostics {
    /// Notes a key that nobody knows.
    pub(crate) fn unknown(&mut self, place: usize, key: &str, wanted: &str) {
        let found = Some("not a key that is known".to_owned());
        self.place_fault(Some(place), key, found, wanted);
        if let Some(fault) = self.faults.last_mut() {
            fault.doubt = Certainty::Unknown;
        }
    }

    /// Notes what is wrong outside the file, or missing in it.
    pub(crate) fn error(&mut self, key: &str, found: Option<String>, wanted: impl Into<String>) {
        self.place_fault(None, key, found, wanted);
    }

    /// Notes what the operator should know.
    pub(crate) fn warn(&mut self, key: impl Into<String>, kind: WarningKind, text: impl Into<String>) {
        self.warnings.push(Warning { key: key.into(), kind, text: text.into() });
    }

    /// How many faults there are so far.
    pub(crate) fn fault_count(&self) -> usize {
        self.faults.len()
    }

    /// All that was found out, with the line of each fault.
    pub(crate) fn finish<T>(mut self, text: &str, settings: T) -> ParsedConfig<T> {
        self.faults.sort_by_key(|found| found.place);
        let line = lines_of(text);
        let mut broken = BTreeSet::new();
        let mut faults = Vec::new();
        // Of lines that are not TOML only the first is sure to be wrong: what is left open there breaks others, and other
        // faults on those lines only follow from it.
        let mut first = None;
        for PlacedFault { place, fault, .. } in &self.faults {
            let line = (*place != NOWHERE).then(|| line(*place));
            if fault.key.is_empty() {
                broken.insert(line);
                if first.is_none() {
                    first = Some(*place);
                    faults.push(ConfigError { line, ..fault.clone() });
                }
            }
        }
        for PlacedFault { place, doubt, fault } in self.faults {
            let line = (place != NOWHERE).then(|| line(place));
            let unread = first.is_some_and(|first| match doubt {
                Certainty::None => false,
                Certainty::Missing => true,
                Certainty::Unknown => place > first,
            });
            if !fault.key.is_empty() && !unread && !broken.contains(&line) {
                faults.push(ConfigError { line, ..fault });
            }
        }
        faults.sort_by_key(|fault| fault.line.unwrap_or(NOWHERE));
        let given = if broken.is_empty() { self.given } else { BTreeSet::new() };
        ParsedConfig { settings, warnings: self.warnings, faults, given }
    }

    /// Notes what is wrong at that place, in bytes from the start of the file; none: it stands nowhere there.
    pub(crate) fn place_fault(
        &mut self,
        place: Option<usize>,
        key: &str,
        found: Option<String>,
        wanted: impl Into<String>,
    ) {
        let doubt = if found.is_none() { Certainty::Missing } else { Certainty::None };
        let text = format!("{}: {}", found.unwrap_or_else(|| "missing".to_owned()), wanted.into());
        let fault = ConfigError { key: key.to_owned(), line: None, text };
        self.faults.push(PlacedFault { place: place.unwrap_or(NOWHERE), doubt, fault });
    }
}

/// Which line a place is in, counted from 1. The text is read once: a bad file may have a fault in every line.
fn lines_of(text: &str) -> impl Fn(usize) -> usize {
    let ends: Vec<_> = text.match_indices('\n').map(|(place, _)| place).collect();
    move |place| ends.partition_point(|end| *end < place) + 1
}

/// Place of what stands nowhere in the file: it is reported last.
const NOWHERE: usize = usize::MAX;

#[cfg(test)]
mod tests;
