//! The files and ports named in an edge's config, which are read and bound before any task is started.

use std::path::Path;

use tokio_rustls::rustls::ClientConfig;
use tracing::warn;

use crate::acceptor::target_tls::TargetTls;
use crate::admin;
use crate::admin::page::PageViewers;
use crate::admission::access::{AccessPolicies, bind_admin};
use crate::config::SecretString;
use crate::config::edge::{TargetTlsConfig, UplinkConfig};
use crate::config::listen_tls::Tls;
use crate::edge::config::{ADMIN, EdgeConfig as Settings};
use crate::session_io::rights::RightsChange;
use crate::startup::{Prepared, StartupErrorCollector, StartupErrorKind};
use crate::uplink::link_dialer::ServerEndpoint;
use tunnel_base::policy::tokens::MIN_TOKEN_BYTES;
use tunnel_net::http_proxy::OutboundProxy;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, link_alpn};

/// The contents of the files; some are reloaded on change.
pub(crate) struct LoadedEdgeFiles {
    /// TLS config for servers, with the trusted CAs.
    pub(crate) tls: ReloadedValue<ClientConfig>,
    /// Servers to dial.
    pub(crate) servers: Vec<ServerEndpoint>,
    /// TLS config for targets.
    pub(crate) targets: TargetTls,
    /// Tokens that prove the node's name: one or two, or none if a certificate proves it.
    pub(crate) tokens: ReloadedValue<Vec<SecretString>>,
    /// HTTP proxy for connections to servers, if any.
    pub(crate) proxy: Option<OutboundProxy>,
    /// The system's resolver.
    pub(crate) resolver: Resolver,
}

/// The files and ports of the config.
pub(crate) struct PreparedEdge {
    pub(super) files: LoadedEdgeFiles,
    pub(super) admin: admin::AdminListeners,
    /// The port of the HTTP proxy.
    pub(super) proxy: Option<TcpListenSocket>,
    pub(super) policies: AccessPolicies,
    /// The users that may view the admin page from other machines.
    pub(super) viewers: Option<PageViewers>,
}

/// Reads all files and binds all ports of the config.
pub(crate) fn prepare(settings: &Settings, startup: &mut StartupErrorCollector) -> Prepared<PreparedEdge> {
    let files = LoadedEdgeFiles::read(settings, startup);
    let ports = ("uplink", &settings.uplink.ports);
    let admin = bind_admin("edge", ports, &settings.admin, &Tls::default(), startup);
    let mut policies = AccessPolicies::default();
    let mut rights = RightsChange::default();
    policies.change(&settings.access(), &mut rights, startup);
    rights.apply();
    let proxy = settings.http_proxy.as_ref().map(|proxy| proxy.bind(startup)).transpose();
    let viewers = policies.viewers(ADMIN, &settings.admin);
    Ok(PreparedEdge { files: files?, admin: admin?, proxy: proxy?, policies, viewers })
}

impl LoadedEdgeFiles {
    /// Reads all files.
    pub(crate) fn read(settings: &Settings, startup: &mut StartupErrorCollector) -> Prepared<Self> {
        let uplink = &settings.uplink;
        let trust = Trust::Ca(uplink.ca.to_path_buf());
        let tls = TlsClientConfig { trust, identity: None, alpn: link_alpn() }.load();
        let tls = startup.collect(StartupErrorKind::Config, &["edge.uplink.ca"], tls);
        let servers = uplink.server_addresses().map(ServerEndpoint::new).collect();
        let servers = startup.collect(StartupErrorKind::Config, &["edge.uplink.tls_server_name"], servers);
        for ca in uplink.websocket_ca.values() {
            startup.check_certs("edge.uplink.websocket_ca", Some(ca));
        }
        let targets = targets(&settings.target_tls, startup);
        let tokens = tokens(uplink, startup);
        let proxy = startup.collect(StartupErrorKind::Config, &["HTTPS_PROXY"], uplink.proxy.parse());
        startup.congestion("edge.uplink.congestion", uplink.congestion.as_deref())?;
        // All files have been read by now, so a start reports the problems of each.
        Ok(Self {
            tls: tls?,
            servers: servers?,
            targets: targets?,
            tokens: tokens?,
            proxy: proxy?,
            resolver: Resolver::system(),
        })
    }
}

/// Reads the tokens from the config, or from a file that contains nothing else and is watched. There are one or two, or
/// none if a certificate proves the node's name.
pub(super) fn tokens(
    uplink: &UplinkConfig,
    startup: &mut StartupErrorCollector,
) -> Prepared<ReloadedValue<Vec<SecretString>>> {
    match (&uplink.token, &uplink.token_file) {
        (None, None) => Ok(ReloadedValue::fixed(Vec::new())),
        (Some(secret), _) => {
            warn_weak_tokens("edge.uplink.token", std::slice::from_ref(secret));
            Ok(ReloadedValue::fixed(vec![secret.clone()]))
        }
        (None, Some(path)) => {
            let file = path.clone();
            let parse = move |text: &[u8]| {
                parse_tokens(&file, text).inspect(|tokens| warn_weak_tokens("edge.uplink.token_file", tokens))
            };
            startup.collect(
                StartupErrorKind::Config,
                &["edge.uplink.token_file"],
                ReloadedValue::file(&path.0, parse),
            )
        }
    }
}

/// Warns of tokens with which a stranger could be this node.
fn warn_weak_tokens(key: &str, tokens: &[SecretString]) {
    if tokens.iter().any(|token| (1..MIN_TOKEN_BYTES).contains(&token.reveal().len())) {
        let risk = format!("a token of less than {MIN_TOKEN_BYTES} characters can be guessed");
        let hint = "run `tunnel token rotate` at the server, and write the new token here";
        warn!(key, risk, hint, "insecure configuration");
    }
}

/// Loads the TLS configs for targets, which are reloaded when their files change.
pub(super) fn targets(tls: &TargetTlsConfig, startup: &mut StartupErrorCollector) -> Prepared<TargetTls> {
    let identity = tls.cert.clone().zip(tls.key.clone());
    let identity = identity.map(|(cert, key)| IdentityFiles { cert: cert.0, key: key.0 });
    let client =
        |trust| TlsClientConfig { trust, identity: identity.clone(), alpn: vec![b"http/1.1".to_vec()] };
    let keys = ["edge.target_tls.cert", "edge.target_tls.key"];
    let loopback = startup.collect(StartupErrorKind::Config, &keys, client(Trust::NoVerify).load());
    let others = tls.ca.clone().map(|ca| {
        let others = client(Trust::Ca(ca.0)).load();
        startup.collect(StartupErrorKind::Config, &["edge.target_tls.ca"], others)
    });
    Ok(TargetTls { loopback: loopback?, others: others.transpose()? })
}

fn parse_tokens(path: &Path, text: &[u8]) -> Result<Vec<SecretString>, String> {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let tokens: Vec<SecretString> = lines.map(SecretString::new).collect();
    let path = path.display();
    match tokens.len() {
        0 => Err(format!("{path}: the token file is empty; write the token into it")),
        1 | 2 => Ok(tokens),
        n => Err(format!(
            "{path}: the token file has {n} lines; write one or two tokens into it, one per line"
        )),
    }
}
