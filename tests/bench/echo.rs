//! Echo clients: 64 bytes there and back, timed.

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::process::Process;
use crate::role::{Role, say};
use crate::way::Way;

/// What the clients are to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Echo {
    /// Where to.
    pub(crate) way: Way,
    /// Clients at once, each its own session.
    pub(crate) clients: usize,
    /// Pause between one echo and the next; none means back to back.
    pub(crate) pause: Option<Duration>,
    /// How long they echo before it counts: caches, windows and clocks settle, sessions go where they belong.
    pub(crate) warm: Duration,
    /// How long it counts.
    pub(crate) time: Duration,
    /// Echoes that took longer than this are told one by one.
    pub(crate) tell: Option<Duration>,
}

/// What came of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Echoes {
    /// Every round trip, in nanoseconds, sorted.
    pub(crate) nanos: Vec<u64>,
    /// When the long ones began (seconds since 1970) and how long they took.
    pub(crate) long: Vec<(f64, Duration)>,
}

impl Echo {
    /// Back to back, one client.
    pub(crate) fn tight(way: &Way, time: Duration) -> Self {
        Self { way: way.clone(), clients: 1, pause: None, warm: WARM, time, tell: None }
    }

    /// Starts it in its own process, waits for its end.
    pub(crate) fn measure(self, space: Option<&str>) -> Result<Echoes> {
        self.start(space)?.hear()
    }

    /// Starts it in its own process, which says [`Echoes`] at its end.
    pub(crate) fn start(self, space: Option<&str>) -> Result<Process> {
        Process::role(space, &Role::Echo(self))
    }

    /// The process's own part.
    pub(crate) fn run(&self) -> Result<()> {
        let mut all = Echoes::default();
        let clients: Vec<_> = (0..self.clients)
            .map(|_| {
                let this = self.clone();
                thread::spawn(move || this.client())
            })
            .collect();
        for client in clients {
            let one = client.join().map_err(|_| anyhow::anyhow!("an echo client failed"))??;
            all.nanos.extend(one.nanos);
            all.long.extend(one.long);
        }
        all.nanos.sort_unstable();
        say(&all)
    }

    fn client(&self) -> Result<Echoes> {
        let (mut stream, _) = self.open()?;
        stream.set_read_timeout(Some(LOST))?;
        let mut buffer = [7; MESSAGE];
        let warm = Instant::now();
        while warm.elapsed() < self.warm {
            stream.write_all(&buffer)?;
            stream.read_exact(&mut buffer)?;
        }
        let mut found = Echoes::default();
        let begin = Instant::now();
        while begin.elapsed() < self.time {
            if let Some(pause) = self.pause {
                thread::sleep(pause);
            }
            let at = SystemTime::now();
            let since = Instant::now();
            stream.write_all(&buffer)?;
            stream.read_exact(&mut buffer).context("an echo was lost")?;
            let took = since.elapsed();
            found.nanos.push(u64::try_from(took.as_nanos())?);
            if self.tell.is_some_and(|limit| took > limit) {
                found.long.push((at.duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64(), took));
            }
        }
        Ok(found)
    }

    /// Tries for a while: in a namespace nobody else has waited for the proxy to come up.
    fn open(&self) -> Result<(std::net::TcpStream, Vec<u8>)> {
        let since = Instant::now();
        loop {
            match self.way.open() {
                Err(_) if since.elapsed() < COME_UP => thread::sleep(Duration::from_millis(20)),
                done => return Ok(done?),
            }
        }
    }
}

impl Echoes {
    /// A quantile in microseconds.
    pub(crate) fn micros(&self, quantile: f64) -> f64 {
        let last = self.nanos.len().saturating_sub(1);
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let at = (last as f64 * quantile).round() as usize;
        #[expect(clippy::cast_precision_loss, reason = "round trips stay far below 2^52 ns")]
        self.nanos.get(at).map_or(f64::NAN, |&nanos| nanos as f64 / 1000.0)
    }

    /// The median in microseconds.
    pub(crate) fn p50(&self) -> f64 {
        self.micros(0.5)
    }

    /// The 99th percentile in microseconds.
    pub(crate) fn p99(&self) -> f64 {
        self.micros(0.99)
    }

    /// The longest in microseconds.
    pub(crate) fn max(&self) -> f64 {
        self.micros(1.0)
    }
}

/// Opens, sees one byte come back, closes.
pub(crate) fn once(way: &Way) -> Result<()> {
    let (mut stream, _) = way.open()?;
    stream.set_read_timeout(Some(LOST))?;
    stream.write_all(b"x")?;
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    ensure!(&byte == b"x", "something else came back");
    Ok(())
}

/// Bytes of one echo: a keystroke with its ssh packet around it.
const MESSAGE: usize = 64;
/// Enough for a session that stays where it began.
pub(crate) const WARM: Duration = Duration::from_millis(200);
/// An echo that takes longer is lost.
const LOST: Duration = Duration::from_secs(30);
/// A proxy that is not there by now will not come.
const COME_UP: Duration = Duration::from_secs(10);
