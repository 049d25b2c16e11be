//! The files and ports that an edge's settings name, had before anything runs.

use std::path::Path;

use tokio_rustls::rustls::ClientConfig;

use super::link_dialer::CloudServer;
use super::proxy::ProxyPort;
use crate::admin::Viewers;
use crate::backend::TargetTls;
use crate::config::Secret;
use crate::config::edge::{Client, EdgeSettings as Settings, Https, Token};
use crate::net::listen::{Listener, LocalListener};
use crate::net::proxy::Proxy;
use crate::net::reload::Reload;
use crate::net::resolver::Resolver;
use crate::net::tls::{self, Identity, Trust};
use crate::startup::{FaultKind, Gates, Startup};

/// What stands in the files; what is watched follows them.
pub(super) struct EdgeFiles {
    /// Whom the edge believes to be the cloud.
    pub(super) tls: Reload<ClientConfig>,
    /// Where the cloud is.
    pub(super) servers: Vec<CloudServer>,
    /// TLS to targets.
    pub(super) targets: TargetTls,
    /// What proves the node: one token, or two; none where a certificate proves it.
    pub(super) tokens: Reload<Vec<Secret>>,
    /// What the cloud is dialled through, if anything.
    pub(super) proxy: Option<Proxy>,
    /// The system's.
    pub(super) resolver: Resolver,
}

/// The ports that operators come to.
#[derive(Debug)]
pub(super) struct Ports {
    /// Health, log level, metrics; none if the implicit port could not be had.
    pub(super) log: Option<Listener>,
    /// Metrics alone.
    pub(super) metrics: Option<Listener>,
    /// For gRPC's debugging clients.
    pub(super) channelz: Option<Listener>,
    /// For commands of this machine.
    pub(super) admin: Option<LocalListener>,
}

/// What the settings name; who may look from other machines, with the files that say so.
pub(super) type Prepared = (EdgeFiles, Ports, Option<ProxyPort>, (Viewers, Gates));

/// What the settings name, had before anything runs; `None`: something is wrong, and noted.
pub(super) fn prepare(settings: &Settings, startup: &mut Startup) -> Option<Prepared> {
    let files = EdgeFiles::read(settings, startup);
    let ports = Ports::bind(settings, startup);
    // Outer: whether it can be served; inner: whether it is asked for.
    let proxy = match &settings.http_proxy {
        None => Some(None),
        Some(proxy) => ProxyPort::prepare(proxy, startup).map(Some),
    };
    let mut gates = Gates::default();
    let viewers = gates.viewers(&settings.admin, startup);
    Some((files?, ports?, proxy?, (viewers?, gates)))
}

impl EdgeFiles {
    /// Reads all of them; `None`: something is wrong, and noted.
    pub(super) fn read(settings: &Settings, startup: &mut Startup) -> Option<Self> {
        let client = &settings.client;
        let trust = Trust::Ca(client.ca.clone());
        let tls = tls::ClientSettings { trust, identity: None, alpn: vec![b"h2".to_vec()] }.load();
        let tls = startup.keep(FaultKind::Config, &["mode.edge.stream.client.cert"], tls);
        let servers = client.servers.iter().map(CloudServer::new).collect();
        let servers = startup.keep(FaultKind::Config, &["mode.edge.stream.client.dns"], servers);
        let targets = targets(&settings.https, startup);
        let tokens = tokens(client.token.as_ref(), startup);
        let proxy = startup.keep(FaultKind::Config, &["HTTPS_PROXY"], proxy(client));
        let resolver = startup.keep(FaultKind::System, &["DNS"], Resolver::system());
        startup.congestion(&format!("{TABLE}.congestion"), client.congestion.as_deref())?;
        Some(Self {
            tls: tls?,
            servers: servers?,
            targets: targets?,
            tokens: tokens?,
            proxy: proxy?,
            resolver: resolver?,
        })
    }
}

impl Ports {
    /// Takes all of them; `None`: one cannot be had, which is noted.
    pub(super) fn bind(settings: &Settings, startup: &mut Startup) -> Option<Self> {
        let log = startup.bind_optional_private(TABLE, settings.client.log_listen);
        // Outer: whether it is asked for; inner: whether it could be had.
        let at = settings.client.metrics_listen;
        let metrics = match at.map(|at| startup.bind(&format!("{TABLE}.metrics_listen"), at)) {
            None => None,
            Some(bound) => Some(bound?),
        };
        let at = settings.client.channelz;
        let channelz = match at.map(|at| startup.bind_private(&format!("{TABLE}.channelz_addr"), at)) {
            None => None,
            Some(bound) => Some(bound?),
        };
        let admin = startup.bind_admin("mode.edge.admin.listen", &settings.admin.socket);
        Some(Self { log: log?, metrics, channelz, admin: admin? })
    }
}

/// What proves the node: the token itself, or a file that holds nothing else and may change. One token, or two; none where a
/// certificate proves it.
fn tokens(token: Option<&Token>, startup: &mut Startup) -> Option<Reload<Vec<Secret>>> {
    match token {
        None => Some(Reload::fixed(Vec::new())),
        Some(Token::Text(secret)) => Some(Reload::fixed(vec![secret.clone()])),
        Some(Token::File(path)) => {
            let file = path.clone();
            let tokens = Reload::file(path, move |text| parse_tokens(&file, text));
            startup.keep(FaultKind::Config, &["mode.edge.stream.client.token_file"], tokens)
        }
    }
}

/// TLS towards targets; the files are read again when they change.
fn targets(https: &Https, startup: &mut Startup) -> Option<TargetTls> {
    let identity = https.identity.clone().map(|(cert, key)| Identity { cert, key });
    let client =
        |trust| tls::ClientSettings { trust, identity: identity.clone(), alpn: vec![b"http/1.1".to_vec()] };
    let keys = ["mode.edge.https.cert", "mode.edge.https.key"];
    let loopback = startup.keep(FaultKind::Config, &keys, client(Trust::Anyone).load());
    let others = match &https.ca {
        None => Some(None),
        Some(ca) => {
            let others = client(Trust::Ca(ca.clone())).load();
            startup.keep(FaultKind::Config, &["mode.edge.https.ca"], others).map(Some)
        }
    };
    Some(TargetTls { loopback: loopback?, others: others? })
}

fn parse_tokens(path: &Path, text: &[u8]) -> Result<Vec<Secret>, String> {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let tokens: Vec<Secret> = lines.map(Secret::new).collect();
    let path = path.display();
    match tokens.len() {
        0 => Err(format!("{path}: the token file is empty: write the token into it")),
        1 | 2 => Ok(tokens),
        n => Err(format!(
            "{path}: the token file holds {n} lines: write one token into it, or two, a line each"
        )),
    }
}

fn proxy(client: &Client) -> Result<Option<Proxy>, crate::net::proxy::ProxyError> {
    let Some(url) = &client.https_proxy else { return Ok(None) };
    Proxy::new(url.reveal(), client.no_proxy.as_deref().unwrap_or_default())
}

const TABLE: &str = "mode.edge.stream.client";
