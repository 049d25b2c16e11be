//! A line between edge and server that can be cut while in use: reset, silent, frozen, or refusing connections.

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

/// A relay in this process. After a cut, new connections work at once.
#[derive(Debug)]
pub(crate) struct Cutter {
    /// The address it listens on.
    pub(crate) at: SocketAddr,
    cuts: broadcast::Sender<Cut>,
    refuses: Arc<AtomicBool>,
}

/// A way to cut a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends receive a RST.
    Reset,
    /// Discards all data, without notifying either end.
    Silent,
    /// Like `Silent`, but for about half of the connections.
    SilentHalf,
    /// Carries nothing for this long, then continues.
    Frozen(Duration),
}

impl Cutter {
    /// Creates a line to `to`, which lasts until the process ends.
    pub(crate) fn to(to: SocketAddr) -> Result<Self> {
        Self::among(vec![to], Duration::ZERO)
    }

    /// Creates a line to a random address of `to` for each connection. Bytes arrive after `delay`.
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
                        socket.set_reset_on_drop(true);
                    } else {
                        tokio::spawn(carry(socket, to.clone(), delay, sender.subscribe()));
                    }
                }
            });
        });
        Ok(Self { at, cuts, refuses })
    }

    /// Cuts all current connections.
    pub(crate) fn cut(&self, how: Cut) {
        // Fails only if there is no connection.
        let _ = self.cuts.send(how);
    }

    /// Sets whether new connections are reset.
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
        // Both ends give up on their own. Their data is read and discarded until then, so that it never queues up.
        let (mut near, mut far) = (near, far);
        let swallow = async |socket: &mut TcpStream| tokio::io::copy(socket, &mut tokio::io::sink()).await;
        let _ = tokio::join!(swallow(&mut near), swallow(&mut far));
        return Ok(());
    }
    near.set_reset_on_drop(true);
    far.set_reset_on_drop(true);
    Ok(())
}

/// Copies one direction until it ends. Each byte arrives after `delay`.
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

/// Maximum bytes of one read.
const PIECE: usize = 64 * 1024;
/// Maximum number of pieces in flight in one direction.
const UNDER_WAY: usize = 64;
