use http::Request;
use http::request::Parts;

use crate::admission::connect::parse;

fn head(method: &str, uri: &str) -> Parts {
    Request::builder().method(method).uri(uri).body(()).unwrap().into_parts().0
}

#[test]
fn the_connect_target_is_from_the_request_line() {
    let mut head = head("CONNECT", "Node1.:22");
    head.headers.insert("host", "elsewhere:80".parse().unwrap());
    assert_eq!(parse(head).unwrap().target.to_string(), "node1:22");
    assert_eq!(parse(self::head("CONNECT", "[fd00::1]:22")).unwrap().target.to_string(), "[fd00::1]:22");
}

#[test]
fn a_request_that_is_no_connect_to_a_port_is_denied() {
    for (method, uri, status) in [
        ("GET", "http://node1:22/", 405),
        ("CONNECT", "node1", 400),
        ("CONNECT", "node1:0", 400),
        ("CONNECT", "/", 400),
        ("CONNECT", "http://node1:22/", 400),
        ("CONNECT", "me@node1:22", 400),
    ] {
        assert_eq!(parse(head(method, uri)).unwrap_err().status(), status, "{method} {uri}");
    }
}

#[test]
fn a_connect_with_a_body_is_denied() {
    for (name, value, status) in [
        ("content-length", "5", Some(400)),
        ("content-length", "-1", Some(400)),
        ("content-length", "0", None),
        ("transfer-encoding", "chunked", Some(400)),
        ("transfer-encoding", "identity", Some(400)),
    ] {
        let mut head = head("CONNECT", "node1:22");
        head.headers.append(name, value.parse().unwrap());
        assert_eq!(parse(head).err().map(|denial| denial.status().as_u16()), status, "{name}: {value}");
    }
}
