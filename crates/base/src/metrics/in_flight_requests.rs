//! HTTP requests in flight.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::metrics::MetricLabels;

/// HTTP requests in flight, by method and kind of path, both fixed words.
#[derive(Debug, Clone, Default)]
pub struct InFlightRequests(pub(super) Family<MetricLabels<2>, Gauge>);

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
        let labels = [("method", one_of(&METHODS, method)), ("path", one_of(&PATHS, first(path)))];
        self.0.get_or_create_owned(&labels)
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

pub(super) fn first(path: &str) -> &str {
    path.trim_start_matches('/').split('/').next().unwrap_or_default()
}

fn one_of(words: &[&'static str], word: &str) -> &'static str {
    words.iter().find(|known| **known == word).copied().unwrap_or("other")
}

const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// First segments of a kubelet's paths.
const PATHS: [&str; 6] = ["exec", "attach", "portForward", "containerLogs", "metrics", "stats"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_in_flight_until_dropped_and_unknown_ones_share_a_label() {
        let requests = InFlightRequests::default();
        let all =
            [("GET", "/exec/a/b/c"), ("GET", "/metrics"), ("GET", "/metrics/cadvisor"), ("POST", "/exec")];
        let held = all.map(|(method, path)| requests.start(method, path));
        assert_eq!(requests.now("GET", "/metrics"), 2);
        assert_eq!(requests.now("GET", "/exec/x"), 1);
        assert_eq!(requests.now("POST", "/exec/x"), 1);
        drop(held);
        assert_eq!(requests.now("GET", "/metrics"), 0);
        let _odd =
            [("BREW", "/pot"), ("brew", "/Exec"), ("BREW", "/exec2")].map(|(m, p)| requests.start(m, p));
        assert_eq!(requests.now("BREW", "/"), 3);
        assert_eq!(requests.now("X", "/y"), 3, "all unknown ones share one series");
    }
}
