//! A line between edge and pod that can be cut under their hands: broken off, silent, frozen, or refusing.

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use rand::seq::SliceRandom;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, mpsc};
use tokio::time::{Instant, sleep, sleep_until};
use tunnel_net::socket::Connection as _;

/// A relay in this process; the network is back at once for whoever connects after a cut.
#[derive(Debug)]
pub(crate) struct Cutter {
    /// Where it listens.
    pub(crate) at: SocketAddr,
    cuts: broadcast::Sender<Cut>,
    refuses: Arc<AtomicBool>,
}

/// How a line is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends get a RST.
    Reset,
    /// Whatever is sent vanishes, and neither end is told.
    Silent,
    /// The same for about half of the connections.
    SilentHalf,
    /// Nothing is carried for this long; then all goes on.
    Frozen(Duration),
}

impl Cutter {
    /// A line to `to`, until the process ends.
    pub(crate) fn to(to: SocketAddr) -> Result<Self> {
        Self::among(vec![to], Duration::ZERO)
    }

    /// A line to whichever of `to` takes a connection, each time a random one. Bytes arrive after `delay`.
    pub(crate) fn among(to: Vec<SocketAddr>, delay: Duration) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let at = listener.local_addr()?;
        let (cuts, _) = broadcast::channel(8);
        let (sender, refuses) = (cuts.clone(), Arc::new(AtomicBool::new(false)));
        let refusing = refuses.clone();
        thread::spawn(move || {
            runtime.block_on(async {
                while let Ok((socket, _)) = listener.accept().await {
                    if refusing.load(Relaxed) {
                        socket.breaks_off(true);
                    } else {
                        tokio::spawn(carry(socket, to.clone(), delay, sender.subscribe()));
                    }
                }
            });
        });
        Ok(Self { at, cuts, refuses })
    }

    /// Cuts all connections that stand now.
    pub(crate) fn cut(&self, how: Cut) {
        // Fails only if no connection stands.
        let _ = self.cuts.send(how);
    }

    /// Whether whoever connects from now on is sent away.
    pub(crate) fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Relaxed);
    }
}

async fn carry(
    mut near: TcpStream,
    mut to: Vec<SocketAddr>,
    delay: Duration,
    mut cuts: broadcast::Receiver<Cut>,
) -> std::io::Result<()> {
    to.shuffle(&mut rand::rng());
    let mut far = TcpStream::connect(to.as_slice()).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let how = {
        let ((near_read, near_write), (far_read, far_write)) = (near.split(), far.split());
        let both =
            async { tokio::try_join!(copy(near_read, far_write, delay), copy(far_read, near_write, delay)) };
        let mut copy = pin!(both);
        loop {
            tokio::select! {
                ended = &mut copy => return ended.map(drop),
                how = cuts.recv() => match how {
                    Ok(Cut::Frozen(time)) => sleep(time).await,
                    Ok(Cut::SilentHalf) if rand::random() => {}
                    Ok(Cut::SilentHalf) => break Ok(Cut::Silent),
                    how => break how,
                }
            }
        }
    };
    if how == Ok(Cut::Silent) {
        // Both ends give it up by themselves; what they say until then is swallowed, so that they never see it wait.
        let (mut near, mut far) = (near, far);
        let swallow = async |socket: &mut TcpStream| tokio::io::copy(socket, &mut tokio::io::sink()).await;
        let _ = tokio::join!(swallow(&mut near), swallow(&mut far));
        return Ok(());
    }
    near.breaks_off(true);
    far.breaks_off(true);
    Ok(())
}

/// Copies one direction to its end; each byte arrives after `delay`.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    delay: Duration,
) -> std::io::Result<()> {
    let (pieces, mut arriving) = mpsc::channel::<(Instant, Vec<u8>)>(UNDER_WAY);
    let read = async move {
        let mut buffer = vec![0; PIECE];
        loop {
            let n = from.read(&mut buffer).await?;
            let piece = buffer.get(..n).unwrap_or_default().to_vec();
            if n == 0 || pieces.send((Instant::now() + delay, piece)).await.is_err() {
                return Ok(());
            }
        }
    };
    let write = async move {
        while let Some((due, piece)) = arriving.recv().await {
            sleep_until(due).await;
            to.write_all(&piece).await?;
        }
        to.shutdown().await
    };
    tokio::try_join!(read, write).map(drop)
}

/// Bytes that are read at once.
const PIECE: usize = 64 * 1024;
/// Pieces that one direction holds.
const UNDER_WAY: usize = 64;
