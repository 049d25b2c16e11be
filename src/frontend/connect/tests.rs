use super::super::TRACE;
use super::*;

use http::Request as Http;

use crate::names::{NodeName, Target};

fn head(method: &str, uri: &str) -> Parts {
    Http::builder().method(method).uri(uri).body(()).unwrap().into_parts().0
}

async fn check(gate: &Gate, head: Parts) -> (Result<(NodeName, Target), Denial>, Access) {
    let mut access = Access::begin(FRONT, "test".into());
    let checked = gate.check(&head, "192.0.2.1".parse().unwrap(), &Drain::new(), &mut access).await;
    (checked, access)
}

#[tokio::test]
async fn the_node_and_the_target_come_from_the_request_line() {
    let mut head = head("CONNECT", "Node1.:22");
    head.headers.insert("host", "elsewhere:80".parse().unwrap());
    let (checked, access) = check(&Gate::default(), head).await;
    let (node, target) = checked.unwrap();
    assert_eq!((node.as_str(), target.to_string().as_str()), ("node1", "node1:22"));
    assert_eq!((&access.node, &access.target), (&Some(node), &Some(target)));
}

#[tokio::test]
async fn what_is_no_connect_to_a_nodes_port_is_denied_with_its_cause() {
    for (method, uri, status) in [
        ("GET", "http://node1:22/", 405),
        ("CONNECT", "node1", 400),
        ("CONNECT", "node1:0", 400),
        ("CONNECT", "/", 400),
        ("CONNECT", "http://node1:22/", 400),
        ("CONNECT", "me@node1:22", 400),
        ("CONNECT", "10.0.0.1:22", 421),
        ("CONNECT", "[fd00::1]:22", 421),
    ] {
        let (checked, _) = check(&Gate::default(), head(method, uri)).await;
        assert_eq!(checked.unwrap_err().status(), status, "{method} {uri}");
    }
}

#[tokio::test]
async fn a_connect_with_a_body_is_denied() {
    for (name, value, status) in [
        ("content-length", "5", Some(400)),
        ("content-length", "-1", Some(400)),
        ("content-length", "0", None),
        ("transfer-encoding", "chunked", Some(400)),
        ("transfer-encoding", "identity", Some(400)),
    ] {
        let mut head = head("CONNECT", "node1:22");
        head.headers.append(name, value.parse().unwrap());
        let (checked, _) = check(&Gate::default(), head).await;
        assert_eq!(checked.err().map(|denial| denial.status().as_u16()), status, "{name}: {value}");
    }
}

#[tokio::test]
async fn one_who_may_not_come_in_learns_nothing_else() {
    let gate = Gate { allow_from: Some(crate::policy::Networks::default()), ..Gate::default() };
    for (method, uri) in [("GET", "/"), ("CONNECT", "node1"), ("CONNECT", "node1:22")] {
        let (checked, _) = check(&gate, head(method, uri)).await;
        assert_eq!(checked.unwrap_err().status(), 403);
    }
}

#[tokio::test]
async fn a_pod_that_stops_takes_nobody_in() {
    let drain = Drain::new();
    drain.begin();
    let mut access = Access::begin(FRONT, "test".into());
    let from = "192.0.2.1".parse().unwrap();
    let checked = Gate::default().check(&head("CONNECT", "node1:22"), from, &drain, &mut access).await;
    assert_eq!(checked.unwrap_err().status(), 503);
}

#[test]
fn a_clients_trace_is_kept_only_if_it_is_short_and_printable() {
    let with = |value: &[u8]| {
        let value = http::HeaderValue::from_bytes(value).unwrap();
        trace(&HeaderMap::from_iter([(TRACE, value)]))
    };
    assert_eq!(with(b"3f2a-x"), "3f2a-x");
    for bad in [&b""[..], b"a b", b"\xff", &[b'a'; 65]] {
        let made = with(bad);
        assert!(made.len() == 8 && made.bytes().all(|b| b.is_ascii_hexdigit()), "{made}");
    }
    assert_ne!(trace(&HeaderMap::new()), trace(&HeaderMap::new()));
}
