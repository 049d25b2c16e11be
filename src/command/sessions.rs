//! `tunnel sessions`: the sessions of a server or edge, and their end by an operator.

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};
use serde::Serialize;

use crate::admin::sessions::{EndSessionsReply, SessionSelection};
use crate::admin::status::{SessionStatus, StatusResponse};
use crate::command::admin_client::{AdminClient, query};
use crate::command::format::{bytes, duration};
use crate::command::table::Table;
use crate::command::{CommandResult, Format, examples, json};
use crate::config::Environment;
use tunnel_proto::printable::one_line as clean;

/// Arguments of `tunnel sessions`.
#[derive(Debug, Clone, clap::Args)]
#[command(args_conflicts_with_subcommands = false)]
pub struct SessionsArgs {
    /// What to do; without it, list the sessions.
    #[command(subcommand)]
    pub command: Option<SessionsCommand>,
    /// Admin socket (`listen` in [server.admin] or [edge.admin]). [default: that of a server of this user, otherwise of
    /// an edge, otherwise a link of client.toml; the log contains the path]
    #[arg(long, value_name = "PATH", global = true)]
    pub socket: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: Format,
}

/// Commands of `tunnel sessions`.
#[derive(Debug, Clone, Subcommand)]
pub enum SessionsCommand {
    /// End a session, or all sessions of a user or a node. Both ends are reset.
    ///
    /// The user may open new sessions: to prevent that, change rules, users or certificates, which ends sessions as
    /// well.
    #[command(after_help = examples("tunnel sessions end"))]
    End(EndSessionsArgs),
}

/// Arguments of `tunnel sessions end`: one of them.
#[derive(Debug, Clone, clap::Args)]
#[group(required = true, multiple = false)]
pub struct EndSessionsArgs {
    /// Id of a session, as in the list and in the log.
    #[arg(value_name = "ID")]
    pub id: Option<String>,
    /// User of the sessions.
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Node of the sessions.
    #[arg(long, value_name = "NAME", value_hint = ValueHint::Hostname)]
    pub node: Option<String>,
}

/// The sessions of a process. Times are seconds since 1970, by the clock of that process.
#[derive(Debug, Serialize)]
struct SessionList {
    /// Time of this list.
    now: f64,
    /// Sessions with an end there; at most 1000.
    sessions: Vec<SessionStatus>,
}

/// Lists sessions, or ends some.
///
/// # Errors
///
/// Returns an error if there is no response, or no such session.
pub async fn run(args: SessionsArgs, env: &Environment) -> CommandResult {
    let work = async |api: &AdminClient| {
        let Some(SessionsCommand::End(EndSessionsArgs { id, user, node })) = args.command else {
            let status: StatusResponse = api.parse(&api.get("/status").await?)?;
            return Ok(match args.output {
                Format::Json => json(&SessionList { now: status.now, sessions: status.sessions }),
                Format::Text => api.choice.clone() + &text(&status),
            });
        };
        let selection = json(&SessionSelection { id, user, node });
        let EndSessionsReply { ended } = api.parse(&api.post("/sessions/end", selection).await?)?;
        Ok(format!("{}{ended} session{} ended", api.choice, if ended == 1 { "" } else { "s" }))
    };
    query(args.socket, &["server", "edge"], env, work).await
}

/// Formats the sessions as a table.
fn text(status: &StatusResponse) -> String {
    let mut table = Table::new(&[
        "ID", "NODE", "TARGET", "USER", "CLIENT", "LISTENER", "AGE", "SENT", "RECEIVED", "STATE", "RESUMES",
    ]);
    let or_dash = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), clean);
    for session in &status.sessions {
        table.row(vec![
            clean(&session.id),
            clean(&session.node),
            or_dash(&session.target),
            or_dash(&session.user),
            or_dash(&session.client),
            or_dash(&session.listener),
            duration(status.now - session.since),
            bytes(session.sent_bytes),
            bytes(session.received_bytes),
            clean(&session.state),
            session.resume_count.to_string(),
        ]);
    }
    match status.totals.sessions.checked_sub(status.sessions.len()) {
        Some(more @ 1..) => format!("{table}\n! {more} more sessions are not listed"),
        _ => table.to_string(),
    }
}
