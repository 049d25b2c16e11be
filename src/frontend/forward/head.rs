//! What of a request's and an answer's head belongs to one connection only and is not passed on, RFC 9110 7.6.1.
//! What a request tells this process about its way is not passed on either.

use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, Entry, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION,
    TE, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode, Uri, Version, request, response};
use http_body::Body;

use crate::frontend::Denial;

/// Checks that a request can be read in one way only, and gives it the Host that it is for: the one of its URI, if that
/// is a whole URL.
///
/// # Errors
///
/// [`Denial::Request`] says what is wrong with it.
pub(super) fn check(head: &mut request::Parts) -> Result<(), Denial> {
    if head.method == Method::CONNECT {
        return Err(Denial::Request("this port does not serve CONNECT"));
    }
    one_coding(&head.headers).map_err(Denial::Request)?;
    let mut hosts = head.headers.get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(_), Some(_)) => return Err(Denial::Request("there are two Host headers")),
        (Some(host), None) => Some(authority(host)?),
        (None, _) => None,
    };
    match (head.uri.scheme(), head.uri.authority(), host) {
        (Some(_), Some(of_uri), _) => {
            let bare = of_uri.as_str().rsplit('@').next().unwrap_or_default();
            let bare = HeaderValue::try_from(bare).map_err(|_| Denial::Request(BAD_HOST))?;
            head.headers.insert(HOST, bare);
        }
        (None, Some(_), _) => return Err(Denial::Request("its target is neither a path nor a whole URL")),
        (_, None, None) if head.version == Version::HTTP_11 => {
            return Err(Denial::Request("there is no Host header"));
        }
        _ => {}
    }
    Ok(())
}

/// Makes of a head that was checked the one for the target. True if it asks for another protocol.
pub(super) fn pass_request(head: &mut request::Parts, body: &impl Body) -> bool {
    let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    head.uri = Uri::from(path);
    let upgrades = head.version == Version::HTTP_11
        && head.headers.contains_key(UPGRADE)
        && tokens(&head.headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
        // A body would have to be read to its end before what follows is of the other protocol: the server may as well
        // not change it.
        && body.is_end_stream();
    let trailers = tokens(&head.headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"));
    let host = head.headers.get(HOST).cloned().unwrap_or_else(|| HeaderValue::from_static(""));
    head.version = Version::HTTP_11;
    let kept = Kept { upgrade: upgrades, trailers };
    kept.leave(&mut head.headers);
    for name in [PROXY_AUTHORIZATION, TUNNEL_HOST, TUNNEL_DEST] {
        head.headers.remove(name);
    }
    if let Entry::Vacant(vacant) = head.headers.entry(HOST) {
        vacant.insert(host);
    }
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

/// Makes of a target's head the one for the client that asked with `method`.
///
/// # Errors
///
/// What makes it unfit to be passed on.
pub(super) fn pass_answer(
    head: &mut response::Parts,
    body: &impl Body,
    method: &Method,
) -> Result<(), &'static str> {
    one_coding(&head.headers)?;
    let chunked = head.headers.contains_key(TRANSFER_ENCODING);
    let other_protocol =
        matches!(head.status, StatusCode::SWITCHING_PROTOCOLS | StatusCode::UPGRADE_REQUIRED);
    head.version = Version::HTTP_11;
    let kept = Kept { upgrade: other_protocol, trailers: false };
    kept.leave(&mut head.headers);
    match body.size_hint().exact() {
        _ if chunked => drop(head.headers.remove(CONTENT_LENGTH)),
        // The length is that of the body that GET would get.
        _ if method == Method::HEAD => {}
        Some(length) if head.headers.contains_key(CONTENT_LENGTH) => {
            head.headers.insert(CONTENT_LENGTH, length.into());
        }
        _ => {}
    }
    Ok(())
}

/// Whether a client waits for a 100 before it sends its body.
pub(super) fn expects_continue(headers: &HeaderMap) -> bool {
    headers.get(EXPECT).is_some_and(|what| what.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// What of a connection's own headers is passed on.
struct Kept {
    upgrade: bool,
    trailers: bool,
}

impl Kept {
    fn leave(&self, headers: &mut HeaderMap) {
        let named: Vec<_> = tokens(headers, &CONNECTION)
            .filter_map(|token| HeaderName::from_bytes(token.as_bytes()).ok())
            .filter(|name| name != UPGRADE && !is_framing(name))
            .collect();
        let own = [CONNECTION, KEEP_ALIVE, PROXY_CONNECTION, TE, TRANSFER_ENCODING];
        for name in own.iter().chain(&named) {
            headers.remove(name);
        }
        if self.upgrade {
            headers.append(CONNECTION, HeaderValue::from_static("Upgrade"));
        } else {
            headers.remove(UPGRADE);
        }
        if self.trailers {
            headers.append(CONNECTION, HeaderValue::from_static("TE"));
            headers.insert(TE, HeaderValue::from_static("trailers"));
        }
    }
}

/// Whether a header decides where a message ends, or for which host it is; no `Connection` takes that away.
fn is_framing(name: &HeaderName) -> bool {
    matches!(*name, CONTENT_LENGTH | HOST)
}

/// That a body is coded in no way but `chunked`, which ends here: what else it were coded with would be lost.
fn one_coding(headers: &HeaderMap) -> Result<(), &'static str> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err("its Transfer-Encoding is not just `chunked`"),
    }
}

fn authority(host: &HeaderValue) -> Result<(), Denial> {
    // An empty one is what a client sends whose URL has none.
    if host.is_empty() {
        return Ok(());
    }
    match Authority::try_from(host.as_bytes()) {
        Ok(authority) if !authority.as_str().contains('@') => Ok(()),
        _ => Err(Denial::Request(BAD_HOST)),
    }
}

/// The elements of a header that is a list.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// Names the node that a request is for, before its Host does.
pub(in crate::frontend) const TUNNEL_HOST: HeaderName = HeaderName::from_static("x-tunnel-proxy-host");

/// Names what that node is to dial, in the place of Host.
pub(in crate::frontend) const TUNNEL_DEST: HeaderName = HeaderName::from_static("x-tunnel-proxy-dest");

const BAD_HOST: &str = "its Host is no host and port";

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
