//! Connections opened before their target was intercepted. Connection tracking keeps the decision made for the
//! first packet, so a client with an unanswered SYN would wait until its timeout. Once such an entry is deleted,
//! the client's next SYN is evaluated again.
//!
//! Uses netlink (`ctnetlink`) directly, as a machine with nft need not have the conntrack program.

use std::io;
use std::net::IpAddr;

use socket2::Socket;
use tokio::task::yield_now;

use crate::intercept::netfilter::{HEADERS_LEN, NETLINK_NETFILTER, message};
use crate::intercept::rules::InterceptSets;
use tunnel_net::os::netlink::{self, AF_INET, AF_INET6, attribute, find, split};

/// Deletes connection tracking entries of unanswered connections to these nodes and ports that are not redirected yet.
/// Returns their number.
///
/// # Errors
///
/// Fails if the kernel does not track connections, or if this process may not change that.
pub(crate) async fn delete_pending_connections(of: &InterceptSets) -> io::Result<usize> {
    // Errors about entries that no longer exist are not read.
    let dump = netlink::open(NETLINK_NETFILTER)?;
    let delete_socket = netlink::open(NETLINK_NETFILTER)?;
    let mut forgotten = 0;
    for family in [AF_INET, AF_INET6] {
        if !of.nodes.iter().any(|ip| ip.is_ipv4() == (family == AF_INET)) {
            continue;
        }
        let pending = pending(&dump, family, of).await?;
        for entry in &pending {
            delete_socket.send(&message(CT_DELETE, 0, 0, family, 0, entry))?;
        }
        forgotten += pending.len();
    }
    Ok(forgotten)
}

/// Returns the attributes that identify each such connection to the kernel.
async fn pending(kernel: &Socket, family: u8, of: &InterceptSets) -> io::Result<Vec<Vec<u8>>> {
    // Requests only connections neither answered nor redirected; older kernels return all.
    let request_filter =
        [attribute(CTA_STATUS, &[0; 4]), attribute(CTA_STATUS_MASK, &REPLIED_OR_DNAT.to_be_bytes())].concat();
    kernel.send(&message(CT_GET, netlink::NLM_F_DUMP, 0, family, 0, &request_filter))?;
    let mut room = vec![0; netlink::DUMP_ROOM];
    let mut found = Vec::new();
    let mut each = |message: &[u8]| {
        let entry = message.get(HEADERS_LEN..).and_then(ConntrackEntry::read);
        let entry = entry.filter(|entry| of.nodes.contains(&entry.to) && of.ports.contains(&entry.port));
        found.extend(entry.filter(ConntrackEntry::is_pending).map(|entry| entry.key));
    };
    while netlink::read_dump(kernel, &mut room, &mut each)? {
        // There may be many entries, and other tasks wait for this thread.
        yield_now().await;
    }
    Ok(found)
}

/// A TCP connection in the kernel's connection tracking.
#[derive(Debug, PartialEq, Eq)]
struct ConntrackEntry {
    /// Destination of its first packet.
    to: IpAddr,
    port: u16,
    status: u32,
    state: u8,
    /// Attributes that identify the connection.
    key: Vec<u8>,
}

impl ConntrackEntry {
    /// Parses an entry. Returns `None` if it is not TCP or incomplete.
    fn read(attributes: &[u8]) -> Option<Self> {
        let tuple = find(attributes, CTA_TUPLE_ORIG)?;
        let ip = find(tuple, CTA_TUPLE_IP)?;
        let protocol = find(tuple, CTA_TUPLE_PROTO)?;
        let to = match find(ip, CTA_IP_V4_DST) {
            Some(v4) => IpAddr::from(<[u8; 4]>::try_from(v4).ok()?),
            None => IpAddr::from(<[u8; 16]>::try_from(find(ip, CTA_IP_V6_DST)?).ok()?),
        };
        let port = u16::from_be_bytes(find(protocol, CTA_PROTO_DST_PORT)?.try_into().ok()?);
        let tcp = find(find(attributes, CTA_PROTOINFO)?, CTA_PROTOINFO_TCP)?;
        let state = *find(tcp, CTA_PROTOINFO_TCP_STATE)?.first()?;
        let status = u32::from_be_bytes(find(attributes, CTA_STATUS)?.try_into().ok()?);
        let naming = [CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE];
        let named = split(attributes).filter(|(kind, ..)| naming.contains(kind));
        let key = named.flat_map(|(.., whole)| whole.iter().copied()).collect();
        Some(Self { to, port, status, state, key })
    }

    fn is_pending(&self) -> bool {
        self.state == SYN_SENT && self.status & REPLIED_OR_DNAT == 0
    }
}

/// Message types of the connection tracking subsystem: list connections, delete one.
const CT_GET: u16 = 1 << 8 | 1;
const CT_DELETE: u16 = 1 << 8 | 2;
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
/// Status bits: a reply was seen, or the destination was changed.
const REPLIED_OR_DNAT: u32 = 1 << 1 | 1 << 5;
/// State of a connection whose SYN is unanswered.
const SYN_SENT: u8 = 1;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The kernel's report of an unanswered connection from 10.99.0.1 to 10.99.0.8:10250.
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
    fn an_unanswered_connection_is_pending_and_a_translated_one_is_not() {
        let message_bytes = bytes(UNANSWERED);
        let entry = ConntrackEntry::read(&message_bytes).unwrap();
        assert_eq!((entry.to, entry.port), ([10, 99, 0, 8].into(), 10250));
        assert!(entry.is_pending());
        // Identified by its source, its destination and its ID.
        assert_eq!(entry.key, [&message_bytes[..0x34], &bytes("08000c009b458e66")].concat());
        for led in [1 << 1, 1 << 5] {
            assert!(
                !ConntrackEntry {
                    status: entry.status | led,
                    ..ConntrackEntry::read(&message_bytes).unwrap()
                }
                .is_pending()
            );
        }
        assert!(!ConntrackEntry { state: 3, ..entry }.is_pending(), "it is established");
    }

    proptest! {
        #[test]
        fn no_conntrack_message_makes_the_parser_panic(message_bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            ConntrackEntry::read(&message_bytes);
        }

        #[test]
        fn a_truncated_conntrack_message_yields_no_other_port(len in 0_usize..208) {
            let message_bytes = bytes(UNANSWERED);
            let cut = ConntrackEntry::read(&message_bytes[..len.min(message_bytes.len())]);
            prop_assert!(cut.is_none_or(|cut| cut.port == 10250));
        }
    }
}
