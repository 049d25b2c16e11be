//! `tunnel migrate`: a config that replaces another tunnel's.

mod superedge;
#[cfg_attr(not(feature = "cluster"), path = "migrate/absent/yurttunnel.rs")]
mod yurttunnel;

use std::io::{self, Read};
use std::path::PathBuf;

use clap::ValueEnum;

use crate::command::CommandError;
use crate::config;

/// Arguments of `tunnel migrate`.
#[derive(Debug, Clone, clap::Args)]
pub struct MigrateArgs {
    /// Tunnel of the deployment.
    #[arg(value_name = "FROM")]
    pub from: Origin,
    /// For superedge its config file. For yurttunnel files with its objects, in YAML or JSON as printed by
    /// `kubectl get -o yaml`: Deployments, DaemonSets, ConfigMaps and Services. `-` is stdin.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Print the config of edges, made from the agents' flags, instead of the servers'.
    #[arg(long)]
    pub edge: bool,
}

/// The other tunnel software whose deployment `tunnel migrate` reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Origin {
    /// SuperEdge's tunnel, or this program before its config had a schema.
    Superedge,
    /// OpenYurt's tunnel.
    Yurttunnel,
}

/// Returns our config, with a line after `#` for each setting of the old deployment. Reads `stdin` if a file is `-`.
/// Blocks on files.
///
/// # Errors
///
/// Returns an error if a file cannot be read, or contains no such deployment.
pub fn run(asked: &MigrateArgs, stdin: impl Read) -> Result<String, CommandError> {
    match asked.from {
        Origin::Superedge => of_superedge(asked, stdin),
        Origin::Yurttunnel => yurttunnel::migrate(asked, stdin),
    }
}

/// Returns SuperEdge's config in this program's schema.
fn of_superedge(asked: &MigrateArgs, stdin: impl Read) -> Result<String, CommandError> {
    let [file] = asked.files.as_slice() else {
        return Err(CommandError::usage("superedge has one config file; give one"));
    };
    let name = file.display();
    let text = if file.as_os_str() == "-" { read(stdin) } else { std::fs::File::open(file).and_then(read) };
    let text = text.map_err(|cause| CommandError::unusable(format!("{name}: {cause}")))?;
    let (settings, _) = config::superedge::convert(&text)
        .whole()
        .map_err(|errors| CommandError::unusable(errors.to_string()))?;
    Ok(superedge::print(&settings))
}

fn read(from: impl Read) -> io::Result<String> {
    let mut text = String::new();
    if from.take(MAX_BYTES + 1).read_to_string(&mut text)? as u64 > MAX_BYTES {
        return Err(io::Error::other("larger than 16 MiB; include only the tunnel's own objects"));
    }
    Ok(text)
}

/// Maximum size of one file.
const MAX_BYTES: u64 = 16 << 20;
