//! Stands in for gRPC's debugging port in a build without it. The config has no address of it then.

use std::net::SocketAddr;

use crate::admin::Admin;
use tunnel_base::drain::Drain;
use tunnel_net::listen::TcpAccept;

pub(crate) async fn serve(_: TcpAccept, _: Admin, _: Option<SocketAddr>, _: Drain) {}
