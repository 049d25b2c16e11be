//! Commands for people: the command line, shell completions and man pages.

#[cfg_attr(not(feature = "csr"), path = "command/approve/absent.rs")]
pub mod approve;
pub mod connect;
pub mod demo;
pub mod doctor;
pub mod file_edit;
pub mod init;
#[cfg_attr(not(feature = "invitations"), path = "command/invitations/absent.rs")]
pub mod invitations;
pub mod migrate;
pub mod output_dir;
pub mod status;
pub mod token;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use tracing::warn;

use crate::command::approve::ApproveArgs;
use crate::command::connect::ConnectArgs;
use crate::command::demo::Module;
use crate::command::doctor::DoctorArgs;
use crate::command::init::InitArgs;
use crate::command::invitations::{InviteArgs, JoinArgs, RevokeArgs};
use crate::command::migrate::MigrateArgs;
use crate::command::token::TokenCommand;
use crate::config::edge::EdgeConfig;
use crate::config::live::{ConfigFile, tell_warnings};
use crate::config::{Environment, Warning};
use crate::edge::Edge;
use crate::parts;
use crate::server::Server;
use crate::server::config::ServerConfig;
use crate::startup::{Startup, StartupErrorKind};
use tunnel_net::reload::warn_of_readers;

/// The error of a command for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct CommandError {
    /// The program's exit code, as in sysexits.h.
    pub code: u8,
    /// What failed and why, with a hint.
    pub text: String,
}

impl CommandError {
    /// Returns an error of the command line.
    fn usage(text: impl Into<String>) -> Self {
        Self { code: 64, text: text.into() }
    }

    /// Returns an error for an unusable input file.
    fn unusable(text: impl Into<String>) -> Self {
        Self { code: 78, text: text.into() }
    }

    /// Returns an error for a refused request.
    fn refused(text: impl Into<String>) -> Self {
        Self { code: 77, text: text.into() }
    }

    /// Returns an error for a file that cannot be written.
    fn cannot_write(text: impl Into<String>) -> Self {
        Self { code: 73, text: text.into() }
    }

    /// Returns an error for a service that does not answer.
    fn unavailable(text: impl Into<String>) -> Self {
        Self { code: 69, text: text.into() }
    }
}

// The command line.

/// Reach edge nodes behind NAT by name: run `tunnel --m=cloud` as a server, and `tunnel --m=edge` on each node.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, after_help = EXIT_CODES)]
pub struct Args {
    /// Command to run instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Role of this process.
    #[arg(long = "m", value_name = "MODE", default_value = "cloud")]
    pub mode: Mode,
    /// Config file; docs/reference/server.toml and docs/reference/edge.toml describe every key. [default: /etc/tunnel/MODE.toml]
    #[arg(long = "c", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the config and the files it names, report all errors, and exit. No port is opened.
    #[arg(long)]
    pub check: bool,
    /// Kubeconfig file, for a server outside its cluster. Requires a build with Kubernetes support.
    #[arg(long = "k", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Requests per second to kube-apiserver. Ignored by this version.
    #[arg(long, value_name = "N", default_value_t = 1000.0)]
    pub kube_qps: f64,
    /// Burst of requests to kube-apiserver. Ignored by this version.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub kube_burst: u32,
    /// Directory for daily log files. The last 7 are kept, at most 100 MiB in total.
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Log to stderr in addition to --log-dir.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub alsologtostderr: bool,
    /// Log to stderr only, and ignore --log-dir.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub logtostderr: bool,
    /// Format of log lines.
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub log_format: LogFormat,
    /// Log level: 0 info, 2 debug, 4 debug of libraries too, 6 trace except frames, 8 frames too.
    #[arg(long = "v", value_name = "N", default_value_t = 0)]
    pub verbosity: i32,
}

/// The command to run instead of serving.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a server and an edge on loopback with new certificates, to try things out, until Ctrl-C.
    Demo {
        /// Make one request through the tunnel in each way, print the results, and exit.
        #[arg(long)]
        check: bool,
        /// Additional ways to demonstrate besides CONNECT, separated by commas.
        #[arg(long, value_name = "MODULES", value_delimiter = ',')]
        with: Vec<Module>,
    },
    /// Create certificates, tokens and config files for a new cloud: everything its servers and edges need.
    Init(InitArgs),
    /// Check everything a server or an edge on this machine needs, from its config to its links. Prints what was found,
    /// what was expected, and a hint for each check. Exits with 1 if a check failed.
    Doctor(DoctorArgs),
    /// Invite a machine to join the cloud as a node, once and within a time limit, through the server on this machine.
    Invite(InviteArgs),
    /// Make this machine a node of the cloud that invited it.
    Join(JoinArgs),
    /// Revoke the token and the invitation of a node, through the server on this machine.
    Revoke(RevokeArgs),
    /// List the nodes of a server's token file, or change a node's token without cutting its sessions.
    #[command(subcommand)]
    Token(TokenCommand),
    /// Approve or deny certificate requests of the tunnel's servers and edges in a Kubernetes cluster, until a signal.
    /// Other requests are not touched.
    Approve(ApproveArgs),
    /// Connect stdin and stdout to a port of a node through a server, as an ssh ProxyCommand or for a local port.
    Connect(ConnectArgs),
    /// Print the status of a server or edge on this machine: its links, and why it has none. Uses the admin socket.
    Status {
        /// Admin socket (`listen` in [server.admin] or [edge.admin]). [default: that of a server of this user,
        /// otherwise of an edge; its log contains the path]
        #[arg(long, value_name = "PATH")]
        socket: Option<PathBuf>,
        /// Print everything as JSON, including sessions.
        #[arg(long)]
        json: bool,
    },
    /// Print a config that replaces another tunnel's deployment in Kubernetes, with a remark on each of its settings.
    Migrate(MigrateArgs),
    /// Print shell completions; load them with `source <(tunnel completions bash)`.
    Completions {
        /// Shell.
        shell: Shell,
    },
    /// Write man pages of this program and of each of its commands.
    Man {
        /// Output directory; created if it is missing.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

/// Arguments of a command that is not compiled in; it says so.
#[derive(Debug, Clone, clap::Args)]
pub struct AnyArgs {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    all: Vec<OsString>,
}

/// The role of a process, set by `--m`: server or edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// A server, which edges connect to.
    #[value(name = "cloud")]
    Server,
    /// An edge, on each node.
    Edge,
}

/// The format of the log lines of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

impl Args {
    /// Parses the command line of this process, including Go's spelling of flags.
    ///
    /// # Errors
    ///
    /// Returns an error if it is wrong, or requests help or the version. Print the error, and see [`is_wrong`].
    pub fn read(args: impl Iterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(args.map(normalize_flag))
    }

    /// Returns the path of the config file.
    pub fn config(&self) -> PathBuf {
        self.config.clone().unwrap_or_else(|| self.mode.config().into())
    }
}

impl Mode {
    /// Returns the default path of the config file.
    pub fn config(self) -> &'static str {
        match self {
            Self::Server => "/etc/tunnel/cloud.toml",
            Self::Edge => "/etc/tunnel/edge.toml",
        }
    }
}

/// Returns true if the command line was wrong. Otherwise the "error" is a requested text, such as help.
pub fn is_wrong(error: &clap::Error) -> bool {
    !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// Converts Go's flags to clap's spelling: one dash becomes two, `_` in a name becomes `-`.
fn normalize_flag(arg: OsString) -> OsString {
    let Some(text) = arg.to_str() else { return arg };
    let name = text.trim_start_matches('-');
    if name.len() == text.len() || name.is_empty() || matches!(text, "-h" | "-V") {
        return arg;
    }
    let (name, value) = name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
    let name = name.replace('_', "-");
    value.map_or_else(|| format!("--{name}"), |value| format!("--{name}={value}")).into()
}

/// The same list as in docs/operating.md.
const EXIT_CODES: &str = "\
Exit codes: 0 stopped, or no errors; 1 the demo, or a check of the doctor, failed; 64 wrong command line; 69 a port is unavailable, or there \
is no answer; 71 a system resource is missing; 73 a file cannot be written; 74 a session was interrupted; 77 this user may \
not use the port, or may not ask; 78 the config, or a file that it names, is wrong. Priority: 78, 77, 73, 71, 69.";

// Shell completions and man pages, generated from the command line's definition.

/// Returns the completion script for a shell.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), NAME, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes tunnel(1) and a page for each command into `dir`, which is created if it is missing. Existing pages are
/// overwritten.
///
/// # Errors
///
/// Returns an error if the directory, or a file in it, cannot be written.
pub fn man(dir: &Path) -> Result<String, CommandError> {
    let written = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Args::command(), dir));
    let failed = |cause| format!("cannot write man pages into {}: {cause}", dir.display());
    written.map(|()| String::new()).map_err(|cause: io::Error| CommandError::cannot_write(failed(cause)))
}

/// The name of the program.
const NAME: &str = "tunnel";

// The config to serve with, read from the file, the environment and the command line.

/// The config of a server or an edge.
#[derive(Debug)]
pub enum Settings {
    /// A server's config.
    Cloud(Box<ServerConfig>),
    /// An edge's config.
    Edge(Box<EdgeConfig>),
}

impl Settings {
    /// Reads the config, and logs its warnings. Returns `None` if it cannot be read, which is recorded in `startup`.
    /// `variable` returns environment variables by name.
    pub fn read(
        args: &Args,
        variable: fn(&str) -> Option<String>,
        startup: &mut Startup,
    ) -> Option<(Self, ConfigFile)> {
        let from = (args.mode, args.config());
        let (settings, file, warnings) =
            Self::examine((from.0, &from.1), args.kubeconfig.clone(), variable, startup)?;
        tell_warnings(&warnings);
        if args.kubeconfig.is_some()
            && startup.is_clear()
            && let Some(why) = settings.asks_no_kubernetes()
        {
            warn!(key = "--k", reason = %why, "kubeconfig ignored");
        }
        for (key, path) in settings.secrets(&file.path) {
            warn_of_readers(&key, &path);
        }
        Some((settings, file))
    }

    /// Like [`Self::read`], but logs nothing.
    pub fn examine(
        (mode, path): (Mode, &Path),
        kubeconfig: Option<PathBuf>,
        variable: fn(&str) -> Option<String>,
        startup: &mut Startup,
    ) -> Option<(Self, ConfigFile, Vec<Warning>)> {
        let text = std::fs::read_to_string(path).map_err(|cause| {
            format!("cannot read the config {}: {cause}; set its path with --c=FILE", path.display())
        });
        let text = startup.collect(StartupErrorKind::Config, &["--c"], text)?;
        let environment = Environment { kubeconfig, ..Environment::read(variable) };
        let (settings, warnings) = match mode {
            Mode::Server => {
                let (settings, warnings) = startup.settings(ServerConfig::examine(&text, &environment));
                (Self::Cloud(Box::new(settings)), warnings)
            }
            Mode::Edge => {
                let (settings, warnings) = startup.settings(EdgeConfig::examine(&text, &environment));
                (Self::Edge(Box::new(settings)), warnings)
            }
        };
        Some((settings, ConfigFile { path: path.to_owned(), text, environment }, warnings))
    }

    /// Checks for everything that would prevent a start, without starting anything.
    pub fn check(&self, startup: &mut Startup) {
        match self {
            Self::Cloud(settings) => Server::validate(settings, startup),
            Self::Edge(settings) => Edge::validate(settings, startup),
        }
    }

    /// Returns the reason why Kubernetes is not used; `None` if it is used.
    fn asks_no_kubernetes(&self) -> Option<&'static str> {
        match self {
            Self::Edge(edge) => {
                let unused =
                    "an edge uses Kubernetes only for its certificate; set agent = true in [edge.csr]";
                edge.csr.is_none().then_some(unused)
            }
            Self::Cloud(cloud) => {
                if let Err(why) = parts::CLUSTER {
                    return Some(why);
                }
                let asks =
                    cloud.peers.cluster.is_some() || cloud.addresses.cluster.is_some() || cloud.csr.is_some();
                let unused = "no key requires Kubernetes; set publish or service of [server.dns], kubernetes = true in \
                              [server.addresses], or profiles of [server.csr]";
                (!asks).then_some(unused)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_for_each_shell_knows_the_flags_and_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completions(shell);
            for word in ["log-dir", "demo", "completions"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn a_page_for_the_program_and_one_for_each_command_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("man1");
        for _ in 0..2 {
            man(&below).unwrap();
        }
        let page = std::fs::read_to_string(below.join("tunnel.1")).unwrap();
        assert!(page.contains(".TH tunnel 1") && page.contains("Exit codes"), "{page}");
        for command in Args::command().get_subcommands() {
            assert!(below.join(format!("tunnel-{}.1", command.get_name())).exists(), "{command}");
        }
    }
}
