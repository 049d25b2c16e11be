//! A separate sshd with its own keys, for the user who runs the test.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::network::Machine;
use crate::parts::{find, free_port};
use crate::process::{Running, TIMEOUT, run};

/// A running sshd on loopback.
#[derive(Debug)]
pub(crate) struct Sshd {
    _process: Running,
    pub(crate) dir: TempDir,
    pub(crate) port: u16,
    key: PathBuf,
    user: String,
}

impl Sshd {
    pub(crate) fn start() -> Self {
        Self::start_as(Command::new)
    }

    /// Starts one on loopback of a machine.
    pub(crate) fn start_on(machine: &Machine) -> Self {
        Self::start_as(|program| machine.command(program))
    }

    /// Starts one with the command that `run` returns for the program.
    fn start_as(run_on: impl FnOnce(PathBuf) -> Command) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (host_key, key) = (dir.path().join("hostkey"), dir.path().join("id"));
        for file in [&host_key, &key] {
            let args = ["-q", "-t", "ed25519", "-N", "", "-f", file.to_str().unwrap()];
            assert!(run("ssh-keygen", &args, None, TIMEOUT).status.success());
        }
        std::fs::copy(key.with_extension("pub"), dir.path().join("authorized_keys")).unwrap();
        let user = run("id", &["-un"], None, TIMEOUT).stdout.trim().to_owned();
        if user == "root" {
            // Without this directory sshd refuses to start as root.
            std::fs::create_dir_all("/run/sshd").unwrap();
        }
        let port = free_port();
        let config = dir.path().join("sshd_config");
        let text = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {host}\nAuthorizedKeysFile {dir}/authorized_keys\n\
             PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n\
             PermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n",
            host = host_key.display(),
            dir = dir.path().display(),
        );
        std::fs::write(&config, text).unwrap();
        let mut command = run_on(find("sshd").unwrap());
        let mut process =
            Running::start("sshd", dir.path(), command.arg("-D").arg("-e").arg("-f").arg(&config));
        process.wait_for_log("Server listening on");
        Self { _process: process, dir, port, key, user }
    }

    /// Returns the options with which ssh and scp reach it through a helper.
    pub(crate) fn options(&self, helper: &str) -> Vec<String> {
        let mut options: Vec<String> = ["-F", "none", "-i"].map(String::from).into();
        options.push(self.key.display().to_string());
        let port = self.port;
        for option in [
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            &format!("ConnectTimeout={}", TIMEOUT.as_secs()),
            &format!("Port={port}"),
            &format!("User={}", self.user),
            &format!("ProxyCommand={helper}"),
        ] {
            options.extend(["-o".into(), option.into()]);
        }
        options
    }

    /// Runs a command on it as `node1` through a helper, and checks its output and its exit code.
    pub(crate) fn works_through(&self, helper: &str) {
        let mut args = self.options(helper);
        args.extend(["node1", "echo over $((6 * 7)) bridges; exit 7"].map(String::from));
        let output = run("ssh", &args, None, LOGIN);
        assert_eq!(output.stdout, "over 42 bridges\n", "{helper}: {output:?}");
        assert_eq!(output.status.code(), Some(7), "{helper}: {output:?}");
    }
}

/// Timeout for a login on a busy machine.
const LOGIN: Duration = Duration::from_secs(30);
