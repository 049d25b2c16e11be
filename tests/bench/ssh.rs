//! The second reference: `ssh -R` between an sshd and an ssh of the benchmark itself.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::place::{Place, free_ports};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::targets::Targets;
use crate::way::{Way, Ways};

/// Starts it on loopback. The error contains the reason if it cannot run here.
pub(crate) fn start(place: &Place, targets: &Targets) -> Result<Proxy> {
    let sshd = ["/usr/sbin/sshd", "/usr/local/sbin/sshd", "/usr/lib/openssh/sshd"];
    let sshd = sshd.iter().find(|path| Path::new(path).is_file()).context("no sshd on this machine")?;
    // sshd requires this directory even if it runs as an ordinary user.
    let _ = fs::create_dir_all("/run/sshd");
    let host_key = make_key(place, "ssh-host-key")?;
    let user_key = make_key(place, "ssh-user-key")?;
    let allowed = place.file("ssh-allowed");
    fs::copy(user_key.with_extension("pub"), &allowed)?;
    let [port] = free_ports()?;
    let ports = free_ports::<4>()?;
    let config = place.file("sshd.conf");
    fs::write(
        &config,
        format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
             UsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin yes\n\
             Ciphers {CIPHER}\nAllowTcpForwarding yes\nUseDNS no\n",
            host_key.display(),
            allowed.display()
        ),
    )?;
    let config = config.display().to_string();
    let mut daemon = Process::start(None, &[sshd, "-D", "-e", "-f", &config], &place.file("sshd.log"))?;
    let mut args: Vec<String> =
        ["ssh", "-N", "-F", "none", "-T", "-p"].iter().map(|&word| word.to_owned()).collect();
    args.extend([port.to_string(), "-i".to_owned(), user_key.display().to_string()]);
    for option in OPTIONS {
        args.extend(["-o".to_owned(), (*option).to_owned()]);
    }
    for (from, to) in ports.into_iter().zip(targets.all()) {
        args.extend(["-R".to_owned(), format!("127.0.0.1:{from}:{to}")]);
    }
    args.push("127.0.0.1".to_owned());
    wait_for(port)?;
    ensure!(daemon.alive(), "sshd ended at once: {}", log(place));
    let client = Process::start(None, &args, &place.file("ssh.log"))?;
    let ways = Ways::each(ports, Way::local);
    let mut proxy = Proxy { name: "ssh -R", ways, processes: vec![daemon, client], port: Some(port) };
    proxy.until_reachable(START).with_context(|| log(place))?;
    Ok(proxy)
}

fn make_key(place: &Place, name: &str) -> Result<PathBuf> {
    let path = place.file(name);
    let done = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(&path)
        .status()
        .context("no ssh-keygen")?;
    ensure!(done.success(), "ssh-keygen failed");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(path)
}

/// Waits until a server listens on a port.
pub(crate) fn wait_for(port: u16) -> Result<()> {
    let since = std::time::Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        ensure!(since.elapsed() < START, "no server listens on port {port}");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn log(place: &Place) -> String {
    let read = |name| fs::read_to_string(place.file(name)).unwrap_or_default();
    format!("sshd: {} ssh: {}", read("sshd.log"), read("ssh.log"))
}

/// The fastest cipher of ssh on machines with AES instructions.
const CIPHER: &str = "aes128-gcm@openssh.com";
/// These options ignore the user's own files.
const OPTIONS: &[&str] = &[
    "Ciphers=aes128-gcm@openssh.com",
    "StrictHostKeyChecking=no",
    "UserKnownHostsFile=/dev/null",
    "IdentitiesOnly=yes",
    "BatchMode=yes",
    "ExitOnForwardFailure=yes",
    "LogLevel=ERROR",
];
/// Longer than any handshake on loopback.
const START: Duration = Duration::from_secs(10);
