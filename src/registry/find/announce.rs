//! What pods announce to each other: a pod that gains a node announces it to the node's homes, and these to whoever is
//! interested.

use std::sync::Arc;
use std::time::Duration;

use super::Finder;
use crate::names::{Instance, NodeName};
use crate::protocol::{Dialect, Found, LinkSender};
use crate::registry::NodeLocation;

impl Finder {
    /// Announces to the node's homes, and to pods that catch, that it is linked here now. If this pod is one of its homes,
    /// also to those that are interested.
    pub fn gained(&self, node: &NodeName) {
        let Some(others) = &self.others else { return };
        let before = others.known.last_pod(node).and_then(|pod| pod.process());
        others.known.forget_all(node);
        others.siblings.announce(node);
        for pod in self.interested(node, before, self.own) {
            others.siblings.announce_to(pod, node, None);
        }
    }

    /// Tells the pods that catch that a link of the node's has ended, if it has no other one here.
    pub fn lost(&self, node: &NodeName) {
        let Some(others) = self.others.as_ref().filter(|_| self.registry.here(node).is_none()) else {
            return;
        };
        others.siblings.announce_gone(node);
        // It may have come back in between, and that been announced first.
        if self.registry.here(node).is_some() {
            others.siblings.announce(node);
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

    /// Takes a Found of another pod: an answer, or the announcement that a node is there or elsewhere, or not there any more.
    /// The process of the pod at which the node is now, if it is news: the caller then calls [`Self::contest`] and
    /// [`Self::make_way`].
    pub fn on_found(&self, from: &Arc<LinkSender>, node: &NodeName, found: Found) -> Option<Instance> {
        let others = self.others.as_ref()?;
        let found = others.siblings.on_found(from, found)?;
        let (at, pod) = match found.at {
            _ if found.here => (from.instance?, others.siblings.behind(from)),
            Some(at) if at != self.own => (at, others.siblings.of_process(at)?),
            Some(_) => return None,
            None => {
                others.known.forget(node, &others.siblings.behind(from));
                return None;
            }
        };
        let before = others.known.last_pod(node).and_then(|pod| pod.process());
        if !others.known.is_complete() {
            others.known.make_room(others.siblings.kept());
        }
        others.known.learn(node, pod, found.instance, others.siblings.kept()(node));
        if found.here {
            // A home that tells where the node is says nothing of them.
            others.known.claim(node, found.ips);
        }
        self.registry.wake_waiters(node);
        if found.here && from.dialect.has(Dialect::HOMES) {
            let forwarded = Found {
                at: Some(at),
                instance: found.instance,
                age: found.age,
                ..Found::away(found.question)
            };
            for pod in self.interested(node, before, at) {
                others.siblings.announce_to(pod, node, Some(forwarded.clone()));
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
        assert_eq!(finder.on_found(&first, node, here.clone()), Some(pod(7)));
        finder.answer(&asker, node, 5);
        finder.answer(&older, node, 5);
        assert_eq!(told(&asker), [Found { at: Some(pod(7)), ..Found::away(5) }]);
        assert_eq!(told(&older), [Found::away(5)], "it knows of no homes");
        assert_eq!(finder.on_found(&second, node, here), Some(pod(8)));
        settled().await;
        let moved = Found { at: Some(pod(8)), instance: Some(pod(77)), ..Found::away(0) };
        assert_eq!((told(&first), told(&asker)), (vec![moved.clone()], vec![moved.clone()]));
        assert_eq!((told(&second), told(&older)), (vec![], vec![moved.clone()]), "an older pod drops it");
        // As the other two hear it.
        assert_eq!(finder.on_found(&second, node, moved.clone()), Some(pod(8)));
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
        registry.insert(
            Linked {
                sender: edge.clone(),
                instance: None,
                from: ([127, 0, 0, 1], 1).into(),
                ips: Arc::default(),
            },
            false,
        );
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

    #[tokio::test(start_paused = true)]
    async fn what_an_edge_at_another_pod_says_of_its_addresses_counts_while_it_is_there_and_that_pod_linked()
    {
        let (siblings, _addresses, _made) = siblings(&[]);
        let registry = Registry::new(Metrics::cloud("", ""));
        let finder = Finder::new(registry, Instance::from_bits(1), siblings.clone(), nowhere(), 1);
        let node: &NodeName = &"node1".parse().unwrap();
        let pod = |id| Instance::from_bits(u128::from(id));
        let link = |id| LinkSender::new(LinkId(id), Peer::Pod, Some(pod(id)), Dialect::NEWEST);
        let links @ [first, second] = &[7, 8].map(link);
        links.iter().for_each(|link| drop(siblings.joined(link, false)));
        settled().await;
        let says = |from: &Arc<LinkSender>, found| finder.on_found(from, node, found);
        let claims = || finder.claims().into_iter().map(|claim| claim.ip.to_string()).collect::<Vec<_>>();
        let (edge, ips) = (Some(pod(77)), ["10.0.0.7", "fd00::7"]);
        let mine = ips.map(|ip| ip.parse().unwrap()).into();
        let here = Found { here: true, instance: edge, ips: mine, ..Found::away(0) };
        says(first, here.clone());
        assert_eq!(claims(), ips);
        says(second, Found { at: Some(pod(7)), instance: edge, ..Found::away(0) });
        assert_eq!(claims(), ips, "a home says where the node is, and nothing of its addresses");
        says(second, Found::away(0));
        assert!(finder.knows(node), "only the pod that has it says that it is gone");
        says(first, Found::away(0));
        assert!(!finder.knows(node) && claims().is_empty(), "it is gone");
        says(first, here.clone());
        says(second, Found { at: Some(pod(7)), instance: Some(pod(78)), ..Found::away(0) });
        assert!(claims().is_empty(), "it is another process, of which nothing is known");
        says(second, here.clone());
        assert_eq!(claims(), ips);
        second.close();
        assert!(claims().is_empty(), "nobody knows whether it is still there");
        tokio::time::advance(Duration::from_millis(1)).await;
        let again = link(8);
        siblings.joined(&again, false);
        settled().await;
        assert!(!finder.knows(node) && claims().is_empty(), "it has not been said by the new link");
        says(&again, here);
        assert_eq!(claims(), ips);
    }
}
