//! A slow line in user space: two network namespaces, and packets carried between them at a rate and with a delay.

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
use crate::role::{Role, print_message, until_dismissed};

/// Both namespaces and their line. This process outlives a benchmark that is killed, and removes them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Line {
    /// Unique to the run; prefix of the namespaces' names.
    pub(crate) name: String,
    /// Properties of the line.
    pub(crate) carry: Carry,
    /// The congestion control for all traffic in the two namespaces.
    pub(crate) congestion: String,
}

/// Properties of a line, the same both ways.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Carry {
    /// Bits per second.
    pub(crate) rate: u64,
    /// Delay of one direction.
    pub(crate) delay: Duration,
    /// Maximum bytes queued for the line; further packets are dropped.
    pub(crate) queue: usize,
    /// Number of lost packets per thousand.
    pub(crate) loss: u32,
    /// Maximum additional delay of one direction, on top of [`Self::delay`]. The actual value is random and changes
    /// after each such interval. Packets are never reordered.
    pub(crate) jitter: Duration,
}

/// The two ends, for use by the benchmark.
#[derive(Debug)]
pub(crate) struct Ends {
    /// Names of the namespaces.
    pub(crate) spaces: [String; 2],
    /// Addresses of the ends.
    pub(crate) addresses: [IpAddr; 2],
    _line: Process,
}

impl Ends {
    /// Creates a line, which is removed on drop.
    pub(crate) fn lay(carry: Carry, congestion: &str) -> Result<Self> {
        let name = format!("bench{}", std::process::id());
        let line = Line { name: name.clone(), carry, congestion: congestion.to_owned() };
        let mut line = Process::survivor(None, &Role::Line(line))?;
        let _: String = line
            .read_output()
            .context("cannot create a line between namespaces; requires root and iproute2")?;
        let spaces = [format!("{name}-a"), format!("{name}-b")];
        Ok(Self { spaces, addresses: ADDRESSES.map(IpAddr::from), _line: line })
    }
}

impl Line {
    /// Runs the process that creates and removes the line.
    pub(crate) fn run(&self) -> Result<()> {
        let done = self.lay().and_then(|_carrier| {
            print_message(&"laid")?;
            until_dismissed();
            Ok(())
        });
        for end in SPACES {
            let _ = ip(&format!("netns del {}-{end}", self.name));
        }
        done
    }

    /// Creates three namespaces: two for the ends, and one in which the devices are created before they are moved, so
    /// that the machine's own network never sees them.
    fn lay(&self) -> Result<Process> {
        let Self { name, congestion, .. } = self;
        for end in SPACES {
            ip(&format!("netns add {name}-{end}"))?;
        }
        let mut carrier = Process::role(Some(&format!("{name}-line")), &Role::Carry(self.carry))?;
        let _: String = carrier.read_output()?;
        for (end, [here, there]) in [("a", ADDRESSES), ("b", [ADDRESSES[1], ADDRESSES[0]])] {
            let (space, device) = (format!("{name}-{end}"), format!("line-{end}"));
            ip(&format!("-n {name}-line link set {device} netns {space}"))?;
            ip(&format!("-n {space} link set lo up"))?;
            ip(&format!("-n {space} addr add {here}/32 dev {device}"))?;
            ip(&format!("-n {space} link set {device} mtu 1500 txqueuelen 1000 up"))?;
            // Otherwise a connection would start with metrics of the previous one to that address.
            ip(&format!("netns exec {space} sysctl -qw net.ipv4.tcp_no_metrics_save=1"))?;
            // Set by route, because the namespace-wide setting is refused if cubic is not the machine's default.
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
    /// Runs the line in this process, with four threads, two for each direction.
    pub(crate) fn run(self) -> Result<()> {
        let ends = ["line-a", "line-b"];
        let [a, b] = ends.map(|name| Interface::new(name).and_then(Tun::new_named).map(Arc::new));
        let (a, b) = (a?, b?);
        print_message(&"ready")?;
        for (from, to) in [(a.clone(), b.clone()), (b, a)] {
            let way = Arc::new(OneWay::default());
            let late = way.clone();
            thread::spawn(move || self.take(&from, &way));
            thread::spawn(move || late.deliver(&to));
        }
        until_dismissed();
        Ok(())
    }

    /// Takes packets from a device. Each gets the time at which it arrives, or is dropped.
    fn take(&self, from: &Tun, way: &OneWay) {
        let mut buffer = [0; 2048];
        let mut line_free = Instant::now();
        let mut later = AddedDelay { until: line_free, by: Duration::ZERO, last: line_free };
        loop {
            // Fails until the device is up, and after its namespace was removed.
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

/// The current additional delay of packets.
#[derive(Debug)]
struct AddedDelay {
    until: Instant,
    by: Duration,
    /// Arrival time of the previous packet.
    last: Instant,
}

impl AddedDelay {
    /// Returns when a packet arrives that would arrive at `due` without jitter.
    fn due(&mut self, due: Instant, jitter: Duration) -> Instant {
        if due >= self.until {
            self.until = due + jitter;
            self.by = jitter.mul_f64(rand::random());
        }
        self.last = self.last.max(due + self.by);
        self.last
    }
}

/// Packets in flight in one direction, in order of arrival. Bounded by the line's rate, delay and queue.
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
                    // Packets are not reordered, so waiting for the first is enough.
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

/// Suffixes of the namespaces: the two ends, and the one in which the devices are created.
const SPACES: [&str; 3] = ["a", "b", "line"];
/// From the range reserved for benchmarks (RFC 2544); visible in the namespaces only.
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];
