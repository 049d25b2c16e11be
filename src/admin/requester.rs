//! The requester, and whether it may see private data.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use http::header::HOST;
use http::{HeaderMap, Request};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};

use crate::admin::nodes::NodesResponse;
use tunnel_base::policy::grants::{FOR_EVER, Rights};
use tunnel_base::policy::{NodeGlob, Rule, canonical_ip};
use tunnel_base::serde_forms::ConfigPort;
use tunnel_base::unix_time;
use tunnel_net::tls::client_certificate::ClientCertificate;
use tunnel_proto::names::{UserDevice, UserName};

/// A request at an admin port or over a link, and who has sent it.
#[derive(Debug)]
pub struct AdminRequest<'a> {
    /// The request.
    pub http: Request<Incoming>,
    /// Its sender.
    pub requester: &'a AdminRequester,
}

/// The sender of a request at an admin port; decides which paths it may use.
#[derive(derive_more::Display, Debug, Clone)]
pub enum AdminRequester {
    /// A client at this address, with the certificate that it has presented.
    #[display("{_0}")]
    Address(IpAddr, Option<ClientCertificate>),
    /// A user of this machine at the admin socket, by user id.
    #[display("uid={_0}")]
    LocalUser(u32),
    /// A user who has proved this name by a certificate or a password.
    User(String),
    /// A user's program, over its link.
    #[display("{}", _0.device)]
    Linked(Arc<LinkedUser>),
}

/// The user whose program has sent a request over its link, with her rights at that moment.
#[derive(Debug, Clone)]
pub struct LinkedUser {
    /// The user and her device, as the link has proved them.
    pub device: UserDevice,
    /// Address of the device.
    pub from: SocketAddr,
    /// What users may reach, and who may send requests of operators.
    pub rights: Rights,
    /// Whether she has sent too many requests within a second.
    pub is_over_rate: bool,
    /// Set once her device leaves: then its link ends after the answer.
    pub leaves: Arc<AtomicBool>,
    /// The last second (Unix time) for which her certificate is valid; `None` for a token.
    pub until: Option<u64>,
}

/// The response to `GET /whoami` over a user's link. Times are seconds since 1970, by the clock of the server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WhoamiResponse {
    /// Time of this response.
    pub now: f64,
    /// The user.
    pub user: String,
    /// Her device.
    pub device: String,
    /// Whether she may send the requests of operators.
    pub is_admin: bool,
    /// End of her certificate, if she has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
    /// What she may reach: anything that one of these has.
    pub reach: Vec<Reach>,
    /// The servers of her `client.toml`, which the command adds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<String>,
}

/// Nodes and ports that a user may reach.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reach {
    /// Patterns of nodes; `*` is all.
    pub nodes: Vec<String>,
    /// Ports; none is all.
    pub ports: Vec<u16>,
    /// Whether a pattern with '*' also covers nodes that came by a join key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with_join_keys: Option<bool>,
    /// End of the right; absent if nothing ends it but a change of the servers' config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
}

impl LinkedUser {
    pub(super) fn is_admin(&self) -> bool {
        self.rights.is_admin(self.device.user.as_str())
    }

    /// Returns why she may not send a request of operators.
    pub(super) fn refusal(&self) -> String {
        format!(
            "user {} is not in admins of [server.clients] of this server; all users may run nodes, whoami and leave\n",
            self.device.user
        )
    }

    /// Returns who she is, and what she may reach.
    pub(super) fn whoami(&self, now: f64) -> WhoamiResponse {
        let UserDevice { user, device } = &self.device;
        let from = self.from.ip();
        let reach = |nodes: Option<&Vec<_>>, ports: &Option<Vec<ConfigPort<1>>>, keys, until: u64| Reach {
            nodes: match nodes {
                Some(globs) => globs.iter().map(NodeGlob::to_string).collect(),
                None => vec!["*".to_owned()],
            },
            ports: ports.iter().flatten().map(|port| port.0).collect(),
            with_join_keys: Some(keys),
            until: Some(until).filter(|end| *end < FOR_EVER),
        };
        let rules = self.rights.rules.of(user.as_str(), from);
        let rules = rules.map(|Rule { nodes, ports, .. }| reach(nodes.as_ref(), ports, true, FOR_EVER));
        let grants = self.rights.permitted(user.as_str(), from, unix_time::now());
        let grants = grants
            .iter()
            .map(|grant| reach(Some(&grant.nodes), &grant.ports, grant.with_join_keys, grant.until));
        WhoamiResponse {
            now,
            user: user.to_string(),
            device: device.to_string(),
            is_admin: self.is_admin(),
            until: self.until,
            reach: rules.chain(grants).collect(),
            servers: Vec::new(),
        }
    }

    /// Returns the part of a list of nodes that she may see: those that she may reach at some port. It reveals
    /// nothing about other nodes.
    pub(super) fn visible(&self, mut all: NodesResponse) -> NodesResponse {
        let user = self.device.user.as_str();
        let from = self.from.ip();
        let now = unix_time::now();
        let may_see = |name: &str| {
            name.parse().is_ok_and(|node| {
                self.rights.rules.allow(Some(user), Some(from), &node, None)
                    || self.rights.find(user, from, &node, None, now).is_some()
            })
        };
        all.nodes.retain(|node| may_see(&node.name));
        all.down.retain(|node| may_see(&node.name));
        all.servers.iter_mut().for_each(|server| server.error = None);
        all.count();
        all
    }
}

impl AdminRequester {
    /// Checks whether the requester may invite or revoke that user. The config makes admins, not the API: over a link,
    /// no user gets or loses a device of an admin.
    ///
    /// # Errors
    ///
    /// Returns the reason for the refusal.
    pub(crate) fn check_user(&self, user: Option<&UserName>) -> Result<(), String> {
        match (self, user) {
            (Self::Linked(linked), Some(user)) if linked.rights.is_admin(user.as_str()) => Err(format!(
                "user {user} is in admins of [server.clients]; invite, grant and revoke on a server's machine, where no link is used\n"
            )),
            _ => Ok(()),
        }
    }

    /// Checks whether the requester may request paths that name nodes or change something. `private` paths, which show
    /// nodes, sessions and clients, are only for this machine.
    ///
    /// # Errors
    ///
    /// Returns the reason if access is denied, with a hint.
    pub(crate) fn check_access(&self, head: &HeaderMap, private: bool) -> Result<(), &'static str> {
        match self {
            Self::LocalUser(_) | Self::User(_) | Self::Linked(_) => Ok(()),
            Self::Address(ip, _) if private && !canonical_ip(*ip).is_loopback() => Err(ELSEWHERE),
            Self::Address(..) if is_plain_host(head) => Ok(()),
            // HTTP/1.0 requests of scripts and load balancers may omit Host; browsers never do.
            Self::Address(..) if !private && !head.contains_key(HOST) => Ok(()),
            Self::Address(..) => Err(OTHER_HOST),
        }
    }
}

/// The client is not on this machine.
const ELSEWHERE: &str = "only available on this machine; connect to 127.0.0.1, or run `tunnel status` there";
/// The name in Host may be one that a malicious page has made resolve to this address (DNS rebinding).
const OTHER_HOST: &str = "connect by IP address or as localhost, not by another name";

/// Returns true if the only Host is an address or `localhost`. A malicious page whose name resolves to 127.0.0.1 sends
/// another.
fn is_plain_host(head: &HeaderMap) -> bool {
    let mut hosts = head.get_all(HOST).iter();
    let (Some(Ok(host)), None) = (hosts.next().map(|host| host.to_str()), hosts.next()) else { return false };
    let Ok(authority) = host.parse::<http::uri::Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    !host.contains('@') && (name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(hosts: &[&str]) -> HeaderMap {
        hosts.iter().map(|host| (HOST, host.parse().unwrap())).collect()
    }

    #[test]
    fn private_pages_are_for_loopback_and_host_must_be_an_address_or_localhost() {
        let (near, far) = (
            AdminRequester::Address("127.0.0.1".parse().unwrap(), None),
            AdminRequester::Address("10.0.0.1".parse().unwrap(), None),
        );
        for host in
            ["127.0.0.1", "127.0.0.1:9010", "[::1]:9010", "localhost", "LocalHost:8080", "10.0.0.7:9010"]
        {
            assert_eq!(near.check_access(&head(&[host]), true), Ok(()), "{host}");
            assert_eq!(far.check_access(&head(&[host]), true), Err(ELSEWHERE), "{host}");
            assert_eq!(far.check_access(&head(&[host]), false), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example:9010",
            "localhost.evil.example",
            "a@127.0.0.1",
            "",
            ":80",
        ] {
            assert_eq!(near.check_access(&head(&[host]), true), Err(OTHER_HOST), "{host}");
            assert_eq!(far.check_access(&head(&[host]), false), Err(OTHER_HOST), "{host}");
        }
        assert_eq!(near.check_access(&head(&[]), true), Err(OTHER_HOST));
        assert_eq!(near.check_access(&head(&[]), false), Ok(()), "HTTP/1.0 needs no Host");
        assert_eq!(near.check_access(&head(&["localhost", "localhost"]), true), Err(OTHER_HOST));
        assert_eq!(AdminRequester::LocalUser(0).check_access(&head(&[]), true), Ok(()));
        let mapped = AdminRequester::Address("::ffff:127.0.0.1".parse().unwrap(), None);
        assert_eq!(mapped.check_access(&head(&["localhost"]), true), Ok(()));
        assert_eq!(
            (near.to_string(), AdminRequester::LocalUser(7).to_string()),
            ("127.0.0.1".into(), "uid=7".into())
        );
    }
}
