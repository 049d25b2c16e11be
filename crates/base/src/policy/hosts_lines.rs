//! Lines of servers in a hosts file: `<address>    <name>`. All other bytes belong to other programs and stay
//! unchanged.

use std::collections::BTreeSet;
use std::net::IpAddr;

/// Returns the text with these records as the only lines of a server. They are placed first, so that no other byte
/// changes, not even a missing final line break. Returns the text unchanged if it is up to date.
pub fn merged(text: &[u8], server: IpAddr, records: &BTreeSet<String>) -> Vec<u8> {
    let expected: BTreeSet<String> = records.iter().map(|name| format!("{server}    {name}\n")).collect();
    let mut foreign = Vec::with_capacity(text.len());
    let mut ours = Vec::new();
    for (line, of) in lines(text) {
        match of {
            Some(of) if of == server => ours.push(line),
            _ => foreign.extend_from_slice(line),
        }
    }
    // Each record must occur once: duplicated lines are rewritten.
    let existing: BTreeSet<&[u8]> = ours.iter().copied().collect();
    if ours.len() == expected.len() && expected.iter().all(|line| existing.contains(line.as_bytes())) {
        return text.to_vec();
    }
    let mut new: Vec<u8> = expected.into_iter().collect::<String>().into_bytes();
    new.extend(foreign);
    new
}

/// Returns the addresses of all lines in the form that servers write.
pub fn servers(text: &[u8]) -> BTreeSet<IpAddr> {
    lines(text).filter_map(|(_, of)| of).collect()
}

/// Returns the text without the lines of these servers.
pub fn without(text: &[u8], stopped: &BTreeSet<IpAddr>) -> Vec<u8> {
    let kept = lines(text).filter(|(_, of)| of.is_none_or(|of| !stopped.contains(&of)));
    kept.flat_map(|(line, _)| line).copied().collect()
}

/// Returns each line with its line break, and the address of the server that wrote it, if any.
fn lines(text: &[u8]) -> impl Iterator<Item = (&[u8], Option<IpAddr>)> {
    let mut in_user_section = false;
    text.split_inclusive(|b| *b == b'\n').map(move |line| {
        let bare = line.trim_ascii();
        in_user_section = (in_user_section || bare == USER_SECTION_BEGIN) && bare != USER_SECTION_END;
        (line, if in_user_section { None } else { server(line) })
    })
}

/// Returns the server that wrote a line: an address in its canonical form, four spaces, one word. Other lines are
/// foreign.
pub(super) fn server(line: &[u8]) -> Option<IpAddr> {
    let (address, name) = str::from_utf8(line).ok()?.strip_suffix('\n')?.split_once(GAP)?;
    let one_word = !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    let server: IpAddr = address.parse().ok()?;
    (one_word && server.to_string() == address).then_some(server)
}

/// Separator of address and name, as SuperEdge writes it.
const GAP: &str = "    ";

/// Start of the section for manual entries, as SuperEdge marks it.
const USER_SECTION_BEGIN: &[u8] = b"#CustomStart";

/// End of that section.
const USER_SECTION_END: &[u8] = b"#CustomEnd";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn foreign_lines_comments_and_the_custom_block_stay_byte_for_byte() {
        let foreign = "127.0.0.1 localhost\r\n# ours?\n10.0.0.2    other-pod\n10.0.0.1    two names\n\
                       #CustomStart\n10.0.0.1    mine\n#CustomEnd\n10.0.0.11    near\nno end";
        let one = merged(foreign.as_bytes(), ip(1), &names(&["b", "a"]));
        assert_eq!(String::from_utf8_lossy(&one), format!("10.0.0.1    a\n10.0.0.1    b\n{foreign}"));
        let other = merged(&one, ip(1), &names(&["c"]));
        assert_eq!(String::from_utf8_lossy(&other), format!("10.0.0.1    c\n{foreign}"));
        assert_eq!(merged(&other, ip(1), &names(&[])), foreign.as_bytes());
    }

    #[test]
    fn own_lines_stay_at_their_place() {
        let text = b"10.0.0.2    b\n10.0.0.1    a\n";
        assert_eq!(merged(text, ip(1), &names(&["a"])), text);
    }

    #[test]
    fn a_duplicate_own_line_is_replaced_by_a_missing_one() {
        let text = b"10.0.0.1    a\n10.0.0.1    a\n";
        assert_eq!(merged(text, ip(1), &names(&["a", "b"])), b"10.0.0.1    a\n10.0.0.1    b\n");
    }

    #[test]
    fn only_lines_of_stopped_servers_are_removed() {
        let text = b"10.0.0.1    a\n10.0.0.2    b\n10.0.0.3 c\nfd00::1    d\n#CustomStart\n10.0.0.2    e\n#CustomEnd\n\
                     10.0.0.2    f\n10.0.0.2    g h\nFD00::1    i\n10.0.0.2    no end";
        assert_eq!(servers(text), BTreeSet::from([ip(1), ip(2), "fd00::1".parse().unwrap()]));
        let left = b"10.0.0.1    a\n10.0.0.3 c\nfd00::1    d\n#CustomStart\n10.0.0.2    e\n#CustomEnd\n\
                     10.0.0.2    g h\nFD00::1    i\n10.0.0.2    no end";
        assert_eq!(without(text, &BTreeSet::from([ip(2), ip(3)])), left);
    }

    fn line() -> impl Strategy<Value = String> {
        prop_oneof![
            "10\\.0\\.0\\.[12]    [a-c]{1,2}",
            "10\\.0\\.0\\.[12] [a-c]",
            Just("#CustomStart".to_owned()),
            Just("#CustomEnd".to_owned()),
            "\\PC{0,12}",
        ]
    }

    proptest! {
        #[test]
        fn a_merge_changes_only_own_lines(
            lines in prop::collection::vec(line(), 0..12),
            ends in any::<bool>(),
            expected in prop::collection::btree_set("[a-c]{1,2}", 0..4),
        ) {
            let mut text = lines.join("\n");
            if ends { text.push('\n'); }
            let text = text.as_bytes();
            let without = |text: &[u8], server| {
                let bare = merged(text, ip(server), &names(&["never-there"]));
                bare.strip_prefix(format!("10.0.0.{server}    never-there\n").as_bytes()).unwrap().to_vec()
            };
            let new = merged(text, ip(1), &expected);
            prop_assert_eq!(without(&new, 1), without(text, 1), "the rest is unchanged");
            prop_assert_eq!(&merged(&new, ip(1), &expected), &new, "a second merge changes nothing");
            for name in &expected {
                let line = format!("10.0.0.1    {name}");
                prop_assert!(String::from_utf8_lossy(&new).lines().any(|l| l == line));
            }
            let back = merged(&merged(&new, ip(2), &expected), ip(2), &BTreeSet::new());
            prop_assert_eq!(without(&back, 2), without(&new, 2), "two servers do not change each other's lines");
        }
    }
}
