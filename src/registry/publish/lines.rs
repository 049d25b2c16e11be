//! The lines of pods in the text of a hosts file: `<address>    <name>`. Every other byte of it is somebody else's.

use std::collections::BTreeSet;
use std::net::IpAddr;

/// The text with these as the only lines of a pod. They stand at the top, so that nothing of others need be touched,
/// not even an end without a line break; where nothing is to be changed, nothing is.
pub(super) fn merged(text: &[u8], pod: IpAddr, records: &BTreeSet<String>) -> Vec<u8> {
    let wanted: BTreeSet<String> = records.iter().map(|name| format!("{pod}    {name}\n")).collect();
    let (mut foreign, mut ours) = (Vec::with_capacity(text.len()), Vec::new());
    for (line, of) in lines(text) {
        match of {
            Some(of) if of == pod => ours.push(line),
            _ => foreign.extend_from_slice(line),
        }
    }
    // Each of them once: what somebody has doubled is written anew.
    let stand: BTreeSet<&[u8]> = ours.iter().copied().collect();
    if ours.len() == wanted.len() && wanted.iter().all(|line| stand.contains(line.as_bytes())) {
        return text.to_vec();
    }
    let mut new: Vec<u8> = wanted.into_iter().collect::<String>().into_bytes();
    new.extend(foreign);
    new
}

/// The addresses that have lines as pods write them.
pub(super) fn pods(text: &[u8]) -> BTreeSet<IpAddr> {
    lines(text).filter_map(|(_, of)| of).collect()
}

/// The text without the lines of these pods.
#[cfg(any(test, feature = "kubernetes"))]
pub(super) fn without(text: &[u8], gone: &BTreeSet<IpAddr>) -> Vec<u8> {
    let kept = lines(text).filter(|(_, of)| of.is_none_or(|of| !gone.contains(&of)));
    kept.flat_map(|(line, _)| line).copied().collect()
}

/// Each line with its end, and whose it is if a pod has written it.
fn lines(text: &[u8]) -> impl Iterator<Item = (&[u8], Option<IpAddr>)> {
    let mut fenced = false;
    text.split_inclusive(|b| *b == b'\n').map(move |line| {
        let bare = line.trim_ascii();
        fenced = (fenced || bare == FENCE) && bare != FENCE_END;
        (line, if fenced { None } else { pod(line) })
    })
}

/// Whose line this is: one address in the form we write it, four spaces, one word. A line with more is somebody else's.
fn pod(line: &[u8]) -> Option<IpAddr> {
    let (address, name) = str::from_utf8(line).ok()?.strip_suffix('\n')?.split_once(GAP)?;
    let one_word = !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    let pod: IpAddr = address.parse().ok()?;
    (one_word && pod.to_string() == address).then_some(pod)
}

/// Between address and name, as SuperEdge writes it.
const GAP: &str = "    ";

/// Where people's own lines begin, as SuperEdge marks them.
const FENCE: &[u8] = b"#CustomStart";

/// Where they end.
const FENCE_END: &[u8] = b"#CustomEnd";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
    fn lines_of_ours_stay_where_another_pod_has_put_them() {
        let text = b"10.0.0.2    b\n10.0.0.1    a\n";
        assert_eq!(merged(text, ip(1), &names(&["a"])), text);
    }

    #[test]
    fn a_line_that_somebody_has_doubled_does_not_stand_for_another() {
        let text = b"10.0.0.1    a\n10.0.0.1    a\n";
        assert_eq!(merged(text, ip(1), &names(&["a", "b"])), b"10.0.0.1    a\n10.0.0.1    b\n");
    }

    #[test]
    fn lines_of_dead_pods_go_and_no_others() {
        let text = b"10.0.0.1    a\n10.0.0.2    b\n10.0.0.3 c\nfd00::1    d\n#CustomStart\n10.0.0.2    e\n#CustomEnd\n\
                     10.0.0.2    f\n10.0.0.2    g h\nFD00::1    i\n10.0.0.2    no end";
        assert_eq!(pods(text), BTreeSet::from([ip(1), ip(2), "fd00::1".parse().unwrap()]));
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
        fn only_own_lines_ever_change(
            lines in prop::collection::vec(line(), 0..12),
            ends in any::<bool>(),
            wanted in prop::collection::btree_set("[a-c]{1,2}", 0..4),
        ) {
            let mut text = lines.join("\n");
            if ends { text.push('\n'); }
            let text = text.as_bytes();
            let without = |text: &[u8], pod| {
                let bare = merged(text, ip(pod), &names(&["never-there"]));
                bare.strip_prefix(format!("10.0.0.{pod}    never-there\n").as_bytes()).unwrap().to_vec()
            };
            let new = merged(text, ip(1), &wanted);
            prop_assert_eq!(without(&new, 1), without(text, 1), "the rest is the same");
            prop_assert_eq!(&merged(&new, ip(1), &wanted), &new, "once is enough");
            for name in &wanted {
                let line = format!("10.0.0.1    {name}");
                prop_assert!(String::from_utf8_lossy(&new).lines().any(|l| l == line));
            }
            let back = merged(&merged(&new, ip(2), &wanted), ip(2), &BTreeSet::new());
            prop_assert_eq!(without(&back, 2), without(&new, 2), "two pods do not touch each other");
        }
    }
}
