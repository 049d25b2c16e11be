//! Why a node was not found, as text.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use crate::paths::RELINK_WINDOW;
use tunnel_base::unix_time::in_words;

/// No server has the node: the peers that were asked, and their answers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeNotFound {
    /// Time since the node was last linked here, or to a peer; `None` if it was never seen, or is linked.
    pub seen: Option<Duration>,
    /// Why DNS returned no server, if DNS was queried.
    pub dns: Option<String>,
    /// Number of peers that answered that the node is not there.
    pub queried_peers: usize,
    /// The peers that could not be reached.
    pub trouble: Vec<PeerError>,
    /// Whether it was found, but as another process than the requested one.
    pub another: bool,
    /// Why servers that may have it were not asked.
    pub unqueried_reason: Option<UnqueriedReason>,
}

/// Why a peer could not be asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// No link could be made. The cause contains a hint.
    #[error("peer {at} cannot be reached: {cause}")]
    NoLink {
        /// The address.
        at: SocketAddr,
        /// The reason.
        cause: String,
    },
    /// Its certificate is not a peer's. The cause contains what is wrong with it.
    #[error("peer {at} cannot be reached: {cause}")]
    NotAPeer {
        /// The address.
        at: SocketAddr,
        /// The reason.
        cause: String,
    },
    /// It is linked and does not answer.
    #[error("peer {0} does not answer")]
    Silent(String),
    /// The address is this server's own.
    #[error("{0} is this server")]
    SelfDial(SocketAddr),
}

/// Why this server cannot ask servers that should be its peers. Displayed after the word "because".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnqueriedReason {
    /// This server's certificate, or its CA file, does not allow links to peers.
    #[error("it cannot link to them (peer_ca)")]
    Unlinked,
    /// Kubernetes has not yet listed the servers.
    #[error("Kubernetes does not list them")]
    Unlisted,
}

impl NodeNotFound {
    /// Returns true if no server remembers a link from that node; it may have no edge at all.
    pub fn is_unknown_node(&self) -> bool {
        self.seen.is_none() && !self.another
    }

    /// Returns true if the node was linked a moment ago and may be linking to another server.
    pub fn is_moving(&self) -> bool {
        self.seen.is_some_and(|seen| seen < RELINK_WINDOW)
    }

    /// Returns the complete message, to be placed after the node's name.
    pub fn sentence(&self) -> String {
        if self.another {
            return RESTARTED.to_owned();
        }
        let seen = self.seen.map(|seen| format!(", last seen {} ago", in_words(seen))).unwrap_or_default();
        format!("is not connected{seen}{self}")
    }
}

impl fmt::Display for NodeNotFound {
    /// Continues a message about the node, so each part starts with "; ".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A node that was linked is not looked for in the wrong place.
        if let Some(dns) = self.dns.as_ref().filter(|_| self.seen.is_none()) {
            write!(f, "; {dns}")?;
        }
        match self.queried_peers {
            0 => {}
            1 => f.write_str("; not at 1 peer")?,
            n => write!(f, "; not at {n} peers")?,
        }
        for trouble in &self.trouble {
            write!(f, "; {trouble}")?;
        }
        if let Some(why) = self.unqueried_reason {
            write!(f, "; this server did not ask the others, because {why}")?;
        }
        Ok(())
    }
}

/// What has become of a node that is linked by another process than that of a session.
pub(crate) const RESTARTED: &str = "was restarted, which ended this session";
