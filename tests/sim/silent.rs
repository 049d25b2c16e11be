//! Lines that are unresponsive, or only seem to be: a backup link exists until the dialling end has chosen.

use std::time::Duration;

use tokio::time::Instant;

use super::world::Simulation;

/// The numbers of two links between the same two processes.
pub(crate) struct BackupPair {
    old: u64,
    new: u64,
    /// Time when the dialling end chooses.
    when: Instant,
    takes_new: bool,
}

impl Simulation {
    /// Makes a line unresponsive in some directions, or only slow. Its end at the edge, or at the server that dialled,
    /// opens a backup link, and the remote end moves its sessions there.
    pub(crate) fn open_backup_link(&mut self, at: usize) {
        let line = &mut self.lines[at];
        let silent = [self.rng.one_in(2), self.rng.one_in(2)];
        line.fall_silent(silent);
        let (old, between) = (line.number, [line.ends[0].at, line.ends[1].at]);
        let dialled = line.ends[0].link.clone();
        self.ledger.note(|| format!("link {old} becomes unresponsive in {silent:?}, and gets a backup link"));
        self.ledger.backup_links();
        let primary = self.link_as(between, true);
        let table = self.processes[between[0]].table.clone();
        let left_link = primary.unwrap_or(dialled);
        table.leave(&left_link, None, |_| true);
        let takes_new = silent != [false; 2] || self.rng.one_in(2);
        let when = Instant::now() + self.rng.time(Duration::from_millis(500));
        self.backup_pairs.push(BackupPair { old, new: self.links, when, takes_new });
    }

    /// Closes one of the two links at the dialling end. The other end learns of it soon, or late if the line is
    /// unresponsive.
    pub(crate) fn choose_links(&mut self, now: Instant) {
        let due: Vec<_> = self.backup_pairs.extract_if(.., |backup_pairs| backup_pairs.when <= now).collect();
        for BackupPair { old, new, takes_new, .. } in due {
            let closing = if takes_new { old } else { new };
            let Some(line) = self.lines.iter_mut().find(|line| line.number == closing) else { continue };
            self.ledger.note(|| format!("link {closing} is no longer needed"));
            line.cut(now, Duration::from_secs(4), &self.rng);
            line.ends[1].notices = Some(now);
        }
    }

    /// Makes all pending choices, and cuts unresponsive lines, so that both ends learn of it.
    pub(crate) fn finish_choices(&mut self) {
        let now = Instant::now();
        self.backup_pairs.iter_mut().for_each(|backup_pairs| backup_pairs.when = now);
        self.choose_links(now);
        for line in self.lines.iter_mut().filter(|line| line.is_silent()) {
            line.cut(now, Duration::from_millis(100), &self.rng);
        }
    }
}
