//! Starts the front ends of `[mode.cloud.https]`.

use super::gates::Gates;
use super::ports::ClientPort;
use crate::config::cloud::{Cloud, HttpsMode};
use crate::frontend::Passthrough;
use crate::startup::Startup;

/// Binds all ports; `None`: there are faults, which `startup` has noted.
pub(super) fn prepare(settings: &Cloud, gates: &mut Gates, startup: &mut Startup) -> Option<Vec<ClientPort>> {
    let https = &settings.https;
    if https.ports.is_empty() || https.mode != HttpsMode::Passthrough {
        return Some(Vec::new());
    }
    let guard = gates.prepare(&https.access, startup);
    let ports = https.ports.iter().map(|port| {
        let (listener, target) = (startup.bind(&port.key, port.at)?, port.target.clone());
        Some(ClientPort::tcp(listener, guard.clone()?, |_| Passthrough { target }))
    });
    // All of them first, so that each fault is noted.
    ports.collect::<Vec<_>>().into_iter().collect()
}
