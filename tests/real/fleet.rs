//! Three servers that know each other, and a proxy through which edges reach any of them, like a Service.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use socket2::SockRef;

use crate::parts::free_port;
use crate::tunnel::{Edge, ServerProcess, TestDir};

/// Servers on separate loopback addresses with the same port.
pub(crate) struct Fleet {
    // Fields drop in order: processes before the files they use.
    pub(crate) servers: Vec<ServerProcess>,
    pub(crate) at: Vec<SocketAddr>,
    pub(crate) place: TestDir,
    listed: bool,
    registry: String,
}

impl Fleet {
    /// Starts three servers that list each other; `registry` is appended to their `[server.dns]`.
    pub(crate) fn start(registry: &str) -> Self {
        Self::start_in(TestDir::new(), true, registry)
    }

    /// Starts three servers that list each other or not; `registry` is appended to their `[server.dns]`.
    pub(crate) fn start_in(place: TestDir, listed: bool, registry: &str) -> Self {
        let port = free_port();
        let at: Vec<_> = (2..5).map(|last| SocketAddr::from(([127, 0, 0, last], port))).collect();
        let mut fleet = Self { servers: Vec::new(), at, place, listed, registry: registry.to_owned() };
        fleet.servers = (0..3).map(|number| fleet.start_without_waiting(number)).collect();
        fleet.servers.iter_mut().for_each(ServerProcess::ready);
        fleet
    }

    fn start_without_waiting(&self, number: usize) -> ServerProcess {
        let (at, ip) = (self.at[number], self.at[number].ip().to_string());
        let peers: Vec<_> = self.at.iter().map(|at| format!("\"{at}\"")).collect();
        let peers = if self.listed {
            format!("[server.peers]\naddresses = [{}]", peers.join(", "))
        } else {
            String::new()
        };
        let more = format!("{peers}\n[server.dns]\n{}", self.registry);
        ServerProcess::launch(&self.place, (&format!("pod{number}"), at), &more, &[("POD_IP", &ip)], &[])
    }

    /// Restarts a server in place of one that has ended.
    pub(crate) fn replace(&mut self, number: usize) {
        let new = self.start_without_waiting(number);
        self.servers[number] = new;
        self.servers[number].ready();
    }

    /// Starts the edge of `node1`, which dials the proxy. The proxy must forward to this server now.
    pub(crate) fn node(&mut self, line: &Line, server: usize) -> Edge {
        let edge = Edge::start(&self.place, &format!("127.0.0.1:{}", line.port));
        self.servers[server].wait_for_node("node1");
        edge
    }
}

/// A proxy that forwards TCP connections to a changeable address and can break them.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) port: u16,
    to: Arc<Mutex<SocketAddr>>,
    /// Both ends of each open connection.
    open: Arc<Mutex<Vec<Pair>>>,
    /// Number of forwarded bytes.
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
                // Like a Service without endpoints: the client gets an error at once.
                let Ok(server) = TcpStream::connect(to) else { continue };
                accepting.carry(edge, server);
            }
        });
        line
    }

    /// Forwards new connections to this address.
    pub(crate) fn lead_to(&self, to: SocketAddr) {
        *self.to.lock().unwrap() = to;
    }

    /// Returns the number of forwarded bytes.
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

    /// Stops forwarding on the open connections without notifying their ends.
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
                        // Incoming bytes are discarded.
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
