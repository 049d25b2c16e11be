//! An etcd of one member in simulated time: it performs writes one by one, and drops keys of leases that are not kept
//! alive.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tunnel::etcd::{CALL_TIMEOUT, EtcdAnswer, EtcdCalls, EtcdDialer, EtcdError};

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
    asked: Asked,
}

/// The requests received.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked {
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
            asked: Asked::default(),
        })))
    }

    /// Makes it unreachable, or reachable again.
    pub(crate) fn goes(&self, away: bool) {
        self.with(|state| state.away = away);
    }

    /// Returns the requests since the last call.
    pub(crate) fn take(&self) -> Asked {
        self.with(|state| std::mem::take(&mut state.asked))
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
    async fn answers<T>(&self, writes: bool, what: impl FnOnce(&mut State) -> T) -> Result<T, EtcdError> {
        let answer = self.with(|state| {
            if state.away {
                return None;
            }
            if writes {
                state.asked.writes.one();
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
            self.0.lock().unwrap().asked.failed_moves += u64::from(writes);
            silent()
        })
    }
}

/// The connection of one server to etcd. Counts the attempts of the server.
pub(crate) struct Way {
    pub(crate) etcd: Arc<Etcd>,
    pub(crate) tried: Arc<Mutex<Rate>>,
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Way")
    }
}

impl EtcdDialer for Way {
    fn members(&self) -> usize {
        1
    }

    fn open(&self, _member: usize) -> EtcdAnswer<'_, Arc<dyn EtcdCalls>> {
        async move {
            self.tried.lock().unwrap().one();
            if self.etcd.with(|state| state.away) {
                sleep(CALL_TIMEOUT).await;
                return Err(silent());
            }
            sleep(3 * LATENCY).await;
            Ok(self.etcd.clone() as Arc<dyn EtcdCalls>)
        }
        .boxed()
    }
}

impl EtcdCalls for Etcd {
    fn grant(&self, length: Duration) -> EtcdAnswer<'_, i64> {
        self.answers(true, move |state| {
            state.given += 1;
            state.leases.insert(state.given, (state.done + length, HashSet::new()));
            state.given
        })
        .boxed()
    }

    fn keep_alive(&self, lease: i64) -> EtcdAnswer<'_, bool> {
        self.answers(false, move |state| {
            let lease = state.leases.get_mut(&lease);
            lease.map(|(ends, _)| *ends = Instant::now() + LEASE).is_some()
        })
        .boxed()
    }

    fn revoke(&self, lease: i64) -> EtcdAnswer<'_, ()> {
        self.answers(true, move |state| {
            let its = state.leases.remove(&lease).unwrap_or((Instant::now(), HashSet::new())).1;
            its.iter().for_each(|key| drop(state.keys.remove(key)));
        })
        .boxed()
    }

    fn put(&self, key: Vec<u8>, value: Vec<u8>, lease: i64) -> EtcdAnswer<'_, ()> {
        let put = self.answers(true, move |state| {
            let (_, its) = state.leases.get_mut(&lease)?;
            its.insert(key.clone());
            state.keys.insert(key, (value, lease));
            Some(())
        });
        put.map(|done| done?.ok_or(EtcdError::LeaseLost)).boxed()
    }

    fn delete(&self, key: Vec<u8>) -> EtcdAnswer<'_, ()> {
        self.answers(true, move |state| {
            let Some((_, lease)) = state.keys.remove(&key) else { return };
            state.leases.get_mut(&lease).map(|(_, its)| its.remove(&key));
        })
        .boxed()
    }

    fn get(&self, _key: Vec<u8>) -> EtcdAnswer<'_, Option<(Vec<u8>, i64)>> {
        unreachable!("publishers do not read")
    }

    fn swap(&self, _key: Vec<u8>, _last_changed: i64, _value: Vec<u8>) -> EtcdAnswer<'_, bool> {
        unreachable!("publishers write only their own keys")
    }
}

fn silent() -> EtcdError {
    EtcdError::Unreachable { at: "etcd:2379".parse().unwrap(), cause: "no answer".to_owned() }
}

/// Duration of one write: 1,656 per second were measured.
const WRITE: Duration = Duration::from_micros(604);
/// RTT.
const LATENCY: Duration = Duration::from_millis(1);
/// Duration of a publisher's lease.
const LEASE: Duration = Duration::from_secs(15);
