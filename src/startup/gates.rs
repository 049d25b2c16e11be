//! Who may come in at the ports for clients: makes the gates of front ends from the settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::info_span;

use super::{FaultKind, Startup};
use crate::config::{Access, Auth};
use crate::drain::Drain;
use crate::frontend::{Gate, Logins, Users};
use crate::net::reload::Reload;
use crate::policy::{Networks, Zone};

/// The users' files of all gates: one that several name is read once, and wrong passwords given at any of them count
/// together.
#[derive(Debug, Default)]
pub struct Gates {
    files: BTreeMap<PathBuf, Option<UserFile>>,
}

/// Who may come in at one port, with the lists and files that decide it.
#[derive(Debug, Clone)]
pub struct Guard {
    access: Access,
    logins: Option<Arc<Logins>>,
}

#[derive(Debug)]
struct UserFile {
    users: Reload<Users>,
    logins: Arc<Logins>,
}

impl Gates {
    /// Reads what a port needs; `None`: a file will not do, which is noted.
    pub fn prepare(&mut self, access: &Access, startup: &mut Startup) -> Option<Guard> {
        let logins = match &access.auth {
            Auth::None => None,
            Auth::Basic { users, key } => {
                let read = || UserFile::read(users, key, startup);
                let file = self.files.entry(users.clone()).or_insert_with(read);
                Some(file.as_ref()?.logins.clone())
            }
        };
        Some(Guard { access: access.clone(), logins })
    }

    /// Follows the files.
    pub fn watch(self, drain: &Drain) {
        for file in self.files.into_values().flatten() {
            drain.spawn(info_span!("users"), file.users.watch(drain.clone()));
        }
    }
}

impl Guard {
    /// Networks of balancers before the port.
    pub fn proxies(&self) -> Networks {
        self.access.proxy_protocol.clone()
    }

    /// The gate of a front end. `zone` is where nodes have a second name.
    pub fn gate(self, zone: Option<Arc<Zone>>) -> Gate {
        let Self { access, logins } = self;
        let Access { allow_from, rules, names, .. } = access;
        Gate { allow_from, logins, names, rules, zone }
    }
}

impl UserFile {
    fn read(path: &Path, key: &str, startup: &mut Startup) -> Option<Self> {
        let shown = path.display().to_string();
        let parse = move |text: &[u8]| {
            Users::parse(&String::from_utf8_lossy(text)).map_err(|cause| format!("{shown}: {cause}"))
        };
        let users = startup.keep(FaultKind::Config, &[key], Reload::file(path, parse))?;
        let logins = Arc::new(Logins::new(users.clone()));
        Some(Self { users, logins })
    }
}
