//! Tests every cell of the two tables in docs/protocol.md#states.

use bytes::Bytes;

use crate::budget::Budget;
use crate::frame::ErrorCode;
use crate::halves::WindowLimits;
use crate::names::Instance;

use super::*;

const A: LinkId = LinkId(1);
const B: LinkId = LinkId(2);
const WINDOWS: WindowLimits = WindowLimits { start: 1000, max: 4000 };

fn halves() -> (SendHalf, RecvHalf) {
    let budget = Budget::new(1 << 20);
    (SendHalf::new(budget.reservation()), RecvHalf::new(WINDOWS, budget.try_reserve(1000).unwrap()))
}

fn now() -> Instant {
    Instant::now()
}

fn refusal(code: ErrorCode) -> SessionError {
    SessionError::new(code, "because")
}

fn instance() -> Option<Instance> {
    Some(Instance::from_bits(7))
}

/// Returns an opener in `phase`, on link A with epoch 1; parked: without a link; resuming: on B with epoch 2.
fn opener(phase: Phase) -> SessionState {
    let (send, recv) = halves();
    let mut end = SessionState::opener("node1:22".parse().unwrap(), "me".into(), send, recv);
    let _ = end.start_attempt(A, None);
    assert!(matches!(end.poll_frame(A, 0).0, Some(SessionFrame::Open { epoch: 1, limit: 1000, .. })));
    if phase == Phase::Opening {
        return end;
    }
    let _ = end.handle_frame(
        A,
        SessionFrame::Opened {
            limit: 500,
            epoch: 1,
            instance: instance(),
            place: None,
            resume_timeout: None,
        },
        now(),
    );
    if phase == Phase::Closing {
        end.send.finish();
        assert!(matches!(end.poll_frame(A, 99).0, Some(SessionFrame::Fin { total: 1 })));
        let _ = end.handle_frame(A, SessionFrame::Fin { total: 1 }, now());
        let _ = end.handle_frame(A, SessionFrame::Credit { received: 1, limit: 500 }, now());
    }
    if matches!(phase, Phase::Parked | Phase::Resuming) {
        let _ = end.lose_path(A, None, now());
    }
    if phase == Phase::Resuming {
        let _ = end.start_attempt(B, None);
        let resume = end.poll_frame(B, 0).0.unwrap();
        let SessionFrame::Resume { epoch: 2, received: 0, target, .. } = resume else { panic!("{resume:?}") };
        assert_eq!(target, "node1:22".parse().unwrap());
    }
    assert_eq!(end.phase(), phase);
    end
}

/// Returns an acceptor in `phase`, on link A with epoch 1; parked: without a link.
fn acceptor(phase: Phase) -> SessionState {
    let (send, recv) = halves();
    let mut end = SessionState::acceptor(A, 1, 500, send, recv);
    if phase == Phase::Accepting {
        return end;
    }
    let _ = end.accept(now());
    assert!(matches!(end.poll_frame(A, 0).0, Some(SessionFrame::Opened { epoch: 1, limit: 1000, .. })));
    if phase == Phase::Parked {
        let _ = end.handle_frame(A, SessionFrame::PathLost { epoch: 1 }, now());
    }
    if phase == Phase::LastAck {
        end.send.finish();
        assert!(matches!(end.poll_frame(A, 99).0, Some(SessionFrame::Fin { total: 1 })));
        let _ = end.handle_frame(A, SessionFrame::Fin { total: 1 }, now());
        assert!(matches!(end.poll_frame(A, 99).0, Some(SessionFrame::Credit { received: 1, .. })));
        let _ = end.handle_frame(A, SessionFrame::Credit { received: 1, limit: 500 }, now());
    }
    assert_eq!(end.phase(), phase);
    end
}

fn data(len: usize) -> SessionFrame {
    SessionFrame::Data(vec![0; len].into())
}

fn credit() -> SessionFrame {
    SessionFrame::Credit { received: 0, limit: 600 }
}

fn finish() -> SessionFrame {
    SessionFrame::Fin { total: 1 }
}

fn open(epoch: u64) -> SessionFrame {
    SessionFrame::Open {
        target: "node1:22".parse().unwrap(),
        limit: 700,
        epoch,
        client: String::new(),
        opener: None,
        resume_timeout: None,
        boot: None,
    }
}

fn resume(epoch: u64) -> SessionFrame {
    let target = "node1:22".parse().unwrap();
    SessionFrame::Resume {
        received: 0,
        limit: 700,
        epoch,
        instance: instance(),
        opener: None,
        target,
        place: None,
    }
}

fn reset(epoch: u64, code: ErrorCode) -> SessionFrame {
    SessionFrame::Reset { epoch, refusal: refusal(code) }
}

/// Handles a frame on `link` and expects it to be dropped without any effect.
#[expect(clippy::needless_pass_by_value, reason = "most frames are created for this one call")]
fn assert_dropped(mut end: SessionState, link: LinkId, frame: SessionFrame) {
    let phase = end.phase();
    let path = end.path();
    assert!(end.handle_frame(link, frame.clone(), now()).dropped, "{frame:?} in {phase:?}");
    assert_eq!((end.phase(), end.path()), (phase, path), "{frame:?} in {phase:?}");
}

#[tokio::test]
async fn a_resume_repeats_the_place_that_opened_has_named() {
    let named = Some(Box::new(("edge1".parse().unwrap(), "10.0.0.1:8080".parse().unwrap())));
    let mut end = opener(Phase::Opening);
    let opened = SessionFrame::Opened {
        limit: 500,
        epoch: 1,
        instance: instance(),
        place: named.clone(),
        resume_timeout: None,
    };
    let _ = end.handle_frame(A, opened, now());
    for _ in 0..2 {
        let _ = end.lose_path(A, None, now());
        let _ = end.start_attempt(A, None);
        let Some(SessionFrame::Resume { place, .. }) = end.poll_frame(A, 0).0 else { panic!() };
        assert_eq!(place, named);
    }
}

#[tokio::test]
async fn opener_while_opening_handles_each_frame() {
    let mut end = opener(Phase::Opening);
    let actions = end.handle_frame(
        A,
        SessionFrame::Opened {
            limit: 500,
            epoch: 1,
            instance: instance(),
            place: None,
            resume_timeout: None,
        },
        now(),
    );
    assert!(actions.state && actions.write);
    assert_eq!(end.phase(), Phase::Open);
    for epoch in [0, 2] {
        assert_dropped(opener(Phase::Opening), A, SessionFrame::opened(500, epoch));
        assert_dropped(
            opener(Phase::Opening),
            A,
            SessionFrame::Refused { epoch, refusal: refusal(ErrorCode::NotAllowed) },
        );
    }
    let mut end = opener(Phase::Opening);
    assert!(
        end.handle_frame(
            A,
            SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::NodeNotConnected) },
            now()
        )
        .state
    );
    assert_eq!((end.phase(), end.path()), (Phase::Opening, None));
    let mut end = opener(Phase::Opening);
    assert!(
        end.handle_frame(
            A,
            SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::NotAllowed) },
            now()
        )
        .forget
    );
    assert_eq!(end.ended(), Some(&refusal(ErrorCode::NotAllowed)));
    for frame in [data(1), credit(), finish(), SessionFrame::Resumed { received: 0, limit: 0, epoch: 1 }] {
        assert_dropped(opener(Phase::Opening), A, frame);
    }
    assert_dropped(opener(Phase::Opening), A, SessionFrame::PathLost { epoch: 0 });
    let mut end = opener(Phase::Opening);
    assert!(end.handle_frame(A, SessionFrame::PathLost { epoch: 1 }, now()).state);
    assert_eq!((end.phase(), end.path()), (Phase::Opening, None));
    let _ = end.start_attempt(B, None);
    assert!(matches!(end.poll_frame(B, 0).0, Some(SessionFrame::Open { epoch: 2, .. })));
    let mut end = opener(Phase::Opening);
    assert!(end.handle_frame(A, reset(1, ErrorCode::Internal), now()).forget);
}

#[tokio::test]
async fn opener_while_open_handles_each_frame() {
    assert_dropped(opener(Phase::Open), A, SessionFrame::opened(9, 1));
    assert_dropped(opener(Phase::Open), A, SessionFrame::Resumed { received: 0, limit: 0, epoch: 1 });
    assert_dropped(
        opener(Phase::Open),
        A,
        SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::Overloaded) },
    );
    for frame in
        [data(1), credit(), finish(), reset(1, ErrorCode::Internal), SessionFrame::PathLost { epoch: 1 }]
    {
        assert_dropped(opener(Phase::Open), B, frame);
    }
    let mut end = opener(Phase::Open);
    assert!(end.handle_frame(A, data(10), now()).read && end.handle_frame(A, credit(), now()).write);
    assert!(end.handle_frame(A, SessionFrame::Fin { total: 11 }, now()).read);
    assert!(end.control().is_some());
    let mut end = opener(Phase::Open);
    assert!(end.handle_frame(A, SessionFrame::PathLost { epoch: 1 }, now()).state);
    assert_eq!((end.phase(), end.path()), (Phase::Parked, None));
    let mut end = opener(Phase::Open);
    let _ = end.handle_frame(A, data(10), now());
    assert!(end.handle_frame(A, reset(1, ErrorCode::TargetUnreachable), now()).forget);
    assert_eq!(end.ended().unwrap().code, ErrorCode::TargetUnreachable);
    assert!(end.recv.take(now(), Default::default()).is_some());
    let mut end = opener(Phase::Open);
    end.send.write(Bytes::from_static(b"unsent"));
    let _ = end.abandon(refusal(ErrorCode::Cancelled), now());
    assert_eq!(sent_frames(&mut end, A), [reset_at(0)]);
    assert!(end.handle_frame(A, reset(1, ErrorCode::NoError), now()).forget);
}

#[tokio::test]
async fn opener_while_parked_handles_each_frame() {
    for frame in [
        SessionFrame::opened(9, 1),
        SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::Overloaded) },
        data(1),
        credit(),
        finish(),
        SessionFrame::PathLost { epoch: 1 },
        reset(1, ErrorCode::Internal),
    ] {
        assert_dropped(opener(Phase::Parked), A, frame);
    }
    let mut end = opener(Phase::Parked);
    assert!(end.poll_frame(A, 99).0.is_none() && end.backlog().is_none() && end.control().is_none());
    end.send.write(Bytes::from_static(b"forgotten"));
    assert!(!end.abandon(refusal(ErrorCode::Cancelled), now()).forget, "the acceptor is not notified yet");
    assert!(end.needs_path() && end.send.unsent() == 0);
    let _ = end.start_attempt(B, None);
    assert!(matches!(end.poll_frame(B, 99).0, Some(SessionFrame::Resume { epoch: 2, .. })));
    let _ = end.handle_frame(B, SessionFrame::Resumed { received: 0, limit: 900, epoch: 2 }, now());
    assert_eq!(end.poll_frame(B, 99).0, Some(reset_at(0)));
    assert!(end.handle_frame(B, reset(2, ErrorCode::NoError), now()).forget);
}

#[tokio::test]
async fn opener_while_resuming_handles_each_frame() {
    for frame in [
        data(1),
        credit(),
        finish(),
        reset(1, ErrorCode::UnknownSession),
        SessionFrame::PathLost { epoch: 1 },
    ] {
        assert_dropped(opener(Phase::Resuming), B, frame);
    }
    assert_dropped(opener(Phase::Resuming), B, SessionFrame::Resumed { received: 0, limit: 0, epoch: 1 });
    assert_dropped(opener(Phase::Resuming), A, SessionFrame::Resumed { received: 0, limit: 0, epoch: 2 });
    let mut end = opener(Phase::Resuming);
    assert!(end.handle_frame(B, SessionFrame::Resumed { received: 0, limit: 900, epoch: 2 }, now()).write);
    assert_eq!((end.phase(), end.resumed()), (Phase::Open, 1));
    let mut end = opener(Phase::Resuming);
    assert!(end.handle_frame(B, SessionFrame::PathLost { epoch: 2 }, now()).state);
    assert_eq!(end.phase(), Phase::Parked);
    let mut end = opener(Phase::Resuming);
    assert!(end.handle_frame(B, reset(2, ErrorCode::UnknownSession), now()).forget);
    let mut end = opener(Phase::Resuming);
    let _ = end.handle_frame(B, SessionFrame::Resumed { received: 1, limit: 900, epoch: 2 }, now());
    assert_eq!(end.ended().unwrap().code, ErrorCode::ProtocolError, "the offset was never sent");
    let mut end = opener(Phase::Resuming);
    let _ = end.abandon(refusal(ErrorCode::Cancelled), now());
    assert_eq!(end.poll_frame(B, 0).0, None, "the Resume may not have reached the acceptor");
    let _ = end.handle_frame(B, SessionFrame::Resumed { received: 0, limit: 900, epoch: 2 }, now());
    assert_eq!(end.poll_frame(B, 9).0, Some(reset_at(0)));
    assert!(end.handle_frame(B, reset(2, ErrorCode::NoError), now()).forget);
}

#[tokio::test]
async fn opener_while_closing_sends_a_reset_and_is_forgotten() {
    let mut end = opener(Phase::Closing);
    let (frame, actions) = end.poll_frame(A, 99);
    let Some(SessionFrame::Reset { refusal, .. }) = frame else { panic!("{frame:?}") };
    assert!(refusal.code == ErrorCode::NoError && actions.forget && end.ended().is_none());
    assert!(opener(Phase::Closing).lose_path(A, None, now()).forget);
    assert!(opener(Phase::Closing).handle_frame(A, SessionFrame::PathLost { epoch: 1 }, now()).forget);
    assert!(opener(Phase::Closing).handle_frame(A, reset(1, ErrorCode::NoError), now()).forget);
    assert_eq!(opener(Phase::Closing).abandon(refusal, now()), Actions::default());
}

#[tokio::test]
async fn acceptor_while_accepting_handles_each_frame() {
    for frame in [data(1), credit(), finish(), open(1), resume(1)] {
        assert_dropped(acceptor(Phase::Accepting), A, frame);
    }
    let mut end = acceptor(Phase::Accepting);
    let _ = end.handle_frame(B, open(2), now());
    assert_eq!((end.path(), end.poll_frame(B, 99).0), (Some(B), None), "silent while it still dials");
    let _ = end.accept(now());
    assert!(matches!(end.poll_frame(B, 0).0, Some(SessionFrame::Opened { epoch: 2, .. })));
    let mut end = acceptor(Phase::Accepting);
    let _ = end.lose_path(A, None, now());
    assert_eq!((end.phase(), end.path()), (Phase::Accepting, None));
    let _ = end.accept(now());
    assert_eq!(end.phase(), Phase::Parked);
    let _ = end.handle_frame(B, open(2), now());
    assert!(matches!(end.poll_frame(B, 0).0, Some(SessionFrame::Opened { epoch: 2, .. })));
    assert!(acceptor(Phase::Accepting).handle_frame(A, reset(1, ErrorCode::Cancelled), now()).forget);
    let mut end = acceptor(Phase::Accepting);
    let _ = end.abandon(refusal(ErrorCode::TargetRefused), now());
    assert!(matches!(
        end.poll_frame(A, 0),
        (Some(SessionFrame::Refused { epoch: 1, .. }), Actions { forget: true, .. })
    ));
}

#[tokio::test]
async fn acceptor_while_open_handles_each_frame() {
    assert_dropped(acceptor(Phase::Open), A, open(1));
    assert_dropped(acceptor(Phase::Open), B, resume(1));
    for frame in
        [data(1), credit(), finish(), reset(1, ErrorCode::Cancelled), SessionFrame::PathLost { epoch: 1 }]
    {
        assert_dropped(acceptor(Phase::Open), B, frame);
    }
    let mut end = acceptor(Phase::Open);
    end.send.write(Bytes::from_static(b"hello"));
    assert!(matches!(end.poll_frame(A, 99).0, Some(SessionFrame::Data(_))));
    let _ = end.handle_frame(B, open(2), now());
    assert!(matches!(end.poll_frame(B, 99).0, Some(SessionFrame::Opened { epoch: 2, .. })));
    assert_eq!(
        end.poll_frame(B, 99).0,
        Some(SessionFrame::Data(Bytes::from_static(b"hello"))),
        "its direction restarts at 0"
    );
    let mut end = acceptor(Phase::Open);
    let _ = end.handle_frame(A, data(1), now());
    assert_dropped(end, B, open(2));
    let mut end = acceptor(Phase::Open);
    end.send.write(Bytes::from_static(b"hello"));
    let _ = end.poll_frame(A, 99);
    let _ = end.handle_frame(A, data(5), now());
    let _ = end.handle_frame(
        B,
        SessionFrame::Resume {
            received: 2,
            limit: 700,
            epoch: 2,
            instance: None,
            opener: None,
            target: "node1:22".parse().unwrap(),
            place: None,
        },
        now(),
    );
    assert!(matches!(end.poll_frame(B, 99).0, Some(SessionFrame::Resumed { received: 5, epoch: 2, .. })));
    assert_eq!(end.poll_frame(B, 99).0, Some(SessionFrame::Data(Bytes::from_static(b"llo"))));
    assert!(end.handle_frame(A, data(1), now()).dropped, "frames from the old link are ignored");
    assert!(acceptor(Phase::Open).handle_frame(A, reset(1, ErrorCode::Cancelled), now()).forget);
    let mut end = acceptor(Phase::Open);
    let _ = end.handle_frame(A, data(1001), now());
    assert!(
        matches!(end.poll_frame(A, 0).0, Some(SessionFrame::Reset { refusal, .. }) if refusal.code == ErrorCode::ProtocolError)
    );
}

#[tokio::test]
async fn acceptor_while_parked_handles_each_frame() {
    for frame in [
        data(1),
        credit(),
        finish(),
        reset(1, ErrorCode::Cancelled),
        SessionFrame::PathLost { epoch: 1 },
        open(1),
        resume(1),
    ] {
        assert_dropped(acceptor(Phase::Parked), A, frame);
    }
    assert!(acceptor(Phase::Parked).mark_waiting(now()).is_some());
    for frame in [open(2), resume(2)] {
        let mut end = acceptor(Phase::Parked);
        let _ = end.handle_frame(B, frame, now());
        assert_eq!((end.phase(), end.mark_waiting(now())), (Phase::Open, None));
        assert!(end.poll_frame(B, 0).0.is_some());
    }
    for request in [open(2), resume(2)] {
        let mut end = acceptor(Phase::Parked);
        end.send.write(Bytes::from_static(b"forgotten"));
        assert!(!end.abandon(refusal(ErrorCode::Cancelled), now()).forget, "the opener is not notified yet");
        let _ = end.handle_frame(B, request, now());
        let frames = sent_frames(&mut end, B);
        assert!(matches!(
            frames[..],
            [
                SessionFrame::Opened { .. } | SessionFrame::Resumed { .. },
                SessionFrame::ResetAt { total: 0, .. }
            ]
        ));
        assert!(end.handle_frame(B, reset(2, ErrorCode::NoError), now()).forget);
    }
    assert!(acceptor(Phase::Parked).give_up(refusal(ErrorCode::Cancelled)).forget);
}

#[tokio::test]
async fn acceptor_in_last_ack_handles_each_frame() {
    for frame in [data(1), credit(), finish(), open(2), resume(1)] {
        assert_dropped(acceptor(Phase::LastAck), A, frame);
    }
    let mut end = acceptor(Phase::LastAck);
    let _ = end.handle_frame(
        B,
        SessionFrame::Resume {
            received: 1,
            limit: 9,
            epoch: 2,
            instance: None,
            opener: None,
            target: "node1:22".parse().unwrap(),
            place: None,
        },
        now(),
    );
    assert!(matches!(end.poll_frame(B, 9).0, Some(SessionFrame::Resumed { received: 1, epoch: 2, .. })));
    assert_eq!(end.phase(), Phase::LastAck);
    let mut end = acceptor(Phase::LastAck);
    let _ = end.lose_path(A, None, now());
    assert!(end.phase() == Phase::LastAck && end.mark_waiting(now()).is_some());
    let mut end = acceptor(Phase::LastAck);
    assert!(end.handle_frame(A, reset(1, ErrorCode::NoError), now()).forget);
    assert!(end.ended().is_none());
    assert_eq!(acceptor(Phase::LastAck).abandon(refusal(ErrorCode::Cancelled), now()), Actions::default());
}

#[tokio::test]
async fn an_abandoned_session_with_both_ends_finished_still_delivers_the_rest() {
    let mut end = opener(Phase::Open);
    end.send.write(Bytes::from_static(b"tail"));
    end.send.finish();
    let _ = end.handle_frame(A, finish(), now());
    assert_eq!(end.abandon(refusal(ErrorCode::Cancelled), now()), Actions::default());
    let sent_frames: Vec<SessionFrame> = std::iter::from_fn(|| end.poll_frame(A, 99).0).collect();
    assert!(
        matches!(
            sent_frames[..],
            [SessionFrame::Credit { .. }, SessionFrame::Data(_), SessionFrame::Fin { total: 5 }]
        ),
        "{sent_frames:?}"
    );
}

#[tokio::test]
async fn a_link_that_ends_affects_only_sessions_on_it() {
    let mut end = opener(Phase::Open);
    assert_eq!(end.lose_path(B, None, now()), Actions::default());
    assert_eq!(end.phase(), Phase::Open);
    assert!(
        end.lose_path(A, Some(refusal(ErrorCode::Internal)), now()).forget,
        "a plain remote cannot resume"
    );
}

#[tokio::test]
async fn only_acceptors_handle_open_and_resume_and_only_openers_their_answers() {
    for frame in [open(9), resume(9)] {
        assert_dropped(opener(Phase::Open), A, frame);
    }
    for frame in [
        SessionFrame::opened(1, 1),
        SessionFrame::Resumed { received: 0, limit: 1, epoch: 1 },
        SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::Overloaded) },
    ] {
        assert_dropped(acceptor(Phase::Open), A, frame);
    }
}

#[tokio::test]
async fn an_opener_that_gives_up_while_resuming_sends_a_reset() {
    let mut end = opener(Phase::Resuming);
    let _ = end.give_up(refusal(ErrorCode::Cancelled));
    assert!(matches!(
        end.poll_frame(B, 0),
        (Some(SessionFrame::Reset { epoch: 2, .. }), Actions { forget: true, .. })
    ));
    let mut end = opener(Phase::Parked);
    assert!(end.give_up(refusal(ErrorCode::Cancelled)).forget);
    let mut end = opener(Phase::Open);
    let _ = end.give_up(refusal(ErrorCode::Cancelled));
    assert_eq!(end.phase(), Phase::Open, "the reply arrived just in time");
}

#[tokio::test]
async fn an_acceptors_last_frame_follows_its_opener_to_another_link() {
    for (phase, request) in [(Phase::Accepting, open(2)), (Phase::Open, resume(2))] {
        let mut end = acceptor(phase);
        if phase == Phase::Open {
            let _ = end.handle_frame(A, reset_at(1), now());
        } else {
            let _ = end.abandon(refusal(ErrorCode::TargetRefused), now());
        }
        assert!(!end.handle_frame(B, request, now()).dropped);
        assert!(end.poll_frame(A, 0).0.is_none());
        let (frame, actions) = end.poll_frame(B, 0);
        assert!(
            matches!(
                frame,
                Some(SessionFrame::Refused { epoch: 2, .. } | SessionFrame::Reset { epoch: 2, .. })
            ),
            "{frame:?}"
        );
        assert!(actions.forget);
    }
}

#[tokio::test]
async fn a_resume_that_a_relay_rejects_is_tried_on_another_path() {
    for code in [ErrorCode::NodeNotConnected, ErrorCode::Overloaded] {
        let mut end = opener(Phase::Resuming);
        assert!(end.handle_frame(B, reset(2, code), now()).state);
        assert_eq!((end.phase(), end.path(), end.ended()), (Phase::Parked, None, None));
        assert!(end.start_attempt(A, None).state);
        assert_eq!(end.phase(), Phase::Resuming);
    }
}

fn reset_at(total: u64) -> SessionFrame {
    SessionFrame::ResetAt { total, refusal: refusal(ErrorCode::Cancelled) }
}

/// Returns everything that an end sends on a link.
fn sent_frames(end: &mut SessionState, link: LinkId) -> Vec<SessionFrame> {
    std::iter::from_fn(|| end.poll_frame(link, 5).0).collect()
}

#[tokio::test]
async fn bytes_written_before_an_abort_are_sent_before_the_reset() {
    for mut end in [opener(Phase::Open), acceptor(Phase::Open)] {
        let _ = end.handle_frame(A, data(10), now());
        end.send.write(Bytes::from_static(b"last words"));
        assert!(!end.abort(refusal(ErrorCode::Cancelled), now()).forget);
        let frames = sent_frames(&mut end, A);
        let data = [&b"last "[..], b"words"].map(|part| SessionFrame::Data(Bytes::from_static(part)));
        assert_eq!(frames, [data[0].clone(), data[1].clone(), reset_at(11)]);
        assert!(
            end.phase() == Phase::Open && end.backlog().is_none(),
            "kept until the remote has received it"
        );
        assert!(
            !end.handle_frame(A, self::data(5), now()).read && end.recv.queued() == 0,
            "there is no reader"
        );
        assert!(end.handle_frame(A, reset(1, ErrorCode::NoError), now()).forget);
        assert_eq!(end.ended(), Some(&refusal(ErrorCode::Cancelled)));
    }
}

#[tokio::test]
async fn bytes_without_credit_at_an_abort_are_sent_once_there_is_credit() {
    let mut end = opener(Phase::Open);
    end.send.write(vec![0; 502].into());
    let _ = end.abort(refusal(ErrorCode::Cancelled), now());
    assert_eq!(sent_frames(&mut end, A).len(), 100);
    let _ = end.handle_frame(A, SessionFrame::Credit { received: 500, limit: 600 }, now());
    assert_eq!(sent_frames(&mut end, A), [data(2), reset_at(503)]);
}

#[tokio::test]
async fn a_finished_direction_stays_finished_after_an_abort() {
    let mut end = acceptor(Phase::Open);
    end.send.finish();
    let _ = end.abort(refusal(ErrorCode::Cancelled), now());
    assert_eq!(sent_frames(&mut end, A), [finish(), reset_at(1)]);
    let mut peer = opener(Phase::Open);
    let _ = peer.handle_frame(A, finish(), now());
    let _ = peer.handle_frame(A, reset_at(1), now());
    assert!(
        peer.recv.is_ended()
            && peer.poll_frame(A, 0).0 == Some(SessionFrame::Reset { epoch: 1, refusal: no_error() })
    );
}

fn no_error() -> SessionError {
    SessionError::new(ErrorCode::NoError, "")
}

#[tokio::test]
async fn a_reset_at_is_sent_again_on_the_next_path() {
    let mut end = opener(Phase::Open);
    end.send.write(Bytes::from_static(b"hello"));
    let _ = end.abort(refusal(ErrorCode::Cancelled), now());
    assert_eq!(sent_frames(&mut end, A).len(), 2);
    let _ = end.lose_path(A, None, now());
    assert!(end.needs_path());
    let _ = end.start_attempt(B, None);
    assert!(matches!(sent_frames(&mut end, B)[..], [SessionFrame::Resume { epoch: 2, .. }]));
    let _ = end.handle_frame(B, SessionFrame::Resumed { received: 3, limit: 900, epoch: 2 }, now());
    assert_eq!(sent_frames(&mut end, B), [SessionFrame::Data(Bytes::from_static(b"lo")), reset_at(6)]);

    let mut end = acceptor(Phase::Parked);
    end.send.write(Bytes::from_static(b"hello"));
    let _ = end.abort(refusal(ErrorCode::Cancelled), now());
    for epoch in [2, 3] {
        let _ = end.handle_frame(B, resume(epoch), now());
        let frames = sent_frames(&mut end, B);
        assert!(
            matches!(
                frames[..],
                [SessionFrame::Resumed { .. }, SessionFrame::Data(_), SessionFrame::ResetAt { total: 6, .. }]
            ),
            "{frames:?}"
        );
    }
}

#[tokio::test]
async fn a_reset_at_is_acknowledged_and_the_bytes_before_it_can_be_read() {
    assert!(
        opener(Phase::Open).handle_frame(A, reset_at(0), now()).read,
        "the remaining bytes are discarded"
    );
    for mut end in [opener(Phase::Open), acceptor(Phase::Open)] {
        end.send.write(Bytes::from_static(b"no longer used"));
        let _ = end.handle_frame(A, data(10), now());
        assert!(end.handle_frame(A, reset_at(11), now()).read);
        assert_eq!(end.ended(), Some(&refusal(ErrorCode::Cancelled)));
        assert!(!end.recv.is_ended() && end.recv.take(now(), Default::default()).is_some());
        assert!(
            matches!(end.poll_frame(A, 99), (Some(SessionFrame::Reset { refusal, .. }), Actions { forget: true, .. }) if refusal == no_error())
        );
    }
    let mut end = acceptor(Phase::LastAck);
    let _ = end.handle_frame(A, reset_at(1), now());
    assert!(
        matches!(end.poll_frame(A, 99).0, Some(SessionFrame::Reset { refusal, .. }) if refusal == no_error())
    );
    let mut end = opener(Phase::Open);
    let _ = end.handle_frame(A, reset_at(2), now());
    assert_eq!(end.ended().unwrap().code, ErrorCode::ProtocolError, "a byte is missing");
    assert_dropped(opener(Phase::Opening), A, reset_at(1));
    assert_dropped(opener(Phase::Parked), A, reset_at(1));
    assert_dropped(opener(Phase::Resuming), B, reset_at(1));
    assert_dropped(opener(Phase::Open), B, reset_at(1));
}

#[tokio::test]
async fn an_orphaned_session_can_be_evicted() {
    let mut end = opener(Phase::Open);
    assert_eq!(end.evict().0, None, "it has an owner");
    end.send.write(Bytes::from_static(b"hello"));
    let _ = end.abort(refusal(ErrorCode::Cancelled), now());
    assert_eq!((end.is_orphaned(), end.evict().0), (true, Some(true)));
    assert_eq!(sent_frames(&mut end, A), [reset(1, ErrorCode::Cancelled)]);
    let mut end = acceptor(Phase::Parked);
    let _ = end.abort(refusal(ErrorCode::Cancelled), now());
    assert!(end.evict().1.forget);
}

#[tokio::test]
async fn a_closed_session_has_nothing_left_to_evict_or_to_wait_for() {
    for mut end in [opener(Phase::Open), acceptor(Phase::Open)] {
        end.send.write(Bytes::from_static(b"bytes"));
        let _ = end.abort(refusal(ErrorCode::Cancelled), now());
        let _ = end.handle_frame(A, reset(1, ErrorCode::Cancelled), now());
        assert_eq!((end.phase(), end.mark_waiting(now()), end.evict().0), (Phase::Closed, None, None));
    }
}

#[tokio::test]
async fn an_open_cancelled_without_a_path_is_revoked_over_the_next_path() {
    let mut end = opener(Phase::Opening);
    end.instance = instance();
    let _ = end.lose_path(A, None, now());
    assert!(!end.abandon(refusal(ErrorCode::Cancelled), now()).forget);
    assert!(end.needs_path() && end.is_orphaned() && end.instance() == instance());
    let _ = end.start_attempt(B, None);
    let frames = sent_frames(&mut end, B);
    assert!(matches!(frames[..], [SessionFrame::Resume { received: 0, epoch: 2, .. }]), "{frames:?}");
    // An acceptor that is open learns that the opening is cancelled.
    let mut end = cancelled_open();
    let _ = end.handle_frame(B, SessionFrame::Resumed { received: 0, limit: 500, epoch: 2 }, now());
    assert_eq!(sent_frames(&mut end, B), [reset_at(0)]);
    assert!(end.handle_frame(B, reset(2, ErrorCode::NoError), now()).forget);
    // An acceptor that does not exist, or was not open, gets nothing more.
    for answer in [reset(2, ErrorCode::UnknownSession), reset(2, ErrorCode::Cancelled)] {
        assert!(cancelled_open().handle_frame(B, answer, now()).forget);
    }
    let mut end = cancelled_open();
    assert!(
        end.handle_frame(B, reset(2, ErrorCode::NodeNotConnected), now()).state && end.needs_path(),
        "the search continues"
    );
}

/// Returns an opening that was cancelled without a path, and has sent a Resume on B with epoch 2.
fn cancelled_open() -> SessionState {
    let mut end = opener(Phase::Opening);
    let _ = end.lose_path(A, None, now());
    let _ = end.abandon(refusal(ErrorCode::Cancelled), now());
    let _ = end.start_attempt(B, None);
    assert_eq!(sent_frames(&mut end, B).len(), 1);
    end
}

#[tokio::test]
async fn a_resume_of_a_cancelled_open_finds_an_unsent_refusal_and_is_answered_by_its_reason() {
    let mut refusing = acceptor(Phase::Accepting);
    let _ = refusing.abandon(refusal(ErrorCode::TargetRefused), now());
    let resume = SessionFrame::Resume {
        received: 0,
        limit: 500,
        epoch: 2,
        instance: None,
        opener: None,
        target: "node1:22".parse().unwrap(),
        place: None,
    };
    let _ = refusing.handle_frame(B, resume, now());
    let frames = sent_frames(&mut refusing, B);
    assert_eq!(frames, [reset(2, ErrorCode::TargetRefused)]);
    for frame in frames {
        assert!(cancelled_open().handle_frame(B, frame, now()).forget);
    }
}

#[tokio::test]
async fn a_cancelled_open_that_reached_no_acceptor_is_forgotten_at_once() {
    let mut unsent = opener(Phase::Opening);
    let _ = unsent.handle_frame(
        A,
        SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::NodeNotConnected) },
        now(),
    );
    assert!(unsent.abandon(refusal(ErrorCode::Cancelled), now()).forget, "the node is not connected there");
    let (send, recv) = halves();
    let mut unsent = SessionState::opener("node1:22".parse().unwrap(), "me".into(), send, recv);
    let _ = unsent.start_attempt(A, None);
    let _ = unsent.lose_path(A, None, now());
    assert!(unsent.abandon(refusal(ErrorCode::Cancelled), now()).forget, "its Open was never sent");
}

#[tokio::test]
async fn an_open_cancelled_before_its_next_attempt_is_sent_opens_nothing() {
    let mut end = opener(Phase::Opening);
    let _ = end.start_attempt(B, None);
    assert!(!end.abandon(refusal(ErrorCode::Cancelled), now()).forget);
    let frames = sent_frames(&mut end, B);
    assert!(matches!(frames[..], [SessionFrame::Resume { epoch: 2, .. }]), "{frames:?}");
}

fn refused(epoch: u64, code: ErrorCode) -> SessionFrame {
    SessionFrame::Refused { epoch, refusal: refusal(code) }
}

#[tokio::test]
async fn a_refused_open_revokes_an_earlier_attempt() {
    // The first Open may still reach an acceptor over the previous path.
    let opened_twice = || {
        let mut end = opener(Phase::Opening);
        let _ = end.start_attempt(B, None);
        assert!(matches!(sent_frames(&mut end, B)[..], [SessionFrame::Open { epoch: 2, .. }]));
        end
    };
    let mut end = opened_twice();
    let actions = end.handle_frame(B, refused(2, ErrorCode::Overloaded), now());
    assert!(actions.state && !actions.forget && end.is_orphaned());
    let frames = sent_frames(&mut end, B);
    assert!(matches!(frames[..], [SessionFrame::Resume { received: 0, epoch: 3, .. }]), "{frames:?}");
    assert!(end.handle_frame(B, reset(3, ErrorCode::UnknownSession), now()).forget);
    assert_eq!(end.ended().unwrap().code, ErrorCode::Overloaded, "the reason of the refusal is kept");
    // The opening was cancelled, and its Reset was not sent before the refusal arrived.
    let mut end = opened_twice();
    let _ = end.abandon(refusal(ErrorCode::Cancelled), now());
    assert!(!end.handle_frame(B, refused(2, ErrorCode::Overloaded), now()).forget);
    let frames = sent_frames(&mut end, B);
    assert!(matches!(frames[..], [SessionFrame::Resume { epoch: 3, .. }]), "{frames:?}");
    assert!(
        end.handle_frame(B, refused(3, ErrorCode::TargetRefused), now()).dropped,
        "no Open has that epoch"
    );
    assert!(
        opener(Phase::Opening).handle_frame(A, refused(1, ErrorCode::Overloaded), now()).forget,
        "no earlier Open is pending"
    );
}

/// Returns an opening that was cancelled while its Open was pending.
fn cancelled_on_its_path() -> SessionState {
    let mut end = opener(Phase::Opening);
    assert!(!end.abandon(refusal(ErrorCode::Cancelled), now()).forget && end.is_orphaned());
    end
}

#[tokio::test]
async fn a_cancelled_open_sends_a_reset_and_a_resume_that_confirms_it() {
    let mut end = cancelled_on_its_path();
    let frames = sent_frames(&mut end, A);
    let [SessionFrame::Reset { epoch: 1, .. }, SessionFrame::Resume { received: 0, epoch: 2, .. }] =
        frames[..]
    else {
        panic!("{frames:?}")
    };
    assert_dropped(cancelled_on_its_path(), A, SessionFrame::opened(500, 0));
    let refused = SessionFrame::Refused { epoch: 1, refusal: refusal(ErrorCode::TargetRefused) };
    assert!(end.handle_frame(A, refused, now()).dropped, "it answers the Open, not the last frame");
    assert!(end.handle_frame(A, reset(2, ErrorCode::UnknownSession), now()).forget);
    assert_eq!(end.ended().unwrap().code, ErrorCode::Cancelled);
}

#[tokio::test]
async fn an_open_cancelled_on_a_lost_path_is_revoked_over_the_next_path() {
    for count in [0, 1, 2] {
        let mut end = cancelled_on_its_path();
        for _ in 0..count {
            assert!(end.poll_frame(A, 0).0.is_some());
        }
        assert!(!end.lose_path(A, None, now()).forget && end.needs_path() && end.path().is_none());
        let _ = end.start_attempt(B, None);
        let frames = sent_frames(&mut end, B);
        assert!(matches!(frames[..], [SessionFrame::Resume { .. }]), "{frames:?}");
    }
}

#[tokio::test]
async fn an_open_accepted_while_it_is_cancelled_is_reset() {
    let mut end = cancelled_on_its_path();
    let opened = SessionFrame::Opened {
        limit: 500,
        epoch: 1,
        instance: instance(),
        place: None,
        resume_timeout: None,
    };
    assert!(!end.handle_frame(A, opened, now()).dropped);
    assert_eq!(sent_frames(&mut end, A), [reset_at(0)]);
    assert!(end.handle_frame(A, reset(1, ErrorCode::NoError), now()).forget);
}

#[tokio::test]
async fn an_acceptor_resumed_while_it_dials_closes_with_one_reset() {
    let mut end = acceptor(Phase::Accepting);
    let _ = end.lose_path(A, None, now());
    assert!(!end.handle_frame(B, resume(2), now()).dropped);
    assert_eq!(
        sent_frames(&mut end, B)[..],
        [SessionFrame::Reset { epoch: 2, refusal: end.ended().unwrap().clone() }]
    );
    assert_eq!((end.phase(), end.ended().unwrap().code), (Phase::Closed, ErrorCode::Cancelled));
    assert_eq!(end.accept(now()), Actions::default());
}
