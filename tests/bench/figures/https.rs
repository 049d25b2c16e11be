//! HTTPS requests over persistent connections, with TLS on every leg: a server's HTTPS ports against two nginx in a
//! row.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Bench, only_with};
use crate::nginx::Nginx;
use crate::place::{Place, free_ports};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::table::{Bound, Row, Table, median, short};
use crate::targets::Targets;
use crate::tunnel::{NODE, Tunnel};

/// One route to the target.
struct Route<'a> {
    name: &'static str,
    at: SocketAddr,
    processes: Vec<&'a Process>,
}

/// The rounds of one route: requests per second, microseconds of CPU per request.
type Rounds = BTreeMap<&'static str, (Vec<f64>, Vec<f64>)>;

impl Bench {
    /// Measures all routes in turns; they have the same target.
    pub(crate) fn https(&self, table: &mut Table) -> Result<()> {
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let target = Nginx::target(&place, ANSWER)?;
        let targets = Targets::start(None, place.edge_address)?;
        let tunnel = self.https_port(&place, &targets, target.at)?;
        let near_target = Nginx::proxy(&place, "second", target.at)?;
        let near_client = Nginx::proxy(&place, "first", near_target.at)?;
        let nginx = Route {
            name: "nginx",
            at: near_client.at,
            processes: vec![&near_client.process, &near_target.process],
        };
        let direct = Route { name: "direct", at: target.at, processes: Vec::new() };
        let ours = tunnel.as_ref().map(|(proxy, at)| Route {
            name: "tunnel",
            at: *at,
            processes: proxy.processes.iter().collect(),
        });
        let mut rounds = Rounds::new();
        for leg in ours.iter().chain([&nginx, &direct]) {
            leg.requests(WARM)?;
        }
        for _ in 0..self.rounds {
            for leg in ours.iter().chain([&nginx, &direct]) {
                let (rate, cost) = leg.requests(self.time(4.0))?;
                let of = rounds.entry(leg.name).or_default();
                of.0.push(rate);
                of.1.push(cost);
            }
        }
        for (name, (rates, costs)) in &rounds {
            eprintln!("{name}: requests/s {rates:.0?}, cpu-us each {costs:.1?}");
        }
        let rate = |name: &str| median(rounds.get(name).map(|of| of.0.clone()).unwrap_or_default());
        let cost = |name: &str| median(rounds.get(name).map(|of| of.1.clone()).unwrap_or_default());
        let proxy = tunnel.as_ref().map(|(proxy, _)| proxy);
        table.add(Row {
            figure: format!(
                "HTTPS, {CLIENTS} kept connections, 1 KiB answers: requests a second, against two nginx's"
            ),
            tunnel: short(rate("tunnel")),
            reference: format!("two nginx {}", short(rate("nginx"))),
            others: format!("direct {}", short(rate("direct"))),
            value: rate("tunnel") / rate("nginx"),
            bound: only_with(proxy, Bound::Least(0.5, 0.75)),
        });
        table.add(Row {
            figure: "CPU of both processes for each of them, against two nginx's".into(),
            tunnel: format!("{} us", short(cost("tunnel"))),
            reference: format!("two nginx {} us", short(cost("nginx"))),
            others: String::new(),
            value: cost("tunnel") / cost("nginx"),
            bound: only_with(proxy, Bound::Most(2.0, 1.33)),
        });
        Ok(())
    }

    /// Starts a server with an HTTPS port for that target, and an edge.
    fn https_port(
        &self,
        place: &Place,
        targets: &Targets,
        target: SocketAddr,
    ) -> Result<Option<(Proxy, SocketAddr)>> {
        let Some(binary) = &self.binary else { return Ok(None) };
        let tunnel = Tunnel::configure(place, targets, binary)?;
        let [port] = free_ports()?;
        tunnel.server_has(&format!(
            "\n[server.https]\nlisten_ip = \"{}\"\nports = {{ \"{port}\" = \"{target}\" }}\ncert = {:?}\nkey = {:?}\n",
            place.cloud_address,
            place.certificates.cert(),
            place.certificates.key(),
        ))?;
        Ok(Some((tunnel.reachable()?, SocketAddr::from((place.cloud_address, port)))))
    }
}

impl Route<'_> {
    /// Runs once. Returns requests per second, and microseconds of CPU per request of the processes between.
    fn requests(&self, time: Duration) -> Result<(f64, f64)> {
        let before = self.cpu()?;
        let output = Command::new("h2load")
            .args(["--h1", "-t", "1", "-c", &CLIENTS.to_string(), "-D", &format!("{}ms", time.as_millis())])
            .arg(format!("--connect-to={}", self.at))
            .arg(format!("https://{NODE}/"))
            .output()
            .context("h2load is not installed; run scripts/parts.sh")?;
        let spent = self.cpu()?.saturating_sub(before);
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        let done = requests(&output).with_context(|| format!("unexpected output of h2load: {output:?}"))?;
        ensure!(done.others == 0.0 && done.succeeded > 0.0, "{}: some requests failed: {output}", self.name);
        Ok((done.succeeded / time.as_secs_f64(), spent.as_secs_f64() * 1e6 / done.succeeded))
    }

    fn cpu(&self) -> Result<Duration> {
        self.processes.iter().map(|process| process.cpu()).sum()
    }
}

/// The outcome of the requests of a run.
struct RequestStats {
    succeeded: f64,
    others: f64,
}

/// Parses h2load's line `requests: 9 total, 9 started, 9 done, 9 succeeded, 0 failed, 0 errored, 0 timeout`.
fn requests(output: &str) -> Option<RequestStats> {
    let line = output.lines().find_map(|line| line.strip_prefix("requests: "))?;
    let of = |word: &str| -> Option<f64> {
        let pair = line.split(", ").find(|pair| pair.ends_with(word))?;
        pair.split(' ').next()?.parse().ok()
    };
    Some(RequestStats {
        succeeded: of(" succeeded")?,
        others: of(" failed")? + of(" errored")? + of(" timeout")?,
    })
}

/// Bytes of one response body.
const ANSWER: usize = 1024;
/// Number of concurrent connections.
const CLIENTS: usize = 64;
/// Duration of a first run that is not measured.
const WARM: Duration = Duration::from_secs(1);
