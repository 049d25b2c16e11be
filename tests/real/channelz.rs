//! gRPC's debugging port, queried by grpcurl with the description in `proto/`.

use std::process::Command;

use serde_json::Value;

use crate::parts::{cached_program, free_port, loopback};
use crate::process::{TIMEOUT, run_command};
use crate::tunnel::TestDir;

const PROTO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/proto");

#[test]
fn grpcurl_finds_the_links_with_their_counters() {
    let Some(program) = cached_program("grpcurl-1.9.3/grpcurl") else { return };
    let place = TestDir::new();
    let (pod, node) = (free_port(), free_port());
    let at = |port: u16| format!("127.0.0.1:{port}");
    let (grpc, log, edge_log) = (free_port(), free_port(), free_port());
    let config = format!(
        "{}channelz_listen = \"{}\"\n[server.connect]\nlisten = \"{}\"\n",
        place.cloud_config(loopback(grpc), log),
        at(pod),
        at(free_port())
    );
    let mut cloud = place.tunnel(("server", "cloud"), &config, &[], &[]);
    cloud.wait_for_answer(log, "/readyz", "");
    let config =
        format!("{}channelz_listen = \"{}\"\n", place.edge_config("node1", &at(grpc), edge_log), at(node));
    let mut edge = place.tunnel(("edge", "edge"), &config, &[], &[]);
    edge.wait_for_answer(edge_log, "/readyz", "");
    let call = |port: u16, method: &str, request: &str| -> Value {
        let mut grpcurl = Command::new(&program);
        grpcurl.args(["-plaintext", "-import-path", PROTO, "-proto", "channelz.proto"]);
        grpcurl.args(["-d", request, &at(port), &format!("grpc.channelz.v1.Channelz/{method}")]);
        let output = run_command("grpcurl", &mut grpcurl, None, TIMEOUT);
        assert!(output.status.success(), "{method}: {output:?}");
        serde_json::from_str(&output.stdout).unwrap()
    };
    let servers = call(pod, "GetServers", "{}");
    let server = &servers["server"][0];
    assert_eq!(server["ref"]["name"], "links", "{servers}");
    assert_eq!(server["data"]["callsStarted"], "1", "{servers}");
    assert_eq!(server["listenSocket"][0]["name"], at(grpc));
    let id = server["ref"]["serverId"].as_str().unwrap();
    let sockets = call(pod, "GetServerSockets", &format!("{{\"server_id\": {id}}}"));
    assert_eq!(sockets["socketRef"][0]["name"], "node1", "{sockets}");
    let id = sockets["socketRef"][0]["socketId"].as_str().unwrap();
    let socket = call(pod, "GetSocket", &format!("{{\"socket_id\": {id}}}"));
    let data = &socket["socket"]["data"];
    assert_eq!(data["streamsStarted"], "1", "{socket}");
    // The first message of an edge is its heartbeat.
    assert!(data["messagesReceived"].as_str().unwrap().parse::<u64>().unwrap() >= 1, "{socket}");
    assert_eq!(socket["socket"]["remote"]["tcpipAddress"]["ipAddress"], "fwAAAQ==", "{socket}");

    let channels = call(node, "GetTopChannels", "{}");
    let channel = &channels["channel"][0];
    assert_eq!(
        (&channel["data"]["target"], &channel["data"]["state"]["state"]),
        (&at(grpc).into(), &"READY".into())
    );
    assert_eq!(call(node, "GetServers", "{}")["server"], Value::Null, "an edge has no gRPC servers");
}
