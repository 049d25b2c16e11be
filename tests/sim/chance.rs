//! Seeded random numbers, and the bytes that each session must transfer.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng as _, RngExt as _, SeedableRng as _};

/// The random numbers of a run. Clones share them.
#[derive(Clone)]
pub(crate) struct SeededRng(Rc<RefCell<StdRng>>);

impl SeededRng {
    pub(crate) fn new(seed: u64) -> Self {
        PROGRAM.with_borrow_mut(|rng| *rng = StdRng::seed_from_u64(seed));
        Self(Rc::new(RefCell::new(StdRng::seed_from_u64(seed))))
    }

    /// Returns a number from 0 to `n - 1`.
    pub(crate) fn below(&self, n: usize) -> usize {
        self.0.borrow_mut().random_range(0..n.max(1))
    }

    /// Returns a number from `least` to `most`.
    pub(crate) fn between(&self, least: usize, most: usize) -> usize {
        self.0.borrow_mut().random_range(least..=most)
    }

    /// Returns a number up to `most`, with every magnitude equally likely.
    pub(crate) fn magnitude(&self, most: usize) -> usize {
        let bits = self.below(usize::BITS as usize - most.leading_zeros() as usize + 1);
        self.between(0, (1 << bits) - 1).min(most)
    }

    /// Returns true once in `n` times; never if `n` is 0.
    pub(crate) fn one_in(&self, n: usize) -> bool {
        n > 0 && self.below(n) == 0
    }

    pub(crate) fn time(&self, most: Duration) -> Duration {
        Duration::from_micros(self.magnitude(most.as_micros() as usize) as u64)
    }
}

/// Returns a random number from 0 to 1 for the program itself.
pub(crate) fn chance() -> f64 {
    PROGRAM.with_borrow_mut(|rng| rng.random())
}

thread_local! {
    static PROGRAM: RefCell<StdRng> = RefCell::new(StdRng::seed_from_u64(0));
}

/// Returns `len` bytes, at most [`MOST`], that `side` of a session sends at `offset`. They differ at any two places.
pub(crate) fn content(session: usize, side: usize, offset: u64, len: usize) -> Bytes {
    let start = (session * 7919 + side * 104_729) % PERIOD;
    let at = (start + (offset % PERIOD as u64) as usize) % PERIOD;
    TABLE.slice(at..at + len)
}

static TABLE: LazyLock<Bytes> = LazyLock::new(|| {
    let mut period = vec![0; PERIOD];
    StdRng::seed_from_u64(7).fill_bytes(&mut period);
    period.repeat(2).into()
});

/// Prime, so that no shift by a frame, window or page yields the same bytes.
const PERIOD: usize = 262_147;
/// Maximum length of [`content`].
pub(crate) const MOST: usize = PERIOD;
