//! Starting, observing and ending other processes.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Once;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::wait::{wait_for, wait_until};

/// A process that runs as long as this value exists. Its output goes to a log, which is printed if the test fails.
#[derive(Debug)]
pub(crate) struct Running {
    name: String,
    child: Child,
    log: PathBuf,
}

/// The result and the output of a finished process.
#[derive(Debug)]
pub(crate) struct ProcessOutput {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Running {
    /// Starts a process. Its log is `name.log` in the directory of the test.
    pub(crate) fn start(name: &str, dir: &Path, command: &mut Command) -> Self {
        handle_ignored_signals();
        let log = dir.join(format!("{name}.log"));
        let file = File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        let child = command.spawn().unwrap_or_else(|e| panic!("{name}: cannot start: {e}"));
        Self { name: name.into(), child, log }
    }

    /// Like [`Self::start`], but with a pipe as its input.
    pub(crate) fn start_with_stdin(name: &str, dir: &Path, command: &mut Command) -> (Self, ChildStdin) {
        handle_ignored_signals();
        let log = dir.join(format!("{name}.log"));
        let file = File::create(&log).unwrap();
        command.stdin(Stdio::piped()).stdout(file.try_clone().unwrap()).stderr(file);
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{name} does not start: {e}"));
        let input = child.stdin.take().unwrap();
        (Self { name: name.into(), child, log }, input)
    }

    /// Returns its process ID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM, like a service manager that stops it.
    pub(crate) fn terminate(&mut self) {
        self.signal("TERM");
    }

    /// Sends SIGHUP, which makes it reload its files.
    pub(crate) fn hang_up(&mut self) {
        self.signal("HUP");
    }

    /// Suspends it with SIGSTOP; its connections stay open.
    pub(crate) fn freeze(&mut self) {
        self.signal("STOP");
    }

    /// Resumes it after [`Self::freeze`].
    pub(crate) fn thaw(&mut self) {
        self.signal("CONT");
    }

    fn signal(&mut self, name: &str) {
        self.assert_running();
        let pid = self.child.id();
        assert!(Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap().success());
    }

    /// Kills it with SIGKILL, as if its machine had failed.
    pub(crate) fn kill(&mut self) {
        self.assert_running();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it ends on its own.
    ///
    /// # Panics
    ///
    /// Panics if it takes longer than `patience`.
    pub(crate) fn wait_for_exit(&mut self, patience: Duration) -> ExitStatus {
        wait_for(&format!("{} ends", self.name), patience, || self.child.try_wait().unwrap())
    }

    /// Returns its output so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Fails the test unless its log contains `text`.
    pub(crate) fn assert_logged(&self, text: &str) {
        assert!(self.log().contains(text), "{} has not logged {text:?}", self.name);
    }

    /// Waits for a line that contains `text`, and returns the line.
    ///
    /// # Panics
    ///
    /// Panics if the process ends first, or if there is no such line in time.
    pub(crate) fn wait_for_log(&mut self, text: &str) -> String {
        self.wait_for_log_of("", text)
    }

    /// Like [`Self::wait_for_log`], but the line must contain `source` as well.
    pub(crate) fn wait_for_log_of(&mut self, source: &str, text: &str) -> String {
        let what = format!("{} logs {text:?} with {source:?}", self.name);
        let is_match = |line: &&str| line.contains(text) && line.contains(source);
        wait_for(&what, TIMEOUT, || {
            let line = self.log().lines().find(is_match).map(String::from);
            if line.is_none() {
                self.assert_running();
            }
            line
        })
    }

    /// Waits until an HTTP path on its admin port answers 200 with a body that contains `text`.
    pub(crate) fn wait_for_answer(&mut self, port: u16, path: &str, text: &str) {
        let what = format!("{} answers 200 with {text:?} at {path}", self.name);
        wait_until(&what, TIMEOUT, || {
            self.assert_running();
            send_request(port, "GET", path, "").is_some_and(|answer| is_ok(&answer) && answer.contains(text))
        });
    }

    /// Waits until an HTTP path on its admin port answers 200 with exactly this body.
    pub(crate) fn wait_for_exact_answer(&mut self, port: u16, path: &str, body: &str) {
        let what = format!("{} answers 200 with only {body:?} at {path}", self.name);
        let end = format!("\r\n\r\n{body}");
        wait_until(&what, TIMEOUT, || {
            self.assert_running();
            send_request(port, "GET", path, "").is_some_and(|answer| is_ok(&answer) && answer.ends_with(&end))
        });
    }

    /// Fails the test if the process has ended.
    pub(crate) fn assert_running(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("{} has ended: {status}", self.name);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let skipped = log.lines().count().saturating_sub(LAST_LINES);
            let lines: Vec<_> = log.lines().skip(skipped).collect();
            let _ = writeln!(std::io::stderr(), "--- {} ---\n{}", self.name, lines.join("\n"));
        }
    }
}

/// Runs a program to its end. Its input is a file, or empty.
///
/// # Panics
///
/// Kills the program and panics if it takes longer than `patience`.
pub(crate) fn run(
    program: &str,
    args: &[impl AsRef<OsStr>],
    stdin: Option<&Path>,
    patience: Duration,
) -> ProcessOutput {
    let mut command = Command::new(program);
    run_command(program, command.args(args), stdin, patience)
}

/// Like [`run`], but takes a command; failures are reported under `name`.
pub(crate) fn run_command(
    name: &str,
    command: &mut Command,
    stdin: Option<&Path>,
    patience: Duration,
) -> ProcessOutput {
    handle_ignored_signals();
    let dir = tempfile::tempdir().unwrap();
    let (out, err) = (dir.path().join("out"), dir.path().join("err"));
    command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
    command.stdin(stdin.map_or_else(Stdio::null, |file| File::open(file).unwrap().into()));
    let mut running = Running {
        name: name.into(),
        child: command.spawn().unwrap_or_else(|e| panic!("{name} does not start: {e}")),
        log: err.clone(),
    };
    let status = wait_for(&format!("{name} ends"), patience, || running.child.try_wait().unwrap());
    let text = |file| String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned();
    ProcessOutput { status, stdout: text(&out), stderr: text(&err) }
}

/// Handles the signals that this process ignores, as under nohup or in the background of a shell. Programs that it
/// starts would inherit that, but they do not inherit handlers.
fn handle_ignored_signals() {
    static DONE: Once = Once::new();
    DONE.call_once(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let _inside = runtime.enter();
        for kind in [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit()] {
            if ignored & 1 << (kind.as_raw_value() - 1) != 0 {
                // The handler stays for the life of this process.
                drop(signal(kind).unwrap());
            }
        }
    });
}

/// Sends one HTTP request, and returns head and body of the response. Returns `None` if there is no response.
pub(crate) fn send_request(port: u16, method: &str, path: &str, body: &str) -> Option<String> {
    let conn = TcpStream::connect(("127.0.0.1", port)).ok()?;
    conn.set_read_timeout(Some(TIMEOUT)).ok()?;
    send_request_over(conn, method, path, body).ok()
}

/// Sets the log level at an admin socket. Returns head and body of the response.
pub(crate) fn set_level(socket: &Path, level: &str) -> String {
    let conn = UnixStream::connect(socket).unwrap();
    conn.set_read_timeout(Some(TIMEOUT)).unwrap();
    send_request_over(conn, "PUT", "/debug/flags/v", level).unwrap()
}

fn send_request_over(
    mut conn: impl Read + Write,
    method: &str,
    path: &str,
    body: &str,
) -> std::io::Result<String> {
    write!(conn, "{method} {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
    let mut answer = String::new();
    conn.read_to_string(&mut answer)?;
    Ok(answer)
}

fn is_ok(answer: &str) -> bool {
    answer.split_whitespace().nth(1) == Some("200")
}

/// Timeout for steps that take milliseconds on an idle machine. Shorter than the resume timeout, after which a
/// session without a path is forgotten.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(45);

/// Number of log lines printed if a test fails.
const LAST_LINES: usize = 60;
