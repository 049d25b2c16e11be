//! The requests of one client, each judged by itself.

use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;
use http::request::Parts;

use super::{Denial, Denied, Granted, OpenRequest, Permitted, Router, Visit, trace};
use crate::names::{NodeName, Target};

/// Checks each request of one client, and finds its destination.
pub(super) struct Requests<'a, 'v, P> {
    parse: P,
    visit: &'a mut Visit<'v>,
    /// The request that was judged last, until a session is opened for it.
    permitted: Option<Permitted>,
    /// Whether its client may be shown addresses and times.
    trusted: bool,
    trace: String,
}

impl<'a, 'v, P> Requests<'a, 'v, P> {
    /// Those of a visitor; `parse` reads a head.
    pub(super) fn new(visit: &'a mut Visit<'v>, parse: P) -> Self {
        Self { parse, visit, permitted: None, trusted: false, trace: String::new() }
    }

    /// A request for which no session was opened went over the one that there was, which has its own line.
    fn let_go(&mut self) {
        if let Some(permitted) = self.permitted.take() {
            permitted.forget();
        }
    }
}

impl<P> Router for Requests<'_, '_, P>
where
    P: Fn(&Parts) -> Result<OpenRequest, Denial> + Send + Sync,
{
    /// The user, who may be another one with each request's password, and where it goes.
    type Way = (Option<String>, NodeName, Target);

    async fn judge(&mut self, head: Result<&Parts, Denial>) -> Result<Self::Way, Denied> {
        self.let_go();
        self.trace = head.as_ref().map_or_else(|_| trace::new(), |head| trace::of(&head.headers));
        let request = head.and_then(&self.parse);
        let permitted = self.visit.judge(request, self.trace.clone()).await?;
        if let Some(slot) = self.visit.slot() {
            slot.steps_aside();
        }
        let way = (permitted.user().map(str::to_owned), permitted.node().clone(), permitted.target().clone());
        self.trusted = permitted.is_trusted();
        self.permitted = Some(permitted);
        Ok(way)
    }

    async fn open(&mut self, _way: &Self::Way) -> Result<Granted, Denied> {
        match self.permitted.take() {
            Some(permitted) => permitted.open().await,
            None => Err(self.failed(Denial::Unanswered("its session ended twice".to_owned()))),
        }
    }

    fn failed(&self, denial: Denial) -> Denied {
        Denied { denial, trusted: self.trusted, trace: self.trace.clone() }
    }

    fn answered(&self) {
        self.visit.waits();
    }
}

impl<P> Drop for Requests<'_, '_, P> {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// Where a password stands, if there is one.
pub(super) fn credentials(headers: &HeaderMap) -> HeaderMap {
    let password = headers.get(PROXY_AUTHORIZATION).cloned();
    HeaderMap::from_iter(password.map(|password| (PROXY_AUTHORIZATION, password)))
}
