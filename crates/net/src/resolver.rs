//! Resolves names to addresses within a bounded time.

pub(crate) mod resolver_runtime;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use hickory_resolver::Hosts;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::lookup_ip::LookupIp;
use hickory_resolver::net::NetError;
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::system_conf::parse_resolv_conf;
use tokio::time::timeout;
use tracing::warn;

use crate::fd_limit;
use crate::reload::{FileWatcher, ReloadError, ReloadedValue};
use crate::resolver::resolver_runtime::ResolverRuntime;
use tunnel_base::names::Target;

/// A DNS client for addresses: with the system's configuration, or for given servers only. Cheap to clone; clones share
/// one cache.
///
/// Addresses are cached for at most 2 s and failures not at all, so that a moved name is found soon.
#[derive(Debug, Clone)]
pub struct Resolver(ReloadedValue<HostsAndDns>);

/// The reason why a name has no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DnsLookupError {
    /// DNS responded that the name has no address. Usual causes: a typo, or a removed service.
    #[error("{0} is not known to DNS")]
    NotFound(String),
    /// DNS did not respond in time. Usual cause: the servers in `/etc/resolv.conf` cannot be reached.
    #[error("DNS gave no address for {name} within {timeout:?}")]
    Timeout {
        /// The name.
        name: String,
        /// How long this process waited.
        timeout: Duration,
    },
    /// The DNS server refused, or its response was malformed.
    #[error("DNS failed for {name}: {cause}")]
    Failed {
        /// The name.
        name: String,
        /// The resolver's error.
        cause: String,
    },
    /// Too many files are open.
    #[error("{}", fd_limit::REACHED)]
    OpenFiles,
}

/// A source of the addresses of names.
pub trait Lookup: fmt::Debug + Send + Sync {
    /// Like [`Resolver::lookup`].
    fn addresses<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Vec<IpAddr>, DnsLookupError>>;
}

impl Lookup for Resolver {
    fn addresses<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Vec<IpAddr>, DnsLookupError>> {
        self.lookup(name).boxed()
    }
}

impl Resolver {
    /// Creates a resolver with the system's configuration: `/etc/hosts`, then the servers and search list of
    /// `/etc/resolv.conf`.
    ///
    /// Without that file it queries a server on this machine, as the C library does. DNS is not queried for a name in
    /// `/etc/hosts`, whichever address families it has there. Blocks on the disk: for startup only. Run [`Self::watch`]
    /// too.
    pub fn system() -> Result<Self, ReloadError> {
        let paths: Vec<_> =
            [RESOLV_CONF, HOSTS].map(PathBuf::from).into_iter().filter(|p| p.exists()).collect();
        let places = [RESOLV_CONF, HOSTS].map(|file| paths.iter().position(|path| path.as_os_str() == file));
        let made = move |contents: &[Vec<u8>]| {
            let [resolv_conf, hosts] = places.map(|place| contents.get(place?));
            let (config, options) = system_servers(resolv_conf);
            build(config, options, hosts_of(hosts.map_or(&[], Vec::as_slice)))
                .map_err(|cause| format!("cannot set up DNS: {cause}"))
        };
        ReloadedValue::new(paths, made).map(Self)
    }

    /// Creates a resolver for the given servers only, over UDP and TCP. It uses no hosts file and no search list.
    pub fn of_servers(servers: &[SocketAddr]) -> Result<Self, DnsLookupError> {
        let servers = servers.iter().map(name_server).collect();
        let mut options = ResolverOpts::default();
        options.ndots = 0;
        build(ResolverConfig::from_name_servers(servers), options, Hosts::default())
            .map(|resolver| Self(ReloadedValue::fixed(resolver)))
            .map_err(|cause| DnsLookupError::Failed { name: "any name".into(), cause: cause.to_string() })
    }

    /// Reloads the system's files when they change, because an edge that moves to another network gets other servers.
    pub fn watch(&self, files: &FileWatcher) {
        files.watch("dns", &self.0);
    }

    /// Returns the addresses of a name, at least one, IPv4 first. Takes at most 5 s. Cancel safe.
    ///
    /// An address as text is returned as is. `localhost` and the names below it resolve to loopback without DNS.
    pub async fn lookup(&self, name: &str) -> Result<Vec<IpAddr>, DnsLookupError> {
        if let Ok(ip) = name.parse() {
            return Ok(vec![ip]);
        }
        if is_localhost(name) {
            return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
        }
        let names = self.0.load();
        let own = names.in_hosts(name);
        if !own.is_empty() {
            return Ok(own);
        }
        let found = timeout(QUERY_TIMEOUT, names.dns.lookup_ip(name)).await.unwrap_or(Err(NetError::Timeout));
        let mut addresses: Vec<IpAddr> = found.map_err(|cause| failed(name, &cause))?.iter().collect();
        addresses.sort_by_key(IpAddr::is_ipv6);
        if addresses.is_empty() { Err(DnsLookupError::NotFound(name.into())) } else { Ok(addresses) }
    }

    /// Like [`Self::lookup`], for the host of a target. Returns the addresses with the target's port.
    pub async fn lookup_target(&self, at: &Target) -> Result<Vec<SocketAddr>, DnsLookupError> {
        let found = self.lookup(&at.host.to_string()).await?;
        Ok(found.into_iter().map(|ip| SocketAddr::new(ip, at.port)).collect())
    }
}

/// The names of the hosts file, and DNS for all other names.
#[derive(Debug)]
struct HostsAndDns {
    hosts: Hosts,
    dns: hickory_resolver::Resolver<ResolverRuntime>,
}

impl HostsAndDns {
    /// Returns the addresses of a name in the hosts file, IPv4 first. Empty if the name is not there.
    fn in_hosts(&self, name: &str) -> Vec<IpAddr> {
        let Ok(name) = Name::from_str(name) else { return Vec::new() };
        let of = |kind| self.hosts.lookup_static_host(&Query::query(name.clone(), kind));
        let found = [RecordType::A, RecordType::AAAA].into_iter().filter_map(of);
        found.flat_map(|found| LookupIp::from(found).into_iter()).collect()
    }
}

/// The hickory resolver gets no hosts file, because it would query servers for each family that the file lacks.
fn build(config: ResolverConfig, options: ResolverOpts, hosts: Hosts) -> Result<HostsAndDns, NetError> {
    let mut builder = hickory_resolver::Resolver::builder_with_config(config, ResolverRuntime::default());
    let to_set = builder.options_mut();
    *to_set = options;
    to_set.use_hosts_file = ResolveHosts::Never;
    to_set.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    to_set.timeout = to_set.timeout.min(ONE_TRY);
    to_set.positive_max_ttl = Some(FAILURE_TTL);
    to_set.negative_max_ttl = Some(Duration::ZERO);
    Ok(HostsAndDns { hosts, dns: builder.build()? })
}

/// Parses a hosts file. Invalid lines are skipped.
fn hosts_of(content: &[u8]) -> Hosts {
    let mut hosts = Hosts::default();
    if let Err(cause) = hosts.read_hosts_conf(String::from_utf8_lossy(content).as_bytes()) {
        warn!(error = %cause, file = HOSTS, "invalid lines in hosts file skipped");
    }
    hosts
}

/// Returns the servers of `resolv.conf`, or a server on this machine if the file is missing or has none.
fn system_servers(resolv_conf: Option<&Vec<u8>>) -> (ResolverConfig, ResolverOpts) {
    let text = resolv_conf.ok_or_else(|| NetError::from("no such file"));
    let servers = text.and_then(|text| parse_resolv_conf(ascii(text)));
    servers.unwrap_or_else(|cause| {
        warn!(error = %cause, file = RESOLV_CONF, "no DNS server configured, using 127.0.0.1");
        let own = NameServerConfig::udp_and_tcp(Ipv4Addr::LOCALHOST.into());
        (ResolverConfig::from_name_servers(vec![own]), ResolverOpts::default())
    })
}

/// Removes search domains that are not ASCII from a `resolv.conf`, as the parser rejects the whole file for one.
fn ascii(resolv_conf: &[u8]) -> String {
    let text = String::from_utf8_lossy(resolv_conf);
    let lines = text.lines().map(|line| {
        let (ascii, other): (Vec<_>, Vec<_>) = line.split_whitespace().partition(|word| word.is_ascii());
        if !other.is_empty() && !line.starts_with(['#', ';']) {
            let hint = "write it in Punycode (xn--)";
            warn!(domain = other.join(" "), file = RESOLV_CONF, hint, "search domain is not ASCII, skipped");
        }
        ascii.join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn name_server(at: &SocketAddr) -> NameServerConfig {
    let mut udp = ConnectionConfig::udp();
    let mut tcp = ConnectionConfig::tcp();
    (udp.port, tcp.port) = (at.port(), at.port());
    NameServerConfig::new(at.ip(), true, vec![udp, tcp])
}

fn is_localhost(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost")
}

fn failed(name: &str, cause: &NetError) -> DnsLookupError {
    let name = name.to_owned();
    match cause {
        cause if cause.is_no_records_found() => DnsLookupError::NotFound(name),
        NetError::Io(cause) if fd_limit::is_exceeded(cause) => DnsLookupError::OpenFiles,
        NetError::Timeout => DnsLookupError::Timeout { name, timeout: QUERY_TIMEOUT },
        NetError::NoConnections => {
            DnsLookupError::Failed { name, cause: "no DNS server can be reached".to_owned() }
        }
        cause => DnsLookupError::Failed { name, cause: cause.to_string() },
    }
}

/// Timeout of a whole lookup: half of an edge's time for dialling a target.
///
/// Even one dead server costs its timeout for each attempt, and once more.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of one query to one server, so that a second server is queried within [`QUERY_TIMEOUT`].
const ONE_TRY: Duration = Duration::from_secs(2);

/// Maximum time for which an address is cached: a burst of connections queries once, and a moved node is found soon.
const FAILURE_TTL: Duration = Duration::from_secs(2);

const RESOLV_CONF: &str = "/etc/resolv.conf";
const HOSTS: &str = "/etc/hosts";

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hickory_resolver::proto::op::{Message, ResponseCode};
    use hickory_resolver::proto::rr::rdata::A;
    use hickory_resolver::proto::rr::{RData, Record};
    use tokio::net::UdpSocket;

    use tunnel_base::drain::Drain;

    use super::*;

    /// A DNS server that resolves `edge1.nodes.`, fails for `broken.`, and has no other names.
    async fn server() -> (SocketAddr, Arc<AtomicUsize>, Drain) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = socket.local_addr().unwrap();
        let (queries, drain) = (Arc::new(AtomicUsize::new(0)), Drain::new());
        let count = Arc::clone(&queries);
        drain.spawn(tracing::Span::none(), async move {
            let mut space = [0; 1500];
            loop {
                let (n, from) = socket.recv_from(&mut space).await.unwrap();
                count.fetch_add(1, Ordering::Relaxed);
                let question = Message::from_vec(&space[..n]).unwrap();
                let _ = socket.send_to(&answer(&question).to_vec().unwrap(), from).await;
            }
        });
        (at, queries, drain)
    }

    fn answer(question: &Message) -> Message {
        let query = &question.queries[0];
        let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
        answer.add_query(query.clone());
        match query.name().to_ascii().as_str() {
            "edge1.nodes." if query.query_type() == RecordType::A => {
                let address = RData::A(A::new(10, 0, 0, 7));
                answer.add_answer(Record::from_rdata(query.name().clone(), 60, address));
            }
            "edge1.nodes." => {}
            "broken." => answer.metadata.response_code = ResponseCode::ServFail,
            _ => answer.metadata.response_code = ResponseCode::NXDomain,
        }
        answer
    }

    #[tokio::test]
    async fn a_name_is_queried_at_the_given_server_and_cached() {
        let (at, queries, _drain) = server().await;
        let resolver = Resolver::of_servers(&[at]).unwrap();
        let expected: IpAddr = "10.0.0.7".parse().unwrap();
        assert_eq!(resolver.lookup("edge1.nodes.").await.unwrap(), [expected]);
        assert_eq!(queries.load(Ordering::Relaxed), 2, "one query for each address family");
        resolver.lookup("edge1.nodes.").await.unwrap();
        assert!(
            queries.load(Ordering::Relaxed) <= 3,
            "the address is cached, the lack of an IPv6 address is not"
        );
    }

    #[tokio::test]
    async fn a_missing_name_differs_from_a_failure_and_is_not_cached() {
        let (at, queries, _drain) = server().await;
        let resolver = Resolver::of_servers(&[at]).unwrap();
        let missed = resolver.lookup("edge2.nodes.").await;
        assert_eq!(missed, Err(DnsLookupError::NotFound("edge2.nodes.".into())));
        let before = queries.load(Ordering::Relaxed);
        assert_eq!(resolver.lookup("edge2.nodes.").await, missed);
        assert!(queries.load(Ordering::Relaxed) > before);
        assert!(matches!(resolver.lookup("broken.").await, Err(DnsLookupError::Failed { .. })));
    }

    #[tokio::test]
    async fn localhost_and_addresses_need_no_dns_server() {
        let resolver = Resolver::of_servers(&["127.0.0.1:1".parse().unwrap()]).unwrap();
        let own: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        assert_eq!(resolver.lookup("LocalHost.").await.unwrap(), own);
        assert_eq!(resolver.lookup("x.localhost").await.unwrap(), own);
        assert_eq!(resolver.lookup("::1").await.unwrap(), own[1..]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lookup_at_a_silent_dns_server_takes_at_most_the_query_timeout() {
        let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let resolver = Resolver::of_servers(&[silent.local_addr().unwrap()]).unwrap();
        let start = tokio::time::Instant::now();
        assert!(resolver.lookup("edge1.nodes.").await.is_err());
        assert!(start.elapsed() <= QUERY_TIMEOUT, "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_in_the_hosts_file_is_final_for_both_address_families() {
        let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let server = name_server(&silent.local_addr().unwrap());
        let search = vec![Name::from_ascii("cluster.example.").unwrap()];
        let config = ResolverConfig::from_parts(None, search, vec![server]);
        let mut options = ResolverOpts::default();
        options.ndots = 5;
        let text = "192.0.2.7 Pod.example.org pod # \u{e9}\nnot an address\n2001:db8::7 six\n192.0.2.8 both\n2001:db8::8 both\n";
        let names = build(config, options, hosts_of(text.as_bytes())).unwrap();
        let resolver = Resolver(ReloadedValue::fixed(names));
        let start = tokio::time::Instant::now();
        for (name, expected) in [
            ("pod", vec!["192.0.2.7"]),
            ("pod.example.org", vec!["192.0.2.7"]),
            ("pod.EXAMPLE.org.", vec!["192.0.2.7"]),
            ("six", vec!["2001:db8::7"]),
            ("both", vec!["192.0.2.8", "2001:db8::8"]),
        ] {
            let expected: Vec<IpAddr> = expected.iter().map(|ip| ip.parse().unwrap()).collect();
            assert_eq!(resolver.lookup(name).await, Ok(expected), "{name}");
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "no server was queried");
    }

    #[tokio::test]
    async fn the_system_resolver_works_with_any_resolv_conf() {
        assert!(Resolver::system().is_ok());
        for nothing in [None, Some(&b"# empty\n".to_vec())] {
            let (config, _) = system_servers(nothing);
            assert_eq!(config.name_servers()[0].ip, Ipv4Addr::LOCALHOST);
        }
        let (config, options) =
            system_servers(Some(&b"nameserver 192.0.2.53\nsearch a.b\noptions ndots:5\n".to_vec()));
        assert_eq!(
            (config.name_servers()[0].ip.to_string().as_str(), config.search().len()),
            ("192.0.2.53", 1)
        );
        assert_eq!(options.ndots, 5);
        let text = "# a comment \u{e9}\nnameserver 192.0.2.53\nsearch b\u{fc}cher.example a.b\n";
        let (config, _) = system_servers(Some(&text.as_bytes().to_vec()));
        assert_eq!(
            (config.name_servers().len(), config.search()),
            (1, &[Name::from_ascii("a.b").unwrap()][..])
        );
    }
}
