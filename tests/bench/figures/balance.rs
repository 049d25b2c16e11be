//! Thousands of edges at two servers, and a third server that starts later.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::Bench;
use super::edges::until_linked;
use crate::edges::{Edges, State};
use crate::place::Place;
use crate::process::Process;
use crate::role::Role;
use crate::table::{Bound, Row, Table, mib, short};
use crate::targets::Targets;
use crate::tunnel::Tunnel;

impl Bench {
    /// Measures how soon the third server has its share, and how many dials that takes.
    pub(crate) fn balance(&self, table: &mut Table) -> Result<()> {
        let Some(binary) = &self.binary else {
            eprintln!("balance: skipped, measures only the program");
            return Ok(());
        };
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let servers = Tunnel::three(&place, &targets, binary)?;
        let _two = [servers[0].server()?, servers[1].server()?];
        let count = self.edges / 2;
        let edges = Edges {
            servers: servers.each_ref().map(|server| server.grpc).to_vec(),
            ca: place.certificates.ca(),
            first: 0,
            count,
        };
        let mut edges = [Process::role(None, &Role::Edges(edges))?];
        until_linked(&mut edges, count)?;
        thread::sleep(SETTLED);
        let before: State = edges[0].request_output()?;
        eprintln!("nodes of each server: {:?}", before.at);
        let _third = servers[2].server()?;
        let since = Instant::now();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "thousands"
        )]
        let most = (count as f64 / 3.0 * 1.3) as usize;
        let (mut even, mut last, mut drained, mut last_report) = (None, since, before.drained, since);
        let state = loop {
            thread::sleep(LOOK);
            let state: State = edges[0].request_output()?;
            ensure!(since.elapsed() < TIMEOUT, "still rebalancing after {TIMEOUT:?}: {:?}", state.at);
            if even.is_none() && state.at.iter().all(|nodes| *nodes <= most) {
                even = Some(since.elapsed());
            }
            if state.drained > drained {
                (drained, last) = (state.drained, Instant::now());
            }
            if last_report.elapsed() >= REPORT_INTERVAL {
                eprintln!(
                    "{:.0?}: {:?}, {} asked",
                    since.elapsed(),
                    state.at,
                    state.drained - before.drained
                );
                last_report = Instant::now();
            }
            if even.is_some() && last.elapsed() >= REST {
                break state;
            }
        };
        for (why, times) in state.failed.iter().chain(&state.ended) {
            eprintln!("{times} times: {why}");
        }
        let even = even.unwrap_or(TIMEOUT).as_secs_f64();
        let rest = (last - since).as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "thousands")]
        let share = state.at.get(2).copied().unwrap_or(0) as f64 * 3.0 / count as f64;
        for (figure, tunnel, value, bound) in [
            (
                format!(
                    "{count} edges at two servers, a third comes: s until none has over 1.3 times the mean"
                ),
                format!("{} s; at rest after {} s, with {:?}", short(even), short(rest), state.at),
                even,
                Some(Bound::Most(180.0, 120.0)),
            ),
            (
                "its part of the mean then".to_owned(),
                format!(
                    "{}; {} edges were asked, {} dials",
                    short(share),
                    state.drained - before.drained,
                    state.dials - before.dials
                ),
                share,
                Some(Bound::Least(0.6, 0.6)),
            ),
        ] {
            table.add(Row { figure, tunnel, reference: String::new(), others: String::new(), value, bound });
        }
        Ok(())
    }

    /// Measures the memory of a server after nine of ten edges have disconnected.
    pub(crate) fn shrink(&self, table: &mut Table) -> Result<()> {
        let Some(binary) = &self.binary else {
            eprintln!("shrink: skipped, measures only the program");
            return Ok(());
        };
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let tunnel = Tunnel::configure(&place, &targets, binary)?;
        let server = tunnel.server()?;
        let tenth = self.edges / 10;
        let edges = |first, count| {
            let edges = Edges { servers: vec![tunnel.grpc], ca: place.certificates.ca(), first, count };
            Process::role(None, &Role::Edges(edges))
        };
        let mut all = vec![edges(0, tenth)?];
        until_linked(&mut all, tenth)?;
        thread::sleep(SETTLED);
        let fresh = server.memory()?;
        all.push(edges(tenth, self.edges - tenth)?);
        until_linked(&mut all, self.edges)?;
        thread::sleep(SETTLED);
        let full = server.memory()?;
        all.pop();
        thread::sleep(SETTLED);
        let after = server.memory()?;
        #[expect(clippy::cast_precision_loss, reason = "bytes")]
        let value = after as f64 / fresh as f64;
        table.add(Row {
            figure: format!(
                "server memory once {} of {} edges have left, against a fresh server's with the rest",
                self.edges - tenth,
                self.edges
            ),
            tunnel: format!("{} MiB; {} MiB with all", short(mib(after)), short(mib(full))),
            reference: format!("fresh {} MiB", short(mib(fresh))),
            others: String::new(),
            value,
            bound: Some(Bound::Most(1.2, 1.2)),
        });
        Ok(())
    }
}

/// Longer than a new edge is exempt from rebalancing, and than buffers of its handshake are kept.
const SETTLED: Duration = Duration::from_secs(32);
/// Interval between two samples.
const LOOK: Duration = Duration::from_millis(500);
/// Interval between two lines of progress.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// Rebalancing is over if no edge is asked to move for this long.
const REST: Duration = Duration::from_secs(30);
/// Maximum time until rebalancing is over.
const TIMEOUT: Duration = Duration::from_secs(600);
