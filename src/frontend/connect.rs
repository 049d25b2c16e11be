//! The CONNECT front end: `CONNECT <node>:<port>`, then the session's bytes.

mod head;
mod request;

use std::net::SocketAddr;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use tracing::{Span, field, info_span};

use super::Denial;
use super::serve::{FrontEnd, Granted, Handshake, Visit};
use crate::net::socket::Connection;
use crate::protocol::Category;

/// CONNECT over a stream of any kind.
#[derive(Debug)]
pub struct Connect;

impl<C: Connection + 'static> FrontEnd<C> for Connect {
    /// SuperEdge's module.
    const NAME: &'static str = "ssh";
    const CATEGORY: Category = Category::Ssh;
    type Connection = C;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("connect", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: C, visit: &mut Visit<'_>) -> Handshake<C> {
        head::handshake(socket, |head| open(head, visit)).await
    }
}

async fn open(head: Parts, visit: &mut Visit<'_>) -> Result<Granted, Response<Bytes>> {
    let trace = request::trace(&head.headers);
    let opened = visit.open(request::parse(head), trace).await;
    opened.map_err(|denied| denied.denial.answer(denied.trusted, &denied.trace))
}

#[cfg(test)]
mod tests;
