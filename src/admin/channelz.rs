//! gRPC's debugging port, as SuperEdge has it: channelz, which shows servers, channels and sockets with their counts, and
//! reflection, by which a client learns its messages. It changes nothing, and asks nobody who he is.

mod entities;
mod reflection;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tonic::{Request, Response, Status};
use tower::Service as _;
use tracing::{Span, debug, info_span};

use crate::admin::Admin;
use crate::drain::Drain;
use crate::net::door::{Door, Limits};
use crate::net::entrance::{Accepted, ConnectionHandler, Entrance};
use crate::net::files;
use crate::net::listen::Listener;
use crate::policy::Networks;
use entities::Entities;
use reflection::{Reflection, ServerReflectionServer};
use wire::channelz_server::{Channelz, ChannelzServer};
use wire::{
    GetChannelRequest, GetChannelResponse, GetServerRequest, GetServerResponse, GetServerSocketsRequest,
    GetServerSocketsResponse, GetServersRequest, GetServersResponse, GetSocketRequest, GetSocketResponse,
    GetSubchannelRequest, GetSubchannelResponse, GetTopChannelsRequest, GetTopChannelsResponse,
};

/// The messages of `proto/channelz.proto`, compiled.
#[allow(missing_docs, unreachable_pub, missing_debug_implementations, clippy::all, reason = "generated")]
mod wire {
    include!(concat!(env!("OUT_DIR"), "/grpc.channelz.v1.rs"));
}

/// Serves the port until `drain` begins. `grpc` is the port at which edges link, of a pod.
pub(super) async fn serve(listener: Listener, admin: Admin, grpc: Option<SocketAddr>, drain: Drain) {
    let door = Door::new(Limits::slots(files::at_most(CONNECTIONS, 16)));
    let (refused, refusals) = (admin.metrics.connections_refused.clone(), admin.metrics.refusals.clone());
    let entrance = Entrance { listener, door, proxies: Networks::default(), refused, refusals };
    let handler = Debugging { entities: Arc::new(Entities::new(admin, grpc)), drain: drain.clone() };
    entrance.run(Arc::new(handler), drain).await;
}

#[derive(Debug)]
struct Debugging {
    entities: Arc<Entities>,
    drain: Drain,
}

impl ConnectionHandler for Debugging {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("channelz", peer = %from)
    }

    async fn serve(self: Arc<Self>, accepted: Accepted) {
        let channelz = ChannelzServer::from_arc(self.entities.clone()).max_decoding_message_size(MOST_BYTES);
        let reflection =
            ServerReflectionServer::new(Reflection::default()).max_decoding_message_size(MOST_BYTES);
        let service = service_fn(move |request: http::Request<Incoming>| {
            let (mut channelz, mut reflection) = (channelz.clone(), reflection.clone());
            async move {
                let request = reflection::in_its_newest_version(request);
                if request.uri().path().starts_with("/grpc.reflection.") {
                    reflection.call(request).await
                } else {
                    channelz.call(request).await
                }
            }
        });
        let mut http = http2::Builder::new(self.drain.clone());
        http.timer(TokioTimer::new())
            .max_concurrent_streams(CALLS)
            .max_header_list_size(MOST_HEAD)
            .keep_alive_interval(Some(PING_AFTER))
            .keep_alive_timeout(PING_AFTER);
        let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(accepted.socket), service));
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = self.drain.draining() => {
                serving.as_mut().graceful_shutdown();
                // A client that keeps a call of reflection open is not waited for.
                tokio::time::timeout(CLOSE_TIME, serving).await.unwrap_or(Ok(()))
            }
        };
        if let Err(error) = ended {
            debug!(%error, "channelz connection ended");
        }
        drop(accepted.slot);
    }
}

#[tonic::async_trait]
impl Channelz for Entities {
    async fn get_top_channels(
        &self,
        request: Request<GetTopChannelsRequest>,
    ) -> Result<Response<GetTopChannelsResponse>, Status> {
        let GetTopChannelsRequest { start_channel_id, max_results } = request.into_inner();
        let (channel, end) = some(self.channels(), start_channel_id, max_results);
        Ok(Response::new(GetTopChannelsResponse { channel, end }))
    }

    async fn get_servers(
        &self,
        request: Request<GetServersRequest>,
    ) -> Result<Response<GetServersResponse>, Status> {
        let GetServersRequest { start_server_id, max_results } = request.into_inner();
        let (server, end) = some(self.servers(), start_server_id, max_results);
        Ok(Response::new(GetServersResponse { server, end }))
    }

    async fn get_server(
        &self,
        request: Request<GetServerRequest>,
    ) -> Result<Response<GetServerResponse>, Status> {
        let server = found(self.servers(), request.into_inner().server_id)?;
        Ok(Response::new(GetServerResponse { server: Some(server) }))
    }

    async fn get_server_sockets(
        &self,
        request: Request<GetServerSocketsRequest>,
    ) -> Result<Response<GetServerSocketsResponse>, Status> {
        let GetServerSocketsRequest { server_id, start_socket_id, max_results } = request.into_inner();
        found(self.servers(), server_id)?;
        let (socket_ref, end) = some(self.server_sockets(), start_socket_id, max_results);
        Ok(Response::new(GetServerSocketsResponse { socket_ref, end }))
    }

    async fn get_channel(
        &self,
        request: Request<GetChannelRequest>,
    ) -> Result<Response<GetChannelResponse>, Status> {
        let channel = found(self.channels(), request.into_inner().channel_id)?;
        Ok(Response::new(GetChannelResponse { channel: Some(channel) }))
    }

    async fn get_subchannel(
        &self,
        request: Request<GetSubchannelRequest>,
    ) -> Result<Response<GetSubchannelResponse>, Status> {
        Err(missing(request.into_inner().subchannel_id))
    }

    async fn get_socket(
        &self,
        request: Request<GetSocketRequest>,
    ) -> Result<Response<GetSocketResponse>, Status> {
        let socket = found(self.sockets(), request.into_inner().socket_id)?;
        Ok(Response::new(GetSocketResponse { socket: Some(socket) }))
    }
}

/// Those from a number on, with whether there are no more.
fn some<T: entities::Numbered>(mut all: Vec<T>, start: i64, most: i64) -> (Vec<T>, bool) {
    all.retain(|one| one.number() >= start);
    all.sort_by_key(T::number);
    let most =
        usize::try_from(most).ok().filter(|most| (1..=MOST_RESULTS).contains(most)).unwrap_or(MOST_RESULTS);
    let end = all.len() <= most;
    all.truncate(most);
    (all, end)
}

fn found<T: entities::Numbered>(all: Vec<T>, number: i64) -> Result<T, Status> {
    all.into_iter().find(|one| one.number() == number).ok_or_else(|| missing(number))
}

fn missing(number: i64) -> Status {
    Status::not_found(format!("there is nothing with number {number}"))
}

/// Connections at once.
const CONNECTIONS: usize = 16;
/// Calls at once of one connection.
const CALLS: u32 = 16;
/// Longest request.
const MOST_BYTES: usize = 16 * 1024;
const MOST_HEAD: u32 = 16 * 1024;
/// Answers hold so many entities at most, as in gRPC's own servers.
const MOST_RESULTS: usize = 100;
/// A client that is silent for so long is asked whether it is there, and has as long to answer.
const PING_AFTER: Duration = Duration::from_secs(20);
const CLOSE_TIME: Duration = Duration::from_secs(1);
