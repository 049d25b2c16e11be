//! The faults that are injected into the cluster: chosen by the seed, undone after a while.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::cutter::{Cut, Cutter};
use crate::process::Signal;
use crate::soak::cluster::{Cluster, DRAIN};
use crate::soak::world::{Affected, MEMBERS, PODS, World};

/// Injects one fault after another.
#[derive(Debug)]
pub(crate) struct FaultInjector {
    rng: StdRng,
    next: Instant,
    undo: Vec<(Instant, Undo)>,
    /// Processes that were asked to end, and their deadlines.
    leaving: Vec<(usize, Instant)>,
    injected: BTreeMap<Fault, u64>,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    CutLine,
    SilentLine,
    /// Half of an edge's connections: its link, or its interactive link.
    SilentHalf,
    FrozenLine,
    RefusingLine,
    CutAllEdges,
    RefuseAllEdges,
    CutServers,
    SilentServers,
    FrozenServers,
    RefusingServers,
    KillServer,
    StopServer,
    FreezeServer,
    KillEdge,
    StopEdge,
    FreezeEdge,
}

/// An action that is due later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Undo {
    Start(usize),
    Thaw(usize),
    AdmitEdge(usize),
    AdmitPeer(usize),
}

impl FaultInjector {
    pub(crate) fn new(rng: StdRng) -> Self {
        Self { rng, next: Instant::now(), undo: Vec::new(), leaving: Vec::new(), injected: BTreeMap::new() }
    }

    /// Returns the number of faults injected so far, by kind.
    pub(crate) fn injected(&self) -> &BTreeMap<Fault, u64> {
        &self.injected
    }

    /// Runs the actions that are due.
    pub(crate) fn turn(&mut self, cluster: &mut Cluster, world: &World) -> Result<()> {
        self.tidy(cluster, world)?;
        if Instant::now() >= self.next {
            self.next = Instant::now() + self.between(500, 3_500);
            self.inject(cluster, world)?;
        }
        Ok(())
    }

    /// Undoes the faults that are due, and handles processes that have ended. Returns true while there is more to undo.
    pub(crate) fn tidy(&mut self, cluster: &mut Cluster, world: &World) -> Result<bool> {
        let now = Instant::now();
        let (due, later) = self.undo.drain(..).partition(|(at, _)| *at <= now);
        self.undo = later;
        for (_, what) in due {
            world.note(&format!("undone: {what:?}"));
            match what {
                Undo::Start(member) => cluster.member(member)?.start()?,
                Undo::Thaw(member) => signal(cluster, member, Signal::Continue)?,
                Undo::AdmitEdge(line) => refuse(&cluster.edge_lines, line, false),
                Undo::AdmitPeer(line) => refuse(&cluster.server_lines, line, false),
            }
        }
        self.handle_ended(cluster, world)?;
        Ok(!self.undo.is_empty() || !self.leaving.is_empty())
    }

    /// Handles processes that have ended, on request or on their own.
    fn handle_ended(&mut self, cluster: &mut Cluster, world: &World) -> Result<()> {
        for number in 0..MEMBERS {
            let leaving_at = self.leaving.iter().position(|(leaving, _)| *leaving == number);
            let member = cluster.member(number)?;
            let Some(process) = &mut member.process else { continue };
            let ended = process.ended()?;
            match (ended, leaving_at) {
                (None, Some(leaving_at))
                    if self.leaving.get(leaving_at).is_some_and(|(_, until)| Instant::now() > *until) =>
                {
                    world.fault(format!("{} does not end after SIGTERM", member.name));
                    process.kill();
                }
                (None, _) => continue,
                (Some(how), Some(_)) if how.success() => {}
                (Some(how), _) => {
                    world.fault(format!("{} ended: {how}", member.name));
                    if leaving_at.is_none() {
                        world.dies(number, true);
                    }
                }
            }
            member.note_end();
            world.is_dead(number);
            world.strikes(struck(number), Duration::ZERO);
            if let Some(leaving_at) = leaving_at {
                self.leaving.remove(leaving_at);
            }
            let after = self.between(0, 6_000);
            self.later(after, Undo::Start(number));
        }
        Ok(())
    }

    fn inject(&mut self, cluster: &mut Cluster, world: &World) -> Result<()> {
        let all: u32 = FAULTS.iter().map(|(_, weight)| weight).sum();
        let mut drawn = self.rng.random_range(0..all);
        let mut fault = Fault::CutLine;
        for (each, weight) in FAULTS {
            fault = each;
            if drawn < weight {
                break;
            }
            drawn -= weight;
        }
        let line = self.rng.random_range(0..cluster.edge_lines.len());
        let (edges, servers) = (&cluster.edge_lines, &cluster.server_lines);
        let mut time = Duration::ZERO;
        match fault {
            Fault::CutLine => cut(edges, line, Cut::Reset),
            Fault::SilentLine => cut(edges, line, Cut::Silent),
            Fault::SilentHalf => cut(edges, line, Cut::SilentHalf),
            Fault::FrozenLine => {
                time = self.between(500, 18_000);
                cut(edges, line, Cut::Frozen(time));
            }
            Fault::RefusingLine => {
                cut(edges, line, Cut::Reset);
                refuse(edges, line, true);
                time = self.between(500, 6_000);
                self.later(time, Undo::AdmitEdge(line));
            }
            Fault::CutAllEdges => edges.iter().for_each(|line| line.cut(Cut::Reset)),
            Fault::RefuseAllEdges => {
                time = self.between(500, 4_000);
                for line in 0..edges.len() {
                    cut(edges, line, Cut::Reset);
                    refuse(edges, line, true);
                    self.later(time, Undo::AdmitEdge(line));
                }
            }
            Fault::CutServers => cut(servers, line, Cut::Reset),
            Fault::SilentServers => cut(servers, line, Cut::Silent),
            Fault::FrozenServers => {
                time = self.between(500, 18_000);
                cut(servers, line, Cut::Frozen(time));
            }
            Fault::RefusingServers => {
                cut(servers, line, Cut::Reset);
                refuse(servers, line, true);
                time = self.between(500, 6_000);
                self.later(time, Undo::AdmitPeer(line));
            }
            Fault::KillServer | Fault::StopServer | Fault::FreezeServer => {
                return self.strike(fault, 0..PODS, cluster, world);
            }
            Fault::KillEdge | Fault::StopEdge | Fault::FreezeEdge => {
                return self.strike(fault, PODS..MEMBERS, cluster, world);
            }
        }
        let target = match fault {
            Fault::CutAllEdges | Fault::RefuseAllEdges => 0..edges.len(),
            Fault::CutServers | Fault::SilentServers | Fault::FrozenServers | Fault::RefusingServers => {
                world.strikes(Affected::Servers, time);
                0..0
            }
            _ => line..line + 1,
        };
        target.for_each(|edge| world.strikes(Affected::Edge(edge), time));
        self.count(fault, line, world);
        Ok(())
    }

    /// Injects a fault into one process, unless too many are already affected.
    fn strike(
        &mut self,
        fault: Fault,
        among: std::ops::Range<usize>,
        cluster: &mut Cluster,
        world: &World,
    ) -> Result<()> {
        let suffers = |number: &usize| {
            self.leaving.iter().any(|(leaving, _)| leaving == number)
                || self
                    .undo
                    .iter()
                    .any(|(_, undo)| [Undo::Start(*number), Undo::Thaw(*number)].contains(undo))
        };
        let freezes = matches!(fault, Fault::FreezeServer | Fault::FreezeEdge);
        let able: Vec<usize> =
            among.clone().filter(|n| !suffers(n) && (freezes || !SURVIVORS.contains(n))).collect();
        if among.clone().filter(suffers).count() * 2 >= among.len() || able.is_empty() {
            return Ok(());
        }
        let Some(&number) = able.get(self.rng.random_range(0..able.len())) else { return Ok(()) };
        cluster.member(number)?.look();
        self.count(fault, number, world);
        match fault {
            Fault::KillServer | Fault::KillEdge => {
                world.dies(number, true);
                let member = cluster.member(number)?;
                member.process.iter_mut().for_each(crate::process::Process::kill);
                member.note_end();
                world.is_dead(number);
                world.strikes(struck(number), Duration::ZERO);
                let after = self.between(0, 6_000);
                self.later(after, Undo::Start(number));
            }
            Fault::StopServer | Fault::StopEdge => {
                world.dies(number, false);
                signal(cluster, number, Signal::Terminate)?;
                self.leaving.push((number, Instant::now() + LEAVES));
            }
            _ => {
                signal(cluster, number, Signal::Stop)?;
                let time = self.between(500, 20_000);
                world.strikes(struck(number), time);
                self.later(time, Undo::Thaw(number));
            }
        }
        Ok(())
    }

    fn count(&mut self, fault: Fault, target: usize, world: &World) {
        world.note(&format!("injected: {fault:?} {target}"));
        *self.injected.entry(fault).or_default() += 1;
    }

    fn later(&mut self, after: Duration, what: Undo) {
        // A line that already refuses connections does so for longer.
        self.undo.retain(|(_, other)| *other != what);
        self.undo.push((Instant::now() + after, what));
    }

    /// Returns a random duration in milliseconds, uniformly distributed.
    fn between(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.rng.random_range(least..most))
    }
}

/// Returns the parties affected by a fault of a process.
fn struck(member: usize) -> Affected {
    member.checked_sub(PODS).map_or(Affected::Servers, Affected::Edge)
}

fn cut(lines: &[Cutter], line: usize, how: Cut) {
    lines.get(line).into_iter().for_each(|line| line.cut(how));
}

fn refuse(lines: &[Cutter], line: usize, refuses: bool) {
    lines.get(line).into_iter().for_each(|line| line.refuse(refuses));
}

fn signal(cluster: &mut Cluster, member: usize, signal: Signal) -> Result<()> {
    cluster.member(member)?.process.iter().try_for_each(|process| process.signal(signal))
}

/// The faults, each with its relative frequency.
const FAULTS: [(Fault, u32); 17] = [
    (Fault::CutLine, 6),
    (Fault::SilentLine, 3),
    (Fault::SilentHalf, 4),
    (Fault::FrozenLine, 4),
    (Fault::RefusingLine, 4),
    (Fault::CutAllEdges, 1),
    (Fault::RefuseAllEdges, 1),
    (Fault::CutServers, 3),
    (Fault::SilentServers, 2),
    (Fault::FrozenServers, 2),
    (Fault::RefusingServers, 2),
    (Fault::KillServer, 3),
    (Fault::StopServer, 3),
    (Fault::FreezeServer, 3),
    (Fault::KillEdge, 3),
    (Fault::StopEdge, 2),
    (Fault::FreezeEdge, 3),
];
/// A server, an edge and an edge that opens sessions are never ended, so that leaks show in them.
pub(crate) const SURVIVORS: [usize; 3] = [PODS - 1, MEMBERS - 3, MEMBERS - 1];
/// Maximum time until a process has ended after it was asked to.
const LEAVES: Duration = Duration::from_secs(DRAIN + 8);
