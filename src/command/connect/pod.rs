//! The way to a pod's port for CONNECT, and opening a session through it.

use std::fmt;
use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{HOST, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::{Method, Request, Response, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::ext::ReasonPhrase;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::Connect;
use super::session::{Carrier, Session};
use crate::command::Failure;
use crate::names::{Host, Target};
use crate::net::dial::dial;
use crate::net::pool::Pool;
use crate::net::resolver::Resolver;
use crate::net::socket::{Connection, Socket};
use crate::net::tls::{self, ClientSettings, Identity, Trust};
use crate::telemetry::printable;

/// A pod's port for CONNECT.
pub(super) struct Pod {
    place: Place,
    /// TLS, and the name that the pod's certificate must carry.
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// Value of `Proxy-Authorization`.
    authorization: Option<HeaderValue>,
    pool: Pool,
}

enum Place {
    At(Target),
    Socket(PathBuf),
}

impl Pod {
    /// Reads the files that are named.
    pub(super) fn new(asked: &Connect) -> Result<Self, Failure> {
        let wrong = |why: &str| {
            let text = format!(
                "--through={}: {why}; want http://[USER@]HOST:PORT, https://… or unix:/PATH",
                asked.through
            );
            Err(Failure::usage(text))
        };
        if let Some(path) = asked.through.strip_prefix("unix:") {
            return match path.starts_with('/') {
                true => {
                    let place = Place::Socket(path.into());
                    Ok(Self { place, tls: None, authorization: None, pool: Pool::new() })
                }
                false => wrong("the path has to begin with /"),
            };
        }
        let (secure, rest) = match asked.through.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            _ => return wrong("it is no such URL"),
        };
        let (user, place) = rest.rsplit_once('@').map_or((None, rest), |(user, place)| (Some(user), place));
        if user.is_some_and(|user| user.contains(':')) {
            let text = "--through: everybody on this machine could read the password there: put it into a file, and name that \
                        with --password-file";
            return Err(Failure::usage(text));
        }
        let Ok(at) = place.trim_end_matches('/').parse::<Target>() else {
            return wrong("host and port are not understood");
        };
        let tls = if secure { Some(encryption(asked, &at)?) } else { None };
        if !secure && (asked.ca.is_some() || asked.cert.is_some()) {
            return Err(Failure::usage("--ca and --cert are for TLS: say https:// in --through"));
        }
        let authorization = authorization(user, asked.password_file.as_deref())?;
        Ok(Self { place: Place::At(at), tls, authorization, pool: Pool::new() })
    }

    /// Opens a session to a target. Cancel safe.
    pub(super) async fn open(&self, target: &Target) -> Result<Session, Failure> {
        let failed =
            |why: &dyn fmt::Display| Failure::unavailable(format!("no way to the pod {self}: {why}"));
        let trace = format!("{:08x}", rand::random::<u32>());
        let request = self.request(target, &trace)?;
        let opening = async {
            match &self.place {
                Place::Socket(path) => {
                    let stream = UnixStream::connect(path).await.map_err(|cause| failed(&cause))?;
                    Ok(Carrier::Unix(self.ask(stream, request).await?))
                }
                Place::At(at) => {
                    let addresses = resolve(at).await.map_err(|why| failed(&why))?;
                    let stream = dial(&addresses, DIAL).await.map_err(|why| failed(&why))?;
                    match &self.tls {
                        None => Ok(Carrier::Tcp(self.ask(stream, request).await?)),
                        Some((tls, name)) => {
                            let stream = tls.connect(name.clone(), stream).await;
                            let stream = stream.map_err(|cause| {
                                failed(&format_args!(
                                    "TLS failed: {cause}; check --ca, and that the certificate there carries {}",
                                    name.to_str()
                                ))
                            })?;
                            Ok(Carrier::Tls(Box::new(self.ask(stream, request).await?)))
                        }
                    }
                }
            }
        };
        let opened = timeout(ANSWER, opening).await;
        let carrier = opened.map_err(|_| failed(&format_args!("no answer within {ANSWER:?}")))??;
        Ok(Session { carrier, pod: self.to_string(), trace })
    }

    /// Sends CONNECT, and takes the stream back from HTTP once the pod has agreed.
    async fn ask<C: Connection>(
        &self,
        stream: C,
        request: Request<Empty<Bytes>>,
    ) -> Result<Socket<C>, Failure> {
        let broken =
            |cause: hyper::Error| Failure::unavailable(format!("the pod {self} gave no answer: {cause}"));
        let (mut sender, mut connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let mut answer = std::pin::pin!(async {
            let answer = sender.send_request(request).await?;
            Ok::<_, hyper::Error>(if answer.status().is_success() {
                None
            } else {
                Some(refusal(answer).await)
            })
        });
        let mut over = false;
        let refused = loop {
            tokio::select! {
                biased;
                refused = &mut answer => break refused.map_err(broken)?,
                // Its error reaches the request, too.
                _ = poll_fn(|cx| connection.poll_without_shutdown(cx)), if !over => over = true,
            }
        };
        if let Some(refused) = refused {
            return Err(refused);
        }
        let parts = connection.into_parts();
        Ok(Socket::with_early(parts.io.into_inner(), self.pool.clone(), parts.read_buf))
    }

    fn request(&self, target: &Target, trace: &str) -> Result<Request<Empty<Bytes>>, Failure> {
        let text = target.to_string();
        let wrong = |_| Failure::usage(format!("{text:?} cannot be asked for over HTTP"));
        let mut request = Request::new(Empty::new());
        *request.method_mut() = Method::CONNECT;
        *request.uri_mut() = Uri::try_from(&*text).map_err(wrong)?;
        for (name, value) in [(HOST, &*text), (TRACE, trace)] {
            if let Ok(value) = HeaderValue::from_str(value) {
                request.headers_mut().insert(name, value);
            }
        }
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(PROXY_AUTHORIZATION, authorization.clone());
        }
        Ok(request)
    }
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::At(at) => at.fmt(f),
            Place::Socket(path) => path.display().fmt(f),
        }
    }
}

/// Why the pod refused: its reason phrase, and what its body says to do.
async fn refusal(answer: Response<Incoming>) -> Failure {
    let status = answer.status();
    let phrase = answer
        .extensions()
        .get::<ReasonPhrase>()
        .map(|reason| String::from_utf8_lossy(reason.as_bytes()).into_owned());
    let phrase = phrase.unwrap_or_else(|| status.canonical_reason().unwrap_or_default().to_owned());
    let body = Limited::new(answer.into_body(), MOST_BODY)
        .collect()
        .await
        .map(|body| body.to_bytes())
        .unwrap_or_default();
    let body = String::from_utf8_lossy(&body).into_owned();
    // The first line says again what the phrase says.
    let more: String = body
        .lines()
        .skip(1)
        .filter(|line| !line.trim().is_empty())
        .map(|line| format!("\n  {}", printable(line)))
        .collect();
    let code = if matches!(status.as_u16(), 403 | 407) { NOT_PERMITTED } else { REFUSED };
    Failure { code, text: format!("{} {}{more}", status.as_u16(), printable(&phrase)) }
}

fn encryption(asked: &Connect, at: &Target) -> Result<(TlsConnector, ServerName<'static>), Failure> {
    let Some(ca) = asked.ca.clone() else {
        return Err(Failure::usage(
            "https:// wants --ca=FILE: the authority that signed the pod's certificate",
        ));
    };
    let identity = asked.cert.clone().zip(asked.key.clone()).map(|(cert, key)| Identity { cert, key });
    let settings = ClientSettings { trust: Trust::Ca(ca), identity, alpn: vec![b"http/1.1".to_vec()] };
    let config = settings.load().map_err(|cause| Failure::unusable(cause.to_string()))?;
    let name = tls::server_name(&at.host.to_string()).map_err(|cause| Failure::usage(cause.to_string()))?;
    Ok((TlsConnector::from(config.load()), name))
}

fn authorization(user: Option<&str>, file: Option<&Path>) -> Result<Option<HeaderValue>, Failure> {
    let (user, file) = match (user, file) {
        (None, None) => return Ok(None),
        (Some(user), Some(file)) => (user, file),
        (Some(_), None) => return Err(Failure::usage("USER in --through wants --password-file")),
        (None, Some(_)) => {
            return Err(Failure::usage("--password-file wants a user: --through=http://USER@HOST:PORT"));
        }
    };
    let password = std::fs::read_to_string(file)
        .map_err(|cause| Failure::unusable(format!("cannot read {}: {cause}", file.display())))?;
    let plain = format!("{user}:{}", password.trim_end_matches(['\r', '\n']));
    let mut value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(plain)))
        .map_err(|cause| Failure::usage(cause.to_string()))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

async fn resolve(at: &Target) -> Result<Vec<std::net::SocketAddr>, String> {
    let found = match &at.host {
        Host::Ip(ip) => vec![*ip],
        Host::Name(name) => {
            let resolver = Resolver::system().map_err(|cause| cause.to_string())?;
            resolver.lookup(name).await.map_err(|cause| cause.to_string())?
        }
    };
    Ok(found.into_iter().map(|ip| std::net::SocketAddr::new(ip, at.port)).collect())
}

/// Names the request in the pod's log.
const TRACE: HeaderName = HeaderName::from_static("traceid");
/// For the connection to the pod.
const DIAL: Duration = Duration::from_secs(10);
/// For all until the session is open: as long as a pod may wait for a target, and some more.
const ANSWER: Duration = Duration::from_secs(30);
/// Of a refusal's text.
const MOST_BODY: usize = 16 * 1024;
/// Exit code where the pod does not let this client in, as in sysexits.h.
const NOT_PERMITTED: u8 = 77;
/// Exit code where it cannot open the session.
const REFUSED: u8 = 69;
