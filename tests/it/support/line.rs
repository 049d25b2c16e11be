//! A line between two programs that can be cut (broken off, or gone silent), or lead elsewhere.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::{beside, clients};

/// A TCP relay on loopback. Connections that come after a cut go through again.
pub(crate) struct Line {
    /// Where it listens.
    pub(crate) at: SocketAddr,
    to: Arc<Mutex<SocketAddr>>,
    cut: watch::Sender<Option<Cut>>,
}

#[derive(Debug, Clone, Copy)]
enum Cut {
    Reset,
    Silent,
}

impl Line {
    /// A line to `to`.
    pub(crate) async fn to(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (cut, _) = watch::channel(None);
        let cuts = cut.clone();
        let to = Arc::new(Mutex::new(to));
        let leads = to.clone();
        beside(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let mut cuts = cuts.subscribe();
                cuts.mark_unchanged();
                let to = *leads.lock().unwrap();
                beside(relay(socket, to, cuts));
            }
        });
        Self { at, to, cut }
    }

    /// From now on new connections lead there.
    pub(crate) fn lead_to(&self, to: SocketAddr) {
        *self.to.lock().unwrap() = to;
    }

    /// Breaks all connections off.
    pub(crate) fn reset(&self) {
        self.cut.send_replace(Some(Cut::Reset));
    }

    /// All connections stay, but nothing goes through any more.
    pub(crate) fn fall_silent(&self) {
        self.cut.send_replace(Some(Cut::Silent));
    }
}

async fn relay(mut socket: TcpStream, to: SocketAddr, mut cuts: watch::Receiver<Option<Cut>>) {
    let Ok(mut onward) = TcpStream::connect(to).await else { return };
    let _ = (socket.set_nodelay(true), onward.set_nodelay(true));
    tokio::select! {
        _ = copy_bidirectional(&mut socket, &mut onward) => return,
        _ = cuts.changed() => {}
    }
    let cut = *cuts.borrow();
    if matches!(cut, Some(Cut::Silent)) {
        // Held until it is broken off, or the line itself is gone.
        let _ = cuts.wait_for(|cut| matches!(cut, Some(Cut::Reset))).await;
    }
    clients::reset(socket);
    clients::reset(onward);
}

/// A balancer on loopback: each new connection leads to the next of some addresses.
pub(crate) struct Balancer {
    /// Where it listens.
    pub(crate) at: SocketAddr,
    to: Arc<Mutex<Vec<SocketAddr>>>,
    /// Held, as nothing is ever cut.
    _cut: watch::Sender<Option<Cut>>,
}

impl Balancer {
    /// One that leads to all of these in turn.
    pub(crate) async fn to(to: &[SocketAddr]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let to = Arc::new(Mutex::new(to.to_vec()));
        let leads = to.clone();
        let (cut, cuts) = watch::channel(None);
        beside(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let to = {
                    let mut leads = leads.lock().unwrap();
                    leads.rotate_left(1);
                    leads[0]
                };
                beside(relay(socket, to, cuts.clone()));
            }
        });
        Self { at, to, _cut: cut }
    }

    /// From now on new connections lead to this one, too.
    pub(crate) fn add(&self, to: SocketAddr) {
        self.to.lock().unwrap().push(to);
    }
}
