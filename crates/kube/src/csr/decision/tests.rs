use proptest::prelude::*;

use super::*;

const PODS: &str = "system:serviceaccount:edge-system:tunnel-cloud";

fn texts(all: &[&str]) -> Vec<String> {
    all.iter().map(|text| (*text).to_owned()).collect()
}

fn addresses() -> BTreeSet<IpAddr> {
    BTreeSet::from(["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()])
}

fn apiserver() -> ApiserverNames {
    ApiserverNames::new(["10.96.0.1", "[fd00:96::1]", "API.example.org", "127.0.0.1"].map(str::to_owned))
}

/// Returns a request that is approved.
fn good(profile: Profile) -> CsrSpec {
    let mut content = CsrContent {
        common_names: texts(&[profile.common_name()]),
        organizations: texts(&[profile.organization()]),
        ..CsrContent::default()
    };
    match profile {
        Profile::Server => content.dns = texts(&["x-tunnel-server-svc"]),
        Profile::ProxyClient => {}
        Profile::Edge => {
            content.dns = texts(&["node7"]);
            content.ips = vec!["10.0.0.7".parse().unwrap()];
        }
    }
    let (requester, group) = match profile {
        Profile::Edge => ("system:node:node7", "system:nodes"),
        _ => (PODS, "system:serviceaccounts"),
    };
    CsrSpec {
        signer: profile.signer().to_owned(),
        requester: requester.to_owned(),
        groups: texts(&[group, "system:authenticated"]),
        usages: texts(&profile.usages()),
        content,
    }
}

/// Facts about node7 and the servers' names. They include kube-apiserver's names, because an annotation or a Node may
/// list them.
fn facts() -> CsrFacts {
    let reachable_names =
        ["x-tunnel-server-svc", "127.0.0.1", "10.96.0.9", "10.96.0.1", "api.example.org", "*.default.svc"];
    CsrFacts { addresses: Some(addresses()), reachable_names: reachable_names.map(str::to_owned).into() }
}

fn verdict(request: &CsrSpec) -> CsrDecision {
    decide(request, PODS, &apiserver(), &facts())
}

/// Returns the reason of a denial.
fn denied(request: &CsrSpec) -> String {
    match verdict(request) {
        CsrDecision::Deny(why) => why,
        other => panic!("{other:?}: {request:?}"),
    }
}

fn changed(profile: Profile, change: impl FnOnce(&mut CsrSpec)) -> CsrSpec {
    let mut request = good(profile);
    change(&mut request);
    request
}

#[test]
fn each_profile_is_approved_for_its_requester() {
    for profile in Profile::ALL {
        assert_eq!(verdict(&good(profile)), CsrDecision::Approve, "{profile:?}");
    }
    let without_addresses = changed(Profile::Edge, |request| request.content.ips.clear());
    let bare = CsrFacts { addresses: Some(BTreeSet::new()), ..CsrFacts::default() };
    assert_eq!(decide(&without_addresses, PODS, &apiserver(), &bare), CsrDecision::Approve);
    let turned = changed(Profile::Server, |request| request.usages.reverse());
    assert_eq!(verdict(&turned), CsrDecision::Approve, "the order of usages must not matter");
}

#[test]
fn a_foreign_requester_is_denied() {
    for profile in [Profile::Server, Profile::ProxyClient] {
        for requester in [
            "system:node:node7",
            "system:serviceaccount:edge-system:other",
            "kubernetes-admin",
            "",
            "system:anonymous",
        ] {
            let request = changed(profile, |request| {
                requester.clone_into(&mut request.requester);
                request.groups.push("system:nodes".to_owned());
            });
            assert!(denied(&request).contains(PODS), "{profile:?}: {requester}");
        }
    }
    for requester in [PODS, "system:node:", "system:node:other", "kubernetes-admin", "node7"] {
        let request = changed(Profile::Edge, |request| requester.clone_into(&mut request.requester));
        let why = denied(&request);
        assert!(why.contains("only a node") || why.contains("\"other\""), "{why}");
    }
    let ungrouped = changed(Profile::Edge, |request| request.groups = texts(&["system:authenticated"]));
    assert!(denied(&ungrouped).contains("only a node"), "the name without the group does not make a node");
}

#[test]
fn an_agent_may_have_only_its_nodes_name_and_addresses() {
    for dns in [&["node8"][..], &[], &["node7", "node8"], &["node7", "node7"], &["Node7"], &["*"]] {
        let request = changed(Profile::Edge, |request| request.content.dns = texts(dns));
        assert!(denied(&request).contains("expected exactly \"node7\""), "{dns:?}");
    }
    let foreign = changed(Profile::Edge, |request| request.content.ips.push("10.0.0.8".parse().unwrap()));
    assert!(denied(&foreign).contains("10.0.0.8 is no address of Node node7"));
    let unknown_node = decide(&good(Profile::Edge), PODS, &apiserver(), &CsrFacts::default());
    assert_eq!(unknown_node, CsrDecision::Deny("there is no Node node7".to_owned()));
}

#[test]
fn a_server_needs_a_name_other_than_the_apiservers_and_a_proxy_client_none() {
    let bare = changed(Profile::Server, |request| request.content.dns.clear());
    assert!(denied(&bare).contains("no alternative name"));
    for name in ["kubernetes", "kubernetes.default", "Kubernetes.default.svc.cluster.local", "*.default.svc"]
    {
        let request = changed(Profile::Server, |request| request.content.dns.push(name.to_owned()));
        assert!(denied(&request).contains("kube-apiserver"), "{name}");
    }
    for name in ["api.example.org", "Api.Example.org.", "10.96.0.1", "fd00:96:0::1"] {
        let request = changed(Profile::Server, |request| request.content.dns.push(name.to_owned()));
        assert!(denied(&request).contains("kube-apiserver"), "{name}");
    }
    for ip in ["10.96.0.1", "::ffff:10.96.0.1", "fd00:96::1"] {
        let request = changed(Profile::Server, |request| request.content.ips.push(ip.parse().unwrap()));
        assert!(denied(&request).contains("kube-apiserver"), "{ip}");
    }
    let loopback = changed(Profile::Server, |request| request.content.ips.push("127.0.0.1".parse().unwrap()));
    assert_eq!(verdict(&loopback), CsrDecision::Approve, "each server's certificate contains it");
    let named = changed(Profile::ProxyClient, |request| request.content.dns = texts(&["node7"]));
    let addressed =
        changed(Profile::ProxyClient, |request| request.content.ips = vec!["10.0.0.7".parse().unwrap()]);
    for request in [named, addressed] {
        assert!(denied(&request).contains("alternative names"));
    }
}

#[test]
fn a_server_may_have_only_names_and_addresses_of_our_services() {
    let mapped = "::ffff:10.96.0.9";
    for foreign in
        ["metrics-server.kube-system.svc", "X-tunnel-server-svc", "x-tunnel-server-svc.", "", mapped]
    {
        let request = changed(Profile::Server, |request| request.content.dns.push(foreign.to_owned()));
        assert!(denied(&request).contains("no known Service"), "{foreign}");
    }
    for foreign in ["10.96.0.10", "10.0.0.7", mapped] {
        let request = changed(Profile::Server, |request| request.content.ips.push(foreign.parse().unwrap()));
        assert!(denied(&request).contains("no known Service"), "{foreign}");
    }
    let ours = changed(Profile::Server, |request| {
        request.content.dns.extend(texts(&["x-tunnel-server-svc"]));
        request.content.ips = vec!["10.96.0.9".parse().unwrap(), "127.0.0.1".parse().unwrap()];
    });
    assert_eq!(verdict(&ours), CsrDecision::Approve);
    let unknown = decide(&good(Profile::Server), PODS, &apiserver(), &CsrFacts::default());
    assert!(matches!(unknown, CsrDecision::Deny(_)), "{unknown:?}");
}

#[test]
fn a_denial_reason_is_one_short_line_for_any_request() {
    let names: Vec<_> = (0..1000).map(|n| format!("n{n}\u{1b}[2J\n")).collect();
    let many = changed(Profile::Edge, |request| request.content.dns = names.clone());
    let who = changed(Profile::ProxyClient, |request| request.requester = names.concat());
    let long = changed(Profile::Server, |request| {
        request.content.dns = vec![format!("kubernetes{}", names.concat()), "*\u{9b}".repeat(99)]
    });
    let used = changed(Profile::Edge, |request| request.usages = names);
    for (request, expected) in [
        (many, "expected exactly \"node7\""),
        (who, PODS),
        (long, "no known Service"),
        (used, "expected exactly the usages"),
    ] {
        let why = denied(&request);
        assert!(why.len() <= 200 && why.contains(expected) && !why.contains(char::is_control), "{why:?}");
    }
}

#[test]
fn an_odd_request_or_one_for_other_usages_is_denied() {
    for profile in Profile::ALL {
        let odd = changed(profile, |request| request.content.odd = Some("it is odd"));
        assert!(denied(&odd).starts_with("it is odd"));
        let both = changed(profile, |request| request.usages.push("code signing".to_owned()));
        let fewer = changed(profile, |request| drop(request.usages.pop()));
        let other = changed(profile, |request| request.usages[2] = "cert sign".to_owned());
        let twice = changed(profile, |request| request.usages[2] = request.usages[1].clone());
        for request in [both, fewer, other, twice] {
            assert!(denied(&request).contains("usages"), "{:?}", request.usages);
        }
    }
}

#[test]
fn requests_of_kubelets_are_left_untouched() {
    let serving =
        changed(Profile::Server, |request| request.content.common_names = texts(&["system:node:node7"]));
    let client = CsrSpec {
        signer: "kubernetes.io/kube-apiserver-client-kubelet".to_owned(),
        content: CsrContent {
            common_names: texts(&["system:node:node7"]),
            organizations: texts(&["system:nodes"]),
            ..CsrContent::default()
        },
        ..good(Profile::Edge)
    };
    for request in [serving, client] {
        assert_eq!(verdict(&request), CsrDecision::NotOurs);
    }
}

fn profile() -> impl Strategy<Value = Profile> {
    prop::sample::select(Profile::ALL.to_vec())
}

/// Generates words with a meaning in requests, and random ones.
fn word() -> impl Strategy<Value = String> {
    let mut known: Vec<&'static str> =
        vec!["", "node7", "node8", PODS, "system:node:node7", "system:masters", "system:nodes"];
    for profile in Profile::ALL {
        known.extend([profile.signer(), profile.common_name(), profile.organization()]);
        known.extend(profile.usages());
    }
    prop_oneof![prop::sample::select(known).prop_map(str::to_owned), "[a-z:.*-]{0,12}"]
}

fn words() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(word(), 0..4)
}

fn anything() -> impl Strategy<Value = CsrSpec> {
    let ips = prop::collection::vec(any::<u32>().prop_map(|ip| IpAddr::from(ip.to_be_bytes())), 0..3);
    let content = (words(), words(), words(), ips).prop_map(|(common_names, organizations, dns, ips)| {
        CsrContent { common_names, organizations, dns, ips, odd: None }
    });
    (word(), word(), words(), words(), content).prop_map(|(signer, requester, groups, usages, content)| {
        CsrSpec { signer, requester, groups, usages, content }
    })
}

proptest! {
    /// Changing any one part of a request never gets it approved for another requester than its profile's.
    #[test]
    fn a_request_is_approved_only_for_the_requester_of_its_profile(from in profile(), other in anything(), part in 0..8_usize) {
        let mut request = good(from);
        match part {
            0 => request.signer = other.signer,
            1 => request.requester = other.requester,
            2 => request.groups = other.groups,
            3 => request.usages = other.usages,
            4 => request.content.common_names = other.content.common_names,
            5 => request.content.organizations = other.content.organizations,
            6 => request.content.dns = other.content.dns,
            _ => request.content.ips = other.content.ips,
        }
        if verdict(&request) == CsrDecision::Approve {
            let profile = request.profile().unwrap();
            prop_assert_eq!(&request.usages.iter().collect::<BTreeSet<_>>().len(), &3);
            match profile {
                Profile::Server => {
                    prop_assert_eq!(&request.requester, PODS);
                    prop_assert!(request.content.dns.iter().all(|name| facts().reachable_names.contains(name)));
                    prop_assert!(request.content.ips.iter().all(|ip| facts().reachable_names.contains(&ip.to_string())));
                }
                Profile::ProxyClient => prop_assert_eq!(&request.requester, PODS),
                Profile::Edge => {
                    prop_assert_eq!(&request.requester, "system:node:node7");
                    prop_assert_eq!(&request.content.dns, &["node7"]);
                    prop_assert!(request.content.ips.iter().all(|ip| addresses().contains(ip)));
                }
            }
        }
    }

    /// A request without exactly the signer, common name and organization of a profile is left untouched for every
    /// requester.
    #[test]
    fn foreign_requests_are_left_untouched(request in anything()) {
        let ours = Profile::ALL.iter().any(|profile| {
            request.signer == profile.signer()
                && request.content.common_names == [profile.common_name()]
                && request.content.organizations == [profile.organization()]
        });
        prop_assert_eq!(verdict(&request) == CsrDecision::NotOurs, !ours);
    }
}
