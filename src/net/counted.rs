//! A byte stream that counts the bytes that pass through it.

use std::io;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;

use super::ByteStream;

/// Counts as bytes pass, so that a session that is cut is counted up to that point.
#[derive(Debug)]
pub struct Counted<'a, D> {
    /// The stream itself.
    pub stream: &'a mut D,
    /// What was taken from it, and counted, before: handed out first.
    pub early: Bytes,
    /// Bytes read from it.
    pub taken: Tally<'a>,
    /// Bytes written to it.
    pub given: Tally<'a>,
}

/// Byte counters of one direction.
#[derive(Debug)]
pub struct Tally<'a> {
    /// Counter of this session.
    pub one: &'a mut u64,
    /// Counter of all sessions of the process.
    pub all: &'a Counter,
}

impl Tally<'_> {
    fn add(&mut self, bytes: usize) {
        *self.one += bytes as u64;
        self.all.inc_by(bytes as u64);
    }
}

impl<D: ByteStream> ByteStream for Counted<'_, D> {
    fn poll_read_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        if !self.early.is_empty() {
            return Poll::Ready(Ok(std::mem::take(&mut self.early)));
        }
        let bytes = ready!(self.stream.poll_read_chunk(cx))?;
        self.taken.add(bytes.len());
        Poll::Ready(Ok(bytes))
    }

    fn poll_write_chunk(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        let before = bytes.len();
        let given = self.stream.poll_write_chunk(cx, bytes);
        self.given.add(before.saturating_sub(bytes.len()));
        given
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_flush(cx)
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_finish(cx)
    }

    fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_lost(cx)
    }
}
