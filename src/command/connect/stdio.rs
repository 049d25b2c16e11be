//! Stdin and stdout of `tunnel connect`, and the copying between them and a session.

use std::fs::File;
use std::future::{self, poll_fn};
use std::io::{self, IsTerminal as _};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use futures_util::future::BoxFuture;
use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::command::connect::session::{ConnectSession, interrupted};
use crate::command::{CommandError, CommandResult};
use crate::session_io::copy::{CopyEnd, EndKind, Side};
use crate::startup::signals::hangup;
use tunnel_net::ChunkStream as _;
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::{Connection, Socket};

/// Copies stdin to the session and the session to stdout until both have ended. Each end is passed on at once: the
/// session is notified when stdin ends, and stdout is closed when the session ends its direction. A terminal ends then,
/// too: its user cannot know that the target has closed.
///
/// # Errors
///
/// Returns an error if the session, stdin or stdout failed.
pub(super) async fn carry(session: ConnectSession) -> CommandResult<()> {
    let failed = |cause: io::Error| interrupted(&cause.to_string());
    let stdin = io::stdin();
    let stdio = Stdio {
        is_terminal: stdin.is_terminal(),
        input: own(&stdin).map_err(failed)?,
        ended: false,
        output: Some(stdout().map_err(failed)?),
        failed: None,
        reader: None,
    };
    tokio::select! {
        copied = copy(stdio, session) => copied,
        () = wait_hangup() => Err(interrupted("SIGHUP before both directions ended")),
    }
}

/// Copies both ways.
async fn copy(stdio: Stdio, mut session: ConnectSession) -> CommandResult<()> {
    let mut here = Socket::new(stdio, BufferPool::new());
    let ended = session.carry(&mut here).await;
    // Bytes received before a failure are still written.
    let flushed = poll_fn(|cx| here.poll_flush(cx)).await.map_err(|cause| stdout_error(cause.kind()));
    let result = match ended {
        CopyEnd { how: EndKind::Finished, .. } => flushed,
        CopyEnd { by: Side::A, how: EndKind::ReadFailed(kind) } => {
            Err(interrupted(&format!("cannot read stdin: {kind}")))
        }
        CopyEnd { by: Side::A, how: EndKind::WriteFailed(kind) } => Err(stdout_error(kind)),
        CopyEnd { by: Side::B, how: EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind) } => {
            Err(session.interruption_error(kind))
        }
    };
    if result.is_err() {
        // ssh ends as soon as its ProxyCommand's stdout is closed. So stdout is closed by the end of this process, when
        // the error is printed.
        std::mem::forget(here);
    }
    result
}

fn stdout_error(kind: io::ErrorKind) -> CommandError {
    interrupted(&format!("cannot write to stdout: {kind}"))
}

/// Completes some time after SIGHUP. ssh sends SIGHUP to its ProxyCommand as soon as it has closed both pipes, and the
/// end of its input must reach the server first.
async fn wait_hangup() {
    hangup().await;
    sleep(HANGUP_GRACE).await;
}

/// Stdin and stdout of `tunnel connect` as one byte stream, to be copied to and from the session.
struct Stdio {
    input: tokio::fs::File,
    /// Whether stdin was read to its end.
    ended: bool,
    /// Stdout; `None` once its direction has ended. It is closed then, so that its reader notices.
    output: Option<tokio::fs::File>,
    /// The error of a failed write. Nothing is read after it, because the caller has disconnected.
    failed: Option<io::ErrorKind>,
    /// Whether stdin is a terminal, which ends with `output`.
    is_terminal: bool,
    /// Wakes the reader of a terminal when `output` ends.
    reader: Option<Waker>,
}

impl Connection for Stdio {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }

    fn remote_reset(&self) -> BoxFuture<'_, ()> {
        // As long as stdin is open, its bytes are needed, even if no process reads stdout.
        let closed = self.ended && self.output.as_ref().is_some_and(has_no_reader);
        if closed { Box::pin(future::ready(())) } else { Box::pin(future::pending()) }
    }
}

/// Returns true if this is a pipe or a socket that no process can read.
fn has_no_reader(output: &tokio::fs::File) -> bool {
    let mut polled = [PollFd::new(output, PollFlags::empty())];
    let ready = rustix::event::poll(&mut polled, Some(&Timespec::default())).is_ok();
    ready && polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
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
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(kind) = this.failed {
            return Poll::Ready(Err(kind.into()));
        }
        if this.is_terminal {
            if this.output.is_none() {
                return Poll::Ready(Ok(()));
            }
            this.reader = Some(cx.waker().clone());
        }
        let before = out.filled().len();
        let read = ready!(Pin::new(&mut this.input).poll_read(cx, out));
        this.ended = out.filled().len() == before;
        Poll::Ready(read)
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
        self.reader.take().into_iter().for_each(Waker::wake);
        Poll::Ready(flushed)
    }
}

/// Returns stdout as a separate file; file descriptor 1 then points to /dev/null.
fn stdout() -> io::Result<tokio::fs::File> {
    let own = own(&io::stdout())?;
    let nowhere = File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&nowhere)?;
    Ok(own)
}

/// Returns a file descriptor as a separate file. Its threads wait in reads and writes, so what it shares with the caller
/// becomes blocking, as shells also make it.
fn own(fd: &impl AsFd) -> io::Result<tokio::fs::File> {
    rustix::io::ioctl_fionbio(fd, false)?;
    Ok(tokio::fs::File::from_std(fd.as_fd().try_clone_to_owned()?.into()))
}

/// Time after SIGHUP for the ends of both directions to be passed on.
const HANGUP_GRACE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixStream;

    use crate::command::connect::session::ConnectStream;

    use super::*;

    #[tokio::test]
    async fn a_pipe_that_the_caller_has_made_non_blocking_is_read_and_written_to_its_end() {
        let (input, mut to_input) = std::io::pipe().unwrap();
        let (mut from_output, output) = std::io::pipe().unwrap();
        for end in [input.as_fd(), output.as_fd()] {
            rustix::io::ioctl_fionbio(end, true).unwrap();
        }
        let [mut reader, mut writer] = [own(&input).unwrap(), own(&output).unwrap()];
        // More than a pipe holds.
        let long = vec![7; 300_000];
        let all = std::thread::spawn(move || {
            let mut read = Vec::new();
            from_output.read_to_end(&mut read).map(|_| read)
        });
        let mut text = String::new();
        let later = async move { to_input.write_all(b"later") };
        let (read, written) = tokio::join!(reader.read_to_string(&mut text), later);
        assert_eq!((read.unwrap(), written.unwrap(), &*text), (5, (), "later"));
        writer.write_all(&long).await.unwrap();
        writer.flush().await.unwrap();
        drop((writer, output));
        assert!(all.join().unwrap().unwrap() == long);
    }

    /// Neither direction has bytes that would reveal it.
    #[tokio::test(start_paused = true)]
    async fn connect_ends_when_its_caller_closes_both_pipes() {
        let (_server, near) = UnixStream::pair().unwrap();
        let (input, to_input) = std::io::pipe().unwrap();
        let (from_output, output) = std::io::pipe().unwrap();
        drop(to_input);
        let file = |end: std::os::fd::OwnedFd| tokio::fs::File::from_std(end.into());
        let (input, output) = (file(input.into()), Some(file(output.into())));
        let stdio = Stdio { input, ended: false, output, failed: None, is_terminal: false, reader: None };
        let stream = ConnectStream::Server(Socket::new(Box::new(near), BufferPool::new()));
        let session = ConnectSession { stream, from: "cloud".to_owned(), trace: "00".to_owned() };
        let mut copying = std::pin::pin!(copy(stdio, session));
        let waited = tokio::time::timeout(Duration::from_secs(1000), &mut copying).await;
        assert!(waited.is_err(), "the caller only waits for the response");
        drop(from_output);
        let ended = copying.await.unwrap_err();
        assert!(ended.text.contains("cannot write to stdout: broken pipe"), "{}", ended.text);
    }
}
