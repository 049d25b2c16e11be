use proptest::prelude::*;

use super::*;

/// The servers of a cloud, simulated in steps of a second. Edges that dial reach any of them.
struct Cloud {
    servers: Vec<(Rebalancer, u64)>,
    /// Number of servers, at the end of the list, that no edge ever reaches.
    shut: usize,
    known_counts: Vec<u64>,
    second: u32,
    started: Instant,
    moved: u64,
}

impl Cloud {
    fn new(nodes: &[u64]) -> Self {
        let servers = nodes.iter().map(|nodes| (Rebalancer::default(), *nodes)).collect();
        Self { servers, shut: 0, known_counts: nodes.to_vec(), second: 0, started: Instant::now(), moved: 0 }
    }

    fn nodes(&self) -> Vec<u64> {
        self.servers.iter().map(|(_, nodes)| *nodes).collect()
    }

    /// Simulates a second. `chance` decides where each edge that was asked arrives. Returns how many were asked.
    fn step(&mut self, chance: &mut impl FnMut(usize) -> usize) -> u64 {
        let now = self.started + Duration::from_secs(self.second.into());
        if self.second.is_multiple_of(5) {
            self.known_counts = self.nodes();
        }
        self.second += 1;
        let (mut requested, open) = (0, self.servers.len() - self.shut);
        for n in 0..self.servers.len() {
            let mut others = self.known_counts.clone();
            others.remove(n);
            let (balance, here) = &mut self.servers[n];
            let here = usize::try_from(*here).unwrap();
            let most = balance.next_batch(Some(NodeCounts { here, others: &others }), now);
            assert!(most <= (here / 100).max(1), "{most} of {here} in a second");
            balance.record_requested(most);
            for _ in 0..most {
                self.servers[n].1 -= 1;
                self.servers[chance(open)].1 += 1;
            }
            requested += most as u64;
        }
        self.moved += requested;
        requested
    }

    /// Runs until no edge is asked for a minute. Returns the seconds that it took.
    fn settle(&mut self, chance: &mut impl FnMut(usize) -> usize) -> u32 {
        let mut last = self.second;
        while self.second - last < 60 {
            assert!(self.second < 3000, "it never settles: {:?}", self.nodes());
            if self.step(chance) > 0 {
                last = self.second;
            }
        }
        last
    }
}

/// Returns a generator of pseudo-random numbers from a seed.
fn dice(mut seed: u64) -> impl FnMut(usize) -> usize {
    move |below| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % below
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_third_server_gets_its_share_of_five_thousand_edges() {
    let mut cloud = Cloud::new(&[2500, 2500, 0]);
    let took = cloud.settle(&mut dice(1));
    let nodes = cloud.nodes();
    assert!(nodes.iter().all(|nodes| (1500..=1850).contains(nodes)), "{nodes:?} after {took} s");
    assert!(took <= 120 && cloud.moved <= 5000, "{took} s, {} were asked", cloud.moved);
}

#[tokio::test(start_paused = true)]
async fn a_new_server_among_twenty_gets_most_of_its_share() {
    let mut nodes = vec![1000; 20];
    nodes.push(0);
    let mut cloud = Cloud::new(&nodes);
    cloud.settle(&mut dice(2));
    assert!(*cloud.nodes().last().unwrap() >= 700, "{:?}", cloud.nodes());
}

#[tokio::test(start_paused = true)]
async fn rebalancing_pauses_if_edges_never_reach_the_emptier_server() {
    let mut cloud = Cloud::new(&[4000, 4000, 500]);
    cloud.shut = 1;
    cloud.settle(&mut dice(3));
    assert!(cloud.moved < 3500, "{} were asked", cloud.moved);
    let (before, mut again) = (cloud.moved, 0);
    for _ in 0..3600 {
        again += u32::from(cloud.step(&mut dice(4)) > 0);
    }
    assert!(again < 150 && cloud.moved > before, "asked in {again} seconds of the next hour");
}

#[tokio::test(start_paused = true)]
async fn no_edge_is_moved_before_all_loads_are_known_for_ten_seconds() {
    let (mut balance, now) = (Rebalancer::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    let weights = NodeCounts { here: 1000, others: &[0] };
    for second in 0..10 {
        assert_eq!(balance.next_batch(Some(weights), after(second)), 0);
    }
    assert_eq!(balance.next_batch(None, after(10)), 0);
    for second in 11..21 {
        assert_eq!(balance.next_batch(Some(weights), after(second)), 0, "the delay starts again");
    }
    assert_eq!(balance.next_batch(Some(weights), after(21)), 10, "1 % of them");
    assert_eq!(balance.next_batch(None, after(22)), 0);
    assert_eq!(
        balance.next_batch(Some(NodeCounts { here: 1000, others: &[] }), after(40)),
        0,
        "there are no peers"
    );
}

#[tokio::test(start_paused = true)]
async fn a_briefly_unknown_peer_does_not_end_the_cooldown() {
    let (mut balance, now) = (Rebalancer::default(), Instant::now());
    let weights = NodeCounts { here: 100, others: &[10] };
    let requested: Vec<u64> = (0..500)
        .filter(|second| {
            // Peers come and go, and no edge moves.
            let known = (*second < 60 || second % 20 > 0).then_some(weights);
            let most = balance.next_batch(known, now + Duration::from_secs(*second));
            balance.record_requested(most);
            most > 0
        })
        .collect();
    assert_eq!(requested.last(), Some(&39), "one round of 30 s after 10 s: {requested:?}");
}

#[tokio::test(start_paused = true)]
async fn no_server_falls_below_the_mean_and_small_differences_are_ignored() {
    for (here, others) in [(2, vec![1]), (3, vec![2, 2]), (1, vec![0, 0]), (120, vec![90, 90]), (0, vec![0])]
    {
        let (mut balance, now) = (Rebalancer::default(), Instant::now());
        for second in 0..60 {
            let requested = balance
                .next_batch(Some(NodeCounts { here, others: &others }), now + Duration::from_secs(second));
            assert_eq!(requested, 0, "{here} with peers {others:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rebalancing_settles_from_any_distribution(
        nodes in prop::collection::vec(0..400_u64, 1..8), seed: u64,
    ) {
        let mut cloud = Cloud::new(&nodes);
        cloud.settle(&mut dice(seed));
        let (nodes, total) = (cloud.nodes(), nodes.iter().sum::<u64>());
        prop_assert_eq!(nodes.iter().sum::<u64>(), total);
    }
}

#[test]
fn an_extreme_load_of_a_peer_does_not_overflow() {
    let mean = NodeCounts { here: 10, others: &[u64::MAX, u64::MAX, 2] }.mean();
    assert!(mean > 1e18, "so no edge here is asked to move: {mean}");
}
