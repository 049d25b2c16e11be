//! `tunnel join --user`: makes this machine a device of a user, and writes the config of its links.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use crate::command::client::{device_of_this_machine, token_in};
use crate::command::join::requests::JoinClient;
use crate::command::join::{JoinArgs, UNIT_SOURCE};
use crate::command::machine_files::{quoted_list, random_token};
use crate::command::output_dir::OutputDir;
use crate::command::{CommandError, CommandResult};
use crate::config::Environment;
use crate::invitations::code::InvitationCode;
use tunnel_proto::names::{Host, Target, UserDevice, UserName};

/// Joins as a device of the user, and writes the user's `client.toml`. Returns lines for the terminal.
///
/// # Errors
///
/// Like `tunnel join` of a node.
pub(super) async fn join(
    args: &JoinArgs,
    code: &InvitationCode,
    user: &UserName,
    env: &Environment,
) -> CommandResult {
    let device = args.device.clone().map_or_else(device_of_this_machine, Ok)?;
    let path = env.client_file.as_ref().ok_or_else(|| {
        CommandError::usage(
            "set HOME or XDG_CONFIG_HOME to an absolute path; client.toml is written below it",
        )
    })?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    // The folder itself is created by `OutputDir`. If this fails, that reports it.
    let _ = dir.parent().map(|above| DirBuilder::new().recursive(true).mode(PRIVATE).create(above));
    // Local steps that can fail come first, because an invitation can be used only once.
    let folder = OutputDir::resume(dir, [CLIENT_FILE, CA_FILE].map(str::to_owned))?;
    let name = UserDevice { user: user.clone(), device: device.clone() };
    let first = client_toml(&name, &random_token(), &[], None);
    let token = token_in(&folder.write_once(CLIENT_FILE, &first)?).unwrap_or_else(random_token);
    let join_client = JoinClient::new(args, code, name.to_string(), &token, folder, CA_FILE, env)?;
    let note = join_client
        .join(|folder, servers, dns| folder.write(CLIENT_FILE, &client_toml(&name, &token, servers, dns)))
        .await?;
    Ok(format!(
        "this machine has joined as {user}'s device {device}; in {}, for this user only: {CLIENT_FILE}, {CA_FILE}\n\
         {note}next, for the nodes that {user} may reach:\n  \
         tunnel nodes\n  tunnel ssh USER@NODE\n\
         or, to let systemd keep a proxy for your programs now and after each login:\n  \
         systemctl --user enable --now tunnel-proxy    {UNIT_SOURCE}\n\
         a proxy that runs already reads the new token, but keeps its servers until it is restarted\n",
        dir.display()
    ))
}

/// Returns the text of `client.toml`. Its values need no quoting: their types allow no special characters.
fn client_toml(
    UserDevice { user, device }: &UserDevice,
    token: &str,
    servers: &[Target],
    dns: Option<&Host>,
) -> String {
    let name = dns.map_or_else(String::new, |name| format!("tls_server_name = \"{name}\"\n"));
    format!(
        "# Links of this machine: written by `tunnel join --user`. Contains a secret.\n\
         servers = [{}]\n{name}user = \"{user}\"\ndevice = \"{device}\"\ntoken = \"{token}\"\nca = \"{CA_FILE}\"\n",
        quoted_list(servers)
    )
}

/// The files of a device that has joined.
pub(crate) const CLIENT_FILE: &str = "client.toml";
pub(crate) const CA_FILE: &str = "ca.crt";

/// The mode of folders that only this user may open.
const PRIVATE: u32 = 0o700;
