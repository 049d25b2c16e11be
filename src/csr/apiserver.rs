//! By what kube-apiserver is reached: its signers' authority is often the one by which it is believed, so that a server with
//! one of these could pose as it.

use std::collections::BTreeSet;
use std::net::IpAddr;

/// The names and addresses of kube-apiserver, as far as they are known.
#[derive(Debug, Clone, Default)]
pub struct Apiserver(BTreeSet<String>);

impl Apiserver {
    /// `hosts` are known beside the names that it has in every cluster. Those of loopback do not count: who listens there
    /// has the machine already, and each pod's certificate has them.
    pub fn new(hosts: impl IntoIterator<Item = String>) -> Self {
        let hosts = hosts.into_iter().map(|host| plain(&host));
        Self(hosts.filter(|host| !is_loopback(host)).collect())
    }

    /// Whether this name or address, or one that it covers, is kube-apiserver's.
    pub fn is_at(&self, name: &str) -> bool {
        let name = plain(name);
        name.contains('*')
            || name == "kubernetes"
            || name.starts_with("kubernetes.default")
            || self.0.contains(&name)
    }
}

/// In the one form in which two of them are compared: IPv4 that is dressed as IPv6 is IPv4.
fn plain(host: &str) -> String {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let name = bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase();
    name.parse::<IpAddr>().map_or(name, |ip| ip.to_canonical().to_string())
}

fn is_loopback(host: &str) -> bool {
    host.parse::<IpAddr>().map_or(host == "localhost", |ip| ip.is_loopback())
}
