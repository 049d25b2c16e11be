//! When machines were last seen, in a text of its own next to that of invitations, and the end of unused devices.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::timeout;
use tracing::info;

use crate::enrolment::SharedEnrolments;
use crate::invitations::ListedEnrolment;
use tunnel_base::drain::Drain;
use tunnel_base::logging::AUDIT;
use tunnel_base::unix_time;

/// The machines that have joined, as all servers have seen them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SeenMachines {
    /// Time of the last write in seconds since 1970.
    written: u64,
    /// The machines by [`crate::invitations::invitee::Invitee::key`].
    machines: BTreeMap<String, SeenMachine>,
}

/// A machine that has joined. Times are seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SeenMachine {
    /// When it joined, unless that was before servers noted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) joined: Option<u64>,
    /// When it was last linked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seen: Option<u64>,
    /// How many seconds a user's device was not linked, without the time in which no server wrote that.
    #[serde(skip_serializing_if = "is_default")]
    unused: u64,
    /// Whether the device remains even if it is unused.
    #[serde(skip_serializing_if = "is_default")]
    keep: bool,
    /// Fields of newer servers. A device that has any does not end here.
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

impl SeenMachine {
    /// Notes when a server has last seen it, if it has.
    fn note(&mut self, at: Option<&u64>, now: u64) {
        if let Some(at) = at {
            self.seen = self.seen.max(Some(*at));
            self.unused = self.unused.min(now.saturating_sub(*at));
        }
    }

    /// Returns how many seconds an unused machine has left; `None` if it does not end.
    pub(super) fn left(&self, name: &str) -> Option<u64> {
        let ends = is_device(name) && !self.keep && self.unknown.is_empty();
        ends.then(|| UNUSED.as_secs().saturating_sub(self.unused))
    }
}

impl SeenMachines {
    /// Returns what is known about a machine.
    pub(super) fn get(&self, name: &str) -> SeenMachine {
        self.machines.get(name).cloned().unwrap_or_default()
    }

    /// Notes which machines have joined, and when a server has last seen some. Each has its name and, if that is known,
    /// whether its invitation keeps it. Of more than `most` machines, further nodes are not noted, and of
    /// twice as many no further devices, which then do not end.
    fn update<'a>(
        &mut self,
        joined: impl Iterator<Item = (&'a String, Option<bool>)>,
        seen: &HashMap<String, u64>,
        most: usize,
        now: u64,
    ) {
        // More has not passed for sure: no server could write, or a clock is wrong.
        let passed = now.saturating_sub(self.written).min(MAX_STEP);
        let joined_at = (self.written > 0).then_some(now);
        let mut before = take(&mut self.machines);
        for (name, keep) in joined {
            let room = if is_device(name) { 2 * most } else { most };
            let mut one = match before.remove(name) {
                Some(one) if is_device(name) => {
                    SeenMachine { unused: one.unused.saturating_add(passed), ..one }
                }
                Some(one) => one,
                None if before.len() + self.machines.len() >= room => continue,
                None => SeenMachine { joined: joined_at, ..SeenMachine::default() },
            };
            one.note(seen.get(name), now);
            one.keep = keep.unwrap_or(one.keep);
            self.machines.insert(name.clone(), one);
        }
        // The clocks of servers differ a little. One that is wrong must not stop the time for long.
        self.written = self.written.clamp(now, now.saturating_add(MAX_STEP));
    }

    /// Returns the devices that were not used for [`UNUSED`], the longest first.
    fn unused(&self) -> Vec<&String> {
        let unused = self.machines.iter().filter(|(name, one)| one.left(name) == Some(0));
        let mut unused: Vec<_> = unused.collect();
        unused.sort_by_key(|(_, one)| Reverse(one.unused));
        unused.into_iter().map(|(name, _)| name).collect()
    }

    /// Returns the number of devices that end within [`WARNING`] unless they are used.
    fn ending(&self) -> usize {
        self.machines.iter().filter(|(name, one)| one.left(name).is_some_and(is_soon)).count()
    }
}

impl SharedEnrolments {
    /// Notes that a node or device is linked, until the result is dropped.
    pub(crate) fn linked(&self, name: String) -> Arc<()> {
        // Nothing is written of others, whose names may be of their own choice.
        if !self.known().has_joined(&name) {
            return Arc::default();
        }
        // Another server may end the device before it reads that it is used again.
        if self.seen.known().seen.get(&name).left(&name).is_some_and(is_soon) {
            self.seen_ending.notify_one();
        }
        let mut uses = self.uses.lock();
        let (at, link) = uses.entry(name).or_default();
        *at = unix_time::now();
        link.clone()
    }

    /// Returns when this server has last seen each machine since its last write.
    fn last_uses(&self, now: u64) -> HashMap<String, u64> {
        let at = |(at, link): &(u64, Arc<()>)| if Arc::strong_count(link) > 1 { now } else { *at };
        self.uses.lock().iter().map(|(name, one)| (name.clone(), at(one))).collect()
    }

    /// Returns what is known of machines, also since the last write.
    pub(crate) fn machines(&self, now: u64) -> impl Fn(&str) -> SeenMachine {
        let known = self.seen.known();
        let uses = self.last_uses(now);
        let enrolled = self.known();
        let kept = enrolled.machines().filter_map(|(name, keep)| Some((name.clone(), keep?)));
        let kept: HashMap<_, _> = kept.collect();
        move |name| {
            let mut machine = known.seen.get(name);
            machine.note(uses.get(name), now);
            machine.keep = kept.get(name).copied().unwrap_or(machine.keep);
            machine
        }
    }

    /// Returns those that have joined or are invited as last read, sorted by name, with their times.
    pub(crate) fn listed(&self) -> Vec<ListedEnrolment> {
        let now = unix_time::now();
        self.known().list(now, self.machines(now))
    }

    /// Writes which machines this server has seen, then ends devices that no server has seen for 90 days.
    ///
    /// # Errors
    ///
    /// Fails if a store cannot be used. Then no device ends.
    pub async fn note_uses(&self, now: u64) -> Result<(), String> {
        self.read_store().await?;
        let known = self.known();
        let uses = self.last_uses(now);
        let most = self.most_grants;
        self.seen
            .change(|all| {
                all.seen.update(known.machines(), &uses, most, now);
                Ok(())
            })
            .await?;
        self.uses.lock().retain(|name, (at, link)| Arc::strong_count(link) > 1 || uses.get(name) != Some(at));
        let seen = self.seen.known();
        let mut unused = seen.seen.unused();
        // Those that have linked meanwhile are in use.
        unused.retain(|name| !self.uses.lock().contains_key(*name));
        for device in self.change(|enrolled| Ok(enrolled.end_unused(&unused, now))).await? {
            info!(target: AUDIT, actor = device, unused_days = DAYS, "unused device ended");
            if let Ok(device) = device.parse() {
                // Its token has ended; its grants remain. A failure is logged.
                let _ = self.revoke(&device, "tunnel").await;
            }
        }
        Ok(())
    }

    /// Notes uses every hour until draining starts. Calls `report` with the result, and how many devices end soon.
    pub(crate) async fn follow_uses(&self, report: impl Fn(Result<(), String>, usize), drain: Drain) {
        let mut noted = self.seen.read_store().await;
        if noted.is_ok() && self.seen.known().seen.written == 0 {
            // From now on it is known when machines join.
            noted = self.note_uses(unix_time::now()).await;
        }
        loop {
            report(noted, self.seen.known().seen.ending());
            let pause = INTERVAL.mul_f64(1.0 + rand::random::<f64>() / 10.0);
            let due = timeout(pause, self.seen_ending.notified());
            if drain.run_until(due).await.is_none() {
                // The next process does not know when this one has seen machines.
                let _ = timeout(AT_STOP, self.note_uses(unix_time::now())).await;
                return;
            }
            noted = self.note_uses(unix_time::now()).await;
        }
    }
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn is_device(name: &str) -> bool {
    name.contains('/')
}

fn is_soon(left: u64) -> bool {
    left <= WARNING.as_secs()
}

/// The time without a link after which a user's device ends.
const UNUSED: Duration = Duration::from_secs(DAYS * 24 * 3600);
const DAYS: u64 = 90;

/// How long before its end operators are told.
const WARNING: Duration = Duration::from_secs(14 * 24 * 3600);

/// Least interval between two writes, unless a device links that would end soon.
const INTERVAL: Duration = Duration::from_secs(3600);

/// Timeout for the last write.
const AT_STOP: Duration = Duration::from_secs(2);

/// The time in seconds that counts between two writes, at most.
const MAX_STEP: u64 = 2 * 3600;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOUR: u64 = 3600;
    /// Any time; a clock may be wrong by more.
    const NOW: u64 = 1_800_000_000;

    fn update(all: &mut SeenMachines, names: &[&str], seen: &[(&str, u64)], now: u64) {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let seen = seen.iter().map(|(name, at)| ((*name).to_owned(), *at)).collect();
        let joined = names.iter().map(|name| (name, (name == "alice/kept").then_some(true)));
        all.update(joined, &seen, 2, now);
    }

    #[test]
    fn a_device_ends_after_ninety_days_of_writes_without_a_use_and_a_node_never() {
        let names = ["alice/kept", "alice/laptop", "alice/phone", "shop-1"];
        let mut all = SeenMachines::default();
        update(&mut all, &names, &[], NOW);
        let mut now = NOW;
        for hour in 1..=90 * 24 {
            assert_eq!((all.unused().len(), all.ending() > 0), (0, hour > 76 * 24), "{hour}");
            now += HOUR;
            update(&mut all, &names, &[("alice/laptop", now)], now);
        }
        assert_eq!(all.unused(), ["alice/phone"]);
        let laptop = all.get("alice/laptop");
        assert_eq!((laptop.joined, laptop.seen, laptop.unused), (None, Some(now), 0));
        // A write whose response was lost changes nothing, and a machine that joins now has its time.
        let written = all.clone();
        update(&mut all, &names, &[("alice/laptop", now)], now);
        assert_eq!(all, written);
        update(&mut all, &["alice/kept", "bob/new", "shop-1"], &[], now);
        assert_eq!((all.get("bob/new").joined, all.get("alice/phone")), (Some(now), SeenMachine::default()));
    }

    #[test]
    fn time_in_which_no_server_writes_and_jumps_of_a_clock_do_not_count() {
        let mut all = SeenMachines::default();
        update(&mut all, &["alice/phone"], &[], NOW);
        for now in [NOW + 1000 * HOUR, NOW + 1000 * HOUR, NOW, NOW + HOUR, NOW + 30_000 * HOUR] {
            update(&mut all, &["alice/phone"], &[], now);
        }
        assert_eq!(all.get("alice/phone").unused, (2 + 2) * HOUR);
        // The clocks of two servers differ by a minute.
        let mut all = SeenMachines::default();
        for hour in 0..100 {
            update(&mut all, &["alice/phone"], &[], NOW + hour * HOUR + 60);
            update(&mut all, &["alice/phone"], &[], NOW + hour * HOUR);
        }
        assert_eq!(all.get("alice/phone").unused, 99 * HOUR);
    }

    proptest! {
        #[test]
        fn whatever_clocks_show_a_write_counts_two_hours_at_most_and_the_newest_time_remains(
            writes in proptest::collection::vec((any::<u32>(), proptest::option::of(any::<u32>())), 1..20)
        ) {
            let mut all = SeenMachines::default();
            for (count, (now, seen)) in writes.iter().enumerate() {
                let seen = seen.map(|at| ("alice/phone", u64::from(at)));
                update(&mut all, &["alice/phone"], seen.as_slice(), u64::from(*now));
                prop_assert!(all.get("alice/phone").unused <= count as u64 * MAX_STEP);
            }
            let newest = writes.iter().filter_map(|(_, seen)| seen.map(u64::from)).max();
            prop_assert_eq!(all.get("alice/phone").seen, newest);
        }
    }

    #[test]
    fn unknown_fields_remain_and_keep_their_device_and_more_nodes_than_fit_are_not_noted() {
        let text = r#"{"written":1800000000,"machines":{"alice/phone":{"seen":5,"unused":99999999,"hold":true},"bob/old":{
            "unused":99999999}}}"#;
        let mut all: SeenMachines = serde_json::from_str(text).unwrap();
        update(&mut all, &["alice/phone", "bob/new", "bob/old", "shop-1"], &[], NOW);
        assert_eq!(all.unused(), ["bob/old"], "a newer server may hold the other");
        let written = serde_json::to_value(&all).unwrap();
        assert_eq!(written["machines"]["alice/phone"]["hold"], true);
        assert_eq!(all.machines.keys().collect::<Vec<_>>(), ["alice/phone", "bob/new", "bob/old"]);
    }
}
