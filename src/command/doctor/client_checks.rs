//! Checks of a user's machine: her file, her servers, and what they say of her device.

use std::path::Path;

use crate::command::client;
use crate::command::doctor::edge_checks::check_servers;
use crate::command::doctor::handshakes::Caller;
use crate::command::doctor::{DoctorArgs, DoctorFindings, WARN_BEFORE_EXPIRY_DAYS};
use crate::config::Environment;
use crate::config::edge::ServerAddress;
use crate::listener::denial::Denial;
use crate::uplink::client::{UserCredentials, UserLinkConfig, UserUplinks};
use crate::uplink::link_dialer::messages;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::{TlsClientConfig, Trust, certificate, pem};
use tunnel_proto::hello::{UserHello, UserProof};
use tunnel_proto::names::{Instance, NodeName};

pub(super) async fn check_client(
    args: &DoctorArgs,
    variable: fn(&str) -> Option<String>,
    found: &mut DoctorFindings,
) {
    let mut env = Environment::read(variable);
    env.client_file = args.config.clone().or(env.client_file);
    let Some(path) = env.client_file.clone() else {
        return found.add_error("config", "neither HOME nor XDG_CONFIG_HOME is set", "a home directory", "");
    };
    let config = match client::links(&env) {
        Ok(Some(config)) => config,
        Ok(None) => {
            let text = format!("{} names no servers to link to, or does not exist", path.display());
            let hint = "get an invitation (`tunnel invite --user`) and run `tunnel join --user`";
            return found.add_error("config", text, "servers, and what proves this user", hint);
        }
        Err(why) => {
            return found.add_error("config", why.text, "a file without errors, for this user only", "");
        }
    };
    let Some(caller) = caller(&config, &path, found) else { return };
    let proxy = match config.proxy.parse() {
        Ok(proxy) => proxy,
        Err(why) => return found.add_error("proxy", why.to_string(), "", "correct HTTPS_PROXY, or unset it"),
    };
    let name = config.tls_server_name.as_ref();
    let servers = config
        .servers
        .iter()
        .map(|at| ServerAddress { at: at.clone(), dns: name.unwrap_or(&at.host).clone() });
    let servers: Vec<_> = servers.collect();
    let mut made = DoctorFindings::default();
    let resolver = Resolver::system();
    check_servers(&caller, &servers, "servers in client.toml", proxy.as_ref(), &resolver, &mut made).await;
    let is_linked = made.0.iter().any(|finding| finding.check == "dialect");
    for finding in &mut made.0 {
        finding.hint = messages::for_user(std::mem::take(&mut finding.hint));
    }
    found.0.append(&mut made.0);
    if is_linked && !args.target.is_empty() {
        check_targets(config, args, found).await;
    }
}

/// Returns what the user's program links with.
fn caller(config: &UserLinkConfig, path: &Path, found: &mut DoctorFindings) -> Option<Caller> {
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
    let tls = match (TlsClientConfig { trust, identity, alpn: vec![b"h2".to_vec()] }).load() {
        Ok(tls) => tls.load(),
        Err(why) => {
            found.add_error("config", why.to_string(), "files that belong together", "");
            return None;
        }
    };
    found.add_ok("config", format!("{} and the files that it names are readable", path.display()));
    let instance = Instance::random();
    let hello = UserHello { proof, device: config.device.clone(), instance, is_backup: false };
    let hello = Some((instance, hello.request()));
    Some(Caller { tls, ca_key: "ca in client.toml", node: NodeName::none(), name, hello })
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

/// Opens a session to each target. Only a server knows the user's rights, and whether the node is connected.
async fn check_targets(config: UserLinkConfig, args: &DoctorArgs, found: &mut DoctorFindings) {
    let links = match UserUplinks::connect(config).await {
        Ok(links) => links,
        Err(why) => return found.add_error("link", why.to_string(), "a link", "run this again"),
    };
    for target in &args.target {
        match links.open(target).await {
            Ok(session) => {
                found.add_ok("target", format!("{target}: the servers open a session for this user"));
                drop(session);
            }
            Err(error) => {
                let denial = Denial::of_user(error.why, &links.route);
                let text = format!("{target}: {denial}");
                found.add_error("target", text, "a target that this user may reach", denial.next_step());
            }
        }
    }
    links.close().await;
}
