//! An etcd of one member in simulated time: it does one write after the other, and forgets what stands under leases that
//! nobody keeps alive.

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
    /// Whether nobody reaches it.
    away: bool,
    /// When it will have done all writes that it was asked for.
    done: Instant,
    /// When each lease ends, and its keys.
    leases: HashMap<i64, (Instant, HashSet<Vec<u8>>)>,
    keys: HashMap<Vec<u8>, (Vec<u8>, i64)>,
    given: i64,
    asked: Asked,
}

/// What it was asked for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked {
    pub(crate) writes: Rate,
    /// Of these, those of which whoever asked did not wait for the end.
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

    /// Whether it is away from now on.
    pub(crate) fn goes(&self, away: bool) {
        self.with(|state| state.away = away);
    }

    /// What it was asked for since this was called last.
    pub(crate) fn take(&self) -> Asked {
        self.with(|state| std::mem::take(&mut state.asked))
    }

    /// How many records stand.
    pub(crate) fn len(&self) -> usize {
        self.with(|state| state.keys.len())
    }

    /// All records: the node's name, and the value.
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

    /// What it answers after a while, unless that is too long or it is away; done in the order of the questions.
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

/// One pod's way to it; counts how often the pod has tried.
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
        unreachable!("publishers read nothing")
    }

    fn swap(&self, _key: Vec<u8>, _last_changed: i64, _value: Vec<u8>) -> EtcdAnswer<'_, bool> {
        unreachable!("publishers write what is theirs alone")
    }
}

fn silent() -> EtcdError {
    EtcdError::Unreachable { at: "etcd:2379".parse().unwrap(), cause: "no answer".to_owned() }
}

/// What one write takes: 1,656 a second were measured.
const WRITE: Duration = Duration::from_micros(604);
/// There and back.
const LATENCY: Duration = Duration::from_millis(1);
/// How long publishers' leases last.
const LEASE: Duration = Duration::from_secs(15);
