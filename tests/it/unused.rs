//! Devices of users that nobody uses: they end after 90 days, like a revocation.

use std::time::Duration;

use tunnel::enrolment::store::SecretHash;
use tunnel_base::unix_time::now;

use crate::enrol::{invited, join, join_as_user, run, settings};
use crate::support::clients::get;
use crate::support::programs::{TestDir, TestServer, at, edge, start_edge};
use crate::support::sessions::assert_session_echo;
use crate::support::users::{USER_TOKEN, link, open, reset, tables};
use crate::support::{assert_eventually, servers, targets, wait_until};
use crate::words::LogLines;

/// Writes for how long each device was not used, in seconds.
fn unused(place: &TestDir, devices: [(&str, u64); 3]) {
    let machines = devices.map(|(device, seconds)| format!("\"{device}\":{{\"unused\":{seconds}}}"));
    let text = format!(
        "{{\"tokens\":{{}},\"seen\":{{\"written\":{},\"machines\":{{{}}}}}}}",
        now(),
        machines.join(",")
    );
    place.file("enrolled.seen", &text);
}

#[tokio::test]
async fn unused_devices_end_one_a_day_at_every_server_and_linked_ones_do_not() {
    let (lines, _guard) = LogLines::start();
    let place = TestDir::new();
    let echo = targets::echo().await;
    place.authority.write(place.path(), &["cloud.test", "127.0.0.1", "127.0.0.2", "127.0.0.3"]);
    let all = servers::addresses(2);
    let tables = tables(&place, "");
    unused(&place, [("alice/laptop", LIMIT), ("alice/phone", LIMIT + 1), ("bob/laptop", LIMIT + 2)]);
    let text = |at| servers::config(&place, at, &format!("{}\n{tables}", servers::peers(&all)));
    let [one, two] = [all[0], all[1]].map(|at| TestServer::from_text(&text(at)));
    let [store, other] = [&one, &two].map(|server| server.server.enrolment.get().unwrap());
    store.refresh().await.unwrap();
    let _edge = edge(&place, &one, "node1").await;
    let target = at("node1", echo);
    let laptop = link(&place, "alice/laptop", &all[..1]).await;
    let mut session = open(&laptop, &target).await.unwrap();
    let has = |device: &str| {
        let known = store.known();
        known.proves_device(&device.parse().unwrap(), &SecretHash::of(USER_TOKEN))
    };
    // Each has been unused for long enough, and the day has come.
    for (hours, left) in [(1, [true, true, false]), (23, [true, true, false]), (26, [true, false, false])] {
        store.note_uses(now() + hours * 3600).await.unwrap();
        assert_eq!(["alice/laptop", "alice/phone", "bob/laptop"].map(has), left, "after {hours} h");
    }
    assert_session_echo(&mut session, "in use").await;

    // One that has a link although it counts as unused: its server could not write for a long time.
    other.refresh().await.unwrap();
    let elsewhere = link(&place, "alice/laptop", &all[1..]).await;
    drop(session);
    laptop.close().await;
    let mut session = open(&elsewhere, &target).await.unwrap();
    assert_session_echo(&mut session, "in use").await;
    let end = async {
        // Until the link here and what is noted of it are gone.
        while has("alice/laptop") {
            unused(&place, [("alice/laptop", LIMIT), ("alice/phone", 0), ("bob/laptop", 0)]);
            store.note_uses(now() + 52 * 3600).await.unwrap();
        }
    };
    assert_eventually("the device has ended", end).await;
    let why = "the access of user alice ended at this device, which was unused for 90 days";
    assert_eq!(reset(&mut session).await, why);
    wait_until("its link has ended", || elsewhere.links() == 0).await;
    assert!(lines.text().contains(&format!("reason=\"{why}\"")), "{}", lines.text());
    for device in ["bob/laptop", "alice/phone", "alice/laptop"] {
        let line = format!("unused device ended actor=\"{device}\"");
        assert_eq!(lines.count(&line), 1, "{line}: {}", lines.text());
    }
}

#[tokio::test]
async fn operators_see_who_was_last_seen_when_and_which_devices_end_soon() {
    let place = TestDir::new();
    let socket = place.path().join("server.sock");
    let all = tables(&place, &format!("[server.admin]\nlisten = \"unix:{}\"", socket.display()));
    unused(
        &place,
        [("alice/laptop", 0), ("alice/phone", LIMIT - 86400), ("bob/laptop", LIMIT - 20 * 86400 - 1800)],
    );
    let server = TestServer::with(&place, &all);
    let metrics = server.server.bound.metrics.unwrap();
    let is_told = async || get(metrics, "/metrics").await.body.contains("tunnel_devices_ending 1\n");
    while !is_told().await {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let output = run(&socket, "invite --user alice --keep").await.unwrap();
    let code = output.lines().find_map(|line| line.trim().strip_prefix("echo ")?.split(' ').next()).unwrap();
    join_as_user(&place, server.server.bound.grpc, code, "kept").await.unwrap();
    // Also before the next write.
    let output = run(&socket, "invitations list").await.unwrap();
    let kept = output.lines().find(|row| row.split_whitespace().nth(1) == Some("kept")).unwrap();
    assert!(kept.ends_with(" -"), "{output}");
    let _link = link(&place, "alice/laptop", &[server.server.bound.grpc]).await;
    let machine = place.path().join("edge7");
    join(server.server.bound.grpc, &invited(&server).await, &machine).await.unwrap();
    let _edge = start_edge(&settings(&machine));
    server.wait_for_node("edge7").await;
    let enrolment = server.server.enrolment.get().unwrap();
    enrolment.note_uses(now()).await.unwrap();
    let listed: serde_json::Value =
        serde_json::from_str(&get(server.server.bound.log, "/nodes").await.body).unwrap();
    assert!(listed["nodes"][0]["joined_at"].is_u64() && listed["nodes"][0]["last_seen"].is_u64(), "{listed}");
    let output = run(&socket, "invitations list").await.unwrap();
    for [start, end] in [
        ["alice kept - ", " - -"],
        ["alice laptop - - ", ""],
        ["bob laptop - - - 20d1h left", ""],
        ["! devices that end within 14 days unless they are used: 1", ""],
    ] {
        let rows = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        let is_row = |row: &String| row.starts_with(start) && row.ends_with(end);
        assert_eq!(rows.filter(is_row).count(), 1, "{start}: {output}");
    }
    let machines: serde_json::Value =
        serde_json::from_str(&get(server.server.bound.log, "/machines").await.body).unwrap();
    assert_eq!(
        (&machines[0]["device"], &machines[0]["ends"]),
        (&"kept".into(), &serde_json::Value::Null),
        "{machines}"
    );
    assert!(machines[1]["last_seen"].is_u64() && machines[2]["ends"].is_u64(), "{machines}");
}

/// 90 days but for an hour.
const LIMIT: u64 = 90 * 86400 - 3600;
