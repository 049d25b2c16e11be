//! A slow line in user space: two network namespaces, and packets carried between them at a rate, late.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tappers::{Interface, Tun};

use crate::process::Process;
use crate::role::{Role, say, until_dismissed};

/// Both namespaces and their line; this part outlives a benchmark that is killed, and removes them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Line {
    /// Unique to the run; the namespaces are called after it.
    pub(crate) name: String,
    /// How the line carries.
    pub(crate) carry: Carry,
    /// The congestion control of all that is sent in the two namespaces.
    pub(crate) congestion: String,
}

/// How the line carries, the same both ways.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Carry {
    /// Bits a second.
    pub(crate) rate: u64,
    /// One way.
    pub(crate) delay: Duration,
    /// Bytes that may wait for the line; what comes on top is dropped.
    pub(crate) queue: usize,
    /// Of a thousand packets, how many are lost.
    pub(crate) loss: u32,
    /// How much longer than [`Self::delay`] a packet may take one way. How much it is changes by chance, every so long;
    /// no packet overtakes another.
    pub(crate) jitter: Duration,
}

/// The two ends as the benchmark uses them.
#[derive(Debug)]
pub(crate) struct Ends {
    /// The namespaces' names.
    pub(crate) spaces: [String; 2],
    /// Their addresses.
    pub(crate) addresses: [IpAddr; 2],
    _line: Process,
}

impl Ends {
    /// Lays a line; it is taken away when this is dropped.
    pub(crate) fn lay(carry: Carry, congestion: &str) -> Result<Self> {
        let name = format!("bench{}", std::process::id());
        let line = Line { name: name.clone(), carry, congestion: congestion.to_owned() };
        let mut line = Process::survivor(None, &Role::Line(line))?;
        let _: String =
            line.hear().context("cannot lay a line between namespaces (root and iproute2 needed)")?;
        let spaces = [format!("{name}-a"), format!("{name}-b")];
        Ok(Self { spaces, addresses: ADDRESSES.map(IpAddr::from), _line: line })
    }
}

impl Line {
    /// The keeper's own part.
    pub(crate) fn run(&self) -> Result<()> {
        let done = self.lay().and_then(|_carrier| {
            say(&"laid")?;
            until_dismissed();
            Ok(())
        });
        for end in SPACES {
            let _ = ip(&format!("netns del {}-{end}", self.name));
        }
        done
    }

    /// Makes three namespaces: the ends', and one in which the devices are made before they are moved, so that
    /// the machine's own network never sees them.
    fn lay(&self) -> Result<Process> {
        let Self { name, congestion, .. } = self;
        for end in SPACES {
            ip(&format!("netns add {name}-{end}"))?;
        }
        let mut carrier = Process::role(Some(&format!("{name}-line")), &Role::Carry(self.carry))?;
        let _: String = carrier.hear()?;
        for (end, [here, there]) in [("a", ADDRESSES), ("b", [ADDRESSES[1], ADDRESSES[0]])] {
            let (space, device) = (format!("{name}-{end}"), format!("line-{end}"));
            ip(&format!("-n {name}-line link set {device} netns {space}"))?;
            ip(&format!("-n {space} link set lo up"))?;
            ip(&format!("-n {space} addr add {here}/32 dev {device}"))?;
            ip(&format!("-n {space} link set {device} mtu 1500 txqueuelen 1000 up"))?;
            // Or a connection would begin with what the last one to that address has learnt.
            ip(&format!("netns exec {space} sysctl -qw net.ipv4.tcp_no_metrics_save=1"))?;
            // By route, because the namespace-wide setting is refused where cubic is not the machine's default.
            ip(&format!("-n {space} route add {there}/32 dev {device} src {here} congctl {congestion}"))?;
            for own in [here, Ipv4Addr::LOCALHOST] {
                let route = format!("{own}/32 dev lo table local scope host src {own} congctl {congestion}");
                ip(&format!("-n {space} route replace local {route}"))?;
            }
        }
        Ok(carrier)
    }
}

impl Carry {
    /// The carrier's own part: four threads, two each way.
    pub(crate) fn run(self) -> Result<()> {
        let ends = ["line-a", "line-b"];
        let [a, b] = ends.map(|name| Interface::new(name).and_then(Tun::new_named).map(Arc::new));
        let (a, b) = (a?, b?);
        say(&"ready")?;
        for (from, to) in [(a.clone(), b.clone()), (b, a)] {
            let way = Arc::new(OneWay::default());
            let late = way.clone();
            thread::spawn(move || self.take(&from, &way));
            thread::spawn(move || late.deliver(&to));
        }
        until_dismissed();
        Ok(())
    }

    /// Takes packets from a device; each gets the time at which it arrives, or is dropped.
    fn take(&self, from: &Tun, way: &OneWay) {
        let mut buffer = [0; 2048];
        let mut line_free = Instant::now();
        let mut later = Later { until: line_free, by: Duration::ZERO, last: line_free };
        loop {
            // Until it is up a device has nothing; once its namespace is gone it never has again.
            let Ok(n) = from.recv(&mut buffer) else {
                thread::sleep(Duration::from_millis(1));
                continue;
            };
            let now = Instant::now();
            let start = line_free.max(now);
            let waits = (start - now).as_secs_f64() * self.rate_f64() / 8.0;
            #[expect(clippy::cast_precision_loss, reason = "a queue of some KiB")]
            if waits > self.queue as f64 {
                continue;
            }
            #[expect(clippy::cast_precision_loss, reason = "a packet")]
            let on_line = Duration::from_secs_f64(n as f64 * 8.0 / self.rate_f64());
            line_free = start + on_line;
            if rand::random_ratio(self.loss, 1000) {
                continue;
            }
            let due = later.due(line_free + self.delay, self.jitter);
            let packet = buffer.get(..n).unwrap_or_default().to_vec();
            let mut late = way.late.lock().unwrap_or_else(PoisonError::into_inner);
            late.push_back((due, packet));
            drop(late);
            way.more.notify_one();
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "no line carries 2^52 bits a second")]
    fn rate_f64(&self) -> f64 {
        self.rate as f64
    }
}

/// How much longer packets take just now.
#[derive(Debug)]
struct Later {
    until: Instant,
    by: Duration,
    /// When the packet before arrives.
    last: Instant,
}

impl Later {
    /// When a packet arrives that would at `due`.
    fn due(&mut self, due: Instant, jitter: Duration) -> Instant {
        if due >= self.until {
            self.until = due + jitter;
            self.by = jitter.mul_f64(rand::random());
        }
        self.last = self.last.max(due + self.by);
        self.last
    }
}

/// Packets under way in one direction, the next to arrive first; bounded by the line's rate, delay and queue.
#[derive(Debug, Default)]
struct OneWay {
    late: Mutex<VecDeque<(Instant, Vec<u8>)>>,
    more: Condvar,
}

impl OneWay {
    fn deliver(&self, to: &Tun) {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let now = Instant::now();
            match late.front().map(|(due, _)| *due) {
                None => late = self.more.wait(late).unwrap_or_else(PoisonError::into_inner),
                Some(due) if due > now => {
                    // Nothing overtakes: only the time has to pass.
                    drop(late);
                    thread::sleep(due - now);
                    late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
                }
                Some(_) => {
                    let packet = late.pop_front();
                    drop(late);
                    if let Some((_, packet)) = packet {
                        let _ = to.send(&packet);
                    }
                    late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

fn ip(words: &str) -> Result<()> {
    let done = Command::new("ip").args(words.split(' ')).output().context("no ip command")?;
    ensure!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(())
}

/// The ends, and where their devices are born.
const SPACES: [&str; 3] = ["a", "b", "line"];
/// From the range kept for benchmarks (RFC 2544); seen in the namespaces only.
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];
