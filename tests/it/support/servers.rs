//! Several servers of one cloud, each on its own loopback address and all on the same port, as in a cluster.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering::Relaxed};

use tokio::net::UdpSocket;
use tokio::runtime::{Builder, Runtime};
use tunnel::config::Environment;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;

use hickory_resolver::proto::op::{Message, ResponseCode};
use hickory_resolver::proto::rr::rdata::A;
use hickory_resolver::proto::rr::{RData, Record, RecordType};

use super::programs::{TestDir, TestServer};
use super::spawn;

/// A server with its own runtime, so that it can be killed.
pub(crate) struct KillableServer {
    pub(crate) server: TestServer,
    runtime: Option<Runtime>,
}

impl KillableServer {
    /// Starts a server from its config's text.
    pub(crate) async fn start(text: String) -> Self {
        let started = tokio::task::spawn_blocking(move || {
            let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let settings = ServerConfig::read(&text, &Environment::default()).unwrap().0;
            let server = runtime.block_on(async { Server::start(settings, None).unwrap() });
            (server, runtime)
        });
        let (server, runtime) = started.await.unwrap();
        Self { server: TestServer::from(server), runtime: Some(runtime) }
    }

    /// Kills the server like SIGKILL: its sockets are closed without any message.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for KillableServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns different addresses for `count` servers. They share one port that the system does not assign to clients.
pub(crate) fn addresses(count: u8) -> Vec<SocketAddr> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = u16::try_from(std::process::id() % 100).unwrap() * 150 + 15_000;
    loop {
        let port = first + NEXT.fetch_add(1, Relaxed) % 15_000;
        let all: Vec<_> = (2..2 + count).map(|last| SocketAddr::from(([127, 0, 0, last], port))).collect();
        if all.iter().all(|at| std::net::TcpListener::bind(at).is_ok()) {
            return all;
        }
    }
}

/// Returns the config of the server at an address, with further tables.
pub(crate) fn config(place: &TestDir, at: SocketAddr, tables: &str) -> String {
    let text = place.cloud(&format!("{tables}\n"));
    text.replacen("listen = \"127.0.0.1:0\"", &format!("listen = \"{at}\""), 1)
}

/// Returns the config table that lists peers.
pub(crate) fn peers(all: &[SocketAddr]) -> String {
    let all: Vec<_> = all.iter().map(|at| format!("\"{at}\"")).collect();
    format!("[server.peers]\naddresses = [{}]", all.join(", "))
}

/// Starts `count` servers that know each other from a list.
pub(crate) fn start(place: &TestDir, count: u8) -> Vec<TestServer> {
    let all = addresses(count);
    all.iter().map(|at| TestServer::from_text(&config(place, *at, &peers(&all)))).collect()
}

/// The responses of a test's DNS server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DnsScript {
    /// No response.
    Nothing,
    /// The name does not exist.
    NoSuchName,
    /// The node is at this server.
    At(std::net::Ipv4Addr),
}

/// A DNS server that gives the same response for every name; the response can be changed.
pub(crate) struct Dns {
    pub(crate) at: SocketAddr,
    script: tokio::sync::watch::Sender<DnsScript>,
    queries: Arc<AtomicUsize>,
}

impl Dns {
    pub(crate) async fn start(script: DnsScript) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = socket.local_addr().unwrap();
        let (script, current_script) = tokio::sync::watch::channel(script);
        let queries = Arc::new(AtomicUsize::new(0));
        let counted = queries.clone();
        spawn(async move {
            let mut space = [0; 1500];
            while let Ok((n, from)) = socket.recv_from(&mut space).await {
                counted.fetch_add(1, Relaxed);
                let script = *current_script.borrow();
                let Ok(question) = Message::from_vec(&space[..n]) else { continue };
                if let Some(answer) = answer(&question, script) {
                    let _ = socket.send_to(&answer.to_vec().unwrap(), from).await;
                }
            }
        });
        Self { at, script, queries }
    }

    /// Returns the number of received queries.
    pub(crate) fn queries(&self) -> usize {
        self.queries.load(Relaxed)
    }

    pub(crate) fn set_script(&self, script: DnsScript) {
        self.script.send_replace(script);
    }
}

fn answer(question: &Message, script: DnsScript) -> Option<Message> {
    let query = &question.queries[0];
    let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
    answer.add_query(query.clone());
    match script {
        DnsScript::Nothing => return None,
        DnsScript::NoSuchName => answer.metadata.response_code = ResponseCode::NXDomain,
        DnsScript::At(ip) if query.query_type() == RecordType::A => {
            answer.add_answer(Record::from_rdata(query.name().clone(), 1, RData::A(A(ip))));
        }
        DnsScript::At(_) => {}
    }
    Some(answer)
}
