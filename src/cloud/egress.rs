//! Starts the CONNECT front end for kube-apiserver from `[mode.cloud.egress]`.

use tracing::info_span;

use super::certificates;
use super::core::Core;
use super::ports::ClientPort;
use crate::config::cloud::{Cloud, Egress};
use crate::frontend::{Connect, Egress as Module, Local, Tls};
use crate::startup::{Gates, Startup};

/// Reads the front end's files and binds its port; `None`: there are faults, which `startup` has noted.
pub(super) fn prepare(settings: &Cloud, gates: &mut Gates, startup: &mut Startup) -> Option<Vec<ClientPort>> {
    let Some(egress) = &settings.egress else { return Some(Vec::new()) };
    let guard = gates.prepare("mode.cloud.egress", egress.access(), startup);
    let connect = Connect::<Module>::default();
    let port = match egress {
        Egress::Port { listen, certificates, .. } => {
            let tls = certificates::read(settings, certificates, startup);
            let listener = startup.bind(&format!("mode.cloud.egress.{}", listen.key), listen.at);
            let (guard, tls, listener) = (guard?, tls?, listener?);
            ClientPort::tcp(listener, guard, move |core: &Core| {
                let links = &core.stopping.links;
                links.spawn(info_span!("tls"), tls.clone().watch(links.clone()));
                Tls::new(connect, tls, core.context.pool.clone())
            })
        }
        Egress::Unix { path, .. } => {
            let listener = startup.bind_local("mode.cloud.egress.listen", path);
            let (guard, listener) = (guard?, listener?);
            ClientPort::new(listener, guard, |_| Local(connect))
        }
    };
    Some(vec![port])
}
