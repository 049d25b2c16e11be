//! Cuts the connection between edge and server during a copy: ssh sees at most a pause.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::parts::are_installed;
use crate::ssh::copies_both_ways;
use crate::tunnel::Pair;

#[test]
fn a_copy_survives_every_cut_of_the_connection() {
    survives(&[10_000_000, 35_000_000, 60_000_000, 25_000_000], End::Cut);
}

/// Simulates a NAT that has forgotten the connection: neither end is notified.
#[test]
fn a_copy_survives_a_connection_that_stops_responding() {
    survives(&[40_000_000], End::Silence);
}

/// Each copy transfers at least 200 MB, so every connection with a limit reaches it.
fn survives(lives: &[usize], end: End) {
    if !are_installed(&["sshd", "ssh", "scp", "ssh-keygen", "nc.openbsd"]) {
        return;
    }
    let line = CuttingProxy::new(lives, end);
    let pair = Pair::start_behind(|cloud| line.start(cloud));
    copies_both_ways(&pair);
    assert_eq!(line.made(), lives.len() + 1, "each connection that ended is replaced once");
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Both sides are notified.
    Cut,
    /// Neither side is notified.
    Silence,
}

/// A proxy whose connections end after a number of bytes, both directions together; the last one stays open.
#[derive(Debug, Clone)]
pub(crate) struct CuttingProxy {
    lives: Arc<[usize]>,
    end: End,
    made: Arc<AtomicUsize>,
    /// Connections that have stopped responding. They are kept open, because neither end closes them.
    silent: Arc<Mutex<Vec<TcpStream>>>,
}

impl CuttingProxy {
    pub(crate) fn new(lives: &[usize], end: End) -> Self {
        Self { lives: lives.into(), end, made: Arc::default(), silent: Arc::default() }
    }

    /// Returns the number of connections so far.
    fn made(&self) -> usize {
        self.made.load(Ordering::SeqCst)
    }

    /// Listens for the edge, and forwards its connections to the server. Its threads end with the test.
    pub(crate) fn start(&self, cloud: u16) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let line = self.clone();
        std::thread::spawn(move || {
            for edge in listener.incoming() {
                let edge = edge.unwrap();
                let Ok(cloud) = TcpStream::connect(("127.0.0.1", cloud)) else { return };
                // Without `TCP_NODELAY`, small segments would be delayed, which would slow both ends down.
                edge.set_nodelay(true).unwrap();
                cloud.set_nodelay(true).unwrap();
                let number = line.made.fetch_add(1, Ordering::SeqCst);
                let left = line.lives.get(number).copied().unwrap_or(usize::MAX);
                let left = Arc::new(AtomicUsize::new(left));
                line.carry(&edge, &cloud, &left);
                line.carry(&cloud, &edge, &left);
            }
        });
        port
    }

    fn carry(&self, from: &TcpStream, to: &TcpStream, left: &Arc<AtomicUsize>) {
        let (line, left) = (self.clone(), Arc::clone(left));
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut piece = vec![0; 64 * 1024];
            loop {
                let read = from.read(&mut piece).unwrap_or(0);
                let lasts = left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(read))
                    .is_ok();
                if read > 0 && lasts && to.write_all(&piece[..read]).is_ok() {
                    continue;
                }
                // If one direction ends, the other ends as well.
                left.store(0, Ordering::SeqCst);
                if !lasts && line.end == End::Silence {
                    line.silent.lock().unwrap().extend([from, to]);
                } else {
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                }
                return;
            }
        });
    }
}
