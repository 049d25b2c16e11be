//! What `tunnel join` of a node does in a build without `edge`: it names the missing feature.

use crate::command::join::JoinArgs;
use crate::command::{CommandError, CommandResult};
use crate::config::Environment;
use crate::invitations::code::InvitationCode;
use crate::invitations::invitee::Invitee;
use crate::parts;

pub(super) async fn join(_: &JoinArgs, _: &InvitationCode, _: &Invitee, _: &Environment) -> CommandResult {
    parts::EDGE.map(|()| String::new()).map_err(CommandError::usage)
}
