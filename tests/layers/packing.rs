//! Statements that pack more into one line than a reader takes in: `let (a, b) = (x, y)`, and closures that only name
//! a block.

use super::{Token, Violation, error, is_tests, report, sources, tokens, without_tests};

/// Maximum number of named closures without arguments in the program. They run later than they are written, or more
/// than once: a reader has to look for each call. The few that are left are called at once, next to their definition.
const MAX_NAMED_BLOCKS: usize = 10;

#[test]
fn no_let_packs_two_values() {
    let errors: Vec<_> = sources().iter().flat_map(|(file, text)| packed_values(file, text)).collect();
    report(&errors);
}

#[test]
fn few_closures_without_arguments_have_a_name() {
    let found: Vec<_> = sources().iter().flat_map(|(file, text)| named_blocks(file, text)).collect();
    if found.len() > MAX_NAMED_BLOCKS {
        report(&found);
    }
}

/// Returns each `let` that takes apart a tuple, an array or a struct that is written on its right side.
fn packed_values(file: &str, text: &str) -> Vec<Violation> {
    let rule = "two values in one let: write a let for each, so that a reader takes in one at a time";
    plain_lets(file, text, is_packed, rule)
}

/// Returns each `let name = || ...`.
fn named_blocks(file: &str, text: &str) -> Vec<Violation> {
    let rule = "a closure without arguments has a name: write the code where it runs, or a function";
    plain_lets(file, text, is_named_block, rule)
}

/// Returns a violation for each `let` statement, outside of tests, for which `found` holds.
fn plain_lets(file: &str, text: &str, found: fn(&[Token], usize) -> bool, rule: &str) -> Vec<Violation> {
    if is_tests(file) {
        return Vec::new();
    }
    let tokens = tokens(without_tests(text));
    let lets = (0..tokens.len()).filter(|at| is_statement(&tokens, *at) && found(&tokens, at + 1));
    lets.map(|at| error(file, tokens[at].line, rule.to_owned())).collect()
}

/// Returns true if a statement begins with `let` here; `if let` and `while let` only match.
fn is_statement(tokens: &[Token], at: usize) -> bool {
    let before = at.checked_sub(1).map_or("", |before| word(tokens, before));
    word(tokens, at) == "let" && !matches!(before, "if" | "while" | "&")
}

fn is_packed(tokens: &[Token], pattern: usize) -> bool {
    let Some(open) = first_bracket(tokens, pattern) else { return false };
    let Some(close) = matching(tokens, open) else { return false };
    // A type may follow the pattern.
    let Some(equals) = (close..tokens.len()).find(|at| matches!(word(tokens, *at), "=" | ";")) else {
        return false;
    };
    let Some(value) = first_bracket(tokens, equals + 1) else { return false };
    let Some(end) = matching(tokens, value) else { return false };
    // `let ... else` only matches. Otherwise the statement ends with the right side.
    let is_same_shape = word(tokens, open) == word(tokens, value);
    word(tokens, equals) == "="
        && is_same_shape
        && word(tokens, end + 1) == ";"
        && has_several(tokens, value, end)
}

fn is_named_block(tokens: &[Token], pattern: usize) -> bool {
    let name = pattern + usize::from(word(tokens, pattern) == "mut");
    let Some(mut value) = (name + 1 < tokens.len() && word(tokens, name + 1) == "=").then_some(name + 2)
    else {
        return false;
    };
    while matches!(word(tokens, value), "move" | "async") {
        value += 1;
    }
    word(tokens, value) == "|" && word(tokens, value + 1) == "|"
}

/// Returns the bracket with which a tuple, an array or a struct's fields begin here.
fn first_bracket(tokens: &[Token], from: usize) -> Option<usize> {
    let mut at = from;
    while word(tokens, at).starts_with(char::is_uppercase) || word(tokens, at) == "::" {
        at += 1;
    }
    // With a name before it, a bracket that is round makes one value.
    let is_group =
        at == from && matches!(word(tokens, at), "(" | "[") || at > from && word(tokens, at) == "{";
    is_group.then_some(at)
}

/// Returns the closing bracket for the one at `open`.
fn matching(tokens: &[Token], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// Returns true if the group has a comma of its own, so that it is no parenthesis and no `[value; length]`.
fn has_several(tokens: &[Token], open: usize, close: usize) -> bool {
    let mut at = open + 1;
    while at < close {
        match word(tokens, at) {
            "," => return true,
            "(" | "[" | "{" => at = matching(tokens, at).unwrap_or(close),
            _ => {}
        }
        at += 1;
    }
    false
}

fn word(tokens: &[Token], at: usize) -> &str {
    tokens.get(at).map_or("", |token| token.text.as_str())
}

#[test]
fn packed_values_are_found_in_each_form() {
    let packed = [
        "let (a, b) = (x, y);",
        "let (mut a, b): (u8, u8) = (f(1, 2), 3);",
        "let [a, b] = [x, y];",
        "let Pair { a, b } = Pair { a: x, b: y };",
    ];
    for line in packed {
        assert_eq!(packed_values("net.rs", &format!("fn f() {{\n{line}\n}}")).len(), 1, "{line}");
        assert_eq!(packed_values("net/tests.rs", line), []);
    }
    let single = [
        "let (a, b) = f(x, y);",
        "let (a, b) = (f(x, y));",
        "if let (Some(a), Some(b)) = (x, y) { g(); }",
        "let (Some(a), Some(b)) = (x, y) else { return };",
        "let a = (x, y);",
        "let [a, b] = [0; 2];",
        "let (a, b) = (x, y).swap();",
    ];
    for line in single {
        assert_eq!(packed_values("net.rs", line), [], "{line}");
    }
}

#[test]
fn closures_without_arguments_are_found_if_they_have_a_name() {
    for line in ["let f = || 1;", "let mut f = move || g();", "let f = async || g().await;"] {
        assert_eq!(named_blocks("net.rs", line).len(), 1, "{line}");
    }
    for line in ["let f = |x| x;", "let f = a || b;", "g(|| 1);", "let f = g(|| 1);"] {
        assert_eq!(named_blocks("net.rs", line), [], "{line}");
    }
}
