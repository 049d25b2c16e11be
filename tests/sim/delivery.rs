//! Handles what arrives at processes.

use futures_util::FutureExt as _;
use tokio::time::Instant;
use tunnel_link::table::FrameEvent;
use tunnel_proto::frame::{FrameKind, SessionKey};

use super::world::Simulation;

impl Simulation {
    pub(crate) fn pull(&mut self, line: usize, side: usize, now: Instant) {
        let line = &mut self.lines[line];
        let Some(frame) = line.pull(side, now, &self.rng, &self.ledger) else { return };
        let [from, to] = [side, 1 - side].map(|side| line.ends[side].at);
        let servers = [from, to].map(|at| self.processes[at].is_server());
        self.hops.check_frame(&frame, [from, to], servers, &self.ledger);
    }

    pub(crate) fn deliver(&mut self, line: usize, side: usize, now: Instant) {
        for frame in self.lines[line].deliver(side, &self.rng, &self.ledger) {
            let end = &mut self.lines[line].ends[side];
            end.turns.received(&frame.body);
            let (at, link) = (end.at, end.link.clone());
            match frame.body {
                FrameKind::Ping(number) => link.pong(number),
                FrameKind::Pong(Some(number)) => drop(link.handle_pong(number, now)),
                FrameKind::Pong(None) => self.ledger.error("a pong without a number"),
                FrameKind::Session(id, category, word) => {
                    let table = self.processes[at].table.clone();
                    let key = SessionKey { id, category, node: frame.node };
                    let event = table.on_frame(&link, key, word, now);
                    self.event(event, at);
                }
                other => self.ledger.error(format!("unexpected frame {other:?}")),
            }
        }
    }

    fn event(&self, event: Option<FrameEvent>, at: usize) {
        let process = &self.processes[at];
        let place = &process.place;
        match event {
            Some(FrameEvent::Incoming(offer)) if !process.is_server() => {
                place.spawner.spawn("acceptor".into(), place.clone().answer(offer));
            }
            Some(FrameEvent::RelayRequest(request)) if process.is_server() && self.plan.servers > 1 => {
                place.spawner.spawn("guide".into(), place.clone().relay_request(request));
            }
            Some(other) => self.ledger.error(format!("process {at} gets unexpected event {other:?}")),
            None => {}
        }
    }

    /// Starts a search for a new path for each session that has lost its path.
    pub(crate) fn seek(&self) {
        for process in self.processes.iter().filter(|process| process.alive) {
            let next = || process.table.next_parked().now_or_never();
            let mut parked: Vec<_> = std::iter::from_fn(next).collect();
            // Sorted by the order of opening, because the map's order of random ids is not reproducible.
            parked.sort_by_key(|session| self.ledger.number(session.key().id));
            for session in parked {
                process.place.spawner.spawn("seeker".into(), process.place.clone().seek(session));
            }
        }
    }
}
