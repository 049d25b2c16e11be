//! One search for a node at other pods: DNS has a head start, then all of them are asked at once.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, FusedFuture as _, Shared, WeakShared};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::time::{Instant, sleep_until};

use super::{LocationCache, NotFound};
use crate::names::{Instance, NodeName};
use crate::protocol::{LinkId, LinkSender, Peer};
use crate::registry::dns::{self, Dns};
use crate::registry::siblings::{FindAnswer, NodeFound, SiblingPod, Siblings, Unreachable};

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

async fn search(means: SearchContext, wanted: NodeQuery) -> Outcome {
    let begun = Instant::now();
    let head_start = if means.dns.has_failed_lately() { Duration::ZERO } else { dns::SLOW };
    let dns = means.dns.clone();
    let node = wanted.node.clone();
    let mut lookup = pin!(async move { dns.lookup(&node).await }.fuse());
    let mut asking =
        Asking { means: &means, wanted: &wanted, asked: Vec::new(), answers: FuturesUnordered::new() };
    let (mut said, mut best, mut all, mut without) =
        (NotFound::default(), None::<NodeFound>, false, Vec::new());
    // The pod that had it last is asked at once, as the likeliest to have it: mostly the link to it was only dropped
    // for want of use, or has just ended.
    asking.ask(means.known.of(&wanted.node).map(|(pod, _)| pod).into_iter().collect());
    loop {
        let dns_is_over = lookup.is_terminated();
        if !all && (begun.elapsed() >= head_start || dns_is_over && asking.answers.is_empty()) {
            all = true;
            asking.ask(means.siblings.all());
        }
        if all && dns_is_over && asking.answers.is_empty() {
            break;
        }
        let until = match &best {
            _ if !all => begun + head_start,
            Some(_) => begun + FRESHEST_WITHIN,
            None => begun + SEARCH_TIMEOUT,
        };
        tokio::select! {
            found = &mut lookup => match found {
                Ok(addresses) => asking.ask(named(&means, addresses)),
                Err(why) => said.dns = Some(why),
            },
            Some(answer) = asking.answers.next() => match answer {
                Ok(FindAnswer { yes: Some(yes), .. }) if wanted.suits(yes.instance, &yes.sender) => {
                    let fresh = yes.silence <= FRESH;
                    if best.as_ref().is_none_or(|best| yes.silence < best.silence) {
                        best = Some(yes);
                    }
                    if fresh {
                        break;
                    }
                }
                Ok(FindAnswer { yes: Some(yes), .. }) => said.another |= !wanted.is_of(yes.instance),
                Ok(FindAnswer { pod, .. }) => {
                    // One pod may be asked twice: by its address, and over the link that it has made. It counts once.
                    if pod.is_none() || !without.contains(&pod) {
                        without.push(pod);
                        said.asked += 1;
                    }
                }
                Err(Unreachable::Itself(_)) => {}
                Err(trouble) => said.trouble.push(trouble),
            },
            () = sleep_until(until) => if all { break },
        }
    }
    let yes = best.ok_or(said)?;
    means.known.learn(&wanted.node, yes.pod.clone(), yes.instance);
    Ok(yes)
}

/// The pods that were asked, and the answers that are still to come.
struct Asking<'a> {
    means: &'a SearchContext,
    wanted: &'a NodeQuery,
    asked: Vec<SiblingPod>,
    answers: FuturesUnordered<BoxFuture<'static, Result<FindAnswer, Unreachable>>>,
}

impl Asking<'_> {
    /// Asks those of these pods that were not asked yet and can be reached.
    fn ask(&mut self, pods: Vec<SiblingPod>) {
        for pod in pods {
            if pod.is_gone() || self.asked.iter().any(|asked| asked.is(&pod)) {
                continue;
            }
            self.asked.push(pod.clone());
            let (siblings, node) = (self.means.siblings.clone(), self.wanted.node.clone());
            self.answers.push(async move { siblings.ask(&pod, &node).await }.boxed());
        }
    }
}

/// The pods at the addresses that DNS named.
fn named(means: &SearchContext, addresses: Vec<IpAddr>) -> Vec<SiblingPod> {
    let first = addresses.into_iter().take(MOST_NAMED);
    first.flat_map(|ip| means.siblings.at(ip, means.port)).collect()
}

/// A pod that has received something from the node within this time has the node for certain.
const FRESH: Duration = Duration::from_secs(5);
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

    #[tokio::test]
    async fn a_pod_that_is_asked_over_two_links_says_once_that_the_node_is_not_there() {
        let (siblings, _tell, _made) = siblings(&[]);
        let link =
            |id, pod| LinkSender::new(LinkId(id), Peer::Pod, Some(Instance::from_bits(pod)), Dialect::NEWEST);
        let (node, known) = ("node1".parse().unwrap(), Arc::new(LocationCache::default()));
        // It had the node by the link before, and has made another one since.
        let links = [link(1, 7), link(2, 7), link(3, 8)];
        known.learn(&node, siblings.behind(&links[0]), None);
        for link in &links {
            siblings.joined(link, false);
        }
        let resolver = Resolver::of_servers(&[([127, 0, 0, 1], 9).into()]).unwrap();
        let dns =
            Arc::new(Dns::new(Arc::new(resolver), Arc::new(Zone::new(String::new(), Vec::new(), |_| true))));
        let means = SearchContext { siblings: siblings.clone(), known, dns, port: 1 };
        let answers = async {
            let mut asked = Vec::new();
            while asked.len() < links.len() {
                for link in &links {
                    if let Some(question) = question(link) {
                        siblings.on_found(link, Found::away(question));
                        asked.push(link.id);
                    }
                }
                tokio::task::yield_now().await;
            }
            asked
        };
        let (found, asked) = tokio::join!(search(means, NodeQuery::new(&node, None, None)), answers);
        assert_eq!((asked.len(), found.unwrap_err().asked), (3, 2), "{asked:?}");
    }
}
