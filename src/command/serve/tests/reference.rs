//! The reference of settings is generated from the structs that are the tables: their doc comments, defaults and
//! limits.
//!
//! A table is a struct with serde's `default`, and its documentation begins with the table's name. The documentation of
//! a field may end with `Example:` or `Required:` and a value to show, for a key without a default.
//! `UPDATE_REFERENCE=1` rewrites the files. The schemas of `schema` are made of the same tables.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

use syn::{Attribute, Fields, GenericArgument, Item, PathArguments, Type};
use toml::Value;

use crate::command::reference_tests::doc_comments::{doc_comment, items, words_of};
use crate::config::ConfigError;

use super::*;

/// The value to show for a key that has no default.
#[derive(Clone)]
pub(super) enum Example {
    Optional(String),
    Required(String),
}

/// A struct that is one or several tables.
struct Struct {
    tables: Vec<String>,
    about: String,
    fields: Vec<Field>,
}

struct Field {
    key: String,
    about: String,
    example: Option<Example>,
    kind: Type,
}

/// A table of the reference.
pub(super) struct TableReference {
    pub(super) name: String,
    about: String,
    /// Whether a config without the table lacks what it sets.
    is_optional: bool,
    /// Whether it has the access rules of `[server.connect]`, too.
    pub(super) inherits: bool,
    pub(super) keys: Vec<Key>,
}

pub(super) struct Key {
    pub(super) name: String,
    pub(super) about: String,
    /// The values that are allowed.
    pub(super) allowed: String,
    example: Option<Example>,
    pub(super) default: Option<Value>,
}

/// Returns the documentation of an item: its text, and the example.
fn documentation(attributes: &[Attribute]) -> (String, Option<Example>) {
    let text = doc_comment(attributes);
    let (about, example) = text.split_once("\n\n").unwrap_or((text.as_str(), ""));
    let value = |mark| Some(example.strip_prefix(mark)?.trim().trim_matches('`').to_owned());
    let required = value("Required: ").map(Example::Required);
    let example = required.or_else(|| value("Example: ").map(Example::Optional));
    (about.replace('\n', " ").replace('`', ""), example)
}

/// Returns the structs that are tables.
fn structs() -> Vec<Struct> {
    let tables = items().into_iter().filter_map(|item| {
        let Item::Struct(item) = item else { return None };
        if words_of(&item.attrs, "serde") != "default" {
            return None;
        }
        let (text, _) = documentation(&item.attrs);
        let (names, about) = text.split_once(": ")?;
        let names = names.split(" and ").map(|name| name.strip_prefix('[')?.strip_suffix(']'));
        let tables = names.map(|name| name.map(str::to_owned)).collect::<Option<Vec<_>>>()?;
        Some(Struct { tables, about: about.to_owned(), fields: fields(item.fields) })
    });
    tables.collect()
}

/// Returns the fields of a struct that are keys.
fn fields(fields: Fields) -> Vec<Field> {
    let fields = fields.into_iter().filter(|field| words_of(&field.attrs, "serde") != "skip").map(|field| {
        let (about, example) = documentation(&field.attrs);
        Field { key: field.ident.unwrap().to_string(), about, example, kind: field.ty }
    });
    fields.collect()
}

/// Returns the keys of `client.toml`, which has no tables.
pub(super) fn client() -> TableReference {
    let file = items().into_iter().find_map(|item| match item {
        Item::Struct(item) if item.ident == "ClientConfigFile" => Some(item),
        _ => None,
    });
    let file = file.unwrap();
    let key = |Field { key, about, example, kind }| {
        let allowed = match &*names(&kind).join(" ") {
            "Option Vec String" => "a list of texts",
            "Option PathBuf" => "a file name",
            "BTreeMap String FilePath" => "a table of file names",
            "Option Duration" => "a duration from 1s to 24h",
            "Option String" | "Option SecretString" => "a text",
            other => panic!("{key}: {other}"),
        };
        Key { name: key, about, allowed: allowed.to_owned(), example, default: None }
    };
    let (about, _) = documentation(&file.attrs);
    TableReference {
        name: CLIENT.to_owned(),
        about: about.split_once(": ").unwrap().1.to_owned(),
        is_optional: false,
        inherits: false,
        keys: fields(file.fields).into_iter().map(key).collect(),
    }
}

/// Returns the names in a type, from the outside.
fn names(kind: &Type) -> Vec<String> {
    let Type::Path(path) = kind else { return Vec::new() };
    let last = path.path.segments.last().unwrap();
    let mut found = vec![last.ident.to_string()];
    if let PathArguments::AngleBracketed(parts) = &last.arguments {
        for part in &parts.args {
            if let GenericArgument::Type(part) = part {
                found.extend(names(part));
            }
        }
    }
    found
}

/// Returns the errors and the tables in effect of a text.
fn parse(text: &str, role: &str) -> (Vec<ConfigError>, BTreeMap<String, toml::Table>) {
    let env = Environment::default();
    if role == "server" {
        let parsed = ServerConfig::examine(text, &env);
        (parsed.errors, parsed.effective)
    } else {
        let parsed = EdgeConfig::examine(text, &env);
        (parsed.errors, parsed.effective)
    }
}

/// A place for a value in a config: a key of a table, or a part of its value.
pub(super) struct Place {
    table: String,
    /// The text between the table's header and the value, and after the value.
    around: (String, String),
    /// The full key.
    key: String,
}

impl Place {
    /// Returns the place of a key's value.
    pub(super) fn of(table: &str, key: &str) -> Self {
        let around = (format!("{key} = "), String::new());
        Self { table: table.to_owned(), around, key: format!("{table}.{key}") }
    }

    /// Returns the full key.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    fn within(&self, before: &str, after: &str, key: &str) -> Self {
        let around = (self.around.0.clone() + before, after.to_owned() + &self.around.1);
        Self { table: self.table.clone(), around, key: self.key.clone() + key }
    }

    /// Returns the place of the first item of a list.
    pub(super) fn item(&self) -> Self {
        self.within("[", "]", "[0]")
    }

    /// Returns the place of a key of an inline table.
    pub(super) fn field(&self, name: &str) -> Self {
        self.within(&format!("{{ {name} = "), " }", &format!(".{name}"))
    }

    /// Like [`Self::field`], but for a name that the user chooses.
    pub(super) fn named(&self, name: &str) -> Self {
        self.within(&format!("{{ \"{name}\" = "), " }", &format!(".\"{name}\""))
    }

    /// Returns the errors about this value, or parts of it.
    fn errors(&self, value: &str) -> Vec<ConfigError> {
        let Self { table, around: (before, after), key } = self;
        let role = table.split('.').next().unwrap();
        let (mut errors, _) = parse(&format!("[{table}]\n{before}{value}{after}\n"), role);
        let is_here = |rest: &str| rest.is_empty() || rest.starts_with(['.', '[']);
        errors.retain(|error| error.key.strip_prefix(key.as_str()).is_some_and(is_here));
        errors
    }

    /// Returns true if the value has no error.
    pub(super) fn accepts(&self, value: &str) -> bool {
        self.errors(value).is_empty()
    }

    /// Returns the keys of an inline table; none if the user chooses them.
    pub(super) fn known_keys(&self) -> Vec<String> {
        let unknown = self.field("zzzzzzzzzzzzzzzzzzzzzzzz");
        let errors = unknown.errors("1");
        let known = errors.iter().find_map(|error| error.text.strip_prefix("unknown key: known here are "));
        assert!(known.is_none_or(|known| !known.contains("others")), "{}: {known:?}", self.key);
        known.map(|known| known.split(", ").map(str::to_owned).collect()).unwrap_or_default()
    }

    /// Returns what the error of a wrong value says about the values that are allowed.
    fn hint(&self, value: &str) -> Option<String> {
        let names = [self.key.clone(), format!("{}[0]", self.key)];
        let error = self.errors(value).into_iter().find(|error| names.contains(&error.key))?;
        let (_, hint) = error.text.split_once("expected ")?;
        Some(hint.split(", for example").next()?.to_owned())
    }

    /// Returns what the errors of wrong values say about the values that are allowed.
    pub(super) fn allowed(&self) -> String {
        match self.hint("\"876000h\"") {
            None => self.hint("\"\\u0000\"").unwrap_or_else(|| "a text".to_owned()),
            Some(list) if list.starts_with("a list") => match self.hint("[\"876000h\"]") {
                None => "a list of texts".to_owned(),
                Some(item) => format!("a list; each item is {item}"),
            },
            Some(size) if size.contains("KiB") => format!("a size of {}", self.hint("\"0B\"").unwrap()),
            Some(hint) => hint,
        }
    }
}

/// Returns the tables of a role. Several structs may be parts of one table: the one that fewest tables share describes
/// it, and has its first keys.
pub(super) fn tables(role: &str) -> Vec<TableReference> {
    let (_, always) = parse("", role);
    let mut tables: Vec<TableReference> = Vec::new();
    let mut structs = structs();
    structs.sort_by_key(|part| Reverse(part.tables.len()));
    for Struct { tables: names, about, fields } in structs {
        for name in names.into_iter().filter(|name| name.split('.').next() == Some(role)) {
            let present = parse(&format!("[{name}]\n"), role).1;
            let defaults = present.get(&name).unwrap_or_else(|| panic!("[{name}] is not recorded"));
            let key = |field: &Field| Key {
                name: field.key.clone(),
                about: field.about.clone(),
                allowed: Place::of(&name, &field.key).allowed(),
                example: field.example.clone(),
                default: defaults.get(&field.key).cloned(),
            };
            let mut keys: Vec<_> = fields.iter().map(key).collect();
            // The example is a server with one port for clients.
            let is_optional = !always.contains_key(&name) && name != "server.connect";
            match tables.iter_mut().find(|table| table.name == name) {
                Some(table) => {
                    table.inherits &= !keys.iter().any(|key| key.name == "rules");
                    keys.append(&mut table.keys);
                    (table.keys, table.about) = (keys, about.clone());
                }
                None => {
                    let inherits =
                        defaults.contains_key("rules") && !keys.iter().any(|key| key.name == "rules");
                    tables.push(TableReference { about: about.clone(), is_optional, inherits, keys, name });
                }
            }
        }
    }
    tables
}

fn is_empty(value: &Value) -> bool {
    value.as_str() == Some("") || value.as_array().is_some_and(Vec::is_empty)
}

impl Key {
    /// Returns the description with the default, and with limits if they are not in the description.
    pub(super) fn description(&self) -> String {
        let mut text = self.about.clone();
        let is_limit = ["a duration", "a size", "a whole number", "true or false"];
        if is_limit.iter().any(|kind| self.allowed.starts_with(kind)) {
            let end = text.find(". ").or_else(|| text.strip_suffix('.').map(str::len)).unwrap();
            text.insert_str(end, &format!(" ({})", self.allowed));
        }
        match self.default() {
            Some(default) => format!("{text} Default: {default}."),
            None => text,
        }
    }

    /// Returns the default as a text, unless the description contains it.
    pub(super) fn default(&self) -> Option<String> {
        let is_described =
            ["Default: ", "No default", "Required."].iter().any(|part| self.about.contains(part));
        let default = self.default.as_ref().filter(|value| !is_empty(value));
        (!is_described).then(|| default.map_or("none".to_owned(), Value::to_string))
    }

    /// Returns a value of the key: its example, otherwise its default.
    pub(super) fn sample(&self) -> Value {
        match (&self.example, &self.default) {
            (Some(Example::Required(value) | Example::Optional(value)), _) => {
                toml::from_str::<toml::Table>(&format!("sample = {value}")).unwrap()["sample"].clone()
            }
            (None, Some(default)) => default.clone(),
            (None, None) => panic!("{} has no default: its documentation needs an example", self.name),
        }
    }

    /// Returns the line that sets the key, commented out if it shows an example of an optional key.
    fn line(&self) -> String {
        let Self { name, example, default, .. } = self;
        match (example, default) {
            (Some(Example::Required(value)), _) => format!("{name} = {value}"),
            (Some(Example::Optional(value)), _) => format!("# {name} = {value}"),
            (None, Some(default)) => format!("{name} = {default}"),
            (None, None) => panic!("{name} has no default: its documentation needs an example"),
        }
    }
}

/// Breaks a text into lines that begin with `start`. No line begins with `key = `, which would look like one.
fn wrapped(start: &str, text: &str) -> String {
    let words: Vec<&str> = text.split(' ').collect();
    let is_glued = |i: usize| words.get(i) == Some(&"=") || i > 0 && words.get(i - 1) == Some(&"=");
    let (mut lines, mut line) = (String::new(), start.to_owned());
    for (i, word) in words.iter().enumerate() {
        let chunk = words[i..]
            .iter()
            .enumerate()
            .take_while(|(n, _)| *n == 0 || is_glued(i + n) || is_glued(i + n + 1));
        let length: usize = chunk.map(|(_, word)| word.chars().count() + 1).sum();
        if !is_glued(i) && !is_glued(i + 1) && line.chars().count() + length > 121 {
            lines += &format!("{}\n", line.trim_end());
            line = start.to_owned();
        }
        line += &format!("{word} ");
    }
    lines + line.trim_end() + "\n"
}

/// Returns a text as lines of comments.
fn comment(text: &str) -> String {
    wrapped("# ", text)
}

/// The name of the file of users.
const CLIENT: &str = "client.toml";

/// The description of the keys that a listener's table shares with `[server.connect]`.
pub(super) const INHERITED: &str =
    "allow_from, auth, proxy_protocol, rules, users: as in [server.connect], which has the defaults.";

impl TableReference {
    /// Returns the description.
    pub(super) fn about(&self) -> String {
        let mut about = self.about.clone();
        about[..1].make_ascii_uppercase();
        about
    }

    /// Returns the heading in the reference.
    fn title(&self) -> String {
        if self.name == CLIENT { self.name.clone() } else { format!("[{}]", self.name) }
    }

    /// Returns the heading of a key in the reference.
    fn title_of(&self, key: &Key) -> String {
        let between = if self.name == CLIENT { ": " } else { "." };
        format!("{}{between}{}", self.name, key.name)
    }

    /// Returns the start of each line in an example file that is not a comment.
    fn mark(&self) -> &'static str {
        if self.is_optional { "# " } else { "" }
    }

    /// Returns the line in an example file that begins the table.
    fn header(&self) -> String {
        format!("{}[{}]\n", self.mark(), self.name)
    }
}

/// Returns a table as part of an example file.
fn example(table: &TableReference) -> String {
    let keys = table.keys.iter().map(|key| {
        let line = key.line();
        let line = if line.starts_with("# ") { line } else { table.mark().to_owned() + &line };
        comment(&key.description()) + &line + "\n"
    });
    let inherited = if table.inherits { comment(INHERITED) } else { String::new() };
    comment(&table.about()) + &table.header() + &keys.collect::<String>() + &inherited
}

/// Replaces the generated tables in an example file. Tables are separated by empty lines.
fn updated(file: &str, role: &str) -> String {
    let mut tables = tables(role);
    let mut blocks = Vec::new();
    for block in file.trim_end().split("\n\n") {
        let header =
            block.lines().find_map(|line| line.trim_start_matches("# ").strip_prefix('[')?.strip_suffix(']'));
        match tables.iter().position(|table| Some(table.name.as_str()) == header) {
            Some(i) => blocks.push(example(&tables.remove(i)).trim_end().to_owned()),
            None => blocks.push(block.to_owned()),
        }
    }
    blocks.extend(tables.iter().map(|table| example(table).trim_end().to_owned()));
    blocks.join("\n\n") + "\n"
}

/// Returns the anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let is_kept = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    heading.chars().filter(is_kept).collect()
}

/// Returns the reference of all tables as a document, in the order of the example files.
fn document(server: &str, edge: &str) -> String {
    let tables = [("server", server), ("edge", edge)].into_iter().flat_map(|(role, file)| {
        let mut tables = tables(role);
        tables.sort_by_key(|table| file.find(&format!("\n{}", table.header())));
        tables
    });
    let escape = |text: &str| text.replace('*', "\\*");
    let (mut contents, mut body) = (String::new(), String::new());
    for table in tables.chain([client()]) {
        let (title, about) = (table.title(), escape(&table.about()));
        let purpose = about.split_once(". ").map_or(about.trim_end_matches('.'), |(first, _)| first);
        let shown = if table.name == CLIENT { title.clone() } else { format!("\\[{}\\]", table.name) };
        contents += &format!("| [{shown}](#{}) | {purpose} |\n", anchor(&title));
        body += &format!("\n## {title}\n\n{}", wrapped("", &about));
        for key in &table.keys {
            let default = match key.default() {
                Some(default) if default == "none" => " Default: none.".to_owned(),
                Some(default) => format!(" Default: `{default}`."),
                None => String::new(),
            };
            let value = wrapped("", &format!("Value: {}.{default}", escape(&key.allowed)));
            body +=
                &format!("\n### {}\n\n{value}\n{}", table.title_of(key), wrapped("", &escape(&key.about)));
        }
        if table.inherits {
            body += &format!("\n{}", wrapped("", INHERITED));
        }
    }
    let start = wrapped(
        "",
        "This page lists the tables of the config files of servers and edges with all keys, and the keys of users' \
         client.toml. It is generated from the sources. The examples [for servers](server.toml) and [for edges](edge.toml) \
         contain the same texts. Editors check files by [JSON Schemas](docs/how-to/on-a-machine.md#check-and-complete-in-an-editor).",
    );
    let start = start.replace("](docs/", "](../");
    format!("# Reference of settings\n\n{start}\n| table | purpose |\n| --- | --- |\n{contents}{body}")
}

#[test]
fn the_config_reference_matches_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap_or_default();
    let (server, edge) = ("docs/reference/server.toml", "docs/reference/edge.toml");
    let examples = (updated(&read(server), "server"), updated(&read(edge), "edge"));
    let document = document(&examples.0, &examples.1);
    for (file, expected) in [(server, examples.0), (edge, examples.1), ("docs/reference/config.md", document)]
    {
        if std::env::var_os("UPDATE_REFERENCE").is_some() {
            std::fs::write(root.join(file), &expected).unwrap();
        }
        assert!(read(file) == expected, "{file} is old; run this test with UPDATE_REFERENCE=1");
    }
}

#[test]
fn effective_tables_contain_defaults_and_values_but_no_secrets() {
    let text = "[edge.uplink]\ntoken = \"sw0rdfish\"\nservers = [\"cloud:9000\"]\n";
    let effective = EdgeConfig::examine(text, &node1()).effective;
    let uplink = &effective["edge.uplink"];
    let value = |key: &str| uplink[key].to_string();
    assert_eq!((value("node"), value("token")), ("\"node1\"".to_owned(), "\"***\"".to_owned()));
    assert_eq!(
        (value("servers"), value("admin_listen")),
        ("[\"cloud:9000\"]".to_owned(), "\"127.0.0.1:9010\"".to_owned())
    );
    let effective = ServerConfig::examine("[server.session]\nmax_sessions = 7\n", &node1()).effective;
    assert_eq!(effective["server.session"]["max_per_client"].as_integer(), Some(2));
    assert!(
        !effective.contains_key("server.node_names"),
        "an absent table that enables something has no effect"
    );
    let text = "[server.addresses]\nnodes = { \"10.0.0.7\" = \"node1\" }\n[server.node_names]\n";
    let effective = ServerConfig::examine(text, &node1()).effective;
    assert_eq!(effective["server.addresses"]["nodes"]["10.0.0.7/32"].as_str(), Some("node1"));
    assert_eq!(effective["server.node_names"]["edges"].as_str(), Some("openyurt.io/is-edge-worker=true"));
}

#[test]
fn comments_in_the_reference_are_wrapped_and_do_not_look_like_keys() {
    let text = comment(&format!(
        "{} if enabled = true in [edge.csr], otherwise not.",
        "word ".repeat(21).trim_end()
    ));
    assert!(text.lines().all(|line| line.starts_with("# ") && line.chars().count() <= 130), "{text}");
    assert!(!text.lines().any(|line| line.starts_with("# enabled = ")), "{text}");
}
