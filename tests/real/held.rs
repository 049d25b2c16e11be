//! A proxy in front of kube-apiserver that can hold writes back.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};

use http::header::{AUTHORIZATION, HOST};
use http::{Method, Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use kube::Client;
use kube::client::Body;
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tracing::Span;
use tunnel_base::drain::Drain;

use crate::kubernetes::Kubernetes;
use crate::process::TIMEOUT;

/// The proxy. While it holds, no write passes. Held writes of ConfigMaps can be released one by one, even if their
/// client has given up.
pub(crate) struct HoldingProxy {
    /// The kubeconfig that uses the proxy.
    pub(crate) kubeconfig: PathBuf,
    holds: Arc<AtomicBool>,
    writes: Receiver<HeldWrite>,
    _dir: TempDir,
}

/// A write that is held back.
pub(crate) struct HeldWrite {
    go: oneshot::Sender<()>,
    status: Receiver<u16>,
}

impl HoldingProxy {
    pub(crate) fn before(kubernetes: &Kubernetes) -> Self {
        let listener = kubernetes.run(TcpListener::bind("127.0.0.1:0")).unwrap();
        let (at, dir) = (listener.local_addr().unwrap(), tempfile::tempdir().unwrap());
        let kubeconfig = dir.path().join("held");
        // JSON is valid YAML.
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{at}")}}],
            "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        std::fs::write(&kubeconfig, text.to_string()).unwrap();
        let (holds, (found, writes), tasks) = (Arc::<AtomicBool>::default(), channel(), Drain::new());
        let (to, holding) = (kubernetes.client(&kubernetes.admin()), holds.clone());
        kubernetes.spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let ways = (to.clone(), holding.clone(), found.clone(), tasks.clone());
                let answer = move |request| pass(ways.clone(), request);
                tasks.spawn(Span::none(), async move {
                    let _ = http1::Builder::new()
                        .serve_connection(TokioIo::new(socket), service_fn(answer))
                        .await;
                });
            }
        });
        Self { kubeconfig, holds, writes, _dir: dir }
    }

    /// Holds back all writes from now on.
    pub(crate) fn hold(&self) {
        self.holds.store(true, Relaxed);
    }

    /// Lets all new requests pass. Held writes stay held.
    pub(crate) fn let_go(&self) {
        self.holds.store(false, Relaxed);
    }

    /// Waits for the next held write of a ConfigMap, and returns it.
    pub(crate) fn write(&self) -> HeldWrite {
        self.writes.recv_timeout(2 * TIMEOUT).expect("no write of a ConfigMap")
    }
}

impl HeldWrite {
    /// Releases the write, and returns its status.
    pub(crate) fn release(self) -> u16 {
        self.go.send(()).unwrap();
        self.status.recv_timeout(2 * TIMEOUT).expect("no response")
    }
}

async fn pass(
    (to, holds, found, tasks): (Client, Arc<AtomicBool>, Sender<HeldWrite>, Drain),
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let (mut head, body) = request.into_parts();
    for name in [HOST, AUTHORIZATION] {
        head.headers.remove(name);
    }
    let is_write = head.method != Method::GET;
    let is_map = head.uri.path().contains("/configmaps");
    let body = body.collect().await.unwrap().to_bytes().to_vec();
    let request = Request::from_parts(head, Body::from(body));
    if !(is_write && holds.load(Relaxed)) {
        return Ok(to.send(request).await.unwrap());
    }
    if is_map {
        let ((go, goes), (answered, status)) = (oneshot::channel(), channel());
        let _ = found.send(HeldWrite { go, status });
        // The write continues even if its client has disconnected.
        tasks.spawn(Span::none(), async move {
            if goes.await.is_ok() {
                let _ = answered.send(to.send(request).await.unwrap().status().as_u16());
            }
        });
    }
    std::future::pending().await
}
