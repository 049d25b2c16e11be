//! Echo clients: send 64 bytes and time their return.

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::process::Process;
use crate::role::{Role, print_message};
use crate::way::Way;

/// The clients' task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Echo {
    /// The route to the target.
    pub(crate) way: Way,
    /// Number of concurrent clients, each with its own session.
    pub(crate) clients: usize,
    /// Pause between two echoes; `None` means back to back.
    pub(crate) pause: Option<Duration>,
    /// Time before the measurement, until caches, windows and clocks settle and sessions have moved to their links.
    pub(crate) warm: Duration,
    /// Duration of the measurement.
    pub(crate) time: Duration,
    /// Echoes that take longer than this are reported one by one.
    pub(crate) report_above: Option<Duration>,
}

/// The result.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Echoes {
    /// All round-trip times in nanoseconds, sorted.
    pub(crate) nanos: Vec<u64>,
    /// Start (seconds since 1970) and duration of each long echo.
    pub(crate) long: Vec<(f64, Duration)>,
}

impl Echo {
    /// Echoes back to back, with one client.
    pub(crate) fn tight(way: &Way, time: Duration) -> Self {
        Self { way: way.clone(), clients: 1, pause: None, warm: WARM, time, report_above: None }
    }

    /// Starts the clients in a separate process and waits for its end.
    pub(crate) fn measure(self, space: Option<&str>) -> Result<Echoes> {
        self.start(space)?.read_output()
    }

    /// Starts the clients in a separate process, which prints [`Echoes`] at its end.
    pub(crate) fn start(self, space: Option<&str>) -> Result<Process> {
        Process::role(space, &Role::Echo(self))
    }

    /// Runs the clients in this process.
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
        print_message(&all)
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
            if self.report_above.is_some_and(|limit| took > limit) {
                found.long.push((at.duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64(), took));
            }
        }
        Ok(found)
    }

    /// Retries for a while: in a namespace no other part has waited for the proxy to start.
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
    /// Returns a quantile in microseconds.
    pub(crate) fn micros(&self, quantile: f64) -> f64 {
        let last = self.nanos.len().saturating_sub(1);
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let at = (last as f64 * quantile).round() as usize;
        #[expect(clippy::cast_precision_loss, reason = "round trips stay far below 2^52 ns")]
        self.nanos.get(at).map_or(f64::NAN, |&nanos| nanos as f64 / 1000.0)
    }

    /// Returns the median in microseconds.
    pub(crate) fn p50(&self) -> f64 {
        self.micros(0.5)
    }

    /// Returns the 99th percentile in microseconds.
    pub(crate) fn p99(&self) -> f64 {
        self.micros(0.99)
    }

    /// Returns the maximum in microseconds.
    pub(crate) fn max(&self) -> f64 {
        self.micros(1.0)
    }
}

/// Opens a session, echoes one byte, and closes it.
pub(crate) fn once(way: &Way) -> Result<()> {
    let (mut stream, _) = way.open()?;
    stream.set_read_timeout(Some(LOST))?;
    stream.write_all(b"x")?;
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    ensure!(&byte == b"x", "a wrong byte came back");
    Ok(())
}

/// Bytes of one echo: a keystroke in its ssh packet.
const MESSAGE: usize = 64;
/// Enough for a session that stays on its first link.
pub(crate) const WARM: Duration = Duration::from_millis(200);
/// An echo that takes longer counts as lost.
const LOST: Duration = Duration::from_secs(30);
/// Timeout for the start of a proxy.
const COME_UP: Duration = Duration::from_secs(10);
