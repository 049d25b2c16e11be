//! The phases of an end, and the effects of an event.

use crate::names::Target;

/// Which of the two ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// The end that asked for the session.
    Opener {
        /// What the acceptor is asked to dial.
        target: Target,
        /// The client, for the acceptor's log.
        client: String,
    },
    /// The end that dials.
    Acceptor,
}

/// The phase of an end.
///
/// ```text
///          opener                                              acceptor
///
///   ask ─▶ Asking ──Refused──────────────▶ Gone         Open ─▶ Dialling ──refuse──▶ Leaving
///             │ Opened                                             │ accept
///             ▼                                                    ▼
///   ┌─────▶ Open ──all is acknowledged──▶ Leaving         ┌────▶ Open ──all is sent and received──▶ Delivered
///   │         │ path lost                    │            │        │ path lost                        │
///   │         ▼                              │         Resume      ▼                                  │
///   │       Parked ◀───────────┐         Reset is         └───── Parked                             Reset,
///   │         │ ask        path lost,    sent, or                  │                          or the grace time
///   │         ▼             not here     path lost          the grace time is over                 is over
///   │ Resumed │                │             ▼                     ▼                                  ▼
///   └────── Resuming ──────────┘           Gone                  Gone                               Gone
/// ```
///
/// An owner that lets go, a peer that violates the protocol and a Broken that has been answered lead from any phase to
/// Leaving, or to Gone if there is no path; an opening that is given up and may have reached an acceptor goes to Resuming
/// or Parked instead. A Reset from the peer leads to Gone. Resume finds an acceptor in Open and
/// Delivered too. The tables of docs/protocol.md#states have each frame in each phase.
///
/// A path may be missing in [`Phase::Asking`], [`Phase::Dialling`] and [`Phase::Delivered`] too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Opener: waits for Opened or Refused.
    Asking,
    /// Acceptor: the offer is not answered yet.
    Dialling,
    /// Bytes move.
    Open,
    /// No path: nothing is sent, nothing taken; what has arrived may still be read.
    Parked,
    /// Opener: waits for Resumed.
    Resuming,
    /// Acceptor: everything is sent and received; kept until the opener confirms it by a Reset, or the grace time is
    /// over.
    Delivered,
    /// One last frame is to be sent, then the end is forgotten.
    Leaving,
    /// Over. What has arrived may still be read.
    Gone,
}

/// What the caller has to do after an event; all may be set at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
pub(crate) struct Effects {
    /// The reader may go on.
    pub read: bool,
    /// The writer may go on.
    pub write: bool,
    /// The phase or the path changed: wake the tasks that wait for an answer or look for a path.
    pub state: bool,
    /// Nothing is left to send or receive: the table may forget the session.
    pub forget: bool,
    /// The frame was ignored: wrong link, role, phase or an old epoch.
    pub dropped: bool,
}
