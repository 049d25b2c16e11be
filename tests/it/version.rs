//! Programs with different versions of the protocol refuse each other, and both name the reason.

use http::HeaderValue;
use tonic::Code;
use tunnel_proto::hello::local_headers;
use tunnel_proto::names::Instance;

use crate::support::clients::get;
use crate::support::programs::{TestDir, TestServer, start_edge};
use crate::support::remote::{self, ScriptedServer};
use crate::support::wait_until;

#[tokio::test]
async fn a_server_refuses_an_edge_of_another_version() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let mut headers = remote::headers("node1", Some(Instance::from_bits(1)));
    headers.insert("tunnel-dialect", HeaderValue::from_static("3"));
    let refused = remote::dial(&place, server.server.bound.grpc, headers, "node1").await.err().unwrap();
    let expected = "the remote speaks version \"3\" of the protocol, and this program version 4; update the end \
                    with the lower one";
    assert_eq!((refused.code(), refused.message()), (Code::Unimplemented, expected));
    assert_eq!(server.server.metrics.links_rejected.counted("protocol_version"), 1);
    assert!(server.link("node1").is_none());
}

#[tokio::test]
async fn an_edge_reports_a_server_of_another_version() {
    let place = TestDir::new();
    let mut server = ScriptedServer::start(&place).await;
    let edge = start_edge(&place.edge("node1", server.at, ""));
    let mut headers = local_headers(Instance::from_bits(1));
    headers.insert("tunnel-dialect", HeaderValue::from_static("5"));
    server.call().await.answer_as(headers);
    let failed = || edge.metrics.link_dial_failures.counted("protocol_version") > 0;
    wait_until("the edge has noticed", failed).await;
    let page = get(edge.bound.log.unwrap(), "/readyz").await;
    assert_eq!(page.status, 503);
    assert!(page.body.contains("version \"5\" of the protocol, and this program version 4"), "{}", page.body);
}
