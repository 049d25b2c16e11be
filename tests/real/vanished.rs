//! Clients on machines that vanish while bytes to them are in flight, and a client that only pauses.
//!
//! The kernel sends no keepalive probes then. The copying runs on one machine in a process of its own, with sockets
//! whose keepalive settings are short, so that the test does not take minutes.

use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep};
use tunnel::session_io::copy::{CopyEnd, EndKind, Side, copy_bidirectional};
use tunnel_net::keepalive::Keepalive;
use tunnel_net::listen::tune;
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::Socket;

use crate::network::Machine;
use crate::parts::{are_installed, is_root};
use crate::process::Running;

#[test]
fn a_client_that_vanishes_with_bytes_in_flight_is_noticed_and_a_paused_reader_stays() {
    if !are_installed(&["ip", "nsenter", "unshare", "bash"]) || !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (server, vanishing, pausing) = (Machine::new(), Machine::new(), Machine::new());
    for (machine, number) in [(&vanishing, 1), (&pausing, 2)] {
        server.cable(
            (&format!("m{number}"), &format!("10.79.{number}.1/24")),
            machine,
            ("wan", &format!("10.79.{number}.2/24")),
        );
    }
    let mut inside = server.command(std::env::current_exe().unwrap());
    inside.args(["--exact", "vanished::inside", "--ignored", "--nocapture"]);
    let mut inside = Running::start("inside", dir.path(), &mut inside);
    inside.wait_for_log("listening");
    let client = |machine: &Machine, number: u8, work: &str, then: &str| {
        let line = format!("exec 3<>/dev/tcp/10.79.{number}.1/7; echo {work} >&3; {then}");
        Running::start(work, dir.path(), machine.command("bash").args(["-c", &line]))
    };
    let _clients = [
        client(&vanishing, 1, "download", "exec cat <&3 >/dev/null"),
        client(&vanishing, 1, "trickle", "exec cat <&3 >/dev/null"),
        client(&vanishing, 1, "stalled", "exec sleep 1000"),
        client(&pausing, 2, "paused", "exec sleep 1000"),
    ];
    for work in ["download", "trickle", "stalled", "paused"] {
        inside.wait_for_log(&format!("copying for {work}"));
    }
    // Its window is closed by then.
    inside.wait_for_log("blocked for stalled");
    inside.wait_for_log("blocked for paused");
    vanishing.sh("ip link set wan down");
    for work in ["download", "trickle", "stalled"] {
        inside.wait_for_log(&format!("{work} has vanished"));
    }
    inside.wait_for_log("paused has stayed");
}

/// Copies to each client until it is noticed as lost. The first line of a client is the kind of its work.
#[test]
#[ignore = "part of the other test, which runs it on a machine of its own"]
fn inside() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let tasks = LocalSet::new();
    runtime.block_on(tasks.run_until(async {
        let listener = TcpListener::bind("0.0.0.0:7").await.unwrap();
        print_line("listening");
        loop {
            let (client, _) = listener.accept().await.unwrap();
            tokio::task::spawn_local(copy(client));
        }
    }));
}

async fn copy(client: TcpStream) {
    let socket = SockRef::from(&client);
    tune(&socket).unwrap();
    KEEPALIVE.set(&socket).unwrap();
    let mut client = BufReader::new(client);
    let mut work = String::new();
    client.read_line(&mut work).await.unwrap();
    let work = work.trim();
    let (target, session) = duplex(64 * 1024);
    let feed = tokio::task::spawn_local(feed(target, work.to_owned()));
    let mut socket = Socket::new(client.into_inner(), BufferPool::new());
    let mut session = Socket::new(session, BufferPool::new());
    print_line(&format!("copying for {work}"));
    let stays = sleep(if work == "paused" { 3 * LIMIT } else { Duration::MAX });
    tokio::select! {
        ended = copy_bidirectional(&mut socket, &mut session) => {
            let lost = CopyEnd { by: Side::A, how: EndKind::WriteFailed(std::io::ErrorKind::TimedOut) };
            assert_eq!(ended, lost, "{work}");
            print_line(&format!("{work} has vanished"));
        }
        () = stays => print_line(&format!("{work} has stayed")),
    }
    feed.abort();
}

/// Sends as much as there is room for, or for a trickle some bytes now and then.
async fn feed(mut target: DuplexStream, work: String) {
    let mut blocked = false;
    loop {
        let piece = if work == "trickle" { &[7; 10][..] } else { &[7; 64 * 1024] };
        let started = Instant::now();
        let write = tokio::time::timeout(BLOCKED, target.write_all(piece)).await;
        if write.is_err() && !std::mem::replace(&mut blocked, true) {
            print_line(&format!("blocked for {work}, {:?}", started.elapsed()));
        }
        if work == "trickle" {
            sleep(Duration::from_millis(500)).await;
        }
    }
}

#[expect(clippy::print_stdout, reason = "the test that runs this program reads it")]
fn print_line(text: &str) {
    println!("{text}");
}

/// Settings with a limit of [`LIMIT`].
const KEEPALIVE: Keepalive =
    Keepalive { time: Duration::from_secs(1), interval: Duration::from_secs(1), attempts: 2 };
const LIMIT: Duration = Duration::from_secs(3);
/// Time after which a write without progress shows that the window is closed.
const BLOCKED: Duration = Duration::from_millis(500);
