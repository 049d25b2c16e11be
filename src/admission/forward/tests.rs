mod site;
mod smuggling;

use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::admission::forward::tests::site::{Site, Target};
use crate::admission::heads::HEAD_BYTES;
use crate::session_io::tests::WINDOWS;
use tunnel_net::limiter::Source;
use tunnel_proto::frame::{ErrorCode, SessionError};

use super::*;

const GET: &str = "GET /a?b=c HTTP/1.1\r\nHost: node1\r\n\r\n";
const EMPTY: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

/// Returns a client that has sent a request, and the target that has received it.
async fn forwarded(request: &str) -> (Site, Target, String) {
    let mut site = Site::new();
    site.send(request).await;
    let mut target = site.target().await;
    let head = target.head().await;
    (site, target, head)
}

#[tokio::test]
async fn a_request_and_its_response_are_forwarded_unchanged() {
    let (mut site, mut target, head) = forwarded(
        "PUT /a?b=%20c HTTP/1.1\r\nHost: Node1:80\r\nX-Odd-CASE: 1\r\nX-Twice: a\r\nX-Twice: b\r\n\
         Authorization: Bearer x\r\nContent-Length: 5\r\n\r\nhello",
    )
    .await;
    assert_eq!(
        head,
        "PUT /a?b=%20c HTTP/1.1\r\nHost: Node1:80\r\nX-Odd-CASE: 1\r\nX-Twice: a\r\nX-Twice: b\r\n\
         Authorization: Bearer x\r\nContent-Length: 5\r\n\r\n"
    );
    target.expect("hello").await;
    let answer = "HTTP/1.1 299 Quite Fine\r\nX-Odd-CASE: 2\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\
                  Content-Length: 3\r\n\r\nbye";
    target.send(answer).await;
    site.expect(answer).await;
}

#[tokio::test]
async fn requests_to_one_target_share_a_session() {
    let (mut site, mut target, _) = forwarded(GET).await;
    for _ in 0..3 {
        target.send(EMPTY).await;
        site.expect(EMPTY).await;
        site.send(GET).await;
        target.head().await;
    }
    assert!(site.requested_no_session());
    let other = site.limiter.try_acquire(&Source::of([10, 0, 0, 1].into())).unwrap();
    target.send(EMPTY).await;
    site.expect(EMPTY).await;
    // The client is idle again, so it has taken its permit back.
    other.revoked().cancelled().await;
    let (word, context) = site.disconnect().await;
    assert_eq!(word, "ok");
    assert_eq!(target.rest().await, (String::new(), true), "closed gracefully");
    target.finish().await;
    assert_eq!(Site::ended(&context, "ok").await, 1);
    let bytes = (context.metrics.bytes_to_target.get(), context.metrics.bytes_to_client.get());
    assert_eq!(bytes, (4 * GET.len() as u64, 4 * EMPTY.len() as u64));
}

#[tokio::test]
async fn a_request_to_another_target_gets_another_session() {
    let (mut site, mut first, _) = forwarded(GET).await;
    first.send(EMPTY).await;
    site.expect(EMPTY).await;
    site.send(&GET.replace("node1", "node2")).await;
    let mut second = site.target().await;
    assert!(second.head().await.contains("Host: node2"));
    assert_eq!(first.rest().await, (String::new(), true), "the reused session is closed");
    second.send(EMPTY).await;
    site.expect(EMPTY).await;
}

#[tokio::test]
async fn pipelined_requests_are_forwarded_one_at_a_time() {
    let (mut site, mut target, _) = forwarded(&GET.repeat(3)).await;
    for last in [false, false, true] {
        assert!(target.receives_nothing().await, "one request at a time");
        target.send(EMPTY).await;
        site.expect(EMPTY).await;
        if !last {
            target.head().await;
        }
    }
    assert!(site.requested_no_session());
}

#[tokio::test]
async fn a_session_finished_by_the_target_is_closed_and_not_reused() {
    let (mut site, mut target, _) = forwarded(GET).await;
    target.send(EMPTY).await;
    site.expect(EMPTY).await;
    target.finish().await;
    assert_eq!(Site::ended(&site.context, "ok").await, 1);
    site.send(GET).await;
    let mut again = site.target().await;
    again.head().await;
    again.send(EMPTY).await;
    site.expect(EMPTY).await;
}

/// The end of the target's stream and the next request cross, a little later each time.
#[tokio::test]
async fn a_request_is_repeated_only_if_the_target_has_not_received_it() {
    const POST: &str = "POST / HTTP/1.1\r\nHost: node1\r\nContent-Length: 4\r\n\r\nbody";
    for request in [GET, POST, ECHO] {
        let mut repeated = 0;
        for yields in 0..30 {
            let (mut site, mut target, _) = forwarded(GET).await;
            target.send(EMPTY).await;
            site.expect(EMPTY).await;
            target.finish().await;
            for _ in 0..yields {
                tokio::task::yield_now().await;
            }
            site.send(request).await;
            match site.target_or_answer().await {
                Ok(mut again) => {
                    repeated += 1;
                    again.head().await;
                    assert_eq!(target.rest().await, (String::new(), true), "{request}");
                    // Not a third time.
                    again.finish().await;
                    assert!(site.head().await.starts_with("HTTP/1.1 502 "), "{request}");
                }
                Err(head) => {
                    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
                    assert!(target.head().await.starts_with(&request[..4]), "{request}");
                }
            }
            assert!(site.requested_no_session());
        }
        assert!(repeated > 0, "{request}");
    }
}

#[tokio::test]
async fn a_request_that_the_target_may_have_received_is_not_repeated() {
    const POST: &str = "POST / HTTP/1.1\r\nHost: node1\r\nContent-Length: 0\r\n\r\n";
    const PUT: &str = "PUT / HTTP/1.1\r\nHost: node1\r\nContent-Length: 4\r\n\r\nbody";
    for (request, answer) in [(GET, ""), (POST, ""), (PUT, ""), (ECHO, ""), (GET, "HTTP/1.1 2")] {
        let (mut site, mut target, _) = forwarded(GET).await;
        target.send(EMPTY).await;
        site.expect(EMPTY).await;
        site.send(request).await;
        target.head().await;
        target.send(answer).await;
        target.finish().await;
        let head = site.head().await;
        assert!(
            head.starts_with("HTTP/1.1 502 invalid response from the target: it closed the connection\r\n"),
            "{head}"
        );
        assert_eq!(head.to_lowercase().contains("connection: close"), request == PUT, "{head}");
        assert!(site.requested_no_session());
    }
    let (mut site, mut target, _) = forwarded(GET).await;
    target.finish().await;
    assert!(site.head().await.starts_with("HTTP/1.1 502 "), "the session was new");
    assert!(site.requested_no_session());
}

#[tokio::test]
async fn a_response_that_is_not_http_is_a_502_and_upstream_invalid() {
    let (mut site, mut target, _) = forwarded(GET).await;
    target.send("SSH-2.0-OpenSSH_9.2\r\n").await;
    assert!(site.head().await.starts_with("HTTP/1.1 502 invalid response from the target: invalid HTTP"));
    assert!(!target.rest().await.1, "it is aborted");
    assert_eq!(Site::ended(&site.context, "upstream_invalid").await, 1);
}

#[tokio::test]
async fn a_session_reset_is_a_502_with_its_reason() {
    let (mut site, target, _) = forwarded(GET).await;
    let why = SessionError::new(ErrorCode::ConnectionFailed, "the target's connection failed: reset");
    target.session.break_off(why);
    let head = site.head().await;
    assert!(head.starts_with(
        "HTTP/1.1 502 invalid response from the target: the target's connection failed: reset\r\n"
    ));
    assert_eq!(Site::ended(&site.context, "target_io_error").await, 1);
}

#[tokio::test]
async fn a_denied_request_keeps_the_connection_open() {
    let mut site = Site::new();
    site.send("GET / HTTP/1.1\r\nHost: no\r\nTraceid: 1a2b\r\n\r\n").await;
    let head = site.head().await;
    assert!(head.starts_with("HTTP/1.1 403 not you\r\n") && head.contains("traceid: 1a2b\r\n"), "{head}");
    assert!(!head.contains("connection: close"), "{head}");
    site.expect("not you\ntrace: 1a2b\n").await;
    assert!(site.requested_no_session());
    site.send(GET).await;
    site.target().await.head().await;
}

#[tokio::test]
async fn a_denied_request_with_an_unread_body_closes_the_connection() {
    let mut site = Site::new();
    site.send("POST / HTTP/1.1\r\nHost: no\r\nContent-Length: 9\r\n\r\n").await;
    let head = site.head().await;
    assert!(head.starts_with("HTTP/1.1 403 ") && head.contains("connection: close"), "{head}");
    assert_eq!(site.outcome().await, "ok");
}

#[tokio::test]
async fn hop_by_hop_headers_are_not_forwarded() {
    let (mut site, mut target, head) = forwarded(
        "GET / HTTP/1.1\r\nHost: node1\r\nConnection: keep-alive, X-Mine, host\r\nKeep-Alive: timeout=5\r\nX-Mine: 1\r\n\
         Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic eDp5\r\nTE: gzip;q=0.5, trailers\r\n\
         Upgrade: h2c\r\nX-Other: 2\r\n\r\n",
    )
    .await;
    assert_eq!(head, "GET / HTTP/1.1\r\nHost: node1\r\nX-Other: 2\r\nTE: trailers\r\nConnection: TE\r\n\r\n");
    target
        .send(
            "HTTP/1.1 200 OK\r\nConnection: close, X-Its\r\nKeep-Alive: timeout=5\r\nX-Its: 1\r\nUpgrade: h2c\r\n\
             Content-Length: 2\r\nX-Other: 2\r\n\r\nok",
        )
        .await;
    site.expect("HTTP/1.1 200 OK\r\nX-Other: 2\r\nContent-Length: 2\r\n\r\nok").await;
    site.send(GET).await;
    site.target().await.head().await;
}

#[tokio::test]
async fn bodies_are_streamed_in_both_directions_at_once() {
    let (mut site, mut target, head) =
        forwarded("POST / HTTP/1.1\r\nHost: node1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n").await;
    assert!(head.contains("Transfer-Encoding: chunked"), "{head}");
    target.expect("3\r\none\r\n").await;
    target.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    assert!(site.head().await.contains("Transfer-Encoding: chunked"));
    site.expect("5\r\nfirst\r\n").await;
    site.send("3\r\ntwo\r\n0\r\n\r\n").await;
    target.expect("3\r\ntwo\r\n0\r\n\r\n").await;
    target.send("4\r\nlast\r\n0\r\n\r\n").await;
    site.expect("4\r\nlast\r\n0\r\n\r\n").await;
    site.send(GET).await;
    target.head().await;
}

#[tokio::test]
async fn a_chunked_body_of_a_get_is_forwarded() {
    let (_site, mut target, head) =
        forwarded("GET / HTTP/1.1\r\nHost: node1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n0\r\n\r\n")
            .await;
    assert!(head.to_lowercase().contains("transfer-encoding: chunked"), "{head}");
    target.expect("3\r\none\r\n0\r\n\r\n").await;
}

#[tokio::test]
async fn trailers_are_forwarded_in_both_directions() {
    let (mut site, mut target, head) = forwarded(
        "POST / HTTP/1.1\r\nHost: node1\r\nTE: trailers\r\nConnection: TE\r\nTrailer: X-Sum\r\n\
         Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n0\r\nX-Sum: 3\r\n\r\n",
    )
    .await;
    assert!(head.contains("Trailer: X-Sum\r\n") && head.contains("TE: trailers\r\n"), "{head}");
    target.expect("3\r\none\r\n0\r\nx-sum: 3\r\n\r\n").await;
    target.send("HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 2\r\n\r\n").await;
    assert!(site.head().await.to_lowercase().contains("trailer: x-sum"));
    site.expect("2\r\nok\r\n0\r\nx-sum: 2\r\n\r\n").await;
}

#[tokio::test]
async fn a_response_to_head_has_a_length_and_no_body() {
    let (mut site, mut target, _) = forwarded("HEAD / HTTP/1.1\r\nHost: node1\r\n\r\n").await;
    target.send("HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n").await;
    site.expect("HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n").await;
    site.send(GET).await;
    target.head().await;
}

#[tokio::test]
async fn a_response_to_http_1_0_ends_with_the_connection() {
    let (mut site, mut target, head) = forwarded("GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").await;
    assert_eq!(head.to_lowercase(), "get /old http/1.1\r\nhost:\r\n\r\n");
    target.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n").await;
    assert!(site.head().await.starts_with("HTTP/1.0 200 OK\r\n"));
    assert_eq!(site.rest().await, "ok");
    assert_eq!(site.outcome().await, "ok");
}

#[tokio::test]
async fn a_response_from_http_1_0_ends_with_the_session() {
    let (mut site, mut target, _) = forwarded(GET).await;
    target.send("HTTP/1.0 200 OK\r\n\r\nall of it").await;
    target.finish().await;
    assert!(site.head().await.starts_with("HTTP/1.1 200 OK\r\n"));
    site.expect("9\r\nall of it\r\n0\r\n\r\n").await;
    site.send(GET).await;
    site.target().await.head().await;
}

#[tokio::test]
async fn a_truncated_response_does_not_look_complete() {
    let (mut site, mut target, _) = forwarded(GET).await;
    target.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    site.head().await;
    site.expect("5\r\nfirst\r\n").await;
    target.finish().await;
    assert_eq!(site.rest().await, "");
    assert_eq!(site.outcome().await, "upstream_truncated");
}

/// At first it is unknown whether the client has disconnected or only closed its write half.
#[tokio::test(start_paused = true)]
async fn a_client_that_disconnects_aborts_its_request() {
    for request in [GET, "PUT / HTTP/1.1\r\nHost: node1\r\nContent-Length: 9\r\n\r\npart"] {
        let (site, mut target, _) = forwarded(request).await;
        let context = site.disconnect().await.1;
        assert!(!target.rest().await.1, "aborted, not finished: {request}");
        assert_eq!(Site::ended(&context, "client_io_error").await, 1);
    }
}

#[tokio::test]
async fn an_early_response_is_delivered_even_if_the_target_disconnects() {
    let request = "PUT / HTTP/1.1\r\nHost: node1\r\nContent-Length: 900\r\n\r\npart";
    let (mut site, mut target, _) = forwarded(request).await;
    let answer = "HTTP/1.1 413 Too Long\r\nContent-Length: 2\r\n\r\nno";
    target.send(answer).await;
    target.finish().await;
    let why = SessionError::new(ErrorCode::Cancelled, "gone");
    target.session.break_off(why);
    site.send("more").await;
    let head = site.head().await;
    assert!(head.starts_with("HTTP/1.1 413 Too Long\r\n") && head.contains("connection: close"), "{head}");
    site.expect("no").await;
}

const ECHO: &str = "GET /exec HTTP/1.1\r\nHost: node1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";

#[tokio::test]
async fn an_upgrade_passes_every_byte_in_both_directions() {
    let (mut site, mut target, head) = forwarded(&format!("{ECHO}early")).await;
    assert_eq!(head, ECHO);
    target
        .send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nat once")
        .await;
    site.expect(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nat once",
    )
    .await;
    target.expect("early").await;
    site.send("\r\n\r\n").await;
    target.expect("\r\n\r\n").await;
    site.finish().await;
    assert_eq!(target.rest().await, (String::new(), true), "half-close passes");
    target.send("the answer").await;
    target.finish().await;
    assert_eq!(site.rest().await, "the answer");
    assert_eq!(site.outcome().await, "carried");
    assert_eq!(Site::ended(&site.context, "ok").await, 1);
    assert_eq!(site.context.metrics.bytes_to_target.get(), (ECHO.len() + "early\r\n\r\n".len()) as u64);
}

#[tokio::test]
async fn a_refused_upgrade_is_an_ordinary_response() {
    let (mut site, mut target, _) = forwarded(ECHO).await;
    let refused = "HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno";
    target.send(refused).await;
    site.expect(refused).await;
    site.send(GET).await;
    target.head().await;
}

#[tokio::test]
async fn an_unrequested_101_is_a_502() {
    let (mut site, mut target, _) = forwarded(GET).await;
    target.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n").await;
    assert!(site.head().await.starts_with("HTTP/1.1 502 "));
    assert!(!target.rest().await.1);
    assert_eq!(Site::ended(&site.context, "upstream_invalid").await, 1);
}

const EXPECT: &str = "PUT / HTTP/1.1\r\nHost: node1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n";
const CONTINUE: &str = "HTTP/1.1 100 Continue\r\n\r\n";

#[tokio::test(start_paused = true)]
async fn the_targets_100_continue_is_forwarded_at_once() {
    let started = tokio::time::Instant::now();
    let (mut site, mut target, head) = forwarded(EXPECT).await;
    assert_eq!(head, EXPECT);
    target.send(CONTINUE).await;
    site.expect(CONTINUE).await;
    site.send("body").await;
    target.expect("body").await;
    target.send(EMPTY).await;
    site.expect(EMPTY).await;
    assert!(started.elapsed() < Duration::from_millis(100), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_client_gets_100_continue_after_a_second_if_the_target_is_silent() {
    let (mut site, mut target, _) = forwarded(EXPECT).await;
    let started = tokio::time::Instant::now();
    site.expect(CONTINUE).await;
    assert_eq!(started.elapsed().as_millis() / 10, 100);
    site.send("body").await;
    target.expect("body").await;
}

#[tokio::test(start_paused = true)]
async fn a_client_whose_expectation_is_refused_gets_no_100_continue() {
    let (mut site, mut target, _) = forwarded(EXPECT).await;
    target.send("HTTP/1.1 401 Unauthorized\r\nContent-Length: 6\r\n\r\nwho").await;
    let head = site.head().await;
    assert!(
        head.starts_with("HTTP/1.1 401 Unauthorized\r\n") && head.contains("connection: close"),
        "{head}"
    );
    site.expect("who").await;
    tokio::time::advance(Duration::from_secs(2)).await;
    target.send("are").await;
    site.expect("are").await;
    assert_eq!(site.rest().await, "");
    assert_eq!(target.rest().await.0, "", "no body");
    assert_eq!(Site::ended(&site.context, "ok").await, 1);
}

#[tokio::test(start_paused = true)]
async fn idle_timeout_is_90_seconds_and_head_timeout_is_10() {
    let (mut site, mut target, _) = forwarded(GET).await;
    tokio::time::advance(Duration::from_secs(3600)).await;
    target.send(EMPTY).await;
    site.expect(EMPTY).await;
    tokio::time::advance(Duration::from_secs(89)).await;
    site.send("GET").await;
    let started = tokio::time::Instant::now();
    assert_eq!(site.rest().await, "");
    assert_eq!((started.elapsed().as_secs(), site.outcome().await), (10, "header_timeout"));
    let (mut site, mut target, _) = forwarded(GET).await;
    target.send(EMPTY).await;
    site.expect(EMPTY).await;
    let started = tokio::time::Instant::now();
    assert_eq!((site.rest().await, started.elapsed().as_secs()), (String::new(), 90));
    assert_eq!(site.outcome().await, "ok");
}

#[tokio::test(start_paused = true)]
async fn a_half_closed_client_gets_its_response() {
    const PUT: &str = "PUT / HTTP/1.1\r\nHost: node1\r\nContent-Length: 4\r\n\r\nbody";
    for request in [GET, PUT] {
        let (mut site, mut target, _) = forwarded(request).await;
        site.finish().await;
        for part in ["HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", "not", "gone"] {
            sleep(Duration::from_secs(25)).await;
            target.send(part).await;
        }
        site.expect("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nnotgone").await;
        assert_eq!((site.rest().await, site.outcome().await), (String::new(), "ok"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_half_closed_client_without_a_response_is_closed_after_30_seconds() {
    const PUT: &str = "PUT / HTTP/1.1\r\nHost: node1\r\nContent-Length: 4\r\n\r\nbody";
    for request in [GET, PUT] {
        let (mut site, mut target, _) = forwarded(request).await;
        let started = tokio::time::Instant::now();
        sleep(Duration::from_secs(100)).await;
        site.finish().await;
        assert!(!target.rest().await.1, "aborted, not finished");
        assert_eq!((started.elapsed().as_secs(), site.outcome().await), (130, "reset"));
        assert_eq!(Site::ended(&site.context, "client_io_error").await, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_pauses_within_a_response_is_not_closed() {
    for finishes in [false, true] {
        let (mut site, mut target, _) = forwarded(GET).await;
        if finishes {
            site.finish().await;
        }
        let body = "x".repeat(1 << 20);
        let serving = async {
            target.send(&format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())).await;
        };
        let reading = async {
            sleep(Duration::from_secs(3600)).await;
            site.head().await;
            site.expect(&body).await;
        };
        tokio::join!(serving, reading);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_never_reads_the_last_bytes_is_closed_after_ten_minutes() {
    let (mut site, mut target, _) = forwarded(GET).await;
    let body = "x".repeat(site::CLIENT_BUFFER + 30_000);
    target.send(&format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())).await;
    let started = tokio::time::Instant::now();
    let over = tokio::time::timeout(Duration::from_secs(3600), site.outcome()).await;
    assert_eq!((over, started.elapsed().as_secs()), (Ok("reset"), 600));
}

#[tokio::test(start_paused = true)]
async fn a_stalled_request_body_times_out_ten_minutes_after_the_last_response_bytes() {
    const PUT: &str = "PUT / HTTP/1.1\r\nHost: node1\r\nContent-Length: 9\r\n\r\npart";
    for answers in [0, 3] {
        let (mut site, mut target, _) = forwarded(PUT).await;
        target.expect("part").await;
        let started = tokio::time::Instant::now();
        for part in ["HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", "not", "over"].iter().take(answers) {
            sleep(Duration::from_secs(500)).await;
            target.send(part).await;
            site.expect(part).await;
        }
        let over = tokio::time::timeout(Duration::from_secs(3600), site.outcome()).await;
        let last = 500 * answers as u64;
        assert_eq!((over, started.elapsed().as_secs()), (Ok("reset"), last + 600), "{answers} parts");
    }
}

#[tokio::test(start_paused = true)]
async fn endless_1xx_responses_do_not_extend_the_timeout_of_a_half_closed_client() {
    let (mut site, mut target, _) = forwarded(GET).await;
    site.finish().await;
    let started = tokio::time::Instant::now();
    let over = async {
        let over = site.outcome().await;
        (over, started.elapsed().as_secs())
    };
    let says = async {
        loop {
            target.send("HTTP/1.1 102 Processing\r\n\r\n").await;
            sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::select! {
        over = over => assert_eq!(over, ("reset", 30)),
        () = says => {}
    }
}

#[tokio::test]
async fn a_target_may_send_at_most_a_hundred_informational_responses() {
    let progress = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
    let (mut site, mut target, _) = forwarded(GET).await;
    for _ in 0..2 {
        target.send(&progress.repeat(100)).await;
        target.send(EMPTY).await;
        site.expect(&progress.replace("Link", "link").repeat(100)).await;
        site.expect(EMPTY).await;
        site.send(GET).await;
        target.head().await;
    }
    target.send(&progress.repeat(101)).await;
    let mut response = site.head().await;
    while response.starts_with("HTTP/1.1 103 ") {
        response = site.head().await;
    }
    assert!(
        response.starts_with("HTTP/1.1 502 ") && response.contains("more than 100 informational"),
        "{response}"
    );
    // The next request has a new session.
    site.send(GET).await;
    let mut fresh = site.target().await;
    fresh.head().await;
    fresh.send(EMPTY).await;
    site.finish().await;
    let word = site.outcome().await;
    assert_eq!((word, Site::ended(&site.context, "upstream_invalid").await), ("ok", 1));
}

#[tokio::test]
async fn headers_for_this_process_are_removed_from_trailers() {
    let names = ["X-Tunnel-Proxy-Host", "x-tunnel-proxy-dest", "Proxy-Authorization", "Keep-Alive", "X-Sum"];
    let trailers: String = names.iter().map(|name| format!("{name}: 1\r\n")).collect();
    let (_site, mut target, _) = forwarded(&format!(
        "POST / HTTP/1.1\r\nHost: node1\r\nTrailer: {}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n{trailers}\r\n",
        names.join(", ")
    ))
    .await;
    target.expect("0\r\nx-sum: 1\r\n\r\n").await;
}

#[tokio::test]
async fn only_http_and_https_urls_are_forwarded() {
    for url in ["http://node1/", "HTTPS://node1/", "ws://node1/"] {
        let (mut site, mut target, _) =
            forwarded(&format!("GET {url} HTTP/1.1\r\nHost: node1\r\n\r\n")).await;
        target.send(EMPTY).await;
        site.expect(EMPTY).await;
    }
    for url in ["ftp://node1/", "wss://node1/"] {
        let mut site = Site::new();
        site.send(&format!("GET {url} HTTP/1.1\r\nHost: node1\r\n\r\n")).await;
        let response = site.head().await;
        assert!(
            response.starts_with("HTTP/1.1 400 bad request: only http:// and https:// URLs"),
            "{response}"
        );
    }
}

#[tokio::test]
async fn a_drain_finishes_responses_and_closes_idle_connections() {
    let (mut site, mut target, _) = forwarded(GET).await;
    target.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n").await;
    site.head().await;
    site.context.drain.start();
    target.send("ok").await;
    assert_eq!(site.rest().await, "ok");
    let (mut idle, mut target, _) = forwarded(GET).await;
    target.send(EMPTY).await;
    idle.expect(EMPTY).await;
    idle.context.drain.start();
    assert_eq!(idle.rest().await, "");
    assert_eq!((site.outcome().await, idle.outcome().await), ("ok", "ok"));
}

#[tokio::test]
async fn an_http_2_client_gets_a_400_about_http_1_1() {
    let mut site = Site::new();
    site.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\u{4}\0\0\0\0\0").await;
    assert!(site.rest().await.starts_with("HTTP/1.1 400 only HTTP/1.1 is served here\r\n"));
}

#[tokio::test]
async fn an_endless_head_is_refused_with_431() {
    let mut site = Site::new();
    let begin = "GET / HTTP/1.1\r\nHost: node1\r\nX: ";
    site.send(&format!("{begin}{}", "x".repeat(LONG_HEAD_BYTES - begin.len()))).await;
    assert!(site.head().await.starts_with("HTTP/1.1 431 "));
    assert_eq!(site.outcome().await, "header_too_large");
}

/// More than a few pieces for each of many stalled clients would fill the memory.
#[tokio::test(start_paused = true)]
async fn a_stalled_client_or_target_holds_a_few_pieces_of_a_body() {
    let piece = "x".repeat(16_000);
    let minute = Duration::from_secs(60);
    let (_site, mut target, _) = forwarded(GET).await;
    target.send("HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n").await;
    let mut taken = 0;
    while timeout(minute, target.send(&piece)).await.is_ok() {
        taken += piece.len();
    }
    let queued = taken - site::CLIENT_BUFFER - WINDOWS.max as usize;
    assert!(queued <= 4 * PIECE_BYTES, "{queued} bytes for the client");
    let (mut site, _target, _) =
        forwarded("PUT / HTTP/1.1\r\nHost: node1\r\nContent-Length: 99999999\r\n\r\n").await;
    let mut taken = 0;
    while timeout(minute, site.send(&piece)).await.is_ok() {
        taken += piece.len();
    }
    let queued = taken - site::CLIENT_BUFFER - WINDOWS.start as usize;
    assert!(queued <= CHUNK + 4 * PIECE_BYTES, "{queued} bytes for the target");
}

/// The error of the request's body comes together with the begin of the response.
#[tokio::test]
async fn a_client_gets_the_head_of_a_response_that_is_cut_at_once() {
    let (mut site, mut target, _) =
        forwarded("POST / HTTP/1.1\r\nHost: node1\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    let part = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart";
    target.send(part).await;
    site.send("x\r\n").await;
    assert_eq!(site.rest().await, part);
}

#[tokio::test]
async fn a_long_head_that_comes_with_another_request_needs_a_permit() {
    let long = GET.replace("\r\n\r\n", &format!("\r\nX: {}\r\n\r\n", "y".repeat(40_000)));
    let (mut site, mut target, _) = forwarded(&format!("{GET}{long}")).await;
    target.send(EMPTY).await;
    site.expect(EMPTY).await;
    target.head().await;
    target.send(EMPTY).await;
    assert!(site.head().await.contains("connection: close"), "it is the last one, as any long head");
}

/// hyper stores them until they are complete.
#[tokio::test(start_paused = true)]
async fn long_trailers_need_the_permit_of_a_long_head() {
    let request = "POST / HTTP/1.1\r\nHost: node1\r\nTE: trailers\r\nConnection: TE\r\nTrailer: x-sum\r\n\
                   Transfer-Encoding: chunked\r\n\r\n";
    let response = "HTTP/1.1 200 OK\r\nTrailer: x-sum\r\nTransfer-Encoding: chunked\r\n\r\n";
    let last = format!("0\r\nx-sum: {}", "y".repeat(2 * HEAD_BYTES + 3000));
    let end = "\r\n\r\n";
    for (is_requests, has_permit) in [(true, true), (true, false), (false, true), (false, false)] {
        let (mut site, mut target, _) = forwarded(request).await;
        let limiter = site.context.pending.long_heads.clone();
        let source = Source::of([127, 0, 0, 1].into());
        let _held = if has_permit { None } else { limiter.try_acquire(&source).ok() };
        if is_requests {
            site.send(&last).await;
            if has_permit {
                site.send(end).await;
                assert!(target.take(last.len() + end.len()).await.ends_with(end));
            } else {
                let head = site.head().await;
                assert!(head.starts_with("HTTP/1.1 503 too many requests and responses with long"), "{head}");
            }
        } else {
            site.send(&format!("0{end}")).await;
            target.send(response).await;
            site.expect(response).await;
            target.send(&last).await;
            if has_permit {
                target.send(end).await;
                site.send(GET).await;
                target.head().await;
            } else {
                assert_eq!(site.rest().await, "", "no last chunk");
            }
        }
    }
}

#[tokio::test]
async fn a_head_without_http_or_with_an_endless_body_gets_its_own_400() {
    for (text, why) in [
        ("EHLO a.b\r\n\r\n", "no valid HTTP request; this port speaks only HTTP/1.1"),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551615\r\n\r\nabc\r\n",
            "Content-Length is too large",
        ),
    ] {
        let mut site = Site::new();
        site.send(text).await;
        let head = site.head().await;
        assert!(head.starts_with(&format!("HTTP/1.1 400 bad request: {why}\r\n")), "{head}");
        assert_eq!(site.outcome().await, "header_invalid");
    }
}
