//! Links, and sessions that outlive them.

pub mod congestion;
pub mod grpc;
pub mod link;
pub mod relay;
pub mod schedule;
pub mod sender;
pub mod table;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex and ignores poisoning: no critical section in this layer can panic half-way.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
