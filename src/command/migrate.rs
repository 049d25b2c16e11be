//! `tunnel migrate`: a config that replaces another tunnel's.

mod superedge;

use std::io::{self, Read};
use std::path::PathBuf;

use clap::Subcommand;

use crate::command::{CommandError, examples};
use crate::parts;
use tunnel_base::files;

/// Commands of `tunnel migrate`, one for each other tunnel software.
#[derive(Debug, Clone, Subcommand)]
pub enum MigrateCommand {
    /// Print the config that replaces one of SuperEdge's tunnel, of a server or an edge.
    #[command(after_help = examples([
        "tunnel migrate superedge tunnel_cloud.toml > server.toml",
        "tunnel migrate superedge - < tunnel_edge.toml > edge.toml",
    ]))]
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
pub fn run(command: &MigrateCommand, stdin: impl Read) -> Result<String, CommandError> {
    parts::SUPEREDGE.map_err(CommandError::usage)?;
    let MigrateCommand::Superedge { file } = command;
    let name = file.display().to_string();
    let text = if name == "-" { read(stdin) } else { std::fs::File::open(file).and_then(read) };
    superedge::migrate(&text.map_err(|cause| CommandError::unusable(format!("{name}: {cause}")))?)
}

fn read(from: impl Read) -> io::Result<String> {
    let mut content = Vec::new();
    if from.take(MAX_BYTES + 1).read_to_end(&mut content)? as u64 > MAX_BYTES {
        return Err(io::Error::other("larger than 16 MiB"));
    }
    files::text(content)
}

/// Maximum size of the file.
const MAX_BYTES: u64 = 16 << 20;
