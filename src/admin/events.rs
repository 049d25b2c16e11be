//! The live page's stream: what has changed since the last event, once a second.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::info_span;

use super::Admin;
use super::status::{LinkStatus, Status, Totals};
use crate::drain::Drain;
use crate::net::door::Slot;

/// A stream of server-sent events. It ends when the process drains, or another source needs its slot.
#[derive(Debug)]
pub(super) struct Events(mpsc::Receiver<Bytes>);

/// What is sent at once.
#[derive(Serialize)]
struct Update {
    mode: String,
    version: String,
    process: String,
    node: Option<String>,
    started: f64,
    now: f64,
    ready: bool,
    notes: Vec<String>,
    totals: Totals,
    /// Links that there are; at most [`MOST_LINKS`] are told one by one.
    links_in_all: usize,
    links: Change,
    sessions: Change,
    siblings: Change,
    gone: Change,
}

/// Of one list: what is new or has changed, each with its key, and the keys of what is there no more.
#[derive(Serialize)]
struct Change {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    set: Vec<(String, serde_json::Value)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gone: Vec<String>,
}

/// What the reader of one stream has been told: of each item a hash.
#[derive(Debug, Default)]
struct Told {
    links: HashMap<String, u64>,
    sessions: HashMap<String, u64>,
    siblings: HashMap<String, u64>,
    gone: HashMap<String, u64>,
}

impl Events {
    /// Begins a stream, fed by a task that ends with it.
    pub(super) fn begin(admin: Admin, slot: Slot, drain: &Drain) -> Self {
        // One event waits for a slow reader; the next one is made when it is taken.
        let (send, events) = mpsc::channel(1);
        let (lost, draining) = (slot.lost(), drain.clone());
        drain.spawn(info_span!("events"), async move {
            let (mut told, _slot) = (Told::default(), slot);
            loop {
                tokio::select! {
                    biased;
                    () = draining.draining() => return,
                    () = lost.cancelled() => return,
                    () = send.closed() => return,
                    permit = send.reserve() => {
                        let Ok(permit) = permit else { return };
                        let Some(event) = told.event(admin.status()) else { return };
                        permit.send(event);
                    }
                }
                tokio::select! {
                    () = sleep(EVERY) => {}
                    () = draining.draining() => return,
                    () = send.closed() => return,
                }
            }
        });
        Self(events)
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

impl Told {
    /// The next event; `None` if it cannot be written, which never is.
    fn event(&mut self, status: Status) -> Option<Bytes> {
        let Status { mode, version, process, node, started, now, ready, notes, totals, links, .. } = status;
        let links_in_all = links.len();
        let by_link =
            |link: &LinkStatus| link.link.map_or_else(|| link.name.clone(), |number| number.to_string());
        let update = Update {
            mode,
            version,
            process,
            node,
            started,
            now,
            ready,
            notes,
            totals,
            links_in_all,
            links: changes(&mut self.links, links.into_iter().take(MOST_LINKS), by_link),
            sessions: changes(&mut self.sessions, status.sessions, |one| format!("{} {}", one.id, one.since)),
            siblings: changes(&mut self.siblings, status.siblings, by_link),
            gone: changes(&mut self.gone, status.gone, |one| one.name.clone()),
        };
        let json = serde_json::to_string(&update).ok()?;
        Some(format!("event: status\ndata: {json}\n\n").into())
    }
}

fn changes<T: Serialize>(
    told: &mut HashMap<String, u64>,
    now: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> String,
) -> Change {
    let (mut seen, mut set) = (HashMap::new(), Vec::new());
    for item in now {
        let (key, value) = (key(&item), serde_json::to_value(&item).unwrap_or_default());
        let mut hasher = DefaultHasher::new();
        value.to_string().hash(&mut hasher);
        let hash = hasher.finish();
        if told.get(&key) != Some(&hash) {
            set.push((key.clone(), value));
        }
        seen.insert(key, hash);
    }
    let gone = told.keys().filter(|key| !seen.contains_key(*key)).cloned().collect();
    *told = seen;
    Change { set, gone }
}

/// Between two events.
const EVERY: Duration = Duration::from_secs(1);
/// Links that are told one by one; nobody looks through more of them, and each costs the reader's machine something.
const MOST_LINKS: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_changed_is_told_again_and_what_went_is_named() {
        let mut told = HashMap::new();
        let change = |told: &mut HashMap<String, u64>, now: &[(&str, u32)]| {
            let change = changes(told, now.iter().copied(), |(key, _)| (*key).to_owned());
            let set: Vec<_> =
                change.set.into_iter().map(|(key, value)| format!("{key}={}", value[1])).collect();
            (set.join(" "), change.gone.join(" "))
        };
        assert_eq!(change(&mut told, &[("a", 1), ("b", 2)]), ("a=1 b=2".into(), String::new()));
        assert_eq!(change(&mut told, &[("a", 1), ("b", 3)]), ("b=3".into(), String::new()));
        assert_eq!(change(&mut told, &[("b", 3), ("c", 1)]), ("c=1".into(), "a".into()));
        assert_eq!(change(&mut told, &[("b", 3), ("c", 1)]), (String::new(), String::new()));
    }
}
