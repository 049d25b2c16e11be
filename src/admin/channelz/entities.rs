//! The links of this process as gRPC's entities.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use prost_types::Timestamp;
use tokio::time::Instant;

use super::wire::channel_connectivity_state::State;
use super::wire::{
    Address, Channel, ChannelConnectivityState, ChannelData, ChannelRef, Security, Server, ServerData,
    ServerRef, Socket, SocketData, SocketRef, address, security,
};
use crate::admin::{Admin, Program};
use crate::policy::plain;
use crate::protocol::{LinkSender, Traffic};

/// What there is to see: the server at which links come in, a channel for each link that was dialled here, and a socket
/// for each link.
#[derive(Debug)]
pub(super) struct Entities {
    admin: Admin,
    grpc: Option<SocketAddr>,
}

/// An entity by its number, which is its own among all.
pub(super) trait Numbered {
    fn number(&self) -> i64;
}

impl Entities {
    pub(super) fn new(admin: Admin, grpc: Option<SocketAddr>) -> Self {
        Self { admin, grpc }
    }

    /// The one server of a pod; an edge has none.
    pub(super) fn servers(&self) -> Vec<Server> {
        let Some(at) = self.grpc else { return Vec::new() };
        let metrics = &self.admin.metrics;
        let (ended, refused) = (metrics.links_ended.all(), metrics.calls_refused.all());
        let now = u64::try_from(metrics.links.get()).unwrap_or_default();
        vec![Server {
            r#ref: Some(ServerRef { server_id: SERVER, name: "links".into() }),
            data: Some(ServerData {
                calls_started: count(now + ended + refused),
                calls_succeeded: count(ended),
                calls_failed: count(refused),
            }),
            listen_socket: vec![SocketRef { socket_id: LISTENER, name: at.to_string() }],
        }]
    }

    /// The links that were dialled here.
    pub(super) fn channels(&self) -> Vec<Channel> {
        self.links().iter().filter(|link| is_dialled(link)).map(|link| self.channel(link)).collect()
    }

    /// The links that came in.
    pub(super) fn server_sockets(&self) -> Vec<SocketRef> {
        self.links().iter().filter(|link| !is_dialled(link)).map(|link| socket_ref(link)).collect()
    }

    /// Every socket, the listening one too.
    pub(super) fn sockets(&self) -> Vec<Socket> {
        let listener = self.grpc.map(|at| Socket {
            r#ref: Some(SocketRef { socket_id: LISTENER, name: at.to_string() }),
            data: Some(SocketData::default()),
            local: Some(address(at)),
            ..Socket::default()
        });
        self.links().iter().map(|link| self.socket(link)).chain(listener).collect()
    }

    fn links(&self) -> Vec<Arc<LinkSender>> {
        match &self.admin.side {
            Program::Cloud(pod) => {
                let nodes =
                    pod.registry.overview(0).linked.into_iter().map(|(_, _, linked, _)| linked.sender);
                nodes.chain(pod.siblings.iter().flat_map(|siblings| siblings.links())).collect()
            }
            Program::Edge(edge) => edge.uplinks.all(),
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
                last_call_started_timestamp: Some(self.time(link.made())),
            }),
            socket_ref: vec![socket_ref(link)],
        }
    }

    fn socket(&self, link: &LinkSender) -> Socket {
        let Traffic { sent_messages, received_messages, .. } = link.traffic();
        let made = Some(self.time(link.made()));
        let (local_stream, remote_stream) = if is_dialled(link) { (made, None) } else { (None, made) };
        let heard = Instant::now().checked_sub(link.silence()).filter(|_| received_messages > 0);
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
                last_message_received_timestamp: heard.map(|at| self.time(at)),
            }),
            local: ends.and_then(|ends| ends.local).map(address),
            remote: ends.and_then(|ends| ends.remote).map(address),
            // Links are TLS always; which suite was agreed is not kept.
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

impl Numbered for Server {
    fn number(&self) -> i64 {
        self.r#ref.as_ref().map_or(0, |one| one.server_id)
    }
}

impl Numbered for Channel {
    fn number(&self) -> i64 {
        self.r#ref.as_ref().map_or(0, |one| one.channel_id)
    }
}

impl Numbered for Socket {
    fn number(&self) -> i64 {
        self.r#ref.as_ref().map_or(0, Numbered::number)
    }
}

impl Numbered for SocketRef {
    fn number(&self) -> i64 {
        self.socket_id
    }
}

fn is_dialled(link: &LinkSender) -> bool {
    link.ends().is_some_and(|ends| ends.dialled)
}

fn socket_ref(link: &LinkSender) -> SocketRef {
    let name = link.peer.node().map_or_else(|| "a pod".to_owned(), ToString::to_string);
    SocketRef { socket_id: channel_id(link).saturating_add(1), name }
}

/// Even numbers are channels, odd ones sockets; links have numbers from 1 on.
fn channel_id(link: &LinkSender) -> i64 {
    count(link.id.0).saturating_mul(2).saturating_add(2)
}

fn address(at: SocketAddr) -> Address {
    let ip_address = match plain(at.ip()) {
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
