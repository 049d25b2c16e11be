//! What the demo shows beside CONNECT: for each module its settings, a line for people to try, and the same in the
//! program's own words.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use clap::ValueEnum;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{NODE, page};
use crate::cloud::Pod;
use crate::edge::Edge;
use crate::net::tls::{ClientSettings, Identity, Trust, server_name};

/// One more way to the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Module {
    /// A TCP port of the pod that stands for the page's.
    Tcp,
    /// A port of the pod that stands for the page's at every node, by Host.
    Http,
    /// The same with TLS, which the pod ends and the edge speaks anew.
    Https,
    /// CONNECT with a client certificate, as kube-apiserver's egress selector asks.
    Egress,
    /// The edge's proxy, for programs at the node.
    Proxy,
}

/// Where the demo's files and pages are.
pub(super) struct Stage<'a> {
    /// Certificates, keys and settings.
    pub(super) dir: &'a Path,
    /// The page.
    pub(super) page: SocketAddr,
    /// The page with TLS.
    pub(super) tls_page: SocketAddr,
}

/// As `--with` has it.
impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

impl Module {
    /// What the pod's settings need for it.
    pub(super) fn cloud_tables(self, stage: &Stage<'_>) -> String {
        let Stage { dir, page, tls_page } = stage;
        let dir = dir.display();
        match self {
            Self::Tcp => format!("[mode.cloud.tcp]\n\"127.0.0.1:0\" = \"{NODE}/{page}\"\n"),
            Self::Http => {
                format!("[mode.cloud.http]\nlisten_ip = \"127.0.0.1\"\naddr = {{ \"0\" = \"{page}\" }}\n")
            }
            Self::Https => format!(
                "[mode.cloud.https]\nlisten_ip = \"127.0.0.1\"\naddr = {{ \"0\" = \"{tls_page}\" }}\n\
                 cert = \"{dir}/{NODE}.crt\"\nkey = \"{dir}/{NODE}.key\"\nclient_ca = \"{dir}/ca.crt\"\n\
                 names = [\"demo\"]\n"
            ),
            Self::Egress => format!(
                "[mode.cloud.egress]\nlisten = \"127.0.0.1:0\"\ncert = \"{dir}/cloud.crt\"\nkey = \"{dir}/cloud.key\"\n\
                 client_ca = \"{dir}/ca.crt\"\nnames = [\"demo\"]\n"
            ),
            Self::Proxy => format!("[mode.cloud.allow]\ntargets = [\"{page}\"]\n"),
        }
    }

    /// What the edge's settings need for it.
    pub(super) fn edge_tables(self) -> &'static str {
        match self {
            Self::Proxy => "[mode.edge.http_proxy]\nlisten = \"127.0.0.1:0\"\n",
            Self::Tcp | Self::Http | Self::Https | Self::Egress => "",
        }
    }

    /// Where its clients come in.
    pub(super) fn at(self, pod: &Pod, edge: &Edge) -> anyhow::Result<SocketAddr> {
        let of_pod = |front| pod.bound.clients.iter().find(|(name, _)| *name == front).map(|(_, at)| *at);
        let at = match self {
            Self::Tcp => of_pod("tcp"),
            Self::Http => of_pod("http"),
            Self::Https => of_pod("https"),
            Self::Egress => of_pod("egress"),
            Self::Proxy => edge.bound.proxy,
        };
        at.with_context(|| format!("there is no port for {self}"))
    }

    /// What the line to try does, and the line.
    pub(super) fn line(self, at: SocketAddr, stage: &Stage<'_>) -> (&'static str, String) {
        let (port, page, dir) = (at.port(), stage.page.port(), stage.dir.display());
        match self {
            Self::Tcp => ("A TCP port of the pod, which stands for the page's", format!("curl http://{at}/")),
            Self::Http => (
                "A port of the pod, which stands for the page's at every node; DNS would lead their names to the pod",
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
                "CONNECT with a certificate, as kube-apiserver's egress selector asks",
                format!(
                    "curl --proxy-cacert {dir}/ca.crt --proxy-cert {dir}/client.crt --proxy-key {dir}/client.key \
                     -p -x https://{at} http://{NODE}:{page}/"
                ),
            ),
            Self::Proxy => (
                "The other way round: a program at the node reaches a page in the cloud through its edge's proxy",
                format!("curl -x http://{at} http://{IN_CLOUD}:{page}/"),
            ),
        }
    }

    /// Does what the line does. How many bytes came.
    pub(super) async fn ask(self, at: SocketAddr, stage: &Stage<'_>) -> anyhow::Result<usize> {
        let socket = TcpStream::connect(at).await?;
        let host = format!("{NODE}:{}", at.port());
        match self {
            Self::Tcp | Self::Http => page::get(socket, "/", &host).await,
            Self::Https => page::get(encrypted(socket, NODE, stage.dir).await?, "/", &host).await,
            Self::Egress => {
                let mut stream = encrypted(socket, &at.ip().to_string(), stage.dir).await?;
                let target = format!("{NODE}:{}", stage.page.port());
                page::connect(&mut stream, &target).await?;
                page::get(stream, "/", &target).await
            }
            Self::Proxy => {
                let host = format!("{IN_CLOUD}:{}", stage.page.port());
                page::get(socket, &format!("http://{host}/"), &host).await
            }
        }
    }
}

/// TLS to a server of that name, with the client's certificate.
async fn encrypted(socket: TcpStream, name: &str, dir: &Path) -> anyhow::Result<TlsStream<TcpStream>> {
    let identity = Identity { cert: dir.join("client.crt"), key: dir.join("client.key") };
    let trust = Trust::Ca(dir.join("ca.crt"));
    let tls = ClientSettings { trust, identity: Some(identity), alpn: vec![b"http/1.1".to_vec()] }.load()?;
    let shaken = TlsConnector::from(tls.load()).connect(server_name(name)?, socket);
    shaken.await.context("the TLS handshake failed")
}

/// A name with a dot is no node's, and this one leads to the machine itself.
const IN_CLOUD: &str = "web.localhost";
