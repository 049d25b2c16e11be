//! From the settings of publishing to the store that serves them.

use std::net::IpAddr;

use anyhow::Context as _;

use crate::config::cloud::registry::Publish;
use crate::net::resolver::Resolver;
use crate::net::tls::Identity;
use crate::registry::publish::Store;
use crate::registry::publish::etcd::{Etcd, Settings};
use crate::registry::publish::hosts::Hosts;

/// Where records go; none if nothing is published.
pub(super) fn store(publish: Publish, pod: Option<IpAddr>) -> anyhow::Result<Option<Store>> {
    // That there is an address was checked with the settings.
    let Some(pod) = pod else { return Ok(None) };
    Ok(match publish {
        Publish::None => None,
        Publish::Hosts(file) => Some(Store::Hosts(Hosts::new(file, pod))),
        Publish::Etcd(etcd) => {
            let resolver = Resolver::system().context("mode.cloud.registry.etcd")?;
            let settings = Settings {
                members: etcd.endpoints.into_iter().map(|member| (member.tls, member.at)).collect(),
                prefix: etcd.prefix,
                ca: etcd.ca,
                identity: etcd.identity.map(|(cert, key)| Identity { cert, key }),
                login: etcd.login,
                address: pod,
            };
            Some(Store::Etcd(Box::new(Etcd::new(settings, resolver))))
        }
    })
}

/// Its name in `/readyz`.
pub(super) const CONDITION: &str = "publisher";
