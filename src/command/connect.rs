//! `tunnel connect`: a session through a pod, for stdin and stdout or for a port of this machine.

mod pod;
mod session;
mod stdio;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tracing::Span;

use super::Failure;
use crate::drain::Drain;
use crate::names::Target;
use crate::net::listen::Listener;
use crate::net::pool::Pool;
use crate::net::socket::{Connection as _, Socket};
use crate::net::splice::{Ended, How, Side, close};
use pod::Pod;

/// What `tunnel connect` is asked for.
#[derive(Debug, Clone, Args)]
pub struct Connect {
    /// NODE:PORT, as clients of a pod name it; or NODE, with PORT behind it.
    #[arg(value_name = "NODE:PORT")]
    pub target: String,
    /// The port, where it stands by itself, as in ssh's `%h %p`.
    #[arg(value_name = "PORT")]
    pub port: Option<u16>,
    /// The pod's port for CONNECT: http://HOST:PORT or http://USER@HOST:PORT, https://… for TLS (then with --ca), or unix:/PATH.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:2222")]
    pub through: String,
    /// File (PEM) of the authorities that may have signed the pod's certificate.
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// File (PEM) of a certificate to show to the pod; with --key.
    #[arg(long, value_name = "FILE", requires = "key")]
    pub cert: Option<PathBuf>,
    /// File (PEM) of its private key.
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// File with the password of USER, and nothing else.
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// Listen at this address (IP:PORT, or PORT on 127.0.0.1), and open a session for each connection; until Ctrl-C.
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<String>,
}

/// Connects stdin and stdout with a target until both directions have ended; or serves a local port until `stop`
/// completes. `say` prints a line for the person at the terminal.
///
/// # Errors
///
/// The session was refused, with the pod's reason, or broke off.
pub async fn connect(
    asked: &Connect,
    stop: impl Future<Output = ()>,
    say: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<String, Failure> {
    let target = target(asked)?;
    let pod = Pod::new(asked)?;
    match &asked.listen {
        None => {
            let session = pod.open(&target).await?;
            stdio::carry(session).await?;
        }
        Some(at) => listen(local(at)?, Arc::new(pod), target, stop, say).await?,
    }
    Ok(String::new())
}

fn target(asked: &Connect) -> Result<Target, Failure> {
    let text = match asked.port {
        None => asked.target.clone(),
        // ssh gives an IPv6 address without brackets.
        Some(port) if asked.target.contains(':') && !asked.target.starts_with('[') => {
            format!("[{}]:{port}", asked.target)
        }
        Some(port) => format!("{}:{port}", asked.target),
    };
    text.parse().map_err(|cause| Failure::usage(format!("{text:?} is no target: {cause}; want NODE:PORT")))
}

fn local(text: &str) -> Result<SocketAddr, Failure> {
    let port = text.parse::<u16>().map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    port.or_else(|_| text.parse()).map_err(|_| {
        Failure::usage(format!("--listen={text}: want IP:PORT, for example 127.0.0.1:8022, or a port"))
    })
}

async fn listen(
    at: SocketAddr,
    pod: Arc<Pod>,
    target: Target,
    stop: impl Future<Output = ()>,
    say: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<(), Failure> {
    let listener = Listener::bind(at).map_err(|cause| Failure::unavailable(cause.to_string()))?;
    say(&format!("{} leads to {target}; Ctrl-C ends it", listener.at()));
    if !at.ip().is_loopback() {
        say("whoever reaches that address reaches the target, with your rights at the pod");
    }
    let (drain, room, pool) = (Drain::new(), Arc::new(Semaphore::new(MOST_CONNECTIONS)), Pool::new());
    let serving = async {
        loop {
            // Only this function has the semaphore, and never closes it.
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            let (client, _) = listener.accept().await;
            let client = Socket::new(client, pool.clone());
            let (pod, target, say) = (pod.clone(), target.clone(), say.clone());
            drain.spawn(Span::none(), async move {
                if let Err(why) = serve(client, &pod, &target).await {
                    say(&format!("tunnel: {why}"));
                }
                drop(permit);
            });
        }
    };
    tokio::select! {
        () = serving => {}
        () = stop => {}
    }
    drain.finish(std::time::Duration::ZERO, std::future::ready(())).await;
    Ok(())
}

/// Serves one client of the local port. Unless all bytes have passed, its connection is reset.
async fn serve(mut client: Socket<TcpStream>, pod: &Pod, target: &Target) -> Result<(), Failure> {
    client.io().breaks_off(true);
    let mut session = pod.open(target).await?;
    let ended = session.carry(&mut client).await;
    close(&mut client, Side::A, ended).await;
    match ended {
        Ended { by: Side::B, how: How::ReadFailed(kind) | How::WriteFailed(kind) } => {
            Err(session.broken(kind))
        }
        // A client whose own connection failed knows that.
        _ => Ok(()),
    }
}

/// Connections at once; more wait to be accepted.
const MOST_CONNECTIONS: usize = 1000;

#[cfg(test)]
mod tests;
