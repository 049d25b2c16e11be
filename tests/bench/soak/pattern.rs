//! Bytes that tell where they belong: any piece can be made, and checked, from its offset alone.

/// One direction of one session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern(u64);

impl Pattern {
    /// What the client sends.
    pub(crate) fn up(seed: u64) -> Self {
        Self(mixed(seed))
    }

    /// What the target sends.
    pub(crate) fn down(seed: u64) -> Self {
        Self(mixed(!seed))
    }

    /// The bytes from an offset on.
    pub(crate) fn bytes(self, at: u64, length: usize) -> Vec<u8> {
        let skipped = usize::try_from(at % 8).unwrap_or_default();
        let words = at / 8..=(at + length as u64) / 8;
        let mut bytes: Vec<u8> = words.flat_map(|word| mixed(self.0 ^ word).to_le_bytes()).collect();
        bytes.drain(..skipped);
        bytes.truncate(length);
        bytes
    }

    /// What is wrong with bytes that came at an offset, if anything is.
    pub(crate) fn fault(self, at: u64, came: &[u8]) -> Option<String> {
        let meant = self.bytes(at, came.len());
        let first = meant.iter().zip(came).position(|(meant, came)| meant != came)?;
        let wrong = at + first as u64;
        let from = wrong.saturating_sub(AROUND);
        let around = self.bytes(from, usize::try_from(2 * AROUND).unwrap_or_default());
        let piece = came.get(first..came.len().min(first + TELLING)).unwrap_or_default();
        let found = around.windows(piece.len()).position(|window| window == piece);
        Some(match found.map(|found| from + found as u64) {
            Some(other) if piece.len() == TELLING && other > wrong => {
                format!("at {wrong} came the bytes of {other}: {} are lost", other - wrong)
            }
            Some(other) if piece.len() == TELLING => {
                format!("at {wrong} came the bytes of {other}: {} are doubled", wrong - other)
            }
            _ => format!("at {wrong} came bytes that are nobody's: {piece:02x?}"),
        })
    }
}

/// A word in which each bit depends on all of the given ones (the finisher of SplitMix64).
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// How far around a wrong byte its true place is looked for.
const AROUND: u64 = 8 << 20;
/// So many bytes are found at one place only.
const TELLING: usize = 16;
