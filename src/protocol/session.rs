//! One end of a session: its lock and wakers, and the handles that its owner holds.

mod handles;
pub(in crate::protocol) mod host;
mod next_frame;
mod owned;
mod paths;
pub(super) mod recv;
pub(super) mod send;
pub(super) mod state;
mod stream;
mod trace;
pub(super) mod view;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Waker;

use tokio::time::Instant;

pub use crate::protocol::session::handles::{Answer, Offer, Opening, Parked};
pub use crate::protocol::session::stream::{Account, Session};

use crate::names::Instance;
use crate::protocol::link::schedule::Standing;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::source::{Control, LinkId};
use crate::protocol::session::host::SessionHost;
use crate::protocol::session::state::{Effects, Phase, SessionState};
use crate::protocol::session::trace::Stage;
use crate::protocol::wire::frame::{Refusal, SessionFrame, SessionKey};
use crate::protocol::wire::opener::Opener;

/// What the table, the owner and the links share of one end.
#[derive(Debug)]
pub(crate) struct SessionCore {
    /// Id, category and node.
    pub key: SessionKey,
    host: Weak<dyn SessionHost>,
    /// When it was made.
    begun: Instant,
    /// Acceptor: the opener, once it is known.
    opener: OnceLock<Opener>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    state: SessionState,
    sender: Option<Arc<LinkSender>>,
    /// The link it ran on before, which still counts it as a member.
    left: Option<Arc<LinkSender>>,
    /// On which link it waits to send a control frame, and of which kind. An entry on another link is stale and harmless.
    in_control: Option<(LinkId, Control)>,
    /// On which link it waits for its turn to send data.
    in_turns: Option<LinkId>,
    /// What it has sent on its link, by which its turns come; starts anew with each link.
    standing: Standing,
    /// The number of the [`Parked`] that may look for a path, and how many were handed out.
    seeker: Option<u64>,
    seekers: u64,
    /// Losses of a path in a row: how many, when the last one was, and how many bytes had moved by then.
    lost: Option<(u32, Instant, u64)>,
    /// When its last frame came in.
    last_frame: Instant,
    reader: Option<Waker>,
    writer: Option<Waker>,
    /// The tasks that wait for an answer, a path or the end.
    watcher: Option<Waker>,
    /// The stage that was logged last.
    logged: Stage,
}

impl SessionCore {
    pub(super) fn new(
        key: SessionKey,
        host: Weak<dyn SessionHost>,
        state: SessionState,
        sender: Option<Arc<LinkSender>>,
    ) -> Arc<Self> {
        let logged = Stage::of(&state);
        logged.log_begin(&key);
        Arc::new(Self {
            key,
            host,
            begun: Instant::now(),
            opener: OnceLock::new(),
            inner: Mutex::new(Inner {
                state,
                sender,
                left: None,
                in_control: None,
                in_turns: None,
                standing: Standing::default(),
                seeker: None,
                seekers: 0,
                lost: None,
                last_frame: Instant::now(),
                reader: None,
                writer: None,
                watcher: None,
                logged,
            }),
        })
    }

    /// Takes one frame of this session from the link of `sender`. False if the frame did not count.
    ///
    /// An Open or Resume may move the session to that link. The session joins the link's members before the state moves
    /// there. The other way round another thread could move it on between the two, remove a membership that is not
    /// there yet, and a stale one would stay. The link cannot end meanwhile, as the read loop that calls this also ends
    /// it. If the frame did not count after all, the session leaves the members again.
    pub(super) fn on_frame(
        self: &Arc<Self>,
        sender: &Arc<LinkSender>,
        frame: SessionFrame,
        now: Instant,
    ) -> bool {
        let moves = matches!(frame, SessionFrame::Open { .. } | SessionFrame::Resume { .. });
        if moves {
            sender.join(self.key.id);
        }
        let (mut dropped, mut here) = (false, true);
        self.act(|inner| {
            inner.last_frame = now;
            let effects = inner.state.on_frame(sender.id, frame, now);
            dropped = effects.dropped;
            here = inner.state.path() == Some(sender.id);
            if here {
                inner.move_to(sender);
            }
            effects
        });
        if moves && !here {
            self.part(sender);
        }
        !dropped
    }

    /// Records the opener; from now on no other may resume the session.
    pub(super) fn opened_by(&self, opener: Opener) {
        // The first opener stays; `set` fails if there is one.
        let _ = self.opener.set(opener);
    }

    /// Whether that opener may resume the session; true if one of the two is not known.
    pub(super) fn is_of(&self, opener: Option<&Opener>) -> bool {
        Opener::agree(self.opener.get(), opener)
    }

    /// The process of its other end, once that is known.
    pub(super) fn instance(&self) -> Option<Instance> {
        self.lock().state.instance()
    }

    /// Resets the session from this side; bytes that were not delivered are dropped.
    pub(super) fn reset(self: &Arc<Self>, why: Refusal) {
        self.act(|inner| {
            // A plain peer answers nothing, and its sessions end with its link.
            let plain = inner.sender.as_ref().is_some_and(|sender| !sender.resumes);
            inner.abandon(why, plain)
        });
        self.depart();
    }

    /// Resets the session behind all that was written.
    fn break_off(self: &Arc<Self>, why: Refusal) {
        self.act(|inner| inner.state.break_off(why, Instant::now()));
        self.depart();
    }

    /// Hands a session whose owner has left to its host, which bounds how long it stays.
    fn depart(self: &Arc<Self>) {
        let stays = self.lock().state.departed_since().is_some();
        if stays && let Some(host) = self.host.upgrade() {
            host.departed(self.key.id);
        }
    }

    /// Drops the bytes that it still delivers for an owner that has left. False if there is nothing to deliver.
    pub(super) fn give_way(self: &Arc<Self>) -> bool {
        let mut gave_way = false;
        self.act(|inner| {
            let (given, effects) = inner.state.give_way();
            gave_way = given;
            effects
        });
        gave_way
    }

    /// Resets the session at once and drops unread bytes, to free its memory.
    pub(super) fn reset_unread(self: &Arc<Self>, why: Refusal) {
        self.act(|inner| {
            if inner.state.recv.queued() > 0 {
                inner.state.drop_unread(&why);
            }
            Effects { read: true, ..inner.abandon(why, true) }
        });
    }

    /// Whether it is open, with or without a path: then the far end may wait for frames from this end.
    pub(super) fn owes(&self) -> bool {
        matches!(self.lock().state.phase(), Phase::Open | Phase::Parked | Phase::Resuming)
    }

    /// As [`Self::queued`], if it runs on that link; else none.
    pub(super) fn queued_from(&self, link: LinkId) -> usize {
        let inner = self.lock();
        if inner.state.path() == Some(link) { inner.state.recv.queued() } else { 0 }
    }

    /// Of these, the bytes of a plain peer, which were not covered by a limit.
    pub(super) fn unpromised(&self) -> usize {
        self.lock().state.recv.unpromised()
    }

    /// Runs `step` under the lock, then does what its effects ask for without the lock.
    fn act(self: &Arc<Self>, step: impl FnOnce(&mut Inner) -> Effects) {
        let mut inner = self.lock();
        let effects = step(&mut inner);
        self.settle(inner, effects);
    }

    /// Takes what is to be done out of the session, releases its lock, and then does it: log, wake, leave links, ask
    /// the link for a turn, be forgotten.
    ///
    /// Each of these takes another lock or runs a waker, and two locks are never held at once. Between the release and
    /// the deed another thread may change the session again, so each deed bears that: a waker that comes too often only
    /// makes its task look again; [`Self::part`] looks a second time; a request for a turn on a link that the session
    /// has left is stale, and the link's puller gets no frame for it; and a session that may be forgotten never comes
    /// back.
    fn settle(self: &Arc<Self>, mut inner: MutexGuard<'_, Inner>, effects: Effects) {
        let reader = if effects.read { inner.reader.take() } else { None };
        let writer = if effects.write { inner.writer.take() } else { None };
        let watcher = if effects.state || effects.forget { inner.watcher.take() } else { None };
        let sender = if inner.state.path().is_none() { inner.sender.take() } else { None };
        let left = [inner.left.take(), sender];
        let intent = inner.intent();
        let ended = inner.state.ended().map(|why| why.code);
        let change = inner.change();
        drop(inner);
        if let Some(change) = change {
            change.log(self);
        }
        for waker in [reader, writer, watcher].into_iter().flatten() {
            waker.wake();
        }
        for left in left.into_iter().flatten() {
            self.part(&left);
        }
        if let Some((sender, intent)) = intent {
            sender.enter(self, &intent);
        }
        if effects.forget
            && let Some(host) = self.host.upgrade()
        {
            host.forget(self.key.id, ended);
        }
    }

    /// Removes the session from the link's members. Adds it again if another thread has moved it back there meanwhile.
    ///
    /// Two locks are involved, the link's and the session's, and they are taken one after the other. A Resume may bring
    /// the session back to this link between the step that left it and this removal, which then removes the new
    /// membership. So there is a second look under the session's lock. If the link ends just then, joining fails, and
    /// its end is passed on here, because the link's own list did not have the session.
    fn part(self: &Arc<Self>, sender: &Arc<LinkSender>) {
        sender.part(self.key.id);
        let back = self.lock().state.path() == Some(sender.id);
        if back && !sender.join(self.key.id) {
            self.link_ended(sender.id, None, Instant::now());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Gives the session up; `at_once`: nothing of it is kept until the far end has heard of that.
    fn abandon(&mut self, why: Refusal, at_once: bool) -> Effects {
        let effects = self.state.abandon(why, Instant::now());
        let (gone, last) = if at_once { self.state.give_way() } else { (false, effects) };
        if gone { last } else { effects }
    }

    /// Makes the link of `sender` the one that it runs on. The link before it is left once the lock is released.
    fn move_to(&mut self, sender: &Arc<LinkSender>) {
        if self.sender.as_ref().is_none_or(|o| o.id != sender.id) {
            self.standing = Standing::default();
            self.left = self.sender.replace(sender.clone());
        }
    }
}

#[cfg(test)]
mod tests;
