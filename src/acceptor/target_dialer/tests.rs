use futures_util::FutureExt as _;
use tokio::net::TcpListener;

use tunnel_net::listen::TcpListenSocket;

use super::*;

fn at(node: &str, own: &'static [&'static str], targets: Targets) -> TargetDialer {
    let own: Vec<IpAddr> = own.iter().map(|ip| ip.parse().unwrap()).collect();
    let own = LocalAddresses::new(move || InterfaceSnapshot { all: own.clone(), own: own.clone() });
    let resolver = Resolver::system();
    TargetDialer {
        role: TargetDialerRole::Node(node.parse().unwrap()),
        own,
        targets: Arc::new(ArcSwap::from_pointee(targets)),
        resolver,
        sockets: None,
    }
}

fn place(allowed: &[&str]) -> TargetDialer {
    at("edge-1", &[], allowed.iter().map(|t| t.parse().unwrap()).collect())
}

async fn found(
    place: &TargetDialer,
    target: &str,
    own: &[&str],
    names: &[&str],
) -> Result<Vec<String>, SessionError> {
    Ok(sought(place, target, own, names).await?)
}

async fn sought(
    place: &TargetDialer,
    target: &str,
    own: &[&str],
    names: &[&str],
) -> Result<Vec<String>, TargetDialError> {
    let own: Vec<IpAddr> = own.iter().map(|ip| ip.parse().unwrap()).collect();
    among(place, target, &InterfaceSnapshot { all: own.clone(), own }, names).await
}

async fn among(
    place: &TargetDialer,
    target: &str,
    here: &InterfaceSnapshot,
    names: &[&str],
) -> Result<Vec<String>, TargetDialError> {
    let names: Vec<IpAddr> = names.iter().map(|ip| ip.parse().unwrap()).collect();
    let lookup = async |_| Ok(names.clone());
    let deadline = Instant::now() + Duration::from_secs(1);
    let found = place.addresses(&target.parse().unwrap(), here, lookup, deadline).await?;
    Ok(found.iter().map(ToString::to_string).collect())
}

#[tokio::test]
async fn the_own_node_resolves_to_loopback_first_then_to_its_addresses() {
    let place = at("Edge-1", &[], Targets::default());
    let own = ["10.0.0.5", "::ffff:10.0.0.5", "fd00::5", "127.0.0.1"];
    let all = ["127.0.0.1:22", "[::1]:22", "10.0.0.5:22", "[fd00::5]:22"];
    assert_eq!(found(&place, "edge-1:22", &own, &[]).await.unwrap(), all);
    assert_eq!(found(&place, "localhost:22", &[], &["10.9.9.9"]).await.unwrap(), all[..2]);
}

#[tokio::test]
async fn an_edge_dials_link_local_addresses_of_its_machine_only_if_listed() {
    let ips = |texts: &[&str]| texts.iter().map(|ip| ip.parse().unwrap()).collect();
    let here = InterfaceSnapshot { all: ips(&["10.0.0.5", "169.254.2.1"]), own: ips(&["10.0.0.5"]) };
    let by_default = at("edge-1", &[], Targets::default());
    let all = ["127.0.0.1:22", "[::1]:22", "10.0.0.5:22"];
    assert_eq!(among(&by_default, "edge-1:22", &here, &[]).await.unwrap(), all);
    for target in ["169.254.2.1:22", "[::ffff:169.254.2.1]:22", "web.local:22"] {
        let refused = among(&by_default, target, &here, &["169.254.2.1"]).await.unwrap_err();
        assert_eq!(refused.refusal.code, ErrorCode::NotAllowed, "{target}");
    }
    let listed = place(&["169.254.2.1:*"]);
    assert_eq!(among(&listed, "169.254.2.1:22", &here, &[]).await.unwrap(), ["169.254.2.1:22"]);
}

#[tokio::test]
async fn only_allowed_addresses_of_a_resolved_name_are_dialled() {
    let place = place(&["10.1.0.0/16:443", "127.0.0.0/8:*"]);
    let mixed = ["192.0.2.1", "::ffff:10.1.2.3", "169.254.169.254"];
    assert_eq!(found(&place, "web.local:443", &[], &mixed).await.unwrap(), ["10.1.2.3:443"]);
    for (target, names, expected) in [
        ("web.local:443", &["192.0.2.1"][..], "web.local:443 is 192.0.2.1, which this edge may not dial"),
        ("web.local:80", &["10.1.2.3"], "web.local:80 is 10.1.2.3, which this edge may not dial"),
        ("web.local:443", &["::ffff:192.0.2.1"], "web.local:443 is 192.0.2.1, which this edge may not dial"),
        ("192.0.2.1:443", &[], "this edge may not dial 192.0.2.1:443"),
        ("[::ffff:192.0.2.1]:443", &[], "this edge may not dial [::ffff:192.0.2.1]:443"),
    ] {
        let refused = found(&place, target, &[], names).await.unwrap_err();
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::NotAllowed, expected));
    }
    let nothing = found(&place, "web.local:443", &[], &[]).await.unwrap_err();
    assert_eq!(
        (nothing.code, nothing.reason.as_str()),
        (ErrorCode::TargetUnreachable, "web.local:443 has no address")
    );
}

/// Dialling it would dial loopback, from which a server may exclude a client.
#[tokio::test]
async fn an_edge_never_dials_the_unspecified_address_even_if_allowed() {
    let place = place(&["0.0.0.0/0:*", "[::/0]:*"]);
    for (target, names) in [
        ("0.0.0.0:22", &[][..]),
        ("[::]:22", &[]),
        ("[::ffff:0.0.0.0]:22", &[]),
        ("web.local:22", &["0.0.0.0", "::"]),
    ] {
        let refused = found(&place, target, &[], names).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::NotAllowed, "{target}");
    }
    assert_eq!(found(&place, "web.local:22", &[], &["::", "10.0.0.1"]).await.unwrap(), ["10.0.0.1:22"]);
}

#[tokio::test]
async fn a_server_dials_only_listed_targets_for_edges_and_reveals_no_addresses() {
    let server = |allowed: &[&str]| TargetDialer { role: TargetDialerRole::ForEdges, ..place(allowed) };
    let listed = server(&["10.1.0.0/16:443", "self:22"]);
    let mixed = ["192.0.2.1", "10.1.2.3"];
    assert_eq!(found(&listed, "web.local:443", &[], &mixed).await.unwrap(), ["10.1.2.3:443"]);
    assert_eq!(found(&listed, "10.9.9.9:22", &["10.9.9.9"], &[]).await.unwrap(), ["10.9.9.9:22"]);
    for (target, names) in
        [("web.local:443", &["192.0.2.1"][..]), ("10.2.0.1:443", &[]), ("localhost:443", &["10.1.2.3"])]
    {
        let refused = found(&listed, target, &[], names).await.unwrap_err();
        let expected = format!("edges may not have the server dial {target}");
        assert!(refused.reason.starts_with(&expected), "{refused}");
        assert!(refused.reason.contains("server.edge_access.targets"), "{refused}");
        assert!(!refused.reason.contains("192.0.2.1"), "{refused}");
        assert_eq!(refused.code, ErrorCode::NotAllowed);
    }
    let deadline = Instant::now() + Duration::from_secs(1);
    for (place, target) in [(server(&[]), "web.local:443"), (listed, "web.local:80")] {
        let must_not_resolve = async |_| unreachable!("DNS must not be queried for a forbidden target");
        let refused = place
            .addresses(&target.parse().unwrap(), &InterfaceSnapshot::default(), must_not_resolve, deadline)
            .await
            .unwrap_err()
            .refusal;
        assert_eq!(refused.code, ErrorCode::NotAllowed);
    }
}

#[tokio::test]
async fn a_server_never_dials_forbidden_addresses_for_clients_in_any_spelling() {
    let server = TargetDialer { role: TargetDialerRole::ForClients, ..place(&["0.0.0.0/0:*", "[::/0]:*"]) };
    assert_eq!(found(&server, "192.0.2.1:80", &[], &[]).await.unwrap(), ["192.0.2.1:80"]);
    let mixed = ["127.0.0.1", "169.254.169.254", "::ffff:10.0.0.1", "fd00:ec2::254"];
    assert_eq!(found(&server, "web.local:80", &[], &mixed).await.unwrap(), ["10.0.0.1:80"]);
    for (target, names) in [
        ("127.0.0.1:80", &[][..]),
        ("[::ffff:127.0.0.1]:80", &[]),
        ("0.0.0.0:80", &[]),
        ("[::]:80", &[]),
        ("169.254.169.254:80", &[]),
        ("localhost:80", &[]),
        ("web.local:80", &["127.0.0.1", "::1", "fe80::1", "224.0.0.1", "168.63.129.16", "100.100.100.200"]),
        ("2130706433:80", &["10.0.0.1"]),
        ("0x7f000001:80", &["10.0.0.1"]),
        ("0177.0.0.1:80", &["10.0.0.1"]),
        ("127.1:80", &["10.0.0.1"]),
    ] {
        let refused = found(&server, target, &[], names).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::NotAllowed, "{target}: {refused}");
        assert_eq!(refused.reason, format!("the server does not dial {target} for clients"));
    }
    let unlisted = TargetDialer { role: TargetDialerRole::ForClients, ..place(&["10.0.0.0/8:*"]) };
    for (server, name, off_limits) in
        [(&server, "127.0.0.1", true), (&server, "64:ff9b::a9fe:a9fe", true), (&unlisted, "192.0.2.1", false)]
    {
        let refused = sought(server, "web.local:80", &[], &[name]).await.unwrap_err();
        assert_eq!((refused.refusal.code, refused.off_limits), (ErrorCode::NotAllowed, off_limits), "{name}");
    }
}

#[tokio::test]
async fn a_server_dials_forbidden_addresses_for_edges_only_if_listed_narrowly() {
    let server = |allowed: &[&str]| TargetDialer { role: TargetDialerRole::ForEdges, ..place(allowed) };
    let wide = server(&["0.0.0.0/0:*", "[::/0]:*", "self:*"]);
    for (target, names) in [
        ("127.0.0.1:80", &[][..]),
        ("[::ffff:127.0.0.1]:80", &[]),
        ("0.0.0.0:80", &[]),
        ("169.254.169.254:80", &[]),
        ("localhost:80", &[]),
        ("web.local:80", &["127.0.0.1", "::1", "fe80::1", "168.63.129.16", "100.100.100.200"]),
        ("2130706433:80", &["10.0.0.1"]),
        ("0177.0.0.1:80", &["10.0.0.1"]),
    ] {
        let refused = found(&wide, target, &["169.254.169.254"], names).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::NotAllowed, "{target}: {refused}");
    }
    let mixed = ["127.0.0.1", "10.0.0.1"];
    assert_eq!(found(&wide, "web.local:80", &[], &mixed).await.unwrap(), ["10.0.0.1:80"]);
    let named = server(&["127.0.0.0/8:80", "169.254.169.254:80"]);
    for target in ["127.0.0.1:80", "169.254.169.254:80"] {
        assert_eq!(found(&named, target, &[], &[]).await.unwrap(), [target]);
    }
    assert_eq!(found(&named, "localhost:80", &[], &[]).await.unwrap(), ["127.0.0.1:80"]);
}

#[tokio::test]
async fn a_port_of_a_tunnel_process_is_refused_as_target_by_any_name_or_address() {
    let edge = place(&["127.0.0.0/8:*", "[::1]:*"]);
    let server = TargetDialer { role: TargetDialerRole::ForEdges, ..edge.clone() };
    let patience = Duration::from_secs(5);
    for at in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"] {
        let listener = TcpListenSocket::bind(at.parse().unwrap()).unwrap();
        let target = |host: &str| format!("{host}:{}", listener.at().port()).parse::<Target>().unwrap();
        for host in ["edge-1", "localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "[::127.0.0.1]"] {
            let refused = edge.dial(&target(host), patience).await.unwrap_err().refusal;
            let text = format!("{} is a tunnel process's own port; for metrics use", target(host));
            assert!(refused.reason.starts_with(&text), "{at}: {refused}");
            assert_eq!(refused.code, ErrorCode::OwnPort);
        }
        let target = target("localhost");
        let refused = server.dial(&target, patience).await.unwrap_err().refusal;
        let text = format!("{target} is a port of a tunnel process on the server's machine");
        assert_eq!((refused.code, refused.reason), (ErrorCode::OwnPort, text));
        // Otherwise the connection of the dial would be the next client of a port that forwards to itself.
        assert!(listener.accept().now_or_never().is_none(), "{at}: refused before it is dialled");
    }
    let public = TcpListenSocket::bind_public("127.0.0.1:0".parse().unwrap()).unwrap();
    edge.dial(&format!("edge-1:{}", public.at().port()).parse().unwrap(), patience).await.unwrap();
}

#[tokio::test]
async fn a_target_on_any_of_the_nodes_own_addresses_is_reached() {
    let place = at("edge-1", &["127.0.0.2"], Targets::default());
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let target = format!("edge-1:{}", listener.local_addr().unwrap().port()).parse().unwrap();
    let socket = place.dial(&target, Duration::from_secs(5)).await.unwrap().socket;
    assert_eq!(socket.peer_addr().unwrap(), listener.local_addr().unwrap());
    assert!(socket.nodelay().unwrap());
}

#[tokio::test]
async fn permission_for_a_target_ends_when_its_entry_is_removed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let entry = format!("127.0.0.0/8:{port}");
    let by_own = at("edge-1", &["127.0.0.1"], ["self:*".parse().unwrap()].into_iter().collect());
    let for_edges = TargetDialer { role: TargetDialerRole::ForEdges, ..place(&[&entry]) };
    for (dialer, text) in [
        (place(&[&entry]), format!("edge-1:{port} is 127.0.0.1, which this edge may not dial")),
        (by_own, format!("edge-1:{port} is 127.0.0.1, which this edge may not dial")),
        (for_edges, "it is not in server.edge_access.targets".to_owned()),
    ] {
        let host = if dialer.node().is_some() { "edge-1" } else { "localhost" };
        let target = format!("{host}:{port}").parse().unwrap();
        let right = dialer.dial(&target, Duration::from_secs(5)).await.unwrap().right;
        assert_eq!(right.judge(&RightsChange::default()), Ok(()));
        dialer.targets.store(Arc::new(["10.0.0.0/8:*".parse().unwrap()].into_iter().collect()));
        let why = right.judge(&RightsChange::default()).unwrap_err();
        assert!(why.code == ErrorCode::NotAllowed && why.reason.ends_with(&text), "{why}");
    }
}

#[tokio::test]
async fn a_closed_port_is_reported_as_refused_with_all_addresses() {
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let target = format!("edge-1:{port}").parse().unwrap();
    let place = at("edge-1", &[], Targets::default());
    let refused = place.dial(&target, Duration::from_secs(5)).await.unwrap_err().refusal;
    let expected = format!("127.0.0.1:{port} refused the connection");
    assert_eq!(refused.code, ErrorCode::TargetRefused);
    // Regardless of whether this machine has IPv6.
    assert!(
        refused.reason.starts_with(&expected) && refused.reason.contains(&format!("[::1]:{port}")),
        "{refused}"
    );
}

#[tokio::test]
async fn a_timeout_on_one_address_takes_precedence_over_a_refusal_on_another() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(0).unwrap();
    let at = listener.local_addr().unwrap();
    let mut queue = Vec::new();
    // With a full queue, the listener does not answer further connections.
    while let Ok(held) = tokio::time::timeout(Duration::from_millis(100), TcpStream::connect(at)).await {
        queue.push(held.unwrap());
    }
    let target = format!("edge-1:{}", at.port()).parse().unwrap();
    let place = place(&["127.0.0.0/8:*", "[::1]:*"]);
    let refused = place.dial(&target, Duration::from_millis(400)).await.unwrap_err().refusal;
    assert_eq!(refused.code, ErrorCode::TargetTimeout, "{refused}");
    let expected = format!("{at} did not answer within ");
    assert!(refused.reason.starts_with(&expected) && refused.reason.contains("[::1]"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn resolving_a_name_fails_at_the_deadline() {
    let place = place(&["10.0.0.0/8:*"]);
    let started = Instant::now();
    let never = async |_| std::future::pending().await;
    let deadline = started + Duration::from_secs(4);
    let refused = place
        .addresses(&"web:80".parse().unwrap(), &InterfaceSnapshot::default(), never, deadline)
        .await
        .unwrap_err()
        .refusal;
    assert_eq!(refused.reason, "web:80 was not resolved in time");
    assert_eq!(started.elapsed(), Duration::from_secs(4));
}
