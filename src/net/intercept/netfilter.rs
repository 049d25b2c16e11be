//! Messages to the kernel's netfilter, as netlink has them.

/// `struct nlmsghdr` of a request with its `number`, then `struct nfgenmsg` with its family and what is asked, then
/// attributes.
pub(super) fn message(
    kind: u16,
    flags: u16,
    number: u32,
    (family, of): (u8, u16),
    attributes: &[u8],
) -> Vec<u8> {
    let mut message = u32::try_from(HEADS + attributes.len()).unwrap_or_default().to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    message.extend(number.to_ne_bytes());
    message.extend([0, 0, 0, 0, family, 0]);
    message.extend(of.to_be_bytes());
    message.extend(attributes);
    message
}

/// An attribute with its value, and the bytes that fill it up.
pub(super) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + value.len()).unwrap_or_default();
    let mut attribute = [&len.to_ne_bytes(), &kind.to_ne_bytes(), value].concat();
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

/// The protocol of netlink.
pub(super) const NETLINK_NETFILTER: i32 = 12;
/// Both headers of a message.
pub(super) const HEADS: usize = 20;
const NLM_F_REQUEST: u16 = 1;
