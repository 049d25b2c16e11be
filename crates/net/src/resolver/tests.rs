use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use hickory_resolver::proto::op::{Message, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA};
use hickory_resolver::proto::rr::{RData, Record};
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep};

use tunnel_base::drain::Drain;

use super::*;

/// How a DNS server answers the queries of one family.
#[derive(Debug, Clone, Copy)]
enum Answer {
    /// With an address, whose last byte is that of the server.
    Address,
    /// With this code, and no address.
    Code(ResponseCode),
    Silence,
}

const SERVFAIL: Answer = Answer::Code(ResponseCode::ServFail);
const REFUSED: Answer = Answer::Code(ResponseCode::Refused);
const NXDOMAIN: Answer = Answer::Code(ResponseCode::NXDomain);
const NODATA: Answer = Answer::Code(ResponseCode::NoError);

/// DNS servers, whose queries are counted, until they are dropped.
#[derive(Debug, Default)]
struct Servers {
    at: Vec<SocketAddr>,
    queries: Arc<AtomicUsize>,
    drain: Drain,
}

impl Servers {
    /// Adds a server that answers A and AAAA after a delay. Names below `lacks.test.` do not exist, for either family.
    async fn add(mut self, delay: u64, ipv4: Answer, ipv6: Answer) -> Self {
        let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        self.at.push(socket.local_addr().unwrap());
        let number = u8::try_from(self.at.len()).unwrap();
        let (queries, drain) = (Arc::clone(&self.queries), self.drain.clone());
        self.drain.spawn(tracing::Span::none(), async move {
            let mut space = [0; 1500];
            loop {
                let (n, from) = socket.recv_from(&mut space).await.unwrap();
                queries.fetch_add(1, Ordering::Relaxed);
                let question = Message::from_vec(&space[..n]).unwrap();
                let query = &question.queries[0];
                let chosen = if query.query_type() == RecordType::A { ipv4 } else { ipv6 };
                let lacks =
                    query.name().to_ascii().ends_with(".lacks.test.") && query.query_type() == RecordType::A;
                let answer = answer(&question, number, if lacks { NXDOMAIN } else { chosen });
                let socket = Arc::clone(&socket);
                drain.spawn(tracing::Span::none(), async move {
                    sleep(Duration::from_millis(delay)).await;
                    if let Some(answer) = answer {
                        let _ = socket.send_to(&answer.to_vec().unwrap(), from).await;
                    }
                });
            }
        });
        self
    }

    fn resolver(&self) -> Resolver {
        Resolver::of_servers(&self.at).unwrap()
    }
}

fn answer(question: &Message, number: u8, how: Answer) -> Option<Message> {
    let query = &question.queries[0];
    let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
    answer.add_query(query.clone());
    match how {
        Answer::Address => {
            let address = match query.query_type() {
                RecordType::A => RData::A(A::new(10, 0, 0, number)),
                _ => RData::AAAA(AAAA::new(0xfd00, 0, 0, 0, 0, 0, 0, number.into())),
            };
            answer.add_answer(Record::from_rdata(query.name().clone(), 60, address));
        }
        Answer::Code(code) => answer.metadata.response_code = code,
        Answer::Silence => return None,
    }
    Some(answer)
}

/// Returns the addresses as text, separated by spaces, or the kind of the error; and the milliseconds that it took.
async fn found(resolver: &Resolver, name: &str) -> (String, u128) {
    let start = Instant::now();
    let found = match resolver.lookup(name).await {
        Ok(found) => found.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
        Err(DnsLookupError::NotFound(_)) => "not found".to_owned(),
        Err(DnsLookupError::Timeout { .. }) => "timeout".to_owned(),
        Err(cause) => cause.to_string(),
    };
    (found, start.elapsed().as_millis())
}

#[tokio::test(start_paused = true)]
async fn servers_are_queried_in_their_order_and_the_next_after_a_failure_or_silence() {
    use Answer::{Address, Silence};
    for (first, second, expected, at_most) in [
        // The usual file of a VPN: the company's server, then the router.
        ((30, Address), (0, NXDOMAIN), "10.0.0.1", 40),
        ((30, Address), (0, SERVFAIL), "10.0.0.1", 40),
        ((30, Address), (0, Address), "10.0.0.1", 40),
        ((0, SERVFAIL), (0, Address), "10.0.0.2", 10),
        ((0, REFUSED), (30, Address), "10.0.0.2", 40),
        ((0, Silence), (0, Address), "10.0.0.2", 1600),
        // A slow server is not forgotten.
        ((2000, Address), (0, Silence), "10.0.0.1", 2100),
        ((0, NXDOMAIN), (0, Address), "not found", 60),
        ((0, SERVFAIL), (0, NXDOMAIN), "not found", 60),
        ((0, Silence), (0, Silence), "timeout", 5100),
    ] {
        let servers =
            Servers::default().add(first.0, first.1, NODATA).await.add(second.0, second.1, NODATA).await;
        for turn in 0..3 {
            let (found, took) = found(&servers.resolver(), "node1.test.").await;
            let case = format!("{first:?}, {second:?}, turn {turn}");
            assert_eq!((found.as_str(), took <= at_most), (expected, true), "{case}: {took} ms");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn addresses_of_one_family_do_not_wait_for_a_silent_other_one() {
    use Answer::{Address, Silence};
    for (ipv4, ipv6, expected, at_most) in [
        (Address, Address, "10.0.0.1 fd00::1", 10),
        (Address, Silence, "10.0.0.1", 60),
        (Address, NXDOMAIN, "10.0.0.1", 10),
        (Address, SERVFAIL, "10.0.0.1", 10),
        (Silence, Address, "fd00::1", 1600),
        (NODATA, Address, "fd00::1", 10),
        (SERVFAIL, Address, "fd00::1", 10),
        (NXDOMAIN, Silence, "not found", 60),
        (NODATA, Silence, "timeout", 5100),
        (NODATA, NODATA, "not found", 10),
    ] {
        let servers = Servers::default().add(0, ipv4, ipv6).await;
        let (found, took) = found(&servers.resolver(), "node1.test.").await;
        assert_eq!((found.as_str(), took <= at_most), (expected, true), "{ipv4:?}, {ipv6:?}: {took} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn the_search_list_goes_on_although_ipv6_is_never_answered() {
    let servers = Servers::default().add(0, Answer::Address, Answer::Silence).await;
    let text = "search lacks.test. more.lacks.test has.test\noptions ndots:2\n";
    let dns = DnsServers::of_resolv_conf(text.into()).unwrap();
    let clients =
        DnsServers::new(servers.at.iter().map(name_server), &ResolverOpts::default()).unwrap().servers;
    let dns = DnsServers { servers: clients, ..dns };
    let resolver = Resolver { dns: Arc::new(Mutex::new(Arc::new(dns))), files: None };
    let (addresses, took) = found(&resolver, "a.node1").await;
    assert_eq!((addresses.as_str(), took <= 200), ("10.0.0.1", true), "{took} ms");
    let queries = servers.queries.load(Ordering::Relaxed);
    assert!(queries >= 6, "two domains without the name came first: {queries} queries");
    assert_eq!(found(&resolver, "x.lacks.test.").await.0, "not found");
}

#[tokio::test]
async fn a_name_is_queried_at_the_given_server_and_cached() {
    let servers = Servers::default().add(0, Answer::Address, NODATA).await;
    let resolver = servers.resolver();
    assert_eq!(found(&resolver, "node1.test.").await.0, "10.0.0.1");
    assert_eq!(servers.queries.load(Ordering::Relaxed), 2, "one query for each address family");
    found(&resolver, "node1.test.").await;
    let queries = servers.queries.load(Ordering::Relaxed);
    assert!(queries <= 3, "the address is cached, the lack of an IPv6 address is not");
}

#[tokio::test]
async fn a_missing_name_differs_from_a_failure_and_is_not_cached() {
    let servers = Servers::default().add(0, NXDOMAIN, NXDOMAIN).await;
    let resolver = servers.resolver();
    let missed = resolver.lookup("node2.test.").await;
    assert_eq!(missed, Err(DnsLookupError::NotFound("node2.test.".into())));
    let before = servers.queries.load(Ordering::Relaxed);
    assert_eq!(resolver.lookup("node2.test.").await, missed);
    assert!(servers.queries.load(Ordering::Relaxed) > before);
    let broken = Servers::default().add(0, SERVFAIL, SERVFAIL).await;
    let failed = broken.resolver().lookup("node2.test.").await;
    assert!(matches!(failed, Err(DnsLookupError::Failed { .. })), "{failed:?}");
}

#[tokio::test]
async fn localhost_and_addresses_need_no_dns_server() {
    let resolver = Resolver::of_servers(&["127.0.0.1:1".parse().unwrap()]).unwrap();
    for (name, expected) in
        [("LocalHost.", "127.0.0.1 ::1"), ("x.localhost", "127.0.0.1 ::1"), ("::1", "::1")]
    {
        assert_eq!(found(&resolver, name).await.0, expected, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_name_in_the_hosts_file_is_final_for_both_address_families() {
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts");
    let resolver =
        Resolver { files: Some(Arc::new([dir.path().join("none"), hosts.clone()])), ..Resolver::system() };
    assert!(in_hosts(&hosts, "pod").is_empty(), "there is no file yet");
    let text = "\u{feff}192.0.2.7 Pod.example.org\tpod # \u{e9} other\r\nnot an address\n 2001:db8::7 six\n\
                ::1%lo bad\n2001:db8::8 both\n192.0.2.8 both";
    std::fs::write(&hosts, [text.as_bytes(), b"\n\xff\xfe latin\n192.0.2.9 last"].concat()).unwrap();
    let start = Instant::now();
    for (name, expected) in [
        ("pod", "192.0.2.7"),
        ("pod.example.org", "192.0.2.7"),
        ("pod.EXAMPLE.org.", "192.0.2.7"),
        ("six", "2001:db8::7"),
        ("both", "192.0.2.8 2001:db8::8"),
        ("last", "192.0.2.9"),
    ] {
        assert_eq!(found(&resolver, name).await.0, expected, "{name}");
    }
    assert_eq!(start.elapsed(), Duration::ZERO, "no server was queried");
    for name in ["other", "bad", "latin"] {
        assert!(in_hosts(&hosts, name).is_empty(), "{name}");
    }
}

#[test]
fn the_system_resolver_works_with_any_resolv_conf() {
    let many = "nameserver 192.0.2.53\nnameserver 2001:db8::53 # backup\nnameserver 192.0.2.54\nnameserver 192.0.2.55\n";
    let expected = HashMap::from([
        ("", (1, "", 1)),
        ("# empty\n", (1, "", 1)),
        ("\0\u{1}nonsense", (1, "", 1)),
        ("nameserver 192.0.2.53\nsearch a.b\noptions ndots:5\n", (1, "a.b", 5)),
        ("# \u{e9}\nnameserver 192.0.2.53\nsearch b\u{fc}cher.example a.b\n", (1, "a.b", 1)),
        ("nameserver 192.0.2.53\nsearch a..b c.d\n", (1, "c.d", 1)),
        ("nameserver 192.0.2.53\nsearch a.b\ndomain c.d\n", (1, "c.d", 1)),
        ("nameserver nonsense\nnameserver 192.0.2.53\nsearch .\n", (1, ".", 1)),
        (many, (3, "", 1)),
    ]);
    for (text, expected) in expected {
        let dns = DnsServers::of_resolv_conf(text.into()).unwrap();
        let search = dns.search.iter().map(Name::to_ascii).collect::<Vec<_>>().join(" ");
        // Without a list, the domain of this machine is searched, if it has one.
        let search = if text.contains("search") { search } else { String::new() };
        assert_eq!((dns.servers.len(), search.as_str(), dns.dots), expected, "{text}");
    }
}

#[test]
fn a_resolv_conf_that_appears_changes_or_becomes_empty_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("resolv.conf");
    let target = dir.path().join("stub");
    // A dangling link, as before a network manager has started.
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let files = Some(Arc::new([path.clone(), dir.path().join("none")]));
    let resolver = Resolver { files, ..Resolver::system() };
    let after = |text: Option<&str>| {
        text.map_or_else(|| std::fs::remove_file(&path), |text| std::fs::write(&target, text)).unwrap();
        assert_eq!(resolver.read_files("node1").unwrap(), [] as [IpAddr; 0]);
        let dns = resolver.dns.lock().clone();
        (dns.dots, dns.servers.len())
    };
    assert!(resolver.read_files("node1").is_ok());
    for (text, expected) in
        [("options ndots:2\n", 2), ("options ndots:3\n", 3), ("", 1), ("options ndots:4\n", 4)]
    {
        assert_eq!(after(Some(text)), (expected, 1), "{text}");
    }
    let kept = resolver.dns.lock().clone();
    resolver.read_files("node1").unwrap();
    assert!(Arc::ptr_eq(&kept, &resolver.dns.lock()), "the cache stays while the file is the same");
    assert_eq!(after(None), (1, 1));
}
