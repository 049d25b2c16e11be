//! Resolves names to addresses within a bounded time.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, Either, select};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{RuntimeProvider, TokioRuntimeProvider};
use hickory_resolver::proto::rr::{Name, RecordType};
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::warn;

use crate::dial::dial;
use crate::fd_limit;
use tunnel_proto::names::{Host, Target};

/// A DNS client for addresses: with the system's configuration, or for given servers only. Cheap to clone; clones share
/// one cache.
///
/// Addresses are cached for at most 2 s and failures not at all, so that a moved name is found soon.
#[derive(Debug, Clone)]
pub struct Resolver {
    dns: Arc<Mutex<Arc<DnsServers>>>,
    /// The system's `resolv.conf` and hosts file.
    files: Option<Arc<[PathBuf; 2]>>,
}

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
    /// Both are read for each name, as by the C library, so that a change applies at once and a long hosts file costs no
    /// memory. Without servers it queries one on this machine. DNS is not queried for a name in `/etc/hosts`, whichever
    /// address families it has there.
    pub fn system() -> Self {
        Self { dns: Arc::default(), files: Some(Arc::new([RESOLV_CONF, HOSTS].map(PathBuf::from))) }
    }

    /// Creates a resolver for the given servers only, over UDP and TCP. It uses no hosts file and no search list.
    pub fn of_servers(servers: &[SocketAddr]) -> Result<Self, DnsLookupError> {
        let servers = servers.iter().map(name_server);
        let dns = DnsServers::new(servers, &ResolverOpts::default());
        let dns = dns.map_err(|cause| failed("any name", &cause))?;
        Ok(Self { dns: Arc::new(Mutex::new(Arc::new(dns))), files: None })
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
        // The hosts file comes before DNS, as in the system's own resolver.
        if self.files.is_some() {
            let this = self.clone();
            let sought = name.to_owned();
            let read = spawn_blocking(move || this.read_files(&sought)).await;
            let own = read.unwrap_or_else(|cause| Err(cause.to_string().into()));
            let own = own.map_err(|cause| failed(name, &cause))?;
            if !own.is_empty() {
                return Ok(own);
            }
        }
        // A copy: the lock is not held during the query.
        let dns = self.dns.lock().clone();
        let found = timeout(QUERY_TIMEOUT, dns.search(name)).await.unwrap_or(Err(NetError::Timeout));
        let addresses = found.map_err(|cause| failed(name, &cause))?;
        if addresses.is_empty() { Err(DnsLookupError::NotFound(name.into())) } else { Ok(addresses) }
    }

    /// Like [`Self::lookup`], for the host of a target. Returns the addresses with the target's port.
    pub async fn lookup_target(&self, at: &Target) -> Result<Vec<SocketAddr>, DnsLookupError> {
        let found = self.lookup(&at.host.to_string()).await?;
        Ok(found.into_iter().map(|ip| SocketAddr::new(ip, at.port)).collect())
    }

    /// Reads the system's files. Returns the addresses of a name in the hosts file. Blocks on the disk.
    fn read_files(&self, name: &str) -> Result<Vec<IpAddr>, NetError> {
        let Some([resolv_conf, hosts]) = self.files.as_deref() else { return Ok(Vec::new()) };
        let text = match std::fs::read(resolv_conf) {
            // It passes: the file is still there.
            Err(cause) if fd_limit::is_exceeded(&cause) => return Err(cause.into()),
            read => read.unwrap_or_default(),
        };
        let mut dns = self.dns.lock();
        if dns.text.as_ref() != Some(&text) {
            *dns = Arc::new(DnsServers::of_resolv_conf(text)?);
        }
        drop(dns);
        Ok(in_hosts(hosts, name))
    }
}

/// DNS servers, and the names that are queried there for the name that is looked up.
#[derive(Debug, Default)]
struct DnsServers {
    /// The `resolv.conf` that they are from.
    text: Option<Vec<u8>>,
    /// One client for each server, in the order of the file.
    servers: Vec<DnsClient>,
    /// Domains to append to a name, each with a final dot.
    search: Vec<Name>,
    /// Number of dots of a name that is queried as is before the search list.
    dots: usize,
}

/// A client of one server, with its cache.
type DnsClient = hickory_resolver::Resolver<ResolverRuntime>;

impl DnsServers {
    fn new(
        servers: impl IntoIterator<Item = NameServerConfig>,
        options: &ResolverOpts,
    ) -> Result<Self, NetError> {
        let client = |server| {
            let config = ResolverConfig::from_name_servers(vec![server]);
            let mut builder = DnsClient::builder_with_config(config, ResolverRuntime::default());
            *builder.options_mut() = options.clone();
            let to_set = builder.options_mut();
            to_set.use_hosts_file = ResolveHosts::Never;
            // All queries of an attempt are sent in its first second. The other one is for a server that was away then.
            to_set.timeout = QUERY_TIMEOUT / 2;
            to_set.attempts = 1;
            to_set.positive_max_ttl = Some(FAILURE_TTL);
            to_set.negative_max_ttl = Some(Duration::ZERO);
            builder.build()
        };
        let servers = servers.into_iter().map(client).collect::<Result<_, _>>()?;
        Ok(Self { servers, ..Self::default() })
    }

    /// Reads the text of a `resolv.conf`. Invalid words are skipped. Without a server in it, there is one on this machine.
    fn of_resolv_conf(text: Vec<u8>) -> Result<Self, NetError> {
        let (mut file, invalid) = resolv_conf::Config::parse_with_errors(&text);
        for cause in invalid {
            warn!(error = %cause, file = RESOLV_CONF, "part of the DNS configuration skipped");
        }
        file.glibc_normalize();
        let mut servers: Vec<IpAddr> = file.nameservers.iter().map(IpAddr::from).collect();
        if servers.is_empty() {
            warn!(file = RESOLV_CONF, "no DNS server configured, using 127.0.0.1");
            servers.push(Ipv4Addr::LOCALHOST.into());
        }
        let mut options = ResolverOpts::default();
        options.edns0 = file.edns0;
        let servers = servers.into_iter().map(NameServerConfig::udp_and_tcp);
        let mut domains: Vec<_> = file.get_last_search_or_domain().cloned().collect();
        // As glibc does: without a list the domain of this machine's own name is searched.
        if domains.is_empty() {
            domains.extend(file.get_system_domain());
        }
        let search = domains.iter().filter_map(|domain| {
            let parsed = Name::from_ascii(domain);
            if parsed.is_err() {
                let hint = "write it in ASCII, as Punycode (xn--)";
                warn!(domain, file = RESOLV_CONF, hint, "invalid search domain skipped");
            }
            parsed.ok()
        });
        let dots = usize::try_from(file.ndots).unwrap_or(usize::MAX);
        Ok(Self { text: Some(text), search: search.collect(), dots, ..Self::new(servers, &options)? })
    }

    /// Queries a name, and that name in each domain of the search list, until one of them has addresses.
    ///
    /// The error is that of the name itself if it comes first. Otherwise a failure outweighs a name that does not exist.
    async fn search(&self, name: &str) -> Result<Vec<IpAddr>, NetError> {
        let mut itself = Name::from_utf8(name)?;
        let in_domains = self.search.iter().filter(|_| !itself.is_fqdn());
        let mut names: Vec<_> =
            in_domains.filter_map(|domain| itself.clone().append_domain(domain).ok()).collect();
        // As glibc does: a name with `ndots` dots or more is tried as it is first.
        let is_first = usize::from(itself.num_labels()) > self.dots;
        itself.set_fqdn(true);
        names.insert(if is_first { 0 } else { names.len() }, itself);
        let mut failure: Option<NetError> = None;
        for name in names {
            match self.query(&name).await {
                Ok(found) => return Ok(found),
                Err(cause)
                    if failure.as_ref().is_none_or(|first| !is_first && first.is_no_records_found()) =>
                {
                    failure = Some(cause);
                }
                Err(_) => {}
            }
        }
        Err(failure.unwrap_or(NetError::NoConnections))
    }

    /// Queries the servers in their order, the next one after an error or silence of those before. The first answer
    /// counts, also that the name does not exist.
    async fn query(&self, name: &Name) -> Result<Vec<IpAddr>, NetError> {
        let mut others = self.servers.iter();
        let mut asked = FuturesUnordered::new();
        let mut failure = NetError::NoConnections;
        loop {
            asked.extend(others.next().map(|server| addresses_at(server, name)));
            let patience = if others.len() > 0 { ONE_TRY } else { QUERY_TIMEOUT };
            match timeout(patience, asked.next()).await {
                Ok(Some(Err(cause))) if !cause.is_no_records_found() => failure = cause,
                Ok(Some(answer)) => return answer,
                // No server is left.
                Ok(None) => return Err(failure),
                Err(_) => {}
            }
        }
    }
}

/// Queries one server for both families, IPv4 first. Addresses of one family do not wait for a server that never answers
/// for the other (RFC 8305, section 3).
async fn addresses_at(server: &DnsClient, name: &Name) -> Result<Vec<IpAddr>, NetError> {
    let of = async |kind| {
        let found = server.lookup(name.clone(), kind).await?;
        Ok(found.answers().iter().filter_map(|record| record.data.ip_addr()).collect())
    };
    let (ipv4, ipv6): (Result<Vec<_>, NetError>, Result<Vec<_>, _>) =
        match select(pin!(of(RecordType::A)), pin!(of(RecordType::AAAA))).await {
            Either::Left((ipv4, other)) => {
                // A name that does not exist has no addresses of the other family either.
                let is_known = ipv4.as_ref().map_or_else(NetError::is_nx_domain, |_| true);
                let patience = if is_known { RESOLUTION_DELAY } else { QUERY_TIMEOUT };
                (ipv4, timeout(patience, other).await.unwrap_or(Err(NetError::Timeout)))
            }
            // Not every machine that gets IPv6 addresses can use them.
            Either::Right((ipv6, other)) => {
                let patience = if ipv6.is_ok() { ONE_TRY } else { QUERY_TIMEOUT };
                (timeout(patience, other).await.unwrap_or(Err(NetError::Timeout)), ipv6)
            }
        };
    match (ipv4, ipv6) {
        (Ok(ipv4), ipv6) => Ok(ipv4.into_iter().chain(ipv6.unwrap_or_default()).collect()),
        (Err(_), Ok(ipv6)) => Ok(ipv6),
        (Err(ipv4), Err(ipv6)) => {
            Err(if ipv4.is_nx_domain() || ipv6.is_no_records_found() { ipv4 } else { ipv6 })
        }
    }
}

/// Returns the addresses of a name in a hosts file, IPv4 first. Empty if the name is not there. Blocks on the disk.
///
/// Invalid lines are skipped.
fn in_hosts(hosts: &Path, name: &str) -> Vec<IpAddr> {
    let Ok(file) = File::open(hosts) else { return Vec::new() };
    let name = name.strip_suffix('.').unwrap_or(name);
    let mut file = BufReader::new(file);
    let mut line = Vec::new();
    let mut found = Vec::<IpAddr>::new();
    while file.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        let text = String::from_utf8_lossy(&line);
        let entry = text.split('#').next().unwrap_or_default().trim_start_matches('\u{feff}');
        let mut words = entry.split_ascii_whitespace();
        let address = words.next();
        if words.any(|word| word.eq_ignore_ascii_case(name)) {
            found.extend(address.and_then(|address| address.parse::<IpAddr>().ok()));
        }
        line.clear();
    }
    found.sort_by_key(IpAddr::is_ipv6);
    found
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
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which the next server is queried too, so that three servers have a chance within [`QUERY_TIMEOUT`].
const ONE_TRY: Duration = Duration::from_millis(1500);

/// Time that IPv4 addresses wait for IPv6 ones.
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);

/// Maximum time for which an address is cached: a burst of connections queries once, and a moved node is found soon.
const FAILURE_TTL: Duration = Duration::from_secs(2);

const RESOLV_CONF: &str = "/etc/resolv.conf";
const HOSTS: &str = "/etc/hosts";

/// A tokio runtime for the resolver, like its standard one, but with the mark on sockets.
#[derive(Clone, Default)]
struct ResolverRuntime(TokioRuntimeProvider);

impl RuntimeProvider for ResolverRuntime {
    type Handle = <TokioRuntimeProvider as RuntimeProvider>::Handle;
    type Timer = <TokioRuntimeProvider as RuntimeProvider>::Timer;
    type Udp = UdpSocket;
    type Tcp = AsyncIoTokioAsStd<TcpStream>;

    fn create_handle(&self) -> Self::Handle {
        self.0.create_handle()
    }

    fn connect_tcp(
        &self,
        server: SocketAddr,
        _from: Option<SocketAddr>,
        timeout: Option<Duration>,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Tcp>>>> {
        Box::pin(async move {
            let timeout = timeout.unwrap_or(ONE_TRY);
            let socket = dial(&Host::Ip(server.ip()), &[server], timeout).await.map_err(io::Error::other)?;
            fd_limit::ensure_outside_half_of_reserve(&socket)?;
            Ok(AsyncIoTokioAsStd(socket))
        })
    }

    fn bind_udp(
        &self,
        at: SocketAddr,
        server: SocketAddr,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Udp>>>> {
        let bound = self.0.bind_udp(at, server);
        Box::pin(async move {
            let socket = bound.await?;
            fd_limit::ensure_outside_half_of_reserve(&socket)?;
            crate::mark::put_on(&SockRef::from(&socket))?;
            Ok(socket)
        })
    }
}

#[cfg(test)]
mod tests;
