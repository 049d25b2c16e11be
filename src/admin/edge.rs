//! What an edge adds to the admin API: its links to servers.

use std::sync::Arc;

use futures_util::future::ready;
use http::{Method, StatusCode};

use crate::admin::requester::AdminRequest;
use crate::admin::responses::{AdminResponseFuture, method_not_allowed, not_found, plain_text};
use crate::admin::status::{LinkStatus, StatusResponse};
use crate::admin::{AdminContext, AdminProcess, READ_ONLY};
use crate::paths::uplinks::Uplinks;
use tunnel_link::link::Link;

impl AdminProcess for Uplinks {
    fn add_status(&self, admin: &AdminContext, status: &mut StatusResponse) {
        status.role = "edge".into();
        status.node = Some(self.node.to_string());
        for link in self.all().into_iter().rev() {
            let server = link.ends().and_then(|ends| ends.server_name.as_ref());
            let server = server.map_or_else(|| "server".to_owned(), ToString::to_string);
            status.links.push(admin.link(server.clone(), &link));
            if let Some(interactive) = link.interactive() {
                let link = admin.link(server, &interactive);
                status.links.push(LinkStatus { state: "interactive".into(), ..link });
            }
        }
    }

    fn links(&self) -> Vec<Arc<Link>> {
        self.all()
    }

    fn answer<'a>(&'a self, _: &'a AdminContext, request: AdminRequest<'a>) -> AdminResponseFuture<'a> {
        let answer = match request.http.uri().path() {
            "/edge/healthz" if *request.http.method() != Method::GET => method_not_allowed("GET", READ_ONLY),
            "/edge/healthz" if self.is_linked() => plain_text(StatusCode::OK, ""),
            "/edge/healthz" => plain_text(StatusCode::INTERNAL_SERVER_ERROR, ""),
            _ => not_found(),
        };
        Box::pin(ready(answer))
    }
}
