//! Checks of an edge: connection to the servers, mutual authentication, and targets.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::acceptor::target_dialer::{TargetDialer, TargetDialerRole};
use crate::command::doctor::handshakes::{Caller, handshakes};
use crate::command::doctor::{
    AdminAddress, DoctorArgs, DoctorFindings, TIMEOUT, add_conditions, admin_address, fetch_page,
    not_responding,
};
use crate::config::edge::ServerAddress;
use crate::edge::config::EdgeConfig;
use crate::uplink::link_dialer::messages::connection_hint;
use tunnel_base::files;
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::OutboundProxy;
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust};
use tunnel_proto::frame::ErrorCode;
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::{Host, Instance, Target};

pub(super) async fn check_edge(
    settings: &EdgeConfig,
    args: &DoctorArgs,
    ports: &[(String, SocketAddr)],
    found: &mut DoctorFindings,
) {
    let client = &settings.uplink;
    let admin = admin_address(&client.ports, &settings.admin).await;
    let linked = check_running_edge(&admin, client.token_file.as_deref(), ports, found).await;
    let resolver = Resolver::system();
    let proxy = match client.proxy.parse() {
        Ok(proxy) => proxy,
        Err(why) => return found.add_error("proxy", why.to_string(), "", "correct HTTPS_PROXY, or unset it"),
    };
    if let Some(caller) = caller(settings, linked, found) {
        let servers: Vec<_> = client.server_addresses().collect();
        check_servers(&caller, &servers, "edge.uplink.servers", proxy.as_ref(), &resolver, found).await;
    }
    let dialer = TargetDialer {
        place: TargetDialerRole::Node(client.node.clone()),
        own: LocalAddresses::of_interfaces(settings.own.clone()),
        targets: Arc::new(ArcSwap::from_pointee(settings.allow.targets.clone())),
        resolver,
    };
    for target in &args.target {
        match dialer.dial(target, TIMEOUT).await {
            Ok(_) => found.add_ok("target", format!("{target} accepts connections")),
            Err(why) => {
                let (expectation, hint) = target_remedy(why.refusal.code);
                found.add_error("target", why.refusal.reason, expectation, hint);
            }
        }
    }
}

/// Returns what was expected of a target that was not dialled because of this error, and a hint.
pub(super) fn target_remedy(code: ErrorCode) -> (&'static str, &'static str) {
    match code {
        ErrorCode::NotAllowed => (
            "a target that the edge may dial",
            "add it to targets in [edge.allow], and keep the entries of the list",
        ),
        ErrorCode::TargetTimeout => {
            ("a target that answers", "check its address, and that no firewall drops connections to it")
        }
        _ => ("a target that accepts connections", "start the service, and check its address and port"),
    }
}

/// Checks that the edge on this machine runs. Returns true if it is connected.
async fn check_running_edge(
    at: &AdminAddress,
    token_file: Option<&Path>,
    ports: &[(String, SocketAddr)],
    found: &mut DoctorFindings,
) -> bool {
    let status = match fetch_page(at, "/edge/healthz").await {
        Ok((status, _)) => status,
        Err(why) => {
            not_responding("edge", at, &why, ports, found);
            return false;
        }
    };
    if let (200, Some(file)) = (status, token_file) {
        wait_until_tried(file).await;
    }
    let (ready, body) = fetch_page(at, "/readyz").await.unwrap_or_default();
    add_conditions("edge", &body, found);
    // A link to a server that stops has only its earlier sessions.
    if status == 200 && ready == 200 {
        found.add_ok("link", "the edge on this machine runs and is connected");
    }
    status == 200
}

/// Waits until a connected edge has tried the tokens of a file that has just changed. Only the edge can try them: for
/// the servers, this command is another process with the name of its node.
async fn wait_until_tried(file: &Path) {
    let changed = std::fs::metadata(file).and_then(|found| found.modified());
    let age = changed.map_or(TOKEN_TRIED_WITHIN, |at| at.elapsed().unwrap_or_default());
    sleep(TOKEN_TRIED_WITHIN.saturating_sub(age)).await;
}

/// Time in which an edge reads a changed token file and dials with it.
const TOKEN_TRIED_WITHIN: Duration = Duration::from_secs(10);

/// Returns what the edge links with. Reports a certificate that does not exist yet.
fn caller(settings: &EdgeConfig, is_linked: bool, found: &mut DoctorFindings) -> Option<Caller> {
    let client = &settings.uplink;
    let has_token = client.token.is_some() || client.token_file.is_some();
    let certificate = settings.csr.as_ref().filter(|_| !has_token).map(|csr| &csr.file);
    if let Some(file) = certificate.filter(|file| !file.exists()) {
        let hint =
            "check the edge's log and that `tunnel approve` runs: kubectl apply -k deploy/kustomize/approver";
        let text = format!("{} does not exist yet", file.display());
        found.add_error("certificate", text, "a certificate, or a token", hint);
        return None;
    }
    let identity = certificate.map(|file| IdentityFiles { cert: file.clone(), key: file.clone() });
    let trust = Trust::Ca(client.ca.clone());
    // Errors of the files were already reported by the check of the config.
    let tls = TlsClientConfig { trust, identity, alpn: vec![b"h2".to_vec()] }.load().ok()?;
    let text = match (&client.token, &client.token_file) {
        (Some(token), _) => token.reveal().to_owned(),
        (None, Some(file)) => files::read_text(file).unwrap_or_default(),
        (None, None) => String::new(),
    };
    let token = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let instance = Instance::random();
    let hello = (!is_linked).then(|| (instance, EdgeHello::edge_request(&client.node, token, instance)));
    let node = client.node.clone();
    Some(Caller { tls: tls.load(), ca_key: "edge.uplink.ca", name: node.to_string(), node, hello })
}

/// Checks that each server can be reached, and accepts the caller.
pub(super) async fn check_servers(
    caller: &Caller,
    servers: &[ServerAddress],
    key: &str,
    proxy: Option<&OutboundProxy>,
    resolver: &Resolver,
    found: &mut DoctorFindings,
) {
    for server in servers {
        let proxy = proxy.filter(|proxy| proxy.applies_to(&server.at));
        if let Some(socket) = reach(server, key, proxy, resolver, found).await {
            handshakes(caller, server, socket, proxy, found).await;
        }
    }
}

/// Connects to a server's address, which is in `key`.
async fn reach(
    server: &ServerAddress,
    key: &str,
    proxy: Option<&OutboundProxy>,
    resolver: &Resolver,
    found: &mut DoctorFindings,
) -> Option<TcpStream> {
    let Some(proxy) = proxy else {
        let addresses = resolve(&server.at, key, resolver, found).await?;
        return match dial(&server.at.host, &addresses, TIMEOUT).await {
            Ok(socket) => {
                found.add_ok("port", format!("{} accepts connections", server.at));
                Some(socket)
            }
            Err(why) => {
                let hint = connection_hint(why.first());
                found.add_error("port", why.to_string(), "a server that listens there", hint);
                None
            }
        };
    };
    let addresses = resolve(proxy.at(), "HTTPS_PROXY", resolver, found).await?;
    match proxy.connect(&addresses, &server.at, TIMEOUT).await {
        Ok(socket) => {
            found.add_ok("proxy", format!("{} is reached through {} (HTTPS_PROXY)", server.at, proxy.at()));
            Some(socket)
        }
        Err(why) => {
            let hint = "add the server's host to NO_PROXY if it is reachable without the proxy, or correct HTTPS_PROXY";
            found.add_error("proxy", why.to_string(), "a proxy that connects to the server", hint);
            None
        }
    }
}

async fn resolve(
    at: &Target,
    key: &str,
    resolver: &Resolver,
    found: &mut DoctorFindings,
) -> Option<Vec<SocketAddr>> {
    match resolver.lookup_target(at).await {
        Ok(addresses) => {
            if let Host::Name(name) = &at.host {
                let shown: Vec<_> = addresses.iter().map(|at| at.ip().to_string()).collect();
                found.add_ok("dns", format!("{name} resolves to {}", shown.join(", ")));
            }
            Some(addresses)
        }
        Err(why) => {
            let hint = format!("check {key}, and the DNS servers of this machine");
            found.add_error("dns", format!("{}: {why}", at.host), "an address", &hint);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_fails_only_for_conditions_that_need_action_now() {
        let mut found = DoctorFindings::default();
        let key = "edge.uplink.ca (/etc/tunnel/certs/ca.crt)";
        let body = format!(
            "ok\ncertificates: {key} expires in 10 days, on 2026-12-06; replace the file\nfiles: token is empty\n"
        );
        add_conditions("edge", &body, &mut found);
        assert!(found.is_well() && found.0.len() == 2, "{found:?}");
        for (line, check) in [
            (format!("certificates: {key} expired on 2026-11-01; replace the file"), "certificate dates"),
            ("token: no link with the changed token".to_owned(), "token"),
            ("link: no server answers; reconnecting".to_owned(), "edge"),
            ("node_name: two machines".to_owned(), "name"),
        ] {
            let mut found = DoctorFindings::default();
            add_conditions("edge", &line, &mut found);
            assert!(!found.is_well() && found.0[0].check == check, "{found:?}");
        }
    }

    #[test]
    fn doctor_gives_different_remedies_for_forbidden_refused_and_silent_targets() {
        let codes = [ErrorCode::NotAllowed, ErrorCode::TargetUnreachable, ErrorCode::TargetTimeout];
        let [forbidden, refused, silent] = codes.map(|code| target_remedy(code).1);
        assert!(forbidden.contains("[edge.allow]") && refused.contains("start the service"));
        assert!(silent.contains("firewall") && !refused.contains("edge.allow"));
    }

    #[test]
    fn doctor_prints_findings_with_expectation_and_hint() {
        let mut found = DoctorFindings::default();
        found.add_ok("config", "fine");
        assert!(found.is_well());
        found.add_error("token", "invalid token", "the cloud's", "compare them");
        assert!(!found.is_well());
        let text = found.text();
        for part in
            ["ok   config", "FAIL token", "expected the cloud's", "hint compare them", "2 checks, 1 failed"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&found.json()).unwrap();
        assert_eq!((&json[1]["status"], &json[1]["check"]), (&"error".into(), &"token".into()));
        assert!(json[0].get("hint").is_none());
    }
}
