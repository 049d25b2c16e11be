//! Whom one search has asked, and what they have said.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;

use super::{NodeQuery, SearchContext};
use crate::names::Instance;
use crate::registry::find::NotFound;
use crate::registry::siblings::{FindAnswer, NodeFound, SiblingPod, Unreachable};

/// The pods that were asked, and the answers that are still to come.
pub(super) struct Asking<'a> {
    means: &'a SearchContext,
    wanted: &'a NodeQuery,
    asked: Vec<SiblingPod>,
    pub(super) answers: FuturesUnordered<BoxFuture<'static, Answered>>,
    /// What those have said that do not have the node.
    pub(super) said: NotFound,
    /// The pods that have said so.
    without: Vec<Option<Instance>>,
    /// The homes of the node that have not yet said with authority that no pod has it. `None`: even if all do, others
    /// have to be asked.
    silent_homes: Option<Vec<Instance>>,
}

pub(super) type Answered = Result<FindAnswer, Unreachable>;

impl<'a> Asking<'a> {
    pub(super) fn new(means: &'a SearchContext, wanted: &'a NodeQuery) -> Self {
        let (asked, answers, without) = (Vec::new(), FuturesUnordered::new(), Vec::new());
        Self { means, wanted, asked, answers, said: NotFound::default(), without, silent_homes: None }
    }

    /// Asks those of these pods that were not asked yet and can be reached.
    pub(super) fn ask(&mut self, pods: Vec<SiblingPod>) {
        for pod in pods {
            if pod.is_gone() || self.asked.iter().any(|asked| asked.is(&pod)) {
                continue;
            }
            self.asked.push(pod.clone());
            let (siblings, node) = (self.means.siblings.clone(), self.wanted.node.clone());
            self.answers.push(async move { siblings.ask(&pod, &node).await }.boxed());
        }
    }

    /// Asks the homes of the node.
    pub(super) fn ask_homes(&mut self) {
        let homes = self.means.siblings.homes_of(&self.wanted.node);
        // Only pods whose members have been the same for long agree on who they are.
        let agreed = self.means.siblings.has_converged();
        self.silent_homes = agreed.then(|| homes.iter().filter_map(SiblingPod::process).collect());
        self.ask(homes);
    }

    /// Asks all pods, unless the homes of the node speak for them.
    pub(super) fn ask_all(&mut self) {
        match &self.silent_homes {
            Some(silent) if silent.is_empty() => {
                self.said.asked = self.said.asked.max(self.means.siblings.other_members());
            }
            _ => self.ask(self.means.siblings.all()),
        }
    }

    /// Asks the pod that another refers to, if it was not asked yet. Returns whether it is.
    pub(super) fn follow_referral(&mut self, answer: &Answered) -> bool {
        let at = answer.as_ref().ok().and_then(|answer| answer.at);
        let Some(pod) = at.and_then(|at| self.means.siblings.of_process(at)) else { return false };
        let before = self.asked.len();
        self.ask(vec![pod]);
        self.asked.len() > before
    }

    /// Takes an answer. Returns where the node is, if it suits.
    pub(super) fn take(&mut self, answer: Answered) -> Option<NodeFound> {
        match answer {
            Ok(FindAnswer { yes: Some(yes), .. }) if self.wanted.suits(yes.instance, &yes.sender) => {
                return Some(yes);
            }
            Ok(FindAnswer { yes: Some(yes), .. }) => self.said.another |= !self.wanted.is_of(yes.instance),
            Ok(FindAnswer { pod, authoritative, seen, .. }) => {
                self.said.seen = self.said.seen.into_iter().chain(seen).min();
                if let Some(homes) = self.silent_homes.as_mut().filter(|_| authoritative) {
                    homes.retain(|home| Some(*home) != pod);
                }
                // One pod may be asked twice: by its address, and over the link that it has made. It counts once.
                if pod.is_none() || !self.without.contains(&pod) {
                    self.without.push(pod);
                    self.said.asked += 1;
                }
            }
            Err(Unreachable::Itself(_)) => {}
            Err(trouble) => self.said.trouble.push(trouble),
        }
        None
    }
}
