//! Whose sessions are served here: one client may have all there is, until another wants some.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use crate::names::SessionId;
use crate::protocol::lock;
use crate::protocol::session::SessionCore;
use crate::protocol::table::SessionTable;
use crate::protocol::wire::frame::{Code, Refusal};

/// The sessions that were opened from elsewhere, by client.
#[derive(Debug, Default)]
pub(super) struct Clients {
    of: HashMap<SessionId, Arc<str>>,
    counts: HashMap<Arc<str>, usize>,
}

impl Clients {
    pub(super) fn add(&mut self, id: SessionId, client: &str) {
        let (client, count) = match self.counts.get_key_value(client) {
            Some((known, count)) => (known.clone(), count + 1),
            None => (client.into(), 1),
        };
        self.counts.insert(client.clone(), count);
        self.of.insert(id, client);
    }

    /// Whose session that was; `None` if nobody's, or if it was removed before.
    pub(super) fn remove(&mut self, id: SessionId) -> Option<Arc<str>> {
        let client = self.of.remove(&id)?;
        if let Some(count) = self.counts.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&client);
            }
        }
        Some(client)
    }

    /// The sessions of the client that has most, if that is more than `newcomer` would have with one more.
    fn of_fullest(&self, newcomer: &str) -> Vec<SessionId> {
        let own = self.counts.get(newcomer).map_or(0, |count| *count);
        let Some((fullest, most)) = self.counts.iter().max_by_key(|(_, count)| **count) else {
            return Vec::new();
        };
        let theirs = self.of.iter().filter(|(_, client)| *most > own + 1 && *client == fullest);
        theirs.map(|(id, _)| *id).collect()
    }
}

impl SessionTable {
    /// Of the client that has more sessions than `newcomer`, the one that was silent for longest is reset. False if
    /// nobody has more.
    pub(super) fn give_way(&self, newcomer: &str) -> bool {
        let theirs = lock(&self.clients).of_fullest(newcomer);
        let sessions = theirs.into_iter().filter_map(|id| self.session(id));
        let Some(session): Option<Arc<SessionCore>> = sessions.min_by_key(|session| session.last_frame())
        else {
            return false;
        };
        self.add_ended(session.key.id, Some(Code::Busy));
        session.reset_unread(Refusal::new(
            Code::Busy,
            "it made room for another client: its own has most sessions there, and it was silent for longest",
        ));
        true
    }
}

/// Who that is, of a client as an Open names it: its user, else its address; one for each /64 of IPv6.
pub(super) fn source(client: &str) -> String {
    if let Some((user, _)) = client.rsplit_once('@') {
        return user.to_owned();
    }
    match client.parse().map(|at: SocketAddr| at.ip().to_canonical()) {
        Ok(IpAddr::V6(ip)) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).to_string(),
        Ok(ip) => ip.to_string(),
        Err(_) => client.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_its_user_or_else_its_address() {
        for (client, expected) in [
            ("10.0.0.1:4711", "10.0.0.1"),
            ("[::ffff:10.0.0.1]:4711", "10.0.0.1"),
            ("[2001:db8:1:2:3::4]:4711", "2001:db8:1:2::"),
            ("ann@10.0.0.1:4711", "ann"),
            ("ann@example.org@[::1]:4711", "ann@example.org"),
            ("node edge-1", "node edge-1"),
            ("", ""),
        ] {
            assert_eq!(source(client), expected, "{client}");
        }
    }

    #[test]
    fn who_has_most_gives_way_to_who_has_less() {
        let mut clients = Clients::default();
        for id in 0..3 {
            clients.add(SessionId::from_bits(id), "ann");
        }
        assert!(clients.of_fullest("ann").is_empty(), "alone it may have all");
        for id in 3..6 {
            assert_eq!(clients.of_fullest("bob").len(), [3, 3, 0][id as usize - 3], "{id}");
            clients.add(SessionId::from_bits(id), "bob");
        }
        for id in 0..6 {
            clients.remove(SessionId::from_bits(id));
        }
        assert!(clients.of.is_empty() && clients.counts.is_empty());
    }
}
