//! `tunnel migrate`: a config that replaces another tunnel's.

#[cfg_attr(not(feature = "superedge"), path = "migrate/without_superedge.rs")]
mod superedge;

use std::io::Read;
use std::path::PathBuf;

use clap::Subcommand;

use crate::command::{CommandResult, examples};

/// Commands of `tunnel migrate`, one for each other tunnel software.
#[derive(Debug, Clone, Subcommand)]
pub enum MigrateCommand {
    /// Print the config that replaces one of SuperEdge's tunnel, of a server or an edge.
    #[command(after_help = examples("tunnel migrate superedge"))]
    Superedge {
        /// The config file; `-` is stdin.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// Returns our config, with a line after `#` for each setting that has another effect here. Reads `stdin` if the file is
/// `-`. Blocks on the file.
///
/// # Errors
///
/// Returns an error if the file cannot be read, or is no such config.
pub fn run(command: &MigrateCommand, stdin: impl Read) -> CommandResult {
    let MigrateCommand::Superedge { file } = command;
    superedge::migrate(file, stdin)
}
