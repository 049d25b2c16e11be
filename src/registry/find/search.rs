//! One search for a node at other pods: its homes are asked first, then DNS, then all at once.

mod asking;

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Fuse, FusedFuture as _, Shared, WeakShared};
use futures_util::stream::StreamExt as _;
use tokio::time::{Instant, sleep_until};

use super::{LocationCache, NotFound};
use crate::names::{Instance, NodeName};
use crate::protocol::{LinkId, LinkSender, Peer};
use crate::registry::dns::{self, Dns};
use crate::registry::siblings::{NodeFound, SiblingPod, Siblings};
use asking::Asking;

/// What a search looks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct NodeQuery {
    pub(super) node: NodeName,
    /// Only this process of it will do.
    instance: Option<Instance>,
    /// The link that must not be used.
    not: Option<LinkId>,
    /// The process of the pod at that link's other end, which must not be used over any other link either.
    not_pod: Option<Instance>,
}

/// The searches under way. A request for the same node joins the search that runs, so that a thousand sessions of one
/// node ask the other pods once.
///
/// A search runs as long as somebody waits for it: the table holds weak handles, the waiters strong ones, and the last
/// waiter to leave removes the entry. A newcomer may come between the drop of the last strong handle and that removal.
/// It then finds a dead handle, begins a search of its own and puts that in its place; so the leaver looks again, under
/// the lock, whether the entry is still the dead one.
#[derive(Debug)]
pub(super) struct Searches {
    means: SearchContext,
    running: Mutex<HashMap<NodeQuery, WeakShared<Running>>>,
}

#[derive(Debug, Clone)]
struct SearchContext {
    siblings: Arc<Siblings>,
    known: Arc<LocationCache>,
    dns: Arc<Dns>,
    port: u16,
}

type Outcome = Result<NodeFound, NotFound>;
type Running = BoxFuture<'static, Outcome>;

impl NodeQuery {
    pub(super) fn new(node: &NodeName, instance: Option<Instance>, not: Option<&LinkSender>) -> Self {
        let not_pod = not.filter(|not| not.peer == Peer::Pod).and_then(|not| not.instance);
        Self { node: node.clone(), instance, not: not.map(|not| not.id), not_pod }
    }

    /// Whether any process of the node will do, by any link.
    pub(super) fn is_any(&self) -> bool {
        self.instance.is_none() && self.not.is_none()
    }

    /// Whether it is the process that is looked for.
    pub(super) fn is_of(&self, instance: Option<Instance>) -> bool {
        self.instance.is_none() || self.instance == instance
    }

    /// Whether that link, which leads to that process of the node, may be used.
    pub(super) fn suits(&self, instance: Option<Instance>, sender: &LinkSender) -> bool {
        let is_not = self.not == Some(sender.id)
            || sender.peer == Peer::Pod && self.not_pod.is_some() && self.not_pod == sender.instance;
        self.is_of(instance) && !is_not
    }
}

impl SearchContext {
    fn learn(&self, node: &NodeName, yes: &NodeFound) {
        self.known.learn(node, yes.pod.clone(), yes.instance, self.siblings.kept()(node));
        self.known.claim(node, yes.ips.clone());
    }
}

impl Searches {
    pub(super) fn new(siblings: Arc<Siblings>, known: Arc<LocationCache>, dns: Dns, port: u16) -> Self {
        Self { means: SearchContext { siblings, known, dns: Arc::new(dns), port }, running: Mutex::default() }
    }

    /// Searches, or joins the search that runs. Takes about 2 s at most. Cancel safe.
    pub(super) async fn join(&self, wanted: NodeQuery) -> Outcome {
        let search = {
            let mut running = self.lock();
            let known = running.get(&wanted).and_then(WeakShared::upgrade);
            known.unwrap_or_else(|| {
                let search = search(self.means.clone(), wanted.clone()).boxed().shared();
                running.extend(search.downgrade().map(|weak| (wanted.clone(), weak)));
                search
            })
        };
        let mut joined = Joined { searches: self, wanted, search: Some(search) };
        match &mut joined.search {
            Some(search) => search.await,
            None => Err(NotFound::default()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeQuery, WeakShared<Running>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One waiter of a search. The last one to leave removes the search from the table.
struct Joined<'a> {
    searches: &'a Searches,
    wanted: NodeQuery,
    search: Option<Shared<Running>>,
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        drop(self.search.take());
        let mut running = self.searches.lock();
        if running.get(&self.wanted).is_some_and(|search| search.upgrade().is_none()) {
            running.remove(&self.wanted);
        }
    }
}

/// Asks the pods that are likeliest to know, then DNS, then all: each of them only once those before had their time, or
/// have answered that they do not know.
async fn search(means: SearchContext, wanted: NodeQuery) -> Outcome {
    let begun = Instant::now();
    let (dns, node) = (means.dns.clone(), wanted.node.clone());
    let mut lookup = pin!(Fuse::terminated());
    let mut asking = Asking::new(&means, &wanted);
    let mut best = None::<NodeFound>;
    // The pod that had it last is asked at once, as the likeliest to have it: mostly the link to it was only dropped
    // for want of use, or has just ended.
    let last = means.known.last_pod(&wanted.node).and_then(|pod| means.siblings.current(pod));
    asking.ask(last.into_iter().collect());
    asking.ask_homes();
    let (mut stage, mut until) = (Stage::Homes, begun + HOMES_FIRST);
    loop {
        let idle = lookup.is_terminated() && asking.answers.is_empty();
        match stage {
            Stage::All if idle => break,
            Stage::Homes if idle || Instant::now() >= until => {
                let (dns, node) = (dns.clone(), node.clone());
                let slow = if dns.has_failed_lately() { Duration::ZERO } else { dns::SLOW };
                lookup.set(async move { dns.lookup(&node).await }.fuse());
                (stage, until) = (Stage::Dns, Instant::now() + slow);
            }
            Stage::Dns if idle || Instant::now() >= until => {
                stage = Stage::All;
                asking.ask_all();
                continue;
            }
            _ => {}
        }
        if let Stage::All = stage {
            until = begun + if best.is_some() { FRESHEST_WITHIN } else { SEARCH_TIMEOUT };
        }
        tokio::select! {
            found = &mut lookup => match found {
                Ok(addresses) => asking.ask(named(&means, addresses)),
                Err(why) => asking.said.dns = Some(why),
            },
            Some(answer) = asking.answers.next() => {
                if asking.follow_referral(&answer) {
                    until = until.max(Instant::now() + HOMES_FIRST).min(begun + MOST_HOMES_FIRST);
                }
                if let Some(yes) = asking.take(answer) {
                    let fresh = yes.silence <= FRESH;
                    if best.as_ref().is_none_or(|best| yes.silence < best.silence) {
                        best = Some(yes);
                    }
                    if fresh {
                        break;
                    }
                }
            }
            () = sleep_until(until) => if let Stage::All = stage { break },
        }
    }
    let yes = best.ok_or(asking.said)?;
    means.learn(&wanted.node, &yes);
    Ok(yes)
}

/// Who has been asked so far.
#[derive(Clone, Copy)]
enum Stage {
    Homes,
    Dns,
    All,
}

/// The pods at the addresses that DNS named.
fn named(means: &SearchContext, addresses: Vec<IpAddr>) -> Vec<SiblingPod> {
    let first = addresses.into_iter().take(MOST_NAMED);
    first.flat_map(|ip| means.siblings.at(ip, means.port)).collect()
}

/// How long the homes of a node, and each pod that they refer to, have to answer before others are asked.
const HOMES_FIRST: Duration = Duration::from_millis(100);
/// How long they have together, however often one refers to another.
const MOST_HOMES_FIRST: Duration = Duration::from_millis(300);
/// A pod that has received something from the node within this time has the node for certain.
const FRESH: Duration = Duration::from_secs(7);
/// If no answer is as fresh, the search takes the freshest one after this time.
const FRESHEST_WITHIN: Duration = Duration::from_millis(300);
/// How long a whole search takes at most: DNS may take 1 s, and dialling a pod another.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
/// How many of the addresses that DNS names for one node are asked.
const MOST_NAMED: usize = 8;

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::net::resolver::Resolver;
    use crate::policy::Zone;
    use crate::protocol::wire::frame::FrameKind;
    use crate::protocol::{Dialect, Found};
    use crate::registry::siblings::tests::siblings;

    /// The number of the question for a node that waits to be sent on a link.
    fn question(link: &LinkSender) -> Option<u64> {
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(frame)) = link.poll_pull(&mut cx, Instant::now()) {
            if let FrameKind::Find(question) = frame.body {
                return Some(question);
            }
        }
        None
    }

    fn link(id: u64, pod: u64) -> Arc<LinkSender> {
        LinkSender::new(LinkId(id), Peer::Pod, Some(Instance::from_bits(pod.into())), Dialect::NEWEST)
    }

    /// Nothing is known yet, and DNS does not answer.
    fn means(siblings: &Arc<Siblings>) -> SearchContext {
        let resolver = Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap();
        let zone = Zone::new("nodes.test".into(), Vec::new(), |_| false);
        let dns = Arc::new(Dns::new(Arc::new(resolver), Arc::new(zone)));
        SearchContext { siblings: siblings.clone(), known: Arc::default(), dns, port: 1 }
    }

    /// What pods answer until the search is over, each once: none says nothing. Returns the result, and who was asked.
    async fn search_with(
        means: &SearchContext,
        links: &[Arc<LinkSender>],
        answer: impl Fn(&LinkSender, Found) -> Option<Found>,
    ) -> (Outcome, Vec<u64>) {
        let mut asked = Vec::new();
        let answers = async {
            loop {
                for link in links {
                    if let Some(question) = question(link) {
                        asked.push(link.id.0);
                        if let Some(found) = answer(link, Found::away(question)) {
                            means.siblings.on_found(link, found);
                        }
                    }
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let node = "node1".parse().unwrap();
        let found = tokio::select! {
            found = search(means.clone(), NodeQuery::new(&node, None, None)) => found,
            () = answers => unreachable!(),
        };
        (found, asked)
    }

    /// Ten pods that have been linked for so long that all agree on the homes.
    async fn converged() -> (SearchContext, Vec<Arc<LinkSender>>) {
        let (siblings, _addresses, _made) = siblings(&[]);
        let pods: Vec<_> = (10..20).map(|id| link(id, id)).collect();
        for pod in &pods {
            siblings.joined(pod, false);
        }
        tokio::time::sleep(Duration::from_secs(32)).await;
        (means(&siblings), pods)
    }

    fn is_home(means: &SearchContext, link: &LinkSender) -> bool {
        let homes = means.siblings.homes_of(&"node1".parse().unwrap());
        homes.iter().any(|home| home.process() == link.instance)
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_of_which_all_its_homes_know_nothing_is_nowhere_and_no_other_pod_speaks_for_them() {
        let (means, pods) = converged().await;
        let homes = pods.iter().filter(|pod| is_home(&means, pod)).count();
        let all = |_: &LinkSender, away| Some(Found { authoritative: true, ..away });
        let (found, asked) = search_with(&means, &pods, all).await;
        assert_eq!((found.unwrap_err().asked, asked.len()), (10, homes), "{asked:?}");
        // One home is not sure, and others that are none pretend to be.
        let first = pods.iter().find(|pod| is_home(&means, pod)).unwrap().id;
        let but_one = |link: &LinkSender, away| Some(Found { authoritative: link.id != first, ..away });
        let (found, asked) = search_with(&means, &pods, but_one).await;
        assert_eq!((found.unwrap_err().asked, asked.len()), (10, 10), "{asked:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_is_found_though_its_homes_say_nothing_or_refer_to_pods_that_have_it_not() {
        let (means, pods) = converged().await;
        let right = pods.iter().rfind(|pod| !is_home(&means, pod)).unwrap();
        let (begun, has) = (Instant::now(), |link: &LinkSender| link.id == right.id);
        let silent = |link: &LinkSender, away: Found| match (has(link), is_home(&means, link)) {
            (true, _) => Some(Found { here: true, ..away }),
            (_, true) => None,
            _ => Some(away),
        };
        let (found, _) = search_with(&means, &pods, silent).await;
        assert_eq!(found.unwrap().sender.id, right.id);
        assert!(begun.elapsed() < Duration::from_millis(200), "{:?}", begun.elapsed());
        // Each refers to the next one, after as long as it may; and all of them say that they have authority.
        let begun = Instant::now();
        let next = |link: &LinkSender| {
            let after = pods.iter().map(|pod| pod.id.0).filter(|id| *id > link.id.0 && *id != right.id.0);
            Some(Instance::from_bits(after.min().unwrap_or(99).into()))
        };
        let refer = |link: &LinkSender, away: Found| match has(link) {
            true => Some(Found { here: true, ..away }),
            false => Some(Found { at: next(link), ..away }),
        };
        let (found, asked) = search_with(&means, &pods, refer).await;
        assert_eq!(found.unwrap().sender.id, right.id);
        assert!(asked.len() <= pods.len(), "each is asked once: {asked:?}");
        assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn a_pod_that_is_asked_over_two_links_says_once_that_the_node_is_not_there() {
        let (siblings, _tell, _made) = siblings(&[]);
        // It had the node by the link before, and has made another one since.
        let links = [link(1, 7), link(2, 7), link(3, 8)];
        let means = means(&siblings);
        means.known.learn(&"node1".parse().unwrap(), siblings.behind(&links[0]), None, false);
        for link in &links {
            siblings.joined(link, false);
        }
        let (found, asked) = search_with(&means, &links, |_, away| Some(away)).await;
        assert_eq!((asked.len(), found.unwrap_err().asked), (3, 2), "{asked:?}");
    }
}
