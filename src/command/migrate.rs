//! `tunnel migrate`: a config that replaces another tunnel's.

mod superedge;
mod yurttunnel;

use std::io::{self, Read};
use std::path::PathBuf;

use clap::ValueEnum;

use crate::command::{CommandError, Role};
use crate::parts;
use tunnel_base::files;

/// Arguments of `tunnel migrate`.
#[derive(Debug, Clone, clap::Args)]
pub struct MigrateArgs {
    /// Tunnel of the deployment.
    #[arg(value_name = "FROM")]
    pub from: MigrationOrigin,
    /// For superedge its config file. For yurttunnel files with its objects, in YAML or JSON as printed by
    /// `kubectl get -o yaml`: Deployments, DaemonSets, ConfigMaps and Services. `-` is stdin.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Role to print the config of. A file of superedge names its role.
    #[arg(long, value_name = "ROLE", default_value = "server")]
    pub role: Role,
}

/// The other tunnel software whose deployment `tunnel migrate` reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MigrationOrigin {
    /// SuperEdge's tunnel.
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
pub fn run(args: &MigrateArgs, stdin: impl Read) -> Result<String, CommandError> {
    let part = match args.from {
        MigrationOrigin::Superedge => parts::SUPEREDGE,
        MigrationOrigin::Yurttunnel => parts::KUBERNETES,
    };
    part.map_err(CommandError::usage)?;
    let mut stdin = Some(stdin);
    let mut texts = Vec::new();
    for file in &args.files {
        let name = file.display().to_string();
        let text = match (name.as_str(), stdin.take_if(|_| name == "-")) {
            ("-", Some(stdin)) => read(stdin),
            ("-", None) => return Err(CommandError::usage("- is given twice; stdin can be read once")),
            _ => std::fs::File::open(file).and_then(read),
        };
        texts.push((text.map_err(|cause| CommandError::unusable(format!("{name}: {cause}")))?, name));
    }
    match args.from {
        MigrationOrigin::Superedge => superedge::migrate(&texts),
        MigrationOrigin::Yurttunnel => yurttunnel::migrate(&texts, args.role),
    }
}

fn read(from: impl Read) -> io::Result<String> {
    let mut content = Vec::new();
    if from.take(MAX_BYTES + 1).read_to_end(&mut content)? as u64 > MAX_BYTES {
        return Err(io::Error::other("larger than 16 MiB; include only the tunnel's own objects"));
    }
    files::text(content)
}

/// Maximum size of one file.
const MAX_BYTES: u64 = 16 << 20;
