//! All metrics: names, help texts and labels.

pub mod format;
pub mod in_flight_requests;
pub mod label_values;
pub mod nodes;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeMetric as _;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::metrics::format::ExpositionFormat;
use crate::metrics::in_flight_requests::{InFlightGuard, InFlightRequests};
use crate::metrics::label_values::{
    CONNECTIONS_REJECTED, DIAL_FAILURES, ENDS, FRAMES_DROPPED, LINKS_CLOSED, LINKS_REJECTED, OPEN_SECONDS,
    RTT_SECONDS,
};
use crate::process::ProcessCollector;
use crate::refusal_log::RefusalLog;
use tunnel_proto::frame::ErrorCode;

/// The metrics of this process, created once at startup and passed to every part that counts. Cheap to clone.
///
/// Label values are fixed words (listener, reason, result), never text from a remote, so that no remote can create
/// series. Counters that sessions change often are plain fields.
#[derive(Debug, Clone, educe::Educe)]
#[educe(Default)]
pub struct Metrics {
    /// Number of nodes linked to this server.
    pub nodes: Gauge,
    /// Open links, by kind of remote.
    #[educe(Default = OpenLinksGauge::by("remote"))]
    pub links: OpenLinksGauge,
    /// Open links to programs of SuperEdge, by dialect.
    #[educe(Default = OpenLinksGauge::by("dialect"))]
    pub plain_links: OpenLinksGauge,
    /// Closed links, by reason.
    pub links_closed: ReasonCounter,
    /// Rejected links, by reason.
    pub links_rejected: ReasonCounter,
    /// Failed attempts to dial a link, by reason.
    pub link_dial_failures: ReasonCounter,
    /// Number of times two running processes used the same node name while one of them was linked here.
    pub node_name_conflicts: Counter,
    /// Number of times an edge started to dial its server again.
    pub link_reconnects: Counter,
    /// Backup links next to an unresponsive link, by outcome.
    #[educe(Default = ReasonCounter::by("outcome"))]
    pub backup_links: ReasonCounter,
    /// Number of edges asked to link to a peer with fewer nodes.
    pub edges_rebalanced: Counter,
    /// Round-trip times of pings in seconds, on every link.
    #[educe(Default = Histogram::new(RTT_SECONDS))]
    pub rtt: Histogram,
    /// Number of times reading a plain link paused because a session's queue was full.
    pub read_pauses: Counter,
    /// Sessions of each listener or of the acceptor.
    pub sessions: SessionMetrics,
    /// Seconds from a session's request to its response, successful or not.
    #[educe(Default = Histogram::new(OPEN_SECONDS))]
    pub open_duration: Histogram,
    /// HTTP requests in flight.
    pub requests: InFlightRequests,
    /// Bytes from clients to targets.
    pub bytes_to_target: Counter,
    /// Bytes from targets to clients.
    pub bytes_to_client: Counter,
    /// Sessions reset before their end, by reason.
    pub resets: ReasonCounter,
    /// Sessions whose last bytes were dropped before delivery, by reason.
    pub truncated: ReasonCounter,
    /// Number of times a session with an end here was resumed over another path.
    pub resumed: Counter,
    /// Number of sessions relayed by this server; updated every few seconds.
    pub sessions_relayed: Gauge,
    /// Bytes that sessions hold in memory, by budget; updated every few seconds.
    pub buffers: BudgetGauges,
    /// Dropped frames (wrong link, role or attempt, or unknown), by reason.
    pub frames_dropped: ReasonCounter,
    /// Client connections closed without a session, by reason (header timeout, not HTTP, limit reached, ...).
    pub connections_rejected: ReasonCounter,
    /// Number of records published for DNS.
    pub dns_records: Gauge,
    /// Number of failed attempts to write records.
    pub dns_publish_failures: Counter,
    /// Number of users' devices that soon end unless they are used.
    pub devices_ending: Gauge,
    /// Expiration times of certificates.
    pub certificates: CertificateExpiryMetric,
    /// Limiter for log lines about refusals that are counted here.
    pub refusals: RefusalLog,
    registry: Arc<Registry>,
}

/// One label of a metric, or `N` of them, with their values, which are fixed words.
type MetricLabels<const N: usize = 1> = [(&'static str, &'static str); N];

/// A counter for each reason, and for all of them together; reasons are fixed words.
#[derive(Debug, Clone, educe::Educe)]
#[educe(Default)]
pub struct ReasonCounter {
    #[educe(Default = "reason")]
    label: &'static str,
    each: Family<MetricLabels, Counter>,
    all: Counter,
}

/// Where a party is refused, which decides the metric that counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// The port for links.
    Links,
    /// A port for clients or operators, before a request was read.
    Connections,
    /// The listener of this name, for a request.
    Listener(&'static str),
}

/// Open links, by kind, and of all kinds together.
#[derive(Debug, Clone)]
pub struct OpenLinksGauge {
    label: &'static str,
    each: Family<MetricLabels, Gauge>,
    all: Gauge,
}

/// Bytes used of each budget, and its limit.
#[derive(Debug, Clone, Default)]
pub struct BudgetGauges {
    used: Family<MetricLabels, Gauge>,
    limit: Family<MetricLabels, Gauge>,
}

/// Open sessions, and closed sessions by result, for each listener.
#[derive(Debug, Clone, Default)]
pub struct SessionMetrics {
    now: Family<MetricLabels, Gauge>,
    total: Family<MetricLabels<2>, Counter>,
}

/// A guard that counts one session as open until dropped.
#[derive(Debug)]
pub struct ActiveSessionGuard {
    sessions: SessionMetrics,
    listener: &'static str,
    result: &'static str,
    request: Option<InFlightGuard>,
}

impl Metrics {
    /// Returns the metrics of a server. Its namespace and name become labels of `tunnel_cloud_nodes`, unless they are
    /// empty.
    pub fn server(namespace: &str, pod: &str) -> Self {
        let mut registry = Registry::default();
        let labels = [("kubernetes_namespace", namespace), ("kubernetes_pod_name", pod)];
        let known = labels.into_iter().filter(|(_, value)| !value.is_empty());
        let labels: Vec<_> = known.map(|(name, value)| (name, value.to_owned())).collect();
        let name = "tunnel_cloud_nodes";
        let help = "Number of nodes linked to this server, as SuperEdge names it";
        let nodes = if labels.is_empty() {
            let nodes = Gauge::default();
            registry.register(name, help, nodes.clone());
            nodes
        } else {
            let nodes = Family::<Vec<(&'static str, String)>, Gauge>::default();
            registry.register(name, help, nodes.clone());
            nodes.get_or_create_owned(&labels)
        };
        registry.register("tunnel_nodes_connected", "Number of nodes linked to this server", nodes.clone());
        let metrics = Self::with(registry, nodes, &["edge", "client", "peer"]);
        metrics.links_rejected.expose(&LINKS_REJECTED);
        metrics.sessions.expose("bridge", &[]);
        metrics
    }

    /// Returns the metrics of an edge; [`Self::nodes`] exists but is not exposed.
    pub fn edge() -> Self {
        Self::with(Registry::default(), Gauge::default(), &["server"])
    }

    /// Returns all metrics as text in the given format.
    pub fn encode(&self, form: ExpositionFormat) -> String {
        form.text(&self.registry)
    }

    /// Counts a refusal, and returns true if its line may be logged. All doors of this process refuse by this.
    pub fn refuse(&self, door: Door, reason: &'static str, from: IpAddr) -> bool {
        self.count_refusal(door, reason);
        self.refusals.may_log(reason, from)
    }

    /// Counts a refusal that is too common for a line.
    pub fn count_refusal(&self, door: Door, reason: &'static str) {
        match door {
            Door::Links => self.links_rejected.count(reason),
            Door::Connections => self.connections_rejected.count(reason),
            Door::Listener(listener) => self.sessions.refused(listener, reason),
        }
    }

    /// Exposes the counters with fixed labels before their first event: an alert on an increase does not see the event
    /// with which a series begins.
    fn expose_reasons(&self) {
        self.links_closed.expose(&LINKS_CLOSED);
        self.link_dial_failures.expose(&DIAL_FAILURES);
        self.resets.expose(&ErrorCode::ALL.map(|(_, name)| name));
        self.resets.expose(&["slow_reader"]);
        self.truncated.expose(&["memory", "sessions", "delivery_timeout"]);
        self.frames_dropped.expose(&FRAMES_DROPPED);
        self.connections_rejected.expose(&CONNECTIONS_REJECTED);
        self.backup_links.expose(&["used", "unneeded", "failed"]);
        self.sessions.expose("acceptor", &[]);
    }

    /// Registers all metrics in `all`. Open links to each of the kinds `remotes` are exposed even before the first one.
    fn with(mut all: Registry, nodes: Gauge, remotes: &[&'static str]) -> Self {
        let [bytes_to_target, bytes_to_client] = session_bytes(&mut all);
        let mut metrics = Self { nodes, bytes_to_target, bytes_to_client, ..Self::default() };
        for remote in remotes {
            metrics.links.of(remote);
        }
        metrics.expose_reasons();
        metrics.register(&mut all);
        let build = Family::<MetricLabels<2>, Gauge>::default();
        let revision = ("revision", REVISION.unwrap_or("unknown"));
        build.get_or_create(&[("version", env!("CARGO_PKG_VERSION")), revision]).set(1);
        all.register("tunnel_build_info", "Version and revision of this program; always 1", build);
        all.register_collector(Box::new(ProcessCollector));
        metrics.registry = Arc::new(all);
        metrics
    }

    fn register(&self, to: &mut Registry) {
        to.register("tunnel_links_open", "Number of open links, by kind of remote", self.links.each.clone());
        let help = "Number of open links to programs of SuperEdge, by dialect";
        to.register("tunnel_plain_links_open", help, self.plain_links.each.clone());
        let help = "Total number of links closed, by reason";
        to.register("tunnel_links_closed", help, self.links_closed.each.clone());
        let help = "Total number of links rejected, by reason";
        to.register("tunnel_links_rejected", help, self.links_rejected.each.clone());
        let help = "Total number of failed attempts to dial a link, by reason";
        to.register("tunnel_link_dial_failures", help, self.link_dial_failures.each.clone());
        let help = "Total number of times two running processes used the same node name";
        to.register("tunnel_node_name_conflicts", help, self.node_name_conflicts.clone());
        let help = "Total number of times an edge dialled its server again, successfully or not";
        to.register("tunnel_link_reconnects", help, self.link_reconnects.clone());
        let help = "Total number of backup links dialled next to an unresponsive link: used (it answered first), \
                    unneeded (the old link did), failed";
        to.register("tunnel_backup_links", help, self.backup_links.each.clone());
        let help = "Total number of edges asked to link to a server with fewer nodes";
        to.register("tunnel_edges_rebalanced", help, self.edges_rebalanced.clone());
        let help = "Round-trip time of a link";
        to.register_with_unit("tunnel_link_rtt", help, Unit::Seconds, self.rtt.clone());
        let help = "Total number of times reading a plain link paused for a slow reader";
        to.register("tunnel_link_read_pauses", help, self.read_pauses.clone());
        let help = "Number of open sessions, by listener";
        to.register("tunnel_sessions_open", help, self.sessions.now.clone());
        let help =
            "Total number of sessions closed, by listener and result; includes requests that never opened";
        to.register("tunnel_sessions_closed", help, self.sessions.total.clone());
        let help = "Time from a session's request to its response, successful or not";
        to.register_with_unit(
            "tunnel_session_open_duration",
            help,
            Unit::Seconds,
            self.open_duration.clone(),
        );
        let help = "Number of HTTP requests in flight, by method and kind of path";
        to.register("tunnel_http_requests_in_flight", help, self.requests.0.clone());
        let help = "Total number of sessions reset before their end, by reason";
        to.register("tunnel_sessions_reset", help, self.resets.each.clone());
        let help = "Total number of aborted sessions that were not delivered in full, by reason";
        to.register("tunnel_sessions_truncated", help, self.truncated.each.clone());
        let help = "Total number of times a session was resumed over another path";
        to.register("tunnel_sessions_resumed", help, self.resumed.clone());
        let help = "Number of sessions relayed by this server";
        to.register("tunnel_sessions_relayed", help, self.sessions_relayed.clone());
        let help = "Bytes used of each budget: reserved (promised to remotes), unacknowledged (not yet received by \
                    the remote, or a little more), relayed (on the way to another link), unreserved (sent by plain \
                    remotes, not read yet)";
        to.register_with_unit("tunnel_buffer", help, Unit::Bytes, self.buffers.used.clone());
        let help = "Limit of each budget in bytes; see memory in the config";
        to.register_with_unit("tunnel_buffer_limit", help, Unit::Bytes, self.buffers.limit.clone());
        let help = "Total number of frames dropped, by reason";
        to.register("tunnel_frames_dropped", help, self.frames_dropped.each.clone());
        let help = "Total number of client connections closed without a session, by reason";
        to.register("tunnel_connections_rejected", help, self.connections_rejected.each.clone());
        to.register("tunnel_dns_records", "Number of records published for DNS", self.dns_records.clone());
        let help = "Total number of failed attempts to write records for DNS";
        to.register("tunnel_dns_publish_failures", help, self.dns_publish_failures.clone());
        let help = "Number of devices of users that end within 14 days unless they are used";
        to.register("tunnel_devices_ending", help, self.devices_ending.clone());
        let help = "Expiration time of the certificate that a config key names, since the Unix epoch";
        let name = "tunnel_certificate_expiration_timestamp";
        to.register_with_unit(name, help, Unit::Seconds, self.certificates.0.clone());
    }
}

/// Registers the counter of bytes and returns its series for bytes to targets and to clients. Sessions use them
/// directly, because looking a series up for each copied piece would be slow.
fn session_bytes(to: &mut Registry) -> [Counter; 2] {
    let bytes = Family::<MetricLabels, Counter>::default();
    let help = "Total number of bytes copied between clients and targets, by direction";
    to.register_with_unit("tunnel_session", help, Unit::Bytes, bytes.clone());
    ["to_target", "to_client"].map(|direction| bytes.get_or_create_owned(&[("direction", direction)]))
}

impl ReasonCounter {
    /// Creates a counter for each value of this label.
    fn by(label: &'static str) -> Self {
        Self { label, ..Self::default() }
    }

    /// Exposes the counts for these reasons.
    fn expose(&self, reasons: &[&'static str]) {
        for reason in reasons {
            self.counted(reason);
        }
    }

    /// Increments the count for `reason`.
    pub fn count(&self, reason: &'static str) {
        // An edge has no reasons to reject links.
        debug_assert!(
            self.each.is_empty() || self.each.get(&[(self.label, reason)]).is_some(),
            "{reason} is in no list of reasons, so it is not exposed from the start"
        );
        self.each.get_or_create(&[(self.label, reason)]).inc();
        self.all.inc();
    }

    /// Returns the count of all reasons together.
    pub fn all(&self) -> u64 {
        self.all.get()
    }

    /// Returns the count for `reason`.
    pub fn counted(&self, reason: &'static str) -> u64 {
        self.each.get_or_create(&[(self.label, reason)]).get()
    }
}

impl OpenLinksGauge {
    fn by(label: &'static str) -> Self {
        Self { label, each: Family::default(), all: Gauge::default() }
    }

    /// Counts a link of that kind, a fixed word, as open.
    pub fn opened(&self, kind: &'static str) {
        self.of(kind).inc();
        self.all.inc();
    }

    /// Counts such a link as closed.
    pub fn closed(&self, kind: &'static str) {
        self.of(kind).dec();
        self.all.dec();
    }

    /// Returns the number of open links of all kinds together.
    pub fn all(&self) -> i64 {
        self.all.get()
    }

    fn of(&self, kind: &'static str) -> Gauge {
        self.each.get_or_create_owned(&[(self.label, kind)])
    }
}

impl BudgetGauges {
    /// Sets the used bytes of `budget` (a fixed word), and its limit.
    pub fn set(&self, budget: &'static str, used: usize, limit: usize) {
        for (family, bytes) in [(&self.used, used), (&self.limit, limit)] {
            family.get_or_create(&[("budget", budget)]).set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }
}

impl SessionMetrics {
    /// Exposes the counts of `listener`, which denies requests for these reasons.
    pub fn expose(&self, listener: &'static str, denials: &[&'static str]) {
        self.now(listener);
        let codes = ErrorCode::ALL.map(|(_, name)| name);
        for result in codes.iter().chain(&ENDS).chain(denials) {
            self.closed(listener, result);
        }
    }

    /// Counts a session of `listener` as open until the result is dropped.
    pub fn start(&self, listener: &'static str) -> ActiveSessionGuard {
        self.now.get_or_create(&[("listener", listener)]).inc();
        ActiveSessionGuard { sessions: self.clone(), listener, result: "aborted", request: None }
    }

    /// Counts a session that was refused before it opened.
    pub fn refused(&self, listener: &'static str, result: &'static str) {
        self.total.get_or_create(&[("listener", listener), ("result", result)]).inc();
    }

    /// Returns the number of open sessions of `listener`.
    pub fn now(&self, listener: &'static str) -> i64 {
        self.now.get_or_create(&[("listener", listener)]).get()
    }

    /// Returns the number of closed sessions of `listener` with this result.
    pub fn closed(&self, listener: &'static str, result: &'static str) -> u64 {
        self.total.get_or_create(&[("listener", listener), ("result", result)]).get()
    }
}

impl ActiveSessionGuard {
    /// Keeps the request in flight until the session closes.
    pub fn hold_request(&mut self, request: InFlightGuard) {
        self.request = Some(request);
    }

    /// Records the session's result; a session dropped without one is counted as `aborted`.
    pub fn end(mut self, result: &'static str) {
        self.result = result;
    }
}

impl Drop for ActiveSessionGuard {
    fn drop(&mut self) {
        self.sessions.now.get_or_create(&[("listener", self.listener)]).dec();
        self.sessions.refused(self.listener, self.result);
    }
}

/// Git revision that this program was built from, if the build knew it.
pub const REVISION: Option<&str> = option_env!("TUNNEL_REVISION");

/// The expiration time of each certificate, by the config key of its file.
#[derive(Debug, Clone, Default)]
pub struct CertificateExpiryMetric(
    Family<[(&'static str, String); 1], Gauge>,
    Arc<Mutex<BTreeMap<String, u64>>>,
);

impl CertificateExpiryMetric {
    /// Sets the expiration time in seconds since 1970.
    pub fn set(&self, key: &str, end: u64) {
        self.0.get_or_create(&[("key", key.to_owned())]).set(i64::try_from(end).unwrap_or(i64::MAX));
        self.1.lock().insert(key.to_owned(), end);
    }

    /// Removes the certificates of all other config keys.
    pub fn retain(&self, keys: &BTreeSet<&str>) {
        self.1.lock().retain(|key, _| {
            let is_kept = keys.contains(key.as_str());
            if !is_kept {
                self.0.remove(&[("key", key.clone())]);
            }
            is_kept
        });
    }

    /// Returns the expiration times by config key, in seconds since 1970.
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.1.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::label_values::DENIALS;

    #[test]
    fn the_exposition_has_superedges_gauge_our_metrics_and_an_eof_line() {
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
        metrics.links_closed.count("timed_out");
        metrics.bytes_to_target.inc_by(7);
        metrics.links.opened("edge");
        metrics.open_duration.observe(0.003);
        metrics.buffers.set("unacknowledged", 5, 6);
        let text = metrics.encode(ExpositionFormat::Open);
        for line in [
            gauge(1).trim_end(),
            "tunnel_nodes_connected 1",
            "tunnel_links_open{remote=\"edge\"} 1",
            "tunnel_links_open{remote=\"peer\"} 0",
            "tunnel_links_closed_total{reason=\"timed_out\"} 1",
            "tunnel_session_bytes_total{direction=\"to_target\"} 7",
            "tunnel_session_bytes_total{direction=\"to_client\"} 0",
            "tunnel_buffer_bytes{budget=\"unacknowledged\"} 5",
            "tunnel_buffer_limit_bytes{budget=\"unacknowledged\"} 6",
            "tunnel_session_open_duration_seconds_bucket{le=\"0.01\"} 1",
            "tunnel_session_open_duration_seconds_bucket{le=\"0.0025\"} 0",
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
            buffers,
            certificates,
            requests,
            plain_links,
            links_closed: _,
            links_rejected: _,
            link_dial_failures: _,
            sessions: _,
            resets: _,
            truncated: _,
            frames_dropped: _,
            connections_rejected: _,
            backup_links: _,
            nodes: _,
            links: _,
            node_name_conflicts: _,
            link_reconnects: _,
            edges_rebalanced: _,
            rtt: _,
            read_pauses: _,
            open_duration: _,
            bytes_to_target: _,
            bytes_to_client: _,
            resumed: _,
            sessions_relayed: _,
            dns_records: _,
            dns_publish_failures: _,
            devices_ending: _,
            refusals: _,
            registry: _,
        } = &metrics;
        plain_links.opened("a");
        buffers.set("a", 1, 1);
        certificates.set("a", 1);
        drop(requests.start("GET", "/"));
        metrics
    }

    #[test]
    fn each_fixed_label_is_exposed_before_its_first_event() {
        let metrics = Metrics::server("", "");
        metrics.sessions.expose("connect", &DENIALS);
        let text = metrics.encode(ExpositionFormat::Plain);
        for series in [
            "tunnel_links_closed_total{reason=\"timed_out\"}",
            "tunnel_links_rejected_total{reason=\"token\"}",
            "tunnel_link_dial_failures_total{reason=\"dns\"}",
            "tunnel_backup_links_total{outcome=\"used\"}",
            "tunnel_sessions_truncated_total{reason=\"memory\"}",
            "tunnel_sessions_reset_total{reason=\"slow_reader\"}",
            "tunnel_frames_dropped_total{reason=\"wrong_node\"}",
            "tunnel_connections_rejected_total{reason=\"header_timeout\"}",
            "tunnel_sessions_closed_total{listener=\"acceptor\",result=\"target_refused\"}",
            "tunnel_sessions_closed_total{listener=\"connect\",result=\"forbidden\"}",
            "tunnel_sessions_open{listener=\"connect\"}",
        ] {
            assert!(text.contains(&format!("\n{series} 0\n")), "{series} is not in\n{text}");
        }
    }

    #[tokio::test]
    async fn the_metrics_page_lists_exactly_the_exposed_metrics() {
        let nodes = nodes::encode_nodes(vec![nodes::tests::linked()], ExpositionFormat::Plain);
        let text = all_shown().encode(ExpositionFormat::Plain) + &nodes;
        let shown = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let shown: std::collections::BTreeSet<_> = shown.collect();
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let page = std::fs::read_to_string(root.join("docs/reference/metrics.md")).unwrap();
        let table = page.split("# Metrics").nth(1).unwrap().split("\n# ").next().unwrap();
        let cells = table.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
        let documented = cells.flat_map(|cell| cell.split(", ").map(|name| name.trim_matches('`'))).collect();
        assert_eq!(shown, documented);
    }

    #[test]
    fn a_server_outside_kubernetes_exposes_no_empty_labels() {
        for (namespace, pod, line) in [
            ("", "", "tunnel_cloud_nodes 0"),
            ("ns", "", "tunnel_cloud_nodes{kubernetes_namespace=\"ns\"} 0"),
        ] {
            let text = Metrics::server(namespace, pod).encode(ExpositionFormat::Plain);
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn process_metrics_include_version_start_time_and_file_limit() {
        let text = Metrics::edge().encode(ExpositionFormat::Plain);
        let value = |name: &str| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap_or_else(|| panic!("no {name} in {text}"));
            line.trim().parse::<f64>().unwrap()
        };
        let revision = REVISION.unwrap_or("unknown");
        let build =
            format!("tunnel_build_info{{version=\"{}\",revision=\"{revision}\"}}", env!("CARGO_PKG_VERSION"));
        assert!((value(&build) - 1.0).abs() < f64::EPSILON);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let start = value("process_start_time_seconds");
        assert!(start <= now + 2.0 && start > now - 86_400.0, "{start} and {now}");
        assert!(value("process_max_fds") >= value("process_open_fds"));
    }

    #[test]
    fn an_edge_exposes_no_gauge_of_nodes() {
        let text = Metrics::edge().encode(ExpositionFormat::Open);
        assert!(!text.contains("tunnel_cloud_nodes") && !text.contains("tunnel_nodes_connected"), "{text}");
        assert!(text.contains("tunnel_links_open{remote=\"server\"} 0\n"), "{text}");
    }

    #[test]
    fn a_session_counts_as_open_until_it_ends() {
        let metrics = Metrics::edge();
        let (one, two) = (metrics.sessions.start("connect"), metrics.sessions.start("connect"));
        assert_eq!(metrics.sessions.now("connect"), 2);
        one.end("ok");
        drop(two);
        assert_eq!(metrics.sessions.now("connect"), 0);
        assert_eq!(
            (metrics.sessions.closed("connect", "ok"), metrics.sessions.closed("connect", "aborted")),
            (1, 1)
        );
    }
}
