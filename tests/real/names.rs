//! Node names resolve to the server of the node: through CoreDNS, or without it if the servers query their peers.

use crate::fleet::{Fleet, Line};
use crate::parts::{are_installed, cached_program};
use crate::process::{TIMEOUT, run};
use crate::publish::{Dns, etcd_and_dns};
use crate::sshd::Sshd;
use crate::tunnel::{Edge, TestDir};
use crate::wait::wait_until;

const PROGRAMS: [&str; 5] = ["dig", "sshd", "ssh", "ssh-keygen", "nc.openbsd"];

/// Returns the address that is published for the server.
fn address(server: usize) -> String {
    format!("127.0.0.{}", server + 2)
}

/// Opens a session to the node through a server. Returns the output of nc if that fails.
fn reaches(fleet: &Fleet, server: usize, sshd: &Sshd) -> Result<(), String> {
    let args =
        format!("-N -w 5 -X connect -x 127.0.0.1:{} node1 {}", fleet.servers[server].connect, sshd.port);
    let output = run("nc.openbsd", &args.split(' ').collect::<Vec<_>>(), Some("/dev/null".as_ref()), TIMEOUT);
    if output.stdout.starts_with("SSH-2.0") { Ok(()) } else { Err(format!("{output:?}")) }
}

/// Moves the node from server to server, and checks that each of them reaches it: by querying its peers, or otherwise
/// by DNS.
fn moves(mut fleet: Fleet, dns: &Dns, by_dns: bool) {
    let (sshd, line) = (Sshd::start(), Line::to(fleet.at[1]));
    let _edge: Edge = fleet.node(&line, 1);
    for server in [1, 2, 0, 1] {
        line.lead_to(fleet.at[server]);
        line.reset();
        fleet.servers[server].wait_for_node("node1");
        if by_dns {
            dns.wait_for_answer("node1.nodes.test", &address(server));
        }
        for through in 0..3 {
            // A server caches DNS answers for 2 s. A query to peers must finish within 1 s, which may be too short on
            // a busy machine.
            let what = format!("server {through} finds the node at server {server}");
            wait_until(&what, TIMEOUT, || reaches(&fleet, through, &sshd).is_ok());
        }
    }
}

fn through_hosts(listed: bool) {
    let Some(coredns) = cached_program("coredns-1.15.0/coredns").filter(|_| are_installed(&PROGRAMS)) else {
        return;
    };
    let place = TestDir::new();
    let hosts = place.path().join("hosts");
    std::fs::write(&hosts, "# for all servers\n").unwrap();
    let dns = Dns::of_hosts(&place, &coredns, &hosts, !listed);
    let registry = format!(
        "zone = \"nodes.test\"\nresolvers = [\"127.0.0.1:{}\"]\npublish = \"hosts\"\nhosts_file = \"{}\"\n",
        dns.port,
        hosts.display()
    );
    moves(Fleet::start_in(place, listed, &registry), &dns, !listed);
}

fn through_etcd(listed: bool) {
    let Some((mut etcd, dns, place)) = etcd_and_dns(false).filter(|_| are_installed(&PROGRAMS)) else {
        return;
    };
    let registry = format!(
        "zone = \"nodes.test\"\nresolvers = [\"127.0.0.1:{}\"]\npublish = \"etcd\"\netcd.endpoints = [\"{}\"]\n",
        dns.port, etcd.url
    );
    let fleet = Fleet::start_in(place, listed, &registry);
    if listed {
        etcd.process.kill();
    }
    moves(fleet, &dns, !listed);
}

#[test]
fn a_node_that_moves_is_found_by_the_hosts_file_that_coredns_reads() {
    through_hosts(false);
}

#[test]
fn a_node_that_moves_is_found_by_the_records_that_coredns_reads_from_etcd() {
    through_etcd(false);
}

#[test]
fn peers_find_a_node_although_coredns_never_reloads_the_hosts_file() {
    through_hosts(true);
}

#[test]
fn peers_find_a_node_although_etcd_is_unreachable() {
    through_etcd(true);
}
