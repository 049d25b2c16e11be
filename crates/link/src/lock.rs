//! A mutex of which each thread holds at most one at a time.
//!
//! Sessions, links and tables have locks of their own, and each runs on many threads. As no thread holds two of them,
//! none can wait for the other in a circle. Debug builds, and so all tests, check this at each lock.
//!
//! A guard cannot be sent to another thread, so a task that holds one across an await does not compile.

use std::task::{Context, Waker};

/// A mutex; see the top of this module.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

/// Access to the value of a locked [`Mutex`].
#[derive(Debug, derive_more::Deref, derive_more::DerefMut)]
pub(crate) struct MutexGuard<'a, T> {
    #[deref(forward)]
    #[deref_mut(forward)]
    value: parking_lot::MutexGuard<'a, T>,
    #[cfg(debug_assertions)]
    _held: held::Held,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    /// Waits for the lock.
    ///
    /// # Panics
    ///
    /// In debug builds, if this thread already holds a lock of this kind.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        #[cfg(debug_assertions)]
        let _held = held::Held::new();
        MutexGuard {
            value: self.0.lock(),
            #[cfg(debug_assertions)]
            _held,
        }
    }
}

/// Stores the waker of a task in a locked value. Returns the waker that it replaces, to be dropped without the lock: with
/// the last waker its task may be dropped, and that task may own what takes a lock when dropped.
#[must_use = "a waker must be dropped without the lock"]
pub(crate) fn store_waker(stored: &mut Option<Waker>, cx: &Context<'_>) -> Option<Waker> {
    let is_known = stored.as_ref().is_some_and(|known| known.will_wake(cx.waker()));
    if is_known { None } else { stored.replace(cx.waker().clone()) }
}

#[cfg(debug_assertions)]
mod held {
    use std::cell::Cell;

    thread_local! {
        static HELD: Cell<bool> = const { Cell::new(false) };
    }

    /// A mark that this thread holds a lock, until dropped.
    #[derive(Debug)]
    pub(super) struct Held(());

    impl Held {
        pub(super) fn new() -> Self {
            assert!(!HELD.replace(true), "this thread holds another lock of a link");
            Self(())
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.set(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_lock_after_the_other_is_fine() {
        let (one, other) = (Mutex::new(1), Mutex::new(2));
        let value = *other.lock();
        *one.lock() += value;
    }

    #[test]
    #[should_panic = "holds another lock"]
    fn two_locks_at_once_are_found() {
        let (one, other) = (Mutex::new(1), Mutex::new(2));
        let _first = one.lock();
        let _second = other.lock();
    }
}
