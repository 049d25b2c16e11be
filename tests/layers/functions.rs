//! The length of functions.

use super::{Token, Violation, error, is_tests, report, sources, tokens, without_tests};

/// Maximum number of lines of a function, with its signature. One function that reads from top to bottom is better than
/// three that share seven values, but a longer one has more than one idea.
const MAX_FUNCTION: usize = 90;

#[test]
fn no_function_is_too_long() {
    let errors: Vec<_> =
        sources().iter().flat_map(|(file, text)| function_length_violations(file, text)).collect();
    report(&errors);
}

fn function_length_violations(file: &str, text: &str) -> Vec<Violation> {
    if is_tests(file) {
        return Vec::new();
    }
    let tokens = tokens(without_tests(text));
    let mut errors = Vec::new();
    for (i, pair) in tokens.windows(2).enumerate().filter(|(_, pair)| pair[0].text == "fn") {
        let name = &pair[1].text;
        // Without a name it is a function pointer type.
        let Some(end) = end_of_function(&tokens[i..]).filter(|_| name != "(") else { continue };
        let length = end - pair[0].line + 1;
        if length > MAX_FUNCTION {
            let rule = format!("{name} has {length} lines, {MAX_FUNCTION} are allowed");
            errors.push(error(file, pair[0].line, rule));
        }
    }
    errors
}

/// Returns the last line of the function that begins here, or `None` if it has no body.
fn end_of_function(tokens: &[Token]) -> Option<usize> {
    let (mut brackets, mut braces) = (0usize, 0usize);
    for token in tokens {
        match token.text.as_str() {
            "(" | "[" => brackets += 1,
            ")" | "]" => brackets = brackets.saturating_sub(1),
            ";" if brackets == 0 && braces == 0 => return None,
            "{" if brackets == 0 || braces > 0 => braces += 1,
            "}" if braces > 0 => {
                braces -= 1;
                if braces == 0 {
                    return Some(token.line);
                }
            }
            _ => {}
        }
    }
    None
}

#[test]
fn a_long_function_is_found_by_name_and_test_functions_are_ignored() {
    let body = |lines: usize| "    step(\"{\", '{', [0; 2]);\n".repeat(lines);
    let fits = format!("fn f(a: fn(u8) -> u8, b: [u8; 3])\nwhere\n    A: B,\n{{\n{}}}\n", body(85));
    assert_eq!(function_length_violations("net.rs", &fits), []);
    let long =
        format!("\nimpl X {{\n    pub async fn start(&self) {{\n{}    }}\n    fn g() {{}}\n}}\n", body(89));
    let found = function_length_violations("net.rs", &long);
    assert_eq!(
        found.iter().map(|f| (f.line, f.rule.as_str())).collect::<Vec<_>>(),
        [(3, "start has 91 lines, 90 are allowed")]
    );
    assert_eq!(function_length_violations("net/tests.rs", &long), []);
    assert_eq!(function_length_violations("net.rs", &format!("#[cfg(test)]\nmod tests {{\n{long}}}\n")), []);
}

#[test]
fn a_function_without_a_body_ends_at_its_semicolon() {
    let text =
        format!("trait T {{\n    fn f(x: [u8; 2]) -> u8;\n    fn g();\n}}\n{}", "// more\n".repeat(120));
    assert_eq!(function_length_violations("net.rs", &text), []);
}
