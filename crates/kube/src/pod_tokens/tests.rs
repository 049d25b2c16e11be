use std::convert::Infallible;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::SystemTime;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeySize, PublicKeyComponents};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair,
};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use http::Response;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::advance;
use tunnel_base::policy::tokens::is_service_account_token;

use super::*;
use crate::pod_tokens::last_known::PAUSE;

const SUBJECT: &str = "system:serviceaccount:edge-system:tunnel-edge";
const AUDIENCE: &str = "tunnel.cloud.io";
const ISSUER: &str = "https://kubernetes.default.svc";

/// A kube-apiserver that reviews tokens: its answers, how many it gave, and whether it is up.
#[derive(Clone)]
struct Apiserver {
    status: Arc<Mutex<Value>>,
    asked: Arc<AtomicUsize>,
    is_up: Arc<Mutex<bool>>,
}

impl Apiserver {
    fn new() -> Self {
        let status = Arc::new(Mutex::new(accepted()));
        Self { status, asked: Arc::default(), is_up: Arc::new(Mutex::new(true)) }
    }

    fn client(&self) -> Client {
        let this = self.clone();
        let answer = move |request: Request<Body>| {
            let this = this.clone();
            async move {
                assert_eq!(request.uri().path(), "/apis/authentication.k8s.io/v1/tokenreviews");
                this.asked.fetch_add(1, Relaxed);
                tokio::task::yield_now().await;
                if !*this.is_up.lock() {
                    std::future::pending::<()>().await;
                }
                let review = json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1",
                    "metadata": {}, "spec": {}, "status": *this.status.lock()});
                let code = u16::try_from(review["status"]["code"].as_u64().unwrap_or(201)).unwrap();
                let response =
                    Response::builder().status(code).body(Body::from(review.to_string().into_bytes()));
                Ok::<_, Infallible>(response.unwrap())
            }
        };
        Client::new(tower::service_fn(answer), "edge-system")
    }

    /// Returns what reviews tokens here, and knows pod `edge-a` on Node `shop-1`.
    fn tokens(&self, outage: bool) -> Arc<PodTokens> {
        let tokens = self.tokens_with(outage, LastKnown::default());
        tokens.pods.send_replace(Some([("edge-a".to_owned(), pod("u1"))].into()));
        tokens
    }

    /// Returns what reviews tokens here, with what an earlier process knew.
    fn tokens_with(&self, outage: bool, known: LastKnown) -> Arc<PodTokens> {
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let account = "tunnel-edge".to_owned();
        let audience = AUDIENCE.to_owned();
        let settings = PodTokenSettings { cluster, account, audience, outage, file: None };
        let tokens = PodTokens::new(settings, known, watch::Sender::default(), Box::new(drop));
        self.connect(&tokens);
        tokens
    }

    /// A failed review forgets the client.
    fn connect(&self, tokens: &PodTokens) {
        *tokens.client.lock() = Some((self.client(), SUBJECT.to_owned()));
    }
}

const EDGE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

fn pod(uid: &str) -> EdgePod {
    EdgePod { uid: uid.to_owned(), node: Some("shop-1".to_owned()), deleted: None }
}

/// The status of a review as kube-apiserver 1.36 gives it.
fn accepted() -> Value {
    json!({"authenticated": true, "audiences": [AUDIENCE], "user": {"username": SUBJECT, "extra": {
        "authentication.kubernetes.io/node-name": ["shop-1"],
        "authentication.kubernetes.io/pod-name": ["edge-a"],
        "authentication.kubernetes.io/pod-uid": ["u1"],
    }}})
}

fn claims() -> Value {
    let now = now();
    json!({"aud": [AUDIENCE], "exp": now + 3600, "nbf": now - 10, "iat": now - 10, "iss": ISSUER, "sub": SUBJECT,
        "kubernetes.io": {"namespace": "edge-system", "pod": {"name": "edge-a", "uid": "u1"}}})
}

fn with(key: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[key] = value;
    claims
}

fn encoded(part: impl AsRef<[u8]>) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(part)
}

/// Returns a token that `sign` has signed.
fn token_by(head: &Value, claims: &Value, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
    let signed = format!("{}.{}", encoded(head.to_string()), encoded(claims.to_string()));
    let signature = encoded(sign(signed.as_bytes()));
    format!("{signed}.{signature}")
}

fn token(claims: &Value) -> String {
    token_by(&json!({"alg": "RS256", "kid": "k"}), claims, |_| b"unknown".to_vec())
}

async fn refusal(tokens: &PodTokens, token: &str) -> String {
    match tokens.review(token, EDGE).await {
        Err(TokenError::PodToken(why)) => why,
        other => panic!("{other:?}"),
    }
}

async fn unchecked_reason(tokens: &PodTokens, token: &str) -> String {
    match tokens.review(token, EDGE).await {
        Err(TokenError::PodTokenUnchecked(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_that_claims_something_else_is_refused_without_a_review() {
    let apiserver = Apiserver::new();
    let tokens = apiserver.tokens(true);
    let others = [
        (with("aud", json!(["other.example.org"])), "its audience is \"other.example.org\""),
        (with("aud", json!([])), "its audience is"),
        (with("sub", json!("system:serviceaccount:edge-system:other")), "edge-system:other\""),
        (with("sub", json!("system:serviceaccount:other:tunnel-edge")), "other:tunnel-edge\""),
        (with("sub", Value::from("a\n".repeat(500))), "it is for \"a a a "),
        (with("exp", json!(now() - 100)), "it has ended"),
        (with("nbf", json!(now() + 100)), "it is not valid yet"),
        (with("exp", json!("soon")), "it is no token of a ServiceAccount"),
        (with("kubernetes.io", json!({"namespace": "edge-system"})), "it is bound to no pod"),
        (with("kubernetes.io", Value::from("x".repeat(9000))), "it is longer than 8192 bytes"),
    ];
    for (claims, expected) in others {
        let why = refusal(&tokens, &token(&claims)).await;
        assert!(why.contains(expected) && why.len() < 600, "{why}");
    }
    for text in ["eyJ..", "eyJhbGciOiJub25lIn0.bnVsbA.", "eyJ.eyJ.eyJ"] {
        assert!(is_service_account_token(text));
        assert_eq!(refusal(&tokens, text).await, "it is no token of a ServiceAccount");
    }
    assert_eq!(apiserver.asked.load(Relaxed), 0);
    for other in ["", "eyJhbGciOiJub25lIn0", "0123456789abcdef0123456789abcdef", "a.b.c"] {
        assert!(!is_service_account_token(other), "{other}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_review_must_confirm_audience_account_and_pod() {
    let apiserver = Apiserver::new();
    let extra = "/user/extra/authentication.kubernetes.io~1";
    let changes = [
        ("/authenticated", json!(false), "does not accept it"),
        ("/audiences", json!(["other.example.org"]), "does not know its audience"),
        ("/audiences", Value::Null, "does not know its audience"),
        ("/user/username", json!("system:serviceaccount:edge-system:tunnel-edges"), "is for"),
        (&format!("{extra}pod-uid"), json!(["u2"]), "bound to another pod"),
        (&format!("{extra}pod-name"), json!(["edge-b"]), "bound to another pod"),
        ("/user/extra", Value::Null, "bound to another pod, or to none"),
    ];
    for (at, value, expected) in changes {
        let mut status = accepted();
        *status.pointer_mut(at).unwrap() = value;
        *apiserver.status.lock() = status;
        let why = refusal(&apiserver.tokens(true), &token(&claims())).await;
        assert!(why.contains(expected), "{at}: {why}");
    }
    *apiserver.status.lock() = json!({"authenticated": false, "error": "[invalid bearer token, service account token has been invalidated]"});
    assert!(refusal(&apiserver.tokens(true), &token(&claims())).await.contains("has been invalidated"));

    let mut old = accepted();
    old["user"]["extra"].as_object_mut().unwrap().remove("authentication.kubernetes.io/node-name");
    for status in [accepted(), old] {
        *apiserver.status.lock() = status;
        let proof = apiserver.tokens(true).review(&token(&claims()), EDGE).await.unwrap();
        assert_eq!((proof.node.as_str(), &*proof.pod, &*proof.uid), ("shop-1", "edge-a", "u1"));
    }
}

#[tokio::test(start_paused = true)]
async fn only_a_pod_that_exists_with_the_same_uid_counts_also_one_that_the_watch_learns_of_later() {
    let apiserver = Apiserver::new();
    let tokens = apiserver.tokens(true);
    tokens.pods.send_replace(Some([("edge-a".to_owned(), pod("u2"))].into()));
    let mine = token(&claims());
    assert_eq!(refusal(&tokens, &mine).await, "the watch does not have its pod edge-a");
    tokens.outage.lock().since = Some(Instant::now());
    assert!(unchecked_reason(&tokens, &mine).await.contains("edge-a"), "the watch may be behind");
    tokens.pods.send_replace(None);
    assert!(unchecked_reason(&tokens, &mine).await.contains("edge-a"), "the pods are not listed yet");
    let later = async {
        tokio::task::yield_now().await;
        tokens.pods.send_replace(Some([("edge-a".to_owned(), pod("u1"))].into()));
    };
    let (reviewed, ()) = tokio::join!(tokens.review(&mine, EDGE), later);
    assert!(reviewed.is_ok(), "{reviewed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_token_is_reviewed_once_at_a_time_and_its_answer_is_kept_for_a_while() {
    let apiserver = Apiserver::new();
    let tokens = apiserver.tokens(true);
    let asked = || apiserver.asked.load(Relaxed);
    let mine = token(&claims());
    let all = futures_util::future::join_all((0..50).map(|_| tokens.review(&mine, EDGE))).await;
    assert!(all.iter().all(Result::is_ok) && asked() == 1, "{}", asked());
    advance(Duration::from_secs(599)).await;
    assert!(tokens.review(&mine, EDGE).await.is_ok() && asked() == 1);
    advance(Duration::from_secs(2)).await;
    assert!(tokens.review(&mine, EDGE).await.is_ok() && asked() == 2);

    let short = token(&with("exp", json!(now() + 30)));
    tokens.review(&short, EDGE).await.unwrap();
    advance(Duration::from_secs(31)).await;
    tokens.review(&short, EDGE).await.unwrap();
    assert_eq!(asked(), 4, "a yes is not kept beyond the token");

    *apiserver.status.lock() = json!({"authenticated": false});
    let wrong = token(&with("jti", json!("x")));
    for (after, expected) in [(0, 5), (9, 5), (2, 6)] {
        advance(Duration::from_secs(after)).await;
        refusal(&tokens, &wrong).await;
        assert_eq!(asked(), expected);
    }
}

/// The name of a key, and what signs with it.
type Signer = (&'static str, Box<dyn Fn(&[u8]) -> Vec<u8>>);

/// Returns published keys, and for each a function that signs with it.
fn published() -> (KeySet, [Signer; 2]) {
    let rsa = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
    let components = PublicKeyComponents::<Vec<u8>>::from(rsa.public_key());
    let ec = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
    let point = ec.public_key().as_ref().to_vec();
    let keys = json!({"keys": [
        {"kty": "RSA", "kid": "rsa", "use": "sig", "alg": "RS256", "n": encoded(&components.n), "e": encoded(&components.e)},
        {"kty": "EC", "kid": "ec", "crv": "P-256", "x": encoded(&point[1..33]), "y": encoded(&point[33..])},
        {"kty": "oct", "kid": "shared", "k": encoded("secret")},
        {"kty": "RSA", "kid": "pss", "alg": "PS256", "n": encoded(&components.n), "e": encoded(&components.e)},
    ]});
    let by_rsa = move |text: &[u8]| {
        let mut signature = vec![0; rsa.public_modulus_len()];
        rsa.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), text, &mut signature).unwrap();
        signature
    };
    let by_ec = move |text: &[u8]| ec.sign(&SystemRandom::new(), text).unwrap().as_ref().to_vec();
    (serde_json::from_value(keys).unwrap(), [("rsa", Box::new(by_rsa)), ("ec", Box::new(by_ec))])
}

#[tokio::test(start_paused = true)]
async fn while_kube_apiserver_is_away_known_pods_return_by_its_keys_and_others_wait() {
    let apiserver = Apiserver::new();
    *apiserver.is_up.lock() = false;
    let (keys, signers) = published();
    let tokens = apiserver.tokens(true);
    let [(_, by_rsa), _] = &signers;
    let good = token_by(&json!({"alg": "RS256", "kid": "rsa"}), &claims(), by_rsa);
    assert!(unchecked_reason(&tokens, &good).await.contains("keys are not known"));
    tokens.keys.send_replace(Some((ISSUER.to_owned(), keys)));
    let asked = apiserver.asked.load(Relaxed);
    for (kid, sign) in &signers {
        apiserver.connect(&tokens);
        // The algorithm that the token names has no effect.
        let proof = tokens
            .review(&token_by(&json!({"alg": "none", "kid": kid}), &claims(), sign), EDGE)
            .await
            .unwrap();
        assert_eq!(proof.node.as_str(), "shop-1", "{kid}");
    }
    assert_eq!(apiserver.asked.load(Relaxed), asked, "it is not asked again at once");

    let head = |kid: &str| json!({"alg": "RS256", "kid": kid});
    let by_ec = &signers[1].1;
    for (what, forged) in [
        ("another key", token_by(&head("rsa"), &claims(), by_ec)),
        ("no signature", token_by(&json!({"alg": "none", "kid": "rsa"}), &claims(), |_| Vec::new())),
        ("an unknown key", token_by(&head("old"), &claims(), by_rsa)),
        (
            "a key without a public part",
            token_by(&json!({"alg": "HS256", "kid": "shared"}), &claims(), by_rsa),
        ),
        ("a key for another algorithm", token_by(&head("pss"), &claims(), by_rsa)),
        ("no name of a key", token_by(&json!({"alg": "RS256"}), &claims(), by_rsa)),
        ("another issuer", token_by(&head("rsa"), &with("iss", json!("https://other")), by_rsa)),
    ] {
        apiserver.connect(&tokens);
        assert_eq!(refusal(&tokens, &forged).await, "no key of kube-apiserver has signed it", "{what}");
    }
    for (key, value, expected) in
        [("aud", json!(["other"]), "its audience"), ("exp", json!(now() - 61), "it has ended")]
    {
        apiserver.connect(&tokens);
        let signed = token_by(&head("rsa"), &with(key, value), by_rsa);
        assert!(refusal(&tokens, &signed).await.contains(expected), "{key}");
    }
    apiserver.connect(&tokens);
    let bound = json!({"pod": {"name": "edge-a", "uid": "u9"}});
    let newer = token_by(&head("rsa"), &with("kubernetes.io", bound), by_rsa);
    assert!(unchecked_reason(&tokens, &newer).await.contains("only pods that were known before"));

    tokens.outage.lock().since = Some(Instant::now());
    advance(Duration::from_secs(24 * 3600 + 1)).await;
    apiserver.connect(&tokens);
    assert!(unchecked_reason(&tokens, &good).await.contains("more than a day"));
    let tokens = apiserver.tokens(false);
    assert!(unchecked_reason(&tokens, &good).await.contains("outage = false"));
    *apiserver.is_up.lock() = true;
    apiserver.connect(&tokens);
    advance(NO_REVIEW).await;
    assert!(tokens.review(&good, EDGE).await.is_ok());
}

/// Otherwise a caller who provokes such an answer would let ended tokens live on.
#[tokio::test(start_paused = true)]
async fn a_refused_request_is_no_outage() {
    for (code, is_outage) in [(400, false), (429, false), (500, true)] {
        let apiserver = Apiserver::new();
        let tokens = apiserver.tokens(true);
        *apiserver.status.lock() = json!({"code": code});
        unchecked_reason(&tokens, &token(&claims())).await;
        let ended = proof(now() - 9);
        assert_eq!(tokens.recheck(&ended).is_ok(), is_outage, "{code}");
    }
}

fn proof(ends: u64) -> PodProof {
    PodProof { node: "shop-1".parse().unwrap(), pod: "edge-a".to_owned(), uid: "u1".to_owned(), ends }
}

#[tokio::test(start_paused = true)]
async fn a_proof_ends_with_its_pod_and_its_token_but_not_while_kube_apiserver_is_away() {
    let valid = proof(now() + 9);
    let ended = proof(now() - 9);
    let long_ended = proof(now() - 24 * 3600 - 9);
    let apiserver = Apiserver::new();
    let tokens = apiserver.tokens(true);
    assert_eq!(tokens.recheck(&valid), Ok(()));
    assert_eq!(tokens.recheck(&ended), Err(TokenError::PodTokenEnded));
    tokens.on_state(Err(ClusterError::Forbidden(String::new())));
    assert_eq!(tokens.recheck(&ended), Err(TokenError::PodTokenEnded), "it answers");
    tokens.on_state(Err(ClusterError::Silent));
    assert_eq!(tokens.recheck(&ended), Ok(()));
    assert_eq!(tokens.recheck(&long_ended), Err(TokenError::PodTokenEnded));
    let strict = apiserver.tokens(false);
    strict.on_state(Err(ClusterError::Silent));
    assert_eq!(strict.recheck(&ended), Err(TokenError::PodTokenEnded));

    let listed = |uid: &str| -> PartialPod {
        serde_json::from_value(
            json!({"metadata": {"name": "edge-a", "uid": uid}, "spec": {"nodeName": "shop-1"}}),
        )
        .unwrap()
    };
    let mut pods = WatchedObjects::default();
    let mut on_event = |event| tokens.on_event(event, &mut pods);
    for event in [Event::Init, Event::InitApply(listed("u1")), Event::InitDone] {
        on_event(event);
    }
    tokens.on_state(Ok(()));
    assert_eq!(tokens.recheck(&ended), Ok(()), "the kubelet needs a moment to renew it");
    advance(AFTER_OUTAGE).await;
    assert_eq!(tokens.recheck(&ended), Err(TokenError::PodTokenEnded));
    assert_eq!(tokens.recheck(&valid), Ok(()));
    for (at, is_valid) in [("2999-01-01T00:00:00Z", true), ("2020-01-01T00:00:00Z", false)] {
        let mut ending = listed("u1");
        ending.metadata.deletion_timestamp = serde_json::from_value(json!(at)).unwrap();
        on_event(Event::Apply(ending));
        assert_eq!(tokens.recheck(&valid).is_ok(), is_valid, "its Node does not answer: {at}");
    }
    on_event(Event::Apply(listed("u1")));
    assert!(tokens.recheck(&valid).is_ok());
    on_event(Event::Apply(listed("u2")));
    assert!(matches!(tokens.recheck(&valid), Err(TokenError::NoPod(_))), "another pod of its name");
    on_event(Event::Delete(listed("u2")));
    assert!(matches!(tokens.recheck(&valid), Err(TokenError::NoPod(_))));
}

/// Runs what writes the file until the change is in it. Returns its text.
async fn written(file: &Path, tokens: &PodTokens, change: impl FnOnce()) -> String {
    let (_, nodes) = watch::channel(None);
    let keys = tokens.keys.subscribe();
    let writing = keep(Some(file.to_owned()), nodes, tokens.pods(), keys, || tokens.pods_age());
    change();
    let _ = timeout(2 * PAUSE, writing).await;
    fs::read_to_string(file).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_server_that_starts_while_kube_apiserver_is_away_admits_the_pods_of_before_and_no_other() {
    let apiserver = Apiserver::new();
    *apiserver.is_up.lock() = false;
    let (keys, [(_, by_rsa), _]) = published();
    let head = json!({"alg": "RS256", "kid": "rsa"});
    let good = token_by(&head, &claims(), &by_rsa);
    let bound = json!({"pod": {"name": "edge-b", "uid": "u2"}});
    let newer = token_by(&head, &with("kubernetes.io", bound), &by_rsa);

    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("known-pods.json");
    let before = apiserver.tokens(true);
    let text = written(&file, &before, || {
        before.keys.send_replace(Some((ISSUER.to_owned(), keys)));
    })
    .await;
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    // Keys that can be read while lists fail do not make the pods look new.
    let hour = Duration::from_secs(3600);
    before.outage.lock().since = Some(Instant::now());
    advance(hour).await;
    written(&file, &before, || before.keys.send_modify(|_| ())).await;
    assert!(LastKnown::recall(Some(&file)).age >= Some(hour));
    let restart = |age: Duration| {
        let changed = File::options().append(true).open(&file).unwrap().set_modified(SystemTime::now() - age);
        changed.unwrap();
        apiserver.tokens_with(true, LastKnown::recall(Some(&file)))
    };
    let tokens = restart(MAX_OUTAGE - Duration::from_secs(60));
    assert!(tokens.review(&good, EDGE).await.is_ok());
    apiserver.connect(&tokens);
    assert!(unchecked_reason(&tokens, &newer).await.contains("only pods that were known before"));
    advance(Duration::from_secs(60)).await;
    apiserver.connect(&tokens);
    assert!(unchecked_reason(&tokens, &good).await.contains("more than a day"));
    let too_old = restart(MAX_OUTAGE + Duration::from_secs(60));
    assert!(unchecked_reason(&too_old, &good).await.contains("its keys are not known yet"));

    // The first list decides again, and a pod that is deleted leaves the file.
    let listed: PartialPod =
        serde_json::from_value(json!({"metadata": {"name": "edge-a", "uid": "u1"}})).unwrap();
    let mut pods = WatchedObjects::default();
    let events = [Event::Init, Event::InitApply(listed.clone()), Event::InitDone, Event::Delete(listed)];
    let after = written(&file, &tokens, || {
        for event in events {
            tokens.on_event(event, &mut pods);
        }
    });
    assert!(text.contains("edge-a") && !after.await.contains("edge-a"));
    let tokens = restart(Duration::ZERO);
    assert!(unchecked_reason(&tokens, &good).await.contains("only pods that were known before"));
    fs::write(&file, &text[..text.len() / 2]).unwrap();
    assert!(unchecked_reason(&restart(Duration::ZERO), &good).await.contains("its keys are not known yet"));
}

/// Delivers messages between two servers until none follows. Returns their number.
fn exchange(asker: &PodTokens, peer: &PodTokens) -> usize {
    let mut said = asker.question();
    let mut count = 0;
    for to in [peer, asker].into_iter().cycle() {
        let Some(message) = said else { break };
        count += 1;
        said = to.on_peer(&message);
    }
    count
}

/// A server that follows pods `edge-N` on that number of Nodes `node-N` besides `edge-a` on `shop-1`, with what signs as
/// kube-apiserver.
fn followed(apiserver: &Apiserver, nodes: usize) -> (Arc<PodTokens>, Signer) {
    let (keys, [signer, _]) = published();
    let tokens = apiserver.tokens(true);
    tokens.keys.send_replace(Some((ISSUER.to_owned(), keys)));
    let names = || (0..nodes).map(|n| (format!("node-{n}"), true));
    tokens.nodes.send_replace(Some(names().chain([("shop-1".to_owned(), true)]).collect()));
    tokens.pods.send_modify(|pods| {
        let pods = pods.as_mut().unwrap();
        pods.extend(names().enumerate().map(|(n, (node, _))| {
            (format!("edge-{n}"), EdgePod { uid: format!("u-{n}"), node: Some(node), deleted: None })
        }));
    });
    (tokens, signer)
}

#[tokio::test(start_paused = true)]
async fn a_server_without_kube_apiserver_knows_the_pods_that_its_peer_follows() {
    let apiserver = Apiserver::new();
    *apiserver.is_up.lock() = false;
    let (peer, (_, by_rsa)) = followed(&apiserver, 1000);
    let head = json!({"alg": "RS256", "kid": "rsa"});
    let good = token_by(&head, &claims(), &by_rsa);
    let bound = json!({"pod": {"name": "edge-b", "uid": "u2"}});
    let newer = token_by(&head, &with("kubernetes.io", bound), &by_rsa);

    let fresh = apiserver.tokens_with(true, LastKnown::default());
    assert_eq!(exchange(&fresh, &peer), 0, "kube-apiserver may still answer");
    fresh.on_state(Err(ClusterError::Silent));
    assert!(unchecked_reason(&fresh, &good).await.contains("its keys are not known yet"));
    assert!(exchange(&fresh, &peer) > 10, "no message is too long");
    assert_eq!(
        (&*fresh.nodes.borrow(), &*fresh.pods.borrow()),
        (&*peer.nodes.borrow(), &*peer.pods.borrow())
    );
    apiserver.connect(&fresh);
    let proof = fresh.review(&good, EDGE).await.unwrap();
    assert_eq!(proof.node.as_str(), "shop-1");
    apiserver.connect(&fresh);
    assert!(unchecked_reason(&fresh, &newer).await.contains("only pods that were known before"));
    assert_eq!(exchange(&fresh, &peer), 1, "it knows as much");

    let more = Duration::from_secs(11);
    advance(more).await;
    peer.pods.send_modify(|pods| drop(pods.as_mut().unwrap().remove("edge-a")));
    exchange(&fresh, &peer);
    assert!(matches!(fresh.recheck(&proof), Err(TokenError::NoPod(_))));
    apiserver.connect(&fresh);
    assert!(unchecked_reason(&fresh, &good).await.contains("only pods that were known before"));

    // The day counts from what the peer saw last.
    peer.on_state(Err(ClusterError::Silent));
    advance(Duration::from_secs(3600)).await;
    assert_eq!(exchange(&fresh, &peer), 1, "two that know the same");
    let third = apiserver.tokens_with(true, LastKnown::default());
    third.on_state(Err(ClusterError::Silent));
    exchange(&third, &peer);
    assert!(third.pods.borrow().is_some() && third.pods_age() >= Some(Duration::from_secs(3600)));
    third.on_state(Ok(()));
    assert_eq!(exchange(&third, &peer), 0);
}

#[tokio::test(start_paused = true)]
async fn what_a_peer_of_another_cluster_or_too_many_parts_tell_does_not_apply() {
    let apiserver = Apiserver::new();
    let (own, _) = followed(&apiserver, 1);
    let (other, _) = followed(&apiserver, 200);
    let before = own.pods.borrow().clone();
    own.on_state(Err(ClusterError::Silent));
    advance(Duration::from_secs(60)).await;
    assert!(exchange(&own, &other) > 2);
    assert_eq!(*own.pods.borrow(), before);

    // Parts of two peers, each of which begins again.
    let fresh = apiserver.tokens_with(true, LastKnown::default());
    fresh.on_state(Err(ClusterError::Silent));
    let first = other.on_peer(&fresh.question().unwrap()).unwrap();
    let second = other.on_peer(&fresh.on_peer(&first).unwrap()).unwrap();
    assert!(fresh.on_peer(&second).is_some());
    assert!(fresh.on_peer(&second).is_none(), "the same part again");
    let end = json!({"age": Duration::ZERO, "after": "", "part": {"nodes": {}, "pods": {}, "keys": null}});
    for said in ["", "{}", &end.to_string().replace("\"after\":\"\"", "\"after\":\"node-0\"")] {
        assert!(fresh.on_peer(said.as_bytes()).is_none() && fresh.pods.borrow().is_none(), "{said}");
    }

    // One that never ends.
    let mut after = String::new();
    let parts = (0..).take_while(|n| {
        let node = format!("node-{n:09}{}", "x".repeat(100_000));
        let part = json!({"age": Duration::ZERO, "after": after, "part": {"nodes": {&node: true}, "pods": {}, "keys": null}});
        after = node;
        fresh.on_peer(part.to_string().as_bytes()).is_some()
    });
    assert!((50..200).contains(&parts.count()));
    assert!(fresh.pods.borrow().is_none());
}
