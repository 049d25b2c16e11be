//! Determines the node and target of a request at a node port.

use std::net::{IpAddr, Ipv4Addr};

use http::HeaderMap;
use http::header::{HOST, HeaderName};
use http::request::Parts;
use http::uri::Authority;

use crate::admission::AccessPolicy;
use crate::admission::basis::ClientIdentity;
use crate::admission::denial::Denial;
use crate::admission::forward::headers::{TUNNEL_DEST, TUNNEL_HOST};
use crate::listener::http::NodePortProtocol;
use crate::paths::PathProvider as _;
use tunnel_base::addresses::{AddressBook, LocateError};
use tunnel_base::policy::canonical_ip;
use tunnel_base::policy::off_limits::is_off_limits;
use tunnel_base::policy::ports::{KUBELET, PortTarget};
use tunnel_base::policy::zone::NodeZone;
use tunnel_proto::names::{Host, NodeName, Target};

/// A router of a client's requests at a node port, with or without TLS.
pub(crate) struct NodePortRouter<'a> {
    pub(crate) port: &'a NodePortProtocol,
    /// The server name (SNI) of the client's TLS connection; `None` without TLS.
    pub(crate) server_name: Option<&'a str>,
    /// Whether the client may choose node and target by headers.
    pub(crate) may_name_target: bool,
    /// The port for a Host header without one.
    pub(crate) default_port: u16,
    /// The zone in which nodes have a second name.
    pub(crate) zone: &'a NodeZone,
    pub(crate) addresses: &'a AddressBook,
}

/// A host with an optional port, as named by a request.
struct HostHeader {
    host: Host,
    port: Option<u16>,
    /// Whether exactly this host must be dialled, because a header names it.
    exact: bool,
}

impl AccessPolicy {
    /// Returns true if the config lists this client by its certificate or by a network. Entries that match all clients
    /// are ignored.
    pub(crate) fn is_trusted_proxy(&self, proof: &ClientIdentity, from: IpAddr) -> bool {
        let by_name = |names: &[String]| {
            let mut globs = self.names.iter().filter(|glob| !glob.matches_everything());
            globs.any(|glob| names.iter().any(|name| glob.matches(name)))
        };
        let by_address =
            self.allow_from.as_ref().is_some_and(|all| !all.contains_all_addresses() && all.contains(from));
        by_address || matches!(proof, ClientIdentity::Certificate(certificate) if by_name(&certificate.names))
    }
}

impl NodePortRouter<'_> {
    /// Returns the node and target of a request, or `None` if nothing in it names a node.
    ///
    /// A trusted client may name the node and the target by headers. Otherwise the first match determines the node:
    ///
    /// 1. the Host header, if it names a connected node;
    /// 2. the server name (SNI);
    /// 3. the pod in a path of the kubelet's API;
    /// 4. the address in the Host header;
    /// 5. any name in the Host header.
    ///
    /// For exec, attach and port-forward, kube-apiserver sends its own Host header. It sends a server name only if it
    /// verifies kubelets' certificates.
    pub(crate) fn route(&self, head: &Parts) -> Result<Option<(NodeName, Target)>, Denial> {
        let tunnel_host = single_header(&head.headers, &TUNNEL_HOST)?;
        let dest = single_header(&head.headers, &TUNNEL_DEST)?;
        if (tunnel_host.is_some() || dest.is_some()) && !self.may_name_target {
            return Err(Denial::Forbidden(UNTRUSTED_HEADERS.to_owned()));
        }
        if dest.is_some() && self.port.stands_for != PortTarget::Host {
            return Err(Denial::Forbidden(DEST_NOT_ALLOWED.to_owned()));
        }
        let header_node = tunnel_host.map(|tunnel_host| self.node_of_header(&tunnel_host)).transpose()?;
        let named = dest.map(|dest| HostHeader { exact: true, ..dest }).or_else(|| host(&head.headers));
        let found = match header_node {
            Some(node) => Some((node, true)),
            None => self.node(head.uri.path(), named.as_ref())?,
        };
        let Some((node, is_named)) = found else { return Ok(None) };
        let target = match &self.port.stands_for {
            PortTarget::Target(target) => target.clone(),
            PortTarget::Host => self.of_node(&node, named.as_ref().filter(|_| is_named))?,
        };
        Ok(Some((node, target)))
    }

    /// Returns the node, and whether the named host belongs to it. A host named by a header must be dialled exactly, so
    /// it always belongs: to the node of that host or, without one, to the node that the rest of the request names.
    fn node(&self, path: &str, named: Option<&HostHeader>) -> Result<Option<(NodeName, bool)>, Denial> {
        let of_host = match named.map(|named| &named.host) {
            Some(Host::Ip(ip)) => self.addresses.node_at(*ip)?.map(|(node, _)| node),
            Some(host @ Host::Name(_)) => self.node_by_name(host),
            None => None,
        };
        let is_name = matches!(named, Some(HostHeader { host: Host::Name(_), .. }));
        if let Some(node) = of_host.as_ref().filter(|node| is_name && self.port.finder.knows(node)) {
            return Ok(Some((node.clone(), true)));
        }
        let sni = self.server_name.and_then(|name| name.parse().ok());
        let other = sni.and_then(|name| self.node_by_name(&name)).or_else(|| {
            let (namespace, server) = pod_of_path(path)?;
            self.addresses.node_of_pod(namespace, server)
        });
        let is_fit = |node: &NodeName| other.as_ref().is_none_or(|other| other == node);
        let of_host = of_host.or_else(|| self.port.finder.node_named_by_address(&named?.host).filter(is_fit));
        if let Some(HostHeader { exact: true, .. }) = named {
            return Ok(of_host.or(other).map(|node| (node, true)));
        }
        let is_named = other.is_none() || other == of_host;
        Ok(other.or(of_host).map(|node| (node, is_named)))
    }

    /// Returns the node that a header names by its name or address.
    fn node_of_header(&self, tunnel_host: &HostHeader) -> Result<NodeName, Denial> {
        let Host::Ip(ip) = tunnel_host.host else {
            return Ok(self.zone.node(tunnel_host.host.to_string().parse()?));
        };
        let known = self.addresses.node_at(ip)?.map(|(node, _)| node);
        known.or_else(|| self.port.finder.node_named_by_address(&tunnel_host.host)).ok_or_else(|| {
            let port = tunnel_host.port.unwrap_or(self.default_port);
            Denial::NoNode(Target { host: Host::Ip(ip), port })
        })
    }

    /// Returns the target at the node for the requested port.
    ///
    /// A listed port is dialled on loopback, other ports at the node's own address or at the requested address behind
    /// the node. `named` is `None` for a request that names something other than the node; it goes to the kubelet.
    fn of_node(&self, node: &NodeName, named: Option<&HostHeader>) -> Result<Target, Denial> {
        let [kubelet, _] = KUBELET;
        let port = named.map_or(kubelet, |named| named.port.unwrap_or(self.default_port));
        let on_loopback = self.port.ports.borrow().is_on_loopback(port);
        let ip = match self.requested_ip(node, named)? {
            // Dialling the unspecified address means dialling loopback.
            Some((ip, is_own)) if on_loopback && (is_own || ip.is_unspecified()) => {
                Ipv4Addr::LOCALHOST.into()
            }
            Some((ip, _)) => ip,
            None if on_loopback => Ipv4Addr::LOCALHOST.into(),
            None => {
                let known = self.addresses.address_of(node);
                known.ok_or_else(|| LocateError::NoAddress(node.clone()))?
            }
        };
        // Programs that listen there serve only the node itself, often without credentials: a proxy may even add the
        // node's own.
        if is_off_limits(ip) && !(on_loopback && ip.is_loopback()) {
            return Err(Denial::Forbidden(LOCAL_ADDRESS.to_owned()));
        }
        Ok(Target { host: Host::Ip(ip), port })
    }

    /// Returns the node of that name, which may be a name in the zone.
    fn node_by_name(&self, host: &Host) -> Option<NodeName> {
        host.node().map(|name| self.zone.node(name))
    }

    /// Returns the address to dial at the node, and whether it is the node's own. Returns `None` for any address of the
    /// node.
    fn requested_ip(
        &self,
        node: &NodeName,
        named: Option<&HostHeader>,
    ) -> Result<Option<(IpAddr, bool)>, Denial> {
        match named {
            Some(HostHeader { host: Host::Ip(ip), exact, .. }) => {
                let ip = canonical_ip(*ip);
                let behind = self.addresses.node_at(ip)?.filter(|(of, _)| of == node);
                let behind = behind.or_else(|| (node.address() == Some(ip)).then(|| (node.clone(), true)));
                Ok(behind.map(|(_, is_own)| (ip, is_own)).or(exact.then_some((ip, false))))
            }
            Some(HostHeader { host: host @ Host::Name(_), exact: true, .. })
                if self.node_by_name(host).as_ref() != Some(node) =>
            {
                Err(Denial::Request(OTHER_NAME))
            }
            _ => Ok(None),
        }
    }
}

/// Returns the host in the Host header, as the client spells it.
fn host(headers: &HeaderMap) -> Option<HostHeader> {
    let authority = Authority::try_from(headers.get(HOST)?.as_bytes()).ok()?;
    let port = authority.port_u16().filter(|port| *port > 0);
    Some(HostHeader { host: authority.host().parse().ok()?, port, exact: false })
}

/// Returns the value of a header that names a request's node or target.
fn single_header(headers: &HeaderMap, name: &HeaderName) -> Result<Option<HostHeader>, Denial> {
    let mut all = headers.get_all(name).iter();
    let Some(first) = all.next() else { return Ok(None) };
    let text = first.to_str().unwrap_or_default().trim();
    let named = match text.parse::<Target>() {
        Ok(Target { host, port }) => Some(HostHeader { host, port: Some(port), exact: false }),
        Err(_) => text.parse().ok().map(|host| HostHeader { host, port: None, exact: false }),
    };
    match named {
        Some(named) if all.next().is_none() => Ok(Some(named)),
        _ => Err(Denial::Request(BAD_HEADER)),
    }
}

/// Returns namespace and name of the pod in a path of the kubelet's API.
fn pod_of_path(path: &str) -> Option<(&str, &str)> {
    let mut parts = path.strip_prefix('/')?.split('/');
    let about_a_pod = POD_PATHS.contains(&parts.next()?);
    let namespace = parts.next()?;
    let server = parts.next()?;
    (about_a_pod && !namespace.is_empty() && !server.is_empty()).then_some((namespace, server))
}

/// First segments of the kubelet's paths that continue with a pod's namespace and name.
const POD_PATHS: [&str; 6] = ["exec", "attach", "portForward", "containerLogs", "run", "checkpoint"];

const UNTRUSTED_HEADERS: &str =
    "X-Tunnel-Proxy-Host and X-Tunnel-Proxy-Dest are allowed only for clients listed in names or allow_from";

const DEST_NOT_ALLOWED: &str =
    "X-Tunnel-Proxy-Dest is allowed only at a port with the entry \"host\" in addr";

const LOCAL_ADDRESS: &str = "addresses local to a node are not reachable, except kubelet ports and localhost-proxy-ports on its loopback";

const OTHER_NAME: &str = "X-Tunnel-Proxy-Dest names another machine; expected the node's name or an address";

const BAD_HEADER: &str =
    "X-Tunnel-Proxy-Host and X-Tunnel-Proxy-Dest: expected one node or address, with an optional port";

#[cfg(test)]
mod tests;
