//! Nodes that have joined by invitation, as a text shared by all servers: in a file, in etcd, or in a Secret.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;
use tracing::debug;

use crate::etcd::{ErrorKind, EtcdAccess, EtcdEndpoints, EtcdError};
use crate::publish;
use tunnel_base::names::NodeName;
use tunnel_net::resolver::Resolver;

/// Invitations, and the tokens of nodes that have used one. Times are seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Enrolments {
    /// Invitations by the hash of their secret.
    invitations: BTreeMap<SecretHash, Invitation>,
    /// Tokens by the node's name in lower case.
    tokens: BTreeMap<String, SecretHash>,
}

/// The hash of a secret. The secret is random and long, so the hash needs no salt.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretHash(String);

/// An invitation of one node in the [`Enrolments`], stored under the hash of its code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Invitation {
    /// Name of the node in lower case.
    node: String,
    /// Expiration time in seconds since 1970.
    until: u64,
    /// Token of the machine that used the invitation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    used_for: Option<SecretHash>,
}

/// A node that has joined, or is invited, or both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrolledNode {
    /// Name of the node in lower case.
    pub node: String,
    /// Whether it has joined.
    pub joined: bool,
    /// Expiration time of its open invitation, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invited_until: Option<u64>,
}

/// Why an invitation is not valid; sent to the joining machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvitationError {
    /// The invitation never existed or was forgotten.
    #[error("there is no such invitation; it may be too old; ask for a new one")]
    Unknown,
    /// The invitation is for another node.
    #[error(
        "the invitation is for another node; use that node's name, or ask for an invitation for this node"
    )]
    OtherNode,
    /// The invitation has already been used.
    #[error(
        "the invitation has been used already; ask for a new one, and inform the operator if you did not use it"
    )]
    Used,
    /// The invitation has expired.
    #[error("the invitation has expired; ask for a new one")]
    Expired,
}

/// The maximum number of open invitations is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("limit of {MAX_OPEN} open invitations reached; wait until some are used or expire")]
pub struct TooManyInvitations;

impl SecretHash {
    /// Returns the hash of a secret.
    pub fn of(secret: &str) -> Self {
        Self(URL_SAFE_NO_PAD.encode(digest(&SHA256, secret.as_bytes())))
    }

    fn equals(&self, other: &Self) -> bool {
        self.0.as_bytes().ct_eq(other.0.as_bytes()).into()
    }
}

impl Enrolments {
    /// Parses the output of [`Self::to_text`]; an empty text has no nodes.
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

    /// Returns the state as JSON.
    pub fn to_text(&self) -> Vec<u8> {
        // Only fails for maps with keys that are not strings.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Adds an invitation, which replaces an open one for the same node. Also removes invitations that expired over a
    /// day ago.
    ///
    /// # Errors
    ///
    /// Fails if there are too many open invitations.
    pub fn invite(
        &mut self,
        secret: SecretHash,
        node: &NodeName,
        until: u64,
        now: u64,
    ) -> Result<(), TooManyInvitations> {
        let node = lower_case(node);
        self.invitations.retain(|_, one| {
            one.until.saturating_add(EXPIRED_RETENTION) > now && (one.used_for.is_some() || one.node != node)
        });
        let open = self.invitations.values().filter(|one| one.used_for.is_none()).count();
        if open >= MAX_OPEN {
            return Err(TooManyInvitations);
        }
        self.invitations.insert(secret, Invitation { node, until, used_for: None });
        Ok(())
    }

    /// Returns true if this token may use the invitation, and false if it has used it already.
    ///
    /// # Errors
    ///
    /// Fails if the invitation is not valid.
    pub fn check(
        &self,
        secret: &SecretHash,
        node: &NodeName,
        token: &SecretHash,
        now: u64,
    ) -> Result<bool, InvitationError> {
        let node = lower_case(node);
        let invitation = self.invitations.get(secret).ok_or(InvitationError::Unknown)?;
        match &invitation.used_for {
            _ if invitation.node != node => Err(InvitationError::OtherNode),
            Some(used) if used.equals(token) && self.tokens.get(&node) == Some(used) => Ok(false),
            Some(_) => Err(InvitationError::Used),
            None if now >= invitation.until => Err(InvitationError::Expired),
            None => Ok(true),
        }
    }

    /// Uses an invitation: from now on only this token authenticates the node. Repeating the request with the same
    /// token has no effect. Returns true on the first use.
    ///
    /// # Errors
    ///
    /// Fails like [`Self::check`].
    pub fn join(
        &mut self,
        secret: &SecretHash,
        node: &NodeName,
        token: SecretHash,
        now: u64,
    ) -> Result<bool, InvitationError> {
        let is_first = self.check(secret, node, &token, now)?;
        if let Some(invitation) = self.invitations.get_mut(secret).filter(|_| is_first) {
            invitation.used_for = Some(token.clone());
            self.tokens.insert(lower_case(node), token);
        }
        Ok(is_first)
    }

    /// Revokes a node's token and its open invitations. Returns true if there were any.
    pub fn revoke(&mut self, node: &NodeName) -> bool {
        let (node, before) = (lower_case(node), self.invitations.len());
        self.invitations.retain(|_, one| one.used_for.is_some() || one.node != node);
        self.tokens.remove(&node).is_some() || self.invitations.len() < before
    }

    /// Returns the nodes that have joined or have an open invitation, sorted by name.
    pub fn list(&self, now: u64) -> Vec<EnrolledNode> {
        let enrolled =
            |node: &String, joined| EnrolledNode { node: node.clone(), joined, invited_until: None };
        let mut all: BTreeMap<&String, EnrolledNode> =
            self.tokens.keys().map(|node| (node, enrolled(node, true))).collect();
        let open = self.invitations.values().filter(|one| one.used_for.is_none() && one.until > now);
        for Invitation { node, until, .. } in open {
            all.entry(node).or_insert_with(|| enrolled(node, false)).invited_until = Some(*until);
        }
        all.into_values().collect()
    }

    /// Returns whether `token` is the one with which the node joined, or `None` if the node has not joined.
    pub fn proves(&self, node: &NodeName, token: &str) -> Option<bool> {
        self.tokens.get(&lower_case(node)).map(|known| known.equals(&SecretHash::of(token)))
    }

    /// Returns the nodes that have joined, in lower case.
    pub fn joined(&self) -> BTreeSet<String> {
        self.tokens.keys().cloned().collect()
    }

    /// Returns true if the node has joined.
    pub fn names(&self, node: &NodeName) -> bool {
        self.tokens.contains_key(&lower_case(node))
    }
}

fn lower_case(node: &NodeName) -> String {
    node.as_str().to_ascii_lowercase()
}

/// Time in seconds after which expired invitations are removed. Until then a late machine learns the reason.
const EXPIRED_RETENTION: u64 = 24 * 3600;

/// Maximum number of open invitations: operators create one for each machine being set up.
const MAX_OPEN: usize = 1000;

// A text that all servers of a cloud share and may change: in a file, in etcd, or in a Secret of Kubernetes.

/// The store of the text of the [`Enrolments`], shared by all servers: a file, etcd, or a Secret of Kubernetes.
pub trait SharedState: fmt::Debug + Send {
    /// Reads the text.
    ///
    /// # Errors
    ///
    /// Fails if the store does not respond or denies access.
    fn read(&mut self) -> BoxFuture<'_, Result<Revision, SharedStateError>>;

    /// Writes the text if it has not changed since `seen`. Returns false, without writing, if another server changed
    /// it. Not cancel safe: if the call is dropped, the text may or may not be written.
    ///
    /// # Errors
    ///
    /// Like [`Self::read`]; after an error the text may or may not be written.
    fn write<'a>(
        &'a mut self,
        seen: &'a Revision,
        text: Vec<u8>,
    ) -> BoxFuture<'a, Result<bool, SharedStateError>>;
}

/// Error reading or writing the shared text of invitations and tokens. Only its text is used.
pub type SharedStateError = Box<dyn std::error::Error + Send + Sync>;

/// The text of the [`Enrolments`] as read from its store. It is given back when writing, to detect another server's
/// change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Revision {
    /// The text; empty if none was written yet.
    pub text: Vec<u8>,
    /// Version number in the store; empty if the text does not exist, or if the store compares the text itself.
    pub version: String,
}

// A shared text in a file, on a disk that the servers share.

/// The enrolment state in a file, on a disk that all servers share.
#[derive(Debug, Clone)]
pub struct FileSharedState(PathBuf);

impl FileSharedState {
    /// Creates the store without reading. A lock file and a temporary file are created next to the file.
    pub fn new(file: PathBuf) -> Self {
        Self(file)
    }
}

impl SharedState for FileSharedState {
    fn read(&mut self) -> BoxFuture<'_, Result<Revision, SharedStateError>> {
        let file = self.0.clone();
        Box::pin(async move {
            let text = publish::in_background(move || publish::content(&file)).await?;
            Ok(Revision { text: text.unwrap_or_default(), version: String::new() })
        })
    }

    fn write<'a>(
        &'a mut self,
        seen: &'a Revision,
        text: Vec<u8>,
    ) -> BoxFuture<'a, Result<bool, SharedStateError>> {
        let (file, seen) = (self.0.clone(), seen.clone());
        let write = move || {
            publish::make_directory(&file);
            let _held = publish::lock(&file)?;
            if publish::content(&file)?.unwrap_or_default() != seen.text {
                return Ok(false);
            }
            publish::replace(&file, OWNER_ONLY, &text).map(|()| true)
        };
        Box::pin(async { Ok(publish::in_background(write).await?) })
    }
}

/// Mode of a new file.
const OWNER_ONLY: u32 = 0o600;

// A shared text in one key of etcd.

/// The enrolment state in a key of an etcd cluster.
#[derive(Debug)]
pub struct EtcdSharedState {
    /// The members of the cluster.
    members: EtcdEndpoints,
    key: Vec<u8>,
}

impl EtcdSharedState {
    /// Creates the store without connecting.
    pub fn new(access: EtcdAccess, key: &str, resolver: Resolver) -> Self {
        Self { members: EtcdEndpoints::of(access, resolver), key: key.as_bytes().to_vec() }
    }

    async fn get(&mut self) -> Result<Revision, EtcdError> {
        let mut left = self.members.len();
        loop {
            let found = match self.members.connected().await {
                Ok(connection) => connection.get(self.key.clone()).await,
                Err(cause) => Err(cause),
            };
            match found {
                Ok(None) => return Ok(Revision::default()),
                Ok(Some((text, changed))) => return Ok(Revision { text, version: changed.to_string() }),
                Err(cause) => self.failed(cause, &mut left)?,
            }
        }
    }

    async fn swap(&mut self, seen: &Revision, text: &[u8]) -> Result<bool, EtcdError> {
        let last_changed = seen.version.parse().unwrap_or(0);
        let mut left = self.members.len();
        loop {
            let swapped = match self.members.connected().await {
                Ok(connection) => connection.swap(self.key.clone(), last_changed, text.to_vec()).await,
                Err(cause) => Err(cause),
            };
            match swapped {
                // After a retry whose response was lost, this may be false although this process wrote the text.
                Ok(swapped) => return Ok(swapped),
                Err(cause) => self.failed(cause, &mut left)?,
            }
        }
    }

    /// Selects the next of the remaining members, or logs in again at the same member if the login has expired.
    fn failed(&mut self, cause: EtcdError, left: &mut usize) -> Result<(), EtcdError> {
        debug!(error = %cause, "etcd member failed");
        if cause.kind() == ErrorKind::LoggedOut {
            self.members.forget();
        } else {
            self.members.next();
        }
        *left = left.checked_sub(1).ok_or(cause)?;
        Ok(())
    }
}

impl SharedState for EtcdSharedState {
    fn read(&mut self) -> BoxFuture<'_, Result<Revision, SharedStateError>> {
        Box::pin(async { Ok(self.get().await?) })
    }

    fn write<'a>(
        &'a mut self,
        seen: &'a Revision,
        text: Vec<u8>,
    ) -> BoxFuture<'a, Result<bool, SharedStateError>> {
        Box::pin(async move { Ok(self.swap(seen, &text).await?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn of(secret: &str) -> SecretHash {
        SecretHash::of(secret)
    }

    fn invited() -> Enrolments {
        let mut enrolled = Enrolments::default();
        enrolled.invite(of("secret"), &node("edge7"), 1000, 0).unwrap();
        enrolled
    }

    #[test]
    fn an_invitation_is_valid_once_before_expiry_and_for_its_node_only() {
        let mut enrolled = invited();
        let edge = node("Edge7");
        assert_eq!(enrolled.join(&of("other"), &edge, of("t"), 1), Err(InvitationError::Unknown));
        assert_eq!(enrolled.join(&of("secret"), &node("edge8"), of("t"), 1), Err(InvitationError::OtherNode));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 1000), Err(InvitationError::Expired));
        assert_eq!(enrolled.proves(&edge, "t"), None);
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 999), Ok(true));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 2000), Ok(false), "its response was lost");
        assert_eq!(enrolled.join(&of("secret"), &edge, of("u"), 999), Err(InvitationError::Used));
        assert_eq!(
            enrolled.join(&of("secret"), &node("edge8"), of("t"), 999),
            Err(InvitationError::OtherNode)
        );
        assert_eq!((enrolled.proves(&edge, "t"), enrolled.proves(&edge, "u")), (Some(true), Some(false)));
        assert!(enrolled.names(&node("edge7")) && !enrolled.names(&node("edge8")));
    }

    #[test]
    fn joining_again_replaces_the_token_and_old_tokens_stay_invalid() {
        let mut enrolled = invited();
        let edge = node("edge7");
        enrolled.join(&of("secret"), &edge, of("t"), 1).unwrap();
        enrolled.invite(of("second"), &edge, 1000, 2).unwrap();
        enrolled.join(&of("second"), &edge, of("u"), 3).unwrap();
        assert_eq!((enrolled.proves(&edge, "t"), enrolled.proves(&edge, "u")), (Some(false), Some(true)));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 4), Err(InvitationError::Used));
        assert!(enrolled.revoke(&edge) && !enrolled.revoke(&edge));
        assert_eq!(enrolled.proves(&edge, "u"), None);
        assert_eq!(
            enrolled.join(&of("second"), &edge, of("u"), 5),
            Err(InvitationError::Used),
            "it was revoked"
        );
    }

    #[test]
    fn a_newer_invitation_replaces_an_open_one_and_revoking_removes_it() {
        let mut enrolled = invited();
        let edge = node("edge7");
        enrolled.invite(of("second"), &edge, 1000, 0).unwrap();
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 1), Err(InvitationError::Unknown));
        assert!(enrolled.revoke(&edge));
        assert_eq!(enrolled.join(&of("second"), &edge, of("t"), 1), Err(InvitationError::Unknown));
    }

    #[test]
    fn open_invitations_are_limited_and_expired_ones_are_kept_for_a_day() {
        let mut enrolled = invited();
        for n in 1..MAX_OPEN {
            enrolled.invite(of(&n.to_string()), &node(&format!("n{n}")), 1000, 0).unwrap();
        }
        assert_eq!(enrolled.invite(of("more"), &node("more"), 1000, 0), Err(TooManyInvitations));
        enrolled.invite(of("later"), &node("later"), 100_000, 1000 + EXPIRED_RETENTION).unwrap();
        assert_eq!(enrolled.invitations.len(), 1);
    }

    #[test]
    fn the_enrolment_state_reads_back_as_written_and_contains_no_secret() {
        let mut enrolled = invited();
        enrolled.join(&of("secret"), &node("edge7"), of("token"), 1).unwrap();
        let text = enrolled.to_text();
        assert_eq!(Enrolments::parse(&text), Ok(enrolled));
        let text = String::from_utf8(text).unwrap();
        assert!(!text.contains("\"secret\"") && !text.contains("\"token\""), "{text}");
        assert_eq!(Enrolments::parse(b" \n"), Ok(Enrolments::default()));
        assert!(Enrolments::parse(b"{\"nodes\":[]}").unwrap_err().contains("not written by a server"));
    }
}

#[cfg(test)]
mod file_tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn only_one_of_several_concurrent_writers_of_a_revision_succeeds() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("shared");
        let mut cells: Vec<_> = (0..8).map(|_| FileSharedState::new(path.clone())).collect();
        let seen = cells[0].read().await.unwrap();
        assert_eq!(seen, Revision::default());
        let writes = cells.iter_mut().enumerate().map(|(n, cell)| {
            let seen = seen.clone();
            async move { cell.write(&seen, n.to_string().into_bytes()).await.unwrap() }
        });
        let written = futures_util::future::join_all(writes).await;
        assert_eq!(written.iter().filter(|written| **written).count(), 1, "{written:?}");
        let winner = written.iter().position(|written| *written).unwrap().to_string();
        assert_eq!(cells[1].read().await.unwrap().text, winner.as_bytes());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn the_stores_directory_is_created_unless_its_parent_is_missing() {
        let place = tempfile::tempdir().unwrap();
        let mut cell = FileSharedState::new(place.path().join("new/shared"));
        assert!(cell.write(&Revision::default(), b"a".to_vec()).await.unwrap());
        let mode = fs::metadata(place.path().join("new")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let mut cell = FileSharedState::new(place.path().join("no/such/shared"));
        let message = cell.write(&Revision::default(), b"a".to_vec()).await.unwrap_err().to_string();
        assert!(message.contains("check that its directory exists"), "{message}");
    }
}
