//! A Unix socket between two programs of one user, with an explicit end of each direction, and notices next to the
//! bytes.
//!
//! A Unix socket has no reset: a program that is killed looks like one that has finished. Here a direction that ends
//! without its last record is broken.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::{fmt, net};

use bytes::{Buf as _, BufMut as _, BytesMut};
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use crate::listen::Accept;
use crate::socket::Connection;
use crate::unix_accept::UnixAccept;

/// A Unix socket that carries records: bytes, the end of a direction, and texts.
pub struct RecordStream {
    outbound: Arc<OutboundRecords>,
    /// Whether the last record of this direction was queued.
    finished: bool,
    header: [u8; HEADER],
    /// Bytes of the header that have arrived.
    header_bytes: usize,
    /// Bytes of the current record that have not arrived.
    left: usize,
    /// Whether the remote has ended its direction.
    ended: bool,
    text: Vec<u8>,
    /// Handles the remote's notices.
    on_notice: Box<dyn FnMut(&str) + Send>,
    /// Returns the reason that the remote gets if this is dropped before its direction has ended.
    break_reason: Box<dyn Fn() -> Option<String> + Send>,
    /// Why the remote has broken off.
    remote_reason: Option<String>,
}

/// The socket, and the records that it has not accepted yet.
#[derive(Debug)]
struct OutboundRecords {
    io: UnixStream,
    records: Mutex<BytesMut>,
}

/// Sends notices to the remote of a [`RecordStream`], while that is open.
#[derive(Debug, Clone)]
pub struct NoticeSender(Weak<OutboundRecords>);

/// The kinds of records, as their first byte. The length follows in two bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RecordKind {
    Bytes = 0,
    /// The end of the direction.
    End = 1,
    /// A text for the person at the remote's terminal.
    Notice = 2,
    /// Why the sender breaks off.
    Broken = 3,
}

impl RecordStream {
    /// Wraps a socket. `on_notice` is called with each text that the remote sends.
    pub fn new(io: UnixStream, on_notice: impl FnMut(&str) + Send + 'static) -> Self {
        Self {
            outbound: Arc::new(OutboundRecords { io, records: Mutex::default() }),
            finished: false,
            header: [0; HEADER],
            header_bytes: 0,
            left: 0,
            ended: false,
            text: Vec::new(),
            on_notice: Box::new(on_notice),
            break_reason: Box::new(|| None),
            remote_reason: None,
        }
    }

    /// Sets what the remote is told if this is dropped before its direction has ended.
    pub fn set_break_reason(&mut self, reason: impl Fn() -> Option<String> + Send + 'static) {
        self.break_reason = Box::new(reason);
    }

    /// Returns why the remote has broken off, if it has said so.
    pub fn remote_reason(&self) -> Option<&str> {
        self.remote_reason.as_deref()
    }

    /// Returns a sender of notices.
    pub fn notifier(&self) -> NoticeSender {
        NoticeSender(Arc::downgrade(&self.outbound))
    }

    /// Reads until there are bytes of the remote's direction, or it has ended.
    fn poll_record(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.ended {
            if self.remote_reason.is_some() {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            if self.header_bytes < HEADER {
                let room = self.header.get_mut(self.header_bytes..).unwrap_or_default();
                self.header_bytes += ready!(self.outbound.poll_read(cx, room))?;
                if let [_, high, low] = self.header
                    && self.header_bytes == HEADER
                {
                    self.left = u16::from_be_bytes([high, low]).into();
                }
                continue;
            }
            match RecordKind::try_from(self.header[0])? {
                RecordKind::Bytes if self.left > 0 => break,
                RecordKind::Bytes => {}
                RecordKind::End => self.ended = true,
                kind => {
                    ready!(self.poll_text(cx))?;
                    let text = String::from_utf8_lossy(&std::mem::take(&mut self.text)).into_owned();
                    if kind == RecordKind::Broken {
                        self.remote_reason = Some(text);
                        continue;
                    }
                    (self.on_notice)(&text);
                }
            }
            self.header_bytes = 0;
        }
        Poll::Ready(Ok(()))
    }

    /// Reads the rest of a record with a text.
    fn poll_text(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.text.len() + self.left > MAX_TEXT {
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        while self.left > 0 {
            let mut part = [0; MAX_TEXT];
            let room = part.get_mut(..self.left).unwrap_or_default();
            let read = ready!(self.outbound.poll_read(cx, room))?;
            self.text.extend_from_slice(part.get(..read).unwrap_or_default());
            self.left -= read;
        }
        Poll::Ready(Ok(()))
    }
}

impl OutboundRecords {
    /// Reads at least one byte.
    fn poll_read(&self, cx: &mut Context<'_>, room: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            match self.io.try_read(room) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.io.poll_read_ready(cx))?;
                }
                read => return Poll::Ready(read),
            }
        }
    }

    fn queue(&self, kind: RecordKind, content: &[u8]) {
        let length = u16::try_from(content.len()).unwrap_or(0);
        let mut records = self.records.lock();
        records.put_u8(kind as u8);
        records.put_u16(length);
        records.put(content.get(..length.into()).unwrap_or_default());
    }

    /// Queues a text, and sends it if the socket accepts it now.
    fn send_text(&self, kind: RecordKind, text: &str) {
        let text = text.as_bytes();
        self.queue(kind, text.get(..MAX_TEXT).unwrap_or(text));
        // The rest follows with the next bytes.
        let _ = self.try_send();
    }

    /// Sends what the socket accepts now. Returns true if nothing is left.
    fn try_send(&self) -> io::Result<bool> {
        let mut records = self.records.lock();
        while !records.is_empty() {
            match self.io.try_write(&records) {
                Ok(sent) => records.advance(sent),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(cause) => return Err(cause),
            }
        }
        Ok(true)
    }

    fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.try_send()? {
            ready!(self.io.poll_write_ready(cx))?;
        }
        Poll::Ready(Ok(()))
    }
}

impl NoticeSender {
    /// Sends a text for the person at the remote's terminal.
    pub fn notify(&self, text: &str) {
        if let Some(outbound) = self.0.upgrade() {
            outbound.send_text(RecordKind::Notice, text);
        }
    }
}

impl TryFrom<u8> for RecordKind {
    type Error = io::Error;

    fn try_from(byte: u8) -> io::Result<Self> {
        let all = [Self::Bytes, Self::End, Self::Notice, Self::Broken];
        all.into_iter().find(|kind| *kind as u8 == byte).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

impl AsyncRead for RecordStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        ready!(this.poll_record(cx))?;
        if this.ended {
            return Poll::Ready(Ok(()));
        }
        let room = out.initialize_unfilled_to(this.left.min(out.remaining()));
        if !room.is_empty() {
            let read = ready!(this.outbound.poll_read(cx, room))?;
            out.advance(read);
            this.left -= read;
            if this.left == 0 {
                this.header_bytes = 0;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for RecordStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.outbound.poll_send(cx))?;
        let taken = bytes.get(..u16::MAX.into()).unwrap_or(bytes);
        self.outbound.queue(RecordKind::Bytes, taken);
        match self.outbound.poll_send(cx) {
            Poll::Ready(Err(cause)) => Poll::Ready(Err(cause)),
            // The rest is sent by the next write or flush.
            _ => Poll::Ready(Ok(taken.len())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.outbound.poll_send(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !std::mem::replace(&mut self.finished, true) {
            self.outbound.queue(RecordKind::End, &[]);
        }
        ready!(self.outbound.poll_send(cx))?;
        match SockRef::from(&self.outbound.io).shutdown(net::Shutdown::Write) {
            // The remote has closed its socket after it has read the end.
            Err(cause) if cause.kind() != io::ErrorKind::NotConnected => Poll::Ready(Err(cause)),
            _ => Poll::Ready(Ok(())),
        }
    }
}

/// Ends cleanly only if its direction was finished.
impl Connection for RecordStream {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }

    fn remote_reset(&self) -> impl Future<Output = ()> + Send {
        self.outbound.io.remote_reset()
    }
}

impl AsFd for RecordStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.outbound.io.as_fd()
    }
}

impl Drop for RecordStream {
    fn drop(&mut self) {
        if !self.finished
            && let Some(reason) = (self.break_reason)()
        {
            self.outbound.send_text(RecordKind::Broken, &reason);
        }
    }
}

impl fmt::Debug for RecordStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordStream").field("io", &self.outbound.io).finish_non_exhaustive()
    }
}

/// A listening Unix socket for [`RecordStream`]s.
#[derive(Debug)]
pub struct RecordStreamListener(pub UnixAccept);

impl Accept for RecordStreamListener {
    type AnyStream = RecordStream;

    fn at(&self) -> impl fmt::Display {
        self.0.at()
    }

    async fn accept(&self) -> (RecordStream, net::SocketAddr) {
        let (stream, from) = self.0.accept().await;
        (RecordStream::new(stream, |_| {}), from)
    }
}

/// Length of a record's header.
const HEADER: usize = 3;
/// Maximum length of a text.
const MAX_TEXT: usize = 1024;

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn pair() -> (RecordStream, RecordStream, mpsc::Receiver<String>) {
        let (near, far) = UnixStream::pair().unwrap();
        let (heard, notices) = mpsc::channel();
        let near = RecordStream::new(near, move |text| heard.send(text.to_owned()).unwrap());
        (near, RecordStream::new(far, |_| {}), notices)
    }

    #[tokio::test]
    async fn bytes_and_the_end_of_each_direction_arrive_and_notices_come_in_between() {
        let (mut near, mut far, notices) = pair();
        let sent: Vec<u8> = (0..300_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let notifier = far.notifier();
        let writing = async {
            far.write_all(b"first").await.unwrap();
            notifier.notify("no path");
            far.write_all(&sent).await.unwrap();
            far.shutdown().await.unwrap();
            let mut back = Vec::new();
            far.read_to_end(&mut back).await.unwrap();
            back
        };
        let reading = async {
            let mut got = Vec::new();
            near.read_to_end(&mut got).await.unwrap();
            near.write_all(b"after the end").await.unwrap();
            near.shutdown().await.unwrap();
            got
        };
        let (back, got) = tokio::join!(writing, reading);
        assert_eq!((back.as_slice(), &got[..5]), (&b"after the end"[..], &b"first"[..]));
        assert!(got[5..] == sent);
        assert_eq!(notices.try_iter().collect::<Vec<_>>(), ["no path"]);
    }

    #[tokio::test]
    async fn a_direction_without_its_end_is_broken_and_the_reason_arrives() {
        let (mut near, mut far, _notices) = pair();
        far.write_all(b"part").await.unwrap();
        far.set_break_reason(|| Some("the node did not return".to_owned()));
        drop(far);
        let mut got = Vec::new();
        let broken = near.read_to_end(&mut got).await.unwrap_err();
        assert_eq!((got.as_slice(), broken.kind()), (&b"part"[..], io::ErrorKind::ConnectionReset));
        let again = near.read_to_end(&mut got).await.unwrap_err();
        assert_eq!((again.kind(), got.as_slice()), (io::ErrorKind::ConnectionReset, &b"part"[..]));
        assert_eq!(near.remote_reason(), Some("the node did not return"));
        let (mut near, mut far, _notices) = pair();
        far.write_all(b"part").await.unwrap();
        drop(far);
        let broken = near.read_to_end(&mut got).await.unwrap_err();
        assert_eq!((broken.kind(), near.remote_reason()), (io::ErrorKind::UnexpectedEof, None));
    }

    #[tokio::test]
    async fn what_is_no_record_is_an_error() {
        for wrong in [&[9, 0, 1, 0][..], &[2, 255, 255, 0]] {
            let (near, mut far) = UnixStream::pair().unwrap();
            far.write_all(wrong).await.unwrap();
            let mut near = RecordStream::new(near, |_| {});
            assert_eq!(near.read(&mut [0]).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
