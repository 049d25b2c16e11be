//! A program that runs until a signal, as its config describes it: a server or an edge.

use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};

use futures_util::future::BoxFuture;

use crate::config::config_watch::ConfigFile;
use crate::config::plan::ConfigPlan;
use crate::startup::signals::Signals;
use crate::startup::{StartupErrorCollector, StartupErrors};
use tunnel_base::drain::Drained;
use tunnel_base::logging::LogLevelHandle;

/// The config of a server or an edge.
pub trait DaemonConfig: Any + fmt::Debug + Send + Sync {
    /// Checks for everything that would prevent a start, without starting anything.
    fn check(&self, startup: &mut StartupErrorCollector);

    /// Returns what a reload of another config of this role does.
    fn plan(&self, new: &dyn DaemonConfig) -> ConfigPlan;

    /// Returns the reason why Kubernetes is not used; `None` if it is used.
    fn uses_no_kubernetes(&self) -> Option<&'static str>;

    /// Returns the files that contain secrets, each with its key. `config` is the path of the config file.
    fn secrets(&self, config: &Path) -> Vec<(String, PathBuf)>;

    /// Returns the admin socket that a key sets.
    fn admin_socket(&self) -> Option<&Path>;

    /// Notes that the config file is bad, and that this is its last good copy.
    fn set_last_good(&mut self) {}

    /// Starts, and serves until a signal. Then it waits for sessions until the drain timeout, or the next signal.
    fn serve(self: Box<Self>, file: ConfigFile, level: LogLevelHandle, signals: Signals) -> Serving;
}

/// What a server or an edge does until it stops.
pub type Serving = BoxFuture<'static, Result<Drained, StartupErrors>>;

impl dyn DaemonConfig {
    /// Returns the config of a role.
    pub(crate) fn of<T: DaemonConfig>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }
}
