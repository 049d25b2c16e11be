//! Dials through an HTTP proxy, as `HTTPS_PROXY` and `NO_PROXY` specify.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use std::{fmt, io, iter};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::dial::{ConnectError, dial};
use tunnel_base::logging::printable;
use tunnel_base::names::{Host, Target};

/// The proxy for connections to servers, and the targets that are dialled without it.
#[derive(Clone)]
pub struct HttpProxyClient {
    at: Target,
    /// Value of `Proxy-Authorization`. A secret that is never displayed.
    authorization: Option<String>,
    no_proxy: NoProxyRules,
}

/// The error of a connection through the proxy. Each text names the proxy; none contains credentials.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The variable does not contain a proxy's address.
    #[error("HTTPS_PROXY: {0:?} is not a proxy; expected http://host:port or http://user:password@host:port")]
    Address(String),
    /// The kind of proxy is not supported.
    #[error(
        "HTTPS_PROXY: {0}:// proxies are not supported; use http://host:port (the traffic through it is encrypted)"
    )]
    Scheme(String),
    /// The proxy cannot be reached.
    #[error("cannot connect to the proxy of HTTPS_PROXY: {0}")]
    Dial(ConnectError),
    /// The proxy requires credentials, or rejects the given ones.
    #[error("the proxy {0} requires credentials; set HTTPS_PROXY to http://user:password@host:port")]
    Credentials(Target),
    /// The proxy refused the connection.
    #[error(
        "the proxy {at} did not connect to {target}: {status}; allow the target there, or add it to NO_PROXY"
    )]
    Refused {
        /// The proxy's address.
        at: Target,
        /// The target.
        target: Target,
        /// The status line of the proxy's response.
        status: String,
    },
    /// The proxy accepted the request and did not respond in time.
    #[error("the proxy {at} did not answer within {timeout:?}")]
    Timeout {
        /// The proxy's address.
        at: Target,
        /// How long this process waited.
        timeout: Duration,
    },
    /// The remote is not an HTTP proxy, or closed the connection.
    #[error("the connection to the proxy {at} failed: {cause}")]
    Broken {
        /// The proxy's address.
        at: Target,
        /// The error.
        cause: io::Error,
    },
}

impl HttpProxyClient {
    /// Parses the values of `HTTPS_PROXY` and `NO_PROXY`. Returns `None` if the first is empty.
    pub fn new(https_proxy: &str, no_proxy: &str) -> Result<Option<Self>, ProxyError> {
        let url = https_proxy.trim();
        if url.is_empty() {
            return Ok(None);
        }
        let rest = match url.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            // The error contains only the scheme, if it looks like one, because a password may contain `://` too.
            Some((scheme, _)) if scheme.bytes().all(|b| b.is_ascii_alphanumeric()) => {
                return Err(ProxyError::Scheme(scheme.to_owned()));
            }
            _ => url,
        };
        let (credentials, place) =
            rest.rsplit_once('@').map_or((None, rest), |(credentials, place)| (Some(credentials), place));
        let place = place.split(['/', '?', '#']).next().unwrap_or(place);
        let at = place.parse().or_else(|_| format!("{place}:{DEFAULT_PORT}").parse());
        let at: Target = at.map_err(|_| ProxyError::Address(place.to_owned()))?;
        let authorization = credentials.map(|credentials| {
            let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
            let (user, password) = (percent_decode_str(user), percent_decode_str(password));
            let plain: Vec<u8> = user.chain(iter::once(b':')).chain(password).collect();
            format!("Basic {}", STANDARD.encode(plain))
        });
        Ok(Some(Self { at, authorization, no_proxy: NoProxyRules::new(no_proxy) }))
    }

    /// Returns host and port of the proxy, which the caller resolves for [`Self::connect`].
    pub fn at(&self) -> &Target {
        &self.at
    }

    /// Returns true if connections to a target go through the proxy. This machine is never reached through it.
    pub fn applies_to(&self, target: &Target) -> bool {
        !self.no_proxy.covers(target)
    }

    /// Connects to `target` within `timeout` through the proxy at one of `addresses`. Cancel safe.
    pub async fn connect(
        &self,
        addresses: &[SocketAddr],
        target: &Target,
        timeout: Duration,
    ) -> Result<TcpStream, ProxyError> {
        let deadline = Instant::now() + timeout;
        let mut socket = dial(&self.at.host, addresses, timeout).await.map_err(ProxyError::Dial)?;
        let status = match timeout_at(deadline, self.send_connect(&mut socket, target)).await {
            Ok(Ok(status)) => status,
            Ok(Err(cause)) => return Err(ProxyError::Broken { at: self.at.clone(), cause }),
            Err(_) => return Err(ProxyError::Timeout { at: self.at.clone(), timeout }),
        };
        match status.split_ascii_whitespace().nth(1) {
            Some("200") => Ok(socket),
            Some("407") => Err(ProxyError::Credentials(self.at.clone())),
            _ => Err(ProxyError::Refused { at: self.at.clone(), target: target.clone(), status }),
        }
    }

    /// Sends CONNECT, reads the header of the response, and returns its first line.
    async fn send_connect(&self, socket: &mut TcpStream, target: &Target) -> io::Result<String> {
        let authorization = self.authorization.as_ref();
        let authorization =
            authorization.map(|value| format!("Proxy-Authorization: {value}\r\n")).unwrap_or_default();
        let head = format!(
            "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nUser-Agent: tunnel\r\n{authorization}\r\n"
        );
        socket.write_all(head.as_bytes()).await?;
        let head = head_of(socket).await?;
        let line =
            String::from_utf8_lossy(head.split(|b| *b == b'\r').next().unwrap_or_default()).into_owned();
        if line.starts_with("HTTP/1.") {
            Ok(printable(&line))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the response is not HTTP/1"))
        }
    }
}

impl fmt::Debug for HttpProxyClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let credentials = if self.authorization.is_some() { "***@" } else { "" };
        write!(f, "Proxy({credentials}{})", self.at)
    }
}

/// Reads up to and including the empty line, and not a byte more: the following bytes come from the target.
async fn head_of(socket: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut waiting = vec![0; MAX_HEAD];
    while head.len() < MAX_HEAD {
        let n = socket.peek(&mut waiting).await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let before = head.len();
        head.extend_from_slice(waiting.get(..n).unwrap_or_default());
        let end = head.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
        head.truncate(end.unwrap_or(head.len()));
        let part = waiting.get_mut(..head.len() - before).unwrap_or_default();
        socket.read_exact(part).await?;
        if end.is_some() {
            return Ok(head);
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the header of the response is too long"))
}

/// Port of an `http://` URL without one.
const DEFAULT_PORT: u16 = 80;

/// Maximum length of a response's header in bytes.
const MAX_HEAD: usize = 8 * 1024;

// The targets that are reached without the proxy, from `NO_PROXY`.

/// The rules of `NO_PROXY`, with Go's semantics.
#[derive(Debug, Clone)]
pub(crate) struct NoProxyRules(Vec<NoProxyRule>);

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
    pub(crate) fn new(list: &str) -> Self {
        Self(list.split(',').filter_map(|item| NoProxyRule::new(&item.trim().to_ascii_lowercase())).collect())
    }

    /// Returns true if a target is reached directly. Loopback always is.
    pub(crate) fn covers(&self, target: &Target) -> bool {
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
