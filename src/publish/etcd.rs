//! Records in etcd in the form of CoreDNS's etcd plugin, with a lease that ends with this server.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::time::Instant;

use crate::etcd::member::{EtcdConnection, EtcdError, EtcdErrorKind};
use crate::etcd::{EtcdClient, FailedCalls};
use tunnel_base::stores::{RecordStore, StoreFuture};

/// The records of this server's nodes in an etcd cluster, from which DNS reads them.
#[derive(Debug)]
pub struct EtcdRecords {
    /// The members of the cluster.
    members: EtcdClient,
    prefix: String,
    address: IpAddr,
    /// Part of our keys, so that servers do not overwrite one another.
    server: String,
    lease: Option<EtcdLease>,
    /// Current limit of concurrent changes.
    at_once: usize,
}

/// A lease: etcd deletes our keys unless it is renewed.
#[derive(Debug)]
struct EtcdLease {
    id: i64,
    /// Time when the lease was last granted or renewed. It is taken before the request, so it is never too late.
    kept: Instant,
    /// Records known to be stored under the lease.
    written: BTreeSet<String>,
    /// Records that may be stored under the lease, because the response to their write did not arrive.
    unsure: BTreeSet<String>,
}

impl EtcdRecords {
    /// Creates the records of the server with this address; sends no request. `prefix` is that of all keys, without a
    /// trailing `/`.
    pub fn new(members: EtcdClient, prefix: String, address: IpAddr) -> Self {
        let server = format!("{:016x}", rand::random::<u64>());
        Self { members, prefix, address, server, lease: None, at_once: INITIAL_AT_ONCE }
    }

    async fn write_once(&mut self, records: &BTreeSet<String>) -> Result<(), EtcdError> {
        self.keep().await?;
        let Some(lease) = &self.lease else { return Err(EtcdError::LeaseLost) };
        let new = records.difference(&lease.written).map(|name| (name.clone(), true));
        let removed = lease.written.union(&lease.unsure).filter(|name| !records.contains(*name));
        let changes: Vec<_> = new.chain(removed.map(|name| (name.clone(), false))).collect();
        let mut left = changes.as_slice();
        while !left.is_empty() {
            self.keep().await?;
            let (some, rest) = left.split_at(left.len().min(self.at_once));
            let started = Instant::now();
            let changed = self.change(some).await;
            self.pace(some.len(), started.elapsed(), changed.is_ok());
            changed?;
            left = rest;
        }
        Ok(())
    }

    /// Adapts the limit of concurrent changes. It halves after slow or failed changes: all servers' changes together
    /// must complete before they time out. It doubles only after a full batch was fast, because a smaller one says
    /// nothing.
    fn pace(&mut self, count: usize, took: Duration, are_done: bool) {
        if !are_done || took > SLOW_BATCH {
            self.at_once = (self.at_once / 2).max(MIN_AT_ONCE);
        } else if count == self.at_once && took < SLOW_BATCH / 4 {
            self.at_once = (self.at_once * 2).min(MAX_AT_ONCE);
        }
    }

    /// Grants or renews the lease if little of its time is left.
    async fn keep(&mut self) -> Result<(), EtcdError> {
        let sent_at = Instant::now();
        let connection = self.members.connected().await?;
        if let Some(lease) = &mut self.lease {
            if lease.kept.elapsed() < RENEWAL_INTERVAL {
                return Ok(());
            }
            if connection.keep_alive(lease.id).await? {
                lease.kept = sent_at;
                return Ok(());
            }
        }
        self.lease = None;
        let id = connection.grant(LEASE).await?;
        self.lease = Some(EtcdLease { id, kept: sent_at, written: BTreeSet::new(), unsure: BTreeSet::new() });
        Ok(())
    }

    /// Puts (true) and deletes (false) records concurrently.
    async fn change(&mut self, some: &[(String, bool)]) -> Result<(), EtcdError> {
        let connection = self.members.connected().await?;
        let Some(lease) = &mut self.lease else { return Err(EtcdError::LeaseLost) };
        // Before the requests: if an answer is lost, the record may be there or not, and is written or deleted again.
        for (name, _) in some {
            lease.unsure.insert(name.clone());
            lease.written.remove(name);
        }
        let value = value(self.address);
        let id = lease.id;
        let mut requests = Vec::with_capacity(some.len());
        for (name, here) in some.iter().cloned() {
            let key = key(&self.prefix, &name, &self.server);
            let value = value.clone();
            requests.push(async move {
                let done = match here {
                    true => connection.put(key, value, id).await,
                    false => connection.delete(key).await,
                };
                done.map(|()| (name, here))
            });
        }
        let answers = join_all(requests).await;
        // All answers are read, even after an error, because each reports what etcd has.
        let mut failed = None;
        for answer in answers {
            match answer {
                Ok((name, here)) => {
                    lease.unsure.remove(&name);
                    if here {
                        lease.written.insert(name);
                    }
                }
                Err(cause) => failed = Some(cause),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

impl RecordStore for EtcdRecords {
    /// Replaces our records with these, and renews the lease. Tries each member once.
    fn write<'a>(&'a mut self, records: &'a BTreeSet<String>) -> StoreFuture<'a, ()> {
        Box::pin(async {
            let mut failed = FailedCalls::default();
            loop {
                let Err(cause) = self.write_once(records).await else { return Ok(()) };
                self.lease.take_if(|_| cause.kind() == EtcdErrorKind::LeaseLost);
                self.members.retry(cause, &mut failed)?;
            }
        })
    }

    /// Revokes the lease, and with it all records.
    fn withdraw(&mut self) -> StoreFuture<'_, ()> {
        Box::pin(async {
            let Some(EtcdLease { id, .. }) = self.lease else { return Ok(()) };
            self.members.call(|member: EtcdConnection| async move { member.revoke(id).await }).await?;
            self.lease = None;
            Ok(())
        })
    }

    /// Returns none: etcd removes the records of a server that has stopped.
    fn servers(&self) -> BoxFuture<'_, BTreeSet<IpAddr>> {
        Box::pin(std::future::ready(BTreeSet::new()))
    }

    /// Returns the time at which the lease must be renewed.
    fn due(&self) -> Instant {
        self.lease.as_ref().map_or_else(Instant::now, |lease| lease.kept) + RENEWAL_INTERVAL
    }
}

/// Returns the key, for example `/skydns/test/nodes/node-a/<server>` for `node-a.nodes.test`.
fn key(prefix: &str, name: &str, server: &str) -> Vec<u8> {
    let labels: Vec<&str> = name.rsplit('.').collect();
    format!("{prefix}/{}/{server}", labels.join("/")).into_bytes()
}

fn value(address: IpAddr) -> Vec<u8> {
    format!(r#"{{"host":"{address}","ttl":{}}}"#, TTL.as_secs()).into_bytes()
}

/// Time between two renewals of the lease; two may fail in a row.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(5);

/// Duration of the lease: how long the records of a dead server remain.
const LEASE: Duration = Duration::from_secs(15);

/// TTL of DNS answers; short, so that a node that moves is found soon.
const TTL: Duration = Duration::from_secs(5);

/// Maximum number of concurrent changes. The lease is checked between two such batches.
const MAX_AT_ONCE: usize = 64;
/// Initial limit of concurrent changes.
const INITIAL_AT_ONCE: usize = 8;
/// Minimum limit where etcd is slow. A thousand servers together then have 4,000 changes in flight.
const MIN_AT_ONCE: usize = 4;
/// Duration above which a batch counts as slow: a third of the timeout of a call.
const SLOW_BATCH: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::etcd::tests::dead_and_full;

    #[test]
    fn etcd_keys_are_skydns_paths() {
        assert_eq!(key("/skydns", "node-a.nodes.test", "1f"), b"/skydns/test/nodes/node-a/1f");
        assert_eq!(value(IpAddr::from([10, 0, 0, 7])), br#"{"host":"10.0.0.7","ttl":5}"#);
    }

    #[tokio::test]
    async fn the_reason_of_a_member_that_answers_outweighs_that_of_a_dead_one() {
        let mut records = EtcdRecords::new(dead_and_full(), "/skydns".to_owned(), [10, 0, 0, 7].into());
        let names = BTreeSet::from(["node1.test".to_owned()]);
        // The first attempt begins at the dead member, the second one at the other.
        for _ in 0..2 {
            let refused = RecordStore::write(&mut records, &names).await.unwrap_err().to_string();
            assert!(refused.contains("space exceeded"), "{refused}");
            records.members.next();
        }
    }

    proptest! {
        #[test]
        fn an_etcd_key_contains_the_reversed_name(name in "[a-z0-9_-]{1,8}(\\.[a-z0-9_-]{1,8}){0,3}") {
            let key = String::from_utf8(key("/p", &name, "pod")).unwrap();
            let labels = key.strip_prefix("/p/").and_then(|k| k.strip_suffix("/pod")).unwrap();
            prop_assert_eq!(labels.rsplit('/').collect::<Vec<_>>().join("."), name);
        }
    }
}
