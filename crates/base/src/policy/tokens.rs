//! The token file: maps nodes to the tokens that authenticate them.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use subtle::ConstantTimeEq;

use tunnel_proto::names::{NameError, NodeName};

/// The contents of a token file (docs/reference/superedge.md#token-file). Each line is `node:token`; spaces are
/// dropped, and later lines win. `default` applies to nodes without their own line. A node whose line has no token is
/// blocked.
///
/// Words may follow the token: `node:token previous=OLD ip=10.0.0.7,fd00::7` accepts both tokens while the edge
/// changes its own, and lists the node's addresses. Never logged or displayed.
#[derive(derive_more::Debug)]
#[debug("Tokens({} lines)", lines.len())]
pub struct NodeTokens {
    lines: HashMap<String, TokenLine>,
    /// Each address, with the node whose line contains it.
    ips: Vec<(IpAddr, NodeName)>,
    errors: Vec<(usize, &'static str)>,
}

/// The tokens of a line.
#[derive(Clone, PartialEq, Eq)]
struct TokenLine {
    /// Empty if the line blocks its node.
    token: String,
    /// The earlier token, which remains valid while the edge changes to the new one.
    previous: Option<String>,
}

/// Why a token does not authenticate a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// No line applies to the node.
    #[error(
        "the token file has no line for {0}, and no default; invite the node, or add a line to the file that \
         server.links.token_file names"
    )]
    NoLine(NodeName),
    /// No line applies to the node, and it has not joined with an invitation that this server knows.
    #[error(
        "{0} has not joined here, and the token file has no line for it; invite it, or, if it joined at another \
         server, give all servers one store (server.invitations)"
    )]
    NotJoined(NodeName),
    /// The token differs from that of the line that applies.
    #[error(
        "the token differs from that of {0} in the file that server.links.token_file names; set the same \
         token at the edge, as edge.uplink.token or in its token_file, or change the line"
    )]
    Mismatch(&'static str),
    /// The token differs from that with which the node joined.
    #[error(
        "the token differs from the one that the node joined with; invite it again, or give it \
         its own line in the file that server.links.token_file names"
    )]
    Joined,
    /// The node's line has no token, which blocks the node.
    #[error(
        "the line of {0} in the file that server.links.token_file names has no token, which blocks the node, \
         even with a certificate; give it a token, or remove the line"
    )]
    Blocked(NodeName),
    /// The client certificate or the pod's token is valid, but its Node does not exist.
    #[error("{1} is for Node {0}, which does not exist in the cluster")]
    NoNode(NodeName, &'static str),
    /// The Node has no edge label. A control-plane Node has no edge: a link with its name would take its traffic.
    #[error(
        "Node {0} has no edge label; to allow an edge there: kubectl label node {name} superedge.io/node-edge=enable (with \
         OpenYurt openyurt.io/is-edge-worker=true)",
        name = .0.as_str().to_ascii_lowercase()
    )]
    NoEdge(NodeName),
    /// The client certificate or the pod's token is valid, but the Nodes of the cluster are not known yet.
    #[error("{0} cannot be checked: Node list not loaded yet")]
    NodesUnknown(&'static str),
    /// The token of a pod does not prove the node.
    #[error("the ServiceAccount token is refused: {0}")]
    PodToken(String),
    /// The token of a pod can be neither accepted nor refused now.
    #[error("the ServiceAccount token cannot be checked: {0}")]
    PodTokenUnchecked(String),
    /// The token that proved the node has ended.
    #[error("the ServiceAccount token has ended; the kubelet renews it while it reaches kube-apiserver")]
    PodTokenEnded,
    /// The pod whose token proved the node was deleted.
    #[error("the pod of the edge of {0} was deleted")]
    NoPod(NodeName),
}

/// Returns true if a token has the form of a ServiceAccount's, which no other token has by chance.
pub fn is_service_account_token(token: &str) -> bool {
    token.starts_with("eyJ") && token.bytes().filter(|byte| *byte == b'.').count() == 2
}

impl NodeTokens {
    /// Parses a file's text. A line without a colon is ignored, and an empty token authenticates no node; both are in
    /// [`Self::errors`]. Empty lines and lines that start with `#` are ignored.
    pub fn parse(text: &str) -> Self {
        let mut lines = HashMap::new();
        let mut errors = Vec::new();
        let mut ips: HashMap<String, Vec<IpAddr>> = HashMap::new();
        for (at, line) in (1..).zip(text.lines()) {
            // The words come off first: spaces separate them, and are then removed from the rest.
            let (line, words) = split_words(line);
            let line = line.replace(' ', "");
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut parts = line.split(':');
            let node = parts.next().unwrap_or_default();
            let token = parts.next();
            let more = parts.next();
            let addresses = words.addresses();
            let are_none = addresses.is_none();
            // By node, so that a line that overrides an earlier one overrides its addresses as well.
            ips.insert(node.to_ascii_lowercase(), addresses.unwrap_or_default());
            let before = token.and_then(|token| {
                // A blocked node stays blocked, whatever its earlier token was.
                let previous = words.previous.filter(|previous| !token.is_empty() && is_token(previous));
                let line = TokenLine { token: token.to_owned(), previous: previous.map(str::to_owned) };
                lines.insert(node.to_ascii_lowercase(), line)
            });
            let error = match token {
                None => "it has no ':' and is ignored; write node:token",
                Some(_) if are_none => {
                    "the text after its ip= is ignored: not a list of addresses; write ip=10.0.0.7,fd00::7"
                }
                Some(_) if line_name(node).is_err() => {
                    "the text before its first ':' is not a valid node name"
                }
                Some("") => "it has no token, which blocks its node",
                _ if more.is_some() => {
                    "the text after its second ':' is ignored: a token cannot contain a colon"
                }
                _ if words.previous.is_some_and(|previous| !is_token(previous)) => {
                    "the text after its previous= is ignored: not a token; write the earlier token there"
                }
                _ if before.is_some() => "it overrides an earlier line of the same node",
                _ => continue,
            };
            if errors.len() < MAX_ERRORS {
                errors.push((at, error));
            }
        }
        let ips = ips.into_iter().filter_map(|(node, ips)| Some((node.parse::<NodeName>().ok()?, ips)));
        let ips = ips.flat_map(|(node, ips)| ips.into_iter().map(move |ip| (ip, node.clone()))).collect();
        Self { lines, ips, errors }
    }

    /// Returns the addresses that lines assign to their nodes.
    pub fn ips(&self) -> &[(IpAddr, NodeName)] {
        &self.ips
    }

    /// Checks that `token` authenticates `node`. A node with its own line cannot use the default token.
    ///
    /// # Errors
    ///
    /// The error is for operators: the edge must only learn that it was refused.
    pub fn verify(&self, node: &NodeName, token: &str) -> Result<(), TokenError> {
        let own = self.lines.get(&node.as_str().to_ascii_lowercase());
        let line = own.or_else(|| self.lines.get(DEFAULT));
        let expected = line.map_or("", |line| &line.token);
        let previous = line.and_then(|line| line.previous.as_deref()).unwrap_or(expected);
        let is_equal = |expected: &str| expected.as_bytes().ct_eq(token.as_bytes());
        let equal: bool = (is_equal(expected) | is_equal(previous)).into();
        match (equal, own) {
            (_, Some(own)) if own.token.is_empty() => Err(TokenError::Blocked(node.clone())),
            _ if expected.is_empty() => Err(TokenError::NoLine(node.clone())),
            (true, _) => Ok(()),
            (false, Some(_)) => Err(TokenError::Mismatch("the node's own line")),
            (false, None) => Err(TokenError::Mismatch("the default line")),
        }
    }

    /// Returns true if the node's own line has no token, so that nothing authenticates the node.
    pub fn is_blocked(&self, node: &NodeName) -> bool {
        self.lines.get(&node.as_str().to_ascii_lowercase()).is_some_and(|line| line.token.is_empty())
    }

    /// Returns true if nodes without a line share a token.
    pub fn has_default(&self) -> bool {
        self.lines.get(DEFAULT).is_some_and(|line| !line.token.is_empty())
    }

    /// Returns the nodes with a token or a previous token that can be guessed, sorted, including `default`.
    pub fn nodes_with_weak_tokens(&self) -> Vec<&str> {
        let is_short = |token: &str| !token.is_empty() && token.len() < MIN_TOKEN_BYTES;
        let weak = self.lines.iter().filter(|(node, line)| {
            line_name(node).is_ok()
                && (is_short(&line.token) || line.previous.as_deref().is_some_and(is_short))
        });
        let names: BTreeSet<_> = weak.map(|(node, _)| node.as_str()).collect();
        names.into_iter().collect()
    }

    /// Returns true if any node is blocked.
    pub fn has_blocked_nodes(&self) -> bool {
        self.lines.iter().any(|(node, line)| line.token.is_empty() && node != DEFAULT)
    }

    /// Returns the faulty lines, counted from 1, with their errors; at most `MAX_ERRORS`.
    pub fn errors(&self) -> &[(usize, &'static str)] {
        &self.errors
    }

    /// Returns true if the node has its own line.
    pub fn has_line(&self, node: &NodeName) -> bool {
        self.lines.contains_key(&node.as_str().to_ascii_lowercase())
    }

    /// Returns the nodes whose token was added, removed or changed since an earlier file, sorted, including `default`.
    pub fn changed_since<'a>(&'a self, earlier: &'a Self) -> Vec<&'a str> {
        let all = self
            .lines
            .keys()
            .chain(earlier.lines.keys())
            .filter(|node| self.lines.get(*node) != earlier.lines.get(*node));
        let names: BTreeSet<_> = all.map(String::as_str).filter(|name| line_name(name).is_ok()).collect();
        names.into_iter().collect()
    }

    /// Returns the nodes with a line, sorted, including `default`, each with what its line does. Text that is not the
    /// name of a node is left out: it may be a misplaced token.
    pub fn entries(&self) -> Vec<(&str, TokenLineState)> {
        let lines = self.lines.iter().filter(|(name, _)| line_name(name).is_ok());
        let state = |line: &TokenLine| match line {
            TokenLine { token, .. } if token.is_empty() => TokenLineState::Blocked,
            TokenLine { previous: Some(_), .. } => TokenLineState::Rotating,
            TokenLine { .. } => TokenLineState::Token,
        };
        let mut entries: Vec<_> = lines.map(|(node, line)| (node.as_str(), state(line))).collect();
        entries.sort_unstable_by_key(|(node, _)| *node);
        entries
    }

    /// Returns the number of lines that apply.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// Returns true if no line has a token.
    pub fn is_empty(&self) -> bool {
        self.lines.values().all(|line| line.token.is_empty())
    }
}

/// What the line of a node does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenLineState {
    /// The node has a token.
    Token,
    /// The node has a token, and its previous one is still accepted.
    Rotating,
    /// The line has no token, which blocks the node.
    Blocked,
}

/// Why the token of a node cannot be rotated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RotateError {
    /// No line applies to the node.
    #[error(
        "{0} has no line in the token file, and there is no default; a node that joined by invitation must be \
         invited again"
    )]
    NoLine(NodeName),
    /// The node's line has no token.
    #[error("the line of {0} has no token, which blocks the node; write a token there, or remove the line")]
    Blocked(NodeName),
    /// The earlier token of the node is still accepted, and a third one would exclude it.
    #[error("the previous token of {0} is still accepted; finish that rotation first")]
    Rotating(NodeName),
    /// The current token cannot follow `previous=`.
    #[error("the token of {0} contains a tab or a control character; write a new one into its line by hand")]
    Unusual(NodeName),
    /// The line has no previous token.
    #[error("{0} has no previous token in the token file; there is no rotation to finish")]
    Finished(NodeName),
}

/// Returns a token file's text in which `token` is the new token of the node, and its current one the previous one. A
/// node without its own line gets one.
///
/// # Errors
///
/// Returns an error if the node has no token now, or has a previous one.
pub fn rotate(text: &str, node: &NodeName, token: &str) -> Result<String, RotateError> {
    let tokens = NodeTokens::parse(text);
    let name = node.as_str().to_ascii_lowercase();
    let own = tokens.lines.get(&name);
    let line = own.or_else(|| tokens.lines.get(DEFAULT));
    let line = line.ok_or_else(|| RotateError::NoLine(node.clone()))?;
    let TokenLine { token: current, previous } = line;
    match (own, previous) {
        (Some(_), _) if current.is_empty() => Err(RotateError::Blocked(node.clone())),
        _ if current.is_empty() => Err(RotateError::NoLine(node.clone())),
        (_, Some(_)) => Err(RotateError::Rotating(node.clone())),
        _ if !is_token(current) => Err(RotateError::Unusual(node.clone())),
        _ => Ok(with_line(text, &name, &format!("{token} {PREVIOUS}{current}"))),
    }
}

/// Returns a token file's text without the previous token of the node.
///
/// # Errors
///
/// Returns an error if the node has no previous token.
pub fn finish_rotation(text: &str, node: &NodeName) -> Result<String, RotateError> {
    let tokens = NodeTokens::parse(text);
    let name = node.as_str().to_ascii_lowercase();
    match tokens.lines.get(&name) {
        Some(TokenLine { token, previous: Some(_) }) => Ok(with_line(text, &name, token)),
        _ => Err(RotateError::Finished(node.clone())),
    }
}

/// Replaces the tokens of the line that applies to the node, or appends one. Its addresses and other lines stay.
fn with_line(text: &str, name: &str, tokens: &str) -> String {
    let node_of = |line: &str| {
        let line = split_words(line).0.replace(' ', "");
        let node = line.split_once(':').map(|(node, _)| node.to_owned());
        node.filter(|node| node.eq_ignore_ascii_case(name))
    };
    let applies = text.lines().enumerate().filter(|(_, line)| node_of(line).is_some()).last();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    match applies {
        Some((at, line)) => {
            let addresses = split_words(line).1.ip.map_or_else(String::new, |list| format!(" {IP}{list}"));
            lines[at] = format!("{}:{tokens}{addresses}", node_of(line).unwrap_or_default());
        }
        None => lines.push(format!("{name}:{tokens}")),
    }
    lines.join("\n") + "\n"
}

/// The words after the token of a line, each without its name.
#[derive(Default)]
struct LineWords<'a> {
    ip: Option<&'a str>,
    previous: Option<&'a str>,
}

impl LineWords<'_> {
    /// Returns the addresses; `None` if they are invalid.
    fn addresses(&self) -> Option<Vec<IpAddr>> {
        self.ip.map_or_else(|| Some(Vec::new()), |list| list.split(',').map(|ip| ip.parse().ok()).collect())
    }
}

/// Splits off a line's last words that start with `ip=` or `previous=`, in any order.
fn split_words(line: &str) -> (&str, LineWords<'_>) {
    let mut rest = line;
    let mut words = LineWords::default();
    while let Some((before, word)) = rest.trim_end().rsplit_once([' ', '\t']) {
        if let Some(list) = word.strip_prefix(IP) {
            words.ip = Some(list);
        } else if let Some(previous) = word.strip_prefix(PREVIOUS) {
            words.previous = Some(previous);
        } else {
            break;
        }
        rest = before;
    }
    (rest, words)
}

/// Parses the name of a line: a node, or `default` for the line of all nodes without their own.
///
/// # Errors
///
/// Returns an error if no node can have that name.
pub fn line_name(text: &str) -> Result<NodeName, NameError> {
    if text.eq_ignore_ascii_case(DEFAULT) { Ok(NodeName::any()) } else { text.parse() }
}

/// Returns true if a token file can contain that token.
fn is_token(text: &str) -> bool {
    !text.is_empty() && !text.contains(|c: char| c == ':' || c.is_whitespace() || c.is_control())
}

/// Length in bytes from which a token cannot be guessed.
pub const MIN_TOKEN_BYTES: usize = 32;

/// Maximum number of faulty lines that are reported.
const MAX_ERRORS: usize = 20;

/// Name of the line for nodes without their own line.
const DEFAULT: &str = "default";

/// The words after a token: the node's addresses, and its earlier token.
const IP: &str = "ip=";
const PREVIOUS: &str = "previous=";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn verify(text: &str, node: &str, token: &str) -> bool {
        NodeTokens::parse(text).verify(&node.parse().unwrap(), token).is_ok()
    }

    #[test]
    fn a_node_uses_its_own_line_otherwise_the_default() {
        let text = "default:abc\n# no comment\nnode 1 : x y z :ignored\r\nnode2:old\nnode2:new\n";
        assert!(verify(text, "other", "abc") && verify(text, "node1", "xyz") && verify(text, "Node1", "xyz"));
        assert!(verify(text, "node2", "new") && !verify(text, "node2", "old"));
        assert!(!verify(text, "node1", "abc"), "a node with its own line cannot use the default");
    }

    #[test]
    fn a_node_with_a_line_without_a_token_is_blocked() {
        let is_blocked = |text, node: &str| NodeTokens::parse(text).is_blocked(&node.parse().unwrap());
        assert!(is_blocked("Node1:\nnode2:a", "nODE1") && is_blocked("node1: ip=10.0.0.7", "node1"));
        assert!(!is_blocked("node1:\nnode2:a", "node2") && !is_blocked("default:", "node1"));
        assert!(!is_blocked("node1:\nnode1:a", "node1"), "the last line applies");
        assert!(NodeTokens::parse("node1:").has_blocked_nodes());
        assert!(!NodeTokens::parse("default:\nnode1\nnode2:a").has_blocked_nodes());
    }

    #[test]
    fn a_shared_token_is_a_default_line_with_a_token() {
        assert!(NodeTokens::parse("node1:a\ndefault:b\n").has_default());
        assert!(!NodeTokens::parse("node1:a\ndefault:\n").has_default());
    }

    #[test]
    fn short_tokens_are_listed_by_node() {
        let long = "0123456789abcdef0123456789abcdef";
        let text = format!(
            "node1:{long}\nnode2:{long} previous=old\nnode3:new previous={long}\nnode4:\ndefault:1\n"
        );
        assert_eq!(NodeTokens::parse(&text).nodes_with_weak_tokens(), ["default", "node2", "node3"]);
    }

    #[test]
    fn an_empty_token_proves_no_node() {
        assert!(!verify("", "n", "") && !verify("default:", "n", "") && !verify("n:\ndefault:a", "n", ""));
        assert!(!verify("n:\ndefault:a", "n", "a"), "its own line applies, even an empty one");
    }

    #[test]
    fn each_reason_why_a_token_is_refused_has_its_own_error() {
        let why = |text, node: &str| {
            NodeTokens::parse(text).verify(&node.parse().unwrap(), "t").unwrap_err().to_string()
        };
        for (text, expected) in [
            ("node1:t", "the token file has no line for node7, and no default; invite the node"),
            ("default:", "the token file has no line for node7, and no default; invite the node"),
            ("default:t\nnode7:", "the line of node7 in the file that"),
            ("node7:a\ndefault:t", "the token differs from that of the node's own line in the file"),
            ("default:a", "the token differs from that of the default line in the file"),
        ] {
            let error = why(text, "node7");
            assert!(error.starts_with(expected), "{error}");
            assert!(error.contains("server.links.token_file"), "{error}");
        }
    }

    #[test]
    fn invalid_lines_are_reported_by_number_without_their_content() {
        let text =
            "# a:b:c\n\ndefault:s\nnode1 SECRET\nnode2:\nnode3:a:b\nNode4:a\nnode4:b\n!:a\n node5 : a \n";
        let tokens = NodeTokens::parse(text);
        let lines: Vec<usize> = tokens.errors().iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [4, 5, 6, 8, 9]);
        assert!(!format!("{:?}", tokens.errors()).contains("SECRET"));
        assert_eq!(NodeTokens::parse(&"x\n".repeat(1000)).errors().len(), MAX_ERRORS);
    }

    #[test]
    fn a_line_may_list_the_nodes_addresses_after_the_token() {
        let text = "edge7:secret ip=10.0.0.7,fd00::7\nedge8 : s e c r e t\tip=10.0.0.8 \nedge9:a ip=10.0.0.9\nedge9:a\n\
                    default:d ip=10.0.0.1\nip=10.0.0.2\n";
        let tokens = NodeTokens::parse(text);
        assert!(
            verify(text, "edge7", "secret") && verify(text, "edge8", "secret"),
            "they are no part of the token"
        );
        let mut ips: Vec<_> = tokens.ips().iter().map(|(ip, node)| format!("{ip} {node}")).collect();
        ips.sort();
        assert_eq!(
            ips,
            ["10.0.0.7 edge7", "10.0.0.8 edge8", "fd00::7 edge7"],
            "the later line applies, and the default has no address"
        );
        let wrong = NodeTokens::parse("edge7:secret ip=10.0.0.300\n");
        assert_eq!((wrong.ips().len(), wrong.errors()[0].0), (0, 1));
        assert!(wrong.verify(&"edge7".parse().unwrap(), "secret").is_ok(), "its token is valid nevertheless");
    }

    #[test]
    fn a_line_may_have_a_previous_token_and_both_prove_the_node() {
        let text = "node7:NEW previous=OLD\nnode8:N ip=10.0.0.8 previous=O\nnode9:a previous=b\nnode9:c previous=d \n\
                    default:D previous=E\n";
        assert!(verify(text, "node7", "NEW") && verify(text, "node7", "OLD"));
        assert!(verify(text, "node8", "N") && verify(text, "node8", "O"));
        assert!(verify(text, "node9", "c") && verify(text, "node9", "d"), "the later line applies");
        assert!(!verify(text, "node9", "a") && !verify(text, "node9", "b"));
        assert!(verify(text, "other", "E") && !verify(text, "node7", "E"));
        assert!(!verify(text, "node7", "NEWprevious=OLD") && !verify(text, "node7", ""));
        assert_eq!(NodeTokens::parse(text).ips().len(), 1);
        assert!(!verify("node7: previous=OLD", "node7", "OLD"), "the node is blocked");
        for bad in ["node7:a previous=", "node7:a previous=b:c"] {
            let tokens = NodeTokens::parse(bad);
            assert!(tokens.errors()[0].1.contains("previous="), "{bad}");
            assert!(verify(bad, "node7", "a") && !verify(bad, "node7", "") && !verify(bad, "node7", "b"));
        }
        let changed = NodeTokens::parse("node7:NEW\n");
        assert_eq!(NodeTokens::parse("node7:NEW previous=OLD").changed_since(&changed), ["node7"]);
    }

    #[test]
    fn changed_since_returns_the_names_of_changed_lines() {
        let earlier = NodeTokens::parse("default:a\nsame:b\nother:c\ngone:d\n");
        let later = NodeTokens::parse("default:e\nsame:b\nother:f\nnew:g\nno name!:h\n");
        assert_eq!(later.changed_since(&earlier), ["default", "gone", "new", "other"]);
        assert_eq!(later.changed_since(&later), Vec::<&str>::new());
    }

    #[test]
    fn a_rotation_keeps_both_tokens_and_every_other_line_until_it_is_finished() {
        let text = "# mine\nnode7:a\nNode7 : o l d ip=10.0.0.7\nnode8:b";
        let node = "node7".parse().unwrap();
        let rotated = rotate(text, &node, "new").unwrap();
        assert_eq!(rotated, "# mine\nnode7:a\nNode7:new previous=old ip=10.0.0.7\nnode8:b\n");
        assert_eq!(rotate(&rotated, &node, "newer"), Err(RotateError::Rotating(node.clone())));
        let finished = finish_rotation(&rotated, &node).unwrap();
        assert_eq!(finished, "# mine\nnode7:a\nNode7:new ip=10.0.0.7\nnode8:b\n");
        assert_eq!(finish_rotation(&finished, &node), Err(RotateError::Finished(node.clone())));
        let shared = rotate("default:d\n", &node, "new").unwrap();
        assert_eq!(shared, "default:d\nnode7:new previous=d\n");
        for (text, error) in [
            ("node8:b\n", RotateError::NoLine(node.clone())),
            ("default:\n", RotateError::NoLine(node.clone())),
            ("default:d\nnode7:\n", RotateError::Blocked(node.clone())),
            ("default:d previous=e\n", RotateError::Rotating(node.clone())),
        ] {
            assert_eq!(rotate(text, &node, "new"), Err(error), "{text}");
        }
    }

    #[test]
    fn entries_have_names_and_no_tokens() {
        let tokens = NodeTokens::parse("node2:a previous=b\nnode1:c\nSECRET !:d\nnode3:\ndefault:e\n");
        let entries = [
            ("default", TokenLineState::Token),
            ("node1", TokenLineState::Token),
            ("node2", TokenLineState::Rotating),
            ("node3", TokenLineState::Blocked),
        ];
        assert_eq!(tokens.entries(), entries);
    }

    proptest! {
        #[test]
        fn after_a_rotation_both_tokens_prove_the_node_and_others_keep_theirs(
            lines in proptest::collection::vec("(node[1-3]|default)? ?:?[a-c]{0,2}( previous=[a-c])?( ip=10[.]0[.]0[.]1)?\t?", 0..6),
            at in 1..4,
        ) {
            let text = lines.join("\n");
            let node: NodeName = format!("node{at}").parse().unwrap();
            let before = NodeTokens::parse(&text);
            if let Ok(rotated) = rotate(&text, &node, "new") {
                let after = NodeTokens::parse(&rotated);
                prop_assert!(after.verify(&node, "new").is_ok());
                for token in ["a", "b", "ab", "ca"] {
                    for n in 1..4 {
                        let other: NodeName = format!("node{n}").parse().unwrap();
                        prop_assert_eq!(after.verify(&other, token).is_ok(), before.verify(&other, token).is_ok());
                    }
                }
                let finished = NodeTokens::parse(&finish_rotation(&rotated, &node).unwrap());
                prop_assert!(finished.verify(&node, "new").is_ok());
                prop_assert!(finished.verify(&node, "a").is_err());
            }
        }

        #[test]
        fn parsing_never_panics_and_debug_output_has_no_token(text in ".{0,200}") {
            let tokens = NodeTokens::parse(&text);
            prop_assert_eq!(format!("{tokens:?}"), format!("Tokens({} lines)", tokens.len()));
        }
    }
}
