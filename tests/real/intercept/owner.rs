//! Ownership of the nftables table.

use super::*;

#[test]
fn an_unprivileged_process_cannot_block_the_nftables_table_of_a_server() {
    let Some(world) = World::start(0) else { return };
    // The names by which servers have detected each other, or might.
    let names = ["tunnel nftables inet tunnel", "tunnel", "inet tunnel"];
    let squatters: Vec<_> = (0..)
        .zip(names)
        .map(|(n, name)| {
            let mut socat = world.host.command("setpriv");
            socat.args(["--reuid=65534", "--regid=65534", "--clear-groups", "socat"]);
            socat.args([&format!("ABSTRACT-RECVFROM:{name},fork"), "-"]);
            Running::start(&format!("squatter-{n}"), world.place.path(), &mut socat)
        })
        .collect();
    wait_until("the names are taken", TIMEOUT, || {
        let taken = world.host.sh("cat /proc/net/unix");
        names.iter().all(|name| taken.lines().any(|line| line.ends_with(&format!("@{name}"))))
    });
    let _server = world.server("");
    // Nor can they delete the table that shows that the owner is alive.
    let mut nft = world.host.command("setpriv");
    nft.args(["--reuid=65534", "--regid=65534", "--clear-groups", "nft", "delete table inet tunnel-owner"]);
    let denied = run_command("nft", &mut nft, None, TIMEOUT);
    assert!(!denied.status.success(), "{denied:?}");
    drop(squatters);
}

#[test]
fn servers_in_separate_pid_namespaces_detect_each_other_on_one_host() {
    let Some(world) = World::start(0) else { return };
    let own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let launch = |number: u16| {
        let name = format!("pod-{number}");
        world.start_without_waiting(&name, &world.config(number, ""), &own, &[])
    };
    let mut first = launch(0);
    ready(&mut first, &world.host, ADMIN);
    let mut second = launch(1);
    assert!(!second.wait_for_exit(TIMEOUT).success());
    second.assert_logged("table inet tunnel belongs to another running process");
    // Not even root can delete the table that shows that the owner is alive, only the owner can.
    let mut nft = world.host.command("nft");
    let denied = run_command("nft", nft.arg("delete table inet tunnel-owner"), None, TIMEOUT);
    assert!(!denied.status.success(), "{denied:?}");
    first.kill();
    let mut third = launch(2);
    ready(&mut third, &world.host, ADMIN + 2);
    third.assert_logged("taking over the table of a dead owner");
}
