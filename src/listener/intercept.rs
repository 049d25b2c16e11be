//! The intercept listener: connections to nodes' addresses that the kernel redirects here. Clients are unaware of it:
//! they connected to the node, and the kernel reports the original destination.

mod claim_log;
mod node_searches;
mod presence;
mod reconciler;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::str::FromStr;
use std::sync::Arc;

use bytes::Bytes;
use educe::Educe;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;

use crate::admission::denial::Denial;
use crate::admission::{Admission, AdmissionOutcome, ListenerProtocol};
use crate::config;
use crate::config::access::{AccessConfig, AuthMethods};
use crate::config::listen_tls::{PortTlsState, Tls};
use crate::config::table::ConfigTableReader;
use crate::intercept::{InterceptError, InterceptRules, NftTable, original_destination};
use crate::listener::intercept::presence::InterceptedAddresses;
use crate::listener::{BoundPort, ListenerConfig, ListenerConfigs, ListenerKind, single};
use crate::paths::node_not_found::NodeNotFound;
use crate::route::RouteError;
use crate::startup::{NotPrepared, StartupErrorCollector, StartupErrorKind};
use tunnel_base::policy::ports::{ConfigMapPorts, KUBELET};
use tunnel_base::policy::{Networks, canonical_ip};
use tunnel_base::serde_forms::ConfigPort;
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::mark;
use tunnel_net::socket::Connection;
use tunnel_proto::frame::SessionCategory;
use tunnel_proto::names::{NodeName, Target};
use tunnel_proto::serde_as_text;

/// `[server.intercept]`: interception by nftables of what programs on this server's host send to the addresses of edge
/// nodes. It is redirected through the node's link. A kube-apiserver or a metrics-server on this host reaches kubelets
/// at their own addresses, without a flag or DNS, and TLS stays end to end. Requires the host's network (hostNetwork in
/// Kubernetes), CAP_NET_ADMIN, Linux 5.12 and the program nft. The node of an address comes from the first source that
/// has it: `[server.addresses]`, the node's line in the token file (node:token ip=10.0.0.7), Kubernetes. If two sources
/// of one rank contradict each other, neither applies, with a warning. Default: nothing is intercepted. To the node, a
/// client on this host has the host's address. It cannot send a password: if auth is "basic" in `[server.connect]`, set
/// auth = "none" here. No load balancer is in front of these ports: proxy_protocol is not inherited.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Educe)]
#[educe(Default)]
#[serde(default)]
pub struct InterceptConfig {
    /// Networks of the addresses of edge nodes. Nothing outside of them is intercepted, nor the address of a Kubernetes
    /// pod, a Service, another server, or this host. Required.
    ///
    /// Required: `["10.0.0.0/16", "fd00:10::/64"]`
    pub networks: Networks,
    /// Intercepted ports of nodes (1 to 65535). The ports of `[server.node_ports]` are added.
    #[educe(Default = KUBELET.map(ConfigPort).into())]
    pub ports: BTreeSet<ConfigPort<1>>,
    /// Networks of other machines. Their traffic is intercepted too, if this host forwards it.
    pub forwarded_networks: Networks,
    /// Port at 127.0.0.1 and ::1 that intercepted traffic is redirected to; the next port, at all addresses, is for
    /// forwarded traffic. 0 selects free ports.
    #[educe(Default = ConfigPort(0))]
    pub port: ConfigPort<0>,
    /// Name of the nftables table (family inet): a letter, then letters, digits and '_'. Must be unique on the host.
    #[serde(deserialize_with = "table_name")]
    #[educe(Default = "tunnel".to_owned())]
    pub table: String,
    /// Mark (SO_MARK) of this server's own connections, which are never intercepted, and the mask of bits that are
    /// compared. Other programs on the host that use marks must not use these bits.
    // A bit that neither Kubernetes nor common pod networks use.
    #[educe(Default = MarkBits { mark: 0x40, mask: 0x40 })]
    pub mark: MarkBits,
    /// `HOST_IP`: the address of the machine on which Kubernetes runs this pod.
    #[serde(skip)]
    pub host_ip: Option<IpAddr>,
    /// `POD_IP`: another address of this machine.
    #[serde(skip)]
    pub pod_ip: Option<IpAddr>,
    /// Access rules.
    #[serde(skip)]
    pub access: AccessConfig,
}

/// Some bits of a connection's mark, such as `0x40/0x40`: their values and their mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, derive_more::Display)]
#[display("{mark:#x}/{mask:#x}")]
pub struct MarkBits {
    /// Values of the bits.
    pub mark: u32,
    /// The bits that apply.
    pub mask: u32,
}

pub(crate) const KIND: ListenerKind = ListenerKind { name: "intercept", by_address: true, read };

/// Reads the table.
fn read(mut table: ConfigTableReader<'_>, inherited: &mut AccessConfig) -> ListenerConfigs {
    let env = table.env;
    let mut intercept: InterceptConfig = table.fields();
    if intercept.networks.is_empty() && table.is_present() && !table.is_wrong("networks") {
        let found = table.has("networks").then(|| "an empty list".to_owned());
        let expected = "list the networks of edge nodes' addresses, as in networks = [\"10.0.0.0/16\"]: \
                      nothing else is intercepted";
        table.error("networks", found, expected);
    }
    // There is no load balancer between the kernel and its listeners.
    let default = AccessConfig { proxy_protocol: Networks::default(), ..inherited.clone() };
    intercept.access = AccessConfig::read(&mut table, AUTH_METHODS, &default);
    let InterceptConfig { access, forwarded_networks, .. } = &intercept;
    if !forwarded_networks.is_empty() {
        let at = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), intercept.port.0);
        // For traffic through this host, these networks restrict the clients.
        let fenced = AccessConfig {
            allow_from: access.allow_from.clone().or_else(|| Some(forwarded_networks.clone())),
            ..access.clone()
        };
        let key = table.key("forwarded_networks");
        let reached = "the intercepted ports of all edge nodes";
        fenced.warn_if_open(key, at, AUTH_METHODS, reached, &mut table.report());
    }
    intercept.host_ip = config::address(&table, "HOST_IP", env.host_ip.as_deref());
    intercept.pod_ip = env.pod_ip.as_deref().and_then(|ip| ip.parse().ok());
    table.close_optional(&intercept);
    single((!intercept.networks.is_empty()).then_some(intercept))
}

/// Reads a name that nft accepts without quotes.
fn table_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    let is_one = name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.len() <= MAX_NAME
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let expected = "expected a letter, then letters, digits and '_', at most 64 in total";
    if is_one { Ok(name) } else { Err(D::Error::custom(expected)) }
}

serde_as_text!(MarkBits);

impl FromStr for MarkBits {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(digits) if !digits.starts_with('+') => u32::from_str_radix(digits, 16).ok(),
            Some(_) => None,
            None => text.parse().ok(),
        };
        let (mark, mask) = text.split_once('/').unwrap_or((text, "0xffffffff"));
        match (number(mark), number(mask)) {
            (Some(mark), Some(mask)) if mark != 0 && mark & !mask == 0 => Ok(Self { mark, mask }),
            _ => {
                Err("expected a mark and the mask of its bits, as in \"0x40/0x40\", and at least one bit set")
            }
        }
    }
}

/// Intercepted traffic has the target's protocol, so clients cannot be asked for a password or a certificate.
const AUTH_METHODS: AuthMethods = AuthMethods { password: false, tls: PortTlsState::Unsupported };

const MAX_NAME: usize = 64;

impl ListenerConfig for InterceptConfig {
    fn access(&self) -> (&str, &AccessConfig) {
        (KEY, &self.access)
    }

    /// Also claims the table, and marks all sockets of this process from now on.
    fn bind(&self, _tls: &Tls, startup: &mut StartupErrorCollector) -> Result<Vec<BoundPort>, NotPrepared> {
        let is_on_host = check_host_network(self.host_ip, startup);
        let listeners = InterceptListeners::bind(self, startup)?;
        is_on_host?;
        let table = match NftTable::claim(listeners.rules(self)) {
            Ok(table) => table,
            Err(why) => {
                startup.error(kind(&why), KEY, why.to_string());
                return Err(NotPrepared);
            }
        };
        mark::set(self.mark.mark);
        let intercepted = Arc::new(InterceptedAddresses::default());
        // The first port starts the interception for all.
        let mut prepared = Some((table, self.clone()));
        let all = [Some(listeners.v4), listeners.v6, listeners.forwarded].into_iter().flatten();
        let ports = all.map(|listener| {
            let intercepted = intercepted.clone();
            let prepared = prepared.take();
            BoundPort::tcp(SessionCategory::Tcp, listener, move |deps| {
                if let Some((table, settings)) = prepared {
                    reconciler::spawn(table, intercepted.clone(), settings, deps);
                }
                Intercept { intercepted, ports: deps.ports.clone() }
            })
        });
        Ok(ports.collect())
    }
}

/// The listeners to which intercepted connections are redirected.
struct InterceptListeners {
    v4: TcpListenSocket,
    /// `None` if this host has no IPv6.
    v6: Option<TcpListenSocket>,
    /// For traffic of other machines that this host forwards.
    forwarded: Option<TcpListenSocket>,
}

impl InterceptListeners {
    fn bind(settings: &InterceptConfig, startup: &mut StartupErrorCollector) -> Result<Self, NotPrepared> {
        let key = format!("{KEY}.networks");
        let ConfigPort(port) = settings.port;
        let mut bind = |ip: IpAddr| startup.bind(&key, SocketAddr::new(ip, port));
        let v4 = bind(Ipv4Addr::LOCALHOST.into());
        let v6 = has_v6().then(|| bind(Ipv6Addr::LOCALHOST.into())).transpose();
        // On a separate port: where one is configured, it is already in use on loopback.
        let any: IpAddr = if has_v6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let at = SocketAddr::new(any, port.checked_add(u16::from(port > 0)).ok_or(NotPrepared)?);
        let forwarded = (!settings.forwarded_networks.is_empty()).then(|| startup.bind(&key, at));
        Ok(Self { v4: v4?, v6: v6?, forwarded: forwarded.transpose()? })
    }

    fn rules(&self, settings: &InterceptConfig) -> InterceptRules {
        let port = |listener: &TcpListenSocket| listener.at().port();
        InterceptRules {
            table: settings.table.clone(),
            mark: settings.mark.mark,
            mask: settings.mark.mask,
            v4: port(&self.v4),
            v6: self.v6.as_ref().map(port),
            forwarded: self
                .forwarded
                .as_ref()
                .map(|listener| (settings.forwarded_networks.iter().copied().collect(), port(listener))),
        }
    }
}

fn has_v6() -> bool {
    UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
}

/// Fails if this pod is not on its host's network, which is recorded. Accepts an unknown host.
fn check_host_network(host: Option<IpAddr>, startup: &mut StartupErrorCollector) -> Result<(), NotPrepared> {
    let Some(host) = host else { return Ok(()) };
    let own = LocalAddresses::of_interfaces(Vec::new()).now().all;
    if own.contains(&host) {
        return Ok(());
    }
    let why = format!(
        "this pod is not on its host's network: HOST_IP is {host}, which is not a local address; set hostNetwork: \
         true in its manifest"
    );
    startup.error(StartupErrorKind::Permission, KEY, why);
    Err(NotPrepared)
}

fn kind(why: &InterceptError) -> StartupErrorKind {
    match why {
        InterceptError::Denied => StartupErrorKind::Permission,
        InterceptError::Owned(_) => StartupErrorKind::Port,
        InterceptError::Foreign(_) => StartupErrorKind::Config,
        InterceptError::Program(_)
        | InterceptError::KernelTooOld
        | InterceptError::Timeout
        | InterceptError::Failed(_) => StartupErrorKind::System,
    }
}

const KEY: &str = "server.intercept";

/// A listener to which the kernel redirects connections meant for nodes.
#[derive(Debug)]
struct Intercept {
    intercepted: Arc<InterceptedAddresses>,
    /// The ports that are served on the nodes' loopback.
    ports: watch::Receiver<ConfigMapPorts>,
}

/// The node that an intercepted address belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct InterceptedNode {
    /// The node.
    node: NodeName,
    /// Time of the node's disconnection, if it is connected to no server. Its connections are then refused at once.
    left: Option<Instant>,
}

impl InterceptedNode {
    /// Returns the node, or a denial if it is disconnected.
    fn reachable(self) -> Result<NodeName, Denial> {
        let Some(left) = self.left else { return Ok(self.node) };
        let missing = NodeNotFound { seen: Some(left.elapsed()), ..NodeNotFound::default() };
        Err(RouteError::Offline { node: self.node, missing }.into())
    }
}

impl Intercept {
    /// Returns the node and target that the client meant. The error is a fixed label for a connection that was not
    /// intercepted on its way to a node.
    fn requested(
        &self,
        socket: &TcpStream,
        client: IpAddr,
    ) -> Result<(InterceptedNode, Target), &'static str> {
        let meant = original_destination(socket, client).map_err(|cause| {
            debug!(error = %cause, "original destination unknown");
            "not_redirected"
        })?;
        let meant = SocketAddr::new(canonical_ip(meant.ip()), meant.port());
        let here = socket.local_addr().map(|at| SocketAddr::new(canonical_ip(at.ip()), at.port()));
        if here.is_ok_and(|here| here == meant) {
            return Err("not_redirected");
        }
        let node = self.intercepted.nodes().get(&meant.ip()).cloned().ok_or("not_a_nodes_address")?;
        let target = at(&node.node, meant, self.ports.borrow().is_on_loopback(meant.port()));
        Ok((node, target))
    }
}

/// Returns the target to request from the node's edge. A port that may be open only on loopback is requested by the
/// node's name, which stands for its loopback and its addresses.
fn at(node: &NodeName, meant: SocketAddr, on_loopback: bool) -> Target {
    if on_loopback { node.target(meant.port()) } else { meant.into() }
}

impl ListenerProtocol<TcpStream> for Intercept {
    async fn handshake(&self, socket: TcpStream, admission: &mut Admission) -> AdmissionOutcome {
        // Reset on failure, because TCP cannot report a denial and a normal close would look like an empty response.
        socket.set_reset_on_drop(true);
        let (node, target) = match self.requested(&socket, admission.client.from.ip()) {
            Ok(requested) => requested,
            Err(reason) => return AdmissionOutcome::Failed { reason, socket: None },
        };
        match admission.open_at(socket.remote_reset(), node.reachable(), &target).await {
            None => AdmissionOutcome::Failed { reason: "reset_while_opening", socket: None },
            Some(Err(_)) => AdmissionOutcome::Closed(None),
            Some(Ok(session)) => {
                AdmissionOutcome::Opened { session, socket: Box::new(socket), buffered: Bytes::new() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    #[test]
    fn intercepted_loopback_ports_are_dialled_by_node_name_and_others_by_address() {
        for (meant, dialled) in [
            ("10.0.0.7:10250", "edge7:10250"),
            ("[fd00::7]:10255", "edge7:10255"),
            ("10.0.0.7:10266", "edge7:10266"),
            ("10.0.0.7:9100", "10.0.0.7:9100"),
            ("[fd00::7]:9100", "[fd00::7]:9100"),
        ] {
            let meant: SocketAddr = meant.parse().unwrap();
            let on_loopback = ConfigMapPorts::default().is_on_loopback(meant.port());
            assert_eq!(at(&node("edge7"), meant, on_loopback).to_string(), dialled);
        }
        let named_so = "10.0.0.7:10250".parse().unwrap();
        assert_eq!(at(&node("10.0.0.7"), named_so, true).to_string(), "localhost:10250");
    }

    #[tokio::test(start_paused = true)]
    async fn an_intercepted_node_that_disconnected_is_denied_with_its_last_seen_time() {
        let intercepted = InterceptedNode { node: node("edge7"), left: Some(Instant::now()) };
        tokio::time::advance(Duration::from_secs(3)).await;
        let denial = intercepted.reachable().unwrap_err();
        assert_eq!(denial.to_string(), "node edge7 is not connected, last seen 3 s ago");
        assert_eq!(InterceptedNode { node: node("edge7"), left: None }.reachable().unwrap(), node("edge7"));
    }
}
