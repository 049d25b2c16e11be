//! Dials through a proxy of HTTP, HTTPS or SOCKS5, as `HTTPS_PROXY` and `NO_PROXY` specify.

use std::future::ready;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::Uri;
use hyper_util::client::legacy::connect::proxy::SocksV5;
use hyper_util::rt::TokioIo;
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;
use tower::{Service as _, service_fn};

use crate::dial::dial;
use crate::exact_read::read_until;
use crate::socket::Connection;
use crate::tls::error::TlsHandshakeError;
use crate::tls::{HTTP_1, TlsClientConfig, Trust, server_name};
use tunnel_proto::names::{Host, Target};
use tunnel_proto::printable::printable;

/// The proxy for connections to servers, and the targets that are dialled without it.
#[derive(derive_more::Debug, Clone)]
#[debug("Proxy({}{at})", if credentials.is_some() { "***@" } else { "" })]
pub struct OutboundProxy {
    at: Target,
    kind: ProxyKind,
    /// User and password. A secret that is never displayed.
    credentials: Option<[Vec<u8>; 2]>,
    no_proxy: NoProxyRules,
}

/// The protocol in which a proxy is asked for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProxyKind {
    Http,
    /// HTTP inside of TLS.
    Https,
    Socks5,
}

/// A connection to a server, directly or through a proxy; with a proxy of HTTPS inside of its TLS.
pub type ProxiedStream<S = TcpStream> = Either<S, Box<TlsStream<S>>>;

/// The error of a proxy's address, or of a connection through it, which its text names. It contains no credentials.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ProxyError(String);

impl OutboundProxy {
    /// Parses the values of `HTTPS_PROXY` and `NO_PROXY`. Returns `None` if the first is empty.
    pub fn new(https_proxy: &str, no_proxy: &str) -> Result<Option<Self>, ProxyError> {
        let url = https_proxy.trim();
        if url.is_empty() {
            return Ok(None);
        }
        let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
        let (kind, port, rest) = match &*scheme.to_ascii_lowercase() {
            "http" => (ProxyKind::Http, 80, rest),
            "https" => (ProxyKind::Https, 443, rest),
            // The proxy resolves the servers' names in either case.
            "socks5" | "socks5h" => (ProxyKind::Socks5, 1080, rest),
            // The error contains only the scheme, if it looks like one, because a password may contain `://` too.
            scheme if scheme.bytes().all(|b| b.is_ascii_alphanumeric()) => {
                return Err(ProxyError(format!(
                    "HTTPS_PROXY: {scheme}:// proxies are not supported; use http://, https:// or socks5://"
                )));
            }
            _ => (ProxyKind::Http, 80, url),
        };
        // The last @ separates them, because a password may contain one that is not encoded.
        let (credentials, place) =
            rest.rsplit_once('@').map_or((None, rest), |(credentials, place)| (Some(credentials), place));
        // Many people end the URL with a slash. A path means nothing to a proxy.
        let place = place.split(['/', '?', '#']).next().unwrap_or(place);
        let at = place.parse().or_else(|_| format!("{place}:{port}").parse());
        let at: Target = at.map_err(|_| {
            ProxyError(format!(
                "HTTPS_PROXY: {place:?} is not a proxy; expected http://host:port, https:// or socks5://, with user:password@ before the host if it needs them"
            ))
        })?;
        let credentials = credentials.map(|credentials| {
            let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
            [user, password].map(|text| percent_decode_str(text).collect())
        });
        Ok(Some(Self { at, kind, credentials, no_proxy: NoProxyRules::new(no_proxy) }))
    }

    /// Returns host and port of the proxy, which the caller resolves for [`Self::connect`].
    pub fn at(&self) -> &Target {
        &self.at
    }

    /// Returns true if connections to a target go through the proxy. This machine is never reached through it.
    pub fn applies_to(&self, target: &Target) -> bool {
        !self.no_proxy.covers(target)
    }

    /// Connects to `target` within `timeout` through the proxy at one of `addresses`; to the proxy itself if that speaks
    /// HTTPS, see [`Self::encrypted`]. Cancel safe.
    pub async fn connect(
        &self,
        addresses: &[SocketAddr],
        target: &Target,
        timeout: Duration,
    ) -> Result<TcpStream, ProxyError> {
        let deadline = Instant::now() + timeout;
        let at = &self.at;
        let dialled = dial(&at.host, addresses, timeout).await;
        let mut socket = dialled
            .map_err(|why| ProxyError(format!("cannot connect to the proxy of HTTPS_PROXY: {why}")))?;
        let asked = async {
            match self.kind {
                ProxyKind::Http => self.ask(&mut socket, target).await.map(|()| socket),
                ProxyKind::Https => Ok(socket),
                ProxyKind::Socks5 => self.pass_socks(socket, target).await.map_err(|cause| {
                    ProxyError(format!(
                        "the proxy {at} did not connect to {target}: {cause}; check the user and password in \
                         HTTPS_PROXY (240 bytes together at most), and allow the target there, or add it to NO_PROXY"
                    ))
                }),
            }
        };
        timeout_at(deadline, asked).await.map_err(|_| self.late(timeout))?
    }

    /// Asks a proxy of HTTPS for `target` over a connection from [`Self::connect`], once the proxy has proved its name by
    /// `trust`. Without such a proxy it returns the connection. Cancel safe.
    pub async fn encrypted<S: Connection>(
        proxy: Option<&Self>,
        socket: S,
        target: &Target,
        trust: Trust,
        patience: Duration,
    ) -> Result<ProxiedStream<S>, ProxyError> {
        let proxy = proxy.filter(|proxy| proxy.kind == ProxyKind::Https && proxy.applies_to(target));
        let Some(proxy) = proxy else { return Ok(Either::Left(socket)) };
        let failed = |cause: String| ProxyError(format!("no TLS with the proxy {}: {cause}", proxy.at));
        let name = server_name(&proxy.at.host.to_string()).map_err(failed)?;
        let tls = TlsClientConfig { trust, identity: None, alpn: vec![HTTP_1.to_vec()] };
        let asked = async {
            // Reads the CAs of the system.
            let tls = spawn_blocking(move || tls.load()).await.map_err(|cause| failed(cause.to_string()))?;
            let tls = TlsConnector::from(tls.map_err(|cause| failed(cause.to_string()))?.load());
            let mut io =
                tls.connect(name, socket).await.map_err(|e| failed(TlsHandshakeError::of(&e).to_string()))?;
            proxy.ask(&mut io, target).await?;
            Ok(Either::Right(Box::new(io)))
        };
        timeout(patience, asked).await.map_err(|_| proxy.late(patience))?
    }

    fn late(&self, timeout: Duration) -> ProxyError {
        ProxyError(format!("the proxy {} did not answer within {timeout:?}", self.at))
    }

    /// Asks a proxy of HTTP for a connection.
    async fn ask(&self, io: &mut impl Connection, target: &Target) -> Result<(), ProxyError> {
        let at = &self.at;
        let status = self.send_connect(io, target).await;
        let status = status
            .map_err(|cause| ProxyError(format!("the connection to the proxy {at} failed: {cause}")))?;
        match status.split_ascii_whitespace().nth(1) {
            Some(code) if code.starts_with('2') => Ok(()),
            Some("407") => Err(ProxyError(format!(
                "the proxy {at} requires credentials; set HTTPS_PROXY with user:password@ before the host"
            ))),
            _ => Err(ProxyError(format!(
                "the proxy {at} did not connect to {target}: {status}; allow the target there, or add it to NO_PROXY"
            ))),
        }
    }

    /// Makes the handshake of SOCKS5 over a connection to the proxy. The target must not send first: its bytes could be lost.
    async fn pass_socks(&self, socket: TcpStream, target: &Target) -> Result<TcpStream, String> {
        let mut socket = Some(TokioIo::new(socket));
        let dialled = service_fn(move |_: Uri| ready(socket.take().ok_or(io::ErrorKind::NotConnected)));
        let mut handshake = SocksV5::new(Uri::default(), dialled);
        if let Some(credentials) = &self.credentials {
            let [user, password] =
                credentials.each_ref().map(|text| String::from_utf8_lossy(text).into_owned());
            handshake = handshake.with_auth(user, password);
        }
        let to = target.to_string().parse().map_err(|_| "not a target for SOCKS5".to_owned())?;
        handshake.call(to).await.map(TokioIo::into_inner).map_err(|cause| cause.to_string())
    }

    /// Sends CONNECT, reads the header of the response, and returns its first line.
    async fn send_connect(&self, socket: &mut impl Connection, target: &Target) -> io::Result<String> {
        let authorization = self.credentials.as_ref().map_or_else(String::new, |credentials| {
            format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode(credentials.join(&b':')))
        });
        let head = format!(
            "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nUser-Agent: tunnel\r\n{authorization}\r\n"
        );
        socket.write_all(head.as_bytes()).await?;
        let line = loop {
            let mut head = Vec::new();
            if !read_until(socket, &mut head, b"\r\n\r\n", MAX_HEAD).await? {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the header of the response is too long",
                ));
            }
            let line =
                String::from_utf8_lossy(head.split(|b| *b == b'\r').next().unwrap_or_default()).into_owned();
            // The final response follows an interim one (RFC 9110, section 15.2).
            if !line.split_ascii_whitespace().nth(1).is_some_and(|code| code.starts_with('1')) {
                break line;
            }
        };
        if line.starts_with("HTTP/1.") {
            Ok(printable(&line))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the response is not HTTP/1"))
        }
    }
}

/// Maximum length of a response's header in bytes.
const MAX_HEAD: usize = 8 * 1024;

/// The rules of `NO_PROXY`, with Go's semantics.
#[derive(Debug, Clone)]
struct NoProxyRules(Vec<NoProxyRule>);

/// A rule of `NO_PROXY`: targets that are dialled without the proxy.
#[derive(Debug, Clone)]
enum NoProxyRule {
    Everything,
    Net(IpNet),
    Ip(IpAddr, Option<u16>),
    Name {
        /// The name with a leading dot, which is the suffix of names below it.
        suffix: String,
        /// Whether the rule includes the name itself, besides the names below it.
        itself: bool,
        port: Option<u16>,
    },
}

impl NoProxyRules {
    /// Parses a comma-separated list of `*`, networks, addresses and names. Other items are ignored.
    ///
    /// A name includes the names below it; with a leading dot or `*.` it includes only those. Addresses and names may
    /// have a port.
    fn new(list: &str) -> Self {
        Self(list.split(',').filter_map(|item| NoProxyRule::new(&item.trim().to_ascii_lowercase())).collect())
    }

    /// Returns true if a target is reached directly. Loopback always is.
    fn covers(&self, target: &Target) -> bool {
        let own = match &target.host {
            Host::Ip(ip) => ip.is_loopback(),
            Host::Name(name) => &**name == "localhost",
        };
        own || self.0.iter().any(|rule| rule.covers(target))
    }
}

impl NoProxyRule {
    fn new(item: &str) -> Option<Self> {
        if item == "*" {
            return Some(Self::Everything);
        }
        if let Ok(net) = item.parse() {
            return Some(Self::Net(net));
        }
        let (host, port) = split_port(item);
        if let Ok(ip) = host.parse() {
            return Some(Self::Ip(ip, port));
        }
        let host = host.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(host);
        let below = host.strip_prefix('.');
        let name = below.unwrap_or(host);
        (!name.is_empty()).then(|| Self::Name { suffix: format!(".{name}"), itself: below.is_none(), port })
    }

    fn covers(&self, target: &Target) -> bool {
        let at_port = |port: &Option<u16>| port.is_none_or(|port| port == target.port);
        match (self, &target.host) {
            (Self::Everything, _) => true,
            (Self::Net(net), Host::Ip(ip)) => net.contains(&ip.to_canonical()),
            (Self::Ip(only, port), Host::Ip(ip)) => only.to_canonical() == ip.to_canonical() && at_port(port),
            (Self::Name { suffix, itself, port }, Host::Name(name)) => {
                let is_it = *itself && suffix.strip_prefix('.') == Some(name);
                (is_it || name.ends_with(suffix)) && at_port(port)
            }
            _ => false,
        }
    }
}

/// Removes port and brackets. An IPv6 address without brackets has no port.
fn split_port(item: &str) -> (&str, Option<u16>) {
    let (host, port) = match item.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, port.parse().ok()),
        _ => (item, None),
    };
    (host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host), port)
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod no_proxy_tests {
    use super::*;

    fn direct(list: &str, target: &str) -> bool {
        NoProxyRules::new(list).covers(&target.parse().unwrap())
    }

    #[test]
    fn no_proxy_names_cover_their_subdomains() {
        for (list, target, expected) in [
            ("cloud.io", "cloud.io:443", true),
            ("cloud.io", "tunnel.Cloud.io:443", true),
            ("cloud.io", "mycloud.io:443", false),
            (".cloud.io", "tunnel.cloud.io:443", true),
            (".cloud.io", "cloud.io:443", false),
            ("*.cloud.io", "tunnel.cloud.io:443", true),
            ("a.b, CLOUD.io:9000", "cloud.io:9000", true),
            ("cloud.io:9000", "cloud.io:9001", false),
            ("", "cloud.io:443", false),
            (",,.,", "cloud.io:443", false),
        ] {
            assert_eq!(direct(list, target), expected, "{list} {target}");
        }
    }

    #[test]
    fn no_proxy_addresses_and_networks_cover_only_addresses() {
        for (list, target, expected) in [
            ("*", "10.0.0.1:1", true),
            ("*", "a.b:1", true),
            ("10.0.0.0/8", "10.1.2.3:443", true),
            ("10.0.0.0/8", "11.1.2.3:443", false),
            ("10.0.0.0/8", "a.b:443", false),
            ("192.0.2.1", "192.0.2.1:443", true),
            ("192.0.2.1:80", "192.0.2.1:443", false),
            ("2001:db8::1", "[2001:db8::1]:443", true),
            ("[2001:db8::1]:443", "[2001:db8::1]:443", true),
            ("[2001:db8::1]:80", "[2001:db8::1]:443", false),
            ("2001:db8::/32", "[2001:db8::1]:443", true),
        ] {
            assert_eq!(direct(list, target), expected, "{list} {target}");
        }
    }

    #[test]
    fn loopback_targets_never_use_the_proxy() {
        assert!(direct("", "localhost:1") && direct("", "127.8.0.1:1") && direct("", "[::1]:1"));
    }
}
