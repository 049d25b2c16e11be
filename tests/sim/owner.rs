//! Those who ask for sessions, answer offers and seek paths: each a task.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tunnel::route::{RouteError, SessionRequest, SessionRouter};
use tunnel_base::names::{Instance, NodeName, Target};
use tunnel_link::sender::LinkSender;
use tunnel_link::session::stream::{IncomingSession, OpenOutcome, Parked, Session};
use tunnel_link::table::{SessionTable, TableFull};
use tunnel_proto::frame::{Category, ErrorCode, SessionError};

use super::chance::Dice;
use super::crowd::Cradle;
use super::ledger::{Ledger, OPENER, Who, acceptor};
use super::paths::Paths;
use super::plan::{About, Plan};
use super::process::Shared;

/// What every task of a process needs.
#[derive(Clone)]
pub(crate) struct Place {
    /// Which process.
    pub(crate) at: usize,
    pub(crate) dice: Dice,
    pub(crate) plan: Shared<Plan>,
    pub(crate) ledger: Ledger,
    pub(crate) cradle: Cradle,
    /// The program's manner of opening and seeking; ours, which is worse, if there is none.
    pub(crate) route: Option<SessionRouter>,
    /// The node that it is, if it is an edge.
    pub(crate) node: Option<NodeName>,
    pub(crate) table: Arc<SessionTable>,
    pub(crate) paths: Paths,
}

impl Place {
    /// Opens session `number` to `node`.
    pub(crate) async fn open(self, number: usize, node: NodeName) {
        sleep(self.dice.time(Duration::from_secs(3))).await;
        self.ledger.asks(number, self.at);
        let target: Target = format!("127.0.0.1:{}", number + 1).parse().unwrap();
        let opened = match &self.route {
            None => self.open_wildly(number, node, target).await,
            Some(route) => {
                let request =
                    SessionRequest { node, target, category: Category::Ssh, client: "client".into() };
                // There is one edge only.
                route.open(request).await.map(|session| (session, Some(acceptor(1)))).map_err(|not| not.why)
            }
        };
        match opened {
            Ok((session, who)) => {
                self.ledger.opened(number, who);
                self.hold(session, number, OPENER);
            }
            Err(why) => self.not_opened(number, &why),
        }
    }

    /// Asks over any link, again and again, and sometimes thinks better of it.
    async fn open_wildly(
        &self,
        number: usize,
        node: NodeName,
        target: Target,
    ) -> Result<(Session, Option<Who>), RouteError> {
        let opening = self.table.open(node.clone(), target, Category::Ssh, "client".into());
        let opening = opening.map_err(|TableFull| RouteError::Busy("full"))?;
        let give_up = self.dice.one_in(self.plan.borrow().drops * 2);
        let mut attempts = 0;
        loop {
            // To itself an edge gets through another of its name only, if there is one.
            let alone = self.node.as_ref() == Some(&node) && attempts > 20;
            if alone || give_up && self.dice.one_in(3) {
                self.ledger.kill(number);
                return Err(RouteError::Busy("thought better of it"));
            }
            let Some(link) = self.path(&node, None) else {
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            opening.ask(&link, None);
            attempts += 1;
            match timeout(self.patience(attempts, &node), opening.answer()).await {
                Ok(OpenOutcome::Open) => {
                    let who = self.ledger.answerer(opening.id(), attempts);
                    return Ok((opening.into_session(), who));
                }
                Ok(OpenOutcome::Refused(refusal)) => return Err(RouteError::Refused { node, refusal }),
                Ok(OpenOutcome::NoPath) | Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    fn not_opened(&self, number: usize, why: &RouteError) {
        let about = self.plan.borrow().about;
        match why {
            // No room for one more is a fair answer.
            RouteError::Busy(_) => self.ledger.kill(number),
            RouteError::Refused { refusal, .. } if refusal.code == ErrorCode::Overloaded => {
                self.ledger.kill(number)
            }
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

    /// The answer of this process to an offer.
    pub(crate) async fn answer(self, offer: IncomingSession) {
        let number = usize::from(offer.target().port) - 1;
        let who = acceptor(self.at);
        self.ledger.offered(number, who);
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
                offer.refuse(SessionError::new(ErrorCode::TargetRefused, why));
            }
            return;
        }
        self.ledger.accepted(number, who);
        self.hold(offer.accept(), number, who);
    }

    /// Looks for a path as the program does, or worse.
    pub(crate) async fn seek(self, parked: Parked) {
        if let Some(route) = &self.route {
            return route.resume(parked).await;
        }
        let until = Instant::now() + self.plan.borrow().grace;
        let mut attempts = 0;
        while parked.needs_path() {
            let vain =
                parked.instance().is_some_and(|there| self.ledger.is_dead(there)) && self.dice.one_in(30);
            if vain || Instant::now() >= until {
                return parked.give_up(SessionError::new(ErrorCode::Cancelled, "no path"));
            }
            let Some(link) = self.path(parked.node(), parked.instance()) else {
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            parked.resume(&link);
            attempts += 1;
            let _ = timeout(self.patience(attempts, parked.node()), parked.answered()).await;
            sleep(self.dice.time(Duration::from_millis(20))).await;
        }
    }

    /// Any time at first, but a path that is slower must be waited for in the end; and when there is no more harm, each
    /// path leads to an answer, be it that it is lost. Only an edge's own name may lead round to itself.
    fn patience(&self, attempts: u64, node: &NodeName) -> Duration {
        if self.plan.borrow().healed && self.node.as_ref() != Some(node) {
            return Duration::from_secs(3600);
        }
        self.dice.time(Duration::from_secs(5)) + Duration::from_millis(20 * attempts)
    }

    /// Where to ask: in one pod's world any link; else as the registry says, which may lie.
    fn path(&self, node: &NodeName, instance: Option<Instance>) -> Option<Arc<LinkSender>> {
        let plan = self.plan.borrow();
        let anywhere = plan.about != About::Pods || self.node.is_some() || self.dice.one_in(plan.lies);
        let path = if anywhere {
            self.paths.any(self.at, &self.dice)?
        } else {
            self.paths.next(self.at, node, instance, true, &self.dice)?
        };
        // What is not a cloud's link, nor a pod's, is an edge's: of another name, it would take the session for its
        // own.
        let wrong = path.node.as_ref().is_some_and(|there| there != node);
        let other = instance.is_some() && path.node.is_some() && path.sender.instance != instance;
        (!wrong && !other).then_some(path.sender)
    }
}
