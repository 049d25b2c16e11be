//! The CONNECT front end: `CONNECT <node>:<port>`, then the session's bytes.

mod head;
mod request;

use std::marker::PhantomData;
use std::net::SocketAddr;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use tracing::{Span, field, info_span, warn};

use super::serve::{FrontEnd, Granted, Handshake, Visit};
use super::{Denial, NO_SSH, SSH, trace};
use crate::net::socket::Connection;
use crate::protocol::Category;

/// CONNECT over a stream of any kind, as one of SuperEdge's modules.
#[derive(Debug, Default)]
pub struct Connect<M>(PhantomData<fn() -> M>);

/// One of SuperEdge's modules that are asked with CONNECT.
pub trait Module: 'static {
    /// Its name in metrics and the access log.
    const NAME: &'static str;

    /// The category that the Open frame carries.
    const CATEGORY: Category;
}

/// CONNECT for people and their tools.
#[derive(Debug, Default)]
pub struct Ssh;

/// CONNECT for kube-apiserver.
#[derive(Debug, Default)]
pub struct Egress;

impl Module for Ssh {
    const NAME: &'static str = "ssh";
    const CATEGORY: Category = Category::Ssh;
}

impl Module for Egress {
    const NAME: &'static str = "egress";
    const CATEGORY: Category = Category::Egress;
}

impl<C: Connection + 'static, M: Module> FrontEnd<C> for Connect<M> {
    const NAME: &'static str = M::NAME;
    const CATEGORY: Category = M::CATEGORY;
    type Connection = C;

    fn span(&self, from: SocketAddr) -> Span {
        info_span!("connect", client = %from, trace = field::Empty, session = field::Empty)
    }

    fn rejection_bytes(&self, denial: &Denial, trace: &str) -> Bytes {
        denial.text(trace)
    }

    async fn handshake(&self, socket: C, visit: &mut Visit<'_>) -> Handshake<C> {
        serve(socket, visit).await
    }
}

/// Serves one CONNECT.
pub(super) async fn serve<C: Connection>(socket: C, visit: &mut Visit<'_>) -> Handshake<C> {
    let done = head::handshake(socket, |head| open(head, visit)).await;
    if matches!(done, Handshake::Failed { cause: SSH, .. })
        && visit.context().metrics.refusals.may_log(SSH, visit.from().ip())
    {
        warn!("an ssh client has come here by itself: {NO_SSH}");
    }
    done
}

async fn open(head: Parts, visit: &mut Visit<'_>) -> Result<Granted, Response<Bytes>> {
    let trace = trace::of(&head.headers);
    let opened = visit.open(request::parse(head), trace).await;
    opened.map_err(|denied| denied.denial.answer(denied.trusted, &denied.trace))
}

#[cfg(test)]
mod tests;
