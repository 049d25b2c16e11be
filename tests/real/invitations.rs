//! Machines join by invitation at servers that share a store: a file, an etcd or a Secret.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::enrol::{run_tunnel, with_admin};
use crate::fleet::Line;
use crate::parts::{are_installed, cached_program, free_port, loopback};
use crate::process::{ProcessOutput, Running, TIMEOUT, run, run_command};
use crate::publish::Etcd;
use crate::tunnel::{ServerProcess, TestDir, tunnel};
use crate::wait::{wait_for, wait_until};

/// Starts a server that keeps invitations in `store`.
pub(crate) fn server(place: &TestDir, number: usize, store: &str, args: &[&str]) -> ServerProcess {
    let name = format!("pod{number}");
    let more = format!(
        "[server.admin]\nlisten = \"unix:{}\"\n[server.invitations]\n{store}\n",
        socket(place, number).display()
    );
    let env = [("POD_NAMESPACE", "edge-system")];
    let mut server = ServerProcess::launch(place, (&name, loopback(free_port())), &more, &env, args);
    server.ready();
    server
}

pub(crate) fn socket(place: &TestDir, server: usize) -> PathBuf {
    place.path().join(format!("pod{server}.sock"))
}

/// Requests an invitation for that node from a server, repeatedly until it succeeds, and returns the code.
fn invited(place: &TestDir, server: usize, node: &str) -> String {
    let socket = format!("--socket={}", socket(place, server).display());
    wait_for("a server creates an invitation", TIMEOUT, || {
        let output = run_tunnel(&["invite", "--node", node, "--expires", "1h", &socket]);
        let line = output.stdout.lines().map(str::trim).find(|line| line.starts_with("echo "))?;
        line.split_whitespace().nth(1).map(str::to_owned)
    })
}

fn join(cloud: &str, code: &str, to: &Path) -> ProcessOutput {
    run_tunnel(&["join", cloud, "--invitation", code, "--install-dir", to.to_str().unwrap()])
}

/// Starts the edge that has joined, with the known port or another one.
fn start(place: &TestDir, to: &Path, (joined_port, port): (u16, u16), env: &[(&str, &str)]) -> Running {
    let log = free_port();
    let text = std::fs::read_to_string(to.join("edge.toml")).unwrap();
    let text = with_admin(&text, log).replace(&format!(":{joined_port}"), &format!(":{port}"));
    let config = format!("--config={}", place.config("joined", &text).display());
    let mut command = tunnel();
    command.args(["edge", &config]).envs(env.iter().copied());
    let mut edge = Running::start("joined", place.path(), &mut command);
    edge.wait_for_answer(log, "/readyz", "");
    edge
}

/// Ten machines use one invitation at once, at three servers. One joins, and all servers accept it; the others read
/// why they failed.
fn race(place: &TestDir, store: &str, args: &[&str]) {
    let mut servers: Vec<_> = (0..3).map(|number| server(place, number, store, args)).collect();
    let code = invited(place, 0, "edge7");
    let ports: Vec<_> = servers.iter().map(|server| server.grpc).collect();
    let to = |number: usize| place.path().join(format!("etc{number}"));
    let outputs: Vec<_> = thread::scope(|scope| {
        let racing: Vec<_> = (0..10)
            .map(|number| {
                let (cloud, code, to) = (format!("localhost:{}", ports[number % 3]), &code, to(number));
                scope.spawn(move || join(&cloud, code, &to))
            })
            .collect();
        racing.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let winners: Vec<_> = (0..10).filter(|number| outputs[*number].status.success()).collect();
    assert_eq!(winners.len(), 1, "{outputs:?}");
    for (number, outputs) in outputs.iter().enumerate().filter(|(number, _)| *number != winners[0]) {
        assert_eq!(outputs.status.code(), Some(77), "{outputs:?}");
        assert!(outputs.stderr.contains("has been used already"), "{outputs:?}");
        assert!(!to(number).exists(), "a machine that has not joined has no files");
    }
    let joined_port = ports[winners[0] % 3];
    for server in &mut servers {
        let mut edge = start(place, &to(winners[0]), (joined_port, server.grpc), &[]);
        server.wait_for_node("edge7");
        edge.terminate();
        edge.wait_for_exit(TIMEOUT);
    }
    let key = race_by_key(place, &ports);
    let logs: String = servers.iter().map(|server| server.process.log()).collect();
    assert_eq!(logs.matches("node joined by invitation").count(), 1 + USES, "{logs}");
    assert!(!logs.contains(&code) && !logs.contains(&key), "the log must not contain secrets");
}

/// More machines than a key admits join by it at once, at the servers with these ports. As many join as it admits.
fn race_by_key(place: &TestDir, ports: &[u16]) -> String {
    let socket = format!("--socket={}", socket(place, 0).display());
    let uses = format!("--uses={USES}");
    let made = run_tunnel(&["invite", "--nodes=shop-*", &uses, "--expires=1d", "-o=json", &socket]);
    let made: serde_json::Value = serde_json::from_str(&made.stdout).unwrap();
    let key = made["code"].as_str().unwrap();
    let outputs: Vec<_> = thread::scope(|scope| {
        let racing: Vec<_> = (0..USES + 5)
            .map(|number| {
                let cloud = format!("localhost:{}", ports[number % ports.len()]);
                let to = place.path().join(format!("shop-{number}")).display().to_string();
                let node = format!("--node=shop-{number}");
                let line = [
                    "join".into(),
                    cloud,
                    "--invitation".into(),
                    key.into(),
                    node,
                    "--install-dir".into(),
                    to,
                ];
                scope.spawn(move || run_tunnel(&line.each_ref().map(String::as_str)))
            })
            .collect();
        racing.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let (joined, refused): (Vec<_>, Vec<_>) = outputs.iter().partition(|output| output.status.success());
    assert_eq!(joined.len(), USES, "{outputs:?}");
    assert!(refused.iter().all(|output| output.stderr.contains("and as many have joined")), "{refused:?}");
    key.to_owned()
}

/// Number of nodes that the key admits.
const USES: usize = 25;

#[test]
fn one_of_ten_concurrent_joins_at_three_servers_with_a_file_succeeds() {
    let place = TestDir::new();
    let file = place.path().join("enrolled");
    race(&place, &format!("store = \"file\"\nfile = {file:?}"), &[]);
}

#[test]
fn one_of_ten_concurrent_joins_at_three_servers_with_etcd_succeeds() {
    let Some(program) = cached_program("etcd-3.6.16/etcd") else { return };
    let place = TestDir::new();
    let etcd = Etcd::start(&place, &program, false);
    race(&place, &format!("store = \"etcd\"\netcd.endpoints = [\"{}\"]", etcd.url), &[]);
}

#[test]
fn one_of_ten_concurrent_joins_at_three_servers_with_a_secret_succeeds() {
    let Some(kubernetes) = crate::kubernetes::Kubernetes::start() else { return };
    let place = TestDir::new();
    if allow_invitations(&kubernetes, &place) {
        race(&place, "store = \"secret\"", &[&format!("--kubeconfig={}", kubernetes.kubeconfig().display())]);
    }
}

/// Gives the servers the rights of the component in deploy/kustomize, and no others. Returns false without kubectl.
pub(crate) fn allow_invitations(kubernetes: &crate::kubernetes::Kubernetes, place: &TestDir) -> bool {
    let Some(kubectl) = cached_program("kubernetes-1.36.3/kubectl") else { return false };
    let component = "deploy/kustomize/components/invitations/kustomization.yaml";
    let component = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(component)).unwrap();
    let rules: Vec<_> = component.lines().filter_map(|line| line.trim().strip_prefix("value: ")).collect();
    assert_eq!(rules.len(), 2, "{component}");
    let role = format!(
        "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n\
         metadata: {{ name: tunnel-invitations, namespace: edge-system }}\nrules:\n- {}\n",
        rules.join("\n- ")
    );
    let binding = "---\napiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\n\
                   metadata: { name: tunnel-invitations, namespace: edge-system }\n\
                   roleRef: { apiGroup: rbac.authorization.k8s.io, kind: Role, name: tunnel-invitations }\n\
                   subjects:\n- { apiGroup: rbac.authorization.k8s.io, kind: User, name: pod }\n";
    let file = place.path().join("role.yaml");
    std::fs::write(&file, format!("{role}{binding}")).unwrap();
    let mut command = std::process::Command::new(kubectl);
    command.arg("--kubeconfig").arg(kubernetes.admin()).args(["apply", "-f"]).arg(&file);
    let output = run_command("kubectl", &mut command, None, TIMEOUT);
    assert!(output.status.success(), "{output:?}");
    true
}

/// A server's connection to etcd that stalls for good once the server writes about a node.
struct StallingProxy {
    port: u16,
    stands_still: mpsc::Receiver<()>,
}

impl StallingProxy {
    /// The write that stalls it arrives or not; its response never does.
    fn to(etcd: SocketAddr, node: &'static str, arrives: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (write_signal, stands_still) = mpsc::channel();
        thread::spawn(move || {
            for near in listener.incoming() {
                let (near, write_signal, is_still) =
                    (near.unwrap(), write_signal.clone(), Arc::new(AtomicBool::new(false)));
                let far = TcpStream::connect(etcd).unwrap();
                let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let stands = is_still.clone();
                thread::spawn(move || {
                    let mut all = Vec::new();
                    carry(&mut from, |piece| {
                        all.extend_from_slice(piece);
                        let names_node = all.windows(node.len()).any(|part| part == node.as_bytes());
                        let first = names_node && !stands.swap(names_node, SeqCst);
                        if !names_node || first && arrives {
                            to.write_all(piece).unwrap_or_default();
                        }
                        if first {
                            let _ = write_signal.send(());
                        }
                    });
                });
                let (mut from, mut to) = (far, near);
                thread::spawn(move || {
                    carry(&mut from, |piece| {
                        if !is_still.load(SeqCst) {
                            to.write_all(piece).unwrap_or_default();
                        }
                    });
                });
            }
        });
        Self { port, stands_still }
    }
}

/// Reads until the end, and passes each piece to `with`.
fn carry(from: &mut TcpStream, mut with: impl FnMut(&[u8])) {
    let mut space = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut space) {
        with(&space[..read]);
    }
}

/// Waits until the store contains that an invitation was used.
fn wait_until_used(etcd: &Etcd) {
    let key = format!("{{\"key\": \"{}\"}}", STANDARD.encode("/tunnel/enrolled"));
    let url = format!("{}/v3/kv/range", etcd.url);
    wait_until("the store contains the used invitation", TIMEOUT, || {
        let output = run("curl", &["-sSf", "-d", &key, &url], None, TIMEOUT);
        let answer: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
        let value = STANDARD.decode(answer["kvs"][0]["value"].as_str().unwrap_or_default()).unwrap();
        String::from_utf8(value).unwrap().contains("used_for")
    });
}

/// The server at which a machine joins is killed while it writes that to the store: before and after the write
/// arrives, with and without another server behind the same name.
#[test]
fn a_join_continues_at_another_server_if_its_server_is_killed_in_a_write() {
    let Some(program) = cached_program("etcd-3.6.16/etcd").filter(|_| are_installed(&["curl"])) else {
        return;
    };
    for (arrives, has_another) in [(false, true), (true, true), (true, false)] {
        let place = TestDir::new();
        let etcd = Etcd::start(&place, &program, false);
        let store = |url: &str| format!("store = \"etcd\"\netcd.endpoints = [\"{url}\"]");
        let mut other = server(&place, 1, &store(&etcd.url), &[]);
        let code = invited(&place, 1, "edge9");
        let at: SocketAddr = etcd.url.trim_start_matches("http://").parse().unwrap();
        let way = StallingProxy::to(at, "edge9", arrives);
        let mut dying = server(&place, 0, &store(&format!("http://127.0.0.1:{}", way.port)), &[]);
        let line = Line::to(loopback(dying.grpc));
        let (cloud, to) = (format!("localhost:{}", line.port), place.path().join("etc"));
        let output = thread::scope(|scope| {
            let joining = scope.spawn(|| join(&cloud, &code, &to));
            way.stands_still.recv_timeout(TIMEOUT).expect("the server did not write");
            if arrives {
                wait_until_used(&etcd);
            }
            line.lead_to(loopback(if has_another { other.grpc } else { 1 }));
            dying.process.kill();
            joining.join().unwrap()
        });
        if !has_another {
            assert_eq!(output.status.code(), Some(69), "{output:?}");
            assert!(output.stderr.contains("run the same command again to continue"), "{output:?}");
            line.lead_to(loopback(other.grpc));
        }
        let output = if has_another { output } else { join(&cloud, &code, &to) };
        assert!(output.status.success() && output.stdout.starts_with("edge9 has joined"), "{output:?}");
        let _edge = start(&place, &to, (line.port, line.port), &[]);
        other.wait_for_node("edge9");
        let second = join(&cloud, &code, &place.path().join("second"));
        assert!(second.status.code() == Some(77) && second.stderr.contains("used already"), "{second:?}");
    }
}

/// Starts an HTTP proxy that resolves every name to this machine. Also returns the requested targets.
fn proxy() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, targets) = (listener.local_addr().unwrap().port(), Arc::new(Mutex::new(Vec::new())));
    let noted = targets.clone();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut head) = (client.unwrap(), Vec::new());
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                client.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            let head = String::from_utf8(head).unwrap();
            let target =
                head.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
            let port: u16 = target.rsplit(':').next().unwrap().parse().unwrap();
            noted.lock().unwrap().push(target);
            let far = TcpStream::connect(loopback(port)).unwrap();
            client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            for (from, to) in [(&client, &far), (&far, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || {
                    carry(&mut from, |piece| to.write_all(piece).unwrap_or_default());
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    (port, targets)
}

#[test]
fn a_machine_behind_a_proxy_joins_and_links_only_through_it() {
    let place = TestDir::new();
    let store = format!("store = \"file\"\nfile = {:?}", place.path().join("enrolled"));
    let mut cloud = server(&place, 0, &store, &[]);
    let (code, to) = (invited(&place, 0, "edge7"), place.path().join("etc"));
    // A name that only the proxy resolves.
    let at = format!("tunnel.test:{}", cloud.grpc);
    let joins = |env: &[(&str, &str)]| {
        let mut command = tunnel();
        command
            .args(["join", &at, "--invitation", &code, "--install-dir"])
            .arg(&to)
            .envs(env.iter().copied());
        run_command("join", &mut command, None, 2 * TIMEOUT)
    };
    let dead_proxy = format!("http://127.0.0.1:{}", free_port());
    let no_proxy = joins(&[("HTTPS_PROXY", &dead_proxy)]);
    assert_eq!(no_proxy.status.code(), Some(69), "{no_proxy:?}");
    assert!(no_proxy.stderr.contains(dead_proxy.trim_start_matches("http://")), "{no_proxy:?}");
    let (port, targets) = proxy();
    let env = [("HTTPS_PROXY", format!("http://127.0.0.1:{port}"))];
    let env = env.each_ref().map(|(name, value)| (*name, value.as_str()));
    let joined = joins(&env);
    assert!(joined.status.success(), "{joined:?}");
    let _edge = start(&place, &to, (cloud.grpc, cloud.grpc), &env);
    cloud.wait_for_node("edge7");
    let targets = targets.lock().unwrap();
    assert!(targets.len() >= 3 && targets.iter().all(|target| *target == at), "{targets:?}");
}
