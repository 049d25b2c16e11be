//! The addresses to which large packets are lost.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::LazyLock;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::path_mtu::MtuBlackHole;

/// Global, because the kernel needs the size before each connection to such an address is made.
pub(super) static KNOWN: LazyLock<Mutex<HashMap<IpAddr, KnownBlackHole>>> = LazyLock::new(Mutex::default);

#[derive(Debug, Clone, Copy)]
pub(super) struct KnownBlackHole {
    pub(super) loss: MtuBlackHole,
    pub(crate) since: Instant,
    pub(crate) certainty: MtuBlackHoleCertainty,
}

/// Whether small segments help at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MtuBlackHoleCertainty {
    /// They are being tried.
    Tried,
    /// They helped once, without proof by the kernel. A server that stalled, or another one behind the same address,
    /// has the same effect. They are not used until it happens again.
    Suspected,
    /// They help.
    Proven,
}

impl MtuBlackHoleCertainty {
    pub(crate) fn lasts(self) -> Duration {
        match self {
            // A dial that is cancelled and made again needs it.
            Self::Tried => Duration::from_secs(60),
            Self::Suspected | Self::Proven => KEPT_FOR,
        }
    }
}

/// Time for which small segments are used without trying larger ones.
pub(super) const KEPT_FOR: Duration = Duration::from_secs(3600);
/// Maximum number of addresses in [`KNOWN`].
pub(super) const MAX_KNOWN: usize = 1000;
