//! The demo's listeners besides CONNECT: for each its config, a command to try, and the same request made by the
//! program.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::page::PAGE;
use super::{NODE, TIMEOUT, USER};
use crate::command::shell_word;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, server_name};

/// An additional way to the demo's page, chosen by `--listeners`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum ExtraDemoListener {
    /// A TCP port of the server that stands for the page's port.
    Tcp,
    /// A port of the server that stands for the page's port at every node, selected by Host.
    Http,
    /// The same with TLS, terminated by the server and started again by the edge.
    Https,
    /// CONNECT with a client certificate, as kube-apiserver's egress selector uses it.
    Egress,
    /// The edge's proxy, for programs on the node.
    Proxy,
}

/// The modules of `--listeners`, each once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DemoListenerSet(pub BTreeSet<ExtraDemoListener>);

/// Parses names separated by commas, or `all`.
impl std::str::FromStr for DemoListenerSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self(ExtraDemoListener::value_variants().iter().copied().collect()));
        }
        text.split(',')
            .map(|name| ExtraDemoListener::from_str(name, false))
            .collect::<Result<_, _>>()
            .map(Self)
            .map_err(|_| {
                let names: Vec<_> =
                    ExtraDemoListener::value_variants().iter().map(ToString::to_string).collect();
                format!("expected all, or some of {}, separated by commas", names.join(", "))
            })
    }
}

/// The demo's directory of files, and the addresses of its page.
pub(crate) struct DemoContext<'a> {
    /// Directory of certificates, keys and tokens.
    pub(crate) dir: &'a Path,
    /// Address of the page.
    pub(crate) page: SocketAddr,
    /// Address of the page with TLS.
    pub(crate) tls_page: SocketAddr,
}

/// Formats the name as in `--listeners`.
impl fmt::Display for ExtraDemoListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

impl ExtraDemoListener {
    /// Returns the tables that a server's config needs for its listener at that address.
    pub(crate) fn server_tables(self, at: SocketAddr, context: &DemoContext<'_>) -> String {
        let DemoContext { dir, page, tls_page } = context;
        let dir = dir.display();
        let port = at.port();
        match self {
            Self::Tcp => format!("[server.tcp]\n\"{at}\" = \"{NODE}/{page}\"\n"),
            Self::Http => {
                format!("[server.http]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"{port}\" = \"{page}\" }}\n")
            }
            Self::Https => format!(
                "[server.https]\nlisten_ip = \"127.0.0.1\"\nports = {{ \"{port}\" = \"{tls_page}\" }}\n\
                 cert = \"{dir}/{NODE}.crt\"\nkey = \"{dir}/{NODE}.key\"\nclient_ca = \"{dir}/ca.crt\"\n\
                 names = [\"{USER}\"]\n"
            ),
            Self::Egress => format!(
                "[server.egress]\nlisten = \"{at}\"\ncert = \"{dir}/server.crt\"\nkey = \"{dir}/server.key\"\n\
                 client_ca = \"{dir}/ca.crt\"\nnames = [\"{USER}\"]\n"
            ),
            Self::Proxy => format!("[server.edge_access]\ntargets = [\"{page}\"]\n"),
        }
    }

    /// Returns the tables that the edge's config needs for its listener at that address.
    pub(crate) fn edge_tables(self, at: SocketAddr) -> String {
        match self {
            Self::Proxy => format!("[edge.http_proxy]\nlisten = \"{at}\"\n"),
            Self::Tcp | Self::Http | Self::Https | Self::Egress => String::new(),
        }
    }

    /// Returns the description of a command to try, and the command.
    pub(crate) fn line(self, at: SocketAddr, context: &DemoContext<'_>) -> (&'static str, String) {
        let port = at.port();
        let page = context.page.port();
        let dir = shell_word(&context.dir.to_string_lossy());
        match self {
            Self::Tcp => ("A TCP port of the server for the page's port", format!("curl http://{at}/")),
            Self::Http => (
                "A port of the server that stands for the page's port at every node; in DNS, nodes' names would resolve to the server",
                format!("curl --resolve {NODE}:{port}:{} http://{NODE}:{port}/", at.ip()),
            ),
            Self::Https => (
                "The same with TLS, for clients with a certificate",
                format!(
                    "curl --cacert {dir}/ca.crt --cert {dir}/client.crt --key {dir}/client.key \
                     --resolve {NODE}:{port}:{} https://{NODE}:{port}/",
                    at.ip()
                ),
            ),
            Self::Egress => (
                "CONNECT with a certificate, as kube-apiserver's egress selector uses it",
                format!(
                    "curl --proxy-cacert {dir}/ca.crt --proxy-cert {dir}/client.crt --proxy-key {dir}/client.key \
                     -p -x https://{at} http://{NODE}:{page}/"
                ),
            ),
            Self::Proxy => (
                "The reverse direction: a program on the node reaches a page in the cloud through its edge's proxy",
                format!("curl -x http://{at} http://{IN_CLOUD}:{page}/"),
            ),
        }
    }

    /// Makes the request of the command. Returns the number of bytes received.
    pub(crate) async fn ask(self, at: SocketAddr, context: &DemoContext<'_>) -> anyhow::Result<usize> {
        let socket = TcpStream::connect(at).await?;
        let host = format!("{NODE}:{}", at.port());
        match self {
            Self::Tcp | Self::Http => get(socket, "/", &host).await,
            Self::Https => get(encrypted(socket, NODE, context.dir).await?, "/", &host).await,
            Self::Egress => {
                let mut stream = encrypted(socket, &at.ip().to_string(), context.dir).await?;
                let target = format!("{NODE}:{}", context.page.port());
                connect(&mut stream, &target).await?;
                get(stream, "/", &target).await
            }
            Self::Proxy => {
                let host = format!("{IN_CLOUD}:{}", context.page.port());
                get(socket, &format!("http://{host}/"), &host).await
            }
        }
    }
}

/// Connects with TLS to a server of that name, and presents the client's certificate.
async fn encrypted(socket: TcpStream, name: &str, dir: &Path) -> anyhow::Result<TlsStream<TcpStream>> {
    let identity = IdentityFiles { cert: dir.join("client.crt"), key: dir.join("client.key") };
    let trust = Trust::Ca(dir.join("ca.crt"));
    let tls = TlsClientConfig { trust, identity: Some(identity), alpn: vec![b"http/1.1".to_vec()] }.load()?;
    let shaken =
        TlsConnector::from(tls.load()).connect(server_name(name).map_err(anyhow::Error::msg)?, socket);
    shaken.await.context("TLS handshake failed")
}

/// A name with a dot, so not a node's; it resolves to this machine.
const IN_CLOUD: &str = "web.localhost";

/// Requests the page over a connection, and reads it completely. Returns the number of bytes received.
pub(crate) async fn get<S>(mut stream: S, url: &str, host: &str) -> anyhow::Result<usize>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let ask = format!("GET {url} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut answer = String::new();
    timeout(TIMEOUT, stream.read_to_string(&mut answer)).await.context("no page within 10 s")??;
    if !answer.ends_with(PAGE) {
        bail!("unexpected page: {answer:?}");
    }
    Ok(answer.len())
}

/// Sends CONNECT for a target. Returns the first line of the response.
pub(crate) async fn connect<S>(stream: &mut S, target: &str) -> anyhow::Result<String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    stream.write_all(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes()).await?;
    let head = timeout(TIMEOUT, read_head(stream)).await.context("no response to CONNECT within 10 s")??;
    let line = head.lines().next().unwrap_or("nothing");
    if !head.contains(" 200 ") {
        bail!("CONNECT refused: {line}");
    }
    Ok(line.to_owned())
}

pub(crate) async fn read_head<S: AsyncRead + Unpin>(stream: &mut S) -> anyhow::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await.context("the server closed the connection")?;
        head.push(byte);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}
