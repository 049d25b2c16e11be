//! The two links of a relayed session, and its opener.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{Notify, oneshot};
use tracing::{Level, debug, enabled};

use crate::link::Link;
use crate::relay::SearchGuard;
use crate::relay::attempt::Attempt;
use crate::relay::queue::{QueueFull, RelayQueue};
use crate::schedule::frame_source::FrameSource as _;
use tunnel_proto::frame::{ErrorCode, Opener, Place, SessionError, SessionFrame, SessionKey};
use tunnel_proto::names::{SessionId, Target};
use tunnel_proto::state::LinkId;

/// All bindings, and how many of them each edge or user has requested.
#[derive(Debug, Default)]
pub(super) struct Bindings {
    pub(super) all: HashMap<SessionId, Binding>,
    pub(super) requested: HashMap<String, usize>,
}

impl Bindings {
    /// Returns the binding that an attempt has made, if it has no newer one.
    pub(super) fn of(&mut self, attempt: &Attempt) -> Option<&mut Binding> {
        let known = self.all.get_mut(&attempt.key.id);
        known.filter(|known| known.epoch == attempt.epoch && known.opener_leg.link.id == attempt.from.id)
    }

    pub(super) fn insert(&mut self, id: SessionId, binding: Binding) -> Option<Binding> {
        let before = self.remove(&id);
        if let Some(requester) = binding.opener_leg.link.peer.requester() {
            *self.requested.entry(requester).or_default() += 1;
        }
        self.all.insert(id, binding);
        before
    }

    pub(super) fn remove(&mut self, id: &SessionId) -> Option<Binding> {
        let binding = self.all.remove(id)?;
        if let Some(requester) = binding.opener_leg.link.peer.requester()
            && let Some(count) = self.requested.get_mut(&requester)
        {
            *count -= 1;
            if *count == 0 {
                self.requested.remove(&requester);
            }
        }
        Some(binding)
    }
}

/// What a frame from one side of a binding requires, without the lock of the bindings.
pub(super) enum RelayStep {
    /// Nothing: it concerns no binding, or an older attempt, or this side may not send it.
    Ignore,
    /// The attempt has not reached the acceptor: the search for its path continues.
    SearchAgain { back: RelayLeg, changed: Arc<Notify>, logged: Option<LoggedBinding> },
    /// The frame goes to the other side.
    Pass { to: RelayLeg, epoch: u64 },
    /// It is the acceptor's answer, which goes to the opener and ends the search.
    Answer { to: RelayLeg, epoch: u64, search: Option<SearchGuard>, logged: Option<LoggedBinding> },
    /// It is the last one. It goes to the other side if there is one.
    End { to: Option<RelayLeg>, back: RelayLeg, binding: Binding },
}

impl Bindings {
    pub(super) fn handle_frame(
        &mut self,
        from: LinkId,
        id: SessionId,
        frame: &mut SessionFrame,
    ) -> RelayStep {
        let Some(binding) = self.all.get_mut(&id) else { return RelayStep::Ignore };
        let Some((back, to)) = binding.legs(from) else { return RelayStep::Ignore };
        let epoch = binding.epoch;
        let of_opener = binding.opener_leg.link.id == from;
        let is_answer = matches!(frame, SessionFrame::Opened { .. } | SessionFrame::Resumed { .. });
        // Only a server may send Revoked, and not over a path of the session.
        let is_revoked = matches!(frame, SessionFrame::Revoked { .. });
        if is_revoked || of_opener && (is_answer || matches!(frame, SessionFrame::Refused { .. })) {
            return RelayStep::Ignore;
        }
        let is_last = matches!(
            frame,
            SessionFrame::Refused { .. } | SessionFrame::Reset { .. } | SessionFrame::PathLost { .. }
        );
        if !is_last {
            binding.note_end(frame.refusal());
            let Some(to) = to else { return RelayStep::Ignore };
            if is_answer {
                if let SessionFrame::Opened { place, .. } = frame {
                    *place = binding.place.take();
                }
                let search = binding.seeker.take();
                return RelayStep::Answer { to, epoch, search, logged: binding.logged() };
            }
            return RelayStep::Pass { to, epoch };
        }
        // The end of an older attempt does not concern this one. An epoch newer than the binding's does: the opener
        // gave up a newer attempt before its Open or Resume was sent, and has left this one too.
        if frame.epoch().is_some_and(|of| of < epoch) {
            return RelayStep::Ignore;
        }
        let is_not_here = frame.refusal().is_some_and(|why| why.code == ErrorCode::NodeNotConnected);
        if !of_opener
            && is_not_here
            && let Some(SearchGuard(changed)) = &binding.seeker
        {
            binding.acceptor_leg = None;
            return RelayStep::SearchAgain { back, changed: changed.clone(), logged: binding.logged() };
        }
        binding.note_end(frame.refusal());
        self.remove(&id).map_or(RelayStep::Ignore, |binding| RelayStep::End { to, back, binding })
    }
}

/// The two links of a relayed session, and the search for the second one.
#[derive(Debug)]
pub(super) struct Binding {
    pub(super) epoch: u64,
    /// The opener of the session.
    pub(super) opener: Option<Opener>,
    /// The target of the newest request.
    pub(super) target: Target,
    /// Where this server has located the target of a user's session; she gets it with Opened.
    pub(super) place: Option<Place>,
    pub(super) opener_leg: RelayLeg,
    /// `None` while a path to the acceptor is searched.
    pub(super) acceptor_leg: Option<RelayLeg>,
    /// The search for that path, until the attempt is answered; `None` if there is none.
    pub(super) seeker: Option<SearchGuard>,
    /// Reports the end of the binding; `None` if it is not watched.
    pub(super) watch: Option<BindingEndReporter>,
}

impl Binding {
    /// Records why the session ends, if there is a reason. The first one is the cause of the others.
    pub(super) fn note_end(&mut self, why: Option<&SessionError>) {
        if let (Some(watch), Some(why)) = (&mut self.watch, why) {
            watch.why.get_or_insert_with(|| why.clone());
        }
    }

    /// Sends both ends the last frame: Reset with the reason, or PathLost, after which they search for another path or
    /// wait for one. Nothing more goes to `silent`, a link that has ended or that the opener has left.
    pub(super) fn end(mut self, why: Option<&SessionError>, silent: Option<&Link>) {
        let epoch = self.epoch;
        let last = match why {
            Some(why) => SessionFrame::Reset { epoch, refusal: why.clone() },
            None => SessionFrame::PathLost { epoch },
        };
        self.note_end(why);
        for leg in [Some(self.opener_leg), self.acceptor_leg].into_iter().flatten() {
            match silent {
                Some(link) if link.id == leg.link.id => leg.close(),
                // Queued after what waits, as those bytes are still valid. It always fits: it costs no budget.
                Some(link) if link.is_closed() => {
                    let _ = leg.push(last.clone());
                }
                _ => leg.cut(last.clone()),
            }
        }
    }

    /// Returns the leg on that link, and the other one if there is one. Returns `None` if no leg is on that link.
    pub(super) fn legs(&self, link: LinkId) -> Option<(RelayLeg, Option<RelayLeg>)> {
        if self.opener_leg.link.id == link {
            return Some((self.opener_leg.clone(), self.acceptor_leg.clone()));
        }
        let acceptor_leg = self.acceptor_leg.clone().filter(|leg| leg.link.id == link)?;
        Some((acceptor_leg, Some(self.opener_leg.clone())))
    }
}

/// How the path of a relayed session through this server has ended.
#[derive(Debug)]
pub struct RelayOutcome {
    /// Why the session ended, or was refused. `None` if only this path ended.
    pub why: Option<SessionError>,
    /// Bytes that passed from the opener to the acceptor, repeated ones included.
    pub to_acceptor: u64,
    /// Bytes that passed the other way.
    pub to_opener: u64,
}

/// Reports the end of a binding when dropped with it, which happens without the lock of the bindings.
#[derive(Debug)]
pub(super) struct BindingEndReporter {
    pub(super) why: Option<SessionError>,
    /// The queue to the acceptor, once there is a path.
    pub(super) up: Option<Arc<RelayQueue>>,
    /// The queue to the opener.
    pub(super) down: Arc<RelayQueue>,
    pub(super) reply: Option<oneshot::Sender<RelayOutcome>>,
}

impl Drop for BindingEndReporter {
    fn drop(&mut self) {
        if let Some(reply) = self.reply.take() {
            let to_acceptor = self.up.as_ref().map_or(0, |queue| queue.passed());
            let why = self.why.take();
            let to_opener = self.down.passed();
            // Fails if no task waits any longer.
            let _ = reply.send(RelayOutcome { why, to_acceptor, to_opener });
        }
    }
}

/// One side of a session: its link, and what waits there.
#[derive(Debug, Clone)]
pub(super) struct RelayLeg {
    pub(super) link: Arc<Link>,
    pub(super) queue: Arc<RelayQueue>,
}

impl RelayLeg {
    pub(super) fn push(&self, frame: SessionFrame) -> Result<(), QueueFull> {
        let request = self.queue.push(frame)?;
        self.link.enter(&self.queue, &request);
        Ok(())
    }

    pub(super) fn cut(&self, frame: SessionFrame) {
        let request = self.queue.cut(frame);
        self.link.enter(&self.queue, &request);
    }

    pub(super) fn close(&self) {
        self.queue.close();
        self.link.detach_relay(&*self.queue);
    }
}

/// A log line's fields of a binding, taken under the table's lock and logged after its release.
#[derive(Debug)]
pub(super) struct LoggedBinding {
    session: SessionKey,
    epoch: u64,
    link: LinkId,
    acceptor_link: Option<LinkId>,
}

impl Binding {
    /// Returns the fields of its log line, or `None` if such lines are not logged.
    pub(super) fn logged(&self) -> Option<LoggedBinding> {
        enabled!(Level::DEBUG).then(|| LoggedBinding {
            session: self.opener_leg.queue.key().clone(),
            epoch: self.epoch,
            link: self.opener_leg.link.id,
            acceptor_link: self.acceptor_leg.as_ref().map(|leg| leg.link.id),
        })
    }
}

/// Logs what has become of a relayed session, and why if there is a reason.
pub(super) fn log(logged: Option<LoggedBinding>, what: &str, why: Option<&SessionError>) {
    let Some(LoggedBinding { session, epoch, link, acceptor_link }) = logged else { return };
    let SessionKey { id: session, node, .. } = session;
    let acceptor_link = acceptor_link.map(tracing::field::display);
    let why = why.map(tracing::field::display);
    debug!(%session, epoch, %link, acceptor_link, %node, error = why, "{what}");
}
