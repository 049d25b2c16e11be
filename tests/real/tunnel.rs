//! Our own program as cloud and as edge, with config files as people write them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::certificates::{Authority, Files};
use crate::parts::{free_port, loopback};
use crate::process::Running;

/// The name that certificates are for and that edges look for.
pub(crate) const SERVER_NAME: &str = "tunnel.test";

/// The token every edge has.
pub(crate) const TOKEN: &str = "token-of-a-test";

/// Where the program is.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_tunnel");

/// The files of one test: certificates, token, configs, logs.
#[derive(Debug)]
pub(crate) struct TestDir {
    dir: TempDir,
    pub(crate) files: Files,
    pub(crate) authority: Authority,
}

/// `tunnel --m=cloud`, ready.
#[derive(Debug)]
pub(crate) struct Cloud {
    pub(crate) process: Running,
    /// Where edges dial.
    pub(crate) grpc: u16,
    /// Where CONNECT clients come in.
    pub(crate) connect: u16,
    /// Where metrics stand alone.
    pub(crate) metrics: u16,
    pub(crate) log_port: u16,
}

/// `tunnel --m=edge`, ready: the cloud has taken it.
#[derive(Debug)]
pub(crate) struct Edge {
    pub(crate) process: Running,
}

/// A cloud with `node1` behind it.
#[derive(Debug)]
pub(crate) struct Pair {
    // Fields drop in order: processes before the files they use.
    pub(crate) edge: Edge,
    pub(crate) cloud: Cloud,
    pub(crate) place: TestDir,
}

impl TestDir {
    pub(crate) fn new() -> Self {
        Self::serving(&["localhost", "127.0.0.1"])
    }

    /// One whose servers are reached by these names and addresses.
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

    /// Writes a config file, and says where it is.
    pub(crate) fn config(&self, name: &str, text: &str) -> PathBuf {
        let file = self.path().join(format!("{name}.toml"));
        std::fs::write(&file, text).unwrap();
        file
    }

    /// The part of a cloud's config that every test needs: where edges dial, and with what proof.
    pub(crate) fn cloud_config(&self, grpc: SocketAddr, log_port: u16) -> String {
        let Files { ca, cert, key } = &self.files;
        format!(
            r#"
[mode.cloud.stream.server]
listen = "{grpc}"
log_listen = "127.0.0.1:{log_port}"
ca = "{}"
cert = "{}"
key = "{}"
tokenfile = "{}"
"#,
            ca.display(),
            cert.display(),
            key.display(),
            self.path().join("token").display(),
        )
    }

    /// The part of the config of a node's edge that every test needs: what it dials, and with what proof.
    pub(crate) fn edge_config(&self, node: &str, cloud: &str, log_port: u16) -> String {
        format!(
            r#"
[mode.edge.stream.client]
node = "{node}"
token = "{TOKEN}"
cert = "{}"
dns = "{SERVER_NAME}"
servername = "{cloud}"
log_listen = "127.0.0.1:{log_port}"
"#,
            self.files.ca.display(),
        )
    }

    /// Starts the program; its config and its log are called `name`.
    pub(crate) fn tunnel(
        &self,
        (mode, name): (&str, &str),
        config: &str,
        env: &[(&str, &str)],
        args: &[&str],
    ) -> Running {
        self.tunnel_as(Command::new(PROGRAM), (mode, name), config, env, &[&["--v=4"], args].concat())
    }

    /// As [`Self::tunnel`], by a command that ends with the program's name.
    pub(crate) fn tunnel_as(
        &self,
        command: Command,
        (mode, name): (&str, &str),
        config: &str,
        env: &[(&str, &str)],
        args: &[&str],
    ) -> Running {
        let file = self.config(name, config);
        let mut command = not_led_astray(command);
        command
            .arg(format!("--m={mode}"))
            .arg(format!("--c={}", file.display()))
            .args(args)
            .envs(env.iter().copied());
        Running::start(name, self.path(), &mut command)
    }
}

/// The program.
pub(crate) fn tunnel() -> Command {
    not_led_astray(Command::new(PROGRAM))
}

/// A program without what the machine has set.
pub(crate) fn not_led_astray(mut command: Command) -> Command {
    for name in [
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

impl Cloud {
    pub(crate) fn start(place: &TestDir) -> Self {
        Self::start_with(place, "", &[])
    }

    /// As [`Self::start`], with more tables and an environment.
    pub(crate) fn start_with(place: &TestDir, more: &str, env: &[(&str, &str)]) -> Self {
        Self::start_as(place, more, env, &[])
    }

    /// As [`Self::start_with`], with more arguments.
    pub(crate) fn start_as(place: &TestDir, more: &str, env: &[(&str, &str)], args: &[&str]) -> Self {
        let grpc = loopback(free_port());
        let mut cloud = Self::launch(place, ("cloud", grpc), more, env, args);
        cloud.ready();
        cloud
    }

    /// Starts one that links come to at an address, called `name` in logs, and does not wait for it.
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
[mode.cloud.ssh]
listen = "127.0.0.1:{connect}"
auth = "none"
{more}"#,
            place.cloud_config(grpc, log_port),
        );
        let process = place.tunnel(("cloud", name), &config, env, args);
        Self { process, grpc: grpc.port(), connect, metrics, log_port }
    }

    /// The address of a page on its admin port.
    pub(crate) fn page(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.log_port)
    }

    /// Waits until it is ready.
    pub(crate) fn ready(&mut self) {
        self.process.answers(self.log_port, "/readyz", "");
    }

    /// Waits until it is ready all the same, and tells of this trouble.
    pub(crate) fn is_troubled(&mut self, why: &str) {
        self.process.answers(self.log_port, "/readyz", why);
    }

    /// Waits until it is ready and has no trouble.
    pub(crate) fn is_well(&mut self) {
        self.process.answers_only(self.log_port, "/readyz", "ok\n");
    }

    /// Waits until its metrics tell of so many records.
    pub(crate) fn publishes(&mut self, records: usize) {
        self.process.answers(self.metrics, "/metrics", &format!("tunnel_published_records {records}\n"));
    }

    /// Waits until a node hangs here.
    pub(crate) fn has(&mut self, node: &str) {
        self.process.answers(self.log_port, "/cloud/healthz", node);
    }
}

impl Edge {
    /// Starts `node1` towards a cloud's address.
    pub(crate) fn start(place: &TestDir, cloud: &str) -> Self {
        Self::start_as(place, "node1", cloud)
    }

    /// Starts a node of that name towards a cloud's address.
    pub(crate) fn start_as(place: &TestDir, node: &str, cloud: &str) -> Self {
        let log_port = free_port();
        let config = place.edge_config(node, cloud, log_port);
        let mut process = place.tunnel(("edge", &format!("edge-{node}")), &config, &[], &[]);
        process.answers(log_port, "/readyz", "");
        Self { process }
    }
}

impl Pair {
    pub(crate) fn start() -> Self {
        Self::start_behind(|grpc| grpc)
    }

    /// As [`Self::start`], where the edge reaches the cloud through a port of the test's own.
    pub(crate) fn start_behind(line: impl FnOnce(u16) -> u16) -> Self {
        let place = TestDir::new();
        let mut cloud = Cloud::start(&place);
        let edge = Edge::start(&place, &format!("127.0.0.1:{}", line(cloud.grpc)));
        cloud.has("node1");
        Self { edge, cloud, place }
    }
}
