//! Netlink messages to the kernel's netfilter.

use tunnel_net::os::netlink;

/// Builds a request with its `number`. Its body is `struct nfgenmsg` with the family and resource ID, then attributes.
pub(crate) fn message(kind: u16, flags: u16, number: u32, family: u8, of: u16, attributes: &[u8]) -> Vec<u8> {
    let body = [&[family, 0][..], &of.to_be_bytes(), attributes].concat();
    netlink::request(kind, flags, number, &body)
}

pub(crate) const NETLINK_NETFILTER: i32 = 12;
/// Length of both headers of a message in bytes.
pub(super) const HEADERS_LEN: usize = netlink::HEADER_LEN + 4;
