//! Those who ask for sessions, answer offers and seek paths: each a task.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tunnel::names::Target;
use tunnel::route::{Request, Route, RouteError};
use tunnel::tunnel::{Answer, Category, Code, Full, Offer, Outbox, Parked, Refusal, Session, Table};

use super::chance::Dice;
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
                    return Err(RouteError::Refused { node: link.peer.node().unwrap().clone(), refusal });
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
        let until = Instant::now() + self.plan.borrow().grace;
        while parked.seeks() {
            if Instant::now() >= until {
                return parked.give_up(Refusal::new(Code::GivenUp, "no path"));
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
}
