//! How an end gets, loses and leaves a path, and how it is given up.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::names::Instance;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::link::source::LinkId;
use crate::protocol::session::recv::Way;
use crate::protocol::session::state::{Effects, Phase};
use crate::protocol::session::{Inner, Parked, SessionCore};
use crate::protocol::wire::frame::{Code, Refusal};
use crate::protocol::wire::opener::Opener;
use crate::protocol::wire::peer::Peer;

impl SessionCore {
    /// What the link knows of the way to the session's far end.
    pub(super) fn way(&self, inner: &Inner) -> Way {
        let Some(sender) = &inner.sender else { return Way::default() };
        let far = match self.opener.get() {
            Some(Opener::Pod(opener)) => Some(*opener),
            Some(Opener::Node(_)) | None => inner.state.instance(),
        };
        // An edge relays nothing. A pod may, so there the far end's process is compared with the link's.
        let ends_there = matches!(sender.peer, Peer::Edge(_)) || (far.is_some() && far == sender.instance);
        Way { latest: sender.round_trip(), least: sender.least_round_trip().filter(|_| ends_there) }
    }

    /// Opener: sends Open over the link of `sender`, or Resume if `again`. An Open is believed to reach `process`, if
    /// that is known.
    ///
    /// The task that opens a session and the task that finds it a new path are different ones. If the session has
    /// become open and lost its path before the first task asks, an Open would be wrong; so nothing is sent unless
    /// `again` fits the state. The session joins the link's members first: if the link has ended already, the state
    /// learns that at once, and if it ends later, its list has the session.
    pub(super) fn ask(self: &Arc<Self>, sender: &Arc<LinkSender>, process: Option<Instance>, again: bool) {
        let alive = sender.join(self.key.id);
        let room = self.host.upgrade().filter(|_| !sender.resumes).map(|host| host.room_unread(sender));
        let mut here = false;
        let mut left = None;
        self.act(|inner| {
            let before = inner.state.path().filter(|path| *path != sender.id).and(inner.sender.clone());
            let epoch = inner.state.epoch();
            let meant = again == inner.state.needs_path();
            let effects = if meant { inner.state.ask(sender.id) } else { Effects::default() };
            if meant {
                inner.state.asks_of(process);
            }
            match room {
                _ if !meant => {}
                Some((in_all, of_link)) => inner.state.recv.lift_limit(in_all, of_link),
                None => inner.state.recv.restore_limit(),
            }
            here = inner.state.path() == Some(sender.id);
            if here {
                left = before.map(|old| (old, epoch));
                inner.move_to(sender);
            }
            if alive { effects } else { inner.state.link_ended(sender.id, None, Instant::now()) }
        });
        if let Some((old, epoch)) = left {
            old.lost(&self.key, epoch);
        }
        // The session was resumed elsewhere, or ended, while its seeker waited for this link.
        if !here {
            self.part(sender);
        }
    }

    /// Opener: gives up the path over the link of `sender`, which may well be alive, to go on over another one. Sends
    /// Lost to the far end, unless another thread has moved the session meanwhile.
    pub(crate) fn leave(self: &Arc<Self>, sender: &Arc<LinkSender>) {
        let mut left = None;
        self.act(|inner| {
            if !inner.state.is_opener() || inner.state.path() != Some(sender.id) {
                return Effects::default();
            }
            left = Some(inner.state.epoch());
            inner.state.link_ended(sender.id, None, Instant::now())
        });
        if let Some(epoch) = left {
            sender.lost(&self.key, epoch);
        }
    }

    /// The link has ended; `why` is given if its peer cannot resume.
    pub(crate) fn link_ended(self: &Arc<Self>, link: LinkId, why: Option<Refusal>, now: Instant) {
        self.act(|inner| inner.state.link_ended(link, why, now));
    }

    /// The right to look for a path, if the session has none, needs one, and nobody has that right yet. All is decided
    /// under one lock, so that two threads that notice the same loss do not both get it.
    pub(crate) fn parked(self: &Arc<Self>) -> Option<Parked> {
        let mut inner = self.lock();
        let needs = inner.state.needs_path() && inner.state.path().is_none();
        if inner.seeker.is_some() || !inner.state.is_opener() || !needs {
            return None;
        }
        inner.seekers += 1;
        let seeker = inner.seekers;
        inner.seeker = Some(seeker);
        let (now, moved) = (Instant::now(), inner.state.moved());
        let again = |&(_, at, before): &(u32, Instant, u64)| now - at < RECENT_LOSS && before == moved;
        let times = inner.lost.filter(again).map_or(0, |(times, ..)| times + 1);
        inner.lost = Some((times, now, moved));
        Some(Parked::new(self.clone(), seeker, times))
    }

    /// Whether it was opened here, and how many bytes have moved in both directions; none unless it is open and runs on that
    /// link: one that has left it and found no other yet is still among its members.
    pub(crate) fn traffic(&self, link: LinkId) -> Option<(bool, u64)> {
        let inner = self.lock();
        let runs = inner.state.phase() == Phase::Open && inner.state.path() == Some(link);
        runs.then(|| (inner.state.is_opener(), inner.state.moved()))
    }

    /// Whether its last frame waits for its turn on the path that it has.
    pub(crate) fn owes_last_frame(&self) -> bool {
        self.lock().state.owes_last_frame()
    }

    /// Gives up an end that has waited since before `before`, for its peer to resume it or, once its owner has left,
    /// for its bytes to be delivered. True if it is given up.
    pub(crate) fn expire(self: &Arc<Self>, before: Instant, why: &Refusal) -> bool {
        let long = |since: Option<Instant>| since.is_some_and(|since| since <= before);
        let mut undelivered = false;
        self.act(|inner| {
            if long(inner.state.departed_since()) {
                let (given, effects) = inner.state.give_way();
                undelivered = given;
                effects
            } else if long(inner.state.parked_since()) && !inner.state.is_opener() {
                inner.state.give_up(why.clone())
            } else {
                Effects::default()
            }
        });
        undelivered
    }

    /// Ends an acceptor here that its opener left before it was open, because a Resume names another process as the
    /// acceptor. True if there was one; the session may then be relayed through this process.
    pub(crate) fn yields(self: &Arc<Self>) -> bool {
        let mut yields = false;
        self.act(|inner| {
            yields = !inner.state.is_opener();
            let why = Refusal::new(Code::Unknown, "its opener went to another process");
            if yields { inner.state.give_up(why) } else { Effects::default() }
        });
        yields
    }
}

/// A path that is lost within this time after the last one, before a byte has moved, counts as lost in a row.
const RECENT_LOSS: Duration = Duration::from_secs(10);
