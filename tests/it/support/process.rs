//! The built program as a separate process, so that its memory can be measured.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::programs::TestDir;
use super::{assert_eventually, clients, servers, wait_until};

/// A process that is killed when this is dropped.
pub(crate) struct Killed(Child);

impl Killed {
    /// Starts it without input and output. Environment variables of the machine do not affect it.
    pub(crate) fn start(command: &mut Command) -> Self {
        let silent = command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(silent.spawn().unwrap())
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server in a separate process. Dropping it kills the process.
pub(crate) struct ServerProcess {
    child: Killed,
    /// Address for edges.
    pub(crate) grpc: SocketAddr,
    /// Address for clients.
    pub(crate) connect: SocketAddr,
    pub(crate) log: SocketAddr,
}

/// A control group (version 1 or 2) with a limit of memory.
pub(crate) struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Creates a group for the test with this name. Prints why the test is skipped if the machine allows none.
    pub(crate) fn new(test: &str, mib: u64) -> Option<Self> {
        let versions = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        for (root, file) in versions {
            let group = Self(Path::new(root).join(format!("tunnel-{}-{test}", std::process::id())));
            let bytes = (mib << 20).to_string();
            if std::fs::create_dir(&group.0).is_ok() && std::fs::write(group.0.join(file), bytes).is_ok() {
                // Version 1 counts the kernel's memory of sockets apart, and only with a limit.
                let _ =
                    std::fs::write(group.0.join("memory.kmem.tcp.limit_in_bytes"), (1u64 << 40).to_string());
                return Some(group);
            }
        }
        // As in `tests/real`: the script for all tests requires everything.
        assert!(
            std::env::var_os("TUNNEL_TESTS").is_none(),
            "no control group with a memory limit can be created"
        );
        // Not by a macro: the test harness captures those, and prints them for failed tests only.
        let _ = writeln!(
            std::io::stderr(),
            "skipped {test}: no control group with a memory limit can be created"
        );
        None
    }

    /// Returns the number of processes that the kernel has killed for the limit.
    pub(crate) fn kills(&self) -> u64 {
        let read = |file| std::fs::read_to_string(self.0.join(file)).ok();
        let text = read("memory.oom_control").or_else(|| read("memory.events")).unwrap();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")).unwrap().parse().unwrap()
    }

    /// Returns the bytes that the kernel keeps for sockets of this group.
    pub(crate) fn sockets(&self) -> u64 {
        let read = |file| std::fs::read_to_string(self.0.join(file)).ok();
        let in_stat =
            |text: String| text.lines().find_map(|line| line.strip_prefix("sock ").map(str::to_owned));
        let text = read("memory.kmem.tcp.usage_in_bytes").or_else(|| read("memory.stat").and_then(in_stat));
        text.unwrap().trim().parse().unwrap()
    }

    /// Returns the command that runs the program in this group.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new("/bin/sh");
        let join = format!("echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"", self.0.display());
        command.args(["-c", &join, env!("CARGO_BIN_EXE_tunnel")]);
        command
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

impl ServerProcess {
    pub(crate) async fn start(place: &TestDir) -> Self {
        Self::start_as(place, "", Command::new(env!("CARGO_BIN_EXE_tunnel"))).await
    }

    /// Starts a server with further tables by this command.
    pub(crate) async fn start_as(place: &TestDir, tables: &str, mut command: Command) -> Self {
        let [grpc, connect, log] = std::array::from_fn(|_| servers::addresses(1)[0]);
        let text = servers::config(place, grpc, tables);
        let text = text.replace("admin_listen = \"127.0.0.1:0\"", &format!("admin_listen = \"{log}\""));
        let any = "[server.connect]\nlisten = \"127.0.0.1:0\"";
        assert!(text.contains(any), "{text}");
        let text = text.replace(any, &format!("[server.connect]\nlisten = \"{connect}\""));
        let file = place.file("process.toml", &text);
        let child = Killed::start(command.arg("server").arg(format!("--config={}", file.display())));
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
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
    }
}
