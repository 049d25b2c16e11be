//! Dialing through an HTTP proxy, as `HTTPS_PROXY` and `NO_PROXY` ask for it.

mod exempt;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::dial::{DialError, dial};
use crate::names::Target;
use crate::telemetry::printable;
use exempt::Exempt;

/// The proxy for connections to pods, and the targets that are dialled without it.
#[derive(Clone)]
pub struct Proxy {
    at: Target,
    /// Value of `Proxy-Authorization`. A secret: never shown.
    authorization: Option<String>,
    exempt: Exempt,
}

/// Why a connection through the proxy failed. Each sentence names the proxy; none shows credentials.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The setting is not a proxy's address.
    #[error("HTTPS_PROXY: {0:?} is not a proxy: want http://host:port or http://user:password@host:port")]
    Address(String),
    /// A kind of proxy that is not supported.
    #[error(
        "HTTPS_PROXY: {0}:// proxies are not spoken: want http://host:port (what goes through it is encrypted)"
    )]
    Scheme(String),
    /// The proxy itself cannot be reached.
    #[error("the proxy of HTTPS_PROXY does not answer: {0}")]
    Dial(#[from] DialError),
    /// The proxy wants credentials, or rejects those that it got.
    #[error("the proxy {0} wants credentials: set HTTPS_PROXY to http://user:password@host:port")]
    Credentials(Target),
    /// The proxy refused the connection.
    #[error(
        "the proxy {at} did not connect to {target}: {status}; allow the target there, or add it to NO_PROXY"
    )]
    Refused {
        /// The proxy's address.
        at: Target,
        /// The target behind it.
        target: Target,
        /// The status line of its answer.
        status: String,
    },
    /// The proxy took the request and did not answer in time.
    #[error("the proxy {at} did not answer within {patience:?}")]
    Timeout {
        /// The proxy's address.
        at: Target,
        /// How long this process waited.
        patience: Duration,
    },
    /// The peer is not an HTTP proxy, or closed the connection.
    #[error("the proxy {at} broke off: {cause}")]
    Broken {
        /// The proxy's address.
        at: Target,
        /// The error.
        cause: io::Error,
    },
}

impl Proxy {
    /// From the values of `HTTPS_PROXY` and `NO_PROXY`; `None` if the first is empty.
    pub fn new(https_proxy: &str, no_proxy: &str) -> Result<Option<Self>, ProxyError> {
        let url = https_proxy.trim();
        if url.is_empty() {
            return Ok(None);
        }
        let rest = match url.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            // The error shows only what looks like a scheme, as a password may hold `://` too.
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
            let plain = [&decoded(user)[..], b":", &decoded(password)].concat();
            format!("Basic {}", STANDARD.encode(plain))
        });
        Ok(Some(Self { at, authorization, exempt: Exempt::new(no_proxy) }))
    }

    /// Host and port of the proxy, which the caller resolves for [`Self::connect`].
    pub fn at(&self) -> &Target {
        &self.at
    }

    /// Whether connections to a target go through the proxy. This machine is never reached through it.
    pub fn applies_to(&self, target: &Target) -> bool {
        !self.exempt.covers(target)
    }

    /// Connects to `target` through the proxy, which is at one of `addresses`, within `patience`. Cancel safe.
    pub async fn connect(
        &self,
        addresses: &[SocketAddr],
        target: &Target,
        patience: Duration,
    ) -> Result<TcpStream, ProxyError> {
        let deadline = Instant::now() + patience;
        let mut socket = dial(addresses, patience).await?;
        let left = deadline.saturating_duration_since(Instant::now());
        let status = match timeout(left, self.ask(&mut socket, target)).await {
            Ok(Ok(status)) => status,
            Ok(Err(cause)) => return Err(ProxyError::Broken { at: self.at.clone(), cause }),
            Err(_) => return Err(ProxyError::Timeout { at: self.at.clone(), patience }),
        };
        match status.split_ascii_whitespace().nth(1) {
            Some("200") => Ok(socket),
            Some("407") => Err(ProxyError::Credentials(self.at.clone())),
            _ => Err(ProxyError::Refused { at: self.at.clone(), target: target.clone(), status }),
        }
    }

    /// Sends CONNECT and reads the answer's head, of which it returns the first line.
    async fn ask(&self, socket: &mut TcpStream, target: &Target) -> io::Result<String> {
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
            Err(io::Error::new(io::ErrorKind::InvalidData, "its answer is not HTTP/1"))
        }
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let credentials = if self.authorization.is_some() { "***@" } else { "" };
        write!(f, "Proxy({credentials}{})", self.at)
    }
}

/// Reads up to and including the empty line, and not a byte further: what follows belongs to the target.
async fn head_of(socket: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut waiting = vec![0; LONGEST_HEAD];
    while head.len() < LONGEST_HEAD {
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
    Err(io::Error::new(io::ErrorKind::InvalidData, "the head of its answer has no end"))
}

/// Decodes percent codes (`%41` is `A`); any other text stays.
fn decoded(text: &str) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let code = match rest {
            [b'%', high, low, ..] => hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        plain.push(code.unwrap_or(*first));
        rest = if code.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    plain
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

/// Port of an `http://` URL that names none.
const DEFAULT_PORT: u16 = 80;

/// Bytes of an answer's head at most.
const LONGEST_HEAD: usize = 8 * 1024;

#[cfg(test)]
mod tests;
