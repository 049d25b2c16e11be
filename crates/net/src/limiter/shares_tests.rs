use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// One step of a random sequence.
#[derive(Debug, Clone)]
enum Step {
    Enter(u8),
    /// The n-th of the present entrants, in order of arrival.
    Leave(usize),
    Busy(usize),
    Waits(usize),
    Aside(usize),
    Later(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u8..5).prop_map(Step::Enter),
        1 => (0_usize..99).prop_map(Step::Leave),
        1 => (0_usize..99).prop_map(Step::Busy),
        2 => (0_usize..99).prop_map(Step::Waits),
        1 => (0_usize..99).prop_map(Step::Aside),
        1 => (1_u64..3000).prop_map(Step::Later),
    ]
}

/// A simple model: every entrant with its source and state, in order of arrival.
#[derive(Debug, Default)]
struct Model(Vec<(u64, u8, State)>);

impl Model {
    fn state(&self, id: u64) -> Option<State> {
        self.0.iter().find(|entrant| entrant.0 == id).map(|entrant| entrant.2)
    }

    fn held(&self, who: u8) -> usize {
        self.0.iter().filter(|(_, of, state)| *of == who && holds(*state)).count()
    }

    fn all_held(&self) -> usize {
        self.0.iter().filter(|(.., state)| holds(*state)).count()
    }

    fn waiting(&self, who: u8) -> usize {
        self.0.iter().filter(|(_, of, state)| *of == who && *state == State::Waits).count()
    }

    fn set(&mut self, id: u64, state: State) {
        self.0.iter_mut().filter(|entrant| entrant.0 == id).for_each(|entrant| entrant.2 = state);
    }

    /// Returns the holder of a source that is the next to lose its permit to another source.
    fn first(&self, of: u8) -> u64 {
        let order = |(id, who, state): &(u64, u8, State)| match state {
            State::Holds { busy, since } if *who == of => Some((*busy, *since, *id)),
            _ => None,
        };
        self.0.iter().filter_map(order).min().unwrap().2
    }

    /// Checks the effects of a step, and applies them to the model.
    fn follow(&mut self, actions: Changes, limits: Limits, now: Instant) {
        if let Some(lost) = actions.lost {
            let (_, of, state) = *self.0.iter().find(|entrant| entrant.0 == lost).unwrap();
            match state {
                State::Waits => {
                    let most = (0..5).map(|who| self.waiting(who)).max().unwrap();
                    assert_eq!(self.waiting(of), most, "another source has more waiting entrants");
                }
                State::Holds { busy, since } => {
                    let most = (0..5).map(|who| self.held(who)).max().unwrap();
                    assert_eq!(self.held(of), most, "another source holds more");
                    assert_eq!(
                        self.first(of),
                        lost,
                        "another holder of this source has been idle for longer"
                    );
                    let granted = actions.granted.expect("revoked only in favour of another entrant");
                    let gets = self.0.iter().find(|entrant| entrant.0 == granted).unwrap().1;
                    let silent =
                        !busy && now - since >= limits.idle_timeout.expect("a holder may be revoked");
                    assert!(self.held(gets) + 1 < most || silent, "it had no more than the newcomer's share");
                }
                State::Aside => panic!("it held no slot"),
            }
            self.0.retain(|entrant| entrant.0 != lost);
        }
        if let Some(granted) = actions.granted {
            let (_, who, state) = *self.0.iter().find(|entrant| entrant.0 == granted).unwrap();
            assert_eq!(state, State::Waits);
            let least = self.0.iter().filter(|g| g.2 == State::Waits).map(|g| self.held(g.1)).min().unwrap();
            // The source that lost a permit just now may be the neediest only after that.
            assert!(actions.lost.is_some() || self.held(who) == least, "another source holds less");
            self.set(granted, State::Holds { busy: false, since: now });
        }
    }
}

fn holds(state: State) -> bool {
    matches!(state, State::Holds { .. })
}

fn live(limits: Limits, steps: &[Step]) {
    let (mut shares, mut model, mut now) = (FairShares::new(limits), Model::default(), Instant::now());
    for step in steps {
        let nth = |n: usize| model.0.get(n % model.0.len().max(1)).map(|entrant| entrant.0);
        match *step {
            Step::Enter(who) => {
                let (held, most) = (model.held(who), (0..5).map(|who| model.held(who)).max().unwrap());
                let neediest = model.0.iter().all(|g| g.2 != State::Waits || model.held(g.1) > held);
                match shares.enter(&who, usize::MAX, now) {
                    Err(why) => {
                        assert_eq!(why, AcquireError::PerSource);
                        assert!(
                            held + model.waiting(who) >= limits.per_source
                                && limits.per_source < limits.permits
                        );
                        continue;
                    }
                    Ok((id, actions)) => {
                        let alone = (0..5).all(|of| of == who || model.held(of) + model.waiting(of) == 0);
                        let free = model.all_held() < limits.permits;
                        model.0.push((id, who, State::Waits));
                        model.follow(actions, limits, now);
                        let got = actions.granted == Some(id);
                        assert!(!(alone && free) || got, "a source alone may have all permits");
                        if limits.idle_timeout.is_some() && held + 1 < most && neediest {
                            assert!(got, "a source with {most} permits keeps out one with {held}");
                        }
                    }
                }
            }
            Step::Leave(n) => {
                let Some(id) = nth(n) else { continue };
                model.0.retain(|entrant| entrant.0 != id);
                let actions = shares.leave(id, now);
                model.follow(actions, limits, now);
            }
            Step::Busy(n) => {
                let Some(id) = nth(n) else { continue };
                let held = shares.mark(id, true, now);
                assert_eq!(held, model.state(id).is_some_and(holds));
                if held {
                    model.set(id, State::Holds { busy: true, since: now });
                }
            }
            Step::Aside(n) => {
                let Some(id) = nth(n) else { continue };
                if model.state(id).is_some_and(holds) {
                    model.set(id, State::Aside);
                }
                let actions = shares.suspend(id, now);
                model.follow(actions, limits, now);
            }
            Step::Waits(n) => {
                let Some(id) = nth(n) else { continue };
                let actions = shares.mark_idle(id, now);
                let full = model.state(id) == Some(State::Aside) && model.all_held() == limits.permits;
                assert_eq!((actions.granted, actions.lost.is_some()), (None, full));
                if let Some(lost) = actions.lost {
                    let of = model.0.iter().find(|entrant| entrant.0 == lost).unwrap().1;
                    assert_eq!(model.held(of), (0..5).map(|who| model.held(who)).max().unwrap());
                    assert_eq!(lost, model.first(of));
                    model.0.retain(|entrant| entrant.0 != lost);
                }
                if model.state(id) != Some(State::Waits) {
                    model.set(id, State::Holds { busy: false, since: now });
                }
            }
            Step::Later(millis) => {
                now += Duration::from_millis(millis);
                let actions = shares.grant_next(now);
                model.follow(actions, limits, now);
            }
        }
        let waiting: usize = (0..5).map(|who| model.waiting(who)).sum();
        assert!(model.all_held() <= limits.permits && waiting <= limits.waiting);
        assert!(
            waiting == 0 || model.all_held() == limits.permits,
            "a permit is free while an entrant waits"
        );
        assert_eq!(
            (shares.held, shares.waiting, shares.entrants.len()),
            (model.all_held(), waiting, model.0.len())
        );
    }
    for (id, ..) in model.0 {
        shares.leave(id, now);
    }
    assert!(shares.is_empty() && shares.own.is_empty());
    assert!(shares.by_held.is_empty() && shares.by_need.is_empty() && shares.by_waiting.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn every_life_keeps_the_rules(
        permits in 1_usize..8,
        per_source in 1_usize..9,
        waiting in 0_usize..5,
        idle_timeout in proptest::option::of(0_u64..2000),
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let idle_timeout = idle_timeout.map(Duration::from_millis);
        live(Limits { permits, per_source, waiting, idle_timeout }, &steps);
    }
}

#[test]
fn one_source_has_everything_until_another_comes() {
    let (mut shares, now) = (FairShares::new(Limits::permits(100)), Instant::now());
    let first: Vec<u64> = (0..100).map(|_| shares.enter(&"many", usize::MAX, now).unwrap().0).collect();
    for lost in first.into_iter().take(50) {
        let (id, actions) = shares.enter(&"few", usize::MAX, now).unwrap();
        assert_eq!(actions, Changes { granted: Some(id), lost: Some(lost) });
    }
    // From now on each has half of the permits, and a newcomer of the first evicts only holders of its own source.
    let (id, actions) = shares.enter(&"many", usize::MAX, now).unwrap();
    assert_eq!(actions.granted, Some(id));
    assert_eq!(shares.held, 100);
}

#[test]
fn of_one_source_the_silent_go_and_those_who_speak_stay() {
    let (mut shares, now) = (FairShares::new(Limits::permits(2)), Instant::now());
    let ids: Vec<u64> = (0..2).map(|_| shares.enter(&"one", usize::MAX, now).unwrap().0).collect();
    shares.mark(ids[0], true, now);
    assert_eq!(shares.enter(&"one", usize::MAX, now).unwrap().1.lost, Some(ids[1]));
    shares.mark(3, true, now);
    let (newcomer, actions) = shares.enter(&"one", usize::MAX, now).unwrap();
    assert_eq!(
        actions,
        Changes { granted: None, lost: Some(newcomer) },
        "all holders of its source are active"
    );
    let (newcomer, actions) = shares.enter(&"other", usize::MAX, now).unwrap();
    let given = Changes { granted: Some(newcomer), lost: Some(ids[0]) };
    assert_eq!(actions, given, "an active holder is evicted for a source that has none");
}

#[test]
fn who_has_stepped_aside_loses_nothing_and_has_its_slot_again_when_it_comes_back() {
    let (mut shares, now) = (FairShares::new(Limits::permits(2)), Instant::now());
    let [works, idle] = ["rich"; 2].map(|who| shares.enter(&who, usize::MAX, now).unwrap().0);
    assert_eq!(shares.suspend(works, now), Changes::default());
    let first = shares.enter(&"a", usize::MAX, now).unwrap();
    assert_eq!(first.1, Changes { granted: Some(first.0), lost: None }, "the permit is free");
    let second = shares.enter(&"b", usize::MAX, now).unwrap();
    assert_eq!(second.1, Changes { granted: Some(second.0), lost: Some(idle) });
    for n in 0..100 {
        let later = now + Duration::from_secs(n);
        let stranger: &str = format!("stranger {n}").leak();
        assert_ne!(shares.enter(&stranger, usize::MAX, later).unwrap().1.lost, Some(works));
    }
    let back = shares.mark_idle(works, now);
    assert!(back.lost.is_some() && back.granted.is_none(), "another holder is evicted for it");
    assert_eq!((shares.held, shares.entrants.len()), (2, 2));
}

#[test]
fn turns_go_round_among_those_who_wait() {
    let limits = Limits { permits: 1, per_source: usize::MAX, waiting: 100, idle_timeout: None };
    let (mut shares, now) = (FairShares::new(limits), Instant::now());
    let mut of = HashMap::new();
    let mut at_work = 0;
    for who in ["flood"; 50].into_iter().chain(["a", "b"]) {
        let (id, actions) = shares.enter(&who, usize::MAX, now).unwrap();
        of.insert(id, who);
        at_work = actions.granted.unwrap_or(at_work);
    }
    let mut turns = Vec::new();
    while let Some(next) = shares.leave(at_work, now).granted {
        at_work = next;
        turns.push(of[&next]);
    }
    assert_eq!(turns.len(), 51);
    assert!(turns[..3].contains(&"a") && turns[..3].contains(&"b"), "{:?}", &turns[..5]);
}

#[test]
fn who_comes_last_has_its_turn_before_the_second_one_of_a_crowd() {
    let limits = Limits { permits: 1, per_source: usize::MAX, waiting: 100, idle_timeout: None };
    let (mut shares, now) = (FairShares::new(limits), Instant::now());
    let mut at_work = shares.enter(&"flood", usize::MAX, now).unwrap().0;
    for _ in 0..50 {
        let _ = shares.enter(&"flood", usize::MAX, now);
    }
    for _ in 0..5 {
        at_work = shares.leave(at_work, now).granted.unwrap();
    }
    let late = shares.enter(&"late", usize::MAX, now).unwrap().0;
    at_work = shares.leave(at_work, now).granted.unwrap();
    assert!(at_work == late || shares.leave(at_work, now).granted == Some(late));
}

#[test]
fn who_floods_a_queue_loses_its_own() {
    let limits = Limits { permits: 1, per_source: usize::MAX, waiting: 10, idle_timeout: None };
    let (mut shares, now) = (FairShares::new(limits), Instant::now());
    let honest: Vec<u64> = (0..3).map(|_| shares.enter(&"honest", usize::MAX, now).unwrap().0).collect();
    for _ in 0..1000 {
        let lost = shares.enter(&"flood", usize::MAX, now).unwrap().1.lost;
        assert!(lost.is_none_or(|lost| !honest.contains(&lost)));
    }
    assert_eq!(shares.waiting, 10);
}
