//! A session's bytes over stdin and stdout.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, copy_bidirectional, join};

use super::pod::Session;
use crate::command::Failure;

/// Copies stdin to the session and the session to stdout until both have ended. The end of one direction is passed on
/// at once: the session is told when stdin ends, and stdout is closed when the session ends its direction.
///
/// # Errors
///
/// The session broke off.
pub(super) async fn carry(session: Session) -> Result<(), Failure> {
    let failed = |cause: io::Error| Failure { code: BROKEN, text: format!("the session broke off: {cause}") };
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let stdout = stdout().map_err(failed)?;
    copy(tokio::fs::File::from_std(stdin.into()), stdout, session).await.map_err(failed)
}

/// Copies both ways.
pub(super) async fn copy(
    input: impl AsyncRead + Unpin,
    output: impl AsyncWrite + Unpin,
    session: Session,
) -> io::Result<()> {
    let Session { mut stream, early } = session;
    let mut here = join(input, output);
    here.write_all(&early).await?;
    here.flush().await?;
    let copied = copy_bidirectional(&mut here, &mut stream).await;
    // What came before a break is given out all the same.
    here.flush().await.or(copied.map(drop))
}

/// A file that is closed when its direction ends, so that its reader sees that.
struct Closing(Option<tokio::fs::File>);

/// Stdout as a file of its own; from now on number 1 leads nowhere.
fn stdout() -> io::Result<Closing> {
    let own = std::io::stdout().as_fd().try_clone_to_owned()?;
    let nowhere = File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&nowhere)?;
    Ok(Closing(Some(tokio::fs::File::from_std(own.into()))))
}

impl AsyncWrite for Closing {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            Some(file) => Pin::new(file).poll_write(cx, bytes),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.as_mut().map_or(Poll::Ready(Ok(())), |file| Pin::new(file).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(self.as_mut().poll_flush(cx));
        self.0 = None;
        Poll::Ready(flushed)
    }
}

/// Exit code of a session that broke off, as in sysexits.h (EX_IOERR).
const BROKEN: u8 = 74;
