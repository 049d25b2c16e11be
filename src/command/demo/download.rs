//! Both ends of the download, during which servers are killed and the line is cut.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use aws_lc_rs::digest::{Context as Digest, SHA256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, interval, timeout};

use super::screen::DemoScreen;
use super::{LENGTH, MIB};
use crate::uplink::client::UserUplinks;
use tunnel_link::table::handles::Session;
use tunnel_net::byte_stream_io::ChunkStreamIo;
use tunnel_proto::names::Target;

/// A running download.
pub(super) struct Download {
    session: ChunkStreamIo<Session>,
    digest: Digest,
    done: usize,
    /// Time of the last byte, and the longest pause since this was reset.
    last: Instant,
    pub(super) longest_pause: Duration,
    screen: DemoScreen,
}

impl Download {
    /// Starts the download from a target.
    pub(super) async fn start(
        links: &UserUplinks,
        target: &Target,
        screen: DemoScreen,
    ) -> anyhow::Result<Self> {
        let session = ChunkStreamIo::new(links.open(target).await?);
        let digest = Digest::new(&SHA256);
        Ok(Self { session, digest, done: 0, last: Instant::now(), longest_pause: Duration::ZERO, screen })
    }

    /// Reads until `tenths` of it have arrived.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no byte is lost.
    pub(super) async fn receive_tenths(&mut self, tenths: usize) -> anyhow::Result<()> {
        let mut bytes = vec![0; PIECE];
        while self.done < LENGTH * tenths / 10 {
            let read = timeout(RESUME_TIMEOUT, self.session.read(&mut bytes)).await;
            let read = read.context("nothing received for a minute")?;
            let read = read.context("the session was interrupted")?;
            ensure!(read > 0, "the download ended after {} of {LENGTH} bytes", self.done);
            self.digest.update(&bytes[..read]);
            self.done += read;
            self.longest_pause = self.longest_pause.max(self.last.elapsed());
            self.last = Instant::now();
            self.screen.progress(self.done, self.done - read);
        }
        Ok(())
    }

    /// Compares the received bytes with those that were sent.
    ///
    /// # Errors
    ///
    /// Returns an error if they differ.
    pub(super) fn verify(self) -> anyhow::Result<()> {
        let mut sent = Digest::new(&SHA256);
        (0..LENGTH / PIECE).for_each(|number| sent.update(&piece(number)));
        let received = self.digest.finish();
        let is_same = sent.finish().as_ref() == received.as_ref();
        ensure!(is_same, "the bytes received differ from the bytes sent");
        let hash: String = received.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        self.screen.step(&format!("{} MiB received, none lost: SHA-256 {hash}… as sent", LENGTH / MIB));
        Ok(())
    }
}

/// Sends the download at its pace.
pub(super) async fn send_download(mut socket: TcpStream) {
    let mut pace = interval(PACE);
    for number in 0..LENGTH / PIECE {
        pace.tick().await;
        if socket.write_all(&piece(number)).await.is_err() {
            return;
        }
    }
}

/// Returns a piece of the download, of which each has other bytes.
fn piece(number: usize) -> Vec<u8> {
    number.to_be_bytes().repeat(PIECE / size_of::<usize>())
}

/// Number of bytes that are sent at once.
const PIECE: usize = 64 * 1024;
/// The time for each piece: 10 s for all, so that one can follow it.
const PACE: Duration = Duration::from_micros(9_765);
/// The resume timeout of a session.
const RESUME_TIMEOUT: Duration = Duration::from_secs(60);
