//! The interactive link, in addition to a link busy with bulk traffic: losses and queues there do not delay
//! interactive sessions.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, info_span};

use crate::uplink::reconnect::{CurrentLink, Reconnector};
use tunnel_base::backoff::Backoff;
use tunnel_link::link::Link;
use tunnel_link::link_reader::LinkReader;
use tunnel_link::liveness::{self, Suspicion};
use tunnel_link::table::FrameEvent;
use tunnel_link::table::traffic_class::TrafficClassifier;
use tunnel_proto::frame::{Frame, FrameKind};
use tunnel_proto::hello::LinkPurpose;

impl Reconnector {
    /// Keeps an interactive link in addition to the current one while bulk and interactive sessions share that.
    ///
    /// There is none of a user's program, or with a short or unknown RTT. Never returns; when the future is
    /// dropped, the interactive link is handed over.
    pub(super) async fn run_interactive(self: &Arc<Self>, current: &CurrentLink) -> Infallible {
        let busy = &current.link;
        if self.dialer.user.is_some() {
            std::future::pending::<()>().await;
        }
        let mut sorting = TrafficClassifier::default();
        let mut backoff = Backoff::new();
        // After an interactive link has died, dial the next one whatever traffic the busy link has: the server's
        // sessions wait on the dead link until the server detects it, and the next link notifies it.
        let mut cooldown_until = Instant::now();
        loop {
            while Instant::now() >= cooldown_until && !self.is_shared(busy, &mut sorting).await {}
            sleep(backoff.pause(rand::random())).await;
            match self.dial_interactive(current).await {
                Ok(reader) => {
                    let started = Instant::now();
                    if self.classify_sessions(busy, reader, &mut sorting).await {
                        cooldown_until = Instant::now() + liveness::DEAD;
                    }
                    backoff.on_attempt_end(started.elapsed(), false);
                }
                Err(why) => {
                    debug!(link = %busy.id, error = %format_args!("{why:#}"), "cannot open interactive link");
                    backoff.refused();
                }
            }
        }
    }

    /// Dials an interactive link to the server of the busy link. Any other server refuses it.
    async fn dial_interactive(&self, current: &CurrentLink) -> anyhow::Result<LinkReader> {
        let request = current.request(LinkPurpose::Interactive);
        let reader = self.dialer.connect_to(current.place.server, request).await?.reader;
        anyhow::ensure!(reader.link.instance == current.link.instance, "connected to another server");
        Ok(reader)
    }

    /// Waits until the link is active, samples its sessions once, and returns true if interactive and bulk sessions
    /// share it and its RTT is long.
    async fn is_shared(&self, busy: &Arc<Link>, sorting: &mut TrafficClassifier) -> bool {
        busy.wait_active().await;
        sleep(TrafficClassifier::SAMPLE_INTERVAL).await;
        if !is_long_rtt(busy.min_rtt()) || busy.sessions() < 2 {
            return false;
        }
        let sorted = self.link_context.table.classify(busy, sorting);
        sorted.bulk > 0 && sorted.interactive > 0
    }

    /// Distributes the sessions between both links until the interactive link is closed or no longer useful. Returns
    /// true if the link has died, which the server may not have detected yet.
    async fn classify_sessions(
        self: &Arc<Self>,
        busy: &Arc<Link>,
        reader: LinkReader,
        sorting: &mut TrafficClassifier,
    ) -> bool {
        let interactive_link = reader.link.clone();
        info!(link = %interactive_link.id, primary = %busy.id, "interactive link opened");
        // `keep_open` is also dropped with this future.
        let (keep_open, cancelled) = oneshot::channel();
        let reconnector = self.clone();
        let span = info_span!("interactive");
        self.link_context.drain.spawn(span, reconnector.serve_interactive(reader, busy.clone(), cancelled));
        // No session migrates before the link has answered, and the server waits for this ping.
        if !interactive_link.is_alive(Suspicion::New).await {
            info!(link = %interactive_link.id, "interactive link does not answer, no sessions migrated");
            interactive_link.close();
            return false;
        }
        busy.set_interactive(Some(interactive_link.clone()));
        if keep_open.is_closed() {
            busy.clear_interactive(&interactive_link);
        }
        let mut shared = Instant::now();
        let died = loop {
            tokio::select! {
                // If its server drained, it was handed over before.
                () = interactive_link.closed() => break !interactive_link.is_drained(),
                () = interactive_link.wait_unresponsive() => {
                    info!(link = %interactive_link.id, "interactive link unresponsive, opening another one");
                    interactive_link.close();
                    break true;
                }
                () = sleep(TrafficClassifier::SAMPLE_INTERVAL) => {
                    let sorted = self.link_context.table.classify(busy, sorting);
                    if sorted.bulk > 0 {
                        shared = Instant::now();
                    } else if shared.elapsed() >= UNUSED_TIMEOUT {
                        break false;
                    }
                }
            }
        };
        drop(keep_open);
        died
    }

    /// Serves an interactive link until it is closed or no longer needed, its server drains, or the busy link is
    /// retired. Then its sessions migrate to the node's current link.
    async fn serve_interactive(
        self: Arc<Self>,
        mut reader: LinkReader,
        busy: Arc<Link>,
        mut cancelled: oneshot::Receiver<()>,
    ) {
        reader.begin();
        let why = loop {
            tokio::select! {
                event = reader.next() => match event {
                    Ok(FrameEvent::Signal(Frame { body: FrameKind::Drain(_), .. })) => break None,
                    Ok(event) => {
                        self.handle_event(event);
                    }
                    Err(why) => break Some(why),
                },
                _ = &mut cancelled => break None,
            }
        };
        // Drop this before clearing: `classify_sessions` checks for it after `set_interactive`.
        drop(cancelled);
        busy.clear_interactive(&reader.link);
        match why {
            Some(why) => self.ended(&reader, &why),
            None => self.hand_over(reader, self.uplinks.wait_newer(None)).await,
        }
    }
}

/// Returns true if bulk traffic delays other sessions on a link with this minimum RTT. Returns false if it is unknown.
fn is_long_rtt(least: Option<Duration>) -> bool {
    least.is_some_and(|rtt| rtt >= MIN_INTERACTIVE_RTT)
}

/// Minimum RTT for an interactive link. With a shorter one, bulk traffic delays other sessions only briefly.
const MIN_INTERACTIVE_RTT: Duration = Duration::from_millis(5);
/// Time without bulk traffic after which the interactive link is closed.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interactive_link_needs_a_measured_rtt_of_five_milliseconds() {
        let rtts = [None, Some(0), Some(4_999), Some(5_000), Some(600_000)];
        let long = rtts.map(|rtt| is_long_rtt(rtt.map(Duration::from_micros)));
        assert_eq!(long, [false, false, false, true, true]);
    }
}
