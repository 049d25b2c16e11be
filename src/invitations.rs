//! Invitations, as servers, joining machines and operators know them.

pub mod code;
pub mod invitee;

use std::fmt;

use serde::{Deserialize, Serialize};

use tunnel_proto::names::UserDevice;

/// A user's device that has joined, as the store of a server knows it.
pub trait JoinedDevice: fmt::Debug + Send + Sync {
    /// Returns the device.
    fn device(&self) -> &UserDevice;

    /// Checks whether the device has joined with its token, and has not ended since.
    ///
    /// # Errors
    ///
    /// Returns how the user's access has ended, as the rest of a sentence.
    fn check(&self) -> Result<(), &'static str>;
}

/// Grants of users to revoke: one of these.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields)]
#[group(required = true, multiple = false)]
pub struct GrantSelection {
    /// ID of a grant, as in the list and in the log.
    #[arg(value_name = "ID")]
    pub id: Option<String>,
    /// User who has the grants.
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Who gave the grants, as in the list; a user includes all her devices.
    #[arg(long, value_name = "NAME")]
    pub by: Option<String>,
}

/// A node or a device that has joined, a node or user that is invited, or both; or a join key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListedEnrolment {
    /// Name of the node in lower case; absent for users and devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The user; absent for nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The user's device; absent for nodes, and for a user's open invitations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// ID of the join key, or of the one by which the node has joined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Pattern of the nodes that the join key is for; absent for all others, like the next two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// Number of nodes that may use the join key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uses: Option<u32>,
    /// Number of nodes that have used it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u32>,
    /// Whether it has joined.
    pub joined: bool,
    /// When it joined, in seconds since 1970, within about an hour; absent if that was before servers noted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub joined_at: Option<u64>,
    /// When it was last linked, in seconds since 1970. Other servers' links are known within about an hour.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<u64>,
    /// When the user's device ends if it stays unused, in seconds since 1970; absent if it does not end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ends: Option<u64>,
    /// Expiration time of its open invitation, in seconds since 1970; of several the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub invited_until: Option<u64>,
}
