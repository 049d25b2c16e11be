//! Who asks, and whether that one may see what is not for everybody.

use std::fmt;
use std::net::IpAddr;

use http::HeaderMap;
use http::header::HOST;

use crate::policy::plain;

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// Whoever is at that address.
    Address(IpAddr),
    /// A user of this machine, by number, at the admin socket.
    User(u32),
}

/// Why an asker gets no answer, as a sentence with the remedy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unasked {
    /// It is not on this machine.
    #[error("this is shown on this machine only: ask 127.0.0.1, or use `tunnel status` there")]
    Elsewhere,
    /// The name that it asked for may have been made to lead here by a stranger's page in a browser.
    #[error("ask by an address or as localhost, not by another name")]
    Host,
}

impl Asker {
    /// Whether it is on this machine.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Address(ip) => plain(*ip).is_loopback(),
            Self::User(_) => true,
        }
    }

    /// Checks whether it may ask for what names nodes or changes something. `private`: for nodes, sessions and clients,
    /// which are shown on this machine only.
    ///
    /// # Errors
    ///
    /// It may not.
    pub(super) fn may_ask(&self, head: &HeaderMap, private: bool) -> Result<(), Unasked> {
        match self {
            Self::User(_) => Ok(()),
            Self::Address(_) if private && !self.is_local() => Err(Unasked::Elsewhere),
            Self::Address(_) if is_plain_host(head) => Ok(()),
            // Scripts and balancers may, in HTTP/1.0; no browser does.
            Self::Address(_) if !private && !head.contains_key(HOST) => Ok(()),
            Self::Address(_) => Err(Unasked::Host),
        }
    }
}

impl fmt::Display for Asker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(ip) => ip.fmt(f),
            Self::User(uid) => write!(f, "uid={uid}"),
        }
    }
}

/// Whether the one Host is an address or `localhost`. A page of a stranger whose name leads to 127.0.0.1 has another.
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
    fn only_this_machine_looks_and_all_ask_by_an_address_or_as_localhost() {
        let (near, far) =
            (Asker::Address("127.0.0.1".parse().unwrap()), Asker::Address("10.0.0.1".parse().unwrap()));
        for host in
            ["127.0.0.1", "127.0.0.1:51010", "[::1]:51010", "localhost", "LocalHost:8080", "10.0.0.7:51010"]
        {
            assert_eq!(near.may_ask(&head(&[host]), true), Ok(()), "{host}");
            assert_eq!(far.may_ask(&head(&[host]), true), Err(Unasked::Elsewhere), "{host}");
            assert_eq!(far.may_ask(&head(&[host]), false), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example:51010",
            "localhost.evil.example",
            "a@127.0.0.1",
            "",
            ":80",
        ] {
            assert_eq!(near.may_ask(&head(&[host]), true), Err(Unasked::Host), "{host}");
            assert_eq!(far.may_ask(&head(&[host]), false), Err(Unasked::Host), "{host}");
        }
        assert_eq!(near.may_ask(&head(&[]), true), Err(Unasked::Host));
        assert_eq!(near.may_ask(&head(&[]), false), Ok(()), "as HTTP/1.0 has it");
        assert_eq!(near.may_ask(&head(&["localhost", "localhost"]), true), Err(Unasked::Host));
        assert_eq!(Asker::User(0).may_ask(&head(&[]), true), Ok(()));
        let mapped = Asker::Address("::ffff:127.0.0.1".parse().unwrap());
        assert!(mapped.is_local() && near.is_local() && !far.is_local());
        assert_eq!((near.to_string(), Asker::User(7).to_string()), ("127.0.0.1".into(), "uid=7".into()));
    }
}
