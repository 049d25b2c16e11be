//! Runs nft.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;

use crate::intercept::{InterceptError, TIMEOUT};

/// Runs commands in one nft transaction. Cancel safe: the nft process is killed, but may already have applied them.
pub(crate) async fn run(commands: &str) -> Result<(), InterceptError> {
    let done = async {
        let mut nft = tokio::process::Command::from(command(&["-j", "-f", "-"]));
        let mut child = nft.kill_on_drop(true).spawn().map_err(InterceptError::Program)?;
        if let Some(mut input) = child.stdin.take() {
            // If nft ends before it has read everything, its output has the reason.
            let _ = input.write_all(commands.as_bytes()).await;
        }
        check_output(&child.wait_with_output().await.map_err(InterceptError::Program)?)
    };
    timeout(TIMEOUT, done).await.unwrap_or(Err(InterceptError::Timeout)).map(drop)
}

/// Like [`run`], but with these arguments, and returns the output. Blocks: call it at startup.
pub(crate) fn wait(args: &[&str], commands: &str) -> Result<String, InterceptError> {
    let mut child = command(args).spawn().map_err(InterceptError::Program)?;
    if let Some(mut input) = child.stdin.take() {
        let _ = input.write_all(commands.as_bytes());
    }
    check_output(&child.wait_with_output().map_err(InterceptError::Program)?)
}

fn command(args: &[&str]) -> Command {
    let mut nft = Command::new("nft");
    nft.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    nft
}

fn check_output(output: &Output) -> Result<String, InterceptError> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let stderr_text = text(&output.stderr);
    if stderr_text.contains("Operation not permitted") {
        return Err(InterceptError::Denied);
    }
    let first =
        stderr_text.lines().find(|line| !line.trim().is_empty()).unwrap_or("failed without a message");
    Err(InterceptError::Failed(first.to_owned()))
}
