//! `tunnel service`: the systemd unit of a server or an edge, from the units that the package has too, or of a user's
//! proxy.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};

use crate::command::init::folder_on_machine;
use crate::command::{CommandError, Role, examples};
use crate::config::config_home;

/// Commands of `tunnel service`.
#[derive(Debug, Clone, Subcommand)]
pub enum ServiceCommand {
    /// Install the systemd unit of a server or an edge, or of the proxy of this user. A unit of the package is used
    /// unchanged.
    #[command(after_help = examples([
        "sudo tunnel service install edge",
        "tunnel service install proxy",
    ]))]
    Install {
        /// Role of the service.
        #[arg(value_name = "ROLE")]
        role: ServiceRole,
        /// Config file of a server or an edge. [default: the one in /etc/tunnel]
        #[arg(short, long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Folder of the unit. [default: /etc/systemd/system; of a proxy ~/.config/systemd/user]
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

/// The role of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ServiceRole {
    /// A server.
    Server,
    /// The edge of a node.
    Edge,
    /// The proxy of this user, as a unit of this user.
    Proxy,
}

/// Runs a command of `tunnel service`. Returns lines for the terminal. Blocks on the disk. `variable` returns
/// environment variables by name.
///
/// # Errors
///
/// Returns an error if the unit cannot be written.
pub fn run(args: &ServiceCommand, variable: impl Fn(&str) -> Option<String>) -> Result<String, CommandError> {
    let ServiceCommand::Install { role, config, dir } = args;
    let role = match role {
        ServiceRole::Server => Role::Server,
        ServiceRole::Edge => Role::Edge,
        ServiceRole::Proxy if config.is_some() => {
            return Err(CommandError::usage(
                "--config: a proxy uses client.toml of its user; remove the flag",
            ));
        }
        ServiceRole::Proxy => return install_proxy(dir.clone(), &variable),
    };
    if let (None, Some(unit)) = (config, packaged(role)) {
        let config = role.config();
        return Ok(format!("the package's unit {} is used\n{}", unit.display(), start(role, &config)));
    }
    let default = role.config();
    let config = config.as_ref().unwrap_or(&default);
    let path = dir.as_deref().unwrap_or(Path::new(UNIT_DIR)).join(unit_name(role));
    let text = unit_of_this_machine(role, config)?;
    let done = write(&path, &text, "run this as root, or set another folder with --dir")?;
    Ok(format!("{done} {}\n{}", path.display(), start(role, config)))
}

/// Installs the unit of a user's proxy.
fn install_proxy(
    dir: Option<PathBuf>,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<String, CommandError> {
    let dir = dir
        .or_else(|| config_home(variable).map(|dir| dir.join("systemd/user")))
        .ok_or_else(|| CommandError::usage("HOME is not set; set --dir"))?;
    let failed =
        |cause| CommandError::cannot_write(format!("cannot create {}: {cause}; set --dir", dir.display()));
    fs::create_dir_all(&dir).map_err(failed)?;
    let path = dir.join(PROXY_UNIT_NAME);
    let program = program();
    let program = folder_on_machine("the program's path", &program)?;
    let text = with_start(PROXY_UNIT.lines(), &format!("{program} proxy"));
    let done = write(&path, &text, "set another folder with --dir")?;
    Ok(format!(
        "{done} {}\nnext, as this user:\n  systemctl --user daemon-reload\n  systemctl --user enable --now \
         {PROXY_UNIT_NAME}\n",
        path.display()
    ))
}

/// Writes a unit, unless it is there already. Returns what was done.
fn write(path: &Path, text: &str, hint: &str) -> Result<&'static str, CommandError> {
    match fs::read_to_string(path) {
        Ok(before) if before == text => Ok("already there, unchanged:"),
        Ok(_) => {
            let hint = "compare it with the new one (--dir /tmp), then remove it and try again";
            Err(CommandError::cannot_write(format!("{} is there already; {hint}", path.display())))
        }
        Err(_) => {
            fs::write(path, text).map_err(|cause| {
                CommandError::cannot_write(format!("cannot write {}: {cause}; {hint}", path.display()))
            })?;
            Ok("created")
        }
    }
}

/// Returns what to type to start the service.
fn start(role: Role, config: &Path) -> String {
    let readable = make_readable(config.parent().unwrap_or(Path::new("/")));
    let unit = unit_name(role);
    format!("next, as root:\n{readable}  systemctl daemon-reload\n  systemctl enable --now {unit}\n")
}

/// Returns what to type so that the service's user can read the folder; empty without that user.
pub(crate) fn make_readable(dir: &Path) -> String {
    let dir = dir.display();
    let text = format!("  chgrp -R {USER} {dir} && chmod -R g+rX {dir}    # the service runs as {USER}\n");
    if has_user() { text } else { String::new() }
}

/// Returns the package's unit for that role, if it is installed.
pub(crate) fn packaged(role: Role) -> Option<PathBuf> {
    let units = PACKAGE_DIRS.map(|dir| Path::new(dir).join(unit_name(role)));
    units.into_iter().find(|unit| unit.exists())
}

/// Returns the file name of the unit, which is the same in the package.
pub(crate) const fn unit_name(role: Role) -> &'static str {
    match role {
        Role::Server => "tunnel-server.service",
        Role::Edge => "tunnel-edge.service",
    }
}

/// Returns the path of this program, otherwise the package's.
fn program() -> PathBuf {
    std::env::current_exe().unwrap_or_else(|_| PACKAGED_PROGRAM.into())
}

/// Returns the text of the unit for this program and that config, and for the user of the package if this machine has
/// that user. Otherwise the service runs as root, without the rights of root.
///
/// # Errors
///
/// Returns an error if a path cannot be part of a unit.
pub(crate) fn unit_of_this_machine(role: Role, config: &Path) -> Result<String, CommandError> {
    unit(role, &program(), has_user(), config)
}

/// Returns the text of a unit. It differs from the package's in the paths, and in the user if there is no such user.
fn unit(role: Role, program: &Path, has_user: bool, config: &Path) -> Result<String, CommandError> {
    let absolute = |path: &Path| {
        std::path::absolute(path).map_err(|cause: io::Error| CommandError::usage(cause.to_string()))
    };
    let program = absolute(program)?;
    let config = absolute(config)?;
    let program = folder_on_machine("the program's path", &program)?;
    let config = folder_on_machine("--config", &config)?;
    let text = match role {
        Role::Server => SERVER_UNIT,
        Role::Edge => EDGE_UNIT,
    };
    let kept = |line: &&str| has_user || !(line.starts_with("User=") || line.starts_with("Group="));
    Ok(with_start(text.lines().filter(kept), &format!("{program} {} -c {config}", role.name())))
}

/// Returns the text of a unit that starts this command.
fn with_start<'a>(lines: impl Iterator<Item = &'a str>, command: &str) -> String {
    let line = |line: &str| match line.starts_with("ExecStart=") {
        true => format!("ExecStart={command}\n"),
        false => format!("{line}\n"),
    };
    lines.map(line).collect()
}

/// Returns true if this machine has the user of the package.
fn has_user() -> bool {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    users.lines().any(|line| line.split(':').next() == Some(USER))
}

const SERVER_UNIT: &str = include_str!("../../deploy/systemd/tunnel-server.service");
const EDGE_UNIT: &str = include_str!("../../deploy/systemd/tunnel-edge.service");
const PROXY_UNIT: &str = include_str!("../../deploy/systemd/tunnel-proxy.service");
const PROXY_UNIT_NAME: &str = "tunnel-proxy.service";
/// The user and the program of the package.
const USER: &str = "tunnel";
const PACKAGED_PROGRAM: &str = "/usr/bin/tunnel";
/// Folder of the operator's units, and those of packages' units.
pub(crate) const UNIT_DIR: &str = "/etc/systemd/system";
const PACKAGE_DIRS: [&str; 2] = ["/usr/lib/systemd/system", "/lib/systemd/system"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_unit_differs_from_the_packaged_one_in_paths_and_user_only() {
        for (role, packaged) in [(Role::Server, SERVER_UNIT), (Role::Edge, EDGE_UNIT)] {
            let unit = |program: &str, has_user, config: &str| {
                unit(role, Path::new(program), has_user, Path::new(config))
            };
            let start = packaged.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
            let (_, config) = start.split_once(" -c ").unwrap();
            assert_eq!(unit(PACKAGED_PROGRAM, true, config).unwrap(), packaged);
            let own = unit("/opt/tunnel", false, "/srv/t.toml").unwrap();
            let started = format!("ExecStart=/opt/tunnel {} -c /srv/t.toml", role.name());
            assert!(own.lines().any(|line| line == started), "{own}");
            assert!(!own.contains("User=") && !own.contains("Group="), "{own}");
            for hardening in
                ["RuntimeDirectory=tunnel", "LimitNOFILE=", "ExecReload=", "ProtectSystem=strict"]
            {
                assert!(own.contains(hardening), "{hardening}: {own}");
            }
            let bad = unit(PACKAGED_PROGRAM, true, "/a b\"").unwrap_err();
            assert_eq!(bad.code, 64);
        }
    }

    #[test]
    fn a_changed_unit_file_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let config = Some(dir.path().join("edge.toml"));
        let install = || {
            let (role, dir) = (ServiceRole::Edge, Some(dir.path().into()));
            run(&ServiceCommand::Install { role, config: config.clone(), dir }, |_| None)
        };
        let output = install().unwrap();
        assert!(output.contains("systemctl enable --now tunnel-edge.service"), "{output}");
        let again = install().unwrap();
        assert_eq!(again, output.replace("created", "already there, unchanged:"), "the same unit again");
        fs::write(dir.path().join("tunnel-edge.service"), "mine").unwrap();
        let refused = install().unwrap_err();
        assert!(refused.code == 73 && refused.text.contains("is there already"), "{refused}");
    }

    #[test]
    fn the_proxy_of_a_user_is_a_unit_of_that_user() {
        let home = tempfile::tempdir().unwrap();
        let variable = |name: &str| (name == "HOME").then(|| home.path().to_str().unwrap().to_owned());
        let install =
            |config| run(&ServiceCommand::Install { role: ServiceRole::Proxy, config, dir: None }, variable);
        let output = install(None).unwrap();
        assert!(output.contains("systemctl --user enable --now tunnel-proxy.service"), "{output}");
        let unit = fs::read_to_string(home.path().join(".config/systemd/user/tunnel-proxy.service")).unwrap();
        let program = std::env::current_exe().unwrap();
        let started = format!("ExecStart={} proxy", program.display());
        assert!(unit.lines().any(|line| line == started) && !unit.contains("User="), "{unit}");
        assert_eq!(install(Some("x".into())).unwrap_err().code, 64);
    }
}
