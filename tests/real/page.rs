//! The live page in a real browser: 500 nodes, a node that links and disconnects, a session that ends, and a phone.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;
use tunnel::config::Environment;
use tunnel::registry::LinkedNode;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel_base::names::Instance;
use tunnel_link::sender::LinkSender;
use tunnel_proto::frame::{Category, Remote};
use tunnel_proto::hello::Dialect;
use tunnel_proto::state::LinkId;

use crate::parts::{free_port, have, loopback};
use crate::process::{Running, TIMEOUT};
use crate::tunnel::{Cloud as CloudProcess, TestDir};
use crate::wait::wait_until;

/// Headless Chromium, driven over two pipes by its debugging protocol.
struct Browser {
    // Fields drop in order: the process before its files.
    _process: Running,
    input: File,
    answers: mpsc::Receiver<Value>,
    page: String,
    next: u64,
    /// Errors that the page has reported.
    errors: Vec<Value>,
    _dir: TempDir,
}

impl Browser {
    fn open(url: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (input, output) = (dir.path().join("in"), dir.path().join("out"));
        assert!(Command::new("mkfifo").args([&input, &output]).status().unwrap().success());
        let line = format!(
            "exec chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
             --disable-background-networking --remote-debugging-pipe --user-data-dir={0} about:blank 3<{0}/in 4>{0}/out",
            dir.path().display()
        );
        let process = Running::start("chromium", dir.path(), Command::new("sh").arg("-c").arg(line));
        // Open the pipes in the same order as the shell: each open waits for the other end.
        let input = File::options().write(true).open(input).unwrap();
        let output = File::open(output).unwrap();
        let (send, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for message in BufReader::new(output).split(0) {
                let Ok(message) = message else { return };
                if send.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
            }
        });
        let (page, next, errors) = (String::new(), 1, Vec::new());
        let mut browser = Self { _process: process, input, answers, page, next, errors, _dir: dir };
        let target = browser.call("Target.createTarget", &json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", &json!({"targetId": target, "flatten": true}));
        browser.page = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Runtime.enable", "Log.enable", "Page.enable"] {
            browser.call(domain, &json!({}));
        }
        browser.call("Page.navigate", &json!({"url": url}));
        browser
    }

    /// Sends one request, and collects errors of the page until its response arrives.
    fn call(&mut self, method: &str, params: &Value) -> Value {
        let id = self.next;
        self.next += 1;
        let mut message = json!({"id": id, "method": method, "params": params});
        if !self.page.is_empty() {
            message["sessionId"] = json!(self.page);
        }
        self.input.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let answer =
                self.answers.recv_timeout(3 * TIMEOUT).unwrap_or_else(|_| panic!("no answer to {method}"));
            if answer["id"] == id {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            if matches!(answer["method"].as_str(), Some("Runtime.exceptionThrown" | "Log.entryAdded")) {
                self.errors.push(answer["params"].clone());
            }
        }
    }

    /// Returns the value of an expression in the page.
    fn says(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true});
        self.call("Runtime.evaluate", &params)["result"]["value"].clone()
    }

    fn shows(&mut self, what: &str, expression: &str) {
        wait_until(what, 3 * TIMEOUT, || self.says(expression) == true);
    }

    /// Like [`Self::shows`], but also prints how long it took: at most 2 s on an idle machine.
    fn shows_soon(&mut self, what: &str, expression: &str) {
        let started = Instant::now();
        wait_until(what, BUSY, || self.says(expression) == true);
        // Not by a macro: the test harness captures those, and prints them for failed tests only.
        let _ = writeln!(std::io::stderr(), "the live page shows {what} after {:?}", started.elapsed());
    }
}

/// Timeout for a change that takes at most 2 s on an idle machine.
const BUSY: Duration = Duration::from_secs(20);

/// Registers a link of a node without an edge.
fn link(server: &Server, number: u64) -> Arc<LinkSender> {
    let peer = Remote::Edge(format!("node{number:04}").parse().unwrap());
    let instance: Option<Instance> = format!("{number:032x}").parse().ok();
    let sender = LinkSender::new(LinkId(1_000_000 + number), peer, instance, Dialect::NEWEST);
    server.registry.insert(
        LinkedNode { sender: sender.clone(), instance, from: ([10, 0, 0, 1], 9).into(), ips: Arc::default() },
        false,
    );
    sender
}

#[test]
fn the_live_page_shows_500_nodes_and_their_changes() {
    if !have(&["chromium", "mkfifo"]) {
        return;
    }
    let place = TestDir::new();
    let log = free_port();
    let text = format!(
        "{}[server.connect]\nlisten = \"127.0.0.1:0\"\n",
        place.cloud_config(loopback(free_port()), log)
    );
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let server = Server::start(ServerConfig::read(&text, &Environment::default()).unwrap().0, None).unwrap();
    let _links: Vec<_> = (0..500).map(|number| link(&server, number)).collect();

    let mut browser = Browser::open(&format!("http://127.0.0.1:{log}/"));
    browser.shows("500 nodes", "document.querySelectorAll('#links tr').length === 500");
    assert_eq!(browser.says("document.getElementById('count').textContent"), "500");
    assert_eq!(browser.says("document.querySelector('#links tr td').textContent"), "node0000");

    let joined = link(&server, 777);
    browser.shows_soon(
        "a node that joins",
        "document.querySelector('#links tr:last-child td').textContent === 'node0777'",
    );
    server.registry.ended(&joined, "nothing was received for 15s");
    browser.shows("that the node has disconnected", "document.querySelectorAll('#links tr').length === 500");
    browser.shows(
        "the reason",
        "document.querySelector('#disconnected').textContent.includes('nothing was received for 15s')",
    );

    let session = server
        .table
        .open("node0001".parse().unwrap(), "node0001:22".parse().unwrap(), Category::Ssh, "10.1.2.3:4".into())
        .unwrap();
    browser.shows("the session", "document.querySelector('#sessions').textContent.includes('node0001:22')");
    drop(session);
    browser.shows_soon("a session's end", "document.querySelectorAll('#sessions tr').length === 0");

    let filter = "document.getElementById('filter')";
    browser.says(&format!("{filter}.value = 'node0042'; {filter}.dispatchEvent(new Event('input'))"));
    browser.shows(
        "the filtered node",
        "[...document.querySelectorAll('#links tr')].filter(row => row.offsetParent).length === 1",
    );
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        &json!({"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": true}),
    );
    browser.shows("a page that is not wider than the phone", "document.documentElement.scrollWidth <= 360");
    assert_eq!(browser.errors, Vec::<Value>::new(), "the page reports no errors");
    drop(browser);
    runtime.block_on(server.shutdown(std::future::ready(())));
}

#[test]
fn the_live_page_of_an_edge_shows_its_link_and_its_loss() {
    if !have(&["chromium", "mkfifo"]) {
        return;
    }
    let place = TestDir::new();
    let (mut cloud, log) = (CloudProcess::start(&place), free_port());
    let config = place.edge_config("node1", &format!("127.0.0.1:{}", cloud.grpc), log);
    let mut edge = place.tunnel(("edge", "edge"), &config, &[], &[]);
    edge.answers(log, "/readyz", "");
    let mut browser = Browser::open(&format!("http://127.0.0.1:{log}/"));
    browser.shows("the name of the node", "document.title.startsWith('edge of node1 ')");
    browser.shows("its one link", "document.querySelectorAll('#links tr').length === 1");
    assert_eq!(browser.says("document.getElementById('links-title').textContent"), "Links to the cloud");
    let linked = "document.querySelector('#links tr td:nth-child(2)')?.textContent === 'linked'";
    browser.shows("that it is linked", linked);
    cloud.process.kill();
    browser.shows("that it is not", &format!("!({linked})"));
    browser.shows(
        "that it is not ready",
        "document.getElementById('state').textContent.startsWith('not ready')",
    );
    assert_eq!(browser.errors, Vec::<Value>::new(), "the page reports no errors");
}
