//! Requests of HTTP that are under way.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::RequestLabels;

/// Requests that are under way, by verb and kind of path, both of them fixed words.
#[derive(Debug, Clone, Default)]
pub struct Requests(pub(super) Family<RequestLabels, Gauge>);

/// Counts one request as under way until dropped.
#[derive(Debug)]
#[must_use = "the request is under way as long as this is there"]
pub struct UnderWay(Gauge);

impl Requests {
    /// Counts a request with this method and path as under way until the result is dropped.
    pub fn begin(&self, method: &str, path: &str) -> UnderWay {
        let gauge = self.gauge(method, path);
        gauge.inc();
        UnderWay(gauge)
    }

    /// Requests of that kind that are under way.
    pub fn now(&self, method: &str, path: &str) -> i64 {
        self.gauge(method, path).get()
    }

    fn gauge(&self, method: &str, path: &str) -> Gauge {
        let labels = RequestLabels { verb: one_of(&VERBS, method), path: one_of(&PATHS, first(path)) };
        self.0.get_or_create_owned(&labels)
    }
}

impl Drop for UnderWay {
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

/// How paths of a kubelet begin.
const PATHS: [&str; 6] = ["exec", "attach", "portForward", "containerLogs", "metrics", "stats"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_under_way_until_it_is_dropped_and_no_client_makes_up_a_label() {
        let requests = Requests::default();
        let all =
            [("GET", "/exec/a/b/c"), ("GET", "/metrics"), ("GET", "/metrics/cadvisor"), ("POST", "/exec")];
        let held = all.map(|(verb, path)| requests.begin(verb, path));
        assert_eq!(requests.now("GET", "/metrics"), 2);
        assert_eq!(requests.now("GET", "/exec/x"), 1);
        assert_eq!(requests.now("POST", "/exec/x"), 1);
        drop(held);
        assert_eq!(requests.now("GET", "/metrics"), 0);
        let _odd =
            [("BREW", "/pot"), ("brew", "/Exec"), ("BREW", "/exec2")].map(|(v, p)| requests.begin(v, p));
        assert_eq!(requests.now("BREW", "/"), 3);
        assert_eq!(requests.now("X", "/y"), 3, "all that is unknown is one");
    }
}
