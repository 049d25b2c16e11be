//! Stands in for the calls of machines with an invitation in a build without them: they are refused.

use std::net::SocketAddr;

use http::{Request, Response};
use hyper::body::Incoming;
use tonic::Status;

use crate::grpc::CallBody;
use tunnel_base::part;

/// A request from a machine that is not a node yet. There are none.
#[derive(Debug)]
pub enum EnrolRequest {}

/// Returns true if a call is an enrolment request.
pub(crate) fn is_petition<B>(request: &Request<B>) -> bool {
    request.uri().path().starts_with("/enrol.Enrol/")
}

/// Refuses an enrolment request.
pub(crate) async fn answer<F: Fn(EnrolRequest) -> bool>(
    _: Request<Incoming>,
    _: SocketAddr,
    _: F,
) -> Response<CallBody> {
    let why: Result<(), _> = part!("invitations", "invitations");
    Status::unimplemented(why.err().unwrap_or_default()).into_http()
}
