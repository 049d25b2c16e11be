//! Approves or denies requests for the three profiles, and leaves all others untouched.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, ObjectList, Patch, PatchParams, WatchEvent, WatchParams};
use kube::{Api, Client, Error, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::cluster::{Cluster, ClusterError};
use crate::csr::apiserver_names::ApiserverNames;
use crate::csr::decision::{CsrDecision, CsrFacts, CsrSpec, decide};
use crate::csr::error::{CsrError, with_timeout};
use crate::csr::profile::Profile;
use crate::csr::server_name_sources::ServerNameSources;
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_base::logging::AUDIT;
use tunnel_proto::printable::printable;

/// Decides on each CertificateSigningRequest of the cluster, one after the other.
#[derive(Debug)]
pub struct Approver {
    cluster: Cluster,
    pods: String,
    reach: ServerNameSources,
    /// Continue token of the list, if it was not read to its end.
    next_page: Mutex<Option<String>>,
}

impl Approver {
    /// Creates an approver; sends no request. `pods` is the servers' user (`system:serviceaccount:NAMESPACE:NAME`), and
    /// `reach` lists how clients reach their listeners. The namespace of `cluster` is that of its Services.
    pub fn new(cluster: Cluster, pods: String, reach: ServerNameSources) -> Self {
        Self { cluster, pods, reach, next_page: Mutex::default() }
    }

    /// Runs until draining starts. Calls `report` with the state of the list at least every few minutes, so that a
    /// missing report means that this has stopped. `report` must not block.
    pub async fn run(self, report: impl Fn(Result<(), String>), drain: Drain) {
        let work = async {
            let mut backoff = Backoff::new();
            loop {
                let was_seen = AtomicBool::new(false);
                let seen = || {
                    was_seen.store(true, Relaxed);
                    report(Ok(()));
                };
                let cause = match timeout(LIST_INTERVAL, self.run_pass(&seen)).await {
                    Ok(Ok(never)) => match never {},
                    Ok(Err(cause)) => cause,
                    // Decisions that could not be recorded are retried with the next list.
                    Err(_) if was_seen.into_inner() => {
                        backoff = Backoff::new();
                        continue;
                    }
                    Err(_) => CsrError::Cluster(ClusterError::Failed(format!(
                        "not all requests were listed within {LIST_INTERVAL:?}; the next pass continues after them"
                    ))),
                };
                warn!(error = %cause, "cannot list requests, retrying");
                report(Err(cause.to_string()));
                sleep(backoff.pause(rand::random())).await;
            }
        };
        drain.run_until(Box::pin(work)).await;
    }

    /// Decides on all existing requests, then on each new one. Creates a new client each time, because its token may
    /// have expired.
    async fn run_pass(&self, seen: &impl Fn()) -> Result<Infallible, CsrError> {
        let (client, _) = self.cluster.connect().await?;
        let apiserver = ApiserverNames::look_up(&self.cluster, &client).await?;
        self.follow(client, &apiserver, seen).await
    }

    async fn follow(
        &self,
        client: Client,
        apiserver: &ApiserverNames,
        seen: &impl Fn(),
    ) -> Result<Infallible, CsrError> {
        let requests = Api::all(client.clone());
        let nodes = Api::all(client);
        // An error in one request must not keep the others waiting; the next list retries it.
        let settle = async |csr: &CertificateSigningRequest| {
            if let Err(cause) = self.record_decision(csr, apiserver, &requests, &nodes).await {
                warn!(
                    csr = csr.name_any(), error = %cause, retry_within = ?LIST_INTERVAL,
                    "cannot decide on request, retrying"
                );
            }
        };
        // The list comes first, and the watch continues from its version: so no request is missed between them.
        let version = loop {
            let page = self.page(&requests).await?;
            for csr in &page.items {
                settle(csr).await;
            }
            if self.next_page.lock().is_none() {
                break page.metadata.resource_version.unwrap_or_default();
            }
        };
        seen();
        let mut events =
            pin!(requests.watch(&WatchParams::default(), &version).await.map_err(ClusterError::from)?);
        while let Some(event) = events.next().await {
            match event.map_err(ClusterError::from)? {
                WatchEvent::Added(csr) | WatchEvent::Modified(csr) => settle(&csr).await,
                WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
                WatchEvent::Error(status) => return Err(ClusterError::from(Error::Api(status)).into()),
            }
        }
        Err(ClusterError::Failed("the watch ended".to_owned()).into())
    }

    /// Returns the page after the previous one, even if that belongs to an earlier pass: any number of requests that
    /// sort first then only delays the others.
    async fn page(
        &self,
        requests: &Api<CertificateSigningRequest>,
    ) -> Result<ObjectList<CertificateSigningRequest>, CsrError> {
        loop {
            let token = self.next_page.lock().clone();
            let params = ListParams { continue_token: token.clone(), ..ListParams::default().limit(PAGE) };
            match requests.list(&params).await {
                Ok(page) => {
                    *self.next_page.lock() =
                        page.metadata.continue_.clone().filter(|token| !token.is_empty());
                    return Ok(page);
                }
                // The list's snapshot expired after some minutes. The error contains a token that continues in the
                // current list.
                Err(Error::Api(status)) if status.code == 410 && token.is_some() => {
                    let now = status.metadata.and_then(|metadata| metadata.continue_);
                    *self.next_page.lock() = now.filter(|now| !now.is_empty());
                }
                Err(cause) => return Err(ClusterError::from(cause).into()),
            }
        }
    }

    /// Decides on a request and records the decision.
    async fn record_decision(
        &self,
        csr: &CertificateSigningRequest,
        apiserver: &ApiserverNames,
        requests: &Api<CertificateSigningRequest>,
        nodes: &Api<Node>,
    ) -> Result<(), CsrError> {
        if is_settled(csr) {
            return Ok(());
        }
        let Some(request) = CsrSpec::read(csr) else {
            debug!(csr = csr.name_any(), "ignoring unreadable request");
            return Ok(());
        };
        let facts = match (request.profile(), request.node()) {
            (Some(Profile::Edge), Some(node)) => {
                let addresses = with_timeout(nodes.get_opt(node)).await?.as_ref().map(addresses);
                CsrFacts { addresses, ..CsrFacts::default() }
            }
            // Requests of other users are denied, whatever their names.
            (Some(Profile::Server), _) if request.requester == self.pods => CsrFacts {
                reachable_names: self.reach.look_up(&self.cluster).await?.0,
                ..CsrFacts::default()
            },
            _ => CsrFacts::default(),
        };
        let (Some(uid), Some(version)) = (csr.uid(), csr.resource_version()) else {
            return Err(CsrError::ChangedOrDeleted);
        };
        let name = csr.name_any();
        let requester = printable(&request.requester);
        let (kind, reason, why) = match decide(&request, &self.pods, apiserver, &facts) {
            CsrDecision::NotOurs => return Ok(()),
            CsrDecision::Approve => ("Approved", "AutoApproved", "requester is authorized".to_owned()),
            CsrDecision::Deny(why) => ("Denied", "NotPermitted", why),
        };
        let message = format!("tunnel approve: {why}");
        let condition = json!({"type": kind, "status": "True", "reason": reason, "message": message});
        // The patch applies only to this version of this object: it affects no other request of that name, and
        // overwrites no one else's decision.
        let patch = json!({
            "metadata": {"uid": uid, "resourceVersion": version},
            "status": {"conditions": [condition]},
        });
        // Logged before the patch: the process may stop while kube-apiserver applies it, and every approval must be in
        // the log.
        match request.profile().map(Profile::name) {
            profile if kind == "Denied" => {
                warn!(target: AUDIT, csr = name, profile, %requester, reason = why, "denying");
            }
            profile => info!(target: AUDIT, csr = name, profile, %requester, "approving"),
        }
        let params = PatchParams::default();
        match with_timeout(requests.patch_approval(&name, &params, &Patch::Merge(&patch))).await {
            Err(CsrError::ChangedOrDeleted) => {
                info!(target: AUDIT, csr = name, "request changed by another party, skipped")
            }
            done => drop(done?),
        }
        Ok(())
    }
}

/// Returns true if a decision or a certificate has already been recorded.
fn is_settled(csr: &CertificateSigningRequest) -> bool {
    let status = csr.status.as_ref();
    let judged = status.and_then(|status| status.conditions.as_ref()).is_some_and(|all| !all.is_empty());
    judged || status.is_some_and(|status| status.certificate.is_some())
}

fn addresses(node: &Node) -> BTreeSet<IpAddr> {
    let all = node.status.as_ref().and_then(|status| status.addresses.as_ref());
    all.into_iter().flatten().filter_map(|at| at.address.parse().ok()).collect()
}

/// Requests per page of a list. Each may exceed a megabyte, and a whole page is in memory at once.
const PAGE: u32 = 4;

/// Time between two lists of all requests; failed decisions are retried then.
const LIST_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use http::Response;
    use k8s_openapi::ByteString;
    use kube::client::Body;

    use tunnel_net::pki::CertificateRequest;

    use super::*;

    /// Captured log output.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(text)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns a request by the servers' user, as kube-apiserver returns it.
    fn pending_csr() -> serde_json::Value {
        let profile = Profile::ProxyClient;
        let request = CertificateRequest::new(profile.common_name(), profile.organization(), &[]).unwrap();
        json!({
            "metadata": {"name": "csr-1", "uid": "u1", "resourceVersion": "7"},
            "spec": {
                "request": ByteString(request.pem().as_bytes().to_vec()), "signerName": profile.signer(),
                "usages": profile.usages(), "username": "pods",
            },
        })
    }

    #[tokio::test]
    async fn an_approval_is_logged_before_it_is_sent() {
        let lines = Lines::default();
        let written = lines.clone();
        let log = tracing_subscriber::fmt().with_writer(move || written.clone()).finish();
        let _guard = tracing::subscriber::set_default(log);
        let (patched, mut is_patched) = tokio::sync::mpsc::channel(1);
        let answer = move |request: http::Request<Body>| {
            let patched = patched.clone();
            async move {
                if request.method() == http::Method::PATCH {
                    patched.send(request.into_body().collect_bytes().await.unwrap()).await.unwrap();
                    return std::future::pending().await;
                }
                let query = request.uri().query().unwrap_or_default();
                assert!(
                    query.contains("limit=4"),
                    "pages must be small because requests may be large: {query}"
                );
                let list = json!({
                    "kind": "CertificateSigningRequestList", "apiVersion": "certificates.k8s.io/v1",
                    "metadata": {"resourceVersion": "1"}, "items": [pending_csr()],
                });
                Ok::<_, Infallible>(Response::new(Body::from(list.to_string().into_bytes())))
            }
        };
        let client = Client::new(tower::service_fn(answer), "n");
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let (approver, apiserver) = (
            Approver::new(cluster, "pods".to_owned(), ServerNameSources::default()),
            ApiserverNames::default(),
        );
        tokio::select! {
            ended = approver.follow(client, &apiserver, &|| ()) => panic!("{ended:?}"),
            patch = is_patched.recv() => {
                let patch: serde_json::Value = serde_json::from_slice(&patch.unwrap()).unwrap();
                assert_eq!(patch["metadata"], json!({"uid": "u1", "resourceVersion": "7"}), "the patch must apply to this request only");
                assert_eq!(patch["status"]["conditions"][0]["type"], "Approved");
            }
        }
        let log_text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert!(
            log_text.contains("tunnel::audit")
                && log_text.contains("approving")
                && log_text.contains("csr-1"),
            "{log_text}"
        );
    }

    /// Returns the requested page of the list, by its continue token.
    fn page(request: &http::Request<Body>) -> String {
        let mut pairs = request.uri().query().unwrap_or_default().split('&');
        pairs.find_map(|pair| pair.strip_prefix("continue=")).unwrap_or("p1").to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn a_pass_continues_at_the_page_where_the_last_one_was_cut_off() {
        let (page_sender, mut pages) = tokio::sync::mpsc::channel(100);
        let answer = move |request: http::Request<Body>| {
            let page_sender = page_sender.clone();
            async move {
                let page = page(&request);
                page_sender.send(page.clone()).await.unwrap();
                let next = match page.as_str() {
                    "p1" => Ok("p2"),
                    "p2" => Ok("p3"),
                    "p3" => Err(json!({"continue": "p3-later"})),
                    "p3-later" => Ok("p4"),
                    _ => Err(json!({})),
                };
                if next.is_ok() {
                    // Two pages take longer than one pass may last.
                    sleep(Duration::from_secs(18)).await;
                }
                let list = json!({
                    "kind": "CertificateSigningRequestList", "apiVersion": "certificates.k8s.io/v1",
                    "metadata": {"resourceVersion": "1", "continue": next.clone().unwrap_or_default()},
                    "items": [],
                });
                let expired = |metadata| json!({"kind": "Status", "code": 410, "metadata": metadata});
                let status = if next.is_ok() { 200 } else { 410 };
                let body = next.map_or_else(expired, |_| list).to_string().into_bytes();
                Ok::<_, Infallible>(Response::builder().status(status).body(Body::from(body)).unwrap())
            }
        };
        let client = Client::new(tower::service_fn(answer), "n");
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let (approver, apiserver) = (
            Approver::new(cluster, "pods".to_owned(), ServerNameSources::default()),
            ApiserverNames::default(),
        );
        let mut looks = Vec::new();
        for _ in 0..3 {
            let look = approver.follow(client.clone(), &apiserver, &|| ());
            assert!(timeout(Duration::from_secs(30), look).await.is_err(), "the list never ends");
            looks.push(std::iter::from_fn(|| pages.try_recv().ok()).collect::<Vec<_>>().join(" "));
        }
        // A continue token expires: the response then contains a new one, or the list starts again.
        assert_eq!(looks, ["p1 p2", "p2 p3 p3-later", "p3-later p4 p1"]);
    }
}
