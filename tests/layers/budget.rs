//! The budget: how many lines of code each module has, and all together.
//!
//! A line of code has a word or a mark of the program: no comment, no blank line, no test, no generated file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{is_tests, sources, tokens_and_texts, without_tests};

/// A module may have so much less than its budget before the budget must be lowered: this share, and these lines.
const SLACK_PERCENT: usize = 5;
const SLACK_LINES: usize = 100;

#[test]
fn each_module_stays_within_its_budget() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md");
    let document = std::fs::read_to_string(path).expect("the document is readable");
    let errors = budget_errors(&budgets(&document), &sizes(&sources()));
    assert!(
        errors.is_empty(),
        "docs/architecture.md, table of budgets: {} broken. Who raises a budget says in the commit what it buys, and \
         who makes a module smaller lowers it:\n{}",
        errors.len(),
        errors.join("\n")
    );
}

/// Returns the lines of code of each top-level module, and of all as `sum`.
fn sizes(sources: &[(String, String)]) -> BTreeMap<String, usize> {
    let mut sizes = BTreeMap::new();
    for (file, text) in sources.iter().filter(|(file, _)| !is_tests(file)) {
        let module = file.split('/').next().unwrap_or(file).trim_end_matches(".rs");
        let module = if matches!(module, "main" | "lib") { "main" } else { module };
        let lines = lines_of_code(text);
        *sizes.entry(module.to_owned()).or_default() += lines;
        *sizes.entry("sum".to_owned()).or_default() += lines;
    }
    sizes
}

fn lines_of_code(text: &str) -> usize {
    tokens_and_texts(without_tests(text))
        .iter()
        .flat_map(|token| token.lines())
        .collect::<BTreeSet<_>>()
        .len()
}

/// Returns the table of budgets: module and number in each row.
fn budgets(document: &str) -> BTreeMap<String, usize> {
    let after = document.split("## Budget\n").nth(1).unwrap_or_default();
    let section = after.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|row| {
        let mut cells = row.split('|').map(str::trim).skip(1);
        let module = cells.next()?.trim_matches('`').to_owned();
        Some((module, cells.next()?.replace(',', "").parse().ok()?))
    });
    rows.collect()
}

fn budget_errors(budgets: &BTreeMap<String, usize>, sizes: &BTreeMap<String, usize>) -> Vec<String> {
    let mut errors = Vec::new();
    for module in budgets.keys().chain(sizes.keys()).collect::<BTreeSet<_>>() {
        let Some(budget) = budgets.get(module) else {
            errors.push(format!("{module} has no row"));
            continue;
        };
        let Some(size) = sizes.get(module) else {
            errors.push(format!("{module} is no module"));
            continue;
        };
        let least = budget.saturating_sub(budget * SLACK_PERCENT / 100 + SLACK_LINES);
        if size > budget {
            errors.push(format!("{module} has {size} lines, {budget} are allowed"));
        } else if *size < least {
            errors.push(format!("{module} has only {size} lines: lower its budget of {budget}"));
        }
    }
    errors
}

#[test]
fn a_line_of_code_is_counted_once_and_only_if_it_is_code() {
    let text = "//! Doc.\n\n/// Doc.\nfn f() { g(); h() } // why\n/* a\nb */\nlet a = \"x\n  y\";\n#[cfg(test)]\nmod tests {\n}\n";
    assert_eq!(lines_of_code(text), 3);
    // Tests that lend something to those of other files.
    assert_eq!(lines_of_code(&text.replace("mod tests", "pub(crate) mod tests")), 3);
}

#[test]
fn a_budget_is_broken_in_both_directions() {
    let table = "# A\n\n## Budget\n\n| module | lines |\n| --- | --- |\n| `net` | 1,000 |\n| `old` | 5 |\n\n## Next\n\n| `b` | 7 |\n";
    let budgets = budgets(table);
    assert_eq!(budgets, BTreeMap::from([("net".into(), 1000), ("old".into(), 5)]));
    let broken =
        |size: usize| budget_errors(&budgets, &BTreeMap::from([("net".into(), size), ("old".into(), 5)]));
    assert_eq!(broken(1000), [""; 0]);
    assert_eq!(broken(850), [""; 0]);
    assert_eq!(broken(1001), ["net has 1001 lines, 1000 are allowed"]);
    assert_eq!(broken(849), ["net has only 849 lines: lower its budget of 1000"]);
    let others = budget_errors(&budgets, &BTreeMap::from([("net".into(), 1000), ("new".into(), 1)]));
    assert_eq!(others, ["new has no row", "old is no module"]);
}
