//! A client of an echo target that detects each lost, duplicated or reordered byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::{Stopwatch, assert_eventually, spawn};

/// What a client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExchangeMode {
    /// Writes as fast as its bytes come back, at most 256 KiB ahead.
    Bulk,
    /// Writes a few bytes, waits for them, and pauses.
    Keystrokes,
    /// Ends its direction.
    End,
}

/// A client on a session to an echo target.
pub(crate) struct ScriptedExchange {
    mode: watch::Sender<ExchangeMode>,
    received: Arc<AtomicU64>,
    task: JoinHandle<(u64, u64)>,
}

impl ScriptedExchange {
    pub(crate) fn on(socket: TcpStream, mode: ExchangeMode) -> Self {
        let (reader, writer) = socket.into_split();
        let (mode, modes) = watch::channel(mode);
        let received = Arc::<AtomicU64>::default();
        let counted = received.clone();
        let task = spawn(async move {
            tokio::join!(send_script(writer, modes, counted.clone()), check_echo(reader, counted))
        });
        Self { mode, received, task }
    }

    /// Switches to another step.
    pub(crate) fn switch_mode(&self, mode: ExchangeMode) {
        self.mode.send_replace(mode);
    }

    /// Returns the number of bytes that have come back.
    pub(crate) fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Waits until bytes sent from now on have come back. Returns how long that took.
    pub(crate) async fn echo_time(&self) -> Duration {
        let (started, before) = (Stopwatch::start(), self.received());
        assert_eventually("what is typed comes back", async {
            while self.received() < before + ECHO_TIMED_BYTES {
                sleep(BETWEEN).await;
            }
        })
        .await;
        started.elapsed()
    }

    /// Drops the client, whatever the state of the session.
    pub(crate) fn abort(self) {
        self.task.abort();
    }

    /// Ends the session in order, and checks that all bytes have come back.
    pub(crate) async fn finish(self) {
        self.switch_mode(ExchangeMode::End);
        let (sent, received) = assert_eventually("the end of a session", self.task).await.unwrap();
        assert!(sent == received && sent > 0, "{sent} bytes were sent, and {received} have come back");
    }
}

/// Returns the number of bytes sent.
async fn send_script(
    mut writer: OwnedWriteHalf,
    mut mode: watch::Receiver<ExchangeMode>,
    received: Arc<AtomicU64>,
) -> u64 {
    let mut sent = 0;
    loop {
        let bytes = match *mode.borrow_and_update() {
            ExchangeMode::Bulk => CHUNK,
            ExchangeMode::Keystrokes => KEYSTROKES,
            ExchangeMode::End => break,
        };
        let text: Vec<u8> = (sent..sent + bytes).map(byte).collect();
        writer.write_all(&text).await.expect("the session goes on");
        sent += bytes;
        if bytes == CHUNK {
            // Bytes in flight at the end must come back in time on a slow machine too.
            while received.load(Relaxed) + MAX_IN_FLIGHT < sent {
                sleep(BETWEEN).await;
            }
        } else {
            // An interactive user waits for the echo.
            let typed = async {
                while received.load(Relaxed) < sent {
                    sleep(BETWEEN).await;
                }
                sleep(KEYSTROKE_INTERVAL).await;
            };
            tokio::select! {
                () = typed => {}
                more = mode.changed() => if more.is_err() { break },
            }
        }
    }
    writer.shutdown().await.expect("the session ends in order");
    sent
}

/// Checks each byte that comes back. Returns their number.
async fn check_echo(mut reader: OwnedReadHalf, received: Arc<AtomicU64>) -> u64 {
    let (mut space, mut so_far) = (vec![0; 64 * 1024], 0);
    loop {
        let bytes = reader.read(&mut space).await.expect("the session is not broken off");
        if bytes == 0 {
            return so_far;
        }
        for came in &space[..bytes] {
            assert_eq!(*came, byte(so_far), "byte {so_far} is lost, doubled or moved");
            so_far += 1;
        }
        received.store(so_far, Relaxed);
    }
}

/// Returns the byte at a position of the text.
fn byte(at: u64) -> u8 {
    (at / 4).to_be_bytes()[4 + usize::try_from(at % 4).unwrap()]
}

const CHUNK: u64 = 16 * 1024;
const MAX_IN_FLIGHT: u64 = 256 * 1024;
const KEYSTROKES: u64 = 20;
const KEYSTROKE_INTERVAL: Duration = Duration::from_millis(20);
const BETWEEN: Duration = Duration::from_millis(5);
/// Number of bytes that cannot all have been in flight before.
const ECHO_TIMED_BYTES: u64 = 5 * KEYSTROKES;
