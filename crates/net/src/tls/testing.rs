//! Certificates, TLS and streams without sockets, for tests of this crate and of those above it.

#![allow(clippy::unwrap_used, missing_docs, missing_debug_implementations)]

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, Join};
use tokio::net::TcpStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::{TlsConnector, client, server};

use crate::reload::ReloadedValue;
use crate::socket::Connection;
use crate::tls::client_certificate::{ClientCertificate, ServerTls};
use crate::tls::params::TlsParams;
use crate::tls::{ClientAuth, IdentityFiles, TlsClientConfig, TlsServerConfig, Trust, server_name};

impl Connection for DuplexStream {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }
}

impl<R: AsyncRead + Unpin + Send, W: AsyncWrite + Unpin + Send> Connection for Join<R, W> {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }
}

/// A CA, and files issued by it, in a directory of its own.
pub struct TestCa {
    dir: TempDir,
    pub(crate) issuer: Issuer<'static, KeyPair>,
}

impl TestCa {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { dir, issuer: Issuer::new(params, key) }
    }

    pub fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.crt")
    }

    /// Writes certificate and key for `name`, and replaces existing ones.
    pub fn issue(&self, file: &str, name: &str) -> IdentityFiles {
        self.issue_for(file, name, 1975..4096)
    }

    /// Like [`Self::issue`], but valid from the first day of a year until that of another.
    pub fn issue_for(&self, file: &str, name: &str, years: std::ops::Range<i32>) -> IdentityFiles {
        self.issue_as(file, CertificateParams::new([name.to_owned()]).unwrap(), years)
    }

    /// Like [`Self::issue_for`], but with these parameters.
    pub fn issue_as(
        &self,
        file: &str,
        mut params: CertificateParams,
        years: std::ops::Range<i32>,
    ) -> IdentityFiles {
        let key = KeyPair::generate().unwrap();
        params.not_before = rcgen::date_time_ymd(years.start, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.end, 1, 1);
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let at = |end: &str| self.dir.path().join(format!("{file}.{end}"));
        std::fs::write(at("crt"), cert.pem()).unwrap();
        std::fs::write(at("key"), key.serialize_pem()).unwrap();
        IdentityFiles { cert: at("crt"), key: at("key") }
    }
}

/// TLS over both ends of a stream: the client's, and the server's.
pub async fn over<N, F>(near: N, far: F) -> (client::TlsStream<N>, server::TlsStream<F>)
where
    N: AsyncRead + AsyncWrite + Unpin,
    F: AsyncRead + AsyncWrite + Unpin,
{
    let ca = TestCa::new("ca");
    let (serves, dials) =
        (server(ca.issue("s", "a.b"), ClientAuth::Anonymous), client(Trust::Ca(ca.ca()), None));
    let (connect, accept) = (TlsConnector::from(dials.load()), serves.load().acceptor());
    let (near, far) = tokio::join!(connect.connect(server_name("a.b").unwrap(), near), accept.accept(far));
    (near.unwrap(), far.unwrap())
}

/// Returns the certificate of a client with these names, which is always valid.
pub fn client_certificate(names: &[&str]) -> ClientCertificate {
    let tls = server(TestCa::new("ca").issue("server", "a.b"), ClientAuth::Anonymous);
    let names = names.iter().map(ToString::to_string).collect();
    ClientCertificate { names, ..ClientCertificate::new(&[], &tls) }
}

pub fn server(identity: IdentityFiles, clients: ClientAuth) -> ReloadedValue<ServerTls> {
    TlsServerConfig { identity, clients, params: TlsParams::default(), alpn: vec![b"h2".to_vec()] }
        .load()
        .unwrap()
}

pub fn client(trust: Trust, identity: Option<IdentityFiles>) -> ReloadedValue<ClientConfig> {
    TlsClientConfig { trust, identity, alpn: vec![b"h2".to_vec()] }.load().unwrap()
}
