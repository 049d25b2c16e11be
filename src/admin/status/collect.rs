//! Collects the [`StatusResponse`] of the process.

use std::time::{Duration, SystemTime};

use rustix::system::uname;
use tokio::time::Instant;

use crate::admin::AdminContext;
use crate::admin::status::{LinkStatus, SessionStatus, StatusResponse, Totals};
use tunnel_link::link::Link;
use tunnel_link::table::session::view::SessionView;

/// Converts times of this process to wall clock times. It is set once, so that a moment always has the same time.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    wall: SystemTime,
    /// When this process started.
    pub(crate) at: Instant,
}

impl WallClock {
    /// Creates a clock from the current time.
    pub fn now() -> Self {
        Self { wall: SystemTime::now(), at: Instant::now() }
    }

    /// Returns seconds since 1970, in whole milliseconds.
    pub(crate) fn time(&self, at: Instant) -> f64 {
        self.since_epoch(at).as_millis() as f64 / 1000.0
    }

    /// Returns the time since 1970.
    pub(crate) fn since_epoch(&self, at: Instant) -> Duration {
        let wall = self.wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let after = at.checked_duration_since(self.at).map(|after| wall + after);
        after.unwrap_or_else(|| wall.saturating_sub(self.at.duration_since(at)))
    }
}

impl AdminContext {
    /// Returns the current status.
    pub fn status(&self) -> StatusResponse {
        let table = &self.table;
        let (count, sessions) = table.overview(MAX_SESSIONS);
        let mut status = StatusResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            instance: format!("{:?}", table.instance()),
            host: uname().nodename().to_string_lossy().into_owned(),
            started_at: self.clock.time(self.clock.at),
            now: self.clock.time(Instant::now()),
            ready: self.readiness.check().is_ok(),
            conditions: self.readiness.conditions(),
            totals: Totals {
                sessions: count,
                sessions_relayed: table.relayed().0,
                bytes_to_target: self.metrics.bytes_to_target.get(),
                bytes_to_client: self.metrics.bytes_to_client.get(),
            },
            refusals: self.metrics.refusals.last_hour().into_iter().map(|(why, n)| (why.into(), n)).collect(),
            certificates: self.metrics.certificates.all(),
            sessions: sessions.into_iter().map(|one| self.session(one)).collect(),
            ..StatusResponse::default()
        };
        self.process.add_status(self, &mut status);
        status
    }

    pub(crate) fn link(&self, name: String, link: &Link) -> LinkStatus {
        let ends = link.ends();
        let traffic = link.traffic();
        LinkStatus {
            name,
            state: if link.is_drained() { "draining" } else { "linked" }.into(),
            link: Some(link.id.0),
            address: ends.and_then(|ends| ends.remote).map(|at| at.to_string()),
            instance: link.instance.map(|process| format!("{process:?}")),
            version: ends.and_then(|ends| ends.version.as_deref()).map(str::to_owned),
            dialect: Some(link.generation().to_owned()),
            websocket: link.websocket().map(str::to_owned),
            since: Some(self.clock.time(link.created_at())),
            rtt_seconds: link.measured_round_trip().map(|trip| trip.as_secs_f64()),
            sessions: link.sessions(),
            sent_bytes: traffic.sent_bytes,
            received_bytes: traffic.received_bytes,
            error: None,
            problems: None,
        }
    }

    fn session(&self, view: SessionView) -> SessionStatus {
        let (target, client) = view.opened_for.unzip();
        // As in the Open frame: USER@ADDRESS, or the address. An address has no @.
        let (user, client) = match client.as_deref().map(|text| text.rsplit_once('@')) {
            Some(Some((user, address))) => (Some(user.to_owned()), Some(address.to_owned())),
            _ => (None, client),
        };
        SessionStatus {
            id: view.id.to_string(),
            node: view.node.to_string(),
            target: target.map(|target| target.to_string()),
            client,
            user,
            listener: view.listener.map(str::to_owned),
            state: view.phase.into(),
            link: view.link.map(|link| link.0),
            since: self.clock.time(view.started),
            resume_count: view.resumed,
            sent_bytes: view.sent_bytes,
            received_bytes: view.received_bytes,
        }
    }
}

/// Maximum number of sessions in the status.
pub(crate) const MAX_SESSIONS: usize = 1000;
