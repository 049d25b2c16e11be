//! Nodes that have joined by invitation, as a text that all pods share: in a file, in etcd, or in a Secret.

#[cfg(feature = "kubernetes")]
pub mod secret;

use std::collections::BTreeMap;
use std::path::PathBuf;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;
use tracing::debug;

use crate::etcd::{ErrorKind, EtcdAccess, EtcdEndpoints, EtcdError, GrpcDialer};
#[cfg(feature = "kubernetes")]
use crate::invitations::store::secret::SecretSharedState;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::cluster::ClusterError;
use crate::publish::{self, SharedFileError};
use tunnel_base::names::NodeName;
use tunnel_net::resolver::Resolver;

/// Invitations, and the tokens of those who have used one. Times are seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EnrolmentState {
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
pub enum InvitationError {
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
#[error("{MAX_OPEN} invitations are open: wait until some have been used or have expired")]
pub struct TooManyInvitations;

impl SecretHash {
    /// Of this secret.
    pub fn of(secret: &str) -> Self {
        Self(URL_SAFE_NO_PAD.encode(digest(&SHA256, secret.as_bytes())))
    }

    fn is(&self, other: &Self) -> bool {
        self.0.as_bytes().ct_eq(other.0.as_bytes()).into()
    }
}

impl EnrolmentState {
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
    ) -> Result<(), TooManyInvitations> {
        let node = small(node);
        self.invitations.retain(|_, one| {
            one.until.saturating_add(REMEMBERED) > now && (one.used_for.is_some() || one.node != node)
        });
        let open = self.invitations.values().filter(|one| one.used_for.is_none()).count();
        if open >= MAX_OPEN {
            return Err(TooManyInvitations);
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
    ) -> Result<bool, InvitationError> {
        let node = small(node);
        let invitation = self.invitations.get_mut(secret).ok_or(InvitationError::Unknown)?;
        if invitation.node != node {
            return Err(InvitationError::OtherNode);
        }
        match &invitation.used_for {
            Some(used) if used.is(&token) && self.tokens.get(&node) == Some(used) => return Ok(false),
            Some(_) => return Err(InvitationError::Used),
            None if now >= invitation.until => return Err(InvitationError::Expired),
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
const MAX_OPEN: usize = 1000;

// A text that all pods of a cloud share, and that each may change: in a file, in etcd, or in a Secret of Kubernetes.

/// Where the text stands.
#[derive(Debug)]
pub enum SharedState {
    /// In a file, on a disk that the pods share.
    File(FileSharedState),
    /// In etcd.
    Etcd(Box<EtcdSharedState>),
    /// In a Secret of Kubernetes.
    #[cfg(feature = "kubernetes")]
    Secret(Box<SecretSharedState>),
}

/// The text at some time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Revision {
    /// Empty if nobody has written any.
    pub text: Vec<u8>,
    /// By which the store knows it again; empty if it is not there, or is known by itself.
    version: String,
}

/// Why the text was neither read nor written.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    /// The file.
    #[error(transparent)]
    File(#[from] SharedFileError),
    /// etcd.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// The Secret, or its cluster.
    #[cfg(feature = "kubernetes")]
    #[error("Secret {name}: {cause}")]
    Secret {
        /// Its name.
        name: String,
        /// What went wrong.
        cause: ClusterError,
    },
    /// It is longer than its store takes.
    #[error(
        "{bytes} bytes are too many for a Secret, which takes {most}: keep it in etcd, or revoke nodes that are gone"
    )]
    Full {
        /// What it would hold.
        bytes: usize,
        /// What it may hold.
        most: usize,
    },
}

impl SharedState {
    /// Reads it.
    ///
    /// # Errors
    ///
    /// The store does not answer, or does not let us.
    pub async fn read(&mut self) -> Result<Revision, CellError> {
        match self {
            Self::File(file) => file.read().await,
            Self::Etcd(etcd) => etcd.read().await,
            #[cfg(feature = "kubernetes")]
            Self::Secret(secret) => secret.read().await,
        }
    }

    /// Writes it, if it is still what was seen; `false`: somebody else was quicker, and nothing is written. Not cancel
    /// safe: who does not wait for the answer does not know whether it is written.
    ///
    /// # Errors
    ///
    /// As for [`Self::read`]; then, too, it may or may not be written.
    pub async fn write(&mut self, seen: &Revision, text: Vec<u8>) -> Result<bool, CellError> {
        match self {
            Self::File(file) => file.write(seen.clone(), text).await,
            Self::Etcd(etcd) => etcd.write(seen, &text).await,
            #[cfg(feature = "kubernetes")]
            Self::Secret(secret) => secret.write(seen, text).await,
        }
    }
}

// A shared text in a file, on a disk that the pods share.

/// One file.
#[derive(Debug, Clone)]
pub struct FileSharedState(PathBuf);

impl FileSharedState {
    /// Nothing is read yet. A lock file and a file being written stand beside it.
    pub fn new(file: PathBuf) -> Self {
        Self(file)
    }

    pub(crate) async fn read(&self) -> Result<Revision, CellError> {
        let file = self.0.clone();
        let text = publish::in_background(move || publish::content(&file)).await?;
        Ok(Revision { text: text.unwrap_or_default(), version: String::new() })
    }

    pub(crate) async fn write(&self, seen: Revision, text: Vec<u8>) -> Result<bool, CellError> {
        let file = self.0.clone();
        let write = move || {
            publish::make_directory(&file);
            let _held = publish::lock(&file)?;
            if publish::content(&file)?.unwrap_or_default() != seen.text {
                return Ok(false);
            }
            publish::replace(&file, OWNER_ONLY, &text).map(|()| true)
        };
        Ok(publish::in_background(write).await?)
    }
}

/// The mode of a new file.
const OWNER_ONLY: u32 = 0o600;

// A shared text in one key of etcd.

/// One key of an etcd.
#[derive(Debug)]
pub struct EtcdSharedState {
    members: EtcdEndpoints,
    key: Vec<u8>,
}

impl EtcdSharedState {
    /// Nothing is asked yet.
    pub fn new(access: EtcdAccess, key: &str, resolver: Resolver) -> Self {
        let dialer = GrpcDialer::new(access, resolver);
        Self { members: EtcdEndpoints::new(dialer), key: key.as_bytes().to_vec() }
    }

    pub(crate) async fn read(&mut self) -> Result<Revision, CellError> {
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

    pub(crate) async fn write(&mut self, seen: &Revision, text: &[u8]) -> Result<bool, CellError> {
        let last_changed = seen.version.parse().unwrap_or(0);
        let mut left = self.members.len();
        loop {
            let swapped = match self.members.connected().await {
                Ok(connection) => connection.swap(self.key.clone(), last_changed, text.to_vec()).await,
                Err(cause) => Err(cause),
            };
            match swapped {
                // After a try whose answer was lost this may be false although we have written.
                Ok(swapped) => return Ok(swapped),
                Err(cause) => self.failed(cause, &mut left)?,
            }
        }
    }

    /// Goes on to the next of the members that are `left`; where the login is over, to the same one with a new login.
    fn failed(&mut self, cause: EtcdError, left: &mut usize) -> Result<(), EtcdError> {
        debug!(%cause, "an etcd member failed");
        if cause.kind() == ErrorKind::LoggedOut {
            self.members.forget();
        } else {
            self.members.next();
        }
        *left = left.checked_sub(1).ok_or(cause)?;
        Ok(())
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

    fn invited() -> EnrolmentState {
        let mut enrolled = EnrolmentState::default();
        enrolled.invite(of("secret"), &node("edge7"), 1000, 0).unwrap();
        enrolled
    }

    #[test]
    fn an_invitation_counts_once_in_its_time_for_its_node() {
        let mut enrolled = invited();
        let edge = node("Edge7");
        assert_eq!(enrolled.join(&of("other"), &edge, of("t"), 1), Err(InvitationError::Unknown));
        assert_eq!(enrolled.join(&of("secret"), &node("edge8"), of("t"), 1), Err(InvitationError::OtherNode));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 1000), Err(InvitationError::Expired));
        assert_eq!(enrolled.proves(&edge, "t"), None);
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 999), Ok(true));
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 2000), Ok(false), "its answer was lost");
        assert_eq!(enrolled.join(&of("secret"), &edge, of("u"), 999), Err(InvitationError::Used));
        assert_eq!(
            enrolled.join(&of("secret"), &node("edge8"), of("t"), 999),
            Err(InvitationError::OtherNode)
        );
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
    fn a_newer_invitation_for_a_node_takes_the_place_of_an_open_one_and_revoking_takes_it_away() {
        let mut enrolled = invited();
        let edge = node("edge7");
        enrolled.invite(of("second"), &edge, 1000, 0).unwrap();
        assert_eq!(enrolled.join(&of("secret"), &edge, of("t"), 1), Err(InvitationError::Unknown));
        assert!(enrolled.revoke(&edge));
        assert_eq!(enrolled.join(&of("second"), &edge, of("t"), 1), Err(InvitationError::Unknown));
    }

    #[test]
    fn there_are_bounds_and_the_late_are_told_so_for_a_day() {
        let mut enrolled = invited();
        for n in 1..MAX_OPEN {
            enrolled.invite(of(&n.to_string()), &node(&format!("n{n}")), 1000, 0).unwrap();
        }
        assert_eq!(enrolled.invite(of("more"), &node("more"), 1000, 0), Err(TooManyInvitations));
        enrolled.invite(of("later"), &node("later"), 100_000, 1000 + REMEMBERED).unwrap();
        assert_eq!(enrolled.invitations.len(), 1);
    }

    #[test]
    fn it_is_read_as_it_was_written_and_shows_no_secret() {
        let mut enrolled = invited();
        enrolled.join(&of("secret"), &node("edge7"), of("token"), 1).unwrap();
        let text = enrolled.to_text();
        assert_eq!(EnrolmentState::parse(&text), Ok(enrolled));
        let text = String::from_utf8(text).unwrap();
        assert!(!text.contains("\"secret\"") && !text.contains("\"token\""), "{text}");
        assert_eq!(EnrolmentState::parse(b" \n"), Ok(EnrolmentState::default()));
        assert!(EnrolmentState::parse(b"{\"nodes\":[]}").unwrap_err().contains("what pods have written"));
    }
}

#[cfg(test)]
mod file_tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn of_several_writers_that_have_seen_the_same_one_writes() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("shared");
        let cells: Vec<_> = (0..8).map(|_| FileSharedState::new(path.clone())).collect();
        let seen = cells[0].read().await.unwrap();
        assert_eq!(seen, Revision::default());
        let writes = cells.iter().enumerate().map(|(n, cell)| {
            let seen = seen.clone();
            async move { cell.write(seen, n.to_string().into_bytes()).await.unwrap() }
        });
        let written = futures_util::future::join_all(writes).await;
        assert_eq!(written.iter().filter(|written| **written).count(), 1, "{written:?}");
        let winner = written.iter().position(|written| *written).unwrap().to_string();
        assert_eq!(cells[1].read().await.unwrap().text, winner.as_bytes());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn the_directory_is_made_unless_another_one_is_missing() {
        let place = tempfile::tempdir().unwrap();
        let cell = FileSharedState::new(place.path().join("new/shared"));
        assert!(cell.write(Revision::default(), b"a".to_vec()).await.unwrap());
        let mode = fs::metadata(place.path().join("new")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let cell = FileSharedState::new(place.path().join("no/such/shared"));
        let told = cell.write(Revision::default(), b"a".to_vec()).await.unwrap_err().to_string();
        assert!(told.contains("check that its directory exists"), "{told}");
    }
}
