//! The token file: which secret proves which node.

use std::collections::HashMap;

use subtle::ConstantTimeEq;

use crate::names::NodeName;

/// What a token file says: one `node:token` a line, spaces dropped, later lines win, `default` for nodes without a line
/// of their own (docs/superedge.md#token-file). Never shown.
pub struct Tokens(HashMap<String, String>);

impl Tokens {
    /// Reads a file's text. A line without a colon is skipped, as is one without a token: an empty token proves nothing.
    pub fn parse(text: &str) -> Self {
        let mut tokens = HashMap::new();
        for line in text.lines() {
            let line = line.replace(' ', "");
            let mut parts = line.split(':');
            if let (Some(node), Some(token)) = (parts.next(), parts.next()) {
                tokens.insert(node.to_ascii_lowercase(), token.to_owned());
            }
        }
        Self(tokens)
    }

    /// Whether `token` proves `node`. A node with a line of its own cannot use the default token.
    pub fn prove(&self, node: &NodeName, token: &str) -> bool {
        let own = self.0.get(&node.as_str().to_ascii_lowercase());
        let expected = own.or_else(|| self.0.get(DEFAULT)).map_or("", String::as_str);
        let equal: bool = expected.as_bytes().ct_eq(token.as_bytes()).into();
        equal && !expected.is_empty()
    }

    /// Whether a node has a line of its own.
    pub fn names(&self, node: &NodeName) -> bool {
        self.0.contains_key(&node.as_str().to_ascii_lowercase())
    }

    /// How many lines count.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nobody can prove anything.
    pub fn is_empty(&self) -> bool {
        self.0.values().all(String::is_empty)
    }
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokens({} lines)", self.0.len())
    }
}

/// The line for nodes without one of their own.
const DEFAULT: &str = "default";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prove(text: &str, node: &str, token: &str) -> bool {
        Tokens::parse(text).prove(&node.parse().unwrap(), token)
    }

    #[test]
    fn a_node_uses_its_own_line_or_else_the_default() {
        let text = "default:abc\n# no comment\nnode 1 : x y z :ignored\r\nnode2:old\nnode2:new\n";
        assert!(prove(text, "other", "abc") && prove(text, "node1", "xyz") && prove(text, "Node1", "xyz"));
        assert!(prove(text, "node2", "new") && !prove(text, "node2", "old"));
        assert!(!prove(text, "node1", "abc"), "one with its own line cannot use the default");
    }

    #[test]
    fn an_empty_token_proves_nothing() {
        assert!(!prove("", "n", "") && !prove("default:", "n", "") && !prove("n:\ndefault:a", "n", ""));
        assert!(!prove("n:\ndefault:a", "n", "a"), "its own line counts, even an empty one");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_or_shows_a_token(text in ".{0,200}") {
            let tokens = Tokens::parse(&text);
            prop_assert_eq!(format!("{tokens:?}"), format!("Tokens({} lines)", tokens.len()));
        }
    }
}
