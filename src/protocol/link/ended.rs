//! How links end.

use crate::protocol::link::UNREAD;
use crate::protocol::wire::codec::BadStream;
use crate::protocol::wire::codec::inbound::StreamEnded;

/// How a link ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkEnded {
    /// The peer ended the stream, or the connection broke.
    #[error("the far end closed the link: {0}")]
    Closed(String),
    /// Its pod ended it, because another process has our name.
    #[error("{0}")]
    NameTaken(String),
    /// Nothing arrived for 15 s.
    #[error("nothing was received for 15s")]
    Silent,
    /// The peer sends but does not read.
    #[error("the far end has taken nothing for {UNREAD:?}")]
    Unread,
    /// We closed it: replaced by a newer one, or stopping.
    #[error("closed here")]
    ClosedHere,
    /// It had fallen silent, and a second one beside it answered first.
    #[error("a second link answered first")]
    Outrun,
    /// What came is not the protocol.
    #[error("protocol violated: {0}")]
    BadStream(#[from] BadStream),
}

impl LinkEnded {
    /// A fixed label for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Closed(_) => "closed",
            Self::NameTaken(_) => "name_taken",
            Self::Silent => "silent",
            Self::Unread => "unread",
            Self::ClosedHere => "closed_here",
            Self::Outrun => "outrun",
            Self::BadStream(_) => "bad_stream",
        }
    }
}

impl From<StreamEnded> for LinkEnded {
    fn from(ended: StreamEnded) -> Self {
        match ended {
            StreamEnded::Closed(why) => Self::Closed(why),
            StreamEnded::NameTaken(why) => Self::NameTaken(why),
        }
    }
}
