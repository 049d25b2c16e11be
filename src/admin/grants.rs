//! The request for a grant at the admin API, as JSON.

use serde::{Deserialize, Serialize};

use tunnel_base::policy::NodeGlob;
use tunnel_base::serde_forms::{ConfigPort, non_empty};
use tunnel_proto::names::UserName;

/// The body of the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrantRequest {
    /// User who gets it.
    pub user: UserName,
    /// Patterns of nodes.
    pub nodes: Vec<NodeGlob>,
    /// Ports; if absent all.
    #[serde(default, deserialize_with = "non_empty::<_, ConfigPort<1>, _>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<Vec<ConfigPort<1>>>,
    /// Time in seconds until it ends. By default 90 days, or the time for which an admin may grant.
    pub seconds: Option<u64>,
    /// Whether a pattern with '*' also covers nodes that came by a join key.
    pub with_join_keys: bool,
}
