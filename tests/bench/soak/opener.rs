//! An edge with programs that open sessions to other nodes: the library's edge with its own CONNECT port, as the
//! program has none.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tunnel::config::Environment;
use tunnel::edge::Edge;
use tunnel::edge::config::EdgeConfig as Settings;
use tunnel::route::{SessionRequest, SessionRouter};
use tunnel::session_io::copy::close::close_gracefully;
use tunnel::session_io::copy::{EndKind, Side, copy_bidirectional};
use tunnel_base::logging::{LogSettings, LoggingGuard};
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::{Connection as _, Socket};
use tunnel_proto::frame::SessionCategory;
use tunnel_proto::names::{Host, Target};

use crate::soak::target::line;

/// One such edge.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Opener {
    /// Path of the config file.
    pub(crate) config: PathBuf,
    /// Address of the CONNECT port.
    pub(crate) listen: SocketAddr,
}

impl Opener {
    /// Runs the edge in this process, until SIGTERM.
    pub(crate) fn run(&self) -> Result<()> {
        let _lines = LoggingGuard::start(LogSettings::default());
        let text = fs::read_to_string(&self.config)?;
        let (settings, _) = Settings::read(&text, &Environment::default())?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate())?;
            let edge = Edge::start(settings, None)?;
            let listener = TcpListener::bind(self.listen).await?;
            let (route, pool) = (edge.route.clone(), BufferPool::new());
            let doors = tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(open(client, route.clone(), pool.clone()));
                }
            });
            terminate.recv().await;
            doors.abort();
            edge.shutdown(std::future::pending()).await;
            Ok(())
        })
    }
}

/// Serves a client like the server's CONNECT listener.
async fn open(mut client: TcpStream, route: SessionRouter, pool: BufferPool) -> Result<()> {
    client.set_nodelay(true)?;
    let request = String::from_utf8_lossy(&line(&mut client).await?).into_owned();
    while line(&mut client).await?.len() > 1 {}
    let target: Target = request.split(' ').nth(1).context("no target")?.parse()?;
    let Host::Name(name) = &target.host else { return Ok(()) };
    let request = SessionRequest {
        node: name.parse()?,
        target,
        category: SessionCategory::HttpProxy,
        client: "soak".to_owned(),
        listener: "connect",
        permit: None,
    };
    let mut session = match route.open(request).await {
        Ok(session) => session,
        Err(why) => return Ok(client.write_all(format!("HTTP/1.1 502 {why}\r\n\r\n").as_bytes()).await?),
    };
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    let mut client = Socket::with_early(client, pool, Bytes::new());
    client.io.set_reset_on_drop(true);
    let ended = copy_bidirectional(&mut client, &mut session).await;
    if ended.by == Side::A || ended.how == EndKind::Finished {
        client.io.set_reset_on_drop(false);
        close_gracefully(&mut client).await;
    }
    Ok(())
}
