//! The sessions of this process, for people who look on.

use crate::protocol::lock;
pub use crate::protocol::session::view::SessionView;
use crate::protocol::table::SessionTable;

impl SessionTable {
    /// Sessions with an end here, `most` of them at most, in the order of their ids: two looks show the same ones, as
    /// far as they live. Each of the table's locks is held for a copy only.
    pub fn overview(&self, most: usize) -> Vec<SessionView> {
        let mut shown: Vec<SessionView> = Vec::new();
        for shard in &self.shards {
            let left = most - shown.len();
            if left == 0 {
                break;
            }
            let mut sessions: Vec<_> = lock(shard).values().cloned().collect();
            sessions.sort_unstable_by_key(|session| session.key.id);
            shown.extend(sessions.iter().take(left).map(|session| session.view()));
        }
        shown
    }
}
