//! A line between two programs that can be cut (broken off, or gone silent), or lead elsewhere.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};

use tokio::io::{copy, copy_bidirectional, sink};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::{beside, clients};

/// A TCP relay on loopback. Connections that come after a cut go through again.
pub(crate) struct Line {
    /// Where it listens.
    pub(crate) at: SocketAddr,
    to: Arc<Mutex<SocketAddr>>,
    cut: watch::Sender<Option<Cut>>,
    /// Whether nothing moves on any connection, new ones too.
    frozen: watch::Sender<bool>,
}

#[derive(Debug, Clone, Copy)]
enum Cut {
    Reset,
    Silent(Silent),
}

/// In which directions a connection falls silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silent {
    Both,
    /// What who dialled says vanishes.
    Up,
    /// What is said to who dialled vanishes.
    Down,
}

impl Line {
    /// A line to `to`.
    pub(crate) async fn to(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (cut, _) = watch::channel(None);
        let (frozen, _) = watch::channel(false);
        let (cuts, freezes) = (cut.clone(), frozen.clone());
        let to = Arc::new(Mutex::new(to));
        let leads = to.clone();
        beside(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let mut cuts = cuts.subscribe();
                cuts.mark_unchanged();
                let to = *leads.lock().unwrap();
                beside(relay(socket, to, cuts, freezes.subscribe()));
            }
        });
        Self { at, to, cut, frozen }
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
        self.fall_silent_in(Silent::Both);
    }

    /// The same in some directions.
    pub(crate) fn fall_silent_in(&self, directions: Silent) {
        self.cut.send_replace(Some(Cut::Silent(directions)));
    }

    /// From now on nothing moves, until it is thawed: then all goes on.
    pub(crate) fn freeze(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }
}

async fn relay(
    mut socket: TcpStream,
    to: SocketAddr,
    mut cuts: watch::Receiver<Option<Cut>>,
    mut frozen: watch::Receiver<bool>,
) {
    let Ok(mut onward) = TcpStream::connect(to).await else { return };
    let _ = (socket.set_nodelay(true), onward.set_nodelay(true));
    {
        let mut flow = pin!(copy_bidirectional(&mut socket, &mut onward));
        loop {
            let flows = !*frozen.borrow_and_update();
            tokio::select! {
                biased;
                _ = cuts.changed() => break,
                more = frozen.changed() => if more.is_err() { return },
                _ = &mut flow, if flows => return,
            }
        }
    }
    let cut = *cuts.borrow();
    if let Some(Cut::Silent(directions)) = cut {
        // Held until it is broken off, or the line itself is gone.
        let over = cuts.wait_for(|cut| matches!(cut, Some(Cut::Reset)));
        let ((mut hear, mut say), (mut far_hear, mut far_say)) = (socket.split(), onward.split());
        let (mut none, mut nothing) = (sink(), sink());
        let flow = async {
            match directions {
                Silent::Both => {}
                Silent::Up => {
                    let _ = tokio::join!(copy(&mut hear, &mut none), copy(&mut far_hear, &mut say));
                }
                Silent::Down => {
                    let _ = tokio::join!(copy(&mut hear, &mut far_say), copy(&mut far_hear, &mut nothing));
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = over => {}
            () = flow => {}
        }
    }
    clients::reset(socket);
    clients::reset(onward);
}

/// A balancer on loopback: each new connection leads to the next of some addresses.
pub(crate) struct Balancer {
    /// Where it listens.
    pub(crate) at: SocketAddr,
    to: Arc<Mutex<Vec<SocketAddr>>>,
    /// Held, as nothing is ever cut or frozen.
    _held: (watch::Sender<Option<Cut>>, watch::Sender<bool>),
}

impl Balancer {
    /// One that leads to all of these in turn.
    pub(crate) async fn to(to: &[SocketAddr]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let to = Arc::new(Mutex::new(to.to_vec()));
        let leads = to.clone();
        let (cut, cuts) = watch::channel(None);
        let (held, frozen) = watch::channel(false);
        beside(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let to = {
                    let mut leads = leads.lock().unwrap();
                    leads.rotate_left(1);
                    leads[0]
                };
                beside(relay(socket, to, cuts.clone(), frozen.clone()));
            }
        });
        Self { at, to, _held: (cut, held) }
    }

    /// From now on new connections lead to this one, too.
    pub(crate) fn add(&self, to: SocketAddr) {
        self.to.lock().unwrap().push(to);
    }
}
