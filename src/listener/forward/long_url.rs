//! URLs that are longer than the HTTP library can represent: only their start passes through it, and their end is put
//! back into the request for the target.

use std::io;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use crate::listener::admission::heads::LONG_HEAD_BYTES;
use tunnel_net::socket::CHUNK;

/// Reads the request line, which starts with `begin`. Returns all bytes read, without the end of a URL that is too
/// long, and that end.
///
/// Any other head is returned unchanged, for the library to parse or to refuse.
pub(crate) async fn shorten<S: AsyncRead + Unpin>(
    socket: &mut S,
    begin: Bytes,
) -> io::Result<(Bytes, Option<Bytes>)> {
    let mut head = BytesMut::from(begin);
    let Some(start) = head.iter().position(|byte| *byte == b' ').map(|space| space + 1) else {
        return Ok((head.freeze(), None));
    };
    let mut end = start;
    loop {
        let rest = head.get(end..).unwrap_or_default();
        match rest.iter().position(u8::is_ascii_whitespace) {
            Some(length) => {
                end += length;
                break;
            }
            None => end = head.len(),
        }
        if head.len() >= LONG_HEAD_BYTES || socket.read_buf(&mut head).await? == 0 {
            return Ok((head.freeze(), None));
        }
    }
    // The library checks only the start. It would also drop a fragment, with which the end would be in the wrong place.
    let is_plain = |byte: &u8| byte.is_ascii_graphic() && *byte != b'#';
    let cut = start + KEPT_URL_BYTES;
    if end <= cut
        || cut + VERSION.len() > CHUNK
        || !head.get(start..end).is_some_and(|url| url.iter().all(is_plain))
    {
        return Ok((head.freeze(), None));
    }
    let rest = head.split_off(end);
    let url_end = head.split_off(cut).freeze();
    head.unsplit(rest);
    Ok((head.freeze(), Some(url_end)))
}

/// Returns a request with the end of its URL, given the first [`CHUNK`] bytes of it.
pub(crate) fn extended(head: &[u8], url_end: &[u8]) -> Bytes {
    let url = head.windows(VERSION.len()).position(|bytes| bytes == VERSION).unwrap_or(head.len());
    let (start, rest) = head.split_at(url);
    [start, url_end, rest].concat().into()
}

/// Bytes of a URL that pass through the library, which accepts 65,534. They fit with a method into one [`CHUNK`].
const KEPT_URL_BYTES: usize = 60_000;

/// The end of a request line after the URL, in which no blank can be.
const VERSION: &[u8] = b" HTTP/1.1\r\n";

#[cfg(test)]
mod tests {
    use super::*;

    async fn shortened(begin: &str, rest: &str) -> (String, Option<usize>) {
        let (head, end) =
            shorten(&mut rest.as_bytes(), Bytes::copy_from_slice(begin.as_bytes())).await.unwrap();
        (String::from_utf8(head.to_vec()).unwrap(), end.map(|end| end.len()))
    }

    #[tokio::test]
    async fn the_end_of_a_long_url_is_cut_and_restored() {
        let (url, fields) = (format!("/?{}", "y".repeat(72_000)), " HTTP/1.1\r\nHost: node1\r\n\r\n");
        let whole = format!("GET {url}{fields}");
        for cut in [10, 65_536, 72_006, whole.len()] {
            let (begin, rest) = whole.split_at(cut);
            let (head, end) = shorten(&mut rest.as_bytes(), begin.to_owned().into()).await.unwrap();
            let end = end.unwrap();
            assert_eq!((head.len() + end.len(), head.starts_with(b"GET /?y")), (whole.len(), true), "{cut}");
            assert!(head.ends_with(fields.as_bytes()), "{cut}");
            assert_eq!(extended(&head, &end), whole, "{cut}");
        }
    }

    #[tokio::test]
    async fn a_head_without_a_long_url_is_unchanged() {
        let long = "y".repeat(70_000);
        for (begin, rest) in [
            (format!("GET / HTTP/1.1\r\nx: {long}"), ""),
            (format!("GET /?{long}#{long} HTTP/1.1\r\n"), ""),
            (format!("GET /?{long}\u{e9} HTTP/1.1\r\n"), ""),
            (format!("GET /?{long}"), "yyy"),
            (long.clone(), "yyy"),
        ] {
            let (head, end) = shortened(&begin, rest).await;
            assert!(end.is_none() && head.starts_with(&begin), "{}", &begin[..20]);
        }
        let endless = format!("GET /{}", "y".repeat(LONG_HEAD_BYTES));
        assert_eq!(shortened(&endless, "yyy HTTP/1.1\r\n").await, (endless, None));
    }
}
