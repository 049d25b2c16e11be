//! Dials through an HTTP proxy, as `HTTPS_PROXY` and `NO_PROXY` specify.

use std::net::SocketAddr;
use std::time::Duration;
use std::{io, iter};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use percent_encoding::percent_decode_str;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::dial::dial;
use crate::exact_read::read_until;
use crate::no_proxy::NoProxyRules;
use tunnel_proto::names::Target;
use tunnel_proto::printable::printable;

/// The proxy for connections to servers, and the targets that are dialled without it.
#[derive(derive_more::Debug, Clone)]
#[debug("Proxy({}{at})", if authorization.is_some() { "***@" } else { "" })]
pub struct OutboundProxy {
    at: Target,
    /// Value of `Proxy-Authorization`. A secret that is never displayed.
    authorization: Option<String>,
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
        let rest = match url.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            // The error contains only the scheme, if it looks like one, because a password may contain `://` too.
            Some((scheme, _)) if scheme.bytes().all(|b| b.is_ascii_alphanumeric()) => {
                return Err(ProxyError(format!(
                    "HTTPS_PROXY: {scheme}:// proxies are not supported; use http://host:port (the traffic through it \
                     is encrypted)"
                )));
            }
            _ => url,
        };
        // The last @ separates them, because a password may contain one that is not encoded.
        let (credentials, place) =
            rest.rsplit_once('@').map_or((None, rest), |(credentials, place)| (Some(credentials), place));
        // Many people end the URL with a slash. A path means nothing to a proxy.
        let place = place.split(['/', '?', '#']).next().unwrap_or(place);
        let at = place.parse().or_else(|_| format!("{place}:{DEFAULT_PORT}").parse());
        let at: Target = at.map_err(|_| {
            ProxyError(format!(
                "HTTPS_PROXY: {place:?} is not a proxy; expected http://host:port or http://user:password@host:port"
            ))
        })?;
        let authorization = credentials.map(|credentials| {
            let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
            let user = percent_decode_str(user);
            let password = percent_decode_str(password);
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
        let at = &self.at;
        let dialled = dial(&at.host, addresses, timeout).await;
        let mut socket = dialled
            .map_err(|why| ProxyError(format!("cannot connect to the proxy of HTTPS_PROXY: {why}")))?;
        let answered = timeout_at(deadline, self.send_connect(&mut socket, target)).await;
        let status = answered
            .map_err(|_| ProxyError(format!("the proxy {at} did not answer within {timeout:?}")))?
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

    /// Sends CONNECT, reads the header of the response, and returns its first line.
    async fn send_connect(&self, socket: &mut TcpStream, target: &Target) -> io::Result<String> {
        let authorization = self.authorization.as_ref();
        let authorization =
            authorization.map(|value| format!("Proxy-Authorization: {value}\r\n")).unwrap_or_default();
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

/// Port of an `http://` URL without one.
const DEFAULT_PORT: u16 = 80;

/// Maximum length of a response's header in bytes.
const MAX_HEAD: usize = 8 * 1024;

#[cfg(test)]
mod tests;
