//! `tunnel whoami` and `tunnel leave`: what this machine is to the servers as a device of a user, and its end.

use crate::admin::requester::WhoamiResponse;
use crate::command::admin_client::{AdminClient, query};
use crate::command::format::duration;
use crate::command::join::user::CA_FILE;
use crate::command::table::Table;
use crate::command::{CommandError, CommandResult, Format, client, json};
use crate::config::Environment;
use crate::uplink::client::{UserCredentials, UserLinkError, UserUplinks};
use crate::uplink::link_dialer::messages::USER_TOKEN_HINT;
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
    /// Confirms that this machine should lose its access.
    #[arg(long, required = true)]
    pub yes: bool,
}

/// Asks the server of a link who the user of this device is, and what she may reach.
///
/// # Errors
///
/// Returns an error if `client.toml` names no servers, or none answers.
pub async fn whoami(args: WhoamiArgs, env: &Environment) -> CommandResult {
    let links = client::joined(env)?;
    let asked = query(None, &[], env, async |api: &AdminClient| {
        api.parse::<WhoamiResponse>(&api.get("/whoami").await?)
    });
    let servers = links.servers.iter().map(ToString::to_string).collect();
    let who = WhoamiResponse { servers, ..asked.await? };
    Ok(if args.output == Format::Json { json(&who) + "\n" } else { text(&who) })
}

fn text(who: &WhoamiResponse) -> String {
    let left = |until: Option<u64>| until.map_or("-".to_owned(), |until| duration(until as f64 - who.now));
    let mut table = Table::new(&["MAY REACH", "PORTS", "JOIN KEYS", "ENDS IN"]);
    for one in &who.reach {
        let ports: Vec<_> = one.ports.iter().map(u16::to_string).collect();
        let ports = if ports.is_empty() { "all".to_owned() } else { ports.join(" ") };
        let keys = one.with_join_keys.map_or("-", |all| if all { "yes" } else { "no" }).to_owned();
        table.row(vec![clean(&one.nodes.join(" ")), ports, keys, left(one.until)]);
    }
    let admin = if who.is_admin { ", an admin" } else { "" };
    let name = clean(&format!("user {}, device {}{admin}", who.user, who.device));
    let servers = who.servers.join(", ");
    let ends = who.until.map(|_| format!("; certificate ends in: {}", left(who.until))).unwrap_or_default();
    format!("{name}{ends}\n\n{table}\n\nservers: {servers}\n")
}

/// Undoes `tunnel join --user`: ends the device at the servers, and removes its files here. Returns lines for the
/// terminal, also about what is left.
///
/// # Errors
///
/// Returns an error if `client.toml` names no servers or has no token, no server confirms the end, or a file cannot be
/// removed.
pub async fn leave(_: LeaveArgs, env: &Environment) -> CommandResult {
    let links = client::joined(env)?;
    let file = env.client_file.clone().unwrap_or_default();
    if matches!(links.proof, UserCredentials::Certificate(_)) {
        let text = format!("{} names a certificate, so no invitation wrote it", file.display());
        return Err(CommandError::unusable(format!("{text}; remove it yourself")));
    }
    // Another file of that name is the user's.
    let ca = links.ca.clone().filter(|ca| *ca == file.with_file_name(CA_FILE));
    let asked =
        query(None, &[], env, async |api: &AdminClient| api.post("/leave", String::new()).await).await;
    // The link may have ended together with the device, before the answer, or the device long before.
    if let Err(why) = asked {
        match UserUplinks::connect(links).await {
            Err(UserLinkError::Denied(why)) if why.contains(USER_TOKEN_HINT) => {}
            // Without its token, the device could not leave later.
            _ => return Err(CommandError { text: format!("{UNHEARD}: {why}\n  {BY_OPERATOR}"), ..why }),
        }
    }
    for file in ca.into_iter().chain([file]) {
        match std::fs::remove_file(&file) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
                let text = format!("cannot remove {}: {cause}", file.display());
                return Err(CommandError::cannot_write(text));
            }
            _ => {}
        }
    }
    Ok(format!("the servers no longer accept this device\n{REST}"))
}

const UNHEARD: &str = "no server has confirmed that this device ends";
const BY_OPERATOR: &str = "client.toml and ca.crt are kept: try again later. Or remove them yourself, and let an operator end the device \
     with tunnel invitations revoke --user USER --device DEVICE";
/// What [`leave`] does not remove.
const REST: &str = "client.toml and ca.crt are removed. Left are your own keys, what tunnel ssh-config --write wrote (--remove), and\n\
                    programs that run, now without a link: systemctl --user disable --now tunnel-proxy\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn files_that_no_invitation_wrote_are_not_removed() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("client.toml");
        let text = "servers = [\"127.0.0.1:1\"]\nca = \"ca.crt\"\ncert = \"me.crt\"\nkey = \"me.key\"\n";
        std::fs::write(&file, text).unwrap();
        std::fs::write(place.path().join(CA_FILE), "").unwrap();
        let env = Environment { client_file: Some(file.clone()), ..Environment::default() };
        let refused = leave(LeaveArgs { yes: true }, &env).await.unwrap_err();
        assert!(refused.text.contains("names a certificate"), "{refused}");
        assert!(file.exists() && place.path().join(CA_FILE).exists());
    }
}
