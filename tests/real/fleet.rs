//! Three pods that know each other, and a line by which edges come to any of them, as through a Service.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use socket2::SockRef;

use crate::parts::free_port;
use crate::tunnel::{Cloud, Edge, TestDir};

/// Pods on loopback addresses of their own and one port.
pub(crate) struct Fleet {
    // Fields drop in order: processes before the files they use.
    pub(crate) servers: Vec<Cloud>,
    pub(crate) at: Vec<SocketAddr>,
    pub(crate) place: TestDir,
    listed: bool,
    registry: String,
}

impl Fleet {
    /// Three pods that have a list of all; `registry` goes on in their `[mode.cloud.registry]`.
    pub(crate) fn start(registry: &str) -> Self {
        Self::start_in(TestDir::new(), true, registry)
    }

    /// Three pods, which have a list of all or no list; `registry` goes on in their `[mode.cloud.registry]`.
    pub(crate) fn start_in(place: TestDir, listed: bool, registry: &str) -> Self {
        let port = free_port();
        let at: Vec<_> = (2..5).map(|last| SocketAddr::from(([127, 0, 0, last], port))).collect();
        let mut fleet = Self { servers: Vec::new(), at, place, listed, registry: registry.to_owned() };
        fleet.servers = (0..3).map(|number| fleet.launch(number)).collect();
        fleet.servers.iter_mut().for_each(Cloud::ready);
        fleet
    }

    fn launch(&self, number: usize) -> Cloud {
        let (at, ip) = (self.at[number], self.at[number].ip().to_string());
        let peers: Vec<_> = self.at.iter().map(|at| format!("\"{at}\"")).collect();
        let peers = if self.listed { format!("siblings = [{}]", peers.join(", ")) } else { String::new() };
        let more = format!("[mode.cloud.registry]\n{peers}\n{}", self.registry);
        Cloud::launch(&self.place, (&format!("pod{number}"), at), &more, &[("POD_IP", &ip)], &[])
    }

    /// Starts a pod anew in the place of one that has ended.
    pub(crate) fn replace(&mut self, number: usize) {
        let new = self.launch(number);
        self.servers[number] = new;
        self.servers[number].ready();
    }

    /// A node that comes by the line, which must lead to this pod now.
    pub(crate) fn node(&mut self, line: &Line, server: usize) -> Edge {
        let edge = Edge::start(&self.place, &format!("127.0.0.1:{}", line.port));
        self.servers[server].has("node1");
        edge
    }
}

/// A line that carries TCP connections to an address that may change, and that can be cut.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) port: u16,
    to: Arc<Mutex<SocketAddr>>,
    /// The connections of this moment, both of their sides.
    open: Arc<Mutex<Vec<Pair>>>,
    /// Bytes that were carried.
    carried: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Pair {
    sides: [TcpStream; 2],
    silent: Arc<AtomicUsize>,
}

impl Line {
    pub(crate) fn to(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let line = Self { port, to: Arc::new(Mutex::new(to)), open: Arc::default(), carried: Arc::default() };
        let accepting = line.clone();
        std::thread::spawn(move || {
            for edge in listener.incoming() {
                let edge = edge.unwrap();
                let to = *accepting.to.lock().unwrap();
                // As a Service without a pod behind it: the caller is told at once.
                let Ok(server) = TcpStream::connect(to) else { continue };
                accepting.carry(edge, server);
            }
        });
        line
    }

    /// From now on new connections lead there.
    pub(crate) fn lead_to(&self, to: SocketAddr) {
        *self.to.lock().unwrap() = to;
    }

    /// How many bytes were carried.
    pub(crate) fn carried(&self) -> usize {
        self.carried.load(SeqCst)
    }

    /// Ends all connections with RST.
    pub(crate) fn reset(&self) {
        for pair in self.open.lock().unwrap().drain(..) {
            for side in &pair.sides {
                SockRef::from(side).set_linger(Some(std::time::Duration::ZERO)).unwrap();
                let _ = side.shutdown(std::net::Shutdown::Read);
            }
            pair.silent.store(2, SeqCst);
        }
    }

    /// Carries nothing more on the connections of this moment, and tells nobody.
    pub(crate) fn fall_silent(&self) {
        for pair in self.open.lock().unwrap().iter() {
            pair.silent.store(1, SeqCst);
        }
    }

    fn carry(&self, edge: TcpStream, server: TcpStream) {
        edge.set_nodelay(true).unwrap();
        server.set_nodelay(true).unwrap();
        let silent = Arc::new(AtomicUsize::new(0));
        for (from, to) in [(&edge, &server), (&server, &edge)] {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let (carried, silent) = (self.carried.clone(), silent.clone());
            std::thread::spawn(move || {
                let mut piece = vec![0; 64 * 1024];
                loop {
                    let read = from.read(&mut piece).unwrap_or(0);
                    match silent.load(SeqCst) {
                        // What comes is swallowed.
                        1 if read > 0 => continue,
                        0 if read > 0 && to.write_all(&piece[..read]).is_ok() => {}
                        _ => break,
                    }
                    carried.fetch_add(read, SeqCst);
                }
                if silent.load(SeqCst) == 0 {
                    let _ = to.shutdown(std::net::Shutdown::Both);
                }
            });
        }
        self.open.lock().unwrap().push(Pair { sides: [edge, server], silent });
    }
}
