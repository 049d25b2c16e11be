//! Edges prove their node by the token of their pod's ServiceAccount, which kube-apiserver reviews.

mod jwt;
pub mod last_known;
mod peers;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use futures_util::future::BoxFuture;
use http::Request;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use crate::cluster::{Cluster, ClusterError, StateReport};
use crate::partial::PartialPod;
use crate::pod_tokens::jwt::{BoundPod, Claims, KeySet};
use crate::pod_tokens::last_known::{KnownKeys, LastKnown, keep};
use crate::pod_tokens::peers::Answer;
use crate::watcher::{Event, ObjectWatcher, WatchedObjects, publish};
use tunnel_base::addresses::cluster_state::{EdgePod, KnownEdgePods, KnownNodes, PodProof, PodTokenReviewer};
use tunnel_base::drain::Drain;
use tunnel_base::logging::AUDIT;
use tunnel_base::policy::tokens::TokenError;
use tunnel_base::unix_time::now;
use tunnel_net::limiter::{FairLimiter, PermitLimits, Source};
use tunnel_proto::printable::printable;

/// Which tokens are accepted.
#[derive(Debug)]
pub struct PodTokenSettings {
    /// The cluster, with the namespace of the edges' pods.
    pub cluster: Cluster,
    /// Name of their ServiceAccount.
    pub account: String,
    /// Audience that the tokens must have.
    pub audience: String,
    /// Whether pods that are known may link, and links outlive their tokens, while kube-apiserver is away.
    pub outage: bool,
    /// The file in which the next process finds what this one knows.
    pub file: Option<PathBuf>,
}

/// Judges the tokens of edges' pods, and follows the pods.
#[derive(derive_more::Debug)]
#[debug("PodTokens({settings:?})")]
pub struct PodTokens {
    settings: PodTokenSettings,
    /// The client for reviews, with the name of the ServiceAccount as a user.
    client: Mutex<Option<(Client, String)>>,
    nodes: watch::Sender<KnownNodes>,
    pods: watch::Sender<KnownEdgePods>,
    keys: watch::Sender<KnownKeys>,
    /// What was answered about each token, by its hash. An answer that is awaited is locked.
    answers: Mutex<HashMap<[u8; 32], AnswerSlot>>,
    /// Shared fairly by sources: a token that nobody has signed also costs a review.
    reviews: FairLimiter,
    outage: Mutex<Outage>,
    /// What a peer has answered so far.
    answer: Mutex<Answer>,
    report: StateReport,
}

/// When kube-apiserver did not answer.
#[derive(Debug, Default)]
struct Outage {
    /// Since when the pods are not watched; at the start, the age of what is known of them.
    since: Option<Instant>,
    /// The last time.
    last: Option<Instant>,
    /// The pods whose links have outlived their tokens, each of which is audited once.
    outlived: BTreeSet<String>,
}

type AnswerSlot = Arc<AsyncMutex<Option<ReviewAnswer>>>;

/// The answer to a review: the pod with its Node if kube-apiserver names that, or the reason for a refusal.
#[derive(Debug, Clone)]
struct ReviewAnswer {
    until: Instant,
    pod: Result<Option<String>, String>,
}

/// The part of kube-apiserver's description of itself that is read.
#[derive(Deserialize)]
struct Discovery {
    issuer: String,
}

impl PodTokenReviewer for PodTokens {
    /// Waits for the answer of kube-apiserver, unless there is one from before.
    fn review<'a>(&'a self, token: &'a str, from: IpAddr) -> BoxFuture<'a, Result<PodProof, TokenError>> {
        Box::pin(async move {
            let (client, subject) = self.connected().await.map_err(|cause| unchecked(&cause))?;
            let checked = Claims::check(token, &subject, &self.settings.audience, now());
            let (claims, bound) = checked.map_err(TokenError::PodToken)?;
            let slot = self.slot(token);
            // Held during the review, so that no token is reviewed twice at once.
            let mut known = slot.lock().await;
            let answer = match &*known {
                Some(answer) if answer.until > Instant::now() => answer.clone(),
                _ => match self.ask(client, token, from, &subject, &bound).await {
                    Ok(pod) => {
                        let keep = if pod.is_ok() { KEEP_YES } else { KEEP_NO };
                        let rest = Duration::from_secs(claims.exp.saturating_sub(now()));
                        known.insert(ReviewAnswer { until: Instant::now() + keep.min(rest), pod }).clone()
                    }
                    Err(cause @ (ClusterError::Silent | ClusterError::Failed(_))) => {
                        return self.check_alone(token, &claims, &bound, &cause);
                    }
                    Err(cause) => return Err(unchecked(&cause.needing("create on tokenreviews"))),
                },
            };
            drop(known);
            let node = answer.pod.map_err(TokenError::PodToken)?;
            // The pod may be so new that the watch does not have it yet.
            let mut pods = self.pods();
            let is_known = pods.wait_for(|pods| find(pods, &bound).is_some());
            if timeout(POD_TIMEOUT, is_known).await.is_err() {
                let why = format!("the watch does not have its pod {}", bound.name);
                let is_followed = self.pods.borrow().is_some() && self.outage.lock().since.is_none();
                return Err(if is_followed { TokenError::PodToken } else { TokenError::PodTokenUnchecked }(
                    why,
                ));
            }
            self.proof(&claims, bound, node)
        })
    }

    /// Its pod must exist, and its token must not have ended, unless kube-apiserver, which would renew it, is away.
    fn recheck(&self, proof: &PodProof) -> Result<(), TokenError> {
        let PodProof { node, pod, uid, ends } = proof;
        let bound = BoundPod { name: pod.clone(), uid: uid.clone() };
        let pods = self.pods.borrow();
        if pods.is_some() && find(&pods, &bound).is_none() {
            return Err(TokenError::NoPod(node.clone()));
        }
        let over = now().saturating_sub(*ends);
        let mut outage = self.outage.lock();
        // The kubelet also needs a while to renew tokens after an outage.
        let is_away = outage.last.is_some_and(|last| last.elapsed() < AFTER_OUTAGE);
        if over == 0 {
            Ok(())
        } else if self.settings.outage && is_away && over < MAX_OUTAGE.as_secs() {
            if outage.outlived.insert(uid.clone()) {
                info!(target: AUDIT, %node, pod, "link outlives its ServiceAccount token: kube-apiserver is away");
            }
            Ok(())
        } else {
            Err(TokenError::PodTokenEnded)
        }
    }

    fn pods(&self) -> watch::Receiver<KnownEdgePods> {
        self.pods.subscribe()
    }

    fn question(&self) -> Option<Vec<u8>> {
        self.ask_peers(String::new())
    }

    fn on_peer(&self, said: &[u8]) -> Option<Vec<u8>> {
        self.answer_peer(said)
    }
}

impl PodTokens {
    /// Creates it with what an earlier process knew; sends no request. Calls `report` when the watch of pods works or
    /// fails.
    pub fn new(
        settings: PodTokenSettings,
        LastKnown { pods, keys, age, .. }: LastKnown,
        nodes: watch::Sender<KnownNodes>,
        report: StateReport,
    ) -> Arc<Self> {
        let since = age.and_then(|age| Instant::now().checked_sub(age));
        Arc::new(Self {
            settings,
            client: Mutex::default(),
            nodes,
            pods: watch::Sender::new(pods),
            keys: watch::Sender::new(keys),
            answers: Mutex::default(),
            reviews: FairLimiter::new(REVIEWS),
            outage: Mutex::new(Outage { since, ..Outage::default() }),
            answer: Mutex::default(),
            report,
        })
    }

    /// Follows the pods and the keys until draining starts, and writes the file of these and the Nodes.
    pub async fn follow(self: Arc<Self>, drain: Drain) {
        let of_account = format!("spec.serviceAccountName={}", self.settings.account);
        let which = ListParams::default().fields(&of_account);
        let watcher = ObjectWatcher { cluster: &self.settings.cluster, what: "pods of edges", which };
        let mut pods = WatchedObjects::default();
        let on_event = |event| self.on_event(event, &mut pods);
        let pods = Box::pin(watcher.run(Api::namespaced, on_event, |state| self.on_state(state)));
        let file = self.settings.file.clone();
        let keep = keep(file, self.nodes.subscribe(), self.pods(), self.keys.subscribe(), || self.pods_age());
        drain.run_until(async { tokio::join!(pods, self.follow_keys(), keep) }).await;
    }

    fn on_event(&self, event: Event<PartialPod>, pods: &mut WatchedObjects<EdgePod>) {
        let kept = |pod: &PartialPod| EdgePod {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            node: pod.spec.node_name.clone(),
            deleted: pod.metadata.deletion_timestamp.as_ref().map(|at| at.0.as_second().unsigned_abs()),
        };
        if pods.take(event, kept) {
            publish(&self.pods, pods.known().cloned());
        }
    }

    /// Notes whether the pods are watched.
    fn on_state(&self, state: Result<(), ClusterError>) {
        let mut outage = self.outage.lock();
        match state {
            Ok(()) => outage.since = None,
            Err(ClusterError::Silent | ClusterError::Failed(_)) => {
                let now = Instant::now();
                outage.last = Some(now);
                if outage.since.is_none() {
                    outage.since = Some(now);
                    outage.outlived.clear();
                }
            }
            Err(_) => {}
        }
        drop(outage);
        (self.report)(state.map_err(|cause| cause.to_string()));
    }

    /// Returns the time since when the pods are not followed; `None` if they are.
    fn pods_age(&self) -> Option<Duration> {
        self.outage.lock().since.map(|since| since.elapsed())
    }

    /// Asks kube-apiserver whose token it is. Returns the Node of the pod if it names that, or why the token is refused.
    async fn ask(
        &self,
        client: Client,
        token: &str,
        from: IpAddr,
        subject: &str,
        bound: &BoundPod,
    ) -> Result<Result<Option<String>, String>, ClusterError> {
        let Ok(_permit) = self.reviews.acquire(&Source::of(from)).await else {
            return Err(ClusterError::Silent);
        };
        // So that a thousand edges do not each wait for a kube-apiserver that does not answer.
        if self.outage.lock().last.is_some_and(|last| last.elapsed() < NO_REVIEW) {
            return Err(ClusterError::Silent);
        }
        let audiences = Some(vec![self.settings.audience.clone()]);
        let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences };
        let review = TokenReview { spec, ..TokenReview::default() };
        let api: Api<TokenReview> = Api::all(client);
        let answered = timeout(REVIEW_TIMEOUT, api.create(&PostParams::default(), &review)).await;
        // A caller may provoke a refusal of the request itself, which is no outage.
        let is_outage = match &answered {
            Ok(Err(kube::Error::Api(status))) => status.code >= 500,
            _ => true,
        };
        match answered.map_err(|_| ClusterError::Silent).and_then(|answer| Ok(answer?)) {
            Ok(answer) => {
                let status = answer.status.unwrap_or_default();
                Ok(reviewed(status, subject, &self.settings.audience, bound))
            }
            Err(cause) => {
                // The next review reads the files again: the credential may have expired.
                *self.client.lock() = None;
                if is_outage {
                    self.outage.lock().last = Some(Instant::now());
                }
                Err(cause)
            }
        }
    }

    /// Checks a token while kube-apiserver is away: a pod that is known from before may come back.
    fn check_alone(
        &self,
        token: &str,
        claims: &Claims,
        bound: &BoundPod,
        cause: &ClusterError,
    ) -> Result<PodProof, TokenError> {
        let unknown = |why| Err(TokenError::PodTokenUnchecked(format!("{cause}; {why}")));
        if !self.settings.outage {
            return unknown("outage = false in [server.service_account]");
        }
        let keys = self.keys.borrow();
        let Some((issuer, keys)) = &*keys else { return unknown("its keys are not known yet") };
        if claims.iss != *issuer || !keys.has_signed(token) {
            return Err(TokenError::PodToken("no key of kube-apiserver has signed it".to_owned()));
        }
        if self.outage.lock().since.is_some_and(|since| since.elapsed() > MAX_OUTAGE) {
            return unknown("no pod is admitted after more than a day without it");
        }
        if find(&self.pods.borrow(), bound).is_none() {
            return unknown("only pods that were known before may link until it is back");
        }
        let proof = self.proof(claims, bound.clone(), None)?;
        info!(target: AUDIT, node = %proof.node, pod = proof.pod, error = %cause, "pod admitted by the published keys: kube-apiserver is away");
        Ok(proof)
    }

    /// Returns the proof of a pod that is known, on this node or on the one that it was assigned to.
    fn proof(&self, claims: &Claims, bound: BoundPod, node: Option<String>) -> Result<PodProof, TokenError> {
        let node = node.or_else(|| find(&self.pods.borrow(), &bound)?.node.clone());
        let node = node.as_deref().and_then(|node| node.parse().ok());
        let node = node.ok_or_else(|| TokenError::PodToken(format!("pod {} has no Node", bound.name)))?;
        Ok(PodProof { node, pod: bound.name, uid: bound.uid, ends: claims.exp })
    }

    /// Returns the place of the answer about a token.
    fn slot(&self, token: &str) -> AnswerSlot {
        let hash = digest(&SHA256, token.as_bytes()).as_ref().first_chunk().copied().unwrap_or_default();
        let mut answers = self.answers.lock();
        if answers.len() >= MAX_ANSWERS && !answers.contains_key(&hash) {
            answers.clear();
        }
        answers.entry(hash).or_default().clone()
    }

    /// Returns a client, and the user that the ServiceAccount is. Sends no request.
    async fn connected(&self) -> Result<(Client, String), ClusterError> {
        if let Some(known) = &*self.client.lock() {
            return Ok(known.clone());
        }
        let (client, namespace) = self.settings.cluster.connect().await?;
        let made = (client, format!("system:serviceaccount:{namespace}:{}", self.settings.account));
        Ok(self.client.lock().insert(made).clone())
    }

    /// Keeps the keys up to date, which are needed when nobody can be asked for them.
    async fn follow_keys(&self) {
        if !self.settings.outage {
            return;
        }
        loop {
            let fetched = timeout(REVIEW_TIMEOUT, self.fetch_keys()).await;
            let again = match fetched.map_err(|_| ClusterError::Silent).flatten() {
                Ok(keys) => {
                    self.keys.send_replace(Some(keys));
                    KEYS_INTERVAL
                }
                Err(error) => {
                    debug!(%error, "keys of ServiceAccount tokens not read");
                    KEYS_RETRY
                }
            };
            sleep(again).await;
        }
    }

    async fn fetch_keys(&self) -> Result<(String, KeySet), ClusterError> {
        let (client, _) = self.connected().await?;
        let get = |path: &str| Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError);
        let Discovery { issuer } = client.request(get("/.well-known/openid-configuration")?).await?;
        Ok((issuer, client.request(get("/openid/v1/jwks")?).await?))
    }
}

/// Returns the Node that a review names, or why it does not confirm what the token claims.
fn reviewed(
    status: TokenReviewStatus,
    subject: &str,
    audience: &str,
    bound: &BoundPod,
) -> Result<Option<String>, String> {
    let TokenReviewStatus { authenticated, audiences, error, user } = status;
    if authenticated != Some(true) {
        return Err(format!("kube-apiserver does not accept it: {}", printable(&error.unwrap_or_default())));
    }
    if !audiences.is_some_and(|all| all.iter().any(|one| one == audience)) {
        return Err("kube-apiserver does not know its audience".to_owned());
    }
    let UserInfo { extra, username, .. } = user.unwrap_or_default();
    if username.as_deref() != Some(subject) {
        let other = printable(&username.unwrap_or_default());
        return Err(format!("kube-apiserver says that it is for {other:?}"));
    }
    let extra = extra.unwrap_or_default();
    let of_pod = |what| Some(extra.get(&format!("authentication.kubernetes.io/{what}"))?.first()?.clone());
    if of_pod("pod-uid").as_ref() != Some(&bound.uid) || of_pod("pod-name").as_ref() != Some(&bound.name) {
        return Err("kube-apiserver says that it is bound to another pod, or to none".to_owned());
    }
    Ok(of_pod("node-name"))
}

/// Returns the pod if it is known. If its Node does not answer, a deleted pod stays in kube-apiserver. It does not count
/// after its grace period, as for kube-apiserver itself.
fn find<'a>(pods: &'a KnownEdgePods, bound: &BoundPod) -> Option<&'a EdgePod> {
    let pod = pods.as_ref()?.get(&bound.name)?;
    (pod.uid == bound.uid && pod.deleted.is_none_or(|at| at > now())).then_some(pod)
}

fn unchecked(cause: &ClusterError) -> TokenError {
    TokenError::PodTokenUnchecked(cause.to_string())
}

/// Time for which an answer is kept, at most until the token ends. A pod that is deleted is found by the watch.
const KEEP_YES: Duration = Duration::from_secs(600);
const KEEP_NO: Duration = Duration::from_secs(10);
/// Maximum number of answers that are kept. Then all are forgotten: another review costs a few milliseconds.
const MAX_ANSWERS: usize = 10_000;
/// Reviews at once, and calls that wait for one. Sources take turns.
const REVIEWS: PermitLimits = PermitLimits { permits: 16, per_source: 16, waiting: 1000, idle_timeout: None };
/// Timeout for a whole review, which is small, shorter than that of an edge for its answer.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);
/// Time without reviews after kube-apiserver did not answer.
const NO_REVIEW: Duration = Duration::from_secs(5);
/// Time for the watch to receive a new pod.
const POD_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without kube-apiserver for which known pods may link, and links outlive their tokens.
const MAX_OUTAGE: Duration = Duration::from_secs(24 * 3600);
/// Time after the last sign of an outage in which kubelets renew the tokens that ended meanwhile.
const AFTER_OUTAGE: Duration = Duration::from_secs(300);
/// Intervals of reading the keys: usually, and if that failed.
const KEYS_INTERVAL: Duration = Duration::from_secs(600);
const KEYS_RETRY: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
