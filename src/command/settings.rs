//! The settings with which the program serves: the config, the environment, and what the command line says of them.

use std::path::{Path, PathBuf};

use tracing::warn;

use super::{Args, Mode};
use crate::cloud::Pod;
use crate::config::cloud::Cloud;
use crate::config::edge::EdgeSettings;
use crate::config::{Environment, Warning};
use crate::edge::Edge;
use crate::net::secret::warn_of_readers;
use crate::startup::{ConfigFile, FaultKind, Startup, tell_warnings};

/// The settings of either side.
#[derive(Debug)]
pub enum Settings {
    /// A pod's.
    Cloud(Box<Cloud>),
    /// An edge's.
    Edge(Box<EdgeSettings>),
}

impl Settings {
    /// Reads the config, and logs its warnings; `None` if it cannot be read, which is noted. `variable` gives those of the
    /// environment.
    pub fn read(
        args: &Args,
        variable: fn(&str) -> Option<String>,
        startup: &mut Startup,
    ) -> Option<(Self, ConfigFile)> {
        let from = (args.mode, args.config());
        let (settings, file, warnings) =
            Self::examine((from.0, &from.1), args.kubeconfig.clone(), variable, startup)?;
        tell_warnings(&warnings);
        if args.kubeconfig.is_some()
            && startup.is_clear()
            && let Some(why) = settings.asks_no_kubernetes()
        {
            warn!(key = "--k", "the kubeconfig is not read: {why}");
        }
        for (key, path) in settings.secrets(&file.path) {
            warn_of_readers(key, path);
        }
        Some((settings, file))
    }

    /// As [`Self::read`], and logs nothing.
    pub fn examine(
        (mode, path): (Mode, &Path),
        kubeconfig: Option<PathBuf>,
        variable: fn(&str) -> Option<String>,
        startup: &mut Startup,
    ) -> Option<(Self, ConfigFile, Vec<Warning>)> {
        let text = std::fs::read_to_string(path).map_err(|cause| {
            format!("cannot read the config {}: {cause}; name it with --c=FILE", path.display())
        });
        let text = startup.keep(FaultKind::Config, &["--c"], text)?;
        let environment = Environment { kubeconfig, ..Environment::read(variable) };
        let (settings, warnings) = match mode {
            Mode::Cloud => {
                let (settings, warnings) = startup.settings(Cloud::examine(&text, &environment));
                (Self::Cloud(Box::new(settings)), warnings)
            }
            Mode::Edge => {
                let (settings, warnings) = startup.settings(EdgeSettings::examine(&text, &environment));
                (Self::Edge(Box::new(settings)), warnings)
            }
        };
        Some((settings, ConfigFile { path: path.to_owned(), text, environment }, warnings))
    }

    /// Looks for all that is in the way of a start, and starts nothing.
    pub fn check(&self, startup: &mut Startup) {
        match self {
            Self::Cloud(settings) => Pod::check(settings, startup),
            Self::Edge(settings) => Edge::check(settings, startup),
        }
    }

    /// Why nothing here asks Kubernetes; `None`: something does.
    fn asks_no_kubernetes(&self) -> Option<&'static str> {
        match self {
            Self::Edge(_) => Some("an edge asks nothing of Kubernetes"),
            Self::Cloud(_) if cfg!(not(feature = "kubernetes")) => {
                Some("this program is built without Kubernetes; build it with --features kubernetes")
            }
            Self::Cloud(cloud) => {
                let asks = cloud.registry.cluster.is_some()
                    || cloud.addresses.cluster.is_some()
                    || cloud.csr.is_some();
                let unused = "no key asks Kubernetes: set publish or service of [mode.cloud.registry], kubernetes = true in \
                              [mode.cloud.addresses], or profiles of [mode.cloud.csr]";
                (!asks).then_some(unused)
            }
        }
    }

    /// The files that hold secrets, each with its key; `config` is where the settings stand.
    fn secrets<'a>(&'a self, config: &'a Path) -> Vec<(&'a str, &'a Path)> {
        match self {
            Self::Cloud(settings) => settings.secrets(),
            Self::Edge(settings) => settings.secrets(config),
        }
    }
}
