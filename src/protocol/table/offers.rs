//! A session that a peer asks this process to serve: whether there is room, and which client makes room.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::names::{SessionId, Target};
use crate::protocol::link::sender::{LinkSender, unknown};
use crate::protocol::lock;
use crate::protocol::session::host::SessionHost as _;
use crate::protocol::session::recv::RecvHalf;
use crate::protocol::session::send::SendHalf;
use crate::protocol::session::state::SessionState;
use crate::protocol::session::{Offer, SessionCore};
use crate::protocol::table::SessionTable;
use crate::protocol::table::clients::source;
use crate::protocol::wire::frame::{Code, Refusal, SessionFrame, SessionKey};
use crate::protocol::wire::opener::Opener;
use crate::protocol::wire::peer::Peer;

/// What an Open asks for, as it came over a link.
#[derive(Debug)]
pub(super) struct ReceivedOpen {
    pub(super) key: SessionKey,
    /// The target to dial.
    pub(super) target: Target,
    /// The opener, for the log.
    pub(super) client: String,
    /// Who opens the session, where that is known.
    pub(super) opener: Option<Opener>,
    /// The offset below which the opener takes bytes.
    pub(super) limit: u64,
    /// The number of the attempt.
    pub(super) epoch: u64,
}

impl SessionTable {
    /// The offer of a session that ends here; `None` if it was refused, and then the opener gets Refused.
    pub(super) fn offered(self: &Arc<Self>, sender: &Arc<LinkSender>, open: ReceivedOpen) -> Option<Offer> {
        let ReceivedOpen { key, target, client, opener, limit, epoch } = open;
        let source = source(&client);
        let ended = lock(&self.ended).refusal(key.id);
        let halves = if let Some(refusal) = ended {
            Err(refusal)
        } else if sender.is_behind() {
            Err(Refusal::new(Code::Busy, "too many answers wait to be read on this link"))
        } else {
            self.halves_for(&source).ok_or_else(|| self.spent(&sender.peer))
        };
        let (send, mut recv) = match halves {
            Ok(halves) => halves,
            Err(refusal) => {
                sender.reply(&key, SessionFrame::Refused { epoch, refusal });
                return None;
            }
        };
        if !sender.resumes {
            let (in_all, of_link) = self.room_unread(sender);
            recv.lift_limit(in_all, of_link);
        }
        let end = SessionState::acceptor(sender.id, epoch, limit, send, recv);
        let shared = SessionCore::new(key, self.host(), end, Some(sender.clone()));
        if let Some(opener) = opener {
            shared.opened_by(opener);
        }
        lock(&self.clients).add(shared.key.id, &source);
        self.insert(&shared);
        // Known here before it is known there: a link that ends looks for its sessions here.
        if !sender.join(shared.key.id) {
            shared.link_ended(sender.id, None, Instant::now());
        }
        let patience = if sender.resumes { PATIENCE } else { PLAIN_PATIENCE };
        Some(Offer::new(shared, target, client, patience))
    }

    /// The answer to a Resume of a session that has no end here, and that no late Open makes one any more.
    pub(super) fn resumed_in_vain(&self, id: SessionId, opener: Option<&Opener>, epoch: u64) -> SessionFrame {
        self.add_unknown(id, opener);
        unknown(epoch)
    }

    /// Room for one session more of a client. If there is none, the client that has more than it gives some of its own.
    fn halves_for(&self, source: &str) -> Option<(SendHalf, RecvHalf)> {
        // A session that gives way leaves memory at once, and the table once its far end has got the reset.
        let given = || (0..MOST_GIVEN).take_while(|_| self.give_way(source)).find_map(|_| self.halves());
        self.has_place().then(|| self.halves()).flatten().or_else(given)
    }

    /// A refusal for want of room, and which key of which program makes more: a cloud asks an edge, any other asks a
    /// pod.
    fn spent(&self, peer: &Peer) -> Refusal {
        let (program, file) = match peer {
            Peer::Cloud(_) => ("edge", "the node's edge.toml"),
            Peer::Edge(_) | Peer::Pod => ("cloud", "that pod's cloud.toml"),
        };
        let most = self.limits.sessions;
        let why = match (self.len() >= most, program) {
            (true, "edge") => format!("{most} sessions run at the node, as many as an edge serves"),
            (true, _) => format!("{most} sessions run at that pod: see [mode.cloud.session] max in {file}"),
            (false, _) => format!(
                "no memory left there for another session: see [mode.{program}.session] memory in {file}"
            ),
        };
        Refusal::new(Code::Busy, why)
    }
}

/// Of one client, so many sessions may give way to one of another's: then there is room, or the one has no more.
const MOST_GIVEN: usize = 8;
/// How long an edge may dial: less than the 12 s a front end waits.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for a plain pod, which waits 5 s.
const PLAIN_PATIENCE: Duration = Duration::from_millis(4500);
