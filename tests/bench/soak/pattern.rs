//! Bytes that depend on their offset: any part can be generated, and checked, from its offset alone.

/// One direction of one session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern(u64);

impl Pattern {
    /// Returns the pattern that the client sends.
    pub(crate) fn up(seed: u64) -> Self {
        Self(mixed(seed))
    }

    /// Returns the pattern that the target sends.
    pub(crate) fn down(seed: u64) -> Self {
        Self(mixed(!seed))
    }

    /// Returns the bytes at an offset.
    pub(crate) fn bytes(self, at: u64, length: usize) -> Vec<u8> {
        let skipped = usize::try_from(at % 8).unwrap_or_default();
        let words = at / 8..=(at + length as u64) / 8;
        let mut bytes: Vec<u8> = words.flat_map(|word| mixed(self.0 ^ word).to_le_bytes()).collect();
        bytes.drain(..skipped);
        bytes.truncate(length);
        bytes
    }

    /// Returns what is wrong with bytes that arrived at an offset, or `None` if they are correct.
    pub(crate) fn fault(self, at: u64, came: &[u8]) -> Option<String> {
        let expected = self.bytes(at, came.len());
        let first = expected.iter().zip(came).position(|(expected, came)| expected != came)?;
        let wrong = at + first as u64;
        let from = wrong.saturating_sub(AROUND);
        let around = self.bytes(from, usize::try_from(2 * AROUND).unwrap_or_default());
        let piece = came.get(first..came.len().min(first + TELLING)).unwrap_or_default();
        let found = around.windows(piece.len()).position(|window| window == piece);
        Some(match found.map(|found| from + found as u64) {
            Some(other) if piece.len() == TELLING && other > wrong => {
                format!("at offset {wrong} came the bytes of {other}: {} lost", other - wrong)
            }
            Some(other) if piece.len() == TELLING => {
                format!("at offset {wrong} came the bytes of {other}: {} duplicated", wrong - other)
            }
            _ => format!("at offset {wrong} came unknown bytes: {piece:02x?}"),
        })
    }
}

/// Mixes a word so that each bit depends on all bits (the finalizer of SplitMix64).
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Distance from a wrong byte within which its true offset is searched for.
const AROUND: u64 = 8 << 20;
/// This number of bytes occurs at one offset only.
const TELLING: usize = 16;
