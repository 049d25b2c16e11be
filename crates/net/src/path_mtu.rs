//! Paths that lose large packets without notice (MTU black holes): recognised during a handshake, and then used with
//! small segments.
//!
//! Both ends of a link pad their first message to more than a full segment ([`padding`]). On such a path the handshake
//! stalls, and no session has to.

mod stall;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::path_mtu::stall::StalledHandshake;
use crate::tcp_info::TcpInfoReader;

/// Large packets that are lost between this machine and an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MtuBlackHole {
    to: IpAddr,
    /// Size of the lost packets in bytes, if the kernel reports it.
    lost: Option<u64>,
    /// Maximum size of a segment that arrives, in bytes.
    segment: u32,
}

/// Connects and makes a handshake. If the path loses large packets, makes it again with small segments.
///
/// `connect` is called with the address of the stalled attempt, if there was one, and `shake` with `true` then. An
/// attempt that may only be slow continues next to the next one, and the first to finish decides. So the remote may see
/// both finish. Cancel safe if both futures are.
///
/// # Errors
///
/// Returns the error of the attempt that finished first.
pub async fn handshake<T, E, C, S>(
    connect: impl Fn(Option<SocketAddr>) -> C,
    shake: impl Fn(TcpStream, bool) -> S,
) -> Result<T, E>
where
    C: Future<Output = Result<TcpStream, E>>,
    S: Future<Output = Result<T, E>>,
{
    let shake = &shake;
    let mut attempts = FuturesUnordered::new();
    let mut stalled = None::<StalledHandshake>;
    let (at, limit, done) = loop {
        let socket = tokio::select! {
            biased;
            Some(finished) = attempts.next() => break finished,
            socket = connect(stalled.as_ref().map(|stall| stall.at)) => socket?,
        };
        let at = socket.peer_addr().ok();
        let reader = TcpInfoReader::of(&socket);
        let limit = at.and_then(|at| segment_limit(at.ip()));
        let is_again = stalled.is_some();
        attempts.push(async move { (at, limit, shake(socket, is_again).await) });
        // Without a smaller size to try, a stall changes nothing: the attempt finishes or fails on its own.
        let stalls = async {
            match (at, SEGMENTS.into_iter().find(|size| limit.is_none_or(|limit| *size < limit))) {
                (Some(at), Some(smaller)) => (StalledHandshake::detect(at, reader).await, smaller),
                _ => std::future::pending().await,
            }
        };
        let (mut stall, smaller) = tokio::select! {
            biased;
            Some(finished) = attempts.next() => break finished,
            stall = stalls => stall,
        };
        // With proof, no earlier attempt can finish. Without it, one may only be slow.
        if stall.is_certain {
            attempts.clear();
        }
        stall.was_suspected |= stalled.is_some_and(|before| before.is_certain || before.was_suspected);
        // Recorded before the next attempt, whose socket takes the size from there.
        stall.note(smaller, MtuBlackHoleCertainty::Tried);
        stalled = Some(stall);
    };
    // An attempt teaches something about its segments only if it succeeded. Full segments that pass refute a suspicion.
    match stalled {
        Some(stall) => stall.settle(limit.filter(|_| done.is_ok())),
        None if limit.is_none() && done.is_ok() => drop(at.and_then(|at| KNOWN.lock().remove(&at.ip()))),
        None => {}
    }
    done
}

/// Returns the number of bytes that make a first message longer than a full segment of that connection.
pub fn padding(connection: Option<&TcpInfoReader>) -> usize {
    let segment = connection.and_then(TcpInfoReader::read).map_or(MAX_PADDING, |info| info.segment);
    usize::try_from(segment.min(MAX_PADDING)).unwrap_or_default()
}

/// Returns the maximum size of a segment to that address, if large packets to it are lost.
pub(crate) fn segment_limit(to: IpAddr) -> Option<u32> {
    known(to)
        .filter(|known| known.certainty != MtuBlackHoleCertainty::Suspected)
        .map(|known| known.loss.segment)
}

/// Returns what is lost on the way to that address, if links to it use small segments for that reason.
pub fn packet_loss(to: IpAddr) -> Option<MtuBlackHole> {
    known(to).filter(|known| known.certainty == MtuBlackHoleCertainty::Proven).map(|known| known.loss)
}

/// Returns true if the last handshake with that address was slow without small segments, for an unknown reason.
pub fn is_suspected(to: IpAddr) -> bool {
    known(to).is_some_and(|known| known.certainty == MtuBlackHoleCertainty::Suspected)
}

fn known(to: IpAddr) -> Option<KnownBlackHole> {
    KNOWN.lock().get(&to).filter(|known| known.since.elapsed() < known.certainty.lasts()).copied()
}

impl fmt::Display for MtuBlackHole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { to, lost, segment } = self;
        f.write_str("large packets")?;
        if let Some(lost) = lost {
            write!(f, " ({lost} bytes)")?;
        }
        let headers = if to.is_ipv4() { 40 } else { 60 };
        write!(
            f,
            " between this machine and {to} are lost without notice, links use {} bytes",
            segment + headers
        )
    }
}

/// The advice for operators.
pub const REMEDY: &str = "lower the MTU of the interface here or at the server, or let ICMP 'fragmentation needed' pass on the way";

/// Maximum segments to try, in bytes, after those of the path's MTU. 500 fits a packet that every IPv4 path passes.
const SEGMENTS: [u32; 2] = [1000, 500];

/// Maximum padding in bytes. It also has to fit the limit for headers of HTTP/2 proxies, 4 KiB at some.
const MAX_PADDING: u64 = 2800;

/// The addresses to which large packets are lost. Global, because the kernel needs the size before each connection to such an address is made.
static KNOWN: LazyLock<Mutex<HashMap<IpAddr, KnownBlackHole>>> = LazyLock::new(Mutex::default);

#[derive(Debug, Clone, Copy)]
struct KnownBlackHole {
    loss: MtuBlackHole,
    since: Instant,
    certainty: MtuBlackHoleCertainty,
}

/// Whether small segments help at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MtuBlackHoleCertainty {
    /// They are being tried.
    Tried,
    /// They helped once, without proof by the kernel. A server that stalled, or another one behind the same address,
    /// has the same effect. They are not used until it happens again.
    Suspected,
    /// They help.
    Proven,
}

impl MtuBlackHoleCertainty {
    fn lasts(self) -> Duration {
        match self {
            // A dial that is cancelled and made again needs it.
            Self::Tried => Duration::from_secs(60),
            Self::Suspected | Self::Proven => KEPT_FOR,
        }
    }
}

/// Time for which small segments are used without trying larger ones.
const KEPT_FOR: Duration = Duration::from_secs(3600);
/// Maximum number of addresses in [`KNOWN`].
const MAX_KNOWN: usize = 1000;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;

    use tokio::net::TcpListener;

    use super::*;
    use crate::path_mtu::stall::HANDSHAKE_TIMEOUT;
    use std::time::Duration;
    use tokio::time::sleep;

    /// Makes handshakes with a server at that address: the attempt with this number finishes after that time.
    async fn finished(ip: &str, lasts: [Option<Duration>; 3]) -> (u32, Option<u32>) {
        let listener = TcpListener::bind((ip, 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let tried = AtomicU32::new(0);
        let connect = async |_| TcpStream::connect(at).await.map_err(drop);
        let shake = |socket: TcpStream, is_again: bool| {
            let attempt = tried.fetch_add(1, Relaxed);
            let lasts = lasts[attempt as usize];
            assert_eq!(is_again, attempt > 0);
            async move {
                match lasts {
                    Some(lasts) => sleep(lasts).await,
                    None => std::future::pending().await,
                }
                drop(socket);
                Ok::<_, ()>(attempt)
            }
        };
        let attempt = handshake(connect, shake).await.unwrap();
        (attempt, packet_loss(at.ip()).map(|loss| loss.segment))
    }

    const NOW: Option<Duration> = Some(Duration::ZERO);

    #[tokio::test(start_paused = true)]
    async fn handshakes_that_stall_twice_limit_the_segments_of_the_path() {
        assert_eq!(finished("127.1.1.1", [NOW, None, None]).await, (0, None));
        for (ip, lasts, attempt) in [("127.1.1.2", [None, NOW, None], 1), ("127.1.1.3", [None, None, NOW], 2)]
        {
            let smallest = Some(SEGMENTS[attempt as usize - 1]);
            assert_eq!(finished(ip, lasts).await, (attempt, None), "the server may have stalled");
            assert_eq!((segment_limit(ip.parse().unwrap()), is_suspected(ip.parse().unwrap())), (None, true));
            assert_eq!(finished(ip, lasts).await, (attempt, smallest));
            assert_eq!(finished(ip, [NOW, None, None]).await, (0, smallest), "it is kept");
            assert_eq!(segment_limit(ip.parse().unwrap()), smallest);
        }
        let known = "127.1.1.2".parse().unwrap();
        assert_eq!(
            packet_loss(known).unwrap().to_string(),
            "large packets (65535 bytes) between this machine and 127.1.1.2 are lost without notice, links use 1040 bytes"
        );
        tokio::time::advance(KEPT_FOR).await;
        assert_eq!(segment_limit(known), None, "the path may be repaired");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_server_is_not_taken_for_a_lossy_path() {
        let slow = Some(HANDSHAKE_TIMEOUT);
        for _ in 0..3 {
            assert_eq!(finished("127.1.1.4", [None, slow, None]).await, (1, None), "each attempt waits");
            let slower = Some(HANDSHAKE_TIMEOUT + Duration::from_millis(200));
            assert_eq!(finished("127.1.1.5", [slower, None, None]).await, (0, None));
            assert_eq!(
                finished("127.1.1.6", [None, NOW, None]).await,
                (1, None),
                "it stalls once in a while"
            );
            assert_eq!(finished("127.1.1.6", [NOW, None, None]).await, (0, None));
        }
        assert_eq!(segment_limit("127.1.1.5".parse().unwrap()), None);
    }
}
