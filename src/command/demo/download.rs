//! A download over a user's link, during which servers are killed and the line is cut.

use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use aws_lc_rs::digest::{Context as Digest, SHA256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::info_span;

use super::listeners::read_head;
use super::page::{DOWNLOAD, LENGTH, MIB, PIECE, expected_digest};
use super::{NODE, elapsed_text};
use crate::uplink::client::ClientUplinks;
use tunnel_base::drain::Drain;
use tunnel_base::names::Target;
use tunnel_link::table::handles::Session;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_net::listen::TcpListenSocket;

/// The lines of the demo, and under them a progress bar if stderr is a terminal.
#[derive(Debug)]
pub(crate) struct DemoScreen {
    started: Instant,
    has_bar: bool,
    is_terminal: bool,
    has_colours: bool,
}

impl DemoScreen {
    pub(crate) fn new() -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        // https://no-color.org
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { started: Instant::now(), has_bar: false, is_terminal, has_colours: is_terminal && !no_color }
    }

    /// Prints a line.
    pub(crate) fn line(&mut self, text: &str) {
        let clear = if std::mem::take(&mut self.has_bar) { "\r\x1b[K" } else { "" };
        // The demo continues without a terminal.
        let _ = writeln!(std::io::stderr(), "{clear}{text}");
    }

    /// Prints a line with the time since the demo's start.
    pub(crate) fn step(&mut self, text: &str) {
        let time = elapsed_text(self.started);
        self.line(&format!("{time:>7} {text}"));
    }

    /// Like [`DemoScreen::step`], on a terminal in that colour: [`RED`] for an interruption, [`GREEN`] for its end.
    pub(crate) fn coloured_step(&mut self, colour: &str, text: &str) {
        if self.has_colours {
            self.step(&format!("{colour}{text}{NO_COLOUR}"));
        } else {
            self.step(text);
        }
    }

    /// Draws the progress of the download. Without a terminal it prints a line for each tenth of it.
    fn progress(&mut self, done: usize, before: usize) {
        let passed = |parts: usize| done * parts / LENGTH > before * parts / LENGTH;
        if !self.is_terminal {
            if passed(10) {
                self.step(&format!("{} %", done * 10 / LENGTH * 10));
            }
            return;
        }
        if passed(LENGTH / MIB) {
            let filled = done * BAR_WIDTH / LENGTH;
            let mib = done / MIB;
            let bar: String = (0..BAR_WIDTH).map(|at| if at < filled { '#' } else { '.' }).collect();
            let _ = write!(std::io::stderr(), "\r\x1b[K        [{bar}] {mib} of {} MiB", LENGTH / MIB);
            self.has_bar = true;
        }
    }
}

/// The line between an edge and the servers. Cut, it loses its connections and accepts no others.
#[derive(Debug)]
pub(crate) struct SimulatedNetwork(watch::Sender<bool>);

impl SimulatedNetwork {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    /// Forwards connections to a server until draining starts. Returns the address to dial.
    pub(crate) fn forward_to(&self, server: SocketAddr, drain: &Drain) -> anyhow::Result<SocketAddr> {
        let listener = TcpListenSocket::bind(super::ephemeral_address())?;
        let at = listener.at();
        let cut = self.0.subscribe();
        let tasks = drain.clone();
        drain.spawn(info_span!("line"), async move {
            while let Some((mut socket, _)) = tasks.run_until(listener.accept()).await {
                let mut cut = cut.clone();
                let drain = tasks.clone();
                tasks.spawn(info_span!("line"), async move {
                    let forward = async {
                        let mut server = TcpStream::connect(server).await?;
                        tokio::io::copy_bidirectional(&mut socket, &mut server).await
                    };
                    tokio::select! {
                        _ = cut.wait_for(|is_cut| *is_cut) => {}
                        () = drain.draining() => {}
                        _ = forward => {}
                    }
                });
            }
        });
        Ok(at)
    }
}

/// A running download.
pub(crate) struct Download {
    session: ChunkStreamIo<Session>,
    digest: Digest,
    done: usize,
    pauses: DownloadPauses,
}

impl Download {
    /// Starts the download from a target.
    pub(crate) async fn start(links: &ClientUplinks, target: &Target) -> anyhow::Result<Self> {
        let mut session = ChunkStreamIo::new(links.open(target).await?);
        let request = format!("GET {DOWNLOAD} HTTP/1.1\r\nHost: {target}\r\n\r\n");
        session.write_all(request.as_bytes()).await?;
        read_head(&mut session).await?;
        let pauses = DownloadPauses { last: Instant::now(), longest: Duration::ZERO, report_at: None };
        Ok(Self { session, digest: Digest::new(&SHA256), done: 0, pauses })
    }

    /// Reads until `tenths` of it have arrived.
    pub(crate) async fn receive_tenths(
        &mut self,
        tenths: usize,
        screen: &mut DemoScreen,
    ) -> anyhow::Result<()> {
        self.receive(LENGTH * tenths / 10, screen).await
    }

    /// Reports the pause in the download once it is over, after an interruption of that length.
    pub(crate) fn report_pause(&mut self, length: Duration) {
        self.pauses.watch(length);
    }

    /// Cuts the line for a while.
    pub(crate) async fn cut(
        &mut self,
        line: &SimulatedNetwork,
        screen: &mut DemoScreen,
    ) -> anyhow::Result<()> {
        line.0.send_replace(true);
        screen.coloured_step(RED, &format!("the line of {NODE} is cut for {} s", CUT_DURATION.as_secs()));
        self.report_pause(CUT_DURATION);
        if let Ok(received) = timeout(CUT_DURATION, self.receive(LENGTH, screen)).await {
            received?;
        }
        line.0.send_replace(false);
        screen.step("the line is back");
        Ok(())
    }

    /// Reads the rest.
    ///
    /// # Errors
    ///
    /// Returns an error if the download fails, or its bytes differ from those that were sent.
    pub(crate) async fn finish(mut self, screen: &mut DemoScreen) -> anyhow::Result<()> {
        self.receive(LENGTH, screen).await?;
        // A download that was late catches up, and may be complete first.
        self.pauses.report(screen);
        let sent = expected_digest();
        let received = self.digest.finish();
        if sent.as_ref() != received.as_ref() {
            bail!("the bytes received differ from the bytes sent");
        }
        let hash: String = received.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        screen.step(&format!("{} MiB received, none lost: SHA-256 {hash}… as sent", LENGTH / MIB));
        Ok(())
    }

    /// Reads until `goal` bytes have arrived.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no byte is lost.
    async fn receive(&mut self, goal: usize, screen: &mut DemoScreen) -> anyhow::Result<()> {
        let mut piece = vec![0; PIECE];
        while self.done < goal {
            let read = timeout(RESUME_TIMEOUT, self.session.read(&mut piece)).await;
            let read =
                read.context("nothing received for a minute")?.context("the session was interrupted")?;
            if read == 0 {
                bail!("the download ended after {} of {LENGTH} bytes", self.done);
            }
            self.digest.update(&piece[..read]);
            self.done += read;
            self.pauses.received(screen);
            screen.progress(self.done, self.done - read);
        }
        Ok(())
    }
}

/// The pauses in which no byte arrived.
struct DownloadPauses {
    last: Instant,
    longest: Duration,
    /// Time of the report about the interruption, if there was one.
    report_at: Option<Instant>,
}

impl DownloadPauses {
    /// Starts to measure after an interruption of that length.
    fn watch(&mut self, length: Duration) {
        self.longest = Duration::ZERO;
        self.report_at = Some(Instant::now() + length + RESUME_EXPECTED_WITHIN);
    }

    /// Notes that bytes have arrived, and reports the pause once it is over.
    fn received(&mut self, screen: &mut DemoScreen) {
        let now = Instant::now();
        self.longest = self.longest.max(now - self.last);
        self.last = now;
        if self.report_at.is_some_and(|at| at <= now) {
            self.report(screen);
        }
    }

    /// Reports the pause, unless that was done.
    fn report(&mut self, screen: &mut DemoScreen) {
        if self.report_at.take().is_some() {
            screen.coloured_step(
                GREEN,
                &format!("the download continues; its longest pause was {:.1?}", self.longest),
            );
        }
    }
}

/// How long the line is cut.
const CUT_DURATION: Duration = Duration::from_secs(2);
/// After an interruption, the time in which a session is expected to continue.
const RESUME_EXPECTED_WITHIN: Duration = Duration::from_secs(1);
/// The resume timeout of a session.
const RESUME_TIMEOUT: Duration = Duration::from_secs(60);
/// Colours of a terminal's text (ECMA-48, SGR).
pub(crate) const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const NO_COLOUR: &str = "\x1b[0m";
/// Width of the progress bar.
const BAR_WIDTH: usize = 40;
