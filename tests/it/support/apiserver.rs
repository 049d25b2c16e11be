//! A fake kube-apiserver with fixed objects that never change.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tunnel::config::Environment;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;

use super::programs::{TestDir, TestServer};
use super::targets;

/// Starts a server whose Kubernetes has these objects, keyed by the last part of their path (`nodes`).
pub(crate) async fn server_with(
    place: &TestDir,
    more: &str,
    objects: HashMap<&'static str, Vec<Value>>,
) -> TestServer {
    let objects = Arc::new(objects);
    let at = targets::serve(move |socket| serve(socket, objects.clone())).await;
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": format!("http://{at}")}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "edge-system"}}],
    });
    let env = Environment {
        kubeconfig: Some(place.file("kubeconfig", &kubeconfig.to_string())),
        ..Environment::default()
    };
    let text =
        place.cloud(&format!("[server.addresses]\nkubernetes = true\n[server.addresses.nodes]\n{more}"));
    let (settings, _) = ServerConfig::read(&text, &env).unwrap();
    TestServer::from(Server::start(settings, None).unwrap())
}

async fn serve(socket: TcpStream, objects: Arc<HashMap<&'static str, Vec<Value>>>) {
    let mut socket = BufReader::new(socket);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if !matches!(socket.read_line(&mut head).await, Ok(1..)) {
                return;
            }
        }
        let (path, query) = head.split(' ').nth(1).unwrap().split_once('?').unwrap();
        if query.contains("watch=") {
            let started =
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
            let _ = socket.write_all(started.as_bytes()).await;
            return std::future::pending().await;
        }
        let items = objects.get(path.rsplit('/').next().unwrap()).cloned().unwrap_or_default();
        let list =
            json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items});
        let body = list.to_string();
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        if socket.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}
