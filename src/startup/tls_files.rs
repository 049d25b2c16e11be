//! The PEM files of a port with TLS: which they are, and how they are loaded.

use std::path::{Path, PathBuf};

use crate::config::listen_tls::{ListenerTlsConfig, Tls, TlsVersion};
use crate::startup::{NotPrepared, Prepared, StartupErrorCollector, StartupErrorKind};
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls::client_certificate::ServerTls;
use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};

/// A PEM file that a listener reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedFile {
    /// The full key that names it.
    pub(crate) key: String,
    /// Its path.
    pub(crate) path: PathBuf,
    /// What it contains.
    pub(crate) kind: FileKind,
}

/// What a PEM file of a listener contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// A private key, which only this user may read.
    PrivateKey,
    /// A certificate that the server presents to clients.
    ServerCertificate,
    /// A certificate that it presents to targets, as their client.
    ClientCertificate,
    /// CAs that it trusts.
    Ca,
}

impl NamedFile {
    pub(crate) fn new(key: impl Into<String>, path: &Path, kind: FileKind) -> Self {
        Self { key: key.into(), path: path.to_owned(), kind }
    }

    /// Checks what all of these files contain, so that each error is recorded.
    pub(crate) fn check_all(files: &[Self], startup: &mut StartupErrorCollector) -> Prepared<()> {
        let mut result = Ok(());
        for Self { key, path, kind } in files {
            let is_right = match kind {
                FileKind::PrivateKey => startup.check_private_key(key, Some(path)),
                FileKind::ServerCertificate | FileKind::ClientCertificate | FileKind::Ca => {
                    startup.check_certs(key, Some(path))
                }
            };
            if !is_right {
                result = Err(NotPrepared);
            }
        }
        result
    }
}

impl ListenerTlsConfig {
    /// Returns the files, with the keys that name them.
    pub(crate) fn files(&self) -> Vec<NamedFile> {
        let file = |name: &str, path: &Path, kind| NamedFile::new(self.key(name), path, kind);
        let own = [
            file("cert", &self.cert, FileKind::ServerCertificate),
            file("key", &self.key, FileKind::PrivateKey),
        ];
        let ca = self.client_ca.iter().map(|ca| file("client_ca", ca, FileKind::Ca));
        own.into_iter().chain(ca).collect()
    }

    /// Returns the TLS of a port for HTTP/1.
    pub(crate) fn load(
        &self,
        tls: &Tls,
        startup: &mut StartupErrorCollector,
    ) -> Prepared<ReloadedValue<ServerTls>> {
        let params = tls_params(tls, startup);
        NamedFile::check_all(&self.files(), startup)?;
        let (params, _) = params?;
        let identity = IdentityFiles { cert: self.cert.to_path_buf(), key: self.key.to_path_buf() };
        let clients = self.client_ca.clone().map_or(ClientAuth::Anonymous, |ca| ClientAuth::Required(ca.0));
        let server = TlsServerConfig { identity, clients, params, alpn: vec![b"http/1.1".to_vec()] };
        startup.collect(StartupErrorKind::Config, &[&self.key("cert"), &self.key("key")], server.load())
    }
}

/// Returns the TLS versions and cipher suites of a server's ports, with warnings about them.
pub(crate) fn tls_params(
    tls: &Tls,
    startup: &mut StartupErrorCollector,
) -> Prepared<(TlsParams, Vec<String>)> {
    let params = TlsParams::new(tls.min_version == TlsVersion::V13, &tls.cipher_suites);
    startup.collect(StartupErrorKind::Config, &["server.tls.cipher_suites"], params)
}
