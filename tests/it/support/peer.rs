//! A peer that the test plays, linked to a real server.

use std::time::Duration;

use tunnel_net::tls::IdentityFiles;
use tunnel_proto::codec::extended::{from_message, to_message};
use tunnel_proto::frame::{Found, Frame, FrameKind, Remote, SessionCategory, SessionFrame};
use tunnel_proto::hello::LinkCaller;
use tunnel_proto::names::{Instance, NodeName, SessionId};

use super::call::Call;
use super::programs::{TestDir, TestServer};
use super::{assert_eventually, remote};

/// Sends a session frame that names another node.
pub(crate) async fn send_session_frame(edge: &Call, node: &str, id: SessionId, frame: SessionFrame) {
    let node: NodeName = node.parse().unwrap();
    edge.send(to_message(Frame { node, body: FrameKind::Session(id, SessionCategory::Ssh, frame) })).await;
}

/// Returns the frame that opens a session.
pub(crate) fn open_frame(epoch: u64) -> SessionFrame {
    SessionFrame::Open {
        target: "127.0.0.1:22".parse().unwrap(),
        limit: 1000,
        epoch,
        client: "root".into(),
        opener: None,
        resume_timeout: None,
        boot: None,
    }
}

/// Links a peer that the test plays to this server.
pub(crate) async fn scripted_server(place: &TestDir, server: &TestServer, number: u128) -> Call {
    let shows = IdentityFiles { cert: place.files.cert.clone(), key: place.files.key.clone() };
    let headers = LinkCaller::peer_request(Instance::from_bits(number));
    let mut call =
        remote::link_as_peer(place, server.server.bound.grpc, Some(shows), headers, "node1").await.unwrap();
    sync_with_server(&mut call).await;
    call
}

/// Waits until the server has processed everything sent before: the answer to a question comes after it.
pub(crate) async fn sync_with_server(call: &mut Call) {
    call.send(to_message(Frame { node: call.node.clone(), body: FrameKind::Find(5) })).await;
    let answer = async {
        loop {
            let message = call.next().await.expect("the stream continues");
            if let FrameKind::Found(Found { question: 5, .. }) =
                from_message(message, &Remote::Peer).unwrap().body
            {
                return;
            }
        }
    };
    assert_eventually("an answer", answer).await;
}

/// Waits until the server asks for the node. Returns the question's number.
pub(crate) async fn next_find(call: &mut Call) -> u64 {
    let question = async {
        loop {
            let message = call.next().await.expect("the stream continues");
            if let FrameKind::Find(question) = from_message(message, &Remote::Peer).unwrap().body {
                return question;
            }
        }
    };
    assert_eventually("a question", question).await
}

/// Answers whether the node is here.
pub(crate) async fn send_found(call: &Call, question: u64, here: bool, silence: Duration) {
    let found = Found { here, silence, instance: Some(Instance::from_bits(1)), ..Found::not_here(question) };
    call.send(to_message(Frame { node: call.node.clone(), body: FrameKind::Found(found) })).await;
}

/// Announces that the node is here, and waits until the server has processed it.
pub(crate) async fn announce_node(call: &mut Call, instance: u128) {
    let node = &call.node.clone();
    let found = Found { here: true, instance: Some(Instance::from_bits(instance)), ..Found::not_here(0) };
    call.send(to_message(Frame { node: node.clone(), body: FrameKind::Found(found) })).await;
    sync_with_server(call).await;
}

/// Accepts the session that the server opens to the node.
pub(crate) async fn accept_open(call: &mut Call) {
    let (id, frame) = call.next_session_frame().await;
    let SessionFrame::Open { epoch, .. } = frame else { panic!("{frame:?}") };
    call.send_session(
        id,
        SessionFrame::Opened {
            limit: 1000,
            epoch,
            instance: Some(Instance::from_bits(1)),
            place: None,
            resume_timeout: None,
        },
    )
    .await;
}
