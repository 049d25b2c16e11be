//! The mark of sockets of this process, so that nftables rules can recognise them.

use std::io;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use socket2::SockRef;

use crate::os::set_mark;

/// Global, because the rules that match the mark concern every dial. 0: no mark.
static MARK: AtomicU32 = AtomicU32::new(0);

/// Sets the mark (`SO_MARK`, requires CAP_NET_ADMIN) of all future connections and DNS queries. 0: no mark.
pub fn set(mark: u32) {
    MARK.store(mark, Relaxed);
}

/// Puts the mark on a socket before it connects or sends.
///
/// # Errors
///
/// The process may not mark sockets.
pub(crate) fn put_on(socket: &SockRef<'_>) -> io::Result<()> {
    match MARK.load(Relaxed) {
        0 => Ok(()),
        mark => set_mark(socket, mark),
    }
}
