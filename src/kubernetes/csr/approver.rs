//! Approves or denies what is asked for, and touches nothing that is not ours.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, ObjectList, Patch, PatchParams, WatchEvent, WatchParams};
use kube::{Api, Client, Error, ResourceExt as _};
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

use crate::kubernetes::cluster::Cluster;
use crate::kubernetes::csr::names::NameLookup;
use crate::kubernetes::csr::{Apiserver, CsrError, Profile, within};
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_base::logging::{AUDIT, printable};

/// Looks at every request of the cluster as it comes, one after the other.
#[derive(Debug)]
pub struct Approver {
    cluster: Cluster,
    pods: String,
    reach: NameLookup,
    /// Where the list goes on, if it was not seen to its end.
    next_page: Mutex<Option<String>>,
}

impl Approver {
    /// Asks nothing yet. `pods` is the user that the tunnel's pods are: `system:serviceaccount:NAMESPACE:NAME`, `reach` by what
    /// their ports may be reached; the namespace of `cluster` is that of its Services.
    pub fn new(cluster: Cluster, pods: String, reach: NameLookup) -> Self {
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
                let cause = match timeout(LIST_INTERVAL, self.run_pass(&seen)).await {
                    Ok(Ok(never)) => match never {},
                    Ok(Err(cause)) => cause,
                    // What could not be recorded is tried again with the next list.
                    Err(_) if was_seen.into_inner() => {
                        backoff = Backoff::new();
                        continue;
                    }
                    Err(_) => CsrError::Watch(format!(
                        "not all requests were seen within {LIST_INTERVAL:?}; the next look goes on behind those that were"
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
    async fn run_pass(&self, seen: &impl Fn()) -> Result<Infallible, CsrError> {
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
            if let Err(cause) = self.record_decision(csr, apiserver, &requests, &nodes).await {
                warn!(
                    csr = csr.name_any(),
                    "it could not be judged, and will be within {LIST_INTERVAL:?}: {cause}"
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
    async fn record_decision(
        &self,
        csr: &CertificateSigningRequest,
        apiserver: &Apiserver,
        requests: &Api<CertificateSigningRequest>,
        nodes: &Api<Node>,
    ) -> Result<(), CsrError> {
        if is_settled(csr) {
            return Ok(());
        }
        let Some(asked) = CsrInfo::read(csr) else {
            debug!(csr = csr.name_any(), "not ours: it is no request that can be read");
            return Ok(());
        };
        let facts = match (asked.profile(), asked.node()) {
            (Some(Profile::Edge), Some(node)) => {
                let addresses = within(nodes.get_opt(node)).await?.as_ref().map(addresses);
                ClusterInfo { addresses, ..ClusterInfo::default() }
            }
            // Others are refused whatever they ask for.
            (Some(Profile::Server), _) if asked.requester == self.pods => ClusterInfo {
                reached: self.reach.look_up(&self.cluster).await?.names,
                ..ClusterInfo::default()
            },
            _ => ClusterInfo::default(),
        };
        let (Some(uid), Some(version)) = (csr.uid(), csr.resource_version()) else {
            return Err(CsrError::Gone);
        };
        let (name, requester) = (csr.name_any(), printable(&asked.requester));
        let (kind, reason, why) = match decide(&asked, &self.pods, apiserver, &facts) {
            Decision::NotOurs => return Ok(()),
            Decision::Approve => ("Approved", "AutoApproved", "its requester may have it".to_owned()),
            Decision::Deny(why) => ("Denied", "NotPermitted", why),
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
const LIST_INTERVAL: Duration = Duration::from_secs(60);

// Whether a certificate may be issued: the approver's decision, which reads nothing but its arguments.

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// It is none of our three: nobody here touches it.
    NotOurs,
    /// It may be issued.
    Approve,
    /// It may not, for that reason: one printable line of at most 200 bytes.
    Deny(String),
}

/// What the cluster says, as far as the request is about it.
#[derive(Debug, Clone, Default)]
pub struct ClusterInfo {
    /// The addresses of the requester's Node; `None`: there is no such Node.
    pub addresses: Option<BTreeSet<IpAddr>>,
    /// All names and addresses by which the pods' ports are reached, as certificates have them.
    pub reached: BTreeSet<String>,
}

/// Judges a request. `pods` is the user that the tunnel's pods are (their service account).
pub fn decide(asked: &CsrInfo, pods: &str, apiserver: &Apiserver, facts: &ClusterInfo) -> Decision {
    let Some(profile) = asked.profile() else { return Decision::NotOurs };
    let permitted = sound(asked, profile).and_then(|()| match profile {
        Profile::Server => {
            by_pods(asked, pods).and_then(|()| server(&asked.content, apiserver, &facts.reached))
        }
        Profile::ProxyClient => by_pods(asked, pods).and_then(|()| proxy_client(&asked.content)),
        Profile::Edge => agent(asked, facts.addresses.as_ref()),
    });
    permitted.map_or_else(|why| Decision::Deny(printable(&why)), |()| Decision::Approve)
}

/// What holds for all three.
fn sound(asked: &CsrInfo, profile: Profile) -> Result<(), String> {
    if let Some(odd) = asked.content.odd {
        return Err(format!("{odd}, and this approver takes none of that"));
    }
    let usages: BTreeSet<&str> = asked.usages.iter().map(String::as_str).collect();
    let wanted = profile.usages();
    if asked.usages.len() != wanted.len() || usages != BTreeSet::from(wanted) {
        return Err(format!("want exactly the usages {wanted:?}, and it has {:?}", asked.usages));
    }
    Ok(())
}

fn by_pods(asked: &CsrInfo, pods: &str) -> Result<(), String> {
    if asked.requester == pods {
        return Ok(());
    }
    Err(format!("only {pods} may have one, and {:?} asks for it", asked.requester))
}

fn server(content: &Content, apiserver: &Apiserver, reached: &BTreeSet<String>) -> Result<(), String> {
    if content.dns.is_empty() && content.ips.is_empty() {
        return Err("it has no alternative name, so that no client could believe it".to_owned());
    }
    for name in content.dns.iter().cloned().chain(content.ips.iter().map(IpAddr::to_string)) {
        if apiserver.is_at(&name) {
            return Err(format!("{name:?} stands for kube-apiserver as well"));
        }
        if !reached.contains(&name) {
            return Err(format!(
                "no Service that this approver knows (--service) is reached by {name:?}, nor is it one of its --name"
            ));
        }
    }
    Ok(())
}

fn proxy_client(content: &Content) -> Result<(), String> {
    if content.dns.is_empty() && content.ips.is_empty() {
        return Ok(());
    }
    Err("it has alternative names, which a proxy client has none of".to_owned())
}

fn agent(asked: &CsrInfo, addresses: Option<&BTreeSet<IpAddr>>) -> Result<(), String> {
    let Some(node) = asked.node() else {
        return Err(format!(
            "only a node may have one for itself (user system:node:NAME in group system:nodes), and {:?} asks for it",
            asked.requester
        ));
    };
    let Content { dns, ips, .. } = &asked.content;
    if *dns != [node] {
        return Err(format!(
            "want exactly {node:?}, the node that asks for it, as its DNS name, and it has {dns:?}"
        ));
    }
    let Some(addresses) = addresses else { return Err(format!("there is no Node {node}")) };
    match ips.iter().find(|ip| !addresses.contains(ip)) {
        Some(ip) => Err(format!("{ip} is no address of Node {node}")),
        None => Ok(()),
    }
}

// A CertificateSigningRequest as the approver sees it.

/// What is asked for, and by whom. kube-apiserver vouches for the requester.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsrInfo {
    /// Who is to sign.
    pub signer: String,
    /// The user who has made the request.
    pub requester: String,
    /// The groups that this user is in.
    pub groups: Vec<String>,
    /// What the key is to be used for.
    pub usages: Vec<String>,
    /// What the request itself says.
    pub content: Content,
}

impl CsrInfo {
    /// Reads one; `None`: its text is no request that can be read.
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

    /// The profile of which it has signer, common name and organization, exactly; `None`: it is not ours.
    pub fn profile(&self) -> Option<Profile> {
        let Content { common_names, organizations, .. } = &self.content;
        Profile::ALL.into_iter().find(|profile| {
            self.signer == profile.signer()
                && *common_names == [profile.common_name()]
                && *organizations == [profile.organization()]
        })
    }

    /// The node whose kubelet asks; `None`: somebody else does.
    pub fn node(&self) -> Option<&str> {
        // Both, as Kubernetes itself tells nodes.
        let grouped = self.groups.iter().any(|group| group == "system:nodes");
        self.requester.strip_prefix("system:node:").filter(|node| grouped && !node.is_empty())
    }
}

// What a CertificateSigningRequest's text asks for. One that could be read in more than one way is odd: who signs it reads
// it with other eyes than ours.

/// The text of a request. Empty lists are lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// The subject's common names.
    pub common_names: Vec<String>,
    /// The subject's organizations.
    pub organizations: Vec<String>,
    /// Alternative names that are DNS names.
    pub dns: Vec<String>,
    /// Alternative names that are addresses.
    pub ips: Vec<IpAddr>,
    /// What else it has, or how it could be read otherwise: a clause.
    pub odd: Option<&'static str>,
}

impl Content {
    /// Reads a request (PKCS#10, PEM); `None`: it is none, or none that can be read.
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
                Some(asked) if n == 0 => extensions.extend(asked),
                _ => content.odd = Some("it has attributes beside one request of extensions"),
            }
        }
        for (n, extension) in names(&extensions).enumerate() {
            match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(names) if n == 0 => {
                    names.general_names.iter().for_each(|name| content.take(name));
                }
                _ => content.odd = Some("its alternative names cannot be read in one way only"),
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
                    _ => self.odd = Some("one of its addresses is none"),
                }
            }
            _ => self.odd = Some("it has alternative names that are neither DNS names nor addresses"),
        }
    }
}

/// The one block of a PEM text that holds nothing else.
fn decoded(pem: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(pem).ok()?.trim();
    let body = text.strip_prefix("-----BEGIN CERTIFICATE REQUEST-----")?;
    let body = body.strip_suffix("-----END CERTIFICATE REQUEST-----")?;
    let plain: String = body.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    STANDARD.decode(plain).ok()
}

/// `None`: one of them is in no encoding of Unicode.
fn texts<'a>(
    values: impl Iterator<Item = &'a x509_parser::x509::AttributeTypeAndValue<'a>>,
) -> Option<Vec<String>> {
    values.map(|value| value.as_str().ok().map(str::to_owned)).collect()
}

/// What a subject has beside one common name and one organization.
fn oddity_of(subject: &X509Name<'_>) -> Option<&'static str> {
    let known = subject.iter_common_name().count() + subject.iter_organization().count();
    (subject.iter_attributes().count() != known).then_some("its subject has more than a CN and an O")
}

/// The extensions that an attribute asks for; `None`: it is another attribute, or has several values, of which the parser
/// shows the first.
fn requested<'a>(attribute: &'a X509CriAttribute<'a>) -> Option<&'a [X509Extension<'a>]> {
    let ParsedCriAttribute::ExtensionRequest(asked) = attribute.parsed_attribute() else { return None };
    let (read, set) = asn1_rs::Header::from_der(attribute.value).ok()?;
    let whole = set.length().definite().ok()? == read.len();
    whole.then_some(&asked.extensions)
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
            (Approver::new(cluster, "pods".to_owned(), NameLookup::default()), Apiserver::default());
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
            (Approver::new(cluster, "pods".to_owned(), NameLookup::default()), Apiserver::default());
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

#[cfg(test)]
mod judge_tests;

#[cfg(test)]
mod content_tests {
    use rcgen::{Attribute, CertificateParams, DnType, KeyPair, SanType};

    use tunnel_net::pki::CertificateRequest;

    use super::*;

    #[test]
    fn what_is_asked_for_is_read() {
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
    fn what_is_no_request_is_not_read() {
        let request = CertificateRequest::new("a", "b", &["n1"]).unwrap().pem().to_owned();
        let more = format!("{request}{request}");
        let before = format!("x\n{request}");
        let cut = request.replacen("MI", "", 1);
        for text in ["", "junk", &more, &before, &cut, "-----BEGIN CERTIFICATE REQUEST-----"] {
            assert_eq!(Content::read(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Content::read(b"\xff"), None);
    }

    /// The request of these parameters, and attributes behind its own.
    fn odd(change: impl FnOnce(&mut CertificateParams), more: Vec<Attribute>) -> Option<&'static str> {
        let mut params = CertificateParams::new(["n1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "a");
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let pem = params.serialize_request_with_attributes(&key, more).unwrap().pem().unwrap();
        Content::read(pem.as_bytes()).unwrap().odd
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_odd() {
        assert_eq!(odd(|_| (), Vec::new()), None);
        let unit = |p: &mut CertificateParams| p.distinguished_name.push(DnType::OrganizationalUnitName, "u");
        assert!(odd(unit, Vec::new()).unwrap().contains("subject"));
        let mail = |p: &mut CertificateParams| {
            p.subject_alt_names.push(SanType::Rfc822Name("a@b.c".try_into().unwrap()));
        };
        assert!(odd(mail, Vec::new()).unwrap().contains("neither DNS names"));
        // A second request of extensions, which signers in Go read as well.
        let extension_request: &[u64] = &[1, 2, 840, 113_549, 1, 9, 14];
        let san: &[u8] = &[0x30, 0x0d, 0x30, 0x0b, 6, 3, 0x55, 0x1d, 0x11, 4, 4, 0x30, 2, 0x82, 0];
        let values = [&[0x31, 15][..], san].concat();
        let second = Attribute { oid: extension_request, values: values.clone() };
        assert!(odd(|_| (), vec![second]).unwrap().contains("attributes beside"));
        // Two values in one.
        let two = Attribute { oid: extension_request, values: [&[0x31, 30][..], san, san].concat() };
        let alone = |p: &mut CertificateParams| p.subject_alt_names.clear();
        assert!(odd(alone, vec![two]).unwrap().contains("attributes beside"));
        let one = Attribute { oid: extension_request, values };
        assert_eq!(odd(alone, vec![one]), None);
    }
}
