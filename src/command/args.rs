//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgAction, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

#[cfg(feature = "kubernetes")]
use super::{Approve, Migrate};
use super::{Connect, Doctor, Init, Invite, Join, Module, Revoke};

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
    pub log_format: Form,
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
    Init(Init),
    /// Look at all that a pod or an edge of this machine needs, from its config to its cloud, and say what is wrong: for each
    /// check what was found, what was wanted, and what to do. Ends with 1 if a check failed.
    Doctor(Doctor),
    /// Have the pod on this machine let another machine join the cloud as a node, once and for a while.
    Invite(Invite),
    /// Make this machine a node of a cloud that has invited it.
    Join(Join),
    /// Have the pod on this machine forget the token of a node that has joined, and what it was invited by.
    Revoke(Revoke),
    /// Approve or deny the certificates that pods and edges of the tunnel ask a cluster of Kubernetes for; no others are
    /// touched. Goes on until a signal ends it.
    #[cfg(feature = "kubernetes")]
    Approve(Approve),
    /// Connect stdin and stdout with a port of a node, through a pod: as ssh's ProxyCommand, or for a local port.
    Connect(Connect),
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
    Migrate(Migrate),
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
    Cloud,
    /// An edge, on each node.
    Edge,
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Form {
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
        Self::try_parse_from(args.map(spelled_our_way))
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
            Self::Cloud => "/etc/tunnel/cloud.toml",
            Self::Edge => "/etc/tunnel/edge.toml",
        }
    }
}

/// Whether the command line was wrong; otherwise the "error" is the text that it asked for, such as help.
pub fn is_wrong(error: &clap::Error) -> bool {
    !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// Go's flags in clap's spelling: one dash becomes two, `_` in a name becomes `-`.
fn spelled_our_way(arg: OsString) -> OsString {
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
