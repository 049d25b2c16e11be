//! What the admission of a client is based on: its address, its identity, and what it reaches. It is judged when a
//! session opens, and again after each change of rights.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};

use crate::acceptor::target_dialer::DialRight;
use crate::admission::AccessPolicy;
use crate::admission::auth::Login;
use crate::admission::denial::Denial;
use crate::invitations::JoinedDevice;
use crate::session_io::judged::UNTIL_CHANGED;
use crate::session_io::rights::RightsChange;
use tunnel_base::policy::grants::Grant;
use tunnel_base::unix_time::now;
use tunnel_net::tls::client_certificate::ClientCertificate;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::names::NodeName;

/// The identity of a client.
#[derive(Debug, Clone, Default)]
pub enum ClientIdentity {
    /// No identity. A password is requested if the access policy requires one.
    #[default]
    None,
    /// A local user of this machine.
    User(String),
    /// A user's device that has joined by invitation.
    Device(Arc<dyn JoinedDevice>),
    /// A certificate. The access policy may accept only some names.
    Certificate(ClientCertificate),
    /// A user with a password.
    Password(Login),
}

/// The facts by which a request was admitted.
#[derive(Debug)]
pub(crate) struct AccessBasis {
    pub(crate) policy: Arc<ArcSwap<AccessPolicy>>,
    pub(crate) listener: &'static str,
    /// Address of the client; without it, the request is judged for any address.
    pub(crate) from: Option<IpAddr>,
    pub(crate) identity: ClientIdentity,
    /// The node, and the port of the target.
    pub(crate) node: NodeName,
    pub(crate) port: u16,
    /// The grant that has allowed it last; `None` if a rule has.
    pub(crate) grant: Arc<ArcSwapOption<Grant>>,
    /// The right to the target, if this process has dialled it.
    pub(crate) direct: Option<DialRight>,
}

impl ClientIdentity {
    /// Returns the user, if the access policy accepts this identity now. Also returns the last second (Unix time) for
    /// which the result holds unless rights change.
    ///
    /// # Errors
    ///
    /// Returns [`Denial::Forbidden`] if the policy does not accept the certificate or the login, or the device was
    /// revoked.
    pub(crate) fn judge(
        &self,
        policy: &AccessPolicy,
        listener: &str,
    ) -> Result<(Option<String>, u64), Denial> {
        match self {
            Self::None if policy.certificates.as_ref().is_some_and(|request| request.is_everywhere) => {
                Err(Denial::Forbidden("clients of this listener need a certificate now".to_owned()))
            }
            Self::None if policy.logins.is_some() => {
                Err(Denial::Forbidden("clients of this listener need a password now".to_owned()))
            }
            Self::None => Ok((None, UNTIL_CHANGED)),
            Self::User(user) => Ok((Some(user.clone()), UNTIL_CHANGED)),
            Self::Device(device) => {
                let user = &device.device().user;
                let checked = device.check();
                checked.map_err(|why| Denial::Forbidden(format!("the access of user {user} {why}")))?;
                Ok((Some(user.to_string()), UNTIL_CHANGED))
            }
            Self::Certificate(certificate) => {
                let now = policy.certificates.as_ref().map(|request| &request.tls);
                let until = certificate.verify(now).map_err(|error| {
                    let error = TlsHandshakeError::of_tls(&error);
                    Denial::Forbidden(format!("client certificate rejected: {error}"))
                })?;
                Ok((Some(policy.user_of_certificate(&certificate.names, listener)?), until))
            }
            // As if requested now, without a password.
            Self::Password(_) if policy.logins.is_none() => Ok((None, UNTIL_CHANGED)),
            Self::Password(login)
                if policy.logins.as_ref().is_some_and(|logins| logins.is_current(login)) =>
            {
                Ok((Some(login.user.clone()), UNTIL_CHANGED))
            }
            Self::Password(Login { user, .. }) => Err(Denial::Forbidden(format!(
                "the password of user {user} was changed, or the user was removed"
            ))),
        }
    }
}

impl AccessBasis {
    /// Checks whether the access policy admits the request with a change of rights. Returns the last second (Unix time)
    /// for which the result holds unless rights change.
    ///
    /// # Errors
    ///
    /// Returns the denial that a new request would get.
    pub(crate) fn judge(&self, change: &RightsChange) -> Result<u64, Denial> {
        let policy = change.load(&self.policy);
        policy.check_source(self.from)?;
        let (user, until) = self.identity.judge(&policy, self.listener)?;
        let user = user.as_deref();
        let why = |grant: &Arc<Grant>| Denial::Forbidden(policy.rights.why_ended(grant, now()));
        let grant = policy
            .authorize(user, self.from, &self.node, self.port)
            .map_err(|denial| self.grant.load().as_ref().map_or(denial, why))?;
        let end = grant.as_ref().map_or(UNTIL_CHANGED, |grant| grant.until.saturating_sub(1));
        if change.is_empty() {
            self.grant.store(grant);
        }
        if let Some(right) = &self.direct {
            policy.authorize(user, self.from, &NodeName::direct(), right.port())?;
            right.judge(change).map_err(Denial::Direct)?;
        }
        Ok(until.min(end))
    }
}
