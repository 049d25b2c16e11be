//! gRPC's debugging port, as in SuperEdge. Channelz lists servers, channels and sockets with their counters; reflection
//! describes the messages to clients. The port changes nothing and needs no authentication.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prost_types::Timestamp;
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use tonic_reflection::server as reflection;
use tower::Service as _;
use tracing::{Span, debug, error, info_span};

use crate::admin::channelz::wire::channel_connectivity_state::State;
use crate::admin::channelz::wire::channelz_server::{Channelz, ChannelzServer};
use crate::admin::channelz::wire::{
    Address, Channel, ChannelConnectivityState, ChannelData, ChannelRef, GetChannelRequest,
    GetChannelResponse, GetServerRequest, GetServerResponse, GetServerSocketsRequest,
    GetServerSocketsResponse, GetServersRequest, GetServersResponse, GetSocketRequest, GetSocketResponse,
    GetSubchannelRequest, GetSubchannelResponse, GetTopChannelsRequest, GetTopChannelsResponse, Security,
    Server, ServerData, ServerRef, Socket, SocketData, SocketRef, address, security,
};
use crate::admin::{Admin, ProcessView, accept_limits};
use tunnel_base::drain::Drain;
use tunnel_base::policy::canonical_ip;
use tunnel_link::sender::LinkSender;
use tunnel_link::sender::stats::Traffic;
use tunnel_net::accept_loop::{self, Accepted, ConnectionHandler};
use tunnel_net::listen::TcpAccept;

/// Generated code of `proto/channelz.proto`.
#[allow(missing_docs, unreachable_pub, missing_debug_implementations, clippy::all, reason = "generated")]
#[rustfmt::skip]
pub(crate) mod wire;

/// Serves the port until `drain` starts. `grpc` is the address at which edges link to a server.
pub(crate) async fn serve(listener: TcpAccept, admin: Admin, grpc: Option<SocketAddr>, drain: Drain) {
    let limits = accept_limits(CONNECTIONS, &admin.metrics);
    let handler = ChannelzHandler { entities: Arc::new(Entities { admin, grpc }), drain: drain.clone() };
    accept_loop::run(listener, limits, handler, drain).await;
}

/// The handler of connections to the channelz port of a process: tells gRPC's debugging clients about its links.
#[derive(Debug)]
struct ChannelzHandler {
    entities: Arc<Entities>,
    drain: Drain,
}

impl ConnectionHandler for ChannelzHandler {
    fn span(&self, from: SocketAddr) -> Span {
        info_span!("channelz", remote_addr = %from)
    }

    async fn handle(self: Arc<Self>, accepted: Accepted) {
        let channelz = ChannelzServer::from_arc(self.entities.clone()).max_decoding_message_size(MAX_BYTES);
        let reflection = || reflection::Builder::configure().register_encoded_file_descriptor_set(FILES);
        let (v1, v1alpha) = match (reflection().build_v1(), reflection().build_v1alpha()) {
            (Ok(v1), Ok(v1alpha)) => (v1, v1alpha),
            (Err(cause), _) | (_, Err(cause)) => return error!(error = %cause, "cannot describe channelz"),
        };
        let v1 = v1.max_decoding_message_size(MAX_BYTES);
        let v1alpha = v1alpha.max_decoding_message_size(MAX_BYTES);
        let service = service_fn(move |request: http::Request<Incoming>| {
            let (mut channelz, mut v1, mut v1alpha) = (channelz.clone(), v1.clone(), v1alpha.clone());
            async move {
                match request.uri().path() {
                    path if path.starts_with("/grpc.reflection.v1.") => v1.call(request).await,
                    path if path.starts_with("/grpc.reflection.v1alpha.") => v1alpha.call(request).await,
                    _ => channelz.call(request).await,
                }
            }
        });
        let mut http = http2::Builder::new(self.drain.clone());
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
                // An open reflection call of a client must not delay the shutdown.
                tokio::time::timeout(CLOSE_TIME, serving).await.unwrap_or(Ok(()))
            }
        };
        if let Err(error) = ended {
            debug!(%error, "channelz connection ended");
        }
        drop(accepted.permit);
    }
}

#[tonic::async_trait]
impl Channelz for Entities {
    async fn get_top_channels(
        &self,
        request: Request<GetTopChannelsRequest>,
    ) -> Result<Response<GetTopChannelsResponse>, Status> {
        let GetTopChannelsRequest { start_channel_id, max_results } = request.into_inner();
        let (channel, end) = page_of(self.channels(), start_channel_id, max_results);
        Ok(Response::new(GetTopChannelsResponse { channel, end }))
    }

    async fn get_servers(
        &self,
        request: Request<GetServersRequest>,
    ) -> Result<Response<GetServersResponse>, Status> {
        let GetServersRequest { start_server_id, max_results } = request.into_inner();
        let (server, end) = page_of(self.servers(), start_server_id, max_results);
        Ok(Response::new(GetServersResponse { server, end }))
    }

    async fn get_server(
        &self,
        request: Request<GetServerRequest>,
    ) -> Result<Response<GetServerResponse>, Status> {
        let server = find_by_number(self.servers(), request.into_inner().server_id)?;
        Ok(Response::new(GetServerResponse { server: Some(server) }))
    }

    async fn get_server_sockets(
        &self,
        request: Request<GetServerSocketsRequest>,
    ) -> Result<Response<GetServerSocketsResponse>, Status> {
        let GetServerSocketsRequest { server_id, start_socket_id, max_results } = request.into_inner();
        find_by_number(self.servers(), server_id)?;
        let (socket_ref, end) = page_of(self.server_sockets(), start_socket_id, max_results);
        Ok(Response::new(GetServerSocketsResponse { socket_ref, end }))
    }

    async fn get_channel(
        &self,
        request: Request<GetChannelRequest>,
    ) -> Result<Response<GetChannelResponse>, Status> {
        let channel = find_by_number(self.channels(), request.into_inner().channel_id)?;
        Ok(Response::new(GetChannelResponse { channel: Some(channel) }))
    }

    async fn get_subchannel(
        &self,
        request: Request<GetSubchannelRequest>,
    ) -> Result<Response<GetSubchannelResponse>, Status> {
        Err(not_found(request.into_inner().subchannel_id))
    }

    async fn get_socket(
        &self,
        request: Request<GetSocketRequest>,
    ) -> Result<Response<GetSocketResponse>, Status> {
        let socket = find_by_number(self.sockets(), request.into_inner().socket_id)?;
        Ok(Response::new(GetSocketResponse { socket: Some(socket) }))
    }
}

/// Returns at most `most` entities starting with a number, and whether there are no more.
fn page_of<T>(mut all: Numbered<T>, start: i64, most: i64) -> (Vec<T>, bool) {
    let after = all.split_off(&start);
    let most =
        usize::try_from(most).ok().filter(|most| (1..=MAX_RESULTS).contains(most)).unwrap_or(MAX_RESULTS);
    let end = after.len() <= most;
    (after.into_values().take(most).collect(), end)
}

fn find_by_number<T>(mut all: Numbered<T>, number: i64) -> Result<T, Status> {
    all.remove(&number).ok_or_else(|| not_found(number))
}

fn not_found(number: i64) -> Status {
    Status::not_found(format!("no entity has the number {number}"))
}

/// Descriptions of the services, for clients that have no copy of them.
const FILES: &[u8] = include_bytes!("channelz/channelz.bin");
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

// The links of this process as gRPC entities.

/// The entities: the server that accepts links, a channel for each dialled link, and a socket for each link.
#[derive(Debug)]
struct Entities {
    admin: Admin,
    grpc: Option<SocketAddr>,
}

/// Entities by their numbers, which are unique among all entities.
type Numbered<T> = BTreeMap<i64, T>;

impl Entities {
    /// Returns the one server entity of a server; an edge has none.
    fn servers(&self) -> Numbered<Server> {
        let Some(at) = self.grpc else { return Numbered::new() };
        let metrics = &self.admin.metrics;
        let (ended, refused) = (metrics.links_closed.all(), metrics.links_rejected.all());
        let now = u64::try_from(metrics.links.all()).unwrap_or_default();
        let server = Server {
            r#ref: Some(ServerRef { server_id: SERVER, name: "links".into() }),
            data: Some(ServerData {
                calls_started: count(now + ended + refused),
                calls_succeeded: count(ended),
                calls_failed: count(refused),
            }),
            listen_socket: vec![SocketRef { socket_id: LISTENER, name: at.to_string() }],
        };
        [(SERVER, server)].into()
    }

    /// Returns the dialled links.
    fn channels(&self) -> Numbered<Channel> {
        let channel = |link: &Arc<LinkSender>| (channel_id(link), self.channel(link));
        self.links().iter().filter(|link| is_dialled(link)).map(channel).collect()
    }

    /// Returns the accepted links.
    fn server_sockets(&self) -> Numbered<SocketRef> {
        let socket = |link: &Arc<LinkSender>| (socket_id(link), socket_ref(link));
        self.links().iter().filter(|link| !is_dialled(link)).map(socket).collect()
    }

    /// Returns all sockets, including the listening one.
    fn sockets(&self) -> Numbered<Socket> {
        let listener = self.grpc.map(|at| Socket {
            r#ref: Some(SocketRef { socket_id: LISTENER, name: at.to_string() }),
            data: Some(SocketData::default()),
            local: Some(address(at)),
            ..Socket::default()
        });
        let socket = |link: &Arc<LinkSender>| (socket_id(link), self.socket(link));
        self.links().iter().map(socket).chain(listener.map(|listener| (LISTENER, listener))).collect()
    }

    fn links(&self) -> Vec<Arc<LinkSender>> {
        match &self.admin.side {
            ProcessView::Cloud(server) => {
                let nodes =
                    server.registry.overview(0).linked.into_iter().map(|(_, _, linked, _)| linked.sender);
                nodes.chain(server.peers.iter().flat_map(|peers| peers.links())).collect()
            }
            ProcessView::Edge(edge) => edge.uplinks.all(),
        }
    }

    fn channel(&self, link: &LinkSender) -> Channel {
        let target = link.ends().and_then(|ends| ends.remote).map(|at| at.to_string()).unwrap_or_default();
        Channel {
            r#ref: Some(ChannelRef { channel_id: channel_id(link), name: target.clone() }),
            data: Some(ChannelData {
                state: Some(ChannelConnectivityState { state: State::Ready.into() }),
                target,
                calls_started: 1,
                calls_succeeded: 0,
                calls_failed: 0,
                last_call_started_timestamp: Some(self.time(link.created_at())),
            }),
            socket_ref: vec![socket_ref(link)],
        }
    }

    fn socket(&self, link: &LinkSender) -> Socket {
        let Traffic { sent_messages, received_messages, .. } = link.traffic();
        let made = Some(self.time(link.created_at()));
        let (local_stream, remote_stream) = if is_dialled(link) { (made, None) } else { (None, made) };
        let last_received = Instant::now().checked_sub(link.idle_for()).filter(|_| received_messages > 0);
        let ends = link.ends();
        Socket {
            r#ref: Some(socket_ref(link)),
            data: Some(SocketData {
                streams_started: 1,
                streams_succeeded: 0,
                streams_failed: 0,
                messages_sent: count(sent_messages),
                messages_received: count(received_messages),
                last_local_stream_created_timestamp: local_stream,
                last_remote_stream_created_timestamp: remote_stream,
                last_message_received_timestamp: last_received.map(|at| self.time(at)),
            }),
            local: ends.and_then(|ends| ends.local).map(address),
            remote: ends.and_then(|ends| ends.remote).map(address),
            // Links always use TLS; the negotiated cipher suite is not recorded.
            security: Some(Security { model: Some(security::Model::Tls(security::Tls::default())) }),
            remote_name: link.peer.node().map(ToString::to_string).unwrap_or_default(),
        }
    }

    fn time(&self, at: Instant) -> Timestamp {
        let since = self.admin.clock.since_epoch(at);
        let nanos = i32::try_from(since.subsec_nanos()).unwrap_or_default();
        Timestamp { seconds: count(since.as_secs()), nanos }
    }
}

fn is_dialled(link: &LinkSender) -> bool {
    link.ends().is_some_and(|ends| ends.dialled)
}

fn socket_ref(link: &LinkSender) -> SocketRef {
    let name = link.peer.node().map_or_else(|| "a server".to_owned(), ToString::to_string);
    SocketRef { socket_id: socket_id(link), name }
}

/// Channels have even numbers, sockets odd ones. Link numbers start with 1.
fn channel_id(link: &LinkSender) -> i64 {
    count(link.id.0).saturating_mul(2).saturating_add(2)
}

fn socket_id(link: &LinkSender) -> i64 {
    channel_id(link).saturating_add(1)
}

fn address(at: SocketAddr) -> Address {
    let ip_address = match canonical_ip(at.ip()) {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let at = address::TcpIpAddress { ip_address, port: at.port().into() };
    Address { address: Some(address::Address::TcpipAddress(at)) }
}

fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

const SERVER: i64 = 1;
const LISTENER: i64 = 2;
