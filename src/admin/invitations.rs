//! Invitations at the admin API, as JSON.

use serde::{Deserialize, Serialize};

/// The response to a request for an invitation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InvitationResponse {
    /// The secret code, for the operator who sets up the machine.
    pub code: String,
    /// End of validity in seconds since 1970.
    pub until: u64,
    /// Host and port of the cloud, by its certificate.
    pub cloud: String,
    /// ID of the join key, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// ID of the grant that `tunnel invite --nodes` has given with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
}

/// Validity of an invitation in seconds: one minute, enough to carry a line to another machine, to one week.
pub(crate) const MIN_INVITATION_SECONDS: u64 = 60;
pub(crate) const MAX_INVITATION_SECONDS: u64 = 7 * 24 * 3600;

/// Longest validity of a join key in seconds, as it is part of an image: a year.
pub(crate) const MAX_KEY_SECONDS: u64 = 365 * 24 * 3600;

/// Maximum number of nodes that a join key admits, so that its record stays small.
pub(crate) const MAX_USES: u32 = 10_000;
