//! Real processes: started, read from, measured, and reliably stopped.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;

use crate::role::Role;

/// A running process. Dropping it kills it, and the kernel kills it if the benchmark itself is killed.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// For starting it again.
    command: Command,
    /// Closing it asks a process of this benchmark to end.
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
    name: String,
    /// Whether it must not be killed: it has cleanup to do, and ends when its input does.
    gentle: bool,
}

/// A signal to a process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Signal {
    /// Ends the process.
    Terminate,
    /// Stops the process.
    Stop,
    /// Continues a stopped process.
    Continue,
}

impl Process {
    /// Starts a program, in a namespace if one is given. Its output goes to `log`.
    pub(crate) fn start<S: AsRef<OsStr>>(space: Option<&str>, args: &[S], log: &Path) -> Result<Self> {
        Self::start_within(&[], space, args, log)
    }

    /// Like [`Self::start`], in the control groups of `doors`.
    pub(crate) fn start_within<S: AsRef<OsStr>>(
        limiters: &[PathBuf],
        space: Option<&str>,
        args: &[S],
        log: &Path,
    ) -> Result<Self> {
        let log = fs::File::options().create(true).append(true).open(log)?;
        let mut command = wrapped(limiters, space, true);
        command.args(args).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Self::spawn(command, args.first().map(AsRef::as_ref).unwrap_or_default())
    }

    /// Starts this program again in another role. [`Process::read_output`] reads its output.
    pub(crate) fn role(space: Option<&str>, role: &Role) -> Result<Self> {
        let mut command = wrapped(&[], space, true);
        command.arg(std::env::current_exe()?).arg("role").arg(serde_json::to_string(role)?);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::spawn(command, OsStr::new(&format!("{role:?}")))
    }

    /// Like `role`, but the process outlives a benchmark that was killed, to clean up after it.
    pub(crate) fn survivor(space: Option<&str>, role: &Role) -> Result<Self> {
        let mut command = wrapped(&[], space, false);
        command.arg(std::env::current_exe()?).arg("role").arg(serde_json::to_string(role)?);
        // In a separate process group, so that Ctrl-C does not reach it.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut process = Self::spawn(command, OsStr::new("the survivor"))?;
        process.gentle = true;
        Ok(process)
    }

    /// Reads the next line of its output. Returns an error if it has ended.
    pub(crate) fn read_output<T: DeserializeOwned>(&mut self) -> Result<T> {
        let output = self.output.as_mut().context("this process has no output")?;
        let mut line = String::new();
        if output.read_line(&mut line)? == 0 {
            bail!("{} ended without output: {}", self.name, self.child.wait()?);
        }
        serde_json::from_str(&line).with_context(|| format!("invalid output of {}: {line:?}", self.name))
    }

    /// Requests a response from a process that prints one for each line of input, and reads it.
    pub(crate) fn request_output<T: DeserializeOwned>(&mut self) -> Result<T> {
        self.input.as_mut().context("this process has no input")?.write_all(b"\n")?;
        self.read_output()
    }

    /// Asks the process to end by closing its input. Its last output can still be read.
    pub(crate) fn dismiss(&mut self) {
        self.input = None;
    }

    /// Asks the process to end, and waits for it.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.dismiss();
        self.child.wait()?;
        Ok(())
    }

    /// Kills it like `kill -9`, and waits for its end.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts a program again. If it still runs, it is killed first, with its descendants: sshd has one for each
    /// client.
    pub(crate) fn start_again(&mut self) -> Result<()> {
        ensure!(self.output.is_none(), "{} would open other ports", self.name);
        if self.alive() {
            let ids = tree(self.child.id())?.into_iter().map(|id| id.to_string());
            Command::new("sh").args(["-c", "kill -KILL \"$@\"", "sh"]).args(ids).status()?;
            self.child.wait()?;
        }
        self.child = self.command.spawn()?;
        Ok(())
    }

    /// Returns the exit status once it has ended.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Sends it a signal. Its exit status must not have been read yet.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let name = match signal {
            Signal::Terminate => "TERM",
            Signal::Stop => "STOP",
            Signal::Continue => "CONT",
        };
        let done = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.child.id())]).status()?;
        ensure!(done.success(), "cannot send {signal:?} to {}", self.name);
        Ok(())
    }

    /// Returns true while it runs.
    pub(crate) fn alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Returns the process id, for inspection while it runs.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the CPU time, user and system, of the process and its descendants so far.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let mut ticks = 0;
        for pid in tree(self.child.id())? {
            ticks += ticks_of(pid).unwrap_or(0);
        }
        Ok(Duration::from_millis(ticks * 1000 / TICKS))
    }

    /// Returns the private memory of the process and its descendants, in bytes: heap, stacks, and changed pages of
    /// files. Other processes share the rest, and the kernel drops it when memory is short.
    pub(crate) fn memory(&self) -> Result<u64> {
        self.status("RssAnon:")
    }

    /// Returns the resident memory of the process and its descendants, in bytes, as `ps` reports it.
    pub(crate) fn resident(&self) -> Result<u64> {
        self.status("VmRSS:")
    }

    fn status(&self, field: &str) -> Result<u64> {
        Ok(tree(self.child.id())?.into_iter().filter_map(|pid| status_of(pid, field)).sum())
    }

    fn spawn(mut command: Command, name: &OsStr) -> Result<Self> {
        let name = name.to_string_lossy().into_owned();
        let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let input = child.stdin.take();
        let output = child.stdout.take().map(BufReader::new);
        Ok(Self { child, command, input, output, name, gentle: false })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.gentle {
            self.dismiss();
            let _ = self.child.wait();
        } else {
            self.kill();
        }
    }
}

/// Returns a command that dies with this process, optionally in a namespace. Each wrapper becomes the program itself by
/// exec, so the process id is the program's.
fn wrapped(limiters: &[PathBuf], space: Option<&str>, mortal: bool) -> Command {
    let mut words: Vec<&str> = Vec::new();
    if let Some(space) = space {
        words.extend(["ip", "netns", "exec", space]);
    }
    if mortal {
        words.extend(["setpriv", "--pdeathsig", "KILL"]);
    }
    // A thousand sessions need more open files than the default limit of many machines.
    words.extend(["sh", "-c", "ulimit -n $(ulimit -Hn); exec \"$@\"", "sh"]);
    let mut command = Command::new("env");
    if !limiters.is_empty() {
        // Before the namespace, in which these files are not visible.
        command.args([
            "sh",
            "-c",
            "until [ \"$1\" = -- ]; do echo $$ >\"$1\" || exit; shift; done; shift; exec \"$@\"",
            "sh",
        ]);
        command.args(limiters).arg("--");
    }
    command.args(words);
    for name in NOT_OURS {
        command.env_remove(name);
    }
    command
}

/// Returns a process and its descendants.
fn tree(root: u32) -> Result<Vec<u32>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse::<u32>() else { continue };
        if let Some(parent) = stat_field(pid, 1) {
            parents.push((pid, parent));
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&above) = found.get(next) {
        found.extend(parents.iter().filter(|(_, parent)| *parent == u64::from(above)).map(|(pid, _)| *pid));
        next += 1;
    }
    Ok(found)
}

fn ticks_of(pid: u32) -> Option<u64> {
    Some(stat_field(pid, 11)? + stat_field(pid, 12)?)
}

/// Returns a field of /proc/PID/stat, counted from 0 after the name in parentheses.
fn stat_field(pid: u32, field: usize) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(field)?.parse().ok()
}

/// Returns a field of /proc/PID/status, in bytes.
fn status_of(pid: u32, field: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Variables that would override the config.
const NOT_OURS: [&str; 9] = [
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
    "NODE_NAME",
    "NODE_IP",
    "POD_IP",
];
/// Linux reports CPU time in hundredths of a second, whatever the kernel's own clock.
const TICKS: u64 = 100;
