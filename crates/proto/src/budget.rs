//! Budgets for the bytes that this process may announce to remotes, or keep for retransmission.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use tokio::sync::Notify;

/// A process-wide allowance in bytes, shared by all sessions.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: AtomicUsize,
    /// The part of `used` by which windows have grown.
    grown: AtomicUsize,
    /// Notified when a window cannot grow.
    pub wanted: Notify,
}

/// The bytes of a [`Budget`] that one session holds. Released on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    held: usize,
    /// The part of `held` from [`Self::try_grow_shared`].
    grown: usize,
}

impl Budget {
    /// Returns a budget of `limit` bytes.
    pub fn new(limit: usize) -> Arc<Self> {
        let [used, grown] = [0; 2].map(AtomicUsize::new);
        Arc::new(Self { limit, used, grown, wanted: Notify::new() })
    }

    /// Returns the bytes held by all reservations. [`Reservation::resize`] may push it over the limit.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Returns the limit in bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns true if no bytes are left.
    pub fn is_exhausted(&self) -> bool {
        self.used() >= self.limit
    }

    /// Returns true if reservations have pushed it over the limit by more than a quarter.
    pub fn is_overdrawn(&self) -> bool {
        self.used() > self.limit.saturating_add(self.limit / 4)
    }

    /// Returns the number of powers of two by which a new reservation should be smaller than usual.
    ///
    /// 0 while half of the budget is left, 2 while a quarter is left, then 4: many small sessions fit before one has to
    /// be refused.
    pub fn pressure(&self) -> u32 {
        pressure(self.used(), self.limit)
    }

    /// Reserves the window of a new session: `start` bytes, or less as the budget fills. Returns `None` if that is not
    /// left.
    ///
    /// A part of the budget is left to windows that grow. Otherwise the windows of idle sessions, which cannot be
    /// withdrawn, would keep those of busy ones at their initial size.
    pub fn reserve_window(self: &Arc<Self>, start: usize) -> Option<Reservation> {
        let most = self.limit - self.limit / GROWTH_DIVISOR;
        let initial = self.used().saturating_sub(self.grown.load(Relaxed));
        let bytes = start >> self.pressure().max(pressure(initial, most));
        if initial.saturating_add(bytes) <= most { self.try_reserve(bytes) } else { None }
    }

    /// Reserves `bytes`. Returns `None` if fewer are left.
    pub fn try_reserve(self: &Arc<Self>, bytes: usize) -> Option<Reservation> {
        let mut share = self.reservation();
        share.try_grow(bytes).then_some(share)
    }

    /// Returns an empty reservation.
    pub fn reservation(self: &Arc<Self>) -> Reservation {
        Reservation { budget: self.clone(), held: 0, grown: 0 }
    }
}

/// Returns the number of powers of two by which a new reservation should be smaller, see [`Budget::pressure`].
fn pressure(used: usize, limit: usize) -> u32 {
    match limit.max(1) {
        limit if used < limit.div_ceil(2) => 0,
        limit if used < limit - limit / 4 => 2,
        _ => 4,
    }
}

/// The part of a budget that windows may grow by in any case.
const GROWTH_DIVISOR: usize = 4;

impl Reservation {
    /// Reserves `bytes` more. Returns false if the budget does not have them.
    pub fn try_grow(&mut self, bytes: usize) -> bool {
        let fits = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.budget.limit);
        let granted = self.budget.used.fetch_update(Relaxed, Relaxed, fits).is_ok();
        if granted {
            self.held += bytes;
        }
        granted
    }

    /// Like [`Self::try_grow`], but fails once half of the budget is in use, to leave room for new sessions.
    ///
    /// All together may always grow by the part that [`Budget::reserve_window`] leaves to them. Of that each takes at
    /// most half of what the others have left, so that the first one does not take all.
    pub(crate) fn try_grow_shared(&mut self, bytes: usize) -> bool {
        let Budget { limit, grown, .. } = &*self.budget;
        let leaves_half = self.budget.used().saturating_add(bytes) <= limit / 2;
        let [own, all] = [self.grown, grown.load(Relaxed)].map(|grown| grown.saturating_add(bytes));
        let is_fair = own.saturating_add(all) <= limit / GROWTH_DIVISOR;
        let granted = (leaves_half || is_fair) && self.try_grow_counted(bytes);
        if !granted {
            self.budget.wanted.notify_one();
        }
        granted
    }

    /// Like [`Self::try_grow`], for bytes that have arrived below an old limit. Only an `initial` window may take the part
    /// that is left to new sessions.
    pub(crate) fn try_grow_arrived(&mut self, bytes: usize, initial: bool) -> bool {
        let most = self.budget.limit - self.budget.limit / GROWTH_DIVISOR;
        let leaves_part = self.budget.used().saturating_add(bytes) <= most;
        if initial { self.try_grow(bytes) } else { leaves_part && self.try_grow_counted(bytes) }
    }

    fn try_grow_counted(&mut self, bytes: usize) -> bool {
        let granted = self.try_grow(bytes);
        if granted {
            self.grown += bytes;
            self.budget.grown.fetch_add(bytes, Relaxed);
        }
        granted
    }

    /// Sets the reservation to `bytes`, even if that exceeds the budget.
    pub fn resize(&mut self, bytes: usize) {
        if bytes >= self.held {
            self.budget.used.fetch_add(bytes - self.held, Relaxed);
        } else {
            let less = self.held - bytes;
            self.budget.used.fetch_sub(less, Relaxed);
            let less = less.min(self.grown);
            self.budget.grown.fetch_sub(less, Relaxed);
            self.grown -= less;
        }
        self.held = bytes;
    }

    /// Returns an empty reservation of the same budget.
    pub(crate) fn new_empty(&self) -> Self {
        self.budget.reservation()
    }

    /// Returns the bytes held.
    pub fn size(&self) -> usize {
        self.held
    }

    /// Like [`Budget::pressure`].
    pub(crate) fn pressure(&self) -> u32 {
        self.budget.pressure()
    }
}

/// Bytes that count in two budgets: one of the process and one of a link.
#[derive(Debug)]
pub struct PairedReservation {
    /// The bytes in the process's budget.
    pub all: Reservation,
    /// The same bytes in the link's budget.
    pub of_link: Reservation,
}

impl PairedReservation {
    /// Reserves `bytes` more. Returns false if one of the budgets does not have them.
    pub fn try_grow(&mut self, bytes: usize) -> bool {
        if !self.all.try_grow(bytes) {
            return false;
        }
        let granted = self.of_link.try_grow(bytes);
        if !granted {
            self.all.resize(self.all.size() - bytes);
        }
        granted
    }

    /// Sets the reservation to `bytes`, even if that exceeds a budget.
    pub fn resize(&mut self, bytes: usize) {
        self.all.resize(bytes);
        self.of_link.resize(bytes);
    }

    /// Returns the bytes held.
    pub fn size(&self) -> usize {
        self.all.size()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn reservations_never_exceed_the_budget_and_are_released_on_drop(steps in prop::collection::vec((0usize..4, 0usize..90), 0..60)) {
            let budget = Budget::new(100);
            let mut shares: Vec<Reservation> = (0..4).map(|_| budget.reservation()).collect();
            for (who, bytes) in steps {
                if bytes < 60 { shares[who].try_grow(bytes); } else { let held = shares[who].size(); shares[who].resize(held / 2); }
                prop_assert_eq!(budget.used(), shares.iter().map(Reservation::size).sum::<usize>());
                prop_assert!(budget.used() <= 100);
            }
            drop(shares);
            prop_assert_eq!(budget.used(), 0);
        }
    }

    #[test]
    fn windows_shrink_so_that_a_thousand_sessions_fit_into_the_budget() {
        let budget = Budget::new(8 << 20);
        let mut shares: Vec<Reservation> = std::iter::from_fn(|| budget.reserve_window(32 * 1024)).collect();
        assert_eq!(shares.len(), 96 + 192 + 768);
        assert_eq!((shares[0].size(), shares[1000].size()), (32 * 1024, 2 * 1024));
        // A quarter is left to those that are busy.
        assert!(shares[0].try_grow_shared(1 << 20) && !shares[0].try_grow_shared(1));
        assert!(shares[1].try_grow_shared(512 << 10) && !shares[1].try_grow_shared(1));
        assert!(budget.reserve_window(32 * 1024).is_none());
        shares.truncate(1);
        shares[0].resize(32 * 1024);
        assert_eq!((budget.used(), budget.grown.load(Relaxed)), (32 * 1024, 0));
    }

    #[test]
    fn a_shared_reservation_grows_only_up_to_half_of_the_budget() {
        let budget = Budget::new(100);
        let mut share = budget.try_reserve(30).unwrap();
        assert!(share.try_grow_shared(20) && !share.try_grow_shared(1) && share.try_grow(1));
        assert_eq!((share.size(), budget.used()), (51, 51));
    }

    #[test]
    fn the_largest_budget_is_shared_like_a_small_one() {
        for limit in [100, usize::MAX] {
            let half = limit.div_ceil(2);
            let used = [0, half - 1, half, limit - limit / 4, limit];
            assert_eq!(used.map(|used| pressure(used, limit)), [0, 0, 2, 4, 4], "{limit}");
        }
    }

    #[test]
    fn an_exhausted_budget_refuses_a_reservation() {
        let budget = Budget::new(10);
        let first = budget.try_reserve(10).unwrap();
        assert!(budget.is_exhausted() && budget.try_reserve(1).is_none());
        drop(first);
        assert!(budget.try_reserve(1).is_some());
    }
}
