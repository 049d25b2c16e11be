//! Links of edges, which have proved their name by a token or a certificate. A link ends when the token file loses that
//! token, its invitation is revoked, or the cluster loses that Node, its edge label or the edge's pod.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::future::OptionFuture;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, info_span, warn};

use crate::enrolment::{OpenedEnrolments, next_change};
use crate::registry::Registry;
use crate::startup::{Prepared, StartupErrorCollector, StartupErrorKind};
use tunnel_base::addresses::cluster_state::{KnownNodes, PodProof, PodTokenReviewer};
use tunnel_base::addresses::owners::{AddressClaim, ClaimSource};
use tunnel_base::drain::Drain;
use tunnel_base::logging::AUDIT;
use tunnel_base::policy::tokens::{MIN_TOKEN_BYTES, NodeTokens, TokenError, is_service_account_token};
use tunnel_link::grpc::accept::CallerCertificate;
use tunnel_link::link::Link;
use tunnel_link::table::SessionTable;
use tunnel_net::guesses::{GuessError, GuessLimiter};
use tunnel_net::limiter::{FairLimiter, PermitLimits, Source};
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls::client_certificate::ClientCertificate;
use tunnel_net::tls::handshake::MAX_HANDSHAKES;
use tunnel_net::tls::link_auth::edge_names;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::NodeName;
use tunnel_proto::state::LinkId;

/// Decides which edges may link here, and keeps their links, each with the credentials for which it was accepted.
#[derive(Debug)]
pub(crate) struct EdgeAuthenticator {
    tokens: ReloadedValue<NodeTokens>,
    /// The nodes that joined by invitation; `None` if that is not enabled.
    enrolment: OpenedEnrolments,
    pub(crate) proofs: watch::Sender<ClusterProofs>,
    links: Mutex<HashMap<LinkId, EdgeLink>>,
    /// Wrong tokens of edges and users.
    guesses: GuessLimiter,
    /// Permits for waiting for the answer to a wrong token.
    pub(crate) refusal_permits: FairLimiter,
}

/// How the cluster proves and rejects edges, as the config requires.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClusterProofs {
    /// The Nodes of the cluster; `None` if no cluster is used.
    pub(crate) nodes: Option<watch::Receiver<KnownNodes>>,
    /// Whether certificates prove the edges of Nodes.
    pub(crate) certificates: bool,
    /// Who judges the tokens of edges' pods; `None` accepts none.
    pub(crate) pod_tokens: Option<Arc<dyn PodTokenReviewer>>,
}

/// The hello of an edge, the node of the certificate that it presented, if any, and what the token of its pod proved.
#[derive(Debug, Clone)]
pub(crate) struct EdgeCredentials {
    pub(crate) hello: EdgeHello,
    pub(crate) certificate_node: Option<NodeName>,
    pub(crate) pod: Option<PodProof>,
}

/// A link with the credentials for which it was accepted.
#[derive(Debug, Clone)]
struct EdgeLink {
    link: Arc<Link>,
    credentials: EdgeCredentials,
}

/// Reads the token file. `is_optional` means that edges can prove themselves without it, and `egress` that
/// kube-apiserver's traffic arrives here.
pub(crate) fn read(
    file: &Path,
    is_optional: bool,
    egress: bool,
    startup: &mut StartupErrorCollector,
) -> Prepared<ReloadedValue<NodeTokens>> {
    let path = file.to_owned();
    let first = AtomicBool::new(true);
    let key = startup.spelled(TOKEN_FILE);
    let tokens = ReloadedValue::file(file, move |text| {
        let tokens = NodeTokens::parse(&String::from_utf8_lossy(text));
        for (line, error) in tokens.errors() {
            warn!(file = %path.display(), line, error = %error, "invalid line in token file");
        }
        warn_insecure(&tokens, &path, &key, egress);
        // At the start an empty file is taken as it is. Later it is more likely a mistake, and would close every link.
        if !tokens.is_empty() {
            first.store(false, Relaxed);
        } else if !first.load(Relaxed) && !is_empty_intended(&tokens, is_optional) {
            return Err(format!(
                "{} has no token, which would close every link; leave at least one line, or block a node with the \
                 line \"NODE:\"",
                path.display()
            ));
        }
        Ok(tokens)
    });
    let tokens = startup.collect(StartupErrorKind::Config, &[TOKEN_FILE], tokens)?;
    if !is_optional && tokens.load().is_empty() {
        warn!(file = %file.display(), refused = "every edge", "token file has no token");
    }
    Ok(tokens)
}

/// Warns of tokens with which a stranger could be a node, or a node another one.
fn warn_insecure(tokens: &NodeTokens, file: &Path, key: &str, egress: bool) {
    let warn = |risk: &str, hint| {
        warn!(key, risk, file = %file.display(), hint, "insecure configuration");
    };
    let weak = tokens.nodes_with_weak_tokens();
    if !weak.is_empty() {
        let count = weak.len();
        let nodes = weak[..weak.len().min(MAX_NODES_LOGGED)].join(" ");
        let risk =
            format!("tokens of less than {MIN_TOKEN_BYTES} characters can be guessed ({count}): {nodes}");
        warn(&risk, "run `tunnel token rotate` for each of these nodes");
    }
    if tokens.has_default() {
        let names =
            if egress { "that kube-apiserver requests (server.egress)" } else { "without its own line" };
        let risk = format!("the token file has a default line: any edge can take any name {names}");
        warn(&risk, "give each node its own line");
    }
}

/// Returns true if a file without any token is intended rather than a mistake: it blocks a node, or tokens are optional
/// and it has no faulty line.
fn is_empty_intended(tokens: &NodeTokens, is_optional: bool) -> bool {
    tokens.has_blocked_nodes() || is_optional && tokens.errors().is_empty()
}

impl EdgeAuthenticator {
    /// Returns an authenticator without links. [`Self::watch_revocations`] closes those whose credentials end.
    pub(crate) fn new(tokens: ReloadedValue<NodeTokens>, enrolment: OpenedEnrolments) -> Arc<Self> {
        let guesses = GuessLimiter::new(MAX_WRONG_TOKENS, MAX_WRONG_TOKENS_OF_SOURCE);
        let refusal_permits = FairLimiter::new(REFUSAL_LIMITS);
        let links = Mutex::default();
        Arc::new(Self {
            tokens,
            enrolment,
            proofs: watch::Sender::default(),
            links,
            guesses,
            refusal_permits,
        })
    }

    /// Returns true if the token file has a separate line for the node, or the node has joined by invitation.
    pub(crate) fn has_node(&self, node: &NodeName) -> bool {
        self.has_line(node) || self.enrolment.get().is_some_and(|all| all.known().names(node))
    }

    /// Returns true if the token file has a separate line for the node.
    pub(crate) fn has_line(&self, node: &NodeName) -> bool {
        self.tokens.load().has_line(node)
    }

    /// Returns whose certificate a handshake has accepted, if the client presented one.
    pub(crate) fn certificate(presented: Option<ClientCertificate>) -> CallerCertificate {
        let Some(certificate) = presented else { return CallerCertificate::None };
        if certificate.is_users() {
            return CallerCertificate::User(certificate);
        }
        // Besides users and edges only servers have accepted certificates, so any other caller with one may claim to be
        // a server.
        match certificate.leaf().and_then(|leaf| edge_names(leaf)).as_deref() {
            None => CallerCertificate::Peer,
            Some([node]) => CallerCertificate::Edge(node.parse().ok()),
            Some(_) => CallerCertificate::Edge(None),
        }
    }

    /// Returns the address claims of the token file.
    pub(crate) fn address_claims(&self) -> Vec<AddressClaim> {
        let tokens = self.tokens.load();
        let claim = |(ip, node): &(IpAddr, NodeName)| AddressClaim {
            ip: *ip,
            node: node.clone(),
            by: ClaimSource::TokenLine,
        };
        tokens.ips().iter().map(claim).collect()
    }

    /// Authenticates like [`Self::authenticate`], but limits guesses of the token, see [`Self::judge_token`]. Has the
    /// token of a pod reviewed, and adds what it proves to the credentials in its place.
    pub(crate) async fn authenticate_caller(
        &self,
        credentials: &mut EdgeCredentials,
        from: IpAddr,
    ) -> Result<(), GuessError<TokenError>> {
        let name = credentials.hello.node.as_str().to_ascii_lowercase();
        let counted = self.counted(&name);
        let token = &credentials.hello.token;
        match self.check_node(credentials).map_err(known) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // It counts as well, otherwise a caller with too many guesses would be told which names are blocked.
            Err(GuessError::Wrong(why)) => {
                return self.guesses.judge(Source::of(from), &counted, Some(token), || Err(why));
            }
            Err(why) => return Err(why),
        }
        let pod_tokens = self.proofs.borrow().pod_tokens.clone().filter(|_| is_service_account_token(token));
        let Some(pod_tokens) = pod_tokens else {
            return self.judge_token(from, &name, token, || self.check_token(credentials)).await;
        };
        let source = Source::of(from);
        self.guesses.judge(source, &counted, None, || Ok::<_, TokenError>(()))?;
        let reviewed = match pod_tokens.review(token, from).await {
            Ok(proof) if proof.node != credentials.hello.node => {
                Err(TokenError::PodToken(format!("its pod is on Node {}", proof.node)))
            }
            Err(why @ TokenError::PodTokenUnchecked(_)) => return Err(GuessError::Unknown(why)),
            reviewed => reviewed,
        };
        credentials.pod = Some(self.guesses.judge(source, &counted, None, || reviewed)?);
        // Its link stays for days, and needs the token no more.
        credentials.hello.token = String::new();
        self.authenticate(credentials).map_err(known)
    }

    /// Compares a token that a caller at `from` presents for this name, unless too many were wrong. The machine may just
    /// have joined at a peer, so a wrong one is compared again after a refresh of the invitations. None is wrong while
    /// the tokens cannot be read.
    pub(crate) async fn judge_token<E>(
        &self,
        from: IpAddr,
        name: &str,
        token: &str,
        compare: impl Fn() -> Result<(), E>,
    ) -> Result<(), GuessError<E>> {
        let from = Source::of(from);
        let counted = self.counted(name);
        let judged = self.guesses.judge(from, &counted, Some(token), &compare);
        let Err(GuessError::Wrong(mut why)) = judged else { return judged };
        let mut is_read = !self.tokens.is_stale();
        if let Some(enrolment) = self.enrolment.get() {
            is_read &= enrolment.refresh().await.is_ok();
            match compare() {
                Ok(()) => {
                    self.guesses.forgive(from, &counted);
                    return Ok(());
                }
                Err(again) => why = again,
            }
        }
        if is_read {
            return Err(GuessError::Wrong(why));
        }
        // Nothing was guessed about a name without a known token, and its caller must not wait when it can be read.
        let is_known = name.parse().is_ok_and(|node| self.has_node(&node));
        if !is_known && !self.tokens.load().has_default() {
            self.guesses.forgive(from, &counted);
        }
        Err(GuessError::Unknown(why))
    }

    /// Returns the name for which wrong tokens count: another one for each token that an invitation has given it, so that a
    /// machine that joins again need not wait.
    fn counted(&self, name: &str) -> String {
        let id = self.enrolment.get().and_then(|all| all.known().token_id(name));
        format!("{name} {}", id.unwrap_or_default())
    }

    /// Checks the edge's credentials.
    ///
    /// A node with an empty token in its line is blocked, and so is a Node without an edge label, regardless of
    /// credentials. A certificate for the node is decisive, and so is its pod's token: once the Node is deleted, no token
    /// replaces it. The token of an invitation is as valid as a line in the token file.
    ///
    /// Until the Nodes are known, tokens suffice: kube-apiserver may itself be reached through the tunnel.
    ///
    /// # Errors
    ///
    /// The reason, only for the log.
    pub(crate) fn authenticate(&self, credentials: &EdgeCredentials) -> Result<(), TokenError> {
        if self.check_node(credentials)? { Ok(()) } else { self.check_token(credentials) }
    }

    /// Checks what does not depend on the token. Returns true if the edge's certificate or its pod is proof enough.
    fn check_node(
        &self,
        EdgeCredentials { hello, certificate_node, pod }: &EdgeCredentials,
    ) -> Result<bool, TokenError> {
        let node = &hello.node;
        // First, because such a line blocks its node whatever else proves the name.
        if self.tokens.load().is_blocked(node) {
            return Err(TokenError::Blocked(node.clone()));
        }
        let proofs = self.proofs.borrow();
        if let Some(pod) = pod {
            let Some(tokens) = &proofs.pod_tokens else {
                return Err(TokenError::PodToken("this server no longer accepts them".to_owned()));
            };
            tokens.recheck(pod)?;
        }
        let certificate_node = certificate_node.as_ref().filter(|_| proofs.certificates);
        let what = if pod.is_some() { "the ServiceAccount token" } else { "the client certificate" };
        if let Some(nodes) = &proofs.nodes {
            let nodes = nodes.borrow();
            let is_edge = nodes.as_ref().map(|nodes| nodes.get(&node.as_str().to_ascii_lowercase()).copied());
            match is_edge {
                // With any proof: only the label distinguishes an edge from a control-plane Node.
                Some(Some(false)) => return Err(TokenError::NoEdge(node.clone())),
                _ if certificate_node != Some(node) && pod.is_none() => {}
                Some(Some(true)) => return Ok(true),
                Some(None) => return Err(TokenError::NoNode(node.clone(), what)),
                None => return Err(TokenError::NodesUnknown(what)),
            }
        }
        Ok(pod.is_some())
    }

    fn check_token(&self, EdgeCredentials { hello, .. }: &EdgeCredentials) -> Result<(), TokenError> {
        let tokens = self.tokens.load();
        let node = &hello.node;
        match self.enrolment.get().and_then(|all| all.known().proves(node, &hello.token)) {
            Some(true) => Ok(()),
            Some(false) if !tokens.has_line(node) => Err(TokenError::Joined),
            _ => tokens.verify(node, &hello.token).map_err(|why| match why {
                TokenError::NoLine(node) if self.enrolment.initialized() => TokenError::NotJoined(node),
                why => why,
            }),
        }
    }

    /// Ends the node's previous token if `hello` has the one that replaced it.
    pub(crate) fn end_previous_token(&self, hello: &EdgeHello, drain: &Drain) {
        let Some(enrolment) = self.enrolment.get() else { return };
        if enrolment.known().replaces(&hello.node, &hello.token) {
            let enrolment = enrolment.clone();
            let hello = hello.clone();
            let ending = async move { enrolment.end_previous(&hello.node, &hello.token).await };
            drain.spawn(info_span!("token"), ending);
        }
    }

    /// Records the link of an authenticated edge, so that it ends with the token.
    pub(crate) fn track(&self, link: &Arc<Link>, credentials: &EdgeCredentials) {
        let tracked = EdgeLink { link: link.clone(), credentials: credentials.clone() };
        self.links.lock().insert(link.id, tracked);
        // The file may have changed since the check.
        if self.authenticate(credentials).is_err() {
            link.close();
        }
    }

    /// Returns true if an edge's link may open sessions: its credentials are not revoked.
    pub(crate) fn is_valid(&self, link: &Link) -> bool {
        self.links.lock().contains_key(&link.id)
    }

    /// Forgets a link that has ended.
    pub(crate) fn untrack(&self, link: &Link) {
        self.links.lock().remove(&link.id);
    }

    /// Closes each link whose token was revoked, until draining begins.
    pub(crate) async fn watch_revocations(
        self: Arc<Self>,
        registry: Arc<Registry>,
        table: Arc<SessionTable>,
        drain: Drain,
    ) {
        let mut changes = self.tokens.changes();
        let mut proofs = self.proofs.subscribe();
        proofs.mark_changed();
        let mut nodes = None;
        let mut pods = None;
        let mut joined = None;
        let mut known = self.tokens.load();
        loop {
            tokio::select! {
                biased;
                () = drain.draining() => return,
                // The channel never closes, nor does that of the proofs: this holds their senders.
                _ = changes.changed() => {
                    let read = self.tokens.load();
                    log_token_changes(&read, &known);
                    known = read;
                }
                () = next_change(&self.enrolment, &mut joined) => {}
                _ = proofs.changed() => {
                    let proofs = proofs.borrow_and_update();
                    nodes.clone_from(&proofs.nodes);
                    pods = proofs.pod_tokens.as_ref().map(|tokens| tokens.pods());
                }
                Some(Ok(())) = OptionFuture::from(nodes.as_mut().map(watch::Receiver::changed)) => {}
                Some(Ok(())) = OptionFuture::from(pods.as_mut().map(watch::Receiver::changed)) => {}
                // Tokens of pods end without a change.
                () = sleep(TOKEN_CHECK_INTERVAL), if pods.is_some() => {}
            }
            let all: Vec<EdgeLink> = self.links.lock().values().cloned().collect();
            let revoked =
                all.into_iter().filter_map(|edge| Some((self.authenticate(&edge.credentials).err()?, edge)));
            let is_replaced = |(why, edge): &(TokenError, EdgeLink)| {
                matches!(why, TokenError::Joined | TokenError::PodTokenEnded) && edge.link.instance.is_some()
            };
            let (replaced, revoked): (Vec<_>, Vec<_>) = revoked.partition(is_replaced);
            // Before the sessions are reset, so that no new one takes their place.
            for (_, edge) in replaced.iter().chain(&revoked) {
                self.untrack(&edge.link);
                registry.remove(&edge.link);
            }
            // Their sessions resume over a link with the token that replaced this one.
            replaced.iter().for_each(|(_, edge)| edge.link.close());
            if revoked.is_empty() {
                continue;
            }
            let names: Vec<&str> = revoked
                .iter()
                .take(MAX_NODES_LOGGED)
                .map(|(_, edge)| edge.credentials.hello.node.as_str())
                .collect();
            warn!(
                links = revoked.len(),
                nodes = names.join(" "),
                "links ended: token revoked, pod or Node deleted or edge label removed"
            );
            let close = |(why, edge): (TokenError, EdgeLink)| {
                (edge.link, revocation(&why, &edge.credentials.hello.node))
            };
            let revoked = revoked.into_iter().map(close).collect();
            // In its own task, because the next node must not keep its links meanwhile.
            drain.spawn(info_span!("revoked"), close_links(revoked, table.clone()));
        }
    }
}

/// Closes links after notifying their sessions of the reason.
pub(crate) async fn close_links(revoked: Vec<(Arc<Link>, String)>, table: Arc<SessionTable>) {
    let reset = |(link, why): &(Arc<Link>, String)| {
        table.reset_on(link, &SessionError::new(ErrorCode::NotAllowed, why));
    };
    // A busy process or a slow line may need longer than the minimum; the timeout covers an unresponsive remote.
    let started = Instant::now();
    let reset_sent = async {
        let has_pending = |link: &Link| !link.is_closed() && link.sessions() + link.waiting() > 0;
        while started.elapsed() < MIN_RESET_FLUSH || revoked.iter().any(|(link, _)| has_pending(link)) {
            // Again, because an opening may have found the link just before it was removed.
            revoked.iter().for_each(reset);
            sleep(POLL_INTERVAL).await;
        }
    };
    let _ = timeout(MAX_RESET_FLUSH, reset_sent).await;
    for (link, _) in revoked {
        link.close();
    }
}

/// Returns the reason for the sessions of an edge whose credentials were revoked.
fn revocation(why: &TokenError, node: &NodeName) -> String {
    match why {
        TokenError::NoNode(..) => format!("Node {node} was deleted"),
        TokenError::NoPod(_) => format!("the pod of the edge of node {node} was deleted"),
        TokenError::NoEdge(_) => format!("Node {node} has no edge label"),
        TokenError::Blocked(_) => format!("node {node} was blocked"),
        _ => format!("the token of node {node} was revoked"),
    }
}

/// Returns whether a caller's proof is wrong, or whether that is not known.
fn known(why: TokenError) -> GuessError<TokenError> {
    match why {
        TokenError::NodesUnknown(_) => GuessError::Unknown(why),
        why => GuessError::Wrong(why),
    }
}

/// Logs changes of tokens in the token file.
fn log_token_changes(read: &NodeTokens, before: &NodeTokens) {
    let nodes = read.changed_since(before);
    if !nodes.is_empty() {
        info!(
            target: AUDIT,
            actor = "the token file",
            key = TOKEN_FILE,
            count = nodes.len(),
            nodes = nodes[..nodes.len().min(MAX_NODES_LOGGED)].join(" "),
            "node tokens changed"
        );
    }
}

/// Key of the token file.
const TOKEN_FILE: &str = "server.links.token_file";
/// Different wrong tokens of a source within a minute, after which no more are compared: for one node or device, and for
/// all. An edge with a stale token repeats it, and a thousand others may have its address.
const MAX_WRONG_TOKENS: usize = 5;
const MAX_WRONG_TOKENS_OF_SOURCE: usize = 100;
/// Limits of callers that wait for the answer to a wrong token. Others get none.
const REFUSAL_LIMITS: PermitLimits =
    PermitLimits { permits: MAX_HANDSHAKES, per_source: 4, waiting: 0, idle_timeout: None };
/// Maximum number of nodes in a log line about tokens.
const MAX_NODES_LOGGED: usize = 20;
/// Interval of checks for tokens of pods that have ended.
const TOKEN_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum time for resets to be sent, and the interval between checks.
pub(crate) const MAX_RESET_FLUSH: Duration = Duration::from_secs(2);
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Minimum time for resets to be sent before their link is closed.
const MIN_RESET_FLUSH: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use futures_util::future::{BoxFuture, join_all};
    use tokio::task::yield_now;
    use tunnel_base::addresses::cluster_state::KnownEdgePods;
    use tunnel_base::metrics::Metrics;
    use tunnel_link::table::SessionLimits;
    use tunnel_proto::frame::Remote;
    use tunnel_proto::halves::WindowLimits;
    use tunnel_proto::hello::LinkPurpose;
    use tunnel_proto::names::Instance;

    use super::*;
    use crate::enrolment::tests as enrolled;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    /// Returns the credentials of the edge of node1, with that token and the certificate of the node `certificate`.
    fn credentials(token: &str, certificate: Option<&str>) -> EdgeCredentials {
        let hello = EdgeHello {
            node: node("node1"),
            token: token.to_owned(),
            instance: None,
            purpose: LinkPurpose::Primary,
        };
        EdgeCredentials { hello, certificate_node: certificate.map(node), pod: None }
    }

    fn edge_links(tokens: &str, nodes: Option<watch::Receiver<KnownNodes>>) -> Arc<EdgeAuthenticator> {
        edge_links_with(tokens, nodes, None)
    }

    fn edge_links_with(
        tokens: &str,
        nodes: Option<watch::Receiver<KnownNodes>>,
        pods: Option<Arc<dyn PodTokenReviewer>>,
    ) -> Arc<EdgeAuthenticator> {
        let tokens = ReloadedValue::fixed(NodeTokens::parse(tokens));
        let links = EdgeAuthenticator::new(tokens, Arc::default());
        links.proofs.send_replace(ClusterProofs { nodes, certificates: true, pod_tokens: pods });
        links
    }

    /// Takes `eyJ.NODE.` as the token of a pod on that node, unless it has to fail. Counts reviews.
    #[derive(Debug, Default)]
    struct FakeReviewer {
        review: Mutex<Option<TokenError>>,
        recheck: Mutex<Option<TokenError>>,
        reviews: Mutex<usize>,
        pods: watch::Sender<KnownEdgePods>,
    }

    impl FakeReviewer {
        /// From now on proofs are no longer valid, for this reason.
        fn end(&self, why: TokenError) {
            *self.recheck.lock() = Some(why);
            self.pods.send_replace(None);
        }
    }

    impl PodTokenReviewer for FakeReviewer {
        fn review<'a>(&'a self, token: &'a str, _: IpAddr) -> BoxFuture<'a, Result<PodProof, TokenError>> {
            *self.reviews.lock() += 1;
            let proof = PodProof {
                node: node(token[4..].trim_end_matches('.')),
                pod: "a".into(),
                uid: "u".into(),
                ends: 0,
            };
            std::future::ready(self.review.lock().clone().map_or(Ok(proof), Err)).boxed()
        }

        fn recheck(&self, _: &PodProof) -> Result<(), TokenError> {
            self.recheck.lock().clone().map_or(Ok(()), Err)
        }

        fn pods(&self) -> watch::Receiver<KnownEdgePods> {
            self.pods.subscribe()
        }

        fn question(&self) -> Option<Vec<u8>> {
            None
        }

        fn on_peer(&self, _: &[u8]) -> Option<Vec<u8>> {
            None
        }
    }

    /// Returns these Nodes, each with whether it has the edge label.
    fn known<const N: usize>(nodes: [(&str, bool); N]) -> Option<std::collections::BTreeMap<String, bool>> {
        Some(nodes.map(|(name, is_edge)| (name.to_owned(), is_edge)).into())
    }

    #[test]
    fn a_node_without_the_edge_label_is_refused_and_an_unknown_name_passes() {
        let nodes = watch::Sender::new(None);
        let links = edge_links("default:shared\ncp2:own\n", Some(nodes.subscribe()));
        let authenticate_as = |name: &str, token: &str, certificate: Option<&str>| {
            let mut credentials = credentials(token, certificate);
            credentials.hello.node = node(name);
            links.authenticate(&credentials)
        };
        assert!(authenticate_as("cp1", "shared", None).is_ok(), "kube-apiserver has not answered yet");
        nodes.send_replace(known([("cp1", false), ("cp2", false), ("edge1", true)]));
        for (name, token, certificate) in
            [("cp1", "shared", None), ("CP1", "shared", None), ("cp2", "own", None), ("cp1", "", Some("cp1"))]
        {
            let judged = authenticate_as(name, token, certificate);
            assert_eq!(judged, Err(TokenError::NoEdge(node(name))), "{name}");
            let why = judged.unwrap_err().to_string();
            assert!(
                why.contains(&format!(
                    "kubectl label node {} superedge.io/node-edge=enable",
                    name.to_ascii_lowercase()
                )),
                "{why}"
            );
        }
        assert!(
            authenticate_as("edge1", "shared", None).is_ok()
                && authenticate_as("Edge1", "", Some("edge1")).is_ok()
        );
        assert!(authenticate_as("machine1", "shared", None).is_ok(), "it is not a Node");
        nodes.send_replace(known([("edge1", false)]));
        assert!(
            authenticate_as("edge1", "shared", None).is_err()
                && authenticate_as("cp1", "shared", None).is_ok()
        );
    }

    #[test]
    fn a_certificate_is_valid_instead_of_a_token_while_its_node_exists() {
        let nodes = watch::Sender::new(None);
        let links = edge_links("node1:right\n", Some(nodes.subscribe()));
        let authenticate_as =
            |token: &str, certificate: Option<&str>| links.authenticate(&credentials(token, certificate));
        // kube-apiserver has not answered since the start: edges with a certificate wait, and tokens alone are valid.
        for token in ["right", "wrong"] {
            assert!(
                matches!(authenticate_as(token, Some("node1")), Err(TokenError::NodesUnknown(_))),
                "{token}"
            );
        }
        assert!(authenticate_as("right", None).is_ok() && authenticate_as("wrong", None).is_err());
        nodes.send_replace(known([("node1", true)]));
        assert!(authenticate_as("wrong", Some("node1")).is_ok());
        // Another node's certificate proves nothing, so the token is checked.
        assert!(
            authenticate_as("wrong", Some("node2")).is_err()
                && authenticate_as("right", Some("node2")).is_ok()
        );
        nodes.send_replace(known([("node2", true)]));
        assert!(matches!(authenticate_as("right", Some("node1")), Err(TokenError::NoNode(..))));
        assert!(authenticate_as("right", None).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn the_token_of_a_pod_proves_its_node_and_wrong_ones_are_guesses() {
        let nodes = watch::Sender::new(None);
        let pods = Arc::new(FakeReviewer::default());
        let links = edge_links_with("node9:\nnode1:right\n", Some(nodes.subscribe()), Some(pods.clone()));
        let from: IpAddr = [10, 0, 0, 1].into();
        let call = async |name: &str, token: &str| {
            let mut credentials = credentials(token, None);
            credentials.hello.node = node(name);
            let judged = links.authenticate_caller(&mut credentials, from).await;
            judged.map(|()| credentials)
        };
        let unknown = call("node1", "eyJ.node1.").await;
        assert!(matches!(unknown, Err(GuessError::Unknown(TokenError::NodesUnknown(_)))), "{unknown:?}");
        nodes.send_replace(known([("node1", true), ("cp1", false)]));
        let linked = call("Node1", "eyJ.node1.").await.unwrap();
        assert!(linked.pod.is_some_and(|pod| pod.node == node("node1")) && linked.hello.token.is_empty());
        assert!(call("node1", "right").await.is_ok(), "other tokens are valid as before");
        let gone = call("node2", "eyJ.node2.").await;
        assert!(matches!(gone, Err(GuessError::Wrong(TokenError::NoNode(..)))), "{gone:?}");

        let reviews = *pods.reviews.lock();
        for (name, expected) in
            [("cp1", TokenError::NoEdge(node("cp1"))), ("node9", TokenError::Blocked(node("node9")))]
        {
            let refused = call(name, &format!("eyJ.{name}.")).await;
            assert_eq!(refused.err(), Some(GuessError::Wrong(expected)));
            for n in 1..MAX_WRONG_TOKENS {
                assert!(matches!(call(name, &format!("guess {n}")).await, Err(GuessError::Wrong(_))));
            }
            assert_eq!(call(name, "guess").await.err(), Some(GuessError::TooMany), "like any other name");
        }
        assert_eq!(*pods.reviews.lock(), reviews, "kube-apiserver is not asked");

        *pods.review.lock() = Some(TokenError::PodTokenUnchecked("away".into()));
        for _ in 0..20 {
            assert!(matches!(call("node1", "eyJ.node1.").await, Err(GuessError::Unknown(_))));
        }
        *pods.review.lock() = None;
        for _ in 0..MAX_WRONG_TOKENS {
            let stolen = call("node1", "eyJ.node2.").await;
            assert!(matches!(stolen, Err(GuessError::Wrong(TokenError::PodToken(_)))), "{stolen:?}");
        }
        let reviews = *pods.reviews.lock();
        assert_eq!(call("node1", "eyJ.node1.").await.err(), Some(GuessError::TooMany));
        assert_eq!(*pods.reviews.lock(), reviews);
    }

    /// The wrong tokens of any minute are at most five for each token that a name had, and a hundred of a source.
    #[tokio::test(start_paused = true)]
    async fn a_node_that_joins_again_has_new_guesses_of_its_new_token_and_its_source_has_no_more() {
        let place = tempfile::tempdir().unwrap();
        let servers = enrolled::servers(place.path(), 2);
        let [here, peer] = &servers[..] else { panic!() };
        let links = edge_links("", None);
        links.enrolment.set(peer.clone()).unwrap();
        let join = async |name: &str, token: usize| {
            let code =
                here.invite(&name.parse().unwrap(), None, enrolled::HOUR, false, "test").await.unwrap().code;
            enrolled::join(here, &code.secret(), name, &enrolled::token(token)).await.unwrap();
            peer.refresh().await.unwrap();
        };
        let call = async |name: &str, token: usize| {
            let mut credentials = credentials(&enrolled::token(token), None);
            credentials.hello.node = node(name);
            links.authenticate_caller(&mut credentials, [10, 0, 0, 1].into()).await
        };
        let [wrong, old, new, others] = [0, 1, 2, 3];
        join("node1", old).await;
        join("node2", others).await;
        here.revoke(&"node1".parse().unwrap(), "test").await.unwrap();
        peer.refresh().await.unwrap();
        let guess = async |name: &str, token| {
            let guesses = (0..MAX_WRONG_TOKENS + 1).map(|n| call(name, token + 10 * n));
            let guesses: Vec<_> = join_all(guesses).await.into_iter().map(Result::unwrap_err).collect();
            let compared = guesses.iter().filter(|why| matches!(why, GuessError::Wrong(_))).count();
            assert_eq!((compared, guesses.last()), (MAX_WRONG_TOKENS, Some(&GuessError::TooMany)), "{name}");
        };
        guess("node1", old).await;
        guess("node2", wrong).await;
        join("Node1", new).await;
        assert_eq!(call("node1", new).await, Ok(()));
        assert_eq!(call("node2", others).await, Err(GuessError::TooMany), "only the name that has joined");
        guess("node1", wrong).await;
        assert_eq!(call("node1", new).await, Err(GuessError::TooMany));
        let left = MAX_WRONG_TOKENS_OF_SOURCE - 3 * MAX_WRONG_TOKENS;
        let names: Vec<_> = (0..=left).map(|n| format!("other{n}")).collect();
        let guesses = join_all(names.iter().map(|name| call(name, wrong))).await;
        assert_eq!(guesses.iter().filter(|why| matches!(why, Err(GuessError::Wrong(_)))).count(), left);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deleted_pod_ends_its_links_with_the_reason_and_a_token_that_has_ended_only_closes_them() {
        for (why, is_reset) in [(TokenError::NoPod(node("node1")), true), (TokenError::PodTokenEnded, false)]
        {
            let metrics = Metrics::server("", "");
            let drain = Drain::new();
            let windows = WindowLimits { start: 1000, max: 1000 };
            let limits = SessionLimits {
                windows,
                memory: 1 << 20,
                sessions: 1,
                resume_timeout: Duration::ZERO,
                max_resume_timeout: Duration::ZERO,
            };
            let table = SessionTable::new(Instance::random(), limits, metrics.clone());
            let nodes = watch::Sender::new(known([("node1", true)]));
            let pods = Arc::new(FakeReviewer::default());
            let links = edge_links_with("", Some(nodes.subscribe()), Some(pods.clone()));
            let watching = links.clone().watch_revocations(Registry::new(metrics), table, drain.clone());
            drain.spawn(info_span!("tokens"), watching);
            let link = Link::new(LinkId(1), Remote::Edge(node("node1")), Some(Instance::random()));
            let mut credentials = credentials("eyJ.node1.", None);
            links.authenticate_caller(&mut credentials, [10, 0, 0, 1].into()).await.unwrap();
            links.track(&link, &credentials);
            sleep(3 * TOKEN_CHECK_INTERVAL).await;
            assert!(links.is_valid(&link) && !link.is_closed());
            let started = Instant::now();
            if is_reset {
                pods.end(why);
            } else {
                // Time alone ends a token: nothing changes.
                *pods.recheck.lock() = Some(why);
            }
            while !link.is_closed() {
                sleep(Duration::from_millis(1)).await;
            }
            assert!(!links.is_valid(&link));
            assert!(started.elapsed() <= TOKEN_CHECK_INTERVAL, "{:?}", started.elapsed());
            assert_eq!(started.elapsed() >= MIN_RESET_FLUSH && started.elapsed() < MAX_RESET_FLUSH, is_reset);
            drain.finish(Duration::from_secs(3), std::future::pending()).await;
        }
    }

    /// Time stands still, so the first link is not closed yet.
    #[tokio::test(start_paused = true)]
    async fn a_node_is_blocked_even_while_links_of_another_are_being_closed() {
        let (metrics, drain) = (Metrics::server("", ""), Drain::new());
        let windows = WindowLimits { start: 1000, max: 1000 };
        let limits = SessionLimits {
            windows,
            memory: 1 << 20,
            sessions: 1,
            resume_timeout: Duration::ZERO,
            max_resume_timeout: Duration::ZERO,
        };
        let table = SessionTable::new(Instance::random(), limits, metrics.clone());
        let nodes = watch::Sender::new(known([("node1", true), ("node2", true)]));
        let links = edge_links("default:shared\n", Some(nodes.subscribe()));
        let watching = links.clone().watch_revocations(Registry::new(metrics), table, drain.clone());
        drain.spawn(info_span!("tokens"), watching);
        let track = |id, name| {
            let link = Link::new(LinkId(id), Remote::Edge(node(name)), Some(Instance::random()));
            let mut credentials = credentials("shared", None);
            credentials.hello.node = node(name);
            links.track(&link, &credentials);
            link
        };
        let tracked = [track(1, "node1"), track(2, "node2")];
        for (blocked, is_edge) in [(&tracked[0], true), (&tracked[1], false)] {
            nodes.send_replace(known([("node1", false), ("node2", is_edge)]));
            for _ in 0..100 {
                yield_now().await;
            }
            assert!(!links.is_valid(blocked) && !blocked.is_closed(), "{:?}", blocked.peer);
        }
        drain.finish(Duration::from_secs(3), std::future::pending()).await;
        assert!(tracked.iter().all(|link| link.is_closed()));
    }

    #[test]
    fn tokens_are_checked_if_certificates_are_not_enabled() {
        let links = edge_links("node1:right\n", None);
        assert!(links.authenticate(&credentials("right", Some("node1"))).is_ok());
        assert!(links.authenticate(&credentials("wrong", Some("node1"))).is_err());
    }

    #[test]
    fn what_a_removed_table_proved_is_refused() {
        let nodes = watch::Sender::new(known([("node1", true)]));
        let links = edge_links_with("", Some(nodes.subscribe()), Some(Arc::new(FakeReviewer::default())));
        let pod = PodProof { node: node("node1"), pod: "a".into(), uid: "u".into(), ends: 0 };
        let by_pod = EdgeCredentials { pod: Some(pod), ..credentials("", None) };
        let proved = [by_pod, credentials("", Some("node1"))];
        assert!(proved.iter().all(|credentials| links.authenticate(credentials).is_ok()));
        links.proofs.send_modify(|proofs| proofs.pod_tokens = None);
        links.proofs.send_modify(|proofs| proofs.certificates = false);
        assert!(proved.iter().all(|credentials| links.authenticate(credentials).is_err()));
    }

    /// Kubernetes keeps its Node, and the kubelet's credentials would get it another certificate.
    #[test]
    fn a_node_with_an_empty_token_is_blocked_even_with_a_certificate() {
        let nodes = watch::Sender::new(known([("node1", true)]));
        for (text, is_in) in [("node2:a", true), ("default:a", true), ("Node1:\ndefault:a", false)] {
            let links = edge_links(text, Some(nodes.subscribe()));
            let judged = links.authenticate(&credentials("a", Some("node1")));
            assert_eq!(judged.is_ok(), is_in, "{text}: {judged:?}");
            assert!(is_in || judged == Err(TokenError::Blocked(node("node1"))), "{judged:?}");
        }
    }

    #[test]
    fn an_empty_token_file_is_intended_if_it_blocks_a_node_or_tokens_are_optional() {
        let meant = |text, is_optional| is_empty_intended(&NodeTokens::parse(text), is_optional);
        assert!(meant("node1:\n", true) && meant("node1:\n", false));
        assert!(meant("# node:token\n", true) && !meant("# node:token\n", false));
        assert!(!meant("default:\n", true) && !meant("all gone", true), "that is a mistake");
    }
}
