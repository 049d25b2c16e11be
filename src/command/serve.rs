//! `tunnel server` and `tunnel edge`: their arguments, and the config to serve with.

use std::io;
use std::path::{Path, PathBuf};

use clap::ArgAction;
use tracing::warn;

use crate::command::{Format, Role};
use crate::config::config_watch::{ConfigFile, tell_warnings};
use crate::config::{Environment, Warning};
use crate::edge::Edge;
use crate::edge::config::EdgeConfig;
use crate::parts;
use crate::server::Server;
use crate::server::config::ServerConfig;
use crate::startup::{NotPrepared, StartupErrorCollector, StartupErrorKind};
use tunnel_base::files;
use tunnel_net::reload::warn_of_readers;

/// Arguments of `tunnel server` and `tunnel edge`.
#[derive(Debug, Clone, clap::Args)]
pub struct DaemonArgs {
    /// Config file; docs/reference/config.md describes every key. [default: server.toml or edge.toml in /etc/tunnel]
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kubeconfig file, for a process outside its cluster. Requires a build with Kubernetes support.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Log level: 0 info, 2 debug, 4 debug of libraries too, 6 trace except frames, 8 frames too.
    #[arg(short, long, value_name = "LEVEL", default_value_t = 0, allow_negative_numbers = true)]
    pub verbosity: i32,
    /// Format of log lines.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: Format,
    /// Directory for log files. The last 8 are kept, at most 100 MiB in total. Moved and deleted files are opened again.
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// File that audit lines are appended to, in addition to the log. It is not rotated here. A moved or deleted file
    /// is opened again.
    #[arg(long, value_name = "FILE")]
    pub audit_file: Option<PathBuf>,
    /// Log to stderr in addition to --log-dir.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub alsologtostderr: bool,
    /// Log to stderr only, and ignore --log-dir.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub logtostderr: bool,
    /// End when the process that started this one ends; for `tunnel demo`.
    #[arg(long, hide = true)]
    pub end_with_parent: bool,
    /// SuperEdge's limit of requests per second to kube-apiserver. Has no effect.
    #[arg(long, hide = true)]
    pub kube_qps: Option<f64>,
    /// SuperEdge's limit of a burst of requests to kube-apiserver. Has no effect.
    #[arg(long, hide = true)]
    pub kube_burst: Option<u32>,
    /// Whether the command line was SuperEdge's.
    #[arg(skip)]
    pub is_superedge: bool,
}

impl DaemonArgs {
    /// Returns the path of the config file.
    pub fn config(&self, role: Role) -> PathBuf {
        self.config.clone().unwrap_or_else(|| role.config())
    }

    /// Logs a warning for each flag without effect.
    pub fn warn_of_ignored(&self) {
        let given = [("--kube-qps", self.kube_qps.is_some()), ("--kube-burst", self.kube_burst.is_some())];
        for (key, _) in given.iter().filter(|(_, is_given)| *is_given) {
            warn!(key, hint = "remove it", "flag ignored");
        }
    }
}

/// The config of a server or an edge.
#[derive(Debug)]
pub enum Settings {
    /// A server's config.
    Cloud(Box<ServerConfig>),
    /// An edge's config.
    Edge(Box<EdgeConfig>),
}

impl Settings {
    /// Reads the config, and logs its warnings. `variable` returns environment variables by name.
    pub fn read(
        role: Role,
        path: &Path,
        kubeconfig: Option<&Path>,
        variable: fn(&str) -> Option<String>,
        startup: &mut StartupErrorCollector,
    ) -> Result<(Self, ConfigFile), NotPrepared> {
        let (settings, file, warnings) = Self::examine(role, path, kubeconfig, variable, startup)?;
        tell_warnings(&warnings);
        if kubeconfig.is_some()
            && startup.is_clear()
            && let Some(why) = settings.uses_no_kubernetes()
        {
            warn!(key = "--kubeconfig", reason = %why, "kubeconfig ignored");
        }
        for (key, path) in settings.secrets(&file.path) {
            warn_of_readers(&startup.spelled(&key), &path);
        }
        Ok((settings, file))
    }

    /// Reads the last good copy of an edge's config, for a start that its file prevents. Returns `None` if none is kept,
    /// or if it is the same as the file.
    pub fn read_copy(
        path: &Path,
        kubeconfig: Option<&Path>,
        variable: fn(&str) -> Option<String>,
        startup: &mut StartupErrorCollector,
    ) -> Option<Result<(Self, ConfigFile), NotPrepared>> {
        let copy = copy_of(path, variable)?;
        let text = files::read_text(&copy).ok()?;
        if files::read_text(path).is_ok_and(|file| file == text) {
            return None;
        }
        let read = Self::read(Role::Edge, &copy, kubeconfig, variable, startup);
        Some(read.map(|(mut settings, file)| {
            if let Self::Edge(edge) = &mut settings {
                edge.is_last_good = true;
            }
            (settings, ConfigFile { path: path.to_owned(), copy: Some(copy), ..file })
        }))
    }

    /// Like [`Self::read`], but logs nothing.
    pub fn examine(
        role: Role,
        path: &Path,
        kubeconfig: Option<&Path>,
        variable: fn(&str) -> Option<String>,
        startup: &mut StartupErrorCollector,
    ) -> Result<(Self, ConfigFile, Vec<Warning>), NotPrepared> {
        let text = files::read_text(path).map_err(|cause| {
            let first = match (cause.kind(), role) {
                (io::ErrorKind::NotFound, Role::Server) => "make one with tunnel init, or ",
                (io::ErrorKind::NotFound, Role::Edge) => {
                    "join a cloud with the command that tunnel invite prints on its server, or "
                }
                _ => "",
            };
            format!(
                "cannot read the config {}: {cause}; {first}name another with --config=FILE",
                path.display()
            )
        });
        let text = startup.collect(StartupErrorKind::Config, &["--config"], text)?;
        let environment =
            Environment { kubeconfig: kubeconfig.map(Path::to_owned), ..Environment::read(variable) };
        let (settings, warnings) = match role {
            Role::Server => {
                let (settings, warnings) = startup.settings(ServerConfig::examine(&text, &environment));
                (Self::Cloud(Box::new(settings)), warnings)
            }
            Role::Edge => {
                let (settings, warnings) = startup.settings(EdgeConfig::examine(&text, &environment));
                (Self::Edge(Box::new(settings)), warnings)
            }
        };
        let copy = if role == Role::Edge { copy_of(path, variable) } else { None };
        Ok((settings, ConfigFile { path: path.to_owned(), text, environment, copy }, warnings))
    }

    /// Checks for everything that would prevent a start, without starting anything.
    pub fn check(&self, startup: &mut StartupErrorCollector) {
        match self {
            Self::Cloud(settings) => Server::validate(settings, startup),
            Self::Edge(settings) => Edge::validate(settings, startup),
        }
    }

    /// Returns the reason why Kubernetes is not used; `None` if it is used.
    fn uses_no_kubernetes(&self) -> Option<&'static str> {
        match self {
            Self::Edge(edge) => {
                let unused =
                    "an edge uses Kubernetes only for its certificate; set enabled = true in [edge.csr]";
                edge.csr.is_none().then_some(unused)
            }
            Self::Cloud(cloud) => {
                if let Err(why) = parts::KUBERNETES {
                    return Some(why);
                }
                let asks = cloud.peers.cluster.is_some() || cloud.addresses.cluster.is_some();
                let proves = cloud.csr.is_some() || cloud.service_account.is_some();
                let unused = "no key requires Kubernetes; set publish or kubernetes_service of [server.peers], kubernetes = true in \
                              [server.addresses], name of [server.service_account], or profiles of [server.csr]";
                (!asks && !proves).then_some(unused)
            }
        }
    }

    /// Returns the files that contain secrets, each with its key. `config` is the path of the config file.
    fn secrets(&self, config: &Path) -> Vec<(String, PathBuf)> {
        match self {
            Self::Cloud(settings) => settings.secrets(),
            Self::Edge(settings) => settings.secrets(config),
        }
    }
}

/// Returns the path of the last good copy of an edge's config file, in the directory that systemd makes for the service.
/// `None` without such a directory.
fn copy_of(config: &Path, variable: fn(&str) -> Option<String>) -> Option<PathBuf> {
    // systemd separates several directories by colons.
    let directories = variable("STATE_DIRECTORY")?;
    let directory = Path::new(directories.split(':').next()?);
    // Several edges of a machine may share the directory.
    let config = std::path::absolute(config).ok()?;
    let name = config.to_str()?.trim_start_matches('/').replace('/', "-");
    Some(directory.join(name + ".last-good"))
}

#[cfg(test)]
mod tests;
