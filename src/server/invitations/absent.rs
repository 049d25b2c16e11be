//! Stands in for nodes that join by invitation in a build without them. The config has no store of invitations then.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::admin::readiness::Readiness;
use crate::invitations::{Enrolment, ServerCa};
use crate::server::ServerContext;
use crate::server::config::ServerConfig;
use crate::startup::{NotPrepared, Startup};
use tunnel_base::drain::Drain;
use tunnel_link::grpc::enrol::EnrolRequest;
use tunnel_net::reload::Reload;
use tunnel_net::resolver::Resolver;

#[expect(clippy::unnecessary_wraps, reason = "with invitations, the files may have errors")]
pub(crate) fn read_ca(_: &ServerConfig, _: &mut Startup) -> Result<Option<Reload<ServerCa>>, NotPrepared> {
    Ok(None)
}

pub(crate) fn start(
    _: &ServerConfig,
    _: Option<Reload<ServerCa>>,
    _: &Resolver,
    _: &Readiness,
    _: &Drain,
) -> Option<Arc<Enrolment>> {
    None
}

pub(crate) async fn joined(_: &ServerConfig, _: &Resolver) -> Option<Result<BTreeSet<String>, String>> {
    None
}

pub(crate) fn spawn(enrol_request: EnrolRequest, _: ServerContext) {
    match enrol_request {}
}
