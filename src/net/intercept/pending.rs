//! Connections that were under way before their target was caught: the kernel's connection tracking keeps what it
//! decided for the first packet, so that a client whose SYN has gone nowhere would wait for its patience to end. Where
//! such an entry is taken away, the client's next SYN is looked at anew.
//!
//! Spoken with the kernel itself (`ctnetlink`), as a machine that has nft need not have conntrack.

use std::io::{self, Read as _};
use std::net::IpAddr;

use socket2::Socket;
use tokio::task::yield_now;

use super::Sets;
use super::netfilter::{HEADS, NETLINK_NETFILTER, attribute, message};
use crate::net::diag::{self, find, split};

/// Has the kernel forget each connection to one of these nodes and ports that nobody has answered and that is not led
/// elsewhere yet. How many those were.
///
/// # Errors
///
/// The kernel does not track connections, or this process may not change that.
pub(super) async fn forget(of: &Sets) -> io::Result<usize> {
    // What it says of entries that are gone already is not read.
    let (mut asked, told) = (diag::netlink(NETLINK_NETFILTER)?, diag::netlink(NETLINK_NETFILTER)?);
    let mut forgotten = 0;
    for family in [AF_INET, AF_INET6] {
        if !of.nodes.iter().any(|ip| ip.is_ipv4() == (family == AF_INET)) {
            continue;
        }
        let pending = pending(&mut asked, family, of).await?;
        for entry in &pending {
            told.send(&message(CT_DELETE, 0, 0, (family, 0), entry))?;
        }
        forgotten += pending.len();
    }
    Ok(forgotten)
}

/// What names each such connection to the kernel.
async fn pending(kernel: &mut Socket, family: u8, of: &Sets) -> io::Result<Vec<Vec<u8>>> {
    // Only what was neither answered nor led elsewhere; an older kernel tells of all.
    let wanted = [attribute(CTA_STATUS, &[0; 4]), attribute(CTA_STATUS_MASK, &LED.to_be_bytes())].concat();
    kernel.send(&message(CT_GET, NLM_F_DUMP, 0, (family, 0), &wanted))?;
    let (mut room, mut found) = (vec![0; ROOM], Vec::new());
    loop {
        let len = kernel.read(&mut room)?;
        let mut rest = room.get(..len).unwrap_or_default();
        while let Some((len, kind)) = diag::head(rest) {
            match kind {
                NLMSG_DONE => return Ok(found),
                NLMSG_ERROR => return Err(diag::error(rest)),
                _ => {}
            }
            let entry = rest.get(HEADS..len).and_then(Entry::read);
            let entry = entry.filter(|entry| of.nodes.contains(&entry.to) && of.ports.contains(&entry.port));
            found.extend(entry.filter(Entry::is_pending).map(|entry| entry.key));
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        // There may be many, and others wait for this thread.
        yield_now().await;
    }
}

/// A TCP connection as the kernel tells of it.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    /// Where its first packet was sent.
    to: IpAddr,
    port: u16,
    status: u32,
    state: u8,
    /// The attributes that name it.
    key: Vec<u8>,
}

impl Entry {
    /// `None`: it is none of TCP, or lacks something.
    fn read(attributes: &[u8]) -> Option<Self> {
        let tuple = find(attributes, CTA_TUPLE_ORIG)?;
        let (ip, protocol) = (find(tuple, CTA_TUPLE_IP)?, find(tuple, CTA_TUPLE_PROTO)?);
        let v4 = || Some(IpAddr::from(<[u8; 4]>::try_from(find(ip, CTA_IP_V4_DST)?).ok()?));
        let v6 = || Some(IpAddr::from(<[u8; 16]>::try_from(find(ip, CTA_IP_V6_DST)?).ok()?));
        let port = u16::from_be_bytes(find(protocol, CTA_PROTO_DST_PORT)?.try_into().ok()?);
        let tcp = find(find(attributes, CTA_PROTOINFO)?, CTA_PROTOINFO_TCP)?;
        let state = *find(tcp, CTA_PROTOINFO_TCP_STATE)?.first()?;
        let status = u32::from_be_bytes(find(attributes, CTA_STATUS)?.try_into().ok()?);
        let naming = [CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE];
        let named = split(attributes).filter(|(kind, ..)| naming.contains(kind));
        let key = named.flat_map(|(.., whole)| whole.iter().copied()).collect();
        Some(Self { to: v4().or_else(v6)?, port, status, state, key })
    }

    fn is_pending(&self) -> bool {
        self.state == SYN_SENT && self.status & LED == 0
    }
}

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Of the subsystem of connection tracking: tell of connections, forget one.
const CT_GET: u16 = 1 << 8 | 1;
const CT_DELETE: u16 = 1 << 8 | 2;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_IP: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_DST: u16 = 4;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_STATUS: u16 = 3;
const CTA_PROTOINFO: u16 = 4;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_STATUS_MASK: u16 = 26;
/// An answer was seen, or the target was changed.
const LED: u32 = 1 << 1 | 1 << 5;
/// The state of a connection whose first packet nobody has answered.
const SYN_SENT: u8 = 1;
/// As much as the kernel says at once.
const ROOM: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the kernel told of a connection from 10.99.0.1 to 10.99.0.8:10250 that nobody has answered.
    const UNANSWERED: &str = "3400018014000180080001000a630001080002000a6300081c000280050001000600000006000200aa1000000600\
                              0300280a00003400028014000180080001000a630008080002000a6300011c000280050001000600000006000200\
                              280a000006000300aa1000000800030000000188080008000000000008000c009b458e6608000b00000000020800\
                              070000000077300004802c0001800500010001000000050002000a00000005000300000000000600040003000000\
                              0600050000000000";

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<_> = hex.bytes().map(|digit| char::from(digit).to_digit(16).unwrap()).collect();
        digits.chunks(2).map(|two| u8::try_from(two[0] * 16 + two[1]).unwrap()).collect()
    }

    #[test]
    fn a_connection_that_nobody_has_answered_is_told_from_one_that_is_led_elsewhere() {
        let told = bytes(UNANSWERED);
        let entry = Entry::read(&told).unwrap();
        assert_eq!((entry.to, entry.port), ([10, 99, 0, 8].into(), 10250));
        assert!(entry.is_pending());
        // What names it: where it came from and goes to, and its number.
        assert_eq!(entry.key, [&told[..0x34], &bytes("08000c009b458e66")].concat());
        for led in [1 << 1, 1 << 5] {
            assert!(!Entry { status: entry.status | led, ..Entry::read(&told).unwrap() }.is_pending());
        }
        assert!(!Entry { state: 3, ..entry }.is_pending(), "it is established");
    }

    proptest! {
        #[test]
        fn whatever_is_told_is_no_panic(told in proptest::collection::vec(any::<u8>(), 0..300)) {
            Entry::read(&told);
        }

        #[test]
        fn what_is_cut_short_names_nothing_else(len in 0_usize..208) {
            let told = bytes(UNANSWERED);
            let cut = Entry::read(&told[..len.min(told.len())]);
            prop_assert!(cut.is_none_or(|cut| cut.port == 10250));
        }
    }
}
