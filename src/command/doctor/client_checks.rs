//! Checks of a user's machine: her file, her servers, and what they say of her device.

use std::path::Path;

use crate::admission::denial::Denial;
use crate::command::client;
use crate::command::doctor::links::Caller;
use crate::command::doctor::{DoctorArgs, DoctorFindings, Finding, Tested, WARN_BEFORE_EXPIRY_DAYS};
use crate::config::Environment;
use crate::startup::StartupErrorCollector;
use crate::uplink::client::{UserCredentials, UserLinkConfig, UserUplinks};
use tunnel_net::tls::{TlsClientConfig, Trust, certificate, link_alpn, pem};
use tunnel_proto::hello::{UserHello, UserProof};
use tunnel_proto::names::{Instance, NodeName};

/// Reads the user's file. Returns what her program links with.
pub(super) fn caller(
    args: &DoctorArgs,
    mut env: Environment,
    found: &mut DoctorFindings,
) -> Tested<(Caller, UserLinkConfig)> {
    env.client_file = args.config.clone().or(env.client_file);
    let path = env.client_file.clone().ok_or_else(|| {
        Finding::error("config", "neither HOME nor XDG_CONFIG_HOME is set", "a home directory", "")
    })?;
    let config = client::joined(&env)
        .map_err(|why| Finding::error("config", why.text, "a file without errors, for this user only", ""))?;
    let (name, proof, identity) = match &config.proof {
        UserCredentials::Token(user, tokens) => {
            let token = tokens.load().first().map(|token| token.reveal().to_owned()).unwrap_or_default();
            (format!("{user}/{}", config.device), UserProof::Token { user: user.clone(), token }, None)
        }
        UserCredentials::Certificate(identity) => {
            check_dates(&identity.cert, found);
            let name = format!("the certificate of {}", config.device);
            (name, UserProof::Certificate, Some(identity.clone()))
        }
    };
    let trust = config.ca.clone().map_or(Trust::System, Trust::Ca);
    let tls = TlsClientConfig { trust, identity, alpn: link_alpn() }.load();
    let tls = tls.map_err(|why| Finding::error("config", why, "files that belong together", ""))?.load();
    // The links read these only once they try a WebSocket.
    let mut startup = StartupErrorCollector::checking();
    if !config.servers.iter().all(|to| startup.check_certs("websocket_ca", to.websocket_ca.as_deref())) {
        return Err(Finding::error("config", startup.into_errors(), "a file of certificates", ""));
    }
    found.add_ok("config", format!("{} and the files that it names are readable", path.display()));
    let instance = Instance::random();
    let hello = UserHello { proof, device: config.device.clone(), instance, is_backup: false };
    let caller = Caller {
        servers: (config.servers.clone(), "servers in client.toml"),
        proxy: config.proxy.clone(),
        tls,
        ca: config.ca.clone(),
        ca_key: "ca in client.toml",
        node: NodeName::none(),
        name,
        hello: Some((instance, hello.request())),
    };
    Ok((caller, config))
}

/// Checks whether a client's certificate is valid, and for how long.
fn check_dates(file: &Path, found: &mut DoctorFindings) {
    let Some(summary) = pem::leaf(file).and_then(|leaf| certificate::summary(&leaf).ok()) else { return };
    let text = format!("cert: {} is valid until {}", file.display(), summary.until);
    let hint = "get a new one from the operator; it is re-read without a restart";
    match summary.days {
        ..0 => found.add_error("certificate dates", text, "a certificate that is valid now", hint),
        0..WARN_BEFORE_EXPIRY_DAYS => found.add_warning("certificate dates", text, hint),
        _ => found.add_ok("certificate", text),
    }
}

/// Opens a session to each target if a server has accepted the user. Only a server knows her rights, and whether the
/// node is connected.
pub(super) async fn check_user_targets(
    config: UserLinkConfig,
    args: &DoctorArgs,
    found: &mut DoctorFindings,
) -> Tested {
    if args.target.is_empty() || !found.0.iter().any(|finding| finding.check == "dialect") {
        return Ok(());
    }
    let links = UserUplinks::connect(config).await;
    let links = links.map_err(|why| Finding::error("link", why, "a link", "run this again"))?;
    for target in &args.target {
        match links.open(target).await {
            Ok(_) => found.add_ok("target", format!("{target}: the servers open a session for this user")),
            Err(error) => {
                let denial = Denial::of_user(error.why, &links.route);
                let text = format!("{target}: {denial}");
                found.add_error("target", text, "a target that this user may reach", denial.next_step());
            }
        }
    }
    links.close().await;
    Ok(())
}
