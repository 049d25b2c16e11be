//! The frames that a session gives to its link when it is its turn.

use std::sync::Arc;

use tokio::time::Instant;

use crate::protocol::link::schedule::Turn;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::source::{FrameSource, LinkId, SendIntent, Sent};
use crate::protocol::session::state::Effects;
use crate::protocol::session::{Inner, SessionCore};
use crate::protocol::wire::frame::{SessionFrame, SessionKey};
use crate::protocol::wire::hello::Dialect;
use crate::protocol::wire::opener::Opener;
use crate::protocol::wire::peer::Peer;

impl FrameSource for SessionCore {
    fn key(&self) -> &SessionKey {
        &self.key
    }

    /// Never true: a session may come back to the link at any time.
    fn is_closed(&self) -> bool {
        false
    }

    /// Does nothing: a session leaves its links by itself.
    fn is_over(&self) -> bool {
        false
    }

    fn next_control(self: Arc<Self>, link: LinkId, now: Instant) -> (Option<SessionFrame>, bool) {
        let mut inner = self.lock();
        if inner.in_control.is_some_and(|(at, _)| at == link) {
            inner.in_control = None;
        }
        let (frame, effects) = inner.state.next_frame(link, 0);
        inner.time(frame.as_ref(), now);
        let frame = frame.map(|frame| self.complete(frame, &inner));
        self.settle(inner, effects);
        (frame, false)
    }

    fn next_turn(
        self: Arc<Self>,
        link: LinkId,
        turn: &Turn<Arc<dyn FrameSource>>,
        longest: usize,
        most: usize,
        now: Instant,
    ) -> Sent {
        let mut inner = self.lock();
        let held = inner.state.backlog().is_some_and(|backlog| backlog > most);
        let (mut frame, mut effects) =
            if held { (None, Effects::default()) } else { inner.state.next_frame(link, longest) };
        if let Some(SessionFrame::Broken { refusal, .. }) = &frame
            && !inner.sender.as_ref().is_some_and(|sender| sender.dialect.has(Dialect::BREAKS))
        {
            let (reset, over) = inner.state.reset_instead(refusal.clone());
            (frame, effects) = (Some(reset), over);
        }
        inner.time(frame.as_ref(), now);
        let frame = frame.map(|frame| self.complete(frame, &inner));
        let bytes = if let Some(SessionFrame::Data(data)) = &frame { data.len() } else { 0 };
        let standing = if held { turn.standing() } else { turn.standing_after(bytes) };
        let mut backlog = None;
        if inner.state.path() == Some(link) && inner.in_turns == Some(link) {
            inner.standing = standing;
            backlog = inner.state.backlog();
        }
        if inner.in_turns == Some(link) && backlog.is_none() {
            inner.in_turns = None;
        }
        self.settle(inner, effects);
        Sent { frame, bytes, standing, backlog }
    }
}

impl SessionCore {
    /// Adds this process's instance and the opener, which the state does not know. An edge names no opener, as its pod
    /// adds it.
    fn complete(&self, mut frame: SessionFrame, inner: &Inner) -> SessionFrame {
        let process = || self.host.upgrade().map(|host| host.instance());
        match &mut frame {
            SessionFrame::Opened { instance, .. } => *instance = process(),
            SessionFrame::Open { opener, .. } | SessionFrame::Resume { opener, .. }
                if !inner.speaks_to_cloud() =>
            {
                *opener = process().map(Opener::Pod);
            }
            _ => {}
        }
        frame
    }
}

impl Inner {
    /// The turns that it needs on its link and has not asked for yet. The marks `in_control` and `in_turns` name the
    /// link, so an entry that still waits on an older link does not count.
    pub(super) fn intent(&mut self) -> Option<(Arc<LinkSender>, SendIntent)> {
        let sender = self.sender.as_ref()?;
        let link = Some(sender.id);
        let asked = self.in_control.filter(|(at, _)| Some(*at) == link).map(|(_, control)| control);
        let control = self.state.control().filter(|control| asked < Some(*control));
        let data = if self.in_turns == link { None } else { self.state.backlog() };
        if control.is_none() && data.is_none() {
            return None;
        }
        if let Some(control) = control {
            self.in_control = Some((sender.id, control));
        }
        if data.is_some() {
            self.in_turns = link;
        }
        Some((sender.clone(), SendIntent { control, data: data.map(|backlog| (self.standing, backlog)) }))
    }

    fn speaks_to_cloud(&self) -> bool {
        self.sender.as_ref().is_some_and(|sender| matches!(sender.peer, Peer::Cloud(_)))
    }

    /// Records when a credit is sent, and discards a measurement when the session moves to another path.
    fn time(&mut self, frame: Option<&SessionFrame>, now: Instant) {
        match frame {
            Some(SessionFrame::Credit { .. }) => self.state.recv.credit_sent(now),
            Some(SessionFrame::Resume { .. } | SessionFrame::Resumed { .. }) => self.state.recv.moved(),
            _ => {}
        }
    }
}
