//! Election of one server that performs a task alone: the holder of a Lease in Kubernetes.
//!
//! Clocks of different machines are never compared: a holder is considered lost if the Lease has not changed for a
//! while by the local clock. That does not suffice for writes, because a holder may have been suspended past its own
//! end. So each term has a number (`leaseTransitions`) that its writes carry. It grows with each change of the holder: a
//! holder that finds a higher one has lost the Lease.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease as Object, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use crate::cluster::{Cluster, ClusterError, write};

/// A Kubernetes Lease by which the servers choose the one that performs a task alone; held for one term at a time.
#[derive(Debug)]
pub(crate) struct LeaderLease {
    cluster: Cluster,
    namespace: String,
    name: String,
    /// Unique identity of this process.
    identity: String,
    /// Resource version seen last, and since when.
    seen: Option<(String, Instant)>,
}

impl LeaderLease {
    pub(crate) fn new(cluster: Cluster, namespace: String, name: String, identity: String) -> Self {
        Self { cluster, namespace, name, identity, seen: None }
    }

    /// Waits until this server holds the Lease. Returns the number of its term, at least `least`. Calls `report` after
    /// each attempt: `Ok` if another server holds the Lease, otherwise the error.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a term that was acquired unnoticed expires.
    pub(crate) async fn acquire(&mut self, least: i32, report: impl Fn(Result<(), String>)) -> i32 {
        loop {
            match self.in_time(Self::try_acquire, least).await {
                Ok(Some(term)) => return term,
                Ok(None) => report(Ok(())),
                Err(cause) => report(Err(format!("Lease {}/{}: {cause}", self.namespace, self.name))),
            }
            sleep(RETRY_PERIOD).await;
        }
    }

    /// Renews the Lease until it is lost, or may be.
    pub(crate) async fn keep(&mut self, term: i32) {
        let mut renewed = Instant::now();
        loop {
            sleep(RETRY_PERIOD).await;
            let started = Instant::now();
            match self.in_time(Self::try_renew, term).await {
                Ok(true) => renewed = started,
                Ok(false) => return,
                Err(cause) => debug!(lease = self.name, error = %cause, "cannot renew Lease"),
            }
            if renewed.elapsed() > RENEW_DEADLINE {
                return;
            }
        }
    }

    /// Releases the Lease, so that another server need not wait until it expires.
    pub(crate) async fn release(&mut self, term: i32) {
        if let Err(cause) = self.in_time(Self::try_release, term).await {
            debug!(lease = self.name, error = %cause, "cannot release Lease");
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

    async fn try_acquire(&mut self, least: i32) -> Result<Option<i32>, ClusterError> {
        let api = self.api().await?;
        let Some(found) = api.get_opt(&self.name).await? else {
            let mut new = Object::default();
            new.metadata.name = Some(self.name.clone());
            new.spec = Some(self.spec(least, Some(Timestamp::now())));
            let made = write(&api, &self.name, &new, false).await?;
            return Ok(made.then_some(least));
        };
        if !self.is_free(&found) {
            return Ok(None);
        }
        let before = found.spec.as_ref().and_then(|spec| spec.lease_transitions).unwrap_or_default();
        let number = before.saturating_add(1).max(least);
        let taken = self.replace(&api, found, self.spec(number, Some(Timestamp::now()))).await?;
        Ok(taken.then_some(number))
    }

    /// Returns true if the Lease has no holder, if this process holds it from an earlier term, or if its holder has not
    /// renewed it in time.
    fn is_free(&mut self, found: &Object) -> bool {
        let holder = holder(found).filter(|holder| !holder.is_empty() && *holder != self.identity);
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
        // Another writer is noticed at the next attempt.
        match self.replace(&api, found, self.spec(number, acquired)).await? {
            true => Ok(true),
            false => Err(ClusterError::Failed("the Lease was written meanwhile".to_owned())),
        }
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
        holder(found) == Some(self.identity.as_str()) && transitions == Some(number)
    }

    /// Writes the Lease unless it has changed since it was read.
    async fn replace(&self, api: &Api<Object>, found: Object, spec: LeaseSpec) -> Result<bool, ClusterError> {
        let object = Object { metadata: found.metadata, spec: Some(spec) };
        write(api, &self.name, &object, true).await
    }

    fn spec(&self, number: i32, acquired: Option<Timestamp>) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
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

/// Returns how long the Lease is valid without renewal.
fn lasts(found: &Object) -> Duration {
    let seconds = found.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
    seconds.and_then(|seconds| u64::try_from(seconds).ok()).map_or(LEASE_DURATION, Duration::from_secs)
}

/// Time without renewal after which another server takes over.
const LEASE_DURATION: Duration = Duration::from_secs(15);

/// Time without renewal after which a holder stops. It is shorter than `LEASE_DURATION` by more than clocks drift apart
/// in that time.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// Time between two attempts to acquire or renew.
const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// Timeout for one attempt, on the whole: a Lease is small, and must be renewed in time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
