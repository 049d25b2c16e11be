use crate::admin::readiness::ReadinessCondition;
use crate::admin::status::{DisconnectedStatus, PublisherStatus, ReportedError, Totals};
use crate::command::format;

use super::*;

fn sample_status() -> StatusResponse {
    let link = LinkStatus {
        name: "edge7".into(),
        state: "linked".into(),
        link: Some(3),
        address: Some("10.0.0.5:40312".into()),
        instance: Some("00000001".into()),
        version: Some("0.1.0".into()),
        dialect: Some("extended".into()),
        websocket: None,
        since: Some(1_000_000.0),
        rtt_seconds: Some(0.0123),
        sessions: 4,
        sent_bytes: 1_258_291,
        received_bytes: 7,
        error: Some(ReportedError { time: Some(999_940.0), text: "nothing was\u{1b}[2J received".into() }),
        problems: None,
    };
    StatusResponse {
        role: "server".into(),
        version: "0.1.0".into(),
        instance: "3f2a1b9c".into(),
        host: "host1".into(),
        name: Some("eu-1".into()),
        node: None,
        started_at: 900_000.0,
        now: 1_011_520.0,
        ready: true,
        conditions: vec![condition("dns", "the disk is full")],
        room: Some(12),
        totals: Totals { sessions: 4, sessions_relayed: 2, bytes_to_target: 5, bytes_to_client: 3 << 30 },
        links: vec![link.clone()],
        disconnected: vec![DisconnectedStatus {
            name: "edge9".into(),
            time: 1_011_500.0,
            state: "down".into(),
            error: link.error.clone(),
            joined_at: None,
            last_seen: None,
        }],
        drops: Vec::new(),
        peers: vec![LinkStatus {
            name: "10.0.0.7:9000".into(),
            state: "not_linked".into(),
            since: None,
            problems: Some("invitations: \x1b[2Jcannot be read".into()),
            ..link
        }],
        publisher: Some(PublisherStatus {
            store: "hosts".into(),
            records: 1,
            failures: 2,
            error: Some("the disk is full".into()),
        }),
        refusals: [("tls".into(), 1), ("token".into(), 3)].into(),
        certificates: [("server.links.cert".into(), 2_000_000)].into(),
        sessions: Vec::new(),
    }
}

fn condition(name: &str, message: &str) -> ReadinessCondition {
    ReadinessCondition { name: name.into(), status: "degraded".into(), message: Some(message.into()) }
}

#[test]
fn a_servers_status_is_printed_in_columns_without_control_characters() {
    let text = text(&sample_status());
    let expected = "\
server eu-1 3f2a1b9c, version 0.1.0, up 1d6h, ready
4 sessions, 2 relayed; 5 B to targets, 3.0 GiB from targets
room for 12 more edges
! dns: the disk is full
! server 10.0.0.7:9000: invitations:  [2Jcannot be read
published: 1 records (hosts), 2 failures; failing: the disk is full
refusals in the last hour: 3 token, 1 tls

NODE   STATE   LINKED  RTT    SESSIONS  SENT     RECEIVED  VERSION  DIALECT   ADDRESS         LAST ERROR
edge7  linked  3h12m   12 ms  4         1.2 MiB  7 B       0.1.0    extended  10.0.0.5:40312  nothing was [2J received (3h13m ago)

NOT LINKED HERE  AGO  LAST ERROR
edge9            20s  nothing was [2J received

PEER           STATE       LINKED  RTT    SESSIONS  SENT     RECEIVED  VERSION  DIALECT   ADDRESS         LAST ERROR
10.0.0.7:9000  not_linked  -       12 ms  4         1.2 MiB  7 B       0.1.0    extended  10.0.0.5:40312  nothing was [2J received (3h13m ago)";
    assert_eq!(text, expected, "\n{text}");
}

#[test]
fn the_status_text_of_an_edge_without_a_link_says_why() {
    // Of each server in its list, so that no reason is cut off.
    let reason = format!("{}; the cloud refused our token", "nothing listens there".repeat(20));
    let edge = StatusResponse {
        role: "edge".into(),
        name: None,
        node: Some("edge7".into()),
        ready: false,
        room: None,
        conditions: vec![condition("link", &reason)],
        links: Vec::new(),
        disconnected: Vec::new(),
        peers: Vec::new(),
        publisher: None,
        ..sample_status()
    };
    let text = text(&edge);
    assert!(text.starts_with("edge of edge7 3f2a1b9c, version 0.1.0, up 1d6h, not ready\n"), "{text}");
    assert!(
        text.contains(&format!("\n! link: {reason}\n")) && text.ends_with("see the reason above"),
        "{text}"
    );
}

#[test]
fn durations_and_sizes_are_printed_with_fitting_units() {
    for (seconds, text) in [(-1.0, "0s"), (59.9, "59s"), (61.0, "1m1s"), (3600.0, "1h0m"), (90_000.0, "1d1h")]
    {
        assert_eq!(format::duration(seconds), text);
    }
    for (count, text) in [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (u64::MAX, "16777216.0 TiB")] {
        assert_eq!(format::bytes(count), text);
    }
    assert_eq!(
        (format::round_trip(0.000_123), format::round_trip(0.25)),
        ("0.12 ms".into(), "250 ms".into())
    );
}

#[test]
fn nodes_are_counted_by_the_version_of_their_edges() {
    let version = |at| ["0.3.0", "0.2.1", "0.3.0", ""][at];
    let nodes: Vec<_> = (0..4)
        .map(|at| {
            let mut node = serde_json::json!({ "name": format!("n{at}"), "server": "s1", "since": 0.0 });
            if !version(at).is_empty() {
                node["version"] = version(at).into();
            }
            node
        })
        .collect();
    let all = serde_json::json!({ "now": 9.0, "servers": [], "nodes": nodes });
    let mut all: NodesResponse = serde_json::from_value(all).unwrap();
    let text = nodes_text(&all, true, false);
    assert!(text.ends_with("\n2 of version 0.3.0, 1 of 0.2.1, 1 of unknown"), "{text}");
    assert!(!nodes_text(&all, false, false).contains(" of "), "the table in `tunnel status` has no counts");
    all.nodes.clear();
    assert!(!nodes_text(&all, true, false).contains(" of "));
    let down = serde_json::json!([
        { "name": "a", "time": 4.0, "state": "down" },
        { "name": "b", "time": 0.0, "state": "absent" },
        { "name": "c", "time": 3.0, "state": "absent", "joined_at": 1, "last_seen": 2 },
    ]);
    all.down = serde_json::from_value(down).unwrap();
    let text = nodes_text(&all, true, false);
    assert!(text.ends_with("\n! nodes that are down: 3; tunnel nodes --down lists them"), "{text}");
    let seen = "NODE  JOINED  LAST SEEN    REASON\na     -       5s ago       -\nb     -       over 9s ago  -\nc     8s ago  7s ago       -";
    assert_eq!(down_text(&all), seen);
}
