//! Messages to and from the kernel over netlink: headers, attributes, dumps and errors.

use std::io::{self, Read as _};
use std::iter;

use socket2::{Domain, Protocol, Socket, Type};

/// Opens a non-blocking socket to the kernel for one netlink protocol.
///
/// # Errors
///
/// The system does not support it, or there are too many open files.
pub fn open(protocol: i32) -> io::Result<Socket> {
    let kernel = Socket::new(Domain::from(AF_NETLINK), Type::DGRAM, Some(Protocol::from(protocol)))?;
    kernel.set_nonblocking(true)?;
    Ok(kernel)
}

/// Builds a request: `struct nlmsghdr` with this type, these flags and this sequence number, then the body.
pub fn request(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(HEADER_LEN + body.len()).unwrap_or_default();
    let kind = kind.to_ne_bytes();
    let flags = (NLM_F_REQUEST | flags).to_ne_bytes();
    [&len.to_ne_bytes()[..], &kind, &flags, &sequence.to_ne_bytes(), &[0; 4], body].concat()
}

/// Builds an attribute with its value and padding.
pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + value.len()).unwrap_or_default();
    let mut attribute = [&len.to_ne_bytes(), &kind.to_ne_bytes(), value].concat();
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

/// Reads one part of a dump into `room`, and calls `each` with each of its messages, header included. Returns false
/// after the last part.
///
/// The first part is ready when the request was sent, and each read makes the kernel write the next one.
///
/// # Errors
///
/// The kernel reports an error instead.
pub fn read_dump(mut kernel: &Socket, room: &mut [u8], mut each: impl FnMut(&[u8])) -> io::Result<bool> {
    let len = kernel.read(room)?;
    for (kind, message) in messages(room.get(..len).unwrap_or_default()) {
        match kind {
            NLMSG_DONE => return Ok(false),
            NLMSG_ERROR => return Err(error(message)),
            _ => each(message),
        }
    }
    Ok(true)
}

/// Returns each message: its type, and all its bytes including the header. Ends at the first invalid one.
pub fn messages(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    iter::from_fn(move || {
        let len = usize::try_from(u32_at(rest, 0)?).ok().filter(|len| *len >= HEADER_LEN)?;
        let message = (kind(rest)?, rest.get(..len)?);
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// Returns the type of a message.
pub fn kind(message: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(message.get(4..6)?.try_into().ok()?))
}

/// Returns the error in a message.
pub fn error(message: &[u8]) -> io::Error {
    match u32_at(message, HEADER_LEN) {
        // Errors are reported negated.
        Some(code) if kind(message) == Some(NLMSG_ERROR) => {
            io::Error::from_raw_os_error(code.cast_signed().saturating_neg())
        }
        _ => io::ErrorKind::InvalidData.into(),
    }
}

/// Returns the value of one of several attributes.
pub fn find(attributes: &[u8], expected_kind: u16) -> Option<&[u8]> {
    split(attributes).find(|(kind, ..)| *kind == expected_kind).map(|(_, value, _)| value)
}

/// Returns each attribute: its kind, its value, and all its bytes including the padding.
pub fn split(attributes: &[u8]) -> impl Iterator<Item = (u16, &[u8], &[u8])> {
    let mut rest = attributes;
    iter::from_fn(move || {
        let half = |at: usize| Some(u16::from_ne_bytes(rest.get(at..at + 2)?.try_into().ok()?));
        let len = usize::from(half(0)?);
        let kind = half(2)? & KIND;
        let value = rest.get(4..len)?;
        let (whole, left) = rest.split_at_checked(len.next_multiple_of(4)).unwrap_or((rest, &[]));
        rest = left;
        Some((kind, value, whole))
    })
}

/// Returns the number in host byte order at this offset.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Flags of a request for a list.
pub const NLM_F_DUMP: u16 = 0x300;
/// The family of IPv4 addresses.
pub const AF_INET: u8 = 2;
/// The family of IPv6 addresses.
pub const AF_INET6: u8 = 10;
/// The length of `struct nlmsghdr`.
pub const HEADER_LEN: usize = 16;
/// Larger than what the kernel writes of a dump at once.
pub const DUMP_ROOM: usize = 64 * 1024;

const AF_NETLINK: i32 = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
/// Mask of an attribute's kind, without flags.
const KIND: u16 = 0x3fff;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_without_an_error_code_is_invalid() {
        for len in 0..200 {
            assert_eq!(error(&vec![20; len]).kind(), io::ErrorKind::InvalidData);
        }
        let refused = request(NLMSG_ERROR, 0, 0, &(-95i32).to_ne_bytes());
        assert_eq!(error(&refused).raw_os_error(), Some(95));
    }

    #[test]
    fn messages_end_at_the_first_invalid_one() {
        let first = request(1, 0, 0, &attribute(7, b"value"));
        let kinds = |bytes: &[u8]| messages(bytes).map(|(kind, _)| kind).collect::<Vec<_>>();
        assert_eq!(kinds(&[&first[..], &request(2, 0, 0, &[]), &[0; 64]].concat()), [1, 2]);
        assert_eq!(kinds(&first[..first.len() - 1]), [0; 0]);
    }
}
