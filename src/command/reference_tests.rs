//! The reference of commands is generated from the definition of the command line. `UPDATE_REFERENCE=1` rewrites it.

pub(super) mod doc_comments;
mod json;

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command};

use super::*;

/// Returns a text as the cell of a table, on one line.
fn cell(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.replace('|', "\\|").replace('<', "\\<").replace('*', "\\*")
}

/// Returns how an argument is written: its flags and its value, or its place.
fn written(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let value = names.iter().map(|name| format!("<{name}>")).collect::<Vec<_>>().join(" ");
    let flags = [arg.get_short().map(|c| format!("-{c}")), arg.get_long().map(|name| format!("--{name}"))];
    let flags = flags.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    match (flags.as_str(), takes_value) {
        ("", _) => value,
        (flags, true) => format!("{flags} {value}"),
        (flags, false) => flags.to_owned(),
    }
}

/// Returns the row of an argument.
fn row(arg: &Arg) -> String {
    let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut text = cell(&help);
    let list = |words: Vec<String>| words.join(", ");
    let values = arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    let values = if arg.get_action().takes_values() { list(values) } else { String::new() };
    if !values.is_empty() {
        let _ = write!(text, ". Values: {values}");
    }
    let defaults = arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy()));
    let default = if arg.get_action().takes_values() { list(defaults.collect()) } else { String::new() };
    if !default.is_empty() {
        let _ = write!(text, ". Default: {default}");
    }
    format!("| `{}` | {text} |\n", written(arg))
}

/// Returns the section of a command and those of the commands below it.
fn section(command: &mut Command, path: &str) -> String {
    let about = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string);
    let about = about.unwrap_or_default().replace('<', "\\<");
    let mut text = format!("\n## {path}\n\n{about}\n");
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let _ = write!(text, "\n```sh\n{usage}\n```\n");
    let shown = |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
    let rows: String = command.get_arguments().filter(shown).map(row).collect();
    if !rows.is_empty() {
        let _ = write!(text, "\n| argument | meaning |\n| --- | --- |\n{rows}");
    }
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let examples = help.split("Examples:\n").nth(1).unwrap_or_default();
    let examples: String = examples.lines().take(2).map(|line| line.trim().to_owned() + "\n").collect();
    let _ = write!(text, "\nExamples:\n\n```sh\n{examples}```\n");
    let below =
        command.get_subcommands_mut().filter(|below| !below.is_hide_set() && below.get_name() != "help");
    below.fold(text, |text, below| {
        let path = format!("{path} {}", below.get_name());
        text + &section(below, &path)
    })
}

#[test]
fn the_commands_reference_matches_the_help() {
    let mut command = Args::command();
    command.build();
    let start = "# Commands\n\nThis page is generated from the program's help. `tunnel help COMMAND` prints the same. All commands have \
                 the\nsame [exit codes](exit-codes";
    let expected = format!("{start}.md).\n") + &section(&mut command, NAME);
    check_page("docs/reference/commands.md", &expected);
}

/// Compares a generated page with the file, or writes it if `UPDATE_REFERENCE` is set.
fn check_page(page: &str, expected: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&file, expected).unwrap();
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(found == expected, "{page} is old; run this test with UPDATE_REFERENCE=1");
}
