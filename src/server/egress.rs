//! Starts the CONNECT listener for kube-apiserver from `[mode.cloud.egress]`.

use tracing::info_span;

use crate::config::server::ServerConfig;
use crate::config::server::egress::EgressConfig;
use crate::listener::authenticated::{OverTls, OverUnix};
use crate::listener::connect::{Connect, Egress as Module};
use crate::server::{ClientListener, ServerCore, https};
use crate::startup::Startup;
use crate::startup::access::AccessPolicies;

/// Reads the listener's files and binds its port. Returns `None` if there are errors, which `startup` has noted.
pub(crate) fn prepare(
    settings: &ServerConfig,
    gates: &mut AccessPolicies,
    startup: &mut Startup,
) -> Option<Vec<ClientListener>> {
    let Some(egress) = &settings.egress else { return Some(Vec::new()) };
    let guard = gates.prepare("mode.cloud.egress", egress.access(), startup);
    let connect = Connect::<Module>::default();
    let port = match egress {
        EgressConfig::Port { listen, certificates, .. } => {
            let tls = https::read(settings, certificates, startup);
            let listener = startup.bind(&format!("mode.cloud.egress.{}", listen.key), listen.at);
            let (guard, tls, listener) = (guard?, tls?, listener?);
            ClientListener::tcp(listener, guard, move |core: &ServerCore| {
                let links = &core.shutdown.links;
                links.spawn(info_span!("tls"), tls.clone().watch(links.clone()));
                OverTls::new(connect, tls, core.context.pool.clone())
            })
        }
        EgressConfig::Unix { path, .. } => {
            let listener = startup.bind_local("mode.cloud.egress.listen", path);
            let (guard, listener) = (guard?, listener?);
            ClientListener::new(listener, guard, |_| OverUnix(connect))
        }
    };
    Some(vec![port])
}
