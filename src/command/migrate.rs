//! `tunnel migrate`: our settings for what another tunnel was set to do, with a line for each setting of that.

mod flags;
mod old;
mod texts;

use std::io::{self, Read};
use std::path::PathBuf;

use clap::ValueEnum;

use super::Failure;
use old::Old;

/// What to read, and for whom to write.
#[derive(Debug, Clone, clap::Args)]
pub struct Migrate {
    /// Whose deployment it is.
    #[arg(value_name = "FROM")]
    pub from: Origin,
    /// Files with its objects, in YAML or JSON as `kubectl get -o yaml` prints them: Deployments, DaemonSets, ConfigMaps
    /// and Services; `-` is stdin.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Print the settings of edges, made from the agents' flags, and not those of pods.
    #[arg(long)]
    pub edge: bool,
}

/// Another tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Origin {
    /// OpenYurt's.
    Yurttunnel,
}

/// What became of a setting, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Remark {
    verdict: Verdict,
    /// The setting with its value.
    what: String,
    why: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It means the same here.
    Kept,
    /// It has another form, or somebody has to see to it.
    Changed,
    /// Nothing stands for it.
    Gone,
    /// Nobody here knows what it was for.
    Unknown,
}

/// Our settings, and behind `#` a line for each setting of the old deployment. `stdin` is read where a file is `-`. Blocks
/// on files.
///
/// # Errors
///
/// A file cannot be read, or holds nothing of such a deployment.
pub fn run(asked: &Migrate, stdin: impl Read) -> Result<String, Failure> {
    let Origin::Yurttunnel = asked.from;
    let mut stdin = Some(stdin);
    let mut old = Old::default();
    for file in &asked.files {
        let name = file.display().to_string();
        let text = match (name.as_str(), stdin.take_if(|_| name == "-")) {
            ("-", Some(stdin)) => read(stdin),
            ("-", None) => return Err(Failure::usage("- stands twice: stdin is read once")),
            _ => std::fs::File::open(file).and_then(read),
        };
        let text = text.map_err(|cause| Failure::unusable(format!("{name}: {cause}")))?;
        old.add(&text).map_err(|why| Failure::unusable(format!("{name}: {why}")))?;
    }
    if asked.edge { texts::edge(&old) } else { texts::cloud(&old) }.map_err(Failure::unusable)
}

fn read(from: impl Read) -> io::Result<String> {
    let mut text = String::new();
    if from.take(MOST_BYTES + 1).read_to_string(&mut text)? as u64 > MOST_BYTES {
        return Err(io::Error::other("it is larger than 16 MiB: give the tunnel's own objects alone"));
    }
    Ok(text)
}

/// Of one file.
const MOST_BYTES: u64 = 16 << 20;

#[cfg(test)]
mod tests;
