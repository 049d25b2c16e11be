//! Pods that say falsely where nodes are, to one that takes them for homes.

use std::time::Duration;

use tunnel_proto::frame::{ErrorCode, SessionError, SessionFrame};

use crate::support::beside;
use crate::support::call::Call;
use crate::support::peer::{asked, is_heard, opens, refers, says, scripted_server};
use crate::support::programs::TestDir;
use crate::support::servers;

/// Refers to the pod of that number whatever is asked.
async fn always_refers(mut home: Call, server: u128) {
    loop {
        let question = asked(&mut home).await;
        refers(&home, question, server).await;
    }
}

#[tokio::test]
async fn a_home_that_refers_to_a_server_that_has_not_got_the_node_misleads_nobody() {
    let place = TestDir::new();
    let server = servers::start(&place, 1).remove(0);
    let mut liar = scripted_server(&place, &server, 7).await;
    let (mut wrong, mut right) =
        (scripted_server(&place, &server, 8).await, scripted_server(&place, &server, 9).await);
    // Nobody has asked; it is taken for true until the pod that it names says otherwise.
    refers(&liar, 0, 8).await;
    is_heard(&mut liar).await;
    beside(always_refers(liar, 8));
    beside(async move {
        let (id, word) = wrong.word().await;
        let SessionFrame::Open { epoch, .. } = word else { panic!("{word:?}") };
        let refusal = SessionError::new(ErrorCode::NodeNotConnected, "it never was");
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
async fn a_node_is_found_though_its_homes_never_answer() {
    let place = TestDir::new();
    let server = servers::start(&place, 1).remove(0);
    let mut all = Vec::new();
    for number in 2..12 {
        all.push(scripted_server(&place, &server, number).await);
    }
    // Whoever of the others is its home says nothing.
    let mut right = all.pop().unwrap();
    let found = async {
        let question = asked(&mut right).await;
        says(&right, question, true, Duration::ZERO).await;
        opens(&mut right).await;
    };
    let (_client, ()) = tokio::join!(server.open("node1:22"), found);
    drop(all);
}
