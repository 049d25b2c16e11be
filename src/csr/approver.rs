//! Approves or denies what is asked for, and touches nothing that is not ours.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, ObjectList, Patch, PatchParams, WatchEvent, WatchParams};
use kube::{Api, Client, Error, ResourceExt as _};
use serde_json::json;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::error::{CsrError, within};
use super::{Apiserver, Asked, Facts, Profile, Reach, Verdict, judge};
use crate::drain::Drain;
use crate::net::backoff::Backoff;
use crate::registry::Cluster;
use crate::telemetry::{AUDIT, printable};

/// Looks at every request of the cluster as it comes, one after the other.
#[derive(Debug)]
pub struct Approver {
    cluster: Cluster,
    pods: String,
    reach: Reach,
    /// Where the list goes on, if it was not seen to its end.
    next_page: Mutex<Option<String>>,
}

impl Approver {
    /// Asks nothing yet. `pods` is the user that the tunnel's pods are: `system:serviceaccount:NAMESPACE:NAME`, `reach` by what
    /// their ports may be reached; the namespace of `cluster` is that of its Services.
    pub fn new(cluster: Cluster, pods: String, reach: Reach) -> Self {
        Self { cluster, pods, reach, next_page: Mutex::default() }
    }

    /// Works until draining begins. `report` is told whether requests are seen, every few minutes at the least, so that who
    /// hears nothing knows that this has stopped; it must be quick.
    pub async fn run(self, report: impl Fn(Result<(), String>), drain: Drain) {
        let work = async {
            let mut backoff = Backoff::new();
            loop {
                let was_seen = AtomicBool::new(false);
                let seen = || {
                    was_seen.store(true, Relaxed);
                    report(Ok(()));
                };
                let cause = match timeout(LIST_EVERY, self.look(&seen)).await {
                    Ok(Ok(never)) => match never {},
                    Ok(Err(cause)) => cause,
                    // What could not be recorded is tried again with the next list.
                    Err(_) if was_seen.into_inner() => {
                        backoff = Backoff::new();
                        continue;
                    }
                    Err(_) => CsrError::Watch(format!(
                        "not all requests were seen within {LIST_EVERY:?}; the next look goes on behind those that were"
                    )),
                };
                warn!("requests cannot be seen, trying on: {cause}");
                report(Err(cause.to_string()));
                sleep(backoff.pause(rand::random())).await;
            }
        };
        tokio::select! {
            () = drain.draining() => {}
            () = work => {}
        }
    }

    /// Judges all that there are, then each that comes. The client is made anew each time: its token may be over.
    async fn look(&self, seen: &impl Fn()) -> Result<Infallible, CsrError> {
        let (client, _) = self.cluster.connect().await?;
        let apiserver = Apiserver::look_up(&self.cluster, &client).await?;
        self.follow(client, &apiserver, seen).await
    }

    async fn follow(
        &self,
        client: Client,
        apiserver: &Apiserver,
        seen: &impl Fn(),
    ) -> Result<Infallible, CsrError> {
        let (requests, nodes) = (Api::all(client.clone()), Api::all(client));
        let settle = async |csr: &CertificateSigningRequest| {
            if let Err(cause) = self.settle(csr, apiserver, &requests, &nodes).await {
                warn!(
                    csr = csr.name_any(),
                    "it could not be judged, and will be within {LIST_EVERY:?}: {cause}"
                );
            }
        };
        let version = loop {
            let page = self.page(&requests).await?;
            for csr in &page.items {
                settle(csr).await;
            }
            if self.next_page().is_none() {
                break page.metadata.resource_version.unwrap_or_default();
            }
        };
        seen();
        let mut events =
            pin!(requests.watch(&WatchParams::default(), &version).await.map_err(|cause| unseen(&cause))?);
        while let Some(event) = events.next().await {
            match event.map_err(|cause| unseen(&cause))? {
                WatchEvent::Added(csr) | WatchEvent::Modified(csr) => settle(&csr).await,
                WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
                WatchEvent::Error(status) => return Err(unseen(&Error::Api(status))),
            }
        }
        Err(CsrError::Watch("the watch has ended".to_owned()))
    }

    /// The page behind the one before, although that may have been of an earlier look: requests that sort first, however
    /// many there are, only delay the others.
    async fn page(
        &self,
        requests: &Api<CertificateSigningRequest>,
    ) -> Result<ObjectList<CertificateSigningRequest>, CsrError> {
        loop {
            let token = self.next_page().clone();
            let params = ListParams { continue_token: token.clone(), ..ListParams::default().limit(PAGE) };
            match requests.list(&params).await {
                Ok(page) => {
                    *self.next_page() = page.metadata.continue_.clone().filter(|token| !token.is_empty());
                    return Ok(page);
                }
                // The list as it was has been forgotten, after some minutes. With that comes where it goes on as it is now.
                Err(Error::Api(status)) if status.code == 410 && token.is_some() => {
                    let now = status.metadata.and_then(|metadata| metadata.continue_);
                    *self.next_page() = now.filter(|now| !now.is_empty());
                }
                Err(cause) => return Err(unseen(&cause)),
            }
        }
    }

    fn next_page(&self) -> MutexGuard<'_, Option<String>> {
        self.next_page.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Judges one, and records the verdict.
    async fn settle(
        &self,
        csr: &CertificateSigningRequest,
        apiserver: &Apiserver,
        requests: &Api<CertificateSigningRequest>,
        nodes: &Api<Node>,
    ) -> Result<(), CsrError> {
        if is_settled(csr) {
            return Ok(());
        }
        let Some(asked) = Asked::read(csr) else {
            debug!(csr = csr.name_any(), "not ours: it is no request that can be read");
            return Ok(());
        };
        let facts = match (asked.profile(), asked.node()) {
            (Some(Profile::Agent), Some(node)) => {
                let addresses = within(nodes.get_opt(node)).await?.as_ref().map(addresses);
                Facts { addresses, ..Facts::default() }
            }
            // Others are refused whatever they ask for.
            (Some(Profile::Server), _) if asked.requester == self.pods => {
                Facts { reached: self.reach.look_up(&self.cluster).await?.names, ..Facts::default() }
            }
            _ => Facts::default(),
        };
        let (Some(uid), Some(version)) = (csr.uid(), csr.resource_version()) else {
            return Err(CsrError::Gone);
        };
        let (name, requester) = (csr.name_any(), printable(&asked.requester));
        let (kind, reason, why) = match judge(&asked, &self.pods, apiserver, &facts) {
            Verdict::NotOurs => return Ok(()),
            Verdict::Approve => ("Approved", "AutoApproved", "its requester may have it".to_owned()),
            Verdict::Deny(why) => ("Denied", "NotPermitted", why),
        };
        let message = format!("tunnel approve: {why}");
        let condition = json!({"type": kind, "status": "True", "reason": reason, "message": message});
        // It counts for this very request alone: neither another one by its name gets it, nor is somebody else's overwritten.
        let patch = json!({
            "metadata": {"uid": uid, "resourceVersion": version},
            "status": {"conditions": [condition]},
        });
        // Before it is done: a stop may come while kube-apiserver does it, and nothing is approved without a line.
        match asked.profile().map(Profile::name) {
            profile if kind == "Denied" => {
                warn!(target: AUDIT, csr = name, profile, %requester, "denying: {why}");
            }
            profile => info!(target: AUDIT, csr = name, profile, %requester, "approving"),
        }
        let params = PatchParams::default();
        match within(requests.patch_approval(&name, &params, &Patch::Merge(&patch))).await {
            Err(CsrError::Gone) => {
                info!(target: AUDIT, csr = name, "somebody else was quicker: nothing was done")
            }
            done => drop(done?),
        }
        Ok(())
    }
}

fn unseen(cause: &Error) -> CsrError {
    CsrError::Watch(cause.to_string())
}

/// Whether somebody has judged it already.
fn is_settled(csr: &CertificateSigningRequest) -> bool {
    let status = csr.status.as_ref();
    let judged = status.and_then(|status| status.conditions.as_ref()).is_some_and(|all| !all.is_empty());
    judged || status.is_some_and(|status| status.certificate.is_some())
}

fn addresses(node: &Node) -> BTreeSet<IpAddr> {
    let all = node.status.as_ref().and_then(|status| status.addresses.as_ref());
    all.into_iter().flatten().filter_map(|at| at.address.parse().ok()).collect()
}

/// Requests on one page of a list: each may have more than a megabyte, and all of a page are in memory at once.
const PAGE: u32 = 4;

/// All requests are looked at again after so long: what could not be judged has its next try then.
const LIST_EVERY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::Request;
    use http::Response;
    use k8s_openapi::ByteString;
    use kube::client::Body;
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    /// What is logged.
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

    /// One request of the pods, by kube-apiserver's hand.
    fn asked() -> serde_json::Value {
        let profile = Profile::ProxyClient;
        let request = Request::new(profile.common_name(), profile.organization(), &[]).unwrap();
        json!({
            "metadata": {"name": "csr-1", "uid": "u1", "resourceVersion": "7"},
            "spec": {
                "request": ByteString(request.pem().as_bytes().to_vec()), "signerName": profile.signer(),
                "usages": profile.usages(), "username": "pods",
            },
        })
    }

    #[tokio::test]
    async fn nothing_is_approved_without_a_line_even_if_it_is_stopped_meanwhile() {
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
                assert!(query.contains("limit=4"), "a page of large requests must be small: {query}");
                let list = json!({
                    "kind": "CertificateSigningRequestList", "apiVersion": "certificates.k8s.io/v1",
                    "metadata": {"resourceVersion": "1"}, "items": [asked()],
                });
                Ok::<_, Infallible>(Response::new(Body::from(list.to_string().into_bytes())))
            }
        };
        let client = Client::new(tower::service_fn(answer), "n");
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let (approver, apiserver) =
            (Approver::new(cluster, "pods".to_owned(), Reach::default()), Apiserver::default());
        tokio::select! {
            ended = approver.follow(client, &apiserver, &|| ()) => panic!("{ended:?}"),
            patch = is_patched.recv() => {
                let patch: serde_json::Value = serde_json::from_slice(&patch.unwrap()).unwrap();
                assert_eq!(patch["metadata"], json!({"uid": "u1", "resourceVersion": "7"}), "for this one alone");
                assert_eq!(patch["status"]["conditions"][0]["type"], "Approved");
            }
        }
        let said = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert!(said.contains("audit") && said.contains("approving") && said.contains("csr-1"), "{said}");
    }

    /// Which page of the list is asked for, by its continue token.
    fn page(request: &http::Request<Body>) -> String {
        let mut pairs = request.uri().query().unwrap_or_default().split('&');
        pairs.find_map(|pair| pair.strip_prefix("continue=")).unwrap_or("p1").to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_requests_that_sort_first_does_not_keep_later_ones_from_their_turn() {
        let (asked_for, mut pages) = tokio::sync::mpsc::channel(100);
        let answer = move |request: http::Request<Body>| {
            let asked_for = asked_for.clone();
            async move {
                let page = page(&request);
                asked_for.send(page.clone()).await.unwrap();
                let next = match page.as_str() {
                    "p1" => Ok("p2"),
                    "p2" => Ok("p3"),
                    "p3" => Err(json!({"continue": "p3-later"})),
                    "p3-later" => Ok("p4"),
                    _ => Err(json!({})),
                };
                if next.is_ok() {
                    // Two pages take longer than a look has.
                    sleep(Duration::from_secs(18)).await;
                }
                let list = json!({
                    "kind": "CertificateSigningRequestList", "apiVersion": "certificates.k8s.io/v1",
                    "metadata": {"resourceVersion": "1", "continue": next.clone().unwrap_or_default()},
                    "items": [],
                });
                let gone = |metadata| json!({"kind": "Status", "code": 410, "metadata": metadata});
                let status = if next.is_ok() { 200 } else { 410 };
                let body = next.map_or_else(gone, |_| list).to_string().into_bytes();
                Ok::<_, Infallible>(Response::builder().status(status).body(Body::from(body)).unwrap())
            }
        };
        let client = Client::new(tower::service_fn(answer), "n");
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let (approver, apiserver) =
            (Approver::new(cluster, "pods".to_owned(), Reach::default()), Apiserver::default());
        let mut looks = Vec::new();
        for _ in 0..3 {
            let look = approver.follow(client.clone(), &apiserver, &|| ());
            assert!(timeout(Duration::from_secs(30), look).await.is_err(), "the list has no end");
            looks.push(std::iter::from_fn(|| pages.try_recv().ok()).collect::<Vec<_>>().join(" "));
        }
        // What a token stands for is forgotten in time: then another one comes with the answer, or it begins anew.
        assert_eq!(looks, ["p1 p2", "p2 p3 p3-later", "p3-later p4 p1"]);
    }
}
