//! This program as a server and as an edge, with config files as users write them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::certificates::{Authority, Files};
use crate::parts::{env_var, free_port, loopback};
use crate::process::Running;

/// The name in the certificates of servers, which edges verify.
pub(crate) const SERVER_NAME: &str = "tunnel.test";

/// The token of every edge.
pub(crate) const TOKEN: &str = "token-of-a-test";

/// Path of the program.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_tunnel");

/// The files of one test: certificates, token, configs, logs.
#[derive(Debug)]
pub(crate) struct TestDir {
    dir: TempDir,
    pub(crate) files: Files,
    pub(crate) authority: Authority,
}

/// A server (`tunnel server`) that is ready.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    pub(crate) process: Running,
    /// The port that edges dial.
    pub(crate) grpc: u16,
    /// The port for CONNECT clients.
    pub(crate) connect: u16,
    /// The port that serves only metrics.
    pub(crate) metrics: u16,
    pub(crate) log_port: u16,
}

/// An edge (`tunnel edge`) that is linked to its server.
#[derive(Debug)]
pub(crate) struct Edge {
    pub(crate) process: Running,
}

/// A server with the linked edge `node1`.
#[derive(Debug)]
pub(crate) struct Pair {
    // Fields drop in order: processes before the files they use.
    pub(crate) edge: Edge,
    pub(crate) cloud: ServerProcess,
    pub(crate) place: TestDir,
}

impl TestDir {
    pub(crate) fn new() -> Self {
        Self::serving(&["localhost", "127.0.0.1"])
    }

    /// Creates a directory with a server certificate for these names and addresses.
    pub(crate) fn serving(names: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let files = authority.write(dir.path(), &[&[SERVER_NAME], names].concat());
        std::fs::write(dir.path().join("token"), format!("default:{TOKEN}\n")).unwrap();
        Self { dir, files, authority }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of an admin socket, and the tables that open it.
    pub(crate) fn admin_socket(&self, role: &str) -> (PathBuf, String) {
        let path = self.path().join(format!("{role}.sock"));
        let table = format!("[{role}.admin]\nlisten = \"unix:{}\"\n", path.display());
        (path, table)
    }

    /// Writes a config file, and returns its path.
    pub(crate) fn config(&self, name: &str, text: &str) -> PathBuf {
        let file = self.path().join(format!("{name}.toml"));
        std::fs::write(&file, text).unwrap();
        file
    }

    /// Returns the part of a server's config that every test needs: the address that edges dial, and the credentials.
    pub(crate) fn cloud_config(&self, grpc: SocketAddr, log_port: u16) -> String {
        let Files { ca, cert, key } = &self.files;
        format!(
            r#"
[server.links]
listen = "{grpc}"
admin_listen = "127.0.0.1:{log_port}"
peer_ca = "{}"
cert = "{}"
key = "{}"
token_file = "{}"
"#,
            ca.display(),
            cert.display(),
            key.display(),
            self.path().join("token").display(),
        )
    }

    /// Returns the part of an edge's config that every test needs: the address of the server, and the credentials.
    pub(crate) fn edge_config(&self, node: &str, cloud: &str, log_port: u16) -> String {
        format!(
            r#"
[edge.uplink]
node = "{node}"
token = "{TOKEN}"
ca = "{}"
tls_server_name = "{SERVER_NAME}"
servers = ["{cloud}"]
admin_listen = "127.0.0.1:{log_port}"
"#,
            self.files.ca.display(),
        )
    }

    /// Starts the program with a config and a log called `name`. `TUNNEL_EDGE` names another program for edges.
    pub(crate) fn tunnel(
        &self,
        (role, name): (&str, &str),
        config: &str,
        env: &[(&str, &str)],
        args: &[&str],
    ) -> Running {
        let other = env_var("TUNNEL_EDGE").filter(|_| role == "edge");
        let command = Command::new(other.as_deref().unwrap_or(PROGRAM));
        self.tunnel_as(command, (role, name), config, env, &[&["--verbosity=4"], args].concat())
    }

    /// Like [`Self::tunnel`], but with a command that ends with the program's name.
    pub(crate) fn tunnel_as(
        &self,
        command: Command,
        (role, name): (&str, &str),
        config: &str,
        env: &[(&str, &str)],
        args: &[&str],
    ) -> Running {
        let file = self.config(name, config);
        let mut command = clear_environment(command);
        command.arg(role).arg(format!("--config={}", file.display())).args(args).envs(env.iter().copied());
        Running::start(name, self.path(), &mut command)
    }
}

/// Returns a command that starts the program.
pub(crate) fn tunnel() -> Command {
    clear_environment(Command::new(PROGRAM))
}

/// Removes environment variables that would change how the program behaves.
pub(crate) fn clear_environment(mut command: Command) -> Command {
    for name in [
        "TUNNEL_SERVER",
        "TUNNEL_USER",
        "TUNNEL_PASSWORD_FILE",
        "TUNNEL_CA",
        "NODE_NAME",
        "NODE_IP",
        "POD_IP",
        "HOST_IP",
        "POD_NAMESPACE",
        "KUBERNETES_SERVICE_HOST",
        "HTTPS_PROXY",
        "https_proxy",
    ] {
        command.env_remove(name);
    }
    command
}

impl ServerProcess {
    pub(crate) fn start(place: &TestDir) -> Self {
        Self::start_with(place, "", &[])
    }

    /// Like [`Self::start`], but with more config tables and an environment.
    pub(crate) fn start_with(place: &TestDir, more: &str, env: &[(&str, &str)]) -> Self {
        Self::start_as(place, more, env, &[])
    }

    /// Like [`Self::start_with`], but with more arguments.
    pub(crate) fn start_as(place: &TestDir, more: &str, env: &[(&str, &str)], args: &[&str]) -> Self {
        let grpc = loopback(free_port());
        let mut cloud = Self::launch(place, ("cloud", grpc), more, env, args);
        cloud.ready();
        cloud
    }

    /// Starts a server that edges dial at `grpc`, called `name` in logs, and does not wait for it.
    pub(crate) fn launch(
        place: &TestDir,
        (name, grpc): (&str, SocketAddr),
        more: &str,
        env: &[(&str, &str)],
        args: &[&str],
    ) -> Self {
        let (connect, log_port, metrics) = (free_port(), free_port(), free_port());
        let config = format!(
            r#"{}metrics_listen = "127.0.0.1:{metrics}"
[server.connect]
listen = "127.0.0.1:{connect}"
auth = "none"
{more}"#,
            place.cloud_config(grpc, log_port),
        );
        let process = place.tunnel(("server", name), &config, env, args);
        Self { process, grpc: grpc.port(), connect, metrics, log_port }
    }

    /// Returns the URL of a page on its admin port.
    pub(crate) fn page(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.log_port)
    }

    /// Waits until it is ready.
    pub(crate) fn ready(&mut self) {
        self.process.wait_for_answer(self.log_port, "/readyz", "");
    }

    /// Waits until it is ready but reports this problem.
    pub(crate) fn wait_for_condition(&mut self, why: &str) {
        self.process.wait_for_answer(self.log_port, "/readyz", why);
    }

    /// Waits until it is ready and reports no problem.
    pub(crate) fn wait_until_healthy(&mut self) {
        self.process.wait_for_exact_answer(self.log_port, "/readyz", "ok\n");
    }

    /// Waits until its metrics report this number of published records.
    pub(crate) fn wait_until_published(&mut self, records: usize) {
        self.process.wait_for_answer(self.metrics, "/metrics", &format!("tunnel_dns_records {records}\n"));
    }

    /// Waits until a node is linked to it.
    pub(crate) fn wait_for_node(&mut self, node: &str) {
        self.process.wait_for_answer(self.log_port, "/cloud/healthz", node);
    }
}

impl Edge {
    /// Starts `node1`, which dials the server at `cloud`.
    pub(crate) fn start(place: &TestDir, cloud: &str) -> Self {
        Self::start_as(place, "node1", cloud)
    }

    /// Starts the edge of `node`, which dials the server at `cloud`.
    pub(crate) fn start_as(place: &TestDir, node: &str, cloud: &str) -> Self {
        let log_port = free_port();
        let config = place.edge_config(node, cloud, log_port);
        let mut process = place.tunnel(("edge", &format!("edge-{node}")), &config, &[], &[]);
        process.wait_for_answer(log_port, "/readyz", "");
        Self { process }
    }
}

impl Pair {
    pub(crate) fn start() -> Self {
        Self::start_behind(|grpc| grpc)
    }

    /// Like [`Self::start`], but the edge dials the port that `line` returns for the server's port.
    pub(crate) fn start_behind(line: impl FnOnce(u16) -> u16) -> Self {
        let place = TestDir::new();
        let mut cloud = ServerProcess::start(&place);
        let edge = Edge::start(&place, &format!("127.0.0.1:{}", line(cloud.grpc)));
        cloud.wait_for_node("node1");
        Self { edge, cloud, place }
    }
}
