//! Clients that open sessions, hold them, or have them ended by the target.

use std::io::{Read, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConnection, StreamOwned};

use crate::place::Certificates;
use crate::role::{print_message, until_dismissed};
use crate::targets::{FILE, file_byte};
use crate::way::Way;
use crate::{echo, tls};

/// Clients that repeatedly open a session, echo one byte, and close it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Open {
    /// The route to the target.
    pub(crate) way: Way,
    /// Number of concurrent loops.
    pub(crate) loops: usize,
    /// Duration.
    pub(crate) time: Duration,
}

/// Like [`Open`], over TLS with a client certificate, in sequence.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OpenTls {
    /// The route; CONNECT is sent inside TLS.
    pub(crate) way: Way,
    /// The presented certificate, and the trusted CA.
    pub(crate) certificates: Certificates,
    /// Duration.
    pub(crate) time: Duration,
}

/// The result.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// Times from the first packet to the echoed byte.
    pub(crate) echoes: echo::Echoes,
    /// Number of attempts that failed.
    pub(crate) failed: u64,
    /// Error of the last failed attempt.
    pub(crate) why: Option<String>,
}

/// A client that sends continuously while the target sends a file and ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tail {
    /// The route to the target.
    pub(crate) way: Way,
    /// Number of times.
    pub(crate) times: usize,
}

impl Open {
    /// Runs the clients in this process; prints [`Opened`].
    pub(crate) fn run(&self) -> Result<()> {
        let loops: Vec<_> = (0..self.loops)
            .map(|_| {
                let this = self.clone();
                thread::spawn(move || this.one_loop())
            })
            .collect();
        let mut all = Opened::default();
        for one in loops {
            let one = one.join().map_err(|_| anyhow::anyhow!("a loop failed"))??;
            all.echoes.nanos.extend(one.echoes.nanos);
            all.failed += one.failed;
            all.why = one.why.or(all.why);
        }
        all.echoes.nanos.sort_unstable();
        print_message(&all)
    }

    fn one_loop(&self) -> Result<Opened> {
        again(self.time, || echo::once(&self.way))
    }
}

impl OpenTls {
    /// Runs the client in this process; prints [`Opened`].
    pub(crate) fn run(&self) -> Result<()> {
        let mut config = tls::client(&self.certificates)?;
        // Each connection does a full handshake, as kube-apiserver does not resume TLS sessions.
        config.resumption = Resumption::disabled();
        let config = Arc::new(config);
        let mut opened = again(self.time, || {
            let tls = ClientConnection::new(Arc::clone(&config), ServerName::try_from("localhost")?)?;
            let mut stream = StreamOwned::new(tls, self.way.dial()?);
            self.way.connect(&mut stream)?;
            stream.write_all(b"x")?;
            Ok(stream.read_exact(&mut [0])?)
        })?;
        opened.echoes.nanos.sort_unstable();
        print_message(&opened)
    }
}

/// Repeats an operation for `time`, and times each run.
fn again(time: Duration, mut once: impl FnMut() -> Result<()>) -> Result<Opened> {
    let mut done = Opened::default();
    let begin = Instant::now();
    while begin.elapsed() < time {
        let since = Instant::now();
        match once() {
            Ok(()) => done.echoes.nanos.push(u64::try_from(since.elapsed().as_nanos())?),
            Err(why) => {
                done.failed += 1;
                done.why = Some(format!("{why:#}"));
            }
        }
    }
    Ok(done)
}

impl Tail {
    /// Runs the client in this process; prints how many files were complete.
    pub(crate) fn run(&self) -> Result<()> {
        let mut whole = 0;
        for _ in 0..self.times {
            whole += usize::from(self.once().unwrap_or(false));
        }
        print_message(&whole)
    }

    /// Returns true if the whole file arrived although this client never stopped sending.
    fn once(&self) -> Result<bool> {
        let (mut stream, mut got) = self.way.open()?;
        stream.set_read_timeout(Some(LOST))?;
        let mut sender = stream.try_clone()?;
        let sending = thread::spawn(move || while sender.write_all(&[3; 16 * 1024]).is_ok() {});
        // The end of the file waits in the proxy for a while, which is where it could be lost.
        thread::sleep(SLOW_START);
        let ended = stream.read_to_end(&mut got);
        let _ = stream.shutdown(std::net::Shutdown::Both);
        let _ = sending.join();
        ended?;
        Ok(got.len() == FILE && got.iter().enumerate().all(|(at, &byte)| byte == file_byte(at)))
    }
}

/// Opens `count` sessions in sequence, reports when all are open, and keeps them until dismissed.
pub(crate) fn hold(way: &Way, count: usize) -> Result<()> {
    let mut held = Vec::with_capacity(count);
    for _ in 0..count {
        let (mut stream, _) = way.open()?;
        stream.set_read_timeout(Some(LOST))?;
        stream.write_all(b"h")?;
        stream.read_exact(&mut [0])?;
        held.push(stream);
    }
    print_message(&held.len())?;
    until_dismissed();
    drop(held);
    print_message(&0)
}

/// Delay of the first read: the end of the file is then already waiting.
const SLOW_START: Duration = Duration::from_millis(30);
/// Timeout for a read.
const LOST: Duration = Duration::from_secs(10);
