//! Runs nft. The crate whose types make its commands would run it as well, but it leaves what nft complains of to our
//! stderr, and that says whether it is not allowed to do as told.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;

use super::{CatchError, PATIENCE};

/// Has nft do all of it in one transaction. Cancel safe as far as the process ends then; it may have done so.
pub(super) async fn run(commands: &str) -> Result<(), CatchError> {
    let done = async {
        let mut nft = tokio::process::Command::from(command(&["-j", "-f", "-"]));
        let mut child = nft.kill_on_drop(true).spawn().map_err(CatchError::Program)?;
        if let Some(mut input) = child.stdin.take() {
            // Where it ends before it has read all, it says why.
            let _ = input.write_all(commands.as_bytes()).await;
        }
        judge(&child.wait_with_output().await.map_err(CatchError::Program)?)
    };
    timeout(PATIENCE, done).await.unwrap_or(Err(CatchError::Silent)).map(drop)
}

/// As [`run`], with these arguments: what it prints. Blocks: for start-up.
pub(super) fn wait(args: &[&str], commands: &str) -> Result<String, CatchError> {
    let mut child = command(args).spawn().map_err(CatchError::Program)?;
    if let Some(mut input) = child.stdin.take() {
        let _ = input.write_all(commands.as_bytes());
    }
    judge(&child.wait_with_output().map_err(CatchError::Program)?)
}

fn command(args: &[&str]) -> Command {
    let mut nft = Command::new("nft");
    nft.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    nft
}

fn judge(output: &Output) -> Result<String, CatchError> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let said = text(&output.stderr);
    if said.contains("Operation not permitted") {
        return Err(CatchError::Denied);
    }
    let first = said.lines().find(|line| !line.trim().is_empty()).unwrap_or("it has failed without a word");
    Err(CatchError::Failed(first.to_owned()))
}
