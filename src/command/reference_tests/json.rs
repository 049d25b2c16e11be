//! The reference of JSON output is generated from the structs that commands print, and their doc comments.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Field, Fields, GenericArgument, ItemEnum, ItemStruct, PathArguments, Type};

use crate::command::reference_tests::doc_comments::{doc_comment, items, words_of};

use super::*;

/// The commands with `-o json`, and what each prints: a struct, a list of structs in brackets, or a text.
const OUTPUTS: [(&str, &str); 11] = [
    (
        "config check",
        "one [line of the log](docs/reference/log-fields.md#json) for each error and warning, on stderr; the last one has `errors`, their number",
    ),
    ("config show", "the [tables and keys](docs/reference/config.md) of the file with the values in effect"),
    ("doctor", "[Finding]"),
    ("grants", "[Grant]"),
    ("invitations list", "[ListedEnrolment]"),
    ("invite", "InvitationResponse"),
    ("nodes", "NodesResponse"),
    ("sessions", "SessionList"),
    ("status", "StatusResponse"),
    ("token list", "TokenList"),
    ("whoami", "WhoamiResponse"),
];

/// The structs and enums of the program that can be printed as JSON, by name.
struct Printed {
    structs: BTreeMap<String, ItemStruct>,
    enums: BTreeMap<String, ItemEnum>,
}

impl Printed {
    fn read() -> Self {
        let mut structs = BTreeMap::new();
        let mut enums = BTreeMap::new();
        for item in items() {
            match item {
                syn::Item::Struct(item) if words_of(&item.attrs, "derive").contains("Serialize") => {
                    structs.insert(item.ident.to_string(), item);
                }
                syn::Item::Enum(item) if words_of(&item.attrs, "derive").contains("Serialize") => {
                    enums.insert(item.ident.to_string(), item);
                }
                _ => {}
            }
        }
        Self { structs, enums }
    }

    /// Returns a type as people call it. Adds the structs in it to `found`, in their order.
    fn name(&self, of: &Type, found: &mut Vec<String>) -> String {
        let path = match of {
            Type::Path(path) => path.path.segments.last().unwrap(),
            Type::Reference(to) => return self.name(&to.elem, found),
            _ => panic!("a field has a type without a name"),
        };
        let parts = match &path.arguments {
            PathArguments::AngleBracketed(parts) => parts.args.iter().collect::<Vec<_>>(),
            _ => Vec::new(),
        };
        let part = |found: &mut Vec<String>| match parts.last() {
            Some(GenericArgument::Type(part)) => self.name(part, found),
            _ => panic!("{} has no type", path.ident),
        };
        match path.ident.to_string().as_str() {
            "String" | "str" | "UserName" | "NodeGlob" => "text".to_owned(),
            "bool" => "`true` or `false`".to_owned(),
            "usize" | "u16" | "u32" | "u64" | "i64" | "f64" | "ConfigPort" => "number".to_owned(),
            "Option" => part(found),
            "Vec" | "BTreeSet" => format!("list of {}", part(found)),
            "BTreeMap" => format!("object: a {} for each key", part(found)),
            name => match self.enums.get(name) {
                Some(item) => {
                    let words = item.variants.iter().map(|word| format!("`{}`", word.ident).to_lowercase());
                    words.collect::<Vec<_>>().join(", ")
                }
                None => {
                    found.push(name.to_owned());
                    link(name)
                }
            },
        }
    }

    /// Returns the row of a field.
    fn row(&self, field: &Field, found: &mut Vec<String>) -> String {
        let name = field.ident.as_ref().unwrap();
        let text = doc_comment(&field.attrs).replace("\n\n- ", " ").replace("\n- ", ". ");
        let text = text.trim_end_matches('.');
        let is_optional = words_of(&field.attrs, "serde").contains("skip_serializing_if");
        let kind = self.name(&field.ty, found) + if is_optional { ", optional" } else { "" };
        format!("| `{name}` | {kind} | {}. |\n", cell(text))
    }

    /// Returns the section of a struct. Adds the structs in it to `found`.
    fn section(&self, name: &str, found: &mut Vec<String>) -> String {
        let item = self.structs.get(name).unwrap_or_else(|| panic!("{name} is no struct with Serialize"));
        let Fields::Named(fields) = &item.fields else { panic!("{name} has no named fields") };
        let rows: String = fields.named.iter().map(|field| self.row(field, found)).collect();
        let about = doc_comment(&item.attrs);
        format!("\n## {name}\n\n{about}\n\n| field | value | meaning |\n| --- | --- | --- |\n{rows}")
    }
}

fn link(name: &str) -> String {
    format!("[{name}](#{})", name.to_lowercase())
}

/// Returns the paths of the commands that print JSON on request.
fn commands_with_json(command: &Command, path: &str) -> BTreeSet<String> {
    let formats = command.get_arguments().filter(|arg| arg.get_id() == "output");
    let has_json = formats.flat_map(Arg::get_possible_values).any(|value| value.get_name() == "json");
    let own = has_json.then(|| path.trim().to_owned());
    let below = command.get_subcommands();
    own.into_iter()
        .chain(below.flat_map(|below| commands_with_json(below, &format!("{path} {}", below.get_name()))))
        .collect()
}

#[test]
fn the_json_reference_matches_what_commands_print() {
    let printed = Printed::read();
    let mut text = "# JSON output\n\nThis page is generated from the sources. Scripts may rely on it: a later version adds \
                    fields, and [CHANGELOG](CHANGELOG.md)\nnames each field that it removes or renames. So ignore fields \
                    that you do not know. An optional field is absent if there is\nno value. Errors of a command are text on \
                    stderr, with an [exit code](docs/reference/exit-codes.md). [Logs](docs/reference/log-fields.md#json) are \
                    JSON\nwith `--log-format json`.\n\n| command with `-o json` | output |\n| --- | --- |\n"
        .to_owned();
    let mut structs = Vec::new();
    for (command, output) in OUTPUTS {
        let of_list = output.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let output = match of_list.unwrap_or(output) {
            name if name.contains(' ') => name.to_owned(),
            name => {
                structs.push(name.to_owned());
                if of_list.is_some() { format!("a list of {}", link(name)) } else { link(name) }
            }
        };
        let _ = writeln!(text, "| `tunnel {command}` | {output} |");
    }
    structs.push("ConfigPlan".to_owned());
    for (command, output) in [
        ("nodes --down", format!("the list `down` of {}", link("NodesResponse"))),
        ("config check --diff", format!("also a {} on stdout", link("ConfigPlan"))),
    ] {
        let _ = writeln!(text, "| `tunnel {command}` | {output} |");
    }
    let mut at = 0;
    while let Some(name) = structs.get(at).cloned() {
        at += 1;
        if structs[..at - 1].contains(&name) {
            continue;
        }
        text += &printed.section(&name, &mut structs);
    }
    let relative = text.replace("](docs/reference/", "](").replace("](CHANGELOG", "](../../CHANGELOG");
    check_page("docs/reference/json.md", &relative);
}

#[test]
fn each_command_with_json_output_is_in_its_reference() {
    let mut command = Args::command();
    command.build();
    let listed: BTreeSet<String> = OUTPUTS.iter().map(|(command, _)| (*command).to_owned()).collect();
    assert_eq!(commands_with_json(&command, ""), listed);
}
