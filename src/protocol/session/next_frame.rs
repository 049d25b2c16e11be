//! What a session says when the link has room for it.

use std::sync::Arc;

use tokio::time::Instant;

use crate::protocol::link::schedule::Turn;
use crate::protocol::link::sender::{Peer, Sent};
use crate::protocol::session::state::{Effects, LinkId};
use crate::protocol::session::{Inner, SessionCore};
use crate::protocol::wire::frame::SessionFrame;
use crate::protocol::wire::hello::Dialect;
use crate::protocol::wire::opener::Opener;

impl SessionCore {
    /// What it says before data, if anything.
    pub(crate) fn speak_control(self: &Arc<Self>, link: LinkId, now: Instant) -> Option<SessionFrame> {
        let mut inner = self.lock();
        if inner.in_control == Some(link) {
            inner.in_control = None;
        }
        let (word, effects) = inner.end.speak(link, 0);
        inner.time(word.as_ref(), now);
        let word = word.map(|word| self.complete(word, &inner));
        self.settle(inner, effects);
        word
    }

    /// What it says in its turn: at most `longest` bytes, nothing if it has more than `most` to say.
    pub(crate) fn speak_turn<K>(
        self: &Arc<Self>,
        link: LinkId,
        turn: &Turn<K>,
        longest: usize,
        most: usize,
        now: Instant,
    ) -> Sent {
        let mut inner = self.lock();
        let held = inner.end.backlog().is_some_and(|backlog| backlog > most);
        let (mut word, mut effects) =
            if held { (None, Effects::default()) } else { inner.end.speak(link, longest) };
        if let Some(SessionFrame::Broken { refusal, .. }) = &word
            && !inner.sender.as_ref().is_some_and(|sender| sender.dialect.has(Dialect::BREAKS))
        {
            let (reset, over) = inner.end.reset_instead(refusal.clone());
            (word, effects) = (Some(reset), over);
        }
        inner.time(word.as_ref(), now);
        let word = word.map(|word| self.complete(word, &inner));
        let bytes = if let Some(SessionFrame::Data(data)) = &word { data.len() } else { 0 };
        let account = if held { turn.starts() } else { turn.account_after(bytes) };
        let mut backlog = None;
        if inner.end.path() == Some(link) && inner.in_turns == Some(link) {
            inner.account = account;
            backlog = inner.end.backlog();
        }
        if inner.in_turns == Some(link) && backlog.is_none() {
            inner.in_turns = None;
        }
        self.settle(inner, effects);
        Sent { word, bytes, account, backlog }
    }

    /// Adds what the end itself does not know: which process this is. To the cloud that says nothing of who opens, for
    /// the pod there does.
    fn complete(&self, mut word: SessionFrame, inner: &Inner) -> SessionFrame {
        let process = || self.table.upgrade().map(|table| table.instance());
        match &mut word {
            SessionFrame::Opened { instance, .. } => *instance = process(),
            SessionFrame::Open { opener, .. } | SessionFrame::Resume { opener, .. }
                if !inner.speaks_to_cloud() =>
            {
                *opener = process().map(Opener::Pod);
            }
            _ => {}
        }
        word
    }
}

impl Inner {
    fn speaks_to_cloud(&self) -> bool {
        self.sender.as_ref().is_some_and(|sender| matches!(sender.peer, Peer::Cloud(_)))
    }

    /// Notes when a credit is said, and that a path which a session moves to is not the one it was measured on.
    fn time(&mut self, word: Option<&SessionFrame>, now: Instant) {
        match word {
            Some(SessionFrame::Credit { .. }) => self.end.recv.credit_said(now),
            Some(SessionFrame::Resume { .. } | SessionFrame::Resumed { .. }) => self.end.recv.moved(),
            _ => {}
        }
    }
}
