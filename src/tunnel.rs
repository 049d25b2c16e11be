//! The protocol: links, and sessions that outlive them. This page is what upper layers may use.

pub mod frame;

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;

pub use frame::{Category, Code, Refusal};

use crate::names::{SessionId, Target};
use crate::net::Duplex;

/// STUB (being written): a session the far end wants to open; answer it by accepting or refusing.
#[must_use = "dropping an offer refuses it"]
#[derive(Debug)]
pub struct Offer {}

#[allow(missing_docs, clippy::todo, unused_variables)]
impl Offer {
    pub fn id(&self) -> SessionId {
        todo!()
    }
    pub fn category(&self) -> Category {
        todo!()
    }
    pub fn target(&self) -> &Target {
        todo!()
    }
    /// Who asked at the far end, for the log.
    pub fn client(&self) -> &str {
        todo!()
    }
    /// How long the dial may take on this link (10 s, or 4.5 s on a plain link).
    pub fn patience(&self) -> std::time::Duration {
        todo!()
    }
    /// Completes when the opener has given up (reset, or the link to a plain peer ended): stop dialling.
    pub async fn withdrawn(&self) {
        todo!()
    }
    pub fn accept(self) -> Session {
        todo!()
    }
    pub fn refuse(self, why: Refusal) {
        todo!()
    }
}

/// STUB (being written): one proxied TCP conversation, seen as a byte stream.
#[derive(Debug)]
pub struct Session {}

/// What a session did, for the access log.
#[derive(Debug, Clone)]
pub struct Account {
    /// Bytes written by our owner.
    pub sent: u64,
    /// Bytes read by our owner.
    pub received: u64,
    /// How often it was resumed on another path.
    pub resumed: u32,
    /// Why it ended early, if it did.
    pub ended: Option<Refusal>,
}

#[allow(missing_docs, clippy::todo, unused_variables)]
impl Session {
    pub fn id(&self) -> SessionId {
        todo!()
    }
    pub fn account(&self) -> Account {
        todo!()
    }
    /// Ends it with a reason for the far end; dropping does the same with [`Code::GivenUp`].
    pub fn reset(self, why: Refusal) {
        todo!()
    }
}

#[allow(clippy::todo, unused_variables)]
impl Duplex for Session {
    fn poll_take(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        todo!()
    }
    fn poll_give(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        todo!()
    }
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        todo!()
    }
}
