//! The links of this process as gRPC entities.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use prost_types::Timestamp;
use tokio::time::Instant;

use crate::admin::AdminContext;
use crate::admin::channelz::wire::channel_connectivity_state::State;
use crate::admin::channelz::wire::{
    Address, Channel, ChannelConnectivityState, ChannelData, ChannelRef, Security, Server, ServerData,
    ServerRef, Socket, SocketData, SocketRef, address, security,
};
use tunnel_base::policy::canonical_ip;
use tunnel_link::link::Link;
use tunnel_link::link::stats::Traffic;

/// The entities: the server that accepts links, a channel for each dialled link, and a socket for each link.
#[derive(Debug)]
pub(super) struct Entities {
    pub(super) admin: AdminContext,
    pub(super) grpc: Option<SocketAddr>,
}

/// Entities by their numbers, which are unique among all entities.
pub(super) type EntitiesById<T> = BTreeMap<i64, T>;

impl Entities {
    /// Returns the one server entity of a server; an edge has none.
    pub(super) fn servers(&self) -> EntitiesById<Server> {
        let Some(at) = self.grpc else { return EntitiesById::new() };
        let metrics = &self.admin.metrics;
        let ended = metrics.links_closed.all();
        let refused = metrics.links_rejected.all();
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
    pub(super) fn channels(&self) -> EntitiesById<Channel> {
        let channel = |link: &Arc<Link>| (channel_id(link), self.channel(link));
        self.admin.process.links().iter().filter(|link| is_dialled(link)).map(channel).collect()
    }

    /// Returns the accepted links.
    pub(super) fn server_sockets(&self) -> EntitiesById<SocketRef> {
        let socket = |link: &Arc<Link>| (socket_id(link), socket_ref(link));
        self.admin.process.links().iter().filter(|link| !is_dialled(link)).map(socket).collect()
    }

    /// Returns all sockets, including the listening one.
    pub(super) fn sockets(&self) -> EntitiesById<Socket> {
        let listener = self.grpc.map(|at| Socket {
            r#ref: Some(SocketRef { socket_id: LISTENER, name: at.to_string() }),
            data: Some(SocketData::default()),
            local: Some(address(at)),
            ..Socket::default()
        });
        let socket = |link: &Arc<Link>| (socket_id(link), self.socket(link));
        self.admin
            .process
            .links()
            .iter()
            .map(socket)
            .chain(listener.map(|listener| (LISTENER, listener)))
            .collect()
    }

    fn channel(&self, link: &Link) -> Channel {
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

    fn socket(&self, link: &Link) -> Socket {
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

fn is_dialled(link: &Link) -> bool {
    link.ends().is_some_and(|ends| ends.dialled)
}

pub(super) fn socket_ref(link: &Link) -> SocketRef {
    let name = link.peer.node().map_or_else(|| "a server".to_owned(), ToString::to_string);
    SocketRef { socket_id: socket_id(link), name }
}

/// Channels have even numbers, sockets odd ones. Link numbers start with 1.
pub(super) fn channel_id(link: &Link) -> i64 {
    count(link.id.0).saturating_mul(2).saturating_add(2)
}

pub(super) fn socket_id(link: &Link) -> i64 {
    channel_id(link).saturating_add(1)
}

pub(super) fn address(at: SocketAddr) -> Address {
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
