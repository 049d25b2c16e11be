//! The lines by which a session that passes through can be followed through this pod's log.

use tracing::{Level, debug, enabled};

use crate::protocol::link::source::{FrameSource as _, LinkId};
use crate::protocol::relay::table::binding::Binding;
use crate::protocol::wire::frame::{SessionFrame, SessionKey};

/// A log line's fields of a binding, taken under the table's lock and logged once that is released.
#[derive(Debug)]
pub(super) struct Bound {
    session: SessionKey,
    epoch: u64,
    link: LinkId,
    acceptor_link: Option<LinkId>,
}

impl Binding {
    /// The fields of its line; `None` if such lines are not logged.
    pub(super) fn bound(&self) -> Option<Bound> {
        enabled!(Level::DEBUG).then(|| Bound {
            session: self.opener.queue.key().clone(),
            epoch: self.epoch,
            link: self.opener.link.id,
            acceptor_link: self.acceptor.as_ref().map(|leg| leg.link.id),
        })
    }
}

/// Logs what has become of a relayed session; `frame` is the one that did it, if a frame did.
pub(super) fn log(bound: Option<Bound>, what: &str, frame: Option<&SessionFrame>) {
    let Some(Bound { session, epoch, link, acceptor_link }) = bound else { return };
    let SessionKey { id: session, node, .. } = session;
    let acceptor_link = acceptor_link.map(tracing::field::display);
    let why = match frame {
        Some(
            SessionFrame::Refused { refusal, .. }
            | SessionFrame::Reset { refusal, .. }
            | SessionFrame::Broken { refusal, .. },
        ) => Some(tracing::field::display(refusal)),
        _ => None,
    };
    debug!(%session, epoch, %link, acceptor_link, %node, why, "{what}");
}
