//! The rights to files: what the user of the systemd units may read, and what only it should.

use std::fs::{Metadata, canonicalize, metadata, read_to_string};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::command::doctor::DoctorFindings;
use tunnel_net::reload::is_world_readable;

/// Checks that the service may read its files, and that no other user may read its secrets.
pub(super) fn check_files(
    config: &Path,
    public: Vec<(String, PathBuf)>,
    secrets: Vec<(String, PathBuf)>,
    found: &mut DoctorFindings,
) {
    for (key, file) in &secrets {
        if is_world_readable(file) {
            let hint = format!("chmod o-rwx {}", file.display());
            found.add_warning("secrets", format!("{key}: every user may read {}", file.display()), &hint);
        }
    }
    let Some(user) = ServiceUser::find() else { return };
    let config = ("--config".to_owned(), config.to_owned());
    let all = std::iter::once(config).chain(public).chain(secrets);
    for (key, file) in all.filter(|(_, file)| !user.may_read(file)) {
        let file = file.display();
        let hint = format!("chgrp {USER} {file}; chmod g+r {file}; and chmod a+x the directories above it");
        let text = format!("{key}: user {USER}, which runs the service, cannot read {file}");
        found.add_error("files", text, "a file that the service may read", &hint);
    }
}

/// The user of the package's units, with its groups.
#[derive(Debug, PartialEq, Eq)]
struct ServiceUser {
    id: u32,
    groups: Vec<u32>,
}

impl ServiceUser {
    /// Returns the user if this process is root, which may read files that the service may not. Returns `None`
    /// otherwise, or if the machine has no such user.
    fn find() -> Option<Self> {
        // The owner of this directory is the user of this process.
        let is_root = metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
        let read = |path| read_to_string(path).unwrap_or_default();
        is_root.then(|| Self::parse(&read("/etc/passwd"), &read("/etc/group"))).flatten()
    }

    /// Parses `/etc/passwd` and `/etc/group`.
    fn parse(users: &str, groups: &str) -> Option<Self> {
        let fields: Vec<_> =
            users.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|user| user[0] == USER)?;
        let id = fields.get(2)?.parse().ok()?;
        let own = fields.get(3)?.parse().ok()?;
        let others = groups.lines().filter_map(|line| {
            let mut fields = line.split(':').skip(2);
            let group = fields.next()?.parse().ok()?;
            fields.next()?.split(',').any(|member| member == USER).then_some(group)
        });
        Some(Self { id, groups: std::iter::once(own).chain(others).collect() })
    }

    /// Returns true if the user may read a file, or the file does not exist. Access control lists are ignored.
    fn may_read(&self, path: &Path) -> bool {
        let Ok(path) = canonicalize(path) else { return true };
        let may = |path: &Path, right| metadata(path).is_ok_and(|found| self.has(right, &found));
        may(&path, READ) && path.ancestors().skip(1).all(|directory| may(directory, ENTER))
    }

    fn has(&self, right: u32, found: &Metadata) -> bool {
        let shift = match () {
            () if found.uid() == self.id => 6,
            () if self.groups.contains(&found.gid()) => 3,
            () => 0,
        };
        found.mode() >> shift & right != 0
    }
}

/// Name of the user.
const USER: &str = "tunnel";
/// Right to read a file.
const READ: u32 = 4;
/// Right to enter a directory.
const ENTER: u32 = 1;

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, set_permissions, write};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_service_user_and_its_groups_are_parsed() {
        let users = "root:x:0:0:root:/root:/bin/sh\ntunnel:x:998:997::/nonexistent:/usr/sbin/nologin\n";
        let groups = "root:x:0:\ntunnel:x:997:\nssl-cert:x:110:postgres,tunnel\nadm:x:4:syslog\n";
        assert_eq!(ServiceUser::parse(users, groups), Some(ServiceUser { id: 998, groups: vec![997, 110] }));
        for none in ["", "tunnel2:x:1:1::/:", "tunnel:x:y:1::/:", "tunnel"] {
            assert_eq!(ServiceUser::parse(none, groups), None, "{none}");
        }
    }

    #[test]
    fn the_service_user_reads_files_by_owner_group_or_other_permissions() {
        let place = tempfile::tempdir().unwrap();
        let (directory, group) = (place.path().join("keys"), metadata(place.path()).unwrap().gid());
        create_dir(&directory).unwrap();
        set_permissions(place.path(), Permissions::from_mode(0o755)).unwrap();
        let file = directory.join("cloud.key");
        write(&file, "").unwrap();
        let mode = |path: &Path, mode| set_permissions(path, Permissions::from_mode(mode)).unwrap();
        let (member, stranger) =
            (ServiceUser { id: u32::MAX, groups: vec![group] }, ServiceUser { id: u32::MAX, groups: vec![] });
        for (of_directory, of_file, may) in [
            (0o755, 0o600, [false, false]),
            (0o755, 0o640, [true, false]),
            (0o755, 0o604, [false, true]),
            (0o750, 0o644, [true, false]),
            (0o700, 0o644, [false, false]),
        ] {
            mode(&directory, of_directory);
            mode(&file, of_file);
            let found = [&member, &stranger].map(|user| user.may_read(&file));
            assert_eq!(found, may, "{of_directory:o} {of_file:o}");
        }
        assert!(stranger.may_read(&directory.join("missing")), "the config check reports it");
    }
}
