//! Tests how many changes a publisher requests of etcd at once: fewer the slower etcd is, and the more it refuses.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use prost::Message as _;
use tonic::Status;
use tunnel::etcd::EtcdClient;
use tunnel::etcd::wire::{LeaseGrantResponse, LeaseKeepAliveResponse};
use tunnel::publish::etcd::EtcdRecords;
use tunnel_base::stores::RecordStore as _;

use super::etcd::{Answer, Call, connection};

/// An etcd cluster that processes one write after the other.
#[derive(Debug, Default)]
struct SerialEtcd {
    /// Duration of each write. `None` makes each fail after a millisecond.
    each: Mutex<Option<Duration>>,
    /// Each running write holds a clone, so that a cancelled one does not count.
    in_flight: Arc<()>,
    /// Highest number of concurrent writes.
    most: AtomicUsize,
}

impl SerialEtcd {
    async fn call(self: Arc<Self>, call: Call) -> Answer {
        match call {
            Call::Grant(_) => Ok(LeaseGrantResponse { id: 1, ttl: 15 }.encode_to_vec()),
            Call::KeepAlive(_) => Ok(LeaseKeepAliveResponse { id: 1, ttl: 15 }.encode_to_vec()),
            Call::Revoke(_) | Call::Put(_) | Call::Delete(_) => self.write().await,
        }
    }

    async fn write(&self) -> Answer {
        let _in_flight = self.in_flight.clone();
        let count = Arc::strong_count(&self.in_flight) - 1;
        self.most.fetch_max(count, Relaxed);
        let each = *self.each.lock().unwrap();
        tokio::time::sleep(each.unwrap_or(Duration::from_millis(1)) * u32::try_from(count).unwrap()).await;
        each.map(|_| Vec::new()).ok_or_else(|| Status::unavailable("refused"))
    }
}

fn ours(etcd: &Arc<SerialEtcd>) -> EtcdRecords {
    let etcd = etcd.clone();
    let open = move |_| {
        let etcd = etcd.clone();
        std::future::ready(Ok(connection(move |call| etcd.clone().call(call)))).boxed()
    };
    let cluster = EtcdClient::new(1, Box::new(open));
    EtcdRecords::new(cluster, "/skydns".to_owned(), IpAddr::from([10, 0, 0, 1]))
}

/// Adds this many records.
fn grow(records: &mut BTreeSet<String>, more: usize) {
    let first = records.len();
    records.extend((first..first + more).map(|n| format!("node{n}.nodes.test")));
}

#[tokio::test(start_paused = true)]
async fn single_records_do_not_raise_the_number_of_concurrent_writes() {
    let etcd = Arc::new(SerialEtcd::default());
    let (mut ours, mut records) = (ours(&etcd), BTreeSet::new());
    for (millis, more) in [(1, 1), (1, 1), (1, 1), (1, 7), (100, 1000)] {
        *etcd.each.lock().unwrap() = Some(Duration::from_millis(millis));
        grow(&mut records, more);
        ours.write(&records).await.unwrap();
    }
    assert_eq!(etcd.most.load(Relaxed), 8);
}

#[tokio::test(start_paused = true)]
async fn failed_writes_reduce_the_number_of_concurrent_writes() {
    let etcd = Arc::new(SerialEtcd::default());
    let (mut ours, mut records) = (ours(&etcd), BTreeSet::new());
    *etcd.each.lock().unwrap() = Some(Duration::from_millis(1));
    grow(&mut records, 1000);
    ours.write(&records).await.unwrap();
    *etcd.each.lock().unwrap() = None;
    grow(&mut records, 1000);
    for most in [64, 32, 16, 8, 4, 4] {
        etcd.most.store(0, Relaxed);
        ours.write(&records).await.unwrap_err();
        assert_eq!(etcd.most.load(Relaxed), most);
    }
}

#[tokio::test(start_paused = true)]
async fn slow_writes_reduce_the_number_of_concurrent_writes() {
    let etcd = Arc::new(SerialEtcd::default());
    let (mut ours, mut records) = (ours(&etcd), BTreeSet::new());
    // As if there were hundreds of other servers, then a few, then none, then hundreds again.
    for (millis, most) in [(100, 8), (20, 16), (1, 64), (100, 8)] {
        *etcd.each.lock().unwrap() = Some(Duration::from_millis(millis));
        // The first writes time out if etcd has become too slow for their number.
        for _ in 0..3 {
            grow(&mut records, 1000);
            _ = ours.write(&records).await;
        }
        etcd.most.store(0, Relaxed);
        grow(&mut records, 1000);
        ours.write(&records).await.unwrap();
        assert_eq!(etcd.most.load(Relaxed), most, "{millis} ms for each");
    }
}
