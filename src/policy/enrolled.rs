//! Nodes that have joined by invitation: what all pods of a cloud share of them. Of secrets it holds hashes alone.

use std::collections::BTreeMap;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

use crate::names::NodeName;

/// Invitations, and the tokens of those who have used one. Times are seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Enrolled {
    /// By the hash of their secret.
    invitations: BTreeMap<SecretHash, Invitation>,
    /// By the node's name in small letters.
    tokens: BTreeMap<String, SecretHash>,
}

/// A hash of a secret that nobody can guess. Two that are equal are of the same secret.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretHash(String);

/// One invitation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Invitation {
    /// In small letters.
    node: String,
    until: u64,
    /// The token of the one who has used it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    used_for: Option<SecretHash>,
}

/// Why an invitation does not count; a sentence for who wants to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Uninvited {
    /// Nobody has made such a one, or not any more.
    #[error("there is no such invitation, or not any more: ask for a new one")]
    Unknown,
    /// It was made for another node.
    #[error("the invitation is for another node: use that one's name, or ask for one for this node")]
    OtherNode,
    /// Somebody has joined with it.
    #[error(
        "the invitation has been used already: ask for a new one; if it was not you, tell those who run the cloud"
    )]
    Used,
    /// Its time is over.
    #[error("the invitation has expired: ask for a new one")]
    Expired,
}

/// There are as many open invitations as there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{MOST_OPEN} invitations are open: wait until some have been used or have expired")]
pub struct TooMany;

impl SecretHash {
    /// Of this secret.
    pub fn of(secret: &str) -> Self {
        Self(URL_SAFE_NO_PAD.encode(digest(&SHA256, secret.as_bytes())))
    }

    fn is(&self, other: &Self) -> bool {
        self.0.as_bytes().ct_eq(other.0.as_bytes()).into()
    }
}

impl Enrolled {
    /// Reads what [`Self::to_text`] has written; an empty text is one without nodes.
    ///
    /// # Errors
    ///
    /// It is something else.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        if text.trim_ascii().is_empty() {
            return Ok(Self::default());
        }
        serde_json::from_slice(text)
            .map_err(|cause| format!("it does not hold what pods have written: {cause}"))
    }

    /// As JSON.
    pub fn to_text(&self) -> Vec<u8> {
        // Fails for maps whose keys are no texts.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Makes an invitation; an open one for the same node is void from now on. What nobody asks for any more is forgotten.
    ///
    /// # Errors
    ///
    /// There are too many.
    pub fn invite(
        &mut self,
        secret: SecretHash,
        node: &NodeName,
        until: u64,
        now: u64,
    ) -> Result<(), TooMany> {
        let node = small(node);
        self.invitations.retain(|_, one| {
            one.until.saturating_add(REMEMBERED) > now && (one.used_for.is_some() || one.node != node)
        });
        let open = self.invitations.values().filter(|one| one.used_for.is_none()).count();
        if open >= MOST_OPEN {
            return Err(TooMany);
        }
        self.invitations.insert(secret, Invitation { node, until, used_for: None });
        Ok(())
    }

    /// Uses an invitation: from now on the node proves itself with that token, and with no earlier one. To ask again with
    /// the same token is no second use. Whether it was the first.
    ///
    /// # Errors
    ///
    /// The invitation does not count.
    pub fn join(
        &mut self,
        secret: &SecretHash,
        node: &NodeName,
        token: SecretHash,
        now: u64,
    ) -> Result<bool, Uninvited> {
        let node = small(node);
        let invitation = self.invitations.get_mut(secret).ok_or(Uninvited::Unknown)?;
        if invitation.node != node {
            return Err(Uninvited::OtherNode);
        }
        match &invitation.used_for {
            Some(used) if used.is(&token) && self.tokens.get(&node) == Some(used) => return Ok(false),
            Some(_) => return Err(Uninvited::Used),
            None if now >= invitation.until => return Err(Uninvited::Expired),
            None => {}
        }
        invitation.used_for = Some(token.clone());
        self.tokens.insert(node, token);
        Ok(true)
    }

    /// Takes a node's token and its open invitations away. Whether there was any.
    pub fn revoke(&mut self, node: &NodeName) -> bool {
        let (node, before) = (small(node), self.invitations.len());
        self.invitations.retain(|_, one| one.used_for.is_some() || one.node != node);
        self.tokens.remove(&node).is_some() || self.invitations.len() < before
    }

    /// Whether `token` is the one with which the node has joined; `None`: it has not.
    pub fn proves(&self, node: &NodeName, token: &str) -> Option<bool> {
        self.tokens.get(&small(node)).map(|known| known.is(&SecretHash::of(token)))
    }

    /// Whether the node has joined.
    pub fn names(&self, node: &NodeName) -> bool {
        self.tokens.contains_key(&small(node))
    }
}

fn small(node: &NodeName) -> String {
    node.as_str().to_ascii_lowercase()
}

/// For how long an invitation that is over is remembered, so that whoever is late is told why.
const REMEMBERED: u64 = 24 * 3600;

/// Open invitations: an operator makes one for each machine that is being set up.
const MOST_OPEN: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn of(secret: &str) -> SecretHash {
        SecretHash::of(secret)
    }

    fn invited() -> Enrolled {
        let mut enrolled = Enrolled::default();
        enrolled.invite(of("secret"), &node("edge7"), 1000, 0).unwrap();
        enrolled
    }

    #[test]
    fn an_invitation_counts_once_in_its_time_for_its_node() {
        let mut enrolled = invited();
        let edge = node("Edge7");
        assert_eq!(enrolled.join(&of("other"), &edge, of("t"), 1), Err(Uninvited::Unknown));
        assert_eq!(enrolled.join(&of("secret"), &node("edge8"), of("t"), 1), Err(Uninvited::OtherNode));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 1000), Err(Uninvited::Expired));
        assert_eq!(enrolled.proves(&edge, "t"), None);
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 999), Ok(true));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 2000), Ok(false), "its answer was lost");
        assert_eq!(enrolled.join(&of("secret"), &edge, of("u"), 999), Err(Uninvited::Used));
        assert_eq!(enrolled.join(&of("secret"), &node("edge8"), of("t"), 999), Err(Uninvited::OtherNode));
        assert_eq!((enrolled.proves(&edge, "t"), enrolled.proves(&edge, "u")), (Some(true), Some(false)));
        assert!(enrolled.names(&node("edge7")) && !enrolled.names(&node("edge8")));
    }

    #[test]
    fn who_joins_again_has_a_new_token_and_an_old_one_never_comes_back() {
        let mut enrolled = invited();
        let edge = node("edge7");
        enrolled.join(&of("secret"), &edge, of("t"), 1).unwrap();
        enrolled.invite(of("second"), &edge, 1000, 2).unwrap();
        enrolled.join(&of("second"), &edge, of("u"), 3).unwrap();
        assert_eq!((enrolled.proves(&edge, "t"), enrolled.proves(&edge, "u")), (Some(false), Some(true)));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 4), Err(Uninvited::Used));
        assert!(enrolled.revoke(&edge) && !enrolled.revoke(&edge));
        assert_eq!(enrolled.proves(&edge, "u"), None);
        assert_eq!(enrolled.join(&of("second"), &edge, of("u"), 5), Err(Uninvited::Used), "it was revoked");
    }

    #[test]
    fn a_newer_invitation_for_a_node_takes_the_place_of_an_open_one_and_revoking_takes_it_away() {
        let mut enrolled = invited();
        let edge = node("edge7");
        enrolled.invite(of("second"), &edge, 1000, 0).unwrap();
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 1), Err(Uninvited::Unknown));
        assert!(enrolled.revoke(&edge));
        assert_eq!(enrolled.join(&of("second"), &edge, of("t"), 1), Err(Uninvited::Unknown));
    }

    #[test]
    fn there_are_bounds_and_the_late_are_told_so_for_a_day() {
        let mut enrolled = invited();
        for n in 1..MOST_OPEN {
            enrolled.invite(of(&n.to_string()), &node(&format!("n{n}")), 1000, 0).unwrap();
        }
        assert_eq!(enrolled.invite(of("more"), &node("more"), 1000, 0), Err(TooMany));
        enrolled.invite(of("later"), &node("later"), 100_000, 1000 + REMEMBERED).unwrap();
        assert_eq!(enrolled.invitations.len(), 1);
    }

    #[test]
    fn it_is_read_as_it_was_written_and_shows_no_secret() {
        let mut enrolled = invited();
        enrolled.join(&of("secret"), &node("edge7"), of("token"), 1).unwrap();
        let text = enrolled.to_text();
        assert_eq!(Enrolled::parse(&text), Ok(enrolled));
        let text = String::from_utf8(text).unwrap();
        assert!(!text.contains("\"secret\"") && !text.contains("\"token\""), "{text}");
        assert_eq!(Enrolled::parse(b" \n"), Ok(Enrolled::default()));
        assert!(Enrolled::parse(b"{\"nodes\":[]}").unwrap_err().contains("what pods have written"));
    }
}
