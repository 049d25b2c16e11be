//! What the architecture lists exists: each file, and each hop of a CONNECT in the file of its row.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{place_on_disk, sources, tokens, without_tests};

#[test]
fn each_hop_of_a_connect_is_a_function_of_its_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md");
    let document = std::fs::read_to_string(path).expect("the document is readable");
    let errors = hop_errors(&document, &sources().into_iter().collect());
    assert!(errors.is_empty(), "docs/architecture.md: {} broken:\n{}", errors.len(), errors.join("\n"));
}

#[test]
fn each_file_of_the_architecture_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document =
        std::fs::read_to_string(root.join("docs/architecture.md")).expect("the document is readable");
    let missing =
        |path: &&str| ![(*path).to_owned(), on_disk(path)].iter().any(|path| root.join(path).exists());
    let lost: Vec<_> = files(&document).into_iter().filter(missing).collect();
    assert!(lost.is_empty(), "docs/architecture.md names files that do not exist: {lost:?}");
}

/// Returns the files and folders in a document's code spans. Placeholders (`x.rs`), and names that several files have,
/// are left out.
fn files(document: &str) -> BTreeSet<&str> {
    let spans = document.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let is_file = |span: &&str| {
        let name = span.rsplit('/').next().unwrap_or(span);
        let ending = name.split_once('.').map_or("", |(_, ending)| ending);
        let is_path =
            ["crates/", "docs/", "scripts/", "src/", "tests/"].iter().any(|top| span.starts_with(top));
        span.chars().all(is_part)
            && (is_path || ["md", "proto", "rs", "sh", "toml", "txt"].contains(&ending))
            && !["x.rs", "absent.rs"].contains(&name)
    };
    spans.filter(is_file).collect()
}

/// Returns where a file of the documents is: they leave out `src`, and `crates/proto/src` is `proto`.
fn on_disk(path: &str) -> String {
    let place = place_on_disk(path);
    if path.ends_with(".rs") { place } else { place.replace("/src/", "/") }
}

/// Returns the errors in the table of hops: missing files and functions, and a wrong number of either.
fn hop_errors(document: &str, sources: &BTreeMap<String, String>) -> Vec<String> {
    let after = document.split("## The path of a CONNECT\n").nth(1).unwrap_or_default();
    let section = after.split("\n## ").next().unwrap_or_default();
    let (mut errors, mut files, mut hops) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for row in section.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, hop, file, names, ..] = cells[..] else { continue };
        if hop.parse::<usize>().is_err() {
            continue;
        }
        let file = file.trim_matches('`');
        files.insert(file);
        let Some(source) = sources.get(file) else {
            errors.push(format!("hop {hop}: there is no {}", place_on_disk(file)));
            continue;
        };
        let defined = functions(source);
        for name in names.split('`').skip(1).step_by(2) {
            hops.insert((file, name));
            if !defined.contains(name) {
                errors.push(format!("hop {hop}: {} has no {name}", place_on_disk(file)));
            }
        }
    }
    let count = format!("{} functions in {} files", hops.len(), files.len());
    if !section.contains(&count) {
        errors.push(format!("the table has {count}, and the text has other numbers"));
    }
    errors
}

/// Returns the functions of a source without its tests: `name` at the top level, `Type::name` in an impl of a type.
fn functions(text: &str) -> BTreeSet<String> {
    let tokens = tokens(without_tests(text));
    let at = |i: usize| tokens.get(i).map_or("", |token| token.text.as_str());
    let (mut found, mut depth, mut owner) = (BTreeSet::new(), 0usize, None);
    for i in 0..tokens.len() {
        match at(i) {
            "{" => depth += 1,
            "}" => {
                depth = depth.saturating_sub(1);
                owner = owner.filter(|_| depth > 0);
            }
            // Not an `impl Trait` in a signature.
            "impl" if depth == 0 && (i == 0 || matches!(at(i - 1), "}" | ";" | "]")) => {
                owner = type_of_impl(at, i + 1)
            }
            "fn" if depth == 0 => _ = found.insert(at(i + 1).to_owned()),
            "fn" if depth == 1 => found.extend(owner.map(|owner| format!("{owner}::{}", at(i + 1)))),
            _ => {}
        }
    }
    found
}

/// Returns the type of an impl whose words begin at `i`: the last word before its body that is not inside of `<>`.
fn type_of_impl<'a>(at: impl Fn(usize) -> &'a str, i: usize) -> Option<&'a str> {
    let (mut angles, mut last) = (0usize, None);
    for i in i.. {
        match at(i) {
            "" => break,
            "{" | "where" if angles == 0 => break,
            "<" => angles += 1,
            // Not the end of an arrow, as in `F: Fn() -> u8`.
            ">" if at(i - 1) != "-" => angles = angles.saturating_sub(1),
            word if angles == 0 && word.starts_with(char::is_alphabetic) => last = Some(word),
            _ => {}
        }
    }
    last
}

#[test]
fn only_names_of_files_are_compared_with_the_disk() {
    let text = "`net/dial.rs` and `golden.rs`, below `crates/kube`:\n`src/x.rs`, `route`, `a/b`, `grep x.rs`, `proto/e.proto`";
    let found: Vec<_> = files(text).into_iter().map(|file| (file, on_disk(file))).collect();
    let places = found.iter().map(|(file, place)| (*file, place.as_str())).collect::<Vec<_>>();
    assert_eq!(
        places,
        [
            ("crates/kube", "src/crates/kube"),
            ("golden.rs", "src/golden.rs"),
            ("net/dial.rs", "crates/net/src/dial.rs"),
            ("proto/e.proto", "crates/proto/e.proto"),
        ]
    );
}

#[test]
fn functions_are_listed_with_their_type_without_nested_and_test_functions() {
    let text = "impl<S: Fn() -> u8> Serve<S> for net::Loop<S>\nwhere\n    S: Sized,\n{\n    async fn serve(&self) {\n        \
                fn inner() {}\n    }\n}\ntrait Serve {\n    fn asked();\n}\n\
                pub fn read(x: impl Read) -> impl Read {\n    fn nested() {}\n}\n\
                #[cfg(test)]\nmod tests {\n    fn tested() {}\n}\n";
    assert_eq!(functions(text).into_iter().collect::<Vec<_>>(), ["Loop::serve", "read"]);
}

#[test]
fn a_hop_without_its_function_or_file_or_with_a_wrong_number_is_found() {
    let source = "impl Loop {\n    fn serve() {}\n}\nfn read() {}\n";
    let sources = BTreeMap::from([("net/dial.rs".to_owned(), source.to_owned())]);
    let errors = |text: &str, rows: &str| {
        let table = format!("| hop | file | function |\n| --- | --- | --- |\n{rows}");
        hop_errors(
            &format!("# A\n\n## The path of a CONNECT\n\n{text}\n\n{table}\n## B\n| 9 | `no.rs` | |\n"),
            &sources,
        )
    };
    let row = "| 1 | `net/dial.rs` | `Loop::serve`, `read` |\n";
    assert_eq!(errors("It has 2 functions in 1 files.", row), Vec::<String>::new());
    assert_eq!(
        errors("It has 3 functions in 1 files.", row),
        ["the table has 2 functions in 1 files, and the text has other numbers"]
    );
    let wrong =
        "| 1 | `net/dial.rs` | `serve`, `Other::serve`, `Loop::read` |\n| 2 | `net/none.rs` | `read` |\n";
    assert_eq!(
        errors("3 functions in 2 files", wrong),
        [
            "hop 1: crates/net/src/dial.rs has no serve",
            "hop 1: crates/net/src/dial.rs has no Other::serve",
            "hop 1: crates/net/src/dial.rs has no Loop::read",
            "hop 2: there is no crates/net/src/none.rs",
        ]
    );
}
