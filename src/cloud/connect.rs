//! Starts the CONNECT front end from `[mode.cloud.ssh]`.

use std::path::Path;

use tracing::info_span;

use super::core::Core;
use super::ports::ClientPort;
use crate::config::cloud::{Auth, Cloud, Ssh};
use crate::frontend::{Connect, Gate, Logins, Users, serve};
use crate::net::listen::Listener;
use crate::net::reload::Reload;
use crate::startup::{Kind, Startup};

/// The front end's name, also its table's.
pub(super) const NAME: &str = "ssh";

/// Reads the front end's files and binds its port; `None`: there are faults, which `startup` has noted.
pub(super) fn prepare(settings: &Cloud, startup: &mut Startup) -> Option<ClientPort> {
    let ssh = settings.ssh.clone();
    let users = match &ssh.auth {
        Auth::None => Some(None),
        Auth::Basic { users } => read_users(users, startup).map(Some),
    };
    let listener = startup.bind_optional("mode.cloud.ssh", ssh.listen);
    let (users, listener) = (users?, listener?);
    let at = listener.as_ref().map(Listener::at);
    let spawn = move |core: &Core| {
        if let Some(listener) = listener {
            spawn(ssh, users, listener, core);
        }
    };
    Some(ClientPort { name: NAME, at, spawn: Box::new(spawn) })
}

fn spawn(ssh: Ssh, users: Option<Reload<Users>>, listener: Listener, core: &Core) {
    if let Some(users) = users.clone() {
        let links = &core.stopping.links;
        links.spawn(info_span!("users"), users.watch(links.clone()));
    }
    let gate = Gate {
        allow_from: ssh.allow_from,
        logins: users.map(Logins::new),
        rules: ssh.rules,
        zone: Some(core.zone.clone()),
    };
    let serving = serve(Connect, listener, ssh.proxy_protocol, core.front_context(gate));
    core.stopping.clients.spawn(info_span!("ssh"), serving);
}

fn read_users(path: &Path, startup: &mut Startup) -> Option<Reload<Users>> {
    let shown = path.display().to_string();
    let parse = move |text: &[u8]| {
        Users::parse(&String::from_utf8_lossy(text)).map_err(|cause| format!("{shown}: {cause}"))
    };
    startup.keep(Kind::Config, &["mode.cloud.ssh.users"], Reload::file(path, parse))
}
