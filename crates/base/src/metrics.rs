//! All metrics: names, help texts, labels, and the two exposition formats.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::access_log::RefusalLogLimiter;
use crate::process::ProcessCollector;

/// The metrics of this process, created once at startup and passed to every part that counts. Cheap to clone.
///
/// Label values are fixed words (listener, reason, result), never text from a remote, so that no remote can create
/// series. Counters that sessions change often are plain fields.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Number of nodes linked to this server. SuperEdge's only metric, under its name.
    pub nodes: Gauge,
    /// Number of open links.
    pub links: Gauge,
    /// Closed links, by reason.
    pub links_ended: CauseCounter,
    /// Rejected links, by reason.
    pub calls_refused: CauseCounter,
    /// Number of times two running processes used the same node name while one of them was linked here.
    pub name_conflicts: Counter,
    /// Number of times an edge started to dial its server again.
    pub reconnects: Counter,
    /// Backup links next to an unresponsive link: `dialled`, then one of `won`, `lost` or `failed`.
    pub second_links: CauseCounter,
    /// Number of edges asked to link to a peer with fewer nodes.
    pub edges_rebalanced: Counter,
    /// Round-trip times of pings in seconds, on every link.
    pub rtt: LatencyHistogram,
    /// Number of times reading a plain link paused because a session's queue was full.
    pub stalls: Counter,
    /// Sessions of each listener or of the acceptor.
    pub sessions: Sessions,
    /// Seconds from a session's request to its response, successful or not.
    pub opening: LatencyHistogram,
    /// HTTP requests in flight.
    pub requests: InFlightRequests,
    /// Bytes from clients to targets.
    pub bytes_up: Counter,
    /// Bytes from targets to clients.
    pub bytes_down: Counter,
    /// Sessions reset before their end, by reason.
    pub resets: CauseCounter,
    /// Sessions whose last bytes were dropped before delivery, by reason.
    pub undelivered: CauseCounter,
    /// Number of times a session with an end here was resumed over another path.
    pub resumed: Counter,
    /// Number of sessions relayed by this server; updated every few seconds.
    pub sessions_relayed: Gauge,
    /// Bytes that sessions hold in memory, by budget; updated every few seconds.
    pub memory: Memory,
    /// Dropped frames (wrong link, role or attempt, or unknown), by reason.
    pub frames_dropped: CauseCounter,
    /// Client connections closed without a session, by reason (header timeout, not HTTP, limit reached, ...).
    pub connections_refused: CauseCounter,
    /// Number of records published for DNS.
    pub published: Gauge,
    /// Number of failed attempts to write records.
    pub publish_failures: Counter,
    /// Expiration times of certificates.
    pub certificates: Certificates,
    /// Limiter for log lines about refusals that are counted here.
    pub refusals: RefusalLogLimiter,
    registry: Arc<Registry>,
}

/// A counter for each reason; reasons are fixed words.
#[derive(Debug, Clone, Default)]
pub struct CauseCounter(Family<CauseLabels, Counter>, Counter);

/// Bytes used of each budget, and its limit.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    used: Family<BudgetLabels, Gauge>,
    limit: Family<BudgetLabels, Gauge>,
}

/// Open sessions, and closed sessions by result, for each listener.
#[derive(Debug, Clone, Default)]
pub struct Sessions {
    now: Family<ListenerLabels, Gauge>,
    total: Family<EndedLabels, Counter>,
}

/// A guard that counts one session as open until dropped.
#[derive(Debug)]
pub struct ActiveSession {
    sessions: Sessions,
    front: &'static str,
    result: &'static str,
    request: Option<InFlightGuard>,
}

/// A histogram of durations in seconds.
#[derive(Debug, Clone)]
pub struct LatencyHistogram(Histogram);

impl Metrics {
    /// Returns the metrics of a server. Its namespace and name become labels of `tunnel_cloud_nodes`, unless they are
    /// empty.
    pub fn server(namespace: &str, pod: &str) -> Self {
        let mut registry = Registry::default();
        let labels = [("kubernetes_namespace", namespace), ("kubernetes_pod_name", pod)];
        let known = labels.into_iter().filter(|(_, value)| !value.is_empty());
        let labels: KubernetesLabels = known.map(|(name, value)| (name, value.to_owned())).collect();
        let (name, help) = ("tunnel_cloud_nodes", "Number of edge nodes");
        if labels.is_empty() {
            let nodes = Gauge::default();
            registry.register(name, help, nodes.clone());
            return Self::with(registry, nodes);
        }
        let nodes = Family::<KubernetesLabels, Gauge>::default();
        registry.register(name, help, nodes.clone());
        Self::with(registry, nodes.get_or_create_owned(&labels))
    }

    /// Returns the metrics of an edge; [`Self::nodes`] exists but is not exposed.
    pub fn edge() -> Self {
        Self::with(Registry::default(), Gauge::default())
    }

    /// Returns all metrics as text in the given format.
    pub fn encode(&self, form: ExpositionFormat) -> String {
        let mut text = String::with_capacity(TEXT_BYTES);
        // Writing to a String fails only if a metric's own encoding fails; the text before it is still served.
        if encode(&mut text, &self.registry).is_err() {
            tracing::error!("cannot encode all metrics");
        }
        match form {
            ExpositionFormat::Open => text,
            ExpositionFormat::Plain => plain(&text),
        }
    }

    fn with(mut all: Registry, nodes: Gauge) -> Self {
        let mut metrics = Self {
            nodes,
            links: Gauge::default(),
            links_ended: CauseCounter::default(),
            calls_refused: CauseCounter::default(),
            name_conflicts: Counter::default(),
            reconnects: Counter::default(),
            second_links: CauseCounter::default(),
            edges_rebalanced: Counter::default(),
            rtt: LatencyHistogram::new(&ROUND_TRIP_SECONDS),
            stalls: Counter::default(),
            sessions: Sessions::default(),
            opening: LatencyHistogram::new(&OPENING_SECONDS),
            requests: InFlightRequests::default(),
            bytes_up: Counter::default(),
            bytes_down: Counter::default(),
            resets: CauseCounter::default(),
            undelivered: CauseCounter::default(),
            resumed: Counter::default(),
            sessions_relayed: Gauge::default(),
            memory: Memory::default(),
            frames_dropped: CauseCounter::default(),
            connections_refused: CauseCounter::default(),
            published: Gauge::default(),
            publish_failures: Counter::default(),
            certificates: Certificates::default(),
            refusals: RefusalLogLimiter::default(),
            registry: Arc::default(),
        };
        metrics.register_links(&mut all);
        metrics.register_sessions(&mut all);
        metrics.register_refused(&mut all);
        let build = Family::<BuildLabels, Gauge>::default();
        build.get_or_create(&BuildLabels { version: env!("CARGO_PKG_VERSION") }).set(1);
        all.register("tunnel_build_info", "Version of this program; always 1", build);
        all.register_collector(Box::new(ProcessCollector));
        metrics.registry = Arc::new(all);
        metrics
    }
}

impl CauseCounter {
    /// Increments the count for `cause`.
    pub fn count(&self, cause: &'static str) {
        self.0.get_or_create(&CauseLabels { cause }).inc();
        self.1.inc();
    }

    /// Returns the count of all reasons together.
    pub fn all(&self) -> u64 {
        self.1.get()
    }

    /// Returns the count for `cause`.
    pub fn counted(&self, cause: &'static str) -> u64 {
        self.0.get_or_create(&CauseLabels { cause }).get()
    }
}

impl Memory {
    /// Sets the used bytes of `budget` (a fixed word), and its limit.
    pub fn set(&self, budget: &'static str, used: usize, limit: usize) {
        for (family, bytes) in [(&self.used, used), (&self.limit, limit)] {
            family.get_or_create(&BudgetLabels { budget }).set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }
}

impl Sessions {
    /// Counts a session of `front` as open until the result is dropped.
    pub fn start(&self, front: &'static str) -> ActiveSession {
        self.now.get_or_create(&ListenerLabels { front }).inc();
        ActiveSession { sessions: self.clone(), front, result: "cut", request: None }
    }

    /// Counts a session that was refused before it opened.
    pub fn refused(&self, front: &'static str, result: &'static str) {
        self.total.get_or_create(&EndedLabels { front, result }).inc();
    }

    /// Returns the number of open sessions of `front`.
    pub fn now(&self, front: &'static str) -> i64 {
        self.now.get_or_create(&ListenerLabels { front }).get()
    }

    /// Returns the number of closed sessions of `front` with this result.
    pub fn ended(&self, front: &'static str, result: &'static str) -> u64 {
        self.total.get_or_create(&EndedLabels { front, result }).get()
    }
}

impl ActiveSession {
    /// Keeps the request in flight until the session closes.
    pub fn carries(&mut self, request: InFlightGuard) {
        self.request = Some(request);
    }

    /// Records the session's result; a session dropped without one is counted as `cut`.
    pub fn end(mut self, result: &'static str) {
        self.result = result;
    }
}

impl Drop for ActiveSession {
    fn drop(&mut self) {
        self.sessions.now.get_or_create(&ListenerLabels { front: self.front }).dec();
        self.sessions.refused(self.front, self.result);
    }
}

impl LatencyHistogram {
    /// Adds one observation.
    pub fn observe(&self, time: Duration) {
        self.0.observe(time.as_secs_f64());
    }

    fn new(buckets: &[f64]) -> Self {
        Self(Histogram::new(buckets.iter().copied()))
    }
}

/// Initial capacity of the text in bytes, to avoid reallocations.
const TEXT_BYTES: usize = 8 * 1024;

/// Buckets in seconds, from a link on one machine to a link that is given up.
const ROUND_TRIP_SECONDS: [f64; 15] =
    [0.0005, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 2.0, 3.0, 5.0];

/// Buckets in seconds, from a target on one machine to the longest timeout.
const OPENING_SECONDS: [f64; 15] =
    [0.0005, 0.001, 0.0025, 0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 12.0];

// Expiration of certificates.

/// The expiration time of each certificate, by the config key of its file.
#[derive(Debug, Clone, Default)]
pub struct Certificates(pub(crate) Family<KeyLabels, Gauge>);

impl Certificates {
    /// Sets the expiration time in seconds since 1970.
    pub fn set(&self, key: &'static str, end: u64) {
        self.0.get_or_create(&KeyLabels { key }).set(i64::try_from(end).unwrap_or(i64::MAX));
    }
}

// The two exposition formats: OpenMetrics, and the older one that every scraper can read.

/// An exposition format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// OpenMetrics 1.0.
    Open,
    /// Prometheus text format, version 0.0.4.
    Plain,
}

impl ExpositionFormat {
    /// Chooses the format by a scraper's `Accept` header: OpenMetrics if it is accepted and not weighted below plain
    /// text.
    pub fn wanted(accept: &str) -> Self {
        let weight = |kind: &str| {
            let mut weights = accept.split(',').filter_map(|part| {
                let mut parts = part.split(';').map(str::trim);
                parts.next().filter(|found| found.eq_ignore_ascii_case(kind))?;
                let given = parts.find_map(|part| part.strip_prefix("q=")?.trim().parse::<f32>().ok());
                Some(given.unwrap_or(1.0))
            });
            weights.next()
        };
        match (weight("application/openmetrics-text"), weight("text/plain")) {
            (Some(open), plain) if open > 0.0 && open >= plain.unwrap_or(0.0) => Self::Open,
            _ => Self::Plain,
        }
    }

    /// Returns the content type.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Open => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Converts OpenMetrics text to the plain format: counters are named like their samples, and units and the end marker
/// are omitted.
pub(crate) fn plain(open: &str) -> String {
    let (mut text, mut help) = (String::with_capacity(open.len()), None);
    for line in open.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), said) => help = Some((name, said.unwrap_or_default())),
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let suffix = if kind == "counter" { "_total" } else { "" };
                if let Some((_, said)) = help.take().filter(|(of, _)| *of == name) {
                    let _ = writeln!(text, "# HELP {name}{suffix} {said}");
                }
                let _ = writeln!(text, "# TYPE {name}{suffix} {kind}");
            }
            (Some("#"), ..) => {}
            _ => {
                let _ = writeln!(text, "{line}");
            }
        }
    }
    text
}

// Labels of metrics; their values are fixed words.

/// Labels, each present only if its value is known.
pub(crate) type KubernetesLabels = Vec<(&'static str, String)>;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct BuildLabels {
    pub(crate) version: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct CauseLabels {
    pub(crate) cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KeyLabels {
    pub(crate) key: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct BudgetLabels {
    pub(crate) budget: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ListenerLabels {
    pub(crate) front: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    pub(crate) verb: &'static str,
    pub(crate) path: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct EndedLabels {
    pub(crate) front: &'static str,
    pub(crate) result: &'static str,
}

// Names and help texts of the metrics.

impl Metrics {
    pub(crate) fn register_links(&self, to: &mut Registry) {
        to.register("tunnel_links", "Number of open links", self.links.clone());
        to.register(
            "tunnel_links_ended",
            "Total number of links closed, by reason",
            self.links_ended.0.clone(),
        );
        to.register(
            "tunnel_calls_refused",
            "Total number of links rejected, by reason",
            self.calls_refused.0.clone(),
        );
        let help = "Total number of times two running processes used the same node name";
        to.register("tunnel_name_conflicts", help, self.name_conflicts.clone());
        to.register(
            "tunnel_reconnects",
            "Total number of times an edge dialled its server again",
            self.reconnects.clone(),
        );
        let help = "Total number of backup links next to an unresponsive link: dialled, won (answered first), lost (the old link did), failed";
        to.register("tunnel_second_links", help, self.second_links.0.clone());
        let help = "Total number of edges asked to link to a server with fewer nodes";
        to.register("tunnel_edges_moved", help, self.edges_rebalanced.clone());
        let help = "Round-trip time of a link";
        to.register_with_unit("tunnel_link_round_trip", help, Unit::Seconds, self.rtt.0.clone());
        to.register(
            "tunnel_link_stalls",
            "Total number of times reading a plain link paused for a slow reader",
            self.stalls.clone(),
        );
    }

    pub(crate) fn register_sessions(&self, to: &mut Registry) {
        to.register("tunnel_sessions", "Number of open sessions, by listener", self.sessions.now.clone());
        to.register(
            "tunnel_sessions_ended",
            "Total number of sessions closed, by listener and result; includes requests that never opened",
            self.sessions.total.clone(),
        );
        let help = "Time from a session's request to its response";
        to.register_with_unit("tunnel_session_opening", help, Unit::Seconds, self.opening.0.clone());
        let help = "Number of HTTP requests in flight, by method and kind of path";
        to.register("tunnel_requests_under_way", help, self.requests.0.clone());
        let help = "Total bytes from clients to targets";
        to.register_with_unit("tunnel_up", help, Unit::Bytes, self.bytes_up.clone());
        let help = "Total bytes from targets to clients";
        to.register_with_unit("tunnel_down", help, Unit::Bytes, self.bytes_down.clone());
        to.register(
            "tunnel_sessions_reset",
            "Total number of sessions reset before their end, by reason",
            self.resets.0.clone(),
        );
        let help = "Total number of aborted sessions that were not delivered in full, by reason";
        to.register("tunnel_sessions_undelivered", help, self.undelivered.0.clone());
        to.register(
            "tunnel_sessions_resumed",
            "Total number of times a session was resumed over another path",
            self.resumed.clone(),
        );
        to.register(
            "tunnel_sessions_passing",
            "Number of sessions relayed by this server",
            self.sessions_relayed.clone(),
        );
        let help = "Bytes used of each budget: promised (reserved for remotes), kept (not yet received by the remote, or a little more), \
                    passing (relayed to another link), unpromised (sent by plain remotes, not read yet)";
        to.register_with_unit("tunnel_memory", help, Unit::Bytes, self.memory.used.clone());
        let help = "Limit of each budget in bytes; see memory in the config";
        to.register_with_unit("tunnel_memory_limit", help, Unit::Bytes, self.memory.limit.clone());
    }

    /// Registers the counters of refusals and of published records.
    pub(crate) fn register_refused(&self, to: &mut Registry) {
        to.register(
            "tunnel_frames_dropped",
            "Total number of frames dropped, by reason",
            self.frames_dropped.0.clone(),
        );
        let help = "Total number of client connections closed without a session, by reason";
        to.register("tunnel_connections_refused", help, self.connections_refused.0.clone());
        to.register(
            "tunnel_published_records",
            "Number of records published for DNS",
            self.published.clone(),
        );
        let help = "Expiration time of the certificate that a config key names, since the Unix epoch";
        to.register_with_unit(
            "tunnel_certificate_not_after",
            help,
            Unit::Seconds,
            self.certificates.0.clone(),
        );
        let help = "Total number of failed attempts to write records";
        to.register("tunnel_publish_failures", help, self.publish_failures.clone());
    }
}

// HTTP requests in flight.

/// HTTP requests in flight, by method and kind of path, both fixed words.
#[derive(Debug, Clone, Default)]
pub struct InFlightRequests(pub(crate) Family<RequestLabels, Gauge>);

/// A guard that counts one request as in flight until dropped.
#[derive(Debug)]
#[must_use = "the request is in flight until this is dropped"]
pub struct InFlightGuard(Gauge);

impl InFlightRequests {
    /// Counts a request with this method and path as in flight until the result is dropped.
    pub fn start(&self, method: &str, path: &str) -> InFlightGuard {
        let gauge = self.gauge(method, path);
        gauge.inc();
        InFlightGuard(gauge)
    }

    /// Returns the number of such requests in flight.
    pub fn now(&self, method: &str, path: &str) -> i64 {
        self.gauge(method, path).get()
    }

    fn gauge(&self, method: &str, path: &str) -> Gauge {
        let labels = RequestLabels { verb: one_of(&VERBS, method), path: one_of(&PATHS, first(path)) };
        self.0.get_or_create_owned(&labels)
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

fn first(path: &str) -> &str {
    path.trim_start_matches('/').split('/').next().unwrap_or_default()
}

fn one_of(words: &[&'static str], word: &str) -> &'static str {
    words.iter().find(|known| **known == word).copied().unwrap_or("other")
}

const VERBS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// First segments of a kubelet's paths.
const PATHS: [&str; 6] = ["exec", "attach", "portForward", "containerLogs", "metrics", "stats"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_superedges_gauge_and_ours_and_ends_well() {
        let metrics = Metrics::server("edge-system", "tunnel-cloud-0");
        let quiet = metrics.encode(ExpositionFormat::Open);
        let gauge = |n: i64| {
            format!(
                "tunnel_cloud_nodes{{kubernetes_namespace=\"edge-system\",\
                 kubernetes_pod_name=\"tunnel-cloud-0\"}} {n}\n"
            )
        };
        assert!(quiet.contains(&gauge(0)), "{quiet}");
        metrics.nodes.inc();
        metrics.links_ended.count("silent");
        metrics.bytes_up.inc_by(7);
        metrics.opening.observe(Duration::from_millis(3));
        metrics.memory.set("kept", 5, 6);
        let text = metrics.encode(ExpositionFormat::Open);
        for line in [
            gauge(1).trim_end(),
            "tunnel_links_ended_total{cause=\"silent\"} 1",
            "tunnel_up_bytes_total 7",
            "tunnel_memory_bytes{budget=\"kept\"} 5",
            "tunnel_memory_limit_bytes{budget=\"kept\"} 6",
            "tunnel_session_opening_seconds_bucket{le=\"0.01\"} 1",
            "tunnel_session_opening_seconds_bucket{le=\"0.0025\"} 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert!(text.contains("\nprocess_resident_memory_bytes "), "{text}");
        assert!(text.contains("\nprocess_cpu_seconds_total "), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }

    /// Returns metrics that each have a value, so that all are exposed.
    fn all_shown() -> Metrics {
        let metrics = Metrics::server("ns", "pod");
        // A new field does not compile here until it is listed, and given a value if it is exposed only with one.
        let Metrics {
            links_ended,
            calls_refused,
            sessions,
            resets,
            undelivered,
            memory,
            frames_dropped,
            connections_refused,
            second_links,
            certificates,
            requests,
            nodes: _,
            links: _,
            name_conflicts: _,
            reconnects: _,
            edges_rebalanced: _,
            rtt: _,
            stalls: _,
            opening: _,
            bytes_up: _,
            bytes_down: _,
            resumed: _,
            sessions_relayed: _,
            published: _,
            publish_failures: _,
            refusals: _,
            registry: _,
        } = &metrics;
        for causes in [
            links_ended,
            calls_refused,
            resets,
            undelivered,
            frames_dropped,
            connections_refused,
            second_links,
        ] {
            causes.count("a");
        }
        memory.set("a", 1, 1);
        certificates.set("a", 1);
        sessions.start("a").end("b");
        drop(requests.start("GET", "/"));
        metrics
    }

    #[tokio::test]
    async fn the_operators_page_has_each_metric_and_no_other() {
        let text = all_shown().encode(ExpositionFormat::Plain);
        let shown = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let shown: std::collections::BTreeSet<_> = shown.collect();
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let page = std::fs::read_to_string(root.join("docs/operating.md")).unwrap();
        let table = page.split("### Metrics").nth(1).unwrap().split("\n## ").next().unwrap();
        let cells = table.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
        let told = cells.flat_map(|cell| cell.split(", ").map(|name| name.trim_matches('`'))).collect();
        assert_eq!(shown, told);
    }

    #[test]
    fn a_server_outside_of_kubernetes_has_no_empty_labels() {
        for (namespace, pod, line) in [
            ("", "", "tunnel_cloud_nodes 0"),
            ("ns", "", "tunnel_cloud_nodes{kubernetes_namespace=\"ns\"} 0"),
        ] {
            let text = Metrics::server(namespace, pod).encode(ExpositionFormat::Plain);
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn the_process_tells_its_version_its_start_and_its_limit_of_files() {
        let text = Metrics::edge().encode(ExpositionFormat::Plain);
        let value = |name: &str| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap_or_else(|| panic!("no {name} in {text}"));
            line.trim().parse::<f64>().unwrap()
        };
        let build = format!("tunnel_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
        assert!((value(&build) - 1.0).abs() < f64::EPSILON);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let start = value("process_start_time_seconds");
        assert!(start <= now + 2.0 && start > now - 86_400.0, "{start} and {now}");
        assert!(value("process_max_fds") >= value("process_open_fds"));
    }

    #[test]
    fn an_edge_shows_no_gauge_of_nodes() {
        assert!(!Metrics::edge().encode(ExpositionFormat::Open).contains("tunnel_cloud_nodes"));
    }

    #[test]
    fn a_session_counts_as_alive_until_it_ends() {
        let metrics = Metrics::edge();
        let (one, two) = (metrics.sessions.start("ssh"), metrics.sessions.start("ssh"));
        assert_eq!(metrics.sessions.now("ssh"), 2);
        one.end("over");
        drop(two);
        assert_eq!(metrics.sessions.now("ssh"), 0);
        assert_eq!((metrics.sessions.ended("ssh", "over"), metrics.sessions.ended("ssh", "cut")), (1, 1));
    }
}

#[cfg(test)]
mod form_tests {
    use super::*;

    #[test]
    fn openmetrics_is_for_who_asks_for_it() {
        let prometheus =
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, form) in [
            (prometheus, ExpositionFormat::Open),
            ("application/openmetrics-text", ExpositionFormat::Open),
            ("Application/OpenMetrics-Text; version=0.0.1", ExpositionFormat::Open),
            ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;q=0.2", ExpositionFormat::Plain),
            ("application/openmetrics-text;q=0", ExpositionFormat::Plain),
            ("text/plain", ExpositionFormat::Plain),
            ("*/*", ExpositionFormat::Plain),
            ("", ExpositionFormat::Plain),
        ] {
            assert_eq!(ExpositionFormat::wanted(accept), form, "{accept}");
        }
    }

    #[test]
    fn the_plain_form_names_counters_as_their_samples_and_says_no_units() {
        let open = "# HELP a Ones.\n# TYPE a counter\na_total 1\n# HELP b_seconds Twos.\n# TYPE b_seconds histogram\n\
                    # UNIT b_seconds seconds\nb_seconds_sum 2.0\n# TYPE c gauge\nc{x=\"# y\"} 3\n# EOF\n";
        assert_eq!(
            plain(open),
            "# HELP a_total Ones.\n# TYPE a_total counter\na_total 1\n# HELP b_seconds Twos.\n\
             # TYPE b_seconds histogram\nb_seconds_sum 2.0\n# TYPE c gauge\nc{x=\"# y\"} 3\n"
        );
    }
}

#[cfg(test)]
mod requests_tests {
    use super::*;

    #[test]
    fn a_request_is_under_way_until_it_is_dropped_and_no_client_makes_up_a_label() {
        let requests = InFlightRequests::default();
        let all =
            [("GET", "/exec/a/b/c"), ("GET", "/metrics"), ("GET", "/metrics/cadvisor"), ("POST", "/exec")];
        let held = all.map(|(verb, path)| requests.start(verb, path));
        assert_eq!(requests.now("GET", "/metrics"), 2);
        assert_eq!(requests.now("GET", "/exec/x"), 1);
        assert_eq!(requests.now("POST", "/exec/x"), 1);
        drop(held);
        assert_eq!(requests.now("GET", "/metrics"), 0);
        let _odd =
            [("BREW", "/pot"), ("brew", "/Exec"), ("BREW", "/exec2")].map(|(v, p)| requests.start(v, p));
        assert_eq!(requests.now("BREW", "/"), 3);
        assert_eq!(requests.now("X", "/y"), 3, "all unknown ones share one series");
    }
}
