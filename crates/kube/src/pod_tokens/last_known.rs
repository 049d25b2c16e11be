//! What a server knows of its cluster, in a file for a next start at which kube-apiserver is away.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::watch::Receiver;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::warn;

use crate::pod_tokens::MAX_OUTAGE;
use crate::pod_tokens::jwt::KeySet;
use tunnel_base::addresses::cluster_state::{KnownEdgePods, KnownNodes};
use tunnel_base::files;

/// The last answers of kube-apiserver.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct LastKnown {
    /// The Nodes.
    pub nodes: KnownNodes,
    pub(crate) pods: KnownEdgePods,
    pub(crate) keys: KnownKeys,
    /// The age of the file: it is written at least whenever the keys were read, and is as old as what is known of pods.
    #[serde(skip)]
    pub(crate) age: Option<Duration>,
}

/// The keys of kube-apiserver, and its name as an issuer; `None` until they are known.
pub(crate) type KnownKeys = Option<(String, KeySet)>;

impl LastKnown {
    /// Reads the file of an earlier process. Without one, or if it is broken or too old, nothing is known. Blocks on the
    /// disk.
    pub fn recall(file: Option<&Path>) -> Self {
        let Some(path) = file else { return Self::default() };
        match Self::read(path) {
            Ok(known) if known.age < Some(MAX_OUTAGE) => return known,
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(file = %path.display(), %error, "last known pods of edges not read");
            }
            _ => {}
        }
        Self::default()
    }

    fn read(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // The clock may have been set back.
        let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
        let text = io::read_to_string(file.take(MAX_BYTES))?;
        Ok(Self { age: Some(age), ..serde_json::from_str(&text)? })
    }
}

/// Writes the file whenever something has changed, but not more often than every few seconds. `pods_age` is the time since
/// when the pods are not followed.
pub(crate) async fn keep(
    file: Option<PathBuf>,
    mut nodes: Receiver<KnownNodes>,
    mut pods: Receiver<KnownEdgePods>,
    mut keys: Receiver<KnownKeys>,
    pods_age: impl Fn() -> Option<Duration>,
) {
    let Some(file) = file else { return };
    loop {
        tokio::select! {
            Ok(()) = nodes.changed() => {}
            Ok(()) = pods.changed() => {}
            Ok(()) = keys.changed() => {}
            else => return,
        }
        let known = LastKnown {
            nodes: nodes.borrow_and_update().clone(),
            pods: pods.borrow_and_update().clone(),
            keys: keys.borrow_and_update().clone(),
            age: None,
        };
        let path = file.clone();
        // Published keys can be read while lists fail. They must not make what is known of pods look new.
        let known_at =
            SystemTime::now().checked_sub(pods_age().unwrap_or_default()).unwrap_or(SystemTime::UNIX_EPOCH);
        let written = spawn_blocking(move || {
            files::replace(&path, 0o600, &serde_json::to_vec(&known)?, |_| Ok(()))?;
            File::options().append(true).open(&path)?.set_modified(known_at)
        });
        if let Ok(Err(error)) = written.await {
            warn!(file = %file.display(), %error, "last known pods of edges not written");
        }
        sleep(PAUSE).await;
    }
}

/// Shortest time between two writes: a thousand edges that are installed are a few of them.
pub(crate) const PAUSE: Duration = Duration::from_secs(5);
/// Maximum size that is read, and that a peer may tell: 100,000 pods.
pub(crate) const MAX_BYTES: u64 = 16 << 20;
