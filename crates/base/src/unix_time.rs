//! The time of day, and durations for people.

use std::time::{Duration, UNIX_EPOCH};

/// Returns the current time in seconds since 1970.
pub fn now() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

/// Returns a duration in its two largest units: `45 s`, `12 min`, `7 h 12 min`, `90 d`.
pub fn in_words(time: Duration) -> String {
    let mut seconds = time.as_secs();
    let mut words = Vec::new();
    for (unit, name) in [(24 * 3600, "d"), (3600, "h"), (60, "min"), (1, "s")] {
        if seconds >= unit && words.len() < 2 || words.is_empty() && unit == 1 {
            words.push(format!("{} {name}", seconds / unit));
        }
        seconds %= unit;
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_its_two_largest_units() {
        let words = |seconds| in_words(Duration::from_secs(seconds));
        assert_eq!(
            [0, 45, 60, 83, 3600, 25_920, 43_200].map(words),
            ["0 s", "45 s", "1 min", "1 min 23 s", "1 h", "7 h 12 min", "12 h"]
        );
        assert_eq!([86_400 * 90, 90_061, 3601].map(words), ["90 d", "1 d 1 h", "1 h 1 s"]);
    }
}
