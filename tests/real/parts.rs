//! External programs for tests: their paths, and skipping tests without them.

#![expect(clippy::disallowed_methods, reason = "tests read the environment that the test script sets")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns true if every named program is installed; otherwise prints the missing ones and skips the test.
///
/// # Panics
///
/// Panics if one is missing although `TUNNEL_TESTS` requires it.
pub(crate) fn are_installed(names: &[&str]) -> bool {
    let missing: Vec<_> = names.iter().copied().filter(|name| find(name).is_none()).collect();
    missing.is_empty() || skip(&format!("{} not installed", missing.join(", ")))
}

/// Returns the value of an environment variable set by a script, if any.
pub(crate) fn env_var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Returns true if the test runs as root; otherwise skips the test.
pub(crate) fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    id.stdout == b"0\n" || skip("only root can create separate machines")
}

/// Returns the path of a program. Also searches /usr/sbin and /sbin, where Debian's sshd is, and the directory of CNI
/// plugins, which may not be in PATH.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let dirs = path.split(':').chain(["/usr/sbin", "/sbin", "/usr/lib/cni"]);
    dirs.map(|dir| Path::new(dir).join(name)).find(|file| file.is_file())
}

/// Returns the plain peer: the program built by the test script, or otherwise built here if Go is installed.
pub(crate) fn plain_peer() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    if !all() {
        return None;
    }
    let built = BUILT.get_or_init(|| {
        if let Ok(given) = std::env::var("TUNNEL_PLAINPEER") {
            return Some(given.into());
        }
        find("go")?;
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plainpeer");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real/plainpeer");
        let mut go = Command::new("go");
        let status = go.arg("build").arg("-o").arg(&program).arg(".").current_dir(sources).status();
        status.is_ok_and(|s| s.success()).then_some(program)
    });
    if built.is_none() {
        skip("the plain peer cannot be built without Go");
    }
    built.as_deref()
}

/// Returns a program that the test script has built into its cache; without it the test is skipped.
pub(crate) fn cached_program(program: &str) -> Option<PathBuf> {
    if !all() {
        return None;
    }
    let home = || Some(Path::new(&std::env::var("HOME").ok()?).join(".cache"));
    let cache = std::env::var("XDG_CACHE_HOME").ok().map(PathBuf::from).or_else(home)?;
    let found = Some(cache.join("tunnel-tests").join(program)).filter(|file| file.is_file());
    if found.is_none() {
        skip(&format!("{program} is not built: scripts/goparts.sh builds it"));
    }
    found
}

/// Returns a loopback port that no program listens on, and that no other call in this process returns.
///
/// The port is outside the kernel's range for outgoing connections, so that none of them uses it in the meantime.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let offset = u16::try_from(std::process::id() % 120).unwrap() * 100;
    loop {
        let port = 20_000 + (offset + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Returns the address of a port on 127.0.0.1.
pub(crate) fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Returns true if tests that take long, or need a program that Debian lacks, run too: `scripts/test.sh` without
/// `--all` leaves them out.
pub(crate) fn all() -> bool {
    env_var("TUNNEL_TESTS").as_deref() != Some("debian")
}

/// Prints that a test is skipped, and why; returns false.
///
/// # Panics
///
/// Panics if `TUNNEL_TESTS` is set, because everything that the chosen tests need is then installed.
pub(crate) fn skip(why: &str) -> bool {
    assert!(env_var("TUNNEL_TESTS").is_none(), "{why}");
    let test = std::thread::current();
    // Not by a macro: the test harness captures those, and prints them for failed tests only.
    let _ = writeln!(std::io::stderr(), "skipped {}: {why}", test.name().unwrap_or("a test"));
    false
}

/// Serves `from the node` at a port of this machine, to one client at a time.
pub(crate) fn page() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let _ = client.read(&mut [0; 4096]);
            let _ = client.write_all(
                b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\nConnection: close\r\n\r\nfrom the node",
            );
        }
    });
    port
}
