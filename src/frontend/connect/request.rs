//! What a client asks for: its request's head, judged.

use http::header::{CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, Method};

use crate::frontend::serve::{OpenRequest, new_trace};
use crate::frontend::{Denial, TRACE};
use crate::names::{NameError, Target};

/// What a head asks for.
///
/// # Errors
///
/// If it is no CONNECT to a target.
pub(super) fn parse(head: Parts) -> Result<OpenRequest, Denial> {
    if head.method != Method::CONNECT {
        return Err(Denial::Method);
    }
    if has_body(&head.headers) {
        return Err(Denial::Body);
    }
    Ok(OpenRequest { node: None, target: target(&head)?, credentials: head.headers })
}

/// The target of the request line; never the Host header, which names the proxy, or nothing true, or is not there.
fn target(head: &Parts) -> Result<Target, NameError> {
    let asked = head.uri.to_string();
    let plain = head.uri.scheme().is_none() && head.uri.path_and_query().is_none();
    match head.uri.authority() {
        Some(authority) if plain => authority.as_str().parse(),
        // A whole URL is no target; its text holds no port where one is looked for, or a path behind it.
        _ => Err(NameError::Port(asked.chars().take(EXCERPT).collect())),
    }
}

/// Whether a head says that a body follows. What comes behind a CONNECT is the session's, so that cannot be meant well.
fn has_body(head: &HeaderMap) -> bool {
    let long = |length: &HeaderValue| length.as_bytes() != b"0";
    head.contains_key(TRANSFER_ENCODING) || head.get_all(CONTENT_LENGTH).iter().any(long)
}

/// The client's own trace if it is fit to be repeated, else a new one. It stands in logs and answers, nowhere else.
pub(super) fn trace(head: &HeaderMap) -> String {
    let given = head.get(TRACE).and_then(|t| t.to_str().ok()).filter(|t| t.len() <= TRACE_BYTES);
    match given {
        Some(given) if !given.is_empty() && given.bytes().all(|b| b.is_ascii_graphic()) => given.to_owned(),
        _ => new_trace(),
    }
}

/// Longest trace that is taken from a client, in bytes: a UUID and some room.
const TRACE_BYTES: usize = 64;

/// Characters of a bad target that its error repeats.
const EXCERPT: usize = 64;
