//! A line between edge and pod that can be cut under their hands: broken off, silent, frozen, or refusing.

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use rand::seq::SliceRandom;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::time::sleep;
use tunnel::net::socket::Connection as _;

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
    /// Nothing is carried for this long; then all goes on.
    Frozen(Duration),
}

impl Cutter {
    /// A line to `to`, until the process ends.
    pub(crate) fn to(to: SocketAddr) -> Result<Self> {
        Self::among(vec![to])
    }

    /// A line to whichever of `to` takes a connection, each time a random one.
    pub(crate) fn among(to: Vec<SocketAddr>) -> Result<Self> {
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
                        tokio::spawn(carry(socket, to.clone(), sender.subscribe()));
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
    mut cuts: broadcast::Receiver<Cut>,
) -> std::io::Result<()> {
    to.shuffle(&mut rand::rng());
    let mut far = TcpStream::connect(to.as_slice()).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let how = {
        let mut copy = pin!(copy_bidirectional(&mut near, &mut far));
        loop {
            tokio::select! {
                ended = &mut copy => return ended.map(drop),
                how = cuts.recv() => match how {
                    Ok(Cut::Frozen(time)) => sleep(time).await,
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
