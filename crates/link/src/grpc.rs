//! Both ends of the gRPC call that carries a link, on hyper's HTTP/2: accepting and dialling links.
//!
//! tonic's own transport hides HTTP/2's send buffer and joins messages, and its codec copies each message twice. So the
//! call is made and served here, with tonic's statuses and the generated messages. See docs/decisions.md#pull-not-push.

pub mod accept;
pub mod dial;
pub mod enrol;
pub mod read_ahead;

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;
#[expect(clippy::disallowed_types, reason = "hyper's Timer trait uses it; the values come from tokio")]
use std::time::Instant;

use futures_util::FutureExt as _;
use futures_util::stream::{FuturesUnordered, Stream as _};
use futures_util::task::AtomicWaker;
use http::{HeaderMap, HeaderValue};
use http_body::Frame;
use hyper::rt::{Sleep, Timer};
use hyper_util::rt::TokioTimer;
use tokio::sync::oneshot;
use tonic::Status;

use crate::foreign::ForeignDialect;
use crate::link::OutboundStream;
use crate::lock::Mutex;

use crate::sender::LinkSender;
use crate::sender::signals::LinkEndpoints;
use crate::table::SessionTable;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_base::names::Instance;
use tunnel_net::socket::Connection;
use tunnel_proto::codec::EncodedMessage;
use tunnel_proto::frame::Remote;
use tunnel_proto::hello::Dialect;
use tunnel_proto::state::LinkId;

/// What all links of this process share.
#[derive(Debug, Clone)]
pub struct LinkContext {
    /// The session table.
    pub table: Arc<SessionTable>,
    /// The metrics.
    pub metrics: Metrics,
    /// Spawns the connection tasks.
    pub drain: Drain,
    /// The kernel's congestion control algorithm for links. `None` means the system's default.
    pub congestion: Option<Arc<str>>,
    /// Time without traffic after which sessions end if the remote does not report ends, as SuperEdge v0.9.
    pub plain_idle_timeout: Duration,
}

/// Creates the outbound side of a new link. If the remote answers the link's own pings, these replace HTTP/2's and
/// `ping_timer` is disabled.
fn outbound(
    peer: Remote,
    instance: Option<Instance>,
    dialect: Dialect,
    link_context: &LinkContext,
    ping_timer: &PingTimer,
) -> OutboundStream {
    let id = LinkId(NEXT_LINK.fetch_add(1, Relaxed));
    let sender = LinkSender::new(id, peer, instance, dialect);
    let LinkContext { table, plain_idle_timeout, .. } = link_context;
    let foreign =
        (dialect == Dialect::Plain).then(|| ForeignDialect::new(&sender, table, *plain_idle_timeout));
    if foreign.is_none() {
        ping_timer.disable();
    }
    OutboundStream { sender, foreign }
}

/// Returns the addresses of a connection.
fn ends(io: &impl Connection) -> LinkEndpoints {
    let tcp = io.tcp();
    LinkEndpoints {
        local: tcp.and_then(|tcp| tcp.local_addr().ok()),
        remote: tcp.and_then(|tcp| tcp.peer_addr().ok()),
        dialled: false,
        version: None,
    }
}

/// Default of [`LinkContext::plain_idle_timeout`].
pub const PLAIN_IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// The number of the next link; unique within the process.
static NEXT_LINK: AtomicU64 = AtomicU64::new(1);

const PATH: &str = "/proto.Stream/TunnelStreaming";
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// Size of an HTTP/2 frame in bytes: one frame of ours, header and data, fits.
const FRAME: u32 = 64 * 1024;
/// Bytes that HTTP/2 buffers for sending. Bytes below the scheduler cannot be reordered, so this only keeps the socket
/// busy.
const SEND_BUFFER: usize = 64 * 1024;
/// HTTP/2's flow-control window in bytes.
///
/// It exceeds 25 MB, twice the bandwidth-delay product of 1 Gbit/s at 100 ms. So HTTP/2 never limits a link, and seldom
/// sends a window update, which costs a packet. It costs no memory: [`ReadAhead`](read_ahead::ReadAhead) bounds what is
/// read.
const WINDOW: u32 = 32 << 20;
/// Maximum size of a call's metadata in bytes.
const METADATA: u32 = 16 * 1024;
/// Timeout of HTTP/2's pings: long enough for a bad line, short enough to detect a dead one.
const PING_TIMEOUT: Duration = Duration::from_secs(15);

// What each end of the call sends, as an HTTP body.

/// The body that one end of the call sends.
#[derive(Debug, Default)]
pub(crate) enum CallBody {
    /// Nothing: the call was rejected.
    #[default]
    Refused,
    /// A heartbeat, until the server has answered and the dialect is known.
    Greeting {
        /// The heartbeat, until it is sent.
        first: Option<EncodedMessage>,
        /// Receives the stream to continue with.
        agreed: oneshot::Receiver<OutboundStream>,
    },
    /// The link's frames.
    Stream {
        /// The link's outbound side.
        outbound: OutboundStream,
        /// Whether a status follows once the link is closed: a server sends one, an edge does not.
        trailers: bool,
    },
    /// A complete response.
    Full(tonic::body::Body),
}

impl http_body::Body for CallBody {
    type Data = EncodedMessage;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<EncodedMessage>, Infallible>>> {
        loop {
            match &mut *self {
                Self::Refused => return Poll::Ready(None),
                Self::Full(answer) => {
                    let frame = ready!(Pin::new(answer).poll_frame(cx)).and_then(Result::ok);
                    return Poll::Ready(frame.map(|frame| Ok(frame.map_data(EncodedMessage::from))));
                }
                Self::Greeting { first, agreed } => {
                    if let Some(first) = first.take() {
                        return Poll::Ready(Some(Ok(Frame::data(first))));
                    }
                    *self = match ready!(Pin::new(agreed).poll(cx)) {
                        Ok(outbound) => Self::Stream { outbound, trailers: false },
                        Err(_) => Self::Refused,
                    };
                }
                Self::Stream { outbound, trailers } => {
                    if let Some(chunk) = ready!(outbound.poll_message(cx)) {
                        return Poll::Ready(Some(Ok(Frame::data(chunk))));
                    }
                    let last = trailers.then(|| status(&outbound.sender));
                    *self = Self::Refused;
                    if let Some(last) = last {
                        return Poll::Ready(Some(Ok(Frame::trailers(last))));
                    }
                }
            }
        }
    }
}

/// Returns the status with which a server ends a link: OK, unless another process has the edge's name.
fn status(link: &LinkSender) -> HeaderMap {
    let taken = link.close_reason().map(Status::already_exists);
    let mut trailers = HeaderMap::new();
    // Fails only if the message cannot be a header. An encoded message always can.
    let _ = taken.unwrap_or_else(|| Status::ok("")).add_header(&mut trailers);
    trailers
}

// The timer for HTTP/2's own pings, which is disabled once the link sends pings itself.
//
// hyper checks every few seconds whether anything was received, with a timer that wakes the connection. With thousands
// of links that ping each other anyway, this would be a considerable part of the cost of idle links.

/// hyper's timer for one connection. It is disabled once the link sends its own pings, and HTTP/2 then sends none.
///
/// Cheap to clone; disabling one clone disables all.
#[derive(Debug, Clone)]
pub(crate) struct PingTimer {
    timer: TokioTimer,
    off: Arc<AtomicBool>,
}

/// A sleep that never completes once its timer is disabled, and then leaves the runtime's timer queue.
struct PingSleep {
    sleep: Option<Pin<Box<dyn Sleep>>>,
    off: Arc<AtomicBool>,
}

impl PingTimer {
    /// Creates an enabled timer.
    pub(crate) fn new() -> Self {
        Self { timer: TokioTimer::new(), off: Arc::default() }
    }

    /// Disables the timer for good.
    pub(crate) fn disable(&self) {
        self.off.store(true, Relaxed);
    }

    fn snooze(&self, sleep: Pin<Box<dyn Sleep>>) -> Pin<Box<dyn Sleep>> {
        Box::pin(PingSleep { sleep: Some(sleep), off: self.off.clone() })
    }
}

#[expect(clippy::disallowed_types, reason = "as above")]
impl Timer for PingTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        self.snooze(self.timer.sleep(duration))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        self.snooze(self.timer.sleep_until(deadline))
    }

    fn now(&self) -> Instant {
        self.timer.now()
    }
}

impl Future for PingSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.off.load(Relaxed) {
            self.sleep = None;
        }
        self.sleep.as_mut().map_or(Poll::Pending, |sleep| sleep.as_mut().poll(cx))
    }
}

impl Sleep for PingSleep {}

// Runs everything that belongs to one HTTP/2 connection in one task.
//
// hyper creates futures for a connection, for each call on it, and for what each call sends; every frame makes one wake
// the next. As separate tasks they would wake other threads, which then fetch the task and its bytes to their core. So
// they are polled in turn on one thread, and the runtime only sees wake-ups from outside.

/// Collects the futures of one connection for the task that runs them. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct ConnectionExecutor(Arc<Mutex<Vec<BoxTask>>>);

type BoxTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs a connection and the futures spawned by it; ends when all have ended.
///
/// Polls only woken futures: polling an idle connection would be a considerable part of the cost of an idle link.
pub(crate) struct ConnectionTask {
    members: FuturesUnordered<BoxTask>,
    arrivals: ConnectionExecutor,
    wake_flag: Arc<WakeFlag>,
    waker: Waker,
}

/// Remembers that a future was woken, and wakes the task unless the task is polling.
#[derive(Default)]
struct WakeFlag {
    rung: AtomicBool,
    polling: AtomicBool,
    task: AtomicWaker,
}

impl<F> hyper::rt::Executor<F> for ConnectionExecutor
where
    F: Future + Send + 'static,
{
    /// Called only before or while the [`ConnectionTask`] is polled: nothing wakes the task for a new future.
    fn execute(&self, member: F) {
        self.0.lock().push(Box::pin(member.map(drop)));
    }
}

impl ConnectionExecutor {
    /// Creates the task that runs the connection `lead` and all futures that it spawns here.
    pub(crate) fn run(self, lead: BoxTask) -> ConnectionTask {
        let wake_flag = Arc::<WakeFlag>::default();
        let waker = Waker::from(wake_flag.clone());
        ConnectionTask { members: FuturesUnordered::from_iter([lead]), arrivals: self, wake_flag, waker }
    }
}

impl ConnectionTask {
    /// Polls all woken futures once.
    fn poll_woken(&mut self) -> Poll<()> {
        let cx = &mut Context::from_waker(&self.waker);
        loop {
            self.members.extend(std::mem::take(&mut *self.arrivals.0.lock()));
            let next = Pin::new(&mut self.members).poll_next(cx);
            if matches!(next, Poll::Ready(None) | Poll::Pending) && self.arrivals.0.lock().is_empty() {
                return next.map(drop);
            }
        }
    }
}

impl Future for ConnectionTask {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        this.wake_flag.task.register(cx.waker());
        for _ in 0..ROUNDS {
            this.wake_flag.start();
            if this.poll_woken().is_ready() {
                return Poll::Ready(());
            }
            if !this.wake_flag.take_woken() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl WakeFlag {
    fn start(&self) {
        self.polling.store(true, SeqCst);
        self.rung.store(false, SeqCst);
    }

    /// Ends a round. Returns true if another round is needed; a wake-up after this check sees that the task is not
    /// polling.
    fn take_woken(&self) -> bool {
        self.polling.store(false, SeqCst);
        self.rung.load(SeqCst)
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, SeqCst);
        if !self.polling.load(SeqCst) {
            self.task.wake();
        }
    }
}

impl fmt::Debug for ConnectionExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConnectionExecutor")
    }
}

/// Maximum number of rounds per poll before other tasks run; a round handles a frame or two.
const ROUNDS: usize = 8;

#[cfg(test)]
mod tests {
    use bytes::{Buf as _, Bytes};

    use crate::congestion::MAX_FRAME;
    use tunnel_base::names::SessionId;
    use tunnel_proto::codec::{encode, to_message};
    use tunnel_proto::frame::{Category, Frame, FrameKind, SessionFrame};

    use super::*;

    #[test]
    fn the_longest_data_of_the_longest_name_is_one_frame_of_http_2() {
        let data = SessionFrame::Data(Bytes::from(vec![7; MAX_FRAME]));
        let body = FrameKind::Session(SessionId::random(), Category::HttpProxy, data);
        let node = "n".repeat(253).parse().unwrap();
        let len = encode(to_message(Frame { node, body })).remaining();
        assert!(len <= FRAME as usize, "{len}");
    }
}

#[cfg(test)]
mod alarm_tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_alarm_goes_off_until_it_is_turned_off() {
        let (ping_timer, nine) = (PingTimer::new(), Duration::from_secs(9));
        let mut sleep = ping_timer.sleep(nine);
        let minute = Duration::from_secs(60);
        assert!(timeout(minute, sleep.as_mut()).await.is_ok());
        let later = ping_timer.now() + nine;
        ping_timer.reset(&mut sleep, later);
        assert!(timeout(minute, sleep.as_mut()).await.is_ok() && ping_timer.now() >= later);
        ping_timer.reset(&mut sleep, later + nine);
        ping_timer.clone().disable();
        assert!(timeout(minute, sleep.as_mut()).await.is_err());
    }
}

#[cfg(test)]
mod crew_tests {
    use std::sync::atomic::AtomicUsize;

    use hyper::rt::Executor as _;
    use tokio::sync::mpsc;

    use tunnel_base::drain::Drain;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    /// Receives numbers and sends each on, `left` times.
    async fn pass(mut from: mpsc::Receiver<u32>, to: mpsc::Sender<u32>, left: u32) {
        for _ in 0..left {
            let Some(next) = from.recv().await else { return };
            let _ = to.send(next + 1).await;
        }
    }

    /// Returns a task whose two futures pass a number to and fro, `times` each.
    fn two(times: u32) -> ConnectionTask {
        let (executor, (one, from_one), (other, from_other)) =
            (ConnectionExecutor::default(), mpsc::channel(1), mpsc::channel(1));
        one.try_send(0).unwrap();
        executor.execute(pass(from_one, other, times));
        executor.run(Box::pin(pass(from_other, one, times)))
    }

    #[test]
    fn a_crew_that_wakes_itself_does_not_wake_its_task() {
        let woken = Arc::<Woken>::default();
        let mut run = two(3);
        assert!(Pin::new(&mut run).poll(&mut Context::from_waker(&woken.clone().into())).is_ready());
        assert_eq!(woken.0.load(SeqCst), 0);
    }

    #[test]
    fn a_lead_is_not_polled_for_what_concerns_a_member_alone() {
        let (executor, (send, receive), (back, mut came)) =
            (ConnectionExecutor::default(), mpsc::channel(1), mpsc::channel(1));
        executor.execute(pass(receive, back, u32::MAX));
        let polls = Arc::<AtomicUsize>::default();
        let counted = polls.clone();
        let mut run = executor.run(Box::pin(std::future::poll_fn(move |_| {
            counted.fetch_add(1, SeqCst);
            Poll::Pending
        })));
        let mut cx = Context::from_waker(Waker::noop());
        for n in 0..5 {
            send.try_send(n).unwrap();
            assert!(Pin::new(&mut run).poll(&mut cx).is_pending());
            assert_eq!(came.try_recv(), Ok(n + 1));
        }
        assert_eq!(polls.load(SeqCst), 1);
    }

    #[test]
    fn a_crew_that_never_rests_gives_way_and_is_woken_again() {
        let woken = Arc::<Woken>::default();
        let waker = woken.clone().into();
        let (mut run, mut polls) = (two(1000), 1);
        while Pin::new(&mut run).poll(&mut Context::from_waker(&waker)).is_pending() {
            assert_eq!(woken.0.load(SeqCst), polls);
            polls += 1;
        }
        assert!(polls >= 1000 / ROUNDS, "{polls}");
    }

    #[test]
    fn what_a_member_executes_runs_at_once_and_the_lead_may_end_first() {
        let (executor, (done, mut ended)) = (ConnectionExecutor::default(), mpsc::channel(1));
        let inner = executor.clone();
        executor.execute(async move { inner.execute(async move { done.send(7).await }) });
        let mut run = executor.run(Box::pin(std::future::ready(())));
        assert!(Pin::new(&mut run).poll(&mut Context::from_waker(Waker::noop())).is_ready());
        assert_eq!(ended.try_recv(), Ok(7));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nothing_that_another_thread_wakes_is_lost() {
        let (executor, (send, receive), (back, mut came)) =
            (ConnectionExecutor::default(), mpsc::channel(1), mpsc::channel(1));
        executor.execute(pass(receive, back, u32::MAX));
        let drain = Drain::new();
        drain.spawn(tracing::Span::none(), executor.run(Box::pin(std::future::ready(()))));
        for n in 0..20_000 {
            send.send(n).await.unwrap();
            assert_eq!(came.recv().await, Some(n + 1));
        }
    }
}
