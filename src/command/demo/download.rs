//! Both ends of the download, during which servers are killed and the line is cut.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::ChildStdout;
use tokio::time::{Instant, interval, timeout};

use super::LENGTH;
use super::screen::DemoScreen;

/// A running download.
pub(super) struct Download {
    from: ChildStdout,
    done: usize,
    /// Time of the last byte.
    last: Instant,
    screen: DemoScreen,
}

impl Download {
    /// Starts the download of what a client prints.
    pub(super) fn new(from: ChildStdout, screen: DemoScreen) -> Self {
        Self { from, done: 0, last: Instant::now(), screen }
    }

    /// Reads until `tenths` of it have arrived, and compares each byte with the one that was sent. Returns the longest
    /// pause.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no byte is lost.
    pub(super) async fn receive_tenths(&mut self, tenths: usize) -> anyhow::Result<Duration> {
        let mut longest = Duration::ZERO;
        let mut bytes = vec![0; PIECE];
        while self.done < LENGTH * tenths / 10 {
            let read = timeout(RESUME_TIMEOUT, self.from.read(&mut bytes)).await;
            let read = read.context("nothing received for a minute")??;
            ensure!(read > 0, "the download ended after {} of {LENGTH} bytes", self.done);
            let is_same = (self.done..).zip(&bytes[..read]).all(|(place, byte)| *byte == sent_byte(place));
            ensure!(is_same, "the bytes received differ from the bytes sent");
            self.done += read;
            longest = longest.max(self.last.elapsed());
            self.last = Instant::now();
            self.screen.progress(self.done, self.done - read);
        }
        Ok(longest)
    }
}

/// Sends the download at its pace.
pub(super) async fn send_download(mut socket: TcpStream) {
    let mut pace = interval(PACE);
    for start in (0..LENGTH).step_by(PIECE) {
        pace.tick().await;
        let piece: Vec<_> = (start..start + PIECE).map(sent_byte).collect();
        if socket.write_all(&piece).await.is_err() {
            return;
        }
    }
}

/// Returns the byte at a place of the download: a part of the place's number, so that a missing piece shows.
fn sent_byte(place: usize) -> u8 {
    (place / 8).to_be_bytes()[place % size_of::<usize>()]
}

/// Number of bytes that are sent at once.
const PIECE: usize = 64 * 1024;
/// The time for each piece: 10 s for all, so that one can follow it.
const PACE: Duration = Duration::from_micros(9_765);
/// The resume timeout of a session.
const RESUME_TIMEOUT: Duration = Duration::from_secs(60);
