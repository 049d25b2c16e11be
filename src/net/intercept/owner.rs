//! Who a table belongs to: beside it stands an empty one that the kernel keeps for one socket (`NFT_TABLE_F_OWNER`), lets
//! nobody else touch, and takes away with that socket, however its process ends. It is made in the network itself, so that
//! pods with process ids and files of their own see each other there, and it takes the right to change that network.
//!
//! Spoken with the kernel itself, as the socket has to stay, and nft's ends with nft.

use std::io::{self, Read as _};

use socket2::Socket;

use super::CatchError;
use super::netfilter::{NETLINK_NETFILTER, attribute, message};
use crate::net::diag;

/// Shows others that the owner of a table lives, as long as this value does.
#[derive(Debug)]
pub(super) struct Owner {
    _kernel: Socket,
}

impl Owner {
    /// Becomes the owner of the table of that name.
    ///
    /// # Errors
    ///
    /// [`CatchError::Owned`], [`CatchError::Denied`], or the kernel cannot do it.
    pub(super) fn of(table: &str) -> Result<Self, CatchError> {
        let failed = |cause: io::Error| CatchError::Failed(format!("the kernel does not answer: {cause}"));
        let mut kernel = diag::netlink(NETLINK_NETFILTER).map_err(failed)?;
        kernel.send(&batch(&format!("{table}-owner"))).map_err(failed)?;
        let mut room = [0; ROOM];
        // The kernel has answered before the call returns.
        let len = kernel.read(&mut room).map_err(failed)?;
        match verdict(room.get(..len).unwrap_or_default()) {
            Verdict::Made => Ok(Self { _kernel: kernel }),
            Verdict::MayNot => Err(CatchError::Denied),
            Verdict::Refused(EPERM | EEXIST) => Err(CatchError::Owned(table.to_owned())),
            Verdict::Refused(EOPNOTSUPP) => Err(CatchError::Old),
            Verdict::Refused(code) => Err(failed(io::Error::from_raw_os_error(code))),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Made,
    /// The whole batch is refused, as the process may change nothing here.
    MayNot,
    /// The table is, with this error.
    Refused(i32),
}

/// What the kernel's answer says of the table.
fn verdict(answer: &[u8]) -> Verdict {
    let code = diag::error(answer).raw_os_error();
    match (code, answer.get(8..12)) {
        (Some(0), _) => Verdict::Made,
        (Some(EPERM), Some(number)) if *number == BEGIN.to_ne_bytes() => Verdict::MayNot,
        (code, _) => Verdict::Refused(code.unwrap_or(EOPNOTSUPP)),
    }
}

/// One transaction that makes a table with an owner, unless there is one of that name.
fn batch(table: &str) -> Vec<u8> {
    let name = [table.as_bytes(), &[0]].concat();
    let attributes = [attribute(NFTA_TABLE_NAME, &name), attribute(NFTA_TABLE_FLAGS, &OWNER.to_be_bytes())];
    let table = NLM_F_ACK | NLM_F_EXCL | NLM_F_CREATE;
    [
        message(NFNL_MSG_BATCH_BEGIN, 0, BEGIN, (0, NFTABLES), &[]),
        message(NFTABLES << 8, table, MAKE, (NFPROTO_INET, 0), &attributes.concat()),
        message(NFNL_MSG_BATCH_END, 0, END, (0, NFTABLES), &[]),
    ]
    .concat()
}

const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
/// The subsystem; its first kind of message makes a table.
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
/// The numbers of the three messages, which the kernel's answer repeats.
const BEGIN: u32 = 1;
const MAKE: u32 = 2;
const END: u32 = 3;
/// More than an answer takes.
const ROOM: usize = 1024;

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
    fn who_may_change_nothing_is_told_from_who_comes_second() {
        assert_eq!(verdict(&answer(MAKE, 0)), Verdict::Made);
        assert_eq!(verdict(&answer(BEGIN, EPERM)), Verdict::MayNot);
        for code in [EPERM, EEXIST, EOPNOTSUPP] {
            assert_eq!(verdict(&answer(MAKE, code)), Verdict::Refused(code));
        }
        assert_eq!(verdict(&[]), Verdict::Refused(EOPNOTSUPP), "no answer makes no owner");
    }

    #[test]
    fn the_table_is_made_in_one_transaction() {
        let batch = batch("t-owner");
        let mut rest = &batch[..];
        let mut kinds = Vec::new();
        while let Some((len, kind)) = diag::head(rest) {
            kinds.push((kind, len));
            rest = &rest[len..];
        }
        assert_eq!(kinds, [(16, 20), (0xa00, 40), (17, 20)]);
        assert_eq!(batch[40..60], *b"\x0c\0\x01\0t-owner\0\x08\0\x02\0\0\0\0\x02");
    }
}
