//! A client that talks to what repeats it, much or little, and notices each byte that is lost, doubled or moved.

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
    /// It writes as fast as what it wrote comes back, a quarter of a MiB ahead.
    Bulk,
    /// It writes a few bytes, waits for them, and rests.
    Types,
    /// It ends its direction.
    Ends,
}

/// A client on a session to an echo.
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

    /// From now on it does that.
    pub(crate) fn assert_continues(&self, does: ExchangeStep) {
        self.does.send_replace(does);
    }

    /// Bytes that have come back so far.
    pub(crate) fn heard(&self) -> u64 {
        self.heard.load(Relaxed)
    }

    /// Waits until something that is said from now on has come back; how long that took.
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

    /// Goes, whatever becomes of the session.
    pub(crate) fn assert_fails(self) {
        self.task.abort();
    }

    /// Ends the session in order; all that was said has come back.
    pub(crate) async fn over(self) {
        self.assert_continues(ExchangeStep::Ends);
        let (said, heard) = assert_eventually("the end of a session", self.task).await.unwrap();
        assert!(said == heard && said > 0, "{said} bytes were said, and {heard} have come back");
    }
}

/// Returns how many bytes were said.
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
            // What is under way at the end has to come back in time on a slow machine, too.
            while heard.load(Relaxed) + MAX_IN_FLIGHT < said {
                sleep(BETWEEN).await;
            }
        } else {
            // Whoever types waits for the echo.
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

/// Returns how many bytes have come back, each as it was said.
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

/// A byte of what is said, by its place.
fn byte(at: u64) -> u8 {
    (at / 4).to_be_bytes()[4 + usize::try_from(at % 4).unwrap()]
}

const CHUNK: u64 = 16 * 1024;
const MAX_IN_FLIGHT: u64 = 256 * 1024;
const TYPED: u64 = 20;
const BETWEEN_WORDS: Duration = Duration::from_millis(20);
const BETWEEN: Duration = Duration::from_millis(5);
/// So many bytes came not all from what was on its way.
const WORDS: u64 = 5 * TYPED;
