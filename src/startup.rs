//! Collects what prevents a start: all faults are found before anything runs, and reported together.

pub mod access;
pub mod admin_socket;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use std::{fmt, io};

use futures_util::future::OptionFuture;
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use crate::config::{AdminSocket, ConfigError, ConfigErrors, ListenConfig, ParsedConfig, Warning};
use crate::startup::admin_socket::SocketDirs;
use tunnel_net::listen::{Accept as _, BindError, TcpAccept, UnixAccept, try_congestion};
use tunnel_net::reload;

/// Collects the faults of a start. Whatever needs a file or a port gets it through here, and goes on to the next when
/// it cannot be had.
#[derive(Debug, Default)]
pub struct Startup {
    faults: Vec<StartupError>,
    /// The keys whose values count; none: all of them do.
    given: Option<BTreeSet<String>>,
    is_check: bool,
    /// The ports that keys have asked for, each with its key.
    asked: Vec<(String, SocketAddr)>,
}

/// How a port is bound.
type Bind = fn(SocketAddr) -> Result<TcpAccept, BindError>;

/// One thing that is in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartupError {
    /// Whom to blame.
    pub kind: StartupErrorKind,
    /// The key, or keys; empty if the text names it. What is wrong with the value, and the remedy.
    pub fault: ConfigError,
}

/// Whom to blame; the gravest first: what no second try mends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StartupErrorKind {
    /// The config, the environment, or a file that they name.
    Config,
    /// This user may not do what is asked.
    Permission,
    /// The directory of log files cannot be used.
    LogFiles,
    /// The system has not got what any program needs.
    System,
    /// An address or port cannot be had.
    Port,
}

/// All that is in the way; displays as one line each.
pub type StartupErrors = ConfigErrors<StartupError>;

impl Startup {
    /// Files are read, those as well that a start leaves for later; no port is tried.
    pub fn checking() -> Self {
        Self { is_check: true, ..Self::default() }
    }

    /// Whether nothing is in the way so far.
    pub fn is_clear(&self) -> bool {
        self.faults.is_empty()
    }

    /// Whether the files are only checked, without a start.
    pub fn is_check(&self) -> bool {
        self.is_check
    }

    /// The settings of a config, and its warnings. If it has faults, warnings are left out, and only the parts without
    /// faults are looked into.
    pub fn settings<T>(&mut self, read: ParsedConfig<T>) -> (T, Vec<Warning>) {
        let ParsedConfig { settings, mut warnings, faults, given } = read;
        if !faults.is_empty() {
            warnings.clear();
            self.given = Some(given);
        }
        let of_config = |fault| StartupError { kind: StartupErrorKind::Config, fault };
        self.faults.extend(faults.into_iter().map(of_config));
        (settings, warnings)
    }

    /// Notes a fault.
    pub fn error(&mut self, kind: StartupErrorKind, key: impl Into<String>, text: impl Into<String>) {
        let fault = ConfigError { key: key.into(), line: None, text: text.into() };
        self.faults.push(StartupError { kind, fault });
    }

    /// What came of the values of some keys; `None`: a fault, which is noted unless nobody has given these values.
    pub fn collect<T>(
        &mut self,
        kind: StartupErrorKind,
        keys: &[&str],
        result: Result<T, impl fmt::Display>,
    ) -> Option<T> {
        let given = keys.iter().all(|key| self.is_given(key));
        match result {
            Err(cause) if given => self.error(kind, keys.join(", "), cause.to_string()),
            result => return result.ok(),
        }
        None
    }

    /// Whether a file can be read and holds what it should; if not, that is noted. A fault of its content need not name
    /// the file.
    pub fn check_file<T, E: fmt::Display>(
        &mut self,
        key: &str,
        path: &Path,
        parse: impl FnOnce(&[u8]) -> Result<T, E>,
    ) -> bool {
        let read = std::fs::read(path).map_err(|cause| {
            format!("cannot read {}: {cause}; check the path, and that this user may read it", path.display())
        });
        let held = read.and_then(|content| {
            parse(&content).map_err(|cause| {
                let (cause, path) = (cause.to_string(), path.display().to_string());
                if cause.contains(&path) { cause } else { format!("{path}: {cause}") }
            })
        });
        self.collect(StartupErrorKind::Config, &[key], held).is_some()
    }

    /// Whether the kernel has the congestion control that a key names, if any; if not, that is noted.
    pub fn congestion(&mut self, key: &str, name: Option<&str>) -> Option<()> {
        self.collect(StartupErrorKind::System, &[key], name.map_or(Ok(()), try_congestion))
    }

    /// Listens there; `None`: it cannot be had, which is noted, or ports are not tried. `key` is the whole one.
    pub fn bind(&mut self, key: &str, at: SocketAddr) -> Option<TcpAccept> {
        self.bind_by(key, at, TcpAccept::bind)
    }

    /// As [`Self::bind`], for a port of operators, which no edge of this machine dials.
    pub fn bind_private(&mut self, key: &str, at: SocketAddr) -> Option<TcpAccept> {
        self.bind_by(key, at, TcpAccept::bind_private)
    }

    fn bind_by(&mut self, key: &str, at: SocketAddr, bind: Bind) -> Option<TcpAccept> {
        if !self.is_given(key) || !self.is_free(key, at) || self.is_check {
            return None;
        }
        bind(at).map_err(|error| self.unbound(key, &error)).ok()
    }

    /// As [`Self::bind`], for a unix socket.
    pub fn bind_local(&mut self, key: &str, path: &Path) -> Option<UnixAccept> {
        if self.is_check || !self.is_given(key) {
            return None;
        }
        let bound = UnixAccept::bind(path);
        bound.map_err(|error| self.error(StartupErrorKind::Port, key, error.to_string())).ok()
    }

    /// As [`Self::bind_local`], for the admin socket; `Some(None)` if no key names it and no directory takes it.
    pub fn bind_admin(&mut self, key: &str, socket: &AdminSocket) -> Option<Option<UnixAccept>> {
        let bound = match socket {
            AdminSocket::At(path) => Some(self.bind_local(key, path)?),
            AdminSocket::Named(..) if self.is_check || !self.is_given(key) => return None,
            AdminSocket::Named(name, runtime_dir) => {
                let bound = SocketDirs::of_user(runtime_dir.as_deref()).bind(name);
                let hint = format!("set {key} to a path that this user may write");
                bound.map_err(|reason| warn!(%reason, hint, "no admin socket for tunnel status")).ok()
            }
        };
        if let Some(listener) = &bound {
            info!(path = %listener.at(), "admin socket open");
        }
        Some(bound)
    }

    /// As [`Self::bind`], for the address in a table; `Some(None)` where nobody asked for it and it cannot be had.
    pub fn bind_optional(&mut self, table: &str, listen: ListenConfig) -> Option<Option<TcpAccept>> {
        self.bind_optional_by(table, listen, TcpAccept::bind)
    }

    /// As [`Self::bind_optional`], for a port of operators, which no edge of this machine dials.
    pub fn bind_optional_private(&mut self, table: &str, listen: ListenConfig) -> Option<Option<TcpAccept>> {
        self.bind_optional_by(table, listen, TcpAccept::bind_private)
    }

    fn bind_optional_by(
        &mut self,
        table: &str,
        listen: ListenConfig,
        bind: Bind,
    ) -> Option<Option<TcpAccept>> {
        let key = format!("{table}.{}", listen.key);
        if !self.is_given(&key) || !listen.implicit && !self.is_free(&key, listen.at) || self.is_check {
            return None;
        }
        let bound = TcpAccept::optional(bind(listen.at), listen.implicit);
        bound.map_err(|error| self.unbound(&key, &error)).ok()
    }

    /// What the start goes on with, if nothing is in its way.
    ///
    /// # Errors
    ///
    /// All that was noted; nothing, where nothing was and something lacks nevertheless, as in a check.
    pub fn finish<T>(self, prepared: Option<T>) -> Result<T, StartupErrors> {
        match prepared {
            Some(prepared) if self.faults.is_empty() => Ok(prepared),
            _ => Err(self.into_faults()),
        }
    }

    /// All that was noted, each thing once.
    pub fn into_faults(self) -> StartupErrors {
        let mut faults: Vec<StartupError> = Vec::new();
        for fault in self.faults {
            if !faults.contains(&fault) {
                faults.push(fault);
            }
        }
        faults.into_iter().collect()
    }

    /// Whether no other key has asked for that port; if one has, that is noted.
    fn is_free(&mut self, key: &str, at: SocketAddr) -> bool {
        let one = |of: SocketAddr| of.ip() == at.ip() || of.ip().is_unspecified() || at.ip().is_unspecified();
        let other = self.asked.iter().find(|(_, of)| at.port() != 0 && of.port() == at.port() && one(*of));
        if let Some(other) = other.map(|(other, _)| other.clone()) {
            let text = format!("{at}: {other} asks for that port, too: give each a port of its own");
            self.error(StartupErrorKind::Config, key, text);
            return false;
        }
        self.asked.push((key.to_owned(), at));
        true
    }

    fn is_given(&self, key: &str) -> bool {
        !key.starts_with("mode.") || self.given.as_ref().is_none_or(|given| given.contains(key))
    }

    fn unbound(&mut self, key: &str, error: &BindError) {
        let denied = error.cause.kind() == io::ErrorKind::PermissionDenied;
        self.error(
            if denied { StartupErrorKind::Permission } else { StartupErrorKind::Port },
            key,
            error.to_string(),
        );
    }
}

impl StartupErrors {
    /// The gravest kind among them; none if there are none.
    pub fn most_severe(&self) -> Option<StartupErrorKind> {
        self.iter().map(|found| found.kind).min()
    }
}

impl fmt::Display for StartupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)
    }
}

// The signals that a process ends at, or reads its files again.

/// SIGTERM and SIGINT, each as often as it comes; and SIGHUP, which ends nothing.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// None where a terminal that goes away is to end the program.
    hangup: Option<Signal>,
}

impl Signals {
    /// For a program that a terminal started.
    ///
    /// # Errors
    ///
    /// The system gives none.
    pub fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, hangup: None })
    }

    /// As [`Self::new`]; SIGHUP means to read the files again.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn of_a_daemon() -> std::io::Result<Self> {
        Ok(Self { hangup: Some(signal(SignalKind::hangup())?), ..Self::new()? })
    }

    /// Waits for one that ends the program; reads the files again at each SIGHUP. Cancel safe.
    pub async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = OptionFuture::from(self.hangup.as_mut().map(Signal::recv)), if self.hangup.is_some() => {
                    info!("SIGHUP: certificates, tokens, users and the config's policies are read again; what else it says counts at a start");
                    reload::reload_now();
                }
            }
        }
    }
}

// What systemd is told of a service: that it is up, that it stops, and that it lives. Elsewhere nobody is told.

/// The service that this process is, if systemd has started it.
#[derive(Debug, Clone, Copy)]
pub struct SystemdNotifier;

impl SystemdNotifier {
    /// It is up: what waits for the service may start.
    pub fn is_up(self) {
        tell(&[NotifyState::Ready]);
    }

    /// It has begun to stop, which may take as long as its sessions may.
    pub fn stops(self) {
        tell(&[NotifyState::Stopping]);
    }

    /// Tells again and again that the runtime still runs tasks, if systemd watches that; never completes. Cancel safe.
    pub async fn run_watchdog(self) {
        let Some(within) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
        // Twice in the time, so that one that is late kills nothing.
        let mut beat = tokio::time::interval((within / 2).max(SHORTEST));
        loop {
            beat.tick().await;
            tell(&[NotifyState::Watchdog]);
        }
    }
}

/// If systemd cannot be told it will act by itself; nothing else depends on it.
fn tell(what: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(what);
}

/// Between two signs of life.
const SHORTEST: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use crate::config::Environment;
    use crate::config::server::ServerConfig;

    use super::*;

    const ANYWHERE: &str = "127.0.0.1:0";

    #[test]
    fn each_fault_is_told_once_and_the_gravest_counts() {
        let mut startup = Startup::default();
        startup.error(StartupErrorKind::Port, "", "taken");
        for _ in 0..2 {
            assert_eq!(startup.collect(StartupErrorKind::System, &["a", "b"], Err::<(), _>("no DNS")), None);
        }
        assert_eq!(startup.collect(StartupErrorKind::Config, &["c"], Ok::<_, String>(1)), Some(1));
        let faults = startup.finish(Some(())).unwrap_err();
        assert_eq!(
            (faults.to_string().as_str(), faults.most_severe()),
            ("taken\na, b: no DNS", Some(StartupErrorKind::System))
        );
    }

    #[tokio::test]
    async fn of_a_config_with_faults_only_what_it_says_is_looked_into() {
        let text = "[mode.cloud.stream.server]\ncert = \"/nowhere/c\"\n[mode.cloud.ssh]\nport = \"x\"\n";
        let mut startup = Startup::default();
        let (settings, _) = startup.settings(ServerConfig::examine(text, &Environment::default()));
        let (cert, key) = ("mode.cloud.stream.server.cert", "mode.cloud.stream.server.key");
        for (name, path) in [(cert, &settings.server.cert), (key, &settings.server.key)] {
            assert!(!startup.check_file(name, path, |_| Ok::<_, String>(())));
        }
        assert!(startup.bind_optional("mode.cloud.ssh", settings.ssh.listen).is_none());
        let told = startup.into_faults().to_string();
        assert!(told.contains("cert: cannot read /nowhere/c") && told.contains("ssh.port"), "{told}");
        assert_eq!(told.lines().count(), 2, "{told}");
    }

    #[test]
    fn a_congestion_control_must_be_one_of_the_kernels() {
        let mut startup = Startup::default();
        let key = "mode.edge.stream.client.congestion";
        assert!(startup.congestion(key, None).is_some() && startup.congestion(key, Some("reno")).is_some());
        assert!(startup.congestion(key, Some("slowpoke")).is_none());
        let told = startup.into_faults().to_string();
        assert!(told.starts_with(&format!("{key}: ")) && told.contains("modprobe tcp_slowpoke"), "{told}");
    }

    #[tokio::test]
    async fn two_keys_with_one_port_are_told_of_each_other() {
        let mut startup = Startup::checking();
        for (key, at) in [
            ("one", "127.0.0.1:7000"),
            ("other", "127.0.0.2:7000"),
            ("two", "0.0.0.0:7000"),
            ("any", ANYWHERE),
            ("any too", ANYWHERE),
        ] {
            startup.bind(key, at.parse().unwrap());
        }
        let faults = startup.into_faults();
        let told = "two: 0.0.0.0:7000: one asks for that port, too: give each a port of its own";
        assert_eq!(
            (faults.to_string().as_str(), faults.most_severe()),
            (told, Some(StartupErrorKind::Config))
        );
    }

    #[tokio::test]
    async fn a_check_tries_no_port() {
        let at = ANYWHERE.parse().unwrap();
        assert!(Startup::checking().bind("k", at).is_none());
        assert!(Startup::default().bind("k", at).is_some());
    }

    #[test]
    fn a_fault_of_a_file_names_it_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "").unwrap();
        let mut startup = Startup::default();
        assert!(!startup.check_file("k", &path, |_| Err::<(), _>("is empty")));
        assert!(!startup.check_file("l", &path, |_| Err::<(), _>(format!("{} is odd", path.display()))));
        let told = startup.into_faults().to_string();
        assert_eq!(told.matches(&*path.to_string_lossy()).count(), 2, "{told}");
    }
}
