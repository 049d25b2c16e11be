//! What a request at a node port asks for: which node, and what of it.

use std::net::{IpAddr, Ipv4Addr};

use http::HeaderMap;
use http::header::{HOST, HeaderName};
use http::request::Parts;
use http::uri::Authority;

use crate::listener::Denial;
use crate::listener::admission::ClientIdentity;
use crate::listener::auth::AccessPolicy;
use crate::listener::forward::message::{TUNNEL_DEST, TUNNEL_HOST};
use crate::listener::https::NodePort;
use tunnel_base::addresses::{AddressBook, LocateError};
use tunnel_base::names::{Host, NodeName, Target};
use tunnel_base::policy::plain;
use tunnel_base::policy::ports::{KUBELET, PortTarget};
use tunnel_base::policy::targets::is_off_limits;

/// Who asks, and what is known where it is asked.
pub(crate) struct RoutingContext<'a> {
    /// The server name of its TLS.
    pub(crate) server_name: Option<&'a str>,
    /// Whether it may say by headers where its requests go.
    pub(crate) trusted: bool,
    /// The port of a Host without one.
    pub(crate) default_port: u16,
    pub(crate) gate: &'a AccessPolicy,
    pub(crate) addresses: &'a AddressBook,
}

/// A host, with or without a port, as a request names it.
struct HostHeader {
    host: Host,
    port: Option<u16>,
    /// Whether that very host is to be dialled: a header says so.
    exact: bool,
}

impl AccessPolicy {
    /// Returns true if the settings name this client: by its certificate, or by a network, and not as one of all clients.
    pub(crate) fn is_trusted_proxy(&self, proof: &ClientIdentity, from: IpAddr) -> bool {
        let by_name = |names: &[String]| {
            let mut globs = self.names.iter().filter(|glob| !glob.is_everyone());
            globs.any(|glob| names.iter().any(|name| glob.matches(name)))
        };
        let by_address =
            self.allow_from.as_ref().is_some_and(|all| !all.holds_everyone() && all.contains(from));
        by_address || matches!(proof, ClientIdentity::Certificate(names) if by_name(names))
    }
}

impl NodePort {
    /// Where a request goes; `None`: nothing in it names a node.
    ///
    /// A client that is trusted may name the node and the target by headers. Else the node is the one that Host names
    /// and that is known; the one of the server name (SNI); the one where the pod of a kubelet's path is; the one whose
    /// address Host is; and at last whatever name Host is. kube-apiserver sends its own Host with exec, attach and
    /// port-forward, and no server name unless it verifies kubelets' certificates.
    pub(crate) fn place(
        &self,
        head: &Parts,
        asker: &RoutingContext<'_>,
    ) -> Result<Option<(NodeName, Target)>, Denial> {
        let (told, dest) = (one(&head.headers, &TUNNEL_HOST)?, one(&head.headers, &TUNNEL_DEST)?);
        if (told.is_some() || dest.is_some()) && !asker.trusted {
            return Err(Denial::Forbidden(UNTRUSTED.to_owned()));
        }
        if dest.is_some() && self.stands_for != PortTarget::Host {
            return Err(Denial::Forbidden(FIXED.to_owned()));
        }
        let told_node = told.map(|told| asker.node_of_header(&told)).transpose()?;
        let named = dest.map(|dest| HostHeader { exact: true, ..dest }).or_else(|| host(&head.headers));
        let found = match told_node {
            Some(node) => Some((node, true)),
            None => self.node(head.uri.path(), named.as_ref(), asker)?,
        };
        let Some((node, is_named)) = found else { return Ok(None) };
        let target = match &self.stands_for {
            PortTarget::Target(target) => target.clone(),
            PortTarget::Host => self.of_node(&node, named.as_ref().filter(|_| is_named), asker)?,
        };
        Ok(Some((node, target)))
    }

    /// The node, and whether what Host names is of it. What a header names is wanted at that very host, so it is of whichever
    /// node: its own, or else the one that the rest of the request tells.
    fn node(
        &self,
        path: &str,
        named: Option<&HostHeader>,
        asker: &RoutingContext<'_>,
    ) -> Result<Option<(NodeName, bool)>, Denial> {
        let of_host = match named.map(|named| &named.host) {
            Some(Host::Ip(ip)) => asker.addresses.node_at(*ip)?.map(|(node, _)| node),
            Some(Host::Name(name)) => asker.named(name),
            None => None,
        };
        let is_name = matches!(named, Some(HostHeader { host: Host::Name(_), .. }));
        if let Some(node) = of_host.as_ref().filter(|node| is_name && self.finder.knows(node)) {
            return Ok(Some((node.clone(), true)));
        }
        let of_server = || {
            let (namespace, server) = server(path)?;
            asker.addresses.node_of_pod(namespace, server)
        };
        let other = asker.server_name.and_then(|name| asker.named(name)).or_else(of_server);
        if let Some(HostHeader { exact: true, .. }) = named {
            return Ok(of_host.or(other).map(|node| (node, true)));
        }
        let is_named = other.is_none() || other == of_host;
        Ok(other.or(of_host).map(|node| (node, is_named)))
    }

    /// The port of the node that a request names: at its loopback if that is listed, else at the node's own address, or
    /// at the one behind the node that is asked for. `None`: a request to its kubelet that names something else.
    fn of_node(
        &self,
        node: &NodeName,
        named: Option<&HostHeader>,
        asker: &RoutingContext<'_>,
    ) -> Result<Target, Denial> {
        let [kubelet, _] = KUBELET;
        let port = named.map_or(kubelet, |named| named.port.unwrap_or(asker.default_port));
        let on_loopback = self.ports.borrow().is_on_loopback(port);
        let ip = match asker.asked(node, named)? {
            // To dial the unspecified address is to dial loopback.
            Some((ip, is_own)) if on_loopback && (is_own || ip.is_unspecified()) => {
                Ipv4Addr::LOCALHOST.into()
            }
            Some((ip, _)) => ip,
            None if on_loopback => Ipv4Addr::LOCALHOST.into(),
            None => {
                let known = asker.addresses.address_of(node);
                known.ok_or_else(|| LocateError::NoAddress(node.clone()))?
            }
        };
        // A node's programs listen there for the node alone, and often need no credential: a proxy there may lend the node's own.
        if is_off_limits(ip) && !(on_loopback && ip.is_loopback()) {
            return Err(Denial::Forbidden(KEPT.to_owned()));
        }
        Ok(Target { host: Host::Ip(ip), port })
    }
}

impl RoutingContext<'_> {
    /// The node of that name in the zone; an address is none.
    fn named(&self, host: &str) -> Option<NodeName> {
        named(host).map(|name| self.gate.own_name(name))
    }

    /// The node that a header names, by its name or its address.
    fn node_of_header(&self, told: &HostHeader) -> Result<NodeName, Denial> {
        let Host::Ip(ip) = told.host else { return Ok(self.gate.own_name(told.host.to_string().parse()?)) };
        let found = self.addresses.node_at(ip)?.map(|(node, _)| node);
        found.ok_or_else(|| {
            Denial::NoNode(Target { host: Host::Ip(ip), port: told.port.unwrap_or(self.default_port) })
        })
    }

    /// The address that is to be dialled at the node, and whether it is the node's own; `None`: whichever it has.
    fn asked(&self, node: &NodeName, named: Option<&HostHeader>) -> Result<Option<(IpAddr, bool)>, Denial> {
        match named {
            Some(HostHeader { host: Host::Ip(ip), exact, .. }) => {
                let ip = plain(*ip);
                let behind = self.addresses.node_at(ip)?.filter(|(of, _)| of == node);
                Ok(behind.map(|(_, is_own)| (ip, is_own)).or(exact.then_some((ip, false))))
            }
            Some(HostHeader { host: Host::Name(name), exact: true, .. })
                if self.named(name).as_ref() != Some(node) =>
            {
                Err(Denial::Request(OTHER_NAME))
            }
            _ => Ok(None),
        }
    }
}

/// A node by a host's name; an address is none.
fn named(host: &str) -> Option<NodeName> {
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_address = host.starts_with('[') || host.parse::<IpAddr>().is_ok();
    host.parse().ok().filter(|_| !is_address)
}

/// What Host names, as the client spells it.
fn host(headers: &HeaderMap) -> Option<HostHeader> {
    let authority = Authority::try_from(headers.get(HOST)?.as_bytes()).ok()?;
    let port = authority.port_u16().filter(|port| *port > 0);
    Some(HostHeader { host: authority.host().parse().ok()?, port, exact: false })
}

/// The value of a header that says where a request goes.
fn one(headers: &HeaderMap, name: &HeaderName) -> Result<Option<HostHeader>, Denial> {
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

/// Namespace and name of the pod that a request to a kubelet is about.
fn server(path: &str) -> Option<(&str, &str)> {
    let mut parts = path.strip_prefix('/')?.split('/');
    let about_a_pod = POD_PATHS.contains(&parts.next()?);
    let (namespace, server) = (parts.next()?, parts.next()?);
    (about_a_pod && !namespace.is_empty() && !server.is_empty()).then_some((namespace, server))
}

/// A kubelet's paths that go on with a pod's namespace and name.
const POD_PATHS: [&str; 6] = ["exec", "attach", "portForward", "containerLogs", "run", "checkpoint"];

const UNTRUSTED: &str =
    "X-Tunnel-Proxy-Host and X-Tunnel-Proxy-Dest count only from clients that names or allow_from lists";

const FIXED: &str = "X-Tunnel-Proxy-Dest counts only at a port whose entry in addr is \"host\"";

const KEPT: &str = "of what a node keeps for itself only the kubelet's ports and those of localhost-proxy-ports are reached, \
                    on its loopback";

const OTHER_NAME: &str =
    "X-Tunnel-Proxy-Dest names another machine than its node: want the node's name, or an address";

const BAD_HEADER: &str =
    "X-Tunnel-Proxy-Host and X-Tunnel-Proxy-Dest want one node or address each, with or without a port";

#[cfg(test)]
mod tests;
