//! The link to another pod while it is up.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::{IDLE, Sibling, State};
use crate::protocol::{LinkSender, SecondLink};
use crate::registry::siblings::reach::DialContext;

impl Sibling {
    /// A link is up: kept until it ends, or has had nothing to do for a minute. Where it falls silent, another one takes
    /// its place.
    pub(super) async fn serve(
        &self,
        mut link: Arc<LinkSender>,
        second: &mut SecondLink,
        means: &DialContext,
    ) {
        let end = loop {
            match self.serve_one(&link, second, means).await {
                End::Outrun(next) => {
                    self.becomes(State::Up(next.clone()));
                    link.close();
                    link = next;
                    // What was announced over the silent one may be lost.
                    self.is_process(None, means);
                }
                end => break end,
            }
        };
        self.becomes(State::Away);
        if let End::Lost = end {
            self.is_process(None, means);
            if self.listed.load(Relaxed) {
                // Whether it lives is known by the next link.
                self.want();
            }
        }
    }

    async fn serve_one(&self, link: &Arc<LinkSender>, second: &mut SecondLink, means: &DialContext) -> End {
        let pod = link.instance.map(tracing::field::debug);
        tracing::info!(link = %link.id, at = %self.at, pod, "linked to another pod");
        self.becomes(State::Up(link.clone()));
        self.note(None, means);
        self.is_process(Some(link), means);
        means.registry.told_of_a_pod();
        means.greet(link, &self.news);
        self.news.send(link, &means.registry, means.own).await;
        // Requests that came during the dial have their link now.
        let _ = timeout(Duration::ZERO, self.wanted.notified()).await;
        self.touch();
        let mut outrun = pin!(second.beside(link, || means.dialer.dial(self.at, true)));
        while !link.is_closed() {
            tokio::select! {
                () = link.closed() => {}
                () = self.news.come() => {
                    self.touch();
                    self.news.send(link, &means.registry, means.own).await;
                }
                () = sleep(IDLE / 4) => {
                    if link.sessions() > 0 {
                        self.touch();
                    } else if self.unused() >= IDLE {
                        tracing::debug!(at = %self.at, "the link to another pod is not needed any more");
                        link.close();
                        return End::Idle;
                    }
                }
                next = &mut outrun => return End::Outrun(next),
            }
        }
        End::Lost
    }
}

/// Why a link is not served any more.
enum End {
    /// Nobody needs it.
    Idle,
    Lost,
    /// It is silent, and this one beside it has answered first.
    Outrun(Arc<LinkSender>),
}
