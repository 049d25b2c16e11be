//! What each frame about a session does: for an end here, for one that passes through, for one that is new.

use std::sync::Arc;

use tokio::time::Instant;

use crate::protocol::link::sender::{LinkSender, UNKNOWN};
use crate::protocol::relay::table::{Attempt, Claim};
use crate::protocol::table::offers::ReceivedOpen;
use crate::protocol::table::request::{RelayRequest, refused};
use crate::protocol::table::{Event, SessionTable};
use crate::protocol::wire::frame::{Category, Code, Refusal, SessionFrame, SessionKey};
use crate::protocol::wire::opener::Opener;
use crate::protocol::wire::peer::Peer;

impl SessionTable {
    /// One frame about a session, from the link of `sender`. The key's node is where its acceptor is, if the frame
    /// asks.
    pub fn on_frame(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        key: SessionKey,
        mut frame: SessionFrame,
        now: Instant,
    ) -> Option<Event> {
        let opener = frame.opener().and_then(|said| {
            *said = Opener::vouched(said.take(), &sender.peer, sender.instance);
            said.clone()
        });
        let mut known = self.session(key.id);
        if known.as_ref().is_some_and(|shared| !shared.is_of(opener.as_ref())) {
            self.foreign(sender, &key, &frame);
            return None;
        }
        if let SessionFrame::Resume { instance: Some(meant), .. } = &frame
            && *meant != self.instance
        {
            known = known.filter(|shared| !shared.yields());
        }
        let Some(shared) = known else { return self.on_foreign_frame(sender, key, frame) };
        // A Reset from a pod on the way sends its opener elsewhere.
        let parks = matches!(frame, SessionFrame::Lost { .. } | SessionFrame::Reset { .. });
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
        mut key: SessionKey,
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
                // An edge must never borrow another front end's rights, nor another's name.
                if let Some(edge) = edge {
                    (key.category, *client) = (Category::HttpProxy, format!("node {edge}"));
                }
                let attempt = Attempt::new(sender, key, *epoch, opener.clone());
                self.on_request(attempt, frame)
            }
            // Only an edge that gives up an opening does not know the process.
            SessionFrame::Resume { epoch, instance, opener, .. }
                if elsewhere && *instance != Some(self.instance) =>
            {
                let attempt = Attempt::new(sender, key, *epoch, opener.clone());
                self.on_request(attempt, frame)
            }
            SessionFrame::Open { .. } => {
                let SessionFrame::Open { target, limit, epoch, client, opener } = frame else { return None };
                let open = ReceivedOpen { key, target, client, opener, limit, epoch };
                self.offered(sender, open).map(Event::Offer)
            }
            SessionFrame::Resume { epoch, opener, .. } => {
                sender.reply(&key, self.resumed_in_vain(key.id, opener.as_ref(), *epoch));
                None
            }
            _ => {
                if !self.relays.on_frame(sender, key.id, frame) {
                    self.metrics.frames_dropped.count("unknown_session");
                }
                None
            }
        }
    }

    fn on_request(self: &Arc<Self>, attempt: Attempt, frame: SessionFrame) -> Option<Event> {
        let from = &attempt.from;
        let most = self.limits.sessions;
        let too_many = if from.is_behind() || from.sessions() >= most {
            Some("too many sessions on this link at once")
        } else if self.relays.len() >= most && !self.relays.knows(attempt.key.id) {
            Some("too many sessions through this pod at once")
        } else {
            None
        };
        if let Some(why) = too_many {
            let refusal = Refusal::new(Code::Busy, why);
            from.reply(&attempt.key, refused(&frame, refusal));
            return None;
        }
        match self.relays.on_request(&attempt) {
            Claim::Newest => {
                return Some(Event::RelayRequest(RelayRequest::new(self.clone(), attempt, frame)));
            }
            Claim::Old => self.metrics.frames_dropped.count("out_of_place"),
            Claim::Foreign => self.foreign(from, &attempt.key, &frame),
        }
        None
    }

    /// A peer that tries to resume another opener's session gets the same answer as for a session that does not exist.
    fn foreign(&self, from: &LinkSender, session: &SessionKey, frame: &SessionFrame) {
        self.metrics.frames_dropped.count("not_the_opener");
        from.reply(session, refused(frame, Refusal::new(Code::Unknown, UNKNOWN)));
    }
}
