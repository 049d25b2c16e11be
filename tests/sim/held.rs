//! Owners of sessions: one task reads, one writes, and either may drop the session.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;
use tunnel_link::table::handles::Session;
use tunnel_net::ChunkStream as _;
use tunnel_proto::frame::{ErrorCode, SessionError};

use super::chance::{MOST, content};
use super::ledger::EndId;
use super::owner::Place;
use super::plan::Plan;

/// One end of a session, shared by its reader and its writer.
struct HeldSession {
    session: RefCell<Option<Session>>,
    number: usize,
    end_id: EndId,
    halves: RefCell<usize>,
    wakers: RefCell<Vec<Waker>>,
    place: Place,
}

impl Place {
    /// Starts the reader and the writer of an end.
    pub(crate) fn hold(&self, session: Session, number: usize, end_id: EndId) {
        let held = Rc::new(HeldSession {
            session: RefCell::new(Some(session)),
            number,
            end_id,
            halves: RefCell::new(2),
            wakers: RefCell::default(),
            place: self.clone(),
        });
        self.spawner.spawn(format!("reader {number}.{end_id}"), held.clone().read());
        self.spawner.spawn(format!("writer {number}.{end_id}"), held.write());
    }
}

impl HeldSession {
    async fn read(self: Rc<Self>) {
        let (rng, ledger) = (&self.place.rng, &self.place.ledger);
        let mut drop_after = self.drop_after();
        loop {
            let taken = poll_fn(|cx| match self.session.borrow_mut().as_mut() {
                Some(session) => session.poll_read_chunk(cx).map(Some),
                None => Poll::Ready(None),
            });
            let taken = self.alive(taken).await;
            match taken.flatten() {
                None => return,
                Some(Ok(bytes)) if bytes.is_empty() => {
                    ledger.ended(self.number, self.end_id);
                    break;
                }
                Some(Ok(bytes)) => {
                    ledger.read(self.number, self.end_id, &bytes);
                    drop_after = drop_after.map(|left| left.saturating_sub(bytes.len()));
                }
                Some(Err(why)) => {
                    ledger.broken(self.number, self.end_id, &why);
                    break;
                }
            }
            if drop_after == Some(0) {
                return self.let_go();
            }
            let rests = self.place.plan.borrow().rests;
            if rng.one_in(rests) {
                let long = rng.one_in(4);
                let rest = if long {
                    Duration::from_millis(rng.below(2_500) as u64)
                } else {
                    rng.time(Duration::from_secs(1))
                };
                sleep(rest).await;
            }
        }
        self.half_done();
    }

    async fn write(self: Rc<Self>) {
        let (rng, ledger) = (&self.place.rng, &self.place.ledger);
        let Plan { most, bulk, .. } = *self.place.plan.borrow();
        let calm = self.place.plan.borrow().is_calm();
        let types = if calm { self.number.is_multiple_of(2) } else { rng.one_in(3) };
        let total = match (types, calm || bulk) {
            (true, _) => rng.between(0, 900),
            (false, true) => rng.between(most / 2, most),
            (false, false) => rng.magnitude(most),
        };
        let mut drop_after = self.drop_after();
        let mut written = 0;
        while written < total {
            let largest = if types { 40 } else { 1 << rng.between(if calm { 12 } else { 1 }, 16) };
            let len = rng.between(1, largest).min(total - written).min(MOST);
            let mut bytes = content(self.number, self.end_id, written as u64, len);
            match self.give(&mut bytes).await {
                None => return,
                Some(Ok(())) => ledger.gave(self.number, self.end_id, len),
                Some(Err(why)) => {
                    ledger.broken(self.number, self.end_id, &why);
                    return self.half_done();
                }
            }
            written += len;
            if types {
                ledger.typed(self.number, self.end_id, len);
                let rest = if calm { rng.between(0, 900) } else { rng.magnitude(800) };
                sleep(Duration::from_millis(rest as u64)).await;
            }
            drop_after = drop_after.map(|left| left.saturating_sub(len));
            if drop_after == Some(0) {
                return self.let_go();
            }
        }
        if rng.one_in(4) {
            sleep(rng.time(Duration::from_secs(2))).await;
        }
        let finished = self.alive(poll_fn(|cx| match self.session.borrow_mut().as_mut() {
            Some(session) => {
                ledger.finished(self.number, self.end_id);
                session.poll_finish(cx).map(Some)
            }
            None => Poll::Ready(None),
        }));
        if finished.await.flatten().is_some() {
            self.half_done();
        }
    }

    /// Writes all of `bytes`. They may arrive at once, so they are recorded first.
    async fn give(&self, bytes: &mut Bytes) -> Option<std::io::Result<()>> {
        self.place.ledger.wrote(self.number, self.end_id, bytes.len());
        let given = poll_fn(|cx| match self.session.borrow_mut().as_mut() {
            Some(session) => session.poll_write_chunk(cx, bytes).map(Some),
            None => Poll::Ready(None),
        });
        self.alive(given).await.flatten()
    }

    /// Runs `work` until it is done, or the other half has dropped the session.
    async fn alive<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        poll_fn(|cx| {
            if self.session.borrow().is_none() {
                return Poll::Ready(None);
            }
            let done = work.as_mut().poll(cx).map(Some);
            if done.is_pending() {
                self.wakers.borrow_mut().retain(|waker| !waker.will_wake(cx.waker()));
                self.wakers.borrow_mut().push(cx.waker().clone());
            }
            done
        })
        .await
    }

    /// Returns the number of bytes after which this half drops the session, if it does.
    fn drop_after(&self) -> Option<usize> {
        let plan = self.place.plan.borrow();
        self.place.rng.one_in(plan.drops).then(|| 1 + self.place.rng.magnitude(plan.most))
    }

    fn half_done(&self) {
        *self.halves.borrow_mut() -= 1;
        if *self.halves.borrow() == 0 {
            self.let_go();
        }
    }

    fn let_go(&self) {
        let Some(session) = self.session.borrow_mut().take() else { return };
        self.place.ledger.dropped(self.number, self.end_id);
        self.place.ledger.resumed(session.resumed());
        self.place.ledger.note(|| format!("owner {}.{} drops the session", self.number, self.end_id));
        if self.place.rng.one_in(2) && self.place.ledger.is_killed(self.number) {
            self.place.ledger.broke(self.number, self.end_id);
            session.break_off(SessionError::new(ErrorCode::TargetTimeout, "enough"));
        } else {
            drop(session);
        }
        self.wakers.take().into_iter().for_each(Waker::wake);
    }
}
