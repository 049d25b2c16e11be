//! Fair shares of what is limited for all sources together: unproved connections, sessions, checks of passwords.
//!
//! A door has a number of slots. A source may hold all of them while no other source wants one, since thousands of
//! honest peers behind one NAT or balancer are one address. When all slots are taken and a source with fewer of them
//! wants one, the source with most loses a slot: the one whose holder has been silent for longest.
//!
//! [`Shares`] decides, and reads no clock; [`Door`] carries it out for tasks, [`FairMap`] for what is remembered of
//! sources. Code that serves a listening socket uses [`super::entrance`], which has a door and its shares.

mod fair_map;
mod shares;

use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::hooked::{Hooked, ReadHook};
use crate::policy::plain;

pub use fair_map::FairMap;
pub use shares::{Effects, Limits, NoSlot, Shares};

/// What counts as one source: an IPv4 address, or the /64 of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source(IpAddr);

/// [`Shares`] whose slots are held by tasks. Cheap to clone; clones are one door.
#[derive(Debug)]
pub struct Door<K: Clone + Ord + Hash = Source>(Arc<Mutex<Inside<K>>>);

#[derive(Debug)]
struct Inside<K> {
    shares: Shares<K>,
    holders: HashMap<u64, HolderSignals>,
}

/// The channels to the task of an entrant.
#[derive(Debug)]
struct HolderSignals {
    /// Sent when the slot is granted; dropped unsent if the entrant is lost while it waits.
    granted: Option<oneshot::Sender<()>>,
    lost: CancellationToken,
}

/// A slot, held until it is dropped, unless it is lost before to another source.
#[derive(Debug)]
#[must_use = "dropping it gives it back"]
pub struct Slot<K: Clone + Ord + Hash = Source> {
    door: Door<K>,
    id: u64,
    lost: CancellationToken,
}

impl Source {
    /// The source of an address; an IPv4 address in IPv6 form counts as IPv4.
    pub fn of(ip: IpAddr) -> Self {
        Self(match plain(ip) {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

impl<K: Clone + Ord + Hash> Door<K> {
    /// A door with these limits and no holders.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Mutex::new(Inside { shares: Shares::new(limits), holders: HashMap::new() })))
    }

    /// Takes a slot without waiting.
    ///
    /// # Errors
    ///
    /// No slot is free, and no holder has to give way.
    pub fn try_enter(&self, who: &K) -> Result<Slot<K>, NoSlot> {
        self.try_enter_within(who, usize::MAX)
    }

    /// As [`Self::try_enter`], as if the door had `most` slots at the most.
    ///
    /// # Errors
    ///
    /// As [`Self::try_enter`].
    pub fn try_enter_within(&self, who: &K, most: usize) -> Result<Slot<K>, NoSlot> {
        let (slot, mut granted) = self.join(who, most)?;
        granted.try_recv().map(|()| slot).map_err(|_| NoSlot::ForAll)
    }

    /// Waits for a slot until it is this source's turn. Cancel safe: a dropped call leaves the queue.
    ///
    /// # Errors
    ///
    /// Too many wait, and most of them are of this source.
    pub async fn enter(&self, who: &K) -> Result<Slot<K>, NoSlot> {
        let (slot, mut granted) = self.join(who, usize::MAX)?;
        loop {
            match timeout(SETTLE_EVERY, &mut granted).await {
                Ok(granted) => return granted.map(|()| slot).map_err(|_| NoSlot::ForAll),
                Err(_) => self.apply(|shares| shares.settle(Instant::now())),
            }
        }
    }

    fn join(&self, who: &K, most: usize) -> Result<(Slot<K>, oneshot::Receiver<()>), NoSlot> {
        let (granted, receiver) = oneshot::channel();
        let lost = CancellationToken::new();
        let (id, notices) = {
            let mut inside = self.inside();
            let (id, effects) = inside.shares.enter_within(who, most, Instant::now())?;
            inside.holders.insert(id, HolderSignals { granted: Some(granted), lost: lost.clone() });
            (id, inside.notices(effects))
        };
        notices.send();
        Ok((Slot { door: self.clone(), id, lost }, receiver))
    }

    fn apply(&self, change: impl FnOnce(&mut Shares<K>) -> Effects) {
        let notices = {
            let mut inside = self.inside();
            let effects = change(&mut inside.shares);
            inside.notices(effects)
        };
        // Outside the lock: a task that is woken may use this door at once.
        notices.send();
    }

    fn inside(&self) -> MutexGuard<'_, Inside<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Clone + Ord + Hash> Clone for Door<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The tasks to notify, once the lock is released.
struct Notices(Option<oneshot::Sender<()>>, Option<HolderSignals>);

impl<K> Inside<K> {
    fn notices(&mut self, effects: Effects) -> Notices {
        let granted = effects.granted.and_then(|id| self.holders.get_mut(&id)?.granted.take());
        Notices(granted, effects.lost.and_then(|id| self.holders.remove(&id)))
    }
}

impl Notices {
    fn send(self) {
        let Self(granted, lost) = self;
        if let Some(granted) = granted {
            // Fails only if the waiting call was dropped, and then its slot is given back.
            let _ = granted.send(());
        }
        if let Some(lost) = lost {
            lost.lost.cancel();
        }
    }
}

impl<K: Clone + Ord + Hash> Slot<K> {
    /// Marks the holder as active: it has sent something, and this process works on it until [`Self::waits`].
    pub fn busy(&self) {
        self.door.inside().shares.mark(self.id, true, Instant::now());
    }

    /// Frees the slot for others while what the holder does is bounded elsewhere: until [`Self::waits`] it has none to
    /// lose.
    pub fn steps_aside(&self) {
        self.door.apply(|shares| shares.step_aside(self.id, Instant::now()));
    }

    /// Marks the holder as silent: from now on this process waits for it. If it had stepped aside, it holds a slot
    /// again.
    pub fn waits(&self) {
        self.door.apply(|shares| shares.waits(self.id, Instant::now()));
    }

    /// Wraps the holder's connection so that its reads mark the slot as active or silent.
    pub fn attend<T>(&self, io: T) -> Attended<T, K> {
        Hooked { io, hook: Attendance { slot: Some((self.door.clone(), self.id)), silent: true } }
    }

    /// Cancelled when the slot is lost: the holder must close its connection at once.
    pub fn lost(&self) -> CancellationToken {
        self.lost.clone()
    }
}

impl<K: Clone + Ord + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        let (notices, gone) = {
            let mut inside = self.door.inside();
            let gone = inside.holders.remove(&self.id);
            let effects = inside.shares.leave(self.id, Instant::now());
            (inside.notices(effects), gone)
        };
        drop(gone);
        notices.send();
    }
}

/// A connection that marks its slot: a read that finds nothing marks the holder as silent, any other as active. Once
/// the slot is given back it is a plain wrapper.
pub type Attended<T, K = Source> = Hooked<T, Attendance<K>>;

/// The slot that an [`Attended`] connection marks, and how it last did.
#[derive(Debug)]
pub struct Attendance<K: Clone + Ord + Hash = Source> {
    slot: Option<(Door<K>, u64)>,
    silent: bool,
}

impl<T: AsyncRead + Unpin, K: Clone + Ord + Hash> ReadHook<T> for Attendance<K> {
    fn poll_read(
        &mut self,
        io: Pin<&mut T>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = io.poll_read(cx, out);
        let silent = read.is_pending();
        if let Some((door, id)) = self.slot.as_ref().filter(|_| silent != self.silent) {
            let held = door.inside().shares.mark(*id, !silent, Instant::now());
            self.silent = silent;
            if !held {
                self.slot = None;
            }
        }
        read
    }
}

/// Between two looks of a waiting call whether a holder has been silent for too long.
const SETTLE_EVERY: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests;
