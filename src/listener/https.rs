//! The HTTPS listener: a port of this server stands for one port of every node. The client's TLS or its request names
//! the node.

use std::net::{IpAddr, Ipv6Addr};

use educe::Educe;
use serde::{Deserialize, Serialize};
use tokio_rustls::rustls::ClientConfig;

use crate::config::WarningKind;
use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen_tls::{self, ListenerTlsConfig, PortTlsState, Tls};
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::{self, FilePath};
use crate::listener::authenticated::TlsListenerProtocol;
use crate::listener::http::{
    NodePortConfig, NodePortProtocol, NodePorts, bind, by_text, node_ports, warn_if_open,
};
use crate::listener::passthrough::Passthrough;
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigs, ListenerKind, single};
use crate::startup::tls_files::{FileKind, NamedFile};
use crate::startup::{NotPrepared, StartupErrorCollector, StartupErrorKind};
use tunnel_base::policy::CertificateGlob;
use tunnel_base::policy::ports::PortTarget;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust};
use tunnel_proto::frame::SessionCategory;

/// `[server.https]`: ports that stand for one port of every node, for TLS: kube-apiserver reaches each kubelet at 10250
/// of this server, if DNS resolves the nodes' names to it. Clients listed in names or allow_from may choose the
/// destination of a request by headers. X-Tunnel-Proxy-Host is its node (a name or an address, with or without a port).
/// At a port with "host", X-Tunnel-Proxy-Dest replaces Host: it is the target that the node dials (host:port). All
/// other clients are denied these headers; targets never receive them. Clients of these ports cannot send a password:
/// if auth is "basic" in `[server.connect]`, set auth = "none" or client_ca here.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct HttpsConfig {
    /// Who terminates the clients' TLS. "terminate": this server; the edge speaks TLS to the target
    /// (`[edge.target_tls]` there). "passthrough": the target; this server only reads the node's name (SNI) in the
    /// client's first message (ClientHello). With "terminate" each request goes to the node that its Host names,
    /// otherwise to the node that SNI names. If neither names one and this server queries Kubernetes, the node of the
    /// pod in a kubelet's path is tried (/exec, /attach, /portForward, /containerLogs). Last comes the node with the
    /// address in Host. A request that names no node gets 421. With "passthrough" a client that names no node gets the
    /// alert unrecognized_name. kube-apiserver names one for logs; for exec, attach and port-forward only if it runs
    /// with --kubelet-certificate-authority. A client that is denied gets access_denied; internal_error means that the
    /// target cannot be reached. The access log contains the reason.
    #[educe(Default = Mode::Terminate)]
    pub(crate) mode: Mode,
    /// Address of the ports.
    #[serde(deserialize_with = "forms::ip")]
    #[educe(Default = Ipv6Addr::UNSPECIFIED.into())]
    listen_ip: IpAddr,
    /// The ports, and the target that a node dials for each: "port" = "host:port"; 127.0.0.1 is the node's own. With
    /// "terminate", "host" means the port in each request's Host, on the node itself. At the node's address,
    /// `[edge.allow]` of its edge decides, and ca in its `[edge.target_tls]` must be the CA of the target. On the
    /// node's loopback, only 10250, 10255 and the ports of localhost-proxy-ports (`[server.node_ports]`) are reachable.
    /// Default: none.
    ///
    /// Example: `{ "10250" = "127.0.0.1:10250", "10263" = "host" }`
    #[serde(serialize_with = "by_text")]
    ports: NodePorts,
    /// For "terminate": file (PEM) of the certificate chain presented to clients, leaf first. Re-read when it changes.
    // SuperEdge's paths of certificate and key.
    #[educe(Default = "/etc/tunnel/certs/apiserver-kubelet-server.crt".into())]
    cert: FilePath,
    /// For "terminate": file (PEM) of its private key.
    #[educe(Default = "/etc/tunnel/certs/apiserver-kubelet-server.key".into())]
    key: FilePath,
    /// For "terminate": file (PEM) of the CA that signs clients' certificates. Every accepted client acts at every
    /// target with the edge's certificate, and so has exec at every kubelet. Set the CA of kube-apiserver's
    /// --kubelet-client-certificate here, and names; allow_from alone gives this access to a whole network. Without
    /// client_ca no certificate is requested, with a warning unless allow_from is set. Default: none.
    ///
    /// Example: `"/etc/tunnel/certs/client-ca.crt"`
    client_ca: Option<FilePath>,
    /// For "terminate": file (PEM) of a certificate with which this server itself speaks TLS to targets, through the
    /// session. Edges then need no certificate. It can be the proxy-client certificate that `[server.csr]` issues.
    /// Requires client_ca and names other than "*", because it is not presented for clients that are known only by an
    /// address. Re-read when it changes. Default: none, the edge speaks TLS to the target.
    ///
    /// Example: `"/var/lib/tunnel/pki/proxy-client.pem"`
    target_cert: Option<FilePath>,
    /// File (PEM) of its private key. Default: the file target_cert.
    ///
    /// Example: `"/var/lib/tunnel/pki/proxy-client.pem"`
    target_key: Option<FilePath>,
    /// File (PEM) of the CA that signs the targets' certificates, each of which must contain its node's name. Required
    /// with target_cert, unless target_insecure_skip_verify is true. No default.
    ///
    /// Example: `"/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"`
    target_ca: Option<FilePath>,
    /// Whether targets are trusted without verification, such as kubelets with self-signed certificates. Anyone between
    /// an edge and its kubelet can then impersonate the kubelet.
    target_insecure_skip_verify: bool,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

/// A value of `mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    Terminate,
    Passthrough,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "https", by_address: true, read };

/// Reads the table.
fn read(mut table: ConfigTableReader<'_>, inherited: &mut AccessConfig) -> ListenerConfigs {
    let mut https: HttpsConfig = table.fields();
    let passthrough = https.mode == Mode::Passthrough;
    let ports = https.node_ports();
    if let Some(port) = ports.iter().find(|port| passthrough && port.stands_for == PortTarget::Host) {
        let part = format!(".\"{}\"", port.at.port());
        let expected = "set the target that each node dials; the Host cannot be read in this mode";
        let found = "\"host\", but mode is \"passthrough\"".to_owned();
        table.error_in("ports", &part, found, expected);
    }
    // In passthrough mode the target ends the TLS, so no client proves anything to this server.
    let requests_certificates = !passthrough && https.client_ca.is_some();
    let tls = PortTlsState::On { client_certificate: requests_certificates };
    let proofs = AuthMethods { password: false, tls };
    // A certificate without use does no harm. A client_ca without use looks like protection, so it is an error.
    if passthrough && (table.has("cert") || table.has("key")) {
        let text = "cert and key are ignored: in this mode clients speak TLS with the target";
        table.warn("mode", WarningKind::Unexpected, text);
    }
    if passthrough && table.has("client_ca") {
        let found = Some("set, but mode is \"passthrough\"".to_owned());
        let expected = "let the target request certificates; in this mode clients speak TLS with it";
        table.error("client_ca", found, expected);
    }
    https.access = AccessConfig::read(&mut table, proofs, inherited);
    if requests_certificates {
        listen_tls::require_names(&table);
    }
    let names = &https.access.names;
    let named = !names.is_empty() && !names.iter().any(CertificateGlob::matches_everything);
    check_target_keys(&table, &https, requests_certificates && named);
    warn_if_open(&table, &ports, &https.access, proofs);
    table.close_optional(&https);
    single((!ports.is_empty()).then_some(https))
}

/// Checks the keys for TLS to targets. `proved` is true if only some clients are accepted, by their certificates.
fn check_target_keys(table: &ConfigTableReader<'_>, keys: &HttpsConfig, proved: bool) {
    let insecure = keys.target_insecure_skip_verify;
    for given in ["target_key", "target_ca", "target_insecure_skip_verify"] {
        let is_off = given == "target_insecure_skip_verify" && !insecure;
        if table.has(given) && !is_off && !table.has("target_cert") {
            table.error("target_cert", None, format!("{given} is set; set the certificate too"));
        }
    }
    if !table.has("target_cert") {
        return;
    }
    if !proved {
        let found =
            Some("set, but client_ca or names is missing, or names accepts any certificate".to_owned());
        let expected = "set client_ca and names to the clients that may use it; it may have rights over every node, so it is not \
                      presented for clients identified only by address";
        table.error("target_cert", found, expected);
    }
    if keys.target_ca.is_none() && !insecure {
        let expected =
            "set the CA that signs targets' certificates, or set target_insecure_skip_verify = true";
        table.error("target_ca", None, expected);
    }
    if insecure {
        let text = "targets are not verified: anyone between an edge and a target can impersonate the target";
        table.warn("target_insecure_skip_verify", WarningKind::Insecure, text);
    }
}

impl HttpsConfig {
    /// Returns the files for TLS with clients.
    fn tls(&self) -> ListenerTlsConfig {
        let Self { cert, key, client_ca, .. } = self.clone();
        ListenerTlsConfig { table: "server.https.".to_owned(), cert, key, client_ca }
    }

    /// Returns the files for this server's own TLS with targets: none if edges speak TLS with them.
    pub(crate) fn target_files(&self) -> Vec<NamedFile> {
        let Some(cert) = &self.target_cert else { return Vec::new() };
        // One file may contain both.
        let key = self.target_key.as_ref().unwrap_or(cert);
        let ca = self.target_ca.as_ref().filter(|_| !self.target_insecure_skip_verify);
        let files = [
            ("cert", Some(cert), FileKind::ClientCertificate),
            ("key", Some(key), FileKind::PrivateKey),
            ("ca", ca, FileKind::Ca),
        ];
        let file = |(name, path, kind): (&str, Option<&FilePath>, _)| {
            Some(NamedFile::new(format!("server.https.target_{name}"), path?, kind))
        };
        files.into_iter().filter_map(file).collect()
    }

    /// Returns this server's own TLS for HTTP/1 with targets, for clients that have presented a certificate. Returns
    /// `None` if edges speak TLS with targets.
    fn target_tls(
        &self,
        startup: &mut StartupErrorCollector,
    ) -> Result<Option<ReloadedValue<ClientConfig>>, NotPrepared> {
        let Some(cert) = self.target_cert.clone() else { return Ok(None) };
        NamedFile::check_all(&self.target_files(), startup)?;
        let key = self.target_key.clone().unwrap_or_else(|| cert.clone());
        let trust = match &self.target_ca {
            _ if self.target_insecure_skip_verify => Trust::NoVerify,
            ca => Trust::Ca(ca.clone().ok_or(NotPrepared)?.0),
        };
        let identity = Some(IdentityFiles { cert: cert.0, key: key.0 });
        let client = TlsClientConfig { trust, identity, alpn: vec![b"http/1.1".to_vec()] };
        startup.collect(StartupErrorKind::Config, &["server.https.target_cert"], client.load()).map(Some)
    }
}

impl ListenerConfig for HttpsConfig {
    fn files(&self) -> Vec<NamedFile> {
        if self.mode == Mode::Passthrough {
            return Vec::new();
        }
        self.tls().files().into_iter().chain(self.target_files()).collect()
    }

    fn access(&self) -> (&str, &AccessConfig) {
        ("server.https", &self.access)
    }

    fn node_ports(&self) -> Vec<NodePortConfig> {
        node_ports("server.https", self.listen_ip, &self.ports)
    }

    fn bind(&self, tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let is_terminated = self.mode == Mode::Terminate;
        let targets = if is_terminated { self.target_tls(startup) } else { Ok(None) };
        let tls = is_terminated.then(|| self.tls().load(tls, startup)).transpose();
        let ports = bind(&self.node_ports(), startup);
        let tls = tls?;
        let targets = targets?;
        let ports = ports?;
        // The first port watches the files for all.
        let mut watched = tls.clone().map(|tls| (tls, targets.clone()));
        let category = if targets.is_some() { SessionCategory::HttpProxy } else { SessionCategory::Https };
        let port = |(listener, stands_for)| match (tls.clone(), stands_for) {
            (Some(tls), stands_for) => {
                let watched = watched.take();
                let targets = targets.clone();
                let clients = Some(tls.clone());
                let port = BoundPort::tcp(category, listener, move |deps| {
                    if let Some((clients, targets)) = watched {
                        deps.files.watch("tls", &clients);
                        if let Some(targets) = targets {
                            deps.files.watch("target tls", &targets);
                        }
                    }
                    let finder = deps.finder.clone();
                    let ports = deps.ports.clone();
                    let port =
                        NodePortProtocol { stands_for, is_tls: true, target_tls: targets, finder, ports };
                    TlsListenerProtocol::new(port, tls, &deps.context)
                });
                Some(BoundPort { tls: clients, ..port })
            }
            (None, PortTarget::Target(target)) => {
                // Not `Https`, because the edge would then use TLS to the target itself.
                let category = SessionCategory::Tcp;
                Some(BoundPort::tcp(category, listener, |_| Passthrough { target }))
            }
            // The config does not allow it: no Host header is read there.
            (None, PortTarget::Host) => None,
        };
        Ok(ports.into_iter().filter_map(port).collect())
    }
}
