//! Tasks that open sessions, answer offers and search for paths.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tunnel::route::{RouteError, SessionRequest, SessionRouter};
use tunnel_link::link::Link;
use tunnel_link::table::handles::{IncomingSession, OpenOutcome, PathSearchRight, Session};
use tunnel_link::table::{SessionTable, TableFull};
use tunnel_proto::frame::{ErrorCode, SessionCategory, SessionError};
use tunnel_proto::names::{Instance, NodeName, Target};

use super::chance::SeededRng;
use super::ledger::{EndId, Ledger, OPENER, acceptor};
use super::paths::Paths;
use super::plan::{Plan, Scenario};
use super::process::Shared;
use super::tasks::TaskSpawner;

/// The context of every task of a process.
#[derive(Clone)]
pub(crate) struct Place {
    /// Index of the process.
    pub(crate) at: usize,
    pub(crate) rng: SeededRng,
    pub(crate) plan: Shared<Plan>,
    pub(crate) ledger: Ledger,
    pub(crate) spawner: TaskSpawner,
    /// The program's router. If `None`, this simulation opens and searches itself, less cleverly.
    pub(crate) route: Option<SessionRouter>,
    /// Node of the process, if it is an edge.
    pub(crate) node: Option<NodeName>,
    pub(crate) table: Arc<SessionTable>,
    pub(crate) paths: Paths,
}

impl Place {
    /// Opens session `number` to `node`.
    pub(crate) async fn open(self, number: usize, node: NodeName) {
        sleep(self.rng.time(Duration::from_secs(3))).await;
        self.ledger.record_opener(number, self.at);
        let target: Target = format!("127.0.0.1:{}", number + 1).parse().unwrap();
        let opened = match &self.route {
            None => self.open_wildly(number, node, target).await,
            Some(route) => {
                let request = SessionRequest {
                    node,
                    target,
                    category: SessionCategory::Ssh,
                    client: "client".into(),
                    listener: "connect",
                    permit: None,
                };
                // There is only one edge.
                route.open(request).await.map(|session| (session, Some(acceptor(1)))).map_err(|not| not.why)
            }
        };
        match opened {
            Ok((session, end_id)) => {
                self.ledger.opened(number, end_id);
                self.hold(session, number, OPENER);
            }
            Err(why) => self.not_opened(number, &why),
        }
    }

    /// Requests a session over any link, repeatedly, and sometimes cancels.
    async fn open_wildly(
        &self,
        number: usize,
        node: NodeName,
        target: Target,
    ) -> Result<(Session, Option<EndId>), RouteError> {
        let opening = self.table.open(node.clone(), target, SessionCategory::Ssh, "client".into(), "connect");
        let opening = opening.map_err(|TableFull| RouteError::Busy)?;
        let give_up = self.rng.one_in(self.plan.borrow().drops * 2);
        let mut attempts = 0;
        loop {
            // An edge reaches its own name only through another edge of that name, if there is one.
            let alone = self.node.as_ref() == Some(&node) && attempts > 20;
            if alone || give_up && self.rng.one_in(3) {
                self.ledger.kill(number);
                return Err(RouteError::Busy);
            }
            let Some(link) = self.path(&node, None) else {
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            opening.ask(&link, None);
            attempts += 1;
            match timeout(self.patience(attempts, &node), opening.answer()).await {
                Ok(OpenOutcome::Open) => {
                    let end_id = self.ledger.answerer(opening.id(), attempts);
                    return Ok((opening.into_session(), end_id));
                }
                Ok(OpenOutcome::Refused(refusal)) => return Err(RouteError::Refused { node, refusal }),
                Ok(OpenOutcome::NoPath) | Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    fn not_opened(&self, number: usize, why: &RouteError) {
        let scenario = self.plan.borrow().scenario;
        match why {
            // A limit is an acceptable reply.
            RouteError::Busy => self.ledger.kill(number),
            RouteError::Refused { refusal, .. } if refusal.code == ErrorCode::Overloaded => {
                self.ledger.kill(number)
            }
            RouteError::Refused { refusal, .. } => {
                if scenario == Scenario::Grace {
                    self.ledger.kill(number);
                }
                self.ledger.was_refused(number, &refusal.reason, scenario != Scenario::Turns);
            }
            _ if scenario == Scenario::Turns => self.ledger.error(format!("session {number}: {why}")),
            _ => self.ledger.kill(number),
        }
    }

    /// Answers an offer to this process.
    pub(crate) async fn answer(self, offer: IncomingSession) {
        let number = usize::from(offer.target.port) - 1;
        let end_id = acceptor(self.at);
        self.ledger.offered(number, end_id);
        tokio::select! {
            biased;
            () = offer.withdrawn() => return,
            () = sleep(self.rng.time(Duration::from_secs(3))) => {}
        }
        if self.rng.one_in(self.plan.borrow().refusals) {
            let dropped = self.rng.one_in(2);
            let why = if dropped { "given up by its owner".into() } else { format!("no {number}") };
            self.ledger.refused(number, why.clone());
            if !dropped {
                offer.refuse(SessionError::new(ErrorCode::TargetRefused, why));
            }
            return;
        }
        self.ledger.accepted(number, end_id);
        self.hold(offer.accept(), number, end_id);
    }

    /// Searches for a path with the program's router, or less cleverly.
    pub(crate) async fn seek(self, mut parked: PathSearchRight) {
        if let Some(route) = &self.route {
            return route.resume(parked).await;
        }
        let until = Instant::now() + self.plan.borrow().grace;
        let mut attempts = 0;
        while parked.needs_path() {
            let vain =
                parked.instance().is_some_and(|there| self.ledger.is_dead(there)) && self.rng.one_in(30);
            if vain || Instant::now() >= until {
                return parked.give_up(SessionError::new(ErrorCode::Cancelled, "no path"));
            }
            let Some(link) = self.path(&parked.key().node, parked.instance()) else {
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            parked.resume(&link);
            attempts += 1;
            let _ = timeout(self.patience(attempts, &parked.key().node), parked.answered()).await;
            sleep(self.rng.time(Duration::from_millis(20))).await;
        }
    }

    /// Returns the time to wait for a reply: random at first, but rising, so that slow paths are waited for.
    ///
    /// Once failures have ended, each path leads to a reply, even if that is its loss. Only an edge's own name may lead
    /// in a circle.
    fn patience(&self, attempts: u64, node: &NodeName) -> Duration {
        if self.plan.borrow().healed && self.node.as_ref() != Some(node) {
            return Duration::from_secs(3600);
        }
        self.rng.time(Duration::from_secs(5)) + Duration::from_millis(20 * attempts)
    }

    /// Returns the link to ask over: any link with a single server, otherwise according to the registry, which may be
    /// wrong.
    fn path(&self, node: &NodeName, instance: Option<Instance>) -> Option<Arc<Link>> {
        let plan = self.plan.borrow();
        let anywhere = plan.scenario != Scenario::Pods || self.node.is_some() || self.rng.one_in(plan.lies);
        let path = if anywhere {
            self.paths.any(self.at, &self.rng)?
        } else {
            self.paths.next(self.at, node, instance, true, &self.rng)?
        };
        // A link that is not a server's is an edge's. An edge of another name would accept the session as its own.
        let wrong = path.node.as_ref().is_some_and(|there| there != node);
        let other = instance.is_some() && path.node.is_some() && path.link.instance != instance;
        (!wrong && !other).then_some(path.link)
    }
}
