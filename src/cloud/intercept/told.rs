//! Which claims without effect the log is told of: each once for as long as it has none, and not too many. Pure.

use std::collections::HashSet;

use crate::registry::Void;

/// What the log has been told.
#[derive(Debug, Default)]
pub(super) struct Told {
    each: HashSet<Void>,
    has_more: bool,
}

impl Told {
    /// Takes in all that count for nothing now; returns those that are news, and how many more there are, if that there are
    /// more is news.
    pub(super) fn step(&mut self, mut void: Vec<Void>) -> (Vec<Void>, Option<usize>) {
        // They come in any order, and the same ones are to be told of each time.
        void.sort_by(|a, b| (a.ip, a.node.as_str(), a.by).cmp(&(b.ip, b.node.as_str(), b.by)));
        let more = void.len().saturating_sub(MOST);
        void.truncate(MOST);
        let news = void.iter().filter(|void| !self.each.contains(void)).cloned().collect();
        let more_is_news = more > 0 && !self.has_more;
        (self.each, self.has_more) = (void.into_iter().collect(), more > 0);
        (news, more_is_news.then_some(more))
    }
}

/// Claims that are told of one by one.
const MOST: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{Claimant, Why};

    fn void(last: u8) -> Void {
        let why = Why::NotANodes("this host's");
        Void { ip: [10, 0, 0, last].into(), node: "edge1".parse().unwrap(), by: Claimant::Edge, why }
    }

    #[test]
    fn each_is_told_once_in_whatever_order_they_come_and_the_rest_is_summed_up_once() {
        let mut told = Told::default();
        let mut all: Vec<_> = (0..150).map(void).collect();
        let (news, more) = told.step(all.clone());
        assert_eq!((news, more), (all[..100].to_vec(), Some(50)));
        for turn in 1..150 {
            all.rotate_left(turn);
            assert_eq!(told.step(all.clone()), (vec![], None), "{turn}");
        }
    }

    #[test]
    fn what_counts_for_nothing_again_is_told_again() {
        let mut told = Told::default();
        assert_eq!(told.step(vec![void(1), void(2)]), (vec![void(1), void(2)], None));
        assert_eq!(told.step(vec![void(2)]), (vec![], None));
        assert_eq!(told.step(vec![void(1), void(2)]), (vec![void(1)], None));
    }
}
