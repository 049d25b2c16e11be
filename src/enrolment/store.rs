//! Nodes and devices of users that have joined by invitation, as a text shared by all servers: in a file, in etcd, or
//! in a Secret.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

use crate::enrolment::seen::{SeenMachine, SeenMachines, is_default};
use crate::invitations::ListedEnrolment;
use crate::invitations::invitee::Invitee;
use tunnel_proto::names::{NodeName, UserDevice};

/// Invitations, and the tokens of nodes and devices that have used one; or in a text of its own, which older servers need
/// not understand, the grants of users, or when machines were seen. Times are seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolments {
    /// Invitations by the hash of their secret.
    #[serde(default)]
    invitations: BTreeMap<SecretHash, StoredInvitation>,
    /// Tokens by [`Invitee::key`] of a node or a device. Only a text of a server has this field.
    tokens: BTreeMap<String, SecretHash>,
    /// Grants as they were written: also those of newer servers, which give nothing here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) grants: Vec<serde_json::Value>,
    /// When machines were seen.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) seen: SeenMachines,
    /// Fields of newer servers, which older ones must not drop.
    #[serde(flatten)]
    unknown: BTreeMap<String, serde_json::Value>,
}

/// The hash of a secret. The secret is random and long, so the hash needs no salt.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretHash(String);

/// An invitation in the [`Enrolments`], stored under the hash of its code. One for several nodes is a join key.
///
/// Older servers keep the fields of a key and refuse it, as no node's name is its pattern.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StoredInvitation {
    /// [`Invitee::key`] of the node, pattern or user that it is for.
    node: String,
    /// Expiration time in seconds since 1970.
    until: u64,
    /// Token of the machine that used the invitation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    used_for: Option<SecretHash>,
    /// Number of nodes that may use it; only a join key has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uses: Option<u32>,
    /// The nodes that have used the join key, in lower case. False once the node has another token, or none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    nodes: BTreeMap<String, bool>,
    /// The token that the node had before, which also proves it until the new one has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous: Option<PreviousToken>,
    /// Whether the device that uses it remains even if it is unused.
    #[serde(default, skip_serializing_if = "is_default")]
    keep: bool,
    /// Whether it only notes that the device with this token has ended at `until`, because it was unused.
    #[serde(default, skip_serializing_if = "is_default")]
    unused: bool,
    /// Fields of newer servers, which older ones must not drop.
    #[serde(flatten)]
    unknown: BTreeMap<String, serde_json::Value>,
}

/// A token that another one has replaced. Servers that do not know it keep it, and refuse it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PreviousToken {
    token: SecretHash,
    /// Expiration time in seconds since 1970.
    until: u64,
}

/// Why an invitation is not valid for this machine, to which it is sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvitationError {
    /// The invitation never existed or was forgotten.
    #[error("there is no such invitation; it may be too old; ask for a new one")]
    Unknown,
    /// The invitation is for another node or user.
    #[error(
        "the invitation is for another node or user; use that name, or ask for an invitation for this one"
    )]
    OtherSubject,
    /// The invitation has already been used.
    #[error(
        "the invitation has been used already; ask for a new one, and inform the operator if you did not use it"
    )]
    Used,
    /// The invitation has expired.
    #[error("the invitation has expired; ask for a new one")]
    Expired,
    /// Another machine of the user has joined under this name.
    #[error("the user has a device of this name; set another --device, or have that one revoked")]
    DeviceTaken,
    /// As many nodes as the join key admits have joined.
    #[error("the join key admits {0} nodes, and as many have joined; ask for another key")]
    UsedUp(u32),
    /// The node that requests to join by a key has a token.
    #[error(
        "another machine is node {0}; set another --node, or have its token revoked or removed from the token file, and \
         ask for an invitation by its name"
    )]
    NodeTaken(String),
    /// The node had joined by this key, and then lost its token.
    #[error("node {0} has used this join key already and was revoked; ask for an invitation by its name")]
    NodeRevoked(String),
}

impl SecretHash {
    /// Returns the hash of a secret.
    pub fn of(secret: &str) -> Self {
        Self(URL_SAFE_NO_PAD.encode(digest(&SHA256, secret.as_bytes())))
    }

    fn equals(&self, other: &Self) -> bool {
        self.0.as_bytes().ct_eq(other.0.as_bytes()).into()
    }

    /// Returns the ID of the join key with this hash, which is no secret.
    pub(crate) fn id(&self) -> String {
        let bytes = URL_SAFE_NO_PAD.decode(&self.0).unwrap_or_default();
        bytes.iter().take(KEY_ID_BYTES).map(|byte| format!("{byte:02x}")).collect()
    }
}

impl StoredInvitation {
    /// Returns true if a machine may still use it, unless it has expired.
    fn is_open(&self) -> bool {
        match self.uses {
            Some(_) => self.left() > 0,
            None => self.used_for.is_none(),
        }
    }

    /// Returns how many nodes may still use the join key.
    fn left(&self) -> u32 {
        self.uses.unwrap_or_default().saturating_sub(self.used())
    }

    /// Returns how many nodes have used the join key.
    fn used(&self) -> u32 {
        u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)
    }

    /// Returns the nodes whose tokens were made by the join key.
    fn members(&self) -> impl Iterator<Item = &String> {
        self.nodes.iter().filter_map(|(node, is_current)| is_current.then_some(node))
    }

    /// Checks a join by a key. `known` is the token that the node has, if any.
    fn check_key(
        &self,
        uses: u32,
        node: String,
        known: Option<&SecretHash>,
        token: &SecretHash,
        now: u64,
    ) -> Result<bool, InvitationError> {
        let used = self.nodes.get(&node);
        match known {
            Some(known) if used == Some(&true) && known.equals(token) => Ok(false),
            Some(_) => Err(InvitationError::NodeTaken(node)),
            None if used.is_some() => Err(InvitationError::NodeRevoked(node)),
            None if now >= self.until => Err(InvitationError::Expired),
            None if self.left() == 0 => Err(InvitationError::UsedUp(uses)),
            None => Ok(true),
        }
    }
}

impl Enrolments {
    /// Adds an invitation of a node or user, or a join key for `uses` nodes. It replaces an open one for the same node,
    /// while a user or a pattern may have several. Also removes invitations that expired over a day ago, but no key
    /// while a node that came by it remains.
    ///
    /// # Errors
    ///
    /// Fails if there are too many open invitations.
    pub fn invite(
        &mut self,
        secret: SecretHash,
        invitee: &Invitee,
        uses: Option<u32>,
        until: u64,
        now: u64,
    ) -> Result<(), String> {
        let node = invitee.key();
        let is_recent = |one: &StoredInvitation| one.until.saturating_add(EXPIRED_RETENTION) > now;
        self.invitations.retain(|_, one| {
            let is_replaced = one.is_open() && one.node == node && invitee.node().is_some();
            !is_replaced && (is_recent(one) || one.members().next().is_some())
        });
        let open = self.invitations.values().filter(|one| one.is_open() && is_recent(one)).count();
        if open >= MAX_OPEN {
            return Err(format!(
                "limit of {MAX_OPEN} open invitations reached; wait until some are used or expire"
            ));
        }
        self.invitations
            .insert(secret, StoredInvitation { node, until, uses, ..StoredInvitation::default() });
        Ok(())
    }

    /// Lets the device that uses an invitation remain even if it is unused.
    pub(super) fn keep(&mut self, secret: &SecretHash) {
        if let Some(invitation) = self.invitations.get_mut(secret) {
            invitation.keep = true;
        }
    }

    /// Returns all that have joined, by [`Invitee::key`], and while the invitation is known, whether it keeps the device.
    pub(super) fn machines(&self) -> impl Iterator<Item = (&String, Option<bool>)> {
        let used = self.invitations.values().filter_map(|one| Some((one.used_for.as_ref()?, one.keep)));
        let keep: BTreeMap<_, _> = used.collect();
        self.tokens.iter().map(move |(name, token)| (name, keep.get(token).copied()))
    }

    /// Ends the first of these devices: within a day a tenth of all at most, as a clock may be wrong, but at least one.
    /// Returns which.
    pub(super) fn end_unused(&mut self, unused: &[&String], now: u64) -> Vec<String> {
        let is_of_today = |one: &&StoredInvitation| one.unused && one.until.saturating_add(24 * 3600) > now;
        let ended = self.invitations.values().filter(is_of_today).count();
        let devices = ended + self.tokens.keys().filter(|key| key.contains('/')).count();
        let most = (devices / 10).max(1).saturating_sub(ended);
        let ended =
            unused.iter().filter_map(|name| self.tokens.remove_entry(*name)).take(most).collect::<Vec<_>>();
        for (name, token) in &ended {
            // Servers that do not know it keep it: an invitation that is used. So all learn the reason at once.
            let note = self.invitations.entry(token.clone()).or_default();
            note.node.clone_from(name);
            note.until = now;
            note.unused = true;
            note.used_for = Some(token.clone());
        }
        ended.into_iter().map(|(name, _)| name).collect()
    }

    /// Returns true if the device with this token has ended because it was unused. That is known for a day.
    pub(super) fn was_unused(&self, token: &SecretHash) -> bool {
        self.invitations.get(token).is_some_and(|one| one.unused)
    }

    /// Returns the ID of the join key that has that secret, if it is one.
    pub(crate) fn key_of(&self, secret: &SecretHash) -> Option<String> {
        self.invitations.get(secret).filter(|one| one.uses.is_some()).map(|_| secret.id())
    }

    /// Returns true if this token may use the invitation, and false if it has used it already.
    ///
    /// # Errors
    ///
    /// Fails if the invitation is not valid.
    pub fn check(
        &self,
        secret: &SecretHash,
        joiner: &Invitee,
        token: &SecretHash,
        now: u64,
    ) -> Result<bool, InvitationError> {
        let known = self.tokens.get(&joiner.key());
        let invitation = self.invitations.get(secret).ok_or(InvitationError::Unknown)?;
        if !invitation.node.parse::<Invitee>().is_ok_and(|invitee| invitee.admits(joiner)) {
            return Err(InvitationError::OtherSubject);
        }
        if let Some(uses) = invitation.uses {
            return invitation.check_key(uses, joiner.key(), known, token, now);
        }
        match &invitation.used_for {
            Some(used) if used.equals(token) && known == Some(used) => Ok(false),
            Some(_) => Err(InvitationError::Used),
            None if now >= invitation.until => Err(InvitationError::Expired),
            // The invitation does not name the device, so a second machine of that name is a mistake.
            None if joiner.device().is_some() && known.is_some() => Err(InvitationError::DeviceTaken),
            None => Ok(true),
        }
    }

    /// Uses an invitation: from now on this token proves the node or device, and the node's previous one until this one
    /// does, or for ten minutes. Repeating the request with the same token has no effect. Returns true on the first use.
    ///
    /// # Errors
    ///
    /// Fails like [`Self::check`].
    pub fn join(
        &mut self,
        secret: &SecretHash,
        joiner: &Invitee,
        token: SecretHash,
        now: u64,
    ) -> Result<bool, InvitationError> {
        let is_first = self.check(secret, joiner, &token, now)?;
        let name = joiner.key();
        if is_first {
            self.leave_keys(&name);
        }
        if let Some(invitation) = self.invitations.get_mut(secret).filter(|_| is_first) {
            if invitation.uses.is_some() {
                invitation.nodes.insert(name.clone(), true);
            } else {
                invitation.used_for = Some(token.clone());
                let until = now.saturating_add(PREVIOUS_TOKEN_TIME);
                let previous = self.tokens.get(&name).cloned();
                invitation.previous = previous.map(|token| PreviousToken { token, until });
            }
            self.tokens.insert(name, token);
        }
        Ok(is_first)
    }

    /// Notes that the token of a node is no longer the one that it has made by a join key.
    fn leave_keys(&mut self, node: &str) {
        for key in self.invitations.values_mut() {
            if let Some(is_current) = key.nodes.get_mut(node) {
                *is_current = false;
            }
        }
    }

    /// Revokes a node's or device's token, or those of all devices of a user, and the open invitations of that node or
    /// user. Returns true if there were any. A join key is ended by [`Self::end_key`] only.
    pub fn revoke(&mut self, subject: &Invitee) -> bool {
        let key = subject.key();
        let before = self.invitations.len() + self.tokens.len();
        let is_user = subject.user().is_some() && subject.device().is_none();
        self.invitations.retain(|_, one| one.uses.is_some() || one.used_for.is_some() || one.node != key);
        self.tokens.retain(|one, _| *one != key && !(is_user && one.starts_with(&key)));
        self.leave_keys(&key);
        self.invitations.len() + self.tokens.len() < before
    }

    /// Ends the join key with that ID, so that no further node joins by it, and with `nodes` also revokes the tokens of
    /// those that came by it. Returns true if that changes anything.
    pub fn end_key(&mut self, id: &str, nodes: bool, now: u64) -> bool {
        let mut keys = self.invitations.iter_mut().filter(|(_, one)| one.uses.is_some());
        let Some((hash, key)) = keys.find(|(hash, _)| hash.id() == id) else { return false };
        let was_open = key.is_open() && key.until > now;
        // The names of revoked nodes are kept for a day from now.
        key.until = if nodes { now } else { key.until.min(now) };
        let members: Vec<_> = key.members().cloned().collect();
        // While it is known, it tells which nodes came by it, also those that are still linked to another server.
        if nodes {
            key.nodes.values_mut().for_each(|is_current| *is_current = false);
            members.iter().for_each(|node| drop(self.tokens.remove(node)));
        } else if key.nodes.is_empty() {
            let hash = hash.clone();
            self.invitations.remove(&hash);
        }
        was_open || nodes && !members.is_empty()
    }

    /// Returns the nodes and devices that have joined, with their times, and the nodes and users with an open invitation,
    /// sorted by name, then the join keys.
    pub(super) fn list(&self, now: u64, times: impl Fn(&str) -> SeenMachine) -> Vec<ListedEnrolment> {
        let enrolled = |key: &str, joined| {
            let machine = if joined { times(key) } else { SeenMachine::default() };
            let (node, user) = key.split_once('/').map_or((Some(key), None), |both| (None, Some(both)));
            let owned = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
            ListedEnrolment {
                node: node.map(str::to_owned),
                user: user.and_then(|(user, _)| owned(user)),
                device: user.and_then(|(_, device)| owned(device)),
                joined,
                joined_at: machine.joined,
                last_seen: machine.seen,
                ends: machine.left(key).filter(|_| joined).map(|left| now.saturating_add(left)),
                ..ListedEnrolment::default()
            }
        };
        let mut all: BTreeMap<&String, ListedEnrolment> =
            self.tokens.keys().map(|key| (key, enrolled(key, true))).collect();
        let mut keys = Vec::new();
        for (hash, invitation) in &self.invitations {
            let StoredInvitation { node, until, uses, .. } = invitation;
            let invited_until = Some(*until).filter(|until| *until > now && invitation.is_open());
            let all_left = !invitation.nodes.is_empty() && invitation.members().next().is_none();
            if uses.is_some() && all_left && invited_until.is_none() {
                continue;
            }
            if uses.is_some() {
                let key = hash.id();
                let pattern = Some(node.clone());
                let used = Some(invitation.used());
                for node in invitation.members() {
                    all.entry(node).and_modify(|one| one.key = Some(key.clone()));
                }
                let key = Some(key);
                keys.push(ListedEnrolment {
                    key,
                    pattern,
                    uses: *uses,
                    used,
                    invited_until,
                    ..ListedEnrolment::default()
                });
            } else if invited_until.is_some() {
                let one = all.entry(node).or_insert_with(|| enrolled(node, false));
                one.invited_until = one.invited_until.max(invited_until);
            }
        }
        all.into_values().chain(keys).collect()
    }

    /// Returns whether `token` is the one with which the node joined, or its previous one. Returns `None` if the node
    /// has not joined.
    pub fn proves(&self, node: &NodeName, token: &str) -> Option<bool> {
        let known = self.tokens.get(&lower_case(node))?;
        let token = SecretHash::of(token);
        // The current token proves nearly all nodes, and all of them are judged at each change of the store.
        if known.equals(&token) {
            return Some(true);
        }
        Some(self.previous_of(known).is_some_and(|previous| previous.token.equals(&token)))
    }

    /// Returns true if the node has joined with `token`, and its previous one is still valid.
    pub fn replaces(&self, node: &NodeName, token: &str) -> bool {
        let known = self.tokens.get(&lower_case(node));
        known.is_some_and(|known| known.equals(&SecretHash::of(token)) && self.previous_of(known).is_some())
    }

    fn previous_of(&self, token: &SecretHash) -> Option<&PreviousToken> {
        let mut replaced = self.invitations.values().filter(|one| one.previous.is_some());
        replaced.find(|one| one.used_for.as_ref() == Some(token))?.previous.as_ref()
    }

    /// Ends the previous token of a node that has proved itself with `token`. Returns true if there was one.
    pub fn end_previous(&mut self, node: &NodeName, token: &str) -> bool {
        let ends = self.replaces(node, token);
        let token = SecretHash::of(token);
        let used = self.invitations.values_mut().filter(|one| ends && one.used_for.as_ref() == Some(&token));
        used.for_each(|one| one.previous = None);
        ends
    }

    /// Returns true if `token` is the one with which that device joined.
    pub fn proves_device(&self, device: &UserDevice, token: &SecretHash) -> bool {
        self.tokens.get(&device.to_string()).is_some_and(|known| known.equals(token))
    }

    /// Returns the nodes that have joined, in lower case.
    pub fn joined(&self) -> BTreeSet<String> {
        self.tokens.keys().filter(|key| !key.contains('/')).cloned().collect()
    }

    /// Returns the nodes that have joined by a key, also those that were revoked since, but not those that have joined
    /// again otherwise.
    pub fn joined_by_key(&self) -> HashSet<NodeName> {
        let nodes = self.invitations.values().flat_map(|key| &key.nodes);
        let by_key = nodes.filter(|(node, is_current)| **is_current || !self.tokens.contains_key(*node));
        by_key.filter_map(|(node, _)| node.parse().ok()).collect()
    }

    /// Returns true if the node or device of this key has joined.
    pub fn has_joined(&self, key: &str) -> bool {
        self.tokens.contains_key(key)
    }

    /// Returns true if the node has joined.
    pub fn names(&self, node: &NodeName) -> bool {
        self.tokens.contains_key(&lower_case(node))
    }

    /// Returns a text that is another one for each token of a node, in lower case, or device.
    pub(crate) fn token_id(&self, name: &str) -> Option<String> {
        self.tokens.get(name).map(SecretHash::id)
    }

    /// Parses the output of [`Self::to_text`]; an empty text is the default.
    ///
    /// # Errors
    ///
    /// Fails for any other text.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        if text.trim_ascii().is_empty() {
            return Ok(Self::default());
        }
        serde_json::from_slice(text)
            .map_err(|cause| format!("the content was not written by a server: {cause}"))
    }

    /// Returns the text, as JSON.
    pub fn to_text(&self) -> Vec<u8> {
        // Only fails for maps with keys that are not strings.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Returns the state without previous tokens that have ended by this time (Unix seconds); `None` if none has.
    pub(super) fn expired(&self, now: u64) -> Option<Self> {
        let has_expired =
            |one: &StoredInvitation| one.previous.as_ref().is_some_and(|previous| previous.until <= now);
        self.invitations.values().any(has_expired).then(|| {
            let mut left = self.clone();
            left.invitations.values_mut().filter(|one| has_expired(one)).for_each(|one| one.previous = None);
            left
        })
    }
}

fn lower_case(node: &NodeName) -> String {
    Invitee::Node(node.clone()).key()
}

/// Time in seconds after which expired invitations are removed. Until then a late machine learns the reason.
const EXPIRED_RETENTION: u64 = 24 * 3600;

/// Time in seconds for which the previous token of a node stays valid.
const PREVIOUS_TOKEN_TIME: u64 = 600;

/// Enough that no two keys of a store have the same ID.
const KEY_ID_BYTES: usize = 5;

/// Maximum number of open invitations: operators create one for each machine being set up.
const MAX_OPEN: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn subject(text: &str) -> Invitee {
        text.parse().unwrap()
    }

    fn unseen(_: &str) -> SeenMachine {
        serde_json::from_str(r#"{"hold":true}"#).unwrap()
    }

    fn of(secret: &str) -> SecretHash {
        SecretHash::of(secret)
    }

    fn invited() -> Enrolments {
        let mut enrolled = Enrolments::default();
        enrolled.invite(of("secret"), &subject("edge7"), None, 1000, 0).unwrap();
        enrolled
    }

    #[test]
    fn an_invitation_is_valid_once_before_expiry_and_for_its_node_only() {
        let mut enrolled = invited();
        let (edge, name) = (subject("Edge7"), node("Edge7"));
        assert_eq!(enrolled.join(&of("other"), &edge, of("t"), 1), Err(InvitationError::Unknown));
        assert_eq!(
            enrolled.join(&of("secret"), &subject("edge8"), of("t"), 1),
            Err(InvitationError::OtherSubject)
        );
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 1000), Err(InvitationError::Expired));
        assert_eq!(enrolled.proves(&name, "t"), None);
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 999), Ok(true));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 2000), Ok(false), "its response was lost");
        assert_eq!(enrolled.join(&of("secret"), &edge, of("u"), 999), Err(InvitationError::Used));
        assert_eq!(
            enrolled.join(&of("secret"), &subject("edge8"), of("t"), 999),
            Err(InvitationError::OtherSubject)
        );
        assert_eq!((enrolled.proves(&name, "t"), enrolled.proves(&name, "u")), (Some(true), Some(false)));
        assert!(enrolled.names(&node("edge7")) && !enrolled.names(&node("edge8")));
    }

    #[test]
    fn joining_again_replaces_the_token_and_the_one_before_stays_valid_for_a_while() {
        let mut enrolled = invited();
        let (edge, name) = (subject("edge7"), node("edge7"));
        enrolled.join(&of("secret"), &edge, of("t"), 1).unwrap();
        enrolled.invite(of("second"), &edge, None, 1000, 2).unwrap();
        enrolled.join(&of("second"), &edge, of("u"), 3).unwrap();
        let proves =
            |enrolled: &Enrolments| ["s", "t", "u"].map(|token| enrolled.proves(&name, token).unwrap());
        assert_eq!(proves(&enrolled), [false, true, true]);
        assert_eq!(Enrolments::parse(&enrolled.to_text()), Ok(enrolled.clone()));
        let mut expired = enrolled.clone();
        assert_eq!(expired.expired(3 + PREVIOUS_TOKEN_TIME - 1), None);
        expired = expired.expired(3 + PREVIOUS_TOKEN_TIME).unwrap();
        assert_eq!(proves(&expired), [false, false, true]);
        let mut again = enrolled.clone();
        again.invite(of("third"), &edge, None, 1000, 4).unwrap();
        again.join(&of("third"), &edge, of("s"), 5).unwrap();
        assert_eq!(proves(&again), [true, false, true], "at most two");
        assert!(!enrolled.end_previous(&name, "t") && enrolled.end_previous(&name, "u"));
        assert_eq!(proves(&enrolled), [false, false, true]);
        assert!(!enrolled.end_previous(&name, "u"), "no further write");
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 4), Err(InvitationError::Used));
        assert!(again.revoke(&edge));
        assert_eq!(["s", "u"].map(|token| again.proves(&name, token)), [None, None], "it ends both");
        assert!(enrolled.revoke(&edge) && !enrolled.revoke(&edge));
        assert_eq!(enrolled.proves(&name, "u"), None);
        assert_eq!(
            enrolled.join(&of("second"), &edge, of("u"), 5),
            Err(InvitationError::Used),
            "it was revoked"
        );
    }

    #[test]
    fn a_newer_invitation_replaces_an_open_one_and_revoking_removes_it() {
        let mut enrolled = invited();
        let edge = subject("edge7");
        enrolled.invite(of("second"), &edge, None, 1000, 0).unwrap();
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 1), Err(InvitationError::Unknown));
        assert!(enrolled.revoke(&edge));
        assert_eq!(enrolled.join(&of("second"), &edge, of("t"), 1), Err(InvitationError::Unknown));
    }

    #[test]
    fn each_invitation_of_a_user_admits_one_device_and_never_a_node() {
        let mut enrolled = invited();
        for secret in ["first", "second", "third"] {
            enrolled.invite(of(secret), &subject("alice/"), None, 1000, 0).unwrap();
        }
        let [laptop, desk] = [subject("alice/laptop"), subject("alice/desk")];
        for (secret, other) in
            [("first", "alice"), ("first", "bob/laptop"), ("first", "Alice/laptop"), ("secret", "edge7/x")]
        {
            let joined = enrolled.join(&of(secret), &subject(other), of("t"), 1);
            assert_eq!(joined, Err(InvitationError::OtherSubject), "{other}");
        }
        assert_eq!(enrolled.join(&of("first"), &laptop, of("t"), 1), Ok(true));
        assert_eq!(enrolled.join(&of("first"), &laptop, of("t"), 2), Ok(false), "its response was lost");
        assert_eq!(enrolled.join(&of("first"), &desk, of("t"), 2), Err(InvitationError::Used));
        assert_eq!(enrolled.join(&of("second"), &laptop, of("u"), 2), Err(InvitationError::DeviceTaken));
        assert_eq!(enrolled.join(&of("second"), &desk, of("u"), 2), Ok(true));
        assert_eq!(
            enrolled.join(&of("third"), &subject("alice/new"), of("v"), 1000),
            Err(InvitationError::Expired)
        );

        let proves = |client: &str, token| enrolled.proves_device(&client.parse().unwrap(), &of(token));
        assert!(proves("alice/LAPTOP", "t"), "devices are DNS labels");
        for (client, token) in
            [("alice/laptop", "u"), ("alice/none", "t"), ("Alice/laptop", "t"), ("edge7/laptop", "t")]
        {
            assert!(!proves(client, token), "{client}");
        }
        assert_eq!(enrolled.proves(&node("alice"), "t"), None);
        assert!(enrolled.joined().is_empty(), "devices are no nodes");
    }

    #[test]
    fn a_device_or_a_user_with_all_devices_is_revoked_and_others_are_kept() {
        let mut enrolled = invited();
        let all = ["alice/laptop", "alice/desk", "alice-2/laptop", "edge7"].map(subject);
        enrolled.join(&of("secret"), &all[3], of("n"), 1).unwrap();
        for (n, (device, user)) in all.iter().zip(["alice/", "alice/", "alice-2/"]).enumerate() {
            enrolled.invite(of(&n.to_string()), &subject(user), None, 1000, 0).unwrap();
            enrolled.join(&of(&n.to_string()), device, of("t"), 1).unwrap();
        }
        enrolled.invite(of("early"), &subject("alice/"), None, 1500, 0).unwrap();
        enrolled.invite(of("late"), &subject("alice/"), None, 2000, 0).unwrap();
        let enrolment = |user: &str, device: Option<&str>, invited_until| ListedEnrolment {
            user: Some(user.to_owned()),
            device: device.map(str::to_owned),
            joined: device.is_some(),
            invited_until,
            ..ListedEnrolment::default()
        };
        let edge7 =
            ListedEnrolment { node: Some("edge7".to_owned()), joined: true, ..ListedEnrolment::default() };
        let listed = enrolled.list(2, unseen);
        let expected = [
            enrolment("alice-2", Some("laptop"), None),
            enrolment("alice", None, Some(2000)),
            enrolment("alice", Some("desk"), None),
            enrolment("alice", Some("laptop"), None),
            edge7.clone(),
        ];
        assert_eq!(listed, expected);

        assert!(enrolled.revoke(&all[0]) && !enrolled.revoke(&all[0]));
        assert_eq!(enrolled.list(2, unseen)[1], expected[1], "the user may join with another device");
        assert_eq!(
            enrolled.join(&of("0"), &all[0], of("t"), 2),
            Err(InvitationError::Used),
            "it was revoked"
        );
        assert!(enrolled.revoke(&subject("alice/")) && !enrolled.revoke(&subject("alice/")));
        assert_eq!(enrolled.join(&of("late"), &all[0], of("t"), 2), Err(InvitationError::Unknown));
        assert_eq!(enrolled.list(2, unseen), [expected[0].clone(), edge7]);
    }

    /// A key for two nodes, and the subjects that it admits.
    fn key() -> (Enrolments, [Invitee; 3]) {
        let mut enrolled = Enrolments::default();
        enrolled.invite(of("key"), &subject("shop-*"), Some(2), 1000, 0).unwrap();
        (enrolled, ["shop-1", "shop-2", "shop-3"].map(subject))
    }

    #[test]
    fn a_join_key_admits_exactly_its_number_of_matching_nodes_before_it_expires() {
        let (mut enrolled, [first, second, third]) = key();
        for (other, now, expected) in [
            ("web-1", 1, InvitationError::OtherSubject),
            ("shop-/x", 1, InvitationError::OtherSubject),
            ("shop-1", 1000, InvitationError::Expired),
        ] {
            assert_eq!(enrolled.join(&of("key"), &subject(other), of("t"), now), Err(expected), "{other}");
        }
        assert_eq!(enrolled.join(&of("key"), &subject("Shop-1"), of("t"), 1), Ok(true));
        let repeated = enrolled.join(&of("key"), &first, of("t"), 5000);
        assert_eq!(repeated, Ok(false), "the same machine, also after expiry");
        let taken = Err(InvitationError::NodeTaken("shop-1".into()));
        assert_eq!(enrolled.join(&of("key"), &first, of("u"), 2), taken);
        assert_eq!(enrolled.join(&of("key"), &second, of("u"), 2), Ok(true));
        assert_eq!(enrolled.join(&of("key"), &third, of("v"), 2), Err(InvitationError::UsedUp(2)));
        assert_eq!(enrolled.join(&of("key"), &second, of("u"), 2), Ok(false));
        assert_eq!(enrolled.joined().len(), 2);
        assert_eq!(Enrolments::parse(&enrolled.to_text()), Ok(enrolled));
    }

    #[test]
    fn a_join_key_replaces_no_token_and_a_revoked_node_needs_an_invitation_by_its_name() {
        let (mut enrolled, [first, second, third]) = key();
        enrolled.invite(of("own"), &first, None, 1000, 0).unwrap();
        enrolled.join(&of("own"), &first, of("t"), 1).unwrap();
        let taken = Err(InvitationError::NodeTaken("shop-1".into()));
        assert_eq!(enrolled.join(&of("key"), &first, of("u"), 2), taken);
        assert_eq!(enrolled.join(&of("key"), &first, of("t"), 2), taken, "its token is not of this key");

        enrolled.join(&of("key"), &second, of("v"), 2).unwrap();
        assert!(enrolled.revoke(&second));
        for token in ["v", "w"] {
            let revoked = Err(InvitationError::NodeRevoked("shop-2".into()));
            assert_eq!(enrolled.join(&of("key"), &second, of(token), 3), revoked, "{token}");
        }
        enrolled.invite(of("again"), &second, None, 1000, 3).unwrap();
        assert_eq!(enrolled.join(&of("again"), &second, of("w"), 4), Ok(true));
        assert_eq!(enrolled.join(&of("key"), &third, of("x"), 4), Ok(true), "no use is counted twice");
        assert!(!enrolled.revoke(&subject("shop-*")), "a key is ended by its ID");
    }

    #[test]
    fn an_ended_key_leaves_its_nodes_unless_they_are_revoked_too() {
        let (mut enrolled, [first, second, third]) = key();
        let id = of("key").id();
        enrolled.join(&of("key"), &first, of("t"), 1).unwrap();
        enrolled.join(&of("key"), &second, of("u"), 1).unwrap();
        enrolled.invite(of("own"), &second, None, 1000, 1).unwrap();
        enrolled.join(&of("own"), &second, of("v"), 1).unwrap();
        enrolled.invite(of("other"), &subject("shop-*"), Some(9), 1000, 1).unwrap();
        let joined = |node: &str, key: Option<&str>| ListedEnrolment {
            node: Some(node.to_owned()),
            key: key.map(str::to_owned),
            joined: true,
            ..ListedEnrolment::default()
        };
        let key = |used, invited_until| ListedEnrolment {
            key: Some(id.clone()),
            pattern: Some("shop-*".to_owned()),
            uses: Some(2),
            used: Some(used),
            invited_until,
            ..ListedEnrolment::default()
        };
        let listed = enrolled.list(2, unseen);
        assert_eq!(listed[..2], [joined("shop-1", Some(&id)), joined("shop-2", None)]);
        assert!(listed.contains(&key(2, None)), "{listed:?}");

        let (mut with_nodes, before) = (enrolled.clone(), enrolled.clone());
        assert!(!enrolled.end_key("none", true, 2) && !enrolled.end_key(&id, false, 2), "it is used up");
        assert_eq!(enrolled.joined(), before.joined());
        enrolled
            .invite(of("late"), &subject("late"), None, 2 * EXPIRED_RETENTION, EXPIRED_RETENTION)
            .unwrap();
        assert!(
            enrolled.list(2, unseen).contains(&key(2, None)),
            "it is kept while a node that came by it remains"
        );
        assert!(with_nodes.end_key(&id, true, 2) && !with_nodes.end_key(&id, true, 2));
        assert_eq!(with_nodes.joined(), ["shop-2".to_owned()].into());

        let other = of("other").id();
        assert!(with_nodes.end_key(&other, false, 2) && !with_nodes.end_key(&other, false, 2));
        assert_eq!(with_nodes.list(2, unseen), [joined("shop-2", None)]);
        assert_eq!(with_nodes.join(&of("other"), &third, of("w"), 2), Err(InvitationError::Unknown));
    }

    #[test]
    fn an_ended_key_with_nodes_admits_no_other_one() {
        let (mut enrolled, [first, second, _]) = key();
        enrolled.join(&of("key"), &first, of("t"), 1).unwrap();
        assert!(enrolled.end_key(&of("key").id(), false, 2));
        assert_eq!(enrolled.join(&of("key"), &second, of("u"), 2), Err(InvitationError::Expired));
        assert_eq!(enrolled.proves(&node("shop-1"), "t"), Some(true));
        assert!(enrolled.end_key(&of("key").id(), true, 3), "its nodes can be revoked later");
        assert!(enrolled.list(3, unseen).is_empty() && enrolled.joined().is_empty());
        assert_eq!(
            enrolled.joined_by_key(),
            [node("shop-1")].into(),
            "it may still be linked to another server"
        );
        let own = Invitee::Node(node("shop-1"));
        enrolled.invite(of("own"), &own, None, 9, 4).unwrap();
        enrolled.join(&of("own"), &own, of("v"), 4).unwrap();
        assert!(enrolled.joined_by_key().is_empty(), "it has joined otherwise");
    }

    #[test]
    fn unknown_fields_of_invitations_survive_a_change() {
        let text =
            br#"{"invitations":{"h":{"node":"shop-*","until":9000,"note":{"shop-1":"k"}}},"tokens":{}}"#;
        let mut enrolled = Enrolments::parse(text).unwrap();
        enrolled.invite(of("secret"), &subject("alice/"), None, 1000, 0).unwrap();
        let written: serde_json::Value = serde_json::from_slice(&enrolled.to_text()).unwrap();
        let read: serde_json::Value = serde_json::from_slice(text).unwrap();
        assert_eq!(written["invitations"]["h"], read["invitations"]["h"]);
    }

    #[test]
    fn open_invitations_are_limited_and_expired_ones_are_kept_for_a_day() {
        let mut enrolled = invited();
        for n in 1..MAX_OPEN {
            enrolled.invite(of(&n.to_string()), &subject(&format!("n{n}")), None, 1000, 0).unwrap();
        }
        let refused = enrolled.invite(of("more"), &subject("more"), None, 1000, 0).unwrap_err();
        assert!(refused.contains("open invitations reached"), "{refused}");
        enrolled.invite(of("later"), &subject("later"), None, 100_000, 1000 + EXPIRED_RETENTION).unwrap();
        assert_eq!(enrolled.invitations.len(), 1);
    }

    #[test]
    fn the_enrolment_state_reads_back_as_written_and_contains_no_secret() {
        let mut enrolled = invited();
        enrolled.join(&of("secret"), &subject("edge7"), of("token"), 1).unwrap();
        let text = enrolled.to_text();
        assert_eq!(Enrolments::parse(&text), Ok(enrolled));
        let text = String::from_utf8(text).unwrap();
        assert!(!text.contains("\"secret\"") && !text.contains("\"token\""), "{text}");
        assert_eq!(Enrolments::parse(b" \n"), Ok(Enrolments::default()));
        assert!(Enrolments::parse(b"{\"nodes\":[]}").unwrap_err().contains("not written by a server"));
    }

    #[test]
    fn unused_devices_end_with_a_reason_a_tenth_in_a_day_and_one_at_least() {
        let mut enrolled = Enrolments::default();
        let names: Vec<_> = (10..35).map(|n| format!("alice/{n}")).collect();
        for name in names.iter().map(String::as_str).chain(["shop-1"]) {
            let device = subject(name);
            let invitee = name.split_inclusive('/').next().unwrap();
            enrolled.invite(of(name), &subject(invitee), None, 1000, 0).unwrap();
            enrolled.join(&of(name), &device, of(&format!("token of {name}")), 1).unwrap();
        }
        let unused: Vec<_> = names.iter().collect();
        let day = 24 * 3600;
        assert_eq!(enrolled.end_unused(&unused, 1), ["alice/10", "alice/11"]);
        assert_eq!(Enrolments::parse(&enrolled.to_text()), Ok(enrolled.clone()));
        assert!(enrolled.end_unused(&unused, day).is_empty());
        assert!(
            enrolled.was_unused(&of("token of alice/10")) && !enrolled.was_unused(&of("token of alice/12"))
        );
        assert_eq!(
            enrolled.join(&of("alice/10"), &subject("alice/10"), of("u"), 2),
            Err(InvitationError::Used)
        );
        assert_eq!(enrolled.list(2, unseen).len(), 24, "the notes are no invitations");
        assert_eq!(enrolled.end_unused(&unused, day + 1), ["alice/12", "alice/13"]);
        // The notes of the first day have ended.
        enrolled.invite(of("new"), &subject("alice/"), None, 1000, day + 1).unwrap();
        assert!(
            !enrolled.was_unused(&of("token of alice/10")) && enrolled.was_unused(&of("token of alice/13"))
        );
        let last = ["alice/34".to_owned(), "alice/33".to_owned()];
        enrolled.tokens.retain(|name, _| last.contains(name) || name == "shop-1");
        enrolled.invitations.clear();
        assert_eq!(enrolled.end_unused(&[&last[0], &last[1]], 1), [last[0].clone()]);
        assert_eq!(enrolled.joined(), ["shop-1".to_owned()].into());
    }

    #[test]
    fn an_invitation_keeps_its_device_and_tells_while_it_is_known() {
        let mut enrolled = invited();
        for (secret, device, keep) in [("one", "alice/kept", true), ("two", "alice/other", false)] {
            enrolled.invite(of(secret), &subject("alice/"), None, 1000, 0).unwrap();
            if keep {
                enrolled.keep(&of(secret));
            }
            enrolled.join(&of(secret), &subject(device), of(device), 1).unwrap();
        }
        let mut enrolled = Enrolments::parse(&enrolled.to_text()).unwrap();
        let kept = |enrolled: &Enrolments| enrolled.machines().map(|(_, keep)| keep).collect::<Vec<_>>();
        assert_eq!(kept(&enrolled), [Some(true), Some(false)]);
        enrolled.invitations.clear();
        assert_eq!(kept(&enrolled), [None, None]);
    }
}
