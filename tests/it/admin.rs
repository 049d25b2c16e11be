//! Pages of the admin ports of a running server and a running edge.

use tokio::io::AsyncWriteExt;

use crate::support::clients::{answer, assert_echo, get, send_request};
use crate::support::programs::{TestDir, TestServer, at, edge, edge_with, start_edge};
use crate::support::{targets, wait_until};

#[tokio::test]
async fn a_servers_pages_show_its_nodes_and_its_sessions() {
    let (place, echo) = (TestDir::new(), targets::echo().await);
    let server = TestServer::start(&place);
    assert_eq!(get(server.server.bound.log, "/cloud/healthz").await.body, "[]\n");
    let _edge = edge(&place, &server, "node1").await;
    assert_eq!(get(server.server.bound.log, "/cloud/healthz").await.body, "[node1]\n");
    let mut client = server.open(&at("node1", echo)).await;
    assert_echo(&mut client, "hello").await;
    let metrics_at = server.server.bound.metrics.unwrap();
    for at in [server.server.bound.log, metrics_at] {
        let page = get(at, "/metrics").await;
        for line in [
            "tunnel_cloud_nodes 1",
            "tunnel_nodes_connected 1",
            "tunnel_links_open{remote=\"edge\"} 1",
            "tunnel_sessions_open{listener=\"connect\"} 1",
            "tunnel_session_bytes_total{direction=\"to_target\"} 5",
            "tunnel_session_bytes_total{direction=\"to_client\"} 5",
        ] {
            assert!(page.body.lines().any(|l| l == line), "{line} is not in\n{}", page.body);
        }
        for path in ["/livez", "/readyz"] {
            assert_eq!(get(at, path).await.status, 200, "{path}");
        }
    }
    assert_eq!(get(metrics_at, "/cloud/healthz").await.status, 404);
    assert_eq!(get(server.server.bound.log, "/edge/healthz").await.status, 404);
    drop(client);
    server.assert_idle().await;
    let page = get(server.server.bound.log, "/metrics").await.body;
    assert!(page.contains("tunnel_sessions_open{listener=\"connect\"} 0\n"), "{page}");
    assert!(page.contains("tunnel_sessions_closed_total{listener=\"connect\",result=\"ok\"} 1\n"), "{page}");
}

#[tokio::test]
async fn an_edges_pages_report_whether_it_is_linked() {
    let place = TestDir::new();
    let nothing = targets::closed_port().await;
    let lost = start_edge(&place.edge("node1", nothing, ""));
    let log = lost.bound.log.unwrap();
    assert_eq!(get(log, "/livez").await.status, 200);
    assert_eq!(get(log, "/readyz").await.status, 503);
    assert_eq!(get(log, "/edge/healthz").await.status, 500);
    wait_until("the failed dial is counted", || lost.metrics.link_dial_failures.counted("refused") > 0).await;

    let server = TestServer::start(&place);
    let edge = edge(&place, &server, "node2").await;
    let log = edge.bound.log.unwrap();
    wait_until("the edge has a link", || edge.metrics.links.all() == 1).await;
    assert_eq!(get(log, "/edge/healthz").await.status, 200);
    assert_eq!(get(log, "/readyz").await.body, "ok\n");
    assert!(get(log, "/metrics").await.body.contains("tunnel_links_open{remote=\"server\"} 1\n"));
}

#[tokio::test]
async fn an_edges_admin_port_is_no_target_but_its_metrics_port_may_be() {
    let place = TestDir::new();
    let server = TestServer::start(&place);
    let edge = edge_with(&place, &server, "node1", "metrics_listen = \"127.0.0.1:0\"").await;
    let refused = server.request_connect(&at("node1", edge.bound.log.unwrap())).await;
    assert_eq!(refused.status, 403, "{refused:?}");
    assert!(refused.phrase.ends_with("for metrics use its metrics_listen"), "{refused:?}");
    for (path, status) in [("/metrics", 200), ("/edge/healthz", 404), ("/debug/flags/v", 404)] {
        let mut metrics = server.open(&at("node1", edge.bound.metrics.unwrap())).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        metrics.write_all(request.as_bytes()).await.unwrap();
        let page = answer(metrics).await;
        assert_eq!(page.status, status, "{path}");
        assert_eq!(page.body.contains("tunnel_links_open{remote=\"server\"} 1\n"), status == 200, "{page:?}");
    }
}

#[tokio::test]
async fn the_log_level_cannot_be_set_at_the_admin_port() {
    let server = TestServer::start(&TestDir::new());
    let put =
        "PUT /debug/flags/v HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1\r\n\r\n4";
    let answer = send_request(server.server.bound.log, put).await;
    assert_eq!(answer.status, 403, "any user of the machine can reach it: {answer:?}");
    assert_eq!(get(server.server.bound.log, "/debug/flags/v").await.status, 406);
}
