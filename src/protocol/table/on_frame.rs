//! What each frame about a session does: for an end here, for one that passes through, for one that is new.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::names::{NodeName, SessionId, Target};
use crate::protocol::link::sender::{LinkSender, UNKNOWN, unknown};
use crate::protocol::lock;
use crate::protocol::relay::request::{RelayRequest, refused};
use crate::protocol::relay::table::{Attempt, Claim};
use crate::protocol::session::recv::RecvHalf;
use crate::protocol::session::send::SendHalf;
use crate::protocol::session::state::SessionState;
use crate::protocol::session::{Offer, SessionCore};
use crate::protocol::table::clients::source;
use crate::protocol::table::{Event, SessionTable};
use crate::protocol::wire::frame::{Category, Code, Refusal, SessionFrame};
use crate::protocol::wire::opener::Opener;
use crate::protocol::wire::peer::Peer;

impl SessionTable {
    /// One frame about a session, from the link of `sender`. `node` is where its acceptor is, if the word asks.
    pub fn on_frame(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        node: NodeName,
        id: SessionId,
        category: Category,
        mut frame: SessionFrame,
        now: Instant,
    ) -> Option<Event> {
        let opener = frame.opener().and_then(|said| {
            *said = Opener::vouched(said.take(), sender);
            said.clone()
        });
        let mut known = self.shard(id).get(&id).cloned();
        if known.as_ref().is_some_and(|shared| !shared.is_of(opener.as_ref())) {
            self.foreign(sender, (id, category, &node), &frame);
            return None;
        }
        if let SessionFrame::Resume { instance: Some(meant), .. } = &frame
            && *meant != self.instance
        {
            known = known.filter(|shared| !shared.yields());
        }
        let Some(shared) = known else { return self.on_foreign_frame(sender, node, id, category, frame) };
        let parks = matches!(frame, SessionFrame::Lost { .. });
        let resumes = matches!(frame, SessionFrame::Resume { .. } | SessionFrame::Resumed { .. });
        if !shared.on_frame(sender, frame, now) {
            self.metrics.frames_dropped.count("out_of_place");
            return None;
        }
        if resumes {
            self.metrics.resumed.inc();
        }
        if let Some(opener) = opener {
            shared.opened_by(opener);
        }
        if parks { shared.parked().map(Event::Parked) } else { None }
    }

    /// A frame about a session that has no end here, or none yet.
    fn on_foreign_frame(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        node: NodeName,
        id: SessionId,
        category: Category,
        mut frame: SessionFrame,
    ) -> Option<Event> {
        let edge = match &sender.peer {
            Peer::Edge(edge) => Some(edge),
            Peer::Cloud(_) | Peer::Pod => None,
        };
        // What the cloud asks of an edge is meant for that edge; a link to it carries nothing else.
        let elsewhere = !matches!(sender.peer, Peer::Cloud(_));
        match &mut frame {
            SessionFrame::Open { epoch, client, opener, .. } if elsewhere => {
                let mut category = category;
                // An edge must never borrow another front end's rights, nor another's name.
                if let Some(edge) = edge {
                    (category, *client) = (Category::HttpProxy, format!("node {edge}"));
                }
                let attempt = Attempt::new(sender, (id, category, node), (*epoch, opener.clone()));
                self.asked(attempt, frame)
            }
            SessionFrame::Resume { epoch, instance: Some(instance), opener, .. }
                if elsewhere && *instance != self.instance =>
            {
                let attempt = Attempt::new(sender, (id, category, node), (*epoch, opener.clone()));
                self.asked(attempt, frame)
            }
            SessionFrame::Open { .. } => {
                let SessionFrame::Open { target, limit, epoch, client, opener } = frame else { return None };
                self.offered(sender, (id, category, node), (target, client, opener), (limit, epoch))
            }
            SessionFrame::Resume { epoch, .. } => {
                sender.reply(id, category, &node, unknown(*epoch));
                None
            }
            _ => {
                if !self.relays.on_frame(sender, id, frame) {
                    self.metrics.frames_dropped.count("unknown_session");
                }
                None
            }
        }
    }

    fn asked(self: &Arc<Self>, attempt: Attempt, frame: SessionFrame) -> Option<Event> {
        let from = &attempt.from;
        let most = self.limits.sessions;
        let too_many = if from.is_behind() || from.sessions() >= most {
            Some("too many sessions on this link at once")
        } else if self.relays.len() >= most && !self.relays.knows(attempt.id) {
            Some("too many sessions through this pod at once")
        } else {
            None
        };
        if let Some(why) = too_many {
            let refusal = Refusal::new(Code::Busy, why);
            from.reply(attempt.id, attempt.category, &attempt.node, refused(&frame, refusal));
            return None;
        }
        match self.relays.asked(&attempt) {
            Claim::Newest => {
                return Some(Event::RelayRequest(RelayRequest::new(self.clone(), attempt, frame)));
            }
            Claim::Old => self.metrics.frames_dropped.count("out_of_place"),
            Claim::Foreign => self.foreign(from, (attempt.id, attempt.category, &attempt.node), &frame),
        }
        None
    }

    /// Who wants to take up a session that another has opened is told no more than one who knows none.
    fn foreign(
        &self,
        from: &LinkSender,
        (id, category, node): (SessionId, Category, &NodeName),
        frame: &SessionFrame,
    ) {
        self.metrics.frames_dropped.count("not_the_opener");
        from.reply(id, category, node, refused(frame, Refusal::new(Code::Unknown, UNKNOWN)));
    }

    pub(crate) fn offered(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        (id, category, node): (SessionId, Category, NodeName),
        (target, client, opener): (Target, String, Option<Opener>),
        (limit, epoch): (u64, u64),
    ) -> Option<Event> {
        let source = source(&client);
        let ended = lock(&self.ended).refusal(id);
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
                sender.reply(id, category, &node, SessionFrame::Refused { epoch, refusal });
                return None;
            }
        };
        if !sender.resumes {
            let (in_all, of_link) = self.room_unread(sender);
            recv.lift_limit(in_all, of_link);
        }
        let end = SessionState::acceptor(sender.id, epoch, limit, send, recv);
        let shared = SessionCore::new(id, category, node, Arc::downgrade(self), end, Some(sender.clone()));
        if let Some(opener) = opener {
            shared.opened_by(opener);
        }
        sender.join(&shared);
        lock(&self.clients).add(id, &source);
        self.insert(&shared);
        let patience = if sender.resumes { PATIENCE } else { PLAIN_PATIENCE };
        Some(Event::Offer(Offer::new(shared, target, client, patience)))
    }

    /// Room for one session more of a client. If there is none, the client that has more than it gives some of its own.
    fn halves_for(&self, source: &str) -> Option<(SendHalf, RecvHalf)> {
        // Who gives way is gone from memory at once, and from the table once its far end was told.
        let given = || (0..MOST_GIVEN).take_while(|_| self.give_way(source)).find_map(|_| self.halves());
        self.has_place().then(|| self.halves()).flatten().or_else(given)
    }

    /// Why there is no room, and which key of which program makes more: a cloud asks an edge, any other asks a pod.
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
