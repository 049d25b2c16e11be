use std::io;
use std::task::{Context, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::FutureExt as _;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

use tokio_rustls::TlsConnector;
use tunnel_base::drain::Drain;
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::{AnyConnection, Buffered, Connection, Socket};
use tunnel_net::tls::testing::{self, TestCa, client, server};
use tunnel_net::tls::{ClientAuth, Trust, server_name};

use super::*;
use crate::session_io::copy::close::{
    LINGER_MAX_BYTES, LINGER_SILENCE, LINGER_TIMEOUT, close_gracefully, wait_acknowledged,
};
use crate::session_io::tests::{session, take};

/// The bytes that each side got, and how the copy ended.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    to_a: u64,
    to_b: u64,
    ended: CopyEnd,
}

async fn copied<A: ChunkStream, B: ChunkStream>(a: &mut A, b: &mut B) -> Outcome {
    let (mut to_b, mut to_a) = (CopyDirection::new(Side::A), CopyDirection::new(Side::B));
    let ended = copy(a, b, &mut to_b, &mut to_a).await;
    Outcome { to_a: to_a.given, to_b: to_b.given, ended }
}

/// Copies between two in-memory pipes, and runs `work` at their other ends.
async fn copy_between<W, R>(room: usize, work: impl FnOnce(DuplexStream, DuplexStream) -> W) -> (Outcome, R)
where
    W: Future<Output = R>,
{
    let ((far_a, near_a), (far_b, near_b)) = (duplex(room), duplex(room));
    let pool = BufferPool::new();
    let mut a = Socket::new(near_a, pool.clone());
    let mut b = Socket::new(near_b, pool);
    tokio::join!(copied(&mut a, &mut b), work(far_a, far_b))
}

async fn rest(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Vec<u8> {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).await.unwrap();
    all
}

/// A connected pair of real sockets.
async fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (near, far) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    (near.unwrap(), far.unwrap().0)
}

#[tokio::test]
async fn half_close_is_passed_in_both_directions() {
    for a_first in [true, false] {
        let (outcome, ()) = copy_between(64, |a, b| async move {
            let (mut requester, mut answers) = if a_first { (a, b) } else { (b, a) };
            requester.write_all(b"question").await.unwrap();
            requester.shutdown().await.unwrap();
            assert_eq!(rest(&mut answers).await, b"question");
            answers.write_all(b"a longer answer").await.unwrap();
            answers.shutdown().await.unwrap();
            assert_eq!(rest(&mut requester).await, b"a longer answer");
        })
        .await;
        let (by, to_a, to_b) = if a_first { (Side::A, 15, 8) } else { (Side::B, 8, 15) };
        assert_eq!(outcome, Outcome { to_a, to_b, ended: CopyEnd { by, how: EndKind::Finished } });
    }
}

#[tokio::test]
async fn half_close_is_passed_on_real_sockets() {
    let ((mut client, near), (far, mut target)) = (tcp().await, tcp().await);
    let pool = BufferPool::new();
    let (mut near, mut far) = (Socket::new(near, pool.clone()), Socket::new(far, pool));
    let ends = async {
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut target).await, b"question");
        target.write_all(b"answer").await.unwrap();
        drop(target);
        assert_eq!(rest(&mut client).await, b"answer");
    };
    let (outcome, ()) = tokio::join!(copied(&mut near, &mut far), ends);
    assert_eq!(outcome.ended, CopyEnd { by: Side::A, how: EndKind::Finished });
}

/// Counts the bytes read from the inner stream.
struct Counted(Socket<TcpStream>, watch::Sender<usize>);

impl ChunkStream for Counted {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        let taken = ready!(self.0.poll_read_chunk(cx))?;
        self.1.send_modify(|all| *all += taken.len());
        Poll::Ready(Ok(taken))
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        self.0.poll_write_chunk(cx, bytes)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_finish(cx)
    }
}

/// The target does not read the upload, so its kernel sends RST on close. The client sends all the time, and reads
/// nothing before the copying is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_whole_response_of_a_target_that_closes_early_is_delivered() {
    const FILE: usize = 256 * 1024;
    for round in 0..50 {
        let ((client, near), (far, mut target)) = (tcp().await, tcp().await);
        let (count, mut taken) = watch::channel(0);
        let pool = BufferPool::new();
        let (mut near, mut far) = (Socket::new(near, pool.clone()), Counted(Socket::new(far, pool), count));
        let (over, is_over) = oneshot::channel();
        let middle = async {
            let outcome = copied(&mut near, &mut far).await;
            assert_eq!((outcome.to_a, outcome.ended.by), (FILE as u64, Side::B));
            drop(far);
            over.send(()).unwrap();
            close_gracefully(&mut near).await;
            drop(near);
        };
        let server = async move {
            target.read_exact(&mut [0; 100]).await.unwrap();
            target.write_all(&vec![7; FILE]).await.unwrap();
            // An RST discards bytes in the target's own kernel even for a remote that reads, so wait until all were
            // read.
            taken.wait_for(|all| *all == FILE).await.unwrap();
        };
        let (mut reads, mut writes) = client.into_split();
        let download = async move {
            let upload = async {
                let junk = vec![1; 16 * 1024];
                while writes.write_all(&junk).await.is_ok() {}
            };
            let answer = async {
                is_over.await.unwrap();
                rest(&mut reads).await
            };
            tokio::select! {
                all = answer => all,
                () = upload => panic!("round {round}: the client was cut off before it had its answer"),
            }
        };
        let ((), (), got) = tokio::join!(middle, server, download);
        assert!(got.len() == FILE && got.iter().all(|b| *b == 7), "round {round}: {} of {FILE}", got.len());
    }
}

#[tokio::test]
async fn a_stalled_reader_stops_only_its_own_direction() {
    let (_, got) = copy_between(64, |a, mut b| async move {
        let (mut a_reads, mut a_writes) = tokio::io::split(a);
        // `b` reads nothing, so this blocks.
        let flood = async { while a_writes.write_all(&[0; 64]).await.is_ok() {} };
        let answer = async {
            b.write_all(&[9; 100_000]).await.unwrap();
            b.shutdown().await.unwrap();
        };
        tokio::select! {
            (got, ()) = async { tokio::join!(rest(&mut a_reads), answer) } => got,
            () = flood => panic!("everything was accepted without a reader"),
        }
    })
    .await;
    assert!(got == [9; 100_000]);
}

/// A stream that answers each operation from a script.
struct Scripted {
    takes: Vec<io::Result<Bytes>>,
    /// The bytes written to it, or the error of each write.
    gives: Result<Vec<u8>, io::ErrorKind>,
    finished: usize,
}

impl Scripted {
    fn new(takes: Vec<io::Result<Bytes>>, gives: Result<Vec<u8>, io::ErrorKind>) -> Self {
        Self { takes, gives, finished: 0 }
    }
}

impl ChunkStream for Scripted {
    fn poll_read_chunk(&mut self, _: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        match self.takes.is_empty() {
            true => Poll::Pending,
            false => Poll::Ready(self.takes.remove(0)),
        }
    }

    fn poll_write_chunk(&mut self, _: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        match &mut self.gives {
            Ok(all) => all.extend_from_slice(&bytes.copy_to_bytes(bytes.len())),
            Err(kind) => return Poll::Ready(Err((*kind).into())),
        }
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.finished += 1;
        Poll::Ready(Ok(()))
    }
}

fn some(text: &'static str) -> io::Result<Bytes> {
    Ok(Bytes::from_static(text.as_bytes()))
}

#[tokio::test]
async fn a_side_whose_writes_fail_is_still_read_to_its_end() {
    let mut client = Scripted::new(vec![some("up"), some("load"), some("goes on")], Ok(vec![]));
    let mut target =
        Scripted::new(vec![some("too "), some("large"), some("")], Err(io::ErrorKind::BrokenPipe));
    let outcome = copied(&mut client, &mut target).await;
    assert_eq!((client.gives.unwrap(), client.finished), (b"too large".to_vec(), 1));
    assert!(client.takes.is_empty(), "discarded, so that the client does not block");
    let ended = CopyEnd { by: Side::B, how: EndKind::WriteFailed(io::ErrorKind::BrokenPipe) };
    assert_eq!(outcome, Outcome { to_a: 9, to_b: 0, ended });
}

#[tokio::test]
async fn a_read_error_ends_the_copy_after_the_last_byte() {
    let reset = Err(io::ErrorKind::ConnectionReset.into());
    let mut target = Scripted::new(vec![some("tail"), reset], Ok(vec![]));
    let mut client = Scripted::new(vec![], Ok(vec![]));
    let outcome = copied(&mut client, &mut target).await;
    assert_eq!((client.gives.unwrap(), client.finished), (b"tail".to_vec(), 0));
    assert_eq!(
        outcome.ended,
        CopyEnd { by: Side::B, how: EndKind::ReadFailed(io::ErrorKind::ConnectionReset) }
    );
}

/// A stream whose last bytes arrive with its error, after the first read.
struct LateBytes {
    takes: Vec<io::Result<Bytes>>,
    has_arrived: bool,
}

impl ChunkStream for LateBytes {
    fn poll_read_chunk(&mut self, _: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        match self.has_arrived && !self.takes.is_empty() {
            true => Poll::Ready(self.takes.remove(0)),
            false => Poll::Pending,
        }
    }

    fn poll_write_chunk(&mut self, _: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        bytes.clear();
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_lost(&mut self, _: &mut Context<'_>) -> Poll<io::Error> {
        self.has_arrived = true;
        Poll::Ready(io::ErrorKind::ConnectionReset.into())
    }
}

#[tokio::test]
async fn bytes_received_before_a_read_error_are_delivered() {
    let mut client = LateBytes { takes: vec![some("late "), some("bytes")], has_arrived: false };
    let mut target = Scripted::new(vec![], Ok(vec![]));
    copied(&mut client, &mut target).await;
    assert_eq!(target.gives.unwrap(), b"late bytes");
}

#[tokio::test]
async fn nothing_is_read_that_a_session_has_no_room_for_and_all_of_it_once_there_is_room() {
    let drain = Drain::new();
    let (mut near, mut far) = session(&drain).await;
    let mut most = Bytes::from(vec![0; 1 << 20]);
    poll_fn(|cx| near.poll_write_chunk(cx, &mut most)).await.unwrap();
    let mut lost = LateBytes { takes: vec![some("late "), some("bytes")], has_arrived: false };
    assert!(copied(&mut lost, &mut near).now_or_never().is_none());
    assert_eq!(lost.takes.len(), 2, "nothing waits where no budget counts it");
    let read = async {
        let mut got = 0;
        while got < (1 << 20) + 10 {
            got += take(&mut far).await.unwrap().len();
        }
    };
    let (outcome, ()) = tokio::join!(copied(&mut lost, &mut near), read);
    assert_eq!(outcome.to_b, 10);
}

/// A stream that always has bytes, and counts the reads. It discards written bytes.
struct Endless(usize);

impl ChunkStream for Endless {
    fn poll_read_chunk(&mut self, _: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        self.0 += 1;
        Poll::Ready(Ok(Bytes::from_static(&[0; 64 * 1024])))
    }

    fn poll_write_chunk(&mut self, _: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        bytes.clear();
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn an_endless_copy_yields_and_starves_neither_direction() {
    let (mut a, mut b) = (Endless(0), Endless(0));
    {
        let copy = copied(&mut a, &mut b);
        tokio::pin!(copy);
        for _ in 0..10 {
            assert!(futures_util::poll!(&mut copy).is_pending());
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(a.0 + b.0, 10 * BYTES_PER_TURN / (64 * 1024));
    assert_eq!(a.0, b.0);
}

/// A client finishes its direction and then disconnects, while its target sends all the time.
///
/// There was always more to discard, so the copy continued for as long as the target sent.
#[tokio::test]
async fn an_endless_source_without_a_reader_ends_the_copy() {
    let mut target = Endless(0);
    let mut closed = Scripted::new(vec![some("")], Err(io::ErrorKind::BrokenPipe));
    let copy = copied(&mut target, &mut closed);
    tokio::pin!(copy);
    for _ in 0..10 {
        if let Poll::Ready(outcome) = futures_util::poll!(&mut copy) {
            let ended = CopyEnd { by: Side::B, how: EndKind::WriteFailed(io::ErrorKind::BrokenPipe) };
            assert_eq!(outcome, Outcome { to_a: 0, to_b: 0, ended });
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("it still reads bytes that have no receiver");
}

/// A target rejects an upload. Its response goes to a client that reads slowly, and then stops reading.
///
/// Meanwhile the client sends all the time, and its bytes are discarded.
#[tokio::test(start_paused = true)]
async fn a_client_that_stops_reading_after_a_failed_upload_times_out() {
    for fails_after in [Duration::ZERO, 2 * READER_PAUSE] {
        let (client, near) = duplex(64);
        let mut near = Socket::new(near, BufferPool::new());
        let (mut reads, mut writes) = tokio::io::split(client);
        let mut target =
            Scripted::new(vec![Ok(Bytes::from_static(&[7; 1000]))], Err(io::ErrorKind::BrokenPipe));
        let floods = async {
            tokio::time::sleep(fails_after).await;
            while writes.write_all(&[1; 64]).await.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let slow = async {
            for _ in 0..5 {
                tokio::time::sleep(READER_PAUSE / 2).await;
                reads.read_exact(&mut [0; 64]).await.unwrap();
            }
            std::future::pending().await
        };
        let started = Instant::now();
        let outcome = tokio::select! {
            outcome = copied(&mut near, &mut target) => outcome,
            ((), ()) = async { tokio::join!(floods, slow) } => panic!("the client never ends"),
        };
        assert_eq!(
            outcome.ended,
            CopyEnd { by: Side::B, how: EndKind::WriteFailed(io::ErrorKind::BrokenPipe) }
        );
        assert_eq!(outcome.to_a, 6 * 64, "the bytes that the slow reader read, and those in its buffer");
        let last = (READER_PAUSE / 2 * 5).max(fails_after);
        let took = started.elapsed();
        assert!(
            took >= last + READER_PAUSE && took < last + 2 * READER_PAUSE + Duration::from_secs(1),
            "{took:?}"
        );
    }
}

/// A client does not read, and sends all the time. For a session that was evicted, its bytes are neither kept nor discarded.
#[tokio::test(start_paused = true)]
async fn an_evicted_session_ends_at_once_next_to_a_client_that_does_not_read() {
    let (mut client, near) = duplex(64);
    let mut near = Socket::new(near, BufferPool::new());
    let evicted = io::ErrorKind::OutOfMemory;
    let mut session = Scripted::new(vec![Ok(Bytes::from_static(&[7; 1000]))], Err(evicted));
    let floods = async {
        while client.write_all(&[1; 64]).await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    let started = Instant::now();
    let outcome = tokio::select! {
        outcome = copied(&mut near, &mut session) => outcome,
        () = floods => panic!("the client never ends"),
    };
    assert_eq!(outcome.ended, CopyEnd { by: Side::B, how: EndKind::WriteFailed(evicted) });
    assert!(started.elapsed().is_zero() && outcome.ended.is_for_memory());
}

/// Copies from a client that disconnects to a reader that pauses, and returns the number of bytes that the reader gets
/// once it goes on, and the end of the copy. `finishes`: the client ends its direction before it resets.
async fn read_after(pause: Duration, finishes: bool) -> (usize, CopyEnd, Duration) {
    let ((mut client, near), (far, mut target)) = (tcp().await, duplex(1000));
    let (mut near, mut far) = (Socket::new(near, BufferPool::new()), Socket::new(far, BufferPool::new()));
    let started = Instant::now();
    let disconnects = async {
        client.write_all(&[1; UPLOAD]).await.unwrap();
        if finishes {
            client.shutdown().await.unwrap();
        }
        socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
        drop(client);
        tokio::time::sleep(pause).await;
        let mut got = Vec::new();
        target.read_to_end(&mut got).await.unwrap();
        got.len()
    };
    let copies = async {
        let ended = copied(&mut near, &mut far).await.ended;
        drop(far);
        (ended, started.elapsed())
    };
    let (got, (ended, took)) = tokio::join!(disconnects, copies);
    (got, ended, took)
}

/// No read waits that would report the reset, and no byte is written to the client.
#[tokio::test(start_paused = true)]
async fn a_disconnected_client_with_undeliverable_bytes_times_out() {
    let reset = CopyEnd { by: Side::A, how: EndKind::WriteFailed(io::ErrorKind::ConnectionReset) };
    let closed = CopyEnd { by: Side::A, how: EndKind::WriteFailed(io::ErrorKind::BrokenPipe) };
    let second = Duration::from_secs(1);
    for (finishes, ended, patience) in [(false, reset, DELIVERY_TIMEOUT), (true, closed, READER_PAUSE)] {
        let (got, how, _) = read_after(patience - second, finishes).await;
        assert_eq!((got, how), (UPLOAD, ended), "a reader that goes on in time gets everything");
        let (got, how, took) = read_after(patience + second, finishes).await;
        assert_eq!((got, how), (1000, ended), "a reader that goes on later");
        assert!(took >= patience && took < patience + second, "{took:?}");
    }
}

/// Unix sockets report no error, so the copying checks for a closed one now and then.
#[tokio::test(start_paused = true)]
async fn a_unix_client_that_closes_after_half_close_is_detected_without_a_write() {
    let (mut client, near) = tokio::net::UnixStream::pair().unwrap();
    let (far, mut target) = duplex(1000);
    let (mut near, mut far) = (Socket::new(near, BufferPool::new()), Socket::new(far, BufferPool::new()));
    let leaves = async {
        client.write_all(b"last").await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut target).await, b"last");
        tokio::time::sleep(Duration::from_secs(1000)).await;
        drop(client);
        Instant::now()
    };
    let copies = async { (copied(&mut near, &mut far).await, Instant::now()) };
    let (left, (outcome, ended)) = tokio::join!(leaves, copies);
    let closed = CopyEnd { by: Side::A, how: EndKind::WriteFailed(io::ErrorKind::BrokenPipe) };
    assert_eq!((outcome.to_b, outcome.ended), (4, closed));
    assert!(ended >= left && ended <= left + Duration::from_secs(30), "{:?}", ended - left);
}

/// Fewer bytes than the kernel accepts, and more than the reader's pipe.
const UPLOAD: usize = 50_000;

#[tokio::test(start_paused = true)]
async fn lingering_ends_at_the_remotes_end_after_silence_or_at_the_timeout() {
    async fn linger_time(work: impl AsyncFnOnce(DuplexStream)) -> Duration {
        let (far, near) = duplex(64);
        let mut socket = Socket::new(near, BufferPool::new());
        let start = tokio::time::Instant::now();
        tokio::select! {
            () = close_gracefully(&mut socket) => {}
            () = async { work(far).await; std::future::pending().await } => {}
        }
        start.elapsed()
    }
    let ends = linger_time(async |mut far| assert!(rest(&mut far).await.is_empty())).await;
    let silent = linger_time(async |far| {
        tokio::time::sleep(LINGER_TIMEOUT).await;
        drop(far);
    })
    .await;
    let chatty = linger_time(async |mut far| {
        while far.write_all(b"more").await.is_ok() {
            tokio::time::sleep(LINGER_SILENCE / 2).await;
        }
    })
    .await;
    assert_eq!((ends, silent, chatty), (Duration::ZERO, LINGER_SILENCE, LINGER_TIMEOUT));
}

#[tokio::test(start_paused = true)]
async fn lingering_discards_a_limited_number_of_bytes() {
    let mut endless = Endless(0);
    close_gracefully(&mut endless).await;
    assert_eq!(endless.0, LINGER_MAX_BYTES / (64 * 1024));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_byte_is_copied_once_and_in_order(
        up in 0..300_000usize, down in 0..300_000usize, room in 1..100_000usize, piece in 1..70_000usize,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let made = |len: usize, step: usize| (0..len).map(|i| (i * step % 251) as u8).collect::<Vec<_>>();
        let (sent_up, sent_down) = (made(up, 3), made(down, 7));
        let (outcome, (got_up, got_down)) = runtime.block_on(copy_between(room.max(16), |a, b| async {
            let (mut a_reads, mut a_writes) = tokio::io::split(a);
            let (mut b_reads, mut b_writes) = tokio::io::split(b);
            let send_up = async {
                for part in sent_up.chunks(piece) {
                    a_writes.write_all(part).await.unwrap();
                }
                a_writes.shutdown().await.unwrap();
            };
            let send_down = async {
                for part in sent_down.chunks(piece) {
                    b_writes.write_all(part).await.unwrap();
                }
                b_writes.shutdown().await.unwrap();
            };
            let ((), (), got_up, got_down) = tokio::join!(send_up, send_down, rest(&mut b_reads), rest(&mut a_reads));
            (got_up, got_down)
        }));
        prop_assert!(got_up == sent_up && got_down == sent_down);
        prop_assert_eq!((outcome.to_b, outcome.to_a), (up as u64, down as u64));
    }
}

/// The kernel accepts nothing more, so TLS still buffers some bytes when the session fails.
#[tokio::test]
async fn bytes_buffered_by_tls_are_delivered_before_the_socket_is_reset() {
    let (near, far) = tcp().await;
    socket2::SockRef::from(&near).set_send_buffer_size(4096).unwrap();
    let (mut client, server) = testing::over(far, near).await;
    let mut socket = Socket::new(Box::new(server) as AnyConnection, BufferPool::new());
    socket.io.set_reset_on_drop(true);
    let mut sent = 0;
    poll_fn(|cx| {
        // As much as it accepts while the client does not read.
        loop {
            let mut bytes = Bytes::from(vec![7; 16 << 10]);
            let whole = bytes.len();
            match socket.poll_write_chunk(cx, &mut bytes) {
                Poll::Ready(written) => written.unwrap(),
                Poll::Pending => return Poll::Ready(()),
            }
            sent += whole - bytes.len();
        }
    })
    .await;
    let closes = async {
        wait_acknowledged(&mut socket).await;
        drop(socket);
    };
    let mut got = Vec::new();
    let (_, read) = tokio::join!(closes, client.read_to_end(&mut got));
    assert_eq!((got.len(), read.is_err()), (sent, true), "all bytes, and no clean end");
}

/// The pipe below TLS is much smaller than the data, so TLS buffers ciphertext. Neither side finishes meanwhile.
#[tokio::test]
async fn bytes_buffered_by_tls_are_delivered_before_the_stream_ends() {
    let ca = TestCa::new("one");
    let served = server(ca.issue("s", "a.b"), ClientAuth::Anonymous);
    let trust = client(Trust::Ca(ca.ca()), None);
    let (near, far) = duplex(1000);
    let (accepted, connected) = tokio::join!(
        served.load().acceptor().accept(Buffered::new(far, BufferPool::new())),
        TlsConnector::from(trust.load()).connect(server_name("a.b").unwrap(), near)
    );
    let (mut writer, plain) = duplex(1000);
    let mut reader = connected.unwrap();
    let (mut a, mut b) =
        (Socket::new(plain, BufferPool::new()), Socket::new(accepted.unwrap(), BufferPool::new()));
    let sent: Vec<u8> = (0..500_000).map(|i| (i % 251) as u8).collect();
    let mut got = vec![0; sent.len()];
    tokio::select! {
        outcome = copied(&mut a, &mut b) => panic!("no side finished, but the copy did: {outcome:?}"),
        () = tokio::time::sleep(Duration::from_secs(20)) => panic!("bytes are stuck"),
        (wrote, read) = async { tokio::join!(writer.write_all(&sent), reader.read_exact(&mut got)) } => {
            wrote.unwrap();
            read.unwrap();
        }
    }
    assert!(got == sent);
}
