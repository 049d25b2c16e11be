//! The live page in a real browser: 500 nodes of one and of three servers, sessions, refusals, and a phone.

use std::fs::File;
use std::io::{BufRead, BufReader, Read as _, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use base64::Engine as _;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;
use tunnel::config::Environment;
use tunnel::registry::LinkedNode;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel_link::link::Link;
use tunnel_proto::frame::{Remote, SessionCategory};
use tunnel_proto::names::Instance;
use tunnel_proto::state::LinkId;

use crate::cut::{CuttingProxy, End};
use crate::parts::{are_installed, free_port, loopback};
use crate::process::{Running, TIMEOUT};
use crate::tunnel::{Edge, ServerProcess as CloudProcess, TestDir};
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
    fn evaluate(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true});
        self.call("Runtime.evaluate", &params)["result"]["value"].clone()
    }

    /// Returns the value of a promise in the page.
    fn evaluate_promise(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        self.call("Runtime.evaluate", &params)["result"]["value"].clone()
    }

    fn wait_for_page(&mut self, what: &str, expression: &str) {
        wait_until(what, 3 * TIMEOUT, || self.evaluate(expression) == true);
    }

    /// Like [`Self::wait_for_page`], but also prints how long it took: at most 2 s on an idle machine.
    fn wait_for_page_soon(&mut self, what: &str, expression: &str) {
        let started = Instant::now();
        wait_until(what, BUSY, || self.evaluate(expression) == true);
        // Not by a macro: the test harness captures those, and prints them for failed tests only.
        let _ = writeln!(std::io::stderr(), "the live page shows {what} after {:?}", started.elapsed());
    }
}

/// Milliseconds of CPU of the page's main thread per second of a page that shows 2000 nodes, 200 of which change each
/// second.
const MAIN_THREAD_LIMIT: f64 = 150.0;
/// Seconds for which it is measured.
const MEASURED: u32 = 10;

/// Timeout for a change that takes at most 2 s on an idle machine.
const BUSY: Duration = Duration::from_secs(20);

/// Registers a link of a node without an edge.
fn link(server: &Server, number: u64) -> Arc<Link> {
    link_with_role(server, number, LinkId(1_000_000 + number), false)
}

/// The same with a number of the link, which replaces an earlier link of the node or, with `is_interactive`, does not.
fn link_with_role(server: &Server, number: u64, id: LinkId, is_interactive: bool) -> Arc<Link> {
    let peer = Remote::Edge(format!("node{number:04}").parse().unwrap());
    let instance: Option<Instance> = format!("{number:032x}").parse().ok();
    let link = Link::new(id, peer, instance);
    server
        .registry
        .insert(LinkedNode { link: link.clone(), from: ([10, 0, 0, 1], 9).into() }, is_interactive);
    link
}

#[test]
fn the_live_page_shows_500_nodes_and_their_changes() {
    if !are_installed(&["chromium", "mkfifo"]) {
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
    browser.wait_for_page("500 nodes", "document.querySelectorAll('#links tbody tr').length === 500");
    assert_eq!(browser.evaluate("document.getElementById('count').textContent"), "500");
    assert_eq!(browser.evaluate("document.querySelector('#links tbody tr td').textContent"), "node0000");

    let joined = link(&server, 777);
    browser.wait_for_page_soon(
        "a node that joins",
        "document.querySelector('#links tbody tr:last-child td').textContent === 'node0777'",
    );
    server.registry.ended(&joined, "nothing was received for 15s");
    browser.wait_for_page(
        "that the node has disconnected",
        "document.querySelector('#links tbody tr:last-child').cells[2].textContent === 'lost'",
    );
    assert_eq!(browser.evaluate("document.getElementById('count').textContent"), "500 of 501");
    assert_eq!(browser.evaluate("document.title.startsWith('(1) ')"), true);
    browser.wait_for_page("it among the problems", &has_problem("node0777 lost at "));
    browser.wait_for_page("its loss", &has_event("node0777 lost its link: nothing was received for 15s"));
    browser.wait_for_page(
        "the reason",
        "document.querySelector('#disconnected').textContent.includes('nothing was received for 15s')",
    );

    let _newer = link_with_role(&server, 5, LinkId(2_000_000), true);
    browser.wait_for_page(
        "that a node has two links",
        "document.querySelectorAll('#links tbody tr').length === 502",
    );
    assert_eq!(browser.evaluate("document.getElementById('count').textContent"), "500 of 501");

    assert_eq!(
        browser.evaluate(
            "document.querySelector('#sessions').textContent.includes('No session has an end here now.')"
        ),
        true
    );
    let session = server
        .table
        .open(
            "node0001".parse().unwrap(),
            "node0001:22".parse().unwrap(),
            SessionCategory::Ssh,
            "10.1.2.3:4".into(),
            "connect",
        )
        .unwrap();
    browser.wait_for_page(
        "the session",
        "document.querySelector('#sessions').textContent.includes('node0001:22')",
    );
    drop(session);
    browser.wait_for_page_soon(
        "a session's end",
        "document.querySelectorAll('#sessions tbody tr').length === 0",
    );

    let filter = "document.querySelector('#links input')";
    browser.evaluate(&format!("{filter}.value = 'node0042'; {filter}.dispatchEvent(new Event('input'))"));
    browser.wait_for_page("the filtered node", "document.querySelectorAll('#links tbody tr').length === 1");
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        &json!({"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": true}),
    );
    browser.wait_for_page(
        "a page that is not wider than the phone",
        "document.documentElement.scrollWidth <= 360",
    );
    browser.wait_for_page(
        "rows as cards, with the title of each value",
        "getComputedStyle(document.querySelector('#links thead')).display === 'none' \
         && getComputedStyle(document.querySelector('#links tbody tr').cells[3], '::before').content.startsWith('\"RTT')",
    );
    assert_eq!(browser.errors, Vec::<Value>::new(), "the page reports no errors");
    drop(browser);
    runtime.block_on(server.shutdown(std::future::ready(())));
}

#[test]
fn the_live_page_of_2000_nodes_leaves_the_browser_idle() {
    if !are_installed(&["chromium", "mkfifo"]) {
        return;
    }
    let place = TestDir::new();
    let log = free_port();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let text = place.cloud_config(loopback(free_port()), log);
    let server = Server::start(ServerConfig::read(&text, &Environment::default()).unwrap().0, None).unwrap();
    let _links: Vec<_> = (0..2000).map(|number| link(&server, number)).collect();
    let mut browser = Browser::open(&format!("http://127.0.0.1:{log}/"));
    browser.wait_for_page("2000 nodes", "document.querySelectorAll('#links tbody tr').length === 2000");
    // Each event also has an RTT and traffic of 200 nodes.
    browser.evaluate(
        "globalThis.events_seen = 0; const shown = tell; tell = (message, complete) => {
           for (let i = 0; i < 200; i++) {
             const n = (events_seen * 200 + i) % 2000, link = 1000000 + n;
             (message.links.set ??= []).push([String(link), { name: `node${String(n).padStart(4, '0')}`, state: 'linked', link,
               address: '10.0.0.1:9', version: '0.1.0', since: message.now - 5000 + n, rtt_seconds: 0.02 + Math.random() / 100,
               sessions: 1, sent_bytes: events_seen * 1000 + i, received_bytes: events_seen * 5000 + i }]);
           }
           events_seen++;
           shown(message, complete);
         }",
    );
    browser.call("Performance.enable", &json!({"timeDomain": "threadTicks"}));
    let mut sample = || {
        let metrics = browser.call("Performance.getMetrics", &json!({}))["metrics"].clone();
        let seconds = |name| {
            let of = |metric: &&Value| metric["name"] == name;
            metrics.as_array().unwrap().iter().find(of).unwrap()["value"].as_f64().unwrap()
        };
        (seconds("TaskDuration"), browser.evaluate("events_seen").as_u64().unwrap())
    };
    let (busy, first) = sample();
    wait_until("events", BUSY, || sample().1 >= first + u64::from(MEASURED));
    let (until, last) = sample();
    let spent = (until - busy) * 1000.0 / (last - first) as f64;
    let _ = writeln!(std::io::stderr(), "2000 nodes take {spent:.0} ms/s of the page's main thread");
    assert!(spent < MAIN_THREAD_LIMIT, "{spent:.0} ms/s");
    assert_eq!(browser.errors, Vec::<Value>::new(), "the page reports no errors");
    drop(browser);
    runtime.block_on(server.shutdown(std::future::ready(())));
}

/// Starts one of the servers with the ports `links`, called `name`: with its ports for links, operators and CONNECT.
/// The user `ops` may use both of these.
fn peer(place: &TestDir, name: &str, (own, admin, connect): (u16, u16, u16), links: &[u16]) -> Server {
    let users = place.path().join("users");
    // A second hash of the same password would end the sessions at the first server.
    if !users.exists() {
        std::fs::write(&users, format!("ops:{}\n", bcrypt::hash("right", 4).unwrap())).unwrap();
    }
    let addresses: Vec<_> = links.iter().map(|port| format!("\"127.0.0.1:{port}\"")).collect();
    let text = format!(
        "{}[server.peers]\naddresses = [{}]\n[server.connect]\nlisten = \"127.0.0.1:{connect}\"\n\
         auth = \"basic\"\nusers = {users:?}\n[server.admin]\nusers = {users:?}\n",
        place.cloud_config(loopback(own), admin),
        addresses.join(", "),
    );
    let text = text.replacen("[server.links]\n", &format!("[server.links]\nname = \"{name}\"\n"), 1);
    Server::start(ServerConfig::read(&text, &Environment::default()).unwrap().0, None).unwrap()
}

#[test]
#[ignore = "not a test: scripts/record.sh writes the README's still of the page with it"]
fn the_still_of_the_live_page() {
    let place = TestDir::new();
    let [links, admins] = [(); 2].map(|()| [(); 2].map(|()| free_port()));
    let (connect, runtime) = (free_port(), tokio::runtime::Runtime::new().unwrap());
    let _inside = runtime.enter();
    let [_eu, _us] = [("eu-1", 0, connect), ("us-1", 1, 0)]
        .map(|(name, n, clients)| peer(&place, name, (links[n], admins[n], clients), &links));
    let edge = |node, server| Edge::start_as(&place, node, &format!("127.0.0.1:{}", links[server]));
    let _edges = ["shop-berlin", "shop-lyon", "shop-turin"].map(|node| edge(node, 0));
    let _others = ["shop-austin", "shop-boston"].map(|node| edge(node, 1));
    let lost = edge("shop-porto", 0);
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = target.local_addr().unwrap().port();
    connect_as(connect, "shop-lyon", port, "ops:wrong");
    // Each session downloads until the test ends.
    std::thread::spawn(move || {
        for client in target.incoming().flatten() {
            std::thread::spawn(move || {
                let written = || (&client).write_all(&[0; 64 << 10]).is_ok();
                while written() {
                    std::thread::sleep(Duration::from_millis(40));
                }
            });
        }
    });
    for node in ["shop-berlin", "shop-lyon", "shop-lyon", "shop-turin", "shop-austin"] {
        let (client, _) = connect_as(connect, node, port, "ops:right");
        std::thread::spawn(move || std::io::copy(&mut &client, &mut std::io::sink()));
    }
    let mut browser = Browser::open(&format!("http://127.0.0.1:{}/", admins[0]));
    let size = json!({"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": false});
    browser.call("Emulation.setDeviceMetricsOverride", &size);
    browser.wait_for_page("all nodes", "document.querySelectorAll('#links tbody tr').length === 6");
    drop(lost);
    browser.wait_for_page("the loss", &has_event("shop-porto lost its link"));
    // RTTs are measured again every few seconds.
    browser.wait_for_page(
        "figures",
        "[...document.querySelectorAll('#links tbody tr')].filter(row => row.cells[3].textContent === '–').length < 2 \
         && past.down.length > 20",
    );
    let still = browser.call("Page.captureScreenshot", &json!({"format": "png"}))["data"].clone();
    let still = base64::engine::general_purpose::STANDARD.decode(still.as_str().unwrap()).unwrap();
    std::fs::write("docs/images/page.png", still).unwrap();
}

#[test]
fn the_live_page_shows_the_nodes_of_three_servers_and_who_uses_them() {
    if !are_installed(&["chromium", "mkfifo"]) {
        return;
    }
    let place = TestDir::new();
    let [links, admins] = [(); 2].map(|()| [(); 3].map(|()| free_port()));
    let (connect, runtime) = (free_port(), tokio::runtime::Runtime::new().unwrap());
    let _inside = runtime.enter();
    let servers = [0, 1, 2].map(|n| {
        let clients = if n == 0 { connect } else { 0 };
        peer(&place, &format!("s{n}"), (links[n], admins[n], clients), &links)
    });
    // 500 with the node that has an edge.
    let _links: Vec<_> =
        (0..499).map(|number| link(&servers[usize::try_from(number % 3).unwrap()], number)).collect();
    // Its first connection ends after 3 MB.
    let line = CuttingProxy::new(&[3_000_000], End::Cut);
    let _edge = Edge::start_as(&place, "edge", &format!("127.0.0.1:{}", line.start(links[0])));

    let mut browser = Browser::open(&format!("http://127.0.0.1:{}/", admins[0]));
    // The number is never shown before all servers have answered.
    let source = "globalThis.counts = []; addEventListener('DOMContentLoaded', () => new MutationObserver(() => \
                  counts.push(by('count').textContent)).observe(by('count'), { childList: true }))";
    browser.call("Page.addScriptToEvaluateOnNewDocument", &json!({"source": source}));
    browser.call("Page.reload", &json!({}));
    browser.wait_for_page("the first number", "globalThis.counts?.length > 0");
    assert_eq!(browser.evaluate("counts[0]"), "500");
    let rows = "document.querySelectorAll('#links tbody tr')";
    browser.wait_for_page("the nodes of all servers", &format!("{rows}.length === 500"));
    browser.wait_for_page("their number", "document.getElementById('count').textContent === '500'");
    let others = format!("[...{rows}].filter(row => row.cells[1].textContent !== 's0').length");
    assert_eq!(browser.evaluate(&others), 332);
    // A node that moves has a link to two servers until the older one is closed. It is neither listed twice, nor
    // missing.
    let moved = link(&servers[1], 0);
    let here = format!(
        "[...{rows}].filter(row => row.textContent.startsWith('node0000')).map(row => row.cells[1].textContent)"
    );
    browser.wait_for_page("the moved node once", &format!("elsewhere(), {here}.join() === 's1'"));
    browser.wait_for_page("its move", &has_event("node0000 moved to s1"));
    assert_eq!(browser.evaluate("document.getElementById('count').textContent"), "500");
    let left = servers[0].registry.link_of(&"node0000".parse().unwrap()).unwrap();
    servers[0].registry.ended(&left.link, "closed");
    browser.wait_for_page("its one link", "tables.disconnected.rows.has('node0000')");
    let lost = "document.querySelectorAll('#disconnected tbody tr').length";
    assert_eq!(browser.evaluate(lost), 0);
    assert_eq!(browser.evaluate("document.getElementById('count').textContent"), "500");
    servers[1].registry.ended(&moved, "closed");
    browser.wait_for_page("that it is missing", &format!("elsewhere(), {lost} === 1"));
    browser.wait_for_page("the problem", &has_problem("node0000 lost at "));
    let _back = link(&servers[0], 0);
    browser.wait_for_page("the node that is back", &format!("{here}.join() === 's0'"));
    browser.wait_for_page("that it is no problem", &format!("!({})", has_problem("node0000 lost at ")));
    assert_eq!(browser.evaluate("document.title"), "s0: server");
    let peers = "[...document.querySelectorAll('#peers tbody tr')].map(row => row.cells[0].textContent + row.cells[6].textContent)";
    browser.wait_for_page("the peers", &format!("{peers}.join() === 's1166,s2166'"));

    // Sorting: by the server's name, and back in the other direction.
    let first = "document.querySelector('#links tbody tr').cells[0].textContent";
    let click = |title: &str| {
        format!(
            "[...document.querySelectorAll('#links th button')].find(b => b.textContent === '{title}').click()"
        )
    };
    assert_eq!(browser.evaluate(first), "edge");
    browser.evaluate(&click("Name"));
    assert_eq!(browser.evaluate(first), "node0498");
    browser.evaluate(&click("Server"));
    let second = "[...document.querySelectorAll('#links tbody tr')].map(row => row.cells[1].textContent)";
    assert_eq!(browser.evaluate(&format!("(s => s.join() === s.toSorted().join())({second})")), true);
    // Only one node has an RTT. It comes first in both directions.
    browser.wait_for_page("its RTT", "[...tables.links.rows.values()].some(row => row.rtt_seconds)");
    for direction in ["ascending", "descending"] {
        browser.evaluate(&click("RTT"));
        assert_eq!(browser.evaluate(first), "edge", "{direction}");
    }
    let without_bytes = "[...tables.links.rows.values()].filter(row => !('sent_bytes' in row && 'received_bytes' in row)).length";
    assert_eq!(browser.evaluate(without_bytes), 0);

    // A session with a user, which resumes once; a refused one.
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = target.local_addr().unwrap().port();
    let refused = connect_as(connect, "edge", port, "ops:wrong");
    assert!(refused.1.starts_with("HTTP/1.1 407 "), "{}", refused.1);
    let (mut client, head) = connect_as(connect, "edge", port, "ops:right");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let mut served = target.accept().unwrap().0;
    std::thread::spawn(move || {
        let _ = served.write_all(&vec![7; 6_000_000]);
        // Until the client leaves.
        let _ = served.read(&mut [0]);
    });
    client.read_exact(&mut vec![0; 6_000_000]).unwrap();
    let row = "[...document.querySelector('#sessions tbody tr')?.cells || []].map(cell => cell.textContent)";
    let address = client.local_addr().unwrap();
    browser.wait_for_page("the resumed session", &format!("{row}[9] === '1'"));
    let cells = browser.evaluate(row);
    assert_eq!(
        (&cells[1], &cells[2], &cells[3], &cells[4], &cells[5]),
        (
            &json!("edge"),
            &json!(format!("edge:{port}")),
            &json!("ops"),
            &json!(address.to_string()),
            &json!("connect")
        ),
        "{cells}"
    );
    let filter = "document.querySelector('#sessions input')";
    let sessions = "document.querySelectorAll('#sessions tbody tr').length";
    for (text, count) in [("nobody", 0), ("OPS", 1)] {
        browser.evaluate(&format!("{filter}.value = '{text}'; {filter}.dispatchEvent(new Event('input'))"));
        assert_eq!(browser.evaluate(sessions), count, "{text}");
    }
    browser.wait_for_page("that it has resumed", &has_event("1 session resumed"));
    browser.wait_for_page(
        "the refusal as a problem",
        &has_problem("1 refusal in the last hour: 1 credentials_invalid"),
    );
    details_of_a_node(&mut browser, port);
    // Only a user who proves a name ends a session.
    let basic = json!({"Authorization": format!("Basic {}", base64::engine::general_purpose::STANDARD.encode("ops:right"))});
    browser.call("Network.enable", &json!({}));
    browser.call("Network.setExtraHTTPHeaders", &json!({"headers": basic}));
    browser.evaluate("confirm = () => true, document.querySelector('#sessions .end').click()");
    browser.wait_for_page("the session's end", &format!("{sessions} === 0"));
    assert!(client.read(&mut [0]).is_err(), "its client is reset");
    browser.call("Network.setExtraHTTPHeaders", &json!({"headers": {}}));
    browser.wait_for_page(
        "the refusal",
        "[...document.querySelectorAll('#refusals tbody tr')].some(row => row.textContent === 'credentials_invalid1')",
    );
    browser.wait_for_page(
        "when the certificate expires",
        "[...document.querySelectorAll('#certificates tbody tr')].some(row => row.textContent.startsWith('server.links.cert20'))",
    );
    assert_eq!(
        browser.evaluate("document.getElementById('publisher').textContent"),
        "publishes no nodes in DNS"
    );
    for path in ["metrics", "readyz", "status"] {
        let status = browser.evaluate_promise(&format!(
            "fetch(document.querySelector('nav a[href={path}]').href).then(r => r.status)"
        ));
        assert_eq!(status, 200, "{path}");
    }
    browser.evaluate(&click("Name"));
    browser.evaluate(&click("Name"));
    rows_stay_in_place(&mut browser, &servers[0]);

    // More nodes than a browser lays out each second; then no other servers.
    browser.evaluate(
        "fetch = async () => ({ json: async () => ({ servers: [{ name: 'own' }], \
         nodes: [...Array(7000).keys()].map(n => ({ name: `other${n}`, server: 'peer', since: 0 })) }) })",
    );
    browser.evaluate("input.value = ''; input.dispatchEvent(new Event('input')); elsewhere()");
    browser.wait_for_page("as many nodes as it can", &format!("{rows}.length === 2000"));
    browser.wait_for_page(
        "the number of all",
        "document.getElementById('count').textContent === '7168 of 7169'",
    );
    let alone = format!("take('peers', [], [...tables.peers.rows.keys()]); elsewhere(); {others}");
    assert_eq!(browser.evaluate(&alone), 0);
    assert_eq!(browser.errors, Vec::<Value>::new(), "the page reports no errors");
    drop((browser, client));
    for server in servers {
        runtime.block_on(server.shutdown(std::future::ready(())));
    }
}

/// Returns an expression that is true if an event of the page has this text.
fn has_event(text: &str) -> String {
    format!("document.getElementById('events').textContent.includes('{text}')")
}

/// The same for a problem.
fn has_problem(text: &str) -> String {
    format!("document.getElementById('problems').textContent.includes('{text}')")
}

/// Opens the node of a session to that port, whose link was cut.
fn details_of_a_node(browser: &mut Browser, port: u16) {
    let dialog = "document.getElementById('node')";
    let open = "[...document.querySelectorAll('#links tbody button')].find(button => button.textContent === 'edge').click()";
    browser.evaluate(open);
    assert_eq!(
        browser.evaluate(&format!("{dialog}.open && document.getElementById('node-name').textContent")),
        "edge"
    );
    assert_eq!(browser.evaluate(&format!("{dialog}.textContent.includes('edge:{port}')")), true);
    assert_eq!(browser.evaluate("document.querySelectorAll('#nodeDrops tbody tr').length > 0"), true);
    // A test has no clipboard.
    browser.evaluate(
        "globalThis.copied = ''; Object.defineProperty(navigator, 'clipboard', { value: { writeText: async text => { copied = text } } }); \
         document.querySelector('#copy button').click()",
    );
    browser.wait_for_page("the command that is copied", "copied === 'tunnel ssh edge'");
    browser.evaluate("document.getElementById('close').click()");
    browser.wait_for_page("that it is closed", &format!("!{dialog}.open"));
}

/// Checks that order, filter, position and rows remain while a node links, and while the page is hidden. The table of
/// nodes is sorted by name, in descending order.
fn rows_stay_in_place(browser: &mut Browser, server: &Server) {
    browser.evaluate(
        "globalThis.input = document.querySelector('#links input'); input.value = 'node04'; \
         input.dispatchEvent(new Event('input'))",
    );
    browser.evaluate("globalThis.box = document.querySelector('#links .table'); box.scrollTop = 400");
    browser.evaluate("void (globalThis.row = document.querySelector('#links tbody tr:nth-child(20)'))");
    let unchanged = |first: &str| {
        format!(
            "box.scrollTop === 400 && row.isConnected && input.value === 'node04' \
             && document.querySelector('#links th[aria-sort=descending]').textContent === 'Name' \
             && document.querySelector('#links tbody tr').cells[0].textContent === '{first}'"
        )
    };
    assert_eq!(browser.evaluate(&unchanged("node0498")), true);
    let joined = link(server, 499);
    browser.wait_for_page("a node that joins, in its place", &unchanged("node0499"));

    let hide = |hidden: bool| {
        format!(
            "Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }}); \
             document.dispatchEvent(new Event('visibilitychange'))"
        )
    };
    browser.evaluate(&hide(true));
    browser.evaluate(
        "globalThis.fetched = 0; const request = fetch; fetch = path => { fetched++; return request(path) }; elsewhere()",
    );
    assert_eq!(browser.evaluate("events === null && fetched === 0"), true, "a hidden page requests nothing");
    server.registry.ended(&joined, "closed");
    browser.evaluate(&hide(false));
    let lost = format!(
        "{} && document.querySelector('#links tbody tr').cells[2].textContent === 'lost'",
        unchanged("node0499")
    );
    browser.wait_for_page("the change while it was hidden", &lost);
    browser.wait_for_page("a request for the nodes of other servers", "fetched > 0");
}

/// Sends CONNECT to a port of a node. Returns the connection and the response's head.
fn connect_as(proxy: u16, node: &str, port: u16, login: &str) -> (TcpStream, String) {
    let mut client = TcpStream::connect(("127.0.0.1", proxy)).unwrap();
    let login = base64::engine::general_purpose::STANDARD.encode(login);
    write!(
        client,
        "CONNECT {node}:{port} HTTP/1.1\r\nHost: {node}:{port}\r\nProxy-Authorization: Basic {login}\r\n\r\n"
    )
    .unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    (client, String::from_utf8(head).unwrap())
}

#[test]
fn the_live_page_of_an_edge_shows_its_link_and_its_loss() {
    if !are_installed(&["chromium", "mkfifo"]) {
        return;
    }
    let place = TestDir::new();
    let (mut cloud, log) = (CloudProcess::start(&place), free_port());
    let config = place.edge_config("node1", &format!("127.0.0.1:{}", cloud.grpc), log);
    let mut edge = place.tunnel(("edge", "edge"), &config, &[], &[]);
    edge.wait_for_answer(log, "/readyz", "");
    let mut browser = Browser::open(&format!("http://127.0.0.1:{log}/"));
    browser.wait_for_page("the name of the node", "document.title.endsWith(': edge of node1')");
    browser.wait_for_page("its one link", "document.querySelectorAll('#links tbody tr').length === 1");
    assert_eq!(
        browser.evaluate("document.querySelector('#links h2').firstChild.textContent"),
        "Links to servers"
    );
    let linked = "document.querySelector('#links tbody tr td:nth-child(3)')?.textContent === 'linked'";
    browser.wait_for_page("that it is linked", linked);
    cloud.process.kill();
    browser.wait_for_page("that it is not", &format!("!({linked})"));
    browser.wait_for_page(
        "that it is not ready",
        "document.getElementById('state').textContent.startsWith('not ready')",
    );
    assert_eq!(browser.errors, Vec::<Value>::new(), "the page reports no errors");
    edge.kill();
    browser.wait_for_page(
        "that its figures are old",
        "document.body.className.includes('stale') \
         && document.getElementById('state').textContent.startsWith('no answer since 20')",
    );
}
