//! The stream of the live page: the changes since the last event, once a second.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::take;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use http::HeaderMap;
use http_body::Frame;
use http_body_util::StreamBody;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::info_span;

use crate::admin::AdminContext;
use crate::admin::requester::AdminRequester;
use crate::admin::status::StatusResponse;
use tunnel_base::drain::Drain;
use tunnel_net::limiter::Permit;

/// A stream of server-sent events. It ends when the process drains or another source needs its permit.
pub(crate) type EventStream = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// The changes of one list: new and changed items with their keys, and the keys of removed items.
#[derive(Serialize)]
struct PageListDelta {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    set: Vec<(String, Value)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    removed: Vec<String>,
}

/// The items of each list that the reader of one stream has received, as hashes by their keys.
#[derive(Debug, Default)]
struct SentItems(HashMap<&'static str, HashMap<String, u64>>);

impl AdminContext {
    /// Starts a stream, and a task that feeds it. The task ends with the stream, or when its reader loses access.
    pub(super) fn event_stream(
        self,
        permit: Permit,
        (requester, head): (AdminRequester, HeaderMap),
        drain: &Drain,
    ) -> EventStream {
        // One event waits for a slow reader; the next is created when it is taken.
        let (send, mut events) = mpsc::channel(1);
        let lost = permit.revoked();
        let draining = drain.clone();
        drain.spawn(info_span!("events"), async move {
            let mut sent = SentItems::default();
            let _slot = permit;
            loop {
                tokio::select! {
                    biased;
                    () = draining.draining() => return,
                    () = lost.cancelled() => return,
                    () = send.closed() => return,
                    permit = send.reserve() => {
                        let Ok(permit) = permit else { return };
                        if self.authenticate(&requester, &head, true).await.is_err() {
                            return;
                        }
                        let Some(event) = sent.event(self.status(), self.viewers.is_some()) else { return };
                        permit.send(event);
                    }
                }
                tokio::select! {
                    () = sleep(CHECK_INTERVAL) => {}
                    () = draining.draining() => return,
                    () = send.closed() => return,
                }
            }
        });
        let events = stream::poll_fn(move |cx| events.poll_recv(cx));
        StreamBody::new(events.map(|event| Ok(Frame::data(event))).boxed())
    }
}

impl SentItems {
    /// Returns the next event: the status, with the changes of its lists instead of these. Returns `None` if it cannot
    /// be serialized, which does not happen.
    fn event(&mut self, mut status: StatusResponse, may_end: bool) -> Option<Bytes> {
        let links_total = status.links.len();
        status.links.truncate(MAX_LINKS);
        let mut event = serde_json::to_value(&status).ok()?;
        for list in LISTS {
            // The status omits some empty lists.
            let items = event[list].as_array_mut().map(take).unwrap_or_default();
            let delta = list_delta(self.0.entry(list).or_default(), items, |item| key(list, item));
            event[list] = serde_json::to_value(delta).ok()?;
        }
        // At most `MAX_LINKS` of them are in the list.
        event["links_total"] = links_total.into();
        // Whether the reader may end sessions, if it proves a name.
        event["may_end"] = may_end.into();
        Some(format!("event: status\ndata: {event}\n\n").into())
    }
}

fn list_delta(
    sent: &mut HashMap<String, u64>,
    now: Vec<Value>,
    key: impl Fn(&Value) -> String,
) -> PageListDelta {
    let mut seen = HashMap::new();
    let mut set = Vec::new();
    for item in now {
        let key = key(&item);
        let mut hasher = DefaultHasher::new();
        item.to_string().hash(&mut hasher);
        let hash = hasher.finish();
        if sent.get(&key) != Some(&hash) {
            set.push((key.clone(), item));
        }
        seen.insert(key, hash);
    }
    let removed = sent.keys().filter(|key| !seen.contains_key(*key)).cloned().collect();
    *sent = seen;
    PageListDelta { set, removed }
}

/// Returns the key of an item of a list: a link has a number, a peer without one only a name.
fn key(list: &str, item: &Value) -> String {
    let text = |field| item[field].as_str().unwrap_or_default();
    match list {
        "links" | "peers" if !item["link"].is_null() => item["link"].to_string(),
        "sessions" => format!("{} {}", text("id"), item["since"]),
        "drops" => format!("{} {}", text("name"), item["time"]),
        _ => text("name").to_owned(),
    }
}

/// The lists of the status.
const LISTS: [&str; 5] = ["links", "peers", "sessions", "disconnected", "drops"];
/// Time between two events.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of links in the list. More are hardly read, and each costs the browser time and memory.
const MAX_LINKS: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_items_of_each_list_have_keys_of_their_own() {
        for (list, items) in [
            (
                "links",
                [serde_json::json!({"link": 1, "name": "a"}), serde_json::json!({"link": 2, "name": "a"})],
            ),
            (
                "peers",
                [serde_json::json!({"link": 1, "name": "a"}), serde_json::json!({"link": null, "name": "b"})],
            ),
            (
                "sessions",
                [serde_json::json!({"id": "a", "since": 1}), serde_json::json!({"id": "a", "since": 2})],
            ),
            ("disconnected", [serde_json::json!({"name": "a"}), serde_json::json!({"name": "b"})]),
            (
                "drops",
                [serde_json::json!({"name": "a", "time": 1}), serde_json::json!({"name": "a", "time": 2})],
            ),
        ] {
            assert_ne!(key(list, &items[0]), key(list, &items[1]), "{list}");
        }
    }

    #[test]
    fn a_list_delta_contains_only_changed_and_removed_entries() {
        let mut sent = HashMap::new();
        let change = |sent: &mut HashMap<String, u64>, now: &[(&str, u32)]| {
            let now = now.iter().map(|item| serde_json::json!(item)).collect();
            let change = list_delta(sent, now, |item| item[0].as_str().unwrap().to_owned());
            let set: Vec<_> =
                change.set.into_iter().map(|(key, value)| format!("{key}={}", value[1])).collect();
            (set.join(" "), change.removed.join(" "))
        };
        assert_eq!(change(&mut sent, &[("a", 1), ("b", 2)]), ("a=1 b=2".into(), String::new()));
        assert_eq!(change(&mut sent, &[("a", 1), ("b", 3)]), ("b=3".into(), String::new()));
        assert_eq!(change(&mut sent, &[("b", 3), ("c", 1)]), ("c=1".into(), "a".into()));
        assert_eq!(change(&mut sent, &[("b", 3), ("c", 1)]), (String::new(), String::new()));
    }
}
