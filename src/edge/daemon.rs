//! Runs an edge by its config.

use std::path::{Path, PathBuf};

use futures_util::FutureExt as _;

use crate::config::config_watch::ConfigFile;
use crate::config::plan::ConfigPlan;
use crate::edge::Edge;
use crate::edge::config::EdgeConfig;
use crate::startup::StartupErrorCollector;
use crate::startup::daemon::{DaemonConfig, Serving};
use crate::startup::signals::Signals;
use crate::startup::systemd::wait_stop;
use tunnel_base::logging::LogLevelHandle;

impl DaemonConfig for EdgeConfig {
    fn check(&self, startup: &mut StartupErrorCollector) {
        Edge::validate(self, startup);
    }

    fn plan(&self, new: &dyn DaemonConfig) -> ConfigPlan {
        new.of().map(|new| Self::plan(self, new)).unwrap_or_default()
    }

    fn uses_no_kubernetes(&self) -> Option<&'static str> {
        let unused = "an edge uses Kubernetes only for its certificate; set enabled = true in [edge.csr]";
        self.csr.is_none().then_some(unused)
    }

    fn secrets(&self, config: &Path) -> Vec<(String, PathBuf)> {
        Self::secrets(self, config)
    }

    fn admin_socket(&self) -> Option<&Path> {
        self.admin.listen.as_deref()
    }

    fn set_last_good(&mut self) {
        self.is_last_good = true;
    }

    fn serve(self: Box<Self>, file: ConfigFile, level: LogLevelHandle, mut signals: Signals) -> Serving {
        let serving = async move {
            let edge = Edge::start(*self, Some(level))?;
            edge.watch_config(file);
            wait_stop(&mut signals).await;
            Ok(edge.shutdown(signals.next()).await)
        };
        serving.boxed()
    }
}
