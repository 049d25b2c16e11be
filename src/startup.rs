//! Collects everything that prevents a start, so that all errors are found and reported together before anything runs.

pub mod admin_socket;
pub mod daemon;
pub mod signals;
pub mod systemd;
pub(crate) mod tls_files;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::{fmt, io};

use tracing::{info, warn};

use crate::admin::readiness::{LISTENERS_CONDITION, Readiness};
use crate::config::admin_listener::AdminConfig;
use crate::config::{ConfigError, ConfigErrors, KeySpellings, ParsedConfig, Warning};
use crate::startup::admin_socket::SocketDirs;
use tunnel_base::files;
use tunnel_net::listen::{Accept as _, BindError, TcpListenSocket, share_port, try_congestion};
use tunnel_net::tls::certificate::{self, CertWarningKind};
use tunnel_net::tls::pem;
use tunnel_net::unix_accept::UnixAccept;

/// A collector of startup errors. Everything that needs a file or a port gets it through here, and startup continues
/// with the next item after an error.
#[derive(Debug, Default)]
pub struct StartupErrorCollector {
    errors: Vec<StartupError>,
    /// Valid keys that the config sets, if it has errors: only these are checked further. `None` checks all keys.
    given: Option<BTreeSet<String>>,
    /// Whether this is only a check.
    pub(crate) is_check: bool,
    /// The config's spelling of keys.
    spelling: KeySpellings,
    /// Requested ports, each with its key.
    requested_addresses: Vec<(String, SocketAddr)>,
}

/// What a start needs is missing: an error is recorded, or this is only a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotPrepared;

/// What is prepared for the start.
pub type Prepared<T> = Result<T, NotPrepared>;

/// One error found at startup, with its kind. All are reported together before the process exits.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
#[display("{error}")]
pub struct StartupError {
    /// Kind of the error, which decides the exit code.
    pub kind: StartupErrorKind,
    /// Key or keys (empty if the text names it), what is wrong with the value, and a hint.
    pub error: ConfigError,
}

/// Kind of a startup error; the most severe first, which no retry can fix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StartupErrorKind {
    /// The config, the environment, or a file that they name is invalid.
    Config,
    /// This user lacks a permission.
    Permission,
    /// The directory of log files cannot be used.
    LogFiles,
    /// The system lacks something that any program needs.
    System,
    /// An address or port is not available.
    Port,
}

/// All startup errors; displayed as one line each.
pub type StartupErrors = ConfigErrors<StartupError>;

impl StartupErrorCollector {
    /// Returns a collector for a check: it also reads files that a start reads later, and binds no port.
    pub fn checking() -> Self {
        Self { is_check: true, ..Self::default() }
    }

    /// Returns true if there are no errors so far.
    pub fn is_clear(&self) -> bool {
        self.errors.is_empty()
    }

    /// Returns the number of errors so far.
    pub fn errors(&self) -> usize {
        self.errors.len()
    }

    /// Returns the settings and warnings of a parsed config, and records its errors. If there are errors, warnings are
    /// dropped and only the valid keys that it sets are checked further.
    pub fn settings<T>(&mut self, read: ParsedConfig<T>) -> (T, Vec<Warning>) {
        let ParsedConfig { settings, mut warnings, errors, given, spelling, .. } = read;
        if !errors.is_empty() {
            warnings.clear();
        }
        self.given = (!errors.is_empty()).then_some(given);
        self.spelling = spelling;
        let of_config = |error| StartupError { kind: StartupErrorKind::Config, error };
        self.errors.extend(errors.into_iter().map(of_config));
        (settings, warnings)
    }

    /// Returns a key as the config spells it.
    pub fn spelled(&self, key: &str) -> String {
        self.spelling.of(key)
    }

    /// Records an error.
    pub fn error(&mut self, kind: StartupErrorKind, key: impl Into<String>, text: impl Into<String>) {
        let error = ConfigError { key: key.into(), line: None, text: text.into() };
        self.errors.push(StartupError { kind, error });
    }

    /// Returns a result's value. Records an error unless one of its keys is not checked.
    pub fn collect<T>(
        &mut self,
        kind: StartupErrorKind,
        keys: &[&str],
        result: Result<T, impl fmt::Display>,
    ) -> Prepared<T> {
        let given = keys.iter().all(|key| self.is_given(key));
        result.map_err(|cause| {
            if given {
                self.error(kind, keys.join(", "), cause.to_string());
            }
            NotPrepared
        })
    }

    /// Returns true if a file can be read and parsed; otherwise records an error. The parse error need not name the
    /// file.
    pub fn check_file<T, E: fmt::Display>(
        &mut self,
        key: &str,
        path: &Path,
        parse: impl FnOnce(&[u8]) -> Result<T, E>,
    ) -> bool {
        let read = files::read(path)
            .map_err(|cause| format!("cannot read {}: {cause}{}", path.display(), files::hint(&cause)));
        let held = read.and_then(|content| {
            parse(&content).map_err(|cause| {
                let cause = cause.to_string();
                let path = path.display().to_string();
                if cause.contains(&path) { cause } else { format!("{path}: {cause}") }
            })
        });
        self.collect(StartupErrorKind::Config, &[key], held).is_ok()
    }

    /// Returns true if a PEM file has certificates, or there is no file; otherwise records an error.
    pub fn check_certs(&mut self, key: &str, path: Option<&Path>) -> bool {
        path.is_none_or(|path| self.check_file(key, path, |text| pem::certs(path, text)))
    }

    /// Returns true if a PEM file has a private key, or there is no file; otherwise records an error.
    pub fn check_private_key(&mut self, key: &str, path: Option<&Path>) -> bool {
        path.is_none_or(|path| self.check_file(key, path, |text| pem::private_key(path, text)))
    }

    /// Checks that the kernel has the congestion control that a key names, if any; otherwise records an error.
    pub fn congestion(&mut self, key: &str, name: Option<&str>) -> Prepared<()> {
        self.collect(StartupErrorKind::System, &[key], name.map_or(Ok(()), try_congestion))
    }

    /// Binds a port, unless this is a check. `key` is the full key.
    pub fn bind(&mut self, key: &str, at: SocketAddr) -> Prepared<TcpListenSocket> {
        self.bind_by(key, at, TcpListenSocket::bind)
    }

    /// Like [`Self::bind`], for a port that edges on this machine may dial for their clients.
    pub fn bind_public(&mut self, key: &str, at: SocketAddr) -> Prepared<TcpListenSocket> {
        self.bind_by(key, at, TcpListenSocket::bind_public)
    }

    fn bind_by(
        &mut self,
        key: &str,
        at: SocketAddr,
        bind: fn(SocketAddr) -> Result<TcpListenSocket, BindError>,
    ) -> Prepared<TcpListenSocket> {
        if !self.is_given(key) || !self.is_free(key, at) || self.is_check {
            return Err(NotPrepared);
        }
        bind(at).map_err(|error| self.bind_error(key, &error))
    }

    /// Like [`Self::bind`], for a unix socket.
    pub fn bind_local(&mut self, key: &str, path: &Path) -> Prepared<UnixAccept> {
        if self.is_check || !self.is_given(key) {
            return Err(NotPrepared);
        }
        self.collect(StartupErrorKind::Port, &[key], UnixAccept::bind(path))
    }

    /// Like [`Self::bind_local`], for the admin socket. Returns `None` if no key names it and no directory is
    /// usable.
    pub fn bind_admin(&mut self, key: &str, admin: &AdminConfig) -> Prepared<Option<UnixAccept>> {
        let bound = match &admin.listen {
            Some(path) => Some(self.bind_local(key, path)?),
            None if self.is_check || !self.is_given(key) => return Err(NotPrepared),
            None => {
                let bound = SocketDirs::of_user(admin.runtime_dir.as_deref()).bind(admin.name);
                let hint = format!("set {key} to a path that this user may write");
                bound.map_err(|reason| warn!(%reason, hint, "no admin socket for tunnel status")).ok()
            }
        };
        if let Some(listener) = &bound {
            let path = listener.at().to_string();
            // Each further process of this name has another number.
            let is_first = admin.listen.is_some() || path.ends_with(&format!("/{}.sock", admin.name));
            let hint = (!is_first).then(|| format!("another {} runs on this machine", admin.name));
            info!(%path, hint, "admin socket open");
        }
        Ok(bound)
    }

    /// Like [`Self::bind`], for an address that may be a default. Returns `None` if it is one and not available.
    pub fn bind_optional(
        &mut self,
        key: &str,
        at: SocketAddr,
        is_default: bool,
    ) -> Prepared<Option<TcpListenSocket>> {
        if !self.is_given(key) || !is_default && !self.is_free(key, at) || self.is_check {
            return Err(NotPrepared);
        }
        TcpListenSocket::optional(TcpListenSocket::bind(at), is_default)
            .map_err(|error| self.bind_error(key, &error))
    }

    /// Checks that a file's certificate is valid now; otherwise records an error. A file that cannot be read is
    /// recorded elsewhere.
    pub fn check_dates(&mut self, key: &str, path: &Path) {
        let Some(summary) = pem::leaf(path).and_then(|leaf| certificate::summary(&leaf).ok()) else { return };
        for odd in summary.oddities.into_iter().filter(|odd| odd.about != CertWarningKind::Kind) {
            let text = format!("{} {}; {}", path.display(), odd.found, odd.hint);
            self.error(StartupErrorKind::Config, key, text);
        }
    }

    /// Returns the ports that were requested so far, each with its key.
    pub fn ports(&self) -> &[(String, SocketAddr)] {
        &self.requested_addresses
    }

    /// Notes ports that are open already, each with its key, so that no other key can request them.
    pub fn reserve_ports<'a>(&mut self, open: impl IntoIterator<Item = &'a (String, SocketAddr)>) {
        self.requested_addresses.extend(open.into_iter().cloned());
    }

    /// Returns what startup prepared, if there are no errors.
    ///
    /// # Errors
    ///
    /// Returns all recorded errors. The list is empty if none was recorded and something is missing nevertheless, as in
    /// a check.
    pub fn finish<T>(self, prepared: Prepared<T>) -> Result<T, StartupErrors> {
        match prepared {
            Ok(prepared) if self.errors.is_empty() => Ok(prepared),
            _ => Err(self.into_errors()),
        }
    }

    /// Returns all recorded errors without duplicates, with keys as the config spells them.
    pub fn into_errors(self) -> StartupErrors {
        let mut errors: Vec<StartupError> = Vec::new();
        for StartupError { kind, mut error } in self.errors {
            error.key = error.key.split(", ").map(|key| self.spelling.of(key)).collect::<Vec<_>>().join(", ");
            let error = StartupError { kind, error };
            if !errors.contains(&error) {
                errors.push(error);
            }
        }
        ConfigErrors(errors)
    }

    /// Returns true if no other key uses that port; otherwise records an error.
    fn is_free(&mut self, key: &str, at: SocketAddr) -> bool {
        let other = self.requested_addresses.iter().find(|(_, of)| share_port(*of, at));
        if let Some(other) = other.map(|(other, _)| other.clone()) {
            let text = format!("{at}: {other} uses the same port; set a different port for each");
            self.error(StartupErrorKind::Config, key, text);
            return false;
        }
        self.requested_addresses.push((key.to_owned(), at));
        true
    }

    fn is_given(&self, key: &str) -> bool {
        !(key.starts_with("server.") || key.starts_with("edge."))
            || self.given.as_ref().is_none_or(|given| given.contains(key))
    }

    fn bind_error(&mut self, key: &str, error: &BindError) -> NotPrepared {
        let denied = error.cause.kind() == io::ErrorKind::PermissionDenied;
        let kind = if denied { StartupErrorKind::Permission } else { StartupErrorKind::Port };
        self.error(kind, key, error.to_string());
        NotPrepared
    }
}

impl StartupErrors {
    /// Returns the errors of a reload without their kinds, if there are any, which is a condition of `readiness`.
    ///
    /// # Errors
    ///
    /// There are errors.
    pub(crate) fn report(self, readiness: &Readiness) -> Result<(), ConfigErrors> {
        let errors: Vec<_> = self.0.into_iter().map(|found| found.error).collect();
        let result = if errors.is_empty() { Ok(()) } else { Err(ConfigErrors(errors)) };
        let trouble = result.as_ref().copied().map_err(|errors| errors.to_string().replace('\n', "; "));
        readiness.set_degraded(LISTENERS_CONDITION, trouble);
        result
    }

    /// Returns the most severe kind of error, or `None` if there are none.
    pub fn most_severe(&self) -> Option<StartupErrorKind> {
        self.iter().map(|found| found.kind).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY_PORT: &str = "127.0.0.1:0";

    #[test]
    fn each_startup_error_is_reported_once_and_the_most_severe_decides() {
        let mut startup = StartupErrorCollector::default();
        startup.error(StartupErrorKind::Port, "", "taken");
        for _ in 0..2 {
            assert_eq!(
                startup.collect(StartupErrorKind::System, &["a", "b"], Err::<(), _>("no DNS")),
                Err(NotPrepared)
            );
        }
        assert_eq!(startup.collect(StartupErrorKind::Config, &["c"], Ok::<_, String>(1)), Ok(1));
        let errors = startup.finish(Ok(())).unwrap_err();
        assert_eq!(
            (errors.to_string().as_str(), errors.most_severe()),
            ("taken\na, b: no DNS", Some(StartupErrorKind::System))
        );
    }

    #[test]
    fn a_congestion_control_must_be_available_in_the_kernel() {
        let mut startup = StartupErrorCollector::default();
        let key = "edge.uplink.congestion";
        assert!(startup.congestion(key, None).is_ok() && startup.congestion(key, Some("reno")).is_ok());
        assert!(startup.congestion(key, Some("slowpoke")).is_err());
        let messages = startup.into_errors().to_string();
        assert!(
            messages.starts_with(&format!("{key}: ")) && messages.contains("modprobe tcp_slowpoke"),
            "{messages}"
        );
    }

    #[tokio::test]
    async fn two_keys_with_the_same_port_are_an_error() {
        let mut startup = StartupErrorCollector::checking();
        for (key, at) in [
            ("one", "127.0.0.1:7000"),
            ("other", "127.0.0.2:7000"),
            ("two", "0.0.0.0:7000"),
            ("any", ANY_PORT),
            ("any too", ANY_PORT),
        ] {
            let _ = startup.bind(key, at.parse().unwrap());
        }
        let errors = startup.into_errors();
        let messages = "two: 0.0.0.0:7000: one uses the same port; set a different port for each";
        assert_eq!(
            (errors.to_string().as_str(), errors.most_severe()),
            (messages, Some(StartupErrorKind::Config))
        );
    }

    #[tokio::test]
    async fn a_config_check_binds_no_port() {
        let at = ANY_PORT.parse().unwrap();
        assert!(StartupErrorCollector::checking().bind("k", at).is_err());
        assert!(StartupErrorCollector::default().bind("k", at).is_ok());
    }

    #[test]
    fn an_error_of_a_file_names_the_file_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "").unwrap();
        let mut startup = StartupErrorCollector::default();
        assert!(!startup.check_file("k", &path, |_| Err::<(), _>("is empty")));
        assert!(!startup.check_file("l", &path, |_| Err::<(), _>(format!("{} is odd", path.display()))));
        let messages = startup.into_errors().to_string();
        assert_eq!(messages.matches(&*path.to_string_lossy()).count(), 2, "{messages}");
    }
}
