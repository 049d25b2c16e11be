//! Makes text of remotes and clients safe to show in a log, a status line or a page.

/// Returns a remote's text as one printable line of at most `MAX_PRINTED_BYTES` bytes. Replaces each character that
/// could end a line, move a cursor or change the direction of writing with a space.
///
/// Every text of a remote passes through here when it is read, so that later code can use it safely.
pub fn printable(text: &str) -> String {
    let mut printed = String::with_capacity(text.len().min(MAX_PRINTED_BYTES));
    for c in text.chars().map(|c| if is_printable(c) { c } else { ' ' }) {
        if printed.len() + c.len_utf8() > MAX_PRINTED_BYTES {
            break;
        }
        printed.push(c);
    }
    printed
}

/// Like [`printable`], but of any length: for texts that are bounded where they are read, and that a command prints.
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if is_printable(c) { c } else { ' ' }).collect()
}

/// Like [`one_line`], but keeps line ends and tabs: for whole texts of another process, before they are printed or
/// parsed.
pub fn plain_text(text: &str) -> String {
    text.chars().map(|c| if is_printable(c) || matches!(c, '\n' | '\t') { c } else { ' ' }).collect()
}

/// Returns true if a character has no effect but its own glyph.
#[inline]
pub fn is_printable(c: char) -> bool {
    let separates = matches!(c, '\u{2028}' | '\u{2029}');
    let directs =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_ascii_graphic() || c == ' ' || !(c.is_control() || separates || directs)
}

/// Maximum length of a remote's text in bytes.
const MAX_PRINTED_BYTES: usize = 200;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn printable_replaces_line_breaks_escapes_and_bidi_controls() {
        let wild = "a\r\nb\u{1b}[2Jc\u{9b}31md\u{2028}e\u{202e}f\u{7f}\u{e9}";
        assert_eq!(printable(wild), "a  b [2Jc 31md e f \u{e9}");
    }

    proptest! {
        #[test]
        fn any_text_becomes_a_short_printable_line(text in any::<String>()) {
            let printed = printable(&text);
            prop_assert!(printed.len() <= MAX_PRINTED_BYTES && printed.chars().all(is_printable));
            prop_assert_eq!(printable(&printed), printed);
        }
    }
}
