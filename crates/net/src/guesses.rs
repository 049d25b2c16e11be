//! Limits wrong guesses of tokens and passwords.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::limiter::Source;

/// The wrong guesses of the last minute, by source and name. Right ones are not counted, nor are those that repeat a
/// wrong one: they tell nothing new, and a machine with an old token tries for days. No source limits another.
#[derive(Debug)]
pub struct GuessLimiter {
    /// Wrong guesses of one source for one name, and of one source for all names.
    limits: (usize, usize),
    /// Hashes names with a random key of this process.
    names: RandomState,
    sources: Mutex<HashMap<Source, VecDeque<WrongGuess>>>,
}

#[derive(Debug)]
struct WrongGuess {
    /// When it counted.
    at: Instant,
    /// When it was last repeated.
    seen: Instant,
    name: u64,
    /// `None` repeats no other.
    guess: Option<u64>,
}

/// Why a guess proves nothing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuessError<E> {
    /// It was compared, and is wrong.
    #[error("{0}")]
    Wrong(E),
    /// It differs from what is known, but not all can be read now.
    #[error("{0}; this is not certain: `tunnel status` has what cannot be read")]
    Unknown(E),
    /// Too many were wrong within a minute. A right one gets the same answer.
    #[error("too many wrong tokens came from its address")]
    TooMany,
}

impl GuessLimiter {
    /// Creates a limiter of wrong guesses within any minute: of a source for one name, and for all names.
    pub fn new(per_name: usize, per_source: usize) -> Self {
        Self { limits: (per_name, per_source), names: RandomState::new(), sources: Mutex::default() }
    }

    /// Compares a guess unless too many were wrong, and counts it if it is wrong; each time if it is not given. No other
    /// guess is compared meanwhile, so that guesses at the same moment do not exceed the limits.
    ///
    /// # Errors
    ///
    /// Fails if the guess is wrong, or was not compared.
    pub fn judge<T, E>(
        &self,
        source: Source,
        name: &str,
        guess: Option<&str>,
        compare: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, GuessError<E>> {
        let now = Instant::now();
        let guess = guess.map(|guess| self.names.hash_one((name, guess)));
        let name = self.names.hash_one(name);
        let mut sources = self.sources.lock();
        // After too many wrong guesses none is compared: a right one gets the same answer, so that guessing further is
        // useless.
        let counts = |wrong: &WrongGuess| now.saturating_duration_since(wrong.at) < WINDOW;
        if let Some(wrong) = sources.get_mut(&source) {
            wrong.retain(|guess| now.saturating_duration_since(guess.seen) < 2 * WINDOW);
            let recent = wrong.iter().filter(|guess| counts(guess));
            let of_name = recent.clone().filter(|guess| guess.name == name).count();
            if of_name >= self.limits.0 || recent.count() >= self.limits.1 {
                return Err(GuessError::TooMany);
            }
        }
        let error = match compare() {
            Ok(right) => return Ok(right),
            Err(error) => error,
        };
        if sources.len() >= MAX_SOURCES && !sources.contains_key(&source) {
            let last = |(_, wrong): &(&Source, &VecDeque<WrongGuess>)| wrong.back().map(|guess| guess.at);
            if let Some(oldest) = sources.iter().min_by_key(last).map(|(source, _)| *source) {
                sources.remove(&oldest);
            }
        }
        let wrong = sources.entry(source).or_default();
        if let Some(known) = wrong.iter_mut().find(|known| guess.is_some() && known.guess == guess) {
            known.seen = now;
            return Err(GuessError::Wrong(error));
        }
        // As many are known as may count. One that still counts is never forgotten.
        let old = (0..wrong.len()).filter(|at| !counts(&wrong[*at]));
        if let Some(oldest) = old.min_by_key(|at| wrong[*at].seen).filter(|_| wrong.len() >= self.limits.1) {
            wrong.remove(oldest);
        }
        wrong.push_back(WrongGuess { at: now, seen: now, name, guess });
        Err(GuessError::Wrong(error))
    }

    /// Uncounts the last wrong guess of this source and name, which has proved to be right.
    pub fn forgive(&self, source: Source, name: &str) {
        let name = self.names.hash_one(name);
        if let Some(wrong) = self.sources.lock().get_mut(&source)
            && let Some(last) = wrong.iter().rposition(|guess| guess.name == name)
        {
            wrong.remove(last);
        }
    }
}

/// Time for which a wrong guess counts.
const WINDOW: Duration = Duration::from_secs(60);

/// Maximum number of sources; a source that made 100 wrong guesses takes 6 KiB. Beyond it, the source of the oldest
/// guess is forgotten: with as many sources, each has its own guesses anyway.
const MAX_SOURCES: usize = 1024;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;
    use tokio::time::advance;

    use super::*;

    fn source(last: u16) -> Source {
        Source::of([10, 0, last.to_be_bytes()[0], last.to_be_bytes()[1]].into())
    }

    /// Makes a guess that differs from all others. Returns its result, and whether it was compared.
    fn guess(guesses: &GuessLimiter, from: u16, name: &str, is_right: bool) -> (bool, bool) {
        repeat(guesses, from, name, None, is_right)
    }

    fn repeat(
        guesses: &GuessLimiter,
        from: u16,
        name: &str,
        token: Option<&str>,
        is_right: bool,
    ) -> (bool, bool) {
        let compared = Cell::new(false);
        let judged = guesses.judge(source(from), name, token, || {
            compared.set(true);
            is_right.then_some(()).ok_or("wrong")
        });
        (judged.is_ok(), compared.get())
    }

    proptest! {
        #[test]
        fn in_any_minute_at_most_so_many_wrong_guesses_of_a_source_are_compared(
            calls in proptest::collection::vec((0..4000_u64, 0..2_u16, 0..6_u8, prop::bool::weighted(0.1)), 1..400),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
            runtime.unwrap().block_on(async {
                let guesses = GuessLimiter::new(5, 20);
                let mut wrong: Vec<(Instant, u16, u8)> = Vec::new();
                for (pause, from, name, is_right) in calls {
                    advance(Duration::from_millis(pause)).await;
                    let now = Instant::now();
                    wrong.retain(|(at, ..)| now - *at < WINDOW);
                    let of_source = wrong.iter().filter(|(_, other, _)| *other == from).count();
                    let of_name = wrong.iter().filter(|(_, other, named)| (*other, *named) == (from, name)).count();
                    let may_compare = of_source < 20 && of_name < 5;
                    let got = guess(&guesses, from, &name.to_string(), is_right);
                    // Right ones are accepted, and wrong ones compared, exactly until a limit is reached.
                    prop_assert_eq!(got, (is_right && may_compare, may_compare));
                    if may_compare && !is_right {
                        wrong.push((now, from, name));
                    }
                }
                Ok(())
            })?;
        }
    }

    /// An edge with a stale token repeats its call while 499 others of one address link within a minute.
    #[tokio::test(start_paused = true)]
    async fn a_stale_token_keeps_no_other_edge_of_its_address_from_linking() {
        let guesses = GuessLimiter::new(5, 100);
        for n in 0..499 {
            advance(WINDOW / 500).await;
            assert!(!guess(&guesses, 1, "stale", false).0);
            assert!(guess(&guesses, 1, &format!("node{n}"), true).0, "{n}");
        }
        assert_eq!(guess(&guesses, 1, "stale", true), (false, false), "alike for a right token");
        assert_eq!(guess(&guesses, 2, "stale", true), (true, true), "another address has its own guesses");
    }

    /// A join key was revoked with a hundred of its nodes. They repeat their tokens every half minute.
    #[tokio::test(start_paused = true)]
    async fn a_hundred_stale_tokens_keep_others_of_their_address_from_linking_for_a_minute_only() {
        let guesses = GuessLimiter::new(5, 100);
        let mut refused = 0;
        for second in 0..600 {
            advance(Duration::from_secs(1)).await;
            for n in (0..100).filter(|n| n % 30 == second % 30) {
                repeat(&guesses, 1, &n.to_string(), Some("stale"), false);
            }
            refused += u32::from(!guess(&guesses, 1, "right", true).0);
        }
        assert!((1..60).contains(&refused), "{refused}");
        for n in 0..1000 {
            repeat(&guesses, 1, "0", Some(&n.to_string()), false);
        }
        assert_eq!(repeat(&guesses, 1, "0", Some("right"), true), (false, false), "new ones count");
        assert_eq!(guesses.sources.lock()[&source(1)].len(), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_forgiven_guess_does_not_count() {
        let guesses = GuessLimiter::new(1, 100);
        guess(&guesses, 1, "a", false);
        guesses.forgive(source(1), "b");
        assert_eq!(guess(&guesses, 1, "a", true), (false, false));
        guesses.forgive(source(1), "a");
        assert_eq!(guess(&guesses, 1, "a", true), (true, true));
    }

    #[tokio::test(start_paused = true)]
    async fn endless_sources_and_names_take_bounded_memory_and_forget_the_oldest_source() {
        let guesses = GuessLimiter::new(5, 100);
        for n in 0..1000_u32 {
            guess(&guesses, 0, &n.to_string(), false);
        }
        advance(Duration::from_secs(1)).await;
        for from in 1..=u16::try_from(MAX_SOURCES).unwrap() {
            guess(&guesses, from, "a", false);
        }
        let sources = guesses.sources.lock();
        assert_eq!((sources.len(), sources.contains_key(&source(0))), (MAX_SOURCES, false));
        assert!(sources.values().all(|wrong| wrong.len() == 1));
    }
}
