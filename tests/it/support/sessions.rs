//! Sessions that a test holds directly, without a socket.

use std::future::poll_fn;

use bytes::Bytes;
use tunnel::edge::Edge;
use tunnel::route::SessionRequest;
use tunnel_link::table::handles::Session;
use tunnel_net::ChunkStream as _;
use tunnel_proto::frame::SessionCategory;
use tunnel_proto::names::{NodeName, Target};

use super::{assert_eventually, wait_until};

/// Opens a session for a program on an edge. Returns the error text if it is refused.
pub(crate) async fn open_session(edge: &Edge, node: NodeName, target: Target) -> Result<Session, String> {
    wait_until("the edge has a link", || edge.metrics.links.all() > 0).await;
    let client = "a program on the edge".into();
    let category = SessionCategory::HttpProxy;
    let request = SessionRequest { node, target, category, client, listener: "connect", permit: None };
    edge.route.open(request).await.map_err(|e| e.to_string())
}

/// Sends a text to an echo target and checks that it comes back.
pub(crate) async fn assert_session_echo(session: &mut Session, text: &str) {
    let mut bytes = Bytes::copy_from_slice(text.as_bytes());
    poll_fn(|cx| session.poll_write_chunk(cx, &mut bytes)).await.unwrap();
    let mut back = Vec::new();
    while back.len() < text.len() {
        let more = assert_eventually("the echo", poll_fn(|cx| session.poll_read_chunk(cx))).await.unwrap();
        assert!(!more.is_empty(), "the session ended after {back:?}");
        back.extend_from_slice(&more);
    }
    assert_eq!(back, text.as_bytes());
}
