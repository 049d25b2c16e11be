//! A text that all pods of a cloud share, and that each may change: in a file, in etcd, or in a Secret of Kubernetes.

mod etcd;
mod file;
#[cfg(feature = "kubernetes")]
mod secret;

pub use etcd::EtcdCell;
pub use file::FileCell;
#[cfg(feature = "kubernetes")]
pub use secret::SecretCell;

#[cfg(feature = "kubernetes")]
use super::ClusterError;
use super::{EtcdError, SharedFileError};

/// Where the text stands.
#[derive(Debug)]
pub enum Cell {
    /// In a file, on a disk that the pods share.
    File(FileCell),
    /// In etcd.
    Etcd(Box<EtcdCell>),
    /// In a Secret of Kubernetes.
    #[cfg(feature = "kubernetes")]
    Secret(Box<SecretCell>),
}

/// The text at some time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Empty if nobody has written any.
    pub text: Vec<u8>,
    /// By which the store knows it again; empty if it is not there, or is known by itself.
    version: String,
}

/// Why the text was neither read nor written.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    /// The file.
    #[error(transparent)]
    File(#[from] SharedFileError),
    /// etcd.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// The Secret, or its cluster.
    #[cfg(feature = "kubernetes")]
    #[error("Secret {name}: {cause}")]
    Secret {
        /// Its name.
        name: String,
        /// What went wrong.
        cause: ClusterError,
    },
    /// It is longer than its store takes.
    #[error(
        "{bytes} bytes are too many for a Secret, which takes {most}: keep it in etcd, or revoke nodes that are gone"
    )]
    Full {
        /// What it would hold.
        bytes: usize,
        /// What it may hold.
        most: usize,
    },
}

impl Cell {
    /// Reads it.
    ///
    /// # Errors
    ///
    /// The store does not answer, or does not let us.
    pub async fn read(&mut self) -> Result<Seen, CellError> {
        match self {
            Self::File(file) => file.read().await,
            Self::Etcd(etcd) => etcd.read().await,
            #[cfg(feature = "kubernetes")]
            Self::Secret(secret) => secret.read().await,
        }
    }

    /// Writes it, if it is still what was seen; `false`: somebody else was quicker, and nothing is written. Not cancel
    /// safe: who does not wait for the answer does not know whether it is written.
    ///
    /// # Errors
    ///
    /// As for [`Self::read`]; then, too, it may or may not be written.
    pub async fn write(&mut self, seen: &Seen, text: Vec<u8>) -> Result<bool, CellError> {
        match self {
            Self::File(file) => file.write(seen.clone(), text).await,
            Self::Etcd(etcd) => etcd.write(seen, &text).await,
            #[cfg(feature = "kubernetes")]
            Self::Secret(secret) => secret.write(seen, text).await,
        }
    }
}
