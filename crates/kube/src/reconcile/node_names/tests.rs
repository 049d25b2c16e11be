//! Tests of the whole module against a fake kube-apiserver.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::advance;

use super::*;

/// The state of the cluster.
#[derive(Debug, Default)]
struct State {
    nodes: Vec<(&'static str, &'static str)>,
    /// Number of lists of all Nodes.
    lists: usize,
    /// ConfigMap and Lease, by the last part of their paths.
    objects: BTreeMap<String, Value>,
    version: u64,
    /// Objects that no client may read or write.
    forbidden: Vec<&'static str>,
}

/// A fake kube-apiserver on its own thread, in which time is not paused. Its watches report no events.
struct Apiserver {
    state: Arc<Mutex<State>>,
    kubeconfig: PathBuf,
    /// Address of an echo server on the same thread.
    echo: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Apiserver {
    fn start() -> Self {
        let [listener, echoes] = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let [at, echo] = [&listener, &echoes].map(|one| {
            one.set_nonblocking(true).unwrap();
            one.local_addr().unwrap()
        });
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("kubeconfig");
        let text = format!(
            "{{apiVersion: v1, kind: Config, current-context: a, users: [{{name: a, user: {{}}}}],\n\
             contexts: [{{name: a, context: {{cluster: a, user: a}}}}],\n\
             clusters: [{{name: a, cluster: {{server: 'http://{at}'}}}}]}}\n"
        );
        std::fs::write(&kubeconfig, text).unwrap();
        let state = Arc::<Mutex<State>>::default();
        let (shared, turns) = (state.clone(), watch::Sender::new(0));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let tasks = tokio::task::LocalSet::new();
            tasks.block_on(&runtime, async {
                let [listener, echoes] = [listener, echoes].map(|one| TcpListener::from_std(one).unwrap());
                loop {
                    let (socket, _) = tokio::select! {
                        accepted = listener.accept() => accepted.unwrap(),
                        accepted = echoes.accept() => {
                            let ((mut socket, _), turn_counter) = (accepted.unwrap(), turns.clone());
                            tokio::task::spawn_local(async move {
                                while let Ok(byte) = socket.read_u8().await {
                                    turn_counter.send_modify(|turns| *turns += 1);
                                    let _ = socket.write_u8(byte).await;
                                }
                            });
                            continue;
                        }
                    };
                    let (state, watched) = (shared.clone(), turns.subscribe());
                    let answer = service_fn(move |request| answer(state.clone(), watched.clone(), request));
                    tokio::task::spawn_local(async move {
                        let _ = http1::Builder::new().serve_connection(TokioIo::new(socket), answer).await;
                    });
                }
            });
        });
        Self { state, kubeconfig, echo, _dir: dir }
    }

    fn text(&self) -> Option<String> {
        let state = self.state.lock().unwrap();
        Some(state.objects.get("map")?["data"]["key"].as_str()?.to_owned())
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }
}

async fn answer(
    state: Arc<Mutex<State>>,
    mut turns: watch::Receiver<u64>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let is_watch = head.uri.query().is_some_and(|query| query.contains("watch=true"));
    if is_watch {
        // A watch ends after ten seconds of the test's time.
        let until = *turns.borrow_and_update() + 10 * TURNS;
        let _ = turns.wait_for(|turns| *turns >= until).await;
        return Ok(Response::new(Full::default()));
    }
    let body = body.collect().await.unwrap().to_bytes();
    let mut state = state.lock().unwrap();
    let name = head.uri.path().rsplit('/').next().unwrap().to_owned();
    let (status, content) = match (head.method, name.as_str()) {
        (Method::GET, "nodes") => {
            state.lists += 1;
            let node = |(name, ip): &(&str, &str)| json!({"metadata": {"name": name}, "status": {"addresses": [{"type": "InternalIP", "address": ip}]}});
            let items: Vec<_> = state.nodes.iter().map(node).collect();
            let list = json!({"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items});
            (200, list)
        }
        (Method::GET, "service") => {
            (200, json!({"metadata": {"name": "service"}, "spec": {"clusterIPs": ["10.96.0.20"]}}))
        }
        (_, name) if state.forbidden.contains(&name) => failure(403),
        (Method::GET, name) => match state.objects.get(name) {
            Some(found) => (200, found.clone()),
            None => failure(404),
        },
        (_, _) => {
            let mut object: Value = serde_json::from_slice(&body).unwrap();
            let name = object["metadata"]["name"].as_str().unwrap().to_owned();
            let before = state.objects.get(&name).map(|found| found["metadata"]["resourceVersion"].clone());
            if before.is_some_and(|before| before != object["metadata"]["resourceVersion"]) {
                failure(409)
            } else {
                state.version += 1;
                object["metadata"]["resourceVersion"] = state.version.to_string().into();
                state.objects.insert(name, object.clone());
                (200, object)
            }
        }
    };
    Ok(Response::builder().status(status).body(Full::from(content.to_string())).unwrap())
}

fn failure(code: u16) -> (u16, Value) {
    let reason = match code {
        403 => "Forbidden",
        409 => "Conflict",
        _ => "NotFound",
    };
    let content = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "", "reason": reason, "code": code});
    (code, content)
}

fn names(apiserver: &Apiserver, identity: &str) -> NodeNamesReconciler {
    NodeNamesReconciler::new(params(apiserver, identity), watch::Sender::default(), Box::new(drop))
}

fn params(apiserver: &Apiserver, identity: &str) -> NamesReconcilerParams {
    NamesReconcilerParams {
        cluster: Cluster { kubeconfig: Some(apiserver.kubeconfig.clone()), namespace: Some("n".to_owned()) },
        namespace: "n".to_owned(),
        configmap: "map".to_owned(),
        key: "key".to_owned(),
        lease: "lease".to_owned(),
        identity: identity.to_owned(),
        edges: ("edge".to_owned(), "true".to_owned()),
        names: Vec::new(),
        service: "service".to_owned(),
        holders: None,
    }
}

/// Advances the time by seconds until the condition holds. During each second the fake kube-apiserver runs several
/// times, so that it answers all requests before they time out, however fast this machine is.
async fn advance_until(apiserver: &Apiserver, what: &str, mut condition: impl FnMut() -> bool) {
    let mut line = TcpStream::connect(apiserver.echo).await.unwrap();
    line.set_nodelay(true).unwrap();
    for _ in 0..MAX_STEPS {
        if condition() {
            return;
        }
        for _ in 0..TURNS {
            line.write_all(b"x").await.unwrap();
            line.read_u8().await.unwrap();
        }
        advance(Duration::from_secs(1)).await;
    }
    panic!("{what}");
}

/// Keeps the runtime busy while the result lives, so that time passes only through `advance`.
fn freeze_time() -> std::sync::mpsc::Sender<()> {
    let (over, is_over) = std::sync::mpsc::channel();
    tokio::task::spawn_blocking(move || is_over.recv());
    over
}

const MAX_STEPS: usize = 20_000;

/// Runs of the fake kube-apiserver in each second.
const TURNS: u64 = 2;

#[tokio::test(start_paused = true)]
async fn manual_changes_and_missed_events_are_repaired_by_periodic_passes() {
    let apiserver = Apiserver::start();
    apiserver.change(|state| state.nodes = vec![("a", "10.0.0.1")]);
    let _still = freeze_time();
    let drain = Drain::new();
    drain.spawn(tracing::Span::none(), names(&apiserver, "first").run(drain.clone()));
    let is = |text: &str| apiserver.text().as_deref() == Some(text);
    advance_until(&apiserver, "the text is written", || is("10.0.0.1\ta\n")).await;

    apiserver.change(|state| {
        let map = state.objects.get_mut("map").unwrap();
        map["data"]["key"] = "192.0.2.1\ta\n".into();
        map["metadata"]["resourceVersion"] = "by hand".into();
    });
    advance_until(&apiserver, "a manual change is reverted", || is("10.0.0.1\ta\n")).await;
    apiserver.change(|state| state.nodes = vec![("a", "10.0.0.9"), ("b", "10.0.0.2")]);
    advance_until(&apiserver, "all Nodes are listed again", || is("10.0.0.2\tb\n10.0.0.9\ta\n")).await;

    // A new holder lists all Nodes, whatever the old one knew.
    drain.start();
    advance_until(&apiserver, "the Lease is released", || {
        let state = apiserver.state.lock().unwrap();
        state.objects["lease"]["spec"]["holderIdentity"] == ""
    })
    .await;
    apiserver.change(|state| state.nodes = vec![("c", "10.0.0.3")]);
    let (drain, lists) = (Drain::new(), apiserver.state.lock().unwrap().lists);
    drain.spawn(tracing::Span::none(), names(&apiserver, "second").run(drain.clone()));
    advance_until(&apiserver, "its successor writes", || is("10.0.0.3\tc\n")).await;
    assert!(apiserver.state.lock().unwrap().lists > lists);
    drain.start();
}

#[tokio::test(start_paused = true)]
async fn a_forbidden_lease_is_reported_until_it_is_held() {
    let apiserver = Apiserver::start();
    apiserver.change(|state| state.forbidden = vec!["lease", "leases"]);
    let _still = freeze_time();
    let (drain, reported) = (Drain::new(), Arc::new(Mutex::new(Ok(()))));
    let state = reported.clone();
    let report = Box::new(move |now| *state.lock().unwrap() = now);
    let names = NodeNamesReconciler::new(params(&apiserver, "first"), watch::Sender::default(), report);
    drain.spawn(tracing::Span::none(), names.run(drain.clone()));
    advance_until(&apiserver, "the error is reported", || {
        reported.lock().unwrap().as_ref().is_err_and(|why| why.contains("Lease n/lease"))
    })
    .await;
    apiserver.change(|state| {
        state.forbidden.clear();
        state.nodes = vec![("a", "10.0.0.1")];
    });
    advance_until(&apiserver, "the Lease is held", || {
        reported.lock().unwrap().is_ok() && apiserver.text().is_some()
    })
    .await;
    drain.start();
}

#[tokio::test(start_paused = true)]
async fn writes_are_spaced_however_often_a_node_changes() {
    let apiserver = Apiserver::start();
    let _still = freeze_time();
    let names = names(&apiserver, "first");
    let term = 1;
    let node = |last: u8| {
        let node = json!({"metadata": {"name": "a"}, "status": {"addresses": [{"type": "InternalIP", "address": format!("10.0.0.{last}")}]}});
        serde_json::from_value::<PartialNode>(node).unwrap()
    };
    let edges = names.params.edges.clone();
    names.nodes.lock().take(Event::InitDone, |node| KubeNodeState::of(node, &edges));
    let (writes, started) = (Mutex::new(Vec::new()), Instant::now());
    let changes = async {
        let mut last = 0;
        advance_until(&apiserver, "the text is written several times", || {
            last = if last == 200 { 1 } else { last + 1 };
            names.on_event(Event::Apply(node(last)));
            let text = apiserver.text();
            let mut writes = writes.lock().unwrap();
            if text.is_some() && writes.last().is_none_or(|(_, before)| *before != text) {
                writes.push((started.elapsed(), text));
            }
            writes.len() > 3
        })
        .await;
    };
    tokio::select! {
        why = names.keep(term) => panic!("{why}"),
        () = changes => {}
    }
    // Each write is noticed at most one second later.
    let writes = writes.into_inner().unwrap();
    for two in writes.windows(2) {
        assert!(two[1].0 - two[0].0 >= MIN_WRITE_INTERVAL - Duration::from_secs(1), "{writes:?}");
    }
}
