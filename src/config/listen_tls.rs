//! TLS of a port: its files, and the names in clients' certificates.

use crate::config::value::forms::FilePath;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::config::WarningKind;
use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::table::ConfigTableReader;
use tunnel_base::policy::CertificateGlob;
use tunnel_base::serde_forms::non_empty;

/// `[server.tls]`: the TLS versions and cipher suites that a server accepts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Tls {
    /// Minimum TLS version, "1.2" or "1.3".
    pub min_version: TlsVersion,
    /// TLS 1.2 cipher suites by Go's names. Default: all secure ones.
    ///
    /// Example: `["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]`
    pub cipher_suites: Vec<String>,
}

/// A TLS version that may be set as the oldest one that a server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
pub enum TlsVersion {
    /// TLS 1.2.
    #[default]
    #[serde(rename = "1.2")]
    V12,
    /// TLS 1.3.
    #[serde(rename = "1.3")]
    V13,
}

/// `[server.connect] and [server.http_proxy] and [server.https] and [server.egress] and [server.admin] and [edge.admin]`:
/// names of clients.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct NameConfigKeys {
    /// Patterns of the names (CN or DNS name) of accepted certificates; '*' matches any run of characters. The user in
    /// rules is the first accepted name. Required with client_ca. ["*"] accepts every certificate that this CA has
    /// signed or will sign, except those made for edges, which are never accepted. No default.
    ///
    /// Example: `["kube-apiserver-kubelet-client"]`
    #[serde(deserialize_with = "non_empty::<_, CertificateGlob, _>")]
    names: Option<Vec<CertificateGlob>>,
}

/// `[server.connect] and [server.http_proxy] and [server.admin] and [edge.admin]`: TLS.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct TlsConfigKeys {
    /// File (PEM) of the certificate chain presented to clients, leaf first. With it the port accepts only TLS. In an
    /// admin table, the port is that of admin_listen. Re-read when it changes. Default: none, no TLS.
    ///
    /// Example: `"/etc/tunnel/certs/server.crt"`
    cert: Option<FilePath>,
    /// File (PEM) of its private key. No default.
    ///
    /// Example: `"/etc/tunnel/certs/server.key"`
    key: Option<FilePath>,
    /// File (PEM) of the CA that signs clients' certificates. Re-read when it changes. Clients without such a
    /// certificate are denied; clients with one need no password, and its name is their user in rules and in the log.
    /// Default: none, no certificate is requested.
    ///
    /// Example: `"/etc/tunnel/certs/client-ca.crt"`
    client_ca: Option<FilePath>,
}

/// The TLS files of a listener: its certificate and key, and the CA of its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerTlsConfig {
    /// The table that sets them.
    pub table: String,
    /// PEM file of the certificate chain, leaf first.
    pub cert: FilePath,
    /// PEM file of its private key.
    pub key: FilePath,
    /// PEM file of the CA that signs clients' certificates; `None` requests no certificates.
    pub client_ca: Option<FilePath>,
}

/// TLS of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PortTlsState {
    /// The port cannot use TLS.
    Unsupported,
    /// The port could use TLS, but no certificate is set.
    Off,
    /// The port uses TLS.
    On {
        /// Whether clients must present a certificate.
        client_certificate: bool,
    },
}

impl ListenerTlsConfig {
    /// Reads the keys of a table without TLS by default, and records the values in effect. Returns `None` if they set
    /// no TLS, or after an error, which is recorded.
    pub(crate) fn read(table: &mut ConfigTableReader<'_>) -> Option<Self> {
        let keys: TlsConfigKeys = table.fields();
        require_pair(table);
        if table.has("client_ca") && !table.has("cert") {
            let expected = "set cert and key, because clients present certificates only over TLS";
            table.error("client_ca", Some("set, but cert is not".to_owned()), expected);
        }
        table.record(&keys);
        let TlsConfigKeys { cert, key, client_ca } = keys;
        Some(Self { table: table.key(""), cert: cert?, key: key?, client_ca })
    }

    /// Returns the full key of one of the files.
    pub fn key(&self, file: &str) -> String {
        format!("{}{file}", self.table)
    }
}

impl PortTlsState {
    /// Returns the TLS of a port that has these files, if it has any.
    pub(crate) fn of(files: Option<&ListenerTlsConfig>) -> Self {
        files.map_or(Self::Off, |files| Self::On { client_certificate: files.client_ca.is_some() })
    }

    /// Warns if passwords for a port cross a network unencrypted. `key` is the key to change.
    pub(crate) fn warn_passwords(self, key: String, at: SocketAddr, report: &mut ConfigDiagnostics) {
        let hint = match self {
            Self::On { .. } => return,
            Self::Off => "set cert and key",
            Self::Unsupported => "this port cannot use TLS: listen on loopback, or offer another port",
        };
        if !at.ip().is_loopback() {
            let text = format!("passwords for {at} cross the network unencrypted; {hint}");
            report.warn(key, WarningKind::Insecure, text);
        }
    }
}

/// Records an error if a table has a certificate without its key, or the other way round.
pub(crate) fn require_pair(table: &ConfigTableReader<'_>) {
    for (given, other) in [("cert", "key"), ("key", "cert")] {
        if table.has(given) && !table.has(other) {
            table.error(other, None, "a certificate needs its key; set both files");
        }
    }
}

/// Records an error if a listener requests certificates, and does not say whose.
pub(crate) fn require_names(table: &ConfigTableReader<'_>) {
    if table.has("client_ca") && !table.has("names") {
        let expected = "list the names (CN or DNS) of client certificates, for example [\"system:kube-apiserver\"]; \
                      [\"*\"] accepts every certificate that a CA of client_ca has signed or will sign";
        table.error("names", None, expected);
    }
}

pub(super) fn names(table: &mut ConfigTableReader<'_>, tls: PortTlsState) -> Vec<CertificateGlob> {
    if tls == PortTlsState::Unsupported {
        return Vec::new();
    }
    let keys: NameConfigKeys = table.fields();
    if keys.names.is_some() && tls != (PortTlsState::On { client_certificate: true }) {
        let expected = "no certificate is requested; set client_ca to the CA that signs them";
        table.error("names", Some("set, but client_ca is not".to_owned()), expected);
    }
    table.record(&keys);
    keys.names.unwrap_or_default()
}
