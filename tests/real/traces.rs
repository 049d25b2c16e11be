//! One session is traced through the logs of its servers and its edge, by the first eight digits of its ID.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use crate::fleet::{Fleet, Line};
use crate::parts::loopback;
use crate::process::{Running, TIMEOUT};

#[test]
fn one_session_is_traced_through_all_logs_by_the_digits_of_its_id() {
    let mut fleet = Fleet::start("");
    let line = Line::to(fleet.at[1]);
    let mut edge = fleet.node(&line, 1);
    let mut client = connect(fleet.servers[0].connect, &format!("node1:{}", echo()));
    repeats(&mut client, b"before");
    line.lead_to(fleet.at[2]);
    line.reset();
    repeats(&mut client, b"after");
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.read_to_end(&mut Vec::new()).unwrap(), 0);

    let access = fleet.servers[0].process.wait_for_log("access: listener=\"connect\"");
    assert!(access.contains(" bytes_to_target=11 bytes_to_client=11 duration_seconds="), "{access}");
    assert!(access.contains(" resume_count=1 status=200 result=\"ok\""), "{access}");
    let (_, id) = access.rsplit_once(" session=").unwrap();
    let id = id.get(..8).unwrap();
    let [opener, first, second] = &mut fleet.servers[..] else { panic!("three servers") };
    assert_log_story(
        &mut opener.process,
        id,
        &[
            "session created",
            "opening session",
            "session opened",
            "session lost its path",
            "resuming session",
            "session resumed",
            "closing session",
            "session closed",
        ],
    );
    assert_log_story(
        &mut first.process,
        id,
        &[
            "searching path for relayed session",
            "relaying session",
            "relayed session answered by acceptor",
            "relay released, link ended",
        ],
    );
    assert_log_story(
        &mut second.process,
        id,
        &[
            "searching path for relayed session",
            "relaying session",
            "relayed session answered by acceptor",
            "relay released",
        ],
    );
    assert_log_story(
        &mut edge.process,
        id,
        &["session created", "session opened", "session lost its path", "session resumed", "session closed"],
    );
    let access = edge.process.wait_for_log("access: listener=\"acceptor\"");
    assert!(access.contains(&format!(" session={id} ")), "{access}");
    for log in [opener.process.log(), first.process.log(), second.process.log(), edge.process.log()] {
        for line in log.lines().filter(|line| line.contains(" tunnel")) {
            assert!(!["Some(", "Extended(", "docs.rs"].iter().any(|ugly| line.contains(ugly)), "{line}");
        }
    }
}

/// Waits until the log contains all of these messages for a session, and fails the test unless they are in this
/// order, each with its fields.
fn assert_log_story(process: &mut Running, id: &str, story: &[&str]) {
    process.wait_for_log_of(id, story[story.len() - 1]);
    let log = process.log();
    let of_protocol = |line: &&str| line.contains(" tunnel_link::") && line.contains(id);
    let lines: Vec<_> = log.lines().filter(of_protocol).collect();
    let matching: Vec<_> = lines.iter().filter(|line| story.iter().any(|what| line.contains(what))).collect();
    let mut rest = lines.iter();
    for what in story {
        let line =
            rest.find(|line| line.contains(what)).unwrap_or_else(|| panic!("{what:?} in {matching:#?}"));
        for field in [&format!(" session={id} "), " epoch=", " node=node1"] {
            assert!(line.contains(field), "{field:?} in {line}");
        }
        assert!(line.contains(" link=") || *what == "session created", "{line}");
    }
}

/// Starts a target that echoes its input, and returns its port.
fn echo() -> u16 {
    let listener = TcpListener::bind(loopback(0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut back = client.try_clone().unwrap();
        std::io::copy(&mut client, &mut back).unwrap();
        back.shutdown(Shutdown::Write).unwrap();
    });
    port
}

/// Opens a session through a server's CONNECT port.
fn connect(port: u16, target: &str) -> TcpStream {
    let mut client = TcpStream::connect(loopback(port)).unwrap();
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(client, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        head.extend_from_slice(&byte);
    }
    assert!(head.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&head));
    client
}

fn repeats(client: &mut TcpStream, bytes: &[u8]) {
    client.write_all(bytes).unwrap();
    let mut back = vec![0; bytes.len()];
    client.read_exact(&mut back).unwrap();
    assert_eq!(back, bytes);
}
