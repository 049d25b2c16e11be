//! The trace ID of a request, which operators and a client's own tracing use to find the request's log lines.

use http::{HeaderMap, HeaderName};

/// Returns the client's trace ID, or a new one if it sent none.
///
/// A short, printable `Traceid` takes precedence over the trace ID of a well-formed `traceparent` (W3C Trace Context).
/// The trace ID appears only in logs and responses.
pub(super) fn trace_of(head: &HeaderMap) -> String {
    let given = text(head, TRACE.as_str()).filter(|given| (1..=MAX_BYTES).contains(&given.len()));
    match given.filter(|given| given.bytes().all(|b| b.is_ascii_graphic())) {
        Some(given) => given.to_owned(),
        None => text(head, TRACEPARENT).and_then(trace_id).map_or_else(new_trace, str::to_owned),
    }
}

pub(super) fn text<'a>(head: &'a HeaderMap, name: &str) -> Option<&'a str> {
    head.get(name)?.to_str().ok()
}

/// Returns a new trace ID. 8 hex digits are enough to distinguish the requests in one log.
pub(super) fn new_trace() -> String {
    format!("{:08x}", rand::random::<u32>())
}

/// Returns the trace ID of a `traceparent`, or `None` if it is malformed.
///
/// Its fields are version, trace ID, parent ID and flags; the two IDs must not be all zeros. Later versions may append
/// fields.
fn trace_id(parent: &str) -> Option<&str> {
    let mut parts = parent.splitn(5, '-');
    let mut part = |digits: usize| {
        let part = parts.next()?;
        let hex = part.len() == digits && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        hex.then_some(part)
    };
    let version = part(2)?;
    let id = part(32)?;
    let parent = part(16)?;
    let _flags = part(2)?;
    let whole = version != "ff" && (version != "00" || parts.next().is_none());
    let named = [id, parent].iter().all(|part| part.bytes().any(|b| b != b'0'));
    (whole && named).then_some(id)
}

/// Header in which SuperEdge passes its trace ID, in requests and responses.
pub(crate) const TRACE: HeaderName = HeaderName::from_static("traceid");

const TRACEPARENT: &str = "traceparent";

/// Maximum length in bytes of a trace ID that is accepted from a client.
const MAX_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn is_generated(trace: &str) -> bool {
        trace.len() == 8 && trace.bytes().all(|b| b.is_ascii_hexdigit())
    }

    #[test]
    fn a_clients_trace_is_kept_only_if_it_is_short_and_printable() {
        let with = |value: &[u8]| {
            let value = http::HeaderValue::from_bytes(value).unwrap();
            trace_of(&HeaderMap::from_iter([(TRACE, value)]))
        };
        assert_eq!(with(b"3f2a-x"), "3f2a-x");
        for bad in [&b""[..], b"a b", b"\xff", &[b'a'; 65]] {
            assert!(is_generated(&with(bad)), "{bad:?}");
        }
        assert_ne!(trace_of(&HeaderMap::new()), trace_of(&HeaderMap::new()));
    }

    #[test]
    fn a_valid_traceparent_provides_the_trace_id() {
        const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        let with = |value: &str| {
            let value = http::HeaderValue::from_bytes(value.as_bytes()).unwrap();
            trace_of(&HeaderMap::from_iter([(http::HeaderName::from_static(TRACEPARENT), value)]))
        };
        for good in
            [format!("00-{ID}-00f067aa0ba902b7-01"), format!("cc-{ID}-00f067aa0ba902b7-01-what-comes")]
        {
            assert_eq!(with(&good), ID, "{good}");
        }
        for bad in [
            String::new(),
            ID.to_owned(),
            format!("00-{ID}-00f067aa0ba902b7"),
            format!("00-{ID}-00f067aa0ba902b7-01-more"),
            format!("ff-{ID}-00f067aa0ba902b7-01"),
            format!("00-{ID}-0000000000000000-01"),
            format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            format!("00-{}-00f067aa0ba902b7-01", ID.to_uppercase()),
            format!("00-{}-00f067aa0ba902b7-01", "é".repeat(16)),
            format!("00-{ID}x-00f067aa0ba902b7-01"),
        ] {
            assert!(is_generated(&with(&bad)), "{bad}");
        }
        let both = [("traceid", "mine"), (TRACEPARENT, &format!("00-{ID}-00f067aa0ba902b7-01"))];
        let both = both.map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
        assert_eq!(trace_of(&HeaderMap::from_iter(both)), "mine");
    }
}
