//! Machines that become nodes, or devices of users, by invitation: creates and redeems invitations, and knows the
//! tokens of those that have joined, and when they were seen.

pub(crate) mod grants;
pub(crate) mod seen;
pub mod shared_state;
pub mod shared_text;
pub mod store;

use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, SetOnce, oneshot, watch};
use tracing::field::display;
use tracing::info;

use crate::enrolment::shared_state::SharedState;
use crate::enrolment::store::{Enrolments, InvitationError, SecretHash};
use crate::invitations::code::{InvitationCode, Pin, pin_of};
use crate::invitations::invitee::Invitee;
use crate::invitations::{GrantSelection, JoinedDevice, ListedEnrolment};
use tunnel_base::limited;
use tunnel_base::logging::AUDIT;
use tunnel_base::policy::tokens::MIN_TOKEN_BYTES;
use tunnel_base::refusal_log::RefusalLog;
use tunnel_base::stores::TextStore;
use tunnel_base::unix_time::now;
use tunnel_link::grpc::enrol::JoinCredentials;
use tunnel_net::reload::{ReloadError, ReloadedValue};
use tunnel_net::tls::certificate::host_of;
use tunnel_net::tls::pem::{self, SUPPORTED_KEYS};
use tunnel_net::tls::verify::issuer;
use tunnel_proto::names::{Host, NodeName, UserDevice};

/// The enrolment state shared by all servers of a cloud, as last read, and operations that change it.
#[derive(Debug)]
pub struct SharedEnrolments {
    state: SharedState,
    /// The text of grants.
    pub(crate) grants: SharedState,
    /// The text of when machines were seen.
    pub(crate) seen: SharedState,
    /// When machines were last linked here, and whether they are: while others hold a clone. Until that is written.
    uses: Mutex<HashMap<String, (u64, Arc<()>)>>,
    /// Notified when a device is linked that would soon end as unused.
    seen_ending: Notify,
    /// Maximum number of grants, and of machines in the text of those seen.
    most_grants: usize,
    /// Machines with valid invitations that wait for the next write, at most one for each connection.
    joining: Mutex<Vec<PendingJoin>>,
    authority: ReloadedValue<AdvertisedCa>,
    /// Limits the lines about joins.
    refusals: RefusalLog,
}

/// The enrolment state of a server, once it is opened: at the start, or by a reload.
pub type OpenedEnrolments = Arc<SetOnce<Arc<SharedEnrolments>>>;

/// Waits for the next change of the state: that it is opened, or of [`SharedState::known`]. `changes` is `None`
/// before the first call. Cancel safe.
pub(crate) async fn next_change(opened: &OpenedEnrolments, changes: &mut Option<watch::Receiver<()>>) {
    match changes {
        // The sender is in `opened`.
        Some(changes) => _ = changes.changed().await,
        None => *changes = Some(opened.wait().await.changes()),
    }
}

/// A user's device, with the token that proves it.
#[derive(Debug, Clone)]
struct EnrolledDevice {
    device: UserDevice,
    token: SecretHash,
    enrolments: Arc<SharedEnrolments>,
}

/// A join that waits for the next write of the store.
#[derive(Debug)]
struct PendingJoin {
    secret: SecretHash,
    joiner: Invitee,
    token: SecretHash,
    /// As of the last attempt to write; true if it is the first use.
    outcome: Result<bool, InvitationError>,
    answer: oneshot::Sender<Result<bool, JoinRefusal>>,
}

/// A new invitation, returned to the operator who asked a server for it.
#[derive(Debug, Clone)]
pub struct NewInvitation {
    /// Code for the person who sets the machine up: a secret.
    pub code: InvitationCode,
    /// Expiration time in seconds since 1970.
    pub until: u64,
    /// ID of the join key; `None` for an invitation of one machine.
    pub key: Option<String>,
    /// A name or address from the server certificate.
    pub host: Option<Host>,
}

/// Why a server refuses a machine's request to join.
#[derive(Debug, thiserror::Error)]
pub enum JoinRefusal {
    /// The request is malformed.
    #[error("{0}")]
    Malformed(&'static str),
    /// The invitation is not valid.
    #[error(transparent)]
    Uninvited(InvitationError),
    /// A temporary failure, with its cause for the log: the machine may retry.
    #[error("this server cannot check invitations now; see its log")]
    Later(String),
}

impl SharedEnrolments {
    /// Creates an empty state. It is filled by [`SharedState::follow`] and by reads on demand.
    pub fn new(
        store: Box<dyn TextStore>,
        ([grants, seen], most_grants): ([Box<dyn TextStore>; 2], usize),
        authority: ReloadedValue<AdvertisedCa>,
        refusals: RefusalLog,
    ) -> Arc<Self> {
        // One for both, because what grants give depends on both.
        let changed = watch::Sender::new(());
        Arc::new(Self {
            state: SharedState::new("invitations", store, changed.clone()),
            grants: SharedState::new("grants", grants, changed),
            seen: SharedState::new("times of machines", seen, watch::Sender::new(())),
            uses: Mutex::default(),
            seen_ending: Notify::new(),
            most_grants,
            joining: Mutex::default(),
            authority,
            refusals,
        })
    }

    /// Returns the device that this token should prove; see [`JoinedDevice::check`].
    pub fn device(self: &Arc<Self>, device: UserDevice, token: &str) -> Arc<dyn JoinedDevice> {
        Arc::new(EnrolledDevice { device, token: SecretHash::of(token), enrolments: self.clone() })
    }

    /// Returns the CA certificates (PEM) used to verify the servers of the cloud.
    pub fn certificates(&self) -> String {
        self.authority.load().certificates.clone()
    }

    /// Creates an invitation of a node or user that is valid for `lasting`, or a join key for `uses` nodes. With `keep`
    /// the user's device remains even if it is unused. `who` is the actor in the log.
    ///
    /// # Errors
    ///
    /// Fails if the invitation was not created.
    pub async fn invite(
        &self,
        invitee: &Invitee,
        uses: Option<u32>,
        lasting: Duration,
        keep: bool,
        who: &str,
    ) -> Result<NewInvitation, String> {
        let authority = self.authority.load();
        let code = InvitationCode::random(authority.pin, invitee.clone());
        let now = now();
        let hash = SecretHash::of(&code.secret());
        let until = now.saturating_add(lasting.as_secs());
        let ttl_seconds = lasting.as_secs();
        let invite = |enrolled: &mut Enrolments| {
            enrolled.invite(hash.clone(), invitee, uses, until, now)?;
            if keep {
                enrolled.keep(&hash);
            }
            Ok(())
        };
        self.change(invite).await?;
        let key = uses.map(|_| hash.id());
        if let Some(key) = &key {
            info!(target: AUDIT, actor = who, key, nodes = %invitee, uses, ttl_seconds, "join key created");
        } else {
            let node = invitee.node().map(display);
            let user = invitee.user().map(display);
            let keep = keep.then_some(true);
            info!(target: AUDIT, actor = who, node, user, ttl_seconds, keep, "invitation created");
        }
        Ok(NewInvitation { code, until, key, host: authority.host.clone() })
    }

    /// Reads the store, and returns those that have joined or are invited, sorted by name.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be read.
    pub async fn list(&self) -> Result<Vec<ListedEnrolment>, String> {
        self.read_store().await?;
        // Without that text, the times are as last read.
        let _ = self.seen.read_store().await;
        Ok(self.listed())
    }

    /// Revokes as [`Enrolments::revoke`] does, with the grants that the user has, and those that user or device has given.
    /// Returns true if there was anything to revoke.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be used.
    pub async fn revoke(&self, subject: &Invitee, who: &str) -> Result<bool, String> {
        let by = subject.user().map(|_| subject.to_string().trim_end_matches('/').to_owned());
        let user = by.clone().filter(|_| subject.device().is_none());
        // The tokens first: a grant that a device gives afterwards is taken back, as it is no longer joined.
        let revoked = self.change(|enrolled| Ok(enrolled.revoke(subject))).await;
        let grants = match &by {
            Some(_) => self.revoke_grants(&GrantSelection { id: None, user, by }, |_| true, who).await,
            None => Ok(0),
        };
        if let Some(message) = revocation_message(&revoked, "token and open invitations revoked") {
            let node = subject.node().map(display);
            let user = subject.user().map(display);
            let device = subject.device().map(display);
            let error = revoked.as_ref().err().map(display);
            info!(target: AUDIT, actor = who, node, user, device, error, "{message}");
        }
        // One store may fail without the other.
        Ok(revoked? | (grants? > 0))
    }

    /// Ends a join key as [`Enrolments::end_key`] does. Returns true if that changed anything.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be used.
    pub async fn end_key(&self, key: &str, nodes: bool, who: &str) -> Result<bool, String> {
        let now = now();
        let ended = self.change(|enrolled| Ok(enrolled.end_key(key, nodes, now))).await;
        if let Some(message) = revocation_message(&ended, "join key revoked") {
            let error = ended.as_ref().err().map(display);
            info!(target: AUDIT, actor = who, key, with_nodes = nodes, error, "{message}");
        }
        ended
    }

    /// Ends the previous token of a node that has linked with the token that replaced it.
    pub async fn end_previous(&self, node: &NodeName, token: &str) {
        // If that fails it expires. `follow` reports failures.
        if let Ok(true) = self.change(|enrolled| Ok(enrolled.end_previous(node, token))).await {
            info!(target: AUDIT, actor = %node, "previous token ended");
        }
    }

    /// Joins a machine to the cloud, as the node or device of that name. `secret` is its invitation's, `token` the
    /// token that it will use from now on. A join key does not admit a node that `has_line` in the token file.
    ///
    /// # Errors
    ///
    /// Fails if the machine has not joined. After a store error it may have joined nevertheless.
    pub async fn join(
        &self,
        from: IpAddr,
        JoinCredentials { secret, name, token }: &JoinCredentials,
        has_line: impl Fn(&NodeName) -> bool,
    ) -> Result<(), JoinRefusal> {
        let Ok(joiner @ (Invitee::Node(_) | Invitee::Device(_))) = name.parse::<Invitee>() else {
            return Err(JoinRefusal::Malformed("not the name of a node or of a user's device"));
        };
        let strong = (MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES).contains(&token.len());
        if !strong || !token.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(JoinRefusal::Malformed("the token must have 32 to 128 letters and digits"));
        }
        let hash = SecretHash::of(secret);
        let token = SecretHash::of(token);
        let check = || {
            let known = self.known();
            // First, so that a key does not reveal which other names have a line.
            let is_first = known.check(&hash, &joiner, &token, now())?;
            match joiner.node().filter(|node| known.key_of(&hash).is_some() && has_line(node)) {
                Some(node) => Err(InvitationError::NodeTaken(node.to_string())),
                None => Ok(is_first),
            }
        };
        // Only a valid code may occupy the store. Otherwise guesses would delay or exclude the machines that have one.
        if check().is_err() {
            self.refresh().await.map_err(JoinRefusal::Later)?;
        }
        let is_first = match check() {
            Ok(true) => self.join_with_others(hash.clone(), joiner.clone(), token.clone()).await?,
            known => known.map_err(JoinRefusal::Uninvited)?,
        };
        let key = self.known().key_of(&hash);
        let message = match joiner {
            _ if !is_first => "join request repeated",
            Invitee::Device(_) => "device joined by invitation",
            _ => "node joined by invitation",
        };
        let repeated = format_args!("{joiner} {}", key.as_deref().unwrap_or_default());
        limited!(
            is_first || self.refusals.may_log_once("join_repeated", repeated) => info,
            target: AUDIT, actor = %joiner, remote_addr = %from, key, "{message}"
        );
        Ok(())
    }

    /// Joins a machine by one write of the store together with all that arrived while it was in use: a write takes
    /// long, and each may conflict with another server's. Returns true on the first use of the invitation.
    async fn join_with_others(
        &self,
        secret: SecretHash,
        joiner: Invitee,
        token: SecretHash,
    ) -> Result<bool, JoinRefusal> {
        let (answer, answered) = oneshot::channel();
        self.joining.lock().push(PendingJoin { secret, joiner, token, outcome: Ok(false), answer });
        {
            // While one call writes, others queue here. The next one to get the lock serves all of them.
            let mut cell = self.lock().await;
            let mut joining = std::mem::take(&mut *self.joining.lock());
            // Another call may have served this one while it waited.
            if !joining.is_empty() {
                let now = now();
                let all = |enrolled: &mut Enrolments| {
                    joining.iter_mut().for_each(|one| one.apply(enrolled, now));
                    Ok(())
                };
                match self.change_in(&mut cell, all).await {
                    Ok(()) => joining.into_iter().for_each(PendingJoin::answer),
                    Err(why) => joining.into_iter().for_each(|one| one.fail(&why)),
                }
            }
        }
        answered.await.unwrap_or_else(|_| Err(JoinRefusal::Later("the write was interrupted".to_owned())))
    }
}

impl Deref for SharedEnrolments {
    type Target = SharedState;

    fn deref(&self) -> &SharedState {
        &self.state
    }
}

impl JoinedDevice for EnrolledDevice {
    fn device(&self) -> &UserDevice {
        &self.device
    }

    fn check(&self) -> Result<(), &'static str> {
        let known = self.enrolments.known();
        if known.proves_device(&self.device, &self.token) {
            Ok(())
        } else if known.was_unused(&self.token) {
            Err("ended at this device, which was unused for 90 days")
        } else {
            Err("was revoked")
        }
    }
}

impl PendingJoin {
    /// Joins. A write whose response was lost may have done it before, which is still the first use.
    fn apply(&mut self, enrolled: &mut Enrolments, now: u64) {
        let was_tried = self.outcome == Ok(true);
        let joined = enrolled.join(&self.secret, &self.joiner, self.token.clone(), now);
        self.outcome = joined.map(|is_first| is_first || was_tried);
    }

    fn answer(self) {
        // A machine that no longer waits repeats its request.
        let _ = self.answer.send(self.outcome.map_err(JoinRefusal::Uninvited));
    }

    fn fail(self, why: &str) {
        let _ = self.answer.send(Err(JoinRefusal::Later(why.to_owned())));
    }
}

/// Returns the audit line about a revocation; `None` if nothing was revoked.
fn revocation_message<E>(done: &Result<bool, E>, revoked: &'static str) -> Option<&'static str> {
    match done {
        Ok(true) => Some(revoked),
        Ok(false) => None,
        // The store may have done it.
        Err(_) => Some("revocation failed, or its result is unknown"),
    }
}

/// Maximum length of a token in bytes, short enough for every place that stores it.
const MAX_TOKEN_BYTES: usize = 128;

/// What a joining machine learns about the cloud's CA.
#[derive(Debug, Clone)]
pub struct AdvertisedCa {
    /// CA certificates, PEM: one, or several during a CA rotation.
    pub(crate) certificates: String,
    /// Pin of the CA that issued the server certificate.
    pub(crate) pin: Pin,
    /// A name in the server certificate.
    pub(crate) host: Option<Host>,
}

impl AdvertisedCa {
    /// Loads the CA file and the server certificate, and reloads them when they change.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read, or if none of the CAs issued the certificate.
    pub fn load(authorities: PathBuf, certificate: PathBuf) -> Result<ReloadedValue<Self>, ReloadError> {
        let paths = vec![authorities.clone(), certificate.clone()];
        ReloadedValue::new(paths, move |contents| {
            let [ca, cert] = contents else { return Err("a file is missing".into()) };
            let all = pem::certs(&authorities, ca)?;
            let chain = pem::certs(&certificate, cert)?;
            let signer = issuer(&all, &chain).ok_or_else(|| {
                format!(
                    "none of the CAs in {} issued {} with a supported signature; set the file of the CA that did, with \
                     a key of {SUPPORTED_KEYS}, and SHA-256 or longer",
                    authorities.display(),
                    certificate.display()
                )
            })?;
            let host = chain.first().and_then(|leaf| host_of(leaf));
            let certificates = String::from_utf8_lossy(ca).into_owned();
            Ok(Self { certificates, pin: pin_of(&signer), host })
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
