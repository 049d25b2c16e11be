//! `tunnel grant` and `tunnel grants`: what users may reach, given by operators and admins until some time.

use std::num::NonZeroU16;
use std::path::PathBuf;

use clap::Subcommand;
use serde::Deserialize as _;
use serde_json::Value;

use crate::admin::grants::GrantRequest;
use crate::admin::nodes::NodesResponse;
use crate::command::admin_client::{AdminClient, query};
use crate::command::format::duration;
use crate::command::table::Table;
use crate::command::{CommandResult, Format, examples, json};
use crate::config::Environment;
use crate::config::value::forms::DURATIONS;
use crate::config::value::quantity;
use crate::invitations::{GrantSelection, ListedEnrolment};
use tunnel_base::policy::NodeGlob;
use tunnel_base::policy::grants::{FOR_EVER, Grant};
use tunnel_base::serde_forms::ConfigPort;
use tunnel_base::unix_time::now;
use tunnel_proto::names::{NodeName, UserName};
use tunnel_proto::printable::one_line as clean;

/// Arguments of `tunnel grant`.
#[derive(Debug, Clone, clap::Args)]
pub struct GrantArgs {
    /// User who gets the right.
    #[arg(value_name = "USER")]
    pub user: UserName,
    /// Nodes that she may reach, separated by commas; '*' matches any run of characters.
    #[arg(long, value_name = "NODES", value_delimiter = ',', required = true)]
    pub nodes: Vec<NodeGlob>,
    /// What else the grant says.
    #[command(flatten)]
    pub terms: GrantTerms,
    /// Admin socket of the server. [default: that of a server of this user, otherwise a link of client.toml; the
    /// server's log contains the path]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// What a grant says besides its user and nodes.
#[derive(Debug, Clone, clap::Args)]
pub struct GrantTerms {
    /// Ports of these nodes, separated by commas. [default: all]
    #[arg(long, value_name = "PORTS", value_delimiter = ',', value_parser = port)]
    #[arg(requires_all = ["user", "nodes"])]
    pub ports: Vec<u16>,
    /// How long the user may reach them: a whole number with s, m, h or d, or "ever". [default: 90d; for admins over
    /// their links at most 12h]
    #[arg(long = "for", value_name = "TIME", value_parser = lasting, requires_all = ["user", "nodes"])]
    pub seconds: Option<u64>,
    /// Let a pattern with '*' also cover nodes that came by a join key. Anyone who has the key chooses their names.
    #[arg(long, requires_all = ["user", "nodes"])]
    pub with_join_keys: bool,
}

/// Arguments of `tunnel grants`.
#[derive(Debug, Clone, clap::Args)]
pub struct GrantsArgs {
    /// What to do; without it, list the grants.
    #[command(subcommand)]
    pub command: Option<GrantsCommand>,
    /// Admin socket of the server. [default: that of a server of this user, otherwise a link of client.toml; the
    /// server's log contains the path]
    #[arg(long, value_name = "PATH", global = true)]
    pub socket: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: Format,
}

/// Commands of `tunnel grants`.
#[derive(Debug, Clone, Subcommand)]
pub enum GrantsCommand {
    /// Revoke grants. The sessions that need them end within 2 s, at all servers.
    #[command(after_help = examples("tunnel grants revoke"))]
    Revoke(GrantSelection),
}

impl GrantTerms {
    /// Gives a grant. Returns it.
    pub(super) async fn grant(
        &self,
        user: &UserName,
        nodes: &[NodeGlob],
        api: &AdminClient,
    ) -> CommandResult<Value> {
        let ports = self.ports.iter().copied().map(ConfigPort).collect::<Vec<_>>();
        let request = GrantRequest {
            user: user.clone(),
            nodes: nodes.to_vec(),
            ports: Some(ports).filter(|ports| !ports.is_empty()),
            seconds: self.seconds,
            with_join_keys: self.with_join_keys,
        };
        api.parse(&api.post("/grants", json(&request)).await?)
    }
}

/// Formats a new grant, and how to revoke it, as lines for the terminal.
pub(super) fn given_text(given: Value) -> String {
    let revoke = format!("tunnel grants revoke {}", cell(&given["id"]));
    format!("{}\nto revoke this: {revoke}\n", table(&[given]))
}

/// Gives a grant. Returns what was given, as lines for the terminal. Notes what no server knows of it yet.
///
/// # Errors
///
/// Returns an error if no server responds, or it refuses.
pub async fn grant(
    GrantArgs { user, nodes, terms, socket }: GrantArgs,
    env: &Environment,
    print_note: impl Fn(&str),
) -> CommandResult {
    let work = async |api: &AdminClient| {
        let given = terms.grant(&user, &nodes, api).await?;
        if let Some(note) = unknown(&user, &nodes, api).await {
            print_note(&note);
        }
        Ok(api.choice.clone() + &given_text(given))
    };
    query(socket, &["server"], env, work).await
}

/// Returns a note of the user or nodes of a grant that no server knows, as they may be misspelt.
async fn unknown(user: &UserName, nodes: &[NodeGlob], api: &AdminClient) -> Option<String> {
    let joined: Vec<ListedEnrolment> = api.parse(&api.get("/invitations").await.ok()?).ok()?;
    let all: NodesResponse = api.parse(&api.get("/nodes").await.ok()?).ok()?;
    let is_complete = all.servers.iter().all(|server| server.state == "complete");
    let linked = all.nodes.into_iter().map(|one| one.name).chain(all.down.into_iter().map(|one| one.name));
    let known: Vec<NodeName> = linked
        .chain(joined.iter().filter_map(|one| one.node.clone()))
        .filter_map(|name| name.parse().ok())
        .collect();
    let has_device = joined.iter().any(|one| one.user.as_deref() == Some(user.as_str()));
    let no_device = (!has_device).then(|| format!("{user} has no device and no invitation"));
    let is_unknown = |glob: &&NodeGlob| is_complete && !known.iter().any(|node| glob.matches(node));
    let unmatched = nodes.iter().filter(is_unknown).map(|glob| format!("no known node matches {glob}"));
    let notes: Vec<_> = no_device.into_iter().chain(unmatched).collect();
    (!notes.is_empty()).then(|| format!("note: {}", notes.join("; ")))
}

/// Lists the grants, or revokes some.
///
/// # Errors
///
/// Returns an error if no server responds, or there is no such grant.
pub async fn manage(args: GrantsArgs, env: &Environment) -> CommandResult {
    let work = async |api: &AdminClient| {
        let Some(GrantsCommand::Revoke(selection)) = args.command else {
            let answer = api.get("/grants").await?;
            let all: Vec<Value> = api.parse(&answer)?;
            return Ok(match args.output {
                Format::Json => answer,
                Format::Text => api.choice.clone() + &table(&all),
            });
        };
        let revoked: usize = api.parse(&api.post("/grants/revoke", json(&selection)).await?)?;
        let rest = selection.user.map_or_else(String::new, |user| {
            format!(
                "\nrules of the servers' config that name {user} remain, if there are any; of an admin over her link also \
                 grants that her rules do not cover"
            )
        });
        Ok(format!("{}grants revoked: {revoked}{rest}", api.choice))
    };
    query(args.socket, &["server"], env, work).await
}

/// Returns a table of grants, also of those that only newer servers understand.
fn table(all: &[Value]) -> String {
    let mut table = Table::new(&["ID", "USER", "NODES", "PORTS", "JOIN KEYS", "LEFT", "BY"]);
    for one in all {
        let left = match Grant::deserialize(one) {
            Ok(Grant { until: FOR_EVER, .. }) => "for ever".to_owned(),
            Ok(Grant { until, .. }) => duration(until.saturating_sub(now()) as f64),
            Err(_) => "of a newer version, gives nothing here".to_owned(),
        };
        let [id, user, nodes, ports, keys, by] =
            ["id", "user", "nodes", "ports", "with_join_keys", "by"].map(|key| cell(&one[key]));
        table.row(vec![id, user, nodes, ports, keys, left, by]);
    }
    table.to_string()
}

/// Formats a field. Only ports may be absent.
fn cell(field: &Value) -> String {
    match field {
        Value::Null => "all".to_owned(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(" "),
        Value::String(text) => clean(text),
        other => other.to_string(),
    }
}

fn port(text: &str) -> Result<u16, &'static str> {
    text.parse().map(NonZeroU16::get).map_err(|_| "expected numbers from 1 to 65535, such as 22 for ssh")
}

fn lasting(text: &str) -> Result<u64, &'static str> {
    let seconds = quantity(text, &DURATIONS[1..]).map(|millis| millis / 1000);
    let seconds = seconds.filter(|seconds| *seconds < FOR_EVER);
    let seconds = seconds.or((text == "ever").then_some(FOR_EVER));
    seconds.ok_or("expected a whole number with s, m, h or d, or ever")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_lasts_for_a_time_with_a_unit_or_for_ever() {
        assert_eq!([lasting("1m"), lasting("2d"), lasting("ever")], [Ok(60), Ok(172_800), Ok(FOR_EVER)]);
        for bad in ["", "1", "18446744073709551615s", "forever", "-1h", "1w"] {
            assert!(lasting(bad).unwrap_err().contains("or ever"), "{bad}");
        }
    }

    #[test]
    fn a_grant_of_a_newer_version_is_listed_as_one_that_gives_nothing() {
        let all = serde_json::json!([
            { "id": "a1", "user": "alice", "nodes": ["shop-*"], "with_join_keys": false, "until": FOR_EVER, "by": "uid=0" },
            { "id": "b2", "user": "bob", "until": FOR_EVER, "only_on": "monday" },
        ]);
        let table = table(all.as_array().unwrap());
        let lines: Vec<_> = table.lines().collect();
        assert!(lines[1].contains("shop-*") && lines[1].contains("for ever"), "{table}");
        assert!(lines[2].contains("bob") && lines[2].contains("gives nothing here"), "{table}");
    }
}
