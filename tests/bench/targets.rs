//! The targets of every proxy: echo, source, sink, and one that sends a file and ends.

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

use crate::place::Certificates;
use crate::process::Process;
use crate::role::{Role, print_message, until_dismissed};
use crate::tls;
use crate::way::{Way, Ways};

/// The targets, in two processes so that bulk does not delay echoes.
#[derive(Debug)]
pub(crate) struct Targets {
    /// Echoes everything.
    pub(crate) echo: SocketAddr,
    /// Sends endlessly after the client's first byte.
    pub(crate) source: SocketAddr,
    /// Counts the bytes, and responds with the count to [`END`] and to the end.
    pub(crate) sink: SocketAddr,
    /// Sends a file and ends.
    pub(crate) file: SocketAddr,
    _processes: [Process; 2],
}

impl Targets {
    /// Starts both processes, in a namespace if one is given.
    pub(crate) fn start(space: Option<&str>, listen: IpAddr) -> Result<Self> {
        let mut quick = Process::role(space, &Role::EchoTarget { listen })?;
        let mut bulk = Process::role(space, &Role::BulkTargets { listen })?;
        let echo: Vec<SocketAddr> = quick.read_output()?;
        let others: Vec<SocketAddr> = bulk.read_output()?;
        let mut all = echo.into_iter().chain(others);
        let mut next = || all.next().context("a target is missing");
        Ok(Self { echo: next()?, source: next()?, sink: next()?, file: next()?, _processes: [quick, bulk] })
    }

    /// Returns the addresses: echo, source, sink, file.
    pub(crate) fn all(&self) -> [SocketAddr; 4] {
        [self.echo, self.source, self.sink, self.file]
    }

    /// Returns the routes without any proxy.
    pub(crate) fn straight(&self) -> Ways {
        Ways::each(self.all(), Way::straight)
    }
}

/// Runs the echo target: one thread, so that many short connections cost little.
pub(crate) fn echo(listen: IpAddr) -> Result<()> {
    let listener = TcpListener::bind((listen, 0))?;
    print_message(&[listener.local_addr()?])?;
    serve(listener, echo_one)
}

/// Runs the echo target with TLS.
pub(crate) fn tls_echo(listen: IpAddr, certificates: &Certificates) -> Result<()> {
    let acceptor = TlsAcceptor::from(Arc::new(tls::server(certificates, true)?));
    let listener = TcpListener::bind((listen, 0))?;
    print_message(&listener.local_addr()?)?;
    serve(listener, move |client| {
        let acceptor = acceptor.clone();
        async move { echo_one(acceptor.accept(client).await?).await }
    })
}

/// Serves clients on one thread until dismissed.
fn serve<F, R>(listener: TcpListener, handle: F) -> Result<()>
where
    F: Fn(tokio::net::TcpStream) -> R + Send + 'static,
    R: Future<Output = std::io::Result<()>> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(serve_for_ever(listener, handle))
    });
    until_dismissed();
    Ok(())
}

/// Pause after an error that may last, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

async fn serve_for_ever<F, R>(listener: TcpListener, handle: F) -> std::io::Result<()>
where
    F: Fn(tokio::net::TcpStream) -> R,
    R: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        // A target that ended would count as a fault of each program after it.
        let client = match listener.accept().await {
            Ok((client, _)) => client,
            Err(cause) => {
                eprintln!("a target cannot accept a connection: {cause}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if client.set_nodelay(true).is_ok() {
            tokio::spawn(handle(client));
        }
    }
}

async fn echo_one(mut client: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
    let mut buffer = vec![0; 4096];
    loop {
        let n = client.read(&mut buffer).await?;
        if n == 0 {
            return client.shutdown().await;
        }
        client.write_all(buffer.get(..n).unwrap_or_default()).await?;
        client.flush().await?;
    }
}

/// Runs the bulk targets: one thread per connection, large blocking writes and reads.
pub(crate) fn bulk(listen: IpAddr) -> Result<()> {
    let handlers: [fn(TcpStream) -> std::io::Result<()>; 3] = [source, sink, file];
    let mut addresses = Vec::new();
    for handle in handlers {
        let listener = TcpListener::bind((listen, 0))?;
        addresses.push(listener.local_addr()?);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                thread::spawn(move || handle(client));
            }
        });
    }
    print_message(&addresses)?;
    until_dismissed();
    Ok(())
}

/// Returns the byte at an offset of the file. The period is not a power of two, so that a lost block is noticed.
pub(crate) fn file_byte(offset: usize) -> u8 {
    u8::try_from(offset % 251).unwrap_or_default()
}

fn source(mut client: TcpStream) -> std::io::Result<()> {
    let block = vec![0x5a; BLOCK];
    // Some programs do not dial a target before the client has sent something. In others a session that is not read yet
    // would stop those that are opened after it.
    client.read_exact(&mut [0])?;
    loop {
        client.write_all(&block)?;
    }
}

fn sink(mut client: TcpStream) -> std::io::Result<()> {
    let mut block = vec![0; BLOCK];
    let mut count = 0_u64;
    loop {
        match client.read(&mut block)? {
            0 => return client.write_all(&count.to_be_bytes()),
            n => {
                count += n as u64;
                if block.get(n - 1) == Some(&END) {
                    client.write_all(&count.to_be_bytes())?;
                }
            }
        }
    }
}

/// Sends the file, ends its direction, and reads what the client still sends: a close with unread bytes would make the
/// kernel discard the end of the file.
fn file(mut client: TcpStream) -> std::io::Result<()> {
    let bytes: Vec<u8> = (0..FILE).map(file_byte).collect();
    client.write_all(&bytes)?;
    client.shutdown(Shutdown::Write)?;
    client.set_read_timeout(Some(LINGER))?;
    let mut block = vec![0; BLOCK];
    while client.read(&mut block)? > 0 {}
    Ok(())
}

/// The last byte of an upload.
pub(crate) const END: u8 = 0;
/// Length of the file in bytes.
pub(crate) const FILE: usize = 1_000_003;
/// Bytes of one system call of a bulk target.
const BLOCK: usize = 256 * 1024;
/// How long the file's target waits for further bytes of a client.
const LINGER: Duration = Duration::from_secs(5);
