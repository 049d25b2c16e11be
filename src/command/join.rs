//! Joining: makes this machine a node of a cloud that has invited it, or a device of a user.

#[cfg_attr(not(feature = "edge"), path = "join/without_edge.rs")]
mod node;
mod requests;
pub(super) mod user;

use std::convert::Infallible;
use std::io::Read;
use std::path::PathBuf;
use std::str::FromStr;

use crate::command::machine_files::host_of_server;
use crate::command::{CommandError, CommandResult};
use crate::config::Environment;
use crate::invitations::code::InvitationCode;
use crate::invitations::invitee::Invitee;
use tunnel_base::files;
use tunnel_proto::names::{DeviceName, Host, NodeName, Target, UserDevice};

/// Arguments of `tunnel join`.
#[derive(Debug, Clone, clap::Args)]
pub struct JoinArgs {
    /// Address of the servers, as edges dial it.
    #[arg(value_name = "SERVER:PORT")]
    pub server: Target,
    /// File with the invitation or join key that `tunnel invite` printed, or - for stdin. It names the node that this
    /// machine becomes, a pattern of nodes, or its user.
    #[arg(long, value_name = "FILE")]
    pub invitation: InvitationSource,
    /// The machine becomes a device of the invited user, and is no node. Writes ~/.config/tunnel/client.toml.
    #[arg(long)]
    pub user: bool,
    /// Name of the user's device. Default: the host's name.
    #[arg(long, value_name = "NAME", requires = "user")]
    pub device: Option<DeviceName>,
    /// Name of the node, if the invitation is a join key for several. Default: NODE_NAME of the environment, or the
    /// host's name.
    #[arg(long, value_name = "NAME", conflicts_with = "user")]
    pub node: Option<NodeName>,
    /// Name in the server's certificate, if it differs from the dialled name.
    #[arg(long, value_name = "NAME", value_parser = host_of_server)]
    pub tls_server_name: Option<Host>,
    /// Folder for config, CA and token; its existing contents are kept.
    #[arg(long, value_name = "DIR", default_value = "/etc/tunnel", conflicts_with = "user")]
    pub install_dir: PathBuf,
    /// Succeed and read nothing if that folder has the files of a node already, for a pod, which runs this at each start.
    #[arg(long, conflicts_with = "user")]
    pub unless_joined: bool,
}

/// Where `tunnel join` finds the invitation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvitationSource {
    /// In the command line. Not documented, because other users of the machine can read it there.
    Argument(InvitationCode),
    /// On stdin.
    Stdin,
    /// In a file.
    File(PathBuf),
}

impl FromStr for InvitationSource {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match (text, text.parse()) {
            ("-", _) => Self::Stdin,
            (_, Ok(code)) => Self::Argument(code),
            (_, Err(_)) => Self::File(text.into()),
        })
    }
}

impl InvitationSource {
    /// Reads the invitation. Blocks on the file or on stdin.
    fn read(&self, stdin: impl Read) -> CommandResult<InvitationCode> {
        let (name, text) = match self {
            Self::Argument(code) => return Ok(code.clone()),
            Self::Stdin => ("stdin".to_owned(), read_text(stdin)),
            Self::File(path) => (path.display().to_string(), std::fs::File::open(path).and_then(read_text)),
        };
        let text = text.map_err(|cause| {
            CommandError::usage(format!(
                "--invitation: cannot read {name}: {cause}; name a file with the invitation, or - for stdin"
            ))
        })?;
        text.parse().map_err(|error| CommandError::usage(format!("--invitation: {name}: {error}")))
    }
}

/// Reads at most [`MAX_INVITATION`] bytes.
fn read_text(from: impl Read) -> std::io::Result<String> {
    let mut content = Vec::new();
    from.take(MAX_INVITATION).read_to_end(&mut content)?;
    files::text(content)
}

/// Longer than any invitation.
const MAX_INVITATION: u64 = 4096;

/// Joins as a node or as a user's device, and writes the files that it needs. Returns what was written and what to do
/// next, as lines for the terminal. An attempt that may have been granted is continued by running it again.
///
/// # Errors
///
/// Returns an error if the invitation is not valid, no server is reachable, or a file cannot be written.
pub async fn run(args: &JoinArgs, env: &Environment, stdin: impl Read) -> CommandResult {
    if args.unless_joined && ENTRIES.iter().all(|name| args.install_dir.join(name).exists()) {
        return Ok(format!("{} has the files of a node already\n", args.install_dir.display()));
    }
    let code = args.invitation.read(stdin)?;
    let output = match (code.invitee(), args.user) {
        (Invitee::User(user), true) => user::join(args, &code, user, env).await,
        (invitee @ (Invitee::Node(_) | Invitee::Nodes(_)), false) => {
            node::join(args, &code, invitee, env).await
        }
        (node @ (Invitee::Node(_) | Invitee::Nodes(_)), true) => Err(CommandError::usage(format!(
            "--user: the invitation is for node {node}, or its last character is missing, a slash; leave --user out, or ask for \
             `tunnel invite --user`"
        ))),
        (Invitee::User(user) | Invitee::Device(UserDevice { user, .. }), _) => {
            Err(CommandError::usage(format!(
                "--invitation: it is for user {user}, whose device is no node; set --user, or ask for `tunnel invite --node`"
            )))
        }
    }?;
    let note = if matches!(args.invitation, InvitationSource::Argument(_)) { VISIBLE_NOTE } else { "" };
    Ok(output + note)
}

/// What is said of an invitation in the command line.
const VISIBLE_NOTE: &str = "note: other users of this machine can read an invitation in a command line; next time, name \
                            a file with it, or - for stdin\n";

/// Where the units are, as a comment of a shell.
const UNIT_SOURCE: &str = "# a unit of the package, of install.sh, or of deploy/systemd";

/// The contents of the folder of a node.
const ENTRIES: [&str; 3] = ["edge.toml", "certs", "token"];
