//! Configuration: parses TOML into a checked config, or into a list of all its errors.
//!
//! Keys are read one by one, so that all errors are found in one pass. An unknown key is an error, because a typo must
//! never leave a port open. `docs/reference/` documents every key. SuperEdge's files are translated first
//! ([`superedge`]).

pub mod access;
pub mod admin_listener;
pub mod admin_ports;
pub mod cluster;
pub mod config_watch;
mod de;
pub(crate) mod diagnostics;
pub mod edge;
#[cfg(feature = "server")]
pub mod kubernetes;
pub mod listen;
pub mod listen_tls;
pub mod plan;
pub(crate) mod removed;
pub(crate) mod required_cluster;
#[cfg(feature = "server")]
pub mod server;
#[cfg_attr(not(feature = "superedge"), path = "config/without_superedge.rs")]
pub mod superedge;
pub mod table;
pub mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::table::ConfigTableReader;
use crate::parts;
use tunnel_net::http_proxy::{OutboundProxy, ProxyError};

/// Values from the environment and the command line, unparsed. An empty value means absent. Only `main` reads them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment {
    /// `NODE_NAME`: the edge's node, if the file does not name it.
    pub node_name: Option<String>,
    /// `NODE_IP`: an address of this machine.
    pub node_ip: Option<String>,
    /// `POD_IP`: an address of this machine or pod.
    pub pod_ip: Option<String>,
    /// `HOST_IP`: the address of the machine on which Kubernetes runs this pod.
    pub host_ip: Option<String>,
    /// `POD_NAME`: a label of the metrics.
    pub pod_name: Option<String>,
    /// `POD_NAMESPACE`: a label of the metrics, and our namespace in Kubernetes.
    pub pod_namespace: Option<String>,
    /// `KUBERNETES_SERVICE_HOST`: set only inside a cluster.
    pub kubernetes_service_host: Option<String>,
    /// `--kubeconfig`: the kubeconfig file, used to reach a cluster from outside.
    pub kubeconfig: Option<PathBuf>,
    /// `PROXY_AUTHORIZATION`: SuperEdge's switch for passwords at the HTTP proxy.
    pub proxy_authorization: Option<String>,
    /// `CLOUD_PROXY`: SuperEdge's list of targets that clients of the HTTP proxy may not reach.
    pub cloud_proxy: Option<String>,
    /// `EDGE_NO_PROXY`: SuperEdge's list of targets that edges may not reach through the cloud.
    pub edge_no_proxy: Option<String>,
    /// The proxy through which servers are dialled.
    pub proxy: ProxyVariables,
    /// `STATE_DIRECTORY`: the directory in which this process keeps files; of several that systemd names, the first.
    pub state_dir: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`: the directory for sockets of this user's programs.
    pub runtime_dir: Option<PathBuf>,
    /// This user's `client.toml`, below `XDG_CONFIG_HOME` or `HOME`.
    pub client_file: Option<PathBuf>,
    /// `HOME`: this user's home directory, whose `.ssh` has ssh's config.
    pub home: Option<PathBuf>,
}

/// The HTTP or SOCKS5 proxy through which edges and users' programs dial servers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProxyVariables {
    /// `HTTPS_PROXY` or `https_proxy`: the proxy's URL. May contain a password.
    pub https_proxy: Option<SecretString>,
    /// `NO_PROXY` or `no_proxy`: hosts that are dialled without the proxy.
    pub no_proxy: Option<String>,
}

/// A text that must not appear in logs. Displays as `***`.
#[derive(derive_more::Debug, derive_more::Display, Clone, PartialEq, Eq, Default, Deserialize)]
#[debug("***")]
#[display("***")]
pub struct SecretString(String);

/// The config read from a file and the environment, complete or not.
#[derive(Debug)]
pub struct ParsedConfig<T> {
    /// The config. If there are errors, wrong and missing values are placeholders, so it is only good for further
    /// checks.
    pub settings: T,
    /// Warnings for the operator.
    pub warnings: Vec<Warning>,
    /// All errors, in the order of the file.
    pub errors: Vec<ConfigError>,
    /// The full keys that were present in the file and valid; empty if the file is not TOML.
    pub given: BTreeSet<String>,
    /// The tables by their full keys, with the values in effect. Secrets are masked.
    pub effective: BTreeMap<String, toml::Table>,
    /// The file's spelling of keys, if it is one of SuperEdge's.
    pub spelling: KeySpellings,
}

/// Keys and tables of the schema that a translated file spells otherwise, with the spelling there.
#[derive(Debug, Clone, Default)]
pub struct KeySpellings(pub(crate) BTreeMap<String, String>);

/// One error in the config: the key, its line and what is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The full key, such as `server.connect.port`, or another source (`NODE_IP`). Empty if the text is not TOML.
    pub key: String,
    /// The line in the file, counted from 1, if known.
    pub line: Option<usize>,
    /// The value found, unless it is secret, and what is allowed or what to do.
    pub text: String,
}

/// All errors. Displays as one line each.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
#[display(bound(F: fmt::Display))]
#[display("{}", _0.iter().map(F::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigErrors<F = ConfigError>(pub Vec<F>);

/// A warning about a file that loads nevertheless.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
#[display("{key}: {text}")]
pub struct Warning {
    /// The full key, or the table.
    pub key: String,
    /// The kind of warning.
    pub kind: WarningKind,
    /// The problem and what to do about it, without the key.
    pub text: String,
}

/// The kind of a [`Warning`] about the config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarningKind {
    /// A port is open to any client that can reach it.
    Insecure,
    /// A SuperEdge key is valid, but its function is not supported yet.
    Unsupported,
    /// The config works, but perhaps not as intended.
    Unexpected,
}

impl Environment {
    /// Reads all variables through `variable`, by name. Does not set the kubeconfig.
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
            proxy: ProxyVariables {
                https_proxy: variable("HTTPS_PROXY")
                    .or_else(|| variable("https_proxy"))
                    .map(SecretString::new),
                no_proxy: variable("NO_PROXY").or_else(|| variable("no_proxy")),
            },
            state_dir: variable("STATE_DIRECTORY").and_then(|dirs| Some(dirs.split(':').next()?.into())),
            runtime_dir: variable("XDG_RUNTIME_DIR").map(PathBuf::from),
            client_file: config_home(&variable).map(|dir| dir.join("tunnel/client.toml")),
            home: variable("HOME").map(PathBuf::from).filter(|dir| dir.is_absolute()),
        }
    }
}

impl ProxyVariables {
    /// Returns the proxy, or `None` if none is set.
    ///
    /// # Errors
    ///
    /// Returns an error if `HTTPS_PROXY` is not a supported proxy's URL.
    pub fn parse(&self) -> Result<Option<OutboundProxy>, ProxyError> {
        let url = self.https_proxy.as_ref().map_or("", SecretString::reveal);
        OutboundProxy::new(url, self.no_proxy.as_deref().unwrap_or_default())
    }
}

/// Returns the directory of the user's config files, as the XDG Base Directory Specification defines it.
pub(crate) fn config_home(variable: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
    absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")))
}

impl SecretString {
    /// Wraps a secret text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text itself, for the one place that must send or compare it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl KeySpellings {
    /// Returns a key as the file spells it.
    pub fn of(&self, key: &str) -> String {
        let ends =
            (0..=key.len()).rev().filter(|end| matches!(key.as_bytes().get(*end), None | Some(b'.' | b'[')));
        let known = |end: usize| {
            let (table, rest) = key.split_at_checked(end)?;
            Some(format!("{}{rest}", self.0.get(table)?))
        };
        ends.into_iter().find_map(known).unwrap_or_else(|| key.to_owned())
    }
}

impl<T> ParsedConfig<T> {
    /// Returns it with other settings.
    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> ParsedConfig<U> {
        let Self { settings, warnings, errors, given, effective, spelling } = self;
        ParsedConfig { settings: change(settings), warnings, errors, given, effective, spelling }
    }

    /// Returns the config and all warnings.
    ///
    /// # Errors
    ///
    /// Returns all errors if there are any.
    pub fn whole(self) -> Result<(T, Vec<Warning>), ConfigErrors> {
        if self.errors.is_empty() {
            Ok((self.settings, self.warnings))
        } else {
            Err(ConfigErrors(self.errors))
        }
    }
}

impl<F> ConfigErrors<F> {
    /// Iterates over the errors.
    pub fn iter(&self) -> std::slice::Iter<'_, F> {
        self.0.iter()
    }
}

impl<F: fmt::Debug + fmt::Display> std::error::Error for ConfigErrors<F> {}

impl Serialize for SecretString {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
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

/// Handles the other role's table. Both may be in one file, but a file with only the other one is the wrong file.
pub(crate) fn other_role(
    file: &mut ConfigTableReader<'_>,
    ours: &ConfigTableReader<'_>,
    other: &'static str,
) {
    if !file.ignore(other) {
        return;
    }
    if ours.is_present() {
        file.report().warn(other, WarningKind::Unexpected, "this table is for the other role and is ignored");
    } else {
        let found = Some("the only table in this file".to_owned());
        let run = format!("run `tunnel {other}` with it, or use the other file");
        file.error(other, found, parts::named(other).err().map_or(run, str::to_owned));
    }
}

/// Parses an address from the environment. An empty value means absent.
pub(crate) fn address(file: &ConfigTableReader<'_>, key: &str, text: Option<&str>) -> Option<IpAddr> {
    let text = text.filter(|text| !text.is_empty())?;
    let wrong = |_| file.report().error(key, Some(value::excerpt(text)), "expected an address");
    text.parse().map_err(wrong).ok()
}

/// kubectl gives up an exec after 60 s without a response, so keeping its session longer is useless.
pub(crate) const RESUME_TIMEOUT: Duration = Duration::from_secs(60);

/// A working day with its meetings, or a night: a person expects her logins back after either.
pub(crate) const MAX_RESUME_TIMEOUT: Duration = Duration::from_secs(12 * 60 * 60);

/// Kubernetes kills a process 30 s after asking it to stop. This leaves time for the last frames.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(25);

/// Upper limit of configurable timeouts, in milliseconds.
pub(crate) const DAY: u64 = 24 * 60 * 60 * 1000;

/// With less memory, not even a few sessions have room for their windows.
const MIN_MEMORY: usize = 1 << 20;

/// SuperEdge's fixed path of the CA file.
const CA: &str = "/etc/tunnel/certs/ca.crt";
