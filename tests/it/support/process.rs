//! The built program as a separate process, so that its memory can be measured.

use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};

use super::programs::TestDir;
use super::{assert_eventually, clients, servers, wait_until};

/// A server in a separate process. Dropping it kills the process.
pub(crate) struct ServerProcess {
    child: Child,
    /// Address for edges.
    pub(crate) grpc: SocketAddr,
    /// Address for clients.
    pub(crate) connect: SocketAddr,
    log: SocketAddr,
}

impl ServerProcess {
    pub(crate) async fn start(place: &TestDir) -> Self {
        let [grpc, connect, log] = std::array::from_fn(|_| servers::addresses(1)[0]);
        let text = servers::config(place, grpc, "");
        let text = text.replace("admin_listen = \"127.0.0.1:0\"", &format!("admin_listen = \"{log}\""));
        let any = "[server.connect]\nlisten = \"127.0.0.1:0\"";
        assert!(text.contains(any), "{text}");
        let text = text.replace(any, &format!("[server.connect]\nlisten = \"{connect}\""));
        let file = place.file("process.toml", &text);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tunnel"));
        // Environment variables of the machine must not affect it.
        command.arg("server").arg(format!("--config={}", file.display())).env_clear();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let process = Self { child, grpc, connect, log };
        let listens = |at| TcpStream::connect(at).is_ok();
        wait_until("the server listens", || [connect, grpc, log].into_iter().all(listens)).await;
        process
    }

    /// Waits until a node is linked.
    pub(crate) async fn wait_for_node(&self, node: &str) {
        let has = async {
            while !clients::get(self.log, "/cloud/healthz").await.body.contains(node) {
                tokio::task::yield_now().await;
            }
        };
        assert_eventually("a link", has).await;
    }

    /// Returns the peak memory of the process in bytes.
    pub(crate) fn most_memory(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
