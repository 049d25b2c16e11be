use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use http::{Request, Response};
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use crate::cluster::tests::answer_slowly;
use tunnel_base::addresses::cluster_state::Endpoints;

/// A fake kube-apiserver that holds one ConfigMap.
#[derive(Default)]
struct Server {
    object: Option<Value>,
    version: u64,
    /// Writes by others right before our next writes, one for each.
    others: VecDeque<Value>,
    refusal: Option<(u16, Value)>,
    reads: usize,
    writes: usize,
}

impl Server {
    fn answer(&mut self, method: &str, body: &[u8]) -> (u16, Value) {
        if let Some(refusal) = &self.refusal {
            return refusal.clone();
        }
        if method == "GET" {
            self.reads += 1;
            return self
                .object
                .clone()
                .map_or_else(|| (404, status(404, "NotFound")), |object| (200, object));
        }
        if let Some(object) = self.others.pop_front() {
            self.object = (!object.is_null()).then_some(object);
            self.stamp();
        }
        let sent: Value = serde_json::from_slice(body).unwrap();
        match (method, &self.object) {
            ("POST", Some(_)) => return (409, status(409, "AlreadyExists")),
            ("PUT", None) => return (404, status(404, "NotFound")),
            ("PUT", Some(now))
                if now["metadata"]["resourceVersion"] != sent["metadata"]["resourceVersion"] =>
            {
                return (409, status(409, "Conflict"));
            }
            _ => {}
        }
        self.writes += 1;
        self.object = Some(sent);
        self.stamp();
        (200, self.object.clone().unwrap())
    }

    fn stamp(&mut self) {
        self.version += 1;
        let version = self.version.to_string();
        if let Some(object) = &mut self.object {
            object["metadata"]["resourceVersion"] = version.into();
        }
    }

    fn hosts(&self) -> String {
        self.object.as_ref().unwrap()["data"]["hosts"].as_str().unwrap().to_owned()
    }
}

fn status(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason})
}

fn object(hosts: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tunnel-nodes"}, "data": {"hosts": hosts}})
}

fn ip(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn pods(ready: &[u8], unready: &[u8]) -> ServiceEndpoints {
    let set = |all: &[u8]| all.iter().map(|last| ip(*last)).collect();
    Some(Endpoints { ready: set(ready), unready: set(unready) })
}

fn no_server_lives() -> Box<ServerLivenessProbe> {
    Box::new(|_| Box::pin(std::future::ready(false)))
}

/// Returns the store of the server 10.0.0.1, at a kube-apiserver that holds this object.
fn pod(
    object: Option<Value>,
    endpoints: Option<watch::Receiver<ServiceEndpoints>>,
) -> (ConfigMapRecords, Arc<Mutex<Server>>) {
    let mut server = Server { object, ..Server::default() };
    server.stamp();
    let server = Arc::new(Mutex::new(server));
    let at = server.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let server = at.clone();
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            let (code, content) = server.lock().unwrap().answer(head.method.as_str(), &body);
            let answer = Response::builder().status(code).body(Body::from(content.to_string().into_bytes()));
            Ok::<_, tower::BoxError>(answer.unwrap())
        }
    });
    let cluster = Cluster { kubeconfig: None, namespace: None };
    let settings = ConfigMapParams {
        cluster,
        name: "tunnel-nodes".to_owned(),
        server: ip(1),
        endpoints,
        liveness: no_server_lives(),
    };
    let mut map = ConfigMapRecords::new(settings);
    map.api = Some(Api::namespaced(Client::new(service, "edge-system"), "edge-system"));
    (map, server)
}

#[tokio::test]
async fn a_write_conflict_is_retried_at_once_on_the_new_content() {
    let (mut map, server) = pod(Some(object("10.0.0.2    b\n")), None);
    server
        .lock()
        .unwrap()
        .others
        .extend([object("10.0.0.2    b\n10.0.0.2    c\n"), object("# mine\n10.0.0.2    c\n")]);
    let before = std::time::SystemTime::now();
    map.write(&names(&["a"])).await.unwrap();
    assert!(before.elapsed().unwrap() < REWRITE_INTERVAL / 2);
    assert_eq!(server.lock().unwrap().hosts(), "10.0.0.1    a\n# mine\n10.0.0.2    c\n");
}

#[tokio::test]
async fn a_missing_map_is_created_even_if_others_create_or_delete_it_meanwhile() {
    let (mut map, server) = pod(None, None);
    map.withdraw().await.unwrap();
    assert_eq!(server.lock().unwrap().object, None, "not created without records");
    server.lock().unwrap().others.push_back(object("10.0.0.2    b\n"));
    map.write(&names(&["a"])).await.unwrap();
    assert_eq!(server.lock().unwrap().hosts(), "10.0.0.1    a\n10.0.0.2    b\n");
    server.lock().unwrap().others.push_back(Value::Null);
    map.write(&names(&["c"])).await.unwrap();
    assert_eq!(
        server.lock().unwrap().hosts(),
        "10.0.0.1    c\n",
        "recreated because it was deleted meanwhile"
    );
    assert_eq!(server.lock().unwrap().object.as_ref().unwrap()["metadata"]["name"], "tunnel-nodes");
}

#[tokio::test]
async fn other_content_of_the_map_stays_and_an_unchanged_map_is_not_written() {
    let mut held = object("10.0.0.1    a\n");
    held["data"]["other"] = "text".into();
    held["binaryData"] = json!({"blob": "AAE="});
    held["metadata"]["labels"] = json!({"a": "b"});
    let (mut map, server) = pod(Some(held.clone()), None);
    map.write(&names(&["a"])).await.unwrap();
    assert_eq!(server.lock().unwrap().reads, 1);
    assert_eq!(server.lock().unwrap().writes, 0);
    map.write(&names(&["a", "b"])).await.unwrap();
    held["data"]["hosts"] = "10.0.0.1    a\n10.0.0.1    b\n".into();
    held["metadata"]["resourceVersion"] = "2".into();
    assert_eq!(server.lock().unwrap().object, Some(held));
}

#[tokio::test]
async fn a_too_large_map_is_an_error_with_a_remedy_and_is_not_sent() {
    let full = format!("{}\n", "#".repeat(MAX_BYTES - 20));
    let (mut map, server) = pod(Some(object(&full)), None);
    map.write(&names(&["a"])).await.unwrap();
    let error = map.write(&names(&["a", "one-more"])).await.unwrap_err().to_string();
    assert!(error.contains("etcd") && error.contains("1048576"), "{error}");
    assert_eq!(server.lock().unwrap().writes, 1);
    map.withdraw().await.unwrap();
    assert_eq!(server.lock().unwrap().hosts(), full);
}

#[tokio::test]
async fn a_forbidden_write_is_an_error_that_names_the_required_verbs() {
    let (mut map, server) = pod(None, None);
    server.lock().unwrap().refusal = Some((403, status(403, "Forbidden")));
    let error = map.write(&names(&["a"])).await.unwrap_err().to_string();
    assert!(error.contains("get, create and update on configmaps"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_write_to_a_silent_apiserver_times_out() {
    let (mut map, _server) = pod(None, None);
    let silent = tower::service_fn(|_: Request<Body>| {
        std::future::pending::<Result<Response<Body>, tower::BoxError>>()
    });
    map.api = Some(Api::namespaced(Client::new(silent, "n"), "n"));
    let error = map.write(&names(&["a"])).await.unwrap_err().to_string();
    assert!(error.contains("did not answer"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_long_answer_may_arrive_slowly() {
    let (mut map, _server) = pod(None, None);
    let (cluster, slow) = answer_slowly(r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{}}"#).await;
    let (client, namespace) = cluster.connect().await.unwrap();
    map.api = Some(Api::namespaced(client, &namespace));
    let none = BTreeSet::new();
    let (written, ()) = tokio::join!(map.change(&none, true), slow);
    assert_eq!(written, Ok(()));
}

#[tokio::test]
async fn endless_write_conflicts_are_an_error() {
    let (mut map, server) = pod(Some(object("")), None);
    server.lock().unwrap().others.extend(std::iter::repeat_n(object("#"), 50));
    let error = map.write(&names(&["a"])).await.unwrap_err().to_string();
    assert!(error.contains("50 conflicting updates"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn lines_of_an_absent_server_are_removed_unless_it_comes_back() {
    let text = "10.0.0.2    b\n10.0.0.3    c\n127.0.0.1    localhost\n192.0.2.1 by-hand\n";
    let (sender, known) = watch::channel(None);
    let (mut map, server) = pod(Some(object(text)), Some(known));
    let hosts = || server.lock().unwrap().hosts();
    let (wait, none) = (STALE_AFTER + SPREAD, BTreeSet::new());

    for unfit in [None, pods(&[], &[]), pods(&[9], &[8])] {
        sender.send_replace(unfit);
        map.write(&none).await.unwrap();
        tokio::time::advance(wait).await;
        map.write(&none).await.unwrap();
        assert_eq!(hosts(), text, "no server is checked unless this one is an endpoint");
    }
    sender.send_replace(pods(&[1, 2], &[3]));
    map.write(&none).await.unwrap();
    tokio::time::advance(STALE_AFTER / 2).await;
    sender.send_replace(pods(&[1, 3], &[2]));
    map.write(&none).await.unwrap();
    assert!(map.due() <= Instant::now() + REWRITE_INTERVAL);
    tokio::time::advance(STALE_AFTER - Duration::from_millis(1)).await;
    map.write(&none).await.unwrap();
    assert_eq!(hosts(), text, "3 came back, 2 has not been absent for long");
    tokio::time::advance(SPREAD + Duration::from_millis(1)).await;
    assert!(map.due() <= Instant::now(), "the check is due");
    map.write(&names(&["a"])).await.unwrap();
    assert_eq!(hosts(), "10.0.0.1    a\n10.0.0.3    c\n127.0.0.1    localhost\n192.0.2.1 by-hand\n");
    assert!(map.due() > Instant::now(), "the check is done");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_not_ready_keeps_its_lines_while_it_answers() {
    let text = "10.0.0.2    b\n10.0.0.3    c\n";
    // This server is not ready either, as if probes could not reach any server.
    let (sender, known) = watch::channel(pods(&[], &[1, 2]));
    let (mut map, server) = pod(Some(object(text)), Some(known));
    let living = Arc::new(Mutex::new(BTreeSet::from([ip(2), ip(3)])));
    let (probed, wait) = (living.clone(), STALE_AFTER + SPREAD);
    map.settings.liveness = Box::new(move |pod| {
        let lives = probed.lock().unwrap().contains(&pod);
        Box::pin(std::future::ready(lives))
    });
    let hosts = || server.lock().unwrap().hosts();
    map.write(&names(&[])).await.unwrap();
    for _ in 0..3 {
        tokio::time::advance(wait).await;
        map.write(&names(&[])).await.unwrap();
        assert_eq!(hosts(), "10.0.0.2    b\n", "an address that is no endpoint belongs to no server now");
        assert!(map.due() > Instant::now());
    }
    living.lock().unwrap().clear();
    tokio::time::advance(wait).await;
    map.write(&names(&[])).await.unwrap();
    assert_eq!(hosts(), "", "the pod of a lost machine remains an endpoint for long");
    sender.send_replace(None);
}

#[tokio::test]
async fn a_server_that_writes_before_a_sweep_keeps_its_lines() {
    let (_sender, known) = watch::channel(pods(&[1], &[]));
    let (mut map, server) = pod(Some(object("10.0.0.2    b\n")), Some(known));
    map.sweeps.insert(ip(2), Instant::now());
    server.lock().unwrap().others.push_back(object("10.0.0.2    back\n"));
    map.write(&names(&["a"])).await.unwrap();
    assert_eq!(server.lock().unwrap().hosts(), "10.0.0.1    a\n10.0.0.2    back\n");
    assert!(map.due() <= Instant::now(), "it is checked again");
}

#[tokio::test]
async fn withdraw_removes_own_lines_without_probing_other_servers() {
    let (_sender, known) = watch::channel(pods(&[1], &[2]));
    let (mut map, server) = pod(Some(object("10.0.0.1    a\n10.0.0.2    b\n")), Some(known));
    map.settings.liveness = Box::new(|_| Box::pin(std::future::pending()));
    map.sweeps.insert(ip(2), Instant::now());
    map.withdraw().await.unwrap();
    assert_eq!(server.lock().unwrap().hosts(), "10.0.0.2    b\n");
}

#[tokio::test(start_paused = true)]
async fn servers_sweep_at_different_times() {
    let mut times = BTreeSet::new();
    for _ in 0..8 {
        let (_sender, known) = watch::channel(pods(&[1], &[]));
        let (mut map, _server) = pod(Some(object("10.0.0.2    b\n")), Some(known));
        map.write(&BTreeSet::new()).await.unwrap();
        times.insert(map.sweeps[&ip(2)]);
    }
    assert!(
        times.len() > 4
            && times.iter().all(|at| (STALE_AFTER..=STALE_AFTER + SPREAD).contains(&(*at - Instant::now())))
    );
}
