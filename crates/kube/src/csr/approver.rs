//! Approves or denies requests for the three profiles, and leaves all others untouched.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, ObjectList, Patch, PatchParams, WatchEvent, WatchParams};
use kube::{Api, Client, Error, ResourceExt as _};
use parking_lot::{Mutex, MutexGuard};
use serde_json::json;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};
use x509_parser::asn1_rs;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::{ParsedCriAttribute, X509CriAttribute};
use x509_parser::extensions::{GeneralName, ParsedExtension, X509Extension};
use x509_parser::oid_registry::OID_X509_EXT_SUBJECT_ALT_NAME;
use x509_parser::prelude::FromDer;
use x509_parser::x509::X509Name;

use crate::cluster::Cluster;
use crate::csr::names::NameLookup;
use crate::csr::{ApiserverNames, CsrError, Profile, with_timeout};
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_base::logging::{AUDIT, printable};

/// Decides on each CertificateSigningRequest of the cluster, one after the other.
#[derive(Debug)]
pub struct Approver {
    cluster: Cluster,
    pods: String,
    reach: NameLookup,
    /// Continue token of the list, if it was not read to its end.
    next_page: Mutex<Option<String>>,
}

impl Approver {
    /// Creates an approver; sends no request. `pods` is the servers' user (`system:serviceaccount:NAMESPACE:NAME`), and
    /// `reach` lists how clients reach their listeners. The namespace of `cluster` is that of its Services.
    pub fn new(cluster: Cluster, pods: String, reach: NameLookup) -> Self {
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
                    Err(_) => CsrError::Watch(format!(
                        "not all requests were listed within {LIST_INTERVAL:?}; the next pass continues after them"
                    )),
                };
                warn!(error = %cause, "cannot list requests, retrying");
                report(Err(cause.to_string()));
                sleep(backoff.pause(rand::random())).await;
            }
        };
        tokio::select! {
            () = drain.draining() => {}
            () = work => {}
        }
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
        let (requests, nodes) = (Api::all(client.clone()), Api::all(client));
        let settle = async |csr: &CertificateSigningRequest| {
            if let Err(cause) = self.record_decision(csr, apiserver, &requests, &nodes).await {
                warn!(
                    csr = csr.name_any(), error = %cause, retry_within = ?LIST_INTERVAL,
                    "cannot decide on request, retrying"
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
        Err(CsrError::Watch("the watch ended".to_owned()))
    }

    /// Returns the page after the previous one, even if that belongs to an earlier pass: any number of requests that
    /// sort first then only delays the others.
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
                // The list's snapshot expired after some minutes. The error contains a token that continues in the
                // current list.
                Err(Error::Api(status)) if status.code == 410 && token.is_some() => {
                    let now = status.metadata.and_then(|metadata| metadata.continue_);
                    *self.next_page() = now.filter(|now| !now.is_empty());
                }
                Err(cause) => return Err(unseen(&cause)),
            }
        }
    }

    fn next_page(&self) -> MutexGuard<'_, Option<String>> {
        self.next_page.lock()
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
        let Some(request) = CsrInfo::read(csr) else {
            debug!(csr = csr.name_any(), "ignoring unreadable request");
            return Ok(());
        };
        let facts = match (request.profile(), request.node()) {
            (Some(Profile::Edge), Some(node)) => {
                let addresses = with_timeout(nodes.get_opt(node)).await?.as_ref().map(addresses);
                DecisionFacts { addresses, ..DecisionFacts::default() }
            }
            // Requests of other users are denied, whatever their names.
            (Some(Profile::Server), _) if request.requester == self.pods => DecisionFacts {
                reachable_names: self.reach.look_up(&self.cluster).await?.names,
                ..DecisionFacts::default()
            },
            _ => DecisionFacts::default(),
        };
        let (Some(uid), Some(version)) = (csr.uid(), csr.resource_version()) else {
            return Err(CsrError::ChangedOrDeleted);
        };
        let (name, requester) = (csr.name_any(), printable(&request.requester));
        let (kind, reason, why) = match decide(&request, &self.pods, apiserver, &facts) {
            Decision::NotOurs => return Ok(()),
            Decision::Approve => ("Approved", "AutoApproved", "requester is authorized".to_owned()),
            Decision::Deny(why) => ("Denied", "NotPermitted", why),
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

fn unseen(cause: &Error) -> CsrError {
    CsrError::Watch(cause.to_string())
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

// The decision whether a certificate may be issued. It depends only on its arguments.

/// The approver's decision on a CertificateSigningRequest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The request matches none of the three profiles and is left untouched.
    NotOurs,
    /// The certificate may be issued.
    Approve,
    /// The certificate must not be issued, for this reason: one printable line of at most 200 bytes.
    Deny(String),
}

/// The state of the cluster that a decision depends on.
#[derive(Debug, Clone, Default)]
pub struct DecisionFacts {
    /// Addresses of the requester's Node. `None` means that there is no such Node.
    pub addresses: Option<BTreeSet<IpAddr>>,
    /// Names and addresses of the servers' listeners, in the form used in certificates.
    pub reachable_names: BTreeSet<String>,
}

/// Decides on a request. `pods` is the servers' user (their service account).
pub fn decide(request: &CsrInfo, pods: &str, apiserver: &ApiserverNames, facts: &DecisionFacts) -> Decision {
    let Some(profile) = request.profile() else { return Decision::NotOurs };
    let permitted = check_common(request, profile).and_then(|()| match profile {
        Profile::Server => check_requester(request, pods)
            .and_then(|()| check_server(&request.content, apiserver, &facts.reachable_names)),
        Profile::ProxyClient => {
            check_requester(request, pods).and_then(|()| check_proxy_client(&request.content))
        }
        Profile::Edge => check_edge(request, facts.addresses.as_ref()),
    });
    permitted.map_or_else(|why| Decision::Deny(printable(&why)), |()| Decision::Approve)
}

/// Checks the rules common to all profiles.
fn check_common(request: &CsrInfo, profile: Profile) -> Result<(), String> {
    if let Some(odd) = request.content.odd {
        return Err(format!("{odd}, which this approver does not accept"));
    }
    let usages: BTreeSet<&str> = request.usages.iter().map(String::as_str).collect();
    let expected = profile.usages();
    if request.usages.len() != expected.len() || usages != BTreeSet::from(expected) {
        return Err(format!("expected exactly the usages {expected:?}, found {:?}", request.usages));
    }
    Ok(())
}

fn check_requester(request: &CsrInfo, pods: &str) -> Result<(), String> {
    if request.requester == pods {
        return Ok(());
    }
    Err(format!("only {pods} may request this certificate, not {:?}", request.requester))
}

fn check_server(
    content: &Content,
    apiserver: &ApiserverNames,
    reachable_names: &BTreeSet<String>,
) -> Result<(), String> {
    if content.dns.is_empty() && content.ips.is_empty() {
        return Err("it has no alternative name, so no client would accept it".to_owned());
    }
    for name in content.dns.iter().cloned().chain(content.ips.iter().map(IpAddr::to_string)) {
        if apiserver.is_at(&name) {
            return Err(format!("{name:?} is a name of kube-apiserver"));
        }
        if !reachable_names.contains(&name) {
            return Err(format!(
                "no known Service (--service) is reachable at {name:?}, and it is not listed with --san"
            ));
        }
    }
    Ok(())
}

fn check_proxy_client(content: &Content) -> Result<(), String> {
    if content.dns.is_empty() && content.ips.is_empty() {
        return Ok(());
    }
    Err("it has alternative names, but a proxy client must have none".to_owned())
}

fn check_edge(request: &CsrInfo, addresses: Option<&BTreeSet<IpAddr>>) -> Result<(), String> {
    let Some(node) = request.node() else {
        return Err(format!(
            "only a node may request this certificate, for itself (user system:node:NAME in group system:nodes), not {:?}",
            request.requester
        ));
    };
    let Content { dns, ips, .. } = &request.content;
    if *dns != [node] {
        return Err(format!("expected exactly {node:?}, the requesting node, as DNS name, found {dns:?}"));
    }
    let Some(addresses) = addresses else { return Err(format!("there is no Node {node}")) };
    match ips.iter().find(|ip| !addresses.contains(ip)) {
        Some(ip) => Err(format!("{ip} is no address of Node {node}")),
        None => Ok(()),
    }
}

// The fields of a CertificateSigningRequest that the approver reads.

/// A request and its requester, which kube-apiserver has authenticated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsrInfo {
    /// Name of the signer.
    pub signer: String,
    /// User who created the request.
    pub requester: String,
    /// Groups of this user.
    pub groups: Vec<String>,
    /// Requested key usages.
    pub usages: Vec<String>,
    /// Content of the PKCS#10 request.
    pub content: Content,
}

impl CsrInfo {
    /// Reads a CertificateSigningRequest. Returns `None` if its PKCS#10 text is invalid.
    pub fn read(csr: &CertificateSigningRequest) -> Option<Self> {
        let spec = &csr.spec;
        Some(Self {
            signer: spec.signer_name.clone(),
            requester: spec.username.clone().unwrap_or_default(),
            groups: spec.groups.clone().unwrap_or_default(),
            usages: spec.usages.clone().unwrap_or_default(),
            content: Content::read(&spec.request.0)?,
        })
    }

    /// Returns the profile with exactly this signer, common name and organization, or `None` if the request is not
    /// ours.
    pub fn profile(&self) -> Option<Profile> {
        let Content { common_names, organizations, .. } = &self.content;
        Profile::ALL.into_iter().find(|profile| {
            self.signer == profile.signer()
                && *common_names == [profile.common_name()]
                && *organizations == [profile.organization()]
        })
    }

    /// Returns the node if its kubelet is the requester, otherwise `None`.
    pub fn node(&self) -> Option<&str> {
        // Both name and group are required, as in Kubernetes itself.
        let grouped = self.groups.iter().any(|group| group == "system:nodes");
        self.requester.strip_prefix("system:node:").filter(|node| grouped && !node.is_empty())
    }
}

// Content of the PKCS#10 text. A request that could be read in more than one way is marked as odd, because the signer's
// parser may differ from ours.

/// The parsed contents of a certificate request (PKCS #10) that the approver checks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// Common names of the subject.
    pub common_names: Vec<String>,
    /// Organizations of the subject.
    pub organizations: Vec<String>,
    /// Alternative names that are DNS names.
    pub dns: Vec<String>,
    /// Alternative names that are addresses.
    pub ips: Vec<IpAddr>,
    /// Unexpected or ambiguous content, as a clause.
    pub odd: Option<&'static str>,
}

impl Content {
    /// Reads a PEM-encoded PKCS#10 request. Returns `None` if it is invalid.
    pub fn read(pem: &[u8]) -> Option<Self> {
        let der = decoded(pem)?;
        let (rest, request) = X509CertificationRequest::from_der(&der).ok()?;
        if !rest.is_empty() {
            return None;
        }
        let info = &request.certification_request_info;
        let mut content = Self { odd: oddity_of(&info.subject), ..Self::default() };
        content.common_names = texts(info.subject.iter_common_name())?;
        content.organizations = texts(info.subject.iter_organization())?;
        let mut extensions = Vec::new();
        for (n, attribute) in info.iter_attributes().enumerate() {
            match requested(attribute) {
                Some(requested) if n == 0 => extensions.extend(requested),
                _ => content.odd = Some("it has attributes other than one extension request"),
            }
        }
        for (n, extension) in names(&extensions).enumerate() {
            match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(names) if n == 0 => {
                    names.general_names.iter().for_each(|name| content.take(name));
                }
                _ => content.odd = Some("its alternative names are ambiguous"),
            }
        }
        Some(content)
    }

    fn take(&mut self, name: &GeneralName<'_>) {
        match name {
            GeneralName::DNSName(name) => self.dns.push((*name).to_owned()),
            GeneralName::IPAddress(bytes) => {
                match (<[u8; 4]>::try_from(*bytes), <[u8; 16]>::try_from(*bytes)) {
                    (Ok(v4), _) => self.ips.push(IpAddr::V4(Ipv4Addr::from(v4))),
                    (_, Ok(v6)) => self.ips.push(IpAddr::V6(Ipv6Addr::from(v6))),
                    _ => self.odd = Some("one of its addresses is invalid"),
                }
            }
            _ => self.odd = Some("it has alternative names that are neither DNS names nor addresses"),
        }
    }
}

/// Returns the DER content of a PEM text that holds exactly one block.
fn decoded(pem: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(pem).ok()?.trim();
    let body = text.strip_prefix("-----BEGIN CERTIFICATE REQUEST-----")?;
    let body = body.strip_suffix("-----END CERTIFICATE REQUEST-----")?;
    let plain: String = body.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    STANDARD.decode(plain).ok()
}

/// Returns `None` if a value has an unsupported string encoding.
fn texts<'a>(
    values: impl Iterator<Item = &'a x509_parser::x509::AttributeTypeAndValue<'a>>,
) -> Option<Vec<String>> {
    values.map(|value| value.as_str().ok().map(str::to_owned)).collect()
}

/// Returns the reason if the subject has attributes other than common names and organizations.
fn oddity_of(subject: &X509Name<'_>) -> Option<&'static str> {
    let known = subject.iter_common_name().count() + subject.iter_organization().count();
    (subject.iter_attributes().count() != known).then_some("its subject has more than a CN and an O")
}

/// Returns the extensions that an attribute requests. Returns `None` for any other attribute, and for one with several
/// values, because the parser returns only the first.
fn requested<'a>(attribute: &'a X509CriAttribute<'a>) -> Option<&'a [X509Extension<'a>]> {
    let ParsedCriAttribute::ExtensionRequest(request) = attribute.parsed_attribute() else { return None };
    let (read, set) = asn1_rs::Header::from_der(attribute.value).ok()?;
    let whole = set.length().definite().ok()? == read.len();
    whole.then_some(&request.extensions)
}

fn names<'a>(extensions: &'a [&'a X509Extension<'a>]) -> impl Iterator<Item = &'a X509Extension<'a>> {
    extensions.iter().copied().filter(|extension| extension.oid == OID_X509_EXT_SUBJECT_ALT_NAME)
}

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
        let (approver, apiserver) =
            (Approver::new(cluster, "pods".to_owned(), NameLookup::default()), ApiserverNames::default());
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
        let (approver, apiserver) =
            (Approver::new(cluster, "pods".to_owned(), NameLookup::default()), ApiserverNames::default());
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

#[cfg(test)]
mod judge_tests;

#[cfg(test)]
mod content_tests {
    use rcgen::{Attribute, CertificateParams, DnType, KeyPair, SanType};

    use tunnel_net::pki::CertificateRequest;

    use super::*;

    #[test]
    fn the_content_of_a_request_is_read() {
        let request = CertificateRequest::new(
            "tunnel-agent-client",
            "openyurt:yurttunnel",
            &["n1", "10.0.0.1", "fd00::1"],
        );
        let content = Content::read(request.unwrap().pem().as_bytes()).unwrap();
        assert_eq!(content.common_names, ["tunnel-agent-client"]);
        assert_eq!(content.organizations, ["openyurt:yurttunnel"]);
        assert_eq!(content.dns, ["n1"]);
        assert_eq!(content.ips, ["10.0.0.1", "fd00::1"].map(|ip| ip.parse::<IpAddr>().unwrap()));
        assert_eq!(content.odd, None);
        let bare = CertificateRequest::new("tunnel-proxy-client", "openyurt:yurttunnel", &[]).unwrap();
        let bare = Content::read(bare.pem().as_bytes()).unwrap();
        assert!(bare.dns.is_empty() && bare.ips.is_empty() && bare.odd.is_none());
    }

    #[test]
    fn an_invalid_request_is_not_read() {
        let request = CertificateRequest::new("a", "b", &["n1"]).unwrap().pem().to_owned();
        let more = format!("{request}{request}");
        let before = format!("x\n{request}");
        let cut = request.replacen("MI", "", 1);
        for text in ["", "junk", &more, &before, &cut, "-----BEGIN CERTIFICATE REQUEST-----"] {
            assert_eq!(Content::read(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Content::read(b"\xff"), None);
    }

    /// Returns the oddity of a request with these parameters and additional attributes.
    fn odd(change: impl FnOnce(&mut CertificateParams), more: Vec<Attribute>) -> Option<&'static str> {
        let mut params = CertificateParams::new(["n1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "a");
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let pem = params.serialize_request_with_attributes(&key, more).unwrap().pem().unwrap();
        Content::read(pem.as_bytes()).unwrap().odd
    }

    #[test]
    fn an_ambiguous_request_is_odd() {
        assert_eq!(odd(|_| (), Vec::new()), None);
        let unit = |p: &mut CertificateParams| p.distinguished_name.push(DnType::OrganizationalUnitName, "u");
        assert!(odd(unit, Vec::new()).unwrap().contains("subject"));
        let mail = |p: &mut CertificateParams| {
            p.subject_alt_names.push(SanType::Rfc822Name("a@b.c".try_into().unwrap()));
        };
        assert!(odd(mail, Vec::new()).unwrap().contains("neither DNS names"));
        // A second extension request, which signers written in Go read as well.
        let extension_request: &[u64] = &[1, 2, 840, 113_549, 1, 9, 14];
        let san: &[u8] = &[0x30, 0x0d, 0x30, 0x0b, 6, 3, 0x55, 0x1d, 0x11, 4, 4, 0x30, 2, 0x82, 0];
        let values = [&[0x31, 15][..], san].concat();
        let second = Attribute { oid: extension_request, values: values.clone() };
        assert!(odd(|_| (), vec![second]).unwrap().contains("attributes other"));
        // Two values in one attribute.
        let two = Attribute { oid: extension_request, values: [&[0x31, 30][..], san, san].concat() };
        let alone = |p: &mut CertificateParams| p.subject_alt_names.clear();
        assert!(odd(alone, vec![two]).unwrap().contains("attributes other"));
        let one = Attribute { oid: extension_request, values };
        assert_eq!(odd(alone, vec![one]), None);
    }
}
