//! How clients share the sessions of a pod.

use std::net::IpAddr;
use std::sync::Arc;

use crate::net::door::{Door, Limits, Source};

/// The key by which clients share a pod's sessions: the user, or the source where the front end asks for no user.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClientKey {
    /// A user, by the name that was proved.
    User(Arc<str>),
    /// An address, or the /64 of an IPv6 address.
    Source(Source),
}

impl ClientKey {
    /// The key of a client at `from`, which has proved to be `user` if that is given.
    pub fn of(user: Option<&str>, from: IpAddr) -> Self {
        user.map_or_else(|| Self::Source(Source::of(from)), |name| Self::User(name.into()))
    }
}

/// The door to the sessions of all front ends of a pod: at once `most` in all, and `for_one` for one client.
pub fn sessions(most: usize, for_one: usize) -> Door<ClientKey> {
    Door::new(Limits { slots: most, for_one, waiting: 0, patience: None })
}
