//! The protocol: links, and sessions that outlive them. This page is what upper layers may use.

mod asked;
pub mod budget;
pub mod codec;
pub mod extension;
pub mod frame;
pub mod grpc;
pub mod hello;
mod lane;
pub mod link;
mod middle;
pub mod opener;
pub mod outbox;
pub mod pace;
mod pieces;
pub mod plain;
#[cfg(test)]
mod recorded;
pub mod recv;
pub mod schedule;
pub mod send;
pub mod session;
pub mod table;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use asked::Asked;
pub use frame::{Category, Code, Conflict, Found, Refusal};
pub use hello::Dialect;
pub use link::{Link, LinkEnded};
pub use opener::Opener;
pub use outbox::{Outbox, Peer};
pub use recv::Windows;
pub use session::{Account, Answer, Offer, Opening, Parked, Session};
pub use table::{Event, Full, Limits, Table};

/// Locks what no panic can leave half done: each lock of this layer is held for a few plain steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
