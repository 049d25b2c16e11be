//! Stands in for `tunnel invite`, `invitations` and `join` in a build without invitations.

use crate::command::{AnyArgs, CommandError};
use crate::config::Environment;
use crate::parts;

/// Arguments of `tunnel invite`.
pub type InviteArgs = AnyArgs;
/// Arguments of `tunnel invitations`.
pub type InvitationsArgs = AnyArgs;
/// Arguments of `tunnel join`.
pub type JoinArgs = AnyArgs;

/// Returns the reason why this build invites no machine.
///
/// # Errors
///
/// Always.
pub async fn invite(_: AnyArgs, _: &Environment) -> Result<String, CommandError> {
    absent()
}

/// Returns the reason why this build has no invitations.
///
/// # Errors
///
/// Always.
pub async fn manage(_: AnyArgs, _: &Environment) -> Result<String, CommandError> {
    absent()
}

/// Returns the reason why this build does not join.
///
/// # Errors
///
/// Always.
pub async fn run(_: &AnyArgs, _: &Environment, _: impl std::io::Read) -> Result<String, CommandError> {
    absent()
}

fn absent() -> Result<String, CommandError> {
    parts::INVITATIONS.map(|()| String::new()).map_err(CommandError::usage)
}
