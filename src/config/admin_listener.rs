//! The admin listener, and the socket for commands.

use std::path::PathBuf;

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

use crate::config::access::{AccessConfig, PasswordFile};
use crate::config::admin_ports::AdminPorts;
use crate::config::listen_tls::{ListenerTlsConfig, PortTlsState, names, require_names};
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::FilePath;

/// `[server.admin]` and `[edge.admin]`: operators' access to the process.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct AdminConfig {
    /// Unix socket ("unix:/path") for commands on this machine, such as tunnel status. Only the user of this program
    /// and root may open its file, which is created at start and removed at exit. If a path is set and fails, the
    /// program does not start. Default: server.sock, or edge.sock of an edge, in the first usable directory:
    /// /run/tunnel, which systemd or root creates; tunnel in $XDG_RUNTIME_DIR; /tmp/tunnel-UID. Only the user may
    /// access the last two (0700). If another process has the socket, the name is server-2.sock, and so on. The path is
    /// logged. If no socket can be made, the reason is logged and the program runs without one.
    ///
    /// Example: `"unix:/run/tunnel/admin.sock"`
    #[serde(with = "UnixPathForm")]
    pub listen: Option<PathBuf>,
    /// File (htpasswd, bcrypt: htpasswd -B) of users who may open the live page and the status at the admin listener
    /// from other machines, with name and password. Re-read when it changes. Set cert and key, too. Default: none, only
    /// this machine may, and clients with an accepted certificate.
    ///
    /// Example: `"/etc/tunnel/auth/operators"`
    pub users: Option<FilePath>,
    /// TLS of the admin listener, if it has any.
    #[serde(skip)]
    pub tls: Option<ListenerTlsConfig>,
    /// Who may open private pages from other machines.
    #[serde(skip)]
    pub access: AccessConfig,
    /// The name of the socket (without `.sock`) if no key sets its path.
    #[serde(skip)]
    pub name: &'static str,
    /// `XDG_RUNTIME_DIR`, a directory for such sockets.
    #[serde(skip)]
    pub runtime_dir: Option<PathBuf>,
}

impl AdminConfig {
    /// Returns what is read only at the start: the socket, TLS, and whether there are passwords at all.
    pub(crate) fn at_start(&self) -> (&Option<PathBuf>, &Option<ListenerTlsConfig>, bool) {
        (&self.listen, &self.tls, self.users.is_some())
    }
}

/// Reads a table `admin`, and warns if other machines can reach the admin listener, whose address `key` sets in the
/// parent. `name` is the socket's name if there is no `listen = "unix:/path"`.
pub(crate) fn admin(
    parent: &mut ConfigTableReader<'_>,
    name: &'static str,
    (key, ports): (&str, &AdminPorts),
) -> AdminConfig {
    let mut table = parent.table("admin");
    let mut admin: AdminConfig = table.fields();
    (admin.name, admin.runtime_dir) = (name, parent.env.runtime_dir.clone());
    admin.tls = ListenerTlsConfig::read(&mut table);
    let tls = PortTlsState::of(admin.tls.as_ref());
    admin.access.names = names(&mut table, tls);
    require_names(&table);
    if let Some(users) = admin.users.clone() {
        let key = table.key("users");
        tls.warn_passwords(key.clone(), ports.admin_listen, &mut table.report());
        admin.access.auth = Some(PasswordFile { users, key });
    }
    if tls != (PortTlsState::On { client_certificate: true }) {
        ports.warn_if_reachable(parent.key(key), &mut parent.report());
    }
    table.close(&admin);
    admin
}

/// The form `unix:/path` of a socket's path.
struct UnixPathForm;

impl UnixPathForm {
    fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
        unix_path(&String::deserialize(deserializer)?)
            .map(Some)
            .ok_or_else(|| D::Error::custom("expected unix:/path, for example unix:/run/tunnel/server.sock"))
    }

    fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_ref().map(|path| format!("unix:{}", path.display())).serialize(serializer)
    }
}

/// Returns the path in `unix:/path`.
pub(super) fn unix_path(text: &str) -> Option<PathBuf> {
    let path = text.strip_prefix("unix:")?;
    (path.starts_with('/') && !path.contains('\0')).then(|| path.into())
}

/// The key for the address that clients connect to.
pub(super) const LISTEN: &str = "listen";
