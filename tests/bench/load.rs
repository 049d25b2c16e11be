//! Bulk clients: downloads, uploads, paced readers, stalled readers.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::process::Process;
use crate::role::{Role, print_message, until_dismissed};
use crate::targets::END;
use crate::way::Way;

/// The clients' task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Load {
    /// The route to the target.
    pub(crate) way: Way,
    /// What the clients do.
    pub(crate) kind: Kind,
    /// Number of concurrent clients, each with its own session.
    pub(crate) clients: usize,
    /// Duration; `None` means until dismissed.
    pub(crate) time: Option<Duration>,
}

/// A kind of bulk client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// Reads as fast as it can.
    Download,
    /// Writes as fast as it can, until the target has confirmed every byte.
    Upload,
    /// Reads this number of bytes per second.
    Paced(u64),
    /// Reads nothing at all.
    Stalled,
}

/// The result.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Transferred {
    /// Bytes that arrived, of all clients.
    pub(crate) bytes: u64,
    /// Bytes of each client.
    pub(crate) each: Vec<u64>,
    /// Duration.
    pub(crate) time: Duration,
}

impl Transferred {
    /// Returns bytes per second.
    #[expect(clippy::cast_precision_loss, reason = "no run moves 2^52 bytes")]
    pub(crate) fn rate(&self) -> f64 {
        self.bytes as f64 / self.time.as_secs_f64()
    }
}

impl Load {
    /// Starts the clients in a separate process and waits until all of them work.
    pub(crate) fn start(self, space: Option<&str>) -> Result<Process> {
        let mut process = Process::role(space, &Role::Load(self))?;
        let _: String = process.read_output()?;
        Ok(process)
    }

    /// Starts the clients and waits for their end.
    pub(crate) fn measure(self, space: Option<&str>) -> Result<Transferred> {
        self.start(space)?.read_output()
    }

    /// Runs the clients in this process. Reports when all are working, then the bytes they moved.
    pub(crate) fn run(&self) -> Result<()> {
        let streams = self.open().context("opening")?;
        let begin = Instant::now();
        let end = self.time.map(|time| begin + time);
        let (mut workers, mut counts) = (Vec::new(), Vec::new());
        for (stream, buffered) in streams {
            let count = Arc::new(AtomicU64::new(buffered.len() as u64));
            counts.push(count.clone());
            let kind = self.kind;
            workers.push(thread::spawn(move || kind.work(stream, end, &count)));
        }
        print_message(&"at work")?;
        if end.is_some() {
            for worker in workers {
                worker.join().map_err(|_| anyhow::anyhow!("a bulk client failed"))??;
            }
        } else {
            until_dismissed();
        }
        let each: Vec<u64> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        print_message(&Transferred { bytes: each.iter().sum(), each, time: begin.elapsed() })
    }
}

impl Load {
    /// Opens all sessions at the same time: in sequence, the first would have a head start of some RTTs.
    fn open(&self) -> io::Result<Vec<(TcpStream, Vec<u8>)>> {
        thread::scope(|scope| {
            let opening: Vec<_> = (0..self.clients).map(|_| scope.spawn(|| self.way.open())).collect();
            let opened =
                opening.into_iter().map(|one| one.join().map_err(|_| io::Error::other("a thread failed"))?);
            opened.collect()
        })
    }
}

impl Kind {
    fn work(self, mut stream: TcpStream, end: Option<Instant>, count: &AtomicU64) -> Result<()> {
        stream.set_read_timeout(Some(LOST))?;
        stream.set_write_timeout(Some(LOST))?;
        if self != Self::Upload {
            // Asks the source to start.
            stream.write_all(b"g")?;
        }
        match self {
            Self::Download => read(&mut stream, end, count, None),
            Self::Paced(rate) => read(&mut stream, end, count, Some(rate)),
            Self::Upload => write(&mut stream, end, count),
            Self::Stalled => {
                thread::park();
                drop(stream);
                Ok(())
            }
        }
    }
}

fn read(stream: &mut TcpStream, end: Option<Instant>, count: &AtomicU64, pace: Option<u64>) -> Result<()> {
    let mut buffer = vec![0; if pace.is_some() { PACED_BLOCK } else { BLOCK }];
    let begin = Instant::now();
    let mut mine = 0;
    while end.is_none_or(|end| Instant::now() < end) {
        let n = stream.read(&mut buffer)?;
        anyhow::ensure!(n > 0, "a download ended early");
        mine += n as u64;
        count.fetch_add(n as u64, Ordering::Relaxed);
        if let Some(rate) = pace {
            let due = begin + Duration::from_micros(mine * 1_000_000 / rate.max(1));
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    Ok(())
}

fn write(stream: &mut TcpStream, end: Option<Instant>, count: &AtomicU64) -> Result<()> {
    let block = vec![0xa5; BLOCK];
    while end.is_none_or(|end| Instant::now() < end) {
        stream.write_all(&block)?;
    }
    // Not a half-close, which some programs do not pass on.
    stream.write_all(&[END])?;
    let mut confirmed = [0; 8];
    stream.read_exact(&mut confirmed).context("an upload was not confirmed")?;
    count.fetch_add(u64::from_be_bytes(confirmed), Ordering::Relaxed);
    Ok(())
}

/// Bytes of one system call: large enough that the clients do not limit a figure.
const BLOCK: usize = 256 * 1024;
/// A transfer without progress for this long has failed.
const LOST: Duration = Duration::from_secs(30);
/// Bytes of one read of a paced reader.
const PACED_BLOCK: usize = 32 * 1024;
