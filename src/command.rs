//! The command line, shell completions and man pages. Each command has its file.

pub mod admin_client;
pub(crate) mod admin_sockets;
#[cfg(feature = "server")]
pub mod approve;
#[cfg(feature = "server")]
pub mod cert;
pub mod client;
pub mod completions;
pub mod config;
pub mod connect;
#[cfg(all(feature = "server", feature = "edge"))]
pub mod demo;
pub mod device;
pub mod doctor;
pub mod exit_code;
pub mod file_edit;
pub(crate) mod format;
pub mod grants;
pub(crate) mod http_request;
#[cfg(feature = "server")]
pub mod init;
pub mod invitations;
pub mod join;
mod machine_files;
pub mod migrate;
pub mod output_dir;
pub mod proxy;
#[cfg(test)]
mod reference_tests;
pub mod serve;
pub mod sessions;
pub mod ssh;
pub mod status;
pub(crate) mod table;
#[cfg(feature = "server")]
pub mod token;

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use serde::Serialize;

use crate::command::config::ConfigCommand;
use crate::command::connect::ConnectArgs;
use crate::command::device::{LeaveArgs, WhoamiArgs};
use crate::command::doctor::DoctorArgs;
use crate::command::grants::{GrantArgs, GrantsArgs};
use crate::command::invitations::{InvitationsArgs, InviteArgs};
use crate::command::join::JoinArgs;
use crate::command::migrate::MigrateCommand;
use crate::command::proxy::ProxyArgs;
use crate::command::serve::DaemonArgs;
use crate::command::sessions::SessionsArgs;
use crate::command::ssh::{SshArgs, SshConfigArgs};
use crate::command::status::NodesArgs;
use crate::parts;
use tunnel_base::metrics::REVISION;

/// The error of a command for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct CommandError {
    /// The program's exit code, of [`exit_code`].
    pub code: u8,
    /// What failed and why, with a hint.
    pub text: String,
}

impl CommandError {
    /// Returns an error of the command line.
    fn usage(text: impl Into<String>) -> Self {
        Self { code: exit_code::USAGE, text: text.into() }
    }

    /// Returns an error for an unusable input file.
    fn unusable(text: impl Into<String>) -> Self {
        Self { code: exit_code::CONFIG, text: text.into() }
    }

    /// Returns an error for a refused request.
    fn refused(text: impl Into<String>) -> Self {
        Self { code: exit_code::NO_PERMISSION, text: text.into() }
    }

    /// Returns an error for a file that cannot be written.
    fn cannot_write(text: impl Into<String>) -> Self {
        Self { code: exit_code::CANNOT_CREATE, text: text.into() }
    }

    /// Returns an error for a service that does not answer.
    fn unavailable(text: impl Into<String>) -> Self {
        Self { code: exit_code::UNAVAILABLE, text: text.into() }
    }
}

/// What a command returns: by default its text for the terminal.
pub type CommandResult<T = String> = Result<T, CommandError>;

/// Returns a command's output as JSON for programs.
pub(crate) fn json(output: &impl Serialize) -> String {
    // None of the types has a value that JSON lacks.
    serde_json::to_string_pretty(output).unwrap_or_default()
}

/// Returns a text as one word of a shell.
pub(crate) fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%,+".contains(c);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// Reach edge nodes behind NAT by name: run `tunnel server` on a reachable machine, and `tunnel edge` on each node.
#[derive(Debug, Parser)]
#[command(version, long_version = VERSION.as_str(), subcommand_required = true, arg_required_else_help = true)]
#[command(help_template = HELP.as_str())]
#[command(after_help = format!("{}\n\n{}", examples("tunnel"), exit_code::help()))]
pub struct Args {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// A command of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a server, which edges and clients connect to, until a signal.
    #[command(after_help = examples("tunnel server"))]
    Server(DaemonArgs),
    /// Run the edge of a node, until a signal.
    #[command(after_help = examples("tunnel edge"))]
    Edge(DaemonArgs),
    /// Check a config file, or print the values in effect.
    #[command(subcommand, after_help = examples("tunnel config"))]
    Config(ConfigCommand),
    #[cfg(all(feature = "server", feature = "edge"))]
    /// Run two servers and an edge on loopback. A download over a user's link survives two killed servers and a cut
    /// line. Then it prints commands to try, until Ctrl-C.
    #[command(after_help = examples("tunnel demo"))]
    Demo {
        /// Make one request through the tunnel in each way, print the results, and exit.
        #[arg(long)]
        check: bool,
        /// Additional listeners besides CONNECT, separated by commas. With --check, curl requests the page there.
        #[arg(long, value_name = "LIST", value_delimiter = ',',
            value_parser = ["all", "tcp", "http", "https", "egress", "proxy"])]
        listeners: Vec<String>,
    },
    #[cfg(feature = "server")]
    /// Create certificates, tokens and config files for a new cloud: everything its servers and edges need.
    #[command(after_help = examples("tunnel init"))]
    Init(init::InitArgs),
    /// Check everything a server, an edge or a user's program on this machine needs, from its config to its links.
    ///
    /// Prints what was found, what was expected, and a hint for each check. Exits with 1 if a check failed.
    #[command(after_help = examples("tunnel doctor"))]
    Doctor(DoctorArgs),
    /// Invite a machine to join the cloud as a node or a user's device, once and within a time limit, or make a join
    /// key for several nodes.
    ///
    /// Through the server on this machine, otherwise over a link of an admin, as by `tunnel nodes`.
    #[command(after_help = examples("tunnel invite"))]
    Invite(InviteArgs),
    /// Make this machine a node of the cloud that invited it, or a device of a user.
    #[command(after_help = examples("tunnel join"))]
    Join(JoinArgs),
    /// Let a user reach nodes until some time, at once and at all servers.
    ///
    /// Through the server on this machine, otherwise over a link of an admin, as by `tunnel nodes`. An admin grants only
    /// what a rule of the server's config gives her.
    #[command(after_help = examples("tunnel grant"))]
    Grant(GrantArgs),
    /// List the grants of users, or revoke some.
    ///
    /// Through the server on this machine, otherwise over a link of an admin, as by `tunnel nodes`.
    #[command(after_help = examples("tunnel grants"))]
    Grants(GrantsArgs),
    /// List the nodes and users that have joined or are invited, or revoke one.
    ///
    /// Through the server on this machine, otherwise over a link of an admin, as by `tunnel nodes`.
    #[command(after_help = examples("tunnel invitations"))]
    Invitations(InvitationsArgs),
    #[cfg(feature = "server")]
    /// Issue certificates by the CA that `tunnel init` has made, or renew them.
    #[command(subcommand, after_help = examples("tunnel cert"))]
    Cert(cert::CertCommand),
    #[cfg(feature = "server")]
    /// List the nodes of a server's token file, or change a node's token without cutting its sessions.
    #[command(subcommand, after_help = examples("tunnel token"))]
    Token(token::TokenCommand),
    #[cfg(feature = "server")]
    /// Approve or deny certificate requests of servers and edges in a Kubernetes cluster, until a signal.
    ///
    /// Other requests are not touched.
    #[command(after_help = examples("tunnel approve"))]
    Approve(approve::ApproveArgs),
    /// Connect stdin and stdout, or a local port, to a port of a node through a server.
    ///
    /// Values without a flag are those of TUNNEL_SERVER, TUNNEL_USER, TUNNEL_PASSWORD_FILE, TUNNEL_CA, TUNNEL_CERT and
    /// TUNNEL_KEY, otherwise of ~/.config/tunnel/client.toml.
    #[command(after_help = examples("tunnel connect"))]
    Connect(ConnectArgs),
    /// Log in to a node with ssh through a server.
    ///
    /// The server and the login there are found as by `tunnel connect`, which ssh runs as its ProxyCommand. The flags
    /// below come first; everything after them is for ssh.
    #[command(after_help = examples("tunnel ssh"))]
    Ssh(SshArgs),
    /// Print a block for ssh's config, or write it, so that ssh, scp, rsync, git, Ansible and editors reach nodes by name.
    #[command(after_help = examples("tunnel ssh-config"))]
    SshConfig(SshConfigArgs),
    /// Keep the links of a user, and give them to programs on this machine as an HTTP proxy and SOCKS5, until a signal.
    ///
    /// Only nodes are reached through it. It uses ~/.config/tunnel/client.toml, which `tunnel join --user` writes.
    #[command(after_help = examples("tunnel proxy"))]
    Proxy(ProxyArgs),
    /// Print the user and device of this machine, its servers, and the nodes and ports that she may reach until when.
    ///
    /// Queries the server of a link of ~/.config/tunnel/client.toml.
    #[command(after_help = examples("tunnel whoami"))]
    Whoami(WhoamiArgs),
    /// Undo `tunnel join --user`: end this device at the servers, and remove client.toml with its token and its CA.
    ///
    /// Without a server it removes the files, and fails: an operator must end the device.
    #[command(after_help = examples("tunnel leave"))]
    Leave(LeaveArgs),
    /// List the nodes of all servers of the cloud.
    ///
    /// Queries the server on this machine if this user may open its admin socket. Otherwise it uses a link of
    /// ~/.config/tunnel/client.toml. Over a link, users that are not admins see the nodes that their rules permit.
    #[command(after_help = examples("tunnel nodes"))]
    Nodes(NodesArgs),
    /// List the sessions of the server or edge on this machine, otherwise those of the server of an admin's link; or
    /// end some.
    ///
    /// At most 1000 sessions are listed. Each server has the sessions of its own clients.
    #[command(after_help = examples("tunnel sessions"))]
    Sessions(SessionsArgs),
    /// Print the status of a server or edge on this machine, otherwise of the server of an admin's link: its links, and
    /// why it has none.
    ///
    /// The admin socket of a server is used if this user may open it, then that of an edge, then a link of
    /// ~/.config/tunnel/client.toml.
    #[command(after_help = examples("tunnel status"))]
    Status {
        /// Admin socket (`listen` in [server.admin] or [edge.admin]). [default: that of a server of this user,
        /// otherwise of an edge, otherwise a link of client.toml; the log contains the path]
        #[arg(long, value_name = "PATH")]
        socket: Option<PathBuf>,
        /// Output format; JSON includes sessions.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: Format,
        /// Redraw the status every 2 s, until Ctrl-C.
        #[arg(short, long, conflicts_with = "output")]
        watch: bool,
    },
    /// Print a config that replaces another tunnel's, with a remark on each setting that has another effect.
    #[command(subcommand, after_help = examples("tunnel migrate"))]
    Migrate(MigrateCommand),
    /// Print shell completions.
    #[command(after_help = examples("tunnel completions"))]
    Completions {
        /// Shell.
        shell: Shell,
    },
    /// Write man pages of this program and of each of its commands.
    #[command(after_help = examples("tunnel man"))]
    Man {
        /// Output directory; created if it is missing.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    #[cfg(not(all(feature = "server", feature = "edge")))]
    /// Say why this build lacks a command.
    #[command(hide = true, name = "demo", disable_help_flag = true)]
    #[cfg_attr(not(feature = "server"), command(aliases = ["init", "cert", "token", "approve"]))]
    Missing {
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

/// The role of a process: server or edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Role {
    /// A server, which edges connect to.
    Server,
    /// An edge, on each node.
    Edge,
}

/// The format of log lines and of a command's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people.
    Text,
    /// JSON for programs.
    Json,
}

impl Args {
    /// Parses the command line of this process, in this program's or in SuperEdge's form.
    ///
    /// # Errors
    ///
    /// Returns an error if it is wrong, or requests help or the version. Print the error, and see [`is_wrong`].
    pub fn read(args: impl Iterator<Item = OsString>) -> Result<Self, clap::Error> {
        let given: Vec<_> = args.collect();
        let translated = translate_superedge(given.clone())?;
        let is_superedge = translated != given;
        let mut args = Self::try_parse_from(translated)?;
        match &mut args.command {
            Command::Server(serve) | Command::Edge(serve) => serve.is_superedge = is_superedge,
            Command::Ssh(ssh) => {
                // The parser drops a "--" before them, which tells ssh that no option follows.
                let before = given.len().saturating_sub(ssh.args.len() + 1);
                ssh.args.splice(0..0, given.get(before).filter(|last| *last == "--").cloned());
            }
            _ => {}
        }
        Ok(args)
    }
}

impl Role {
    /// Returns the role's name, which is the name of its command and of its table in the config.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Edge => "edge",
        }
    }

    /// Returns the default path of the config file. A server reads SuperEdge's name if there is no file of its own.
    pub fn config(self) -> PathBuf {
        self.config_in(Path::new(CONFIG_DIR))
    }

    pub(crate) fn config_in(self, dir: &Path) -> PathBuf {
        let own = dir.join(format!("{}.toml", self.name()));
        let superedge = dir.join("cloud.toml");
        if self == Self::Server && !own.exists() && superedge.exists() { superedge } else { own }
    }
}

/// Returns true if the command line was wrong. Otherwise the "error" is a requested text, such as help.
pub fn is_wrong(error: &clap::Error) -> bool {
    !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// Translates the command line of SuperEdge's program, which begins with a flag: `--m=cloud --c=FILE` becomes
/// `server --config=FILE`. Flags are spelled as in Go, with one or two dashes, and `_` or `-` in their names.
fn translate_superedge(args: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    let is_flag = |arg: &OsString| arg.as_encoded_bytes().first() == Some(&b'-');
    let is_ours = |arg: &OsString| ["-h", "--help", "-V", "--version"].iter().any(|own| arg == own);
    if !args.get(1).is_some_and(|first| is_flag(first) && !is_ours(first)) {
        return Ok(args);
    }
    let mut role = Role::Server;
    // Flags are collected first: `--m` may be the last one, and the role must be the first argument.
    let mut translated = Vec::new();
    let mut args = args.into_iter();
    let program = args.next();
    while let Some(arg) = args.next() {
        let Some((name, value)) = go_flag(&arg) else {
            translated.push(arg);
            continue;
        };
        let name = match name.as_str() {
            "m" => {
                role = superedge_role(value.map(OsString::from).or_else(|| args.next()))?;
                continue;
            }
            "c" => "config",
            "k" => "kubeconfig",
            "v" => "verbosity",
            name => name,
        };
        translated
            .push(value.map_or_else(|| format!("--{name}"), |value| format!("--{name}={value}")).into());
    }
    Ok(program.into_iter().chain([role.name().into()]).chain(translated).collect())
}

/// Returns the name of a flag, with `-` for `_`, and the value after `=`.
fn go_flag(arg: &OsStr) -> Option<(String, Option<&str>)> {
    let text = arg.to_str()?.strip_prefix('-')?;
    let text = text.strip_prefix('-').unwrap_or(text);
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    Some((name.replace('_', "-"), value))
}

/// Returns the role that SuperEdge's `--m` names.
fn superedge_role(value: Option<OsString>) -> Result<Role, clap::Error> {
    let value = value.unwrap_or_default();
    match value.to_str() {
        Some("cloud") => Ok(Role::Server),
        Some("edge") => Ok(Role::Edge),
        _ => {
            let text = format!("invalid value {value:?} for '--m': expected cloud or edge");
            Err(Args::command().error(ErrorKind::InvalidValue, text))
        }
    }
}

/// The directory of config files.
pub(crate) const CONFIG_DIR: &str = "/etc/tunnel";

/// Returns the end of a command's help: two examples, each with a comment.
fn examples(command: &str) -> String {
    let mut all = include_str!("command/examples.txt").trim_end().split("\n\n");
    let own = all.find_map(|block| block.strip_prefix(command)?.strip_prefix('\n'));
    format!("Examples:\n{}", own.unwrap_or_default())
}

/// The version, with the revision, if the build knew it, and the optional parts that are compiled in.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let features = parts::compiled_in().collect::<Vec<_>>().join(", ");
    let revision = REVISION.map(|revision| format!("revision {revision}; ")).unwrap_or_default();
    format!("{} ({revision}features: {features})", env!("CARGO_PKG_VERSION"))
});

/// The template of the help, with the commands in groups. Those that no group names follow at the end.
static HELP: LazyLock<String> = LazyLock::new(|| {
    let all = Command::augment_subcommands(clap::Command::new(NAME)).disable_help_subcommand(true);
    let last = GROUPS.len() - 1;
    let group_of = |name: &str| GROUPS.iter().position(|(_, names)| names.contains(&name)).unwrap_or(last);
    let mut groups = GROUPS.map(|(title, _)| format!("\n{title}:\n"));
    for command in all.get_subcommands().filter(|command| !command.is_hide_set()) {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let about = about.split(". ").next().unwrap_or_default();
        groups[group_of(command.get_name())] += &format!("  {:12} {about}\n", command.get_name());
    }
    let groups = groups.concat();
    format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{groups}\nOptions:\n{{options}}{{after-help}}"
    )
});

/// The groups of commands in the help, each in the order of [`Command`].
const GROUPS: [(&str, &[&str]); 5] = [
    ("Reach nodes from your machine", &["connect", "ssh", "ssh-config", "proxy", "whoami", "leave"]),
    ("Run servers and edges", &["server", "edge", "config", "init", "cert", "token", "approve", "migrate"]),
    ("Let nodes and users in", &["invite", "join", "invitations", "grant", "grants"]),
    ("See what happens", &["nodes", "sessions", "status", "doctor"]),
    ("More", &[]),
];

/// Writes tunnel(1) and a page for each command into `dir`, which is created if it is missing. Existing pages are
/// overwritten.
///
/// # Errors
///
/// Returns an error if the directory, or a file in it, cannot be written.
pub fn man(dir: &Path) -> CommandResult {
    let written = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Args::command(), dir));
    let failed = |cause| format!("cannot write man pages into {}: {cause}", dir.display());
    written.map(|()| String::new()).map_err(|cause: io::Error| CommandError::cannot_write(failed(cause)))
}

/// Returns the error of a command that this build lacks.
#[cfg(not(all(feature = "server", feature = "edge")))]
pub fn missing() -> CommandError {
    let why = parts::SERVER.and(parts::EDGE).err().unwrap_or_default();
    CommandError::usage(why)
}

/// The name of the program.
const NAME: &str = "tunnel";

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str) -> String {
        let args = line.split(' ').map(OsString::from).collect();
        let words = translate_superedge(args).unwrap().into_iter();
        words.map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_command_line_of_superedge_is_translated() {
        for (line, expected) in [
            ("tunnel --m=cloud --c=f", "tunnel server --config=f"),
            ("tunnel --c f --m edge", "tunnel edge --config f"),
            ("tunnel -m=edge -c=f -v 4", "tunnel edge --config=f --verbosity 4"),
            ("tunnel -log_dir=a_b --k=/k_1", "tunnel server --log-dir=a_b --kubeconfig=/k_1"),
            ("tunnel --alsologtostderr --kube-qps=5", "tunnel server --alsologtostderr --kube-qps=5"),
            ("tunnel server -v 4", "tunnel server -v 4"),
            ("tunnel", "tunnel"),
            ("tunnel --help", "tunnel --help"),
        ] {
            assert_eq!(translated(line), expected);
        }
        for line in ["tunnel --m=none", "tunnel --m"] {
            let error = Args::read(line.split(' ').map(OsString::from)).unwrap_err();
            assert!(is_wrong(&error) && error.to_string().contains("expected cloud or edge"), "{error}");
        }
        let args =
            ["tunnel", "--m=edge", "--c=f", "--v=2", "--kube_qps=1", "--kube_burst=2", "--logtostderr"];
        let Command::Edge(edge_args) = Args::read(args.into_iter().map(OsString::from)).unwrap().command
        else {
            panic!()
        };
        assert_eq!(
            (edge_args.config, edge_args.verbosity, edge_args.kube_qps),
            (Some("f".into()), 2, Some(1.0))
        );
    }

    #[test]
    fn a_missing_command_is_a_usage_error_with_the_help() {
        let error = Args::read(["tunnel"].into_iter().map(OsString::from)).unwrap_err();
        assert!(is_wrong(&error) && error.to_string().contains("doctor"), "{error}");
    }

    #[test]
    fn the_help_has_each_command_once_in_a_group_and_a_misspelt_one_gets_a_suggestion() {
        let help = Args::command().render_help().to_string();
        for command in Args::command().get_subcommands() {
            let line = format!("\n  {:12} ", command.get_name());
            assert_eq!(help.matches(&line).count(), 1, "{line}: {help}");
        }
        assert!(help.contains("\nOptions:\n  -h, --help") && help.contains("Exit codes"), "{help}");
        let unknown =
            GROUPS.iter().flat_map(|(_, names)| *names).find(|name| !help.contains(&format!("\n  {name} ")));
        assert_eq!(unknown, None);
        let error = Args::read(["tunnel", "nodez"].into_iter().map(OsString::from)).unwrap_err();
        assert!(error.to_string().contains("'nodes'"), "{error}");
    }

    /// Checks that the examples of a command, and of the commands below it, can be parsed. Returns the paths of all.
    fn commands_with_examples(command: &clap::Command, path: &str) -> Vec<String> {
        let help = command.get_after_help().unwrap_or_else(|| panic!("{path} has no examples")).to_string();
        let lines: Vec<&str> = help.lines().skip_while(|line| *line != "Examples:").skip(1).take(2).collect();
        assert_eq!(lines.len(), 2, "{path}: {help}");
        for line in lines {
            let line =
                [" # ", " < ", " > ", " >> "].iter().fold(line, |line, end| line.split(end).next().unwrap());
            let line = line.trim().trim_start_matches("sudo ").replace('\'', "");
            assert!(format!("{line} ").starts_with(&format!("{path} ")) || path == NAME, "{path}: {line}");
            let parsed = Args::read(line.split_whitespace().map(OsString::from));
            assert!(parsed.as_ref().err().is_none_or(|error| !is_wrong(error)), "{line}: {parsed:?}");
        }
        let visible = command.get_subcommands().filter(|below| !below.is_hide_set());
        let below =
            visible.flat_map(|below| commands_with_examples(below, &format!("{path} {}", below.get_name())));
        std::iter::once(path.to_owned()).chain(below).collect()
    }

    #[test]
    fn each_command_has_two_examples_that_can_be_parsed() {
        let all = commands_with_examples(&Args::command(), NAME);
        assert!(all.contains(&"tunnel config show".to_owned()), "{all:?}");
    }

    #[test]
    fn the_version_lists_the_compiled_in_features() {
        let error = Args::read(["tunnel", "--version"].into_iter().map(OsString::from)).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&format!("tunnel {} (", env!("CARGO_PKG_VERSION"))), "{text}");
        assert_eq!(text.contains("(features: "), REVISION.is_none(), "{text}");
        assert_eq!(text.contains("(revision "), REVISION.is_some(), "{text}");
        assert_eq!(text.contains("superedge"), parts::SUPEREDGE.is_ok(), "{text}");
    }

    #[test]
    fn a_man_page_is_written_for_the_program_and_each_command() {
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
