//! A server and an edge in this process, with the files that their configs name.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tunnel::config::Environment;
use tunnel::edge::Edge;
use tunnel::edge::config::EdgeConfig;
use tunnel::registry::LinkedNode;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel_net::pki::CertificateAuthority;
use tunnel_net::tls::IdentityFiles;
use tunnel_proto::names::Target;

use super::clients::{self, Answer};
use super::wait_until;
use crate::certificates::{Authority, Files};

use tokio::net::TcpStream;

/// A directory with certificates and a token file, shared by the programs of one test.
pub(crate) struct TestDir {
    dir: TempDir,
    /// CA that issued its certificates.
    pub(crate) authority: Authority,
    pub(crate) files: Files,
}

/// A server that clients and edges can reach.
pub(crate) struct TestServer {
    pub(crate) server: Server,
    /// Address for clients.
    pub(crate) connect: SocketAddr,
}

impl TestDir {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let files = authority.write(dir.path(), &[NAME, "127.0.0.1"]);
        std::fs::write(dir.path().join("token"), format!("default:{TOKEN}\n")).unwrap();
        Self { dir, authority, files }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Creates a client certificate with this name.
    pub(crate) fn client(&self, name: &str) -> IdentityFiles {
        let identity =
            IdentityFiles { cert: self.path().join("client.crt"), key: self.path().join("client.key") };
        self.authority.0.client(name).unwrap().write(&identity.cert, &identity.key).unwrap();
        identity
    }

    /// Returns the CA as it is read from files.
    pub(crate) fn read_authority(&self) -> CertificateAuthority {
        let Authority(authority) = &self.authority;
        let (cert, key) = (self.file("read.crt", authority.cert()), self.file("read.key", &authority.key()));
        CertificateAuthority::read(&cert, &key).unwrap()
    }

    /// Writes a file into the directory.
    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Returns a server's config. `more` continues `[server.connect]` and may open further tables.
    pub(crate) fn cloud(&self, more: &str) -> String {
        let dir = self.path().display();
        format!(
            r#"
[server.links]
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"
metrics_listen = "127.0.0.1:0"
cert = "{dir}/cloud.crt"
key = "{dir}/cloud.key"
token_file = "{dir}/token"
peer_ca = "{dir}/ca.crt"
[server.connect]
listen = "127.0.0.1:0"
{more}
"#
        )
    }

    /// Returns an edge's config for a server. `more` continues `[edge.uplink]` and may open further tables.
    pub(crate) fn edge(&self, node: &str, server: impl Display, more: &str) -> String {
        let dir = self.path().display();
        format!(
            r#"
[edge.uplink]
node = "{node}"
token = "{TOKEN}"
ca = "{dir}/ca.crt"
tls_server_name = "{NAME}"
servers = ["{server}"]
admin_listen = "127.0.0.1:0"
{more}
"#
        )
    }
}

impl TestServer {
    pub(crate) fn start(place: &TestDir) -> Self {
        Self::with(place, "")
    }

    /// Starts a server with `more` at the end of its config, see [`TestDir::cloud`].
    pub(crate) fn with(place: &TestDir, more: &str) -> Self {
        Self::from_text(&place.cloud(more))
    }

    /// Starts a server from its config's text.
    pub(crate) fn from_text(text: &str) -> Self {
        let (settings, _) = ServerConfig::read(text, &Environment::default()).unwrap();
        Self::from(Server::start(settings, None).unwrap())
    }

    pub(crate) fn from(server: Server) -> Self {
        let connect = server.bound.connect().unwrap();
        Self { server, connect }
    }

    /// Returns the address of the listener with this name, or of the first if there are several.
    pub(crate) fn port(&self, listener: &str) -> SocketAddr {
        let found = self.server.bound.clients.iter().find(|(name, _)| *name == listener);
        found.unwrap_or_else(|| panic!("no {listener} among {:?}", self.server.bound.clients)).1
    }

    /// Connects to the listener with this name.
    pub(crate) async fn client(&self, listener: &str) -> TcpStream {
        TcpStream::connect(self.port(listener)).await.unwrap()
    }

    /// Requests `target` and returns the response, whatever it is.
    pub(crate) async fn request_connect(&self, target: &str) -> Answer {
        clients::send_request(self.connect, &format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n")).await
    }

    /// Opens a session to `target`.
    pub(crate) async fn open(&self, target: &str) -> TcpStream {
        clients::open(self.connect, target).await
    }

    /// Returns the link of a node, if it has one.
    pub(crate) fn link(&self, node: &str) -> Option<LinkedNode> {
        self.server.registry.link_of(&node.parse().unwrap())
    }

    /// Waits until a node is linked.
    pub(crate) async fn wait_for_node(&self, node: &str) -> LinkedNode {
        let mut linked = None;
        wait_until(&format!("{node} is linked"), || {
            linked = self.link(node);
            linked.is_some()
        })
        .await;
        linked.unwrap()
    }

    /// Waits until no trace of any session is left: neither in the table, nor in memory, nor in a counter.
    pub(crate) async fn assert_idle(&self) {
        let (table, metrics) = (&self.server.table, &self.server.metrics);
        wait_until("the server has dropped its sessions", || table.is_empty()).await;
        wait_until("the server has released its memory", || table.memory() == (0, 0)).await;
        for listener in ["connect", "tcp", "https"] {
            wait_until("the server counts no session", || metrics.sessions.now(listener) == 0).await;
        }
        let links = self.server.registry.nodes();
        for node in links {
            if let Some(linked) = self.link(node.as_str()) {
                wait_until("the link has no sessions", || linked.link.sessions() == 0).await;
            }
        }
    }
}

/// Starts an edge with this name, linked to a server.
pub(crate) async fn edge(place: &TestDir, server: &TestServer, node: &str) -> Edge {
    edge_with(place, server, node, "").await
}

/// Like [`edge`], but with additional config, see [`TestDir::edge`].
pub(crate) async fn edge_with(place: &TestDir, server: &TestServer, node: &str, more: &str) -> Edge {
    let edge = start_edge(&place.edge(node, server.server.bound.grpc, more));
    server.wait_for_node(node).await;
    edge
}

/// Starts an edge from its config's text.
pub(crate) fn start_edge(text: &str) -> Edge {
    let (settings, _) = EdgeConfig::read(text, &Environment::default()).unwrap();
    Edge::start(settings, None).unwrap()
}

/// Waits until no trace of any session is left on an edge.
pub(crate) async fn assert_edge_idle(edge: &Edge) {
    wait_until("the edge has dropped its sessions", || edge.table.is_empty()).await;
    wait_until("the edge has released its memory", || edge.table.memory() == (0, 0)).await;
    wait_until("the edge counts no session", || edge.metrics.sessions.now("acceptor") == 0).await;
    wait_until("the edge's proxy counts no session", || edge.metrics.sessions.now("http_proxy") == 0).await;
}

/// Returns a target at a node, as clients write it.
pub(crate) fn at(node: &str, target: SocketAddr) -> String {
    format!("{node}:{}", target.port())
}

/// Returns a target, as edges see it.
pub(crate) fn target(text: &str) -> Target {
    text.parse().unwrap()
}

/// The name in the servers' certificates.
pub(crate) const NAME: &str = "cloud.test";
/// The token of all edges.
pub(crate) const TOKEN: &str = "0123456789abcdef";
