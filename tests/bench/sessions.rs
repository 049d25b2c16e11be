//! Clients that are about sessions rather than bytes: opened, held, ended by the target.

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
use crate::role::{say, until_dismissed};
use crate::targets::{FILE, file_byte};
use crate::way::Way;
use crate::{echo, tls};

/// Opens, sees one byte come back, closes, and again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Open {
    /// Where to.
    pub(crate) way: Way,
    /// Loops at once.
    pub(crate) loops: usize,
    /// How long.
    pub(crate) time: Duration,
}

/// The same over TLS with a certificate of the client's, one after another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OpenTls {
    /// Where to; what it asks for, it asks for inside TLS.
    pub(crate) way: Way,
    /// What it shows, and whom it believes.
    pub(crate) certificates: Certificates,
    /// How long.
    pub(crate) time: Duration,
}

/// What came of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// From the first packet to the echoed byte.
    pub(crate) echoes: echo::Echoes,
    /// Loops that did not come back with the byte.
    pub(crate) failed: u64,
    /// Why the last of them did not.
    pub(crate) why: Option<String>,
}

/// Sends without end while the target sends a file and ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tail {
    /// Where to.
    pub(crate) way: Way,
    /// How often.
    pub(crate) times: usize,
}

impl Open {
    /// The process's own part; says [`Opened`].
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
        say(&all)
    }

    fn one_loop(&self) -> Result<Opened> {
        again(self.time, || echo::once(&self.way))
    }
}

impl OpenTls {
    /// The process's own part; says [`Opened`].
    pub(crate) fn run(&self) -> Result<()> {
        let mut config = tls::client(&self.certificates)?;
        // Each connection has a whole handshake: kube-apiserver keeps nothing of the one before.
        config.resumption = Resumption::disabled();
        let config = Arc::new(config);
        let mut opened = again(self.time, || {
            let tls = ClientConnection::new(Arc::clone(&config), ServerName::try_from("localhost")?)?;
            let mut stream = StreamOwned::new(tls, self.way.dial()?);
            self.way.ask(&mut stream)?;
            stream.write_all(b"x")?;
            Ok(stream.read_exact(&mut [0])?)
        })?;
        opened.echoes.nanos.sort_unstable();
        say(&opened)
    }
}

/// Does it again and again, and times each.
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
    /// The process's own part; says how many files came whole.
    pub(crate) fn run(&self) -> Result<()> {
        let mut whole = 0;
        for _ in 0..self.times {
            whole += usize::from(self.once().unwrap_or(false));
        }
        say(&whole)
    }

    /// True if the whole file came although this client never stopped sending.
    fn once(&self) -> Result<bool> {
        let (mut stream, mut got) = self.way.open()?;
        stream.set_read_timeout(Some(LOST))?;
        let mut sender = stream.try_clone()?;
        let sending = thread::spawn(move || while sender.write_all(&[3; 16 * 1024]).is_ok() {});
        // The file's end waits in the proxy for a while, which is where it is lost if anywhere.
        thread::sleep(SLOW_START);
        let ended = stream.read_to_end(&mut got);
        let _ = stream.shutdown(std::net::Shutdown::Both);
        let _ = sending.join();
        ended?;
        Ok(got.len() == FILE && got.iter().enumerate().all(|(at, &byte)| byte == file_byte(at)))
    }
}

/// Opens so many sessions one after another, says when all are open, keeps them until dismissed.
pub(crate) fn hold(way: &Way, count: usize) -> Result<()> {
    let mut held = Vec::with_capacity(count);
    for _ in 0..count {
        let (mut stream, _) = way.open()?;
        stream.set_read_timeout(Some(LOST))?;
        stream.write_all(b"h")?;
        stream.read_exact(&mut [0])?;
        held.push(stream);
    }
    say(&held.len())?;
    until_dismissed();
    drop(held);
    say(&0)
}

/// A client that starts reading this late has an end waiting for it.
const SLOW_START: Duration = Duration::from_millis(30);
/// What has not come by now will not.
const LOST: Duration = Duration::from_secs(10);
