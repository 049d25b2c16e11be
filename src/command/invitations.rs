//! `tunnel invite` and `tunnel invitations`: authorizing machines and users to join a cloud.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueHint};
use serde_json::{Value, json};

use crate::admin::invitations::{
    InvitationResponse, MAX_INVITATION_SECONDS, MAX_KEY_SECONDS, MAX_USES, MIN_INVITATION_SECONDS,
};
use crate::command::admin_client::{AdminClient, query};
use crate::command::format::duration;
use crate::command::grants::{GrantTerms, given_text};
use crate::command::machine_files::tls_note;
use crate::command::table::Table;
use crate::command::{CommandError, CommandResult, Format, examples, shell_word};
use crate::config::Environment;
use crate::config::value::forms::DURATIONS;
use crate::config::value::quantity;
use crate::invitations::ListedEnrolment;
use crate::invitations::code::InvitationCode;
use crate::invitations::invitee::Invitee;
use tunnel_base::policy::NodeGlob;
use tunnel_base::unix_time::{in_words, now};
use tunnel_proto::names::{DeviceName, NodeName, Target, UserDevice, UserName};
use tunnel_proto::printable;

/// Arguments of `tunnel invite`.
#[derive(Debug, Clone, clap::Args)]
pub struct InviteArgs {
    /// Name of the node that the machine becomes.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["user", "nodes", "keep", "GrantTerms"])]
    #[arg(required_unless_present_any = ["user", "nodes"])]
    pub node: Option<NodeName>,
    /// User to whom the machine belongs, which is no node then.
    #[arg(long, value_name = "NAME")]
    pub user: Option<UserName>,
    /// With --uses: pattern of the nodes for which to make a join key. With --user: nodes that the user may reach from
    /// now on, separated by commas; none by default. '*' matches any run of characters.
    #[arg(long, value_name = "NODES", value_delimiter = ',')]
    pub nodes: Vec<NodeGlob>,
    /// Number of nodes that may join by the key, each under its own name.
    #[arg(long, value_name = "NUMBER", requires = "nodes", conflicts_with_all = ["user", "GrantTerms"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_USES)))]
    pub uses: Option<u32>,
    /// Let the user's device remain even if it is unused for 90 days.
    #[arg(long, requires = "user")]
    pub keep: bool,
    /// What else the grant to a user says.
    #[command(flatten)]
    pub terms: GrantTerms,
    /// Lifetime of the invitation: a whole number with s, m, h or d, from 1m to 7d, and to 365d for a join key.
    #[arg(long = "expires", alias = "ttl", value_name = "TIME", default_value = "1h", value_parser = lasting)]
    pub lasting: Duration,
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: Format,
    /// Admin socket of the server. [default: that of a server of this user, otherwise a link of client.toml; the
    /// server's log contains the path]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Arguments of `tunnel invitations`.
#[derive(Debug, Clone, clap::Args)]
pub struct InvitationsArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: InvitationsCommand,
    /// Admin socket of the server. [default: that of a server of this user, otherwise a link of client.toml; the
    /// server's log contains the path]
    #[arg(long, value_name = "PATH", global = true)]
    pub socket: Option<PathBuf>,
}

/// Commands of `tunnel invitations`.
#[derive(Debug, Clone, Subcommand)]
pub enum InvitationsCommand {
    /// List the nodes and users' devices that have joined, who has an open invitation, and the join keys.
    #[command(after_help = examples("tunnel invitations list"))]
    List {
        /// Output format.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: Format,
    },
    /// Revoke the token and the open invitation of a node, those of a user, or a join key. The links close within 2 s,
    /// at all servers.
    #[command(after_help = examples("tunnel invitations revoke"))]
    Revoke {
        /// Node that has joined, or was invited.
        #[arg(value_name = "NODE", required_unless_present_any = ["user", "key"], conflicts_with_all = ["user", "key"])]
        #[arg(value_hint = ValueHint::Hostname)]
        node: Option<NodeName>,
        /// User, with all devices and open invitations.
        #[arg(long, value_name = "NAME")]
        user: Option<UserName>,
        /// Only this device of the user.
        #[arg(long, value_name = "NAME", requires = "user")]
        device: Option<DeviceName>,
        /// Join key, by its ID. No further machine joins by it, and its nodes remain.
        #[arg(long, value_name = "ID", conflicts_with = "user")]
        key: Option<String>,
        /// Also revoke the tokens of the nodes that came by the key.
        #[arg(long, requires = "key")]
        with_nodes: bool,
    },
}

/// Requests an invitation from a server. Returns the command for the machine that should join.
///
/// # Errors
///
/// Returns an error if no server responds, or it refuses.
pub async fn invite(args: InviteArgs, env: &Environment) -> CommandResult {
    query(args.socket.clone(), &["server"], env, async |api| invite_by(api, &args).await).await
}

async fn invite_by(api: &AdminClient, args: &InviteArgs) -> CommandResult {
    let invitee = invitee(args)?;
    let mut body = json!({ "subject": invitee.to_string(), "seconds": args.lasting.as_secs() });
    if let Some(uses) = args.uses {
        // Otherwise absent, as older servers do not know it.
        body["uses"] = uses.into();
    }
    if args.keep {
        body["keep"] = true.into();
    }
    // Before the invitation: of a grant that is refused, no open invitation must remain.
    let given = match &args.user {
        Some(user) if !args.nodes.is_empty() => Some(args.terms.grant(user, &args.nodes, api).await?),
        _ => None,
    };
    let answer = match api.post("/invitations", body.to_string()).await {
        Ok(answer) => answer,
        Err(why) => {
            if let Some(given) = given {
                api.post("/grants/revoke", json!({ "id": given["id"] }).to_string()).await?;
            }
            return Err(why);
        }
    };
    let InvitationResponse { code, cloud, key, .. } = api.parse(&answer)?;
    // They become a part of a command for root, so nothing else passes.
    let code = code.parse::<InvitationCode>().map_err(|cause| api.incompatible(&cause))?;
    cloud.parse::<Target>().map_err(|cause| api.incompatible(&cause))?;
    if *code.invitee() != invitee {
        return Err(api.incompatible(&"its invitation is for another node or user"));
    }
    if args.output == Format::Json {
        let Some(given) = given else { return Ok(answer) };
        let mut answer: Value = api.parse(&answer)?;
        answer["grant"] = given["id"].clone();
        return Ok(answer.to_string());
    }
    let granted = given
        .map_or_else(|| "The invitation grants nothing; see tunnel grant --help\n".to_owned(), given_text);
    let choice = &api.choice;
    let cloud = shell_word(&cloud);
    let lasting = in_words(args.lasting);
    Ok(match &invitee {
        Invitee::User(user) | Invitee::Device(UserDevice { user, .. }) => format!(
            "{choice}on a machine of {user}, within {lasting}, as that person:\n  \
             echo {code} | tunnel join --user {cloud} --invitation -\n\
             It works once, for one device. Anyone who has it can be {user}, so send it over a private channel.\n\
             {granted}",
        ),
        Invitee::Node(node) => format!(
            "{choice}on {node}, within {lasting}, as root:\n  echo {code} | tunnel join {cloud} --invitation -\n\
             It works once. If {node} has joined before, its earlier token then ends. Anyone who has it can become {node}, \
             so send it over a private channel.\n{note}",
            note = tls_note(node),
        ),
        Invitee::Nodes(pattern) => format!(
            "{choice}on each machine, within {lasting}, as root:\n  echo {key_code} | tunnel join {cloud} --invitation -\n\
             It works for {uses} machines, each named by its host's name, or by --node. Anyone who has it can become any \
             {pattern} that has not joined, so keep it as secret as a password. To end it:\n  \
             tunnel invitations revoke --key {key}\n",
            key_code = shell_word(&code.to_string()),
            uses = args.uses.unwrap_or_default(),
            key = printable::printable(&key.unwrap_or_default()),
        ),
    })
}

/// Returns whom the arguments invite.
pub(super) fn invitee(args: &InviteArgs) -> CommandResult<Invitee> {
    let (invitee, max_seconds) = match (&args.nodes[..], args.uses) {
        ([pattern], Some(_)) if pattern.to_string().contains('*') => {
            (Invitee::Nodes(pattern.clone()), MAX_KEY_SECONDS)
        }
        (_, Some(_)) => {
            return Err(CommandError::usage(
                "--nodes: expected one pattern with '*'; for one node set --node instead",
            ));
        }
        ([_, ..], None) if args.user.is_none() => {
            return Err(CommandError::usage("--nodes: set --uses for a join key, or --user for a grant"));
        }
        _ => (subject(args.node.as_ref(), args.user.as_ref(), None)?, MAX_INVITATION_SECONDS),
    };
    if args.lasting.as_secs() > max_seconds {
        return Err(CommandError::usage(
            "--expires: at most 7d, unless it is for a join key (--nodes and --uses)",
        ));
    }
    Ok(invitee)
}

/// Returns whom the arguments name.
fn subject(
    node: Option<&NodeName>,
    user: Option<&UserName>,
    device: Option<&DeviceName>,
) -> CommandResult<Invitee> {
    match (node.cloned(), user.cloned(), device.cloned()) {
        (Some(node), ..) => Ok(Invitee::Node(node)),
        (None, Some(user), Some(device)) => Ok(Invitee::Device(UserDevice { user, device })),
        (None, Some(user), None) => Ok(Invitee::User(user)),
        (None, None, _) => Err(CommandError::usage("expected a node, or --user")),
    }
}

/// Lists those who joined by a server's invitations or have one, or revokes one.
///
/// # Errors
///
/// Returns an error if no server responds, or there is nothing to revoke.
pub async fn manage(args: InvitationsArgs, env: &Environment) -> CommandResult {
    query(args.socket, &["server"], env, async |api| manage_by(api, args.command).await).await
}

async fn manage_by(api: &AdminClient, command: InvitationsCommand) -> CommandResult {
    match command {
        InvitationsCommand::List { output } => {
            let answer = api.get("/invitations").await?;
            let all: Vec<ListedEnrolment> = api.parse(&answer)?;
            Ok(if output == Format::Json { answer } else { api.choice.clone() + &tables(&all) })
        }
        InvitationsCommand::Revoke { key: Some(key), with_nodes, .. } => {
            let body = json!({ "key": key, "with_nodes": with_nodes });
            api.post("/revocations", body.to_string()).await?;
            let end = if with_nodes { "the links of its nodes close within 2 s" } else { "its nodes remain" };
            Ok(format!("{}revoked; {end}\n", api.choice))
        }
        InvitationsCommand::Revoke { node, user, device, .. } => {
            let subject = subject(node.as_ref(), user.as_ref(), device.as_ref())?;
            let body = json!({ "subject": subject.to_string() });
            api.post("/revocations", body.to_string()).await?;
            let choice = &api.choice;
            Ok(match &subject {
                Invitee::Node(_) | Invitee::Nodes(_) => format!(
                    "{choice}revoked; the links of {subject} close within 2 s\nto add {subject} again, here:\n  \
                     tunnel invite --node {subject}\nand there, as root, before the command that invite prints:\n  \
                     cd /etc/tunnel && mv -t $(mktemp -d old.XXXX) edge.toml certs token\n"
                ),
                Invitee::User(user) => format!(
                    "{choice}revoked, with the grants that {user} has and has given; the links of {user} close within \
                     2 s\nrules of the servers' config that name {user} remain, if there are any, for who joins by \
                     another invitation for {user}\n"
                ),
                Invitee::Device(UserDevice { user, device }) => format!(
                    "{choice}revoked; the links of {user}'s {device} close within 2 s\nopen invitations for {user} \
                     remain, if there are any (tunnel invitations list)\nto add it again, \
                     here:\n  tunnel invite --user {user}\nand there, before the command that invite prints:\n  \
                     cd ~/.config/tunnel && mv -t $(mktemp -d old.XXXX) client.toml ca.crt\n"
                ),
            })
        }
    }
}

/// Returns a table of nodes, and one of users and one of join keys if there are any.
fn tables(all: &[ListedEnrolment]) -> String {
    let mut nodes = Table::new(&["NODE", "JOINED", "OPEN INVITATION", "KEY", "SINCE", "LAST SEEN"]);
    let mut users = Table::new(&["USER", "DEVICE", "OPEN INVITATION", "SINCE", "LAST SEEN", "IF UNUSED"]);
    let mut keys = Table::new(&["KEY", "NODES", "USES", "LEFT", "OPEN"]);
    let now = now();
    for one in all {
        let left = |until: u64| format!("{} left", duration(until.saturating_sub(now) as f64));
        let ago = |at: u64| format!("{} ago", duration(now.saturating_sub(at) as f64));
        let [since, seen] = [one.joined_at, one.last_seen].map(|at| at.map_or("-".to_owned(), ago));
        let invited = one.invited_until.map_or("-".to_owned(), left);
        let name = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), printable::printable);
        if one.pattern.is_some() {
            let uses = one.uses.unwrap_or_default();
            let used = one.used.unwrap_or_default();
            let rest = uses.saturating_sub(used).to_string();
            keys.row(vec![name(&one.key), name(&one.pattern), uses.to_string(), rest, invited]);
        } else if one.user.is_some() {
            let ends = one.ends.map_or("-".to_owned(), left);
            users.row(vec![name(&one.user), name(&one.device), invited, since, seen, ends]);
        } else {
            let joined = if one.joined { "yes" } else { "no" }.to_owned();
            nodes.row(vec![name(&one.node), joined, invited, name(&one.key), since, seen]);
        }
    }
    let more = [users, keys].into_iter().filter(|table| table.rows.len() > 1);
    let text = more.fold(format!("{nodes}\n"), |text, table| format!("{text}\n{table}\n"));
    let ending = all.iter().filter(|one| one.ends.is_some_and(|ends| ends <= now.saturating_add(WARNING)));
    match ending.count() {
        0 => text,
        ending => format!("{text}\n! devices that end within 14 days unless they are used: {ending}\n"),
    }
}

/// How long before the end of an unused device a line tells it, in seconds.
const WARNING: u64 = 14 * 24 * 3600;

fn lasting(text: &str) -> Result<Duration, String> {
    let expected = "expected a whole number with s, m, h or d, from 1m to 365d";
    let seconds = quantity(text, &DURATIONS[1..]).map(|millis| millis / 1000);
    let seconds = seconds.filter(|seconds| (MIN_INVITATION_SECONDS..=MAX_KEY_SECONDS).contains(seconds));
    Ok(Duration::from_secs(seconds.ok_or(expected)?))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        _invite: InviteArgs,
    }

    #[test]
    fn terms_of_a_grant_are_refused_where_no_user_gets_one() {
        for who in [&["--node", "a"][..], &["--nodes", "a-*", "--uses", "3"]] {
            for terms in [&["--ports", "22"][..], &["--for", "8h"], &["--with-join-keys"]] {
                let line = [&["invite"], who, terms].concat();
                assert!(Line::try_parse_from(&line).is_err(), "{line:?}");
            }
        }
        let line =
            ["invite", "--user", "a", "--nodes", "b-*", "--ports", "22", "--for", "8h", "--with-join-keys"];
        assert!(Line::try_parse_from(line).is_ok());
    }

    #[test]
    fn an_invitation_lifetime_needs_a_unit_and_has_limits() {
        assert_eq!(lasting("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(lasting("365d"), Ok(Duration::from_secs(MAX_KEY_SECONDS)));
        for bad in ["", "1", "h", "59s", "366d", "-1h", "1hh", "1w", "99999999999999999999h"] {
            assert!(lasting(bad).unwrap_err().contains("from 1m to 365d"), "{bad}");
        }
        assert_eq!(
            [30 * 86400, 3600, 5400, 90].map(|s| in_words(Duration::from_secs(s))),
            ["30 d", "1 h", "1 h 30 min", "1 min 30 s"]
        );
    }
}
