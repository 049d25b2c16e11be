//! The mark that all sockets carry by which this process asks others, so that the kernel's rules know them for its own.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use socket2::SockRef;

/// Of the whole process, as every rule that looks for it concerns every dial. 0: none.
static MARK: AtomicU32 = AtomicU32::new(0);

/// From now on each connection that is dialled, and each question of DNS, carries this mark (`SO_MARK`), which takes CAP_NET_ADMIN; 0: none.
pub fn set(mark: u32) {
    MARK.store(mark, Relaxed);
}

/// Puts it on a socket that is about to connect, or to send.
///
/// # Errors
///
/// The process may not mark sockets.
pub(super) fn put_on(socket: &SockRef<'_>) -> io::Result<()> {
    match MARK.load(Relaxed) {
        0 => Ok(()),
        mark => socket.set_mark(mark),
    }
}
