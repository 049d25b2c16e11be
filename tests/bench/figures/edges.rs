//! Thousands of idle edges at one server: its memory and CPU, and how soon all or half of them reconnect after it was
//! down.

use std::io::{ErrorKind, Read as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Bench;
use crate::edges::{Edges, State};
use crate::place::Place;
use crate::process::Process;
use crate::role::Role;
use crate::table::{Bound, Row, Table, mib, short};
use crate::targets::Targets;
use crate::tunnel::Tunnel;

impl Bench {
    /// Measures everything, with the edges in two processes: the half that stays reconnects once more.
    pub(crate) fn idle_edges(&self, table: &mut Table) -> Result<()> {
        let Some(binary) = &self.binary else {
            eprintln!("edges: skipped, measures only the program");
            return Ok(());
        };
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let tunnel = Tunnel::configure(&place, &targets, binary)?;
        let mut server = tunnel.server()?;
        thread::sleep(SETTLE);
        let empty = server.memory()?;
        let half = self.edges / 2;
        let edges = |first, count| {
            let edges = Edges { servers: vec![tunnel.grpc], ca: place.certificates.ca(), first, count };
            Process::role(None, &Role::Edges(edges))
        };
        let mut halves = [edges(0, half)?, edges(half, self.edges - half)?];
        until_linked(&mut halves, self.edges)?;
        self.weigh_idle(table, &server, empty, &mut halves)?;
        back(table, &tunnel, &mut server, &mut halves, self.edges, 0)?;
        let [stay, removed] = halves;
        drop(removed);
        let mut half_of_them = [stay];
        for silent in [0, SILENT] {
            // Long enough for each edge to reset its backoff.
            thread::sleep(PINGED);
            back(table, &tunnel, &mut server, &mut half_of_them, half, silent)?;
        }
        Ok(())
    }

    /// Measures the memory of each edge, and the CPU of idle edges.
    fn weigh_idle(
        &self,
        table: &mut Table,
        server: &Process,
        empty: u64,
        halves: &mut [Process; 2],
    ) -> Result<()> {
        // Meanwhile buffers of the handshakes are freed, and every link is pinged.
        thread::sleep(PINGED);
        let full = server.memory()?;
        let watched = self.time(60.0);
        let cpu = |of: &[Process; 2]| -> Result<Duration> { of.iter().map(Process::cpu).sum() };
        let (before, theirs) = (server.cpu()?, cpu(halves)?);
        thread::sleep(watched);
        let busy = server.cpu()?.saturating_sub(before).as_secs_f64() / watched.as_secs_f64() * 100.0;
        let theirs = cpu(halves)?.saturating_sub(theirs).as_secs_f64() / watched.as_secs_f64() * 100.0;
        until_linked(halves, self.edges).context("edges were lost while idle")?;
        let after = server.memory()?;
        eprintln!(
            "server memory MiB: without edges {:.1}, with {} edges {:.1}, {watched:?} later {:.1}",
            mib(empty),
            self.edges,
            mib(full),
            mib(after)
        );
        #[expect(clippy::cast_precision_loss, reason = "thousands")]
        let each = mib(full.max(after).saturating_sub(empty)) * 1024.0 / self.edges as f64;
        table.add(Row {
            figure: format!("server memory for each of {} idle edges, KiB", self.edges),
            tunnel: format!("{} KiB", short(each)),
            reference: String::new(),
            others: String::new(),
            value: each,
            bound: Some(Bound::Most(60.0, 60.0)),
        });
        table.add(Row {
            figure: format!("server CPU with {} idle edges, percent of a core", self.edges),
            tunnel: format!("{} %; all edges together {} %", short(busy), short(theirs)),
            reference: String::new(),
            others: String::new(),
            value: busy,
            bound: None,
        });
        Ok(())
    }
}

/// Kills the server, waits, and restarts it, in parallel with `silent` sockets from the edges' own address.
fn back(
    table: &mut Table,
    tunnel: &Tunnel,
    server: &mut Process,
    edges: &mut [Process],
    count: usize,
    silent: usize,
) -> Result<()> {
    let cpu = |of: &[Process]| -> Result<Duration> { of.iter().map(Process::cpu).sum() };
    let before = State::of_all(edges)?;
    server.kill();
    thread::sleep(AWAY);
    let away = State::of_all(edges)?;
    ensure!(away.linked == 0, "{} edges are linked to a stopped server", away.linked);
    let theirs = cpu(edges)?;
    *server = tunnel.server()?;
    let _crowd = SilentSockets::start(tunnel.grpc, silent);
    let since = Instant::now();
    let (mut state, mut quarters) = (away.clone(), Vec::new());
    while state.linked < count && since.elapsed() < TIMEOUT {
        thread::sleep(LOOK);
        let most = state.most;
        state = State::of_all(edges)?;
        state.most = state.most.max(most);
        while quarters.len() < 4 && state.linked * 4 >= count * (quarters.len() + 1) {
            quarters.push(since.elapsed().as_secs_f64());
        }
    }
    let took = since.elapsed().as_secs_f64();
    ensure!(state.linked == count, "only {} of {count} edges reconnected: {:?}", state.linked, state.failed);
    let (own, theirs) = (server.cpu()?, cpu(edges)?.saturating_sub(theirs));
    eprintln!(
        "quarters of the edges reconnected after, s: {quarters:.2?}; server CPU {own:?}, all edges' {theirs:?}"
    );
    for (why, times) in &state.failed {
        let new = times - before.failed.get(why).copied().unwrap_or(0);
        eprintln!("{new} failed dials: {why}");
    }
    let silent_text = if silent > 0 { format!(", next to {silent} silent sockets") } else { String::new() };
    table.add(Row {
        figure: format!(
            "{count} edges back after the server was away for {AWAY:?}{silent_text}: s from its start to the last"
        ),
        tunnel: format!(
            "{} s; half of them {} s",
            short(took),
            short(quarters.get(1).copied().unwrap_or(f64::NAN))
        ),
        reference: String::new(),
        others: String::new(),
        value: took,
        bound: Some(Bound::Most(10.0, 10.0)),
    });
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let [buffered, each, meanwhile] = [
        (state.buffered - before.buffered) as f64,
        (state.dials - before.dials) as f64 / count as f64,
        (away.dials - before.dials) as f64 / count as f64,
    ];
    table.add(Row {
        figure: "their dials sooner than their backoff allows".into(),
        tunnel: format!(
            "{buffered}; dials of an edge {}, of them {} before the server was started, at most {}",
            short(each),
            short(meanwhile),
            state.most.max(away.most)
        ),
        reference: String::new(),
        others: String::new(),
        value: buffered,
        bound: Some(Bound::Most(0.0, 0.0)),
    });
    Ok(())
}

/// Sockets that connect, send nothing, and reconnect when they are closed, until this is dropped.
struct SilentSockets(Arc<AtomicBool>);

impl SilentSockets {
    fn start(at: SocketAddr, count: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let ended = over.clone();
        thread::spawn(move || {
            let mut sockets: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
            while !ended.load(Relaxed) {
                for socket in &mut sockets {
                    let open = socket.as_mut().is_some_and(|socket| {
                        matches!(socket.read(&mut [0]), Err(cause) if cause.kind() == ErrorKind::WouldBlock)
                    });
                    if !open {
                        *socket = TcpStream::connect_timeout(&at, LOOK).ok();
                        let _ = socket.as_ref().map(|socket| socket.set_nonblocking(true));
                    }
                }
                thread::sleep(LOOK);
            }
        });
        Self(over)
    }
}

impl Drop for SilentSockets {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

pub(crate) fn until_linked(halves: &mut [Process], count: usize) -> Result<()> {
    let since = Instant::now();
    loop {
        let state = State::of_all(halves)?;
        let linked = state.linked;
        if linked == count {
            eprintln!("{linked} edges linked after {:.1?}", since.elapsed());
            for (why, times) in state.failed.iter().chain(&state.ended) {
                eprintln!("{times} times: {why}");
            }
            return Ok(());
        }
        ensure!(since.elapsed() < TIMEOUT, "only {linked} of {count} edges are linked: {state:?}");
        thread::sleep(LOOK);
    }
}

/// Time for cleanup after a program has started, or has lost many links.
const SETTLE: Duration = Duration::from_secs(2);
/// Longer than the interval of pings on an idle link, and than buffers are kept.
const PINGED: Duration = Duration::from_secs(15);
/// How long the server is down.
const AWAY: Duration = Duration::from_secs(2);
/// Number of silent sockets while the edges reconnect.
const SILENT: usize = 4500;
/// Interval between two samples.
const LOOK: Duration = Duration::from_millis(50);
/// Maximum time until edges are linked.
const TIMEOUT: Duration = Duration::from_secs(120);
