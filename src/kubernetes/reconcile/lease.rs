//! Which of several pods does something alone: the holder of a Lease of Kubernetes.
//!
//! Nobody's clock is compared with another's: a holder is gone if the Lease has not changed for a while by our own. That
//! is not enough where a write counts, as a holder may have slept through its own end. So a term has a number, which
//! what is written carries, see `LeaderTerm`.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease as Object, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Error};
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use crate::kubernetes::cluster::{Cluster, ClusterError};

/// A Lease that this pod wants to hold.
#[derive(Debug)]
pub(crate) struct LeaderLease {
    cluster: Cluster,
    namespace: String,
    name: String,
    /// Who we are; no other process is called so.
    me: String,
    /// The version that was seen last, and since when.
    seen: Option<(String, Instant)>,
}

/// A time for which this pod holds the Lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaderTerm {
    /// Grows with each change of the holder (`leaseTransitions`): who finds a higher one is not the holder any more.
    pub(crate) number: i32,
}

impl LeaderLease {
    pub(crate) fn new(cluster: Cluster, namespace: String, name: String, me: String) -> Self {
        Self { cluster, namespace, name, me, seen: None }
    }

    /// Waits until this pod holds the Lease. `least` is the lowest number that the term may have. Cancel safe: a term
    /// that has begun unnoticed ends by itself. `report` gets of each try whether another one holds it, and else why it
    /// cannot be had.
    pub(crate) async fn acquire(&mut self, least: i32, report: impl Fn(Result<(), String>)) -> LeaderTerm {
        loop {
            match self.in_time(Self::try_acquire, least).await {
                Ok(Some(term)) => return term,
                Ok(None) => report(Ok(())),
                Err(cause) => report(Err(format!("Lease {}/{}: {cause}", self.namespace, self.name))),
            }
            sleep(RETRY_PERIOD).await;
        }
    }

    /// Keeps the Lease until it is lost, or may be.
    pub(crate) async fn keep(&mut self, term: LeaderTerm) {
        let mut renewed = Instant::now();
        loop {
            sleep(RETRY_PERIOD).await;
            let started = Instant::now();
            match self.in_time(Self::try_renew, term.number).await {
                Ok(true) => renewed = started,
                Ok(false) => return,
                Err(cause) => debug!(lease = self.name, %cause, "not renewed"),
            }
            if renewed.elapsed() > RENEW_DEADLINE {
                return;
            }
        }
    }

    /// Gives it back, so that another pod need not wait for its end.
    pub(crate) async fn release(&mut self, term: LeaderTerm) {
        if let Err(cause) = self.in_time(Self::try_release, term.number).await {
            debug!(lease = self.name, %cause, "not released");
        }
    }

    async fn in_time<T>(
        &mut self,
        what: impl AsyncFnOnce(&mut Self, i32) -> Result<T, ClusterError>,
        number: i32,
    ) -> Result<T, ClusterError> {
        timeout(REQUEST_TIMEOUT, what(self, number)).await.unwrap_or(Err(ClusterError::Silent))
    }

    async fn api(&self) -> Result<Api<Object>, ClusterError> {
        let (client, _) = self.cluster.connect().await?;
        Ok(Api::namespaced(client, &self.namespace))
    }

    async fn try_acquire(&mut self, least: i32) -> Result<Option<LeaderTerm>, ClusterError> {
        let api = self.api().await?;
        let Some(found) = api.get_opt(&self.name).await? else {
            let mut new = Object::default();
            new.metadata.name = Some(self.name.clone());
            new.spec = Some(self.spec(least, Some(Timestamp::now())));
            let made = written(api.create(&PostParams::default(), &new).await)?;
            return Ok(made.then_some(LeaderTerm { number: least }));
        };
        if !self.is_free(&found) {
            return Ok(None);
        }
        let before = found.spec.as_ref().and_then(|spec| spec.lease_transitions).unwrap_or_default();
        let number = before.saturating_add(1).max(least);
        let taken = self.replace(&api, found, self.spec(number, Some(Timestamp::now()))).await?;
        Ok(taken.then_some(LeaderTerm { number }))
    }

    /// Nobody holds it, or we do, from a term that is over; or its holder has not renewed it for as long as it lasts.
    fn is_free(&mut self, found: &Object) -> bool {
        let holder = holder(found).filter(|holder| !holder.is_empty() && *holder != self.me);
        let version = found.metadata.resource_version.clone().unwrap_or_default();
        let since = match self.seen.take() {
            Some((known, since)) if known == version => since,
            _ => Instant::now(),
        };
        self.seen = Some((version, since));
        holder.is_none() || since.elapsed() > lasts(found)
    }

    async fn try_renew(&mut self, number: i32) -> Result<bool, ClusterError> {
        let api = self.api().await?;
        let Some(found) = api.get_opt(&self.name).await? else { return Ok(false) };
        if !self.is_mine(&found, number) {
            return Ok(false);
        }
        let acquired = found.spec.as_ref().and_then(|spec| spec.acquire_time.as_ref()).map(|time| time.0);
        // Whoever was quicker is seen the next time.
        self.replace(&api, found, self.spec(number, acquired)).await.and_then(|done| {
            if done {
                Ok(true)
            } else {
                Err(ClusterError::Failed("the Lease was written meanwhile".to_owned()))
            }
        })
    }

    async fn try_release(&mut self, number: i32) -> Result<(), ClusterError> {
        let api = self.api().await?;
        let Some(found) = api.get_opt(&self.name).await? else { return Ok(()) };
        if self.is_mine(&found, number) {
            let free = LeaseSpec { holder_identity: Some(String::new()), ..self.spec(number, None) };
            self.replace(&api, found, free).await?;
        }
        Ok(())
    }

    fn is_mine(&self, found: &Object, number: i32) -> bool {
        let transitions = found.spec.as_ref().and_then(|spec| spec.lease_transitions);
        holder(found) == Some(self.me.as_str()) && transitions == Some(number)
    }

    /// Writes it unless it has changed since it was read.
    async fn replace(&self, api: &Api<Object>, found: Object, spec: LeaseSpec) -> Result<bool, ClusterError> {
        let object = Object { metadata: found.metadata, spec: Some(spec) };
        written(api.replace(&self.name, &PostParams::default(), &object).await)
    }

    fn spec(&self, number: i32, acquired: Option<Timestamp>) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            lease_transitions: Some(number),
            acquire_time: acquired.map(MicroTime),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..LeaseSpec::default()
        }
    }
}

fn holder(found: &Object) -> Option<&str> {
    found.spec.as_ref()?.holder_identity.as_deref()
}

/// How long its holder may be silent.
fn lasts(found: &Object) -> Duration {
    let seconds = found.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
    seconds.and_then(|seconds| u64::try_from(seconds).ok()).map_or(LEASE_DURATION, Duration::from_secs)
}

/// Whether it was written; not, if others have been quicker.
fn written<T>(done: Result<T, Error>) -> Result<bool, ClusterError> {
    match done {
        Ok(_) => Ok(true),
        Err(Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
        Err(cause) => Err(cause.into()),
    }
}

/// How long a holder may be silent before another pod takes its place.
const LEASE_DURATION: Duration = Duration::from_secs(15);

/// How long a holder goes on without having renewed: less, by more than two clocks drift apart in that time.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// How often it is looked at, and renewed.
const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// Longest wait for one look.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

// Objects of Kubernetes that pods keep as they should be: ports of a Service, names of nodes for DNS.
