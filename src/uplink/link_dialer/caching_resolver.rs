//! Caches the addresses of the names that an edge dials, for use while DNS fails.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tracing::info_span;

use tunnel_base::drain::Drain;
use tunnel_net::resolver::{DnsLookupError, Resolver};

/// A resolver that caches the last addresses of each name. It allows a link that fails while DNS is down to be
/// redialled within the resume timeout of its sessions. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct CachingResolver {
    pub(crate) resolver: Resolver,
    /// Time for which the last addresses stay in use after DNS first responds that a name does not exist.
    grace: Duration,
    drain: Drain,
    last: Arc<Mutex<HashMap<String, LastAddresses>>>,
}

/// The addresses of a server's name to dial, from DNS or, if DNS failed, from an earlier lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResolvedServer {
    pub(crate) addresses: Vec<IpAddr>,
    /// The DNS error, if these are the last known addresses.
    pub(crate) failure: Option<DnsLookupError>,
}

/// The addresses that DNS last returned for a server's name, kept for when DNS fails.
#[derive(Debug)]
struct LastAddresses {
    addresses: Vec<IpAddr>,
    /// Time when DNS first responded that the name does not exist, since it last returned addresses.
    missing: Option<Instant>,
}

impl CachingResolver {
    /// Creates an empty cache. Lookups in flight end when draining starts.
    pub(crate) fn new(resolver: Resolver, grace: Duration, drain: Drain) -> Self {
        Self { resolver, grace, drain, last: Arc::default() }
    }

    /// Returns the addresses of a name. With cached addresses it takes at most 1 s; a slower DNS response is cached for
    /// the next call. Cancel safe.
    ///
    /// # Errors
    ///
    /// Returns the DNS error if no address is cached.
    pub(crate) async fn addresses_of(&self, name: &str) -> Result<ResolvedServer, DnsLookupError> {
        let Some(addresses) = self.last(name) else { return self.query_dns(name).await };
        let (answers, answer) = oneshot::channel();
        let known = self.clone();
        let queried = name.to_owned();
        self.drain.spawn(info_span!("lookup", name), async move {
            if let Some(found) = known.drain.run_until(known.query_dns(&queried)).await {
                let _ = answers.send(found);
            }
        });
        match timeout(DNS_TIMEOUT, answer).await {
            Ok(Ok(found)) => found,
            Ok(Err(_)) | Err(_) => {
                let failure = DnsLookupError::Timeout { name: name.to_owned(), timeout: DNS_TIMEOUT };
                Ok(ResolvedServer { addresses, failure: Some(failure) })
            }
        }
    }

    /// Queries DNS. If it fails, the last addresses stay in use; if the name does not exist, only for `grace`.
    async fn query_dns(&self, name: &str) -> Result<ResolvedServer, DnsLookupError> {
        let found = self.resolver.lookup(name).await;
        let mut all = self.last.lock();
        let failure = match found {
            Ok(addresses) => {
                all.insert(name.to_owned(), LastAddresses { addresses: addresses.clone(), missing: None });
                return Ok(ResolvedServer { addresses, failure: None });
            }
            Err(failure) => failure,
        };
        let Some(last) = all.get_mut(name) else { return Err(failure) };
        if matches!(failure, DnsLookupError::NotFound(_)) {
            let since = *last.missing.get_or_insert_with(Instant::now);
            if since.elapsed() >= self.grace {
                all.remove(name);
                return Err(failure);
            }
        }
        Ok(ResolvedServer { addresses: last.addresses.clone(), failure: Some(failure) })
    }

    fn last(&self, name: &str) -> Option<Vec<IpAddr>> {
        let all = self.last.lock();
        all.get(name).map(|last| last.addresses.clone())
    }
}

/// Timeout for DNS if there are cached addresses, which need the rest of a dial's time.
const DNS_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use hickory_resolver::proto::op::{Message, ResponseCode};
    use hickory_resolver::proto::rr::rdata::A;
    use hickory_resolver::proto::rr::{RData, Record, RecordType};
    use tokio::net::UdpSocket;

    use super::*;

    const NAME: &str = "cloud.example.";
    const GRACE: Duration = Duration::from_secs(60);

    /// The response of a DNS server.
    #[derive(Debug, Clone, Copy)]
    enum Answer {
        Address(u8),
        Code(ResponseCode),
        Nothing,
    }

    /// Starts a DNS server. Returns the cache that queries it, and its current response.
    async fn dns() -> (CachingResolver, Arc<Mutex<Answer>>) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let drain = Drain::new();
        let resolver = Resolver::of_servers(&[socket.local_addr().unwrap()]).unwrap();
        let known = CachingResolver::new(resolver, GRACE, drain.clone());
        let answer = Arc::new(Mutex::new(Answer::Address(1)));
        let answers = answer.clone();
        drain.spawn(tracing::Span::none(), async move {
            let mut space = [0; 1500];
            loop {
                let (n, from) = socket.recv_from(&mut space).await.unwrap();
                let question = Message::from_vec(&space[..n]).unwrap();
                let query = question.queries[0].clone();
                let mut message = Message::response(question.metadata.id, question.metadata.op_code);
                message.add_query(query.clone());
                match *answers.lock() {
                    Answer::Nothing => continue,
                    Answer::Code(code) => message.metadata.response_code = code,
                    Answer::Address(last) if query.query_type() == RecordType::A => {
                        let data = RData::A(A::new(10, 0, 0, last));
                        // With a TTL of 0 the resolver caches nothing.
                        message.add_answer(Record::from_rdata(query.name().clone(), 0, data));
                    }
                    Answer::Address(_) => {}
                }
                let _ = socket.send_to(&message.to_vec().unwrap(), from).await;
            }
        });
        (known, answer)
    }

    fn set_answer(answer: &Mutex<Answer>, next: Answer) {
        *answer.lock() = next;
    }

    /// Returns the last byte of the only address, and whether it came from DNS.
    async fn found(known: &CachingResolver) -> Option<(u8, bool)> {
        let found = known.addresses_of(NAME).await.ok()?;
        let [IpAddr::V4(ip)] = found.addresses[..] else { panic!("{found:?}") };
        Some((ip.octets()[3], found.failure.is_none()))
    }

    #[tokio::test]
    async fn known_addresses_stay_in_use_while_dns_fails() {
        let (known, answer) = dns().await;
        assert_eq!(found(&known).await, Some((1, true)));
        set_answer(&answer, Answer::Code(ResponseCode::ServFail));
        assert_eq!(found(&known).await, Some((1, false)));
        set_answer(&answer, Answer::Code(ResponseCode::Refused));
        assert_eq!(found(&known).await, Some((1, false)));
        set_answer(&answer, Answer::Address(2));
        assert_eq!(found(&known).await, Some((2, true)));
        set_answer(&answer, Answer::Code(ResponseCode::ServFail));
        assert_eq!(found(&known).await, Some((2, false)));
        assert!(known.addresses_of("unknown.example.").await.is_err(), "another name has no addresses");
    }

    #[tokio::test]
    async fn known_addresses_are_used_within_a_second_if_dns_is_silent() {
        let (known, answer) = dns().await;
        assert_eq!(found(&known).await, Some((1, true)));
        set_answer(&answer, Answer::Nothing);
        tokio::time::pause();
        let start = Instant::now();
        assert_eq!(found(&known).await, Some((1, false)));
        assert!(start.elapsed() <= DNS_TIMEOUT + Duration::from_millis(2), "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn a_late_dns_answer_applies_to_the_next_dial() {
        let (known, answer) = dns().await;
        assert_eq!(found(&known).await, Some((1, true)));
        set_answer(&answer, Answer::Nothing);
        assert_eq!(found(&known).await, Some((1, false)));
        // The lookup is still in flight, and its next query gets a response.
        set_answer(&answer, Answer::Address(3));
        let patience = Duration::from_secs(20);
        let late = async {
            while known.last(NAME) != Some(vec!["10.0.0.3".parse().unwrap()]) {
                tokio::task::yield_now().await;
            }
        };
        timeout(patience, late).await.unwrap();
    }

    #[tokio::test]
    async fn nxdomain_takes_effect_after_the_grace_time() {
        let (known, answer) = dns().await;
        assert_eq!(found(&known).await, Some((1, true)));
        set_answer(&answer, Answer::Code(ResponseCode::NXDomain));
        assert_eq!(found(&known).await, Some((1, false)));
        let age = |time: Duration| {
            let mut all = known.last.lock();
            let missing = &mut all.get_mut(NAME).unwrap().missing;
            *missing = missing.map(|since| since - time);
        };
        age(GRACE / 2);
        assert_eq!(found(&known).await, Some((1, false)));
        set_answer(&answer, Answer::Address(1));
        assert_eq!(found(&known).await, Some((1, true)), "`grace` starts again");
        set_answer(&answer, Answer::Code(ResponseCode::NXDomain));
        assert_eq!(found(&known).await, Some((1, false)));
        age(GRACE);
        let missing = Err(DnsLookupError::NotFound(NAME.to_owned()));
        assert_eq!(known.addresses_of(NAME).await, missing);
        set_answer(&answer, Answer::Code(ResponseCode::ServFail));
        assert!(known.addresses_of(NAME).await.is_err(), "the addresses are no longer cached");
    }
}
