//! What a session asks of the process that it runs in.

use std::fmt;

use crate::names::{Instance, SessionId};
use crate::protocol::budget::Share;
use crate::protocol::link::sender::LinkSender;
use crate::protocol::wire::frame::Code;

/// Who keeps the sessions of a process. Never called under a session's lock.
pub(in crate::protocol) trait SessionHost: fmt::Debug + Send + Sync {
    /// This process.
    fn instance(&self) -> Instance;

    /// Empty shares for what a plain peer sends over that link: of all there may be in this process, and of a quarter of
    /// that, to which the link is held once half of all is taken.
    fn room_unread(&self, link: &LinkSender) -> (Share, Share);

    /// The session's owner has left, and it is still to be delivered.
    fn departed(&self, id: SessionId);

    /// The session is over, for the given reason if it did not end by itself.
    fn forget(&self, id: SessionId, why: Option<Code>);
}
