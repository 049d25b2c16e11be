//! Checks the sources: the order of modules, circles of files, the length of files and functions, limits of log lines, and
//! the hops that the architecture lists.
//!
//! A module imports only modules before it.

#![allow(clippy::expect_used)]

#[path = "layers/budget.rs"]
mod budget;
#[path = "layers/circles.rs"]
mod circles;
#[path = "layers/functions.rs"]
mod functions;
#[path = "layers/hops.rs"]
mod hops;
#[path = "layers/lines.rs"]
mod lines;
#[path = "layers/packing.rs"]
mod packing;

use std::fmt;
use std::path::{Path, PathBuf};

/// The first modules are crates, which cargo keeps in order. Here they are read like modules of one program.
const CRATES: [&str; 5] = ["proto", "base", "net", "link", "kube"];

/// The modules, each after everything that it imports. `main` and `lib` have no place in the order.
const ORDER: [&str; 26] = [
    "proto",
    "base",
    "net",
    "link",
    "kube",
    "parts",
    "config",
    "etcd",
    "intercept",
    "paths",
    "registry",
    "publish",
    "invitations",
    "enrolment",
    "route",
    "session_io",
    "acceptor",
    "admin",
    "kubernetes",
    "startup",
    "admission",
    "listener",
    "uplink",
    "edge",
    "server",
    "command",
];

/// Maximum number of lines of a file without its tests. A longer file has more than one idea.
const MAX_FILE: usize = 800;

/// First words of a generated file, which is not checked.
const GENERATED: &str = "// This file is @generated";

/// A broken rule, and where it is broken.
#[derive(Debug, PartialEq, Eq)]
struct Violation {
    file: String,
    line: usize,
    rule: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", place_on_disk(&self.file), self.line, self.rule)
    }
}

/// A word or a mark of the source, with its line.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Token {
    text: String,
    line: usize,
}

impl Token {
    /// Returns the lines on which the token is: a string literal may have several.
    fn lines(&self) -> std::ops::RangeInclusive<usize> {
        self.line..=self.line + self.text.matches('\n').count()
    }
}

/// A path from the crate's root, as segments, wherever the source names it.
#[derive(Debug, PartialEq, Eq)]
struct Import {
    path: Vec<String>,
    line: usize,
}

#[test]
fn modules_import_those_before_them_only() {
    let errors: Vec<_> =
        sources().iter().flat_map(|(file, text)| import_order_violations(file, text)).collect();
    report(&errors);
}

#[test]
fn grpc_config_and_http_statuses_are_used_in_permitted_modules_only() {
    let errors: Vec<_> = sources().iter().flat_map(|(file, text)| misplaced_uses(file, text)).collect();
    report(&errors);
}

#[test]
fn no_file_is_too_long() {
    let errors: Vec<_> = sources().iter().filter_map(|(file, text)| length_violation(file, text)).collect();
    report(&errors);
}

#[test]
fn the_protocol_crate_has_no_io_dependencies() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/proto/Cargo.toml");
    let manifest = std::fs::read_to_string(manifest).expect("the manifest is readable");
    let dependencies =
        manifest.split("\n[").find(|table| table.starts_with("dependencies]")).expect("a table");
    let tokio = dependencies.lines().find(|line| line.starts_with("tokio =")).unwrap_or_default();
    for feature in ["\"net\"", "\"rt", "\"fs\"", "\"full\""] {
        assert!(!tokio.contains(feature), "proto's tokio has {feature}");
    }
    for other in
        ["hyper", "procfs", "prometheus-client", "socket2", "tokio-util", "tunnel-base", "tunnel-net"]
    {
        let named = dependencies.lines().any(|line| line.split(' ').next() == Some(other));
        assert!(!named, "proto depends on {other}");
    }
}

#[test]
fn no_path_goes_up_more_than_one_parent() {
    let errors: Vec<_> =
        sources().iter().flat_map(|(file, text)| super_path_violations(file, text)).collect();
    report(&errors);
}

fn report(errors: &[Violation]) {
    let lines: Vec<_> = errors.iter().map(Violation::to_string).collect();
    assert!(errors.is_empty(), "{} broken:\n{}", errors.len(), lines.join("\n"));
}

/// Returns every source file by its module's path, `net/dial.rs`, wherever it is on disk.
fn sources() -> Vec<(String, String)> {
    let mut found = files_below("src");
    for name in CRATES {
        for (file, text) in files_below(&format!("crates/{name}/src")) {
            let file = if file == "lib.rs" { format!("{name}.rs") } else { format!("{name}/{file}") };
            found.push((file, text.replace("crate::", &format!("crate::{name}::"))));
        }
    }
    for (_, text) in &mut found {
        for name in CRATES {
            *text = text.replace(&format!("tunnel_{name}::"), &format!("crate::{name}::"));
        }
    }
    found.sort();
    found
}

fn files_below(dir: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir);
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = vec![root.clone()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).expect("sources are readable") {
            let path = entry.expect("sources are readable").path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(&root).expect("below the root").to_string_lossy().into_owned();
                let text = std::fs::read_to_string(&path).expect("a source is UTF-8");
                if !text.starts_with(GENERATED) {
                    found.push((name, text));
                }
            }
        }
    }
    assert!(!found.is_empty(), "no sources under {}", root.display());
    found
}

/// Returns the path of a file on disk, in a crate or in the program.
fn place_on_disk(file: &str) -> String {
    let (room, rest) = file.split_once('/').unwrap_or((file.trim_end_matches(".rs"), "lib.rs"));
    if CRATES.contains(&room) { format!("crates/{room}/src/{rest}") } else { format!("src/{file}") }
}

fn import_order_violations(file: &str, text: &str) -> Vec<Violation> {
    let home = module_of(file);
    let Some(room) = home.first() else { return Vec::new() };
    let Some(place) = place_of(room) else {
        return vec![error(file, 1, format!("module {room} has no place in the order"))];
    };
    let mut errors = Vec::new();
    for import in imports(&home, &tokens(text)) {
        let Some(other) = import.path.first().filter(|other| *other != room) else { continue };
        let rule = match place_of(other) {
            None => format!("{other} has no place in the order"),
            Some(theirs) if theirs > place => format!("{room} imports {other}, which comes after it"),
            // Commands are at the top. The server and the edge must not know each other.
            Some(_) if room == "server" && other == "edge" => "server imports edge".to_owned(),
            Some(_) => continue,
        };
        errors.push(error(file, import.line, rule));
    }
    // Several words of a group may break one rule on one line.
    errors.dedup();
    errors
}

fn misplaced_uses(file: &str, text: &str) -> Vec<Violation> {
    let home = module_of(file);
    let Some(room) = home.first() else { return Vec::new() };
    let tokens = tokens(text);
    let below = |i: usize| home.get(i).map_or("", String::as_str);
    let grpc = (room.as_str(), below(1)) == ("link", "grpc");
    // etcd is queried over gRPC as well, and the channelz port serves gRPC's own clients.
    let others = room == "etcd" || (room.as_str(), below(1)) == ("admin", "channelz");
    let wire = grpc || others || (room.as_str(), below(1)) == ("proto", "codec");
    let wiring = matches!(
        room.as_str(),
        "config"
            | "kubernetes"
            | "startup"
            | "admission"
            | "listener"
            | "uplink"
            | "server"
            | "edge"
            | "command"
    );
    // gRPC and WebSockets use HTTP, so their ends check statuses as well.
    let http = grpc
        || matches!(room.as_str(), "admission" | "listener" | "admin")
        || (room.as_str(), below(1)) == ("net", "websocket");
    let mut errors = Vec::new();
    for import in imports(&home, &tokens) {
        if !wire
            && import.path.iter().skip(1).any(|s| s == "proto")
            && import.path.last().is_some_and(|s| s != "StreamMsg")
        {
            errors.push(error(
                file,
                import.line,
                "only the codec and the gRPC ends use protobuf types".into(),
            ));
        }
        if !wiring && import.path.first().is_some_and(|s| s == "config") {
            errors.push(error(file, import.line, "only wiring reads config".into()));
        }
    }
    for (i, token) in tokens.iter().enumerate() {
        // A gRPC status contains the reason why a link has ended, so the rest of a link may read it.
        let status = matches!(room.as_str(), "proto" | "link")
            && token.text == "tonic"
            && tokens.get(i + 2).is_some_and(|t| matches!(t.text.as_str(), "Status" | "Code"));
        if !wire && !status && matches!(token.text.as_str(), "tonic" | "prost" | "tonic_prost") {
            errors.push(error(file, token.line, format!("only the gRPC ends know {}", token.text)));
        }
        if !http && token.text == "StatusCode" {
            errors.push(error(
                file,
                token.line,
                "only admission, listeners and admin know HTTP statuses".into(),
            ));
        }
    }
    errors
}

fn super_path_violations(file: &str, text: &str) -> Vec<Violation> {
    let tokens = tokens(text);
    let twice =
        tokens.windows(3).filter(|t| t[0].text == "super" && t[1].text == "::" && t[2].text == "super");
    twice
        .map(|t| error(file, t[0].line, "super::super hides the module: start with crate::".into()))
        .collect()
}

fn length_violation(file: &str, text: &str) -> Option<Violation> {
    if is_tests(file) {
        return None;
    }
    let length = without_tests(text).lines().count();
    (length > MAX_FILE)
        .then(|| error(file, length, format!("{length} lines without tests, {MAX_FILE} are allowed")))
}

/// Returns true if a file is compiled for tests only: `tests.rs` and its children, `x_tests.rs` and its children if a
/// file has several, and what tests of other files use.
fn is_tests(file: &str) -> bool {
    let stem = file.trim_end_matches(".rs");
    stem.split('/').any(|name| name == "tests" || name.ends_with("_tests"))
        || ["testing", "golden"].iter().any(|name| stem.ends_with(&format!("/{name}")))
}

/// Returns a source without its tests. Tests with a body are at the end of a file; `mod tests;` names another file and
/// cuts nothing.
fn without_tests(text: &str) -> &str {
    let (mut at, mut marked) = (0, None);
    for line in text.split_inclusive('\n') {
        match line.trim() {
            "#[cfg(test)]" => marked = Some(at),
            tests if tests.trim_start_matches("pub(crate) ").starts_with("mod ") && tests.ends_with('{') => {
                if let Some(end) = marked {
                    return &text[..end];
                }
            }
            _ => marked = None,
        }
        at += line.len();
    }
    text
}

fn error(file: &str, line: usize, rule: String) -> Violation {
    Violation { file: file.into(), line, rule }
}

fn place_of(room: &str) -> Option<usize> {
    ORDER.iter().position(|module| *module == room)
}

/// Returns the module path of a file: `net/dial.rs` is `[net, dial]`; `main.rs` and `lib.rs` are the root, `[]`.
fn module_of(file: &str) -> Vec<String> {
    let stem = file.trim_end_matches(".rs");
    if matches!(stem, "main" | "lib") { Vec::new() } else { stem.split('/').map(String::from).collect() }
}

/// Returns every path that begins with `crate` or `super`, resolved against its module.
fn imports(home: &[String], tokens: &[Token]) -> Vec<Import> {
    let at = |i: usize| tokens.get(i).map_or("", |t| t.text.as_str());
    let mut found = Vec::new();
    let mut depth = 0usize;
    // Inline modules around the current token, each with the brace depth at which it opened.
    let mut inside: Vec<(String, usize)> = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        match at(i) {
            "mod" if at(i + 2) == "{" => inside.push((at(i + 1).into(), depth + 1)),
            "{" => depth += 1,
            "}" => {
                inside.retain(|(_, opened)| *opened < depth);
                depth = depth.saturating_sub(1);
            }
            "crate" | "super" if at(i + 1) == "::" && (i == 0 || !matches!(at(i - 1), "::" | "$")) => {
                let mut base: Vec<String> = Vec::new();
                let mut next = i + 2;
                if at(i) == "super" {
                    base = home.iter().cloned().chain(inside.iter().map(|(name, _)| name.clone())).collect();
                    base.pop();
                    while at(next) == "super" && at(next + 1) == "::" {
                        base.pop();
                        next += 2;
                    }
                }
                i = branch(tokens, next, base, &mut found);
                continue;
            }
            _ => {}
        }
        i += 1;
    }
    found
}

/// Reads one branch of a path tree from `i` (`a::b`, `{a, b::{c}}`, `*`), and returns its end.
fn branch(tokens: &[Token], mut i: usize, mut path: Vec<String>, found: &mut Vec<Import>) -> usize {
    while let Some(token) = tokens.get(i) {
        if token.text == "{" {
            i += 1;
            while tokens.get(i).is_some_and(|t| t.text != "}") {
                let before = i;
                i = branch(tokens, i, path.clone(), found);
                if tokens.get(i).is_some_and(|t| t.text == "as") {
                    i += 2;
                }
                // Tokens that are not a path (a comma) are skipped, so that this always ends.
                i += usize::from(i == before);
            }
            return i + 1;
        }
        if token.text != "*" && !token.text.starts_with(is_word) {
            return i;
        }
        path.push(token.text.clone());
        if tokens.get(i + 1).is_some_and(|t| t.text == "::") {
            i += 2;
        } else {
            found.push(Import { path, line: token.line });
            return i + 1;
        }
    }
    i
}

/// Returns the words and marks of a source, without comments and string literals.
fn tokens(text: &str) -> Vec<Token> {
    tokens_and_texts(text).into_iter().filter(|token| !token.text.starts_with('"')).collect()
}

/// Returns the words, marks and string literals of a source, without comments.
fn tokens_and_texts(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let (mut found, mut line, mut i) = (Vec::new(), 1, 0);
    while i < chars.len() {
        let from = i;
        let c = at(i);
        i = match c {
            '/' if at(i + 1) == '/' => until(&chars, i, |j| at(j) == '\n'),
            '/' if at(i + 1) == '*' => end_of_block_comment(&chars, i),
            '"' => end_of_text(&chars, i),
            'r' if at(i + 1) == '"' || at(i + 1) == '#' && matches!(at(i + 2), '"' | '#') => {
                let hashes = until(&chars, i + 1, |j| at(j) != '#') - i - 1;
                let close = |j: usize| at(j) == '"' && (1..=hashes).all(|k| at(j + k) == '#');
                until(&chars, i + hashes + 2, close) + hashes + 1
            }
            '\'' if at(i + 1) == '\\' => until(&chars, i + 3, |j| at(j) == '\'') + 1,
            '\'' if at(i + 2) == '\'' => i + 3,
            ':' if at(i + 1) == ':' => i + 2,
            _ if is_word(c) => until(&chars, i, |j| !is_word(at(j))),
            _ => i + 1,
        };
        i = i.min(chars.len());
        let piece = &chars[from..i];
        let silent = c.is_whitespace() || piece.starts_with(&['/', '/']) || piece.starts_with(&['/', '*']);
        if !silent {
            found.push(Token { text: piece.iter().collect(), line });
        }
        line += piece.iter().filter(|c| **c == '\n').count();
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn until(chars: &[char], from: usize, stop: impl Fn(usize) -> bool) -> usize {
    (from..chars.len()).find(|i| stop(*i)).unwrap_or(chars.len())
}

fn end_of_text(chars: &[char], from: usize) -> usize {
    let mut i = from + 1;
    while i < chars.len() && chars[i] != '"' {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

fn end_of_block_comment(chars: &[char], from: usize) -> usize {
    let (mut depth, mut i) = (0usize, from);
    while i < chars.len() {
        match (chars[i], chars.get(i + 1)) {
            ('/', Some('*')) => (depth, i) = (depth + 1, i + 2),
            ('*', Some('/')) => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            break;
        }
    }
    i
}

// Tests of the checks, on made-up sources that break the rules.

fn lines_of(errors: &[Violation]) -> Vec<(usize, &str)> {
    errors.iter().map(|f| (f.line, f.rule.as_str())).collect()
}

#[test]
fn an_import_that_goes_up_is_found_with_its_line() {
    let errors = import_order_violations(
        "net/dial.rs",
        "//! Dials.\n\nuse crate::proto::names::Target;\nuse crate::route::Route;\n",
    );
    assert_eq!(lines_of(&errors), [(4, "net imports route, which comes after it")]);
    assert_eq!(errors[0].to_string(), "crates/net/src/dial.rs:4: net imports route, which comes after it");
}

#[test]
fn a_server_that_imports_the_edge_is_found() {
    let errors = import_order_violations("server.rs", "use crate::edge::Edge;");
    assert_eq!(lines_of(&errors), [(1, "server imports edge")]);
}

#[test]
fn nested_import_groups_are_expanded() {
    assert_eq!(
        import_order_violations("server.rs", "use crate::{proto::names as n, net::{tls as t, dial}};"),
        []
    );
    let text = "use crate::{\n  proto::names::{NodeName, Target},\n  net::{\n    tls as t,\n  },\n  admin::{self, Page},\n};";
    let errors = import_order_violations("link/link.rs", text);
    assert_eq!(lines_of(&errors), [(6, "link imports admin, which comes after it")]);
}

#[test]
fn a_path_in_the_middle_of_code_is_an_import_too() {
    let errors = import_order_violations("base/policy.rs", "fn f() -> u8 { 1 + crate::net::dial::PATIENCE }");
    assert_eq!(lines_of(&errors), [(1, "base imports net, which comes after it")]);
}

#[test]
fn super_is_resolved_from_inline_modules_and_files() {
    let text = "use super::frame;\nuse super::super::route::X;\nmod tests {\n use super::super::codec;\n use super::super::super::edge::Y;\n}\nuse super::super::server;";
    let errors = import_order_violations("link/link.rs", text);
    assert_eq!(
        lines_of(&errors),
        [
            (2, "link imports route, which comes after it"),
            (5, "link imports edge, which comes after it"),
            (7, "link imports server, which comes after it")
        ]
    );
}

#[test]
fn paths_in_comments_strings_and_visibility_are_not_imports() {
    let text = "// crate::edge\n/* crate::edge /* crate::edge */ */\npub(crate) fn f<'a>(x: &'a str) -> char {\n  \
                g(\"\\\"crate::edge\", r#\"\"crate::edge\"#, '\"', '\\'');\n  '\"'\n}\n";
    assert_eq!(import_order_violations("base/policy.rs", text), []);
    assert_eq!(
        lines_of(&import_order_violations("base/policy.rs", &format!("{text}use crate::edge;"))).len(),
        1
    );
}

#[test]
fn earlier_modules_and_the_module_itself_may_be_imported() {
    let text = "use crate::link::table;\nuse crate::net::ChunkStream;\nuse crate::proto::names::Target;";
    assert_eq!(import_order_violations("link/link.rs", text), []);
    assert_eq!(import_order_violations("main.rs", "use crate::anything;"), []);
}

#[test]
fn a_module_missing_from_the_order_is_found() {
    let errors = import_order_violations("helpers.rs", "");
    assert_eq!(lines_of(&errors), [(1, "module helpers has no place in the order")]);
    let errors = import_order_violations("net.rs", "use crate::helpers::x;");
    assert_eq!(lines_of(&errors), [(1, "helpers has no place in the order")]);
}

#[test]
fn grpc_is_used_by_the_codec_and_the_grpc_ends_only() {
    let text = "use tonic::client::Grpc;\nuse prost::Message;\nuse crate::proto::codec::proto::Control;";
    for file in ["proto/codec.rs", "proto/codec/tests.rs", "link/grpc.rs", "link/grpc/accept.rs"] {
        assert_eq!(misplaced_uses(file, text), [], "{file}");
    }
    assert_eq!(misplaced_uses("link/link.rs", text).len(), 3);
    assert_eq!(misplaced_uses("registry.rs", text).len(), 3);
}

#[test]
fn a_grpc_status_may_be_read_by_a_link_and_nowhere_else() {
    let text = "fn f(code: tonic::Code) { tonic::Status::ok() }\nuse tonic::{Status, client::Grpc};";
    assert_eq!(lines_of(&misplaced_uses("link/link.rs", text)), [(2, "only the gRPC ends know tonic")]);
    assert_eq!(misplaced_uses("edge.rs", text).len(), 3);
}

#[test]
fn config_is_read_by_wiring_modules_only() {
    let text = "use crate::config::server::Cloud;";
    for file in ["server.rs", "edge/reconnect.rs", "command/demo.rs", "main.rs", "config/edge.rs"] {
        assert_eq!(misplaced_uses(file, text), [], "{file}");
    }
    assert_eq!(lines_of(&misplaced_uses("route.rs", text)), [(1, "only wiring reads config")]);
}

#[test]
fn http_statuses_are_used_by_listeners_and_admin_only() {
    let text = "\nuse http::StatusCode;";
    for file in ["admission.rs", "listener.rs", "listener/connect.rs", "admin.rs", "link/grpc.rs"] {
        assert_eq!(misplaced_uses(file, text), [], "{file}");
    }
    assert_eq!(
        lines_of(&misplaced_uses("route.rs", text)),
        [(2, "only admission, listeners and admin know HTTP statuses")]
    );
}

#[test]
fn a_file_that_is_too_long_is_found_without_counting_its_tests() {
    let body = "let x = 1;\n".repeat(MAX_FILE);
    assert_eq!(length_violation("net.rs", &body), None);
    assert!(length_violation("net.rs", &format!("{body}\n")).is_some());
    assert_eq!(length_violation("net.rs", &format!("{body}#[cfg(test)]\nmod tests {{\n{body}}}\n")), None);
    assert!(length_violation("net.rs", &format!("#[cfg(test)]\nmod tests;\n{body}")).is_some());
    assert_eq!(length_violation("net/tests.rs", &body.repeat(3)), None);
}

#[test]
fn a_path_through_two_parents_is_found() {
    let text =
        "use super::frame;\nuse super::super::route::X;\n// super::super\nfn f() { super::super::g() }";
    assert_eq!(super_path_violations("net/dial.rs", text).iter().map(|f| f.line).collect::<Vec<_>>(), [2, 4]);
}
