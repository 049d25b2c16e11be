//! The congestion control with which the kernel sends an interactive link.

use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;

use socket2::{Domain, Protocol, Socket, Type};
use tunnel_net::listen::try_congestion;

use super::{ALLOW, PROXY, World, assert_all_finish, wait_for_sessions_on_links};
use crate::support::programs::TestDir;
use crate::support::talk::ExchangeMode;
use crate::support::wait_until;

#[tokio::test]
async fn an_interactive_link_always_uses_cubic_or_reno_at_both_ends() {
    let usable = |name: &&str| try_congestion(name).is_ok();
    let configured = ["bbr", "reno"].into_iter().find(usable).unwrap();
    let interactive = ["cubic", "reno"].into_iter().find(usable).unwrap();
    let place = TestDir::new();
    let (key, table) = (format!("congestion = \"{configured}\"\n"), "[server.links]\n");
    let server = place.cloud(ALLOW).replace(table, &format!("{table}{key}"));
    let world = World::of(place, &server, &format!("{key}{PROXY}")).await;
    let (at_server, at_edge) = (world.server.server.bound.grpc.port(), world.line.at.port());
    // Congestion controls of the server's sockets, and of the edge's.
    let both = || [congestion(|near, _| near == at_server), congestion(|_, far| far == at_edge)];
    // A single look may find another number: the kernel lists its sockets in parts while tests open and close others,
    // and a handshake that is slow on a busy machine is made again next to the first.
    wait_until("both ends have the configured one", || both() == [[configured], [configured]]).await;
    let (bulk, typed) =
        (world.exchange(ExchangeMode::Bulk).await, world.exchange(ExchangeMode::Keystrokes).await);
    wait_for_sessions_on_links(&world.server, 1, 1).await;
    let mut expected = [configured, interactive];
    expected.sort_unstable();
    wait_until("both ends have chosen", || both() == [expected, expected]).await;
    assert_all_finish([bulk, typed]).await;
}

/// Returns the congestion controls of the established loopback connections with a local and a remote port that are
/// wanted.
fn congestion(selects: impl Fn(u16, u16) -> bool) -> Vec<String> {
    let kernel = Socket::new(Domain::from(16), Type::DGRAM, Some(Protocol::from(4))).unwrap();
    // `nlmsghdr`, then `inet_diag_req_v2`: a dump of TCP's established sockets over IPv4, each with INET_DIAG_CONG.
    let mut question = [0; 72];
    question[..4].copy_from_slice(&72u32.to_ne_bytes());
    question[4..6].copy_from_slice(&20u16.to_ne_bytes());
    question[6..8].copy_from_slice(&0x301u16.to_ne_bytes());
    question[16..20].copy_from_slice(&[2, 6, 1 << 3, 0]);
    question[20..24].copy_from_slice(&2u32.to_ne_bytes());
    (&kernel).write_all(&question).unwrap();
    let (mut found, mut room) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let len = (&kernel).read(&mut room).unwrap();
        let mut messages = &room[..len];
        while !messages.is_empty() {
            let (len, kind) = (u32::from_ne_bytes(messages[..4].try_into().unwrap()), messages[4]);
            if kind != 20 {
                found.sort_unstable();
                return found;
            }
            let (message, rest) = messages.split_at(len as usize);
            let port = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
            let loopback = message[24..28] == Ipv4Addr::LOCALHOST.octets();
            if loopback && selects(port(20), port(22)) {
                found.push(name(&message[88..]));
            }
            messages = rest;
        }
    }
}

/// Returns the text of the attribute INET_DIAG_CONG of one socket.
fn name(mut attributes: &[u8]) -> String {
    loop {
        let half = |at: usize| u16::from_ne_bytes([attributes[at], attributes[at + 1]]);
        let len = usize::from(half(0));
        if half(2) == 4 {
            return String::from_utf8(attributes[4..len - 1].to_vec()).unwrap();
        }
        attributes = &attributes[len.next_multiple_of(4)..];
    }
}
