//! A session's bytes over stdin and stdout.

use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use super::session::{Session, broken_off};
use crate::command::Failure;
use crate::net::ByteStream as _;
use crate::net::pool::Pool;
use crate::net::socket::Socket;
use crate::net::splice::{Ended, How, Side};

/// Copies stdin to the session and the session to stdout until both have ended. The end of one direction is passed on
/// at once: the session is told when stdin ends, and stdout is closed when the session ends its direction.
///
/// # Errors
///
/// The session broke off, or stdin or stdout did.
pub(super) async fn carry(session: Session) -> Result<(), Failure> {
    let failed = |cause: io::Error| broken_off(&cause.to_string());
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let stdio = Stdio {
        input: tokio::fs::File::from_std(stdin.into()),
        output: Some(stdout().map_err(failed)?),
        failed: None,
    };
    tokio::select! {
        copied = copy(stdio, session) => copied,
        () = hung_up() => Err(broken_off("hung up on before both directions had ended")),
    }
}

/// Copies both ways.
async fn copy(stdio: Stdio, mut session: Session) -> Result<(), Failure> {
    let mut here = Socket::new(stdio, Pool::new());
    let ended = session.carry(&mut here).await;
    // What came before a break is given out all the same.
    let flushed = poll_fn(|cx| here.poll_flush(cx)).await.map_err(|cause| unwritten(cause.kind()));
    match ended {
        Ended { how: How::Finished, .. } => flushed,
        Ended { by: Side::A, how: How::ReadFailed(kind) } => {
            Err(broken_off(&format!("stdin cannot be read: {kind}")))
        }
        Ended { by: Side::A, how: How::WriteFailed(kind) } => Err(unwritten(kind)),
        Ended { by: Side::B, how: How::ReadFailed(kind) | How::WriteFailed(kind) } => {
            Err(session.broken(kind))
        }
    }
}

fn unwritten(kind: io::ErrorKind) -> Failure {
    broken_off(&format!("stdout cannot be written to: {kind}"))
}

/// Completes a while after SIGHUP. ssh sends that to its ProxyCommand as soon as it has closed both pipes, and the end of
/// its input must reach the pod first. A program that ignores SIGHUP, as under nohup, goes on ignoring it.
async fn hung_up() {
    if !ignores_hangup()
        && let Ok(mut hangups) = signal(SignalKind::hangup())
    {
        hangups.recv().await;
        return sleep(HANG_UP).await;
    }
    std::future::pending().await
}

/// Returns true if the parent has made this process ignore SIGHUP (proc(5), SigIgn).
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1))
}

/// Stdin and stdout as one stream.
struct Stdio {
    input: tokio::fs::File,
    /// `None` once its direction has ended: it is closed, so that its reader sees that.
    output: Option<tokio::fs::File>,
    /// How writing failed. Then nothing more is read either, as the caller has gone.
    failed: Option<io::ErrorKind>,
}

impl Stdio {
    fn poll_output<T>(
        &mut self,
        poll: impl FnOnce(Pin<&mut tokio::fs::File>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let Some(output) = &mut self.output else {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        };
        let polled = poll(Pin::new(output));
        if let Poll::Ready(Err(cause)) = &polled {
            self.failed = Some(cause.kind());
        }
        polled
    }
}

impl AsyncRead for Stdio {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.failed {
            Some(kind) => Poll::Ready(Err(kind.into())),
            None => Pin::new(&mut self.input).poll_read(cx, out),
        }
    }
}

impl AsyncWrite for Stdio {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_output(|output| output.poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.output {
            Some(_) => self.poll_output(|output| output.poll_flush(cx)),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(self.as_mut().poll_flush(cx));
        self.output = None;
        Poll::Ready(flushed)
    }
}

/// Stdout as a separate file; number 1 then leads nowhere.
fn stdout() -> io::Result<tokio::fs::File> {
    let own = std::io::stdout().as_fd().try_clone_to_owned()?;
    let nowhere = File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&nowhere)?;
    Ok(tokio::fs::File::from_std(own.into()))
}

/// Time after SIGHUP in which the ends of both directions may pass.
const HANG_UP: Duration = Duration::from_secs(1);
