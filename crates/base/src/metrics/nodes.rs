//! The metrics of single nodes. They are a separate scrape, because their series grow with the nodes.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::metrics::format::ExpositionFormat;
use tunnel_proto::frame::ListedNode;

/// A node that is linked to this server, or that it has lost.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeMetrics {
    /// Name of the node.
    pub node: String,
    /// When the node last sent anything, since 1970; `None` if this server has not seen it.
    pub last_seen: Option<Duration>,
    /// Its links; `None` if it has none.
    pub links: Option<ListedNode>,
}

/// Labels of a metric with their values.
type Labels<const N: usize = 1> = [(&'static str, String); N];

type Seconds = Family<Labels, Gauge<f64, AtomicU64>>;

/// Returns the metrics of these nodes as text.
pub fn encode_nodes(nodes: Vec<NodeMetrics>, form: ExpositionFormat) -> String {
    let up = Family::<Labels, Gauge>::default();
    let sessions = Family::<Labels, Gauge>::default();
    let last_seen = Seconds::default();
    let round_trip = Seconds::default();
    let bytes = Family::<Labels<2>, Counter>::default();
    let versions = Family::<Labels<2>, Gauge>::default();
    for NodeMetrics { node, last_seen: seen, links } in nodes {
        let labels = [("node", node.clone())];
        up.get_or_create(&labels).set(links.is_some().into());
        if let Some(seen) = seen {
            last_seen.get_or_create(&labels).set(seen.as_secs_f64());
        }
        // Without a link the other values are unknown, and zeros would look measured.
        let Some(links) = links else { continue };
        if let Some(count) = links.sessions {
            sessions.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        if let Some(time) = links.round_trip {
            round_trip.get_or_create(&labels).set(time.as_secs_f64());
        }
        for (direction, total) in ["to_node", "from_node"].into_iter().zip(links.bytes.into_iter().flatten())
        {
            let labels = [("node", node.clone()), ("direction", direction.to_owned())];
            bytes.get_or_create(&labels).inc_by(total);
        }
        if let Some(version) = links.version {
            versions.get_or_create(&[("node", node), ("version", version.into())]).set(1);
        }
    }
    let mut all = Registry::default();
    let help = "Whether the node is linked to this server; 0 if it was lost within a day, or has joined and not come, and no peer has it";
    all.register("tunnel_node_up", help, up);
    let help = "Time when the node last sent anything, since 1970";
    all.register_with_unit("tunnel_node_last_seen_timestamp", help, Unit::Seconds, last_seen);
    let help = "Latest time from a ping to its answer";
    all.register_with_unit("tunnel_node_rtt", help, Unit::Seconds, round_trip);
    all.register("tunnel_node_sessions", "Number of current sessions, including relayed ones", sessions);
    let help = "Number of bytes on the node's links since it was linked, by direction";
    all.register_with_unit("tunnel_node", help, Unit::Bytes, bytes);
    all.register("tunnel_node_info", "Version of the node's program; always 1", versions);
    form.text(&all)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a node with all figures.
    pub(crate) fn linked() -> NodeMetrics {
        let links = ListedNode {
            node: "shop-1".parse().unwrap(),
            age: Duration::ZERO,
            address: None,
            round_trip: Some(Duration::from_millis(20)),
            sessions: Some(3),
            version: Some("1.2 \"x\"".into()),
            bytes: Some([10, 7]),
            websocket: None,
        };
        NodeMetrics {
            node: "shop-1".into(),
            last_seen: Some(Duration::from_millis(1500)),
            links: Some(links),
        }
    }

    #[test]
    fn each_node_has_its_series_and_a_lost_one_only_two() {
        let here = linked();
        let lost =
            NodeMetrics { node: "shop-2".into(), last_seen: Some(Duration::from_secs(7)), links: None };
        let absent = NodeMetrics { node: "shop-3".into(), last_seen: None, links: None };
        let text = encode_nodes(vec![here, lost, absent], ExpositionFormat::Plain);
        let mut series: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        series.sort_unstable();
        let expected = [
            r#"tunnel_node_bytes_total{node="shop-1",direction="from_node"} 7"#,
            r#"tunnel_node_bytes_total{node="shop-1",direction="to_node"} 10"#,
            r#"tunnel_node_info{node="shop-1",version="1.2 \"x\""} 1"#,
            r#"tunnel_node_last_seen_timestamp_seconds{node="shop-1"} 1.5"#,
            r#"tunnel_node_last_seen_timestamp_seconds{node="shop-2"} 7.0"#,
            r#"tunnel_node_rtt_seconds{node="shop-1"} 0.02"#,
            r#"tunnel_node_sessions{node="shop-1"} 3"#,
            r#"tunnel_node_up{node="shop-1"} 1"#,
            r#"tunnel_node_up{node="shop-2"} 0"#,
            r#"tunnel_node_up{node="shop-3"} 0"#,
        ];
        assert_eq!(series, expected);
        assert!(encode_nodes(Vec::new(), ExpositionFormat::Open).ends_with("# EOF\n"));
    }
}
