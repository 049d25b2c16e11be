//! gRPC's debugging port, as in SuperEdge. Channelz lists servers, channels and sockets with their counters. The port
//! changes nothing and needs no authentication.

use std::convert::Infallible;
use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tonic::body::Body;
use tonic::server::Grpc;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;
use tracing::{Span, debug, info_span};

use crate::admin::channelz::entities::{Entities, EntitiesById};
use crate::admin::channelz::wire::{
    GetChannelRequest, GetChannelResponse, GetServerRequest, GetServerResponse, GetServerSocketsRequest,
    GetServerSocketsResponse, GetServersRequest, GetServersResponse, GetSocketRequest, GetSocketResponse,
    GetSubchannelRequest, GetSubchannelResponse, GetTopChannelsRequest, GetTopChannelsResponse,
};
use crate::admin::{AdminContext, accept_limits};
use tunnel_base::drain::Drain;
use tunnel_net::accept_loop::{self, Accepted, ConnectionHandler};
use tunnel_net::listen::TcpListenSocket;

mod entities;
/// Generated messages of `proto/channelz.proto`.
#[allow(missing_docs, unreachable_pub, missing_debug_implementations, clippy::all, reason = "generated")]
#[rustfmt::skip]
pub(crate) mod wire;

/// Serves the port until `drain` starts. `grpc` is the address at which edges link to a server.
pub(crate) async fn serve(
    listener: TcpListenSocket,
    admin: AdminContext,
    grpc: Option<SocketAddr>,
    drain: Drain,
) {
    let limits = accept_limits(CONNECTIONS, &admin.metrics);
    let handler = ChannelzHandler { entities: Entities { admin, grpc }, drain: drain.clone() };
    accept_loop::run(listener, limits, handler, drain).await;
}

/// The handler of connections to the channelz port of a process: tells gRPC's debugging clients about its links.
#[derive(Debug)]
struct ChannelzHandler {
    entities: Entities,
    drain: Drain,
}

impl ConnectionHandler for ChannelzHandler {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("channelz", remote_addr = %from)
    }

    async fn handle(self: Arc<Self>, accepted: Accepted) {
        let service = hyper::service::service_fn(|request: http::Request<Incoming>| {
            let handler = self.clone();
            async move { Ok::<_, Infallible>(handler.entities.answer(request).await) }
        });
        let mut http = http2::Builder::new(TokioExecutor::new());
        http.timer(TokioTimer::new())
            .max_concurrent_streams(CALLS)
            .max_header_list_size(MAX_HEAD)
            .keep_alive_interval(Some(PING_AFTER))
            .keep_alive_timeout(PING_AFTER);
        let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(accepted.socket), service));
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = self.drain.draining() => {
                serving.as_mut().graceful_shutdown();
                // A client that never completes its request must not delay the shutdown.
                tokio::time::timeout(CLOSE_TIME, serving).await.unwrap_or(Ok(()))
            }
        };
        if let Err(error) = ended {
            debug!(%error, "channelz connection ended");
        }
        drop(accepted.permit);
    }
}

impl Entities {
    /// Returns the response to one call of gRPC.
    async fn answer(&self, request: http::Request<Incoming>) -> http::Response<Body> {
        let method = request.uri().path().strip_prefix(SERVICE).unwrap_or_default().to_owned();
        let answer = match method.as_str() {
            "GetTopChannels" => unary(request, |GetTopChannelsRequest { start_channel_id, max_results }| {
                let (channel, end) = page_of(self.channels(), start_channel_id, max_results);
                Ok(GetTopChannelsResponse { channel, end })
            }),
            "GetServers" => unary(request, |GetServersRequest { start_server_id, max_results }| {
                let (server, end) = page_of(self.servers(), start_server_id, max_results);
                Ok(GetServersResponse { server, end })
            }),
            "GetServer" => unary(request, |GetServerRequest { server_id }| {
                let server = find_by_number(self.servers(), server_id)?;
                Ok(GetServerResponse { server: Some(server) })
            }),
            "GetServerSockets" => {
                unary(request, |GetServerSocketsRequest { server_id, start_socket_id, max_results }| {
                    find_by_number(self.servers(), server_id)?;
                    let (socket_ref, end) = page_of(self.server_sockets(), start_socket_id, max_results);
                    Ok(GetServerSocketsResponse { socket_ref, end })
                })
            }
            "GetChannel" => unary(request, |GetChannelRequest { channel_id }| {
                let channel = find_by_number(self.channels(), channel_id)?;
                Ok(GetChannelResponse { channel: Some(channel) })
            }),
            "GetSubchannel" => unary(request, |GetSubchannelRequest { subchannel_id }| {
                Err::<GetSubchannelResponse, _>(not_found(subchannel_id))
            }),
            "GetSocket" => unary(request, |GetSocketRequest { socket_id, .. }| {
                let socket = find_by_number(self.sockets(), socket_id)?;
                Ok(GetSocketResponse { socket: Some(socket) })
            }),
            _ => return Status::unimplemented("").into_http(),
        };
        answer.await
    }
}

/// Answers a call of one message with one message.
fn unary<'a, M, R>(
    request: http::Request<Incoming>,
    answer: impl Fn(M) -> Result<R, Status> + Send + 'a,
) -> BoxFuture<'a, http::Response<Body>>
where
    M: prost::Message + Default + 'static,
    R: prost::Message + 'static,
{
    let answer =
        service_fn(move |message: Request<M>| ready(answer(message.into_inner()).map(Response::new)));
    let mut grpc = Grpc::new(ProstCodec::<R, M>::default()).max_decoding_message_size(MAX_BYTES);
    Box::pin(async move { grpc.unary(answer, request).await })
}

/// Returns at most `most` entities starting with a number, and whether there are no more.
fn page_of<T>(mut all: EntitiesById<T>, start: i64, most: i64) -> (Vec<T>, bool) {
    let after = all.split_off(&start);
    let most =
        usize::try_from(most).ok().filter(|most| (1..=MAX_RESULTS).contains(most)).unwrap_or(MAX_RESULTS);
    let end = after.len() <= most;
    (after.into_values().take(most).collect(), end)
}

fn find_by_number<T>(mut all: EntitiesById<T>, number: i64) -> Result<T, Status> {
    all.remove(&number).ok_or_else(|| not_found(number))
}

fn not_found(number: i64) -> Status {
    Status::not_found(format!("no entity has the number {number}"))
}

/// What the paths of the service's methods start with.
const SERVICE: &str = "/grpc.channelz.v1.Channelz/";
/// Maximum number of concurrent connections.
const CONNECTIONS: usize = 16;
/// Maximum number of concurrent calls per connection.
const CALLS: u32 = 16;
/// Maximum length of a request in bytes.
const MAX_BYTES: usize = 16 * 1024;
const MAX_HEAD: u32 = 16 * 1024;
/// Maximum number of entities in a response, as in gRPC's own servers.
const MAX_RESULTS: usize = 100;
/// Idle time after which a client is pinged, and timeout for its response.
const PING_AFTER: Duration = Duration::from_secs(20);
const CLOSE_TIME: Duration = Duration::from_secs(1);
