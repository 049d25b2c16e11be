//! A network path between two programs that can be long, interrupted (reset or silent), or rerouted.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, copy_bidirectional, sink};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::{clients, spawn};

/// A TCP relay on loopback. An interruption affects only the connections that exist then.
pub(crate) struct Line {
    /// Address at which it listens.
    pub(crate) at: SocketAddr,
    to: Arc<Mutex<SocketAddr>>,
    /// Senders of interruptions, one per connection so far.
    cuts: Arc<Mutex<Vec<watch::Sender<Option<Cut>>>>>,
    /// Whether all connections are stopped, including new ones.
    frozen: watch::Sender<bool>,
}

#[derive(Debug, Clone, Copy)]
enum Cut {
    Reset,
    Silent(Silent),
}

/// The directions in which a connection becomes silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silent {
    Both,
    /// Bytes from the dialling end are dropped.
    Up,
    /// Bytes to the dialling end are dropped.
    Down,
}

impl Line {
    /// Creates a path to `to`.
    pub(crate) async fn to(to: SocketAddr) -> Self {
        Self::new(to, None).await
    }

    /// Creates a path to `to` that delays each byte by `delay`. Each connection carries 2 MB/s in each direction.
    pub(crate) async fn slow(to: SocketAddr, delay: Duration) -> Self {
        Self::new(to, Some(delay)).await
    }

    async fn new(to: SocketAddr, delay: Option<Duration>) -> Self {
        let socket = socket(delay);
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let listener = socket.listen(1024).unwrap();
        let at = listener.local_addr().unwrap();
        let (frozen, _) = watch::channel(false);
        let freezes = frozen.clone();
        let (to, cuts) = (Arc::new(Mutex::new(to)), Arc::<Mutex<Vec<_>>>::default());
        let (leads, came) = (to.clone(), cuts.clone());
        spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (cut, cuts) = watch::channel(None);
                came.lock().unwrap().push(cut);
                let to = *leads.lock().unwrap();
                spawn(relay(socket, to, delay, cuts, freezes.subscribe()));
            }
        });
        Self { at, to, cuts, frozen }
    }

    /// Routes new connections to this address from now on.
    pub(crate) fn route_to(&self, to: SocketAddr) {
        *self.to.lock().unwrap() = to;
    }

    /// Resets all connections.
    pub(crate) fn reset(&self) {
        self.cut(|_| true, Cut::Reset);
    }

    /// Resets one connection, by its number from 0.
    pub(crate) fn reset_one(&self, number: usize) {
        self.cut(|one| one == number, Cut::Reset);
    }

    /// Drops all bytes while the connections stay open.
    pub(crate) fn become_unresponsive(&self) {
        self.become_unresponsive_in(Silent::Both);
    }

    /// Drops the bytes of some directions while the connections stay open.
    pub(crate) fn become_unresponsive_in(&self, directions: Silent) {
        self.cut(|_| true, Cut::Silent(directions));
    }

    /// Drops all bytes of one connection, by its number from 0, while it stays open.
    pub(crate) fn make_one_unresponsive(&self, number: usize) {
        self.cut(|one| one == number, Cut::Silent(Silent::Both));
    }

    fn cut(&self, is_selected: impl Fn(usize) -> bool, cut: Cut) {
        for (_, connection) in
            self.cuts.lock().unwrap().iter().enumerate().filter(|(one, _)| is_selected(*one))
        {
            connection.send_replace(Some(cut));
        }
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.cuts.lock().unwrap().len()
    }

    /// Stops all connections, or lets them continue.
    pub(crate) fn freeze(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }
}

async fn relay(
    mut socket: TcpStream,
    to: SocketAddr,
    delay: Option<Duration>,
    mut cuts: watch::Receiver<Option<Cut>>,
    mut frozen: watch::Receiver<bool>,
) {
    let Ok(mut onward) = self::socket(delay).connect(to).await else { return };
    let _ = (socket.set_nodelay(true), onward.set_nodelay(true));
    {
        let mut flow = pin!(carry(&mut socket, &mut onward, delay));
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
        // Held until it is reset, or the path itself is dropped.
        let reset_later = cuts.wait_for(|cut| matches!(cut, Some(Cut::Reset)));
        let ((mut near_reader, mut near_writer), (mut far_reader, mut far_writer)) =
            (socket.split(), onward.split());
        let (mut none, mut nothing) = (sink(), sink());
        let flow = async {
            match directions {
                Silent::Both => {}
                Silent::Up => {
                    let _ = tokio::join!(
                        copy(&mut near_reader, &mut none),
                        copy(&mut far_reader, &mut near_writer)
                    );
                }
                Silent::Down => {
                    let _ = tokio::join!(
                        copy(&mut near_reader, &mut far_writer),
                        copy(&mut far_reader, &mut nothing)
                    );
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = reset_later => {}
            () = flow => {}
        }
    }
    clients::reset(socket);
    clients::reset(onward);
}

/// Returns a socket with a small buffer if there is a delay, because bytes queued before the path add to its RTT.
fn socket(delay: Option<Duration>) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    if delay.is_some() {
        socket.set_recv_buffer_size(32 * 1024).unwrap();
    }
    socket
}

async fn carry(one: &mut TcpStream, other: &mut TcpStream, delay: Option<Duration>) {
    let Some(delay) = delay else {
        let _ = copy_bidirectional(one, other).await;
        return;
    };
    let ((near_reader, near_writer), (far_reader, far_writer)) = (one.split(), other.split());
    let _ = tokio::try_join!(hold(near_reader, far_writer, delay), hold(far_reader, near_writer, delay));
}

/// Forwards each byte after `delay`, until the end of the stream.
async fn hold(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    delay: Duration,
) -> std::io::Result<()> {
    let (put, mut take) = mpsc::channel(HELD);
    let receive = async move {
        loop {
            let mut piece = vec![0; PIECE];
            let bytes = from.read(&mut piece).await?;
            piece.truncate(bytes);
            if bytes == 0 || put.send((Instant::now() + delay, piece)).await.is_err() {
                return Ok(());
            }
        }
    };
    let deliver = async {
        let mut free = Instant::now();
        while let Some((arrives, piece)) = take.recv().await {
            sleep_until(arrives.max(free)).await;
            free = free.max(Instant::now())
                + Duration::from_secs(1) * u32::try_from(piece.len()).unwrap() / RATE;
            to.write_all(&piece).await?;
        }
        to.shutdown().await
    };
    tokio::try_join!(receive, deliver).map(drop)
}

/// Limits of a path with a delay: bytes per piece, pieces in flight, and bytes per second.
const PIECE: usize = 8 * 1024;
const HELD: usize = 16;
const RATE: u32 = 2_000_000;

/// A load balancer on loopback: each new connection goes to the next of some addresses.
pub(crate) struct Balancer {
    /// Address at which it listens.
    pub(crate) at: SocketAddr,
    to: Arc<Mutex<Vec<SocketAddr>>>,
    /// Kept alive, because no connection is ever interrupted or stopped.
    _held: (watch::Sender<Option<Cut>>, watch::Sender<bool>),
}

impl Balancer {
    /// Creates a load balancer to all of these addresses in turn.
    pub(crate) async fn to(to: &[SocketAddr]) -> Self {
        Self::new(to, None).await
    }

    /// Creates a load balancer with a delay, like [`Line::slow`].
    pub(crate) async fn slow(to: &[SocketAddr], delay: Duration) -> Self {
        Self::new(to, Some(delay)).await
    }

    async fn new(to: &[SocketAddr], delay: Option<Duration>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let to = Arc::new(Mutex::new(to.to_vec()));
        let leads = to.clone();
        let (cut, cuts) = watch::channel(None);
        let (held, frozen) = watch::channel(false);
        spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let to = {
                    let mut leads = leads.lock().unwrap();
                    leads.rotate_left(1);
                    leads[0]
                };
                spawn(relay(socket, to, delay, cuts.clone(), frozen.clone()));
            }
        });
        Self { at, to, _held: (cut, held) }
    }

    /// Adds an address for new connections.
    pub(crate) fn add(&self, to: SocketAddr) {
        self.to.lock().unwrap().push(to);
    }
}
