//! Authorizes and routes each request of one client separately.

use std::sync::Arc;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue, ORIGIN, PROXY_AUTHORIZATION};
use http::request::Parts;
use http::{HeaderMap, Uri};
use tokio::time::timeout;
use tokio_rustls::rustls::ClientConfig;

use crate::admission::denial::Denial;
use crate::admission::trace_id::{new_trace, trace_of};
use crate::admission::{Admission, AuthorizedRequest, DeniedRequest, ListenerContext, OpenRequest};
use crate::session_io::OpenSession;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::names::{Host, NodeName, Target};

/// A router that authorizes each request of one client, and opens sessions for them.
pub(crate) struct RequestRouter<'a> {
    pub(super) parse: &'a ParseRequest<'a>,
    pub(super) admission: &'a mut Admission,
    /// TLS config of this process towards targets, whose certificates must have the nodes' names. `None` leaves TLS to
    /// the edge that dials them, if it uses TLS.
    pub(super) tls: Option<ReloadedValue<ClientConfig>>,
    /// Whether responses to the client of the last request may contain addresses and times.
    pub(super) sees_details: bool,
    /// The trace of the last request.
    pub(super) trace: String,
}

/// Returns the request in a head. The URI is as sent by the client; the Host header is the effective host.
pub(crate) type ParseRequest<'a> = dyn Fn(&Parts) -> Result<OpenRequest, Denial> + Send + Sync + 'a;

/// The user, who may differ between requests, and the destination. Requests with equal routes may share a session.
#[derive(Debug, PartialEq)]
pub(crate) struct RequestRoute {
    pub(super) user: Option<String>,
    pub(super) node: NodeName,
    pub(super) target: Target,
}

impl<'a> RequestRouter<'a> {
    /// Authorizes a request. An error in the head is reported only to clients that may use the listener.
    ///
    /// # Errors
    ///
    /// Returns the denial for the client.
    pub(crate) async fn route(
        &mut self,
        head: Result<&Parts, Denial>,
    ) -> Result<AuthorizedRequest, DeniedRequest> {
        self.trace = head.as_ref().map_or_else(|_| new_trace(), |head| trace_of(&head.headers));
        let request = head.and_then(self.parse);
        let authorized = self.admission.authorize(request, self.trace.clone()).await?;
        if let Some(permit) = self.admission.permit() {
            permit.suspend();
        }
        self.sees_details = authorized.sees_details();
        Ok(authorized)
    }

    /// Returns the denial of a request whose head cannot be parsed. Only clients that may use the listener get the
    /// reason.
    pub(crate) async fn deny(&mut self, denial: Denial) -> DeniedRequest {
        match self.route(Err(denial)).await {
            Err(denied) => denied,
            Ok(_) => self.failed(Denial::Request("its head cannot be parsed")),
        }
    }

    /// Opens a session for an authorized request. Cancel safe: dropping the future leaves no session.
    ///
    /// # Errors
    ///
    /// Returns the denial for the client.
    pub(crate) async fn open(&self, authorized: AuthorizedRequest) -> Result<OpenSession, DeniedRequest> {
        let node = authorized.node().clone();
        let opened = authorized.open().await?;
        let Some(tls) = &self.tls else { return Ok(opened) };
        // Load the config for each session, so that a renewed certificate applies without ending sessions.
        let encrypted = encrypted(opened, &node, tls.load(), &self.admission.context);
        encrypted.await.map_err(|error| self.failed(Denial::TargetTls(error)))
    }

    /// Returns the denial for the last authorized request, if its session gave no response.
    pub(crate) fn failed(&self, denial: Denial) -> DeniedRequest {
        DeniedRequest { denial, sees_details: self.sees_details, trace: self.trace.clone().into_boxed_str() }
    }
}

/// Wraps an opened session in TLS. If that fails, ends the session and writes its access log entry.
async fn encrypted(
    mut opened: OpenSession,
    node: &NodeName,
    config: Arc<ClientConfig>,
    context: &ListenerContext,
) -> Result<OpenSession, TlsHandshakeError> {
    let pool = context.pool.clone();
    let accepted = match tls::server_name(node.as_str()) {
        Err(why) => Err(TlsHandshakeError::Other(why.to_string())),
        Ok(name) => match timeout(TARGET_TLS_TIMEOUT, opened.session.encrypted(config, name, pool)).await {
            Ok(accepted) => accepted.map_err(|cause| TlsHandshakeError::of(&cause)),
            Err(_) => Err(TlsHandshakeError::Other(format!("not finished within {TARGET_TLS_TIMEOUT:?}"))),
        },
    };
    match accepted {
        Ok(session) => Ok(OpenSession { session, ..opened }),
        Err(error) => {
            let denial = Denial::TargetTls(error.clone());
            opened.access.status = Some(denial.status().as_u16());
            opened.access.set_opening(&context.metrics.refusals);
            opened.access.end(denial.name(), &denial.to_string());
            opened.alive.end(denial.name());
            Err(error)
        }
    }
}

/// Timeout of the TLS handshake with a target that is already connected.
const TARGET_TLS_TIMEOUT: Duration = Duration::from_secs(10);

/// Refuses what a browser sends for a page of another site than the target's, which may use a node with the user's
/// rights. The site of an `http://` page is its host here. Only GETs without `Origin` cannot be told apart, and their page
/// cannot read the answers.
///
/// # Errors
///
/// Returns the denial for the client.
pub(crate) fn refuse_other_sites(headers: &HeaderMap, target: &Target) -> Result<(), Denial> {
    let host = |origin: &HeaderValue| -> Option<Host> {
        let origin: Uri = origin.to_str().ok()?.parse().ok()?;
        origin.scheme().and(origin.host())?.parse().ok()
    };
    let is_other = match headers.get(SEC_FETCH_SITE) {
        Some(site) => !["same-origin", "same-site", "none"].iter().any(|own| site == own),
        None => headers.get(ORIGIN).is_some_and(|origin| host(origin).as_ref() != Some(&target.host)),
    };
    let why = "a browser sent this for a page of another site, which could use the node with your rights";
    if is_other { Err(Denial::Forbidden(why.to_owned())) } else { Ok(()) }
}

/// Returns the headers by which a request is judged.
pub(crate) fn credentials(headers: &HeaderMap) -> HeaderMap {
    let names = [PROXY_AUTHORIZATION, ORIGIN, SEC_FETCH_SITE];
    names.into_iter().filter_map(|name| headers.get(&name).cloned().map(|value| (name, value))).collect()
}

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
