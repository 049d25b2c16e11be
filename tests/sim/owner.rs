//! Those who hold sessions and seek paths for them: each a task.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};
use tunnel::names::{SessionId, Target};
use tunnel::net::Duplex as _;
use tunnel::route::{Request, Route, RouteError};
use tunnel::tunnel::{Answer, Category, Code, Full, Offer, Outbox, Parked, Refusal, Session, Table};

use super::chance::{Dice, MOST, content};
use super::crowd::Cradle;
use super::ledger::Ledger;
use super::plan::{About, Plan};

/// What every task needs.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) dice: Dice,
    pub(crate) plan: Rc<RefCell<Plan>>,
    pub(crate) ledger: Ledger,
    pub(crate) cradle: Cradle,
    pub(crate) route: Route,
    pub(crate) table: Arc<Table>,
    /// The cloud's ends of links, some of them ended.
    pub(crate) paths: Rc<RefCell<Vec<Arc<Outbox>>>>,
    /// Sessions that have a wild seeker.
    pub(crate) sought: Rc<RefCell<BTreeSet<SessionId>>>,
}

/// One end, shared by its reader and its writer.
struct Held {
    session: RefCell<Option<Session>>,
    number: usize,
    side: usize,
    halves: RefCell<usize>,
    wakers: RefCell<Vec<Waker>>,
    place: Place,
}

impl Place {
    pub(crate) async fn open(self, number: usize) {
        sleep(self.dice.time(Duration::from_secs(3))).await;
        let target: Target = format!("127.0.0.1:{}", number + 1).parse().unwrap();
        let wild = self.plan.borrow().wild;
        let opened = if wild {
            self.open_wildly(number, target).await
        } else {
            let (node, client) = ("edge1".parse().unwrap(), format!("s{number}"));
            self.route.open(Request { node, target, category: Category::Ssh, client }).await
        };
        match opened {
            Ok(session) => {
                self.ledger.opened(number);
                self.hold(session, number, 0);
            }
            Err(why) => self.not_opened(number, &why),
        }
    }

    /// Asks over any link, again and again, and sometimes thinks better of it.
    async fn open_wildly(&self, number: usize, target: Target) -> Result<Session, RouteError> {
        let opening = self.table.open("edge1".parse().unwrap(), target, Category::Ssh, format!("s{number}"));
        let opening = opening.map_err(|Full| RouteError::Busy("full"))?;
        let give_up = self.dice.one_in(self.plan.borrow().drops * 2);
        loop {
            if give_up && self.dice.one_in(3) {
                self.ledger.kill(number);
                return Err(RouteError::Busy("thought better of it"));
            }
            let Some(link) = self.any_path() else {
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            opening.ask(&link);
            match timeout(self.dice.time(Duration::from_secs(5)), opening.answer()).await {
                Ok(Answer::Open) => return Ok(opening.into_session()),
                Ok(Answer::Refused(refusal)) => {
                    return Err(RouteError::Refused { node: link.node.clone(), refusal });
                }
                Ok(Answer::NoPath) | Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    fn not_opened(&self, number: usize, why: &RouteError) {
        let about = self.plan.borrow().about;
        match why {
            // No room for one more is a fair answer.
            RouteError::Busy(_) => self.ledger.kill(number),
            RouteError::Refused { refusal, .. } if refusal.code == Code::Busy => self.ledger.kill(number),
            RouteError::Refused { refusal, .. } => {
                if about == About::Grace {
                    self.ledger.kill(number);
                }
                self.ledger.was_refused(number, &refusal.reason, about != About::Turns);
            }
            _ if about == About::Turns => self.ledger.fault(format!("session {number}: {why}")),
            _ => self.ledger.kill(number),
        }
    }

    /// The far end's answer to an offer.
    pub(crate) async fn answer(self, offer: Offer) {
        let Some(number) = offer.client().strip_prefix('s').and_then(|n| n.parse().ok()) else {
            return self.ledger.fault(format!("an offer for {:?}", offer.client()));
        };
        self.ledger.offered(number);
        if offer.target().port as usize != number + 1 || offer.category() != Category::Ssh {
            self.ledger.fault(format!("session {number} is offered as {}", offer.target()));
        }
        tokio::select! {
            biased;
            () = offer.withdrawn() => return,
            () = sleep(self.dice.time(Duration::from_secs(3))) => {}
        }
        if self.dice.one_in(self.plan.borrow().refusals) {
            let dropped = self.dice.one_in(2);
            let why = if dropped { "given up by its owner".into() } else { format!("no {number}") };
            self.ledger.refused(number, why.clone());
            if !dropped {
                offer.refuse(Refusal::new(Code::TargetRefused, why));
            }
            return;
        }
        self.hold(offer.accept(), number, 1);
    }

    /// Looks for a path as the program does, or worse.
    pub(crate) async fn seek(self, parked: Parked) {
        if !self.plan.borrow().wild {
            return self.route.seek(parked).await;
        }
        // One for each session: several would take each other's answers for late ones.
        if !self.sought.borrow_mut().insert(parked.id()) {
            return;
        }
        self.seek_wildly(&parked).await;
        self.sought.borrow_mut().remove(&parked.id());
        if parked.seeks() {
            parked.give_up(Refusal::new(Code::GivenUp, "no path"));
        }
    }

    async fn seek_wildly(&self, parked: &Parked) {
        let until = Instant::now() + self.plan.borrow().grace;
        while parked.seeks() {
            if Instant::now() >= until {
                return;
            }
            let Some(link) = self.any_path() else {
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            parked.resume(&link);
            let _ = timeout(self.dice.time(Duration::from_secs(4)), parked.answered()).await;
            sleep(self.dice.time(Duration::from_millis(20))).await;
        }
    }

    fn any_path(&self) -> Option<Arc<Outbox>> {
        let paths = self.paths.borrow();
        (!paths.is_empty()).then(|| paths[self.dice.below(paths.len())].clone())
    }

    fn hold(&self, session: Session, number: usize, side: usize) {
        let held = Rc::new(Held {
            session: RefCell::new(Some(session)),
            number,
            side,
            halves: RefCell::new(2),
            wakers: RefCell::default(),
            place: self.clone(),
        });
        self.cradle.spawn(format!("reader {number}.{side}"), held.clone().read());
        self.cradle.spawn(format!("writer {number}.{side}"), held.write());
    }
}

impl Held {
    async fn read(self: Rc<Self>) {
        let (dice, ledger) = (&self.place.dice, &self.place.ledger);
        let mut drop_after = self.drop_after();
        loop {
            let taken = poll_fn(|cx| match self.session.borrow_mut().as_mut() {
                Some(session) => session.poll_take(cx).map(Some),
                None => Poll::Ready(None),
            });
            let taken = self.alive(taken).await;
            match taken.flatten() {
                None => return,
                Some(Ok(bytes)) if bytes.is_empty() => {
                    ledger.ended(self.number, self.side);
                    break;
                }
                Some(Ok(bytes)) => {
                    ledger.read(self.number, self.side, &bytes);
                    drop_after = drop_after.map(|left| left.saturating_sub(bytes.len()));
                }
                Some(Err(why)) => {
                    ledger.broken(self.number, self.side, &why);
                    break;
                }
            }
            if drop_after == Some(0) {
                return self.let_go();
            }
            let rests = self.place.plan.borrow().rests;
            if dice.one_in(rests) {
                sleep(dice.time(Duration::from_secs(1))).await;
            }
        }
        self.half_done();
    }

    async fn write(self: Rc<Self>) {
        let (dice, ledger) = (&self.place.dice, &self.place.ledger);
        let most = self.place.plan.borrow().most;
        let types = dice.one_in(3);
        let total = if types { dice.between(0, 900) } else { dice.magnitude(most) };
        let mut drop_after = self.drop_after();
        let mut written = 0;
        while written < total {
            let largest = if types { 40 } else { 1 << dice.between(1, 16) };
            let len = dice.between(1, largest).min(total - written).min(MOST);
            let mut bytes = content(self.number, self.side, written as u64, len);
            match self.give(&mut bytes).await {
                None => return,
                Some(Ok(())) => {}
                Some(Err(why)) => {
                    ledger.broken(self.number, self.side, &why);
                    return self.half_done();
                }
            }
            written += len;
            if types {
                ledger.typed(self.number, self.side, len);
                sleep(dice.time(Duration::from_millis(800))).await;
            }
            drop_after = drop_after.map(|left| left.saturating_sub(len));
            if drop_after == Some(0) {
                return self.let_go();
            }
        }
        if dice.one_in(4) {
            sleep(dice.time(Duration::from_secs(2))).await;
        }
        let finished = self.alive(poll_fn(|cx| match self.session.borrow_mut().as_mut() {
            Some(session) => {
                ledger.finished(self.number, self.side);
                session.poll_finish(cx).map(Some)
            }
            None => Poll::Ready(None),
        }));
        if finished.await.flatten().is_some() {
            self.half_done();
        }
    }

    /// Gives all of `bytes`. Written is what may arrive: it is said before.
    async fn give(&self, bytes: &mut Bytes) -> Option<std::io::Result<()>> {
        self.place.ledger.wrote(self.number, self.side, bytes.len());
        let given = poll_fn(|cx| match self.session.borrow_mut().as_mut() {
            Some(session) => session.poll_give(cx, bytes).map(Some),
            None => Poll::Ready(None),
        });
        self.alive(given).await.flatten()
    }

    /// Runs `work` until it is done, or the other half has let the session go.
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

    /// After how many bytes this half drops the session, if it does.
    fn drop_after(&self) -> Option<usize> {
        let plan = self.place.plan.borrow();
        self.place.dice.one_in(plan.drops).then(|| 1 + self.place.dice.magnitude(plan.most))
    }

    fn half_done(&self) {
        *self.halves.borrow_mut() -= 1;
        if *self.halves.borrow() == 0 {
            self.let_go();
        }
    }

    fn let_go(&self) {
        let Some(session) = self.session.borrow_mut().take() else { return };
        self.place.ledger.dropped(self.number, self.side);
        self.place.ledger.note(|| format!("owner {}.{} lets go", self.number, self.side));
        if self.place.dice.one_in(2) && self.place.ledger.is_killed(self.number) {
            session.reset(Refusal::new(Code::TargetTimeout, "enough"));
        } else {
            drop(session);
        }
        self.wakers.take().into_iter().for_each(Waker::wake);
    }
}
