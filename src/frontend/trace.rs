//! The trace of a request: by it the operator finds the request's lines, and a client's own tracing finds them, too.

use http::{HeaderMap, HeaderName};

/// The client's own trace, or else a new one: its `Traceid` if that is short and printable, else the trace id of its
/// `traceparent` (W3C Trace Context) if that is well formed. It appears in logs and answers only.
pub(super) fn of(head: &HeaderMap) -> String {
    let given = text(head, TRACE.as_str()).filter(|given| (1..=MOST_BYTES).contains(&given.len()));
    match given.filter(|given| given.bytes().all(|b| b.is_ascii_graphic())) {
        Some(given) => given.to_owned(),
        None => text(head, PARENT).and_then(trace_id).map_or_else(new, str::to_owned),
    }
}

fn text<'a>(head: &'a HeaderMap, name: &str) -> Option<&'a str> {
    head.get(name)?.to_str().ok()
}

/// A new trace: 8 hex digits tell apart what one log holds.
pub(super) fn new() -> String {
    format!("{:08x}", rand::random::<u32>())
}

/// The trace id in a `traceparent`: version, trace id, parent id and flags, of which none is all zeros but the first and
/// the last. A later version may have more behind them.
fn trace_id(parent: &str) -> Option<&str> {
    let mut parts = parent.splitn(5, '-');
    let mut part = |digits: usize| {
        let part = parts.next()?;
        let hex = part.len() == digits && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        hex.then_some(part)
    };
    let (version, id, parent, _flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
    let whole = version != "ff" && (version != "00" || parts.next().is_none());
    let named = [id, parent].iter().all(|part| part.bytes().any(|b| b != b'0'));
    (whole && named).then_some(id)
}

/// The header in which SuperEdge passes its trace, both ways.
pub(super) const TRACE: HeaderName = HeaderName::from_static("traceid");

const PARENT: &str = "traceparent";

/// Longest trace in bytes that is taken from a client.
const MOST_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn made(trace: &str) -> bool {
        trace.len() == 8 && trace.bytes().all(|b| b.is_ascii_hexdigit())
    }

    #[test]
    fn a_clients_trace_is_kept_only_if_it_is_short_and_printable() {
        let with = |value: &[u8]| {
            let value = http::HeaderValue::from_bytes(value).unwrap();
            of(&HeaderMap::from_iter([(TRACE, value)]))
        };
        assert_eq!(with(b"3f2a-x"), "3f2a-x");
        for bad in [&b""[..], b"a b", b"\xff", &[b'a'; 65]] {
            assert!(made(&with(bad)), "{bad:?}");
        }
        assert_ne!(of(&HeaderMap::new()), of(&HeaderMap::new()));
    }

    #[test]
    fn the_id_of_a_well_formed_trace_context_is_the_trace() {
        const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        let with = |value: &str| {
            let value = http::HeaderValue::from_bytes(value.as_bytes()).unwrap();
            of(&HeaderMap::from_iter([(http::HeaderName::from_static(PARENT), value)]))
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
            assert!(made(&with(&bad)), "{bad}");
        }
        let both = [("traceid", "mine"), (PARENT, &format!("00-{ID}-00f067aa0ba902b7-01"))];
        let both = both.map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
        assert_eq!(of(&HeaderMap::from_iter(both)), "mine");
    }
}
