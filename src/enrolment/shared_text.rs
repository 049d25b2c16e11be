//! A text that all servers of a cloud share and may change: in a file, or in etcd.

use std::path::PathBuf;

use crate::etcd::member::EtcdConnection;
use crate::etcd::{EtcdAccess, EtcdClient};
use crate::publish::shared_file;
use tunnel_base::stores::{StoreFuture, TextStore, VersionedText};
use tunnel_net::resolver::Resolver;

/// A text in a file, on a disk that all servers share.
#[derive(Debug, Clone, derive_more::Display)]
#[display("{}", _0.display())]
pub struct FileTextStore(PathBuf);

impl FileTextStore {
    /// Creates the store without reading. A lock file and a temporary file are created next to the file.
    pub fn new(file: PathBuf) -> Self {
        Self(file)
    }
}

impl TextStore for FileTextStore {
    fn read(&mut self) -> StoreFuture<'_, VersionedText> {
        let file = self.0.clone();
        Box::pin(async move {
            let text = shared_file::in_background(move || shared_file::content(&file)).await?;
            let is_missing = text.is_none();
            Ok(VersionedText { text: text.unwrap_or_default(), is_missing, ..VersionedText::default() })
        })
    }

    fn write<'a>(&'a mut self, seen: &'a VersionedText, text: Vec<u8>) -> StoreFuture<'a, bool> {
        let file = self.0.clone();
        let seen = seen.clone();
        Box::pin(async {
            Ok(shared_file::in_background(move || {
                shared_file::make_directory(&file);
                let _held = shared_file::lock(&file)?;
                if shared_file::content(&file)?.unwrap_or_default() != seen.text {
                    return Ok(false);
                }
                shared_file::replace(&file, OWNER_ONLY, &text).map(|()| true)
            })
            .await?)
        })
    }
}

/// Mode of a new file.
const OWNER_ONLY: u32 = 0o600;

/// A text in a key of an etcd cluster.
#[derive(Debug, derive_more::Display)]
#[display("{} of etcd", key.escape_ascii())]
pub struct EtcdTextStore {
    /// The members of the cluster.
    members: EtcdClient,
    key: Vec<u8>,
}

impl EtcdTextStore {
    /// Creates the store without connecting.
    pub fn new(access: EtcdAccess, key: &str, resolver: Resolver) -> Self {
        Self { members: EtcdClient::of(access, resolver), key: key.as_bytes().to_vec() }
    }
}

impl TextStore for EtcdTextStore {
    fn read(&mut self) -> StoreFuture<'_, VersionedText> {
        Box::pin(async move {
            let key = &self.key;
            let get = |member: EtcdConnection| async move { member.get(key.clone()).await };
            let found = self.members.call(get).await?;
            let revision =
                |(text, at): (_, i64)| VersionedText { text, version: at.to_string(), is_missing: false };
            Ok(found.map(revision).unwrap_or_default())
        })
    }

    fn write<'a>(&'a mut self, seen: &'a VersionedText, text: Vec<u8>) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            let last_changed = seen.version.parse().unwrap_or(0);
            let key = &self.key;
            let text = &text;
            let swap = |member: EtcdConnection| async move {
                member.swap(key.clone(), last_changed, text.clone()).await
            };
            // After a retry whose response was lost, this may be false although this process wrote the text.
            Ok(self.members.call(swap).await?)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn only_one_of_several_concurrent_writers_of_a_revision_succeeds() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("shared");
        let mut cells: Vec<_> = (0..8).map(|_| FileTextStore::new(path.clone())).collect();
        let seen = cells[0].read().await.unwrap();
        assert_eq!(seen, VersionedText { is_missing: true, ..VersionedText::default() });
        let writes = cells.iter_mut().enumerate().map(|(n, cell)| {
            let seen = seen.clone();
            async move { cell.write(&seen, n.to_string().into_bytes()).await.unwrap() }
        });
        let written = futures_util::future::join_all(writes).await;
        assert_eq!(written.iter().filter(|written| **written).count(), 1, "{written:?}");
        let winner = written.iter().position(|written| *written).unwrap().to_string();
        assert_eq!(cells[1].read().await.unwrap().text, winner.as_bytes());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn the_stores_directory_is_created_unless_its_parent_is_missing() {
        let place = tempfile::tempdir().unwrap();
        let mut cell = FileTextStore::new(place.path().join("new/shared"));
        assert!(cell.write(&VersionedText::default(), b"a".to_vec()).await.unwrap());
        let mode = fs::metadata(place.path().join("new")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let mut cell = FileTextStore::new(place.path().join("no/such/shared"));
        let message = cell.write(&VersionedText::default(), b"a".to_vec()).await.unwrap_err().to_string();
        assert!(message.contains("check that its directory exists"), "{message}");
    }
}
