//! A shared text in a file, on a disk that the pods share.

use std::path::PathBuf;

use super::{CellError, Seen};
use crate::registry::shared_file;

/// One file.
#[derive(Debug, Clone)]
pub struct FileCell(PathBuf);

impl FileCell {
    /// Nothing is read yet. A lock file and a file being written stand beside it.
    pub fn new(file: PathBuf) -> Self {
        Self(file)
    }

    pub(super) async fn read(&self) -> Result<Seen, CellError> {
        let file = self.0.clone();
        let text = shared_file::in_background(move || shared_file::content(&file)).await?;
        Ok(Seen { text: text.unwrap_or_default(), version: String::new() })
    }

    pub(super) async fn write(&self, seen: Seen, text: Vec<u8>) -> Result<bool, CellError> {
        let file = self.0.clone();
        let write = move || {
            shared_file::make_directory(&file);
            let _held = shared_file::lock(&file)?;
            if shared_file::content(&file)?.unwrap_or_default() != seen.text {
                return Ok(false);
            }
            shared_file::replace(&file, OWNER_ONLY, &text).map(|()| true)
        };
        Ok(shared_file::in_background(write).await?)
    }
}

/// The mode of a new file.
const OWNER_ONLY: u32 = 0o600;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    #[tokio::test]
    async fn of_several_writers_that_have_seen_the_same_one_writes() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("shared");
        let cells: Vec<_> = (0..8).map(|_| FileCell::new(path.clone())).collect();
        let seen = cells[0].read().await.unwrap();
        assert_eq!(seen, Seen::default());
        let writes = cells.iter().enumerate().map(|(n, cell)| {
            let seen = seen.clone();
            async move { cell.write(seen, n.to_string().into_bytes()).await.unwrap() }
        });
        let written = futures_util::future::join_all(writes).await;
        assert_eq!(written.iter().filter(|written| **written).count(), 1, "{written:?}");
        let winner = written.iter().position(|written| *written).unwrap().to_string();
        assert_eq!(cells[1].read().await.unwrap().text, winner.as_bytes());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn the_directory_is_made_unless_another_one_is_missing() {
        let place = tempfile::tempdir().unwrap();
        let cell = FileCell::new(place.path().join("new/shared"));
        assert!(cell.write(Seen::default(), b"a".to_vec()).await.unwrap());
        let mode = fs::metadata(place.path().join("new")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let cell = FileCell::new(place.path().join("no/such/shared"));
        let told = cell.write(Seen::default(), b"a".to_vec()).await.unwrap_err().to_string();
        assert!(told.contains("check that its directory exists"), "{told}");
    }
}
