//! Servers that give wrong locations of nodes, to a server that takes them for location replicas.

use std::time::Duration;

use tunnel_proto::frame::{ErrorCode, SessionError, SessionFrame};

use crate::support::beside;
use crate::support::call::Call;
use crate::support::peer::{asked, is_heard, opens, refers, says, scripted_server};
use crate::support::programs::TestDir;
use crate::support::servers;

/// Answers each question with a referral to the server of that number.
async fn always_refers(mut home: Call, server: u128) {
    loop {
        let question = asked(&mut home).await;
        refers(&home, question, server).await;
    }
}

#[tokio::test]
async fn a_location_replica_that_names_a_wrong_server_misleads_no_client() {
    let place = TestDir::new();
    let server = servers::start(&place, 1).remove(0);
    let mut liar = scripted_server(&place, &server, 7).await;
    let (mut wrong, mut right) =
        (scripted_server(&place, &server, 8).await, scripted_server(&place, &server, 9).await);
    // An unrequested referral is trusted until the server that it names contradicts it.
    refers(&liar, 0, 8).await;
    is_heard(&mut liar).await;
    beside(always_refers(liar, 8));
    beside(async move {
        let (id, word) = wrong.word().await;
        let SessionFrame::Open { epoch, .. } = word else { panic!("{word:?}") };
        let refusal = SessionError::new(ErrorCode::NodeNotConnected, "it was never here");
        wrong.say(id, SessionFrame::Refused { epoch, refusal }).await;
        loop {
            let question = asked(&mut wrong).await;
            says(&wrong, question, false, Duration::ZERO).await;
        }
    });
    let found = async {
        let question = asked(&mut right).await;
        says(&right, question, true, Duration::ZERO).await;
        opens(&mut right).await;
    };
    let (_client, ()) = tokio::join!(server.open("node1:22"), found);
}

#[tokio::test]
async fn a_node_is_found_although_its_location_replicas_never_answer() {
    let place = TestDir::new();
    let server = servers::start(&place, 1).remove(0);
    let mut all = Vec::new();
    for number in 2..12 {
        all.push(scripted_server(&place, &server, number).await);
    }
    // The location replicas among the others send nothing.
    let mut right = all.pop().unwrap();
    let found = async {
        let question = asked(&mut right).await;
        says(&right, question, true, Duration::ZERO).await;
        opens(&mut right).await;
    };
    let (_client, ()) = tokio::join!(server.open("node1:22"), found);
    drop(all);
}
