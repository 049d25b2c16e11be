//! The file of `tunnel ssh-config --write`, and the line of ssh's own config that includes it.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process;

use crate::command::CommandError;
use crate::command::file_edit::FileEdit;
use crate::config::Environment;
use tunnel_base::files;

/// Writes the blocks into the file, and includes it if it is not included yet. Returns lines for the terminal.
///
/// # Errors
///
/// Returns an error if a file cannot be written, or another program wrote the file.
pub(super) fn write(
    env: &Environment,
    blocks: &str,
    nodes: &[String],
    command: &str,
) -> Result<String, CommandError> {
    let dir = ssh_dir(env)?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.map_err(|cause| CommandError::cannot_write(format!("cannot create {}: {cause}", dir.display())))?;
    let own = dir.join(OWN_FILE);
    is_written_here(&own)?;
    let text = format!("{HEADER}{blocks}");
    files::replace(&own, 0o600, text.as_bytes(), |_| Ok(()))
        .map_err(|cause| CommandError::cannot_write(format!("cannot write {}: {cause}", own.display())))?;
    let config = dir.join("config");
    include(&config).map_err(|error| {
        let text =
            format!("{}; or add this line yourself, above the first Host: Include {OWN_FILE}", error.text);
        CommandError { text, ..error }
    })?;
    let note = nodes.iter().find(|name| !name.starts_with('!')).and_then(|name| unused(name, command));
    let what = if let [one] = nodes { one.clone() } else { format!("{} names of nodes", nodes.len()) };
    Ok(format!(
        "wrote {} for {what}, and its Include in {}\nto undo this:\n  tunnel ssh-config --remove\n{}",
        own.display(),
        config.display(),
        note.unwrap_or_default(),
    ))
}

/// Removes what [`write`] wrote, and nothing else. Returns lines for the terminal.
///
/// # Errors
///
/// Returns an error if a file cannot be changed, or another program wrote the file.
pub(super) fn remove(env: &Environment) -> Result<String, CommandError> {
    let dir = ssh_dir(env)?;
    let removed = |path: &Path| {
        fs::remove_file(path)
            .map_err(|cause| CommandError::cannot_write(format!("cannot remove {}: {cause}", path.display())))
    };
    let config = dir.join("config");
    let mut lines = String::new();
    if files::read_text(&config).is_ok_and(|text| text.contains(INCLUDE)) {
        let edit = FileEdit::start(&config)?;
        let rest = edit.text().replace(INCLUDE, "");
        // An empty file has the same effect as none, which there was before.
        if rest.is_empty() && !config.is_symlink() {
            removed(&config)?
        } else {
            edit.replace(&rest)?
        }
        lines += &format!("removed the Include of {}\n", config.display());
    }
    let own = dir.join(OWN_FILE);
    if is_written_here(&own)? {
        removed(&own)?;
        lines += &format!("removed {}\n", own.display());
    }
    // An empty folder has the same effect as none.
    let _ = fs::remove_dir(&dir);
    if files::read_text(&config).is_ok_and(|text| is_included(&text)) {
        lines += &format!("left: your own Include of that file in {}\n", config.display());
    }
    Ok(if lines.is_empty() { format!("{} has nothing of this command\n", dir.display()) } else { lines })
}

/// Returns true if [`write`] has written there for this user.
pub(crate) fn is_written(env: &Environment) -> bool {
    ssh_dir(env).and_then(|dir| is_written_here(&dir.join(OWN_FILE))).unwrap_or_default()
}

fn ssh_dir(env: &Environment) -> Result<PathBuf, CommandError> {
    let home = env
        .home
        .as_ref()
        .ok_or_else(|| CommandError::usage("set HOME to an absolute path; ssh's config is below it"))?;
    Ok(home.join(".ssh"))
}

/// Returns true if the file exists. Returns an error if this command did not write it.
fn is_written_here(own: &Path) -> Result<bool, CommandError> {
    match fs::symlink_metadata(own) {
        Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(false),
        Ok(found) if found.is_file() && files::read_text(own).is_ok_and(|text| text.starts_with(HEADER)) => {
            Ok(true)
        }
        _ => Err(CommandError::cannot_write(format!(
            "{} was not written by this command, so it is neither replaced nor removed; move it away",
            own.display()
        ))),
    }
}

/// Includes the file at the top of ssh's config. Further below, the line would be part of a `Host` block.
fn include(config: &Path) -> Result<(), CommandError> {
    if !config.is_symlink() && !config.exists() {
        return files::create_private(config, INCLUDE).map_err(|cause| {
            CommandError::cannot_write(format!("cannot write {}: {cause}", config.display()))
        });
    }
    let edit = FileEdit::start(config)?;
    let rest = edit.text().replace(INCLUDE, "");
    let text = if is_included(&rest) { rest } else { format!("{INCLUDE}{rest}") };
    if text == edit.text() { Ok(()) } else { edit.replace(&text) }
}

/// Returns true if a line above the first `Host` and `Match` includes the file by its name.
fn is_included(config: &str) -> bool {
    let is_break = |c: char| c.is_whitespace() || matches!(c, '=' | '"');
    let mut lines = config.lines().map(|line| line.split(is_break).filter(|word| !word.is_empty()));
    lines.find_map(|mut words| match words.next()?.to_ascii_lowercase().as_str() {
        "host" | "match" => Some(false),
        "include" => words.any(|word| [OWN_FILE, IN_HOME].contains(&word)).then_some(true),
        _ => None,
    }) == Some(true)
}

/// Returns a line if ssh does not use the block for a node with such a name.
fn unused(pattern: &str, command: &str) -> Option<String> {
    let name = pattern.replace(['*', '?'], "x");
    let found = match process::Command::new("ssh").args(["-G", &name]).output() {
        Ok(found) => found,
        Err(cause) => return Some(format!("! cannot run ssh: {cause}\n")),
    };
    let is_used =
        String::from_utf8_lossy(&found.stdout).lines().any(|line| line == format!("proxycommand {command}"));
    let why = String::from_utf8_lossy(&found.stderr);
    let why = why.lines().next().unwrap_or("the system's config or another home directory comes first");
    (!is_used).then(|| format!("! ssh does not use it for {name}: {why}; compare with `ssh -G {name}`\n"))
}

/// The name of the file, as `Include` takes it in a user's config, and with its folder.
const OWN_FILE: &str = "tunnel_config";
const IN_HOME: &str = "~/.ssh/tunnel_config";
/// The first line of the file.
const HEADER: &str = "# Written by `tunnel ssh-config --write`, which overwrites changes here.\n";
/// The lines that are added to ssh's config.
const INCLUDE: &str =
    "# Added by `tunnel ssh-config --write`; --remove takes both lines out.\nInclude tunnel_config\n";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// Returns an environment whose home has a space in its path, and the folder of ssh there.
    fn home(place: &Path) -> (Environment, PathBuf) {
        let home = place.join("her home");
        fs::create_dir(&home).unwrap();
        let ssh = home.join(".ssh");
        (Environment { home: Some(home), ..Environment::default() }, ssh)
    }

    fn write(env: &Environment, text: &str) -> Result<String, CommandError> {
        super::write(env, text, &["edge-*".to_owned()], "none")
    }

    #[test]
    fn the_block_has_a_file_of_its_own_that_is_included_once_and_removed_without_a_trace() {
        let place = tempfile::tempdir().unwrap();
        let (env, ssh) = home(place.path());
        let read = |name: &str| fs::read_to_string(ssh.join(name)).ok();
        let mode = |name: &str| fs::metadata(ssh.join(name)).unwrap().permissions().mode() & 0o777;
        write(&env, "Host a\n").unwrap();
        assert!(is_written(&env));
        assert_eq!(["", "config", OWN_FILE].map(mode), [0o700, 0o600, 0o600]);
        write(&env, "Host b\n").unwrap();
        assert_eq!(read("config").unwrap(), INCLUDE);
        assert_eq!(read(OWN_FILE).unwrap(), format!("{HEADER}Host b\n"));
        remove(&env).unwrap();
        assert!(!ssh.exists() && !is_written(&env));
        assert!(remove(&env).unwrap().contains("nothing of this command"));
        // The user's own lines, the file's mode and a link to it stay. In a Host block, an Include has another meaning.
        fs::create_dir(&ssh).unwrap();
        let theirs = "# mine\r\nHost old\n  User x\n  Include tunnel_config\nHost *\n Port 1";
        let real = place.path().join("dotfiles");
        fs::write(&real, theirs).unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&real, ssh.join("config")).unwrap();
        for _ in 0..2 {
            write(&env, "Host c\n").unwrap();
            assert_eq!(read("config").unwrap(), format!("{INCLUDE}{theirs}"));
        }
        assert_eq!(remove(&env).unwrap().lines().count(), 2);
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
        let (own, config) = (ssh.join(OWN_FILE), ssh.join("config"));
        for line in ["Include tunnel_config", " include=\"~/.ssh/tunnel_config\"", "INCLUDE a tunnel_config"]
        {
            let theirs = format!("Port 1\n{line}\nHost *\n");
            fs::write(&config, &theirs).unwrap();
            write(&env, "Host a\n").unwrap();
            assert_eq!(fs::read_to_string(&config).unwrap(), theirs);
            assert!(remove(&env).unwrap().contains("left: your own Include"));
            assert_eq!((fs::read_to_string(&config).unwrap(), own.exists()), (theirs, false));
        }
        fs::write(&own, "Host theirs\n").unwrap();
        fs::write(&config, INCLUDE).unwrap();
        for refused in [write(&env, "Host a\n"), remove(&env)] {
            assert!(refused.unwrap_err().text.contains("was not written by this command"));
            assert_eq!(fs::read_to_string(&own).unwrap(), "Host theirs\n");
        }
        // A link may lead to a file of another program.
        let other = place.path().join("other");
        fs::write(&other, HEADER).unwrap();
        fs::remove_file(&own).unwrap();
        symlink(&other, &own).unwrap();
        write(&env, "Host a\n").unwrap_err();
        fs::remove_file(&own).unwrap();
        // A dangling link, and a config that is no file: the block is there, and the line is named.
        for make in [
            |path: &Path| symlink("/nowhere/config", path).unwrap(),
            |path: &Path| fs::create_dir(path).unwrap(),
        ] {
            let _ = fs::remove_file(&config);
            make(&config);
            let error = write(&env, "Host a\n").unwrap_err();
            assert!(
                error.text.contains("add this line yourself, above the first Host: Include tunnel_config"),
                "{error}"
            );
        }
        let nobody = write(&Environment::default(), "").unwrap_err();
        assert!(nobody.text.contains("set HOME"), "{nobody}");
    }
}
