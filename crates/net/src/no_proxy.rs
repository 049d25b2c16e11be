//! The targets that are reached without the proxy, from `NO_PROXY`.

use std::net::IpAddr;

use ipnet::IpNet;

use tunnel_proto::names::{Host, Target};

/// The rules of `NO_PROXY`, with Go's semantics.
#[derive(Debug, Clone)]
pub(crate) struct NoProxyRules(Vec<NoProxyRule>);

/// A rule of `NO_PROXY`: targets that are dialled without the proxy.
#[derive(Debug, Clone)]
enum NoProxyRule {
    Everything,
    Net(IpNet),
    Ip(IpAddr, Option<u16>),
    Name {
        /// The name with a leading dot, which is the suffix of names below it.
        suffix: String,
        /// Whether the rule includes the name itself, besides the names below it.
        itself: bool,
        port: Option<u16>,
    },
}

impl NoProxyRules {
    /// Parses a comma-separated list of `*`, networks, addresses and names. Other items are ignored.
    ///
    /// A name includes the names below it; with a leading dot or `*.` it includes only those. Addresses and names may
    /// have a port.
    pub(crate) fn new(list: &str) -> Self {
        Self(list.split(',').filter_map(|item| NoProxyRule::new(&item.trim().to_ascii_lowercase())).collect())
    }

    /// Returns true if a target is reached directly. Loopback always is.
    pub(crate) fn covers(&self, target: &Target) -> bool {
        let own = match &target.host {
            Host::Ip(ip) => ip.is_loopback(),
            Host::Name(name) => &**name == "localhost",
        };
        own || self.0.iter().any(|rule| rule.covers(target))
    }
}

impl NoProxyRule {
    fn new(item: &str) -> Option<Self> {
        if item == "*" {
            return Some(Self::Everything);
        }
        if let Ok(net) = item.parse() {
            return Some(Self::Net(net));
        }
        let (host, port) = split_port(item);
        if let Ok(ip) = host.parse() {
            return Some(Self::Ip(ip, port));
        }
        let host = host.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(host);
        let below = host.strip_prefix('.');
        let name = below.unwrap_or(host);
        (!name.is_empty()).then(|| Self::Name { suffix: format!(".{name}"), itself: below.is_none(), port })
    }

    fn covers(&self, target: &Target) -> bool {
        let at_port = |port: &Option<u16>| port.is_none_or(|port| port == target.port);
        match (self, &target.host) {
            (Self::Everything, _) => true,
            (Self::Net(net), Host::Ip(ip)) => net.contains(&ip.to_canonical()),
            (Self::Ip(only, port), Host::Ip(ip)) => only.to_canonical() == ip.to_canonical() && at_port(port),
            (Self::Name { suffix, itself, port }, Host::Name(name)) => {
                let is_it = *itself && suffix.strip_prefix('.') == Some(name);
                (is_it || name.ends_with(suffix)) && at_port(port)
            }
            _ => false,
        }
    }
}

/// Removes port and brackets. An IPv6 address without brackets has no port.
fn split_port(item: &str) -> (&str, Option<u16>) {
    let (host, port) = match item.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, port.parse().ok()),
        _ => (item, None),
    };
    (host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host), port)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn direct(list: &str, target: &str) -> bool {
        NoProxyRules::new(list).covers(&target.parse().unwrap())
    }

    #[test]
    fn no_proxy_names_cover_their_subdomains() {
        for (list, target, expected) in [
            ("cloud.io", "cloud.io:443", true),
            ("cloud.io", "tunnel.Cloud.io:443", true),
            ("cloud.io", "mycloud.io:443", false),
            (".cloud.io", "tunnel.cloud.io:443", true),
            (".cloud.io", "cloud.io:443", false),
            ("*.cloud.io", "tunnel.cloud.io:443", true),
            ("a.b, CLOUD.io:9000", "cloud.io:9000", true),
            ("cloud.io:9000", "cloud.io:9001", false),
            ("", "cloud.io:443", false),
            (",,.,", "cloud.io:443", false),
        ] {
            assert_eq!(direct(list, target), expected, "{list} {target}");
        }
    }

    #[test]
    fn no_proxy_addresses_and_networks_cover_only_addresses() {
        for (list, target, expected) in [
            ("*", "10.0.0.1:1", true),
            ("*", "a.b:1", true),
            ("10.0.0.0/8", "10.1.2.3:443", true),
            ("10.0.0.0/8", "11.1.2.3:443", false),
            ("10.0.0.0/8", "a.b:443", false),
            ("192.0.2.1", "192.0.2.1:443", true),
            ("192.0.2.1:80", "192.0.2.1:443", false),
            ("2001:db8::1", "[2001:db8::1]:443", true),
            ("[2001:db8::1]:443", "[2001:db8::1]:443", true),
            ("[2001:db8::1]:80", "[2001:db8::1]:443", false),
            ("2001:db8::/32", "[2001:db8::1]:443", true),
        ] {
            assert_eq!(direct(list, target), expected, "{list} {target}");
        }
    }

    #[test]
    fn loopback_targets_never_use_the_proxy() {
        assert!(direct("", "localhost:1") && direct("", "127.8.0.1:1") && direct("", "[::1]:1"));
    }
}
