//! The reference: a bare TLS relay of two processes, with one connection per session.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::place::{Certificates, Place};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::role::{Role, print_message, until_dismissed};
use crate::targets::Targets;
use crate::tls;
use crate::way::{Way, Ways};

/// Starts both ends of a relay to these targets.
pub(crate) fn start(place: &Place, targets: &Targets) -> Result<Proxy> {
    let back = start_back(place, targets)?;
    start_front(place, vec![back])
}

/// Like [`start`], with one more process between the two ends, which decrypts and encrypts all bytes.
pub(crate) fn start_longer(place: &Place, targets: &Targets) -> Result<Proxy> {
    let mut back = start_back(place, targets)?;
    let certificates = place.certificates.clone();
    let role = Role::RelayMiddle { listen: place.cloud_address, backs: back.read_output()?, certificates };
    let middle = Process::role(place.cloud_space.as_deref(), &role)?;
    start_front(place, vec![middle, back])
}

fn start_back(place: &Place, targets: &Targets) -> Result<Process> {
    let targets = targets.all().to_vec();
    let certificates = place.certificates.clone();
    let role = Role::RelayBack { listen: place.edge_address, targets, certificates };
    Process::role(place.edge_space.as_deref(), &role)
}

/// Starts the clients' end, connected to the first of `beyond`.
fn start_front(place: &Place, mut beyond: Vec<Process>) -> Result<Proxy> {
    let backs = beyond.first_mut().context("a relay needs another end")?.read_output()?;
    let certificates = place.certificates.clone();
    let role = Role::RelayFront { listen: place.cloud_address, backs, certificates };
    let mut front = Process::role(place.cloud_space.as_deref(), &role)?;
    let ways = Ways::each(front.read_output()?, Way::straight);
    beyond.insert(0, front);
    Ok(Proxy { name: "relay", ways, processes: beyond, port: None })
}

/// Runs the clients' end.
pub(crate) fn front(listen: IpAddr, backs: &[SocketAddr], certificates: &Certificates) -> Result<()> {
    let connector = TlsConnector::from(Arc::new(tls::client(certificates)?));
    serve(listen, backs, move |client, back| {
        let connector = connector.clone();
        async move { both_ways(client, link_to(back, &connector).await?).await }
    })
}

/// Runs the process between the two ends.
pub(crate) fn middle(listen: IpAddr, backs: &[SocketAddr], certificates: &Certificates) -> Result<()> {
    let acceptor = TlsAcceptor::from(Arc::new(tls::server(certificates, false)?));
    let connector = TlsConnector::from(Arc::new(tls::client(certificates)?));
    serve(listen, backs, move |link, back| {
        let (acceptor, connector) = (acceptor.clone(), connector.clone());
        async move {
            let link = acceptor.accept(link).await?;
            both_ways(link, link_to(back, &connector).await?).await
        }
    })
}

/// Runs the end that dials the targets.
pub(crate) fn back(listen: IpAddr, targets: &[SocketAddr], certificates: &Certificates) -> Result<()> {
    let acceptor = TlsAcceptor::from(Arc::new(tls::server(certificates, false)?));
    serve(listen, targets, move |link, target| {
        let acceptor = acceptor.clone();
        async move {
            let link = acceptor.accept(link).await?;
            let target = TcpStream::connect(target).await?;
            target.set_nodelay(true)?;
            both_ways(link, target).await
        }
    })
}

async fn link_to(back: SocketAddr, connector: &TlsConnector) -> Result<TlsStream<TcpStream>> {
    let link = TcpStream::connect(back).await?;
    link.set_nodelay(true)?;
    Ok(connector.connect(ServerName::try_from("localhost")?, link).await?)
}

/// Runs one listener per address of `beyond` until dismissed. Prints the listeners' addresses.
fn serve<F, R>(listen: IpAddr, beyond: &[SocketAddr], handle: F) -> Result<()>
where
    F: Fn(TcpStream, SocketAddr) -> R + Clone + Send + 'static,
    R: Future<Output = Result<()>> + Send + 'static,
{
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let mut addresses = Vec::new();
        for &far in beyond {
            let listener = TcpListener::bind((listen, 0)).await?;
            addresses.push(listener.local_addr()?);
            let handle = handle.clone();
            tokio::spawn(async move {
                while let Ok((near, _)) = listener.accept().await {
                    let _ = near.set_nodelay(true);
                    tokio::spawn(handle(near, far));
                }
            });
        }
        print_message(&addresses)
    })?;
    until_dismissed();
    Ok(())
}

/// Copies until both directions have ended, each with its own half-close.
async fn both_ways<A, B>(a: A, b: B) -> Result<()>
where
    A: AsyncRead + AsyncWrite,
    B: AsyncRead + AsyncWrite,
{
    let (mut a_read, mut a_write) = tokio::io::split(a);
    let (mut b_read, mut b_write) = tokio::io::split(b);
    tokio::try_join!(pump(&mut a_read, &mut b_write), pump(&mut b_read, &mut a_write))?;
    Ok(())
}

async fn pump(from: &mut (impl AsyncRead + Unpin), to: &mut (impl AsyncWrite + Unpin)) -> Result<()> {
    let mut buffer = vec![0; BUFFER];
    let mut since_yield = 0;
    loop {
        let n = from.read(&mut buffer).await?;
        if n == 0 {
            return Ok(to.shutdown().await?);
        }
        to.write_all(buffer.get(..n).unwrap_or_default()).await?;
        // Without this the TLS layer may keep the last bytes.
        to.flush().await?;
        since_yield += n;
        if since_yield >= TURN {
            since_yield = 0;
            tokio::task::yield_now().await;
        }
    }
}

/// Bytes of one read: large enough that system calls do not dominate.
const BUFFER: usize = 64 * 1024;
/// Bytes after which a copy yields to other tasks. Without it another session waits for 128 reads, 8 ms instead of 1.
const TURN: usize = 256 * 1024;
