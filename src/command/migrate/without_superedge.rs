//! What `tunnel migrate superedge` does in a build without `superedge`: it names the missing feature.

use std::io::Read;
use std::path::Path;

use crate::command::{CommandError, CommandResult};
use crate::parts;

pub(crate) fn migrate(_: &Path, _: impl Read) -> CommandResult {
    parts::SUPEREDGE.map(|()| String::new()).map_err(CommandError::usage)
}
