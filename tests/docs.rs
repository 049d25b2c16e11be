//! Checks the documents: every citation has a target, every document can be reached from the README, and the manifests
//! grant what the reference of permissions lists. The module `language` checks words, sentences and lengths.
//!
//! Code, scripts and config cite a document by its path from the root of the project (`docs/protocol.md#traps`).
//! Markdown uses relative links.

#![allow(clippy::expect_used)]

#[path = "docs/language.rs"]
mod language;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// Files and directories that may contain citations, in addition to the Markdown files of the root and of `docs`.
const CITING: [&str; 10] =
    ["src", "crates", "tests", "scripts", "conf", "proto", "deploy", ".ci", "Cargo.toml", "deny.toml"];
/// Files of this test, which contain broken citations and old words on purpose.
const OURSELVES: [&str; 2] = ["tests/docs.rs", "tests/docs/language.rs"];

/// Words that the sources no longer use, in names, comments and texts; [the glossary](../docs/glossary.md) has the
/// words in use. `siblings` remains a key that `tunnel migrate` reads.
const BANNED_WORDS: [&str; 8] =
    ["sibling", "caught", "whoever", "anew", "unshaken", "of late", "in vain", "for want of"];

/// All checked files, by their path from the root.
#[derive(Debug, Default)]
struct Project {
    /// Anchors of the headings of each Markdown file.
    anchors: BTreeMap<String, BTreeSet<String>>,
    /// Texts that may contain citations.
    texts: BTreeMap<String, String>,
}

#[test]
fn every_citation_of_a_document_has_a_target() {
    let project = Project::read(root());
    assert!(project.anchors.contains_key("docs/protocol.md"), "no documents below {}", root().display());
    let errors: Vec<_> = project.texts.iter().flat_map(|(file, text)| project.errors(file, text)).collect();
    assert!(errors.is_empty(), "{} broken:\n{}", errors.len(), errors.join("\n"));
}

#[test]
fn every_document_is_reachable_from_the_readme() {
    let project = Project::read(root());
    let (mut seen, mut open) = (BTreeSet::new(), vec!["README.md".to_owned()]);
    while let Some(file) = open.pop() {
        let Some(text) = project.texts.get(&file).filter(|_| seen.insert(file.clone())) else { continue };
        open.extend(links(text).into_iter().filter_map(|(_, to)| resolve(&file, split(&to).0)));
    }
    let lost: Vec<_> = project.anchors.keys().filter(|file| !seen.contains(*file)).collect();
    assert!(lost.is_empty(), "not reachable: {lost:?}");
}

#[test]
fn the_sources_contain_no_banned_words() {
    let project = Project::read(root());
    let sources = project.texts.iter().filter(|(file, _)| file.ends_with(".rs") || file.ends_with(".sh"));
    let found: Vec<_> = sources.flat_map(|(file, text)| banned_words(file, text)).collect();
    assert!(found.is_empty(), "{} old words:\n{}", found.len(), found.join("\n"));
}

#[test]
fn the_permissions_reference_lists_what_the_manifests_grant() {
    let project = Project::read(root());
    let manifests = project.texts.iter().filter(|(file, _)| file.starts_with("deploy/"));
    let granted: BTreeSet<_> =
        manifests.flat_map(|(_, text)| text.split("apiGroups:").skip(1).flat_map(granted)).collect();
    let reference = &project.texts["docs/reference/rbac.md"];
    let listed: BTreeSet<_> = reference.lines().flat_map(listed).collect();
    assert!(granted.contains(&("leases".to_owned(), "update".to_owned())), "{granted:?}");
    assert_eq!(listed, granted);
}

/// Returns the pairs of resource and verb of a rule in a manifest, which begins after `apiGroups:`.
fn granted(rule: &str) -> Vec<(String, String)> {
    let list = |key: &str| {
        let list =
            rule.split_once(key).and_then(|(_, rest)| rest.split_once(']')).map_or("", |(list, _)| list);
        list.split(',').map(|word| word.trim().to_owned()).collect::<Vec<_>>()
    };
    let (resources, verbs) = (list(" resources: ["), list(" verbs: ["));
    resources.iter().flat_map(|what| verbs.iter().map(|verb| (what.clone(), verb.clone()))).collect()
}

/// Returns the pairs of resource and verb of a row in the reference: its second and third cell.
fn listed(row: &str) -> Vec<(String, String)> {
    let cells: Vec<_> = row.split(" | ").collect();
    let [_, resources, verbs, _, _] = cells[..] else { return Vec::new() };
    let codes = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    codes(resources)
        .iter()
        .flat_map(|what| codes(verbs).into_iter().map(|verb| (what.clone(), verb)))
        .collect()
}

/// Returns the old words in a source, one per line of it. An underscore ends a word, too.
fn banned_words(file: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.to_lowercase().replace('_', " ");
        let is_old = |word: &&&str| {
            line.match_indices(**word).any(|(at, _)| {
                let (before, after) = (&line[..at], line[at + word.len()..].trim_start_matches('s'));
                let key = line[at..].strip_prefix("siblings");
                let is_key = key.is_some_and(|rest| {
                    before.ends_with(['"', '.', '`'])
                        || rest.starts_with(" =")
                        || rest.starts_with(" service")
                });
                let ends = |c: Option<char>| !c.is_some_and(char::is_alphanumeric);
                ends(before.chars().next_back()) && ends(after.chars().next()) && !is_key
            })
        };
        found.extend(BANNED_WORDS.iter().find(is_old).map(|word| format!("{file}:{}: {word}", number + 1)));
    }
    found
}

#[test]
fn a_banned_word_is_found_in_names_and_texts_but_not_inside_other_words() {
    let words = |text: &str| banned_words("src/x.rs", text).len();
    assert_eq!(words("let sibling = f();\n// tried In Vain\nfn is_caught_here() {}\nSibling"), 4);
    assert_eq!(words("\"siblings = []\" mode.cloud.registry.siblings foreground of latest"), 0);
}

impl Project {
    fn read(root: &Path) -> Self {
        let mut project = Self::default();
        let mut open: Vec<PathBuf> = CITING.iter().map(|name| root.join(name)).collect();
        open.push(root.join("docs"));
        let at_root = std::fs::read_dir(root).expect("the root is readable");
        open.extend(
            at_root.map(|entry| entry.expect("the root is readable").path()).filter(|p| is_markdown(p)),
        );
        while let Some(path) = open.pop() {
            if path.is_dir() {
                let skipped = path.ends_with("target") || path.ends_with("corpus") || path.ends_with("seeds");
                let entries = std::fs::read_dir(&path).expect("a folder is readable");
                open.extend(entries.filter(|_| !skipped).map(|entry| entry.expect("is readable").path()));
            } else if let Ok(text) = std::fs::read_to_string(&path) {
                let name = path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
                project.add(name, text);
            }
        }
        project
    }

    fn add(&mut self, name: String, text: String) {
        if is_markdown(Path::new(&name)) {
            self.anchors.insert(name.clone(), anchors(&text));
        }
        if !OURSELVES.contains(&name.as_str()) {
            self.texts.insert(name, text);
        }
    }

    /// Returns the errors in the citations of a file.
    fn errors(&self, file: &str, text: &str) -> Vec<String> {
        let mut errors = Vec::new();
        let mut complain = |line: usize, why: String| errors.push(format!("{file}:{line}: {why}"));
        if !is_markdown(Path::new(file)) {
            for (line, cited) in cited(text) {
                if let Some(why) = self.missing(&cited) {
                    complain(line, why);
                }
            }
            return errors;
        }
        for (line, to) in links(text) {
            let (path, anchor) = split(&to);
            match resolve(file, path) {
                None => complain(line, format!("{to} is outside the project")),
                Some(path) if self.anchors.contains_key(&path) => {
                    let whole = if anchor.is_empty() { path } else { format!("{path}#{anchor}") };
                    if let Some(why) = self.missing(&whole) {
                        complain(line, why);
                    }
                }
                Some(path) if !root().join(&path).exists() => complain(line, format!("there is no {path}")),
                Some(_) => {}
            }
        }
        errors
    }

    /// Returns why a document cited by its path from the root cannot be found.
    fn missing(&self, cited: &str) -> Option<String> {
        let (path, anchor) = split(cited);
        match self.anchors.get(path) {
            None => Some(format!("there is no {path}; a document is cited by its path from the root")),
            Some(anchors) if !anchor.is_empty() && !anchors.contains(anchor) => {
                Some(format!("{path} has no heading #{anchor}"))
            }
            Some(_) => None,
        }
    }
}

/// Returns the documents that a text names, each with its line: all words that end in `.md`, with or without an anchor.
fn cited(text: &str) -> Vec<(usize, String)> {
    let part = |c: char| c.is_ascii_alphanumeric() || "./_-#".contains(c);
    let words = text.lines().zip(1..).flat_map(|(line, number)| {
        line.split(move |c| !part(c)).map(move |word| (number, word.trim_end_matches('.').to_owned()))
    });
    words.filter(|(_, word)| is_markdown(Path::new(split(word).0))).collect()
}

/// Returns the targets of relative links in Markdown, each with its line. Links inside code are ignored.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let plain: String =
            line.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "" }).collect();
        for rest in plain.split("](").skip(1) {
            let to = rest.split(')').next().unwrap_or_default();
            if !to.contains("://") && !to.starts_with("mailto:") {
                found.push((number, to.to_owned()));
            }
        }
    }
    found
}

/// Returns the anchors of a Markdown file's headings, in GitHub's format.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().to_lowercase();
        let slug: String = kept
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let twice = (1..).map(|n| format!("{slug}-{n}")).find(|other| !found.contains(other));
        let slug = if found.contains(&slug) { twice.unwrap_or(slug) } else { slug };
        found.insert(slug);
    }
    found
}

/// Returns the lines outside of fenced code, each with its number.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut found = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            found.push((number, line));
        }
    }
    found
}

/// Returns the path from the root that a link in `file` points to, or `None` if it is outside the root.
fn resolve(file: &str, to: &str) -> Option<String> {
    if to.is_empty() {
        return Some(file.to_owned());
    }
    let mut path: Vec<String> = Vec::new();
    let from = Path::new(file).parent().unwrap_or(Path::new(""));
    for component in from.join(to).components() {
        match component {
            Component::Normal(name) => path.push(name.to_string_lossy().into_owned()),
            Component::ParentDir => drop(path.pop()?),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path.join("/"))
}

fn split(cited: &str) -> (&str, &str) {
    cited.split_once('#').unwrap_or((cited, ""))
}

fn is_markdown(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn small(files: &[(&str, &str)]) -> Project {
    let mut project = Project::default();
    for (name, text) in files {
        project.add((*name).to_owned(), (*text).to_owned());
    }
    project
}

#[test]
fn a_citation_in_code_names_an_existing_file_and_heading() {
    let project = small(&[("docs/a.md", "# One\n## Two, and three\n```\n# four\n```\n## One\n")]);
    let errors = |text: &str| project.errors("src/x.rs", text);
    assert_eq!(errors("//! See `docs/a.md#two-and-three`, and docs/a.md#one-1.\n"), Vec::<String>::new());
    assert_eq!(errors("\n// docs/a.md#four"), ["src/x.rs:2: docs/a.md has no heading #four"]);
    assert_eq!(errors("// (`a.md` 3)").len(), 1);
    assert_eq!(errors("// docs/b.md#one").len(), 1);
    assert_eq!(errors("// a.mdx, amd, .md5, nothing").len(), 0);
}

#[test]
fn a_link_in_markdown_is_relative_to_its_file_and_stays_inside() {
    let project = small(&[("docs/a.md", "# One\n"), ("docs/b.md", "# Two\n")]);
    let errors = |text: &str| project.errors("docs/b.md", text);
    assert_eq!(errors("[a](a.md#one) [b](#two) [c](../docs/a.md) [d](https://example.org/x.md)").len(), 0);
    assert_eq!(errors("[a](a.md#two)"), ["docs/b.md:1: docs/a.md has no heading #two"]);
    assert_eq!(errors("[a](docs/a.md)"), ["docs/b.md:1: there is no docs/docs/a.md"]);
    assert_eq!(errors("[a](../../a.md)"), ["docs/b.md:1: ../../a.md is outside the project"]);
    assert_eq!(errors("`[a](nowhere.md)`\n```\n[a](nowhere.md)\n```\n").len(), 0);
    assert_eq!(errors("[a](../Cargo.toml) [b](../src)").len(), 0);
}
