//! Stands in for invitations in a build without them: no node has joined by one.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use tunnel_base::names::{Host, NodeName};

/// The nodes that have joined by invitation. There are none.
#[derive(Debug)]
pub enum Enrolment {}

/// What a joining machine learns about the cloud's CA. No machine joins.
#[derive(Debug, Clone)]
pub enum ServerCa {}

/// A new invitation. There is none.
#[derive(Debug)]
pub(crate) struct IssuedInvitation {
    pub(crate) code: String,
    pub(crate) until: SystemTime,
    pub(crate) host: Option<Host>,
}

/// Error changing the invitations.
pub(crate) type EnrolError<E> = E;

impl Enrolment {
    pub(crate) fn known(&self) -> Arc<Self> {
        match *self {}
    }

    pub(crate) fn names(&self, _: &NodeName) -> bool {
        match *self {}
    }

    pub(crate) fn proves(&self, _: &NodeName, _: &str) -> Option<bool> {
        match *self {}
    }

    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        match *self {}
    }

    pub(crate) async fn refresh(&self) -> bool {
        match *self {}
    }

    pub(crate) async fn invite(
        &self,
        _: &NodeName,
        _: Duration,
        _: &str,
    ) -> Result<IssuedInvitation, Infallible> {
        match *self {}
    }

    pub(crate) async fn list(&self) -> Result<Vec<String>, Infallible> {
        match *self {}
    }

    pub(crate) async fn revoke(&self, _: &NodeName, _: &str) -> Result<bool, Infallible> {
        match *self {}
    }
}
