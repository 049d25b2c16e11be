//! Which rejected claims are logged: each once while it is rejected, and a limited number. Pure.

use std::collections::HashSet;

use tunnel_base::addresses::owners::RejectedClaim;

/// The rejected claims of addresses that were logged, so that each is logged once.
#[derive(Debug, Default)]
pub(super) struct ClaimLog {
    /// Rejected claims at the last update, up to a limit.
    each: HashSet<RejectedClaim>,
    /// Whether there were more than that limit.
    has_more: bool,
}

impl ClaimLog {
    /// Takes all claims that are rejected now. Returns the new ones, and the number of further ones if their existence
    /// is new.
    pub(super) fn update(&mut self, mut rejected: Vec<RejectedClaim>) -> (Vec<RejectedClaim>, Option<usize>) {
        // They arrive in any order, and the same ones must be selected each time.
        rejected.sort_by_cached_key(|it| (it.claim.ip, it.claim.node.to_string(), it.claim.by));
        let more = rejected.len().saturating_sub(MAX_LOGGED_CLAIMS);
        rejected.truncate(MAX_LOGGED_CLAIMS);
        let news = rejected.iter().filter(|it| !self.each.contains(it)).cloned().collect();
        let more_is_news = more > 0 && !self.has_more;
        (self.each, self.has_more) = (rejected.into_iter().collect(), more > 0);
        (news, more_is_news.then_some(more))
    }
}

/// Maximum number of claims that are logged one by one.
const MAX_LOGGED_CLAIMS: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use tunnel_base::addresses::owners::AddressClaim;
    use tunnel_base::addresses::owners::ClaimRejectReason;
    use tunnel_base::addresses::owners::ClaimSource;

    fn rejected(last: u8) -> RejectedClaim {
        let (ip, node) = ([10, 0, 0, last].into(), "edge1".parse().unwrap());
        let why = ClaimRejectReason::NotANodeAddress("this host's");
        RejectedClaim { claim: AddressClaim { ip, node, by: ClaimSource::Kubernetes }, why }
    }

    #[test]
    fn rejected_claims_are_logged_once_in_any_order_and_the_rest_summarised_once() {
        let mut claim_log = ClaimLog::default();
        let mut all: Vec<_> = (0..150).map(rejected).collect();
        let (news, more) = claim_log.update(all.clone());
        assert_eq!((news, more), (all[..100].to_vec(), Some(50)));
        for turn in 1..150 {
            all.rotate_left(turn);
            assert_eq!(claim_log.update(all.clone()), (vec![], None), "{turn}");
        }
    }

    #[test]
    fn a_claim_that_is_rejected_again_is_logged_again() {
        let mut claim_log = ClaimLog::default();
        assert_eq!(claim_log.update(vec![rejected(1), rejected(2)]), (vec![rejected(1), rejected(2)], None));
        assert_eq!(claim_log.update(vec![rejected(2)]), (vec![], None));
        assert_eq!(claim_log.update(vec![rejected(1), rejected(2)]), (vec![rejected(1)], None));
    }
}
