//! What pods announce to each other: a pod that gains a node announces it to the node's homes, and these to whoever is
//! interested.

use std::sync::Arc;
use std::time::Duration;

use super::Finder;
use crate::names::{Instance, NodeName};
use crate::protocol::{Dialect, Found, LinkSender};
use crate::registry::NodeLocation;

impl Finder {
    /// Announces to the node's homes that it is linked here now. If this pod is one of them, also to those that
    /// are interested.
    pub fn gained(&self, node: &NodeName) {
        let Some(others) = &self.others else { return };
        let before = others.known.last_pod(node).and_then(|pod| pod.process());
        others.known.forget_all(node);
        others.siblings.announce(node);
        for pod in self.interested(node, before, self.own) {
            others.siblings.announce_to(pod, node, None);
        }
    }

    /// Answers another pod's question: from this pod's own links, else with the pod at which the node is, as far as this
    /// one knows.
    pub fn answer(&self, to: &Arc<LinkSender>, node: &NodeName, question: u64) {
        if let Some(others) = &self.others {
            others.siblings.behind(to);
            // Before the look: a node that comes after it is announced to who has asked.
            if let Some(pod) = to.instance.filter(|_| others.siblings.is_home(node)) {
                others.interest.note(node, pod);
            }
        }
        let linked = self.registry.here(node).filter(|linked| !linked.sender.is_closed());
        let found = match linked {
            Some(linked) => linked.found(question, self.own),
            None => self.elsewhere(to, node, question),
        };
        // Dropped if too much waits on that link: a pod that does not read its answers gets none.
        to.found(node, found);
    }

    /// Takes a Found of another pod. The process of the pod at which the node is now, if it is news: the caller then
    /// calls [`Self::contest`] and [`Self::make_way`].
    pub fn on_found(&self, from: &Arc<LinkSender>, node: &NodeName, found: Found) -> Option<Instance> {
        let others = self.others.as_ref()?;
        if !others.siblings.on_found(from, found) {
            return None;
        }
        let (at, pod) = if found.here {
            (from.instance?, others.siblings.behind(from))
        } else {
            let at = found.at.filter(|at| *at != self.own)?;
            (at, others.siblings.of_process(at)?)
        };
        let before = others.known.last_pod(node).and_then(|pod| pod.process());
        if !others.known.is_complete() {
            others.known.make_room(others.siblings.own_homes());
        }
        others.known.learn(node, pod, found.instance, others.siblings.is_home(node));
        self.registry.wake_waiters(node);
        if found.here && from.dialect.has(Dialect::HOMES) {
            let forwarded = Found {
                at: Some(at),
                instance: found.instance,
                age: found.age,
                ..Found::away(found.question)
            };
            for pod in self.interested(node, before, at) {
                others.siblings.announce_to(pod, node, Some(forwarded));
            }
        }
        Some(at)
    }

    /// The pods to which a home of the node announces that it is now at the pod `at`: the one that had it `before`, and
    /// those that have asked for it. None if this pod is no home of it.
    fn interested(&self, node: &NodeName, before: Option<Instance>, at: Instance) -> Vec<Instance> {
        let Some(others) = self.others.as_ref().filter(|others| others.siblings.is_home(node)) else {
            return Vec::new();
        };
        let mut pods = others.interest.of(node);
        pods.extend(before.filter(|before| !pods.contains(before)));
        pods.retain(|pod| *pod != at && *pod != self.own);
        pods
    }

    /// The answer about a node that is not linked here.
    fn elsewhere(&self, to: &LinkSender, node: &NodeName, question: u64) -> Found {
        let away = Found::away(question);
        let Some(others) = self.others.as_ref().filter(|_| to.dialect.has(Dialect::HOMES)) else {
            return away;
        };
        let last = others.known.last_pod(node);
        // What is known may be out of date: then the pod that has the node may be one of which this one has not heard.
        let authoritative = last.is_none()
            && others.siblings.is_home(node)
            && others.siblings.has_converged()
            && others.known.is_complete();
        let at = last.and_then(|pod| others.siblings.current(pod)?.process());
        let seen = match self.registry.find(node) {
            NodeLocation::Nowhere(Some(seen)) => Some(seen),
            // The pod that had it knows it better.
            _ if at.is_some() => None,
            _ => others.known.lost(node),
        };
        // 0 stands for never.
        let silence = seen.map_or(Duration::ZERO, |seen| seen.max(Duration::from_millis(1)));
        Found { at: at.filter(|at| Some(*at) != to.instance), authoritative, silence, ..away }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use tokio::time::Instant;

    use super::*;
    use crate::net::resolver::Resolver;
    use crate::policy::Zone;
    use crate::protocol::wire::frame::FrameKind;
    use crate::protocol::{LinkId, Peer};
    use crate::registry::siblings::tests::{settled, siblings};
    use crate::registry::{Dns, Linked, Registry};
    use crate::telemetry::Metrics;

    /// What is said to a pod about nodes.
    fn told(link: &LinkSender) -> Vec<Found> {
        let mut cx = Context::from_waker(Waker::noop());
        let mut all = Vec::new();
        while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
            if let FrameKind::Found(found) = frame.body {
                all.push(found);
            }
        }
        all
    }

    /// A DNS that does not answer.
    fn nowhere() -> Dns {
        let resolver = Arc::new(Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap());
        Dns::new(resolver, Arc::new(Zone::new(String::new(), Vec::new(), |_| true)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_home_refers_to_the_pod_and_announces_to_it_and_to_who_asked_that_the_node_has_moved() {
        let (siblings, _tell, _made) = siblings(&[]);
        let own = Instance::from_bits(1);
        let finder = Finder::new(Registry::new(Metrics::cloud("", "")), own, siblings.clone(), nowhere(), 1);
        let pod = |id| Instance::from_bits(u128::from(id));
        let link = |id, dialect| LinkSender::new(LinkId(id), Peer::Pod, Some(pod(id)), dialect);
        let [first, second, asker] = [7, 8, 9].map(|id| link(id, Dialect::NEWEST));
        let older = link(10, Dialect::Extended(2));
        for link in [&first, &second, &asker, &older] {
            siblings.joined(link, false);
        }
        settled().await;
        let names = (0..).map(|n| format!("node{n}").parse::<NodeName>().unwrap());
        let node = &names.into_iter().find(|node| siblings.is_home(node)).unwrap();
        let here = Found { here: true, instance: Some(pod(77)), ..Found::away(0) };
        assert_eq!(finder.on_found(&first, node, here), Some(pod(7)));
        finder.answer(&asker, node, 5);
        finder.answer(&older, node, 5);
        assert_eq!(told(&asker), [Found { at: Some(pod(7)), ..Found::away(5) }]);
        assert_eq!(told(&older), [Found::away(5)], "it knows of no homes");
        assert_eq!(finder.on_found(&second, node, here), Some(pod(8)));
        settled().await;
        let moved = Found { at: Some(pod(8)), instance: Some(pod(77)), ..Found::away(0) };
        assert_eq!((told(&first), told(&asker)), (vec![moved], vec![moved]));
        assert_eq!((told(&second), told(&older)), (vec![], vec![moved]), "an older pod drops it");
        // As the other two hear it.
        assert_eq!(finder.on_found(&second, node, moved), Some(pod(8)));
        assert_eq!(
            finder.on_found(&second, node, Found { at: Some(own), ..moved }),
            None,
            "this pod knows better"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_for_a_node_that_has_just_left_hears_so_and_may_wait_for_it() {
        let (siblings, _addresses, _made) = siblings(&[]);
        let registry = Registry::new(Metrics::cloud("", ""));
        let finder = Finder::new(registry.clone(), Instance::from_bits(1), siblings.clone(), nowhere(), 1);
        let node: &NodeName = &"node1".parse().unwrap();
        let link = |id, peer| {
            LinkSender::new(LinkId(id), peer, Some(Instance::from_bits(id.into())), Dialect::NEWEST)
        };
        let (asker, other) = (link(9, Peer::Pod), link(8, Peer::Pod));
        siblings.joined(&asker, false);
        siblings.joined(&other, false);
        settled().await;
        finder.answer(&asker, node, 5);
        assert_eq!(told(&asker), [Found::away(5)], "it was never anywhere");
        let edge = link(7, Peer::Edge(node.clone()));
        registry
            .insert(Linked { sender: edge.clone(), instance: None, from: ([127, 0, 0, 1], 1).into() }, false);
        registry.remove(&edge);
        tokio::time::advance(Duration::from_secs(2)).await;
        finder.answer(&asker, node, 6);
        assert_eq!(told(&asker), [Found { silence: Duration::from_secs(2), ..Found::away(6) }]);
        // It is at a pod, as that one says, which is gone then.
        let gone: &NodeName = &"node2".parse().unwrap();
        finder.on_found(&other, gone, Found { here: true, ..Found::away(0) });
        finder.answer(&asker, gone, 7);
        assert_eq!(told(&asker), [Found { at: other.instance, ..Found::away(7) }]);
        siblings.left(&other);
        other.close();
        finder.answer(&asker, gone, 8);
        assert_eq!(told(&asker), [Found { silence: Duration::from_millis(1), ..Found::away(8) }]);
    }
}
