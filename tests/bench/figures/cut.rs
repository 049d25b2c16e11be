//! The line between edge and server is cut while a session runs: time until its bytes flow again.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Bench;
use crate::cutter::{Cut, Cutter};
use crate::place::Place;
use crate::table::{Bound, Row, Table, largest, median, short};
use crate::targets::Targets;
use crate::tunnel::Tunnel;

impl Bench {
    /// Measures cuts by RST and by silence.
    pub(crate) fn cut(&self, table: &mut Table) -> Result<()> {
        let Some(binary) = &self.binary else {
            eprintln!("cut: skipped, measures only the program");
            return Ok(());
        };
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let tunnel = Tunnel::configure(&place, &targets, binary)?;
        let line = Cutter::to(tunnel.grpc)?;
        tunnel.edge_dials(line.at)?;
        let proxy = tunnel.reachable()?;
        let (mut session, _) = proxy.ways.echo.open()?;
        session.set_read_timeout(Some(LOST))?;

        let times = if self.quick { 3 } else { 20 };
        for (figure, how, pause, most) in [
            (
                "line cut by RST, network back at once: s until bytes of the session flow again, median",
                Cut::Reset,
                None,
                1.0,
            ),
            (
                "line silent, new connections work: s until bytes of the session flow again, worst",
                Cut::Silent,
                None,
                3.0,
            ),
            (
                "the same, where the cloud speaks first after a pause of 1 s: s from the cut, worst",
                Cut::Silent,
                Some(Duration::from_secs(1)),
                5.0,
            ),
        ] {
            let took = cut_often(&mut session, &line, (how, pause), times)?;
            let (middle, worst) = (median(took.clone()), largest(&took));
            table.add(Row {
                figure: figure.into(),
                tunnel: format!("median {} s, worst of {times} {} s", short(middle), short(worst)),
                reference: String::new(),
                others: String::new(),
                value: if how == Cut::Reset { middle } else { worst },
                bound: Some(Bound::Most(most, most)),
            });
        }
        Ok(())
    }
}

/// Returns the seconds from each cut to the next echo.
fn cut_often(
    session: &mut TcpStream,
    line: &Cutter,
    (how, pause): (Cut, Option<Duration>),
    times: u32,
) -> Result<Vec<f64>> {
    let mut took = Vec::new();
    for _ in 0..times {
        let calm = Instant::now();
        while calm.elapsed() < CALM {
            echo(session)?;
            thread::sleep(PAUSE);
        }
        line.cut(how);
        let since = Instant::now();
        thread::sleep(pause.unwrap_or_default());
        echo(session).with_context(|| format!("after a cut: {how:?}"))?;
        took.push(since.elapsed().as_secs_f64());
    }
    eprintln!("{how:?}, pause {pause:?}, s: {took:.3?}");
    Ok(took)
}

fn echo(session: &mut TcpStream) -> Result<()> {
    let mut buffer = [7; 64];
    session.write_all(&buffer)?;
    Ok(session.read_exact(&mut buffer)?)
}

/// Time for which a session works between two cuts.
const CALM: Duration = Duration::from_millis(500);
/// Pause between two echoes during that time.
const PAUSE: Duration = Duration::from_millis(10);
/// An echo that takes longer counts as lost.
const LOST: Duration = Duration::from_secs(60);
