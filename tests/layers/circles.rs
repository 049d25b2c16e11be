//! Circles of files: a reader of one file needs all the others.
//!
//! A file may use items of its parent, and a parent items of its children; both at once is no circle. So circles are
//! searched for twice: without what children take from their parents, and without what parents take from their
//! children.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::{Token, Violation, error, imports, is_tests, module_of, report, sources, tokens, without_tests};

/// The path of a module from the crate's root.
type Module = Vec<String>;

/// The files of the modules, the re-exports of each, and which modules each uses, with the line of the first use.
struct ModuleGraph {
    files: BTreeMap<Module, String>,
    exports: HashMap<Module, HashMap<String, Module>>,
    uses: BTreeMap<Module, BTreeMap<Module, usize>>,
}

impl ModuleGraph {
    fn of(sources: &[(String, String)]) -> Self {
        let read: Vec<_> = sources
            .iter()
            .filter(|(file, _)| !is_tests(file))
            .map(|(file, text)| (module_of(file), file.clone(), tokens(without_tests(text))))
            .filter(|(home, ..)| !home.is_empty())
            .collect();
        let mut house = Self { files: BTreeMap::new(), exports: HashMap::new(), uses: BTreeMap::new() };
        for (home, file, tokens) in &read {
            house.files.insert(home.clone(), file.clone());
            house.exports.insert(home.clone(), exports(home, tokens));
        }
        for (home, _, tokens) in &read {
            let mut uses = BTreeMap::new();
            for import in imports(home, tokens) {
                if let Some(to) = house.source_of(import.path).filter(|to| to != home) {
                    uses.entry(to).or_insert(import.line);
                }
            }
            for declared in tokens.windows(3).filter(|t| t[0].text == "mod" && t[2].text == ";") {
                let child: Module = home.iter().chain([&declared[1].text]).cloned().collect();
                if house.files.contains_key(&child) {
                    uses.entry(child).or_insert(declared[0].line);
                }
            }
            house.uses.insert(home.clone(), uses);
        }
        house
    }

    /// Returns the file in which a path ends, through all re-exports.
    fn source_of(&self, mut path: Module) -> Option<Module> {
        // Re-exports that name each other do not compile. The bound is for made-up sources.
        for _ in 0..20 {
            let prefix_len = (1..=path.len()).rev().find(|n| self.files.contains_key(&path[..*n]))?;
            let exported = path.get(prefix_len).and_then(|name| self.exports[&path[..prefix_len]].get(name));
            let Some(from) = exported else { return Some(path[..prefix_len].to_vec()) };
            path = from.iter().chain(&path[prefix_len + 1..]).cloned().collect();
        }
        None
    }

    /// Returns one circle of each group of files that use one another, among the uses for which `counts` is true.
    fn circles(&self, counts: impl Fn(&Module, &Module) -> bool) -> Vec<Violation> {
        let mut seen: BTreeSet<&Module> = BTreeSet::new();
        let mut found = Vec::new();
        for (from, uses) in &self.uses {
            for (to, line) in uses.iter().filter(|(to, _)| counts(from, to)) {
                if seen.contains(from) && seen.contains(to) {
                    continue;
                }
                let Some(back) = self.shortest(to, from, &counts) else { continue };
                let names: Vec<_> = [from].into_iter().chain(back.iter().copied()).collect();
                let names: Vec<_> = names.into_iter().map(|module| self.files[module].as_str()).collect();
                found.push(error(&self.files[from], *line, format!("a circle: {}", names.join(" -> "))));
                seen.extend(back);
            }
        }
        found
    }

    fn shortest<'a>(
        &'a self,
        from: &'a Module,
        to: &'a Module,
        counts: impl Fn(&Module, &Module) -> bool,
    ) -> Option<Vec<&'a Module>> {
        let mut before: HashMap<&Module, &Module> = HashMap::new();
        let mut open = VecDeque::from([from]);
        while let Some(at) = open.pop_front() {
            if at == to {
                let mut way = vec![at];
                while let Some(last) =
                    way.last().filter(|last| **last != from).and_then(|last| before.get(last))
                {
                    way.push(last);
                }
                way.reverse();
                return Some(way);
            }
            for next in self.uses.get(at).into_iter().flat_map(BTreeMap::keys).filter(|next| counts(at, next))
            {
                if next != from && !before.contains_key(next) {
                    before.insert(next, at);
                    open.push_back(next);
                }
            }
        }
        None
    }
}

/// Returns the names that the `use` items of a file make known under its own path.
fn exports(home: &[String], tokens: &[Token]) -> HashMap<String, Module> {
    let mut found = HashMap::new();
    for (i, _) in tokens.iter().enumerate().filter(|(_, token)| token.text == "use") {
        let end = tokens[i..].iter().position(|t| t.text == ";").map_or(tokens.len(), |n| i + n);
        for import in imports(home, &tokens[i..end]) {
            if let Some(name) = import.path.last().filter(|name| *name != "self") {
                found.insert(name.clone(), import.path.clone());
            }
        }
    }
    found
}

fn cycle_violations(sources: &[(String, String)]) -> Vec<Violation> {
    let house = ModuleGraph::of(sources);
    let mut errors = house.circles(|from, to| !from.starts_with(to));
    for circle in house.circles(|from, to| !to.starts_with(from)) {
        if !errors.contains(&circle) {
            errors.push(circle);
        }
    }
    errors
}

#[test]
fn no_files_import_each_other_in_a_cycle() {
    report(&cycle_violations(&sources()));
}

/// Returns the circles among made-up sources, as text.
fn circles(sources: &[(&str, &str)]) -> Vec<String> {
    let sources: Vec<_> = sources.iter().map(|(file, text)| ((*file).into(), (*text).into())).collect();
    cycle_violations(&sources).iter().map(Violation::to_string).collect()
}

#[test]
fn two_files_that_import_each_other_are_found() {
    let found = circles(&[
        ("cloud.rs", "mod asked;\nmod links;"),
        ("cloud/asked.rs", "//! Asks.\nuse crate::cloud::links::Context;"),
        ("cloud/links.rs", "fn f() { super::asked::answer() }"),
    ]);
    assert_eq!(found, ["src/cloud/asked.rs:2: a circle: cloud/asked.rs -> cloud/links.rs -> cloud/asked.rs"]);
}

#[test]
fn a_cycle_through_three_files_is_found_once() {
    let found = circles(&[
        ("net/a.rs", "use crate::net::b::B;"),
        ("net/b.rs", "use crate::net::c::C;"),
        ("net/c.rs", "use crate::net::a::A;"),
    ]);
    assert_eq!(found, ["crates/net/src/a.rs:1: a circle: net/a.rs -> net/b.rs -> net/c.rs -> net/a.rs"]);
}

#[test]
fn a_re_exported_name_resolves_to_the_file_that_defines_it() {
    let found = circles(&[
        (
            "net.rs",
            "mod a;\nmod b;\npub use a::A;\npub use crate::net::{a::A as _, b::B};\npub use crate::net::a::A;",
        ),
        ("net/a.rs", "use crate::net::B;"),
        ("net/b.rs", "use crate::net::A;"),
    ]);
    assert_eq!(found.len(), 1, "{found:?}");
}

#[test]
fn one_way_imports_among_the_children_of_a_module_are_no_cycle() {
    let found = circles(&[
        ("net.rs", "mod a;\nmod b;\nuse crate::net::a::A;\nuse crate::net::b::B;"),
        ("net/a.rs", "use crate::net::{Net, b::B};"),
        ("net/b.rs", "use super::Net;"),
    ]);
    assert_eq!(found, [""; 0]);
}

#[test]
fn a_cycle_through_a_parent_is_found_in_both_directions() {
    let up = circles(&[
        ("net/a.rs", "use crate::wire::Link;"),
        ("wire.rs", "use crate::net::b::B;"),
        ("net/b.rs", "use crate::wire::deep::X;"),
        ("wire/deep.rs", "use crate::wire::Wire;"),
    ]);
    assert_eq!(up, ["crates/net/src/b.rs:1: a circle: net/b.rs -> wire/deep.rs -> wire.rs -> net/b.rs"]);
    let down = circles(&[
        ("wire.rs", "mod deep;"),
        ("wire/deep.rs", "use crate::net::b::B;"),
        ("net/b.rs", "use crate::wire::Wire;"),
    ]);
    assert_eq!(down, ["crates/net/src/b.rs:1: a circle: net/b.rs -> wire.rs -> wire/deep.rs -> net/b.rs"]);
}

#[test]
fn imports_of_tests_are_not_checked() {
    let found = circles(&[
        ("net/a.rs", "use crate::net::b::B;"),
        ("net/b.rs", "#[cfg(test)]\nmod tests {\n    use crate::net::a::A;\n}"),
        ("net/b/tests.rs", "use crate::net::a::A;"),
    ]);
    assert_eq!(found, [""; 0]);
}
