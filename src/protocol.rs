//! The protocol: links, and sessions that outlive them. Re-exports what upper rows may use.

mod budget;
mod link;
mod pieces;
mod relay;
mod session;
mod table;
pub mod wire;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use crate::protocol::link::grpc;
pub use crate::protocol::link::sender::{Ends, LinkSender, Traffic};
pub use crate::protocol::link::source::LinkId;
pub use crate::protocol::link::{Link, LinkEnded, SecondLink};
pub use crate::protocol::session::recv::Windows;
pub use crate::protocol::session::{Account, Answer, Offer, Opening, Parked, Session};
pub use crate::protocol::table::overview::SessionView;
pub use crate::protocol::table::request::RelayRequest;
pub use crate::protocol::table::sorting::{Sorted, Sorting};
pub use crate::protocol::table::{Event, SessionLimits, SessionTable, TableFull};
pub use crate::protocol::wire::frame::{Category, Code, Conflict, Found, Load, Refusal, SessionKey};
pub use crate::protocol::wire::hello::{Caller, Dialect, Hello, Older};
pub use crate::protocol::wire::opener::Opener;
pub use crate::protocol::wire::peer::Peer;

/// Locks a mutex and ignores poisoning: each lock of this layer is held for a few steps that cannot panic half way.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
