use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::ArcSwap;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tracing_subscriber::layer::SubscriberExt;

use crate::admin::page::UserFuture;
use crate::admin::readiness::ReadinessCondition;
use crate::admin::server::ServerAdmin;
use crate::admin::status::{LinkStatus, StatusResponse};
use crate::paths::uplinks::Uplinks;
use crate::registry::{Finder, LinkedNode, Registry};
use tunnel_base::drain::Drained;
use tunnel_base::policy::grants::Rights;
use tunnel_link::link::Link;
use tunnel_link::table::SessionLimits;
use tunnel_net::limiter::{PermitLimits, Source};
use tunnel_proto::frame::Remote;
use tunnel_proto::halves::WindowLimits;
use tunnel_proto::names::{Instance, NodeName};
use tunnel_proto::state::LinkId;

use super::*;
use crate::admin;
use http::header::HOST;
use http::{HeaderMap, HeaderValue};

fn cloud(nodes: &[&str]) -> AdminContext {
    let registry = Registry::new(Metrics::server("", ""));
    for (number, node) in (1..).zip(nodes) {
        let peer = Remote::Edge(node.parse().unwrap());
        let link = Link::new(LinkId(number), peer, Some(Instance::random()));
        registry.insert(LinkedNode { link, from: ([10, 0, 0, 1], 5).into() }, false);
    }
    admin(Arc::new(ServerAdmin {
        finder: Finder::without_peers(registry, Instance::from_bits(7)),
        name: "eu-1".parse().ok(),
        max_links: 400,
        publishes: Arc::new(ArcSwap::from_pointee(Some("hosts"))),
        enrolment: Default::default(),
        rights: Arc::new(Rights::default),
        port: 9000,
    }))
}

fn edge(linked: bool) -> AdminContext {
    let node: NodeName = "node1".parse().unwrap();
    let uplinks = Uplinks::new(node.clone());
    if linked {
        uplinks.add(Link::new(LinkId(1), Remote::Server(node), Some(Instance::random())));
    }
    admin(uplinks)
}

fn table() -> Arc<SessionTable> {
    let windows = WindowLimits { start: 1024, max: 1024 };
    let limits = SessionLimits {
        windows,
        memory: 1 << 20,
        sessions: 9,
        resume_timeout: Duration::ZERO,
        max_resume_timeout: Duration::ZERO,
    };
    SessionTable::new(Instance::from_bits(7 << 96), limits, Metrics::edge())
}

fn admin(process: Arc<dyn AdminProcess>) -> AdminContext {
    AdminContext {
        process,
        table: table(),
        judged: JudgedSessions::default(),
        metrics: Metrics::server("ns", "pod"),
        readiness: Readiness::waiting_for(&["link"]),
        level: None,
        level_at_ports: true,
        clock: WallClock::now(),
        viewers: None,
        streams: FairLimiter::new(STREAMS),
        planner: ConfigPlanner::default(),
    }
}

/// Sends a request over a real connection. Returns the status and the body.
async fn ask(admin: &AdminContext, port: AdminPortKind, request: &str) -> (u16, String) {
    ask_as(admin, port, "127.0.0.1", request).await
}

/// Like [`ask`], but with this Host.
async fn ask_as(admin: &AdminContext, port: AdminPortKind, host: &str, request: &str) -> (u16, String) {
    let listener = TcpListenSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = listener.at();
    let drain = Drain::new();
    let client = async {
        let mut socket = TcpStream::connect(at).await.unwrap();
        let (line, body) = request.split_once('|').unwrap_or((request, ""));
        let length = body.len();
        let head = format!(
            "{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        socket.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        drain.start();
        answer
    };
    let (answer, ()) = tokio::join!(client, serve(listener, None, admin.clone(), port, drain.clone()));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn superedges_healthz_paths_answer_as_superedge_does() {
    let two = cloud(&["a", "b"]);
    let (status, list) = ask(&two, AdminPortKind::All, "GET /cloud/healthz").await;
    assert!(status == 200 && ["[a b]\n", "[b a]\n"].contains(&&*list), "{status}: {list}");
    assert_eq!(ask(&cloud(&[]), AdminPortKind::All, "GET /cloud/healthz").await, (200, "[]\n".into()));
    let (status, body) = ask(&two, AdminPortKind::All, "POST /cloud/healthz").await;
    assert_eq!((status, body.as_str()), (405, "only supports GET method\n"));
    assert_eq!(ask(&two, AdminPortKind::All, "GET /edge/healthz").await.0, 404);
    for (linked, status) in [(true, 200), (false, 500)] {
        let edge = edge(linked);
        assert_eq!(ask(&edge, AdminPortKind::All, "GET /edge/healthz").await, (status, String::new()));
        assert_eq!(ask(&edge, AdminPortKind::All, "PUT /edge/healthz").await.0, 405);
    }
}

#[tokio::test]
async fn readyz_reports_each_failed_condition_with_its_reason() {
    let admin = cloud(&[]);
    assert_eq!(ask(&admin, AdminPortKind::All, "GET /livez").await, (200, "ok\n".into()));
    assert_eq!(ask(&admin, AdminPortKind::All, "GET /readyz").await, (503, "link: not yet\n".into()));
    admin.readiness.set("link", Err("the cloud refused our token".into()));
    admin.readiness.set("drain", Err("stopping".into()));
    let (status, body) = ask(&admin, AdminPortKind::Metrics, "GET /readyz").await;
    assert_eq!((status, body.as_str()), (503, "drain: stopping\nlink: the cloud refused our token\n"));
    admin.readiness.set("link", Ok(()));
    admin.readiness.set("drain", Ok(()));
    assert_eq!(ask(&admin, AdminPortKind::Metrics, "GET /readyz").await, (200, "ok\n".into()));
    admin.readiness.set_degraded("dns", Err("etcd is away".into()));
    let (status, body) = ask(&admin, AdminPortKind::All, "GET /readyz").await;
    assert_eq!((status, body.as_str()), (200, "ok\ndns: etcd is away\n"));
    admin.readiness.set("link", Err("gone".into()));
    let (status, body) = ask(&admin, AdminPortKind::All, "GET /readyz").await;
    assert_eq!((status, body.as_str()), (503, "dns: etcd is away\nlink: gone\n"));
    admin.readiness.set("link", Ok(()));
    admin.readiness.set_degraded("dns", Ok(()));
    assert_eq!(ask(&admin, AdminPortKind::Metrics, "GET /readyz").await, (200, "ok\n".into()));
    assert_eq!(ask(&admin, AdminPortKind::Metrics, "DELETE /readyz").await.0, 405);
}

#[tokio::test]
async fn metrics_are_on_both_ports_and_other_pages_on_the_admin_port_only() {
    let admin = cloud(&[]);
    for port in [AdminPortKind::All, AdminPortKind::Metrics] {
        let (status, body) = ask(&admin, port, "GET /metrics").await;
        assert!(
            status == 200 && body.contains("# TYPE tunnel_cloud_nodes gauge\n") && !body.contains("EOF"),
            "{body}"
        );
    }
    for path in ["/cloud/healthz", "/debug/flags/v", "/status", "/nodes", "/"] {
        assert_eq!(ask(&admin, AdminPortKind::Metrics, &format!("GET {path}")).await.0, 404, "{path}");
    }
}

#[tokio::test]
async fn the_log_level_is_set_with_superedges_requests_and_responses() {
    let (filter, level) = LogLevelHandle::new(0);
    let subscriber = tracing_subscriber::registry().with(filter);
    let admin = AdminContext { level: Some(level), ..cloud(&[]) };
    for (body, status, answer) in [
        ("4", 200, "successfully set klog.logging.verbosity to 4\n"),
        ("-1", 200, "successfully set klog.logging.verbosity to -1\n"),
        ("4\n", 200, "successfully set klog.logging.verbosity to 4\n"),
        ("", 400, "failed set klog.logging.verbosity : strconv.ParseInt: parsing \"\": invalid syntax\n"),
        (
            "4294967296",
            400,
            "failed set klog.logging.verbosity 4294967296: strconv.ParseInt: parsing \"4294967296\": \
             value out of range\n",
        ),
    ] {
        let got = ask(&admin, AdminPortKind::All, &format!("PUT /debug/flags/v|{body}")).await;
        let next = if status == 400 { admin::LEVEL_BODY } else { "" };
        assert_eq!(got, (status, format!("{answer}{next}")), "{body:?}");
    }
    assert_eq!(
        ask(&admin, AdminPortKind::All, &format!("PUT /debug/flags/v|{}", "1".repeat(1000))).await.0,
        400
    );
    let other = ask(&admin, AdminPortKind::All, "GET /debug/flags/v").await;
    assert_eq!(other, (406, "unsupported http method\n".into()));
    drop(subscriber);
    assert_eq!(ask(&admin, AdminPortKind::All, "PUT /debug/flags/v|4").await.0, 400, "the log has ended");
}

#[tokio::test(start_paused = true)]
async fn a_drain_closes_the_admin_port_and_idle_connections() {
    let listener = TcpListenSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = listener.at();
    let drain = Drain::new();
    let admin = cloud(&[]);
    let client = async {
        let mut socket = TcpStream::connect(at).await.unwrap();
        socket.write_all(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut some = [0; 15];
        socket.read_exact(&mut some).await.unwrap();
        assert_eq!(&some, b"HTTP/1.1 200 OK");
        drain.start();
        socket.read_to_end(&mut Vec::new()).await.unwrap();
    };
    tokio::join!(client, serve(listener, None, admin, AdminPortKind::All, drain.clone()));
    assert_eq!(drain.finish(Duration::from_secs(1), std::future::pending()).await, Drained::Finished);
}

#[tokio::test]
async fn the_log_level_is_set_over_tcp_only_with_a_superedge_config() {
    let (filter, level) = LogLevelHandle::new(0);
    let _subscriber = tracing_subscriber::registry().with(filter);
    let superedge = AdminContext { level: Some(level), level_at_ports: true, ..cloud(&[]) };
    let ours = AdminContext { level_at_ports: false, ..superedge.clone() };
    for (admin, peer, line) in [
        (&ours, "192.0.2.1", "HTTP/1.1 403"),
        (&ours, "::ffff:127.0.0.1", "HTTP/1.1 403"),
        (&superedge, "192.0.2.1", "HTTP/1.1 200"),
    ] {
        let listener = TcpListenSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut client = TcpStream::connect(listener.at()).await.unwrap();
        let request =
            b"PUT /debug/flags/v HTTP/1.1\r\nHost: 10.0.0.7\r\nConnection: close\r\nContent-Length: 1\r\n\r\n2";
        client.write_all(request).await.unwrap();
        let mut socket = listener.accept().await.0;
        let served = AdminConnectionHandler {
            tls: None,
            admin: admin.clone(),
            port: AdminPortKind::All,
            drain: Drain::new(),
        };
        let peer = peer.parse().unwrap();
        let permit = FairLimiter::new(PermitLimits::permits(1)).try_acquire(&Source::of(peer)).unwrap();
        served.serve(&mut socket, AdminRequester::Address(peer, None), &permit).await;
        drop(socket);
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(line), "{peer}: {answer}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_noted_condition_ends_unless_it_is_renewed() {
    let readiness = Readiness::waiting_for(&[]);
    let until = Instant::now() + Duration::from_secs(90);
    readiness.note_until("node_name", "two machines".into(), until);
    assert_eq!(readiness.check(), Ok("node_name: two machines\n".into()));
    tokio::time::advance(Duration::from_secs(90)).await;
    assert_eq!(readiness.check(), Ok(String::new()));
}

fn problems(status: &StatusResponse) -> Vec<String> {
    let line =
        |one: &ReadinessCondition| Some(format!("{} {} {}", one.name, one.status, one.message.as_ref()?));
    status.conditions.iter().filter_map(line).collect()
}

#[tokio::test]
async fn a_servers_status_lists_its_nodes_by_name_and_its_problems() {
    let server = cloud(&["b", "a"]);
    server.readiness.set("link", Ok(()));
    server.readiness.set_degraded("dns", Err("the disk is full".into()));
    let (status, body) = ask(&server, AdminPortKind::All, "GET /status").await;
    assert_eq!(status, 200, "{body}");
    let parsed: StatusResponse = serde_json::from_str(&body).unwrap();
    assert_eq!((parsed.role.as_str(), parsed.instance.as_str(), parsed.ready), ("server", "00000007", true));
    assert_eq!(problems(&parsed), ["dns degraded the disk is full"]);
    let names: Vec<_> = parsed.links.iter().map(|link| link.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    let LinkStatus { state, address, dialect, rtt_seconds, sessions, .. } = &parsed.links[0];
    assert_eq!(
        (state.as_str(), address.as_deref(), dialect.as_deref(), *rtt_seconds, *sessions),
        ("linked", Some("10.0.0.1:5"), Some("extended"), None, 0)
    );
    let publisher = parsed.publisher.unwrap();
    assert_eq!((publisher.store.as_str(), publisher.error.as_deref()), ("hosts", Some("the disk is full")));
    assert!(parsed.now >= parsed.started_at && parsed.started_at > 1.5e9);
    assert_eq!(ask(&server, AdminPortKind::All, "POST /status").await.0, 405);
}

#[tokio::test]
async fn an_edges_status_says_why_it_is_not_linked() {
    let lost = edge(false);
    lost.readiness.set("link", Err("the cloud refused our token".into()));
    let parsed: StatusResponse =
        serde_json::from_str(&ask(&lost, AdminPortKind::All, "GET /status").await.1).unwrap();
    assert_eq!((parsed.role.as_str(), parsed.node.as_deref(), parsed.ready), ("edge", Some("node1"), false));
    assert_eq!(
        (parsed.links.len(), problems(&parsed)),
        (0, vec!["link not_ready the cloud refused our token".to_owned()])
    );
    let parsed: StatusResponse =
        serde_json::from_str(&ask(&edge(true), AdminPortKind::All, "GET /status").await.1).unwrap();
    assert_eq!(
        (parsed.links[0].name.as_str(), parsed.links[0].dialect.as_deref()),
        ("server", Some("extended"))
    );
}

#[tokio::test]
async fn the_status_is_refused_for_a_foreign_host_header() {
    let server = cloud(&["secret"]);
    for path in ["GET /status", "GET /nodes", "GET /cloud/healthz", "PUT /debug/flags/v|2"] {
        let (status, body) = ask_as(&server, AdminPortKind::All, "evil.example", path).await;
        assert!(
            status == 403 && body.contains("as localhost") && !body.contains("secret"),
            "{status}: {body}"
        );
    }
    // Paths of probes and scrapers contain no secrets, and are requested with any Host.
    assert_eq!(ask_as(&server, AdminPortKind::All, "evil.example", "GET /livez").await.0, 200);
}

#[tokio::test]
async fn the_admin_socket_answers_with_any_host_header() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("server.sock");
    let drain = Drain::new();
    let listeners =
        AdminListeners { local: Some(UnixAccept::bind(&path).unwrap()), ..AdminListeners::default() };
    cloud(&["a"]).spawn(listeners, None, MonitoredCertificates::default(), &FileWatcher::new(&drain), &drain);
    let mut socket = tokio::net::UnixStream::connect(&path).await.unwrap();
    socket.write_all(b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"name\":\"a\""), "{answer}");
    drain.start();
}

#[tokio::test]
async fn the_status_page_loads_nothing_external_and_runs_only_its_own_script() {
    let listener = TcpListenSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let (at, drain) = (listener.at(), Drain::new());
    let client = async {
        let mut answers = Vec::new();
        for _ in 0..2 {
            let mut socket = TcpStream::connect(at).await.unwrap();
            socket
                .write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                .await
                .unwrap();
            let mut answer = String::new();
            socket.read_to_string(&mut answer).await.unwrap();
            answers.push(answer);
        }
        drain.start();
        answers
    };
    let (pages, ()) =
        tokio::join!(client, serve(listener, None, cloud(&[]), AdminPortKind::All, drain.clone()));
    let nonces: Vec<_> = pages
        .iter()
        .map(|page| {
            let policy = page.split("content-security-policy: ").nth(1).unwrap().lines().next().unwrap();
            assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{policy}");
            let nonce = policy.split("'nonce-").nth(1).unwrap().split('\'').next().unwrap();
            assert_eq!(page.matches(&format!("nonce=\"{nonce}\"")).count(), 2, "one script and one style");
            nonce
        })
        .collect();
    assert_ne!(nonces[0], nonces[1]);
    let mut body = pages[0].split_once("\r\n\r\n").unwrap().1.to_owned();
    for own in ["metrics", "readyz", "status"] {
        body = body.replacen(&format!("<a href=\"{own}\">"), "", 1);
    }
    for foreign in ["http://", "https://", "src=", "href=", "@import", "url(", "innerHTML"] {
        let found = body.matches(foreign).count()
            - body.matches("http://www.w3.org/2000/svg").count() * usize::from(foreign == "http://");
        assert_eq!(found, 0, "{foreign}");
    }
}

#[tokio::test(start_paused = true)]
async fn pages_are_for_loopback_clients_or_users_with_a_valid_password() {
    let server = cloud(&[]);
    let elsewhere = AdminRequester::Address("192.0.2.1".parse().unwrap(), None);
    let head = |password: &str| {
        let mut head = local_head();
        head.insert("authorization", password.parse().unwrap());
        head
    };
    let refused = server.authenticate(&elsewhere, &head("right"), true).await.unwrap_err();
    assert_eq!(refused.status(), 403, "no users are configured");
    let right = Arc::new(AtomicBool::new(true));
    let is_right = right.clone();
    let user = move |_, head: HeaderMap, _| -> UserFuture {
        let is_right = is_right.load(Relaxed) && head["authorization"] == "right";
        let wrong = ("credentials_invalid", "wrong password".to_owned());
        Box::pin(async move { is_right.then(|| "ops".to_owned()).ok_or(wrong) })
    };
    let viewers = PageViewers { authenticate: Arc::new(user), has_passwords: true };
    let server = AdminContext { viewers: Some(viewers), ..server };
    let user = server.authenticate(&elsewhere, &head("right"), true).await.unwrap();
    assert_eq!(user.to_string(), "ops");
    let refused = server.authenticate(&elsewhere, &head("wrong"), true).await.unwrap_err();
    assert_eq!((refused.status().as_u16(), refused.headers().contains_key("www-authenticate")), (401, true));
    let refused = |result| server.metrics.sessions.closed("admin", result);
    assert_eq!(["forbidden", "credentials_invalid"].map(refused), [1, 1]);

    let drain = Drain::new();
    let stream = |requester| server.events(&requester, &head("right"), &drain).into_body();
    let near = AdminRequester::Address("127.0.0.1".parse().unwrap(), None);
    let [mut far, mut near] = [elsewhere, near].map(stream);
    for _ in 0..2 {
        assert!(far.frame().await.is_some());
    }
    right.store(false, Relaxed);
    while far.frame().await.is_some() {}
    for _ in 0..3 {
        assert!(near.frame().await.is_some(), "this machine needs no password");
    }
}

/// Returns the head of a request to an address.
fn local_head() -> HeaderMap {
    HeaderMap::from_iter([(HOST, HeaderValue::from_static("localhost"))])
}

#[tokio::test]
async fn an_event_stream_starts_with_full_state_and_streams_per_source_are_limited() {
    let (server, drain) = (cloud(&["a"]), Drain::new());
    let near = AdminRequester::Address("127.0.0.1".parse().unwrap(), None);
    let mut open = Vec::new();
    let refused = loop {
        let answer = server.events(&near, &local_head(), &drain);
        if answer.status() != 200 {
            break answer;
        }
        open.push(answer.into_body());
    };
    assert_eq!((refused.status().as_u16(), open.len()), (503, 8));
    let near_other = AdminRequester::Address("127.1.2.3".parse().unwrap(), None);
    let other = server.events(&near_other, &local_head(), &drain);
    assert_eq!(other.status(), 200, "another source has its own limit");
    let mut first = open.swap_remove(0);
    let event = first.frame().await.unwrap().unwrap().into_data().unwrap();
    let event = std::str::from_utf8(&event).unwrap();
    let json = event.strip_prefix("event: status\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
    let parsed: serde_json::Value = serde_json::from_str(json).unwrap();
    assert_eq!(parsed["links"]["set"][0][1]["name"], "a");
    drop(open);
    drain.start();
    while let Some(more) = first.frame().await {
        more.unwrap();
    }
    assert_eq!(drain.finish(Duration::from_secs(20), std::future::pending()).await, Drained::Finished);
}
