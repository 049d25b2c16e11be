//! How near two words are, so that a misspelt key finds the one that was meant.

/// How many letters to put in, take out, change or swap to get from one text to the other.
pub(super) fn edits(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in to.iter().enumerate() {
            let at = |row: &[usize], j: usize| row.get(j).copied().unwrap_or(usize::MAX - 1);
            let changed = at(&above, j) + usize::from(a != b);
            let mut least = changed.min(at(&above, j + 1) + 1).min(at(&row, j) + 1);
            let crossed = i > 0 && j > 0 && from.get(i - 1) == Some(b) && to.get(j - 1) == Some(a);
            if crossed {
                least = least.min(at(&before, j - 1) + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut above, row);
    }
    above.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_a_swap_as_one_slip() {
        for (a, b, distance) in [
            ("", "", 0),
            ("port", "port", 0),
            ("prot", "port", 1),
            ("por", "port", 1),
            ("", "abc", 3),
            ("log", "dog", 1),
        ] {
            assert_eq!(edits(a, b), distance, "{a} {b}");
            assert_eq!(edits(b, a), distance, "{b} {a}");
        }
    }
}
