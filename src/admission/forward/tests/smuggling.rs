//! Requests that two parsers could interpret differently: each results in 400 or in exactly one well-formed request.

use super::*;

/// Returns the only request that the target receives, or the client's response.
async fn sent(text: &str) -> Result<String, String> {
    let mut site = Site::new();
    site.send(text).await;
    let mut target = site.target_or_answer().await?;
    let mut request = target.head().await;
    let length = request.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    let body = match length {
        Some(length) => target.take(length.parse().unwrap()).await,
        None if request.contains("chunked") => target.take("0\r\n\r\n".len()).await,
        None => String::new(),
    };
    request.push_str(&body);
    assert!(target.receives_nothing().await && site.requested_no_session(), "more than {request:?}");
    Ok(request)
}

async fn refused(request: &str) {
    let response = sent(request).await.expect_err(request);
    assert!(response.starts_with("HTTP/1.1 400 "), "{request:?}: {response}");
}

async fn passed(request: &str, as_this: &str) {
    let arrived = sent(request).await.expect(request);
    assert_eq!(arrived.to_lowercase(), as_this.to_lowercase(), "{request:?}");
}

#[tokio::test]
async fn ambiguous_content_lengths_are_refused_or_normalised() {
    // RFC 9112, section 6.3: the transfer coding takes precedence, and the length is not forwarded.
    passed(
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    )
    .await;
    passed(
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    )
    .await;
    refused("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd").await;
    refused("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\nabc").await;
    refused("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc").await;
    refused("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x3\r\n\r\nabc").await;
    refused("POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\nabc").await;
    passed(
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    )
    .await;
}

#[tokio::test]
async fn invalid_transfer_codings_are_refused() {
    for coding in
        ["gzip, chunked", "chunked, identity", "identity", "xchunked", "chunked, chunked", "\u{b}chunked"]
    {
        refused(&format!("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: {coding}\r\n\r\n0\r\n\r\n")).await;
    }
    let twice = "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity";
    refused(&format!("POST / HTTP/1.1\r\nHost: a\r\n{twice}\r\n\r\n0\r\n\r\n")).await;
    refused("POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n").await;
    refused("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n").await;
}

#[tokio::test]
async fn invalid_chunks_abort_the_request() {
    for chunks in
        ["x\r\n", "-1\r\na\r\n", "1\na\r\n0\r\n\r\n", "1\r\nab\r\n", "10000000000000000\r\n", "0x1\r\na\r\n"]
    {
        let mut site = Site::new();
        site.send(&format!("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}")).await;
        let mut target = site.target().await;
        let head = site.head().await;
        assert!(head.starts_with("HTTP/1.1 400 "), "{chunks:?}: {head}");
        let (arrived, finished) = target.rest().await;
        assert!(!finished && !arrived.ends_with("0\r\n\r\n"), "{chunks:?}: {arrived:?}");
    }
}

#[tokio::test]
async fn invalid_header_lines_are_refused_or_normalised() {
    refused("GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n folded\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: a\r\n\tX: b\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\n Host: a\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: a\r\nX: b\rc\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: a\r\nX: b\0c\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: a\r\nNo colon\r\n\r\n").await;
    refused("GET  / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    refused("GET / HTTP/1.1 \r\nHost: a\r\n\r\n").await;
    // Few other parsers accept lines that end with LF alone, so they are forwarded with CR LF.
    passed("GET / HTTP/1.1\nHost: a\nX: b\n\n", "GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n\r\n").await;
    passed("\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
}

#[tokio::test]
async fn ambiguous_hosts_are_refused_or_normalised() {
    passed("GET http://b:81/x?y HTTP/1.1\r\nHost: a\r\n\r\n", "GET /x?y HTTP/1.1\r\nHost: b:81\r\n\r\n")
        .await;
    passed("GET http://me:pw@b HTTP/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/1.1\r\nHost: b\r\n\r\n").await;
    passed("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: a b\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: a/b\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: a, b\r\n\r\n").await;
    refused("GET / HTTP/1.1\r\nHost: me@a\r\n\r\n").await;
    refused("GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    refused("CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n").await;
}

#[tokio::test]
async fn an_upgrade_with_a_body_is_an_ordinary_request() {
    passed(
        "POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\nContent-Length: 3\r\n\r\nabcGET /x HTTP/1.1\r\nHost: a\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    )
    .await;
}
