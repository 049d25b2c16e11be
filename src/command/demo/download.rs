//! A download over a user's link, during which servers are killed and the line is cut.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use aws_lc_rs::digest::{Context as Digest, SHA256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::info_span;

use super::page::{DOWNLOAD, LENGTH, MIB, PIECE, piece, read_head};
use super::screen::{DemoScreen, GREEN, RED};
use crate::uplink::client::UserUplinks;
use tunnel_base::drain::Drain;
use tunnel_link::table::handles::Session;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_net::listen::TcpListenSocket;
use tunnel_proto::names::Target;

/// The line between an edge and the servers. Cut, it loses its connections and accepts no others.
#[derive(Debug)]
pub(crate) struct SimulatedNetwork(watch::Sender<bool>);

impl SimulatedNetwork {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    /// Forwards connections to a server until draining starts. Returns the address to dial.
    pub(crate) fn forward_to(&self, server: String, drain: &Drain) -> anyhow::Result<SocketAddr> {
        let listener = TcpListenSocket::bind(super::EPHEMERAL.parse()?)?;
        let at = listener.at();
        let cut = self.0.subscribe();
        let tasks = drain.clone();
        drain.spawn(info_span!("line"), async move {
            while let Some((mut socket, _)) = tasks.run_until(listener.accept()).await {
                let mut cut = cut.clone();
                let drain = tasks.clone();
                let server = server.clone();
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
    /// Time of the last byte, and the longest pause since the last interruption.
    last: Instant,
    longest_pause: Duration,
}

impl Download {
    /// Starts the download from a target.
    pub(crate) async fn start(links: &UserUplinks, target: &Target) -> anyhow::Result<Self> {
        let mut session = ChunkStreamIo::new(links.open(target).await?);
        let request = format!("GET {DOWNLOAD} HTTP/1.1\r\nHost: {target}\r\n\r\n");
        session.write_all(request.as_bytes()).await?;
        read_head(&mut session).await?;
        let digest = Digest::new(&SHA256);
        Ok(Self { session, digest, done: 0, last: Instant::now(), longest_pause: Duration::ZERO })
    }

    /// Reads until `tenths` of it have arrived.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no byte is lost.
    pub(crate) async fn receive_tenths(
        &mut self,
        tenths: usize,
        screen: &mut DemoScreen,
    ) -> anyhow::Result<()> {
        let mut bytes = vec![0; PIECE];
        while self.done < LENGTH * tenths / 10 {
            let read = timeout(RESUME_TIMEOUT, self.session.read(&mut bytes)).await;
            let read =
                read.context("nothing received for a minute")?.context("the session was interrupted")?;
            if read == 0 {
                bail!("the download ended after {} of {LENGTH} bytes", self.done);
            }
            self.digest.update(&bytes[..read]);
            self.done += read;
            self.longest_pause = self.longest_pause.max(self.last.elapsed());
            self.last = Instant::now();
            screen.progress(self.done, self.done - read);
        }
        Ok(())
    }

    /// Like [`Self::receive_tenths`] after an interruption, and prints how long no byte arrived.
    pub(crate) async fn resume_to_tenths(
        &mut self,
        tenths: usize,
        screen: &mut DemoScreen,
    ) -> anyhow::Result<()> {
        self.longest_pause = Duration::ZERO;
        self.receive_tenths(tenths, screen).await?;
        let pause = self.longest_pause;
        screen.coloured_step(GREEN, &format!("the download continues; its longest pause was {pause:.1?}"));
        Ok(())
    }

    /// Cuts the line for a while.
    pub(crate) async fn cut(
        &mut self,
        line: &SimulatedNetwork,
        screen: &mut DemoScreen,
    ) -> anyhow::Result<()> {
        line.0.send_replace(true);
        screen.coloured_step(RED, "the line of node1 is cut for 2 s");
        if let Ok(received) = timeout(CUT_DURATION, self.receive_tenths(10, screen)).await {
            received?;
        }
        line.0.send_replace(false);
        screen.step("the line is back");
        Ok(())
    }

    /// Compares the received bytes with those that were sent.
    ///
    /// # Errors
    ///
    /// Returns an error if they differ.
    pub(crate) fn verify(self, screen: &mut DemoScreen) -> anyhow::Result<()> {
        let mut sent = Digest::new(&SHA256);
        (0..LENGTH / PIECE).for_each(|number| sent.update(&piece(number)));
        let received = self.digest.finish();
        if sent.finish().as_ref() != received.as_ref() {
            bail!("the bytes received differ from the bytes sent");
        }
        let hash: String = received.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        screen.step(&format!("{} MiB received, none lost: SHA-256 {hash}… as sent", LENGTH / MIB));
        Ok(())
    }
}

/// How long the line is cut.
const CUT_DURATION: Duration = Duration::from_secs(2);
/// The resume timeout of a session.
const RESUME_TIMEOUT: Duration = Duration::from_secs(60);
