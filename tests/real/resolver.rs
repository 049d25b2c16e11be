//! Names resolve as by the C library, over a table of `resolv.conf` and hosts files.

use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::process::Command;

use hickory_resolver::proto::op::{Message, ResponseCode};
use hickory_resolver::proto::rr::rdata::A;
use hickory_resolver::proto::rr::{RData, Record, RecordType};
use tunnel_net::resolver::Resolver;

use crate::parts::{are_installed, env_var, is_root};
use crate::process::{TIMEOUT, run, run_command};
use crate::tunnel::TestDir;

/// How each DNS server answers: the last byte of 127.0.0.0/24, and the codes for A and AAAA; `None` is silence. With
/// NoError it has an address for each name below `x.test`.
const SERVERS: [(u8, Option<ResponseCode>, Option<ResponseCode>); 6] = [
    (1, Some(ResponseCode::NoError), Some(ResponseCode::NoError)),
    (2, Some(ResponseCode::NXDomain), Some(ResponseCode::NXDomain)),
    (3, Some(ResponseCode::ServFail), Some(ResponseCode::ServFail)),
    (4, Some(ResponseCode::Refused), Some(ResponseCode::Refused)),
    (5, None, None),
    (6, Some(ResponseCode::NoError), None),
];

/// Numbers of the servers in the file's order, more lines of it, and a name.
const CASES: [(&[u8], &str, &str); 18] = [
    (&[1], "", "a.x.test"),
    (&[1, 2], "", "a.x.test"),
    (&[1, 3], "", "a.x.test"),
    (&[2, 1], "", "a.x.test"),
    (&[3, 1], "", "a.x.test"),
    (&[4, 1], "", "a.x.test"),
    (&[5, 1], "", "a.x.test"),
    (&[3, 4, 1], "", "a.x.test"),
    (&[3, 4], "", "a.x.test"),
    (&[6], "", "a.x.test"),
    (&[], "", "a.x.test"),
    (&[1], "search y.test x.test", "a"),
    (&[1], "search y.test x.test", "b.c"),
    (&[1], "search x.test y..test", "a"),
    (&[1], "search y.test\ndomain x.test", "a"),
    (&[1], "search x.test\ndomain y.test", "a"),
    (&[1], "options ndots:3\nsearch z x.test", "b.c"),
    (&[1, 9], "nonsense\nnameserver nonsense", "a.x.test"),
];

/// Names in the hosts file, and some that it lacks.
const HOSTS: &str = "# 192.0.2.1 comment\n192.0.2.2\tOne one.test # none\n192.0.2.3 two\n2001:db8::3 two\n\
                     2001:db8::4 six\nnonsense four\n192.0.2.5 a.x.test\n192.0.2.6 last";
const NAMES_IN_HOSTS: [&str; 9] =
    ["one", "ONE.test", "two", "six", "none", "comment", "four", "a.x.test", "last"];

/// Set in the process that has a network and mounts of its own.
const INSIDE: &str = "TUNNEL_TEST_INSIDE";

#[test]
fn names_resolve_as_by_the_c_library() {
    if !is_root() || !are_installed(&["getent", "unshare", "ip", "mount"]) {
        return;
    }
    if env_var(INSIDE).is_none() {
        let mut again = Command::new("unshare");
        again.args(["--net", "--mount"]).arg(std::env::current_exe().unwrap());
        again
            .args(["--exact", "resolver::names_resolve_as_by_the_c_library", "--nocapture"])
            .env(INSIDE, "1");
        let output = run_command("unshare", &mut again, None, 6 * TIMEOUT);
        assert!(output.status.success() && output.stdout.contains(" 1 passed"), "{output:?}");
        return;
    }
    let place = TestDir::new();
    let file = |name: &str, text: &str| std::fs::write(place.path().join(name), text).unwrap();
    file("nsswitch.conf", "hosts: files dns\n");
    file("resolv.conf", "");
    file("hosts", "");
    let mut line = "ip link set lo up".to_owned();
    for name in ["nsswitch.conf", "resolv.conf", "hosts"] {
        line += &format!(
            " && touch /etc/{name} && mount --bind {} /etc/{name}",
            place.path().join(name).display()
        );
    }
    let output = run("sh", &["-c", &line], None, TIMEOUT);
    assert!(output.status.success(), "{output:?}");
    SERVERS.iter().for_each(|server| serve(*server));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let check = |name: &str, case: &str| {
        let resolver = Resolver::system();
        let found = runtime.block_on(resolver.lookup(name)).unwrap_or_default();
        let ours: BTreeSet<_> = found.iter().map(ToString::to_string).collect();
        let text = run("getent", &["ahosts", name], None, TIMEOUT).stdout;
        let theirs: BTreeSet<_> =
            text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
        assert_eq!(ours, theirs, "{case}: {name}");
        !ours.is_empty()
    };
    let mut found = 0;
    for (servers, more, name) in CASES {
        let lines: String = servers.iter().map(|number| format!("nameserver 127.0.0.{number}\n")).collect();
        let text = format!("{lines}options timeout:1 attempts:1\n{more}\n");
        file("resolv.conf", &text);
        found += usize::from(check(name, &text));
    }
    assert!(found >= 13, "only {found} were found at all");
    file("resolv.conf", "nameserver 127.0.0.2\n");
    file("hosts", HOSTS);
    for name in NAMES_IN_HOSTS {
        check(name, "hosts");
    }
}

/// Starts one of the servers, in a thread that ends with this process.
fn serve((number, ipv4, ipv6): (u8, Option<ResponseCode>, Option<ResponseCode>)) {
    let socket = UdpSocket::bind((std::net::Ipv4Addr::new(127, 0, 0, number), 53)).unwrap();
    std::thread::spawn(move || {
        let mut space = [0; 1500];
        loop {
            let (length, from) = socket.recv_from(&mut space).unwrap();
            let question = Message::from_vec(&space[..length]).unwrap();
            let query = &question.queries[0];
            let is_ipv4 = query.query_type() == RecordType::A;
            let Some(code) = (if is_ipv4 { ipv4 } else { ipv6 }) else { continue };
            let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
            answer.metadata.recursion_available = true;
            answer.add_query(query.clone());
            let has_name = query.name().to_ascii().to_lowercase().ends_with(".x.test.");
            answer.metadata.response_code = code;
            if code == ResponseCode::NoError && !has_name {
                answer.metadata.response_code = ResponseCode::NXDomain;
            } else if code == ResponseCode::NoError && is_ipv4 {
                let address = RData::A(A::new(10, 0, 0, number));
                answer.add_answer(Record::from_rdata(query.name().clone(), 60, address));
            }
            socket.send_to(&answer.to_vec().unwrap(), from).unwrap();
        }
    });
}
