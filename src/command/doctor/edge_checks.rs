//! Checks of an edge: its links, and the targets that it may dial.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::acceptor::target_dialer::{TargetDialer, TargetDialerRole};
use crate::command::doctor::links::{Caller, check_servers};
use crate::command::doctor::running::{admin_address, check_running};
use crate::command::doctor::service_user::check_files;
use crate::command::doctor::{CheckedProgram, DoctorFindings, Finding, TIMEOUT, Tested};
use crate::edge::config::EdgeConfig;
use tunnel_base::files;
use tunnel_net::interfaces::LocalAddresses;
use tunnel_net::tls::{IdentityFiles, TlsClientConfig, Trust, link_alpn};
use tunnel_proto::frame::ErrorCode;
use tunnel_proto::hello::EdgeHello;
use tunnel_proto::names::Instance;

/// Makes all checks of an edge.
pub(super) async fn check(checked: &CheckedProgram<'_>, found: &mut DoctorFindings) {
    let Some(settings) = checked.settings.of::<EdgeConfig>() else { return };
    let public = vec![("edge.uplink.ca".to_owned(), settings.uplink.ca.to_path_buf())];
    check_files(checked.path, public, settings.secrets(checked.path), found);
    let admin = admin_address(&settings.uplink.ports, &settings.admin).await;
    let tokens = settings.uplink.token_file.as_deref();
    let is_linked = check_running("edge", &admin, tokens, checked.ports, found).await;
    if let Some(Some(caller)) = found.test(async |_| Caller::edge(settings, is_linked)).await {
        found.test(async |found| check_servers(&caller, &checked.resolver, found).await).await;
    }
    check_targets(settings, checked, found).await;
}

impl Caller {
    /// Returns what the edge links with; `None` if its files have errors, which the check of the config has reported.
    fn edge(settings: &EdgeConfig, is_linked: bool) -> Tested<Option<Self>> {
        let uplink = &settings.uplink;
        let has_token = uplink.token.is_some() || uplink.token_file.is_some();
        let certificate = settings.csr.as_ref().filter(|_| !has_token).map(|csr| &csr.file);
        if let Some(file) = certificate.filter(|file| !file.exists()) {
            let hint = "check the edge's log and that `tunnel approve` runs: kubectl apply -k deploy/kustomize/approver";
            let text = format!("{} does not exist yet", file.display());
            return Err(Finding::error("certificate", text, "a certificate, or a token", hint));
        }
        let identity =
            certificate.map(|file| IdentityFiles { cert: file.to_path_buf(), key: file.to_path_buf() });
        let trust = Trust::Ca(uplink.ca.to_path_buf());
        let Ok(tls) = (TlsClientConfig { trust, identity, alpn: link_alpn() }).load() else {
            return Ok(None);
        };
        let text = match (&uplink.token, &uplink.token_file) {
            (Some(token), _) => token.reveal().to_owned(),
            (None, Some(file)) => files::read_text(file).unwrap_or_default(),
            (None, None) => String::new(),
        };
        let token = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
        let instance = Instance::random();
        let node = uplink.node.clone();
        Ok(Some(Self {
            servers: (uplink.server_addresses().collect(), "edge.uplink.servers"),
            proxy: uplink.proxy.clone(),
            tls: tls.load(),
            ca: Some(uplink.ca.to_path_buf()),
            ca_key: "edge.uplink.ca",
            name: node.to_string(),
            hello: (!is_linked).then(|| (instance, EdgeHello::edge_request(&node, token, instance))),
            node,
        }))
    }
}

/// Dials targets as the edge does.
async fn check_targets(settings: &EdgeConfig, checked: &CheckedProgram<'_>, found: &mut DoctorFindings) {
    let dialer = TargetDialer {
        role: TargetDialerRole::Node(settings.uplink.node.clone()),
        own: LocalAddresses::of_interfaces(settings.own.clone()),
        targets: Arc::new(ArcSwap::from_pointee(settings.allow.targets.clone())),
        resolver: checked.resolver.clone(),
        sockets: None,
    };
    for target in &checked.args.target {
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
fn target_remedy(code: ErrorCode) -> (&'static str, &'static str) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_gives_different_remedies_for_forbidden_refused_and_silent_targets() {
        let codes = [ErrorCode::NotAllowed, ErrorCode::TargetUnreachable, ErrorCode::TargetTimeout];
        let [forbidden, refused, silent] = codes.map(|code| target_remedy(code).1);
        assert!(forbidden.contains("[edge.allow]") && refused.contains("start the service"));
        assert!(silent.contains("firewall") && !refused.contains("edge.allow"));
    }
}
