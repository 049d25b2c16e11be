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

use super::{Stopwatch, assert_eventually, beside};

/// What a client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExchangeStep {
    /// Writes as fast as its bytes come back, at most 256 KiB ahead.
    Bulk,
    /// Writes a few bytes, waits for them, and pauses.
    Types,
    /// Ends its direction.
    Ends,
}

/// A client on a session to an echo target.
pub(crate) struct ScriptedExchange {
    does: watch::Sender<ExchangeStep>,
    heard: Arc<AtomicU64>,
    task: JoinHandle<(u64, u64)>,
}

impl ScriptedExchange {
    pub(crate) fn on(socket: TcpStream, does: ExchangeStep) -> Self {
        let (hear, say) = socket.into_split();
        let (does, what) = watch::channel(does);
        let heard = Arc::<AtomicU64>::default();
        let counted = heard.clone();
        let task =
            beside(async move { tokio::join!(says(say, what, counted.clone()), hears(hear, counted)) });
        Self { does, heard, task }
    }

    /// Switches to another step.
    pub(crate) fn switch_to(&self, does: ExchangeStep) {
        self.does.send_replace(does);
    }

    /// Returns the number of bytes that have come back.
    pub(crate) fn heard(&self) -> u64 {
        self.heard.load(Relaxed)
    }

    /// Waits until bytes sent from now on have come back. Returns how long that took.
    pub(crate) async fn is_alive(&self) -> Duration {
        let (started, before) = (Stopwatch::start(), self.heard());
        assert_eventually("what is typed comes back", async {
            while self.heard() < before + WORDS {
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
    pub(crate) async fn over(self) {
        self.switch_to(ExchangeStep::Ends);
        let (said, heard) = assert_eventually("the end of a session", self.task).await.unwrap();
        assert!(said == heard && said > 0, "{said} bytes were sent, and {heard} have come back");
    }
}

/// Returns the number of bytes sent.
async fn says(
    mut say: OwnedWriteHalf,
    mut does: watch::Receiver<ExchangeStep>,
    heard: Arc<AtomicU64>,
) -> u64 {
    let mut said = 0;
    loop {
        let bytes = match *does.borrow_and_update() {
            ExchangeStep::Bulk => CHUNK,
            ExchangeStep::Types => TYPED,
            ExchangeStep::Ends => break,
        };
        let text: Vec<u8> = (said..said + bytes).map(byte).collect();
        say.write_all(&text).await.expect("the session goes on");
        said += bytes;
        if bytes == CHUNK {
            // Bytes in flight at the end must come back in time on a slow machine too.
            while heard.load(Relaxed) + MAX_IN_FLIGHT < said {
                sleep(BETWEEN).await;
            }
        } else {
            // An interactive user waits for the echo.
            let typed = async {
                while heard.load(Relaxed) < said {
                    sleep(BETWEEN).await;
                }
                sleep(BETWEEN_WORDS).await;
            };
            tokio::select! {
                () = typed => {}
                more = does.changed() => if more.is_err() { break },
            }
        }
    }
    say.shutdown().await.expect("the session ends in order");
    said
}

/// Checks each byte that comes back. Returns their number.
async fn hears(mut hear: OwnedReadHalf, heard: Arc<AtomicU64>) -> u64 {
    let (mut space, mut so_far) = (vec![0; 64 * 1024], 0);
    loop {
        let bytes = hear.read(&mut space).await.expect("the session is not broken off");
        if bytes == 0 {
            return so_far;
        }
        for came in &space[..bytes] {
            assert_eq!(*came, byte(so_far), "byte {so_far} is lost, doubled or moved");
            so_far += 1;
        }
        heard.store(so_far, Relaxed);
    }
}

/// Returns the byte at a position of the text.
fn byte(at: u64) -> u8 {
    (at / 4).to_be_bytes()[4 + usize::try_from(at % 4).unwrap()]
}

const CHUNK: u64 = 16 * 1024;
const MAX_IN_FLIGHT: u64 = 256 * 1024;
const TYPED: u64 = 20;
const BETWEEN_WORDS: Duration = Duration::from_millis(20);
const BETWEEN: Duration = Duration::from_millis(5);
/// Number of bytes that cannot all have been in flight before.
const WORDS: u64 = 5 * TYPED;
