//! `tunnel join` of a node: makes this machine a node, and writes the config of its edge.

use rustix::system::uname;

use crate::command::join::requests::JoinClient;
use crate::command::join::{ENTRIES, JoinArgs, UNIT_SOURCE};
use crate::command::machine_files::{checked, edge_config, folder_on_machine, random_token, tls_note};
use crate::command::output_dir::OutputDir;
use crate::command::{CONFIG_DIR, CommandError, CommandResult, Role};
use crate::config::Environment;
use crate::invitations::code::InvitationCode;
use crate::invitations::invitee::Invitee;
use tunnel_proto::names::NodeName;

/// Joins as a node that the invitation is for. Returns lines for the terminal.
///
/// # Errors
///
/// See [`super::run`].
pub(super) async fn join(
    args: &JoinArgs,
    code: &InvitationCode,
    invitee: &Invitee,
    env: &Environment,
) -> CommandResult {
    let node = &node_of_this_machine(invitee, args.node.as_ref(), env)?;
    let to = folder_on_machine("--install-dir", &args.install_dir)?;
    // Local steps that can fail come first, because an invitation can be used only once.
    let folder = OutputDir::resume(&args.install_dir, ENTRIES.map(str::to_owned))?;
    let token = folder.write_once(TOKEN_FILE, &format!("{}\n", random_token()))?;
    let named = std::slice::from_ref(&args.server);
    folder.write(CONFIG_FILE, &edge_config(node, named, args.tls_server_name.as_ref(), false, to))?;
    let join_client = JoinClient::new(args, code, node.to_string(), token.trim(), folder, CA_FILE, env)?;
    let note = join_client
        .join(|folder, servers, dns| {
            let config = |dir: &str| edge_config(node, servers, dns, false, dir);
            folder.write(CONFIG_FILE, &config(to))?;
            checked(Role::Edge, &config(&folder.unfinished().to_string_lossy()))
        })
        .await?;
    Ok(format!(
        "{node} has joined; in {to}, for this user only: edge.toml, certs/ca.crt, token/token\n{note}next, here:\n  tunnel edge -c {to}/edge.toml\n\
         or, to let systemd start it now and at every boot:\n{}{}",
        systemd_lines(to),
        tls_note(node),
    ))
}

/// Returns the name of the node that this machine becomes.
fn node_of_this_machine(
    invitee: &Invitee,
    named: Option<&NodeName>,
    env: &Environment,
) -> CommandResult<NodeName> {
    let (from, node) = match (named, invitee, env.node_name.as_deref().filter(|name| !name.is_empty())) {
        (Some(node), ..) => ("--node", node.clone()),
        (None, Invitee::Node(node), _) => return Ok(node.clone()),
        (None, _, name) => {
            let from = if name.is_some() { "NODE_NAME" } else { "the host's name" };
            let node = name.map_or_else(|| uname().nodename().to_string_lossy().parse(), str::parse);
            (from, node.map_err(|why| CommandError::usage(format!("{from}: {why}; set --node")))?)
        }
    };
    if invitee.admits(&Invitee::Node(node.clone())) {
        return Ok(node);
    }
    Err(CommandError::usage(format!(
        "{from}: {node} does not match the invitation, which is for {invitee}; set --node, or ask for another invitation"
    )))
}

/// Returns what to type so that systemd runs the edge with the config in this folder.
fn systemd_lines(dir: &str) -> String {
    let mut lines = String::new();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    if users.lines().any(|line| line.starts_with("tunnel:")) {
        lines += &format!(
            "  chgrp -R tunnel {dir} && chmod -R g+rX {dir}    # the package's unit runs as tunnel\n"
        );
    }
    if dir != CONFIG_DIR {
        lines += &format!(
            "  systemctl edit tunnel-edge    # [Service], ExecStart=, ExecStart=tunnel edge -c {dir}/edge.toml\n"
        );
    }
    lines + &format!("  systemctl enable --now tunnel-edge    {UNIT_SOURCE}\n")
}

const CONFIG_FILE: &str = "edge.toml";
const TOKEN_FILE: &str = "token/token";
const CA_FILE: &str = "certs/ca.crt";
