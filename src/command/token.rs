//! `tunnel token`: lists the nodes of a server's token file, and changes a node's token without cutting its sessions.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use serde::Serialize;

use crate::command::file_edit::FileEdit;
use crate::command::machine_files::{random_token, tls_note};
use crate::command::table::Table;
use crate::command::{CommandError, CommandResult, Format, Role, examples, json};
use crate::config::Environment;
use crate::server::config::ServerConfig;
use tunnel_base::files;
use tunnel_base::policy::tokens::{
    NodeTokens, RotateError, TokenLineState, finish_rotation, line_name, rotate,
};
use tunnel_proto::names::NodeName;

/// Commands of `tunnel token`.
#[derive(Debug, Clone, Subcommand)]
pub enum TokenCommand {
    /// List the nodes of a token file. No token is printed.
    #[command(after_help = examples("tunnel token list"))]
    List {
        /// Token file, or the server's config, which names it. [default: the server's config in /etc/tunnel]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Output format.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: Format,
    },
    /// Give a node a new token. The previous one remains valid until `--finish`, so that no session is cut.
    #[command(after_help = examples("tunnel token rotate"))]
    Rotate(RotateTokenArgs),
}

/// Arguments of `tunnel token rotate`.
#[derive(Debug, Clone, clap::Args)]
pub struct RotateTokenArgs {
    /// Node that gets a new token, or `default`.
    #[arg(value_name = "NODE", value_parser = line_name)]
    pub node: NodeName,
    /// Token file, or the server's config, which names it. [default: the server's config in /etc/tunnel]
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// New file for the token, for its user only, instead of stdout.
    #[arg(long, value_name = "FILE", conflicts_with = "finish")]
    pub out: Option<PathBuf>,
    /// Remove the previous token. Links that still use it close within 10 s.
    #[arg(long)]
    pub finish: bool,
}

/// Runs a command of `tunnel token`. Returns lines for the terminal. Blocks on the disk.
///
/// # Errors
///
/// Returns an error if a file cannot be read or written, or the node's token cannot be changed.
pub fn run(args_of: &TokenCommand) -> CommandResult {
    match args_of {
        TokenCommand::List { file, output } => {
            let listed = TokenList::read(&token_file(file.as_deref())?)?;
            Ok(if *output == Format::Json { json(&listed) } else { listed.text() })
        }
        TokenCommand::Rotate(RotateTokenArgs { node, file, out, finish }) => {
            let file = token_file(file.as_deref())?;
            if *finish { finish_rotation_of(&file, node) } else { start(&file, node, out.as_deref()) }
        }
    }
}

/// The nodes of a token file, without their tokens.
#[derive(Debug, Serialize)]
struct TokenList {
    /// Nodes, sorted by name.
    nodes: Vec<TokenListRow>,
    /// Lines that are ignored in whole or in part, or that block their node.
    warnings: Vec<TokenWarning>,
}

/// A node of a token file.
#[derive(Debug, Serialize)]
struct TokenListRow {
    /// Name of the node, or `default`.
    node: String,
    /// `set`; `rotating`, if the previous token is still valid; or `blocked`, if the node has none.
    token: &'static str,
}

/// A warning about a line of a token file.
#[derive(Debug, Serialize)]
struct TokenWarning {
    /// Number of the line, counted from 1.
    line: usize,
    /// What is wrong, and what to do.
    text: &'static str,
}

impl TokenList {
    fn read(file: &Path) -> CommandResult<Self> {
        let tokens = NodeTokens::parse(&read(file)?);
        let nodes = tokens.entries().into_iter().map(|(node, entry)| {
            let token = match entry {
                TokenLineState::Token => "set",
                TokenLineState::Rotating => "rotating",
                TokenLineState::Blocked => "blocked",
            };
            TokenListRow { node: node.to_owned(), token }
        });
        let warnings = tokens.errors().iter().map(|(line, text)| TokenWarning { line: *line, text });
        Ok(Self { nodes: nodes.collect(), warnings: warnings.collect() })
    }

    /// Formats the list as a table, with warnings and hints.
    fn text(&self) -> String {
        let mut table = Table::new(&["NODE", "TOKEN"]);
        for TokenListRow { node, token } in &self.nodes {
            let state = match *token {
                "rotating" => "set, and the previous one is still valid",
                "blocked" => "none: the node is blocked",
                other => other,
            };
            table.row(vec![node.clone(), state.to_owned()]);
        }
        let warnings = self.warnings.iter();
        let warnings: String =
            warnings.map(|TokenWarning { line, text }| format!("\nline {line}: {text}")).collect();
        let nodes = self.nodes.iter().filter_map(|one| one.node.parse().ok());
        let notes: String = nodes.map(|node| tls_note(&node)).collect();
        format!("{table}{warnings}\n{notes}")
    }
}

fn start(file: &Path, node: &NodeName, out: Option<&Path>) -> CommandResult {
    let edit = FileEdit::start(file)?;
    let token = random_token();
    let text = rotate(&edit.text, node, &token).map_err(|error| refused(&error, file))?;
    if let Some(out) = out {
        write_new(out, &token)?;
    }
    edit.replace(&text).inspect_err(|_| {
        if let Some(out) = out {
            // Best effort: no server knows this token.
            let _ = fs::remove_file(out);
        }
    })?;
    let (place, given) = match out {
        Some(out) => (format!("{}", out.display()), String::new()),
        None => ("this token".to_owned(), format!("{token}\n")),
    };
    Ok(format!(
        "{given}{node} has a new token in {file}; its previous one is still valid\nnext:\n  copy {file} to every other server\n  \
         write {place} into the token_file of the edge; it links again within 10 s\n  \
         tunnel token rotate {node} --file {file} --finish\n",
        file = file.display()
    ))
}

fn finish_rotation_of(file: &Path, node: &NodeName) -> CommandResult {
    let edit = FileEdit::start(file)?;
    edit.replace(&finish_rotation(&edit.text, node).map_err(|error| refused(&error, file))?)?;
    Ok(format!(
        "only the new token of {node} is valid in {file}; links with the previous one close within 10 s\n\
         next: copy {file} to every other server\n",
        file = file.display()
    ))
}

fn refused(error: &RotateError, file: &Path) -> CommandError {
    let text = format!("{}: {error}", file.display());
    match error {
        RotateError::Rotating(node) => CommandError::unusable(format!(
            "{text}: tunnel token rotate {node} --file {} --finish",
            file.display()
        )),
        _ => CommandError::unusable(text),
    }
}

/// Returns the token file: the named one, or the one that the named or the default config names.
fn token_file(named: Option<&Path>) -> CommandResult<PathBuf> {
    let path = named.map_or_else(|| Role::Server.config(), Path::to_owned);
    if path.extension().is_none_or(|extension| extension != "toml") {
        return Ok(path);
    }
    let (config, _) = ServerConfig::read(&read(&path)?, &Environment::default())
        .map_err(|errors| CommandError::unusable(format!("{}: {errors}", path.display())))?;
    Ok(config.links.token_file.0)
}

fn read(path: &Path) -> CommandResult {
    files::read_text(path).map_err(|cause| {
        let text =
            format!("cannot read {}: {cause}; name a token file, or a server's config", path.display());
        CommandError::unusable(text)
    })
}

/// Writes a token into a new file that only its user can read.
fn write_new(path: &Path, token: &str) -> CommandResult<()> {
    files::create_private(path, &format!("{token}\n")).map_err(|cause| {
        let text = format!("cannot write {}: {cause}; choose a path that does not exist", path.display());
        CommandError::cannot_write(text)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn args(file: &Path, out: Option<PathBuf>, finish: bool) -> TokenCommand {
        let node = "node7".parse().unwrap();
        TokenCommand::Rotate(RotateTokenArgs { node, file: Some(file.to_owned()), out, finish })
    }

    #[test]
    fn a_token_rotation_writes_both_files_and_prints_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let (file, out) = (dir.path().join("token"), dir.path().join("node7.token"));
        fs::write(&file, "node7:old\nnode8:other\n").unwrap();
        let output = run(&args(&file, Some(out.clone()), false)).unwrap();
        let token = fs::read_to_string(&out).unwrap().trim().to_owned();
        assert!(!output.contains(&token) && !output.contains("old\n"), "{output}");
        assert!(output.contains("--finish"), "{output}");
        assert_eq!(fs::metadata(&out).unwrap().permissions().mode() & 0o777, 0o600);
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(text, format!("node7:{token} previous=old\nnode8:other\n"));
        let listed = run(&TokenCommand::List { file: Some(file.clone()), output: Format::Text }).unwrap();
        assert!(listed.contains("node7") && listed.contains("the previous one is still valid"), "{listed}");
        assert!(!listed.contains("old") && !listed.contains("other") && !listed.contains(&token), "{listed}");

        let again = run(&args(&file, None, false)).unwrap_err();
        assert!(again.code == 78 && again.text.contains("finish that rotation first"), "{again}");
        run(&args(&file, None, true)).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), format!("node7:{token}\nnode8:other\n"));
        run(&args(&file, None, true)).unwrap_err();
        let output = run(&args(&file, None, false)).unwrap();
        let newer = NodeTokens::parse(&fs::read_to_string(&file).unwrap());
        assert!(newer.verify(&"node7".parse().unwrap(), output.lines().next().unwrap()).is_ok());
    }

    #[test]
    fn a_token_list_as_json_has_states_and_warnings_but_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        fs::write(&file, "node7:s3cret\nnode8:s3cret2 previous=s3cret3\nnode9:\nwithout a colon\n").unwrap();
        let listed = run(&TokenCommand::List { file: Some(file), output: Format::Json }).unwrap();
        assert!(!listed.contains("s3cret"), "{listed}");
        let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
        let nodes = serde_json::json!([
            { "node": "node7", "token": "set" },
            { "node": "node8", "token": "rotating" },
            { "node": "node9", "token": "blocked" },
        ]);
        assert_eq!((&listed["nodes"], &listed["warnings"][1]["line"]), (&nodes, &4.into()));
    }

    #[test]
    fn a_failed_token_rotation_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (file, out) = (dir.path().join("token"), dir.path().join("there"));
        fs::write(&file, "node7:old\n").unwrap();
        fs::write(&out, "mine").unwrap();
        let refused = run(&args(&file, Some(out.clone()), false)).unwrap_err();
        assert_eq!(refused.code, 73);
        assert_eq!(fs::read_to_string(&file).unwrap(), "node7:old\n");
        assert_eq!(fs::read_to_string(&out).unwrap(), "mine");
        let refused =
            run(&TokenCommand::List { file: Some(dir.path().join("none.toml")), output: Format::Json })
                .unwrap_err();
        assert!(refused.code == 78 && refused.text.contains("cannot read"), "{refused}");
    }
}
