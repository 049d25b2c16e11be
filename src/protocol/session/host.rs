//! The interface of a session to the process that it runs in.

use std::fmt;

use crate::names::{Instance, SessionId};
use crate::protocol::budget::Share;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::wire::frame::Code;

/// Keeps the sessions of a process. Never called under a session's lock.
pub(in crate::protocol) trait SessionHost: fmt::Debug + Send + Sync {
    /// The instance of this process.
    fn instance(&self) -> Instance;

    /// Two empty shares for the bytes that a plain peer sends over that link: one of the process's budget, one of a
    /// quarter of it, to which the link is limited once half of the budget is taken.
    fn room_unread(&self, link: &LinkSender) -> (Share, Share);

    /// Takes over a session whose owner has left and whose bytes are still to be delivered.
    fn departed(&self, id: SessionId);

    /// Forgets a session that is over, for the given reason if it did not end in good order.
    fn forget(&self, id: SessionId, why: Option<Code>);
}
