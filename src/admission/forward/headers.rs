//! Headers that belong to one connection only (RFC 9110, section 7.6.1) are not forwarded, nor are a request's
//! headers for routing by this process.

use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, StatusCode, Uri, Version, request, response};
use http_body::Body;

use crate::admission::denial::Denial;

/// Checks that a request is unambiguous, and sets its Host header to the host of an absolute URI.
///
/// # Errors
///
/// Returns [`Denial::Request`] with the reason.
pub(crate) fn check(head: &mut request::Parts) -> Result<(), Denial> {
    if head.method == Method::CONNECT {
        return Err(Denial::Request("this port does not serve CONNECT"));
    }
    // What curl sends to a proxy for a WebSocket without TLS: a request with an upgrade.
    if head.uri.scheme_str() == Some("ws") {
        let mut parts = std::mem::take(&mut head.uri).into_parts();
        parts.scheme = Some(Scheme::HTTP);
        head.uri = Uri::from_parts(parts).map_err(|_| Denial::Request(BAD_HOST))?;
    }
    if head.uri.scheme().is_some_and(|scheme| *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS) {
        return Err(Denial::Request("only http:// and https:// URLs are accepted"));
    }
    check_codings(&head.headers).map_err(Denial::Request)?;
    let mut hosts = head.headers.get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(_), Some(_)) => return Err(Denial::Request("more than one Host header")),
        (Some(host), None) => Some(check_authority(host)?),
        (None, _) => None,
    };
    match (head.uri.scheme(), head.uri.authority(), host) {
        (Some(_), Some(of_uri), _) => {
            let bare = of_uri.as_str().rsplit('@').next().unwrap_or_default();
            let bare = HeaderValue::try_from(bare).map_err(|_| Denial::Request(BAD_HOST))?;
            head.headers.insert(HOST, bare);
        }
        (None, Some(_), _) => return Err(Denial::Request("its target is neither a path nor a full URL")),
        (_, None, None) if head.version == Version::HTTP_11 => {
            return Err(Denial::Request("no Host header"));
        }
        _ => {}
    }
    Ok(())
}

/// Converts a checked head for the target. Returns true if it requests a switch to another protocol.
pub(crate) fn prepare_request(head: &mut request::Parts, body: &impl Body) -> bool {
    let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    head.uri = Uri::from(path);
    let upgrades = head.version == Version::HTTP_11
        && head.headers.contains_key(UPGRADE)
        && tokens(&head.headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
        // With a body, the other protocol would start only after the body's end. A server may ignore the upgrade, so
        // such an upgrade is not forwarded.
        && body.is_end_stream();
    let trailers = tokens(&head.headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"));
    head.version = Version::HTTP_11;
    remove_hop_by_hop(&mut head.headers, upgrades, trailers);
    remove_tunnel_headers(&mut head.headers);
    // A request in HTTP/1.0 may have none.
    head.headers.entry(HOST).or_insert(HeaderValue::from_static(""));
    match body.size_hint().exact() {
        Some(0) => {}
        Some(length) => drop(head.headers.insert(CONTENT_LENGTH, length.into())),
        None => {
            head.headers.remove(CONTENT_LENGTH);
            head.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
    }
    upgrades
}

/// Removes the headers of a request, or of its trailers, that are for this process.
fn remove_tunnel_headers(headers: &mut HeaderMap) {
    for name in [PROXY_AUTHORIZATION, TUNNEL_HOST, TUNNEL_DEST] {
        headers.remove(name);
    }
}

/// Converts the trailers of a request.
pub(crate) fn prepare_trailers(trailers: &mut HeaderMap) {
    remove_hop_by_hop(trailers, false, false);
    remove_tunnel_headers(trailers);
}

/// Converts the head of a target's response for the client; `method` is that of its request.
///
/// # Errors
///
/// Returns [`Denial::UpstreamFailed`] with the reason.
pub(crate) fn prepare_response(
    head: &mut response::Parts,
    body: &impl Body,
    method: &Method,
) -> Result<(), Denial> {
    check_codings(&head.headers).map_err(|why| Denial::UpstreamFailed(why.to_owned()))?;
    let chunked = head.headers.contains_key(TRANSFER_ENCODING);
    let other_protocol =
        matches!(head.status, StatusCode::SWITCHING_PROTOCOLS | StatusCode::UPGRADE_REQUIRED);
    head.version = Version::HTTP_11;
    remove_hop_by_hop(&mut head.headers, other_protocol, false);
    match body.size_hint().exact() {
        _ if chunked => drop(head.headers.remove(CONTENT_LENGTH)),
        // The length is that of the body in a response to GET.
        _ if method == Method::HEAD => {}
        Some(length) if head.headers.contains_key(CONTENT_LENGTH) => {
            head.headers.insert(CONTENT_LENGTH, length.into());
        }
        _ => {}
    }
    Ok(())
}

/// Returns an interim response (1xx) of a target, as sent to the client.
pub(crate) fn add_interim(status: StatusCode, headers: &HeaderMap) -> Vec<u8> {
    let mut headers = headers.clone();
    remove_hop_by_hop(&mut headers, false, false);
    // It has no body, and a naive recipient would wait for one (RFC 9110, 8.6).
    headers.remove(CONTENT_LENGTH);
    let phrase = status.canonical_reason().unwrap_or_default();
    let mut text = format!("HTTP/1.1 {} {phrase}\r\n", status.as_str()).into_bytes();
    for (name, value) in &headers {
        text.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    text.extend_from_slice(b"\r\n");
    text
}

/// Returns true if a client waits for a 100 before it sends its body.
pub(crate) fn expects_continue(headers: &HeaderMap) -> bool {
    headers.get(EXPECT).is_some_and(|what| what.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Removes the headers that belong to one connection, except those for an upgrade or for trailers if these are kept.
fn remove_hop_by_hop(headers: &mut HeaderMap, upgrade: bool, trailers: bool) {
    // `Connection` cannot remove headers that determine a message's end or host.
    let named: Vec<_> = tokens(headers, &CONNECTION)
        .filter_map(|token| HeaderName::from_bytes(token.as_bytes()).ok())
        .filter(|name| ![UPGRADE, CONTENT_LENGTH, HOST].contains(name))
        .collect();
    let own = [CONNECTION, KEEP_ALIVE, PROXY_CONNECTION, TE, TRANSFER_ENCODING];
    for name in own.iter().chain(&named) {
        headers.remove(name);
    }
    if upgrade {
        headers.append(CONNECTION, HeaderValue::from_static("Upgrade"));
    } else {
        headers.remove(UPGRADE);
    }
    if trailers {
        headers.append(CONNECTION, HeaderValue::from_static("TE"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

/// Checks that a body has no transfer coding except `chunked`, because other codings would be lost here.
fn check_codings(headers: &HeaderMap) -> Result<(), &'static str> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err("unsupported Transfer-Encoding, expected only `chunked`"),
    }
}

fn check_authority(host: &HeaderValue) -> Result<(), Denial> {
    // Clients send an empty Host header if their URL has no host.
    if host.is_empty() {
        return Ok(());
    }
    match Authority::try_from(host.as_bytes()) {
        Ok(authority) if !authority.as_str().contains('@') => Ok(()),
        _ => Err(Denial::Request(BAD_HOST)),
    }
}

/// Returns the elements of a list header.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// Header that names a request's node and takes precedence over Host.
pub(crate) const TUNNEL_HOST: HeaderName = HeaderName::from_static("x-tunnel-proxy-host");

/// Header that names the target at the node and replaces Host.
pub(crate) const TUNNEL_DEST: HeaderName = HeaderName::from_static("x-tunnel-proxy-dest");

const BAD_HOST: &str = "Host is not a valid host and port";

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
