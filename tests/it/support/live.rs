//! Programs that follow their config files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::sleep;
use tunnel::config::Environment;
use tunnel::config::config_watch::ConfigFile;
use tunnel::edge::Edge;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;
use tunnel_net::reload::reload_now;

use super::programs::{TestDir, TestServer, start_edge};

/// Starts a server that follows its config file. Returns both.
pub(crate) fn server(place: &TestDir, text: &str) -> (TestServer, PathBuf) {
    let path = place.file("server.toml", text);
    let server = Server::start(ServerConfig::read(text, &Environment::default()).unwrap().0, None).unwrap();
    server.watch_config(file(&path, text));
    (TestServer::from(server), path)
}

/// Starts an edge that follows its config file. Returns both.
pub(crate) fn edge(place: &TestDir, text: &str) -> (Edge, PathBuf) {
    let (path, edge) = (place.file("edge.toml", text), start_edge(text));
    edge.watch_config(file(&path, text));
    (edge, path)
}

fn file(path: &Path, text: &str) -> ConfigFile {
    ConfigFile { path: path.into(), text: text.to_owned(), environment: Environment::default(), copy: None }
}

/// Has all files read again until this completes.
pub(crate) async fn reloaded<F: Future>(ended: F) -> F::Output {
    let reloading = async {
        loop {
            reload_now();
            sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        ended = ended => ended,
        () = reloading => unreachable!(),
    }
}
