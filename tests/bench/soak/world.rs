//! State shared by clients, targets and the fault injection.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use tokio::sync::oneshot;

use crate::soak::plan::Kind;
use crate::soak::pump::Side;

/// One run.
#[derive(Debug)]
pub(crate) struct World {
    /// How often each process has started or finished dying.
    deaths: [DeathCounts; MEMBERS],
    /// Whether clients start no more sessions.
    pub(crate) resting: AtomicBool,
    /// Number of sessions that run, or have no report of the target yet.
    pub(crate) running: AtomicU64,
    moved: AtomicU64,
    book: Mutex<Statistics>,
    waited_for: Mutex<HashMap<u64, oneshot::Sender<Side>>>,
    /// The two end processes of each running session.
    between: Mutex<HashMap<u64, [usize; 2]>>,
    calm: Mutex<WorkingSince>,
    events: Mutex<File>,
}

/// The values for the tables.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    /// Sessions by kind: complete, and cut by the death of one of their two end processes.
    pub(crate) sessions: BTreeMap<Kind, [u64; 2]>,
    /// Sessions that could not be opened, by error.
    pub(crate) refused: BTreeMap<String, u64>,
    /// Errors that were found.
    pub(crate) faults: Vec<String>,
    /// The longest time without a byte in a session that should have received some, and its id.
    pub(crate) stall: (Duration, u64),
    /// The same, measured from when its lines and processes worked again.
    pub(crate) silence: (Duration, u64),
    /// The longest time that a target outlived its client's abort.
    pub(crate) lag: (Duration, u64),
    /// The longest time until a session was open.
    pub(crate) opening: (Duration, u64),
    /// The longest time until a refusal.
    pub(crate) refusing: (Duration, u64),
}

/// Times since when lines and processes have worked; in the future while they do not.
#[derive(Debug)]
struct WorkingSince {
    /// Those of each edge.
    edges: [Instant; MEMBERS - PODS],
    /// Servers, and the lines between them: any session may use them.
    servers: Instant,
}

/// The parties affected by a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Affected {
    /// One edge, by its number among the edges, or its line.
    Edge(usize),
    /// A server, or a line between two servers.
    Servers,
}

/// How often a process has started or finished dying: odd while it is dying.
#[derive(Debug, Default)]
struct DeathCounts {
    all: AtomicU64,
    sudden: AtomicU64,
    last: Mutex<Option<Instant>>,
}

/// The end processes of a session, and how often they had died when it started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    /// The process that accepted the client's connection.
    pub(crate) near: usize,
    /// The process that dials the target.
    pub(crate) far: usize,
    deaths: [(u64, u64); 2],
    started: Instant,
}

/// How an end process has died since a session started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Died {
    /// It has not died.
    No,
    /// It was asked to end.
    Terminated,
    /// By SIGKILL: its kernel ends its connections as if they were complete.
    Killed,
}

impl World {
    /// Creates a new run. Events are written to `events.log`.
    pub(crate) fn new(dir: &Path) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            deaths: Default::default(),
            resting: AtomicBool::new(false),
            running: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            book: Mutex::default(),
            waited_for: Mutex::default(),
            between: Mutex::default(),
            calm: Mutex::new(WorkingSince {
                edges: [Instant::now(); MEMBERS - PODS],
                servers: Instant::now(),
            }),
            events: Mutex::new(File::create(dir.join("events.log"))?),
        }))
    }

    /// Writes a line to the event log, for debugging.
    pub(crate) fn note(&self, what: &str) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (day, ms) = (now.as_secs() % 86_400, now.subsec_millis());
        let (hours, minutes, seconds) = (day / 3600, day / 60 % 60, day % 60);
        let _ = writeln!(held(&self.events), "{hours:02}:{minutes:02}:{seconds:02}.{ms:03} {what}");
    }

    /// Records an error.
    pub(crate) fn fault(&self, what: String) {
        self.note(&format!("ERROR {what}"));
        println!("ERROR {what}");
        self.book().faults.push(what);
    }

    /// Returns the values for the tables.
    pub(crate) fn book(&self) -> MutexGuard<'_, Statistics> {
        held(&self.book)
    }

    /// Records bytes that arrived.
    pub(crate) fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Relaxed);
    }

    /// Returns the bytes that have arrived and been checked, on both sides.
    pub(crate) fn bytes(&self) -> u64 {
        self.moved.load(Relaxed)
    }

    /// Records that a session received nothing for this long, `own` of which it may have waited by itself.
    ///
    /// It may also have waited after its line worked again, so that both times are without it.
    pub(crate) fn stalled(&self, id: u64, idle: Duration, own: Duration) {
        let time = idle.saturating_sub(own);
        if time > Duration::from_secs(1) {
            self.note(&format!("{id} continues after {:.1} s", time.as_secs_f64()));
            let silence = self.back_for(id).map_or(Duration::ZERO, |back| back.saturating_sub(own).min(time));
            let mut book = self.book();
            book.stall = book.stall.max((time, id));
            book.silence = book.silence.max((silence, id));
            drop(book);
            if silence > SILENCE {
                self.fault(format!("session {id} was silent for {silence:?} after its line worked again"));
            }
        }
    }

    /// Records a fault that ends after `time`.
    pub(crate) fn strikes(&self, target: Affected, time: Duration) {
        let mut calm = held(&self.calm);
        let until = Instant::now() + time;
        match target {
            Affected::Edge(edge) => calm.edges.get_mut(edge).into_iter().for_each(|at| *at = until.max(*at)),
            Affected::Servers => calm.servers = until.max(calm.servers),
        }
    }

    /// Returns how long everything that a session requires has worked; `None` if its ends are unknown.
    fn back_for(&self, id: u64) -> Option<Duration> {
        let between = held(&self.between).get(&id).copied()?;
        let calm = held(&self.calm);
        let edges =
            between.into_iter().filter_map(|member| calm.edges.get(member.checked_sub(PODS)?).copied());
        edges.chain([calm.servers]).max().map(|at| Instant::now().saturating_duration_since(at))
    }

    /// Records how long a session took to open.
    pub(crate) fn opened(&self, id: u64, time: Duration) {
        let mut book = self.book();
        book.opening = book.opening.max((time, id));
    }

    /// Records a session that could not be opened.
    pub(crate) fn refused(&self, id: u64, why: &str, node: &str, time: Duration) {
        let mut book = self.book();
        book.refusing = book.refusing.max((time, id));
        let why = why.replace(node, "NODE").split([':', ';', ',']).take(2).collect::<Vec<_>>().join(":");
        if book.refused.len() < CAUSES || book.refused.contains_key(&why) {
            *book.refused.entry(why).or_default() += 1;
        }
    }

    /// Records how long a target outlived its client's abort.
    pub(crate) fn lagged(&self, id: u64, time: Duration) {
        let mut book = self.book();
        book.lag = book.lag.max((time, id));
    }

    /// Records the end of a session, complete or cut.
    pub(crate) fn ended(&self, kind: Kind, whole: bool) {
        let mut book = self.book();
        let [all, cut] = book.sessions.entry(kind).or_default();
        *(if whole { all } else { cut }) += 1;
    }

    /// Records that a process is about to die, suddenly or on request.
    pub(crate) fn dies(&self, member: usize, suddenly: bool) {
        let Some(deaths) = self.deaths.get(member) else { return };
        if suddenly {
            deaths.sudden.fetch_add(1, Relaxed);
        }
        deaths.all.fetch_add(1, Relaxed);
    }

    /// Records that a process has died.
    pub(crate) fn is_dead(&self, member: usize) {
        let Some(deaths) = self.deaths.get(member) else { return };
        *held(&deaths.last) = Some(Instant::now());
        deaths.all.fetch_add(1, Relaxed);
    }

    /// Returns how long a session outlived the last death of one of its processes; `None` if none has died since it
    /// started.
    pub(crate) fn outlived(&self, ends: &Ends, over: Instant) -> Option<Duration> {
        let deaths = [ends.near, ends.far].into_iter().filter_map(|member| self.deaths.get(member));
        let times = deaths.filter_map(|deaths| *held(&deaths.last)).filter(|time| *time > ends.started);
        times.max().map(|time| over.saturating_duration_since(time))
    }

    /// Records the start of a session between two processes.
    pub(crate) fn ends(&self, id: u64, near: usize, far: usize) -> Ends {
        held(&self.between).insert(id, [near, far]);
        Ends { near, far, deaths: [near, far].map(|member| self.dead(member)), started: Instant::now() }
    }

    /// Returns how its near and its far process have died since.
    pub(crate) fn died(&self, ends: &Ends) -> [Died; 2] {
        let [near, far] = ends.deaths;
        [(ends.near, near), (ends.far, far)].map(|(member, (all, sudden))| {
            let now = self.dead(member);
            if now.1 > sudden {
                Died::Killed
            } else if now.0 > all || all % 2 == 1 {
                Died::Terminated
            } else {
                Died::No
            }
        })
    }

    fn dead(&self, member: usize) -> (u64, u64) {
        self.deaths.get(member).map_or((0, 0), |d| (d.all.load(Relaxed), d.sudden.load(Relaxed)))
    }

    /// Returns a receiver of the target's report on a session.
    pub(crate) fn expect(&self, id: u64) -> oneshot::Receiver<Side> {
        let (sender, receiver) = oneshot::channel();
        held(&self.waited_for).insert(id, sender);
        receiver
    }

    /// Sends the target's report on a session. There is no receiver if the session could not be opened.
    pub(crate) fn report(&self, id: u64, side: Side) {
        let waits = held(&self.waited_for).remove(&id);
        let _ = waits.map(|sender| sender.send(side));
    }

    /// Drops the state of a session that is over.
    pub(crate) fn forget(&self, id: u64) {
        held(&self.waited_for).remove(&id);
        held(&self.between).remove(&id);
    }

    /// Returns the current state as one line.
    pub(crate) fn progress(&self) -> String {
        let book = self.book();
        let [whole, cut] = book.sessions.values().fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
        format!(
            "{} running, {whole} whole, {cut} died with their process, {} refused, {} MiB, longest stall {:.1} s, silence {:.1} s, {} errors found",
            self.running.load(Relaxed),
            book.refused.values().sum::<u64>(),
            self.bytes() >> 20,
            book.stall.0.as_secs_f64(),
            book.silence.0.as_secs_f64(),
            book.faults.len(),
        )
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maximum silence of a session once its line works again.
pub(crate) const SILENCE: Duration = Duration::from_secs(5);
/// Maximum number of distinct refusals that are counted separately.
const CAUSES: usize = 60;
/// Number of servers; edges follow them.
pub(crate) const PODS: usize = 3;
/// Number of processes under test.
pub(crate) const MEMBERS: usize = PODS + 6;
/// The resume timeout, and the time until a death is noticed: the maximum by which a session may outlive its process.
pub(crate) const OUTLIVES: Duration = Duration::from_secs(60 + 25);
/// The resume timeout, and what may delay its start: stopped processes and frozen lines.
pub(crate) const HANG: Duration = Duration::from_secs(60 + 60);
