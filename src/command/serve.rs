//! `tunnel server` and `tunnel edge`: their arguments, and the config to serve with.

use std::io;
use std::path::{Path, PathBuf};

use clap::ArgAction;
use tracing::warn;

use crate::command::{Format, Role};
use crate::config::config_watch::{ConfigFile, tell_warnings};
use crate::config::{Environment, ParsedConfig, Warning};
#[cfg(feature = "edge")]
use crate::edge::config::EdgeConfig;
use crate::parts;
#[cfg(feature = "server")]
use crate::server::config::ServerConfig;
use crate::startup::daemon::DaemonConfig;
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

/// How the config of each role that is compiled in is read.
const ROLES: &[(Role, ConfigExaminer)] = &[
    #[cfg(feature = "server")]
    (Role::Server, |text, env| ServerConfig::examine(text, env).map(|config| Box::new(config) as _)),
    #[cfg(feature = "edge")]
    (Role::Edge, |text, env| EdgeConfig::examine(text, env).map(|config| Box::new(config) as _)),
];

/// A config with its file and warnings.
pub type ExaminedConfig = (Box<dyn DaemonConfig>, ConfigFile, Vec<Warning>);

/// A config with its file, unless it cannot be read.
pub type ReadConfig = Result<(Box<dyn DaemonConfig>, ConfigFile), NotPrepared>;

type ConfigExaminer = fn(&str, &Environment) -> ParsedConfig<Box<dyn DaemonConfig>>;

impl Role {
    /// Returns how the role's config is read.
    ///
    /// # Errors
    ///
    /// Returns the reason if this program was built without the role.
    pub(crate) fn examiner(self) -> Result<ConfigExaminer, &'static str> {
        parts::named(self.name())?;
        let known = ROLES.iter().find(|(role, _)| *role == self);
        known.map(|(_, examine)| *examine).ok_or("this program was built without this role")
    }
}

/// Reads the config, and logs its warnings.
pub fn read(role: Role, path: &Path, env: &Environment, startup: &mut StartupErrorCollector) -> ReadConfig {
    let (settings, file, warnings) = examine(role, path, env, startup)?;
    tell_warnings(&warnings);
    if env.kubeconfig.is_some()
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
pub fn read_copy(path: &Path, env: &Environment, startup: &mut StartupErrorCollector) -> Option<ReadConfig> {
    let copy = copy_of(path, env)?;
    let text = files::read_text(&copy).ok()?;
    if files::read_text(path).is_ok_and(|file| file == text) {
        return None;
    }
    let read = read(Role::Edge, &copy, env, startup);
    Some(read.map(|(mut settings, file)| {
        settings.set_last_good();
        (settings, ConfigFile { path: path.to_owned(), copy: Some(copy), ..file })
    }))
}

/// Like [`read`], but logs nothing.
pub fn examine(
    role: Role,
    path: &Path,
    env: &Environment,
    startup: &mut StartupErrorCollector,
) -> Result<ExaminedConfig, NotPrepared> {
    let examine = startup.collect(StartupErrorKind::Config, &[role.name()], role.examiner())?;
    let text = files::read_text(path).map_err(|cause| {
        let first = match (cause.kind(), role) {
            (io::ErrorKind::NotFound, Role::Server) => "make one with tunnel init, or ",
            (io::ErrorKind::NotFound, Role::Edge) => {
                "join a cloud with the command that tunnel invite prints on its server, or "
            }
            _ => "",
        };
        format!("cannot read the config {}: {cause}; {first}name another with --config=FILE", path.display())
    });
    let text = startup.collect(StartupErrorKind::Config, &["--config"], text)?;
    let (settings, warnings) = startup.settings(examine(&text, env));
    let copy = if role == Role::Edge { copy_of(path, env) } else { None };
    Ok((settings, ConfigFile { path: path.to_owned(), text, environment: env.clone(), copy }, warnings))
}

/// Returns the path of the last good copy of an edge's config file, in the directory that systemd makes for the service.
/// `None` without such a directory.
fn copy_of(config: &Path, environment: &Environment) -> Option<PathBuf> {
    let directory = environment.state_dir.as_ref()?;
    // Several edges of a machine may share the directory.
    let config = std::path::absolute(config).ok()?;
    let name = config.to_str()?.trim_start_matches('/').replace('-', "--").replace('/', "-");
    Some(directory.join(name + ".last-good"))
}

#[cfg(test)]
mod tests;
