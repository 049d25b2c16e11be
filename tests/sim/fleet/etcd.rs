//! An etcd of one member in simulated time: it performs writes one by one, and drops keys of leases that are not kept
//! alive.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use http_body_util::{BodyExt as _, Full};
use prost::Message as _;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::Status;
use tonic::body::Body;
use tower::util::BoxCloneSyncService;
use tunnel::etcd::member::{EtcdConnection, EtcdError};
use tunnel::etcd::wire::{
    DeleteRangeRequest, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse,
    LeaseRevokeRequest, PutRequest,
};
use tunnel::etcd::{CALL_TIMEOUT, EtcdClient};

use super::figures::Rate;

#[derive(Debug)]
pub(crate) struct Etcd(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Whether it is unreachable.
    away: bool,
    /// Time when all requested writes are done.
    done: Instant,
    /// Expiry and keys of each lease.
    leases: HashMap<i64, (Instant, HashSet<Vec<u8>>)>,
    keys: HashMap<Vec<u8>, (Vec<u8>, i64)>,
    given: i64,
    counts: WriteCounts,
}

/// The requests received.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WriteCounts {
    pub(crate) writes: Rate,
    /// Number of writes of which the client did not wait for the result.
    pub(crate) failed_moves: u64,
}

impl Etcd {
    pub(crate) fn start() -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            away: false,
            done: Instant::now(),
            leases: HashMap::new(),
            keys: HashMap::new(),
            given: 0,
            counts: WriteCounts::default(),
        })))
    }

    /// Makes it unreachable, or reachable again.
    pub(crate) fn goes(&self, away: bool) {
        self.with(|state| state.away = away);
    }

    /// Returns the requests since the last call.
    pub(crate) fn take(&self) -> WriteCounts {
        self.with(|state| std::mem::take(&mut state.counts))
    }

    /// Returns the number of records.
    pub(crate) fn len(&self) -> usize {
        self.with(|state| state.keys.len())
    }

    /// Returns all records: name of the node, and values.
    pub(crate) fn records(&self) -> HashMap<String, Vec<String>> {
        self.with(|state| {
            let mut all = HashMap::<_, Vec<_>>::new();
            for (key, (value, _)) in &state.keys {
                let name = String::from_utf8_lossy(key).split('/').nth_back(1).unwrap().to_owned();
                all.entry(name).or_default().push(String::from_utf8_lossy(value).into_owned());
            }
            all
        })
    }

    fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.0.lock().unwrap();
        if !state.away {
            let State { leases, keys, .. } = &mut *state;
            leases.retain(|_, (ends, its)| {
                let lives = *ends > Instant::now();
                if !lives {
                    its.iter().for_each(|key| drop(keys.remove(key)));
                }
                lives
            });
        }
        look(&mut state)
    }

    /// Replies after a delay, in the order of the requests; fails if the delay is too long or it is unreachable.
    async fn answers<T>(&self, writes: bool, what: impl FnOnce(&mut State) -> T) -> Result<T, Status> {
        let answer = self.with(|state| {
            if state.away {
                return None;
            }
            if writes {
                state.counts.writes.one();
                state.done = state.done.max(Instant::now()) + WRITE;
            }
            Some((what(state), if writes { state.done } else { Instant::now() } + LATENCY))
        });
        let answer = async move {
            match answer {
                Some((answer, at)) => {
                    sleep_until(at).await;
                    answer
                }
                None => std::future::pending().await,
            }
        };
        let answer = timeout(CALL_TIMEOUT, answer).await;
        answer.map_err(|_| {
            self.0.lock().unwrap().counts.failed_moves += u64::from(writes);
            Status::deadline_exceeded("no answer")
        })
    }

    async fn call(&self, call: Call) -> Answer {
        match call {
            Call::Grant(request) => {
                let length = Duration::from_secs(request.ttl.try_into().unwrap());
                let grant = move |state: &mut State| {
                    state.given += 1;
                    state.leases.insert(state.given, (state.done + length, HashSet::new()));
                    LeaseGrantResponse { id: state.given, ttl: request.ttl }.encode_to_vec()
                };
                self.answers(true, grant).await
            }
            Call::KeepAlive(request) => {
                let keep = move |state: &mut State| {
                    let lease = state.leases.get_mut(&request.id);
                    let exists = lease.map(|(ends, _)| *ends = Instant::now() + LEASE).is_some();
                    LeaseKeepAliveResponse { id: request.id, ttl: i64::from(exists) }.encode_to_vec()
                };
                self.answers(false, keep).await
            }
            Call::Revoke(request) => {
                let revoke = move |state: &mut State| {
                    let its = state.leases.remove(&request.id).unwrap_or((Instant::now(), HashSet::new())).1;
                    its.iter().for_each(|key| drop(state.keys.remove(key)));
                    Vec::new()
                };
                self.answers(true, revoke).await
            }
            Call::Put(request) => {
                let put = move |state: &mut State| {
                    let (_, its) = state.leases.get_mut(&request.lease)?;
                    its.insert(request.key.to_vec());
                    state.keys.insert(request.key.to_vec(), (request.value.to_vec(), request.lease));
                    Some(Vec::new())
                };
                self.answers(true, put).await?.ok_or_else(|| Status::not_found("no such lease"))
            }
            Call::Delete(request) => {
                let delete = move |state: &mut State| {
                    if let Some((_, lease)) = state.keys.remove(&*request.key) {
                        state.leases.get_mut(&lease).map(|(_, its)| its.remove(&*request.key));
                    }
                    Vec::new()
                };
                self.answers(true, delete).await
            }
        }
    }

    /// Returns a cluster of this one member. Counts the attempts to connect.
    pub(crate) fn cluster(self: &Arc<Self>, tried: Arc<Mutex<Rate>>) -> EtcdClient {
        let etcd = self.clone();
        let open = move |_| {
            let (etcd, tried) = (etcd.clone(), tried.clone());
            async move {
                tried.lock().unwrap().one();
                if etcd.with(|state| state.away) {
                    sleep(CALL_TIMEOUT).await;
                    return Err(EtcdError::NotConnected("etcd:2379: no answer".to_owned()));
                }
                sleep(3 * LATENCY).await;
                Ok(connection(move |call| {
                    let etcd = etcd.clone();
                    async move { etcd.call(call).await }
                }))
            }
            .boxed()
        };
        EtcdClient::new(1, Box::new(open))
    }
}

/// A call of a publisher. It neither reads nor swaps.
#[derive(Debug)]
pub(crate) enum Call {
    Grant(LeaseGrantRequest),
    KeepAlive(LeaseKeepAliveRequest),
    Revoke(LeaseRevokeRequest),
    Put(PutRequest),
    Delete(DeleteRangeRequest),
}

/// The encoded message, or why there is none.
pub(crate) type Answer = Result<Vec<u8>, Status>;

impl Call {
    fn decode(path: &str, message: &[u8]) -> Self {
        match path {
            "/etcdserverpb.Lease/LeaseGrant" => Self::Grant(LeaseGrantRequest::decode(message).unwrap()),
            "/etcdserverpb.Lease/LeaseKeepAlive" => {
                Self::KeepAlive(LeaseKeepAliveRequest::decode(message).unwrap())
            }
            "/etcdserverpb.Lease/LeaseRevoke" => Self::Revoke(LeaseRevokeRequest::decode(message).unwrap()),
            "/etcdserverpb.KV/Put" => Self::Put(PutRequest::decode(message).unwrap()),
            "/etcdserverpb.KV/DeleteRange" => Self::Delete(DeleteRangeRequest::decode(message).unwrap()),
            _ => unreachable!("{path}"),
        }
    }
}

/// Returns a connection on which `answer` answers every call.
pub(crate) fn connection<A>(answer: impl Fn(Call) -> A + Clone + Send + Sync + 'static) -> EtcdConnection
where
    A: Future<Output = Answer> + Send + 'static,
{
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let answer = answer.clone();
        async move {
            let path = request.uri().path().to_owned();
            let body = request.into_body().collect().await?.to_bytes();
            let message = match answer(Call::decode(&path, &body[PREFIX..])).await {
                Ok(message) => message,
                Err(status) => return Ok(status.into_http()),
            };
            let mut framed = vec![0];
            framed.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
            framed.extend(message);
            let trailers = http::HeaderMap::from_iter([(Status::GRPC_STATUS, http::HeaderValue::from(0))]);
            let body = Full::from(framed).with_trailers(std::future::ready(Some(Ok(trailers))));
            Ok(http::Response::new(Body::new(body)))
        }
    });
    EtcdConnection::over("etcd:2379".parse().unwrap(), BoxCloneSyncService::new(service))
}

/// Bytes before a message of gRPC: a flag and the length.
const PREFIX: usize = 5;
/// Duration of one write: 1,656 per second were measured.
const WRITE: Duration = Duration::from_micros(604);
/// RTT.
const LATENCY: Duration = Duration::from_millis(1);
/// Duration of a publisher's lease.
const LEASE: Duration = Duration::from_secs(15);
