//! Dials through an HTTP or SOCKS5 proxy, as `HTTPS_PROXY` and `NO_PROXY` specify.

use std::future::ready;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::Uri;
use hyper_util::client::legacy::connect::proxy::SocksV5;
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tower::{Service as _, service_fn};

use crate::dial::dial;
use crate::exact_read::read_until;
use crate::no_proxy::NoProxyRules;
use tunnel_proto::names::Target;
use tunnel_proto::printable::printable;

/// The proxy for connections to servers, and the targets that are dialled without it.
#[derive(derive_more::Debug, Clone)]
#[debug("Proxy({}{at})", if credentials.is_some() { "***@" } else { "" })]
pub struct OutboundProxy {
    at: Target,
    is_socks: bool,
    /// User and password. A secret that is never displayed.
    credentials: Option<[Vec<u8>; 2]>,
    no_proxy: NoProxyRules,
}

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
        let is_any = |scheme: &str, of: &[&str]| of.iter().any(|one| scheme.eq_ignore_ascii_case(one));
        let (is_socks, rest) = match url.split_once("://") {
            Some((scheme, rest)) if is_any(scheme, &["http"]) => (false, rest),
            // The proxy resolves the servers' names in either case.
            Some((scheme, rest)) if is_any(scheme, &["socks5", "socks5h"]) => (true, rest),
            // The error contains only the scheme, if it looks like one, because a password may contain `://` too.
            Some((scheme, _)) if scheme.bytes().all(|b| b.is_ascii_alphanumeric()) => {
                return Err(ProxyError(format!(
                    "HTTPS_PROXY: {scheme}:// proxies are not supported; use http://host:port or socks5://host:port \
                     (the traffic through it is encrypted)"
                )));
            }
            _ => (false, url),
        };
        // The last @ separates them, because a password may contain one that is not encoded.
        let (credentials, place) =
            rest.rsplit_once('@').map_or((None, rest), |(credentials, place)| (Some(credentials), place));
        // Many people end the URL with a slash. A path means nothing to a proxy.
        let place = place.split(['/', '?', '#']).next().unwrap_or(place);
        let port = if is_socks { SOCKS_PORT } else { HTTP_PORT };
        let at = place.parse().or_else(|_| format!("{place}:{port}").parse());
        let at: Target = at.map_err(|_| {
            ProxyError(format!(
                "HTTPS_PROXY: {place:?} is not a proxy; expected http://host:port or socks5://host:port, with user:password@ before the host if it needs them"
            ))
        })?;
        let credentials = credentials.map(|credentials| {
            let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
            [user, password].map(|text| percent_decode_str(text).collect())
        });
        Ok(Some(Self { at, is_socks, credentials, no_proxy: NoProxyRules::new(no_proxy) }))
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
        let at = &self.at;
        let dialled = dial(&at.host, addresses, timeout).await;
        let mut socket = dialled
            .map_err(|why| ProxyError(format!("cannot connect to the proxy of HTTPS_PROXY: {why}")))?;
        let late = |_| ProxyError(format!("the proxy {at} did not answer within {timeout:?}"));
        if self.is_socks {
            let connected = timeout_at(deadline, self.pass_socks(socket, target)).await.map_err(late)?;
            return connected.map_err(|cause| {
                ProxyError(format!(
                    "the proxy {at} did not connect to {target}: {cause}; check the user and password in \
                     HTTPS_PROXY, and allow the target there, or add it to NO_PROXY"
                ))
            });
        }
        let answered = timeout_at(deadline, self.send_connect(&mut socket, target)).await;
        let status = answered
            .map_err(late)?
            .map_err(|cause| ProxyError(format!("the connection to the proxy {at} failed: {cause}")))?;
        match status.split_ascii_whitespace().nth(1) {
            Some("200") => Ok(socket),
            Some("407") => Err(ProxyError(format!(
                "the proxy {at} requires credentials; set HTTPS_PROXY to http://user:password@host:port"
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
    async fn send_connect(&self, socket: &mut TcpStream, target: &Target) -> io::Result<String> {
        let authorization = self.credentials.as_ref().map_or_else(String::new, |credentials| {
            format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode(credentials.join(&b':')))
        });
        let head = format!(
            "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nUser-Agent: tunnel\r\n{authorization}\r\n"
        );
        socket.write_all(head.as_bytes()).await?;
        let mut head = Vec::new();
        if !read_until(socket, &mut head, b"\r\n\r\n", MAX_HEAD).await? {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the header of the response is too long"));
        }
        let line =
            String::from_utf8_lossy(head.split(|b| *b == b'\r').next().unwrap_or_default()).into_owned();
        if line.starts_with("HTTP/1.") {
            Ok(printable(&line))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the response is not HTTP/1"))
        }
    }
}

/// Port of a URL without one.
const HTTP_PORT: u16 = 80;
const SOCKS_PORT: u16 = 1080;

/// Maximum length of a response's header in bytes.
const MAX_HEAD: usize = 8 * 1024;

#[cfg(test)]
mod tests;
