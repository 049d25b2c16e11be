//! The nodes that are published without a zone, where names are those of the whole network.

use std::net::Ipv4Addr;
use std::time::Duration;

use tunnel::config::Environment;
use tunnel::server::Server;
use tunnel::server::config::ServerConfig;

use crate::support::programs::{TOKEN, TestDir, TestServer};
use crate::support::servers::{self, Dns, DnsScript};
use crate::support::{pause_time, remote, wait_until, wait_within};

#[tokio::test]
async fn without_a_zone_no_node_takes_a_name_of_another_host() {
    let place = TestDir::new();
    place.file("token", &format!("default:{TOKEN}\nknown.example.org:{TOKEN}\n"));
    let (dns, hosts, all) =
        (Dns::start(DnsScript::NoSuchName).await, place.path().join("hosts"), servers::addresses(2));
    let lines = format!(
        "{}\n[server.dns]\nresolvers = [\"{}\"]\npublish = \"hosts\"\nhosts_file = \"{}\"\npublish_names = [\"*.edge.example.org\"]",
        servers::peers(&all),
        dns.at,
        hosts.display()
    );
    let env = Environment { pod_ip: Some(all[0].ip().to_string()), ..Environment::default() };
    let (settings, _) = ServerConfig::read(&servers::config(&place, all[0], &lines), &env).unwrap();
    let server = TestServer::from(Server::start(settings, None).unwrap());
    let _other = TestServer::from_text(&servers::config(&place, all[1], &servers::peers(&all)));
    let published = || {
        let text = std::fs::read_to_string(&hosts).unwrap_or_default();
        text.lines().map(|line| line.split_whitespace().nth(1).unwrap().to_owned()).collect::<Vec<_>>()
    };

    let mut calls = Vec::new();
    let foreign = ["a.localhost", "wpad", "kubernetes.default.svc.cluster.local", "bank.example.org"];
    for node in foreign.iter().chain(&["known.example.org", "a.edge.example.org", "node1"]) {
        calls.push(remote::link(&place, &server, node, None).await);
    }
    wait_until("the allowed names are published", || {
        published() == ["a.edge.example.org", "known.example.org", "node1"]
    })
    .await;

    dns.set_script(DnsScript::At("127.0.0.3".parse().unwrap()));
    calls.push(remote::link(&place, &server, "moved", None).await);
    wait_until("a name at a server may move", || published().contains(&"moved".to_owned())).await;
    dns.set_script(DnsScript::At(Ipv4Addr::new(127, 0, 0, 99)));
    calls.push(remote::link(&place, &server, "intranet", None).await);
    pause_time();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(!published().contains(&"intranet".to_owned()), "{:?}", published());
    dns.set_script(DnsScript::NoSuchName);
    let patience = Duration::from_secs(60);
    wait_within(patience, "the name is free", || published().contains(&"intranet".to_owned())).await;
}
