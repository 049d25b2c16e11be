//! Runs a server by its config.

use std::path::{Path, PathBuf};

use futures_util::FutureExt as _;

use crate::config::config_watch::ConfigFile;
use crate::config::plan::ConfigPlan;
use crate::parts;
use crate::server::Server;
use crate::server::config::ServerConfig;
use crate::startup::StartupErrorCollector;
use crate::startup::daemon::{DaemonConfig, Serving};
use crate::startup::signals::Signals;
use crate::startup::systemd::wait_stop;
use tunnel_base::drain::Drained;
use tunnel_base::logging::LogLevelHandle;

impl DaemonConfig for ServerConfig {
    fn check(&self, startup: &mut StartupErrorCollector) {
        Server::validate(self, startup);
    }

    fn plan(&self, new: &dyn DaemonConfig) -> ConfigPlan {
        new.of().map(|new| Self::plan(self, new)).unwrap_or_default()
    }

    fn uses_no_kubernetes(&self) -> Option<&'static str> {
        if let Err(why) = parts::KUBERNETES {
            return Some(why);
        }
        let asks = self.peers.cluster.is_some() || self.addresses.cluster.is_some();
        let proves = self.csr.is_some() || self.service_account.is_some();
        let unused = "no key requires Kubernetes; set publish or kubernetes_service of [server.peers], kubernetes = true in \
                      [server.addresses], name of [server.service_account], or profiles of [server.csr]";
        (!asks && !proves).then_some(unused)
    }

    fn secrets(&self, _: &Path) -> Vec<(String, PathBuf)> {
        self.secrets()
    }

    fn admin_socket(&self) -> Option<&Path> {
        self.admin.listen.as_deref()
    }

    fn serve(self: Box<Self>, file: ConfigFile, level: LogLevelHandle, mut signals: Signals) -> Serving {
        let serving = async move {
            // The cluster's signers may take any time, and a signal must end the wait.
            tokio::select! {
                () = Server::wait_for_certificates(&self) => {}
                () = signals.next() => return Ok(Drained::Finished),
            }
            let server = Server::start(*self, Some(level))?;
            server.watch_config(file);
            wait_stop(&mut signals).await;
            Ok(server.shutdown(signals.next()).await)
        };
        serving.boxed()
    }
}
