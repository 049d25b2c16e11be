//! A line between edge and pod that can be cut under their hands: broken off, or silent while new connections work.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;

use anyhow::Result;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tunnel::net::listen::breaks_off;

/// A relay in this process; the network is back at once for whoever connects after a cut.
#[derive(Debug)]
pub(crate) struct Cutter {
    /// Where it listens.
    pub(crate) at: SocketAddr,
    cuts: broadcast::Sender<Cut>,
}

/// How a line is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends get a RST.
    Reset,
    /// Whatever is sent vanishes, and neither end is told.
    Silent,
}

impl Cutter {
    /// A line to `to`, until the process ends.
    pub(crate) fn to(to: SocketAddr) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let at = listener.local_addr()?;
        let (cuts, _) = broadcast::channel(8);
        let sender = cuts.clone();
        thread::spawn(move || {
            runtime.block_on(async {
                while let Ok((socket, _)) = listener.accept().await {
                    tokio::spawn(carry(socket, to, sender.subscribe()));
                }
            });
        });
        Ok(Self { at, cuts })
    }

    /// Cuts all connections that stand now.
    pub(crate) fn cut(&self, how: Cut) {
        // Fails only if no connection stands.
        let _ = self.cuts.send(how);
    }
}

async fn carry(
    mut near: TcpStream,
    to: SocketAddr,
    mut cuts: broadcast::Receiver<Cut>,
) -> std::io::Result<()> {
    let mut far = TcpStream::connect(to).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let how = tokio::select! {
        ended = copy_bidirectional(&mut near, &mut far) => return ended.map(drop),
        how = cuts.recv() => how,
    };
    if how == Ok(Cut::Silent) {
        // Both ends give it up by themselves; what they say until then is swallowed, so that they never see it wait.
        let (mut near, mut far) = (near, far);
        let swallow = async |socket: &mut TcpStream| tokio::io::copy(socket, &mut tokio::io::sink()).await;
        let _ = tokio::join!(swallow(&mut near), swallow(&mut far));
        return Ok(());
    }
    breaks_off(&near, true);
    breaks_off(&far, true);
    Ok(())
}
