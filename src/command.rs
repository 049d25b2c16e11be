//! Commands for people: the command line, and what shells and `man` learn of it.

#[cfg(feature = "kubernetes")]
pub mod approve;
pub mod connect;
pub mod demo;
pub mod doctor;
pub mod init;
pub mod invitations;
#[cfg(feature = "kubernetes")]
pub mod migrate;
pub mod output_dir;
pub mod status;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use tracing::warn;

#[cfg(feature = "kubernetes")]
use crate::command::approve::ApproveArgs;
use crate::command::connect::ConnectArgs;
use crate::command::demo::Module;
use crate::command::doctor::DoctorArgs;
use crate::command::init::InitArgs;
use crate::command::invitations::{InviteArgs, JoinArgs, RevokeArgs};
#[cfg(feature = "kubernetes")]
use crate::command::migrate::MigrateArgs;
use crate::config::edge::EdgeConfig;
use crate::config::live::{ConfigFile, tell_warnings};
use crate::config::server::ServerConfig;
use crate::config::{Environment, Warning};
use crate::edge::Edge;
use crate::server::Server;
use crate::startup::{Startup, StartupErrorKind};
use tunnel_net::reload::warn_of_readers;

/// Why a command for people was not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct CommandError {
    /// The program's exit code, as in sysexits.h.
    pub code: u8,
    /// What is wrong, and the remedy.
    pub text: String,
}

impl CommandError {
    /// What was asked for cannot be.
    fn usage(text: impl Into<String>) -> Self {
        Self { code: 64, text: text.into() }
    }

    /// A file that was named will not do.
    fn unusable(text: impl Into<String>) -> Self {
        Self { code: 78, text: text.into() }
    }

    /// Somebody does not let us.
    fn refused(text: impl Into<String>) -> Self {
        Self { code: 77, text: text.into() }
    }

    /// A file cannot be written.
    fn cannot_write(text: impl Into<String>) -> Self {
        Self { code: 73, text: text.into() }
    }

    /// Nobody answers.
    fn unavailable(text: impl Into<String>) -> Self {
        Self { code: 69, text: text.into() }
    }
}

// The command line.

/// Reach edge nodes behind NAT by name: `tunnel --m=cloud` where they are reached from, `tunnel --m=edge` on each.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, after_help = EXIT_CODES)]
pub struct Args {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// What this process is.
    #[arg(long = "m", value_name = "MODE", default_value = "cloud")]
    pub mode: Mode,
    /// Config file; conf/cloud.toml and conf/edge.toml describe every key. [default: /etc/tunnel/MODE.toml]
    #[arg(long = "c", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Read the config and the files it names, say what is wrong with them, and end; no port is tried.
    #[arg(long)]
    pub check: bool,
    /// kubeconfig file, for a cloud outside its cluster. Needs a program built with Kubernetes.
    #[arg(long = "k", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Requests a second to kube-apiserver. Read by nothing in this version.
    #[arg(long, value_name = "N", default_value_t = 1000.0)]
    pub kube_qps: f64,
    /// Burst of requests to kube-apiserver. Read by nothing in this version.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub kube_burst: u32,
    /// Log to daily files in this directory: 7 are kept, 100 MiB in all.
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// With --log-dir: log to stderr as well.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub alsologtostderr: bool,
    /// Log to stderr only, whatever --log-dir says.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub logtostderr: bool,
    /// Form of log lines.
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub log_format: LogFormat,
    /// How much to log: 0 what operators need, 2 debug, 4 libraries too, 6 everything but frames, 8 these too.
    #[arg(long = "v", value_name = "N", default_value_t = 0)]
    pub verbosity: i32,
}

/// What to do instead of serving.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// A pod and an edge on loopback with fresh certificates, to try things out; stays until Ctrl-C.
    Demo {
        /// Make one request through the tunnel, and one in each of the other ways, say what happened, and end.
        #[arg(long)]
        check: bool,
        /// Other ways to show beside CONNECT, with commas between.
        #[arg(long, value_name = "MODULES", value_delimiter = ',')]
        with: Vec<Module>,
    },
    /// Make certificates, tokens and settings for a cloud of your own: all that its pods and edges need.
    Init(InitArgs),
    /// Look at all that a pod or an edge of this machine needs, from its config to its cloud, and say what is wrong: for each
    /// check what was found, what was wanted, and what to do. Ends with 1 if a check failed.
    Doctor(DoctorArgs),
    /// Have the pod on this machine let another machine join the cloud as a node, once and for a while.
    Invite(InviteArgs),
    /// Make this machine a node of a cloud that has invited it.
    Join(JoinArgs),
    /// Have the pod on this machine forget the token of a node that has joined, and what it was invited by.
    Revoke(RevokeArgs),
    /// Approve or deny the certificates that pods and edges of the tunnel ask a cluster of Kubernetes for; no others are
    /// touched. Goes on until a signal ends it.
    #[cfg(feature = "kubernetes")]
    Approve(ApproveArgs),
    /// Connect stdin and stdout with a port of a node, through a pod: as ssh's ProxyCommand, or for a local port.
    Connect(ConnectArgs),
    /// What a pod or edge of this machine does now: its links, and why it has none; asked over its admin socket.
    Status {
        /// The socket (its config's `listen` in [mode.cloud.admin] or [mode.edge.admin]). [default: that of a pod, otherwise of
        /// an edge, of this user; its log says where]
        #[arg(long, value_name = "PATH")]
        socket: Option<PathBuf>,
        /// All of it as JSON, with sessions.
        #[arg(long)]
        json: bool,
    },
    /// Print settings for what another tunnel was set to do in Kubernetes, and what became of each of its settings.
    #[cfg(feature = "kubernetes")]
    Migrate(MigrateArgs),
    /// Print what makes a shell complete this command line: `source <(tunnel completions bash)`.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Write man pages of this program and of each of its commands.
    Man {
        /// Where to; it is made where it is missing.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

/// What a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// A pod, where edges are reached.
    #[value(name = "cloud")]
    Server,
    /// An edge, on each node.
    Edge,
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

impl Args {
    /// The command line of this process, Go's spelling of it too.
    ///
    /// # Errors
    ///
    /// It is wrong, or asks for help or the version: print the error, and see [`is_wrong`].
    pub fn read(args: impl Iterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(args.map(normalize_flag))
    }

    /// Which config file is read.
    pub fn config(&self) -> PathBuf {
        self.config.clone().unwrap_or_else(|| self.mode.config().into())
    }
}

impl Mode {
    /// Where its config is, unless it is named.
    pub fn config(self) -> &'static str {
        match self {
            Self::Server => "/etc/tunnel/cloud.toml",
            Self::Edge => "/etc/tunnel/edge.toml",
        }
    }
}

/// Whether the command line was wrong; otherwise the "error" is the text that it asked for, such as help.
pub fn is_wrong(error: &clap::Error) -> bool {
    !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// Go's flags in clap's spelling: one dash becomes two, `_` in a name becomes `-`.
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

/// As docs/operating.md has them.
const EXIT_CODES: &str = "\
Exit codes: 0 stopped, or all is well; 1 the demo, or a check of the doctor, has failed; 64 the command line is wrong; 69 a port cannot be had, or \
nobody answers; 71 the system lacks something; 73 a file cannot be written; 74 a session broke off; 77 this user may not \
have the port, or may not ask; 78 the config, or a file that it names, is wrong. Of several, the gravest: 78, 77, 73, 71, 69.";

// What shells and `man` learn of the command line, from its own definition.

/// The script that completes `tunnel` in that shell.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), NAME, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes tunnel(1) and a page for each command into `dir`, which is made where it is missing. Pages that are there are
/// written anew.
///
/// # Errors
///
/// The directory, or a file in it, cannot be written.
pub fn man(dir: &Path) -> Result<String, CommandError> {
    let written = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Args::command(), dir));
    let failed = |cause| format!("cannot write man pages into {}: {cause}", dir.display());
    written.map(|()| String::new()).map_err(|cause: io::Error| CommandError::cannot_write(failed(cause)))
}

/// By which the program is called.
const NAME: &str = "tunnel";

// The settings with which the program serves: the config, the environment, and what the command line says of them.

/// The settings of either side.
#[derive(Debug)]
pub enum Settings {
    /// A pod's.
    Cloud(Box<ServerConfig>),
    /// An edge's.
    Edge(Box<EdgeConfig>),
}

impl Settings {
    /// Reads the config, and logs its warnings; `None` if it cannot be read, which is noted. `variable` gives those of the
    /// environment.
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
            warn!(key = "--k", "the kubeconfig is not read: {why}");
        }
        for (key, path) in settings.secrets(&file.path) {
            warn_of_readers(key, path);
        }
        Some((settings, file))
    }

    /// As [`Self::read`], and logs nothing.
    pub fn examine(
        (mode, path): (Mode, &Path),
        kubeconfig: Option<PathBuf>,
        variable: fn(&str) -> Option<String>,
        startup: &mut Startup,
    ) -> Option<(Self, ConfigFile, Vec<Warning>)> {
        let text = std::fs::read_to_string(path).map_err(|cause| {
            format!("cannot read the config {}: {cause}; name it with --c=FILE", path.display())
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

    /// Looks for all that is in the way of a start, and starts nothing.
    pub fn check(&self, startup: &mut Startup) {
        match self {
            Self::Cloud(settings) => Server::validate(settings, startup),
            Self::Edge(settings) => Edge::validate(settings, startup),
        }
    }

    /// Why nothing here asks Kubernetes; `None`: something does.
    fn asks_no_kubernetes(&self) -> Option<&'static str> {
        match self {
            Self::Edge(edge) => {
                let unused = "an edge asks nothing of Kubernetes but its certificate: set agent = true in [mode.edge.csr]";
                edge.csr.is_none().then_some(unused)
            }
            Self::Cloud(_) if cfg!(not(feature = "kubernetes")) => {
                Some("this program is built without Kubernetes; build it with --features kubernetes")
            }
            Self::Cloud(cloud) => {
                let asks = cloud.registry.cluster.is_some()
                    || cloud.addresses.cluster.is_some()
                    || cloud.csr.is_some();
                let unused = "no key asks Kubernetes: set publish or service of [mode.cloud.registry], kubernetes = true in \
                              [mode.cloud.addresses], or profiles of [mode.cloud.csr]";
                (!asks).then_some(unused)
            }
        }
    }

    /// The files that hold secrets, each with its key; `config` is where the settings stand.
    fn secrets<'a>(&'a self, config: &'a Path) -> Vec<(&'a str, &'a Path)> {
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
