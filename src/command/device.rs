//! `tunnel whoami` and `tunnel leave`: what this machine is to the servers as a device of a user, and its end.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::admin::requester::WhoamiResponse;
use crate::command::admin_client::{AdminClient, query};
use crate::command::format::duration;
use crate::command::join::user::{CA_FILE, CLIENT_FILE};
use crate::command::ssh::include::is_written;
use crate::command::table::Table;
use crate::command::{CommandError, Format, client, json};
use crate::config::Environment;
use crate::uplink::client::{UserCredentials, UserLinkConfig, UserLinkError, UserUplinks};
use crate::uplink::link_dialer::messages::USER_TOKEN_HINT;
use tunnel_proto::names::UserDevice;
use tunnel_proto::printable::one_line as clean;

/// Arguments of `tunnel whoami`.
#[derive(Debug, Clone, clap::Args)]
pub struct WhoamiArgs {
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: Format,
}

/// Arguments of `tunnel leave`.
#[derive(Debug, Clone, clap::Args)]
pub struct LeaveArgs {
    /// Leave. Without it, the command prints what it would remove.
    #[arg(long)]
    pub yes: bool,
}

/// Asks the server of a link who the user of this device is, and what she may reach.
///
/// # Errors
///
/// Returns an error if `client.toml` names no servers, or none answers.
pub async fn whoami(args: WhoamiArgs, env: &Environment) -> Result<String, CommandError> {
    let UserLinkConfig { servers, .. } = client::joined(env)?;
    let answer = query(None, &[], env, async |api: &AdminClient| api.parse(&api.get("/whoami").await?)).await;
    let mut who: WhoamiResponse = answer.map_err(|CommandError { code, text }| CommandError {
        code,
        text: format!("{text}; a server of an earlier version cannot tell: run tunnel nodes"),
    })?;
    who.servers = servers.iter().map(ToString::to_string).collect();
    Ok(if args.output == Format::Json { json(&who) } else { text(&who) })
}

fn text(who: &WhoamiResponse) -> String {
    let left = |until: Option<u64>| until.map(|until| duration(until as f64 - who.now));
    let mut lines = format!(
        "user {}, device {}, linked to server {}\nservers: {}\n",
        clean(&who.user),
        clean(&who.device),
        clean(&who.server),
        who.servers.join(", ")
    );
    // Writing to a String cannot fail.
    if let Some(left) = left(who.until) {
        let _ = writeln!(lines, "the certificate ends in {left}");
    }
    if who.is_admin {
        lines += "an admin: may use tunnel status, sessions, invite and invitations\n";
    }
    if who.reach.is_empty() {
        return lines + "may reach no node; ask an operator for a rule\n";
    }
    let mut table = Table::new(&["MAY REACH", "PORTS", "ENDS IN"]);
    for one in &who.reach {
        let nodes = one.nodes.iter().map(|node| clean(node)).collect::<Vec<_>>().join(" ");
        let ports = one.ports.iter().map(u16::to_string).collect::<Vec<_>>().join(" ");
        let ports = if ports.is_empty() { "all".to_owned() } else { ports };
        table.row(vec![nodes, ports, left(one.until).unwrap_or_else(|| "-".to_owned())]);
    }
    format!("{lines}\n{table}\n")
}

/// Undoes `tunnel join --user`: removes the device at the servers, and its files here. Returns lines for the terminal,
/// also about what is left.
///
/// # Errors
///
/// Returns an error if `client.toml` names no servers, `--yes` is missing, or a file cannot be removed.
pub async fn leave(args: LeaveArgs, env: &Environment) -> Result<String, CommandError> {
    let links = client::joined(env)?;
    let path = env.client_file.as_deref().unwrap_or(Path::new(CLIENT_FILE));
    let device = match &links.proof {
        UserCredentials::Token(user, _) => {
            Some(UserDevice { user: user.clone(), device: links.device.clone() })
        }
        UserCredentials::Certificate(_) => None,
    };
    let ours = [path.to_owned(), path.with_file_name(CA_FILE)];
    let ours: Vec<PathBuf> = ours.into_iter().filter(|file| file.is_symlink() || file.exists()).collect();
    let files: Vec<_> = ours.iter().map(|file| file.display().to_string()).collect();
    let files = files.join(" and ");
    if !args.yes {
        let end = device.map_or_else(String::new, |device| format!("ends {device} at the servers, and "));
        return Err(CommandError::usage(format!("this {end}removes {files}; to do it: tunnel leave --yes")));
    }
    let mut lines = String::new();
    if let Some(device @ UserDevice { user, device: name }) = &device {
        lines += &match end_at_servers(env, links).await {
            None => format!("{device} has left: the servers no longer accept it\n"),
            Some(why) => format!(
                "! the servers still accept {device}: {why}\n  an operator ends it:\n    \
                 tunnel invitations revoke --user {user} --device {name}\n"
            ),
        };
    }
    for file in &ours {
        std::fs::remove_file(file).map_err(|cause| {
            CommandError::cannot_write(format!("cannot remove {}: {cause}", file.display()))
        })?;
    }
    lines += &format!("removed {files}\n");
    if device.is_none() {
        lines += "left: the certificate and its key; their issuer ends them\n";
    }
    if is_written(env) {
        lines += "left: nodes in ssh's config; to remove them:\n  tunnel ssh-config --remove\n";
    }
    Ok(lines
        + "left: programs that still run, without a link; the proxy of systemd ends by:\n  systemctl --user disable --now tunnel-proxy\n")
}

/// Removes this device at the servers. Returns why that is not certain.
async fn end_at_servers(env: &Environment, links: UserLinkConfig) -> Option<String> {
    let asked =
        query(None, &[], env, async |api: &AdminClient| api.post("/leave", String::new()).await).await;
    let CommandError { text, .. } = asked.err()?;
    // The link may have ended together with the device, before the answer, or before this command.
    match UserUplinks::connect(links).await {
        Err(UserLinkError::Denied(why)) if why.contains(USER_TOKEN_HINT) => None,
        Err(_) => Some(text),
        Ok(links) => {
            links.close().await;
            Some(text)
        }
    }
}
