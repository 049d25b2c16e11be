//! Makes text of peers and clients safe to show in a log, a status line or a page.

/// A peer's text as one printable line of at most `MOST` bytes. A character that could end a line, move a cursor or
/// change the direction of writing becomes a space.
///
/// Each text of a peer passes through here where it is read, so that later code may use it freely.
pub fn printable(text: &str) -> String {
    let mut printed = String::with_capacity(text.len().min(MOST));
    for c in text.chars().map(|c| if is_printable(c) { c } else { ' ' }) {
        if printed.len() + c.len_utf8() > MOST {
            break;
        }
        printed.push(c);
    }
    printed
}

/// Whether a character has no effect but its own glyph.
pub(super) fn is_printable(c: char) -> bool {
    let separates = matches!(c, '\u{2028}' | '\u{2029}');
    let directs =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !(c.is_control() || separates || directs)
}

/// Longest text of a peer in bytes.
pub(super) const MOST: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neither_lines_nor_escapes_nor_turned_writing_get_through() {
        let wild = "a\r\nb\u{1b}[2Jc\u{9b}31md\u{2028}e\u{202e}f\u{7f}\u{e9}";
        assert_eq!(printable(wild), "a  b [2Jc 31md e f \u{e9}");
    }

    proptest! {
        #[test]
        fn any_text_becomes_a_short_line(text in any::<String>()) {
            let printed = printable(&text);
            prop_assert!(printed.len() <= MOST && printed.chars().all(is_printable));
            prop_assert_eq!(super::printable(&printed), printed);
        }
    }
}
