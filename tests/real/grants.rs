//! Grants in an etcd and in a Secret: two servers that share nothing else follow them, also while the store fails.
#![expect(clippy::print_stdout, reason = "the times are worth reading")]

use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ChildStdin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Secret;
use serde_json::{Value, json};
use tokio::time::Instant;
use tunnel_base::policy::grants::FOR_EVER;

use crate::enrol::run_tunnel;
use crate::invitations::{allow_invitations, server, socket};
use crate::kubernetes::{Kubernetes, NAMESPACE};
use crate::parts::{are_installed, cached_program};
use crate::process::{ProcessOutput, Running, TIMEOUT, run, run_command};
use crate::publish::Etcd;
use crate::tunnel::{Edge, ServerProcess, TestDir, tunnel};
use crate::wait::{wait_for, wait_until};

/// Starts a target that returns what it receives. Returns its port.
fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for client in listener.incoming().map(Result::unwrap) {
            thread::spawn(move || std::io::copy(&mut &client, &mut &client));
        }
    });
    port
}

/// Runs a command of an operator at a server.
fn operate(place: &TestDir, server: usize, line: &str) -> ProcessOutput {
    let socket = format!("--socket={}", socket(place, server).display());
    run_tunnel(&line.split(' ').chain([socket.as_str()]).collect::<Vec<_>>())
}

/// Like [`operate`], for a command that succeeds. Returns its output.
fn operated(place: &TestDir, server: usize, line: &str) -> String {
    let output = operate(place, server, line);
    assert!(output.status.success(), "{line}: {output:?}");
    output.stdout
}

fn listed(place: &TestDir, server: usize) -> Vec<Value> {
    serde_json::from_str(&operated(place, server, "grants -o json")).unwrap()
}

/// Gives a grant, and returns its ID.
fn granted(place: &TestDir, server: usize, line: &str) -> String {
    let output = operated(place, server, line);
    output.trim_end().rsplit(' ').next().unwrap().to_owned()
}

/// Waits until a server lists this number of grants. Prints how long that took.
fn wait_for_grants(place: &TestDir, server: usize, grants: usize, since: Instant) {
    let what = format!("server {server} lists {grants} grants");
    wait_until(&what, TIMEOUT, || listed(place, server).len() == grants);
    println!("{what} after {:.2?}", since.elapsed());
}

/// Number of logins so far.
static LOGINS: AtomicUsize = AtomicUsize::new(0);

/// A login of alice: `tunnel connect` to a target that returns everything.
struct Login {
    process: Running,
    input: ChildStdin,
    sent: usize,
}

impl Login {
    /// Opens it as the user with that home, again and again until she has the right.
    fn open(place: &TestDir, home: &Path, target: &str) -> Self {
        let mut login = wait_for("alice reaches the target", TIMEOUT, || {
            let mut command = tunnel();
            command.args(["connect", target]).env("XDG_CONFIG_HOME", home);
            let name = format!("login{}", LOGINS.fetch_add(1, Relaxed));
            let (process, input) = Running::start_with_stdin(&name, place.path(), &mut command);
            let mut login = Self { process, input, sent: 0 };
            login.lives().then_some(login)
        });
        assert!(login.lives());
        login
    }

    /// Sends a line. Returns true if it comes back, and false if the login has ended.
    fn lives(&mut self) -> bool {
        self.sent += 1;
        let line = format!("line {}\n", self.sent);
        let is_sent = self.input.write_all(line.as_bytes()).is_ok();
        let ended = |login: &mut Self| login.process.log().contains("tunnel: ");
        wait_for("an answer", TIMEOUT, || match self.process.log().contains(&line) {
            _ if !is_sent || ended(self) => Some(false),
            has_come => has_come.then_some(true),
        })
    }

    /// Waits until it has ended, and checks the reason at the terminal.
    fn ends(&mut self, why: &str, since: Instant) {
        let what = format!("a login ends: {why}");
        wait_until(&what, 4 * TIMEOUT, || self.process.log().contains("tunnel: "));
        println!("{what} after {:.2?}", since.elapsed());
        assert!(self.process.log().contains(why), "{why}: {}", self.process.log());
    }
}

/// A store that can fail, and into which other programs can write.
struct Store<'a> {
    tables: &'a str,
    args: &'a [&'a str],
    most: usize,
    fails: &'a mut dyn FnMut(bool),
    write: &'a mut dyn FnMut(&[u8]),
}

/// Admits alice at one server and lets her log in at the other one. Returns her homes for both.
fn admit(place: &TestDir, servers: &[ServerProcess], port: u16) -> ([PathBuf; 2], Login) {
    let begun = Instant::now();
    let invited = operated(place, 0, &format!("invite --user alice --nodes shop-* --ports {port}"));
    let code = invited.split_whitespace().skip_while(|word| *word != "echo").nth(1).unwrap();
    let homes = [0, 1].map(|number| place.path().join(format!("home{number}")));
    let at = format!("localhost:{}", servers[1].grpc);
    let mut command = tunnel();
    command.args(["join", "--user", &at, "--invitation", code, "--device", "laptop"]);
    let joined = run_command("join", command.env("XDG_CONFIG_HOME", &homes[1]), None, TIMEOUT);
    assert!(joined.status.success(), "{joined:?}");
    let login = Login::open(place, &homes[1], &format!("shop-1:{port}"));
    println!("from invite to an open login: {:.2?}", begun.elapsed());
    assert!(
        run("cp", &["-r", homes[1].to_str().unwrap(), homes[0].to_str().unwrap()], None, TIMEOUT)
            .status
            .success()
    );
    let file = homes[0].join("tunnel/client.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(file, text.replace(&at, &format!("localhost:{}", servers[0].grpc))).unwrap();
    (homes, login)
}

fn assert_followed(place: &TestDir, store: &mut Store<'_>) {
    let mut servers = [0, 1].map(|number| server(place, number, store.tables, store.args));
    let mut edges = Vec::new();
    for (number, server) in servers.iter_mut().enumerate() {
        let node = format!("shop-{number}");
        edges.push(Edge::start_as(place, &node, &format!("localhost:{}", server.grpc)));
        server.wait_for_node(&node);
    }
    let [port, other, third] = [echo(), echo(), echo()];
    let (homes, mut login) = admit(place, &servers, port);

    // Ten at once from both: none is lost.
    let begun = Instant::now();
    thread::scope(|scope| {
        for n in 0..20 {
            scope.spawn(move || granted(place, n % 2, &format!("grant user{n} --nodes web-{n} --for ever")));
        }
    });
    println!("twenty grants at once are given after {:.2?}", begun.elapsed());
    (0..2).for_each(|server| wait_for_grants(place, server, 21, begun));

    // Revoked at the server where she is not.
    let id = listed(place, 0).into_iter().find(|one| one["user"] == "alice").unwrap()["id"].clone();
    let begun = Instant::now();
    operated(place, 0, &format!("grants revoke {}", id.as_str().unwrap()));
    login.ends(&format!("grant {} was revoked", id.as_str().unwrap()), begun);

    // One that ends while the store cannot be read, and one that does not.
    let brief = granted(place, 0, &format!("grant alice --nodes shop-* --ports {port} --for 1m"));
    let lasting = granted(place, 1, &format!("grant alice --nodes shop-0 --ports {other} --for ever"));
    let mut login = Login::open(place, &homes[1], &format!("shop-1:{port}"));
    let mut stays = Login::open(place, &homes[0], &format!("shop-0:{other}"));
    (store.fails)(true);
    let begun = Instant::now();
    for server in &mut servers {
        server.wait_for_condition("grants: cannot access the store");
    }
    for line in [&format!("grant alice --nodes shop-0 --ports {third}"), &format!("grants revoke {lasting}")]
    {
        let refused = operate(place, 0, line);
        assert!(refused.stderr.contains("cannot access the store"), "{line}: {refused:?}");
    }
    assert!(login.lives() && stays.lives(), "known grants hold");
    Login::open(place, &homes[1], &format!("shop-1:{port}"));
    login.ends(&format!("grant {brief} has expired"), begun);
    assert!(stays.lives(), "it ends for no other reason");
    (store.fails)(false);
    servers.iter_mut().for_each(ServerProcess::wait_until_healthy);
    assert!(stays.lives());
    let begun = Instant::now();
    operated(place, 1, &format!("grants revoke {lasting}"));
    stays.ends("was revoked", begun);

    // As many as the store may have.
    let grant = |n: usize| json!({ "id": format!("{n:010x}"), "user": "bob", "nodes": ["*"], "with_join_keys": false, "until": FOR_EVER, "by": "uid=0" });
    let all: Vec<_> = (1..store.most).map(grant).collect();
    (store.write)(json!({ "invitations": {}, "tokens": {}, "grants": all }).to_string().as_bytes());
    let begun = Instant::now();
    (0..2).for_each(|server| wait_for_grants(place, server, store.most - 1, begun));
    granted(place, 1, "grant carol --nodes shop-0");
    let full = operate(place, 0, "grant carol --nodes shop-1");
    let why = format!("no room for more than {} grants", store.most);
    assert!(full.status.code() == Some(69) && full.stderr.contains(&why), "{full:?}");
    operated(place, 0, "grants revoke --user bob");
    granted(place, 0, "grant carol --nodes shop-1");
    assert_eq!(listed(place, 0).len(), 2);
}

#[test]
fn two_servers_follow_grants_in_etcd_also_while_it_fails() {
    let Some(program) = cached_program("etcd-3.6.16/etcd").filter(|_| are_installed(&["curl"])) else {
        return;
    };
    let place = TestDir::new();
    let mut etcd = Etcd::start(&place, &program, false);
    let put = format!("{}/v3/kv/put", etcd.url);
    let tables = format!("store = \"etcd\"\netcd.endpoints = [\"{}\"]", etcd.url);
    let mut fails = |fails| if fails { etcd.process.kill() } else { etcd.restart(&place) };
    let mut write = |text: &[u8]| {
        let body = json!({ "key": STANDARD.encode("/tunnel/grants"), "value": STANDARD.encode(text) });
        let file = place.path().join("put");
        std::fs::write(&file, body.to_string()).unwrap();
        let output = run("curl", &["-sSf", "-d", &format!("@{}", file.display()), &put], None, TIMEOUT);
        assert!(output.status.success(), "{output:?}");
    };
    let mut store = Store { tables: &tables, args: &[], most: 10_000, fails: &mut fails, write: &mut write };
    assert_followed(&place, &mut store);
}

#[test]
fn two_servers_follow_grants_in_a_secret_also_while_kube_apiserver_fails() {
    let Some(kubernetes) = Kubernetes::start() else { return };
    let place = TestDir::new();
    if !allow_invitations(&kubernetes, &place) {
        return;
    }
    let kubernetes = std::cell::RefCell::new(kubernetes);
    let kubeconfig = format!("--kubeconfig={}", kubernetes.borrow().kubeconfig().display());
    let mut fails = |fails| {
        let mut kubernetes = kubernetes.borrow_mut();
        if fails { kubernetes.stop() } else { kubernetes.restart() }
    };
    let mut write = |text: &[u8]| {
        kubernetes.borrow().apply::<Secret>(&json!({
            "apiVersion": "v1", "kind": "Secret", "data": { "grants": STANDARD.encode(text) },
            "metadata": { "name": "tunnel-invitations", "namespace": NAMESPACE },
        }));
    };
    let args = [kubeconfig.as_str()];
    let tables = "store = \"secret\"";
    assert_followed(
        &place,
        &mut Store { tables, args: &args, most: 2_000, fails: &mut fails, write: &mut write },
    );
}
