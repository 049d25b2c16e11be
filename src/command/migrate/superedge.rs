//! A file of SuperEdge, printed in this program's schema with the comments of the reference.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{self, Read};
use std::path::Path;

use toml::{Table, Value};

use crate::command::{CommandError, CommandResult};
use crate::config::{self, Warning};
use tunnel_base::files;
use tunnel_proto::printable::printable;

/// Every key with its description.
const REFERENCE: &str = concat!(
    include_str!("../../../docs/reference/server.toml"),
    "\n",
    include_str!("../../../docs/reference/edge.toml")
);

/// What the reference says: comments by table and key, and the tables that have headers.
#[derive(Debug, Default)]
struct ReferenceComments<'r> {
    comments: BTreeMap<(&'r str, &'r str), Vec<&'r str>>,
    tables: BTreeSet<&'r str>,
}

/// Returns SuperEdge's config in this program's schema. Reads `stdin` if the file is `-`.
pub(crate) fn migrate(file: &Path, stdin: impl Read) -> CommandResult {
    let name = file.display().to_string();
    let text = if name == "-" { read(stdin) } else { std::fs::File::open(file).and_then(read) };
    let text = text.map_err(|cause| CommandError::unusable(format!("{name}: {cause}")))?;
    let (settings, remarks) = config::superedge::convert(&text)
        .whole()
        .map_err(|errors| CommandError::unusable(errors.to_string()))?;
    Ok(print(&settings, &remarks))
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

/// Returns the file with a comment above each key, after the remarks on keys with another effect.
fn print(settings: &Table, remarks: &[Warning]) -> String {
    let mut text =
        "# Printed by `tunnel migrate superedge`; docs/reference/ describes all keys.\n".to_owned();
    for remark in remarks {
        // The key is untrusted, and must not end the comment.
        _ = writeln!(text, "#   {}", printable(&remark.to_string()));
    }
    let reference = ReferenceComments::read(REFERENCE);
    for (name, value) in settings {
        if let Value::Table(table) = value {
            reference.print(table, name, &mut text);
        }
    }
    text
}

impl<'r> ReferenceComments<'r> {
    fn read(text: &'r str) -> Self {
        let mut reference = Self::default();
        let mut table = "";
        let mut above = Vec::new();
        for line in text.lines() {
            let bare = line.trim_start_matches('#').trim();
            let key = bare.split_once(" = ").map(|(key, _)| key);
            if let Some(name) = bare.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                table = name;
                reference.tables.insert(name);
                above.clear();
            } else if let Some(key) =
                key.filter(|key| key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
            {
                reference.comments.insert((table, key), std::mem::take(&mut above));
            } else if line.starts_with('#') && !bare.is_empty() {
                above.push(line);
            } else {
                above.clear();
            }
        }
        reference
    }

    /// Prints a table: its own keys first, then the tables below it that have a header of their own.
    fn print(&self, table: &Table, path: &str, text: &mut String) {
        let below = |key: &str| format!("{path}.{key}");
        let is_header = |key: &str| {
            self.tables.iter().any(|name| {
                name.strip_prefix(&below(key)).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            })
        };
        let (tables, keys): (Vec<_>, Vec<_>) =
            table.iter().partition(|(key, value)| value.is_table() && is_header(key));
        if !keys.is_empty() || tables.is_empty() {
            _ = writeln!(text, "\n[{path}]");
        }
        for (key, value) in keys {
            for line in self.comments.get(&(path, key.as_str())).into_iter().flatten() {
                _ = writeln!(text, "{line}");
            }
            let bare = key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            let key = if bare { key.clone() } else { Value::String(key.clone()).to_string() };
            _ = writeln!(text, "{key} = {value}");
        }
        for (key, value) in tables {
            if let Value::Table(table) = value {
                self.print(table, &below(key), text);
            }
        }
    }
}
