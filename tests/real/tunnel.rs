//! Our own program as cloud and as edge, with config files as people write them.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::certificates::{Authority, Files};
use crate::parts::free_port;
use crate::process::Running;

/// The name that certificates are for and that edges look for.
pub(crate) const SERVER_NAME: &str = "tunnel.test";

/// The token every edge has.
pub(crate) const TOKEN: &str = "token-of-a-test";

/// The files of one test: certificates, token, configs, logs.
#[derive(Debug)]
pub(crate) struct Place {
    dir: TempDir,
    pub(crate) files: Files,
}

/// `tunnel --m=cloud`, ready.
#[derive(Debug)]
pub(crate) struct Cloud {
    pub(crate) process: Running,
    /// Where edges dial.
    pub(crate) grpc: u16,
    /// Where CONNECT clients come in.
    pub(crate) connect: u16,
    log_port: u16,
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
    pub(crate) place: Place,
}

impl Place {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files = Authority::new().write(dir.path(), &[SERVER_NAME, "localhost", "127.0.0.1"]);
        std::fs::write(dir.path().join("token"), format!("default:{TOKEN}\n")).unwrap();
        Self { dir, files }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    fn tunnel(&self, mode: &str, config: &str) -> Running {
        let file = self.path().join(format!("{mode}.toml"));
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tunnel"));
        command.arg(format!("--m={mode}")).arg(format!("--c={}", file.display())).arg("--v=4");
        // What the machine has set must not lead the edge astray.
        for name in ["NODE_NAME", "NODE_IP", "POD_IP", "HTTPS_PROXY", "https_proxy"] {
            command.env_remove(name);
        }
        Running::start(mode, self.path(), &mut command)
    }
}

impl Cloud {
    pub(crate) fn start(place: &Place) -> Self {
        let (grpc, connect, log_port, metrics) = (free_port(), free_port(), free_port(), free_port());
        let Files { cert, key, .. } = &place.files;
        let config = format!(
            r#"
[mode.cloud.stream.server]
listen = "127.0.0.1:{grpc}"
log_listen = "127.0.0.1:{log_port}"
metrics_listen = "127.0.0.1:{metrics}"
cert = "{}"
key = "{}"
tokenfile = "{}"
[mode.cloud.ssh]
listen = "127.0.0.1:{connect}"
auth = "none"
"#,
            cert.display(),
            key.display(),
            place.path().join("token").display(),
        );
        let mut process = place.tunnel("cloud", &config);
        process.answers(log_port, "/readyz", "");
        Self { process, grpc, connect, log_port }
    }

    /// Waits until a node hangs here.
    pub(crate) fn has(&mut self, node: &str) {
        self.process.answers(self.log_port, "/cloud/healthz", node);
    }
}

impl Edge {
    /// Starts `node1` towards a cloud's address.
    pub(crate) fn start(place: &Place, cloud: &str) -> Self {
        let log_port = free_port();
        let config = format!(
            r#"
[mode.edge.stream.client]
node = "node1"
token = "{TOKEN}"
cert = "{}"
dns = "{SERVER_NAME}"
servername = "{cloud}"
log_listen = "127.0.0.1:{log_port}"
"#,
            place.files.ca.display(),
        );
        let mut process = place.tunnel("edge", &config);
        process.answers(log_port, "/readyz", "");
        Self { process }
    }
}

impl Pair {
    pub(crate) fn start() -> Self {
        let place = Place::new();
        let mut cloud = Cloud::start(&place);
        let edge = Edge::start(&place, &format!("127.0.0.1:{}", cloud.grpc));
        cloud.has("node1");
        Self { edge, cloud, place }
    }
}
