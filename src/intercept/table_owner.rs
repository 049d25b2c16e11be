//! Ownership of a table. Next to it is an empty table that the kernel reserves for one socket
//! (`NFT_TABLE_F_OWNER`). The kernel lets no other process change it, and deletes it with that socket, however the
//! process ends. The table belongs to the network namespace, so servers with separate process IDs and files see
//! each other's table. Creating it requires CAP_NET_ADMIN there.
//!
//! Uses netlink directly, as the socket must stay open, and nft's closes with nft.

use std::io::{self, Read as _};

use socket2::Socket;

use crate::intercept::InterceptError;
use crate::intercept::netfilter::{NETLINK_NETFILTER, message};
use tunnel_net::os::netlink::{self, attribute};

/// While it exists, marks a table's name as owned by this process.
#[derive(Debug)]
pub(crate) struct TableOwner {
    /// The netlink socket that owns the kernel's marker table, which the kernel deletes with it.
    _kernel: Socket,
}

impl TableOwner {
    /// Becomes the owner of the table with this name.
    ///
    /// # Errors
    ///
    /// Returns [`InterceptError::Owned`], [`InterceptError::Denied`], or another error if the kernel cannot do it.
    pub(crate) fn of(table: &str) -> Result<Self, InterceptError> {
        let mut kernel = netlink::open(NETLINK_NETFILTER).map_err(|cause| failed(&cause))?;
        kernel.send(&batch(&format!("{table}-owner"))).map_err(|cause| failed(&cause))?;
        let mut room = [0; OWNER_BUFFER_SIZE];
        // The kernel has responded before `send` returns.
        let len = kernel.read(&mut room).map_err(|cause| failed(&cause))?;
        check_response(room.get(..len).unwrap_or_default(), table)?;
        Ok(Self { _kernel: kernel })
    }
}

/// Returns an error unless the kernel responds that the marker table was created.
fn check_response(answer: &[u8], table: &str) -> Result<(), InterceptError> {
    let cause = netlink::error(answer);
    match (cause.raw_os_error(), answer.get(8..12)) {
        (Some(0), _) => Ok(()),
        // The whole batch was refused, as the process may not change this network.
        (Some(EPERM), Some(number)) if *number == BEGIN.to_ne_bytes() => Err(InterceptError::Denied),
        (Some(EPERM | EEXIST), _) => Err(InterceptError::Owned(table.to_owned())),
        (Some(EOPNOTSUPP) | None, _) => Err(InterceptError::KernelTooOld),
        (Some(_), _) => Err(failed(&cause)),
    }
}

fn failed(cause: &io::Error) -> InterceptError {
    InterceptError::Failed(format!("cannot query the kernel: {cause}"))
}

/// Builds a transaction that creates a table with an owner, unless a table with that name exists.
fn batch(table: &str) -> Vec<u8> {
    let name = [table.as_bytes(), &[0]].concat();
    let attributes = [attribute(NFTA_TABLE_NAME, &name), attribute(NFTA_TABLE_FLAGS, &OWNER.to_be_bytes())];
    let table = NLM_F_ACK | NLM_F_EXCL | NLM_F_CREATE;
    [
        message(NFNL_MSG_BATCH_BEGIN, 0, BEGIN, 0, NFTABLES, &[]),
        message(NFTABLES << 8, table, MAKE, NFPROTO_INET, 0, &attributes.concat()),
        message(NFNL_MSG_BATCH_END, 0, END, 0, NFTABLES, &[]),
    ]
    .concat()
}

const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
/// The nftables subsystem; its first message type creates a table.
const NFTABLES: u16 = 10;
const NFPROTO_INET: u8 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_TABLE_FLAGS: u16 = 2;
const OWNER: u32 = 2;
const EPERM: i32 = 1;
const EEXIST: i32 = 17;
const EOPNOTSUPP: i32 = 95;
/// Sequence numbers of the three messages, which the kernel's response repeats.
const BEGIN: u32 = 1;
const MAKE: u32 = 2;
const END: u32 = 3;
/// More than the length of a response in bytes.
const OWNER_BUFFER_SIZE: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(number: u32, code: i32) -> Vec<u8> {
        let mut answer = 36_u32.to_ne_bytes().to_vec();
        answer.extend(2_u16.to_ne_bytes());
        answer.extend([0, 0]);
        answer.extend(number.to_ne_bytes());
        answer.extend([0; 4]);
        answer.extend((-code).to_ne_bytes());
        answer.resize(36, 0);
        answer
    }

    #[test]
    fn missing_privileges_are_distinguished_from_a_refused_table() {
        let check = |answer: &[u8]| check_response(answer, "t");
        assert!(check(&answer(MAKE, 0)).is_ok());
        assert!(matches!(check(&answer(BEGIN, EPERM)), Err(InterceptError::Denied)));
        for code in [EPERM, EEXIST] {
            assert!(matches!(check(&answer(MAKE, code)), Err(InterceptError::Owned(_))));
        }
        assert!(matches!(check(&answer(MAKE, EOPNOTSUPP)), Err(InterceptError::KernelTooOld)));
        assert!(check(&[]).is_err(), "without a response there is no ownership");
    }

    #[test]
    fn the_owned_table_is_created_in_one_transaction() {
        let batch = batch("t-owner");
        let lengths: Vec<_> =
            netlink::messages(&batch).map(|(kind, message)| (kind, message.len())).collect();
        assert_eq!(lengths, [(16, 20), (0xa00, 40), (17, 20)]);
        assert_eq!(batch[40..60], *b"\x0c\0\x01\0t-owner\0\x08\0\x02\0\0\0\0\x02");
    }
}
