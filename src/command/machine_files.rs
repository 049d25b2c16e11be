//! What `tunnel init` and `tunnel join` write for a machine.

use std::fmt::{Display, Write as _};
use std::path::Path;

use crate::command::{CommandError, CommandResult, Role};
use crate::config::{ConfigError, Environment};
use crate::startup::StartupErrorCollector;
use tunnel_net::tls;
use tunnel_proto::names::{Host, NameError, NodeName, Target};

/// Returns a folder as text that a config can contain.
pub(crate) fn folder_on_machine<'a>(option: &str, dir: &'a Path) -> CommandResult<&'a str> {
    let text = dir.to_str().filter(|dir| dir.starts_with('/') && !dir.contains(['"', '\\', '\'', '\n', '%']));
    text.ok_or_else(|| {
        CommandError::usage(format!("{option} {}: expected an absolute path without quotes", dir.display()))
    })
}

/// Returns a random secret for a token file.
pub(crate) fn random_token() -> String {
    format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>())
}

/// Checks that the program of a role would start with a config and its files, before the config is written. A build
/// without the role cannot check that.
pub(crate) fn checked(role: Role, text: &str) -> CommandResult<()> {
    let Ok(examine) = role.examiner() else { return Ok(()) };
    let mut startup = StartupErrorCollector::checking();
    let (settings, _) = startup.settings(examine(text, &Environment::default()));
    if startup.is_clear() {
        settings.check(&mut startup);
    }
    let found: Vec<_> = startup.into_errors().iter().map(|found| found.error.clone()).collect();
    let Some(first) = found.first() else { return Ok(()) };
    // Without the line: the file does not exist.
    let why = ConfigError { line: None, ..first.clone() };
    Err(CommandError::unusable(format!("cannot make {}.toml of these arguments: {why}", role.name())))
}

/// Parses the host of a server, which its certificate must be able to contain.
pub(crate) fn host_of_server(text: &str) -> Result<Host, String> {
    let host: Host = text.parse().map_err(|cause: NameError| cause.to_string())?;
    tls::server_name(&host.to_string())
        .map_err(|_| "expected a DNS name, or an IP address without leading zeros".to_owned())?;
    Ok(host)
}

/// Returns a line about a node that clients of TLS cannot name, or an empty text.
pub(crate) fn tls_note(node: &NodeName) -> String {
    match tls::server_name(node.as_str()) {
        Ok(_) => String::new(),
        Err(_) => format!(
            "note: {node} is no valid server name for TLS; [server.https] reaches it with mode = \"passthrough\", or, \
             without target_cert, by the Host of clients that send no server name\n"
        ),
    }
}

/// Returns the TOML config of the edge of a node, with its files in that folder. `dns` is the name in the certificate of
/// the server, if it differs from the dialled one. With `has_kubelet` there is a certificate for the node's kubelet.
pub(crate) fn edge_config(
    node: &NodeName,
    servers: &[Target],
    dns: Option<&Host>,
    has_kubelet: bool,
    dir: &str,
) -> String {
    let dns = dns.map_or_else(String::new, |dns| format!("tls_server_name = \"{dns}\"\n"));
    let mut text = format!(
        include_str!("machine_files/edge.toml"),
        dir = dir,
        dns = dns,
        node = node,
        servers = quoted_list(servers)
    );
    if has_kubelet {
        let _ = write!(text, concat!("\n", include_str!("machine_files/kubelet.toml")), dir = dir);
    }
    text
}

/// Returns the items of a list in TOML, which need no escapes.
pub(crate) fn quoted_list(items: &[impl Display]) -> String {
    items.iter().map(|item| format!("\"{item}\"")).collect::<Vec<_>>().join(", ")
}
