//! The clients: each opens one session after another, checks it, and passes it to the judge.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::WriteHalf;
use tokio::time::{sleep, timeout};
use tunnel_net::socket::Connection as _;

use crate::soak::judge::Judge;
use crate::soak::pattern::Pattern;
use crate::soak::plan::{Kind, Plan};
use crate::soak::pump::{End, Progress, Side, give, take, write};
use crate::soak::target::line;
use crate::soak::world::{HANG, PODS, World};

/// The routes for opening sessions.
#[derive(Clone, Debug)]
pub(crate) struct Ways {
    /// Addresses of CONNECT ports, each with its process: servers, and edges that open sessions themselves.
    pub(crate) doors: Vec<(usize, SocketAddr)>,
    /// The nodes, in the order of their processes.
    pub(crate) nodes: Vec<String>,
    /// The only target, the same for all nodes.
    pub(crate) target: SocketAddr,
}

/// One of the clients.
pub(crate) struct Client {
    world: Arc<World>,
    ways: Ways,
    rng: StdRng,
    number: u64,
    sessions: u64,
}

impl Client {
    /// Creates a client. Its sessions depend on the run's seed and on `number`.
    pub(crate) fn new(world: Arc<World>, ways: Ways, seed: u64, number: u64) -> Self {
        let rng = StdRng::seed_from_u64(seed.wrapping_add(number));
        Self { world, ways, rng, number, sessions: 0 }
    }

    /// Runs sessions in sequence until clients must rest.
    pub(crate) async fn work(mut self) {
        while !self.world.resting.load(Relaxed) {
            self.session().await;
        }
    }

    async fn session(&mut self) {
        self.sessions += 1;
        let door = self.rng.random_range(0..self.ways.doors.len());
        let node = self.rng.random_range(0..self.ways.nodes.len());
        let (Some(&(near, at)), Some(name)) = (self.ways.doors.get(door), self.ways.nodes.get(node)) else {
            return;
        };
        if near == PODS + node {
            // A request of an edge for its own name would go to a server.
            return;
        }
        let id = self.number * 1_000_000 + self.sessions;
        let plan = Plan::random(id, &mut self.rng, near >= PODS);
        let ends = self.world.ends(id, near, PODS + node);
        let target = format!("{name}:{}", self.ways.target.port());
        self.world.running.fetch_add(1, Relaxed);
        let target_report = self.world.expect(id);
        let started = Instant::now();
        let opened = timeout(HANG, open(at, &target, &plan)).await;
        match opened.unwrap_or_else(|_| Err("no response".to_owned())) {
            Ok(stream) => {
                self.world.opened(id, started.elapsed());
                self.world.note(&format!("{id} begins: door {near}, {name}, {plan:?}"));
                let side = act(stream, &plan, &self.world, &mut self.rng).await;
                let judge = Judge { world: self.world.clone(), plan, ends, client: side };
                tokio::spawn(judge.read_output(target_report));
            }
            Err(why) => {
                self.world.note(&format!(
                    "{id} not opened after {:?}: door {near}, {name}: {why}",
                    started.elapsed()
                ));
                self.world.refused(id, &why, name, started.elapsed());
                self.world.forget(id);
                self.world.running.fetch_sub(1, Relaxed);
                sleep(Duration::from_millis(self.rng.random_range(50..500))).await;
            }
        }
    }
}

/// Returns the nodes that are not reachable, with the door and the reason.
pub(crate) async fn unreachable(world: &World, ways: &Ways) -> Vec<String> {
    let mut rng = StdRng::seed_from_u64(0);
    let mut troubles = Vec::new();
    let mut id = TRIES;
    let all = ways.doors.iter().flat_map(|door| ways.nodes.iter().enumerate().map(move |node| (door, node)));
    for (&(door, at), (_, name)) in all.filter(|((door, _), (node, _))| *door != PODS + node) {
        id += 1;
        let plan = Plan::short(id);
        let target = format!("{name}:{}", ways.target.port());
        let started = Instant::now();
        let trouble = loop {
            let tried = match timeout(HANG, open(at, &target, &plan)).await {
                Ok(Ok(stream)) => match act(stream, &plan, world, &mut rng).await {
                    Side { got, end: End::Finished, .. } if got == plan.down => break None,
                    other => format!("{other:?}"),
                },
                Ok(Err(why)) => why,
                Err(_) => "no response".to_owned(),
            };
            if started.elapsed() > BACK {
                break Some(tried);
            }
            sleep(Duration::from_millis(200)).await;
        };
        troubles.extend(trouble.map(|why| format!("{name} is not reachable through door {door}: {why}")));
    }
    troubles
}

/// Requests a session. Sends the plan either with the request or after the response.
async fn open(at: SocketAddr, target: &str, plan: &Plan) -> Result<TcpStream, String> {
    let to_text = |what: std::io::Error| format!("connection: {what}");
    let mut stream = TcpStream::connect(at).await.map_err(to_text)?;
    stream.set_nodelay(true).map_err(to_text)?;
    let head = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nTraceId: {}\r\n\r\n", plan.id);
    let first = serde_json::to_string(plan).map_err(|why| why.to_string())? + "\n";
    let buffered = plan.id.is_multiple_of(4);
    let request = if buffered { head + &first } else { head };
    stream.write_all(request.as_bytes()).await.map_err(to_text)?;
    let status = String::from_utf8_lossy(&line(&mut stream).await.map_err(to_text)?).trim().to_owned();
    if status.split(' ').nth(1) != Some("200") {
        return Err(status);
    }
    while line(&mut stream).await.map_err(to_text)?.len() > 1 {}
    if !buffered {
        stream.write_all(first.as_bytes()).await.map_err(to_text)?;
    }
    Ok(stream)
}

/// Carries out the client's part of the plan.
async fn act(mut stream: TcpStream, plan: &Plan, world: &World, rng: &mut StdRng) -> Side {
    let (mut read, mut write) = stream.split();
    let (up, down) = (Pattern::up(plan.seed), Pattern::down(plan.seed));
    let pulse = &Progress::new(plan, world);
    let mut unsent = None;
    let (got, end) = match plan.kind {
        Kind::Download => take(&mut read, down, plan.down, pulse).await,
        Kind::Upload | Kind::Both | Kind::HalfClose => {
            let (taken, given) =
                tokio::join!(take(&mut read, down, plan.down, pulse), finished(&mut write, up, pulse));
            unsent = given.err();
            taken
        }
        Kind::TargetAborts => {
            let taking = take(&mut read, down, plan.down, pulse);
            let (taken, given) = tokio::join!(taking, give(&mut write, up, plan.up, pulse));
            unsent = given.err();
            taken
        }
        Kind::Echo => {
            let (taken, given) =
                tokio::join!(take(&mut read, up, plan.up, pulse), keys(&mut write, up, pulse, rng));
            unsent = given.err();
            taken
        }
        Kind::ClientAborts => {
            unsent = give(&mut write, up, plan.up, pulse).await.err();
            // A close is abrupt only if there are unread bytes.
            let _ = pulse.within(read.peek(&mut [0])).await;
            (0, End::Own)
        }
        Kind::Vanish => {
            let after = Duration::from_millis(rng.random_range(10..8_000));
            let both = async {
                tokio::join!(take(&mut read, down, plan.down, pulse), give(&mut write, up, plan.up, pulse))
            };
            let done = timeout(after, both).await;
            stream.set_reset_on_drop(true);
            done.map_or((0, End::Own), |(taken, _)| taken)
        }
    };
    Side { got, end, unsent }
}

/// Sends the client's bytes, and their end.
async fn finished(to: &mut WriteHalf<'_>, up: Pattern, pulse: &Progress<'_>) -> Result<(), String> {
    give(to, up, pulse.plan.up, pulse).await?;
    to.shutdown().await.map_err(|why| why.to_string())
}

/// Sends keystrokes, and occasional pastes.
async fn keys(
    to: &mut WriteHalf<'_>,
    up: Pattern,
    pulse: &Progress<'_>,
    rng: &mut StdRng,
) -> Result<(), String> {
    let plan = pulse.plan;
    let started = Instant::now();
    let mut sent = 0;
    while sent < plan.up && started.elapsed() < TYPED {
        let piece = rng.random_range(1..=64).min(plan.up - sent);
        write(to, &up.bytes(sent, usize::try_from(piece).unwrap_or_default()), pulse).await?;
        sent += piece;
        sleep(plan.pause).await;
    }
    let rest = usize::try_from(plan.up - sent).unwrap_or_default();
    write(to, &up.bytes(sent, rest), pulse).await?;
    to.shutdown().await.map_err(|why| why.to_string())
}

/// Time within which every node is linked again: the maximum backoff of an edge, and some more.
const BACK: Duration = Duration::from_secs(40);
/// First id of the sessions that only check whether a node is reachable.
const TRIES: u64 = 1_000_000_000_000;
/// Time after which the remaining keystrokes are sent at once.
const TYPED: Duration = Duration::from_secs(40);
