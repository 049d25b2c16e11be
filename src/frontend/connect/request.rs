//! Turns the head of a CONNECT into an open request.

use http::header::{CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, Method};

use crate::frontend::Denial;
use crate::frontend::serve::OpenRequest;
use crate::names::{NameError, Target};

/// The open request that a head holds.
///
/// # Errors
///
/// The head is not a CONNECT to a target.
pub(super) fn parse(head: Parts) -> Result<OpenRequest, Denial> {
    if head.method != Method::CONNECT {
        return Err(Denial::Method);
    }
    if has_body(&head.headers) {
        return Err(Denial::Body);
    }
    Ok(OpenRequest { node: None, target: target(&head)?, credentials: head.headers })
}

/// The target of the request line. The Host header is ignored: it may be absent, wrong, or name the proxy.
fn target(head: &Parts) -> Result<Target, NameError> {
    let asked = head.uri.to_string();
    let plain = head.uri.scheme().is_none() && head.uri.path_and_query().is_none();
    match head.uri.authority() {
        Some(authority) if plain => authority.as_str().parse(),
        // A whole URL is not a target: its text has no port at its end.
        _ => Err(NameError::Port(asked.chars().take(EXCERPT).collect())),
    }
}

/// Whether a head announces a body. Bytes behind a CONNECT belong to the session, so this is refused.
fn has_body(head: &HeaderMap) -> bool {
    let long = |length: &HeaderValue| length.as_bytes() != b"0";
    head.contains_key(TRANSFER_ENCODING) || head.get_all(CONTENT_LENGTH).iter().any(long)
}

/// Characters of a bad target that the error shows.
const EXCERPT: usize = 64;
