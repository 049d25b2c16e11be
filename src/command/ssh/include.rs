//! The file of `tunnel ssh-config --write`, and the line of ssh's own config that includes it.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use crate::command::file_edit::FileEdit;
use crate::command::{CommandError, CommandResult};
use crate::config::Environment;
use tunnel_base::files;

/// Writes the block into the file, which ssh's config then includes. Without a block, removes what was written. Returns
/// lines for the terminal.
///
/// # Errors
///
/// Returns an error if a file cannot be changed, or something else wrote the file.
pub(super) fn set(env: &Environment, block: Option<&str>) -> CommandResult {
    let dir = env.home.as_ref().map(|home| home.join(".ssh"));
    let dir = dir.ok_or_else(|| CommandError::usage("set HOME to an absolute path"))?;
    let own = dir.join(OWN_FILE);
    let config = dir.join("config");
    let failed =
        |cause: io::Error| CommandError::cannot_write(format!("cannot change {}: {cause}", own.display()));
    let found = files::read_text(&own);
    let is_none = found.as_ref().is_err_and(|cause| cause.kind() == ErrorKind::NotFound);
    if own.is_symlink() || !is_none && !found.is_ok_and(|text| text.starts_with(HEADER)) {
        return Err(failed(io::Error::other("this command did not write it; move it away")));
    }
    if let Some(block) = block {
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(failed)?;
        // First what may fail. ssh ignores an Include of a file that does not exist.
        include(&config, true)?;
        files::replace(&own, 0o600, format!("{HEADER}{block}").as_bytes(), |_| Ok(())).map_err(failed)?;
        return Ok(format!(
            "wrote {} and its Include in {}; --remove undoes it\n",
            own.display(),
            config.display()
        ));
    }
    if !is_none {
        fs::remove_file(&own).map_err(failed)?;
    }
    include(&config, false)?;
    // An empty folder has the same effect as none.
    let _ = fs::remove_dir(&dir);
    Ok(format!("{} and its Include in {} are removed\n", own.display(), config.display()))
}

/// Includes the file at the top of ssh's config, or removes that line. Further below it would be part of a `Host` block.
fn include(config: &Path, is_wanted: bool) -> CommandResult<()> {
    let failed = |cause| CommandError::cannot_write(format!("cannot change {}: {cause}", config.display()));
    if !config.is_symlink() && !config.exists() {
        return if is_wanted { files::create_private(config, INCLUDE).map_err(failed) } else { Ok(()) };
    }
    let edit = FileEdit::start(config)?;
    let rest = edit.text.replace(INCLUDE, "").replace(&INCLUDE.replace('\n', "\r\n"), "");
    let text = if is_wanted && !is_included(&rest) { format!("{INCLUDE}{rest}") } else { rest };
    match text.as_str() {
        same if same == edit.text => Ok(()),
        // An empty file has the same effect as none.
        "" if !config.is_symlink() => fs::remove_file(config).map_err(failed),
        text => edit.replace(text),
    }
}

/// Returns true if a line above the first `Host` and `Match` includes the file by its name.
fn is_included(config: &str) -> bool {
    let is_break = |c: char| c.is_whitespace() || matches!(c, '=' | '"');
    let mut lines = config.lines().map(|line| line.split(is_break).filter(|word| !word.is_empty()));
    lines.find_map(|mut words| match words.next()?.to_ascii_lowercase().as_str() {
        "host" | "match" => Some(false),
        "include" => {
            words.any(|word| word.strip_prefix("~/.ssh/").unwrap_or(word) == OWN_FILE).then_some(true)
        }
        _ => None,
    }) == Some(true)
}

/// The name of the file, in the folder in which a user's `Include` is resolved.
const OWN_FILE: &str = "tunnel_config";
/// The first line of the file.
const HEADER: &str = "# Written by `tunnel ssh-config --write`, which overwrites changes here.\n";
/// The lines that are added to ssh's config.
const INCLUDE: &str =
    "# Added by `tunnel ssh-config --write`; --remove takes both lines out.\nInclude tunnel_config\n";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::PathBuf;

    use super::*;

    /// Returns an environment whose home has a space in its path, and the folder of ssh there.
    fn home(place: &Path) -> (Environment, PathBuf) {
        let home = place.join("her home");
        fs::create_dir(&home).unwrap();
        let ssh = home.join(".ssh");
        (Environment { home: Some(home), ..Environment::default() }, ssh)
    }

    #[test]
    fn the_block_has_a_file_of_its_own_that_is_included_once_and_removed_without_a_trace() {
        let place = tempfile::tempdir().unwrap();
        let (env, ssh) = home(place.path());
        let read = |name: &str| fs::read_to_string(ssh.join(name)).ok();
        let mode = |name: &str| fs::metadata(ssh.join(name)).unwrap().permissions().mode() & 0o777;
        set(&env, Some("Host a\n")).unwrap();
        assert_eq!(["", "config", OWN_FILE].map(mode), [0o700, 0o600, 0o600]);
        set(&env, Some("Host b\n")).unwrap();
        assert_eq!(read("config").unwrap(), INCLUDE);
        assert_eq!(read(OWN_FILE).unwrap(), format!("{HEADER}Host b\n"));
        set(&env, None).unwrap();
        assert!(!ssh.exists());
        set(&env, None).unwrap();
        // The user's own lines, the file's mode and a link to it stay. In a Host block, an Include has another meaning.
        fs::create_dir(&ssh).unwrap();
        let theirs = "# mine\r\nHost old\n  User x\n  Include tunnel_config\nHost *\n Port 1";
        let real = place.path().join("dotfiles");
        fs::write(&real, theirs).unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&real, ssh.join("config")).unwrap();
        for _ in 0..2 {
            set(&env, Some("Host c\n")).unwrap();
            assert_eq!(read("config").unwrap(), format!("{INCLUDE}{theirs}"));
        }
        set(&env, None).unwrap();
        assert!(ssh.join("config").is_symlink());
        assert_eq!(
            (fs::read_to_string(&real).unwrap(), mode("config"), read(OWN_FILE)),
            (theirs.to_owned(), 0o640, None)
        );
    }

    #[test]
    fn neither_a_foreign_file_nor_an_include_of_the_user_is_touched() {
        let place = tempfile::tempdir().unwrap();
        let (env, ssh) = home(place.path());
        fs::create_dir(&ssh).unwrap();
        let own = ssh.join(OWN_FILE);
        let config = ssh.join("config");
        for line in ["Include tunnel_config", " include=\"~/.ssh/tunnel_config\"", "INCLUDE a tunnel_config"]
        {
            let theirs = format!("Port 1\n{line}\nHost *\n");
            fs::write(&config, &theirs).unwrap();
            set(&env, Some("Host a\n")).unwrap();
            assert_eq!(fs::read_to_string(&config).unwrap(), theirs);
            set(&env, None).unwrap();
            assert_eq!((fs::read_to_string(&config).unwrap(), own.exists()), (theirs, false));
        }
        fs::write(&own, "Host theirs\n").unwrap();
        fs::write(&config, INCLUDE).unwrap();
        for refused in [set(&env, Some("Host a\n")), set(&env, None)] {
            assert!(refused.unwrap_err().text.contains("this command did not write it"));
            assert_eq!(fs::read_to_string(&own).unwrap(), "Host theirs\n");
        }
        // A link may lead to a file of another program.
        let other = place.path().join("other");
        fs::write(&other, HEADER).unwrap();
        fs::remove_file(&own).unwrap();
        symlink(&other, &own).unwrap();
        set(&env, Some("Host a\n")).unwrap_err();
        fs::remove_file(&own).unwrap();
        // A dangling link, and a config that is no file.
        fs::remove_file(&config).unwrap();
        symlink("/nowhere/config", &config).unwrap();
        assert!(set(&env, Some("Host a\n")).unwrap_err().text.contains("cannot read"));
        fs::remove_file(&config).unwrap();
        fs::create_dir(&config).unwrap();
        assert!(set(&env, Some("Host a\n")).unwrap_err().text.contains("cannot read"));
        let nobody = set(&Environment::default(), None).unwrap_err();
        assert!(nobody.text.contains("set HOME"), "{nobody}");
    }
}
