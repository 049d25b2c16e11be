//! What clients, targets and the one who injects faults know together.

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
    /// How often each process has begun or finished to die.
    deaths: [Deaths; MEMBERS],
    /// Clients begin no more sessions.
    pub(crate) resting: AtomicBool,
    /// Sessions that run, or whose target has not reported yet.
    pub(crate) running: AtomicU64,
    moved: AtomicU64,
    book: Mutex<Book>,
    waited_for: Mutex<HashMap<u64, oneshot::Sender<Side>>>,
    /// The two end processes of each session that runs.
    between: Mutex<HashMap<u64, [usize; 2]>>,
    calm: Mutex<Calm>,
    events: Mutex<File>,
}

/// What is counted for the table.
#[derive(Debug, Default)]
pub(crate) struct Book {
    /// Sessions by kind: whole, and cut by the death of one of their two end processes.
    pub(crate) sessions: BTreeMap<Kind, [u64; 2]>,
    /// Sessions that could not be opened, by what was said.
    pub(crate) refused: BTreeMap<String, u64>,
    /// What is not as it should be.
    pub(crate) faults: Vec<String>,
    /// The longest time without a byte in a session that was to have some, and which one.
    pub(crate) stall: (Duration, u64),
    /// The same, counted from when its lines and processes were back.
    pub(crate) silence: (Duration, u64),
    /// The longest time that a target lived on after its client had broken off.
    pub(crate) lag: (Duration, u64),
    /// The longest time until a session was open.
    pub(crate) opening: (Duration, u64),
    /// The longest time until a refusal.
    pub(crate) refusing: (Duration, u64),
}

/// Since when lines and processes work again; a time to come while they do not.
#[derive(Debug)]
struct Calm {
    /// Those of one edge.
    edges: [Instant; MEMBERS - PODS],
    /// Servers, and the lines between them: any session may need them.
    servers: Instant,
}

/// Whom a fault strikes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Struck {
    /// One edge, by its number among the edges, or its line.
    Edge(usize),
    /// A server, or a line between two.
    Servers,
}

/// How often a process has begun or finished to die: odd while it does.
#[derive(Debug, Default)]
struct Deaths {
    all: AtomicU64,
    sudden: AtomicU64,
    last: Mutex<Option<Instant>>,
}

/// Which processes a session ends in, and how often they had died when it began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    /// Where the client's connection ends.
    pub(crate) near: usize,
    /// Which dials the target.
    pub(crate) far: usize,
    deaths: [(u64, u64); 2],
    started: Instant,
}

/// How an end process has died since a session began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Died {
    /// Not at all.
    No,
    /// It was told to.
    Told,
    /// By SIGKILL: its kernel ends its connections, and has no idea how.
    Killed,
}

impl World {
    /// A new one; what happens stands in `events.log`.
    pub(crate) fn new(dir: &Path) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            deaths: Default::default(),
            resting: AtomicBool::new(false),
            running: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            book: Mutex::default(),
            waited_for: Mutex::default(),
            between: Mutex::default(),
            calm: Mutex::new(Calm { edges: [Instant::now(); MEMBERS - PODS], servers: Instant::now() }),
            events: Mutex::new(File::create(dir.join("events.log"))?),
        }))
    }

    /// A line for whoever has to find out what happened when.
    pub(crate) fn note(&self, what: &str) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (day, ms) = (now.as_secs() % 86_400, now.subsec_millis());
        let (hours, minutes, seconds) = (day / 3600, day / 60 % 60, day % 60);
        let _ = writeln!(held(&self.events), "{hours:02}:{minutes:02}:{seconds:02}.{ms:03} {what}");
    }

    /// Something is not as it should be.
    pub(crate) fn fault(&self, what: String) {
        self.note(&format!("FAULT {what}"));
        println!("FAULT {what}");
        self.book().faults.push(what);
    }

    /// The counts.
    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        held(&self.book)
    }

    /// Bytes arrived.
    pub(crate) fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Relaxed);
    }

    /// Bytes that have arrived and been checked, at both sides.
    pub(crate) fn bytes(&self) -> u64 {
        self.moved.load(Relaxed)
    }

    /// A session had nothing for this long.
    pub(crate) fn stalled(&self, id: u64, time: Duration) {
        if time > Duration::from_secs(1) {
            self.note(&format!("{id} goes on after {:.1} s", time.as_secs_f64()));
            let silence = self.back_for(id).map_or(Duration::ZERO, |back| back.min(time));
            let mut book = self.book();
            book.stall = book.stall.max((time, id));
            book.silence = book.silence.max((silence, id));
            drop(book);
            if silence > SILENCE {
                self.fault(format!("session {id} was silent for {silence:?} after its line came back"));
            }
        }
    }

    /// A fault strikes, and is over after that time.
    pub(crate) fn strikes(&self, whom: Struck, time: Duration) {
        let mut calm = held(&self.calm);
        let until = Instant::now() + time;
        match whom {
            Struck::Edge(edge) => calm.edges.get_mut(edge).into_iter().for_each(|at| *at = until.max(*at)),
            Struck::Servers => calm.servers = until.max(calm.servers),
        }
    }

    /// For how long everything that a session needs has worked; none for one whose ends are not known.
    fn back_for(&self, id: u64) -> Option<Duration> {
        let between = held(&self.between).get(&id).copied()?;
        let calm = held(&self.calm);
        let edges =
            between.into_iter().filter_map(|member| calm.edges.get(member.checked_sub(PODS)?).copied());
        edges.chain([calm.servers]).max().map(|at| Instant::now().saturating_duration_since(at))
    }

    /// A session took this long to open.
    pub(crate) fn opened(&self, id: u64, time: Duration) {
        let mut book = self.book();
        book.opening = book.opening.max((time, id));
    }

    /// A session could not be opened.
    pub(crate) fn refused(&self, id: u64, why: &str, node: &str, time: Duration) {
        let mut book = self.book();
        book.refusing = book.refusing.max((time, id));
        let why = why.replace(node, "NODE").split([':', ';', ',']).take(2).collect::<Vec<_>>().join(":");
        if book.refused.len() < CAUSES || book.refused.contains_key(&why) {
            *book.refused.entry(why).or_default() += 1;
        }
    }

    /// A target lived on for this long after its client had broken off.
    pub(crate) fn lagged(&self, id: u64, time: Duration) {
        let mut book = self.book();
        book.lag = book.lag.max((time, id));
    }

    /// A session is over: whole, or cut.
    pub(crate) fn ended(&self, kind: Kind, whole: bool) {
        let mut book = self.book();
        let [all, cut] = book.sessions.entry(kind).or_default();
        *(if whole { all } else { cut }) += 1;
    }

    /// A process is about to die: suddenly, or because it is told to.
    pub(crate) fn dies(&self, member: usize, suddenly: bool) {
        let Some(deaths) = self.deaths.get(member) else { return };
        if suddenly {
            deaths.sudden.fetch_add(1, Relaxed);
        }
        deaths.all.fetch_add(1, Relaxed);
    }

    /// A process has died.
    pub(crate) fn is_dead(&self, member: usize) {
        let Some(deaths) = self.deaths.get(member) else { return };
        *held(&deaths.last) = Some(Instant::now());
        deaths.all.fetch_add(1, Relaxed);
    }

    /// How long after the last death of one of its processes a session was over; none if none died since it began.
    pub(crate) fn outlived(&self, ends: &Ends, over: Instant) -> Option<Duration> {
        let deaths = [ends.near, ends.far].into_iter().filter_map(|member| self.deaths.get(member));
        let times = deaths.filter_map(|deaths| *held(&deaths.last)).filter(|time| *time > ends.started);
        times.max().map(|time| over.saturating_duration_since(time))
    }

    /// A session begins between two processes.
    pub(crate) fn ends(&self, id: u64, near: usize, far: usize) -> Ends {
        held(&self.between).insert(id, [near, far]);
        Ends { near, far, deaths: [near, far].map(|member| self.dead(member)), started: Instant::now() }
    }

    /// How its near and its far process have died since.
    pub(crate) fn died(&self, ends: &Ends) -> [Died; 2] {
        let [near, far] = ends.deaths;
        [(ends.near, near), (ends.far, far)].map(|(member, (all, sudden))| {
            let now = self.dead(member);
            if now.1 > sudden {
                Died::Killed
            } else if now.0 > all || all % 2 == 1 {
                Died::Told
            } else {
                Died::No
            }
        })
    }

    fn dead(&self, member: usize) -> (u64, u64) {
        self.deaths.get(member).map_or((0, 0), |d| (d.all.load(Relaxed), d.sudden.load(Relaxed)))
    }

    /// The target's account of a session, once it has one.
    pub(crate) fn expect(&self, id: u64) -> oneshot::Receiver<Side> {
        let (tell, told) = oneshot::channel();
        held(&self.waited_for).insert(id, tell);
        told
    }

    /// The target's account of a session; nobody waits for that of a session which could not be opened.
    pub(crate) fn report(&self, id: u64, side: Side) {
        let waits = held(&self.waited_for).remove(&id);
        let _ = waits.map(|tell| tell.send(side));
    }

    /// Nobody waits for it any more.
    pub(crate) fn forget(&self, id: u64) {
        held(&self.waited_for).remove(&id);
        held(&self.between).remove(&id);
    }

    /// Where things stand, in a line.
    pub(crate) fn progress(&self) -> String {
        let book = self.book();
        let [whole, cut] = book.sessions.values().fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
        format!(
            "{} run, {whole} whole, {cut} died with their process, {} refused, {} MiB, longest stall {:.1} s, silence {:.1} s, {} faults found",
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

/// No session may be silent for longer once its line is back.
pub(crate) const SILENCE: Duration = Duration::from_secs(5);
/// Different words of refusals that are counted apart.
const CAUSES: usize = 60;
/// Pods, then edges.
pub(crate) const PODS: usize = 3;
/// All processes under test.
pub(crate) const MEMBERS: usize = PODS + 6;
/// The grace time, and a while until a death is noticed: no session may outlive a process of its own for longer.
pub(crate) const OUTLIVES: Duration = Duration::from_secs(60 + 25);
/// The grace time, and what may come together before it begins: processes and lines that stand still.
pub(crate) const HANG: Duration = Duration::from_secs(60 + 60);
