use tunnel_net::accept_loop::{Accepted, ConnectionHandler};
pub(crate) mod line;

use std::future::{pending, poll_fn};

use futures_util::FutureExt as _;
use http::HeaderMap;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::mpsc;

use crate::acceptor::target_dialer::{TargetDialer, TargetDialerRole};
use crate::admission;
use crate::admission::auth::{PasswordChecker, Users};
use crate::admission::http_proxy::HttpProxyProtocol;
use crate::admission::requests::RequestRouter;
use crate::admission::socks5::Socks5;
use crate::admission::tests::line::{Line, Lines, Switch};
use crate::admission::trace_id::new_trace;
use crate::paths::uplinks::Uplinks;
use crate::route::{RouteError, SessionRequest};
use crate::session_io::tests::{linked, take};
use tunnel_base::policy::zone::NodeZone;
use tunnel_base::policy::{Rule, Rules, network};
use tunnel_link::link::Link;
use tunnel_link::table::SessionTable;
use tunnel_link::table::handles::IncomingSession;
use tunnel_net::ChunkStream;
use tunnel_net::interfaces::{InterfaceSnapshot, LocalAddresses};
use tunnel_net::limiter::Source;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::resolver::Resolver;
use tunnel_proto::names::{NameError, NodeName, Target};

use tunnel_net::tls::testing::client_certificate;

use super::*;
use crate::admission::client_handler::{ClientHandler, HEAD_TIME, run};
use std::time::Duration;

/// A server's listener for requests of one line, and the sessions offered over its only link.
struct Served {
    context: ListenerContext,
    offered: mpsc::Receiver<IncomingSession>,
    at: tempfile::TempDir,
}

impl Served {
    fn new(policy: AccessPolicy) -> Self {
        Self::with(Line, policy)
    }

    fn with<F: ListenerProtocol<UnixStream>>(protocol: F, policy: AccessPolicy) -> Self {
        let drain = Drain::new();
        let (table, link, offered) = linked(&drain);
        let context = context(policy, drain.clone(), table, Some(link));
        let at = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(at.path().join("socket")).unwrap();
        let serving = run(protocol, line::Bound(listener), Networks::default(), context.clone());
        drain.spawn(Span::none(), serving);
        Self { context, offered, at }
    }

    async fn client(&self, line: &str) -> UnixStream {
        let mut client = UnixStream::connect(self.at.path().join("socket")).await.unwrap();
        client.write_all(line.as_bytes()).await.unwrap();
        client
    }

    async fn answer(&self, line: &str) -> String {
        let mut received = String::new();
        self.client(line).await.read_to_string(&mut received).await.unwrap();
        received
    }
}

pub(crate) fn context(
    policy: AccessPolicy,
    drain: Drain,
    table: Arc<SessionTable>,
    link: Option<Arc<Link>>,
) -> ListenerContext {
    let uplinks = Uplinks::new("edge-1".parse().unwrap());
    link.into_iter().for_each(|link| uplinks.add(link));
    let time = Duration::from_secs(9);
    ListenerContext {
        listener: "line",
        category: SessionCategory::Ssh,
        policy: Arc::new(ArcSwap::from_pointee(policy)),
        judged: JudgedSessions::default(),
        sessions: admission::sessions(9, 9),
        pending: PendingLimits::new(100 << 20, false),
        pool: BufferPool::new(),
        route: SessionRouter::new(uplinks, table, time, time),
        zone: Arc::default(),
        addresses: Arc::default(),
        direct: None,
        uplink: None,
        metrics: Metrics::edge(),
        stopping: drain.clone(),
        drain,
    }
}

/// Returns the rights of one rule.
fn ruled(rule: Rule) -> Rights {
    Rights { rules: Rules(vec![rule]), ..Rights::default() }
}

#[tokio::test]
async fn a_protocol_only_parses_the_request_and_writes_the_answer() {
    let mut served = Served::new(AccessPolicy::default());
    let mut client = served.client("node1:22\n").await;
    let offer = served.offered.recv().await.unwrap();
    let uid = client.peer_cred().unwrap().uid();
    let request = (offer.target.to_string(), offer.client.clone());
    assert_eq!(request, ("node1:22".into(), format!("uid {uid}@127.0.0.1:0")));
    let mut far = offer.accept();
    let mut received = [0; 3];
    client.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, b"ok\n");
    client.write_all(b"question").await.unwrap();
    assert_eq!(take(&mut far).await.unwrap(), "question");
    client.shutdown().await.unwrap();
    assert_eq!(take(&mut far).await.unwrap(), "");
    let mut answer = Bytes::from_static(b"answer");
    poll_fn(|cx| far.poll_write_chunk(cx, &mut answer)).await.unwrap();
    poll_fn(|cx| far.poll_finish(cx)).await.unwrap();
    let mut all = String::new();
    client.read_to_string(&mut all).await.unwrap();
    assert_eq!(all, "answer");
    let metrics = &served.context.metrics;
    while metrics.sessions.now("line") > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(metrics.sessions.closed("line", "ok"), 1);
    assert_eq!((metrics.bytes_to_target.get(), metrics.bytes_to_client.get()), (8, 6));
}

#[tokio::test]
async fn a_denied_client_gets_the_reason_and_is_counted() {
    let served = Served::new(AccessPolicy::default());
    assert_eq!(served.answer("10.0.0.1:22\n").await, "no: no node is known for 10.0.0.1:22\n");
    let metrics = &served.context.metrics;
    assert_eq!(metrics.sessions.closed("line", "node_not_named"), 1);
    let nobody = AccessPolicy { allow_from: Some(Networks::default()), ..AccessPolicy::default() };
    served.context.policy.store(Arc::new(nobody));
    assert_eq!(served.answer("").await, "no: your address 127.0.0.1 is not allowed here\n");
    assert_eq!(metrics.sessions.closed("line", "forbidden"), 1);
}

#[tokio::test(start_paused = true)]
async fn an_endless_head_times_out_after_ten_seconds() {
    let served = Served::new(AccessPolicy::default());
    let started = tokio::time::Instant::now();
    assert_eq!(served.answer("node1:").await, "");
    assert_eq!(started.elapsed().as_secs(), HEAD_TIME.as_secs());
    assert_eq!(served.context.metrics.connections_rejected.counted("header_timeout"), 1);
}

#[tokio::test]
async fn a_client_may_send_several_requests_over_one_connection() {
    let mut served = Served::with(Lines, AccessPolicy::default());
    let mut client = BufReader::new(served.client("").await);
    for (line, expected) in [("node1:22\n", "one\n"), ("10.0.0.1:22\n", "no: "), ("node1:23\n", "two\n")] {
        client.write_all(line.as_bytes()).await.unwrap();
        let mut far = None;
        if !expected.starts_with("no") {
            let session = far.insert(served.offered.recv().await.unwrap().accept());
            let mut bytes = Bytes::copy_from_slice(expected.trim().as_bytes());
            poll_fn(|cx| session.poll_write_chunk(cx, &mut bytes)).await.unwrap();
        }
        let mut received = String::new();
        client.read_line(&mut received).await.unwrap();
        assert!(received.starts_with(expected), "{received}");
    }
    client.shutdown().await.unwrap();
    assert_eq!(client.read_u8().await.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
    let metrics = &served.context.metrics;
    assert_eq!(metrics.sessions.closed("line", "node_not_named"), 1);
    for refused in ["header_missing", "header_timeout", "reset"] {
        assert_eq!(metrics.connections_rejected.counted(refused), 0, "{refused}");
    }
}

#[tokio::test]
async fn a_permit_is_released_on_open_only_by_single_request_protocols() {
    let drain = Drain::new();
    let (table, link, mut offered) = linked(&drain);
    let context = Arc::new(context(AccessPolicy::default(), drain.clone(), table, Some(link)));
    let limiter = FairLimiter::new(PermitLimits::permits(1));
    let (here, elsewhere) = (Source::of(CLIENT_ADDRESS.ip()), Source::of([198, 51, 100, 1].into()));
    for keeps in [true, false] {
        let permit = limiter.try_acquire(&here).unwrap();
        let mut admission = Admission::new(context.clone(), CLIENT_ADDRESS, permit);
        let open = async {
            match keeps {
                true => {
                    admission.authorize(open_request("node1:22"), new_trace()).await.unwrap().open().await
                }
                false => {
                    let opened = admission.open(pending(), open_request("node1:22"), new_trace());
                    opened.await.expect("the client stays")
                }
            }
        };
        let (granted, _far) = tokio::join!(open, async { offered.recv().await.unwrap().accept() });
        granted.unwrap();
        assert_eq!(limiter.try_acquire(&elsewhere).is_err(), keeps);
    }
}

#[tokio::test]
async fn only_an_idle_client_of_many_requests_is_evicted() {
    let drain = Drain::new();
    let (table, link, _offered) = linked(&drain);
    let context = Arc::new(context(AccessPolicy::default(), drain.clone(), table, Some(link)));
    let limiter = FairLimiter::new(PermitLimits::permits(2));
    let here = Source::of(CLIENT_ADDRESS.ip());
    let (permit, _other) = (limiter.try_acquire(&here).unwrap(), limiter.try_acquire(&here).unwrap());
    let lost = permit.revoked();
    let mut admission = Admission::new(context.clone(), CLIENT_ADDRESS, permit);
    let permit = admission.permit().cloned().unwrap();
    let parse = |_: &_| open_request("node1:22");
    let mut requests = RequestRouter {
        parse: &parse,
        admission: &mut admission,
        tls: None,
        sees_details: false,
        trace: String::new(),
    };
    let head = http::Request::new(()).into_parts().0;
    let newcomer = |n| limiter.try_acquire(&Source::of([10, 0, 0, n].into())).unwrap();
    for _ in 0..2 {
        requests.route(Ok(&head)).await.unwrap();
        let _newcomers: Vec<_> = (0..9).map(newcomer).collect();
        assert!(!lost.is_cancelled(), "its request is in flight");
        permit.mark_idle();
    }
    assert!(!lost.is_cancelled());
    let _newcomers = (newcomer(1), newcomer(2));
    assert!(lost.is_cancelled(), "it is idle");
}

/// Runs everything that is ready.
async fn settle() {
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_idle_connection_makes_room_and_one_within_a_head_gets_an_answer() {
    let drain = Drain::new();
    let (table, link, _offered) = linked(&drain);
    let context = context(AccessPolicy::default(), drain.clone(), table, Some(link));
    let limiter = FairLimiter::new(PermitLimits::permits(4));
    let (here, elsewhere) = (Source::of(CLIENT_ADDRESS.ip()), Source::of([198, 51, 100, 1].into()));
    let front = Arc::new(ClientHandler { protocol: HttpProxyProtocol, context: Arc::new(context) });
    let connect = async |bytes: &str| {
        let (mut client, socket) = UnixStream::pair().unwrap();
        let permit = limiter.try_acquire(&here).unwrap();
        let lost = permit.revoked();
        let serving = front.clone().handle(Accepted { socket, from: CLIENT_ADDRESS, permit });
        // As the accept loop does.
        drain.spawn(Span::none(), async move {
            tokio::select! { biased; () = serving => {}, () = lost.cancelled() => {} }
        });
        client.write_all(bytes.as_bytes()).await.unwrap();
        settle().await;
        client
    };
    let head = "GET https://node1/ HTTP/1.1\r\nHost: node1\r\n\r\n";
    let mut half = [connect("CONNECT node1:22 HT").await, connect(&head[..40]).await];
    let mut silent = connect("").await;
    let mut kept = connect(head).await;
    let answer = async |client: &mut UnixStream| {
        let mut received = vec![0; 4096];
        let length = client.read(&mut received).await.unwrap();
        String::from_utf8_lossy(&received[..length]).into_owned()
    };
    assert!(answer(&mut kept).await.starts_with("HTTP/1.1 400 "));
    let mut held = Vec::new();
    // The silent one is idle for longer than the one between two requests.
    for idle in [&mut silent, &mut kept] {
        let newcomer = limiter.try_acquire(&here).unwrap();
        newcomer.mark_active();
        held.push(newcomer);
        assert_eq!(answer(idle).await, "");
    }
    assert!(limiter.try_acquire(&here).is_err(), "all others are active");
    for client in &mut half {
        held.push(limiter.try_acquire(&elsewhere).unwrap());
        let answer = answer(client).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 503 {}", admission::NO_PENDING)), "{answer}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_socks5_client_within_a_message_gets_an_answer_when_it_loses_its_place() {
    let drain = Drain::new();
    let (table, link, _offered) = linked(&drain);
    let context = context(AccessPolicy::default(), drain.clone(), table, Some(link));
    let front = Arc::new(ClientHandler { protocol: Socks5, context: Arc::new(context) });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for (sent, expected) in [
        (&[5][..], &[5, 0xff][..]),
        (&[5, 1, 0, 5, 1, 0, 3, 9], &[5, 0, 5, 1, 0, 1, 0, 0, 0, 0, 0, 0]),
        (&[], &[]),
    ] {
        let limiter = FairLimiter::new(PermitLimits::permits(1));
        let permit = limiter.try_acquire(&Source::of(CLIENT_ADDRESS.ip())).unwrap();
        let lost = permit.revoked();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (socket, _) = listener.accept().await.unwrap();
        client.write_all(sent).await.unwrap();
        let accepted = Accepted { socket, from: CLIENT_ADDRESS, permit };
        let mut serving = std::pin::pin!(front.clone().handle(accepted));
        let _ = tokio::time::timeout(Duration::from_millis(50), &mut serving).await;
        lost.cancel();
        // As the accept loop does.
        assert!(serving.as_mut().now_or_never().is_none());
        let mut received = vec![0; expected.len()];
        client.read_exact(&mut received).await.unwrap();
        assert_eq!(received, expected);
    }
}

#[tokio::test]
async fn a_session_in_progress_holds_no_permit_of_the_listener() {
    let drain = Drain::new();
    let (table, link, mut offered) = linked(&drain);
    let context = Arc::new(context(AccessPolicy::default(), drain.clone(), table, Some(link)));
    let limiter = FairLimiter::new(PermitLimits::permits(1));
    let permit = limiter.try_acquire(&Source::of(CLIENT_ADDRESS.ip())).unwrap();
    let (mut client, socket) = UnixStream::pair().unwrap();
    let front = Arc::new(ClientHandler { protocol: Switch, context });
    drain.spawn(Span::none(), front.handle(Accepted { socket, from: CLIENT_ADDRESS, permit }));
    client.write_all(b"node1:22\n").await.unwrap();
    let mut far = offered.recv().await.unwrap().accept();
    client.write_all(b"carried").await.unwrap();
    assert_eq!(take(&mut far).await.unwrap(), "carried");
    assert!(limiter.try_acquire(&Source::of([198, 51, 100, 1].into())).is_ok());
}

/// Checks a request and returns the result with its access log entry.
async fn check(
    context: &Arc<ListenerContext>,
    proof: ClientIdentity,
    request: Result<OpenRequest, Denial>,
) -> (Result<Destination, Denial>, AccessLogEntry) {
    let permit =
        FairLimiter::new(PermitLimits::permits(1)).try_acquire(&Source::of(CLIENT_ADDRESS.ip())).unwrap();
    let mut admission = Admission::new(context.clone(), CLIENT_ADDRESS, permit);
    admission.client.proof = proof;
    let mut access = AccessLogEntry::start("line", "test".into());
    (admission.check(request, &mut access).await.map(|(destination, _)| destination), access)
}

fn open_request(target: &str) -> Result<OpenRequest, Denial> {
    Ok(OpenRequest { node: None, target: target.parse()?, credentials: HeaderMap::new() })
}

fn unlinked(policy: AccessPolicy) -> Arc<ListenerContext> {
    let drain = Drain::new();
    let table = linked(&drain).0;
    Arc::new(context(policy, drain, table, None))
}

#[tokio::test]
async fn the_node_is_the_host_of_the_target() {
    let (checked, access) =
        check(&unlinked(AccessPolicy::default()), ClientIdentity::None, open_request("Node1.:22")).await;
    let Destination { node, target, .. } = checked.unwrap();
    assert_eq!((node.as_str(), target.to_string().as_str()), ("node1", "node1:22"));
    assert_eq!((&access.node, &access.target), (&Some(node), &Some(target)));
}

#[tokio::test]
async fn an_unknown_address_is_denied_with_421() {
    for target in ["10.0.0.1:22", "[fd00::1]:22"] {
        let (checked, _) =
            check(&unlinked(AccessPolicy::default()), ClientIdentity::None, open_request(target)).await;
        assert_eq!(checked.unwrap_err().status(), 421, "{target}");
    }
}

#[tokio::test]
async fn a_forbidden_source_gets_403_for_every_request() {
    let context = unlinked(AccessPolicy { allow_from: Some(Networks::default()), ..AccessPolicy::default() });
    for request in [Err(Denial::Method), Err(NameError::Session.into()), open_request("node1:22")] {
        assert_eq!(check(&context, ClientIdentity::None, request).await.0.unwrap_err().status(), 403);
    }
}

#[tokio::test]
async fn a_draining_server_denies_every_request_with_503() {
    let context = unlinked(AccessPolicy::default());
    context.drain.start();
    for request in [Err(Denial::Method), open_request("node1:22")] {
        assert_eq!(check(&context, ClientIdentity::None, request).await.0.unwrap_err().status(), 503);
    }
}

#[tokio::test]
async fn a_proven_identity_needs_no_password_and_obeys_the_rules() {
    let users = Users::parse("ops:$2b$04$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy");
    let policy = AccessPolicy {
        logins: Some(Arc::new(PasswordChecker::new(ReloadedValue::fixed(users.unwrap())))),
        rights: ruled(Rule { users: Some(vec!["ops".into()]), ..Rule::default() }),
        names: vec!["*".parse().unwrap()],
        ..AccessPolicy::default()
    };
    let context = unlinked(policy);
    let certificate = |name: &str| ClientIdentity::Certificate(client_certificate(&[name]));
    for (proof, user, status) in [
        (ClientIdentity::None, None, Some(407)),
        (ClientIdentity::User("dev".into()), Some("dev"), Some(403)),
        (ClientIdentity::User("ops".into()), Some("ops"), None),
        (certificate("dev"), Some("dev"), Some(403)),
        (certificate("ops"), Some("ops"), None),
    ] {
        let (checked, access) = check(&context, proof.clone(), open_request("node1:22")).await;
        assert_eq!(checked.err().map(|denial| denial.status().as_u16()), status, "{proof:?}");
        assert_eq!(access.user.as_deref(), user);
    }
}

#[tokio::test]
async fn the_user_is_the_first_allowed_name_of_the_certificate() {
    let names = vec!["*.example.org".parse().unwrap(), "ops".parse().unwrap()];
    let context = unlinked(AccessPolicy { names, ..AccessPolicy::default() });
    for (names, user) in
        [(&["dev", "A.example.org", "ops"][..], Some("A.example.org")), (&["dev"], None), (&[], None)]
    {
        let proof = ClientIdentity::Certificate(client_certificate(names));
        let (checked, access) = check(&context, proof, open_request("node1:22")).await;
        assert_eq!((checked.is_ok(), access.user.as_deref()), (user.is_some(), user), "{names:?}");
    }
}

/// Returns a context with a network in its address book, whose process may dial some targets itself.
fn context_with_addresses(policy: AccessPolicy, direct: &[&str]) -> Arc<ListenerContext> {
    let fixed = vec![("10.0.0.0/24".parse().unwrap(), "node1".parse().unwrap())];
    let dialer = TargetDialer {
        role: TargetDialerRole::ForClients,
        own: LocalAddresses::new(InterfaceSnapshot::default),
        targets: Arc::new(ArcSwap::from_pointee(direct.iter().map(|t| t.parse().unwrap()).collect())),
        resolver: Resolver::of_servers(&["127.0.0.1:1".parse().unwrap()]).unwrap(),
        sockets: None,
    };
    let mut context = Arc::unwrap_or_clone(unlinked(policy));
    context.addresses = Arc::new(AddressBook::new(fixed, false));
    context.direct = Some(DirectDialer::new(dialer, Duration::from_secs(1)));
    Arc::new(context)
}

#[tokio::test]
async fn a_known_address_resolves_to_its_node_and_stays_the_target() {
    for dress in ["10.0.0.7:80", "[::ffff:10.0.0.7]:80"] {
        let (checked, access) = check(
            &context_with_addresses(AccessPolicy::default(), &[]),
            ClientIdentity::None,
            open_request(dress),
        )
        .await;
        let Destination { node, target, .. } = checked.unwrap();
        assert_eq!((node.as_str(), target.to_string().as_str()), ("node1", "10.0.0.7:80"));
        assert_eq!(access.node, Some(node));
    }
    let rule = Rule { nodes: Some(vec!["node2".parse().unwrap()]), ..Rule::default() };
    let policy = AccessPolicy { rights: ruled(rule), ..AccessPolicy::default() };
    let (checked, _) =
        check(&context_with_addresses(policy, &[]), ClientIdentity::None, open_request("10.0.0.7:80")).await;
    assert_eq!(checked.unwrap_err().status(), 403, "the rules apply to the node, whatever name was used");
}

#[tokio::test]
async fn direct_targets_must_be_listed_and_forbidden_ones_are_always_denied() {
    let listed = context_with_addresses(AccessPolicy::default(), &["0.0.0.0/0:80", "[::/0]:80"]);
    let nothing = context_with_addresses(AccessPolicy::default(), &[]);
    let status = async |context: &Arc<ListenerContext>, requested: &str| match check(
        context,
        ClientIdentity::None,
        open_request(requested),
    )
    .await
    .0
    {
        Ok(destination) => destination.node.to_string(),
        Err(denial) => denial.status().as_u16().to_string(),
    };
    for requested in ["192.0.2.1:80", "[2001:db8::1]:80"] {
        assert_eq!(status(&listed, requested).await, "-", "{requested}");
        assert_eq!(status(&nothing, requested).await, "421", "{requested}: by default nothing is allowed");
    }
    assert_eq!(status(&listed, "192.0.2.1:81").await, "421", "no entry has that port");
    for requested in ["127.0.0.1:80", "[::1]:80", "[::ffff:127.0.0.1]:80", "0.0.0.0:80", "169.254.169.254:80"]
    {
        assert_eq!(status(&listed, requested).await, "403", "{requested}");
        assert_eq!(status(&nothing, requested).await, "403", "{requested}");
    }
    let nodes = Some(vec!["edge-*".parse().unwrap()]);
    let policy = AccessPolicy { rights: ruled(Rule { nodes, ..Rule::default() }), ..AccessPolicy::default() };
    let ruled = context_with_addresses(policy, &["0.0.0.0/0:80"]);
    assert_eq!(status(&ruled, "192.0.2.1:80").await, "403", "rules apply");
}

#[tokio::test(start_paused = true)]
async fn a_request_at_an_edge_that_just_lost_its_link_waits_for_the_next() {
    let drain = Drain::new();
    let (table, link, mut offered) = linked(&drain);
    let (uplinks, time) = (Uplinks::new("edge-1".parse().unwrap()), Duration::from_secs(9));
    let route = SessionRouter::new(uplinks.clone(), table, time, time);
    let (node, target): (NodeName, Target) = ("node2".parse().unwrap(), "node2:22".parse().unwrap());
    let request = SessionRequest {
        node,
        target,
        category: SessionCategory::HttpProxy,
        client: "test".into(),
        listener: "test",
        permit: None,
    };
    let started = tokio::time::Instant::now();
    assert!(matches!(route.open(request.clone()).await.unwrap_err().why, RouteError::Offline { .. }));
    uplinks.add(link.clone());
    uplinks.remove(&link);
    let comes = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        uplinks.add(link.clone());
        offered.recv().await.unwrap().accept()
    };
    let (opened, _far) = tokio::join!(route.open(request.clone()), comes);
    opened.unwrap();
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    uplinks.remove(&link);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let started = tokio::time::Instant::now();
    assert!(matches!(route.open(request).await.unwrap_err().why, RouteError::Offline { .. }));
    assert_eq!(started.elapsed(), Duration::ZERO, "no request waits for a link that was closed long ago");
}

#[tokio::test]
async fn a_request_may_name_its_node_separately_from_the_target() {
    let zone = NodeZone::new("nodes.test".into(), Vec::new(), |_: &NodeName| false);
    let context = ListenerContext::clone(&unlinked(AccessPolicy::default()));
    let context = Arc::new(ListenerContext { zone: Arc::new(ArcSwap::from_pointee(zone)), ..context });
    for node in ["node1", "node1.nodes.test"] {
        let request = OpenRequest { node: node.parse().ok(), ..open_request("127.0.0.1:6443").unwrap() };
        let (checked, access) = check(&context, ClientIdentity::None, Ok(request)).await;
        let Destination { node, target, .. } = checked.unwrap();
        assert_eq!((node.as_str(), target.to_string().as_str()), ("node1", "127.0.0.1:6443"));
        assert_eq!((&access.node, &access.target), (&Some(node), &Some(target)));
    }
}

const CLIENT_ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 5);

#[tokio::test]
async fn an_access_policy_enforces_networks_and_rules() {
    let inside: IpAddr = "10.1.2.3".parse().unwrap();
    let outside: IpAddr = "192.0.2.1".parse().unwrap();
    let node = "edge-1".parse().unwrap();
    let open = AccessPolicy::default();
    assert!(open.check_source(outside).is_ok() && open.authorize(None, outside, &node, 22).is_ok());
    assert!(open.authenticate(&HeaderMap::new(), outside).await.unwrap().is_none());
    let policy = AccessPolicy {
        allow_from: Some(Networks::from_iter([network("10.0.0.0/8").unwrap()])),
        rights: ruled(Rule { users: Some(vec!["ops".into()]), ..Rule::default() }),
        ..AccessPolicy::default()
    };
    assert!(policy.check_source(inside).is_ok());
    assert_eq!(policy.check_source(outside).unwrap_err().status(), 403);
    assert!(policy.authorize(Some("ops"), inside, &node, 22).is_ok());
    let denied = policy.authorize(Some("dev"), inside, &node, 22).unwrap_err();
    assert_eq!(denied.to_string(), "no rule lets dev reach port 22 of node edge-1");
}
